"""Scan over the columns of all shards of a dataset, several shards at a time, in threads.

The result of each group of shards is written to a file during the scan, so that a process that was killed resumes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.file_states import CacheDirectory
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.selection_files import map_bits, selection_lock
from lightning_streaming.cache.shared_files import adopt_file, make_directories, unwritable
from lightning_streaming.errors import (
    DiskFullError,
    ObjectNotFoundError,
    ShardCorruptError,
    StorageError,
    StreamingError,
)
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import appears_whole, file_named_by, remove_partials
from lightning_streaming.formats.columns import ColumnValues, joined, read_columns
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard import narrowed
from lightning_streaming.waits import ProgressCallback, progress

_log = package_logger(__name__)
SAMPLES_AT_ONCE = 1 << 20
SHARDS_AT_ONCE = 32
"""Most shards of a group, whose result is one file."""
_BYTES_AT_ONCE = 1 << 28
"""Bytes of the shards of all threads, unless one shard is larger: a column of long texts may be most of a shard."""
_MOST_THREADS = 8
_CHECKSUM_BYTES = 8


class ShardGroup(NamedTuple):
    """Consecutive shards that are scanned together."""

    shards: range
    first: int
    """Number of the first sample."""
    samples: int


ProgressFactory = Callable[[str, str, int], AbstractContextManager[ProgressCallback | None]]
"""Context of a scan: called with the dataset's label in errors, a name of the result and the number of samples; returns
a callback for the number of samples that were read, or None."""
Found = NDArray[Any]
"""Result of the samples of a group."""
_Seen = TypeVar("_Seen")
_Whole = TypeVar("_Whole")
_Outcome = tuple[ShardGroup, Found | BaseException]
"""Group with its result, or the error that it raised."""


@contextmanager
def add_error_context(cache: ShardCache, failed: str) -> Iterator[None]:
    """Add the label of the dataset to errors.

    Args:
        cache: Shard cache of the dataset.
        failed: Message of errors of the operating system, like "the index of 'id' cannot be built or cached".
    """
    try:
        yield
    except StreamingError as error:
        raise error.with_context(cache.label, stream=cache.stream) from error.__cause__
    except OSError as error:
        raise StorageError(
            f"{cache.label}: {failed}: {error}", stream=cache.stream, path=file_named_by(error)
        ) from error


@contextmanager
def scan_progress(
    callback: ProgressCallback | None, num_samples: int, what: str, warning: str = ""
) -> Iterator[ProgressCallback]:
    """Return the callback that reports scan progress.

    Args:
        callback: Callback of the caller; None to show progress as other waits do.
        num_samples: Number of samples.
        what: Description of the work.
        warning: Logged first if there are many samples; empty for none.
    """
    if callback is not None:
        yield callback
        return
    if warning and num_samples > SAMPLES_AT_ONCE:
        _log.warning("%s", warning)
    with progress(num_samples, "samples", what) as report:
        yield report


@dataclass(frozen=True, kw_only=True)
class ShardScan:
    """One scan over a dataset.

    Args:
        index: Index of the dataset.
        cache: Shard cache of the dataset.
        quota: Quota that fetched bytes count against; None for no limit.
        num_threads: Shards that are scanned at the same time; by default as many as there are processors, up to 8.
        most_bytes: Most bytes of several shards whose result is kept together, and lost if the process is killed.
    """

    index: DatasetIndex
    cache: ShardCache
    quota: CacheQuota | None
    num_threads: int = field(default_factory=lambda: min(_MOST_THREADS, os.cpu_count() or 1))
    most_bytes: int = _BYTES_AT_ONCE
    stopped: Event = field(default_factory=Event)

    def outcomes(self, look: Callable[[ShardGroup], Found]) -> Iterator[tuple[ShardGroup, Found]]:
        """Yield each group of shards with the result of ``look``, which is called in threads, as they finish.

        Raises:
            StreamingError: Raised by ``look``; raised here after all threads have ended.
        """
        most_bytes = min(self.most_bytes, _BYTES_AT_ONCE // self.num_threads)
        groups = shard_groups(self.index.samples_per_shard(), self.index.shards.data_bytes(), most_bytes)
        waiting, threads = 0, list[Thread]()
        # Unlike the locks of concurrent.futures, these queues cannot be left locked by Ctrl-C.
        todo: SimpleQueue[ShardGroup | None] = SimpleQueue()
        done: SimpleQueue[_Outcome] = SimpleQueue()
        try:
            for _ in range(self.num_threads):
                thread = Thread(target=self._work_off, args=(todo, done, look), name="scanning", daemon=True)
                thread.start()
                threads.append(thread)
            for group in islice(groups, 2 * max(_MOST_THREADS, self.num_threads)):
                todo.put(group)
                waiting += 1
            while waiting:
                group, outcome = done.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                waiting -= 1
                for another in islice(groups, 1):
                    todo.put(another)
                    waiting += 1
                yield group, outcome
        finally:
            self.stopped.set()
            for _ in threads:
                todo.put(None)
            for thread in threads:
                thread.join()

    def columns(self, shards: Sequence[int], names: Sequence[str]) -> dict[str, ColumnValues]:
        """Read columns of some shards, concatenated."""
        if not names:
            return {}
        read = [
            self.look(shard, lambda info, directory: read_columns(info, directory, names), names) for shard in shards
        ]
        return {name: joined([columns[name] for columns in read]) for name in names}

    def look(self, shard: int, look: Callable[[ShardInfo, Path], _Seen], columns: Sequence[str] | None = None) -> _Seen:
        """Return the result of ``look`` for one shard, which is fetched again if it is damaged or has vanished.

        Args:
            shard: Number of the shard.
            look: Called with the shard's entry in the index, and the directory of its raw files.
            columns: The columns that ``look`` reads; None for all.
        """
        info = narrowed(self.index.shards[shard], columns)
        for attempts_left in (1, 0):
            self.check_stopped()
            with self.cache.hold(info, self.quota) as directory:
                try:
                    return look(info, directory)
                except (ShardCorruptError, ObjectNotFoundError) as error:
                    damage = error
            if not attempts_left or not self.cache.discard(info):
                raise damage
        raise AssertionError("the last attempt returns or raises")

    def check_stopped(self) -> None:
        """Raise CancelledError in this thread if the scan was stopped."""
        if self.stopped.is_set():  # by Ctrl-C, or by an error of another shard
            raise CancelledError

    def _work_off(
        self, todo: SimpleQueue[ShardGroup | None], done: SimpleQueue[_Outcome], look: Callable[[ShardGroup], Found]
    ) -> None:
        """Process groups from the queue, in a thread."""
        while (group := todo.get()) is not None and not self.stopped.is_set():
            done.put((group, _outcome_of(look, group)))


def _outcome_of(look: Callable[[ShardGroup], Found], group: ShardGroup) -> Found | BaseException:
    try:
        return look(group)
    except BaseException as error:  # noqa: BLE001  raised again by outcomes
        return error


def shard_groups(sizes: NDArray[np.int64], data_bytes: NDArray[np.int64], most_bytes: int) -> Iterator[ShardGroup]:
    """Yield the shards of a dataset in groups of limited size.

    Args:
        sizes: Samples of each shard.
        data_bytes: Bytes of each shard.
        most_bytes: Most bytes of a group of several shards.
    """
    begin = first = samples = held = 0
    for shard, (size, bytes_) in enumerate(zip(sizes.tolist(), data_bytes.tolist(), strict=True)):
        is_full = samples + size > SAMPLES_AT_ONCE or held + bytes_ > most_bytes
        if shard > begin and (is_full or shard - begin == SHARDS_AT_ONCE):
            yield ShardGroup(range(begin, shard), first, samples)
            begin, first, samples, held = shard, first + samples, 0, 0
        samples, held = samples + size, held + bytes_
    if len(sizes):
        yield ShardGroup(range(begin, len(sizes)), first, samples)


# --- cached results ---


def no_progress(*_: object) -> AbstractContextManager[None]:
    """Return a :data:`ProgressFactory` context without a callback."""
    return nullcontext()


def load_or_create(
    path: Path,
    directory: CacheDirectory,
    work: str,
    *,
    find: Callable[[], _Whole | None],
    create: Callable[[Path], _Whole | None],
    create_uncached: Callable[[], _Whole],
) -> _Whole:
    """Return a result that is created once per node, from its file or created now while other processes wait.

    Args:
        path: Its file, from ``selection_path``.
        directory: The cache directory.
        work: Description of the work, for the processes that wait for it.
        find: Returns the content of the file, mapped; None if it is missing or damaged.
        create: Writes the file, with partial results in the given directory. If the file cannot be replaced, returns
            the result instead.
        create_uncached: Creates the result if the directory is not writable.

    Raises:
        StorageError: The file was written but cannot be read, or the disk is full.
    """
    result = find()
    if result is not None:
        return result
    with ExitStack() as stack:
        if not lock_for_writing(path, directory, stack, work):
            return create_uncached()
        result = find()
        if result is not None:
            return result
        parts = path.with_suffix(".parts")
        try:
            make_directories(parts, directory.path)
            with suppress(PermissionError):  # left by a process of another user
                remove_partials(path)
            uncached = create(parts)
        except StreamingError:
            raise
        except OSError as error:  # the disk is full
            raise unwritable(directory.path, error) from error
        if uncached is not None:
            return uncached
        shutil.rmtree(parts, ignore_errors=True)
        result = find()
    if result is None:
        raise StorageError(
            f"{path} was written but cannot be read", hint="check whether the disk is full or failing", path=str(path)
        )
    return result


def lock_for_writing(path: Path, directory: CacheDirectory, stack: ExitStack, work: str) -> bool:
    """Wait for the lock under which one process creates a file.

    Args:
        path: The file, from ``selection_path``.
        directory: The cache directory.
        stack: Releases the lock when it is closed.
        work: Description of the work, for the processes that wait for it.

    Returns:
        True if the lock is held; False if the directory is not writable.

    Raises:
        DiskFullError: There is no space for the lock file.
    """
    root = directory.path
    try:
        directory.prepare()
        make_directories(path.parent, root)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(path.parent)
        # Another process may hold the lock for hours; it is released when that process ends.
        stack.enter_context(selection_lock(path, root, work))
    except DiskFullError:
        raise
    except (OSError, StorageError):
        return False
    return True


def part_path(parts: Path, group: ShardGroup) -> Path:
    """Return the file of a group's result."""
    return parts / f"{group.shards.start}-{group.shards.stop}.npy"


