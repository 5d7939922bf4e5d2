"""Order of an epoch: the samples that it draws from each stream, shuffled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.base import SampleSequence, digest_of
from lightning_streaming.sequence.blockwise import BlockwiseOrder, blockwise_order
from lightning_streaming.sequence.partition import CanonicalSequence
from lightning_streaming.sequence.runs import RunLookup, write_runs
from lightning_streaming.sequence.settings import OrderSettings, ResolvedOrder
from lightning_streaming.sequence.shuffles import ShuffleTask, shuffle_into, shuffle_items
from lightning_streaming.sequence.stream_slices import MOST_STEPS, StreamSlice, in_pass_order
from lightning_streaming.sequence.tokens import TokenLengths, even_shares
from lightning_streaming.sequence.weights import DatasetShape, StreamGroup

_ORDER_VERSION = 2
"""Incremented when the same settings give another order, or other bytes, so that existing files are not used for it."""

_CHUNK = 1 << 20
"""Ids that are looked up at once, to keep temporary arrays small."""


_LARGEST_FREED = 8 * _CHUNK
"""Bytes of the largest array that drawing allocates repeatedly. glibc reuses the memory of freed arrays only if a
larger one was freed before, and otherwise requests it from the system each time, which took half of a draw: so one
array of this size is allocated and freed first."""

Draw = Callable[["Shuffled"], NDArray[np.integer[Any]]]
"""Draws a whole order."""


def drawn_here(order: Shuffled) -> NDArray[np.integer[Any]]:
    """Draw an order into a new array of this process."""
    out = np.empty(len(order), order.dtype)
    order.draw_into(out)
    return out


class EpochPart(SampleSequence):
    """The samples of one part of an epoch in the order in which canonical nodes divide them: what batches are made of.

    A part is the whole epoch, or one mixture step of a schedule.
    """

    settings: ResolvedOrder
    """Settings of its order and batches."""
    epoch: int
    """Counts from 0."""
    step: int
    """The mixture step, from 0; 0 without a schedule."""
    turn: int
    """The number with which its shuffle is drawn, unique for every epoch and every step of every epoch."""
    is_on_demand: bool
    """True if ids are computed when they are requested, so that nothing is drawn before."""
    choose: tuple[int, ...]
    """Samples of each stream, in stream order; one stream after another where batches are composed."""
    proportion: tuple[float, ...]
    """Share of each stream; they sum to 1."""

    @abstractmethod
    def name_of(self, stream: int) -> str | None:
        """Return the name of a stream, where it is known."""

    @abstractmethod
    def stream_label(self, stream: int) -> str:
        """Return a stream as errors name it."""


@dataclass(frozen=True, eq=False)
class Shuffled(EpochPart):
    """Samples that an epoch draws, shuffled: all streams as one, or one stream after another.

    The order is drawn once, when ids are first requested.

    Args:
        settings: Settings of the order.
        shape: Shape of the data.
        epoch: Number of the epoch, from 0.
        draw: Draws the order, if single ids cannot be computed.
        stream_slices: For a mixture step, where each stream continues. The shape is then that of the step.
        step: The step's number in its epoch.
        tokens: The tokens of samples, if each part of a mixture step has each stream's share of its tokens.

    Raises:
        ConfigError: The epoch is negative; or, when it is drawn, the samples or the block are too few for the shuffle
            algorithm.
    """

    settings: ResolvedOrder
    shape: DatasetShape
    epoch: int
    draw: Draw = drawn_here
    stream_slices: tuple[StreamSlice, ...] = ()
    step: int = 0
    tokens: TokenLengths | None = None

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise ConfigError(f"epochs count from 0, but got {self.epoch}", option="epoch")

    def __len__(self) -> int:
        """Return the number of places: the samples that the epoch draws."""
        return self.shape.epoch_size

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids at places in ``[0, len(self))``, of any shape."""
        order = self._order
        if order is None:
            return self.shape.ids(places)
        if isinstance(order, BlockwiseOrder):
            return self.shape.ids(order.ids(places))
        return self.shape.ids(order[places].astype(np.int64, copy=False))

    @property
    def digest(self) -> str:
        """See :class:`~lightning_streaming.sequence.base.SampleSequence`; independent of how it is drawn."""
        of_step = [self.step, *(taken.facts for taken in self.stream_slices)] if self.stream_slices else []
        of_tokens = [] if self.tokens is None else ["even shares of passes", self.tokens.digest]
        return digest_of(_ORDER_VERSION, self.settings.facts, self.epoch, self.shape.digest, *of_step, *of_tokens)

    @property
    def choose(self) -> tuple[int, ...]:  # type: ignore[override]
        """Samples drawn of each stream."""
        return self.shape.weights.choose

    @property
    def proportion(self) -> tuple[float, ...]:  # type: ignore[override]
        """Share of each stream."""
        return self.shape.weights.proportion

    @property
    def turn(self) -> int:  # type: ignore[override]
        """See :class:`EpochPart`."""
        return self.epoch * MOST_STEPS + self.step if self.stream_slices else self.epoch

    def name_of(self, stream: int) -> str | None:
        """Return the name of a stream, where it is known."""
        return self.stream_slices[stream].stream if self.stream_slices else None

    def stream_label(self, stream: int) -> str:
        """Return the label of a stream in errors: its name, if that is known."""
        return repr(self.stream_slices[stream].stream) if self.stream_slices else str(stream)

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]:
        """Smallest type that :meth:`draw_into` can fill: 4 bytes if they hold every sample id and every place."""
        first_ids = [
            taken.first_id + int(sizes.sum())
            for taken, sizes in zip(self.stream_slices, self.shape.shard_sizes, strict=False)
        ]
        return np.dtype(np.uint32 if max(len(self.shape), len(self), *first_ids) <= 1 << 32 else np.int64)

    @property
    def is_identity(self) -> bool:
        """True if the epoch reads every sample once, in the order of the ids."""
        if self.stream_slices:
            return False
        sizes = [int(sizes.sum()) for sizes in self.shape.shard_sizes]
        return not self.settings.shuffle and list(self.shape.weights.choose) == sizes

    @property
    def is_on_demand(self) -> bool:  # type: ignore[override]
        """See :class:`EpochPart`."""
        is_blockwise = self.settings.shuffle and self.settings.shuffle_algo == "blockwise"
        return is_blockwise and self.tokens is None and not self._has_several_passes

    @cached_property
    def _has_several_passes(self) -> bool:
        return any(group.has_several_passes for group in self._groups())

    @property
    def is_drawn(self) -> bool:
        """True if the whole order must be drawn before any id is known."""
        return not (self.is_identity or self.is_on_demand)

    def drawn(self) -> Shuffled:
        """Draw the order now, and return self."""
        self.ids(np.empty(0, np.int64))
        return self

    def draw_into(self, out: NDArray[np.integer[Any]]) -> None:
        """Fill an array, which may be a mapped file, with the sample id at each place.

        In addition to ``out`` this takes memory for the blocks of one canonical node, and with weighted streams for
        another array of the size of ``out``.

        Args:
            out: One dimension, ``len(self)`` long, of :attr:`dtype` or wider.

        Raises:
            ConfigError: The samples or the block are too few for the shuffle algorithm.
        """
        np.empty(_LARGEST_FREED, np.uint8)
        stop = 0
        for group in self._groups():
            start, stop = stop, stop + sum(group.choose)
            _draw_group(group, self.settings, self.turn, out[start:stop], self.tokens)

    @cached_property
    def _order(self) -> NDArray[np.integer[Any]] | BlockwiseOrder | None:
        """The drawn or computed order; None if places are sample ids."""
        if self.is_drawn:
            return self.draw(self)
        if self.is_identity:
            return None
        return blockwise_order(self._groups(), self.settings, self.turn)

    def _groups(self) -> Iterator[StreamGroup]:
        """Yield all streams as one group if batches mix them; else each stream, with its share of the block size."""
        shape, block_size, first_id = self.shape, self.settings.shuffle_block_size, 0
        if self.settings.batching_method == "random":
            yield StreamGroup(
                shard_sizes=shape.shard_sizes,
                choose=shape.weights.choose,
                first_id=0,
                block_size=block_size,
                stream_slices=self.stream_slices,
            )
            return
        weights = shape.weights
        for stream, (sizes, share) in enumerate(zip(shape.shard_sizes, weights.proportion, strict=True)):
            yield StreamGroup(
                shard_sizes=(sizes,),
                choose=weights.choose[stream : stream + 1],
                first_id=first_id,
                block_size=int(block_size * share),
                stream_slices=self.stream_slices[stream : stream + 1],
            )
            # The samples that a step takes of a stream do not change when the stream grows.
            first_id += weights.choose[stream] if self.stream_slices else int(sizes.sum())


