"""A log of the samples that each worker read: a line of JSON for each, written before the sample is read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_streaming.errors import FormatError
from lightning_streaming.loading.sample_key import SampleKey
from lightning_streaming.loading.watch import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedSample:
    """One line of a sample log."""

    time: float
    """When the worker began to read it, in seconds since 1970."""
    pid: int
    """Process that read it."""
    key: SampleKey
    """Which sample; ``restore_sample`` makes it again."""


def sample_log_path(directory: str | os.PathLike[str], rank: int, worker: int) -> Path:
    """Where the log of one worker is.

    Args:
        directory: What the dataset was given as ``sample_log``.
        rank: Among the ranks that read different samples.
        worker: Among the workers of that rank; 0 where there are none.
    """
    return Path(directory) / f"rank{rank}-worker{worker}.jsonl"


def read_sample_log(path: str | os.PathLike[str]) -> Iterator[LoggedSample]:
    """The samples of a log, in the order in which they were read.

    Lines that were cut short, as a full disk or a power cut leaves them, are left out.

    Raises:
        FormatError: A whole line is not one of a sample log.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"}\n") or not line.startswith(b"{"):
                yield _parsed(line, f"line {number} of {os.fspath(path)}")


class SampleLog:
    """Writes the log of one worker's pass; one system call a sample, so that a killed process has written all of it.

    Args:
        path: Where to; what is there is kept, and the directory made if there is none.
        key: Finds the key of a sample.
    """

    def __init__(self, path: Path, key: Callable[[Row], SampleKey]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        if _ends_in_a_line_cut_short(path):
            self._file.write(b"\n")
        self._key = key
        self._pid = os.getpid()

    def asked(self) -> None:
        """Of no interest."""

    def begun(self, row: Row) -> None:
        """Write the sample down before anything can go wrong with it."""
        line = {"time": time.time(), "pid": self._pid, **self._key(row).as_dict()}
        left = json.dumps(line).encode() + b"\n"
        while left:  # a disk that is nearly full takes a part, and refuses the rest by an error
            left = left[self._file.write(left) :]

    def given(self) -> None:
        """Of no interest."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_in_a_line_cut_short(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() not in (b"", b"\n")


def _parsed(line: bytes, where: str) -> LoggedSample:
    try:
        values: dict[str, Any] = json.loads(line)
        return LoggedSample(time=values.pop("time"), pid=values.pop("pid"), key=SampleKey.from_dict(values))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{where} is not one of a sample log, but {line[:200]!r}") from error
