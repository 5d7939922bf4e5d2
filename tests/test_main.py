from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

import lightning_streaming
from lightning_streaming import __main__ as program
from lightning_streaming.tools.commands import COMMANDS, GROUPS
from lightning_streaming.trainer import SUBCOMMANDS
from lightning_streaming.trainer.cli import StreamingCLI
from tests.tools.running import run, run_process, write_texts


def test_help_lists_the_tools_and_the_ways_to_train() -> None:
    shown = run("--help")
    assert shown.code == 0
    for name, words in {**COMMANDS, **SUBCOMMANDS}.items():
        assert f"\n    {name:<12}{words}\n" in shown.out
    for group in GROUPS:
        assert f"\n\n  {group}\n    " in shown.out
    assert "{fit,validate,test,predict}" in shown.out
    assert "lightning-streaming fit --config run.yaml\n" in shown.out


def test_every_command_is_in_one_group() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted([*COMMANDS, *SUBCOMMANDS])


def test_no_arguments_are_answered_with_the_first_steps_and_an_error() -> None:
    code, out, err = run()
    assert (code, out) == (2, "")
    assert len(err.splitlines()) < 20
    first_steps, _, _ = err.partition("All commands: lightning-streaming --help\n")
    assert run("-h").out.startswith(first_steps)
    assert "lightning-streaming convert " in first_steps


def test_what_training_can_be_asked_for_is_what_lightning_offers() -> None:
    assert set(SUBCOMMANDS) == set(StreamingCLI.subcommands())


def test_a_word_that_is_no_command_is_refused_with_all_that_are() -> None:
    refused = run("inspekt", "data")
    assert refused.code == 2
    assert refused.out == ""
    for name in ("fit", "predict", "inspect", "verify", "copy", "merge"):
        assert name in refused.err


@pytest.mark.parametrize(("typed", "meant"), [("inpsect", "inspect"), ("fti", "fit"), ("covnert", "convert")])
def test_of_a_mistyped_command_the_one_that_was_meant_is_named(typed: str, meant: str) -> None:
    words = f"lightning-streaming: error: {typed!r} is not a command; did you mean {meant}? "
    assert run(typed, "data").err.startswith(words)


def test_what_is_no_command_is_told_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["https://user:hush@host/index.json?sig=hush"]) == 2
    assert "'https://host/index.json' is not a command" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["fit", "--help"], ["--config", "nowhere.yaml", "fit"], ["--print_shtab=bash"]])
def test_all_else_goes_to_training(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[str] | None] = []
    monkeypatch.setattr("lightning_streaming.trainer.cli.main", heard.append)
    monkeypatch.setattr(sys, "argv", ["lightning-streaming", *args])
    assert program.main() == 0
    assert heard == [None]  # those of the process: Lightning warns of any others, and shows them
    assert program.main(args) == 0
    assert heard == [None, args]


@pytest.mark.nightly
def test_training_is_reached_in_a_real_process() -> None:
    ended = run_process("fit", "--trainer.mx_steps=3")
    assert ended.code == 2
    assert ended.err == (
        "lightning-streaming fit: error: there is no field trainer.mx_steps; did you mean trainer.max_steps?\n"
    )


def test_the_version_is_told() -> None:
    assert run("--version") == run("-V") == (0, f"lightning-streaming {lightning_streaming.__version__}\n", "")


def test_ctrl_c_is_quiet_also_while_something_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_streaming.tools.commands.import_module", interrupt)
    monkeypatch.setattr("lightning_streaming.__main__.import_module", interrupt)
    assert run("inspect", "data") == run("fit") == (130, "", "")


def test_ctrl_c_is_quiet_also_before_there_is_a_main(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "lightning_streaming.tools.commands":
                raise KeyboardInterrupt

    for name in ("lightning_streaming.__main__", "lightning_streaming.tools.commands"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        import_module("lightning_streaming.__main__")
    assert ended.value.code == 130


def test_help_of_no_tool_takes_the_time_that_torch_takes(tmp_path: Path) -> None:
    code = (
        "import sys; from lightning_streaming.__main__ import main\n"
        f"for name in {list(COMMANDS)}:\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit: pass\n"
        "    heavy = {'torch', 'lightning', 'jsonargparse'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{name} --help imports {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    "args",
    [
        ["inspect"],
        ["verify"],
        ["select", "--where", "id < 5", "--local", "cache"],
        ["lengths", "--lengths", "id", "--local", "cache"],
    ],
    ids=lambda args: args[0],
)
def test_tools_for_stored_data_import_neither_torch_nor_lightning(tmp_path: Path, args: list[str]) -> None:
    write_texts(tmp_path / "data")
    code = (
        "import sys; from lightning_streaming.__main__ import main\n"
        f"assert main({[args[0], 'data', *args[1:]]!r}) == 0\n"
        "print(*{'torch', 'lightning', 'jsonargparse'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