def write_part(path: Path, content: NDArray[np.uint8], root: Path) -> None:
    """Write the result of a group, unless another process did so.

    Args:
        path: The file.
        content: Bytes of the result.
        root: The cache directory.
    """
    # The file is another user's, or a process without locks has finished and removed the directory.
    with suppress(PermissionError, FileNotFoundError):
        write_checked(path, content, root)


@contextmanager
def array_file(
    path: Path, dtype: type[np.generic], shape: tuple[int, ...], root: Path
) -> Iterator[np.memmap[Any, Any]]:
    """Yield a mapped array to fill; its file appears at the end of the context.

    Args:
        path: The file.
        dtype: Data type of the array.
        shape: Shape of the array.
        root: The cache directory.
    """
    with appears_whole(path) as partial:
        mapped = np.lib.format.open_memmap(partial, "w+", dtype, shape)
        if hasattr(os, "posix_fallocate"):  # otherwise writing to the map on a full disk would kill the process
            with partial.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        yield mapped
        with partial.open("rb") as file:
            adopt_file(file.fileno(), root)


def write_checked(path: Path, content: NDArray[np.uint8], root: Path) -> None:
    """Write bytes with their checksum, for :func:`read_checked`."""
    with appears_whole(path) as partial, partial.open("wb") as file:
        np.save(file, np.concatenate([content, _checksum(content)]))
        adopt_file(file.fileno(), root)


def read_checked(path: Path, num_bytes: int) -> NDArray[np.uint8] | None:
    """Map the bytes of a file; return None unless their number and checksum are right."""
    array = map_bits(path)
    if array is None or array.dtype != np.uint8 or array.shape != (num_bytes + _CHECKSUM_BYTES,):
        return None
    content: NDArray[np.uint8] = array[:-_CHECKSUM_BYTES]
    return content if (array[-_CHECKSUM_BYTES:] == _checksum(content)).all() else None


def _checksum(content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.array([crc32(content.data)], "<u8").view(np.uint8)
