"""A configured training run: its train loader in a world, where it begins, and how it makes steps of batches."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.options.groups import group_of
from lightning_streaming.options.storage import StorageConfig
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.position import position_of, run_of
from lightning_streaming.resume.run import Run
from lightning_streaming.resume.state import Cursor
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.packing.settings import AnyPackSettings
from lightning_streaming.sequence.skips import SkippedPositions, TrainProgress
from lightning_streaming.tools.commands import count_ranks, read_run_files
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.runs.checkpoints import (
    SavedLoader,
    batches_trained,
    find_places,
    find_state_file,
    settled,
)
from lightning_streaming.tools.runs.describe import (
    RunDescription,
    StrategyRanks,
    load_position,
    only_loader,
    saved_run,
    strategy_ranks,
)
from lightning_streaming.world import World


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """A training run whose steps and samples are known in advance, because the order is a pure function."""

    loader: StreamingDataLoader
    """Reads as rank 0 of the world."""
    order: Run
    """The meaning of its cursors."""
    num_nodes: int
    ranks_per_node: int
    replication: int
    """Consecutive ranks that read the same samples."""
    past: Run
    """The run up to its checkpoint, with the ranges that it skipped then."""
    begins: Cursor
    ended: Cursor
    """Where the checkpoint was saved: before ``begins`` if the next positions are skipped now."""
    steps: RunSteps
    assumed: str | None
    """Assumptions about what the configuration leaves open."""
    saved: SavedLoader | None
    """Saved position of the checkpoint that it resumes from."""
    from_start: RunSteps
    """Steps of the same run from its start, if it had always had these ranks, batch size and accumulation."""

    def steps_before(self) -> RunSteps | None:
        """Return its steps from its start; None if they are known to have had other batches before the checkpoint."""
        epoch, after = self.from_start.find(self.steps.first_step)
        first = self.from_start.of_epoch(epoch).batches_of(after).start
        size = self.past.unskipped(self.ended).geometry.global_batch_size
        is_here = epoch == self.ended.epoch and first * size == self.past.samples_before(self.ended)
        return self.from_start if is_here else None

    @cached_property
    def described(self) -> RunDescription:
        """Its streams, schedule, packing and epochs."""
        return RunDescription(dataset=self.loader.dataset, run=self.order)

    @property
    def catalog(self) -> Catalog:
        """The shards and samples of its streams."""
        return self.described.catalog

    @property
    def packs(self) -> AnyPackSettings | None:
        """Settings of packs; None unless documents are packed."""
        return self.described.packing

    @property
    def num_ranks(self) -> int:
        """Ranks over all nodes."""
        return self.num_nodes * self.ranks_per_node

    def skipped_before(self, epoch: int) -> SkippedPositions:
        """Return the positions of an epoch that the run of its checkpoint skipped."""
        return self.past.skipped(epoch)

    def reader(self, rank: int) -> World:
        """Return a rank's place among those that read different samples."""
        world = World(num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node, rank=rank)
        return world.replicated(self.replication)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    loader: SavedLoader
    global_step: int
    batches_trained: int
    """Batches over all epochs that its weights had seen."""
    batches: int
    """Batches of the current epoch among them."""
    epoch: int
    """The current epoch, as the trainer counts: without epochs that were skipped as a whole."""

    @classmethod
    def read(cls, path: str, loader_name: str | None) -> _Checkpoint:
        content = find_state_file(Path(path)).peek()
        places = find_places(content, path)
        if places.trainer is None or places.global_step is None:
            hint = "only checkpoints of Lightning do"
            raise StateError(f"{path} does not have its trainer's step", hint=hint, path=path)
        trainer, loader = settled(places.trainer), places.loaders[places.choose(loader_name)]
        return cls(loader, places.global_step, batches_trained(content), trainer.batches, trainer.epoch)


def traced_run(args: Namespace) -> TracedRun:
    """Read configuration and checkpoint, and the indexes of the data.

    Args:
        args: As for :func:`run_on`; and ``config``, ``set`` and ``batch_size`` as the command line has them.

    Raises:
        ConfigError: They do not describe a run that can be traced.
        StateError: The checkpoint has no saved position, or is of other data.
        StorageError: An index could not be fetched.
    """
    written = written_run(args)
    return run_on(written.datamodule, written.trainer, args)


