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

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.tools.console import print_error, print_json, print_note, progress, require_rich
from tests.tools.running import run, write_texts


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


def test_without_rich_there_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "data")
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'lightning-streaming\[tools\]'"):
        require_rich()
    for command in (["inspect"], ["verify"], ["copy", tmp_path / "data"]):
        refused = run(*command, tmp_path / "data")
        assert refused.code == 2
        assert "--json" in refused.err
    assert run("inspect", tmp_path / "data", "--json").code == 0


def test_a_real_terminal_sees_progress(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "lightning_streaming", "verify", str(tmp_path / "data")]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, check=True)
    assert select.select([ours], [], [], 10)[0]
    shown = os.read(ours, 4096)
    os.close(theirs)
    os.close(ours)
    assert shown.startswith(b"\rverify:   0%")
