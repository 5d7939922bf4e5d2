from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from io import StringIO
from pathlib import Path

import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.console import print_error, print_json, print_note, progress
from tests.tools.running import run_process, write_texts


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_an_error_is_one_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("lightning-streaming copy", ConfigError("long " * 100 + "end"))
    assert capsys.readouterr() == ("", "lightning-streaming copy: error: " + "long " * 100 + "end\n")


def test_an_error_is_one_block_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    url = "s3://bucket/" + "x" * 60
    print_error("tool", ConfigError(f"words before {url} and some words after it"))
    lines = terminal.getvalue().splitlines()
    assert lines[0] == "tool: error: words before"
    assert lines[1] == f"  {url}", "what is to be copied is not broken"
    assert all(line.startswith("  ") for line in lines[1:])


def test_notes_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_note("tool", "by the way")
    assert capsys.readouterr() == ("", "tool: by the way\n")


def test_json_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": "é"})
    assert capsys.readouterr().out == '{\n  "a": "\\u00e9"\n}\n'


@pytest.mark.parametrize("unit", ["shards", "B"])
def test_progress_is_shown_on_a_terminal_only(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, is_shown in ((Terminal(), True), (StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress(10, "copy", unit) as advance:
            advance(10)
        assert ("copy" in stream.getvalue()) == is_shown


def on_terminal(*words: object) -> str:
    """What a command that ends well shows on standard error, which is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "lightning_streaming", *map(str, words)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, check=True)
    shown = b""
    while select.select([ours], [], [], 0.2)[0]:
        shown += os.read(ours, 4096)
    os.close(theirs)
    os.close(ours)
    return shown.decode()


@pytest.mark.parametrize(
    ("words", "bar"),
    [
        (("verify", "data"), "verify:   0%"),
        (("verify", "data", "--workers", 2), "verify:   0%"),
        (("copy", "data", "copied"), "copy:   0%"),
        (("convert", "rows.jsonl", "one"), "convert: 0 sample"),
        (("convert", "rows.jsonl", "several", "--part-size", "1kb", "--workers", 1), "writing: 100%"),
    ],
)
def test_a_real_terminal_sees_progress_and_a_pipe_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], bar: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "data")
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "text": "some words"}\n' * 100)
    assert f"\r{bar}" in on_terminal(*words)
    tool, what, *more = words
    if tool != "verify":
        more[0] = "again"
    assert "\r" not in run_process(tool, what, *more, cwd=tmp_path).err