def written_run(args: Namespace) -> Any:
    """Return the configuration that ``config``, ``set`` and ``batch_size`` of the command line describe."""
    changes = dict(args.set) | ({} if args.batch_size is None else {"batch_size": str(args.batch_size)})
    return read_run_files(args.config, changes)


def run_on(data: Any, trainer: Mapping[str, Any], args: Namespace) -> TracedRun:
    """Return the run of a data module that is not set up yet.

    Args:
        data: A ``StreamingDataModule``.
        trainer: The trainer's settings, as far as they are written.
        args: Arguments that override the settings: ``nodes``, ``ranks_per_node``, ``accumulate``, and the path of a
            ``checkpoint`` with the name of its ``loader``; each is None to use configuration or checkpoint.

    Raises:
        ConfigError: They do not describe a run that can be traced.
        StateError: The checkpoint has no saved position, or is of other data.
        StorageError: An index could not be fetched.
    """
    train = data.configs["train"]
    data.configs["train"] = replace(train, storage=replace(group_of(train, StorageConfig), on_demand=True))
    data.setup("fit")
    loader = only_loader(data, "train", option="data")
    saved = None if args.checkpoint is None else _Checkpoint.read(args.checkpoint, args.loader)
    nodes, by_strategy = args.nodes or int(trainer.get("num_nodes") or 1), StrategyRanks(loader.dataset.replication)
    if loader.dataset.replication is None:
        by_strategy = strategy_ranks(trainer, nodes, args.ranks_per_node)
        loader.dataset.replication = by_strategy.replication
    ranks_per_node, assumed = args.ranks_per_node or by_strategy.ranks_per_node, None
    if not ranks_per_node:
        ranks_per_node, assumed = _ranks_per_node(trainer, nodes, saved, loader)
    loader.dataset.world = World(num_nodes=nodes, ranks_per_node=ranks_per_node, rank=0)
    if saved is not None:
        load_position(loader, saved.loader.position, args.checkpoint)
    limit = trainer.get("limit_train_batches")
    progress = TrainProgress(
        steps=0 if saved is None else saved.batches_trained,
        place=position_of(loader).cursor(),
        steps_in_epoch=0 if saved is None else saved.batches,
        limit=1.0 if limit is None else limit,
    )
    accumulate = args.accumulate or trainer.get("accumulate_grad_batches", 1)
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate_grad_batches is {accumulate!r}", hint="pass --accumulate", option="--accumulate")
    if trainer.get("overfit_batches"):
        raise ConfigError(
            "with overfit_batches a trainer reads the same few batches again and again, which trace does not follow",
            hint="remove it from the configuration",
            option="trainer.overfit_batches",
        )
    run = run_of(loader).counted_from(progress)
    begins = run.normalise(position_of(loader).cursor())
    steps = _run_steps(run, begins, accumulate, progress, len(loader), saved)
    past = run if saved is None else saved_run(run, saved.loader.position)
    start = past.normalise(Cursor(0, 0))
    from_start = TrainProgress(limit=progress.limit)
    steps_from_start = _run_steps(past, start, accumulate, from_start, past.batches_in_epoch(start), None)
    max_steps, max_epochs = trainer.get("max_steps", -1), trainer.get("max_epochs")
    if max_steps is not None and max_steps >= 0:
        steps = replace(steps, max_steps=int(max_steps))
    if max_epochs is not None and max_epochs >= 0:
        left = max(0, int(max_epochs) - (0 if saved is None else saved.epoch))
        steps = replace(steps, max_epochs=int(max_epochs), stop_epoch=steps.after(left))
    return TracedRun(
        loader=loader,
        order=run,
        num_nodes=nodes,
        ranks_per_node=ranks_per_node,
        replication=loader.dataset.replication or 1,
        past=past,
        begins=begins,
        ended=past.normalise(position_of(loader).cursor()),
        steps=steps,
        assumed="; ".join(filter(None, (assumed, by_strategy.assumed))) or None,
        saved=None if saved is None else saved.loader,
        from_start=steps_from_start,
    )


