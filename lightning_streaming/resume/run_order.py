"""The order of every epoch of a run: the user's options, resolved, over the data.

RunRequest   the user's options: order, weights, phases, steps, packing, batches to skip
RunOrder     these, resolved, over the data: the sequence of each epoch, and its fingerprint

An epoch is made of a *source*, the user's steps, and batches or packs. The source is a ``Mixture`` with a schedule, and
``WeightedEpochs`` without one: it has one or more parts, which are drawn and shuffled separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.options.mixing import MixingConfig
from lightning_streaming.options.packing import Packing
from lightning_streaming.resume.appended_data import NO_GROWTH, Growth
from lightning_streaming.resume.fingerprint import Fingerprint
from lightning_streaming.resume.order_files import EpochPacker, shared_order
from lightning_streaming.resume.state import Cursor, SavedPosition
from lightning_streaming.selection.catalog import Catalog, CatalogLengths, CatalogView
from lightning_streaming.sequence.base import digest_of
from lightning_streaming.sequence.batching import Batched, batched
from lightning_streaming.sequence.draw import Draw, Shuffled, drawn_here
from lightning_streaming.sequence.packing.packs import PackedPart
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.phased import Mixture, StepDraws
from lightning_streaming.sequence.phases import Mix, MixtureSchedule, ResolvedPhase, WeightChange
from lightning_streaming.sequence.settings import OrderSettings, ResolvedOrder
from lightning_streaming.sequence.skips import BatchRange
from lightning_streaming.sequence.steps import SequenceStep, with_steps
from lightning_streaming.sequence.stream_slices import StreamPasses, TruncatedEpochs
from lightning_streaming.sequence.weights import DatasetShape, ResolvedWeights, StreamWeight, resolve_weights

WHOLE_EPOCH = "proportion"
"""Name of the only phase of an epoch without a schedule, if options of mixing make it one."""
_ROUNDING = 1e-10
"""How much a sum of rounded shares may differ from 1."""
_CACHED_SEQUENCES = 3
"""Sequences that are cached: of the epoch under way, the one before and the one after."""

_weights = lru_cache(maxsize=16)(resolve_weights)


def _sizes_of_read_shards(catalog: CatalogView) -> tuple[NDArray[np.int64], ...]:
    """Return the samples in each shard, per stream, without shards of which nothing is selected."""
    streams = zip(catalog.shard_sizes_per_stream, catalog.selections, strict=True)
    return tuple(sizes if selection is None else sizes[sizes > 0] for sizes, selection in streams)


def _rounded(number: float) -> float:
    """Return a number with as many digits as are the same on all machines, and for all weights of the same ratios."""
    return float(f"{number:.12g}")


def _shares(mix: Mix, factors: Mapping[str, float]) -> Mix:
    """Return the shares that weights, times factors, have in their sum. Shares stay as they are."""
    weights = {name: weight * factors.get(name, 1.0) for name, weight in mix}
    total = sum(weights.values())
    if abs(total - 1) < _ROUNDING:
        total = 1.0
    return tuple((name, _rounded(weight / total)) for name, weight in weights.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """The user's options."""

    settings: OrderSettings
    weights: tuple[StreamWeight, ...]
    """Each stream's weight, in stream order."""
    epoch_size: int | None
    """Samples per epoch, if set."""
    skip: tuple[BatchRange, ...] = ()
    """Global batches of the run to leave out."""
    batch_size: int | None = None
    """Samples per batch on each rank, if the dataset has it."""
    phases: tuple[ResolvedPhase, ...] = ()
    """The schedule: the samples that each part of an epoch takes of each stream, instead of weights and size."""
    mixing: MixingConfig | None = None
    """The unit and the limits of weights; with it, an epoch without a schedule is a single phase."""
    weights_set: tuple[WeightChange, ...] = ()
    """Weights that the run has set, which a saved position holds."""
    pack: Packing | None = None
    """The packing of documents, if they are packed."""
    steps: tuple[SequenceStep, ...] = ()
    """The user's steps, which change what an epoch reads after its shuffle."""
    followed: frozenset[int] = frozenset()
    """Streams, by number, of which epochs after a resume read appended data."""

    @property
    def has_phases(self) -> bool:
        """True if streams continue from step to step, over all epochs: with a schedule, or with options of mixing."""
        return bool(self.phases) or self.mixing is not None

    def mixture(self, settings: ResolvedOrder, catalog: CatalogView, growth: Growth = NO_GROWTH) -> Mixture | None:
        """Return the streams that its phases mix; None without a schedule.

        Raises:
            ConfigError: The data cannot be read with these phases.
            StateError: Passes of a stream that has grown do not end with their shards.
        """
        if not self.has_phases:
            return None
        names, sizes_read = catalog.stream_names, _sizes_of_read_shards(catalog)
        truncated = {}
        for stream, passes in growth.passes:
            sizes = catalog.shard_sizes_per_stream[stream]
            are_read = np.cumsum(sizes > 0 if catalog.selections[stream] is not None else np.ones_like(sizes))
            epochs = tuple(TruncatedEpochs(shards=int(are_read[shards - 1]), stop=stop) for stop, shards in passes)
            if not StreamPasses(sizes_read[stream], epochs).are_whole:
                raise StateError(
                    f"'grown' of stream {names[stream]!r} of the saved position has passes that do not end with their "
                    f"shards: {list(passes)}",
                    hint="the state was edited or damaged; resume from another checkpoint",
                    stream=names[stream],
                )
            truncated[names[stream]] = epochs
        shard_sizes = dict(zip(names, sizes_read, strict=True))
        first_ids = dict(zip(names, catalog.first_ids, strict=True))
        mixing = self.mixing or MixingConfig()
        tokens = KeptTokens.of(catalog.lengths, self.pack) if mixing.in_tokens else None
        phases = self.phases
        if self.mixing is not None:
            draws = StepDraws(settings, shard_sizes, first_ids, truncated, tokens)
            phases = self._weighted_phases(
                mixing,
                {
                    name: draws.passes(name).position(0)[1]
                    if tokens is None
                    else draws.token_passes(name).tokens_of_pass(0)
                    for name in names
                },
            )
        return Mixture(
            settings,
            phases,
            shard_sizes,
            first_ids,
            shorter=truncated,
            draw=shared_order,
            tokens=tokens,
            limits=mixing.max_repeats,
            redistributes=mixing.beyond == "redistribute",
            changes=self.weights_set,
            most_per_step=None if mixing.longest_step is None else int(mixing.longest_step),
        )

    def _weighted_phases(self, mixing: MixingConfig, sizes: Mapping[str, int]) -> tuple[ResolvedPhase, ...]:
        """Return the phases with weights that take the sizes of streams into account.

        Args:
            mixing: The options of the mixture.
            sizes: Samples, or tokens, of the first pass over each stream.
        """
        exponent, phases = mixing.size_exponent, self.phases
        factors = dict.fromkeys(sizes, 1.0)
        if not phases:
            said = [weight.proportion for weight in self.weights]
            if None in said and any(proportion is not None for proportion in said):
                raise ConfigError(
                    f"proportion must be given for all {len(said)} streams or for none, but "
                    f"{len(said) - said.count(None)} have it",
                    option="proportion",
                )
            if None in said:
                said, exponent = [1.0] * len(said), exponent or 1.0
            mix = tuple(sorted((name, float(weight)) for name, weight in zip(sizes, said, strict=True) if weight))
            if not mix:
                raise ConfigError("at least one stream needs a proportion above 0", option="proportion")
            stop = self.epoch_size or sum(sizes.values())
            phases = (ResolvedPhase(name=WHOLE_EPOCH, planned_stop=stop, begin=mix, end=mix),)
        if exponent:
            # Rounded, as powers differ in the last digit between machines.
            factors = {name: _rounded(size**exponent) for name, size in sizes.items()}
        return tuple(
            replace(phase, begin=_shares(phase.begin, factors), end=_shares(phase.end, factors)) for phase in phases
        )

    def resolved_weights(
        self, catalog: CatalogView, settings: OrderSettings, growth: Growth = NO_GROWTH, mixture: Mixture | None = None
    ) -> ResolvedWeights:
        """Return the samples of each stream; the seed decides which streams get the remainder of rounding.

        Args:
            catalog: The data.
            settings: The settings of the order.
            growth: The shards that are read of streams that have grown.
            mixture: The result of :meth:`mixture`, if it is known.

        Raises:
            ConfigError: A stream is repeated so rarely that no epoch reads a sample of it.
        """
        resolved = settings if isinstance(settings, ResolvedOrder) else settings.resolved(1)
        mixture = mixture or self.mixture(resolved, catalog, growth)
        if mixture is not None:
            return mixture.plan.weights(catalog.stream_names, mixture.repeats)
        for name, weight, samples in zip(catalog.stream_names, self.weights, catalog.samples_per_stream, strict=True):
            if weight.repeat and int(weight.repeat * samples) < 1:
                raise ConfigError(
                    f"repeat of stream {name!r} is {weight.repeat}, and the stream has {samples} samples, so an epoch "
                    "would read none of them",
                    hint="increase it, pass choose=1 instead, or remove the stream",
                    option="repeat",
                    stream=name,
                )
        return _weights(self.weights, tuple(catalog.samples_per_stream), self.epoch_size, settings.shuffle_seed)

    def of_order(self) -> RunRequest:
        """Return the options of the order only."""
        return replace(self, skip=(), batch_size=None, followed=frozenset(), weights_set=())

    def resumed(self, saved: SavedPosition) -> OrderSettings:
        """Return the settings with seed and canonical nodes of a saved position."""
        # Of the unresolved settings: the default block size depends on the canonical nodes.
        return replace(self.settings, shuffle_seed=saved.shuffle_seed, num_canonical_nodes=saved.num_canonical_nodes)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptTokens:
    """The tokens that a run reads of samples: their lengths, without what packing cuts off or leaves out."""

    lengths: CatalogLengths
    most: int
    """The longest document that is read whole; 0 if all are."""
    drops: bool
    """Longer documents are left out, rather than cut."""

    @classmethod
    def of(cls, lengths: CatalogLengths | None, pack: Packing | None) -> KeptTokens:
        """Return the tokens of samples, packed so."""
        assert lengths is not None, "lengths were requested"
        settings = None if pack is None else pack.settings()
        longer = "split" if settings is None else settings.longer
        most = settings.capacity if settings is not None and longer in ("truncate", "drop") else 0
        return cls(lengths=lengths, most=most, drops=longer == "drop")

    @property
    def digest(self) -> str:
        """Digest of all that the tokens depend on."""
        return digest_of(self.lengths.digests, self.most, self.drops)

    def __call__(self, sample_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the tokens of some samples."""
        tokens = self.lengths(sample_ids)
        if self.most:
            tokens = np.where(tokens > self.most, 0 if self.drops else self.most, tokens).astype(np.uint32)
        return tokens


@dataclass(frozen=True, slots=True)
class WeightedEpochs:
    """The source of epochs without a schedule: one part, with each stream's share of it."""

    settings: ResolvedOrder
    shape: DatasetShape

    plan = None
    num_parts = 1

    def can_draw(self, _epoch: int, _part: int) -> bool:
        """Return True: its only part can be drawn in every epoch."""
        return True

    def has_epoch(self, _epoch: int) -> bool:
        """Return True: every epoch can be read."""
        return True

    def check_epoch(self, epoch: int) -> None:
        """Return: every epoch can be read."""

    def shuffled(self, epoch: int, part: int = 0, draw: Draw = drawn_here) -> Shuffled:
        """Return the shuffled draw of an epoch's only part."""
        return Shuffled(self.settings, self.shape, epoch, draw, step=part)

    def batched(
        self,
        geometry: BatchGeometry,
        epoch: int,
        draw: Draw = drawn_here,
        will_follow: Callable[[Shuffled], None] | None = None,
        steps: Sequence[SequenceStep] = (),
    ) -> Batched:
        """Return an epoch in batches, like :class:`~lightning_streaming.sequence.phased.Phased`."""
        order = self.shuffled(epoch, draw=draw)
        return batched(with_steps(order if will_follow is None else order.drawn(), steps), geometry)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOrder:
    """The order of every epoch of a run: resolved settings over its data.

    If the data has grown, and epochs read different parts of it, :meth:`of_epoch` returns the order of one epoch.
    """

    settings: ResolvedOrder
    catalog: CatalogView
    weights: ResolvedWeights
    source: Mixture | WeightedEpochs
    growth: Growth = NO_GROWTH
    """The part of today's data that is left out."""
    packer: EpochPacker | None = None
    """Packs the documents of an epoch, instead of batching them."""
    steps: tuple[SequenceStep, ...] = ()
    """The user's steps, between the shuffle and the batches."""
    mixing: MixingConfig | None = None
    """The unit and the limits of weights."""
    later: RunOrder | None = None
    """The order of epochs after ``growth.last_epoch``, where these read more."""
    _sequences: dict[tuple[BatchGeometry, int], Batched] = field(default_factory=dict, repr=False)
    _fingerprints: dict[int, Fingerprint] = field(default_factory=dict, repr=False)

    def of_epoch(self, epoch: int) -> RunOrder:
        """Return the order of one epoch, and of all others that read the same part of the data."""
        return self if self.later is None or epoch <= self.growth.last_epoch else self.later

    @property
    def differs_by_epoch(self) -> bool:
        """True if epochs may have different lengths."""
        changes = self.mixture is not None and self.mixture.differs_by_epoch
        return self.later is not None or self.packer is not None or bool(self.steps) or changes

    @property
    def unit(self) -> str:
        """The unit that positions count: "sample" or "pack"."""
        return "sample" if self.packer is None else "pack"

    @property
    def is_composed(self) -> bool:
        """True if batches are composed for given machines, so that an epoch's sequence depends on them."""
        return self.settings.batching_method != "random"

    @property
    def mixture(self) -> Mixture | None:
        """The streams of a schedule; None without one."""
        return self.source if isinstance(self.source, Mixture) else None

    @property
    def plan(self) -> MixtureSchedule | None:
        """The samples that each mixture step takes of each stream; None without a schedule."""
        return self.source.plan

    def fingerprint(self, phases_begun: int = 0) -> Fingerprint:
        """Return the fingerprint of a saved position.

        Args:
            phases_begun: Phases of which a sample was read; later ones may change.
        """
        known = self._fingerprints.get(phases_begun)
        if known is None:
            known = self._fingerprints[phases_begun] = Fingerprint(
                self.catalog,
                self.settings,
                self.weights,
                self.plan,
                phases_begun,
                dict(self.growth.passes),
                packing=None if self.packer is None else self.packer.saved(),
                sequence=tuple(step.facts for step in self.steps),
                mixing=self.mixing,
                weights_set=() if self.mixture is None else self.mixture.changes,
            )
        return known

    def phase_stops(self, geometry: BatchGeometry, epoch: int) -> NDArray[np.int64]:
        """Return the position at which each phase of an epoch ends; only with a schedule."""
        assert self.plan is not None, "as there are phases"
        return self.sequence(geometry, epoch).part_stops()[self.plan.last_steps]

    def phases_begun(self, cursor: Cursor, geometry: BatchGeometry) -> int:
        """Return how many phases have begun at a cursor: those of which a sample was read; only with a schedule."""
        assert self.plan is not None, "as there are phases"
        if cursor.epoch:  # before the epoch's sequence, which steps and packing make expensive
            return len(self.plan.phases)
        stops = self.phase_stops(geometry, 0)
        ended = int(np.searchsorted(stops, cursor.sample_in_epoch, side="left"))
        return min(ended + bool(cursor.sample_in_epoch), len(stops))

    def phases_ended(self, cursor: Cursor, geometry: BatchGeometry) -> int:
        """Return how many phases of its epoch have ended at a cursor; only with a schedule."""
        return int(np.searchsorted(self.phase_stops(geometry, cursor.epoch), cursor.sample_in_epoch, side="right"))

    def check_schedule(self, first: int = 0) -> None:
        """Check that the phases from number ``first`` on can be read, if there is a schedule.

        Raises:
            ConfigError: A stream is missing, or would be read more often than it may.
        """
        if self.mixture is not None:
            self.mixture.plan.check_streams(self.catalog.stream_names, first)
            self.mixture.plan.check_repeats(self.mixture.passes, self.mixture.repeats, first)

    def sequence(self, geometry: BatchGeometry, epoch: int) -> Batched:
        """Return the sequence of an epoch, to count with. It is cached, so do not request ids of it.

        Args:
            geometry: The geometry that its batches are composed for.
            epoch: Counts from 0.
        """
        known = self._sequences.get((geometry, epoch))
        if known is None:
            known = self.drawn(geometry, epoch)
            # Replaced, rather than changed: a checkpoint may be written by a thread.
            cached = list(self._sequences.items())[1 - _CACHED_SEQUENCES :]
            object.__setattr__(self, "_sequences", {**dict(cached), (geometry, epoch): known})
        return known

    def drawn(
        self,
        geometry: BatchGeometry,
        epoch: int,
        draw: Draw = drawn_here,
        will_follow: Callable[[Shuffled], None] | None = None,
    ) -> Batched:
        """Return the sequence of an epoch, to request ids of it.

        Args:
            geometry: The geometry that its batches are composed for.
            epoch: Counts from 0.
            draw: Draws a part before ids of it are known.
            will_follow: Called with the part that must be drawn next, where an epoch is not drawn as a whole. None: ids
                are not requested.
        """
        if self.packer is None:
            return self.source.batched(geometry, epoch, draw, will_follow, self.steps)
        parts = range(self.source.num_parts)
        orders = [with_steps(self.source.shuffled(epoch, part, draw), self.steps) for part in parts]
        starts = accumulate(map(len, orders), initial=0)
        return self.packer.epoch(
            [PackedPart(order=order, first_position=start) for order, start in zip(orders, starts, strict=False)]
        )


def resolved_order(
    request: RunRequest, settings: ResolvedOrder, catalog: Catalog, growth: Growth = NO_GROWTH
) -> RunOrder:
    """Return the order of a run over its data, of which epochs may read different parts."""
    later = order_of(request, settings, catalog.head(growth.shards_in(growth.last_epoch + 1)), growth)
    if not growth.followed or growth.last_epoch < 0:
        return later
    return order_of(request, settings, catalog.head(growth.shards_in(growth.last_epoch)), growth, later)


def order_of(
    request: RunRequest, settings: ResolvedOrder, data: CatalogView, growth: Growth, later: RunOrder | None = None
) -> RunOrder:
    """Return the order of epochs that read a part of the data; ``later`` is that of epochs that read more."""
    mixture = request.mixture(settings, data, growth)
    weights = request.resolved_weights(data, settings, growth, mixture)
    source: Mixture | WeightedEpochs
    if mixture is None:
        first_ids = data.first_ids if data.leaves_gaps else ()
        shape = DatasetShape(shard_sizes=_sizes_of_read_shards(data), weights=weights, first_ids=first_ids)
        source = WeightedEpochs(settings, shape)
    else:
        source = mixture
    packer = None
    if request.pack is not None:
        assert data.lengths is not None, "as documents are packed"
        packer = EpochPacker(pack=request.pack, lengths=data.lengths)
    return RunOrder(
        settings=settings,
        catalog=data,
        weights=weights,
        source=source,
        growth=growth,
        packer=packer,
        steps=request.steps,
        mixing=request.mixing,
        later=later,
    )
