"""Writers in processes of their own, that are killed: after so many operations on files, or from outside."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lightning_streaming.files import PARTIAL_SUFFIX
from lightning_streaming.formats.index import dump_index, parse_index
from lightning_streaming.writing.writers import CSVWriter, MDSWriter, ShardWriter

WRITERS: dict[str, type[ShardWriter]] = {"mds": MDSWriter, "csv": CSVWriter}
COLUMNS = {"id": "int", "text": "str"}
_TOUCHING = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir")

# Each child is forked from one that has imported all this and has one thread.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__, "s3fs"])


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Samples written to a place."""

    out: Any
    mode: Any
    samples: int = 120
    begun: int = 50
    """Samples of the finished dataset that is appended to; its last shard is not full."""
    format: str = "mds"
    settings: dict[str, Any] = field(default_factory=dict)
    pause: float = 0.0
    """Seconds between two samples."""

    def run(self) -> None:
        """Write what is not there yet."""
        settings: dict[str, Any] = {"columns": COLUMNS, "size_limit": 700, "max_workers": 2, **self.settings}
        with WRITERS[self.format](out=self.out, mode=self.mode, **settings) as writer:
            for sample in islice(samples(self.samples), writer.num_samples, None):
                writer.write(sample)
                if self.pause:
                    threading.Event().wait(self.pause)

    def begin(self) -> None:
        """Write the dataset that is appended to."""
        replace(self, mode="create", samples=self.begun, pause=0.0).run()

    def uninterrupted(self, out: Path) -> Path:
        """The same dataset in a directory, written in one go; or begun, and then appended to in one go."""
        keeps = {name: one for name, one in self.settings.items() if name not in ("storage_options", "keep_local")}
        job = replace(self, out=str(out), mode="append", settings=keeps, pause=0.0)
        if self.mode == "append":
            job.begin()
        else:
            job = replace(job, mode="create")
        job.run()
        return out


def samples(count: int) -> Iterator[dict[str, Any]]:
    """Samples of many sizes; one is larger than a shard may be."""
    for number in range(count):
        yield {"id": number, "text": f"{number} " * (400 if number == 55 else number % 13)}


def start(conversion: Conversion) -> BaseProcess:
    """Run a conversion in a process of its own."""
    process = _processes.Process(target=conversion.run)
    process.start()
    return process


def runs_to_its_end(conversion: Conversion, operations: int, under: Path) -> bool:
    """Run a conversion in a process that is killed before it has touched files under a directory so many times.

    Returns:
        Whether it was finished before.
    """
    process = _processes.Process(target=_run_until, args=(conversion, operations, str(under)))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def _run_until(conversion: Conversion, operations: int, under: str) -> None:
    left = iter(range(operations))

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _TOUCHING and str(arguments[0]).startswith(under) and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    conversion.run()


def leave_as_earlier(out: Path, filled: Path) -> list[str]:
    """Leave in a dataset what an earlier version left when it was killed before an append was decided.

    Args:
        out: The finished dataset.
        filled: What was to become of it: its last shard is filled up, and others are behind it.

    Returns:
        The files of the filled-up shard, which lie in ``.writing``.
    """
    shards, published = (parse_index((root / "index.json").read_bytes(), str(root)).shards for root in (filled, out))
    first = len(published) - 1
    assert shards[first] != published[first]
    assert len(shards) > first + 3
    (out / ".writing").mkdir()
    for number in range(first, len(shards) - 1):
        record = dump_index([shards[number], shards[number - 1]])
        (out / ".writing" / f"{number:05}.json").write_bytes(record)
        for file in shards[number].stored:
            shutil.copy(filled / file.basename, out / ".writing" if number == first else out)
    return [file.basename for file in shards[first].stored]


def shard_marks(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time of the last change and content of every shard file in a directory."""
    found = ((path, path.stat()) for path in directory.glob("shard.*") if path.suffix != PARTIAL_SUFFIX)
    return {path.name: (stat.st_ino, stat.st_mtime_ns, path.read_bytes()) for path, stat in found}


def contents(directory: Path) -> dict[str, bytes]:
    """Every file under a directory; looked at again where a writer renames or removes one meanwhile."""
    while True:
        files = (path for path in sorted(directory.rglob("*")) if path.is_file())
        try:
            return {str(path.relative_to(directory)): path.read_bytes() for path in files}
        except FileNotFoundError:
            continue
