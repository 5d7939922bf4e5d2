"""Samples of each stream in an epoch, and the shape of the data that the order is computed from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.sequence.base import SampleSequence, digest_of
from lightning_streaming.sequence.stream_slices import SliceUnits, StreamPasses, StreamSlice, slice_units
from lightning_streaming.units import LARGEST_COUNT, plain_number, store_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamWeight:
    """The user's weight of one stream: at most one of the three."""

    proportion: float | None = None
    """Share relative to the other streams; only ratios matter."""
    repeat: float | None = None
    """Reads of each sample per epoch, on average."""
    choose: int | None = None
    """Samples per epoch."""

    def __post_init__(self) -> None:
        said = {
            name: value
            for name, value in (("proportion", self.proportion), ("repeat", self.repeat), ("choose", self.choose))
            if value is not None
        }
        if len(said) > 1:
            raise ConfigError(
                f"a stream takes one of proportion, repeat and choose, but got {said}", option="proportion"
            )
        for name, value in said.items():
            if name == "choose":
                store_whole(self, name, 0)
                continue
            number = plain_number(value)
            if number is None or number < 0:
                raise ConfigError(
                    f"{name} must be a finite number that is not negative, but got {short_repr(value)}", option=name
                )
            object.__setattr__(self, name, number)

    @property
    def is_unsaid(self) -> bool:
        """True if the stream has no weight, so that its size decides."""
        return self.proportion is None and self.repeat is None and self.choose is None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedWeights:
    """Samples of each stream, in stream order."""

    proportion: tuple[float, ...]
    """Share of the epoch; sums to 1."""
    repeat: tuple[float, ...]
    """Reads of each sample per epoch, on average."""
    choose: tuple[int, ...]
    """Samples per epoch; sums to ``epoch_size``."""
    epoch_size: int
    """Samples per epoch over all streams."""


def resolve_weights(
    weights: Sequence[StreamWeight], sizes: Sequence[int], epoch_size: int | None, seed: int
) -> ResolvedWeights:
    """Return the samples per stream for the user's weights.

    Streams are either all relative (each has a ``proportion``, together they fill ``epoch_size``) or all absolute
    (``repeat``, ``choose`` or their own size). With an ``epoch_size`` and no weights at all, streams share it by size.

    Args:
        weights: One per stream.
        sizes: Samples in each stream.
        epoch_size: Samples per epoch; None or 0 for the size of the streams or the sum of the weights.
        seed: Decides which streams get the few samples that remain after rounding.

    Raises:
        ConfigError: Weights of different kinds are mixed, an ``epoch_size`` contradicts absolute weights, a stream is
            empty, or nothing would be drawn.
    """
    if not weights or len(weights) != len(sizes):
        raise ConfigError(
            f"a dataset needs streams with one weight each, but got {len(sizes)} and {len(weights)}", option="streams"
        )
    if min(sizes) < 1:
        raise ConfigError(f"stream {list(sizes).index(min(sizes))} has no samples", hint="remove it", option="streams")
    if seed < 0 or (epoch_size or 0) < 0:
        raise ConfigError(
            f"seed and epoch_size must not be negative, but got {seed} and {epoch_size}", option="epoch_size"
        )

    totals = np.asarray(sizes, np.int64)
    relative = sum(weight.proportion is not None for weight in weights)
    if relative not in (0, len(weights)):
        raise ConfigError(
            f"proportion must be given for all {len(weights)} streams or for none, but {relative} have it",
            option="proportion",
        )
    if relative:
        shares = np.asarray([weight.proportion for weight in weights], np.float64)
        return _relative(shares, totals, epoch_size, seed)
    if not epoch_size:
        return _absolute(weights, totals)
    if not all(weight.is_unsaid for weight in weights):
        raise ConfigError(
            f"repeat and choose determine the size of an epoch, so epoch_size={epoch_size} contradicts them",
            hint="drop epoch_size, or weight streams by proportion",
            option="epoch_size",
        )
    return _relative(totals.astype(np.float64), totals, epoch_size, seed)


def _relative(
    shares: NDArray[np.float64], totals: NDArray[np.int64], epoch_size: int | None, seed: int
) -> ResolvedWeights:
    if not shares.any():
        raise ConfigError("at least one stream needs a proportion above 0", option="proportion")
    if not np.isfinite(sum(shares.tolist())):
        raise ConfigError("the proportions are too large to be added", hint="scale them down", option="proportion")
    size = epoch_size or int(totals.sum())
    proportion = shares / shares.sum()
    choose = (size * proportion).astype(np.int64)
    remainder = size - int(choose.sum())  # at most one sample per stream
    choose[np.random.default_rng(seed).choice(len(choose), remainder, replace=False)] += 1
    return _resolved(proportion, choose, totals)


