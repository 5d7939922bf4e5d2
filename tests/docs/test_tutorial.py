"""The tutorial, done as it says: its files are written, its commands run in one directory, and print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
_BLOCK = re.compile(r"^```(python|yaml|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# (\w+\.\w+)\n")
"""First line of a block that is a file."""


def printed(command: str, directory: Path) -> str:
    """What a shell prints for a command, standard error too."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment, stdout=-1, stderr=subprocess.STDOUT, check=False
    )
    return done.stdout.decode()


def pattern(shown: str) -> re.Pattern[str]:
    """What a command may print: ``...`` stands for anything, and alone in a line for lines."""
    return re.compile(".*".join(map(re.escape, re.split(r"\n\.\.\.\n|\.\.\.", shown))), re.DOTALL)


@pytest.mark.nightly
@pytest.mark.timeout(400)  # seven programs that import what training needs
def test_each_step_prints_what_the_tutorial_shows(tmp_path: Path) -> None:
    commands = 0
    for language, text in _BLOCK.findall(TUTORIAL.read_text()):
        name = _NAME.match(text)
        if name is not None:
            (tmp_path / name[1]).write_text(text)
        elif language == "python":
            subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True)
        elif language == "console":
            for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
                found = printed(command, tmp_path)
                assert pattern(f"\n{shown}").fullmatch(f"\n{found}"), f"$ {command}\n{found}"
                commands += 1
    assert commands == 5


@pytest.mark.parametrize(
    ("shown", "fits"),
    [("a\n...\nd\n", True), ("a\nb\n", False), ("a\nb ...\nc\nd\n", True), ("a\nb c.\n...\nd\n", False)],
)
def test_dots_stand_for_what_is_left_out(shown: str, fits: bool) -> None:
    assert (pattern(shown).fullmatch("a\nb c\nc\nd\n") is not None) is fits
