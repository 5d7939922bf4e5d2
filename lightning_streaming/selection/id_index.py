"""Where the sample of an id is in a dataset: made once per node, kept beside the dataset's cached index, and mapped.

Each id has a key of 64 bits, spread evenly: whole numbers are mixed by a bijection, of text and bytes a hash is taken,
whose other 64 bits are kept too. The file has the keys in order, the other bits of hashes in the same order, and the
numbers of the samples, one array after another. A number below zero has the key of a large one: which of the two it is,
the highest bit of the sample's number tells.

While it is made, each group of shards has a file of its own. From these rows go to the buckets of the whole that have
their keys, and then each bucket is sorted: so memory is that of a bucket, whatever the dataset.
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
    array_file,
    errors_name,
    load_or_create,
    part_path,
    read_checked,
    scan_progress,
    write_part,
)
from lightning_streaming.waits import ProgressCallback

_VERSION = 2
"""Of what a file holds; part of its name."""
_ROWS_PER_BUCKET = 1 << 21
_SIGN_BIT = np.uint64(63)
"""Of a sample's number, where ids are whole numbers: set where the id is below zero."""
_NUMBER_BITS = np.uint64(2**63 - 1)
_TEXT = ("str", "bytes")

_logger = package_logger(__name__)


class IdIndex:
    """Finds samples by id.

    Args:
        table: Rows of uint64: keys, ascending; the other bits of hashes, where ids are text; numbers of samples, with
            the signs of ids. Of shape (2 or 3, samples + 1), where the first of the last column is a checksum. May be a
            file's, mapped into memory.
        kept_at: That file; None if there is none.
    """

    def __init__(self, table: NDArray[np.uint64], kept_at: Path | None = None) -> None:
        plain = np.asarray(table)  # of which single numbers are had sooner than of a file's
        self._table, self._checksum = plain[:, :-1], plain[0, -1]
        self.kept_at = kept_at

    def __len__(self) -> int:
        """Samples."""
        return int(self._table.shape[1])

    def is_whole(self) -> bool:
        """Whether it is as it was made: it is not looked through as a whole before something does not fit."""
        return bool(self._checksum == _checksum(self._table))

    def place(self, value: Any) -> int:
        """The number of the sample that has an id; -1 if none has."""
        # As places does, but numpy takes long for one of anything.
        if len(self._table) == 2:
            key, other = _mixed_one(_in_64_bits(value)), int(value < 0)
        else:
            digest = _hash(value)
            key, other = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        return self._place_after(int(self._table[0].searchsorted(np.uint64(key))), key, other)

    def places(self, values: ColumnValues) -> NDArray[np.int64]:
        """The numbers of the samples that have these ids, -1 where none has; of shape (ids,)."""
        keys, others = _keys(values, len(self._table) == 3)
        rows = np.searchsorted(self._table[0], keys)
        here = np.flatnonzero(rows < len(self))
        here = here[self._table[0, rows[here]] == keys[here]]
        is_found = self._others(rows[here]) == others[here]
        places = np.full(len(rows), -1, np.int64)
        places[here[is_found]] = self._table[-1, rows[here[is_found]]] & _NUMBER_BITS
        for at in here[~is_found].tolist():  # of hashes that begin alike, or of -1 and 2**64 - 1: hardly ever any
            places[at] = self._place_after(int(rows[at]) + 1, int(keys[at]), int(others[at]))
        return places

    def _place_after(self, row: int, key: int, other: int) -> int:
        """What :meth:`place` gives, looked for from a row on, before which it is not."""
        while row < len(self) and self._table[0, row] == key:
            if self._others(row) == other:
                return int(self._table[-1, row] & _NUMBER_BITS)
            row += 1
        return -1

    def _others(self, rows: Any) -> Any:
        """What tells ids of one key apart, of these rows: the other bits of hashes; 1 for numbers below zero."""
        return self._table[1, rows] if len(self._table) == 3 else self._table[-1, rows] >> _SIGN_BIT


def _checksum(table: NDArray[np.uint64]) -> int:
    checksum = 0
    for row in table:
        for first in range(0, len(row), _ROWS_PER_BUCKET):
            checksum = crc32(row[first : first + _ROWS_PER_BUCKET].data, checksum)
    return checksum


