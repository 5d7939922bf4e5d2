"""The run that is tuned: its data module, loaders of it with other settings, and how many ranks it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.dataloader import StreamingDataLoader
from lightning_streaming.tools.run_files import read_run_files
from lightning_streaming.world import World

STAGES = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""The data of each of Lightning's stages; of ``fit`` that to train on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What was said on the command line; None where the configuration is to say it."""

    configs: list[str]
    changes: Mapping[str, str]
    stage: str
    """One of :data:`STAGES`."""
    nodes: int | None
    ranks_per_node: int | None


class TunedRun:
    """A data module, and the one stage of it that is tuned.

    Args:
        module: A ``StreamingDataModule`` that is not set up.
        stage: One of :data:`STAGES`.
        world: The ranks that are to read, as rank 0 of which the loaders read.
        assumed: What nobody said and is taken to be so.
    """

    def __init__(self, module: Any, stage: str, world: World, assumed: str | None) -> None:
        self.world = world
        self.assumed = assumed
        self.written = {"num_workers": module.num_workers, "prefetch_factor": module.prefetch_factor}
        """Settings of the loader as the configuration has them."""
        self.config = module.configs[STAGES[stage]]
        """The stage's data as the configuration has it: a ``StreamingConfig``."""
        self._module = module
        self._stage = stage

    @property
    def data(self) -> str:
        """What the data of the stage is called in the configuration."""
        return STAGES[self._stage]

    @property
    def start_method(self) -> str | None:
        """How the configuration wants processes to start; None for the platform's default."""
        method: str | None = self._module.multiprocessing_context
        return method

    def use(self, config: Any) -> None:
        """Let the loaders that are made from now on read this data: a ``StreamingConfig``."""
        self._module.configs[self.data] = config
        self._module.setup(self._stage)

    def loader(self, num_workers: int) -> StreamingDataLoader:
        """A loader of the data in use, with the transform and the collate function of the data module.

        Its workers live on from epoch to epoch, so that epochs that are short here count like long ones.

        Raises:
            ConfigError: The data module makes something else.
        """
        module = self._module
        module.num_workers = num_workers
        module.persistent_workers = num_workers > 0
        module.prefetch_factor = self.written["prefetch_factor"] if num_workers else None
        made = getattr(module, f"{self.data}_dataloader")()
        if isinstance(made, Mapping) and len(made) == 1:
            made = next(iter(made.values()))
        if not isinstance(made, StreamingDataLoader):
            raise ConfigError(
                f"a run with one StreamingDataLoader for {self.data!r} can be tuned, but this data module's "
                f"{self.data}_dataloader gives a {type(made).__name__}"
            )
        if made.num_workers != num_workers:
            raise ConfigError(
                f"num_workers={num_workers} was asked for, but this data module's build_dataloader makes loaders with "
                f"{made.num_workers}; let it use self.num_workers"
            )
        return made


def tuned_run(asked: Asked) -> TunedRun:
    """Read the configuration; nothing is opened.

    Raises:
        ConfigError: It does not describe a run that can be tuned.
    """
    written = read_run_files(asked.configs, asked.changes, STAGES[asked.stage])
    nodes = asked.nodes or int(written.trainer.get("num_nodes", 1))
    ranks, assumed = (asked.ranks_per_node, None) if asked.ranks_per_node else _devices(written.trainer)
    return TunedRun(written.datamodule, asked.stage, World(num_nodes=nodes, ranks_per_node=ranks), assumed)


def batch_size_of(loader: StreamingDataLoader) -> int:
    """Samples of a batch of one rank."""
    return loader.samples_per_global_batch // loader.dataset.current_world().num_ranks


def _devices(trainer: Mapping[str, Any]) -> tuple[int, str | None]:
    devices = trainer.get("devices", "auto")
    if isinstance(devices, list):
        return len(devices), None
    if str(devices).isdecimal() and int(devices):
        return int(devices), None
    return 1, "the configuration leaves the number of devices open; taken to be 1, see --ranks-per-node"
