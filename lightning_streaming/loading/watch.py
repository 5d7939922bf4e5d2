"""Keeping an eye on a worker's samples, one by one: for those who log them, and for those who time them.

A pass that nobody watches runs without any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import accumulate
from typing import Any, Protocol

from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.cursor import PassStart
from lightning_streaming.loading.sample_key import SampleKey

_NO_MORE = object()

Row = tuple[int, int, int, int]
"""Position of a sample in the epoch, its shard over all streams, its index there; and what is no watcher's business."""


class Watcher(Protocol):
    """Someone who is told of each sample. All of it happens in the thread that reads."""

    def asked(self) -> None:
        """The next sample is asked for; nobody knows which one yet."""

    def begun(self, row: Row) -> None:
        """It is this one: it is going to be fetched, decoded and transformed."""

    def given(self) -> None:
        """It is handed out."""

    def close(self) -> None:
        """No more samples are asked for."""


class SampleWatch:
    """Tells watchers about the samples of one worker's pass, in order.

    Args:
        watchers: Makes those who are told, when the first sample is asked for.
    """

    def __init__(self, watchers: Callable[[], Sequence[Watcher]]) -> None:
        self._make = watchers
        self._watchers: Sequence[Watcher] = ()

    def rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The same rows; each is told of when it is asked for, which is when its sample is read."""
        for row in rows:
            for watcher in self._watchers:
                watcher.begun(row)
            yield row

    def samples(self, samples: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The same samples; the watch ends with the last of them."""
        with ExitStack() as stack:
            stack.enter_context(closing(samples))
            self._watchers = [stack.enter_context(closing(watcher)) for watcher in self._make()]
            while True:
                for watcher in self._watchers:
                    watcher.asked()
                sample = next(samples, _NO_MORE)
                for watcher in self._watchers:
                    watcher.given()
                if sample is _NO_MORE:
                    return
                yield sample


def keys_of_rows(catalog: Catalog, start: PassStart) -> Callable[[Row], SampleKey]:
    """What finds the key of a sample of this pass."""
    first_shards = [0, *accumulate(catalog.shards_per_stream)]

    def key(row: Row) -> SampleKey:
        position, shard, index, _ = row
        stream = int(catalog.stream_of_shard[shard])
        return SampleKey(
            stream=catalog.stream_names[stream],
            shard=shard - first_shards[stream],
            index=index,
            epoch=start.cursor.epoch,
            position=position,
            shuffle_seed=start.shuffle_seed,
        )

    return key
