"""One worker's pass: windows of samples in order, their shards, and batches that are read without decoding samples.

Scheduler        a pass under way: yields windows; fetches shards ahead, opens and releases them, and measures
read_batches     some batches at a time, as many as are quick to gather
SampleAssembler  batches of samples; of numbers and arrays many batches at once

Numbers and arrays of one size are copied as rows of bytes, shard by shard, and the columns cut out of all together.
Where a shard reads columns of many samples at once, texts too, these are gathered instead:

    sample      0   1   2   3   4   5             sorted by shard, each shard is read once:
    shard       7   2   7   7   2   9             shard 7 for samples 0 2 3, shard 2 for 1 4, shard 9 for 5
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_streaming.dataset.collation import Collate, collated, stacked
from lightning_streaming.dataset.sample_key import Row
from lightning_streaming.errors import FormatError, StreamingError
from lightning_streaming.formats.shard_format import ColumnReader, PlainReader, PlainRows, ShardReader
from lightning_streaming.reading.plan import Assembler, Batches, Window, WorkerPartition, WorkerPlan, by_shard, located
from lightning_streaming.reading.prefetch import (
    LastUses,
    Lookahead,
    ShardPrefetcher,
    lookahead_of,
    node_plan,
    shard_needs,
)

GATHERED_BYTES = 1 << 20
"""Bytes of the samples gathered at a time, unless one batch has more: the size of a core's own cache."""
_LARGE = 1 << 15
"""Bytes of a sample from which on one more copy takes longer than to request it alone."""
_NEAR_END = 0.5
"""Part of a partition after which the order of the next pass is prepared."""


