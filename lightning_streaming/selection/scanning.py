"""Columns of all shards of a dataset, looked at once: several shards at a time, in threads.

Each group of shards has a file of its own while a whole is being made, so that who is killed has done nothing in vain.
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
"""Shards that are looked at, and kept, together."""
_BYTES_AT_ONCE = 1 << 28
"""Of the shards of all threads, unless one has more: a column of long texts may be nearly all of them."""
_MOST_THREADS = 8
_CHECKSUM_BYTES = 8


class ShardGroup(NamedTuple):
    """Shards that are looked at together."""

    shards: range
    first: int
    """Number of their first sample."""
    samples: int


ProgressFactory = Callable[[str, str, int], AbstractContextManager[ProgressCallback | None]]
"""Function that opens the progress display of an operation, given the dataset's name for errors, the operation, and the
number of samples; it yields the callback for scanned samples, or None for the default display."""
Found = NDArray[Any]
"""What was found of the samples of a group."""
_Seen = TypeVar("_Seen")
_Whole = TypeVar("_Whole")
_Outcome = tuple[ShardGroup, Found | BaseException]
"""Of a group; or what went wrong."""


@contextmanager
def errors_name(cache: ShardCache, failed: str) -> Iterator[None]:
    """Let errors say whose shards were looked at.

    Args:
        cache: Where these are.
        failed: What to say where the system refuses something, like "the index of 'id' cannot be made or kept".
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
    callback: ProgressCallback | None, num_samples: int, label: str, warning: str = ""
) -> Iterator[ProgressCallback]:
    """Yield the callback of a scan; without one, show a progress display.

    Args:
        callback: Callback of the caller, if there is one.
        num_samples: Number of samples to scan.
        label: The operation.
        warning: Warning to log before a long scan; empty for none.
    """
    if callback is not None:
        yield callback
        return
    if warning and num_samples > SAMPLES_AT_ONCE:
        _log.warning("%s", warning)
    with progress(num_samples, "samples", label) as shown:
        yield shown


@dataclass(frozen=True, kw_only=True)
class ShardScan:
    """Goes through a dataset once.

    Args:
        index: The dataset's.
        cache: Where its files are.
        room: Where what is fetched is counted; None for no limit.
        num_threads: How many shards are looked at together; by default as many as there are processors, up to 8.
    """

    index: DatasetIndex
    cache: ShardCache
    room: CacheQuota | None
    num_threads: int = field(default_factory=lambda: min(_MOST_THREADS, os.cpu_count() or 1))
    stopped: Event = field(default_factory=Event)

    def outcomes(self, look: Callable[[ShardGroup], Found]) -> Iterator[tuple[ShardGroup, Found]]:
        """What ``look``, which is called in threads, finds in each group of shards, as it comes.

        Raises:
            StreamingError: What it raised, once all threads have ended.
        """
        groups = shard_groups(
            self.index.samples_per_shard(), self.index.shards.data_bytes(), _BYTES_AT_ONCE // self.num_threads
        )
        waiting, threads = 0, list[Thread]()
        # Ctrl-C cannot leave these queues locked, as it can what concurrent.futures waits with.
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
                group, found = done.get()
                if isinstance(found, BaseException):
                    raise found
                waiting -= 1
                for another in islice(groups, 1):
                    todo.put(another)
                    waiting += 1
                yield group, found
        finally:
            self.stopped.set()
            for _ in threads:
                todo.put(None)
            for thread in threads:
                thread.join()

    def columns(self, shards: Sequence[int], names: Sequence[str]) -> dict[str, ColumnValues]:
        """Some columns of some shards together."""
        if not names:
            return {}
        read = [
            self.look(shard, lambda info, directory: read_columns(info, directory, names), names) for shard in shards
        ]
        return {name: joined([columns[name] for columns in read]) for name in names}

    def look(self, shard: int, look: Callable[[ShardInfo, Path], _Seen], columns: Sequence[str] | None = None) -> _Seen:
        """What is seen in one shard, which is fetched again if it is damaged on this node, or has vanished.

        Args:
            shard: Which one.
            look: Gets the shard, as its index describes it, and the directory of its raw files.
            columns: The columns that it looks at; None for all.
        """
        info = narrowed(self.index.shards[shard], columns)
        for attempts_left in (1, 0):
            self.go_on()
            with self.cache.hold(info, self.room) as directory:
                try:
                    return look(info, directory)
                except (ShardCorruptError, ObjectNotFoundError) as error:
                    damage = error
            if not attempts_left or not self.cache.discard(info):
                raise damage
        raise AssertionError("the last attempt returns or raises")

    def go_on(self) -> None:
        """End the thread that asks, where nobody wants any more what it looks for."""
        if self.stopped.is_set():  # by Ctrl-C, or by what is wrong with another shard
            raise CancelledError

    def _work_off(
        self, todo: SimpleQueue[ShardGroup | None], done: SimpleQueue[_Outcome], look: Callable[[ShardGroup], Found]
    ) -> None:
        """What each thread does."""
        while (group := todo.get()) is not None and not self.stopped.is_set():
            done.put((group, _tried(look, group)))


