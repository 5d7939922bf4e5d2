"""The passes over a dataset: where each begins, what a worker reads of it, and how far it has come.

A dataset shows its users samples and a place; who carries them out, as a loader does, talks to its passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from lightning_streaming.cache.misses import Misses
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.cursor import Cursor, PassCounter, PassStart
from lightning_streaming.loading.epochs import Epochs
from lightning_streaming.loading.making import Making
from lightning_streaming.loading.meter import Meter
from lightning_streaming.loading.reading import WorkerPass
from lightning_streaming.loading.samples import WorkerSamples
from lightning_streaming.loading.share import Share
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.loading.unsuited import unsuited
from lightning_streaming.loading.watch import keys_of_rows
from lightning_streaming.loading.watchers import WatchSettings
from lightning_streaming.world import World

_log = logging.getLogger(__name__)

MakingOf = Callable[[int, int], Making]
"""Says how the samples of an epoch are made, by shuffle seed and epoch."""


class Passes:
    """The passes over one dataset, in one process after another.

    Args:
        epochs: The order of samples.
        source: The samples.
        misses: Where each stream's cache notes what was not there, by stream name.
        predownload: Samples ahead of each worker for which shards are fetched.
        watched: Who is told of each sample.
    """

    def __init__(
        self,
        epochs: Epochs,
        source: SampleSource,
        misses: Mapping[str, Misses],
        predownload: int | None,
        watched: WatchSettings,
    ) -> None:
        self.epochs = epochs
        self._source = source
        self._misses = dict(misses)
        self._predownload = predownload
        self._watched = watched
        self._next = Cursor(0, 0)
        self._counter = PassCounter()
        self._latest: PassStart | None = None
        self._handed_out: Cursor | None = None
        self._assigned: WorkerPass | None = None
        self._reading: WorkerSamples | None = None
        self._has_told = False

    @property
    def catalog(self) -> Catalog:
        """Every shard and sample of the streams, in one numbering."""
        return self._source.catalog

    def say_whose(self, place: str) -> None:
        """Let errors say where the streams are configured, like ``data.val``."""
        self._source.say_whose(place)

    def next_cursor(self) -> Cursor:
        """Where the next pass begins."""
        return self._next.passes_later(self._counter.passes_counted())

    def seek(self, cursor: Cursor) -> None:
        """Let the next pass begin at ``cursor``; a pass under way goes on undisturbed, and counts no longer."""
        self._next = cursor
        self._counter.reset(cursor)
        self._latest = self._handed_out = self._reading = self._assigned = None

    def begin(self, world: World, batch_size: int, drop_last: bool = False) -> PassStart:
        """Begin the next pass and say where; the pass after it is that of the next epoch."""
        self._source.prepare()
        start = self.epochs.start(self.next_cursor(), world, batch_size, drop_last)
        self.seek(start.cursor.passes_later(1))
        self._latest = start
        return start

    def begin_in_worker(self, worker: int, world: World, batch_size: int) -> PassStart:
        """The same in a worker of a plain torch DataLoader, which tells it nothing."""
        start = self.epochs.start(self._counter.count_pass(worker), world, batch_size)
        if worker == 0 and self._counter.passes_counted() == 1:
            self.tell_unsuited(start)
        return start

    def tell_unsuited(self, start: PassStart) -> None:
        """Say once, on one rank, which settings do not suit the data or the machines."""
        if self._has_told or start.world.rank:
            return
        self._has_told = True
        settings, catalog = self.epochs.settle(start.world), self._source.catalog
        ahead = self._predownload if self._source.is_remote else None
        for sentence in unsuited(settings, start, catalog, self.epochs.weights.epoch_size, ahead):
            _log.warning("streams %s: %s", ", ".join(catalog.stream_names[:3]), sentence)

    def of_worker(
        self, making_of: MakingOf, start: PassStart, worker: int, num_workers: int, *, is_measured: bool = False
    ) -> WorkerPass:
        """What one of a loader's workers, or the only reader there is, reads of a pass that was begun."""
        source = self._source
        return WorkerPass(
            make_share=partial(_share, self.epochs, start, worker, num_workers),
            source=source,
            making=making_of(start.shuffle_seed, start.cursor.epoch),
            key=lambda row: keys_of_rows(source.catalog, start)(row),
            predownload=self._predownload,
            near_end=partial(self.epochs.prepare_next, start),
            meter=Meter(self._misses, is_read=is_measured),
            watch=self._watched.watch(source, start, worker),
        )

    def assign(self, of_pass: WorkerPass) -> None:
        """Let the next ``iter`` of the dataset in this process read this."""
        self._assigned = of_pass

    def take_assigned(self) -> WorkerPass | None:
        """What was assigned and not taken yet."""
        of_pass, self._assigned = self._assigned, None
        return of_pass

    def read_here(self, of_pass: WorkerPass) -> WorkerSamples:
        """Read the pass under way in this process; what is taken counts as read."""
        self._reading = WorkerSamples(of_pass)
        return self._reading

    def hand_out(self, start: PassStart, end: Cursor) -> None:
        """Take note that a loader has handed out a pass up to here; of no meaning if another has begun since."""
        if start is self._latest:
            self._handed_out = end

    def handed_out(self) -> Cursor | None:
        """Up to where a loader has handed out the pass under way; None if there is no loader, or no such pass."""
        return None if self._counter.passes_counted() else self._handed_out

    def began(self) -> Cursor:
        """Where the pass under way began, or the next one begins if none is."""
        passes = self._counter.passes_counted()
        if passes:
            return self._next.passes_later(passes - 1)
        return self._next if self._latest is None else self._latest.cursor

    def samples_read(self) -> int:
        """Samples of the pass under way that were taken in this process."""
        if self._reading is None or self._counter.passes_counted():
            return 0
        return self._reading.samples_read

    def close(self) -> None:
        """Stop fetching."""
        if self._reading is not None:
            self._reading.close()
        self.epochs.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_assigned": None}


class HasPasses(Protocol):
    """A dataset."""

    _passes: Passes


def passes_of(dataset: HasPasses) -> Passes:
    """The passes over a dataset: for loaders and tools, not for users, whose own names may be any other."""
    return dataset._passes


def _share(epochs: Epochs, start: PassStart, worker: int, num_workers: int) -> Share:
    return Share(
        plan=epochs.plan(start),
        deal=epochs.deal(start),
        node=start.world.node,
        rank_of_node=start.world.rank_of_node,
        worker=worker,
        num_workers=num_workers,
    )
