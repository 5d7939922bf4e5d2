"""The position of this process among all that train together.

A :class:`World` is a value. It is never read in a constructor and never remembered across a launch: the caller that
starts an iteration passes the world. Under Lightning that is the trainer's; otherwise :meth:`World.detect` finds it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.signatures import public

DATA_PARALLEL = ("dp_replicate", "dp_shard")
"""The dimensions of a device mesh whose ranks read different samples, as torch's own trainers name them."""


class Mesh(Protocol):
    """The attributes of a ``torch.distributed.device_mesh.DeviceMesh`` that are used here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """A name for each dimension."""

    @property
    def mesh(self) -> Any:
        """The ranks: a tensor with these dimensions."""


@public()
@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Position of one rank among nodes and ranks."""

    num_nodes: int = 1
    """Number of machines that train together."""
    ranks_per_node: int = 1
    """Number of training processes on each machine."""
    rank: int = 0
    """Number of this process over all nodes: node * ranks_per_node + rank_of_node."""
    is_reader: bool = True
    """Whether this rank reads samples. If not, its loader yields the same number of batches, all of them empty, and
    counts positions like every other rank."""

    def __post_init__(self) -> None:
        counts = (self.num_nodes, self.ranks_per_node, self.rank)
        if not all(isinstance(count, Integral) and not isinstance(count, bool) for count in counts):
            raise ConfigError(
                f"num_nodes, ranks_per_node and rank must be whole numbers, but got {short_repr(counts)}",
                option="world",
            )
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigError(
                f"a world needs at least one node and one rank per node, but got "
                f"{short_repr(self.num_nodes)} and {short_repr(self.ranks_per_node)}",
                option="world",
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(
                f"rank must be in [0, {short_repr(self.num_ranks)}), but got {short_repr(self.rank)}", option="rank"
            )
        if not isinstance(self.is_reader, bool):
            raise ConfigError(
                f"is_reader must be True or False, but got {short_repr(self.is_reader)}", option="is_reader"
            )

    @property
    def num_ranks(self) -> int:
        """Number of training processes over all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        """Number of the machine that this rank runs on."""
        return self.rank // self.ranks_per_node

    @property
    def rank_of_node(self) -> int:
        """Number of this rank within its machine."""
        return self.rank % self.ranks_per_node

    def replicated(self, replication: int | None) -> World:
        """Return the world in which ``replication`` consecutive ranks count as one, because they read the same samples.

        For example 2 nodes of 4 ranks with replication 2 become 1 node of 4 ranks, as in MosaicML Streaming; the orders
        of runs depend on it. :meth:`from_mesh` keeps machines apart where it can.

        Args:
            replication: Ranks per group; None for no replication.

        Raises:
            ConfigError: The ranks do not divide into such groups.
        """
        if replication is None:
            return self
        if replication < 1 or self.num_ranks % replication:
            raise ConfigError(
                f"replication must divide the {self.num_ranks} ranks, but got {replication}", option="replication"
            )
        groups = self.num_ranks // replication
        nodes = groups // self.ranks_per_node if groups % self.ranks_per_node == 0 else 1
        rank = self.rank // replication
        return World(num_nodes=nodes, ranks_per_node=groups // nodes, rank=rank, is_reader=self.is_reader)

    @classmethod
    def from_mesh(
        cls,
        mesh: Mesh,
        readers: Sequence[str] = DATA_PARALLEL,
        *,
        ranks: World | None = None,
        is_reader: bool = True,
    ) -> World:
        """Return the world of those ranks of a device mesh that read different samples.

        Ranks that differ only in other dimensions (tensor, context, pipeline, expert parallel) count as one and read
        the same samples; the order of the dimensions does not matter. If every machine has the same number of readers,
        and two machines share either all of their readers or none, the nodes are the machines; otherwise all readers
        form one node.

        Args:
            mesh: A ``torch.distributed.device_mesh.DeviceMesh`` of all ranks, with names for its dimensions.
            readers: Dimensions along which samples differ; the mesh may lack some of the default ones.
            ranks: All ranks as they were started, and the number of this one. None: :meth:`detect`.
            is_reader: Whether this rank reads samples.

        Raises:
            ConfigError: The mesh has no named dimensions, or none of these, or does not contain each rank once.
        """
        ranks = cls.detect() if ranks is None else ranks
        reader_of = readers_of_mesh(mesh, readers, ranks.num_ranks)
        machines = {frozenset(machine.tolist()) for machine in reader_of.reshape(ranks.num_nodes, -1)}
        count = int(reader_of.max()) + 1
        # As many sets of this size hold all readers, so no two of them meet. Readers are in order of their lowest
        # ranks, so each set is a run of them.
        nodes = len(machines) if all(len(readers_of) * len(machines) == count for readers_of in machines) else 1
        return cls(
            num_nodes=nodes,
            ranks_per_node=count // nodes,
            rank=int(reader_of[ranks.rank]),
            is_reader=is_reader and ranks.is_reader,
        )

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> World:
        """Detect the world of this process: from ``torch.distributed`` if initialised, else from the environment.

        ``torchrun`` sets ``RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``. Without the last, all ranks count as ranks
        of one node: every sample is still read exactly once, but the default number of canonical nodes is that of one
        node.

        Args:
            environ: Variables to read instead of ``os.environ``.

        Raises:
            ConfigError: The variables contradict each other, or there are several ranks and ``RANK`` is not set.
        """
        env = os.environ if environ is None else environ
        rank, num_ranks = _distributed_rank() or _launched_rank(env)
        ranks_per_node = _number(env, "LOCAL_WORLD_SIZE", num_ranks)
        if ranks_per_node < 1 or num_ranks % ranks_per_node:
            raise ConfigError(
                f"{num_ranks} ranks do not divide into nodes of LOCAL_WORLD_SIZE={ranks_per_node}",
                hint="pass world=World(...) to say how they are laid out",
                option="world",
            )
        return cls(num_nodes=num_ranks // ranks_per_node, ranks_per_node=ranks_per_node, rank=rank)


def readers_of_mesh(mesh: Mesh, readers: Sequence[str], num_ranks: int) -> NDArray[np.int64]:
    """Return the reader of each of ``num_ranks`` ranks, as :func:`merge_ranks` numbers them.

    Raises:
        ConfigError: The mesh has none of these dimensions, or no names, or does not contain each rank once.
    """
    names, wanted = mesh.mesh_dim_names, (readers,) if isinstance(readers, str) else tuple(readers)
    if not names:
        raise ConfigError(
            "the device mesh has no names for its dimensions",
            hint="create it with mesh_dim_names=(...)",
            option="world",
        )
    axes = [axis for axis, name in enumerate(names) if name in wanted]
    strange = [name for name in wanted if name not in names and name not in DATA_PARALLEL]
    if strange or not axes:
        raise ConfigError(
            f"readers={tuple(strange) or wanted!r} are none of the dimensions of the device mesh, which are "
            f"{', '.join(map(repr, names))}",
            hint="name those along which ranks read different samples",
            option="readers",
        )
    ranks = np.asarray(mesh.mesh, np.int64)
    if sorted(ranks.reshape(-1).tolist()) != list(range(num_ranks)):
        raise ConfigError(
            f"the device mesh must have each of the {num_ranks} ranks once, but has {ranks.size}",
            hint="pass the whole mesh, "
            f"not a slice of it like mesh[{wanted[0]!r}], so that all ranks divide the data alike",
            option="world",
        )
    return merge_ranks(ranks, axes)


def merge_ranks(ranks: NDArray[np.int64], axes: Sequence[int]) -> NDArray[np.int64]:
    """Return the reader of each rank, where ranks that differ only along other axes are one.

    For example the mesh [[0, 1], [2, 3]] has the readers 0 0 1 1 along its first axis, and 0 1 0 1 along its second.

    Args:
        ranks: Ranks in any shape; each in ``[0, ranks.size)``, once.
        axes: Axes along which ranks read different samples.

    Returns:
        The reader by rank, of shape (ranks.size,). Readers are numbered from 0 on, by the lowest rank of each.
    """
    by_reader = np.moveaxis(ranks, axes, range(len(axes)))
    groups = by_reader.reshape(int(np.prod(by_reader.shape[: len(axes)])), -1)
    reader_of = np.empty(ranks.size, np.int64)
    reader_of[groups[np.argsort(groups.min(axis=1))]] = np.arange(len(groups))[:, np.newaxis]
    return reader_of


def _distributed_rank() -> tuple[int, int] | None:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def _launched_rank(env: Mapping[str, str]) -> tuple[int, int]:
    """Return this rank and the number of ranks from the launcher's environment."""
    num_ranks = _number(env, "WORLD_SIZE", 1)
    is_spawned = bool(env.get("LOCAL_RANK")) and not env.get("WORLD_SIZE")  # by Lightning, which says no more there
    if not env.get("RANK") and (num_ranks > 1 or is_spawned):
        # To take them all for rank 0 would have each of them read the same samples.
        values = [f"{name}={env[name]}" for name in ("WORLD_SIZE", "NODE_RANK", "LOCAL_RANK") if env.get(name)]
        raise ConfigError(
            f"the environment ({', '.join(values)}) makes this process one of several ranks, but RANK is not set and "
            "torch.distributed is not initialised here",
            hint="use what depends on the ranks only after they are connected; read through a StreamingDataLoader, "
            "which passes the rank to its workers; or pass world=World(...) to the dataset",
            option="world",
        )
    return _number(env, "RANK", 0), num_ranks


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} must be a whole number, but is {short_repr(text)}", option=name
        ) from None
