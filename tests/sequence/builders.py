"""Settings and data for tests of order, resolved and weighted, and shuffles by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.sequence.base import SampleSequence, digest_of
from lightning_streaming.sequence.batching import BatchedDraw, batched
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.partition import BatchGeometry, Partition
from lightning_streaming.sequence.phased import Mixture
from lightning_streaming.sequence.phases import LONGEST_STEP, ResolvedPhase
from lightning_streaming.sequence.settings import OrderSettings, ResolvedOrder
from lightning_streaming.sequence.shuffles import ShuffleTask, shuffle_into
from lightning_streaming.sequence.weights import DatasetShape, StreamWeight, resolve_weights

CANONICAL = 12


def make_shape(*streams: list[int], epoch_size: int | None = None, **said: Any) -> DatasetShape:
    """Streams of these shard sizes, all of the same weight."""
    sizes = tuple(np.asarray(stream, np.int64) for stream in streams)
    weights = resolve_weights(
        [StreamWeight(**said)] * len(sizes), [int(stream.sum()) for stream in sizes], epoch_size, seed=0
    )
    return DatasetShape(shard_sizes=sizes, weights=weights)


def make_settings(**said: Any) -> ResolvedOrder:
    """Shuffled, in 12 canonical nodes, unless said otherwise."""
    return OrderSettings(**{"shuffle": True, "num_canonical_nodes": CANONICAL, **said}).resolved(1)


def shuffle_map(
    algo: str, units: NDArray[np.int64], num_canonical_nodes: int, seed: int, epoch: int, block_size: int
) -> NDArray[np.int64]:
    """What a shuffle makes of runs of these sizes."""
    task = ShuffleTask(
        units=units, num_canonical_nodes=num_canonical_nodes, seed=seed, epoch=epoch, block_size=block_size
    )
    permutation = np.empty(task.num_samples, np.int64)
    shuffle_into(algo, task, permutation)
    return permutation


@dataclass(frozen=True)
class Numbers(SampleSequence):
    """A sequence of so many entries, each of them its own number."""

    length: int

    def __len__(self) -> int:
        return self.length

    def ids(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        return entries

    @property
    def digest(self) -> str:
        return digest_of(self.length)


def geometry_of(nodes: int, ranks: int, batch_size: int) -> BatchGeometry:
    """Nodes, ranks per node and batch size."""
    return BatchGeometry(num_nodes=nodes, ranks_per_node=ranks, batch_size=batch_size)


def partition_of(length: int, start: int, nodes: int, ranks: int, batch_size: int) -> Partition:
    """Numbers, divided in turn."""
    return Partition(sequence=Numbers(length), start=start, geometry=geometry_of(nodes, ranks, batch_size))


def epoch_of(settings: ResolvedOrder, shape: DatasetShape, geometry: BatchGeometry, epoch: int = 0) -> BatchedDraw:
    """The whole chain of an epoch, nothing skipped."""
    return batched(Shuffled(settings, shape, epoch), geometry)


def phase(name: str, stop: int, mix: Mapping[str, float | tuple[float, float]], steps: int = 1) -> ResolvedPhase:
    """A phase; two weights of a stream are a ramp."""
    pairs = {stream: one if isinstance(one, tuple) else (one, one) for stream, one in sorted(mix.items())}
    begin, end = (tuple((stream, pair[place]) for stream, pair in pairs.items()) for place in (0, 1))
    return ResolvedPhase(name=name, planned_stop=stop, begin=begin, end=end, steps=steps)


@st.composite
def phase_lists(
    draw: st.DrawFn,
    names: Sequence[str],
    lengths: st.SearchStrategy[int],
    weights: st.SearchStrategy[float],
    most_phases: int = 5,
    most_steps: int = 40,
) -> list[ResolvedPhase]:
    """Phases of some of these streams, which come and go; of some ramps, from or to 0."""
    phases, stop = [], 0
    for number in range(draw(st.integers(1, most_phases))):
        stop += draw(lengths)
        mixed = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        mix: dict[str, float | tuple[float, float]] = {name: draw(weights) for name in mixed}
        if draw(st.booleans()):
            for name in mixed[1:]:
                one, other = draw(weights), draw(st.just(0.0) | weights)
                mix[name] = (one, other) if draw(st.booleans()) else (other, one)
        phases.append(phase(f"p{number}", stop, mix, draw(st.integers(1, most_steps))))
    return phases


def make_mixture(
    settings: ResolvedOrder,
    phases: Sequence[ResolvedPhase],
    shards: Mapping[str, Sequence[int]],
    longest_step: int = LONGEST_STEP,
) -> Mixture:
    """Streams of these shard sizes, mixed in phases."""
    first_ids = [0, *accumulate(sum(sizes) for sizes in shards.values())]
    return Mixture(
        settings,
        phases,
        {name: np.asarray(sizes, np.int64) for name, sizes in shards.items()},
        dict(zip(shards, first_ids, strict=False)),
        longest_step,
    )


def ids_of(mixture: Mixture, name: str) -> range:
    """The sample ids of one of its streams."""
    return mixture._draws.ids_of(name)
