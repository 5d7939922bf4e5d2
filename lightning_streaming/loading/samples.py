"""A worker's samples of one pass, in order: where ids become samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.prefetch import ShardNeed, ShardPrefetcher
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.order.partition import Deal
from lightning_streaming.order.plan import EpochPlan

_WINDOW_SAMPLES = 1024
"""Samples whose ids are worked out together: enough for numpy to be fast, few enough to start at once."""

Transform = Callable[[dict[str, Any], int], Any]
"""Turns a decoded sample, and its position in the epoch, into what the worker hands out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One worker's share of a pass: every ``num_workers``-th global batch, beginning with number ``worker``."""

    plan: EpochPlan
    deal: Deal
    node: int
    rank_of_node: int
    worker: int = 0
    num_workers: int = 1

    def windows(self) -> Iterator[NDArray[np.int64]]:
        """Positions of this worker's samples in the epoch's sequence, some batches at a time."""
        batches = range(self.worker, self.deal.num_batches(), self.num_workers)
        step = max(1, _WINDOW_SAMPLES // self.deal.batch_size)
        for first in range(0, len(batches), step):
            window = np.asarray(batches[first : first + step], np.int64)
            positions = self.deal.batches(window, self.node, self.rank_of_node).reshape(-1)
            yield positions[positions >= 0]


class _Window(NamedTuple):
    """Some consecutive samples of a worker, by position and place. Arrays of equal length."""

    positions: NDArray[np.int64]
    shards: NDArray[np.int64]
    indexes: NDArray[np.int64]


def _located(share: Share, catalog: Catalog) -> Iterator[_Window]:
    for positions in share.windows():
        shards, indexes = catalog.places(share.plan.ids(positions))
        yield _Window(positions, shards, indexes)


def shard_needs(share: Share, catalog: Catalog) -> Iterator[ShardNeed]:
    """Shards in the order in which this worker first needs them, once per window of samples."""
    samples_before = 0
    for window in _located(share, catalog):
        shards, first_uses = np.unique(window.shards, return_index=True)
        for use in np.argsort(first_uses, kind="stable"):
            yield ShardNeed(samples_before + int(first_uses[use]), int(shards[use]))
        samples_before += len(window.positions)


@dataclass(slots=True)
class WorkerSamples(Iterator[Any]):
    """Iterates over a worker's share of a pass; an iterator with a count and an explicit end."""

    share: Share
    source: SampleSource
    transform: Transform | None
    predownload: int
    """Samples ahead of the reader for which shards are fetched."""
    samples_read: int = 0
    """Samples handed out so far."""
    _prefetcher: ShardPrefetcher | None = None
    _iterator: Iterator[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._iterator = self._read()

    def __next__(self) -> Any:
        sample = next(self._iterator)
        self.samples_read += 1
        return sample

    def close(self) -> None:
        """Stop fetching ahead. The iterator must not be used afterwards."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _read(self) -> Iterator[Any]:
        catalog = self.source.catalog
        if self.source.is_remote:
            self._prefetcher = ShardPrefetcher(
                shard_needs(self.share, catalog), lambda shard: self.source.fetch(shard, wait=False), self.predownload
            )
        batch_size = self.share.deal.batch_size
        for window in _located(self.share, catalog):
            places = zip(window.positions.tolist(), window.shards.tolist(), window.indexes.tolist(), strict=True)
            for place, (position, shard, index) in enumerate(places):
                if self._prefetcher is not None:
                    if place % batch_size == 0:
                        self._prefetcher.reader_at(self.samples_read)
                    self._prefetcher.raise_if_failed(shard)
                sample = self.source.read(shard, index)
                yield sample if self.transform is None else self.transform(sample, position)
        self.close()
