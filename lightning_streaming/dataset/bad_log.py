"""Log of samples that could not be read: written by workers, read by resumed runs and by tools."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_streaming.dataset.line_log import LineLog, whole_lines
from lightning_streaming.dataset.sample_key import SampleKey
from lightning_streaming.errors import FormatError, ObjectNotFoundError, StorageError, StreamingError
from lightning_streaming.signatures import public

_MOST_CHARACTERS = 500
"""Length of an error."""
_ANY_FILE = "bad-rank*-worker*.jsonl"


@public("logs")
@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    """Line of a log of bad samples."""

    time: float
    """Time of the failure, in seconds since 1970."""
    pid: int
    """Process that failed to read the sample."""
    attempt: int
    """0 for the sample of that position; n for the n-th replacement that was tried."""
    error: str
    """Error message, in one line."""
    key: SampleKey
    """Key of the sample, with its position in the epoch."""


def bad_log_path(directory: str | os.PathLike[str], rank: int, worker: int) -> Path:
    """Return the path of one worker's log of bad samples; the file is created with the first of them.

    Args:
        directory: Given as ``bad_samples.log``.
        rank: Among the ranks that read different samples.
        worker: Among the workers of that rank; 0 where there are none.
    """
    return Path(directory) / f"bad-rank{rank}-worker{worker}.jsonl"


def write_bad_sample(path: Path, key: SampleKey, attempt: int, error: StreamingError) -> None:
    """Add a line to a log.

    Args:
        path: The log.
        key: Key of the sample.
        attempt: As :attr:`BadSample.attempt`.
        error: Why it could not be read.

    Raises:
        StorageError: The log cannot be written.
    """
    cause = error.__cause__ or error  # its message names the sample again where it is read
    text = " ".join((str(cause) if isinstance(cause, FormatError) else f"{type(cause).__name__}: {cause}").split())
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    line = {"time": time.time(), "pid": os.getpid(), **key.as_dict(), "attempt": attempt, "error": text}
    try:
        with closing(LineLog(path)) as log:  # bad samples are few, so it is not kept open
            log.write(line)
    except OSError as failure:
        raise StorageError(
            f"bad_samples.log={str(path.parent)!r}: the log of a bad sample cannot be written: {failure}",
            hint="make room, or pass a directory that can be written to",
            option="bad_samples.log",
            path=str(path.parent),
        ) from failure


def read_bad_samples(path: str | os.PathLike[str]) -> Iterator[BadSample]:
    """Read the bad samples of a log, file by file, in the order in which they were found.

    Incomplete lines, which a full disk or a power cut leaves, are skipped.

    Args:
        path: Given to the dataset as ``bad_samples.log``; or one of the files there.

    Raises:
        ObjectNotFoundError: There is no such file or directory.
        FormatError: A complete line is not one of such a log.
    """
    path = Path(path)
    if not path.exists():
        raise ObjectNotFoundError(
            f"{path} is no log of bad samples: there is no such file or directory", path=str(path)
        )
    for file in sorted(path.glob(_ANY_FILE)) if path.is_dir() else [path]:
        for line, where in whole_lines(file):
            yield _parsed(line, where)


def _parsed(line: bytes, where: str) -> BadSample:
    try:
        values: dict[str, Any] = json.loads(line)
        fields = {name: values.pop(name) for name in ("time", "pid", "attempt", "error")}
        return BadSample(**fields, key=SampleKey.from_dict(values))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{where} is not one of a log of bad samples, but {line[:200]!r}", path=where.rpartition(", line ")[0]
        ) from error
