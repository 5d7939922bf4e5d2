"""A configured training run: its train loader in a world, where it begins, and how it makes steps of batches."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.options.groups import group_of
from lightning_streaming.options.storage import StorageConfig
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.passes import passes_of
from lightning_streaming.reading.position import position_of, run_of
from lightning_streaming.resume.run import Run
from lightning_streaming.resume.state import Cursor
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.packing.settings import AnyPackSettings
from lightning_streaming.sequence.skips import NOTHING_SKIPPED, SkippedPositions, TrainProgress
from lightning_streaming.tools.commands import count_ranks, read_run_files
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.runs.checkpoints import (
    SavedLoader,
    batches_trained,
    find_places,
    find_state_file,
    settled,
)
from lightning_streaming.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRun:
    """A run whose samples can be told, because the order is a pure function."""

    loader: StreamingDataLoader
    """Reads as rank 0 of the world."""
    order: Run
    """What a cursor means to it."""
    num_nodes: int
    ranks_per_node: int
    replication: int
    """Consecutive ranks that read the same samples."""
    begins: Cursor
    steps: _RunSteps
    assumed: str | None
    """What nobody said and is taken to be so."""
    saved: SavedLoader | None
    """Where it goes on from a checkpoint."""

    def skipped_before(self, epoch: int) -> SkippedPositions:
        """What the run that saved its checkpoint skips of an epoch."""
        return NOTHING_SKIPPED if self.saved is None else self.saved.skipped(epoch)

    @property
    def catalog(self) -> Catalog:
        """The shards and samples of its streams."""
        return passes_of(self.loader.dataset).catalog

    @property
    def packs(self) -> AnyPackSettings | None:
        """How documents are packed; None where they are not."""
        packer = self.order.order.packer
        return None if packer is None else packer.pack.settings()

    @property
    def num_ranks(self) -> int:
        """Ranks over all nodes."""
        return self.num_nodes * self.ranks_per_node

    def reader(self, rank: int) -> World:
        """A rank's place among those that read different samples."""
        world = World(num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node, rank=rank)
        return world.replicated(self.replication)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    loader: SavedLoader
    global_step: int
    batches_trained: int
    """Batches over all epochs that its weights had seen."""
    batches: int
    """Those of them in the epoch under way."""
    epoch: int
    """That one, as the trainer counts: without epochs of which all was skipped."""


def traced_run(asked: Namespace, changes: Mapping[str, Any]) -> TracedRun:
    """Read configuration and checkpoint, and the indexes of the data.

    Args:
        asked: As for :func:`run_on`; and ``config``, the paths of the configuration's files.
        changes: More settings of the data.

    Raises:
        ConfigError: They do not describe a run that can be traced.
        StateError: The checkpoint has no place to begin at, or is of other data.
        StorageError: An index could not be fetched.
    """
    written = read_run_files(asked.config, changes)
    return run_on(written.datamodule, written.trainer, asked)


