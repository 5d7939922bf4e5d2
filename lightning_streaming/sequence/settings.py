"""Options of the order, their checks, and the defaults that depend on the number of nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.units import store_whole

ShuffleAlgo = Literal["blockwise", "naive", "py1b", "py1br", "py1e", "py1s", "py2s"]
PartitionAlgo = Literal["orig", "relaxed"]
SamplingMethod = Literal["balanced", "fixed"]
BatchingMethod = Literal["device_per_stream", "per_stream", "random", "stratified"]


def require_known(setting: str, name: str, known: Iterable[str]) -> None:
    """Check that a name is known.

    Args:
        setting: The option that has the name.
        name: The user's name.
        known: The known names.

    Raises:
        ConfigError: ``name`` is unknown.
    """
    known = sorted(known)
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{setting} must be one of {', '.join(known)}, but got {short_repr(name)}", option=setting)


DEFAULT_SHUFFLE_SEED = 9176

PARTITION_ALGOS: tuple[PartitionAlgo, ...] = get_args(PartitionAlgo)
SAMPLING_METHODS: tuple[SamplingMethod, ...] = get_args(SamplingMethod)
BATCHING_METHODS: tuple[BatchingMethod, ...] = get_args(BatchingMethod)
SHUFFLE_ALGOS: tuple[ShuffleAlgo, ...] = get_args(ShuffleAlgo)

_CANONICAL_NODES_PER_NODE = {"blockwise": 16, "py1s": 64, "py2s": 64}
"""Defaults of shuffles that mix by many canonical nodes, or stagger block borders with them; others have 1."""
_BLOCK_BUDGET = 4_000_000
_SMALLEST_BLOCK = 262_144
LARGEST_SEED = 2**63 - 1
"""The largest integer of numpy and torch."""
MOST_CANONICAL_NODES = 2**20
"""64 for each of 16,384 nodes. Every epoch has at least an entry for each canonical node, for any number of samples."""


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """Options that determine how an epoch's samples are drawn, shuffled and batched.

    Args:
        sampling_method: "balanced" draws other samples each epoch where a weight is below or above 1; "fixed" always
            draws the same.
        sampling_granularity: Samples drawn from a shard at a time.
        partition_algo: "relaxed" lets a run continue on any number of nodes; "orig" on numbers that the canonical nodes
            fit.
        num_canonical_nodes: Slices of the sample space that make the order independent of the machine count. None:
            one per node of the first run (64 for "py1s" and "py2s", 16 for "blockwise"), kept in every saved position.
        shuffle: Whether to shuffle.
        shuffle_algo: "py1e", "blockwise", "py1br", "py1s", "py2s", "naive" or, deprecated, "py1b"; see docs/order.md.
        shuffle_seed: Seed of everything random about the order.
        shuffle_block_size: Samples within which "py1e", "py1br", "py1b" and "blockwise" mix. None: 4 million over all
            canonical nodes, at least 262144 in each (16384 with "blockwise").
        batching_method: Which samples share a batch: "random", "stratified" (each global batch holds every stream's
            share), "per_stream" (each is of one stream) or "device_per_stream" (each batch of one rank is).

    Raises:
        ConfigError: A setting is invalid.
    """

    sampling_method: SamplingMethod = "balanced"
    sampling_granularity: int = 1
    partition_algo: PartitionAlgo = "relaxed"
    num_canonical_nodes: int | None = None
    shuffle: bool = False
    shuffle_algo: ShuffleAlgo = "py1e"
    shuffle_seed: int = DEFAULT_SHUFFLE_SEED
    shuffle_block_size: int | None = None
    batching_method: BatchingMethod = "random"

    def __post_init__(self) -> None:
        require_known("shuffle_algo", self.shuffle_algo, SHUFFLE_ALGOS)
        require_known("sampling_method", self.sampling_method, SAMPLING_METHODS)
        require_known("partition_algo", self.partition_algo, PARTITION_ALGOS)
        require_known("batching_method", self.batching_method, BATCHING_METHODS)
        store_whole(self, "shuffle_seed", 0, LARGEST_SEED)
        store_whole(self, "sampling_granularity", 1, LARGEST_SEED)
        store_whole(self, "shuffle_block_size", 1, LARGEST_SEED, or_none=True)
        store_whole(self, "num_canonical_nodes", 0, MOST_CANONICAL_NODES, or_none=True)

    @property
    def redraws_shards(self) -> bool:
        """True if the number of samples of each shard is drawn again for each epoch."""
        return self.shuffle and self.sampling_method == "balanced"

    def resolved(self, num_nodes: int) -> ResolvedOrder:
        """Return the settings with ``num_canonical_nodes`` and ``shuffle_block_size`` filled in.

        Call it once, at the first start of a run, and keep the result: the defaults depend on the number of nodes, and
        other values give another order.

        Args:
            num_nodes: Nodes of the run, replication divided out.
        """
        nodes_each = _CANONICAL_NODES_PER_NODE.get(self.shuffle_algo, 1)
        canonical = self.num_canonical_nodes or nodes_each * num_nodes
        # With blockwise the blocks of one node's canonical nodes together are as large as one block of the others.
        smallest = _SMALLEST_BLOCK // (nodes_each if self.shuffle_algo == "blockwise" else 1)
        block = self.shuffle_block_size or max(_BLOCK_BUDGET // canonical, smallest)
        return self.resolved_as(canonical, block)

    def resolved_as(self, num_canonical_nodes: int, shuffle_block_size: int) -> ResolvedOrder:
        """Return the settings with the values that :meth:`resolved` once filled in."""
        known = {"num_canonical_nodes": num_canonical_nodes, "shuffle_block_size": shuffle_block_size}
        return ResolvedOrder(**{**vars(self), **known})


@dataclass(frozen=True, kw_only=True)
class ResolvedOrder(OrderSettings):
    """Settings with every default filled in, by :meth:`OrderSettings.resolved`: the input of an order."""

    num_canonical_nodes: int = field()
    shuffle_block_size: int = field()

    @property
    def facts(self) -> dict[str, str | int | bool]:
        """All settings under the keys that digests are computed over."""
        return {
            "sampling_method": self.sampling_method,
            "sampling_granularity": self.sampling_granularity,
            "partition_algo": self.partition_algo,
            "num_canonical_nodes": self.num_canonical_nodes,
            "shuffle": self.shuffle,
            "shuffle_algo": self.shuffle_algo,
            "shuffle_seed": self.shuffle_seed,
            "shuffle_block_size": self.shuffle_block_size,
            "batching_method": self.batching_method,
        }
