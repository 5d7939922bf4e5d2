"""Packs made whole tables at a time: the bytes of all documents of some packs are joined by one call, so that no step
of Python is taken for each."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, FormatError, SampleError
from lightning_streaming.formats.columns import flat_column
from lightning_streaming.formats.readers import FlatColumn, ShardReader
from lightning_streaming.options.packing import PackingConfig
from lightning_streaming.options.token_budget import TokenBudget
from lightning_streaming.reading.batches import GATHERED_BYTES
from lightning_streaming.reading.packs.groups import batch_of_group, spans_of
from lightning_streaming.reading.packs.types import converted
from lightning_streaming.reading.packs.values import (
    PackBatch,
    PackSpans,
    batch_of,
    bytes_of,
    cut,
    expected,
    filling,
    part_of,
)
from lightning_streaming.reading.plan import Reading, Window, WorkerPass, by_shard


def read_pack_tables(
    of_pass: WorkerPass, pack: PackingConfig, *, drop_last: bool
) -> Generator[list[PackBatch], None, None]:
    """The worker's batches in order, some at a time; what is stored is joined without a look at single documents.

    Args:
        of_pass: What to read; its samples are looked at by nobody.
        pack: How documents are brought together.
        drop_last: Whether to leave out a last batch that is not full.

    Raises:
        ConfigError: A column is stored in types of which no type holds all values.
        SampleError: A type does not hold a value, or a document has another length than it was said to have.
        FormatError: A shard or a document of the next batch is damaged; names the stream and the shard.
        StorageError: A shard of the next batch could not be fetched.
    """
    with of_pass.begun() as reading:
        join, together = _Join(of_pass, reading), 1
        for window in reading.windows():
            assert window.pieces is not None, "as of packs"
            packs = _packs_of_batches(window, reading.batch_size)
            num_batches = len(packs) - 1
            if drop_last and packs[-1] - packs[-2] < reading.batch_size:
                num_batches -= 1
            first = 0
            while first < num_batches:
                last = min(first + together, num_batches)
                reading.about_to_read(last - first - 1)
                begin = int(window.stops[first - 1]) if first else 0
                rows = slice(begin, int(window.stops[last - 1]))
                spans = PackSpans.of(
                    part_of(window.pieces, rows, packs[first]), packs[last] - packs[first], pack.capacity
                )
                columns = {name: join.packed(name, window, rows, spans) for name in pack.columns}
                _let_go(reading, window.shards[rows], last - first)
                yield [
                    batch_of(
                        pack,
                        {name: of[start:stop] for name, of in columns.items()},
                        spans.between(start, stop),
                        join.types,
                    )
                    for start, stop in pairwise(one - packs[first] for one in packs[first : last + 1])
                ]
                size = sum(of.nbytes for of in columns.values()) // (last - first)
                first, together = last, max(1, min(2 * together, GATHERED_BYTES // max(1, size)))


def read_group_tables(of_pass: WorkerPass, budget: TokenBudget) -> Generator[list[PackBatch], None, None]:
    """The same of groups of a budget, one by one: each is a batch."""
    with of_pass.begun() as reading:
        join = _Join(of_pass, reading)
        for window in reading.windows():
            assert window.pieces is not None, "as of groups"
            for number, (start, stop) in enumerate(pairwise([0, *window.stops.tolist()])):
                reading.about_to_read(0)
                rows = slice(start, stop)
                spans = spans_of(part_of(window.pieces, rows, number))
                columns = {name: join.packed(name, window, rows, spans) for name in budget.columns}
                _let_go(reading, window.shards[rows], 1)
                yield [batch_of_group(budget, columns, spans, join.types)]


def _packs_of_batches(window: Window, batch_size: int) -> list[int]:
    """The first pack of each batch of a window, and the end of the last."""
    assert window.pieces is not None, "as of packs"
    num_packs = int(window.pieces.packs[-1]) + 1 if len(window.pieces.packs) else 0
    return [*range(0, num_packs, batch_size), num_packs]


def _let_go(reading: Reading, shards: NDArray[np.int64], batches: int) -> None:
    """Say that these samples, the next ones, were read."""
    are_last = reading.last_uses(shards)
    if are_last is not None:
        for shard in np.unique(shards[are_last]).tolist():
            reading.let_go(shard)
    reading.have_read(batches)


class _Join:
    """Brings the values of documents together from their shards."""

    def __init__(self, of_pass: WorkerPass, reading: Reading) -> None:
        assert of_pass.pack is not None, "as of packs"
        assert of_pass.types is not None, "as of packs"
        self._source, self._reading, self._pack, self.types = of_pass.source, reading, of_pass.pack, of_pass.types
        self.types.check_stored()
        self._mixed = set[str]()
        """Columns of which shards have values of several types: these are converted before they are joined."""
        self._columns: dict[tuple[int, str], tuple[ShardReader, FlatColumn]] = {}

    def packed(self, name: str, window: Window, rows: slice, spans: PackSpans) -> NDArray[Any]:
        """The values of a column in some packs, of shape (packs, capacity)."""
        shards, indexes = window.shards[rows], window.indexes[rows]
        begins, counts = spans.rows.starts, spans.rows.lengths
        parts, sources, places = list[memoryview](), np.empty(len(shards), np.int64), np.empty(len(shards), np.int64)
        groups, common = list(by_shard(shards)), None
        stay_open = all(int(shards[ours[0]]) in self._source.readers for ours in groups)
        for ours in groups:
            shard = int(shards[ours[0]])
            column = self._column(shard, name)
            stops, are_ends = begins[ours] + counts[ours], spans.rows.are_ends[ours]
            self._check(shard, name, column, indexes[ours], stops, are_ends)
            size = column.dtype.itemsize
            starts, sizes = column.starts[indexes[ours]] + begins[ours] * size, counts[ours] * size
            if common is None:
                common = self.types.unseen(name) if name in self._mixed else column.dtype
            if column.dtype != common and name not in self._mixed:
                self._mixed.add(name)
                return self.packed(name, window, rows, spans)
            data = column.data
            if column.dtype != common or not stay_open:  # the next shard may take this one's room
                data = memoryview(b"".join(_slices(data, starts, starts + sizes)))
                if column.dtype != common:
                    documents = indexes[ours], counts[ours]
                    data = self._as_type(shard, name, np.frombuffer(data, column.dtype), common, documents)
                starts = (np.cumsum(counts[ours]) - counts[ours]) * common.itemsize
            parts.append(data)
            sources[ours], places[ours] = len(parts) - 1, starts
        assert common is not None, "there is a document"
        return self._joined(name, parts, (sources, places), spans, common)

    def _as_type(
        self,
        shard: int,
        name: str,
        values: NDArray[Any],
        dtype: np.dtype[Any],
        documents: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> memoryview:
        """Return the bytes of a shard's values in another type; ``documents`` has index and length of each."""
        indexes, counts = documents

        def sample_of(place: int) -> str:
            return f"{int(indexes[np.searchsorted(np.cumsum(counts), place, side='right')])} of shard {shard}"

        try:
            return bytes_of(converted(self._pack, name, values, dtype, sample_of))
        except SampleError as error:
            raise self._source.named(error, shard) from None

    def _joined(
        self,
        name: str,
        parts: list[memoryview],
        found: tuple[NDArray[np.int64], NDArray[np.int64]],
        spans: PackSpans,
        dtype: np.dtype[Any],
    ) -> NDArray[Any]:
        """Documents in the order of packs, with what fills these up; ``found`` has the part and first byte of each."""
        sources, places = found
        longest = int(spans.lengths[spans.sources < 0].max(initial=0))
        parts = [*parts, bytes_of(filling(self._pack, name, longest, dtype, self.types))]
        is_document = spans.sources >= 0
        of = np.where(is_document, sources[spans.sources], len(parts) - 1)
        starts = np.where(is_document, places[spans.sources], 0)
        pieces = map(cut, map(parts.__getitem__, of.tolist()), _bounds(starts, starts + spans.lengths * dtype.itemsize))
        return np.frombuffer(bytearray().join(pieces), dtype).reshape(spans.num_packs, spans.capacity)

    def _column(self, shard: int, name: str) -> FlatColumn:
        reader = self._reading.reader(shard)
        known = self._columns.get((shard, name))
        if known is None or known[0] is not reader:
            try:
                found = flat_column(reader, self._source.info_of(shard), name, self._pack.dtype_of(name))
                self.types.of(name, found.dtype)
            except (ConfigError, FormatError, SampleError) as error:
                raise self._source.named(error, shard) from error
            # As long as a shard is open: an epoch has many, and a document takes 16 bytes of each column.
            held, readers = self._columns, self._source.readers
            self._columns = {of: one for of, one in held.items() if readers.get(of[0]) is one[0]}
            known = self._columns[shard, name] = reader, found
        return known[1]

    def _check(
        self,
        shard: int,
        name: str,
        column: FlatColumn,
        indexes: NDArray[np.int64],
        stops: NDArray[np.int64],
        are_ends: NDArray[np.bool_],
    ) -> None:
        """Refuse documents that are shorter, or longer, than they were said to be."""
        counts = column.counts[indexes]
        is_wrong = (counts < stops) | (are_ends & (counts > stops))
        if is_wrong.any():
            place = int(is_wrong.argmax())
            index, said = int(indexes[place]), expected(int(stops[place]), bool(are_ends[place]))
            raise self._source.named(
                SampleError(
                    f"sample {index} of shard {shard} has {int(column.counts[index])} values in column {name!r}, and "
                    f"was said to have {said}",
                    hint=f"give {self._pack.option}.lengths= what tells the length of {self._pack.column!r}, and name "
                    "along it only columns that are as long",
                    option=f"{self._pack.option}.lengths",
                    sample=index,
                ),
                shard,
            )


def _slices(data: memoryview, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Iterator[memoryview]:
    return map(cut, repeat(data), _bounds(starts, stops))


def _bounds(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Iterator[slice]:
    return map(slice, starts.tolist(), stops.tolist())
