"""The command line, run in this process or in one of its own, and small datasets to run it on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from lightning_streaming.__main__ import main
from lightning_streaming.formats.index import DatasetIndex, parse_index
from lightning_streaming.storage import Location
from lightning_streaming.writing.writers import MDSWriter


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    """Its exit code."""
    out: str
    """What it printed."""
    err: str
    """What it printed on standard error."""

    @property
    def json(self) -> Any:
        """What it printed, read as JSON."""
        return json.loads(self.out)


def run(*args: object) -> Outcome:
    """Run ``lightning-streaming`` with these arguments in this process."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def run_process(*args: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Outcome:
    """Run ``lightning-streaming`` with these arguments in a process of its own."""
    command = [sys.executable, "-m", "lightning_streaming", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=cwd, env=env, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def options(values: Mapping[str, str], name: str = "--storage-options") -> list[str]:
    """Storage options as arguments."""
    return [word for key, value in values.items() for word in (name, f"{key}={value}")]


def write_texts(out: str | Path, samples: int = 25, **settings: Any) -> DatasetIndex:
    """Write a dataset of several shards: 10 samples each, unless the settings say otherwise."""
    usual: dict[str, Any] = {"size_limit": 500, "hashes": ["sha1"], "columns": {"id": "int", "text": "str"}}
    with MDSWriter(out=out, **(usual | settings)) as writer:
        for number in range(samples):
            writer.write({"id": number, "text": f"text {number:03}"})
    return read_index(Path(out)) if "://" not in str(out) else DatasetIndex(())


def read_index(directory: Path) -> DatasetIndex:
    """The index of a dataset in a directory."""
    path = directory / "index.json"
    return parse_index(path.read_bytes(), str(path))


def flip_byte(path: Path, position: int = -1) -> None:
    """Change one byte of a file, and not its size."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def put(directory: Path, url: str, settings: Mapping[str, Any]) -> None:
    """Upload a directory as it is."""
    for path in directory.rglob("*"):
        if path.is_file():
            Location(f"{url}/{path.relative_to(directory).as_posix()}", settings).upload(path)


def contents(directory: Path) -> dict[str, bytes]:
    """All files of a directory, by name."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def edit_state(*args: object) -> Any:
    """What ``state`` says of an edit that it has made."""
    done = run("state", *args, "--json")
    assert (done.code, done.err) == (0, "")
    return done.json
