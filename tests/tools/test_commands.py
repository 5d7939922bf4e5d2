"""The table of tools, how one is run, and the arguments that several have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    DownloadError,
    FormatError,
    IntegrityError,
    MissingDependencyError,
    ObjectNotFoundError,
    ShardCorruptError,
)
from lightning_streaming.tools.commands import (
    COMMANDS,
    add_storage_options,
    add_workers,
    not_negative,
    positive,
    usable_cpus,
)
from lightning_streaming.tools.planning.show_plan import check_page
from lightning_streaming.writing.writers import MDSWriter
from tests.tools.running import flip_byte, run, run_process, write_texts


@pytest.mark.parametrize("command", COMMANDS)
def test_every_tool_explains_itself(command: str) -> None:
    shown = run(command, "--help")
    assert shown.code == 0
    assert f"usage: lightning-streaming {command}" in shown.out
    description = import_module(f"lightning_streaming.tools.{command}").__doc__
    assert description is not None
    lines = [line for line in description.splitlines() if line]
    examples = [line for line in lines if line.startswith(f"    lightning-streaming {command} ")]
    assert examples
    assert all(f"\n{line}\n" in shown.out for line in lines)
    below_the_options = shown.out.partition("\nexamples:\n\n")[2]
    assert all(f"{line}\n" in below_the_options for line in examples)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_usage_names_the_value_of_each_required_option(command: str) -> None:
    usage = run(command, "--help").out.partition("\n\n")[0]
    assert "None" not in usage
    assert ("--format {" in usage) == (command == "index")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_has_help(command: str) -> None:
    parser = ArgumentParser()
    import_module(f"lightning_streaming.tools.{command}").add_arguments(parser)
    assert all(action.help for action in parser._actions)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FormatError, 1),
        (ShardCorruptError, 1),
        (IntegrityError, 1),
        (ConfigError, 2),
        (MissingDependencyError, 2),
        (ObjectNotFoundError, 2),
        (AccessDeniedError, 2),
        (DownloadError, 2),
    ],
)
def test_errors_end_with_their_words_and_a_code(
    error: type[Exception], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: object) -> int:
        raise error("this is why; do that")

    monkeypatch.setattr("lightning_streaming.tools.merge.run", fail)
    assert run("merge", "out") == (code, "", "lightning-streaming merge: error: this is why; do that\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["merge"], "the following arguments are required: OUT; see"),
        (["verify", "data", "--fast"], "unrecognized arguments: --fast"),
        (["verify", "data", "--storage-option", "key=hush"], "unrecognized arguments: --storage-option; see"),
        (["verify", "data", "--token=hush", "--secret", "hush"], "unrecognized arguments: --token --secret; see"),
        (["verify", "data", "--storage-options", "key=a", "secret=hush"], "unrecognized arguments: secret; see"),
        (["inspect", "data", "--samples", "x"], "argument --samples: must be a whole number of at least 0"),
        (
            ["inspect", "data", "--samples", "9" * 5000],
            "argument --samples: must be a whole number",
        ),
        (["trace", "--config", "c", "--step", "1", "--batch-size", "9" * 20], "argument --batch-size: must be a whole"),
        (
            ["plan", "--config", "c", "--epochs", "9" * 12],
            "argument --epochs: must be a whole number of",
        ),
        (["inspect", "data", "--storage-options", "a=" + "[" * 99_999], "argument --storage-options: the value of a"),
    ],
)
def test_wrong_arguments_are_answered_in_one_line(args: list[str], words: str) -> None:
    refused = run(*args)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(f"lightning-streaming {args[0]}: error: {words}")
    assert refused.err.endswith(f"; see lightning-streaming {args[0]} --help\n")
    assert refused.err.count("\n") == 1


def test_mistakes_of_ours_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("lightning_streaming.tools.merge.run", fail)
    with pytest.raises(ZeroDivisionError):
        run("merge", "out")


def test_what_the_system_refuses_ends_with_its_words(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "file").write_text("")
    code, _, told = run("convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "file" / "below"))
    assert code == 2
    assert "Not a directory" in told


def test_ctrl_c_ends_a_tool_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_streaming.tools.merge.run", fail)
    assert run("merge", "out") == (130, "", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_end_leaves_blocks_and_ends_with_its_code(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []

    def be_ended(args: object) -> int:
        try:
            os.kill(os.getpid(), number)
            return 0
        finally:
            left.append("block")

    def unhandled(*_: object) -> None:
        raise AssertionError("the signal is not handled")

    before = signal.signal(number, unhandled)
    try:
        monkeypatch.setattr("lightning_streaming.tools.merge.run", be_ended)
        assert run("merge", "out") == (code, "", "")
        assert left == ["block"]
        assert signal.getsignal(number) is unhandled
        signal.signal(number, signal.SIG_IGN)  # as nohup does
        assert run("merge", "out") == (0, "", "")
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_memory_that_is_not_there_ends_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise MemoryError("Unable to allocate 8 EiB")

    monkeypatch.setattr("lightning_streaming.tools.merge.run", fail)
    assert run("merge", "out") == (2, "", "lightning-streaming merge: error: out of memory: Unable to allocate 8 EiB\n")


def test_a_reader_that_has_seen_enough_gets_no_traceback(tmp_path: Path) -> None:
    columns = {f"column{number}": "int" for number in range(5000)}  # more output than a pipe holds
    with MDSWriter(out=tmp_path / "data", columns=columns) as writer:
        writer.write(dict.fromkeys(columns, 7))
    command = [sys.executable, "-m", "lightning_streaming", "inspect", str(tmp_path / "data"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("closed", "words", "code"),
    [
        ("2>&-", "data --workers 2", 0),
        ("1>&-", "data", 0),
        ("0<&- 1>&- 2>&-", "bad", 1),
        ("2>/dev/full", "absent", 2),
    ],
)
def test_closed_streams_do_not_change_the_exit_code(closed: str, words: str, code: int, tmp_path: Path) -> None:
    write_texts(tmp_path / "data", samples=2)
    write_texts(tmp_path / "bad", samples=2)
    flip_byte(tmp_path / "bad" / "shard.00000.mds")
    script = f"{sys.executable} -m lightning_streaming verify {words} {closed}"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    assert ("all sound" in done.stdout) == (closed == "2>&-")


@pytest.mark.parametrize("words", [["inspect", "data"], ["verify", "data", "--json"]])
def test_a_reader_that_is_gone_before_the_first_word_is_no_trouble(tmp_path: Path, words: list[str]) -> None:
    write_texts(tmp_path / "data")
    theirs, ours = os.pipe()
    os.close(theirs)
    command = [sys.executable, "-m", "lightning_streaming", *words]
    done = subprocess.run(command, stdout=ours, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(ours)
    assert (done.returncode, done.stderr) == (141, b"")


def test_output_that_cannot_show_a_character_shows_another(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    shown = run_process("inspect", tmp_path / "data", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert shown.code == 0
    assert "text 000" in shown.out
    assert "?" in shown.out


def parsed(*args: str) -> Mapping[str, Any]:
    parser = ArgumentParser()
    add_storage_options(parser)
    given: Mapping[str, Any] = parser.parse_args(args).storage_options
    return given


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("false", False),
        ("null", None),
        ("3", 3),
        ("-1.5", -1.5),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ('{"region_name": "eu"}', {"region_name": "eu"}),
        ("http://host:9000", "http://host:9000"),
        ("a=b=", "a=b="),  # as secrets may end
        ("123e45", "123e45"),  # a key, not a huge number
        ("0123", "0123"),
        ("", ""),
        ("True", "True"),
        ("٣", "٣"),
    ],
)
def test_values_are_json_where_that_is_meant(written: str, value: Any) -> None:
    assert parsed("--storage-options", f"x={written}") == {"x": value}


def test_several_options_are_one_mapping() -> None:
    assert parsed() == {}
    given = ["--storage-options", "key=a", "--storage-options", "anon=true", "--storage-options", "key=b"]
    assert parsed(*given) == {"key": "b", "anon": True}


@pytest.mark.parametrize("written", ["opensesame", "=opensesame", 'key={"a": opensesame', "key=[opensesame]"])
def test_a_value_is_not_shown_when_it_is_refused(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--storage-options", written)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--storage-options" in error
    assert "opensesame" not in error


@pytest.mark.parametrize("written", ["0", "-1", "two", "1.5", ""])
def test_workers_must_be_a_positive_number(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_workers(parser, 4, "threads")
    assert parser.parse_args([]).workers == 4
    with pytest.raises(SystemExit):
        parser.parse_args(["--workers", written])
    assert "at least 1" in capsys.readouterr().err


def test_numbers() -> None:
    assert positive("12") == 12
    assert not_negative("0") == 0
    assert usable_cpus() >= 1


def test_pages_without_their_extra_are_refused_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    found = run("view", tmp_path)
    assert found.code == 2
    assert "pip install 'lightning-streaming[pages]'" in found.err
    with pytest.raises(MissingDependencyError, match=r"lightning-streaming\[pages\]"):
        check_page(tmp_path / "plan.html")  # before the plan, which may take minutes


def test_tools_start_without_the_packages_of_pages() -> None:
    code = "import sys; sys.modules['markupsafe'] = None; import lightning_streaming.tools.planning.show_plan"
    subprocess.run([sys.executable, "-c", code], check=True)
