"""Batches of samples, made in the process that reads them: many batches of plain samples at a time, others one by one.

Plain samples are numbers and arrays alone. Their bytes are gathered shard by shard, and the columns cut out of all of
them together. Where a shard gives columns of many samples at once, texts too, these are gathered instead:

    sample      0   1   2   3   4   5             sorted by shard, each shard is read once:
    shard       7   2   7   7   2   9             shard 7 for samples 0 2 3, shard 2 for 1 4, shard 9 for 5
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_streaming.dataset.collation import collated, stacked
from lightning_streaming.errors import StreamingError
from lightning_streaming.formats.readers import ColumnReader, PlainReader, PlainRows, ShardReader
from lightning_streaming.reading.plan import Reading, WorkerPass, by_shard, decoded

GATHERED_BYTES = 1 << 20
"""Of the samples gathered at a time, unless one batch has more: what a core's own cache holds."""
_LARGE = 1 << 15
"""Bytes of a sample from which on copying it once more would take longer than asking for it alone."""


@dataclass(frozen=True, slots=True)
class Table:
    """Batches of plain samples, all of one size. Each batch is a dict of tensors that share no memory with others."""

    columns: dict[str, NDArray[Any]]
    """Arrays of shape (batches, samples, ...), by name."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # Not views of one tensor: writing into such would count as a change of all of them, which autograd refuses.
        tensors = (map(torch.from_numpy, values) for values in self.columns.values())
        return (dict(zip(self.columns, batch, strict=True)) for batch in zip(*tensors, strict=True))


_Columns = dict[str, NDArray[Any] | list[Any]]
"""Of some samples, by name: numbers and arrays as one of shape (samples, ...), texts and bytes as a list."""
Batches = Table | list[Any]
"""Collated batches that follow each other."""


def read_tables(of_pass: WorkerPass, *, drop_last: bool, one_by_one: bool) -> Generator[Batches, None, None]:
    """Yield the worker's batches in order: tables of full batches, the first of one batch, then the rest.

    A batch whose samples are not alike is yielded alone, collated as usual.

    Args:
        of_pass: What to read; its samples may be plain.
        drop_last: Whether to leave out a last batch that is not full.
        one_by_one: Whether each table must be of one batch, rather than of as many as are quick to gather.

    Raises:
        FormatError: A shard or a sample of the next batch is damaged; names the stream and the shard.
        StorageError: A shard of the next batch could not be fetched.
    """
    with of_pass.begun() as reading:
        gather, batch_size, bad = _Gather(of_pass, reading), reading.batch_size, of_pass.bad
        batches, fewest_samples = 1, batch_size if drop_last else 1
        for window in reading.windows():
            shards, indexes, positions = window.shards, window.indexes, window.positions
            while len(shards) >= fewest_samples:
                # Only what is left at the end fills no batch, and is read alone.
                samples = min(batches, len(shards) // batch_size) * batch_size or len(shards)
                reading.about_to_read(samples // batch_size - 1)
                are_known = bad is not None and bad.are_known(positions[:samples])
                rows = None if are_known else gather.rows(shards[:samples], indexes[:samples])
                made: Batches
                if rows is not None:
                    samples, made = len(rows.data), _table(rows, batch_size)
                    bytes_ = rows.data.nbytes
                else:
                    columns = None if are_known else gather.columns(shards[:samples], indexes[:samples])
                    if columns is None:
                        samples = min(batch_size, samples)
                        made = [gather.collated(positions[:samples], shards[:samples], indexes[:samples])]
                        bytes_ = GATHERED_BYTES
                    else:
                        made, bytes_ = _cut(columns, samples, batch_size), _bytes_of(columns)
                most = 1 if one_by_one else GATHERED_BYTES * samples // (batch_size * max(bytes_, 1))
                batches = max(1, min(2 * batches, most))
                _let_go(reading, shards[:samples])
                shards, indexes, positions = shards[samples:], indexes[samples:], positions[samples:]
                yield made


class _Rows(NamedTuple):
    data: NDArray[np.void]
    """The bytes of some samples."""
    plain: PlainRows
    """How each lies in them."""


class _Gather:
    """Gathers samples from their shards."""

    def __init__(self, of_pass: WorkerPass, reading: Reading) -> None:
        self._of_pass = of_pass
        self._reading = reading
        self._failed: dict[int, StreamingError] = {}
        self._between = np.empty(0, np.void)
        """Memory that is used again each time: new memory would cost as much as copying to it."""

    def rows(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> _Rows | None:
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
                in_whole_batches = first // self._reading.batch_size * self._reading.batch_size
                if plain is None or not in_whole_batches:
                    raise
                data = data[:in_whole_batches]
                break
            if plain is None:
                plain = reader.plain_rows()
                data = np.empty(len(shards), np.void if plain is None else plain.row)
            if plain is None or reader.plain_rows() is not plain:
                return None
            self._copy(reader, indexes, data, places)
        assert plain is not None, "there is a sample"
        return _Rows(data, plain) if plain.are(data) else None

    def columns(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> _Columns | None:
        """Return some samples, column by column; None where each must be decoded by itself."""
        parts = list[tuple[NDArray[np.int64], _Columns]]()
        for places in by_shard(shards):
            try:
                reader = self._reader(int(shards[places[0]]))
                taken = reader.take(indexes[places]) if isinstance(reader, ColumnReader) else None
            except StreamingError:  # which of the samples cannot be had is found out one by one
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

    def collated(self, positions: NDArray[np.int64], shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> Any:
        """Return a batch of samples decoded one by one.

        Raises:
            FormatError: One of them is damaged; names the stream and the shard.
            CollateError: They are not of the same shape.
        """
        samples, bad = list[Any](), self._of_pass.bad
        one = partial(decoded, self._of_pass, self._reading)
        for position, shard, index in zip(positions.tolist(), shards.tolist(), indexes.tolist(), strict=True):
            self._reader(shard)
            row = position, shard, index, 0
            try:
                if bad is not None:
                    bad.refuse_known(position, shard, index)
                samples.append(one(row))
            except StreamingError as error:
                samples.append(self._of_pass.instead(row, error, one))
        return collated(stacked, samples)

    def _reader(self, shard: int) -> ShardReader:
        """Return the reader of a shard. One that could not be opened is not tried again by the batch that needs it."""
        if shard in self._failed:
            raise self._failed[shard]
        try:
            return self._reading.reader(shard)
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
        else:  # one copy more, which is cheaper than a step of Python for each sample
            if len(self._between) < len(places) or self._between.dtype != rows.dtype:
                self._between = np.empty(len(rows), rows.dtype)
            between = self._between[: len(places)]
            reader.copy_rows(indexes[places], between)
            rows[places] = between


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
        found = [value for _, values in parts for value in values]
        return [found[place] for place in order]
    column = np.empty((samples, *first.shape[1:]), first.dtype)
    for places, values in parts:
        if isinstance(values, list) or values.dtype != first.dtype or values.shape[1:] != first.shape[1:]:
            return None
        column[places] = values
    return column


def _cut(columns: _Columns, samples: int, batch_size: int) -> list[Any]:
    """Yield the batches of some samples."""
    batches = list[Any]()
    for start in range(0, samples, batch_size):
        parts = ((name, values[start : start + batch_size]) for name, values in columns.items())
        # As in a table, each tensor is one of its own.
        batches.append({name: one if isinstance(one, list) else torch.from_numpy(one) for name, one in parts})
    return batches


def _bytes_of(columns: _Columns) -> int:
    """Return about how many bytes samples have."""
    return sum(sum(map(len, one)) if isinstance(one, list) else one.nbytes for one in columns.values())


def _let_go(reading: Reading, shards: NDArray[np.int64]) -> None:
    """Note that the next samples were read."""
    are_last = reading.last_uses(shards)
    if are_last is not None:
        for shard in np.unique(shards[are_last]).tolist():
            reading.let_go(shard)
    reading.have_read(len(shards) // reading.batch_size)


def _table(rows: _Rows, batch_size: int) -> Table:
    size = min(batch_size, len(rows.data))
    columns = rows.plain.columns_of(rows.data).items()
    batches = len(rows.data) // size  # of empty arrays, numpy could not tell
    return Table({name: values.reshape(batches, size, *values.shape[1:]) for name, values in columns})