def _tried(look: Callable[[ShardGroup], Found], group: ShardGroup) -> Found | BaseException:
    try:
        return look(group)
    except BaseException as error:  # noqa: BLE001  raised again where it is waited for
        return error


def shard_groups(sizes: NDArray[np.int64], data_bytes: NDArray[np.int64], most_bytes: int) -> Iterator[ShardGroup]:
    """The shards of a dataset in groups that are not too large.

    Args:
        sizes: Samples of each shard.
        data_bytes: Bytes of each.
        most_bytes: Of a group of several.
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


# --- what was found, kept ---


def no_progress(*_: object) -> AbstractContextManager[None]:
    """Return a context without a callback, as a :data:`ProgressFactory`."""
    return nullcontext()


def load_or_create(
    path: Path,
    directory: CacheDirectory,
    work: str,
    *,
    find: Callable[[], _Whole | None],
    make: Callable[[Path], _Whole | None],
    make_unkept: Callable[[], _Whole],
) -> _Whole:
    """Load a cached result, or create it in one process per node while others wait.

    Args:
        path: Its file, as ``selection_path`` names it.
        directory: The cache directory.
        work: The operation, for messages of processes that wait.
        find: Function that maps the contents of the file; it returns None if there is none, or it is damaged.
        make: Function that writes the file, from parts in a directory that is its argument. If the file may not be
            replaced, it returns the result instead.
        make_unkept: Function that creates the result where nothing may be written.

    Raises:
        StorageError: It was written, and cannot be read; or the disk is full.
    """
    found = find()
    if found is not None:
        return found
    with ExitStack() as stack:
        if not may_be_kept(path, directory, stack, work):
            return make_unkept()
        found = find()
        if found is not None:
            return found
        parts = path.with_suffix(".parts")
        try:
            make_directories(parts, directory.path)
            with suppress(PermissionError):  # another user's, who died
                remove_partials(path)
            unkept = make(parts)
        except StreamingError:
            raise
        except OSError as error:  # the disk is full
            raise unwritable(directory.path, error) from error
        if unkept is not None:
            return unkept
        shutil.rmtree(parts, ignore_errors=True)
        found = find()
    if found is None:
        raise StorageError(
            f"{path} was written just now and cannot be read", hint="is the disk full, or failing?", path=str(path)
        )
    return found


def may_be_kept(path: Path, directory: CacheDirectory, stack: ExitStack, work: str) -> bool:
    """Become the one process that makes a file, however long others take before.

    Args:
        path: The file, as ``selection_path`` names it.
        directory: The cache directory.
        stack: At its end others may make it.
        work: What this process then does, as others are told who wait for it.

    Returns:
        Whether it can be kept; False where nothing may be written.

    Raises:
        DiskFullError: There is no room even for the lock.
    """
    root = directory.path
    try:
        directory.prepare()
        make_directories(path.parent, root)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(path.parent)
        # Whoever holds it may take hours; it is given back when they die.
        stack.enter_context(selection_lock(path, root, work))
    except DiskFullError:
        raise
    except (OSError, StorageError):
        return False
    return True


def part_path(parts: Path, group: ShardGroup) -> Path:
    """Where what was found of a group is kept."""
    return parts / f"{group.shards.start}-{group.shards.stop}.npy"


def write_part(path: Path, found: NDArray[np.uint8], root: Path) -> None:
    """Keep what was found of a group, unless somebody else does so.

    Args:
        path: Where.
        found: Its bytes.
        root: The cache directory.
    """
    # Of another user; or who has no lock made the whole, and removed them.
    with suppress(PermissionError, FileNotFoundError):
        write_checked(path, found, root)


@contextmanager
def array_file(
    path: Path, dtype: type[np.generic], shape: tuple[int, ...], root: Path
) -> Iterator[np.memmap[Any, Any]]:
    """A new file of an array, mapped to be filled; it is there once it is filled.

    Args:
        path: The file.
        dtype: Of the array.
        shape: Of the array.
        root: The cache directory.
    """
    with appears_whole(path) as partial:
        mapped = np.lib.format.open_memmap(partial, "w+", dtype, shape)
        if hasattr(os, "posix_fallocate"):  # else a full disk would end the process where it writes to the map
            with partial.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        yield mapped
        with partial.open("rb") as file:
            adopt_file(file.fileno(), root)


def write_checked(path: Path, content: NDArray[np.uint8], root: Path) -> None:
    """Write bytes with their checksum, as :func:`read_checked` wants them."""
    with appears_whole(path) as partial, partial.open("wb") as file:
        np.save(file, np.concatenate([content, _checksum(content)]))
        adopt_file(file.fileno(), root)


def read_checked(path: Path, num_bytes: int) -> NDArray[np.uint8] | None:
    """The bytes that a file holds, mapped, if they are so many and fit their checksum."""
    found = map_bits(path)
    if found is None or found.dtype != np.uint8 or found.shape != (num_bytes + _CHECKSUM_BYTES,):
        return None
    content: NDArray[np.uint8] = found[:-_CHECKSUM_BYTES]
    return content if (found[-_CHECKSUM_BYTES:] == _checksum(content)).all() else None


def _checksum(content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.array([crc32(content.data)], "<u8").view(np.uint8)
