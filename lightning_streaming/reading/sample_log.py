"""Logging of a worker's samples one by one, and a watchdog for samples that take too long.

A pass without a log and a watchdog uses none of this.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import get_worker_info

from lightning_streaming.dataset.line_log import LineLog, last_whole_line, whole_lines
from lightning_streaming.dataset.sample_key import Row, SampleKey, keys_of_rows
from lightning_streaming.dataset.samples import SampleSource
from lightning_streaming.errors import FormatError, StorageError
from lightning_streaming.options.reading import DebugConfig
from lightning_streaming.resume.state import EpochStart
from lightning_streaming.signatures import public

_NO_MORE = object()


def watch_of(debug: DebugConfig, source: SampleSource, start: EpochStart, worker: int) -> SampleWatch:
    """Return the watch over a worker's pass, with a log or a watchdog."""
    return SampleWatch(partial(_watchers, debug, source, start, worker))


def _watchers(debug: DebugConfig, source: SampleSource, start: EpochStart, worker: int) -> Sequence[Watcher]:
    key = keys_of_rows(source.catalog, start)
    rank = start.world.rank
    log = None if debug.sample_log is None else _sample_log_path(debug.sample_log, rank, worker)
    watchers = list[Watcher]()
    if log is not None:
        try:
            watchers.append(_SampleLog(log, key))
        except OSError as error:
            raise StorageError(
                f"debug.sample_log={str(log.parent)!r} cannot be written: {error}",
                hint="pass a directory that can be written to",
                option="debug.sample_log",
                path=str(log.parent),
            ) from error
    if debug.watchdog_seconds is not None:
        stacks = None if log is None else log.with_suffix(".stacks")
        watchers.append(_Watchdog(debug.watchdog_seconds, f"worker {worker} of rank {rank}", key, stacks))
    return watchers


def last_sample(directory: str | os.PathLike[str] | None, rank: int, worker: int, pid: int) -> str:
    """Return how an error describes the sample that a worker was reading when it died.

    Args:
        directory: Given as ``debug.sample_log``; None without a log.
        rank: Among the ranks that read different samples.
        worker: Among the workers of that rank.
        pid: The worker's.
    """
    if directory is None:
        name = _sample_log_path("", rank, worker).name
        return (
            f"to find the sample, pass debug={{'sample_log': DIRECTORY}} to the dataset; the last line of {name} names "
            "it"
        )
    path = _sample_log_path(directory, rank, worker)
    try:
        line = last_whole_line(path) if path.exists() else None
        sample = None if line is None else _parsed(line, f"the last line of {path}")
    except (FormatError, OSError) as error:  # the worker's end is the error to report
        return f"its last sample is unknown: {error}"
    if sample is None or sample.pid != pid:
        return "it had read no sample"
    return f"the last sample it read: dataset.restore_sample({json.dumps(sample.key.as_dict())})"


class Watcher(Protocol):
    """Base of what observes each sample. Its methods are called in the thread that reads."""

    def requested(self) -> None:
        """Note that the next sample is requested; which one is unknown yet."""

    def begun(self, row: Row) -> None:
        """Note which sample is going to be fetched, decoded and transformed."""

    def yielded(self) -> None:
        """Note that the sample is yielded."""

    def close(self) -> None:
        """Note that no more samples are requested."""


class SampleWatch:
    """Reports the samples of one worker's pass to watchers, in order.

    Args:
        watchers: Creates the watchers when the first sample is requested.
    """

    def __init__(self, watchers: Callable[[], Sequence[Watcher]]) -> None:
        self._make = watchers
        self._watchers: Sequence[Watcher] = ()

    def rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the same rows, and report each when it is requested, which is when its sample is read."""
        for row in rows:
            self.begun(row)
            yield row

    def begun(self, row: Row) -> None:
        """Report a sample that is going to be read, possibly as a replacement of one reported before."""
        for watcher in self._watchers:
            watcher.begun(row)

    def samples(self, samples: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield the same samples; the watch ends with the last of them."""
        with ExitStack() as stack:
            stack.enter_context(closing(samples))
            self._watchers = [stack.enter_context(closing(watcher)) for watcher in self._make()]
            while True:
                for watcher in self._watchers:
                    watcher.requested()
                sample = next(samples, _NO_MORE)
                for watcher in self._watchers:
                    watcher.yielded()
                if sample is _NO_MORE:
                    return
                yield sample


@public("logs")
@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedSample:
    """Line of a sample log."""

    time: float
    """Time at which the worker began to read the sample, in seconds since 1970."""
    pid: int
    """Process that read the sample."""
    key: SampleKey
    """Key of the sample; ``restore_sample`` reads it again."""


