"""The plan of one epoch: which sample is read at which position, without reading the positions before."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.partition import CanonicalSequence, canonical_sequence
from lightning_streaming.order.sampling import resample
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shuffle import shuffle_map
from lightning_streaming.order.weights import ResolvedWeights

_ORDER_VERSION = 1
"""Raised when the same settings come to mean another order, so that files made before are not taken for it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DatasetShape:
    """All that order knows about the data."""

    shard_sizes: tuple[NDArray[np.int64], ...]
    """Samples in each shard, per stream."""
    weights: ResolvedWeights
    """Samples per epoch of each stream."""

    def __post_init__(self) -> None:
        if len(self.shard_sizes) != len(self.weights.choose):
            raise ConfigError(
                f"each stream needs one weight, but got {len(self.shard_sizes)} streams and "
                f"{len(self.weights.choose)} weights"
            )
        for stream, sizes in enumerate(self.shard_sizes):
            if sizes.size == 0 or sizes.min() < 0 or sizes.sum() < 1:
                raise ConfigError(f"stream {stream} has no samples; remove it")

    @property
    def num_samples(self) -> int:
        """Samples in all streams; sample ids are below it."""
        return sum(int(sizes.sum()) for sizes in self.shard_sizes)

    @property
    def epoch_size(self) -> int:
        """Samples that an epoch draws."""
        return self.weights.epoch_size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochPlan:
    """The sample at each position of one epoch, at random access."""

    sequence: CanonicalSequence
    """Where in ``order`` each position reads."""
    order: NDArray[np.int64] | None
    """What :func:`draw_order` made, maybe memory-mapped; None for the identity."""

    def __post_init__(self) -> None:
        if self.order is not None and self.order.shape != (self.sequence.num_samples,):
            raise ConfigError(
                f"an epoch of {self.sequence.num_samples} samples needs an order of that length, but got shape "
                f"{self.order.shape}"
            )

    def __len__(self) -> int:
        """Positions of the epoch; a little more than its samples where they do not divide evenly."""
        return len(self.sequence)

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at these positions.

        Args:
            positions: Of any shape, each in ``[0, len(self))``.

        Returns:
            Sample ids of the same shape.

        Raises:
            SampleIndexError: A position lies outside the epoch.
        """
        canonical = self.sequence.canonical_positions(positions)
        return canonical if self.order is None else self.order[canonical]

    def ids_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Sample ids at positions ``[start, stop)``."""
        return self.ids(np.arange(start, stop))


def plan_epoch(
    settings: OrderSettings,
    shape: DatasetShape,
    num_nodes: int,
    order: NDArray[np.int64] | None,
    initial_num_nodes: int | None = None,
) -> EpochPlan:
    """Plan an epoch whose order has been drawn.

    Args:
        settings: Settled; see :meth:`OrderSettings.settled`.
        shape: The data.
        num_nodes: Nodes to deal to, replication divided out.
        order: What :func:`draw_order` gave for the same settings and data.
        initial_num_nodes: Nodes that the run began with; None for a run that begins now.

    Raises:
        UnsupportedError: The run cannot go on on this number of nodes yet.
        ConfigError: The canonical nodes do not fit the nodes, or ``order`` is not of this epoch.
    """
    assert settings.num_canonical_nodes, "settle the settings first"
    sequence = canonical_sequence(
        settings.partition_algo, shape.epoch_size, settings.num_canonical_nodes, num_nodes, initial_num_nodes
    )
    return EpochPlan(sequence=sequence, order=order)


def draw_order(settings: OrderSettings, shape: DatasetShape, epoch: int) -> NDArray[np.int64] | None:
    """Draw and shuffle the samples of one epoch: the part of planning that takes time and memory for each sample.

    Args:
        settings: Settled; see :meth:`OrderSettings.settled`.
        shape: The data.
        epoch: Counts from 0.

    Returns:
        The sample id at each canonical position, of shape (epoch_size,); None where they are equal.

    Raises:
        ConfigError: The epoch is negative, or the samples are too few for the shuffle algorithm.
    """
    assert settings.num_canonical_nodes, "settle the settings first"
    assert settings.shuffle_block_size, "settle the settings first"
    if epoch < 0:
        raise ConfigError(f"epochs count from 0, but got {epoch}")
    drawn = resample(shape.shard_sizes, shape.weights.choose, settings, epoch)
    if not settings.shuffle:
        return drawn.sample_ids
    shuffled = shuffle_map(
        settings.shuffle_algo,
        drawn.units,
        settings.num_canonical_nodes,
        settings.shuffle_seed,
        epoch,
        settings.shuffle_block_size,
    )
    return shuffled if drawn.sample_ids is None else drawn.sample_ids[shuffled]


def order_digest(settings: OrderSettings, shape: DatasetShape, epoch: int) -> str:
    """Name what :func:`draw_order` would give, without drawing it.

    Returns:
        32 hexadecimal digits; equal digests mean equal orders.
    """
    assert settings.num_canonical_nodes, "settle the settings first"
    assert settings.shuffle_block_size, "settle the settings first"
    facts = {
        "version": _ORDER_VERSION,
        "settings": asdict(settings),
        "shards": [len(sizes) for sizes in shape.shard_sizes],
        "choose": shape.weights.choose,
        "epoch": epoch,
    }
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
    for sizes in shape.shard_sizes:
        digest.update(sizes.astype("<i8").tobytes())
    return digest.hexdigest()
