"""The commands of docs/tools.md, docs/plan.md and others print what they say they print.

Each ``python`` block is run, and each line of a ``console`` block that starts with ``$`` is given to a shell, in order,
in one empty directory, which the address of the documents' server stands for too. What follows such a line is exactly
what it prints.

Run as a script, this file writes what is printed into the document.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.servers import http_server
from tests.tools.forked import command_line, run_program

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

HOST = "https://data.example.com"
"""Where the document has data that is on a server."""
DOCUMENTS = [
    Path(__file__).parents[2] / "docs" / name for name in ("tools.md", "plan.md", "agents.md", "trace-samples.md")
]
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ .*\n", re.MULTILINE)


def blocks(document: str) -> list[tuple[str, str]]:
    """Language and text of each block that is run."""
    found = [(match[1], match[2]) for match in _BLOCK.finditer(document)]
    assert len(found) == document.count("```python") + document.count("```console")
    return found


def run_console(text: str, directory: Path, program: str = "") -> str:
    """The block as it should be: its commands, each with what it prints; ``program`` is shell that defines ours."""
    if HOST not in text:
        return run_commands(text, directory, program)
    with http_server(directory) as url:
        return run_commands(text.replace(HOST, url), directory, program).replace(url, HOST)


def run_commands(text: str, directory: Path, program: str) -> str:
    """Like :func:`run_console`, with servers as they are."""
    lines = [match[0] for match in _COMMAND.finditer(text)]
    # printf shows a command just before it is run; $? must be that of the command, not of the printf.
    shown = "".join(f"code=$?; printf '%s' {_quoted(line)}; (exit $code)\n{line[2:]}" for line in lines)
    environment = {**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    script = ["bash", "-c", program + shown]
    done = subprocess.run(
        script, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.stdout.decode()


def _quoted(line: str) -> str:
    return "'" + line.replace("'", "'\\''") + "'"


def rewritten(document: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Each console block as it stands, and as it should."""
    with command_line() as program:
        for language, text in blocks(document):
            if language == "python":
                run_program(text, directory)
            else:
                yield text, run_console(text, directory, program)


@pytest.mark.nightly
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_commands_print_what_the_document_says(document: Path, tmp_path: Path) -> None:
    checked = 0
    for stands, should in rewritten(document.read_text(), tmp_path):
        assert stands == should
        checked += 1
    assert checked >= (7 if document.stem == "tools" else 1)


def test_a_command_that_prints_something_else_is_found(tmp_path: Path) -> None:
    ((stands, should),) = rewritten("words\n```console\n$ echo 'a b'\na\n```\nwords", tmp_path)
    assert (stands, should) == ("$ echo 'a b'\na\n", "$ echo 'a b'\na b\n")


def test_exit_codes_are_those_of_the_command_before(tmp_path: Path) -> None:
    assert run_console("$ (exit 3)\n$ echo $?\n", tmp_path) == "$ (exit 3)\n$ echo $?\n3\n"


def test_what_is_on_the_server_is_what_is_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content\n")
    block = f"$ curl -s {HOST}/file; echo {HOST}\n"
    assert run_console(block, tmp_path) == f"{block}content\n{HOST}\n"


if __name__ == "__main__":
    for document in DOCUMENTS:
        with TemporaryDirectory() as name:
            whole = document.read_text()
            for old, new in rewritten(whole, Path(name)):
                whole = whole.replace(f"```console\n{old}```", f"```console\n{new}```", 1)
            document.write_text(whole)
