"""What a person writes about order, and the defaults that only a world can fill in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.names import require_served
from lightning_streaming.order.shuffle import SHUFFLES, SHUFFLES_LATER

DEFAULT_SHUFFLE_SEED = 9176

PARTITION_ALGOS = ("orig", "relaxed")
SAMPLING_METHODS = ("balanced", "fixed")
BATCHING_METHODS = ("random",)
BATCHING_METHODS_LATER = ("device_per_stream", "per_stream", "stratified")

_MANY_NODE_SHUFFLES = frozenset({"py1s", "py2s"})
"""Shuffles that mix by having many canonical nodes rather than by blocks."""
_CANONICAL_NODES_PER_NODE = 64
_BLOCK_BUDGET = 4_000_000
_SMALLEST_BLOCK = 262_144
_TOO_MANY = 2**63
"""What no longer fits the integers that numpy and torch pass around."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings:
    """How an epoch's samples are drawn, shuffled and batched."""

    shuffle: bool = False
    """Whether to shuffle; False reads shards one after another within each canonical node."""
    shuffle_algo: str = "py1e"
    """How to shuffle: naive, py1s or py1e."""
    shuffle_seed: int = DEFAULT_SHUFFLE_SEED
    """Seed of everything random about order."""
    shuffle_block_size: int | None = None
    """Samples that py1e mixes with each other, roughly; None for 4,000,000 over all canonical nodes, at least 2**18."""
    num_canonical_nodes: int | None = None
    """Slices of the epoch that are shuffled each by itself; None or 0 for one per node (py1s and py2s: 64 per node)."""
    sampling_method: str = "balanced"
    """What is left out or repeated in each epoch: balanced draws anew, fixed draws the same."""
    sampling_granularity: int = 1
    """Consecutive samples drawn together when a stream is drawn in part."""
    partition_algo: str = "relaxed"
    """How an epoch is divided among nodes: orig or relaxed."""
    batching_method: str = "random"
    """Which samples may share a batch: random lets all."""

    def __post_init__(self) -> None:
        require_served("shuffle_algo", self.shuffle_algo, SHUFFLES, SHUFFLES_LATER)
        require_served("sampling_method", self.sampling_method, SAMPLING_METHODS)
        require_served("partition_algo", self.partition_algo, PARTITION_ALGOS)
        require_served("batching_method", self.batching_method, BATCHING_METHODS, BATCHING_METHODS_LATER)
        _check_whole("shuffle_seed", self.shuffle_seed, least=0)
        _check_whole("sampling_granularity", self.sampling_granularity, least=1)
        if self.shuffle_block_size is not None:
            _check_whole("shuffle_block_size", self.shuffle_block_size, least=1)
        if self.num_canonical_nodes is not None:
            _check_whole("num_canonical_nodes", self.num_canonical_nodes, least=0)

    @property
    def redraws_shards(self) -> bool:
        """Whether each epoch chooses anew how many samples each shard gives."""
        return self.shuffle and self.sampling_method == "balanced"

    def settled(self, num_nodes: int) -> OrderSettings:
        """The same settings with ``num_canonical_nodes`` and ``shuffle_block_size`` filled in.

        Settle once, where a run first starts, and keep the result: the defaults depend on the number of nodes, and an
        order made with other values is another order.

        Args:
            num_nodes: Nodes of the run, replication divided out.
        """
        nodes_each = _CANONICAL_NODES_PER_NODE if self.shuffle_algo in _MANY_NODE_SHUFFLES else 1
        canonical = self.num_canonical_nodes or nodes_each * num_nodes
        block = self.shuffle_block_size or max(_BLOCK_BUDGET // canonical, _SMALLEST_BLOCK)
        return replace(self, num_canonical_nodes=canonical, shuffle_block_size=block)


def _check_whole(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _TOO_MANY:
        raise ConfigError(f"{name} must be a whole number of at least {least} and below 2**63, but got {value!r}")
