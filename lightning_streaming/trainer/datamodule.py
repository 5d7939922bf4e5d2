"""Streaming datasets for each stage of a Lightning run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch.utils.data import default_collate

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.options.groups import group_of
from lightning_streaming.options.reading import BadSamplesConfig
from lightning_streaming.reading.dataset import StreamingDataset, source_of
from lightning_streaming.reading.loader import StreamingDataLoader, watch_first_download
from lightning_streaming.reading.measures import DownloadCallback, Fetched
from lightning_streaming.signatures import accepts_keyword, check_accepts, explains_options_of, public, suggests_names
from lightning_streaming.trainer import lightning_internals
from lightning_streaming.trainer.config import StreamingConfig, config_of, shown
from lightning_streaming.trainer.pause import PauseWorkers
from lightning_streaming.trainer.state_callback import StreamingStateCallback
from lightning_streaming.units import check_truth, format_bytes, is_one_of, store_whole
from lightning_streaming.waits import ProgressDisplay, waiting
from lightning_streaming.world import DATA_PARALLEL, World, readers_of_mesh

Stage = Literal["train", "val", "test", "predict"]
STAGES: tuple[Stage, ...] = get_args(Stage)

_STAGES_OF: Mapping[str, tuple[Stage, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
_RUN_OF: Mapping[Stage, str] = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}
"""What sets up the data of each stage."""
_LIGHTNINGS_OWN = "data_parallel"
"""The dimension of Lightning's own meshes along which samples differ."""


@dataclass
class StageOptions:
    """Datasets of each stage, and their batches.

    Args:
        train: Data of ``fit``.
        val: Data of ``fit``'s validation and of ``validate``.
        test: Data of ``test``.
        predict: Data of ``predict``.
        batch_size: Samples per batch on each rank.
        eval_batch_size: Samples per batch on each rank for val, test and predict. None: ``batch_size``.
        return_keys: Stages whose batches come with the keys of their samples, as a :class:`KeyedBatch`; see
            docs/evaluation.md.
        return_valid_mask: Stages whose batches, which must be dicts, get a mask ``valid``: False for samples that are
            read again so that every rank has the same number of batches.
    """

    train: StreamingConfig | None = None
    val: StreamingConfig | None = None
    test: StreamingConfig | None = None
    predict: StreamingConfig | None = None
    batch_size: int = 1
    eval_batch_size: int | None = None
    return_keys: Sequence[Stage] = ()
    return_valid_mask: Sequence[Stage] = ()