def _absolute(weights: Sequence[StreamWeight], totals: NDArray[np.int64]) -> ResolvedWeights:
    counts = list[int]()
    for weight, size in zip(weights, totals.tolist(), strict=True):
        whole = size if weight.choose is None else weight.choose
        counts.append(whole if weight.repeat is None else int(float(weight.repeat) * size))
    if sum(counts) > LARGEST_COUNT:
        raise ConfigError(
            f"an epoch would draw {sum(counts)} samples, but has {LARGEST_COUNT} at most",
            hint="lower repeat or choose",
            option="repeat",
        )
    choose = np.asarray(counts, np.int64)
    if not choose.any():
        raise ConfigError("the weights draw no sample at all", hint="raise a repeat or a choose", option="repeat")
    return _resolved(choose / choose.sum(), choose, totals)


def _resolved(proportion: NDArray[np.float64], choose: NDArray[np.int64], totals: NDArray[np.int64]) -> ResolvedWeights:
    return ResolvedWeights(
        proportion=tuple(proportion.tolist()),
        repeat=tuple((choose / totals).tolist()),
        choose=tuple(choose.tolist()),
        epoch_size=int(choose.sum()),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetShape(SampleSequence):
    """The data as the order sees it: every sample once, shard by shard, and the number that an epoch draws."""

    shard_sizes: tuple[NDArray[np.int64], ...]
    """Samples in each shard, per stream."""
    weights: ResolvedWeights
    """Samples per epoch of each stream."""
    first_ids: tuple[int, ...] = ()
    """Sample id at which each stream begins, if streams have more samples than these; empty if each follows the one
    before. Orders are the same with and without."""

    def __post_init__(self) -> None:
        if len(self.shard_sizes) != len(self.weights.choose):
            raise ConfigError(
                f"each stream needs one weight, but got {len(self.shard_sizes)} streams and "
                f"{len(self.weights.choose)} weights",
                option="streams",
            )
        if self.first_ids and len(self.first_ids) != len(self.shard_sizes):
            raise ConfigError(
                f"each stream needs one first id, but got {len(self.shard_sizes)} streams and {len(self.first_ids)} "
                "ids",
                option="streams",
            )
        for stream, sizes in enumerate(self.shard_sizes):
            if sizes.size == 0 or sizes.min() < 0 or sizes.sum() < 1:
                raise ConfigError(f"stream {stream} has no samples", hint="remove it", option="streams")

    def __len__(self) -> int:
        """Return the number of samples in all streams; without ``first_ids`` sample ids are below it."""
        return sum(int(sizes.sum()) for sizes in self.shard_sizes)

    def ids(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids of entries: samples are numbered shard by shard."""
        if not self.first_ids:
            return entries
        stops, shifts = self._renumbering
        moved: NDArray[np.int64] = entries + shifts.take(np.searchsorted(stops, entries, side="right"))
        return moved

    @cached_property
    def _renumbering(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The entry at which each stream ends, and the difference of its sample ids to its entries."""
        sizes = np.asarray([int(of.sum()) for of in self.shard_sizes])
        stops = np.cumsum(sizes)
        return stops, np.asarray(self.first_ids) - (stops - sizes)

    @property
    def digest(self) -> str:
        """See :class:`~lightning_streaming.sequence.base.SampleSequence`; of the weights too."""
        sizes = [hashlib.blake2b(sizes.astype("<i8").tobytes()).hexdigest() for sizes in self.shard_sizes]
        firsts = [self.first_ids] if self.first_ids else []
        return digest_of(sizes, self.weights.choose, self.weights.proportion, *firsts)

    @property
    def epoch_size(self) -> int:
        """Number of samples that an epoch draws."""
        return self.weights.epoch_size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StreamGroup:
    """Streams that are drawn and shuffled together."""

    shard_sizes: tuple[NDArray[np.int64], ...]
    """Samples in each shard, per stream."""
    choose: tuple[int, ...]
    """Samples to draw from each stream; more than it holds repeats it."""
    first_id: int
    """Sample id at which the first shard of the first stream starts; with slices, the samples that the step takes of
    the groups before."""
    block_size: int
    """Samples to mix with each other, for algorithms that work in blocks."""
    stream_slices: tuple[StreamSlice, ...] = ()
    """The position at which each stream's passes continue, in a mixture step; empty if each epoch draws separately."""

    def slice_units(self, seed: int, *, is_shuffled: bool) -> SliceUnits:
        """Return the samples of the slices, as whole shards and parts of shards."""
        return slice_units(self.shard_sizes, self.choose, self.stream_slices, seed, is_shuffled=is_shuffled)

    @property
    def has_several_passes(self) -> bool:
        """True if the slices reach into several passes of a stream."""
        slices = zip(self.shard_sizes, self.choose, self.stream_slices, strict=False)  # without slices, none
        ends = (
            StreamPasses(sizes, taken.shorter).numbers(np.asarray([taken.start, taken.start + count - 1]))
            for sizes, count, taken in slices
        )
        return any(first != last for first, last in ends)
