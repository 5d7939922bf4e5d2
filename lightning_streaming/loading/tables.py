"""A worker's plain samples of one pass, many batches at a time: their bytes are gathered shard by shard.

    sample      0   1   2   3   4   5             sorted by shard, each shard is asked once:
    shard       7   2   7   7   2   9             shard 7 for samples 0 2 3, shard 2 for 1 4, shard 9 for 5

Then the columns are cut out of the bytes of all of them together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_streaming.errors import FormatError, StreamingError
from lightning_streaming.formats.mds import MDSReader
from lightning_streaming.formats.plain_rows import PlainRows
from lightning_streaming.formats.shard import ShardReader
from lightning_streaming.loading.collating import collated
from lightning_streaming.loading.delivery import Table
from lightning_streaming.loading.reading import Reading, WorkerPass
from lightning_streaming.loading.source import SampleSource

_MOST_BYTES = 1 << 20
"""Of the samples gathered at a time, unless one batch has more: what a core's own cache holds."""
_LARGE = 1 << 15
"""Bytes of a sample from which on copying it once more would take longer than asking for it alone."""

Batches = Table | list[Any]
"""Collated batches that follow each other."""


def read_tables(of_pass: WorkerPass, *, drop_last: bool, one_by_one: bool) -> Generator[Batches, None, None]:
    """The worker's batches in order: tables of full batches, the first of one batch, then what is left.

    Where the samples of a batch turn out not to be alike, that batch comes alone, collated as ever.

    Args:
        of_pass: What to read; its samples may be plain.
        drop_last: Whether to leave out a last batch that is not full.
        one_by_one: Whether each table must be of one batch, rather than of as many as are quick to gather.

    Raises:
        FormatError: A shard or a sample of the next batch is damaged; names the stream and the shard.
        StorageError: A shard of the next batch could not be fetched.
    """
    with of_pass.begun() as reading:
        gather, batch_size = _Gather(of_pass.source, reading), reading.batch_size
        batches, fewest_samples = 1, batch_size if drop_last else 1
        for window in reading.windows():
            shards, indexes = window.shards, window.indexes
            while len(shards) >= fewest_samples:
                # Only what is left at the end fills no batch, and is read alone.
                samples = min(batches, len(shards) // batch_size) * batch_size or len(shards)
                reading.about_to_read(samples // batch_size - 1)
                rows = gather.rows(shards[:samples], indexes[:samples])
                if rows is None:
                    samples, batches = min(batch_size, samples), 1
                    made: Batches = [gather.collated(shards[:samples], indexes[:samples])]
                else:
                    samples, made = len(rows.data), _table(rows, batch_size)
                    most = 1 if one_by_one else _MOST_BYTES // (batch_size * rows.data.itemsize)
                    batches = max(1, min(2 * batches, most))
                _let_go(reading, shards[:samples])
                shards, indexes = shards[samples:], indexes[samples:]
                yield made


class _Rows(NamedTuple):
    data: NDArray[np.void]
    """The bytes of some samples."""
    plain: PlainRows
    """How each lies in them."""


class _Gather:
    """Brings samples together from their shards."""

    def __init__(self, source: SampleSource, reading: Reading) -> None:
        self._source = source
        self._reading = reading
        self._failed: dict[int, StreamingError] = {}
        self._between = np.empty(0, np.void)
        """Memory that is used again each time: new memory would cost as much as copying to it."""

    def rows(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> _Rows | None:
        """The bytes of some samples; where not all can be had, of the batches before the first that cannot.

        Returns:
            None where the samples do not all lie alike in their bytes.
        """
        plain, data = None, np.empty(0, np.void)
        for places in by_shard(shards):
            first = int(places[0])
            try:
                reader = self._reader(int(shards[first]))
            except StreamingError:
                in_whole_batches = first // self._reading.batch_size * self._reading.batch_size
                if plain is None or not in_whole_batches:
                    raise
                data = data[:in_whole_batches]
                break
            assert isinstance(reader, MDSReader), "the one format that has plain samples"
            if plain is None:
                plain = reader.plain_rows()
                data = np.empty(len(shards), np.void if plain is None else plain.row)
            if plain is None or reader.plain_rows() is not plain:
                return None
            self._copy(reader, indexes, data, places)
        assert plain is not None, "there is a sample"
        return _Rows(data, plain) if plain.are(data) else None

    def collated(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> Any:
        """A batch of samples decoded one by one.

        Raises:
            FormatError: One of them is damaged; names the stream and the shard.
            CollateError: They are not of the same shape.
        """
        samples: list[Any] = []
        for shard, index in zip(shards.tolist(), indexes.tolist(), strict=True):
            reader = self._reader(shard)
            try:
                samples.append(reader[index])
            except FormatError as error:
                raise self._source.named(error, shard) from error
        return collated(default_collate, samples)

    def _reader(self, shard: int) -> ShardReader:
        """The reader of a shard. One that could not be had is not tried again by the batch that needs it."""
        if shard in self._failed:
            raise self._failed[shard]
        try:
            return self._reading.reader(shard)
        except StreamingError as error:
            self._failed[shard] = error
            raise

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
            if len(self._between) < len(places) or self._between.dtype != rows.dtype:
                self._between = np.empty(len(rows), rows.dtype)
            between = self._between[: len(places)]
            reader.copy_rows(indexes[places], between)
            rows[places] = between


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


def _let_go(reading: Reading, shards: NDArray[np.int64]) -> None:
    """Say that these samples, the next ones, were read."""
    are_last = reading.last_uses(shards)
    if are_last is not None:
        for shard in np.unique(shards[are_last]).tolist():
            reading.let_go(shard)
    reading.have_read(len(shards) // reading.batch_size)


def _table(rows: _Rows, batch_size: int) -> Table:
    size = min(batch_size, len(rows.data))
    columns = rows.plain.columns_of(rows.data).items()
    return Table({name: values.reshape(-1, size, *values.shape[1:]) for name, values in columns})