@dataclass
class LoaderOptions:
    """Arguments of torch's ``DataLoader`` for the loader of each stage.

    Args:
        num_workers: Worker processes per loader; 0 loads in the training process.
        prefetch_factor: Batches each worker prepares ahead. None: torch's default.
        persistent_workers: Keep workers running between epochs.
        pin_memory: Copy batches to page-locked memory, for faster transfer to a GPU.
        drop_last: Drop the last training batch if it is not full.
        multiprocessing_context: How workers start: "fork", "spawn" or "forkserver". None: the platform's default.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    drop_last: bool = False
    multiprocessing_context: str | None = None


@dataclass
class ModuleOptions(LoaderOptions, StageOptions):
    """Options of a data module; stages first.

    Args:
        pause_workers: End the train workers while a validation of ``fit`` runs, and the validation workers after it, so
            that the workers of one stage run at a time. They start again at the next batch; prefetched batches are
            read again.
    """

    pause_workers: bool = False

    def __post_init__(self) -> None:
        self.return_keys = _stages("return_keys", self.return_keys)
        self.return_valid_mask = _stages("return_valid_mask", self.return_valid_mask)
        for name in ("persistent_workers", "pin_memory", "drop_last", "pause_workers"):
            check_truth(name, getattr(self, name))
        store_whole(self, "batch_size", 1)
        store_whole(self, "eval_batch_size", 1, or_none=True)
        store_whole(self, "num_workers", 0)
        store_whole(self, "prefetch_factor", 1, or_none=True)


def _stages(option: str, stages: Any) -> tuple[Stage, ...]:
    names = tuple(stages) if isinstance(stages, Iterable) and not isinstance(stages, str) else (stages,)
    if isinstance(stages, str) or not all(is_one_of(name, STAGES) for name in names):
        raise ConfigError(
            f"{option} must be a list of stages ({', '.join(STAGES)}), but got {short_repr(stages)}", option=option
        )
    return names


if TYPE_CHECKING:

    class _WithOptions(ModuleOptions, LightningDataModule):
        """Has each option as an attribute, which may be set."""
else:
    _WithOptions = LightningDataModule


@public()
@suggests_names
@explains_options_of(ModuleOptions)
class StreamingDataModule(_WithOptions):
    """Data module with a streaming dataset and loader for each stage, which makes ``Trainer.fit(ckpt_path=...)`` exact.

    Use it as it is, from Python or YAML, or override ``transform(self, sample, stage)`` or ``transform(self, sample,
    stage, rng)``, and ``collate(self, samples)``, for your task, and
    :meth:`build_dataset` and :meth:`build_dataloader` for anything else. It adds a :class:`StreamingStateCallback` to
    the trainer if there is none, so every checkpoint contains the position.
    """

    def __init__(
        self,
        train: StreamingConfig | None = None,
        val: StreamingConfig | None = None,
        test: StreamingConfig | None = None,
        predict: StreamingConfig | None = None,
        batch_size: int = 1,
        eval_batch_size: int | None = None,
        return_keys: Sequence[Stage] = (),
        return_valid_mask: Sequence[Stage] = (),
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory: bool = False,
        drop_last: bool = False,
        multiprocessing_context: str | None = None,
        pause_workers: bool = False,
    ) -> None:
        values = locals()
        settings = vars(ModuleOptions(**{option.name: values[option.name] for option in fields(ModuleOptions)}))
        LightningDataModule.__init__(self)
        self.configs: dict[Stage, StreamingConfig | None] = {stage: config_of(settings.pop(stage)) for stage in STAGES}
        _check_logs(self.configs)
        for name, value in settings.items():
            setattr(self, name, value)  # which a subclass may have a property for
        self.datasets: dict[Stage, StreamingDataset] = {}
        self._leave_out_loaders()
        self._check_hooks()

    # Override these -----------------------------------------------------------------------------------------------

    def transform(self, sample: dict[str, Any], stage: Stage, rng: np.random.Generator) -> Any:
        """Transform a decoded sample into the input of :meth:`collate`. Runs in the workers.

        Args:
            sample: Column name to value.
            stage: "train", "val", "test" or "predict"; augment in "train" only.
            rng: Random generator of the sample: it gives the same augmentation after any resume. An override that
                draws nothing may omit this parameter.
        """
        return sample

    def collate(self, samples: list[Any]) -> Any:
        """Collate the transformed samples of a batch. Runs in the workers."""
        return default_collate(samples)

    def build_dataset(self, stage: Stage, config: StreamingConfig) -> StreamingDataset:
        """Build the dataset of a stage. Called in :meth:`setup`, on every rank, with the trainer attached."""
        arguments = config.dataset_arguments(shuffle_by_default=stage == "train")
        world = None if self.trainer is None else world_of(self.trainer)
        if self.trainer is not None and arguments["replication"] is None:
            world, arguments["replication"] = readers_of(self.trainer)
        transform = None
        if self._overrides("transform"):
            transform = (_TransformWithRng if accepts_keyword(self.transform, "rng") else _Transform)(self, stage)
        return StreamingDataset(**arguments, transform=transform, world=world)

    def build_dataloader(self, stage: Stage, dataset: StreamingDataset) -> StreamingDataLoader:
        """Build the loader of a stage. Called whenever Lightning needs one."""
        loading = {one.name: getattr(self, one.name) for one in fields(LoaderOptions)}
        loading["drop_last"] = self.drop_last and stage == "train"
        if not self.num_workers:
            loading.update(persistent_workers=False, multiprocessing_context=None)
        return StreamingDataLoader(
            dataset,
            batch_size=self.batch_size_of(stage),
            fixed_epoch=stage != "train",
            return_keys=stage in self.return_keys,
            return_valid_mask=stage in self.return_valid_mask,
            collate_fn=_Collate(self, stage) if self._overrides("collate") else None,
            **loading,
        )

    # Lightning calls these ----------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Build the datasets of a stage, and add the callback that saves their position."""
        if self.trainer is not None:
            callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
            kinds: list[type[Callback]] = [StreamingStateCallback]
            for kind in [*kinds, PauseWorkers] if self.pause_workers else kinds:
                if not any(isinstance(callback, kind) for callback in callbacks):
                    callbacks.append(kind())
        for name in _STAGES_OF[stage]:
            config = self.configs[name]
            if config is not None:
                try:
                    self.datasets[name] = dataset = self.build_dataset(name, config)
                except ConfigError as error:
                    raise error.with_context(f"data.{name}") from error.__cause__
                if isinstance(dataset, StreamingDataset):
                    source_of(dataset).set_label(f"data.{name}")
                    if self.trainer is not None:
                        source_of(dataset).shown = progress_display(self.trainer)

    def train_dataloader(self) -> Any:
        """Return the loader of ``train``."""
        return self._loader("train")

    def val_dataloader(self) -> Any:
        """Return the loader of ``val``."""
        return self._loader("val")

    def test_dataloader(self) -> Any:
        """Return the loader of ``test``."""
        return self._loader("test")

    def predict_dataloader(self) -> Any:
        """Return the loader of ``predict``."""
        return self._loader("predict")

    def teardown(self, stage: str) -> None:
        """Unmap the shards of a stage."""
        for name in _STAGES_OF[stage]:
            if name in self.datasets:
                self.datasets[name].close()

    def batch_size_of(self, stage: Stage) -> int:
        """Return the samples per batch on each rank."""
        if stage == "train" or self.eval_batch_size is None:
            return self.batch_size
        return self.eval_batch_size

    @property
    def hparams(self) -> Any:
        """Hyperparameters saved by ``save_hyperparameters()``: stages are plain values without secrets.

        ``configs`` has the stages as they were passed.
        """
        found = super().hparams
        found.update({name: shown(value, name) for name, value in found.items()})
        return found

    @property
    def hparams_initial(self) -> Any:
        """Hyperparameters as they were first saved."""
        found = super().hparams_initial
        found.update({name: shown(value, name) for name, value in found.items()})
        return found

    def _for_workers(self) -> StreamingDataModule:
        """Copy the module without trainer and datasets, for workers: these need only ``transform`` and ``collate``."""
        copied = copy(self)
        copied.trainer, copied.datasets = None, {}
        return copied

    def __repr__(self) -> str:
        stages = [
            f"{stage}: {self.datasets.get(stage, 'not set up')!s}"
            for stage, config in self.configs.items()
            if config is not None or stage in self.datasets
        ]
        settings = f"batch_size={self.batch_size}, num_workers={self.num_workers}"
        return f"<{type(self).__name__}: {'; '.join([*stages, settings])}>"

    __str__ = __repr__  # Lightning's own makes loaders and reads indexes

    def __getstate__(self) -> dict[str, Any]:
        hooks = {_hook_of(stage) for stage in self.configs}
        return {name: value for name, value in self.__dict__.items() if name not in hooks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._leave_out_loaders()

    def _loader(self, stage: Stage) -> StreamingDataLoader:
        if stage not in self.datasets and self.configs[stage] is not None:
            raise ConfigError(
                f"the data for {stage!r} is not set up yet",
                hint=f"call setup({_RUN_OF[stage]!r}) first",
                option=f"data.{stage}",
            )
        if stage not in self.datasets:
            way_out = f"pass {stage}=StreamingConfig(...), in YAML {stage}: {{remote: ...}}"
            raise ConfigError(f"this data module has no data for {stage!r}", hint=way_out, option=f"data.{stage}")
        loader = self.build_dataloader(stage, self.datasets[stage])
        callback = None if self.trainer is None else first_download_callback(self.trainer)
        if callback is not None and isinstance(loader, StreamingDataLoader):
            watch_first_download(loader, callback)
        return loader

    def _leave_out_loaders(self) -> None:
        # Lightning takes a hook that is defined for a stage that is wanted, and warns when it comes back empty. So a
        # stage without data has Lightning's own hook, which is how Lightning knows that there is none. Without training
        # data there is nothing to fit, and ours says so better.
        for stage, config in self.configs.items():
            if config is None and stage != "train" and not self._overrides(_hook_of(stage)):
                setattr(self, _hook_of(stage), getattr(super(), _hook_of(stage)))

    def _check_hooks(self) -> None:
        name = type(self).__name__
        if self._overrides("transform"):
            rng = {"rng": None} if accepts_keyword(self.transform, "rng") else {}
            form = "(sample, stage=...), optionally with rng=..."
            check_accepts(self.transform, f"{name}.transform", form, {}, stage="train", **rng)
        if self._overrides("collate"):
            check_accepts(self.collate, f"{name}.collate", "(samples)", [])

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(StreamingDataModule, name)


def _check_logs(configs: Mapping[Stage, StreamingConfig | None]) -> None:
    """Refuse stages that would take each other's bad samples for their own."""
    owners: dict[Path, Stage] = {}
    for stage, config in configs.items():
        log = None if config is None else group_of(config, BadSamplesConfig).log
        directory = None if log is None else Path(log).absolute()
        if directory is not None and owners.setdefault(directory, stage) != stage:
            raise ConfigError(
                f"data.{owners[directory]} and data.{stage} have the same bad_samples.log, {directory}, and would "
                "replace each other's samples",
                hint="give each stage its own directory",
                option=f"{stage}.bad_samples.log",
                path=str(directory),
            )


def _hook_of(stage: Stage) -> str:
    return f"{stage}_dataloader"


class _OfModule:
    """A hook of the data module for one stage, which a spawned worker gets without the trainer."""

    def __init__(self, module: StreamingDataModule, stage: Stage) -> None:
        self._module = module
        self._stage = stage

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self._module._for_workers()}


