"""docs/convert.md as a reader would follow it: what makes a source, the command, and what reads the dataset again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import datasets
import pytest

from tests.servers import http_server
from tests.tools.running import run

HOST = "https://data.example.com"
"""Where the document has data that is on a server. Here it is the directory in which the commands are run."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "convert.md"
_BLOCK = re.compile(r"^```(?P<kind>python|console|text)\n(?P<content>.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (?P<command>.*)\n(?P<prints>(?:^[^$].*\n)*)", re.MULTILINE)


def test_every_command_prints_what_the_document_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    names = {"__name__": "__main__"}
    with http_server(tmp_path) as url:
        assert _follow(DOCUMENT.read_text().replace(HOST, url), names, capsys) >= 10


def _follow(document: str, names: dict[str, str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run a document, and give the number of its commands."""
    printed, commands = "", 0
    for block in _BLOCK.finditer(document):
        if block["kind"] == "python":
            exec(compile(block["content"], str(DOCUMENT), "exec"), names)
            printed = capsys.readouterr().out
        elif block["kind"] == "text":
            assert printed == block["content"]
        else:
            for shown in _COMMAND.finditer(block["content"]):
                program, *args = shlex.split(shown["command"])
                assert program == "lightning-streaming"
                outcome = run(*args)
                # Notes come before results. Images depend on the version of Pillow, so their size is not shown.
                assert (outcome.err + outcome.out).startswith(shown["prints"])
                commands += 1
    return commands
