"""Which ranks read the same samples by the strategy of a configured trainer, as that has them read when it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.commands import count_ranks
from lightning_streaming.tools.console import counted

_WITH_MESH = "ModelParallelStrategy"
"""The only one of Lightning's whose ranks share samples."""
_LIGHTNING = ("lightning", "pytorch_lightning")


class StrategyRanks(NamedTuple):
    """What a strategy says of a run's ranks."""

    replication: int | None = None
    """Consecutive ranks that read the same samples; None where each reads its own."""
    ranks_per_node: int | None = None
    """None where the strategy does not say."""
    assumed: str | None = None
    """What nobody said and is taken to be so."""


def strategy_ranks(trainer: Mapping[str, Any], nodes: int, ranks_per_node: int | None = None) -> StrategyRanks:
    """What the strategy of a trainer says, as it is written; nothing of it is made.

    Args:
        trainer: The trainer's settings.
        nodes: Of the run.
        ranks_per_node: If somebody asked for so many.

    Raises:
        ConfigError: Its mesh is of a size that is not told, or of other ranks than the run has.
    """
    strategy = trainer.get("strategy")
    if not isinstance(strategy, Mapping):
        return StrategyRanks()  # those that go by a name have each rank read its own samples
    path = str(strategy.get("class_path"))
    module, _, name = path.rpartition(".")
    if name != _WITH_MESH:
        if not module or module.partition(".")[0] in _LIGHTNING:
            return StrategyRanks()
        return StrategyRanks(
            assumed=f"which ranks of trainer.strategy={path} read the same samples is not known; taken to be none, "
            "else set data.train.replication"
        )
    configured, left_open = count_ranks(trainer)
    ranks = ranks_per_node or (configured if left_open is None else None)
    sizes = strategy.get("init_args") or {}
    # Left to itself, the strategy puts the ranks of each node into a group.
    data, tensor = _size(sizes, "data_parallel_size", nodes), _size(sizes, "tensor_parallel_size", ranks)
    if data * tensor % nodes or (ranks is not None and data * tensor != nodes * ranks):
        has = counted(nodes, "node") if ranks is None else f"{nodes} x {ranks} ranks"
        raise ConfigError(
            f"trainer.strategy={name} has a mesh of {data} (data parallel) x {tensor} (tensor parallel) ranks, and the "
            f"run has {has}",
            hint="give trainer.num_nodes and trainer.devices, or the sizes of the mesh, so that they agree, or "
            "data.train.replication, which goes before the mesh",
            option="trainer.strategy",
        )
    return StrategyRanks(replication=tensor if tensor > 1 else None, ranks_per_node=data * tensor // nodes)


def _size(sizes: Mapping[str, Any], name: str, left_open: int | None) -> int:
    """A size of the mesh, as it is written, or what it is where that is left open."""
    size = sizes.get(name, "auto")
    if size == "auto" and left_open is None:
        raise ConfigError(
            f"{name} of trainer.strategy={_WITH_MESH} is left to the number of devices, which is left open, too",
            hint="write one of them, that or trainer.devices, as a number",
            option="trainer.strategy",
        )
    size = left_open if size == "auto" else size
    if type(size) is not int or size < 1:
        raise ConfigError(
            f"{name} of trainer.strategy={_WITH_MESH} must be a number of ranks, but is {size!r}",
            option="trainer.strategy",
        )
    return size