class _Collate(_OfModule):
    def __call__(self, samples: list[Any]) -> Any:
        return self._module.collate(samples)


class _Transform(_OfModule):
    def __call__(self, sample: dict[str, Any]) -> Any:
        return self._module.transform(sample, stage=self._stage)  # type: ignore[call-arg]  # an override without rng


class _TransformWithRng(_OfModule):
    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> Any:
        return self._module.transform(sample, stage=self._stage, rng=rng)


def world_of(trainer: Trainer) -> World:
    """The trainer's own count of nodes and ranks; the environment may say otherwise, or nothing."""
    return World(
        num_nodes=trainer.num_nodes,
        ranks_per_node=trainer.world_size // trainer.num_nodes,
        rank=trainer.global_rank,
    )


def readers_of(trainer: Trainer) -> tuple[World, int | None]:
    """The world that the strategy wants its ranks to read in, and the replication there.

    Tensor-parallel ranks share the work on one batch, so there are fewer readers than ranks. For example 4 ranks in a
    device mesh of 2 (data parallel) x 2 (tensor parallel) are 2 readers. Where these are consecutive ranks it is the
    replication that one could ask for, None where each rank reads its own samples; else the world is that of the
    readers, as :meth:`World.from_mesh` lays it out.

    Raises:
        ConfigError: The strategy does not say which of its mesh's dimensions is data parallel; or has no mesh, and
            ranks that are to read the same samples do not follow each other.
    """
    world, mesh = world_of(trainer), getattr(trainer.strategy, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    readers = (_LIGHTNINGS_OWN,) if _LIGHTNINGS_OWN in names else DATA_PARALLEL
    if mesh is None or not {*readers} & {*names}:
        return world, _wanted_replication(trainer, names)
    reader_of = readers_of_mesh(mesh, readers, world.num_ranks)
    replication = world.num_ranks // (int(reader_of.max()) + 1)
    if (reader_of == np.arange(world.num_ranks) // replication).all():
        return world, replication if replication > 1 else None
    return World.from_mesh(mesh, readers, ranks=world), None


def _wanted_replication(trainer: Trainer, dimensions: Sequence[str]) -> int | None:
    """The replication of a strategy of which only each rank's own reader is known."""
    strategy = type(trainer.strategy).__name__
    try:
        wanted = trainer.distributed_sampler_kwargs
    except KeyError:  # of Lightning's, which looks for a dimension by its own name
        raise ConfigError(
            f"the device mesh of {strategy} has the dimensions {', '.join(map(repr, dimensions))}, and none of "
            "them is known to be the one along which ranks read different samples",
            hint=f"name those {' or '.join((_LIGHTNINGS_OWN, *DATA_PARALLEL))}, or pass replication=1 and set "
            "dataset.world = World.from_mesh(mesh, readers=(...)) in build_dataset",
            option="replication",
        ) from None
    readers = trainer.world_size if wanted is None else int(wanted["num_replicas"])
    if wanted is None or readers == trainer.world_size:
        return None
    replication = trainer.world_size // readers
    if readers * replication != trainer.world_size or trainer.global_rank // replication != int(wanted["rank"]):
        raise ConfigError(
            f"{strategy} has rank {trainer.global_rank} of {trainer.world_size} read as reader {wanted['rank']} of "
            f"{readers}, but without a device mesh ranks that read the same samples must follow each other",
            hint="pass replication=1 and set dataset.world to that of the readers in build_dataset",
            option="replication",
        )
    return replication


# Progress of the downloads before the first batch -----------------------------------------------------------------


def progress_display(trainer: Trainer) -> ProgressDisplay:
    """Return how a trainer's process shows progress.

    The first rank draws bars, unless progress bars are disabled: within Lightning's display if that redraws itself all
    the time, otherwise below it. The first rank of each node logs.
    """
    return ProgressDisplay(
        bars=trainer.is_global_zero and getattr(trainer.progress_bar_callback, "is_enabled", False),
        lines=trainer.local_rank == 0,
        display=partial(lightning_internals.line_in_rich_bar, trainer),
    )


def first_download_callback(trainer: Trainer) -> DownloadCallback | None:
    """Return a callback that shows the first download of one of a trainer's loaders; None where nothing is shown."""
    display = progress_display(trainer)
    return _FirstDownload(display) if display.lines or display.draws() else None


class _FirstDownload:
    """Callback that shows the first download, from the first shard on."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display
        self._latest: Fetched | None = None
        self._wait = ExitStack()

    def __call__(self, fetched: Fetched | None) -> None:
        if fetched is None:
            self._wait.close()
            return
        is_first, self._latest = self._latest is None, fetched
        if is_first:
            with self._display.here():
                self._wait.enter_context(waiting(self._message))

    def _message(self) -> str:
        assert self._latest is not None, "it is not shown before"
        return download_message(self._latest)


def download_message(fetched: Fetched) -> str:
    """Return the progress of a download, for example ``"fetching 3 of 812 shards: 2 here, 128 MB, 64 MB/s"``."""
    rate = f", {format_bytes(int(fetched.bytes / fetched.seconds))}/s" if fetched.bytes and fetched.seconds else ""
    here = f": {fetched.here} here, {format_bytes(fetched.bytes)}{rate}" if fetched.here else ""
    return f"fetching {fetched.begun:,} of {fetched.of:,} shards{here}"
