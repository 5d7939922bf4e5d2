"""A worker's plain samples of one pass, many batches at a time: their bytes are gathered shard by shard.

positions   0   1   2   3   4   5             sorted by shard, each shard is asked once:
shard       7   2   7   7   2   9             shard 7 -> rows 0 2 3,  2 -> rows 1 4,  9 -> row 5
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import FormatError, StreamingError
from lightning_streaming.formats.mds import MDSReader
from lightning_streaming.formats.plain_rows import PlainRows
from lightning_streaming.loading.delivery import Table
from lightning_streaming.loading.reading import Reading, WorkerPass

_MOST_BYTES = 1 << 20
"""Of the samples gathered at a time, unless one batch has more: what a core's own cache holds."""

_LARGE = 1 << 15
"""Bytes of a sample from which on copying it once more would take longer than asking for it alone."""


def read_tables(
    of_pass: WorkerPass, plain: PlainRows, *, drop_last: bool, one_by_one: bool
) -> Generator[Table, None, None]:
    """The worker's samples in order: tables of full batches, the first of one batch, then a table of what is left.

    Args:
        of_pass: What to read.
        plain: How each sample lies in its bytes.
        drop_last: Whether to leave out a last batch that is not full.
        one_by_one: Whether each table must be of one batch, rather than of as many as are quick to gather.

    Raises:
        FormatError: A shard or a sample of the next batch is damaged; names the stream and the shard.
        StorageError: A shard of the next batch could not be fetched.
    """
    with of_pass.begun() as reading:
        gather = _Gather(plain, reading)
        most = 1 if one_by_one else max(1, _MOST_BYTES // (reading.batch_size * plain.row_bytes))
        fewest_samples = reading.batch_size if drop_last else 1
        batches = 1
        for window in reading.windows():
            shards, indexes = window.shards, window.indexes
            while len(shards) >= fewest_samples:
                rows = gather.rows(shards, indexes, batches)
                shards, indexes = shards[len(rows) :], indexes[len(rows) :]
                yield _table(plain, rows, reading.batch_size)
                batches = min(2 * batches, most)


class _Gather:
    """Brings samples together from their shards."""

    def __init__(self, plain: PlainRows, reading: Reading) -> None:
        self._plain = plain
        self._reading = reading
        self._between = np.empty(0, plain.row)
        """Memory that is used again each time: new memory would cost as much as copying to it."""

    def rows(self, shards: NDArray[np.int64], indexes: NDArray[np.int64], batches: int) -> NDArray[np.void]:
        """The bytes of the next samples, of at most so many batches."""
        batch_size = self._reading.batch_size
        # Only what is left at the end fills no batch, and is read alone.
        samples = min(batches, len(shards) // batch_size) * batch_size or len(shards)
        self._reading.about_to_read(samples // batch_size)
        try:
            rows = self._read(shards[:samples], indexes[:samples])
        except FormatError:
            if samples <= batch_size:
                raise
            rows = self._read(shards[:batch_size], indexes[:batch_size])  # the damage may be another batch's
        self._have_read(shards[: len(rows)])
        return rows

    def _read(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.void]:
        """The bytes of some samples; where not all can be had, of the batches before the first that cannot."""
        rows = np.empty(len(shards), self._plain.row)
        for places in by_shard(shards):
            first = int(places[0])
            try:
                reader = self._reading.reader(int(shards[first]))
                assert isinstance(reader, MDSReader), "the one format that has plain samples"
                self._copy(reader, indexes, rows, places)
            except StreamingError:
                in_whole_batches = first // self._reading.batch_size * self._reading.batch_size
                if not in_whole_batches:
                    raise
                return rows[:in_whole_batches]
        return rows

    def _copy(
        self, reader: MDSReader, indexes: NDArray[np.int64], rows: NDArray[np.void], places: NDArray[np.int64]
    ) -> None:
        """Copy those samples of a shard that belong to some places to these."""
        if len(places) == len(rows):
            reader.copy_rows(indexes, rows)
        elif rows.itemsize >= _LARGE:
            for place in places.tolist():
                reader.copy_rows(indexes[place : place + 1], rows[place : place + 1])
        else:  # one copy more, which is cheaper than a step of Python for each sample
            if len(self._between) < len(places):
                self._between = np.empty(len(rows), rows.dtype)
            between = self._between[: len(places)]
            reader.copy_rows(indexes[places], between)
            rows[places] = between

    def _have_read(self, shards: NDArray[np.int64]) -> None:
        are_last = self._reading.last_uses(shards)
        if are_last is not None:
            for shard in np.unique(shards[are_last]).tolist():
                self._reading.let_go(shard)
        self._reading.have_read(len(shards) // self._reading.batch_size)


def by_shard(shards: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The places at which each shard stands, ascending; shards in the order of their first places.

    Args:
        shards: The shard of each sample; at least one.
    """
    if (shards == shards[0]).all():
        yield np.arange(len(shards))
        return
    # Of numbers of 16 bits numpy makes a radix sort, in a tenth of the time.
    order = (shards.astype(np.uint16) if shards.max() < 1 << 16 else shards).argsort(kind="stable")
    in_order = shards[order]
    starts = [0, *(1 + (in_order[1:] != in_order[:-1]).nonzero()[0]).tolist()]
    for _, start, stop in sorted(zip(order[starts].tolist(), starts, [*starts[1:], len(shards)], strict=True)):
        yield order[start:stop]


def _table(plain: PlainRows, rows: NDArray[np.void], batch_size: int) -> Table:
    size = min(batch_size, len(rows))
    columns = plain.columns_of(rows).items()
    return Table({name: values.reshape(-1, size, *values.shape[1:]) for name, values in columns})
