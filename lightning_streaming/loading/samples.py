"""A worker's samples of one pass, in order: where ids become samples."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.last_uses import LastUses
from lightning_streaming.loading.prefetch import ShardNeed, ShardPrefetcher
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.plan import EpochPlan

_WINDOW_SAMPLES = 8192
"""Samples whose ids are worked out together: enough for numpy to be fast, few enough to start at once."""
_NEAR_END = 0.5
"""Part of a share after which what the next pass needs is made ready."""

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
            # Only an epoch's last batch has gaps.
            yield positions if positions[-1] >= 0 else positions[positions >= 0]

    def num_samples(self) -> int:
        """About how many samples :meth:`windows` gives, exactly if the last batch is full."""
        return len(range(self.worker, self.deal.num_batches(), self.num_workers)) * self.deal.batch_size


class _Window(NamedTuple):
    """Some consecutive samples of a worker, by position and place. Arrays of equal length."""

    positions: NDArray[np.int64]
    shards: NDArray[np.int64]
    indexes: NDArray[np.int64]

    def rows(self, last_uses: LastUses | None, samples_before: int) -> Iterator[tuple[int, int, int, bool]]:
        """Position, shard, index within it, and whether this is the shard's last sample, one by one."""
        columns = (self.positions.tolist(), self.shards.tolist(), self.indexes.tolist())
        if last_uses is None:
            return zip(*columns, repeat(False), strict=False)
        return zip(*columns, last_uses.among(self.shards, samples_before).tolist(), strict=True)


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


class WorkerSamples(Iterator[Any]):
    """Iterates over a worker's share of a pass; an iterator with a count, which ends when nobody holds it any more.

    Args:
        make_share: Says what to read. Called with the first ``next``: in a worker that lives on from pass to pass,
            torch reports an error of ``next``, and loses one of ``iter``.
        source: Where from.
        transform: What to make of each sample.
        predownload: Samples ahead of the reader for which shards are fetched.
        near_end: Called once, when most of the share has been read.
    """

    def __init__(
        self,
        make_share: Callable[[], Share],
        source: SampleSource,
        transform: Transform | None,
        predownload: int,
        near_end: Callable[[], None],
    ) -> None:
        self.samples_read = 0
        """Samples handed out so far."""
        self._samples = _read(make_share, source, transform, predownload, near_end)

    def __next__(self) -> Any:
        sample = next(self._samples)
        self.samples_read += 1
        return sample

    def close(self) -> None:
        """Hand out no more, and stop fetching ahead."""
        self._samples.close()


def _read(
    make_share: Callable[[], Share],
    source: SampleSource,
    transform: Transform | None,
    predownload: int,
    near_end: Callable[[], None],
) -> Generator[Any, None, None]:
    share = make_share()
    # A share of one batch that is not full has all of its end in sight.
    near_end_at = (share.num_samples() - share.deal.batch_size) * _NEAR_END
    is_near_end = False
    source.share_room(share.num_workers * share.deal.ranks_per_node)
    with _prefetching(share, source, predownload) as prefetcher, _last_uses(share, source) as last_uses:
        samples_read = 0
        for window in _located(share, source.catalog):
            if not is_near_end and samples_read + len(window.positions) > near_end_at:
                is_near_end = True
                near_end()
            for position, shard, index, is_last in window.rows(last_uses, samples_read):
                if prefetcher is not None and samples_read % share.deal.batch_size == 0:
                    prefetcher.reader_at(samples_read)
                sample = _read_one(source, prefetcher, shard, index, is_last)
                samples_read += 1
                if samples_read % share.deal.batch_size == 0:
                    source.end_batch()
                yield sample if transform is None else transform(sample, position)


def _read_one(
    source: SampleSource, prefetcher: ShardPrefetcher | None, shard: int, index: int, is_last: bool
) -> dict[str, Any]:
    goes_on = not source.has_open(shard)
    if prefetcher is not None and goes_on:
        prefetcher.retry_if_failed(shard)
    sample = source.read(shard, index)
    if is_last:
        source.finish(shard)
    if prefetcher is not None and (goes_on or is_last):
        prefetcher.moved_on()
    return sample


@contextmanager
def _prefetching(share: Share, source: SampleSource, predownload: int) -> Iterator[ShardPrefetcher | None]:
    """Fetch shards ahead of a reader while it reads; nothing where they are all here."""
    with ExitStack() as stack:
        stack.callback(source.end_pass)
        prefetcher = None
        if source.is_remote:
            needs = shard_needs(share, source.catalog)
            prefetcher = stack.enter_context(closing(ShardPrefetcher(needs, source.fetch_ahead, predownload)))
        yield prefetcher


@contextmanager
def _last_uses(share: Share, source: SampleSource) -> Iterator[LastUses | None]:
    """Find out when shards are needed for the last time, where there is a limit on how many are kept."""
    if source.cache_limit is None:
        yield None
        return
    catalog = source.catalog

    def shards_in_order() -> Iterator[NDArray[np.int64]]:
        return (window.shards for window in _located(share, catalog))

    with closing(LastUses(shards_in_order, share.num_samples(), len(catalog.shards))) as last_uses:
        yield last_uses
