"""The order of every epoch of a run: the user's request, resolved, over the data.

RunRequest   the user's options: order, weights, phases, steps, packs, batches to skip
RunOrder     these, resolved, over the data: the sequence of each epoch, and its fingerprint
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.options.packing import Packing
from lightning_streaming.resume.appended_data import NO_GROWTH, Growth
from lightning_streaming.resume.fingerprint import Fingerprint
from lightning_streaming.resume.order_files import EpochPacker, shared_order
from lightning_streaming.resume.state import Cursor, SavedPosition
from lightning_streaming.selection.catalog import Catalog, CatalogView
from lightning_streaming.sequence.batching import Batched, batched
from lightning_streaming.sequence.draw import Draw, Shuffled, drawn_here
from lightning_streaming.sequence.packing.packs import PackedPart
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.phased import Mixture, Phased
from lightning_streaming.sequence.phases import MixtureSchedule, ResolvedPhase
from lightning_streaming.sequence.settings import OrderSettings, ResolvedOrder
from lightning_streaming.sequence.skips import (
    BatchRange,
)
from lightning_streaming.sequence.steps import SequenceStep, with_steps
from lightning_streaming.sequence.stream_slices import StreamPasses, TruncatedEpochs
from lightning_streaming.sequence.weights import DatasetShape, ResolvedWeights, StreamWeight, resolve_weights

_SEQUENCES_KEPT = 3
"""Sequences that are kept for the next question: of the epoch under way, the one before and the one after."""

_weights = lru_cache(maxsize=16)(resolve_weights)


def _sizes_of_read_shards(catalog: CatalogView) -> tuple[NDArray[np.int64], ...]:
    """Return the samples in each shard, per stream, without shards of which nothing is selected."""
    sizes = zip(catalog.shard_sizes_per_stream, catalog.selections, strict=True)
    return tuple(of if selection is None else of[of > 0] for of, selection in sizes)


def _shorter_passes(catalog: CatalogView, stream: int, grown: Sequence[tuple[int, int]]) -> tuple[TruncatedEpochs, ...]:
    """The passes of a stream that read less, in shards of which something is selected."""
    sizes = catalog.shard_sizes_per_stream[stream]
    are_read = np.cumsum(sizes > 0 if catalog.selections[stream] is not None else np.ones_like(sizes))
    found = tuple(TruncatedEpochs(shards=int(are_read[shards - 1]), stop=stop) for stop, shards in grown)
    if not StreamPasses(sizes[sizes > 0] if catalog.selections[stream] is not None else sizes, found).are_whole:
        raise StateError(
            f"'grown' of stream {catalog.stream_names[stream]!r} of the saved position has passes that do not end with "
            f"their shards: {list(grown)}",
            hint="the state was edited or damaged; go on from another checkpoint",
            stream=catalog.stream_names[stream],
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """The user's options."""

    settings: OrderSettings
    weights: tuple[StreamWeight, ...]
    """Each stream's weight, in stream order."""
    epoch_size: int | None
    """Samples per epoch, if the user chose."""
    skip: tuple[BatchRange, ...] = ()
    """Global batches of the run to leave out."""
    batch_size: int | None = None
    """Samples per batch on each rank, if the dataset was told."""
    phases: tuple[ResolvedPhase, ...] = ()
    """What each part of an epoch takes of each stream, in place of weights and size."""
    pack: Packing | None = None
    """How documents are brought together, if they are."""
    steps: tuple[SequenceStep, ...] = ()
    """The user's, which change what an epoch reads after its shuffle."""
    followed: frozenset[int] = frozenset()
    """Streams, by place, of which epochs after a resume read what was appended meanwhile."""

    def mixture(self, settings: ResolvedOrder, catalog: CatalogView, growth: Growth = NO_GROWTH) -> Mixture | None:
        """Return the streams that its phases mix; None without a schedule.

        Raises:
            ConfigError: The phases cannot be read so.
        """
        if not self.phases:
            return None
        names = catalog.stream_names
        return Mixture(
            settings,
            self.phases,
            dict(zip(names, _sizes_of_read_shards(catalog), strict=True)),
            dict(zip(names, catalog.first_ids, strict=True)),
            shorter={names[stream]: _shorter_passes(catalog, stream, told) for stream, told in growth.passes},
            draw=shared_order,
        )

    def resolved_weights(
        self, catalog: CatalogView, settings: OrderSettings, growth: Growth = NO_GROWTH
    ) -> ResolvedWeights:
        """Return the samples of each stream; the seed decides which streams get the remainder of rounding."""
        resolved = settings if isinstance(settings, ResolvedOrder) else settings.resolved(1)
        mixture = self.mixture(resolved, catalog, growth)
        if mixture is not None:
            return mixture.plan.weights(catalog.stream_names, mixture.passes)
        self._check_repeats(catalog)
        return _weights(self.weights, tuple(catalog.samples_per_stream), self.epoch_size, settings.shuffle_seed)

    def _check_repeats(self, catalog: CatalogView) -> None:
        """Check that no stream is repeated so rarely that no epoch reads a sample of it."""
        for name, weight, samples in zip(catalog.stream_names, self.weights, catalog.samples_per_stream, strict=True):
            if weight.repeat and int(weight.repeat * samples) < 1:
                raise ConfigError(
                    f"repeat of stream {name!r} is {weight.repeat}, and the stream has {samples} samples, so an epoch "
                    "would read none of them",
                    hint="raise it, pass choose=1 in its place, or leave the stream out",
                    option="repeat",
                    stream=name,
                )

    def of_order(self) -> RunRequest:
        """Return the options of the order only."""
        return replace(self, skip=(), batch_size=None, followed=frozenset())

    def resumed(self, saved: SavedPosition) -> OrderSettings:
        """Return the settings with seed and canonical nodes of a saved position."""
        # From what was asked, not from what was resolved since: the block size follows the canonical nodes.
        return replace(self.settings, shuffle_seed=saved.shuffle_seed, num_canonical_nodes=saved.num_canonical_nodes)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOrder:
    """The order of every epoch of a run: resolved settings over its data.

    If the data has grown, and epochs read different parts of it, :meth:`of_epoch` returns the order of one epoch.
    """

    settings: ResolvedOrder
    catalog: CatalogView
    weights: ResolvedWeights
    mixture: Mixture | None = None
    """What phases read of the streams, where there are phases."""
    growth: Growth = NO_GROWTH
    """What it leaves out of today's data."""
    packer: EpochPacker | None = None
    """Makes packs of the documents, where they are brought together: then these are what epochs are made of."""
    steps: tuple[SequenceStep, ...] = ()
    """The user's, between the shuffle and the batches."""
    later: RunOrder | None = None
    """That of epochs after ``growth.last_epoch``, where these read more."""
    _sequences: dict[tuple[BatchGeometry, int], Batched] = field(default_factory=dict, repr=False)
    _fingerprints: dict[int, Fingerprint] = field(default_factory=dict, repr=False)

    @cached_property
    def shape(self) -> DatasetShape:
        """Return the shape of the data."""
        data = self.catalog
        first_ids = data.first_ids if data.leaves_gaps else ()
        return DatasetShape(shard_sizes=_sizes_of_read_shards(data), weights=self.weights, first_ids=first_ids)

    def of_epoch(self, epoch: int) -> RunOrder:
        """Return the order of one epoch, and of all others that read the same part of the data."""
        return self if self.later is None or epoch <= self.growth.last_epoch else self.later

    @property
    def differs_by_epoch(self) -> bool:
        """Return whether epochs may have different lengths."""
        return self.later is not None or self.packer is not None or bool(self.steps)

    @property
    def plan(self) -> MixtureSchedule | None:
        """Return what each mixture step takes of each stream; None without a schedule."""
        return None if self.mixture is None else self.mixture.plan

    def fingerprint(self, phases_begun: int = 0) -> Fingerprint:
        """Return the fingerprint of a saved position.

        Args:
            phases_begun: Phases of which a sample was read: what comes after them may change.
        """
        known = self._fingerprints.get(phases_begun)
        if known is None:
            grown = dict(self.growth.passes)
            known = Fingerprint(
                self.catalog,
                self.settings,
                self.weights,
                self.plan,
                phases_begun,
                grown,
                packing=None if self.packer is None else self.packer.saved(),
                sequence=tuple(step.facts for step in self.steps),
            )
            self._fingerprints[phases_begun] = known
        return known

    def phases_begun(self, cursor: Cursor, geometry: BatchGeometry) -> int:
        """Return how many phases have begun at a cursor: those of which a sample was read."""
        if self.plan is None:
            return 0
        if cursor.epoch:
            return len(self.plan.phases)
        ended = np.searchsorted(self.phase_stops(geometry, 0), cursor.sample_in_epoch, side="left")
        return min(int(ended) + bool(cursor.sample_in_epoch), len(self.plan.phases))

    def phases_ended(self, cursor: Cursor, geometry: BatchGeometry) -> int:
        """Return how many phases of its epoch have ended at a cursor."""
        if self.plan is None:
            return 0
        return int(np.searchsorted(self.phase_stops(geometry, cursor.epoch), cursor.sample_in_epoch, side="right"))

    def check_phases(self, first: int = 0) -> None:
        """Check that phases can be read, from one of them.

        Raises:
            ConfigError: A stream is missing, or would be read more often than it may.
        """
        if self.plan is None or self.mixture is None:
            return
        self.plan.check_streams(self.catalog.stream_names, first)
        self.plan.check_repeats(self.mixture.passes, first)

    def phase(self, cursor: Cursor, geometry: BatchGeometry) -> str | None:
        """Return the name of the phase that is read at a cursor; None without a schedule."""
        if self.plan is None:
            return None
        phases = self.plan.phases
        return phases[min(self.phases_ended(cursor, geometry), len(phases) - 1)].name

    def phase_stops(self, geometry: BatchGeometry, epoch: int) -> NDArray[np.int64]:
        """Return the position at which each phase of an epoch ends; only with a schedule."""
        assert self.plan is not None, "as there are phases"
        return self.sequence(geometry, epoch).part_stops()[self.plan.last_steps]

    @property
    def is_composed(self) -> bool:
        """Return whether batches are composed for given machines, so that an epoch's sequence depends on them."""
        return self.settings.batching_method != "random"

    def sequence(self, geometry: BatchGeometry, epoch: int) -> Batched:
        """Return the sequence of an epoch, to count with. It is cached, so do not request ids of it.

        Args:
            geometry: What its batches are made for.
            epoch: Counts from 0.
        """
        known = self._sequences.get((geometry, epoch))
        if known is None:
            known = self._batched(geometry, epoch)
            # Anew, rather than changed: a checkpoint may be written by a thread.
            kept = list(self._sequences.items())[1 - _SEQUENCES_KEPT :]
            object.__setattr__(self, "_sequences", {**dict(kept), (geometry, epoch): known})
        return known

    def drawn(
        self, geometry: BatchGeometry, epoch: int, draw: Draw, will_follow: Callable[[Shuffled], None]
    ) -> Batched:
        """Return the sequence of an epoch, to request ids of it.

        Args:
            geometry: What its batches are made for.
            epoch: Counts from 0.
            draw: Draws what has to be drawn before ids of it are known.
            will_follow: Told what will have to be drawn next, where an epoch is not drawn as a whole.
        """
        if self.mixture is None and self.packer is None:
            return batched(with_steps(self.first_draw(epoch, draw).drawn(), self.steps), geometry)
        return self._batched(geometry, epoch, draw, will_follow)

    def can_draw_first(self) -> bool:
        """Return whether the beginning of a later epoch can be drawn: streams of its phases may have been removed."""
        return self.mixture is None or self.mixture.can_draw(1, 0)

    def first_draw(self, epoch: int, draw: Draw = drawn_here) -> Shuffled:
        """Return what has to be drawn first for an epoch; without a schedule, all of it."""
        if self.mixture is not None:
            return self.mixture.shuffled(epoch, 0, draw)
        return Shuffled(self.settings, self.shape, epoch, draw)

    def _batched(
        self,
        geometry: BatchGeometry,
        epoch: int,
        draw: Draw = drawn_here,
        will_follow: Callable[[Shuffled], None] | None = None,
    ) -> Batched:
        if self.packer is not None:
            return self.packer.epoch(self._parts(epoch, draw))
        if self.mixture is not None:
            return Phased(self.mixture, geometry, epoch, draw, will_follow, self.steps)
        return batched(with_steps(self.first_draw(epoch, draw), self.steps), geometry)

    def _parts(self, epoch: int, draw: Draw) -> list[PackedPart]:
        """Return the parts that are packed separately: the epoch, or each mixture step."""
        if self.mixture is None:
            return [PackedPart(order=with_steps(self.first_draw(epoch, draw), self.steps), first_position=0)]
        orders = [
            with_steps(self.mixture.shuffled(epoch, step, draw), self.steps) for step in range(len(self.mixture.plan))
        ]
        starts = accumulate(map(len, orders), initial=0)
        return [PackedPart(order=order, first_position=start) for order, start in zip(orders, starts, strict=False)]


def resolved_order(
    asked: RunRequest, settings: ResolvedOrder, catalog: Catalog, growth: Growth = NO_GROWTH
) -> RunOrder:
    later = order_of(asked, settings, catalog.head(growth.shards_in(growth.last_epoch + 1)), growth)
    if not growth.followed or growth.last_epoch < 0:
        return later
    return order_of(asked, settings, catalog.head(growth.shards_in(growth.last_epoch)), growth, later)


def order_of(
    asked: RunRequest, settings: ResolvedOrder, data: CatalogView, growth: Growth, later: RunOrder | None = None
) -> RunOrder:
    mixture = asked.mixture(settings, data, growth)
    if mixture is None:
        weights = asked.resolved_weights(data, settings)
    else:
        weights = mixture.plan.weights(data.stream_names, mixture.passes)
    packer = None
    if asked.pack is not None:
        assert data.lengths is not None, "they are looked up where documents are packed"
        packer = EpochPacker(pack=asked.pack, lengths=data.lengths)
    return RunOrder(
        settings=settings,
        catalog=data,
        weights=weights,
        mixture=mixture,
        growth=growth,
        packer=packer,
        steps=asked.steps,
        later=later,
    )