def _ranks_per_node(
    trainer: Mapping[str, Any], nodes: int, saved: _Checkpoint | None, loader: StreamingDataLoader
) -> tuple[int, str | None]:
    """Return the ranks per node of the checkpoint's run, else those configured; and what is assumed about them."""
    configured, left_open = count_ranks(trainer)
    if saved is None or saved.loader.global_batch is None:
        return configured, left_open
    batch_size, replication = loader.batch_size or 1, loader.dataset.replication or 1
    at_a_time = f"the checkpoint's run read {saved.loader.global_batch} {saved.loader.unit}s at a time"
    ranks, left_over = divmod(saved.loader.global_batch * replication, batch_size * nodes)

    def in_words(ranks: int) -> str:
        return counted(ranks, "rank") + ("" if nodes == 1 else f" on each of {nodes} nodes")

    if left_over or not ranks:
        assumed = f"which is no multiple of batches of {batch_size}; taken to resume with {in_words(configured)}"
        return configured, f"{at_a_time}, {assumed}, see --ranks-per-node"
    if left_open is None and ranks != configured:
        assumed = f"with batches of {batch_size} taken to be {in_words(ranks)}"
        return ranks, f"{at_a_time}, {assumed}; the configuration has {configured}, see --ranks-per-node"
    return ranks, None