def _keys(values: ColumnValues, is_text: bool) -> NDArray[np.uint64]:
    """The keys of ids, and what tells those of one key apart, as ``_others`` does; of shape (2, ids)."""
    if is_text:
        digests = b"".join(_hash(one) for one in values)
        return np.ascontiguousarray(np.frombuffer(digests, "<u8").reshape(-1, 2).T.astype(np.uint64))
    if isinstance(values, np.ndarray):
        numbers, is_negative = values.astype(np.int64).view(np.uint64), values < 0
    else:
        numbers = np.array([_in_64_bits(one) for one in values], np.uint64)
        is_negative = np.array([one < 0 for one in values], np.bool_)
    return np.stack([splitmix(numbers), is_negative.astype(np.uint64)])


def _mixed_one(number: int) -> int:
    """What ``splitmix`` makes of one number of 64 bits."""
    mixed = (number + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def _hash(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()


def _in_64_bits(number: Any) -> int:
    """A whole number as 64 bits have it; those below zero look like large ones."""
    value = int(number)
    if not -(2**63) <= value < 2**64:
        raise ConfigError(
            f"ids that are whole numbers can have 64 bits, but one is {value}",
            hint="join on text instead",
            option="key",
        )
    return value % 2**64


def check_ids(on: str, stream: tuple[str, DatasetIndex], joined: tuple[str, DatasetIndex]) -> None:
    """Refuse a column of ids that one of two datasets lacks, or that cannot hold the same ids in both.

    Args:
        on: The column.
        stream: What errors call the stream, and its index.
        joined: The same of the joined dataset.

    Raises:
        ConfigError: Naming the dataset, and what it has.
    """
    kinds = {label: _kind_of_ids(on, label, index) for label, index in (stream, joined)}
    if len(set(kinds.values())) > 1:
        told = " and ".join(f"{kind} in {label}" for label, kind in kinds.items())
        raise ConfigError(
            f"key={on!r} is a column of {told}, so no id of one is in the other",
            hint="write it alike in both",
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
    room: CacheQuota | None = None,
    progress: ProgressCallback | None = None,
) -> IdIndex:
    """The index of a dataset's ids; made now, unless a process of this node did before.

    Args:
        on: Column of the ids, which :func:`check_ids` accepts.
        index: The dataset's.
        cache: Where its files are.
        room: Where what is fetched is counted; None for no limit.
        progress: Is told of samples that were looked at; None to show it as other waits.

    Raises:
        ConfigError: Two samples have the same id; says which.
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched, or what was found could not be kept.
    """
    with errors_name(cache, f"the index of {on!r} cannot be made or kept"):
        return _Making(on=on, index=index, cache=cache, room=room, progress=progress).done()


def are_ids_known(on: str, index: DatasetIndex, cache: ShardCache) -> bool:
    """Whether the index of a dataset's ids was made before; no shard is looked at. Otherwise as :func:`index_ids`."""
    making = _Making(on=on, index=index, cache=cache, room=None, progress=None)
    return not index.num_samples or making.kept() is not None


@dataclass(frozen=True, kw_only=True)
class _Making:
    """One index to be made."""

    on: str
    index: DatasetIndex
    cache: ShardCache
    room: CacheQuota | None
    progress: ProgressCallback | None

    @cached_property
    def path(self) -> Path:
        facts = json.dumps(["ids", _VERSION, sys.byteorder, self.cache.data_version(self.index), self.on])
        return selection_path(self.cache.directory.path, hashlib.blake2b(facts.encode(), digest_size=16).hexdigest())

    @cached_property
    def rows(self) -> int:
        """Of a table: 3 where ids are text."""
        return 2 + any(encodings_of(info)[self.on] in _TEXT for _, info in self.index.shards.examples())

    @property
    def shape(self) -> tuple[int, int]:
        """Of the table, with its checksum."""
        return self.rows, self.index.num_samples + 1

    def done(self) -> IdIndex:
        if not self.index.num_samples:
            return IdIndex(np.zeros((self.rows, 1), np.uint64))
        return load_or_create(
            self.path,
            self.cache.directory,
            "makes the index of ids",
            find=self.kept,
            make=self._made,
            make_unkept=self._unkept,
        )

    def kept(self) -> IdIndex | None:
        """What was made before, and is whole."""
        table = map_bits(self.path)
        if table is None or table.dtype != np.uint64 or table.shape != self.shape:
            return None
        return IdIndex(table, self.path)

    def _made(self, parts: Path) -> IdIndex | None:
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
        except PermissionError:  # in place of another user's, which is damaged
            return self._unkept()
        return None

    def _unkept(self) -> IdIndex:
        _logger.warning("%s is not writable: each process makes its index of ids anew", self.path.parent)
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
        """Refuse an id that two samples have, which are one after the other."""
        told = rows.copy()
        if self.rows == 2:
            told[-1] >>= _SIGN_BIT
        else:
            told[-1] = 0
        again = np.flatnonzero((told[:, 1:] == told[:, :-1]).all(axis=0))
        if not len(again):
            return
        first, second = sorted((rows[-1, again[0] : again[0] + 2] & _NUMBER_BITS).tolist())
        value = self._value_of(first)
        more = ", and there are others like them" if len(again) > 1 else ""
        raise ConfigError(
            f"samples {first} and {second} both have {self.on}={value!r}{more}",
            hint="write each once, or join on a column that tells samples apart",
            option="key",
            sample=second,
        )

    def _value_of(self, number: int) -> Any:
        stops = np.cumsum(self.index.samples_per_shard())
        shard = int(np.searchsorted(stops, number, side="right"))
        before = int(stops[shard]) - self.index.shards[shard].samples
        scan = ShardScan(index=self.index, cache=self.cache, room=self.room)
        return listed(scan.columns([shard], [self.on])[self.on])[number - before]

    def _parts(self, parts: Path | None) -> Iterator[tuple[ShardGroup, NDArray[np.uint64]]]:
        """The rows of some samples each, their keys ascending, as they come."""
        scan = ShardScan(index=self.index, cache=self.cache, room=self.room)
        self.cache.prepare()
        begins = (
            f"making the index of column {self.on!r} over {self.index.num_samples} samples of {self.cache.label}; "
            "`lightning-streaming select --config` can do so ahead"
        )
        what = f"reading ids in column {self.on!r} of {self.cache.label}"
        with scan_progress(self.progress, self.index.num_samples, what, begins) as tell:
            for group, found in scan.outcomes(lambda group: self._of_group(scan, group, parts)):
                tell(group.samples)
                yield group, found

    def _of_group(self, scan: ShardScan | None, group: ShardGroup, parts: Path | None) -> NDArray[np.uint64]:
        """Rows of a group: kept before, or made now by way of a scan."""
        path = None if parts is None else part_path(parts, group)
        if path is not None:
            kept = read_checked(path, 8 * self.rows * group.samples)
            if kept is not None:
                return kept.view(np.uint64).reshape(self.rows, group.samples)
        scan = scan or ShardScan(index=self.index, cache=self.cache, room=self.room)  # it was kept a moment ago
        values = scan.columns(group.shards, [self.on])[self.on]
        found = np.empty((self.rows, group.samples), np.uint64)
        found[0], others = _keys(values, self.rows == 3)
        found[-1] = np.arange(group.first, group.first + group.samples)
        if self.rows == 3:
            found[1] = others
        else:
            found[-1] |= others << _SIGN_BIT
        found = found[:, np.argsort(found[0], kind="stable")]
        if path is not None:
            write_part(path, np.ascontiguousarray(found).reshape(-1).view(np.uint8), self.cache.directory.path)
        return found


class _KeyRanges:
    """Which rows of a table have keys of which range; ranges are even, as keys are.

    Args:
        rows: Of the table.
        samples: Its columns.
    """

    def __init__(self, rows: int, samples: int) -> None:
        self._rows = rows
        buckets = max(1, -(-samples // _ROWS_PER_BUCKET))
        self._borders = np.array([2**64 * bucket // buckets for bucket in range(1, buckets)], np.uint64)
        self._counts = np.zeros(buckets, np.int64)
        self._filled: NDArray[np.int64] | None = None

    def add(self, part: NDArray[np.uint64]) -> None:
        """Count rows that will be put."""
        self._counts += np.diff(self._cuts(part))

    def put(self, part: NDArray[np.uint64], table: NDArray[np.uint64]) -> None:
        """Put rows that were counted where those of their bucket are."""
        if self._filled is None:
            self._filled = np.cumsum(self._counts) - self._counts
        cuts = self._cuts(part)
        for bucket, (start, stop) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
            at = int(self._filled[bucket])
            table[:, at : at + stop - start] = part[:, start:stop]
            self._filled[bucket] += stop - start

    def spans(self) -> Iterator[slice]:
        """The places of each bucket."""
        stops = np.cumsum(self._counts).tolist()
        return (slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True))

    def _cuts(self, part: NDArray[np.uint64]) -> NDArray[np.int64]:
        inner = np.searchsorted(part[0], self._borders)
        return np.concatenate([[0], inner, [part.shape[1]]]).astype(np.int64)
