"""Which process this is among all that train together.

A :class:`World` is a value. It is never read in a constructor and never remembered across a launch: whoever starts an
iteration says in which world it happens. Under Lightning the trainer says it; otherwise :meth:`World.detect` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_streaming.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One rank's place among nodes and ranks."""

    num_nodes: int = 1
    """Machines that train together."""
    ranks_per_node: int = 1
    """Training processes on each machine."""
    rank: int = 0
    """This process, counted over all nodes: node * ranks_per_node + rank_of_node."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigError(
                f"a world needs at least one node and one rank per node, but got {self.num_nodes} and "
                f"{self.ranks_per_node}"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"rank must be in [0, {self.num_ranks}), but got {self.rank}")

    @property
    def num_ranks(self) -> int:
        """Training processes over all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        """The machine this rank runs on."""
        return self.rank // self.ranks_per_node

    @property
    def rank_of_node(self) -> int:
        """This rank, counted within its machine."""
        return self.rank % self.ranks_per_node

    def replicated(self, replication: int | None) -> World:
        """The world in which ``replication`` consecutive ranks are one, because they read the same samples.

        For example 2 nodes of 4 ranks with replication 2 become 1 node of 4 ranks.

        Args:
            replication: Ranks per group; None for no replication.

        Raises:
            ConfigError: The ranks do not divide into such groups.
        """
        if replication is None:
            return self
        if replication < 1 or self.num_ranks % replication:
            raise ConfigError(f"replication must divide the {self.num_ranks} ranks, but got {replication}")
        groups = self.num_ranks // replication
        nodes = groups // self.ranks_per_node if groups % self.ranks_per_node == 0 else 1
        return World(num_nodes=nodes, ranks_per_node=groups // nodes, rank=self.rank // replication)

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> World:
        """The world this process runs in now: ``torch.distributed`` if it is up, else the launcher's environment.

        ``torchrun`` sets ``RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``. Where the last is missing all ranks count
        as ranks of one node: every sample is still read exactly once, only the default number of canonical nodes
        is that of one node.

        Args:
            environ: Variables to read instead of ``os.environ``.

        Raises:
            ConfigError: The variables contradict each other, or say that this is one of several ranks, but not which.
        """
        env = os.environ if environ is None else environ
        rank, num_ranks = _distributed_rank() or _launched_rank(env)
        ranks_per_node = _number(env, "LOCAL_WORLD_SIZE", num_ranks)
        if ranks_per_node < 1 or num_ranks % ranks_per_node:
            raise ConfigError(
                f"{num_ranks} ranks do not divide into nodes of LOCAL_WORLD_SIZE={ranks_per_node}; "
                "pass world=World(...) to say how they are laid out"
            )
        return cls(num_nodes=num_ranks // ranks_per_node, ranks_per_node=ranks_per_node, rank=rank)


def _distributed_rank() -> tuple[int, int] | None:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def _launched_rank(env: Mapping[str, str]) -> tuple[int, int]:
    """This rank and the number of ranks, as the launcher's environment has them."""
    num_ranks = _number(env, "WORLD_SIZE", 1)
    is_spawned = bool(env.get("LOCAL_RANK")) and not env.get("WORLD_SIZE")  # by Lightning, which says no more there
    if not env.get("RANK") and (num_ranks > 1 or is_spawned):
        # To take them all for rank 0 would have each of them read the same samples.
        found = [f"{name}={env[name]}" for name in ("WORLD_SIZE", "NODE_RANK", "LOCAL_RANK") if env.get(name)]
        raise ConfigError(
            f"the environment ({', '.join(found)}) has this process be one of several ranks and does not say which: "
            "RANK is not set, and torch.distributed is not initialised here. Ask for nothing that depends on the ranks "
            "before they are connected; read through a StreamingDataLoader, which tells its workers; or pass "
            "world=World(...) to the dataset"
        )
    return _number(env, "RANK", 0), num_ranks


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name} must be a whole number, but is {text!r}") from None
