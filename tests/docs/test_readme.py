"""README and quick start work as printed: commands, programs and configurations, in order, in one empty directory.

A ``bash`` block is given to a shell, a ``python`` block to an interpreter of its own, a ``yaml`` block that begins with
``# NAME.yaml`` is written there, and a ``text`` block is exactly what the program before it prints. ``s3://my-bucket``
is a bucket of a server on this machine. Only what follows ``<!-- not run -->``, which installs, is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml  # type: ignore[import-untyped]

import lightning_streaming.trainer.cli  # noqa: F401  what a fork of this process need not import again
from tests.servers import S3Store
from tests.tools.forked import command_line, run_program

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": ("checkpoints", "python"),
    "docs/quickstart.md": ("checkpoints", "on-s3/checkpoints", "mixed", "python"),
}
"""The pages, and the directories of checkpoints that their runs leave."""
BUCKET = "s3://my-bucket"
"""The bucket that the pages use."""
_SHOWN = re.compile(r"`(Resumed [^`]+, )\.\.\.\)`")
"""The output of a command, as a page shows it."""
_BLOCK = re.compile(
    r"^(?P<not_run><!-- not run -->\s*)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_NAMED = re.compile(r"# (?P<name>[\w.-]+\.yaml)\n")


class Block(NamedTuple):
    """A block of the document that is run."""

    language: str
    text: str


def blocks(document: str) -> Iterator[Block]:
    """The blocks in order, without those that are not run."""
    found = list(_BLOCK.finditer(document))
    assert len(found) == len(re.findall(r"^```\w", document, re.MULTILINE)), "a block is not closed, or indented"
    yield from (Block(one["language"], one["text"]) for one in found if not one["not_run"])


def run_shell(program: str, text: str, directory: Path) -> str:
    """Give each line to a shell, and stop at the first that fails; gives all that is printed, errors too."""
    environment = {**os.environ, "LIGHTNING_STREAMING_CACHE": str(directory.parent / "cache")}
    script = ["bash", "-ec", program + text]
    done = subprocess.run(script, cwd=directory, env=environment, stdout=-1, stderr=-2, text=True, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout}"
    return done.stdout


def run_block(block: Block, program: str, directory: Path, capfd: pytest.CaptureFixture[str]) -> str | None:
    """Run a block; gives what it prints, if it is a program."""
    if block.language == "bash":
        return run_shell(program, block.text, directory)
    if block.language == "python":
        capfd.readouterr()
        run_program(block.text, directory)
        return capfd.readouterr().out
    assert block.language == "yaml", f"nobody knows how to run {block.language}"
    named = _NAMED.match(block.text)
    assert yaml.safe_load(block.text) is not None
    if named is not None:
        (directory / named["name"]).write_text(block.text)
    return None


@pytest.mark.nightly
@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/quickstart.md", marks=pytest.mark.nightly)])
def test_every_line_runs_as_printed(
    page: str, tmp_path: Path, s3: S3Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    newcomer = tmp_path / "newcomer"
    newcomer.mkdir()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    text = (ROOT / page).read_text()
    assert BUCKET in text
    printed, languages, of_shells = None, set[str](), ""
    with command_line() as program:
        for block in blocks(text.replace(BUCKET, s3.make_bucket())):
            languages.add(block.language)
            if block.language == "text":
                assert printed == block.text
            else:
                printed = run_block(block, program, newcomer, capfd)
                of_shells += (printed or "") * (block.language == "bash")
    assert {"bash", "python", "yaml"} <= languages
    (resumed,) = _SHOWN.findall(text)
    assert resumed in of_shells
    for checkpoints in PAGES[page]:
        assert torch.load(newcomer / checkpoints / "last.ckpt")["global_step"] > 10


def test_a_line_that_fails_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no-such-file"):
        run_shell("", "true\ncat no-such-file\ntrue\n", tmp_path)