class Scheduler:
    """One worker's pass under way.

    It does not refer to the plan: the source refers to it during the pass, so the threads that prefetch from the source
    would keep all that the plan refers to, such as a dataset that creates samples itself.

    Args:
        plan: The worker's plan.
        partition: Its positions.
        prefetcher: Fetches shards ahead; None where all are on this node.
        last_uses: The last uses of shards; None without a cache limit.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        partition: WorkerPartition,
        prefetcher: ShardPrefetcher | None,
        last_uses: LastUses | None,
    ) -> None:
        self.batch_size = partition.epoch_partition.geometry.batch_size
        self._state = plan.state
        self._start = plan.start
        self._assembler = plan.assembler
        self._source = plan.source
        self._meter = plan.meter
        self._bad = plan.bad
        self._partition = partition
        self._prefetcher = prefetcher
        self._last_uses = last_uses
        self._batches_read = 0
        no_rows = np.empty(0, np.int64)
        self._window = Window(no_rows, no_rows, no_rows, None, no_rows, 0, 0, 0, None)
        self._joined: NDArray[np.int64] | None = None
        """Shards of joined datasets that the samples of the window need, from the first that is not read yet."""

    @staticmethod
    @contextmanager
    def of(plan: WorkerPlan) -> Iterator[Scheduler]:
        """Begin a pass, which ends with the block: shards that are not on this node are fetched ahead meanwhile."""
        partition, source = plan.partition(), plan.source
        plan.meter.begin_pass(source.open_shards.readers)
        if plan.bad is not None:
            plan.bad.begin()
        with ExitStack() as stack:
            source.begin_pass(partition.num_workers * partition.epoch_partition.geometry.ranks_per_node)
            stack.callback(source.end_pass)
            prefetcher = last_uses = None
            if source.is_remote:
                ahead = plan.predownload
                lookahead = Lookahead(ahead, ahead) if ahead else lookahead_of(partition, source.catalog)
                needs, find = shard_needs(partition, source.catalog), source.find_joined()
                ahead_of_reader = ShardPrefetcher(needs, source.fetch_ahead, lookahead, find=find)
                prefetcher = stack.enter_context(closing(ahead_of_reader))
            if source.quota.limit is not None:
                last_uses = stack.enter_context(closing(LastUses(node_plan(partition, source.catalog))))
            scheduler = Scheduler(plan, partition, prefetcher, last_uses)
            source.open_shards.opens = scheduler.open
            yield scheduler

    def windows(self) -> Iterator[Window]:
        """Yield the worker's samples in order, some batches at a time."""
        # A partition of one batch that is not full is near its end at once.
        near_end_at = (self._partition.num_samples() - self.batch_size) * _NEAR_END
        is_near_end, catalog = False, self._source.catalog
        for window in located(self._partition, catalog):
            self._meter.begin_window(
                catalog, window.shards, window.stops, self._assembler.tokens(window), window.sample_tokens(catalog)
            )
            if not is_near_end and (window.batches_before + len(window.stops)) * self.batch_size > near_end_at:
                is_near_end = True
                self._state.prepare_after(self._start)
            self._window, self._joined = window, window.joined
            yield window
        self._source.check_unchanged()

    def last_uses(self, shards: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return which of the next samples are this worker's last of their shards.

        Args:
            shards: The shard of each of these samples.

        Returns:
            None without a cache limit.
        """
        if self._last_uses is None:
            return None
        return self._last_uses.among(shards, self._window.rows_until(self._batches_read))

    def reader(self, shard: int) -> ShardReader:
        """Return the reader of the next sample's shard; fetch and open it if necessary."""
        readers = self._source.open_shards.readers
        reader = readers.get(shard)
        if reader is None:
            return self.open(shard)
        readers.move_to_end(shard)
        return reader

    def open(self, shard: int) -> ShardReader:
        """Open a shard that is not open, and measure it; fetch it if necessary."""
        began = perf_counter_ns()
        reader = self._source.open(shard)
        self._meter.opened(began, self._source.take_misses(shard), self._source.stream_of(shard))
        if self._prefetcher is not None:
            self._prefetcher.moved_on()
        return reader

    def decoded(self, row: Row) -> dict[str, Any]:
        """Return a sample as it is stored, with images decoded.

        Raises:
            FormatError: It is damaged; names the stream and the shard.
        """
        _, shard, index, _ = row
        reader, decode = self.reader(shard), self._source.decoder()
        try:
            sample = reader[index]
            return sample if decode is None else decode(sample, shard, index)
        except FormatError as error:
            raise self._source.named(error, shard) from error

    def release(self, shard: int) -> None:
        """Release a shard after the worker's last sample of it."""
        self._source.release(shard)
        if self._prefetcher is not None:
            self._prefetcher.moved_on()

    def about_to_read(self, batches: int) -> None:
        """Prefetch for batches that are about to be read all at once."""
        if self._prefetcher is not None:
            read, next_ = (self._window.rows_until(self._batches_read + more) for more in (0, max(0, batches)))
            self._prefetcher.reader_at(read, next_)

    def have_read(self, batches: int, shards: NDArray[np.int64] | None = None) -> None:
        """Note that more batches were read, which are not yielded yet.

        Args:
            batches: Number of batches.
            shards: The shard of each of their samples, to release those that are no longer needed; None where the
                caller has released them.
        """
        if shards is not None:
            self._release_last(shards, self.last_uses(shards))
        read = self._batches_read + batches
        if self._joined is not None or self._bad is not None:
            samples = self._window.rows_until(read) - self._window.rows_until(self._batches_read)
            if self._joined is not None:
                joined, self._joined = self._joined[:samples], self._joined[samples:]
                for column in joined.T:
                    are_last = self.last_uses(column)
                    self._release_last(column, are_last if are_last is None else are_last & (column >= 0))
            if self._bad is not None:
                self._bad.have_read(samples)
        self._batches_read = read
        self.about_to_read(0)
        for finished in () if self._last_uses is None else self._last_uses.finished(read):
            self._source.note_use(finished, finished=True)
        self._source.rest()

    def _release_last(self, shards: NDArray[np.int64], are_last: NDArray[np.bool_] | None) -> None:
        if are_last is not None:
            for shard in np.unique(shards[are_last]).tolist():
                self.release(shard)


ReadSome = Callable[[Window, slice, int, int], tuple[Batches, int]]
"""Reads some batches of a window: takes their rows, the first batch and the end of the last. Returns these batches, or
fewer but at least one, and the bytes that they have."""


def read_batches(
    plan: WorkerPlan, begin: Callable[[Scheduler], ReadSome], *, drop_last: bool, separately: bool
) -> Generator[Batches, None, None]:
    """Yield the worker's batches in order, some at a time: at first one, then as many as are quick to gather.

    Args:
        plan: The worker's plan.
        begin: Returns the function that reads some batches of a window.
        drop_last: Whether to leave out a last batch that is not full.
        separately: Whether to yield each batch alone.
    """
    with Scheduler.of(plan) as scheduler:
        read, together = begin(scheduler), 1
        for window in scheduler.windows():
            stops = [0, *window.stops.tolist()]
            full = window.num_items // scheduler.batch_size
            first, num_batches = 0, full if drop_last else len(window.stops)
            while first < num_batches:
                # A last batch that is not full is read alone.
                stop = min(first + together, full) if first < full else num_batches
                scheduler.about_to_read(stop - first - 1)
                batches, num_bytes = read(window, slice(stops[first], stops[stop]), first, stop)
                stop = first + len(batches)
                scheduler.have_read(stop - first, window.shards[stops[first] : stops[stop]])
                most = 1 if separately else GATHERED_BYTES * (stop - first) // max(1, num_bytes)
                first, together = stop, max(1, min(2 * together, most))
                yield list(batches) if separately else batches


class SampleAssembler(Assembler):
    """Batches of whole samples."""

    def items(self, plan: WorkerPlan, samples: Generator[Any, None, None]) -> Generator[Any, None, None]:  # noqa: ARG002
        """Return the samples."""
        return samples

    def batches(self, plan: WorkerPlan, *, drop_last: bool, separately: bool) -> Generator[Batches, None, None] | None:
        """Return batches that are gathered from shards; None where samples must be decoded one by one."""
        if not (plan.reads_as_stored and plan.source.may_be_plain()):
            return None
        return read_batches(
            plan, lambda scheduler: _Gatherer(plan, scheduler).read, drop_last=drop_last, separately=separately
        )

    def collate(self, collate: Collate, *, by_torch: bool) -> Collate:
        """Return a function that collates samples, and explains errors."""
        return partial(collated, stacked if collate is default_collate and not by_torch else collate)


@dataclass(frozen=True, slots=True)
class Table:
    """Batches of plain samples, all of one size. Each batch is a dict of tensors that share no memory with others."""

    columns: dict[str, NDArray[Any]]
    """Arrays of shape (batches, samples, ...), by name."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # Not views of one tensor: writing into one would count as a change of all, which autograd refuses.
        tensors = (map(torch.from_numpy, values) for values in self.columns.values())
        return (dict(zip(self.columns, batch, strict=True)) for batch in zip(*tensors, strict=True))


_Columns = dict[str, NDArray[Any] | list[Any]]
"""Columns of some samples, by name: numbers and arrays of shape (samples, ...), or a list of texts or bytes."""


class _Rows(NamedTuple):
    data: NDArray[np.void]
    """The bytes of some samples."""
    plain: PlainRows
    """The layout of each."""


class _Gatherer:
    """Gathers samples from their shards."""

    def __init__(self, plan: WorkerPlan, scheduler: Scheduler) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._failed: dict[int, StreamingError] = {}
        self._buffer = np.empty(0, np.void)
        """Reused memory: new memory would cost as much as copying to it."""
        self._cut_rows = np.empty(0, np.void)
        """Reused memory of rows that columns are cut out of."""

    def read(self, window: Window, rows: slice, _first: int, _stop: int) -> tuple[Batches, int]:
        """Return batches of a window with their bytes; see :data:`ReadSome`.

        Raises:
            FormatError: A shard or a sample of the first batch is damaged; names the stream and the shard.
            StorageError: A shard of the first batch could not be fetched.
        """
        positions, shards, indexes = window.positions[rows], window.shards[rows], window.indexes[rows]
        bad, batch_size = self._plan.bad, self._scheduler.batch_size
        if bad is None or not bad.are_known(positions):
            plain = self._rows(shards, indexes)
            if plain is not None:
                return self._table(plain, batch_size), plain.data.nbytes
            columns = self._columns(shards, indexes)
            if columns is not None:
                return _cut(columns, len(shards), batch_size)
        return [self._collated(positions[:batch_size], shards[:batch_size], indexes[:batch_size])], GATHERED_BYTES

    def _rows(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> _Rows | None:
        """Return the bytes of some samples; if some cannot be read, of the batches before the first of those.

        Returns:
            None where the samples do not all have the same layout.
        """
        plain, data = None, np.empty(0, np.void)
        for places in by_shard(shards):
            first = int(places[0])
            try:
                reader = cast("PlainReader", self._reader(int(shards[first])))  # as its samples may be plain
            except StreamingError:
                in_whole_batches = first // self._scheduler.batch_size * self._scheduler.batch_size
                if plain is None or not in_whole_batches:
                    raise
                data = data[:in_whole_batches]
                break
            if plain is None:
                plain = reader.plain_rows()
                data = data if plain is None else self._memory_of_rows(len(shards), plain)
            if plain is None or reader.plain_rows() is not plain:
                return None
            self._copy(reader, indexes, data, places)
        assert plain is not None, "there is a sample"
        return _Rows(data, plain) if plain.are(data) else None

    def _memory_of_rows(self, samples: int, plain: PlainRows) -> NDArray[np.void]:
        """Return memory for the bytes of samples: that of the batches where nothing is cut out of them."""
        if plain.is_column:
            return self._plan.empty((samples,), plain.row)
        if len(self._cut_rows) < samples or self._cut_rows.dtype != plain.row:
            self._cut_rows = np.empty(samples, plain.row)
        return self._cut_rows[:samples]

    def _table(self, rows: _Rows, batch_size: int) -> Table:
        size = min(batch_size, len(rows.data))
        columns = rows.plain.columns_of(rows.data, self._plan.empty).items()
        batches = len(rows.data) // size  # numpy cannot infer it for empty arrays
        return Table({name: values.reshape(batches, size, *values.shape[1:]) for name, values in columns})

    def _columns(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> _Columns | None:
        """Return some samples, column by column; None where each must be decoded alone."""
        parts = list[tuple[NDArray[np.int64], _Columns]]()
        for places in by_shard(shards):
            try:
                reader = self._reader(int(shards[places[0]]))
                taken = reader.take(indexes[places]) if isinstance(reader, ColumnReader) else None
            except StreamingError:  # reading them one by one finds out which sample it is
                return None
            if taken is None or (parts and list(parts[0][1]) != list(taken)):
                return None
            parts.append((places, taken))
        columns = _Columns()
        for name in parts[0][1]:
            column = _joined([(places, taken[name]) for places, taken in parts], len(shards))
            if column is None:
                return None
            columns[name] = column
        return columns

    def _collated(self, positions: NDArray[np.int64], shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> Any:
        """Return a batch of samples decoded one by one.

        Raises:
            FormatError: One of them is damaged; names the stream and the shard.
            CollateError: They are not of the same shape.
        """
        samples, bad, decoded = list[Any](), self._plan.bad, self._scheduler.decoded
        for position, shard, index in zip(positions.tolist(), shards.tolist(), indexes.tolist(), strict=True):
            self._reader(shard)
            row = position, shard, index, 0
            try:
                if bad is not None:
                    bad.refuse_known(position, shard, index)
                samples.append(decoded(row))
            except StreamingError as error:
                samples.append(self._plan.replacement(row, error, decoded))
        return collated(stacked, samples)

    def _reader(self, shard: int) -> ShardReader:
        """Return the reader of a shard. One that could not be opened is not tried again by the batch that needs it."""
        if shard in self._failed:
            raise self._failed[shard]
        try:
            return self._scheduler.reader(shard)
        except StreamingError as error:
            self._failed[shard] = error
            raise

    def _copy(
        self, reader: PlainReader, indexes: NDArray[np.int64], rows: NDArray[np.void], places: NDArray[np.int64]
    ) -> None:
        """Copy samples of a shard to their places in the output."""
        if len(places) == len(rows):
            reader.copy_rows(indexes, rows)
        elif rows.itemsize >= _LARGE:
            for place in places.tolist():
                reader.copy_rows(indexes[place : place + 1], rows[place : place + 1])
        else:  # one more copy, which is cheaper than a step of Python for each sample
            if len(self._buffer) < len(places) or self._buffer.dtype != rows.dtype:
                self._buffer = np.empty(len(rows), rows.dtype)
            buffer = self._buffer[: len(places)]
            reader.copy_rows(indexes[places], buffer)
            rows[places] = buffer


def _joined(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[Any] | list[Any]]], samples: int
) -> NDArray[Any] | list[Any] | None:
    """Return a column of some samples, joined from the values of each shard; None where they differ in kind."""
    first = parts[0][1]
    if len(parts) == 1:
        return first
    if isinstance(first, list):
        if not all(isinstance(values, list) for _, values in parts):
            return None
        order = np.concatenate([places for places, _ in parts]).argsort().tolist()
        joined = [value for _, values in parts for value in values]
        return [joined[place] for place in order]
    column = np.empty((samples, *first.shape[1:]), first.dtype)
    for places, values in parts:
        if isinstance(values, list) or values.dtype != first.dtype or values.shape[1:] != first.shape[1:]:
            return None
        column[places] = values
    return column


def _cut(columns: _Columns, samples: int, batch_size: int) -> tuple[list[Any], int]:
    """Return the batches of some samples, and about how many bytes they have."""
    batches = list[Any]()
    for start in range(0, samples, batch_size):
        parts = ((name, values[start : start + batch_size]) for name, values in columns.items())
        # As in a table, tensors are no views of one.
        batches.append({name: part if isinstance(part, list) else torch.from_numpy(part) for name, part in parts})
    sizes = (sum(map(len, part)) if isinstance(part, list) else part.nbytes for part in columns.values())
    return batches, sum(sizes)