def run_on(data: Any, trainer: Mapping[str, Any], asked: Namespace) -> TracedRun:
    """The run of a data module that is not set up yet.

    Args:
        data: A ``StreamingDataModule``.
        trainer: The trainer's settings, as far as they are written.
        asked: What goes before those settings: ``nodes``, ``ranks_per_node``, ``accumulate``, and the path of a
            ``checkpoint`` with the name of its ``loader``; each is None where configuration or checkpoint are to say.

    Raises:
        ConfigError: They do not describe a run that can be traced.
        StateError: The checkpoint has no place to begin at, or is of other data.
        StorageError: An index could not be fetched.
    """
    train = data.configs["train"]
    data.configs["train"] = replace(train, storage=replace(group_of(train, StorageConfig), on_demand=True))
    data.setup("fit")
    loader = _only_loader(data.train_dataloader())
    saved = None if asked.checkpoint is None else _read_checkpoint(asked.checkpoint, asked.loader)
    nodes, by_strategy = asked.nodes or int(trainer.get("num_nodes") or 1), StrategyRanks(loader.dataset.replication)
    if loader.dataset.replication is None:
        by_strategy = strategy_ranks(trainer, nodes, asked.ranks_per_node)
        loader.dataset.replication = by_strategy.replication
    told = asked.ranks_per_node or by_strategy.ranks_per_node
    ranks_per_node, assumed = (told, None) if told else _ranks_per_node(trainer, nodes, saved, loader)
    loader.dataset.world = World(num_nodes=nodes, ranks_per_node=ranks_per_node, rank=0)
    if saved is not None:
        _load(loader, saved, asked.checkpoint)
    counted = _counted(loader, saved, trainer.get("limit_train_batches"))
    run = run_of(loader).counted_from(counted)
    begins = run.normalise(position_of(loader).cursor())
    return TracedRun(
        loader=loader,
        order=run,
        num_nodes=nodes,
        ranks_per_node=ranks_per_node,
        replication=loader.dataset.replication or 1,
        begins=begins,
        steps=_run_steps(
            run,
            begins,
            _accumulate(asked, trainer),
            counted,
            len(loader),
            saved,
            _stop(trainer),
        ),
        assumed="; ".join(filter(None, (assumed, by_strategy.assumed))) or None,
        saved=None if saved is None else saved.loader,
    )


def _counted(loader: StreamingDataLoader, saved: _Checkpoint | None, limit: int | float | None) -> TrainProgress:
    return TrainProgress(
        steps=0 if saved is None else saved.batches_trained,
        place=position_of(loader).cursor(),
        steps_in_epoch=0 if saved is None else saved.batches,
        limit=1.0 if limit is None else limit,
    )


def _load(loader: StreamingDataLoader, saved: _Checkpoint, path: str) -> None:
    passes_of(loader.dataset).run.call(checkpoint=path)
    loader.load_state_dict(saved.loader.position.as_state())


def _accumulate(asked: Namespace, trainer: Mapping[str, Any]) -> int:
    """Batches of a step."""
    accumulate = asked.accumulate or trainer.get("accumulate_grad_batches", 1)
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate_grad_batches is {accumulate!r}", hint="say --accumulate", option="--accumulate")
    return accumulate


def _only_loader(loaders: Any) -> StreamingDataLoader:
    if isinstance(loaders, Mapping) and len(loaders) == 1:
        loaders = next(iter(loaders.values()))
    if not isinstance(loaders, StreamingDataLoader):
        raise ConfigError(
            "a run with one StreamingDataLoader to train on can be traced, but this data module's train_dataloader "
            f"gives a {type(loaders).__name__}",
            option="data",
        )
    return loaders


def _read_checkpoint(path: str, loader_name: str | None) -> _Checkpoint:
    content = find_state_file(Path(path)).peek()
    places = find_places(content, path)
    if places.trainer is None or places.global_step is None:
        raise StateError(f"{path} does not tell its trainer's step", hint="only checkpoints of Lightning do", path=path)
    loader = places.loaders[places.choose(loader_name)]
    trainer = settled(places.trainer)
    return _Checkpoint(loader, places.global_step, batches_trained(content), trainer.batches, trainer.epoch)


def _stop(trainer: Mapping[str, Any]) -> dict[str, int | None]:
    """Where the trainer is told to stop; None where it is not."""
    if trainer.get("overfit_batches"):
        raise ConfigError(
            "with overfit_batches a trainer reads the same few batches again and again, which trace does not follow",
            hint="take it out of the configuration",
            option="trainer.overfit_batches",
        )
    steps, epochs = trainer.get("max_steps", -1), trainer.get("max_epochs")
    return {
        "max_steps": None if steps is None or steps < 0 else int(steps),
        "max_epochs": None if epochs is None or epochs < 0 else int(epochs),
    }


