"""Index of the ids of a dataset: built once per node, cached next to the dataset's index, and mapped.

Each id has a key of 64 bits, evenly distributed: whole numbers are mixed by a bijection, text and bytes are hashed, and
the other 64 bits of the hash are stored too. The file holds three arrays: the sorted keys, the other bits of the hashes
in the same order, and the numbers of the samples. A negative number has the same key as a large one; the highest bit of
the sample's number distinguishes them.

The index is built in two passes: rows of each group of shards are written to a file, then distributed into buckets by
key, and each bucket is sorted. So memory is bounded by a bucket.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.selection_files import map_bits, selection_path
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.formats.columns import WHOLE_NUMBERS, ColumnValues, encodings_of, listed
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.selection.conditions import splitmix
from lightning_streaming.selection.scanning import (
    ShardGroup,
    ShardScan,
    add_error_context,
    array_file,
    load_or_create,
    part_path,
    read_checked,
    scan_progress,
    write_part,
)
from lightning_streaming.waits import ProgressCallback

_VERSION = 2
"""Version of the file's content; part of its name."""
_ROWS_PER_BUCKET = 1 << 21
_SIGN_BIT = np.uint64(63)
"""Bit of a sample's number that is set if its id is a negative number."""
_NUMBER_BITS = np.uint64(2**63 - 1)
_TEXT = ("str", "bytes")

_logger = package_logger(__name__)


class IdIndex:
    """Index that finds samples by id.

    Args:
        table: Rows of uint64: keys, ascending; the other bits of hashes, where ids are text; numbers of samples, with
            the signs of ids. Of shape (2 or 3, samples + 1), where the first value of the last column is a checksum.
            May be mapped from a file.
        cached_at: The mapped file; None for a table in memory.
    """

    def __init__(self, table: NDArray[np.uint64], cached_at: Path | None = None) -> None:
        plain = np.asarray(table)  # indexing a plain array is faster than indexing a memmap
        self._table, self._checksum = plain[:, :-1], plain[0, -1]
        self.cached_at = cached_at

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._table.shape[1])

    def is_whole(self) -> bool:
        """Check the table against its checksum, which is done only after a lookup gave a wrong result."""
        return bool(self._checksum == _checksum(self._table))

    def place(self, value: Any) -> int:
        """Return the number of the sample with this id; -1 if there is none."""
        # The same as places, without numpy's overhead for a single value.
        if len(self._table) == 2:
            key, other = _mixed_number(_in_64_bits(value)), int(value < 0)
        else:
            digest = _hash(value)
            key, other = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        return self._place_after(int(self._table[0].searchsorted(np.uint64(key))), key, other)

    def places(self, values: ColumnValues) -> NDArray[np.int64]:
        """Return the numbers of the samples with these ids, -1 where there is none; of shape (ids,)."""
        keys, others = _keys(values, len(self._table) == 3)
        rows = np.searchsorted(self._table[0], keys)
        here = np.flatnonzero(rows < len(self))
        here = here[self._table[0, rows[here]] == keys[here]]
        is_match = self._others(rows[here]) == others[here]
        places = np.full(len(rows), -1, np.int64)
        places[here[is_match]] = self._table[-1, rows[here[is_match]]] & _NUMBER_BITS
        for at in here[~is_match].tolist():  # equal keys of different ids: almost never
            places[at] = self._place_after(int(rows[at]) + 1, int(keys[at]), int(others[at]))
        return places

    def _place_after(self, row: int, key: int, other: int) -> int:
        """Return the number of the sample with this key, searching from ``row``."""
        while row < len(self) and self._table[0, row] == key:
            if self._others(row) == other:
                return int(self._table[-1, row] & _NUMBER_BITS)
            row += 1
        return -1

    def _others(self, rows: Any) -> Any:
        """Return what distinguishes ids of equal keys: the other bits of hashes; 1 for negative numbers."""
        return self._table[1, rows] if len(self._table) == 3 else self._table[-1, rows] >> _SIGN_BIT


