"""What goes on beside a worker's reading of one pass: shards are fetched ahead, opened, let go of, and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import StreamingError
from lightning_streaming.formats.shard import ShardReader
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.last_uses import LastUses
from lightning_streaming.loading.making import Making, failed_sample
from lightning_streaming.loading.meter import Meter
from lightning_streaming.loading.prefetch import Reach, ShardPrefetcher, default_reach
from lightning_streaming.loading.sample_key import SampleKey
from lightning_streaming.loading.share import Share, Window, located, node_plan, shard_needs
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.loading.watch import Row, SampleWatch

_NEAR_END = 0.5
"""Part of a share after which what the next pass needs is made ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPass:
    """What one worker reads in a pass, where from, and what it makes of it."""

    make_share: Callable[[], Share]
    """Says what to read. Called with the first sample: torch reports an error of ``next``, but loses one of ``iter`` in
    a worker that lives on from pass to pass."""
    source: SampleSource
    making: Making
    key: Callable[[Row], SampleKey]
    """Finds the key of a sample."""
    predownload: int | None
    """Samples ahead of the reader for which shards are fetched; None for :func:`default_reach`."""
    near_end: Callable[[], None]
    """Called once, when most of the share has been read."""
    meter: Meter
    watch: SampleWatch | None
    """Is told of each sample; None for no one."""

    def may_be_tables(self) -> bool:
        """Whether samples may be plain, and nobody looks at them one by one."""
        making = self.making
        is_untouched = making.transform is None and making.make is None and self.watch is None
        return is_untouched and self.source.may_be_plain()

    def failed(self, row: Row, error: Exception) -> StreamingError:
        """What to raise from an error of the user's own code about a sample."""
        return failed_sample(error, self.making.name, self.key(row))

    def keys_of_batch(self, number: int) -> list[SampleKey]:
        """The keys of one of the worker's batches, counted from the first of the pass."""
        share, catalog = self.make_share(), self.source.catalog
        positions = share.batch(number)
        places = (positions, *catalog.places(share.plan.ids(positions)))
        rows = zip(*(numbers.tolist() for numbers in places), strict=True)
        return [self.key((position, shard, index, 0)) for position, shard, index in rows]

    @contextmanager
    def begun(self) -> Iterator[Reading]:
        """Read. Shards are fetched ahead meanwhile, if they are not all here, and the last use of each is watched for,
        where there is a limit on how many are kept."""
        share, source = self.make_share(), self.source
        self.meter.begin_pass(source.readers)
        with ExitStack() as stack:
            source.begin_pass(share.num_workers * share.deal.ranks_per_node)
            stack.callback(source.end_pass)
            prefetcher = last_uses = None
            if source.is_remote:
                ahead = self.predownload
                reach = Reach(ahead, ahead) if ahead else _default_reach(share, source.catalog)
                needs = shard_needs(share, source.catalog)
                prefetcher = stack.enter_context(closing(ShardPrefetcher(needs, source.fetch_ahead, reach)))
            if source.cache_limit is not None:
                last_uses = stack.enter_context(closing(LastUses(node_plan(share, source.catalog))))
            yield Reading(share, self, prefetcher, last_uses)


class Reading:
    """One worker's pass under way.

    Args:
        share: What is read.
        of_pass: How.
        prefetcher: Fetches shards ahead; None where they are all here.
        last_uses: Tells of shards' last uses; None where nobody need know.
    """

    def __init__(
        self, share: Share, of_pass: WorkerPass, prefetcher: ShardPrefetcher | None, last_uses: LastUses | None
    ) -> None:
        self.batch_size = share.deal.batch_size
        self._share = share
        self._source = of_pass.source
        self._meter = of_pass.meter
        self._near_end = of_pass.near_end
        self._prefetcher = prefetcher
        self._last_uses = last_uses
        self._batches_read = 0

    def windows(self) -> Iterator[Window]:
        """The worker's samples in order, some batches at a time."""
        # A share of one batch that is not full has all of its end in sight.
        near_end_at = (self._share.num_samples() - self.batch_size) * _NEAR_END
        samples_before, is_near_end, catalog = 0, False, self._source.catalog
        for window in located(self._share, catalog):
            self._meter.begin_window(catalog, window.shards, self.batch_size)
            samples_before += len(window.positions)
            if not is_near_end and samples_before > near_end_at:
                is_near_end = True
                self._near_end()
            yield window

    def last_uses(self, shards: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which of the samples that follow the batches read so far are this worker's last of their shards.

        Args:
            shards: The shard of each of these samples.

        Returns:
            None where nobody need know.
        """
        if self._last_uses is None:
            return None
        return self._last_uses.among(shards, self._batches_read * self.batch_size)

    def reader(self, shard: int) -> ShardReader:
        """The reader of a shard whose sample is next; opened, and fetched, if need be."""
        readers = self._source.readers
        reader = readers.get(shard)
        if reader is None:
            return self._open(shard)
        readers.move_to_end(shard)
        return reader

    def let_go(self, shard: int) -> None:
        """Take note that the worker's last sample of a shard was read."""
        self._source.let_go(shard)
        if self._prefetcher is not None:
            self._prefetcher.moved_on()

    def about_to_read(self, batches: int) -> None:
        """Fetch ahead as if so many more batches had been read: they are about to be, all at once."""
        if self._prefetcher is not None:
            self._prefetcher.reader_at((self._batches_read + max(0, batches)) * self.batch_size)

    def have_read(self, batches: int) -> None:
        """Take note that so many more batches were read, and are not handed out yet."""
        self._batches_read += batches
        self.about_to_read(0)
        for finished in () if self._last_uses is None else self._last_uses.finished(self._batches_read):
            self._source.finish(finished)
        self._source.rest()

    def _open(self, shard: int) -> ShardReader:
        began = perf_counter_ns()
        if self._prefetcher is not None:
            self._prefetcher.retry_if_failed(shard)
        reader = self._source.open(shard)
        self._meter.opened(began, self._source.catalog, shard)
        if self._prefetcher is not None:
            self._prefetcher.moved_on()
        return reader


def _default_reach(share: Share, catalog: Catalog) -> Reach:
    readers = share.num_workers * share.deal.ranks_per_node
    return default_reach(share.deal.batch_size, catalog.num_samples / len(catalog.shards), readers)
