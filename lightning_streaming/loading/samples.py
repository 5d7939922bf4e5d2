"""A worker's samples of one pass, one by one: where ids become samples."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from lightning_streaming.errors import FormatError
from lightning_streaming.loading.reading import Reading, WorkerPass
from lightning_streaming.loading.share import Window
from lightning_streaming.loading.transform import KeyedSample
from lightning_streaming.loading.watch import Row

_LAST_USE, _BATCH_ENDS = 1, 2


class WorkerSamples(Iterator[Any]):
    """Iterates over a worker's samples of a pass and counts them. It ends when nobody holds it any more.

    Args:
        of_pass: What to read.
    """

    def __init__(self, of_pass: WorkerPass) -> None:
        self.samples_read = 0
        """Samples handed out so far."""
        make = of_pass.making.make
        samples = _read(of_pass) if make is None else _make(of_pass, make)
        self._samples = samples if of_pass.watch is None else of_pass.watch.samples(samples)

    def __next__(self) -> Any:
        sample = next(self._samples)
        self.samples_read += 1
        return sample

    def close(self) -> None:
        """Hand out no more, and stop fetching ahead."""
        self._samples.close()


def _read(of_pass: WorkerPass) -> Generator[Any, None, None]:
    source, transform, watch = of_pass.source, of_pass.making.transform, of_pass.watch
    with of_pass.begun() as reading:
        readers, latest = source.readers, -1
        for window in reading.windows():
            rows = _rows(window, reading)
            for position, shard, index, events in rows if watch is None else watch.rows(rows):
                # At every sample anew: what the caller does between two of them may close shards.
                reader = readers.get(shard) if shard == latest else reading.reader(shard)
                if reader is None:
                    reader = reading.reader(shard)
                latest = shard
                try:
                    sample = reader[index]
                except FormatError as error:
                    raise source.named(error, shard) from error
                if events:
                    _note(events, shard, reading)
                if transform is not None:
                    try:
                        sample = transform(sample, position)
                    except Exception as error:
                        raise of_pass.failed((position, shard, index, events), error) from error
                yield sample


def _make(of_pass: WorkerPass, make: KeyedSample) -> Generator[Any, None, None]:
    """The samples as a subclass of the dataset makes them, each while its shard is open."""
    source, watch = of_pass.source, of_pass.watch
    with of_pass.begun() as reading:
        first_ids = source.catalog.first_sample_of_shard
        for window in reading.windows():
            rows = _rows(window, reading)
            for position, shard, index, events in rows if watch is None else watch.rows(rows):
                reading.reader(shard)
                source.is_in_pass = True
                try:
                    sample = make(int(first_ids[shard]) + index, position)
                except Exception as error:
                    raise of_pass.failed((position, shard, index, events), error) from error
                finally:
                    source.is_in_pass = False
                if events:
                    _note(events, shard, reading)
                yield sample


def _note(events: int, shard: int, reading: Reading) -> None:
    if events & _LAST_USE:
        reading.let_go(shard)
    if events & _BATCH_ENDS:
        reading.have_read(batches=1)


def _rows(window: Window, reading: Reading) -> Iterator[Row]:
    """Position, shard, index within it, and what happens after it, sample by sample."""
    events = np.zeros(len(window.positions), np.uint8)
    events[reading.batch_size - 1 :: reading.batch_size] = _BATCH_ENDS
    are_last = reading.last_uses(window.shards)
    if are_last is not None:
        events[are_last] |= _LAST_USE
    columns = window.positions.tolist(), window.shards.tolist(), window.indexes.tolist(), events.tobytes()
    return zip(*columns, strict=True)