def _draw_group(
    group: StreamGroup,
    settings: ResolvedOrder,
    turn: int,
    out: NDArray[np.integer[Any]],
    tokens: TokenLengths | None = None,
) -> None:
    if group.stream_slices:
        _draw_stream_slices(group, settings, turn, out, tokens)
        return
    drawn = resample(group.shard_sizes, group.choose, settings, turn, out.dtype)
    if settings.shuffle:
        shuffle_into(settings.shuffle_algo, _shuffle_task(drawn.units, group, settings, turn), out)
        if drawn.sample_ids is not None:
            _look_up(drawn.sample_ids, out)
    elif drawn.sample_ids is not None:
        out[:] = drawn.sample_ids
    else:
        out[:] = np.arange(len(out), dtype=out.dtype)
    if group.first_id:
        out += group.first_id


def _shuffle_task(units: NDArray[np.int64], group: StreamGroup, settings: ResolvedOrder, turn: int) -> ShuffleTask:
    return ShuffleTask(
        units=units,
        num_canonical_nodes=settings.num_canonical_nodes,
        seed=settings.shuffle_seed,
        epoch=turn,
        block_size=group.block_size,
    )


def _draw_stream_slices(
    group: StreamGroup,
    settings: ResolvedOrder,
    turn: int,
    out: NDArray[np.integer[Any]],
    tokens: TokenLengths | None = None,
) -> None:
    """Draw the slices of a mixture step, the samples of a pass before those of the next."""
    units = group.slice_units(settings.shuffle_seed, is_shuffled=settings.shuffle)
    is_blockwise = settings.shuffle and settings.shuffle_algo == "blockwise"
    sample_ids, of_unit = np.empty(len(out), out.dtype), None
    if is_blockwise:
        order = blockwise_order([group], settings, turn)
        of_unit = np.empty(len(out), np.int64)
        for start in range(0, len(out), _CHUNK):
            places = np.arange(start, min(start + _CHUNK, len(out)))
            out[start : start + _CHUNK], of_unit[start : start + _CHUNK] = order.ids(places), order.units(places)
    else:
        if settings.shuffle:
            shuffle_into(settings.shuffle_algo, _shuffle_task(units.shuffled_runs(), group, settings, turn), out)
        else:
            out[:] = np.arange(len(out), dtype=out.dtype)
        units.write_ids(sample_ids)
        if group.has_several_passes or tokens is not None:
            of_unit = RunLookup(np.cumsum(units.sizes)).find(out.astype(np.int64))
    if tokens is not None and of_unit is not None:
        ids = out if is_blockwise else sample_ids[out]
        sizes = tokens(ids.astype(np.int64)).astype(np.int64)
        order_of_tokens = even_shares(
            units.streams[of_unit], units.passes[of_unit], sizes, settings.num_canonical_nodes
        )
        out[:], of_unit = out[order_of_tokens], of_unit[order_of_tokens]
    if of_unit is not None and group.has_several_passes:
        in_pass_order(out, units.streams[of_unit], units.passes[of_unit], _reading_order(len(out), settings))
    if not is_blockwise:
        _look_up(sample_ids, out)