def _sample_log_path(directory: str | os.PathLike[str], rank: int, worker: int) -> Path:
    """Return the path of the log of one worker.

    Args:
        directory: What the dataset was given as ``sample_log``.
        rank: Among the ranks that read different samples.
        worker: Among the workers of that rank; 0 where there are none.
    """
    return Path(directory) / f"rank{rank}-worker{worker}.jsonl"


def read_sample_log(path: str | os.PathLike[str]) -> Iterator[LoggedSample]:
    """Read the samples of a log, in the order in which they were read.

    Incomplete lines, which a full disk or a power cut leaves, are skipped.

    Args:
        path: A file in the directory ``debug.sample_log`` of the dataset.

    Raises:
        FormatError: A complete line is not one of a sample log.
    """
    for line, where in whole_lines(path):
        yield _parsed(line, where)


class _SampleLog(LineLog):
    """Writes the log of one worker's pass.

    Args:
        path: Path of the log; it is appended to.
        key: Returns the key of a sample.
    """

    def __init__(self, path: Path, key: Callable[[Row], SampleKey]) -> None:
        super().__init__(path)
        self._key = key
        self._pid = os.getpid()

    def requested(self) -> None:
        """Do nothing."""

    def begun(self, row: Row) -> None:
        """Write the sample down before anything can go wrong with it."""
        self.write({"time": time.time(), "pid": self._pid, **self._key(row).as_dict()})

    def yielded(self) -> None:
        """Do nothing."""


def _parsed(line: bytes, where: str) -> LoggedSample:
    try:
        values: dict[str, Any] = json.loads(line)
        return LoggedSample(time=values.pop("time"), pid=values.pop("pid"), key=SampleKey.from_dict(values))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{where} is not one of a sample log, but {line[:200]!r}") from error


class _Watchdog:
    """Writes the stacks of all threads to stderr, once a sample, when one takes longer than it should.

    The reader notes when it requested which sample, which takes well under a microsecond. A thread reads the note when
    the time could be up, so at most twice in ``seconds``. In a worker process, Python's ``faulthandler`` watches that
    thread: it prints the stack of a worker that holds the interpreter, as a call into C may, after twice the time and
    without the sample's key.

    Args:
        seconds: Time that a sample may take, from the request until it is yielded.
        name: Name of the worker, for the first line.
        key: Returns the key of a sample.
        also_to: A file to append the same text to.
    """

    def __init__(self, seconds: float, name: str, key: Callable[[Row], SampleKey], also_to: Path | None) -> None:
        self._seconds = seconds
        self._name = name
        self._key = key
        self._also_to = also_to
        self._requested_at: float | None = None
        self._row: Row | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def requested(self) -> None:
        """Start the time."""
        self._row = None
        self._requested_at = time.monotonic()

    def begun(self, row: Row) -> None:
        """Note the sample, for the first line of a report."""
        self._row = row

    def yielded(self) -> None:
        """Stop the time; what the consumer does with the sample does not count."""
        self._requested_at = None

    def close(self) -> None:
        """Stop the watchdog."""
        self._closed.set()

    def _watch(self) -> None:
        reported, wait, in_worker = None, self._seconds, get_worker_info() is not None
        while True:
            if in_worker:
                faulthandler.dump_traceback_later(2 * self._seconds, file=2)  # unless it is called again before
            if self._closed.wait(wait):
                break
            requested_at, wait = self._requested_at, self._seconds
            if requested_at is None or requested_at == reported:
                continue
            left = requested_at + self._seconds - time.monotonic()
            if left > 0:
                wait = left
            else:
                reported = requested_at
                self._report()
        if in_worker:
            faulthandler.cancel_dump_traceback_later()

    def _report(self) -> None:
        row = self._row
        which = "which one is not known yet" if row is None else json.dumps(self._key(row).as_dict())
        # The stack of every other thread of this process, the innermost call last.
        names, own = {thread.ident: thread.name for thread in threading.enumerate()}, threading.get_ident()
        stacks = "\n".join(
            f"Thread {names.get(ident, ident)!r}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
            if ident != own
        )
        text = f"{self._name} has been at one sample for {self._seconds:g} s: {which}\n{stacks}\n"
        sys.stderr.write(text)
        sys.stderr.flush()
        if self._also_to is not None:
            self._also_to.parent.mkdir(parents=True, exist_ok=True)
            with self._also_to.open("a") as file:
                file.write(text)