def _run_steps(
    run: Run, begins: Cursor, accumulate: int, progress: TrainProgress, in_epoch: int, saved: _Checkpoint | None
) -> RunSteps:
    """Return the steps of a run without the end that its trainer sets."""
    left, limit = run.batches_left(begins), progress.limited(in_epoch)
    if begins.sample_in_epoch and limit < in_epoch:
        raise ConfigError(
            f"the checkpoint lies within an epoch that limit_train_batches={progress.limit} cuts short",
            hint="trace the run from its beginning",
            option="trainer.limit_train_batches",
        )
    done = run.batches_left(Cursor(begins.epoch, 0)) - left if begins.sample_in_epoch else 0
    last_uneven = max([begins.epoch, *(stop[0] for _, stop in run.skipped_ranges.values())])
    later = in_epoch
    if run.order.later is not None:  # later epochs read more of data that has grown
        later = run.unskipped(Cursor(last_uneven + 1, 0)).num_batches(run.machines.drop_last)

    def each(epoch: int) -> EpochSteps:
        start = Cursor(epoch, 0)
        batches = progress.limited(run.batches_left(start)) if run.normalise(start) == start else 0
        return EpochSteps(done=0, batches=batches, accumulate=accumulate)

    early = [EpochSteps(done=done, batches=min(left, limit), accumulate=accumulate)]
    early += [each(epoch) for epoch in range(begins.epoch + 1, last_uneven + 1)]
    return RunSteps(
        first_step=0 if saved is None else saved.global_step,
        first_epoch=begins.epoch,
        early=early,
        later=cache(each) if run.order.packer is not None or run.order.steps else None,
        whole=EpochSteps(done=0, batches=progress.limited(later), accumulate=accumulate),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSteps:
    """The steps of an epoch, or of the rest of one.

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
        """Number of steps that these batches make."""
        return self.step_of(self.batches - 1) + 1 if self.batches else 0

    def step_of(self, batch: int) -> int:
        """Return the step that a batch belongs to; both are counted from the first one read here."""
        return (self.done + batch) // self.accumulate - self.done // self.accumulate

    def batches_of(self, step: int) -> range:
        """Return the batches of a step; all are counted from the first one read here."""
        first = (self.done // self.accumulate + step) * self.accumulate - self.done
        return range(max(0, first), min(first + self.accumulate, self.batches))


class Rest(NamedTuple):
    """What a run reads from some epoch on."""

    epochs: int = 0
    """Epochs that have batches."""
    batches: int = 0
    steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSteps:
    """The steps of a run, epoch after epoch."""

    first_step: int
    """The trainer's ``global_step`` where the run begins."""
    first_epoch: int
    """The epoch in which it begins."""
    early: Sequence[EpochSteps]
    """Steps of that epoch, and of those after it up to the last one with skipped positions."""
    whole: EpochSteps
    """Steps of each epoch after those."""
    later: Callable[[int], EpochSteps] | None = None
    """Returns the steps of one of those epochs, if they differ, as of packs."""
    max_steps: int | None = None
    """Step before which the trainer stops."""
    max_epochs: int | None = None
    """Epochs after which the trainer stops."""
    stop_epoch: int | None = None
    """The epoch before which that is: trainers do not count epochs that are skipped as a whole."""

    def after(self, epochs: int) -> int:
        """Return the epoch before which a trainer has trained so many, from the first one on."""
        epoch = self.first_epoch
        for early in self.early:
            if not epochs:
                break
            epochs, epoch = epochs - bool(early.batches), epoch + 1
        return epoch + epochs

    def has(self, epoch: int, step: int | None = None) -> bool:
        """Return whether the run reaches an epoch, or a global step in it."""
        is_early = self.stop_epoch is None or epoch < self.stop_epoch
        return is_early and (step is None or self.max_steps is None or step < self.max_steps)

    def find(self, step: int) -> tuple[int, int]:
        """Return the epoch of a global step, and its number among the steps read in that epoch.

        Raises:
            ConfigError: It is before the run or after its end, or an epoch has no steps.
        """
        if step < self.first_step:
            raise ConfigError(
                f"step {step} was done before the checkpoint, which is at step {self.first_step}",
                hint="trace the run that saved it, without --ckpt, or with the checkpoint that it began with",
                option="--step",
            )
        epoch, after = self.first_epoch, step - self.first_step
        is_reached = self.max_steps is None or step < self.max_steps
        # Epochs that the run does not reach are not planned.
        while is_reached and self.has(epoch) and (self.later is not None or epoch - self.first_epoch < len(self.early)):
            steps = len(self.of_epoch(epoch))
            if after < steps:
                break
            if not steps and epoch - self.first_epoch >= len(self.early):
                raise self._no_batch()
            after, epoch = after - steps, epoch + 1
        else:
            if is_reached and self.has(epoch):  # all epochs from here on are alike
                if not len(self.whole):
                    raise self._no_batch()
                epochs, after = divmod(after, len(self.whole))
                epoch += epochs
        if not is_reached or not self.has(epoch):
            end = f"max_epochs={self.max_epochs}" if is_reached else f"max_steps={self.max_steps}"
            raise ConfigError(f"there is no step {step}: the run ends after {end}", option="--step")
        return epoch, after

    @staticmethod
    def _no_batch() -> ConfigError:
        return ConfigError(
            "an epoch has no batch, so there is no such step",
            hint="see drop_last and limit_train_batches",
            option="--step",
        )

    def of_epoch(self, epoch: int) -> EpochSteps:
        """Return the steps read in an epoch, from the one in which the run begins on."""
        number = epoch - self.first_epoch
        if number < len(self.early):
            return self.early[number]
        return self.whole if self.later is None else self.later(epoch)

    def global_step(self, epoch: int, batch: int) -> int:
        """Return the trainer's ``global_step`` in a batch, counted from the first one read in the epoch."""
        number = epoch - self.first_epoch
        if self.later is None:
            before = sum(map(len, self.early[:number])) + max(0, number - len(self.early)) * len(self.whole)
        else:
            before = sum(len(self.of_epoch(other)) for other in range(self.first_epoch, epoch))
        return self.first_step + before + self.of_epoch(epoch).step_of(batch)

    def read_in(self, epoch: int, step: int) -> EpochSteps:
        """Return the steps read in an epoch that begins at a global step: fewer if the run ends within it."""
        whole = self.of_epoch(epoch)
        left = len(whole) if self.max_steps is None else max(0, self.max_steps - step)
        if left >= len(whole):
            return whole
        return replace(whole, batches=whole.batches_of(left - 1).stop if left else 0)

    def rest(self, epoch: int, step: int) -> Rest:
        """Return what the run reads from the beginning of an epoch on; it must have an end.

        Epochs of packs differ in length, which is known once they are packed; all are taken to be like the first here.

        Args:
            epoch: The epoch; the first one counts from where the run begins.
            step: Global step at its first batch.
        """
        rest = Rest()
        while epoch < self.first_epoch + len(self.early) and self.has(epoch, step):
            read = self.read_in(epoch, step)
            rest = Rest(rest.epochs + bool(read.batches), rest.batches + read.batches, rest.steps + len(read))
            epoch, step = epoch + 1, step + len(read)
        each = self.of_epoch(epoch)
        if not self.has(epoch, step) or not len(each):
            return rest
        whole = [] if self.stop_epoch is None else [self.stop_epoch - epoch]
        whole += [] if self.max_steps is None else [(self.max_steps - step) // len(each)]
        epochs = min(whole)
        step += epochs * len(each)
        last = EpochSteps(done=0, batches=0, accumulate=1)
        if self.has(epoch + epochs, step):
            last = self.read_in(epoch, step)  # as long as the last one
        return Rest(
            rest.epochs + epochs + bool(last.batches),
            rest.batches + epochs * each.batches + last.batches,
            rest.steps + epochs * len(each) + len(last),
        )