def _reading_order(num_samples: int, settings: ResolvedOrder) -> NDArray[np.int64]:
    """Return places in the order in which they are read, each once."""
    sequence = CanonicalSequence(num_samples=num_samples, num_canonical_nodes=settings.num_canonical_nodes, num_nodes=1)
    places = sequence.places(np.arange(len(sequence)))
    if len(places) == num_samples:
        return places
    _, first = np.unique(places, return_index=True)
    return places[np.sort(first)]


def _look_up(sample_ids: NDArray[np.integer[Any]], out: NDArray[np.integer[Any]]) -> None:
    """Compute ``out[:] = sample_ids[out]`` in chunks."""
    for start in range(0, len(out), _CHUNK):
        chunk = out[start : start + _CHUNK]
        chunk[:] = sample_ids[chunk]


_PICKS_CHUNK = 1 << 18
"""Picks that are counted at once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Resampled:
    """Samples that an epoch draws, before shuffling, shard by shard."""

    units: NDArray[np.int64]
    """Sizes of the runs that shuffling treats as one shard: each full repeat, and each part of a shard."""
    sample_ids: NDArray[np.integer[Any]] | None
    """The drawn samples, unit after unit; None if each sample is drawn once, in order."""


def resample(
    shard_sizes: Sequence[NDArray[np.int64]],
    choose: Sequence[int],
    settings: OrderSettings,
    epoch: int,
    dtype: DTypeLike = np.int64,
) -> Resampled:
    """Draw ``choose[s]`` samples from each stream ``s``.

    Sample ids count from 0 at the first shard of the first stream given here.

    Args:
        shard_sizes: Samples in each shard, per stream.
        choose: Samples to draw from each stream; more than it holds repeats it.
        settings: Seed, method and granularity.
        epoch: Number of the epoch, from 0.
        dtype: Type of the sample ids.
    """
    seed = settings.shuffle_seed
    shard_seed = seed + epoch if settings.redraws_shards else seed
    sample_seed = seed + epoch if settings.sampling_method == "balanced" else seed

    sizes = np.concatenate(shard_sizes)
    counts = np.concatenate(
        [
            per_shard_choice(stream_sizes, stream_choose, settings.sampling_granularity, shard_seed)
            for stream_sizes, stream_choose in zip(shard_sizes, choose, strict=True)
        ]
    )
    if np.array_equal(counts, sizes):
        return Resampled(units=sizes[sizes > 0], sample_ids=None)

    # Each shard's ids as often as all of them are drawn, then the rest at random, ascending.
    sample_ids = np.empty(int(counts.sum()), dtype)
    repeats, rest = np.divmod(counts, np.maximum(sizes, 1))
    times = np.column_stack([repeats, rest > 0]).ravel()
    units = np.repeat(np.column_stack([sizes, rest]).ravel(), times)
    first_ids = np.cumsum(sizes) - sizes
    write_runs(np.repeat(np.repeat(first_ids, 2), times), units, sample_ids)
    generator = np.random.default_rng(sample_seed)
    parts = np.flatnonzero(rest)
    part_stops = np.cumsum(counts)[parts]
    for first, size, part, stop in zip(
        first_ids[parts].tolist(), sizes[parts].tolist(), rest[parts].tolist(), part_stops.tolist(), strict=True
    ):
        sample_ids[stop - part : stop] = first + np.sort(generator.choice(size, part, replace=False))
    return Resampled(units=units, sample_ids=sample_ids)


def per_shard_choice(sizes: NDArray[np.int64], choose: int, granularity: int, seed: int) -> NDArray[np.int64]:
    """Divide the ``choose`` samples to draw from a stream among its shards.

    All samples are drawn as often as the whole stream is repeated. The remainder is picked in runs of ``granularity``
    samples, in random order over all shards.

    Args:
        sizes: Samples in each shard; at least one in all.
        choose: Samples to draw.
        granularity: Samples per pick; the last pick of a shard may be shorter.
        seed: Orders the picks.

    Returns:
        Samples to draw from each shard; sums to ``choose``.
    """
    repeats, rest = divmod(choose, int(sizes.sum()))
    counts = sizes * repeats
    if rest == 0:
        return counts

    picks = -(-sizes // granularity)
    pick_stops = np.cumsum(picks)
    last_sizes = sizes - (picks - 1) * granularity
    # An empty shard has no pick: as in the reference, this makes the pick before it a full one, which may take more
    # from that shard than it has left.
    last_sizes[:-1][picks[1:] == 0] = granularity

    order = _permutation(int(pick_stops[-1]), seed)
    lookup, start = RunLookup(pick_stops), 0
    while rest > 0:
        # Enough picks for the rest, and one more for each shard's short pick.
        chunk = order[start : start + min(rest // granularity + len(sizes) + 1, _PICKS_CHUNK)].astype(np.int64)
        start += len(chunk)
        shards = lookup.find(chunk)
        pick_sizes = np.where(chunk == pick_stops[shards] - 1, last_sizes[shards], granularity)
        # The rest before each pick; not positive after the last one.
        left = rest - (np.cumsum(pick_sizes) - pick_sizes)
        np.add.at(counts, shards, np.clip(left, 0, pick_sizes))
        rest = int(left[-1] - pick_sizes[-1])
    return counts


def _permutation(size: int, seed: int) -> NDArray[np.integer[Any]]:
    """Return ``np.random.default_rng(seed).permutation(size)``, in half the memory if numbers are small."""
    order = np.arange(size, dtype=np.uint32 if size <= 1 << 32 else np.int64)
    shuffle_items(order, np.random.default_rng(seed))
    return order
