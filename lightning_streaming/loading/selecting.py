"""Evaluate what is asked of a stream, once per node: over the named columns only, in threads, resumable after a kill.

The outcome lies beside the stream's cached index, under a name made of data and conditions; while it is made, so do
the bits of some shards each, so that nobody evaluates them twice. :mod:`~lightning_streaming.cache.selection_files` has
the names.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.selection_files import made_by_one, map_bits, selection_path
from lightning_streaming.cache.shared_files import adopt_file, make_directories, unwritable
from lightning_streaming.errors import (
    ConfigError,
    DiskFullError,
    ObjectNotFoundError,
    ShardCorruptError,
    StorageError,
    StreamingError,
)
from lightning_streaming.files import appears_whole, remove_partials
from lightning_streaming.formats.columns import ColumnValues, check_columns_tell, encodings_of, joined, read_columns
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.loading.conditions import Condition, FunctionCondition, PartCondition, SqlCondition
from lightning_streaming.loading.selection import Select, Selection, SelectionRequest, as_numbers, packed_bytes
from lightning_streaming.storage import Location
from lightning_streaming.storage.sinks import system_errors

_SAMPLES_AT_ONCE = 1 << 20
_SHARDS_AT_ONCE = 32
"""Shards that are evaluated, and kept, together."""
_BYTES_AT_ONCE = 1 << 28
"""Of the shards of all threads, unless one has more: a column of long texts may be nearly all of them."""
_MOST_THREADS = 8
_CHECKSUM_BYTES = 8

_logger = logging.getLogger(__name__)

Progress = Callable[[int, int], object]
"""Is told how many samples have been looked at, and of how many."""


def select_samples(
    asked: SelectionRequest,
    index: DatasetIndex,
    cache: ShardCache,
    room: CacheQuota | None = None,
    progress: Progress | None = None,
    key: str | None = None,
) -> Selection:
    """The selected samples of one stream; evaluated now, unless a process of this node did before.

    Args:
        asked: What is wanted.
        index: The stream's index.
        cache: Where its files are.
        room: Where what is fetched is counted; None for no limit.
        progress: Is told how far it is; None to log it.
        key: That of the outcome, if it is known from another process: what is kept under it is taken as it is.

    Raises:
        ConfigError: A condition cannot be evaluated on this data, or is another than it was where ``key`` comes from;
            says which and why.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched.
    """
    try:
        found = None if key is None else _kept(cache, key, index.num_samples)
        if found is not None:
            return found
        work = _Work(
            asked=asked,
            selected=None if asked.select is None else _read_select(asked.select),
            index=index,
            sizes=index.samples_per_shard(),
            cache=cache,
            room=room,
            progress=progress,
        )
        if key not in (None, work.key):
            raise ConfigError(
                f"{asked.in_words()} is another selection in this process than in the one that has started it; a "
                "function, what it names, a file of select= or the data has changed meanwhile"
            )
        return work.done()
    except StreamingError as error:
        if str(error).startswith(cache.label):
            raise
        raise type(error)(f"{cache.label}: {error}") from error
    except OSError as error:
        raise StorageError(f"{cache.label}: {asked.in_words()} cannot be evaluated or kept: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One selection to be made."""

    asked: SelectionRequest
    selected: NDArray[np.bool_] | NDArray[np.int64] | None
    index: DatasetIndex
    sizes: NDArray[np.int64]
    cache: ShardCache
    room: CacheQuota | None
    progress: Progress | None
    stopped: Event = field(default_factory=Event)

    @property
    def num_samples(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def key(self) -> str:
        """A name of the outcome."""
        return self.asked.key(self.index.data_digest, self.selected)

    @cached_property
    def conditions(self) -> Sequence[Condition]:
        """What each sample must meet, checked. Who finds what was made before does without it, and without DuckDB."""
        conditions: list[Condition] = []
        if isinstance(self.asked.where, str):
            conditions.append(SqlCondition(self.asked.where))
        elif self.asked.where is not None:
            conditions.append(FunctionCondition(self.asked.where))
        if self.asked.part is not None:
            conditions.append(PartCondition(self.asked.part, self.asked.split_by, self.asked.split_seed))
        for condition in conditions:
            _check_columns(condition, self.index, self.asked)
        return conditions

    @cached_property
    def chosen(self) -> NDArray[np.bool_] | None:
        """A truth value for each sample, where some were chosen by number."""
        return None if self.selected is None else _truth_values(self.selected, self.num_samples)

    def done(self) -> Selection:
        """What was made before; else make it, and keep it if the cache may be written to."""
        path = selection_path(self.cache.directory.path, self.key)
        found = self._kept()
        if found is not None:
            return found
        _ = self.conditions, self.chosen  # to refuse what cannot be, before anything is made
        with ExitStack() as stack:
            try:
                self._begin(path, stack)
            except DiskFullError:
                raise
            except (OSError, StorageError):
                return self._unkept(path, self._evaluate(None))
            found = self._kept()
            if found is not None:
                return found
            try:
                return self._made(path)
            except StreamingError:
                raise
            except OSError as error:  # the disk is full
                raise unwritable(self.cache.directory.path, error) from error

    def _begin(self, path: Path, stack: ExitStack) -> None:
        root = self.cache.directory.path
        self.cache.directory.prepare()
        make_directories(path.parent, root)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(path.parent)
        # Whoever holds it may take hours; it is given back when they die.
        stack.enter_context(made_by_one(path, root))

    def _unkept(self, path: Path, bits: NDArray[np.uint8]) -> Selection:
        _logger.warning("%s is not writable: each process evaluates the selection anew", path.parent)
        return Selection(bits, self.num_samples, self.key)

    def _kept(self) -> Selection | None:
        return _kept(self.cache, self.key, self.num_samples)

    def _made(self, path: Path) -> Selection:
        parts = path.with_suffix(".parts")
        make_directories(parts, self.cache.directory.path)
        with suppress(PermissionError):  # another user's, who died
            remove_partials(path)
        bits = self._evaluate(parts)
        try:
            self._write(path, bits)
        except PermissionError:  # in place of another user's, which is damaged
            return self._unkept(path, bits)
        shutil.rmtree(parts, ignore_errors=True)
        kept = self._kept()
        if kept is None:
            raise StorageError(f"{path} was written just now and cannot be read; is the disk full, or failing?")
        return kept

    def _write(self, path: Path, bits: NDArray[np.uint8]) -> None:
        with appears_whole(path) as partial, partial.open("wb") as file:
            np.save(file, np.concatenate([bits, _checksum(bits)]))
            adopt_file(file.fileno(), self.cache.directory.path)

    def _evaluate(self, parts: Path | None) -> NDArray[np.uint8]:
        bits = np.zeros(packed_bytes(self.num_samples), np.uint8)
        _ = self.chosen  # before there are threads
        self.cache.prepare()
        progress, done = self.progress or self._log_progress(), 0
        for group, wanted in self._wanted(parts):
            _put(bits, group.first, wanted)
            done += len(wanted)
            progress(done, self.num_samples)
        return bits

    def _log_progress(self) -> Progress:
        label, told = self.cache.label, 0
        if self.num_samples > _SAMPLES_AT_ONCE and any(condition.columns for condition in self.conditions):
            _logger.warning(
                "evaluating %s over %d samples of %s; `lightning-streaming select` does it ahead",
                self.asked.in_words(),
                self.num_samples,
                label,
            )

        def tell(done: int, total: int) -> None:
            nonlocal told
            if total > _SAMPLES_AT_ONCE and 10 * done // total > told:
                told = 10 * done // total
                _logger.info("%s: %d %% of %d samples have been looked at for the selection", label, 10 * told, total)

        return tell

    def _wanted(self, parts: Path | None) -> Iterator[tuple[_ShardGroup, NDArray[np.bool_]]]:
        """The truth values of some samples each, as they come."""
        num_threads = min(_MOST_THREADS, os.cpu_count() or 1)
        groups = _groups(self.sizes, self.index.shards.data_bytes(), _BYTES_AT_ONCE // num_threads)
        waiting, threads = 0, list[Thread]()
        # Ctrl-C cannot leave these queues locked, as it can what concurrent.futures waits with.
        todo: SimpleQueue[_ShardGroup | None] = SimpleQueue()
        done: SimpleQueue[_Outcome] = SimpleQueue()
        try:
            for _ in range(num_threads):
                thread = Thread(target=self._work_off, args=(todo, done, parts), name="selecting", daemon=True)
                thread.start()
                threads.append(thread)
            for group in islice(groups, 2 * _MOST_THREADS):
                todo.put(group)
                waiting += 1
            while waiting:
                group, wanted = done.get()
                if isinstance(wanted, BaseException):
                    raise wanted
                waiting -= 1
                for another in islice(groups, 1):
                    todo.put(another)
                    waiting += 1
                yield group, wanted
        finally:
            self.stopped.set()
            for _ in threads:
                todo.put(None)
            for thread in threads:
                thread.join()

    def _work_off(self, todo: SimpleQueue[_ShardGroup | None], done: SimpleQueue[_Outcome], parts: Path | None) -> None:
        """What each thread does."""
        while (group := todo.get()) is not None and not self.stopped.is_set():
            done.put((group, self._outcome(group, parts)))

    def _outcome(self, group: _ShardGroup, parts: Path | None) -> NDArray[np.bool_] | BaseException:
        try:
            return self._of_group(group, parts)
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            return error

    def _of_group(self, group: _ShardGroup, parts: Path | None) -> NDArray[np.bool_]:
        path = None if parts is None else parts / f"{group.shards.start}-{group.shards.stop}.npy"
        if path is not None:
            kept = _checked(map_bits(path), -(-group.samples // 8))
            if kept is not None:
                return np.unpackbits(kept, count=group.samples, bitorder="little").view(np.bool_)
        wanted = np.ones(group.samples, np.bool_)
        if self.chosen is not None:
            wanted &= self.chosen[group.first : group.first + group.samples]
        self._narrow(group, wanted)
        if path is not None:
            # Of another user; or who has no lock made the whole, and removed them.
            with suppress(PermissionError, FileNotFoundError):
                self._write(path, np.packbits(wanted, bitorder="little"))
        return wanted

    def _narrow(self, group: _ShardGroup, wanted: NDArray[np.bool_]) -> None:
        """Clear the truth values of samples that do not meet all conditions; shards without one set are not read."""
        sizes = self.sizes[group.shards.start : group.shards.stop]
        stops = np.cumsum(sizes)
        spans = enumerate(zip((stops - sizes).tolist(), stops.tolist(), strict=True))
        read = [shard for shard, (start, stop) in spans if wanted[start:stop].any()]
        if not read or not self.conditions:
            return
        places = np.concatenate([np.arange(stops[shard] - sizes[shard], stops[shard]) for shard in read])
        columns = self._columns([group.shards[shard] for shard in read])
        for condition in self.conditions:
            wanted[places] &= condition.met(columns, group.first + places)

    def _columns(self, shards: Sequence[int]) -> dict[str, ColumnValues]:
        """What the conditions look at, of some shards together."""
        names = list(dict.fromkeys(name for condition in self.conditions for name in condition.columns))
        if not names:
            return {}
        read = [self._read(shard, names) for shard in shards]
        return {name: joined([columns[name] for columns in read]) for name in names}

    def _read(self, shard: int, names: Sequence[str]) -> dict[str, ColumnValues]:
        """Columns of one shard, which is fetched again if it is damaged on this node, or has vanished."""
        info = self.index.shards[shard]
        for attempts_left in (1, 0):
            if self.stopped.is_set():  # by Ctrl-C, or by what is wrong with another shard
                raise CancelledError
            with self.cache.hold(info, self.room) as directory:
                try:
                    return read_columns(info, directory, names)
                except (ShardCorruptError, ObjectNotFoundError) as error:
                    damage = error
            if not attempts_left or not self.cache.discard(info):
                raise damage
        raise AssertionError("the last attempt returns or raises")


def _kept(cache: ShardCache, key: str, num_samples: int) -> Selection | None:
    """What was made before, and is whole."""
    path = selection_path(cache.directory.path, key)
    bits = _checked(map_bits(path), packed_bytes(num_samples))
    return None if bits is None else Selection(bits, num_samples, key, kept_at=path)


def _checked(found: NDArray[Any] | None, num_bytes: int) -> NDArray[np.uint8] | None:
    """The bits that a file holds before their checksum, if they are so many and fit it."""
    if found is None or found.dtype != np.uint8 or found.shape != (num_bytes + _CHECKSUM_BYTES,):
        return None
    bits: NDArray[np.uint8] = found[:-_CHECKSUM_BYTES]
    return bits if (found[-_CHECKSUM_BYTES:] == _checksum(bits)).all() else None


def _checksum(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.array([crc32(bits.data)], "<u8").view(np.uint8)


class _ShardGroup(NamedTuple):
    """Shards that are evaluated together."""

    shards: range
    first: int
    """Number of their first sample."""
    samples: int


_Outcome = tuple[_ShardGroup, NDArray[np.bool_] | BaseException]
"""The truth values of a group's samples; or what went wrong."""


def _groups(sizes: NDArray[np.int64], data_bytes: NDArray[np.int64], most_bytes: int) -> Iterator[_ShardGroup]:
    begin = first = samples = held = 0
    for shard, (size, bytes_) in enumerate(zip(sizes.tolist(), data_bytes.tolist(), strict=True)):
        is_full = samples + size > _SAMPLES_AT_ONCE or held + bytes_ > most_bytes
        if shard > begin and (is_full or shard - begin == _SHARDS_AT_ONCE):
            yield _ShardGroup(range(begin, shard), first, samples)
            begin, first, samples, held = shard, first + samples, 0, 0
        samples, held = samples + size, held + bytes_
    if len(sizes):
        yield _ShardGroup(range(begin, len(sizes)), first, samples)


def _put(bits: NDArray[np.uint8], first: int, wanted: NDArray[np.bool_]) -> None:
    """Set the bits of some samples, beginning with number ``first``."""
    aligned = np.concatenate([np.zeros(first % 8, np.bool_), wanted])
    packed = np.packbits(aligned, bitorder="little")
    bits[first // 8 : first // 8 + len(packed)] |= packed


def _check_columns(condition: Condition, index: DatasetIndex, asked: SelectionRequest) -> None:
    for _, info in index.shards.examples():
        check_columns_tell(info, condition.columns, asked.in_words())
        if isinstance(condition, PartCondition):
            _check_equal_or_not(encodings_of(info), condition)


def _check_equal_or_not(known: Mapping[str, str], condition: PartCondition) -> None:
    for name in condition.columns:
        if "float" in known[name] or known[name] == "str_decimal":
            raise ConfigError(
                f"split_by={name!r} is a column of {known[name]}; parts are drawn by whole numbers, text or bytes, "
                "which are equal or not"
            )


def _read_select(select: Select) -> NDArray[np.bool_] | NDArray[np.int64]:
    """The numbers, or truth values, that ``select`` is or points at."""
    if not isinstance(select, str):
        return as_numbers(select)
    try:
        values = _mapped(Location(select))
    except (ValueError, EOFError) as error:
        raise ConfigError(f"select={select!r} must be a .npy file of numbers or truth values ({error})") from None
    return as_numbers(values)


def _mapped(location: Location) -> NDArray[Any]:
    """An array; a file of this machine is not read as a whole."""
    path = location.path
    if path is not None and path.is_file():
        with system_errors(f"read {path}"):
            found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    else:
        found = np.load(io.BytesIO(location.read()), allow_pickle=False)
    return found


def _truth_values(selected: NDArray[np.bool_] | NDArray[np.int64], num_samples: int) -> NDArray[np.bool_]:
    if selected.dtype == np.bool_:
        if len(selected) != num_samples:
            raise ConfigError(f"select has {len(selected)} truth values, but the stream has {num_samples} samples")
        return selected.astype(np.bool_, copy=False)
    if selected.size and not (selected.min() >= 0 and selected.max() < num_samples):
        raise ConfigError(
            f"select names sample {int(selected.max() if selected.max() >= num_samples else selected.min())}, but the "
            f"stream has samples 0 to {num_samples - 1}"
        )
    wanted = np.zeros(num_samples, np.bool_)
    wanted[selected] = True
    return wanted