def _ranks_per_node(
    trainer: Mapping[str, Any], nodes: int, saved: _Checkpoint | None, loader: StreamingDataLoader
) -> tuple[int, str | None]:
    """As the checkpoint's run had them; else as configured."""
    configured, left_open = count_ranks(trainer)
    if saved is None or saved.loader.global_batch is None:
        return configured, left_open
    batch_size, replication = loader.batch_size or 1, loader.dataset.replication or 1
    at_a_time = f"the checkpoint's run read {saved.loader.global_batch} {saved.loader.unit}s at a time"
    ranks, left_over = divmod(saved.loader.global_batch * replication, batch_size * nodes)
    if left_over or not ranks:
        assumed = f"which batches of {batch_size} do not make up; taken to go on with {_ranks(nodes, configured)}"
        return configured, f"{at_a_time}, {assumed}, see --ranks-per-node"
    if left_open is None and ranks != configured:
        assumed = f"with batches of {batch_size} taken to be {_ranks(nodes, ranks)}"
        return ranks, f"{at_a_time}, {assumed}; the configuration has {configured}, see --ranks-per-node"
    return ranks, None


def _ranks(nodes: int, ranks_per_node: int) -> str:
    ranks = counted(ranks_per_node, "rank")
    return ranks if nodes == 1 else f"{ranks} on each of {nodes} nodes"