def _checksum(table: NDArray[np.uint64]) -> int:
    checksum = 0
    for row in table:
        for first in range(0, len(row), _ROWS_PER_BUCKET):
            checksum = crc32(row[first : first + _ROWS_PER_BUCKET].data, checksum)
    return checksum


def _keys(values: ColumnValues, is_text: bool) -> NDArray[np.uint64]:
    """Return the keys of ids, and what distinguishes equal keys, as ``_others`` does; of shape (2, ids)."""
    if is_text:
        digests = b"".join(_hash(value) for value in values)
        return np.ascontiguousarray(np.frombuffer(digests, "<u8").reshape(-1, 2).T.astype(np.uint64))
    if isinstance(values, np.ndarray):
        numbers, is_negative = values.astype(np.int64).view(np.uint64), values < 0
    else:
        numbers = np.array([_in_64_bits(value) for value in values], np.uint64)
        is_negative = np.array([value < 0 for value in values], np.bool_)
    return np.stack([splitmix(numbers), is_negative.astype(np.uint64)])


def _mixed_number(number: int) -> int:
    """Return ``splitmix`` of a single number of 64 bits."""
    mixed = (number + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def _hash(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()


def _in_64_bits(number: Any) -> int:
    """Return a whole number as an unsigned number of 64 bits."""
    value = int(number)
    if not -(2**63) <= value < 2**64:
        raise ConfigError(
            f"ids that are whole numbers must fit in 64 bits, but one is {value}",
            hint="join on text instead",
            option="key",
        )
    return value % 2**64


def check_ids(on: str, stream: tuple[str, DatasetIndex], joined: tuple[str, DatasetIndex]) -> None:
    """Check that a column of ids exists in both datasets, and can hold the same ids in both.

    Args:
        on: The column.
        stream: Label of the stream in errors, and its index.
        joined: Label of the joined dataset, and its index.

    Raises:
        ConfigError: The column is missing, or its types differ.
    """
    kinds = {label: _kind_of_ids(on, label, index) for label, index in (stream, joined)}
    if len(set(kinds.values())) > 1:
        types = " and ".join(f"{kind} in {label}" for label, kind in kinds.items())
        raise ConfigError(
            f"key={on!r} is a column of {types}, so no id of one is in the other",
            hint="write the column with the same type in both",
            option="key",
        )


def _kind_of_ids(on: str, label: str, index: DatasetIndex) -> str:
    kinds = []
    for _, info in index.shards.examples():
        known = encodings_of(info)
        if on not in known:
            raise ConfigError(
                f"{label} has no column key={on!r}", hint=f"it has {', '.join(map(repr, known))}", option="key"
            )
        kind = "whole numbers" if known[on] in WHOLE_NUMBERS else known[on]
        if kind not in ("whole numbers", *_TEXT):
            raise ConfigError(
                f"key={on!r} of {label} is {known[on]!r}", hint="ids are whole numbers, str or bytes", option="key"
            )
        kinds.append(kind)
    if len(set(kinds)) > 1:
        raise ConfigError(f"key={on!r} of {label} is of several kinds: {', '.join(dict.fromkeys(kinds))}", option="key")
    return kinds[0] if kinds else "no samples"


def index_ids(
    on: str,
    index: DatasetIndex,
    cache: ShardCache,
    quota: CacheQuota | None = None,
    progress: ProgressCallback | None = None,
) -> IdIndex:
    """Return the index of a dataset's ids, from the cache of this node or built now.

    Args:
        on: Column of the ids, checked by :func:`check_ids`.
        index: Index of the dataset.
        cache: Shard cache of the dataset.
        quota: Quota that fetched bytes count against; None for no limit.
        progress: Called with the number of samples that were read; None to show progress as other waits do.

    Raises:
        ConfigError: Two samples have the same id.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched, or the index could not be written.
    """
    with add_error_context(cache, f"the index of {on!r} cannot be built or cached"):
        return _IdIndexBuilder(on=on, index=index, cache=cache, quota=quota, progress=progress).done()


def is_id_index_cached(on: str, index: DatasetIndex, cache: ShardCache) -> bool:
    """Return whether the index of a dataset's ids is cached, without reading shards; otherwise as :func:`index_ids`."""
    builder = _IdIndexBuilder(on=on, index=index, cache=cache, quota=None, progress=None)
    return not index.num_samples or builder.cached() is not None


@dataclass(frozen=True, kw_only=True)
class _IdIndexBuilder:
    """Builder of the index of one dataset's ids."""

    on: str
    index: DatasetIndex
    cache: ShardCache
    quota: CacheQuota | None
    progress: ProgressCallback | None

    @cached_property
    def path(self) -> Path:
        facts = json.dumps(["ids", _VERSION, sys.byteorder, self.cache.data_version(self.index), self.on])
        return selection_path(self.cache.directory.path, hashlib.blake2b(facts.encode(), digest_size=16).hexdigest())

    @cached_property
    def rows(self) -> int:
        """Rows of the table: 3 if ids are text."""
        return 2 + any(encodings_of(info)[self.on] in _TEXT for _, info in self.index.shards.examples())

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the table, with its checksum."""
        return self.rows, self.index.num_samples + 1

    def done(self) -> IdIndex:
        if not self.index.num_samples:
            return IdIndex(np.zeros((self.rows, 1), np.uint64))
        return load_or_create(
            self.path,
            self.cache.directory,
            "builds the index of ids",
            find=self.cached,
            create=self._create,
            create_uncached=self._uncached,
        )

    def cached(self) -> IdIndex | None:
        """Return the cached index, if there is one of the right shape."""
        table = map_bits(self.path)
        if table is None or table.dtype != np.uint64 or table.shape != self.shape:
            return None
        return IdIndex(table, self.path)

    def _create(self, parts: Path) -> IdIndex | None:
        counted = _KeyRanges(self.rows, self.index.num_samples)
        groups = []
        for group, part in self._parts(parts):
            groups.append(group)
            counted.add(part)
        try:
            with array_file(self.path, np.uint64, self.shape, self.cache.directory.path) as table:
                self._fill(table, counted, lambda: (self._of_group(None, group, parts) for group in groups))
        except StreamingError:
            raise
        except PermissionError:  # a damaged file of another user cannot be replaced
            return self._uncached()
        return None

    def _uncached(self) -> IdIndex:
        _logger.warning("%s is not writable: each process builds its own index of ids", self.path.parent)
        counted, parts = _KeyRanges(self.rows, self.index.num_samples), []
        for _, part in self._parts(None):
            parts.append(part)
            counted.add(part)
        table = np.zeros(self.shape, np.uint64)
        self._fill(table, counted, lambda: iter(parts))
        return IdIndex(table)

    def _fill(
        self, table: NDArray[np.uint64], counted: _KeyRanges, parts: Callable[[], Iterator[NDArray[np.uint64]]]
    ) -> None:
        for part in parts():
            counted.put(part, table)
        for bucket in counted.spans():
            here = table[:, bucket]
            here[:] = here[:, np.argsort(here[0])]
            if (here[0, 1:] == here[0, :-1]).any():
                here[:] = here[:, np.lexsort(here[::-1])]
                self._check_once(here)
        table[0, -1] = _checksum(table[:, :-1])

    def _check_once(self, rows: NDArray[np.uint64]) -> None:
        """Raise an error if two consecutive rows have the same id."""
        ids = rows.copy()
        if self.rows == 2:
            ids[-1] >>= _SIGN_BIT
        else:
            ids[-1] = 0
        again = np.flatnonzero((ids[:, 1:] == ids[:, :-1]).all(axis=0))
        if not len(again):
            return
        first, second = sorted((rows[-1, again[0] : again[0] + 2] & _NUMBER_BITS).tolist())
        value = self._value_of(first)
        more = ", and there are more duplicates" if len(again) > 1 else ""
        raise ConfigError(
            f"samples {first} and {second} both have {self.on}={value!r}{more}",
            hint="write each id once, or join on a column with unique values",
            option="key",
            sample=second,
        )

    def _value_of(self, number: int) -> Any:
        stops = np.cumsum(self.index.samples_per_shard())
        shard = int(np.searchsorted(stops, number, side="right"))
        before = int(stops[shard]) - self.index.shards[shard].samples
        scan = ShardScan(index=self.index, cache=self.cache, quota=self.quota)
        return listed(scan.columns([shard], [self.on])[self.on])[number - before]

    def _parts(self, parts: Path | None) -> Iterator[tuple[ShardGroup, NDArray[np.uint64]]]:
        """Yield each group of shards with its rows, sorted by key, in the order in which they finish."""
        scan = ShardScan(index=self.index, cache=self.cache, quota=self.quota)
        self.cache.prepare()
        begins = (
            f"building the index of column {self.on!r} over {self.index.num_samples} samples of {self.cache.label}; "
            "`lightning-streaming select --config` does this ahead of a run"
        )
        what = f"reading ids in column {self.on!r} of {self.cache.label}"
        with scan_progress(self.progress, self.index.num_samples, what, begins) as report:
            for group, rows in scan.outcomes(lambda group: self._of_group(scan, group, parts)):
                report(group.samples)
                yield group, rows

    def _of_group(self, scan: ShardScan | None, group: ShardGroup, parts: Path | None) -> NDArray[np.uint64]:
        """Return the rows of a group, from its file or read now."""
        path = None if parts is None else part_path(parts, group)
        if path is not None:
            kept = read_checked(path, 8 * self.rows * group.samples)
            if kept is not None:
                return kept.view(np.uint64).reshape(self.rows, group.samples)
        scan = scan or ShardScan(index=self.index, cache=self.cache, quota=self.quota)  # the file has just vanished
        values = scan.columns(group.shards, [self.on])[self.on]
        rows = np.empty((self.rows, group.samples), np.uint64)
        rows[0], others = _keys(values, self.rows == 3)
        rows[-1] = np.arange(group.first, group.first + group.samples)
        if self.rows == 3:
            rows[1] = others
        else:
            rows[-1] |= others << _SIGN_BIT
        rows = rows[:, np.argsort(rows[0], kind="stable")]
        if path is not None:
            write_part(path, np.ascontiguousarray(rows).reshape(-1).view(np.uint8), self.cache.directory.path)
        return rows


class _KeyRanges:
    """Buckets of a table by ranges of keys, which are of equal size because keys are evenly distributed.

    Args:
        rows: Rows of the table.
        samples: Columns of the table.
    """

    def __init__(self, rows: int, samples: int) -> None:
        self._rows = rows
        buckets = max(1, -(-samples // _ROWS_PER_BUCKET))
        self._borders = np.array([2**64 * bucket // buckets for bucket in range(1, buckets)], np.uint64)
        self._counts = np.zeros(buckets, np.int64)
        self._filled: NDArray[np.int64] | None = None

    def add(self, part: NDArray[np.uint64]) -> None:
        """Count the rows of a part for each bucket, before any is put."""
        self._counts += np.diff(self._cuts(part))

    def put(self, part: NDArray[np.uint64], table: NDArray[np.uint64]) -> None:
        """Copy the rows of a counted part into their buckets."""
        if self._filled is None:
            self._filled = np.cumsum(self._counts) - self._counts
        cuts = self._cuts(part)
        for bucket, (start, stop) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
            at = int(self._filled[bucket])
            table[:, at : at + stop - start] = part[:, start:stop]
            self._filled[bucket] += stop - start

    def spans(self) -> Iterator[slice]:
        """Return the columns of each bucket."""
        stops = np.cumsum(self._counts).tolist()
        return (slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True))

    def _cuts(self, part: NDArray[np.uint64]) -> NDArray[np.int64]:
        inner = np.searchsorted(part[0], self._borders)
        return np.concatenate([[0], inner, [part.shape[1]]]).astype(np.int64)