def _run_steps(
    run: Run,
    begins: Cursor,
    accumulate: int,
    counted: TrainProgress,
    in_epoch: int,
    saved: _Checkpoint | None,
    stop: Mapping[str, int | None],
) -> _RunSteps:
    last_uneven = max([begins.epoch, *(stop[0] for _, stop in run.skipped_ranges.values())])
    left, limit = run.batches_left(begins), counted.limited(in_epoch)
    if begins.sample_in_epoch and limit < in_epoch:
        raise ConfigError(
            f"the checkpoint lies within an epoch that limit_train_batches={counted.limit} cuts short",
            hint="trace the run from its beginning",
            option="trainer.limit_train_batches",
        )
    done = run.batches_left(Cursor(begins.epoch, 0)) - left if begins.sample_in_epoch else 0
    later = in_epoch
    if run.order.later is not None:  # epochs to come read more of data that has grown
        later = run.unskipped(Cursor(last_uneven + 1, 0)).num_batches(run.machines.drop_last)

    def each(epoch: int) -> EpochSteps:
        start = Cursor(epoch, 0)
        batches = counted.limited(run.batches_left(start)) if run.normalise(start) == start else 0
        return EpochSteps(done=0, batches=batches, accumulate=accumulate)

    early = [EpochSteps(done=done, batches=min(left, limit), accumulate=accumulate)]
    early += [each(epoch) for epoch in range(begins.epoch + 1, last_uneven + 1)]
    steps = _RunSteps(
        first_step=0 if saved is None else saved.global_step,
        **stop,
        first_epoch=begins.epoch,
        early=early,
        later=cache(each) if run.order.packer is not None else None,
        whole=EpochSteps(done=0, batches=counted.limited(later), accumulate=accumulate),
    )
    most = stop["max_epochs"]
    if most is None:
        return steps
    return replace(steps, stop_epoch=steps.after(max(0, most - (0 if saved is None else saved.epoch))))


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSteps:
    """The steps of an epoch, or of what a run reads of one.

    A step is complete where the number of the epoch's batches is a multiple of ``accumulate``, and at the epoch's last
    batch. For example 5 batches in steps of 2 are 0 1 | 2 3 | 4; with the first of them read in an earlier run, and
    its batches larger, they may be 1 | 2 3 | 4.
    """

    done: int
    """Batches of the epoch before those read here, as the trainer counts them."""
    batches: int
    """Batches that are read here."""
    accumulate: int
    """Batches of one step."""

    def __len__(self) -> int:
        """Steps made of these batches."""
        return self.step_of(self.batches - 1) + 1 if self.batches else 0

    def step_of(self, batch: int) -> int:
        """The step that a batch belongs to; both are counted from the first one read here."""
        return (self.done + batch) // self.accumulate - self.done // self.accumulate

    def batches_of(self, step: int) -> range:
        """The batches of a step; all are counted from the first one read here."""
        first = (self.done // self.accumulate + step) * self.accumulate - self.done
        return range(max(0, first), min(first + self.accumulate, self.batches))


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunSteps:
    """The steps of a run, epoch after epoch."""

    first_step: int
    """The trainer's ``global_step`` where the run begins."""
    first_epoch: int
    """The epoch in which it begins."""
    early: Sequence[EpochSteps]
    """Of that epoch, and of those after it up to the last one of which anything is skipped."""
    whole: EpochSteps
    """Of each epoch after those."""
    later: Callable[[int], EpochSteps] | None = None
    """In its place, where epochs differ, as of packs: tells them of an epoch."""
    max_steps: int | None = None
    """Where the trainer is told to stop."""
    max_epochs: int | None = None
    stop_epoch: int | None = None
    """The epoch before which that is: later, where trainers do not count epochs of which all is skipped."""

    def after(self, epochs: int) -> int:
        """The epoch before which a trainer has trained so many, from the first one on."""
        epoch = self.first_epoch
        for early in self.early:
            if not epochs:
                break
            epochs, epoch = epochs - bool(early.batches), epoch + 1
        return epoch + epochs

    def has(self, epoch: int, step: int | None = None) -> bool:
        """Whether the trainer is not told to stop before an epoch, or a global step in it."""
        is_early = self.stop_epoch is None or epoch < self.stop_epoch
        return is_early and (step is None or self.max_steps is None or step < self.max_steps)

    def find(self, step: int) -> tuple[int, int]:
        """The epoch of a global step, and which of the steps read in that epoch it is.

        Raises:
            ConfigError: It lies before the run or after its end, or an epoch has no steps.
        """
        epoch, of_epoch = self._find(step)
        if not self.has(epoch):
            raise ConfigError(
                f"there is no step {step}: the run ends after max_epochs={self.max_epochs}", option="--step"
            )
        return epoch, of_epoch

    def _find(self, step: int) -> tuple[int, int]:
        if step < self.first_step:
            raise ConfigError(
                f"step {step} was done before the checkpoint, which is at step {self.first_step}",
                hint="trace the run that saved it, without --ckpt, or with the checkpoint that it began with",
                option="--step",
            )
        if self.max_steps is not None and step >= self.max_steps:
            raise ConfigError(
                f"there is no step {step}: the run ends after max_steps={self.max_steps}", option="--step"
            )
        after, epoch = step - self.first_step, self.first_epoch
        while epoch - self.first_epoch < len(self.early) or self.later is not None:
            if not self.has(epoch):  # it need not be planned
                return epoch, after
            steps = self.of_epoch(epoch)
            if after < len(steps):
                return epoch, after
            if not len(steps) and epoch - self.first_epoch >= len(self.early):
                break
            after -= len(steps)
            epoch += 1
        if self.later is not None or not len(self.whole):
            raise ConfigError(
                "an epoch has no batch, so there is no such step",
                hint="see drop_last and limit_train_batches",
                option="--step",
            )
        epochs, of_epoch = divmod(after, len(self.whole))
        return epoch + epochs, of_epoch

    def of_epoch(self, epoch: int) -> EpochSteps:
        """The steps read in an epoch, from the one in which the run begins on."""
        place = epoch - self.first_epoch
        if place < len(self.early):
            return self.early[place]
        return self.whole if self.later is None else self.later(epoch)

    def global_step(self, epoch: int, batch: int) -> int:
        """The trainer's ``global_step`` while it trains on a batch, counted from the first one read in the epoch."""
        place = epoch - self.first_epoch
        if self.later is None:
            before = sum(map(len, self.early[:place])) + max(0, place - len(self.early)) * len(self.whole)
        else:
            before = sum(len(self.of_epoch(one)) for one in range(self.first_epoch, epoch))
        return self.first_step + before + self.of_epoch(epoch).step_of(batch)


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
