"""The epochs of a planned run, as far as each is read: where the run ends, and what is left where nobody looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.reading.passes import drawn_sequence
from lightning_streaming.resume.run import Epoch
from lightning_streaming.resume.state import Cursor
from lightning_streaming.sequence.batchings import Batched
from lightning_streaming.sequence.partition import Partition
from lightning_streaming.tools.runs.traced_run import EpochSteps, TracedRun

_TICKS = 200
"""Of all epochs together, at least; each has four or more."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedEpoch:
    """An epoch of the run, as far as it is read."""

    number: int
    read: Epoch
    sequence: Batched
    """Its ids by position."""
    steps: EpochSteps
    """Of its batches that are read."""
    first_step: int
    """The trainer's step at its first batch."""
    is_last: bool
    """Whether the run ends in it."""

    @property
    def partition(self) -> Partition:
        """How it is divided among ranks and batches."""
        return self.read.partition

    @property
    def batches(self) -> int:
        """Batches of each rank that are read."""
        return self.steps.batches

    @property
    def stop_step(self) -> int:
        """The trainer's step after it."""
        return self.first_step + len(self.steps)

    def step_of(self, batch: Any) -> Any:
        """The trainer's step in which a batch is read, counted from the first that is read of the epoch; or steps."""
        return self.first_step + self.steps.step_of(batch)

    def edges(self, epochs: int) -> NDArray[np.int64]:
        """Batches at its ticks, from 0 to all; of shape (ticks + 1,).

        Args:
            epochs: Of the run, if somebody knows.
        """
        ticks = min(max(4, _TICKS // max(1, epochs)), max(1, self.batches))
        return np.linspace(0, self.batches, ticks + 1).astype(np.int64)


class Rest(NamedTuple):
    """What is left of a run after an epoch."""

    epochs: int = 0
    """Those that have batches."""
    batches: int = 0
    steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """Where a run ends; what comes first counts."""

    stop_epoch: int | None
    """The epoch before which it ends."""
    max_steps: int | None
    assumed: str | None = None
    """What nobody said."""

    def cut(self, of_epoch: EpochSteps, step: int) -> EpochSteps:
        """What is read of an epoch that begins at a step: maybe less, as the run ends.

        Args:
            of_epoch: All of it.
            step: The trainer's step at its first batch.
        """
        left = len(of_epoch) if self.max_steps is None else max(0, self.max_steps - step)
        if left >= len(of_epoch):
            return of_epoch
        return replace(of_epoch, batches=of_epoch.batches_of(left - 1).stop if left else 0)

    def ends_before(self, epoch: int, step: int) -> bool:
        """Whether the run has ended where an epoch would begin at a step."""
        is_end = self.stop_epoch is not None and epoch >= self.stop_epoch
        return is_end or (self.max_steps is not None and step >= self.max_steps)

    def rest(self, run: TracedRun, epoch: int, step: int) -> Rest:
        """What is left of a run from the beginning of an epoch on.

        Epochs of packs are as long as they are once they are packed; from here on all are taken to be like the first.

        Args:
            run: The run.
            epoch: Which one; not the one in which the run goes on from a checkpoint.
            step: The trainer's step at its first batch.
        """
        found = Rest()
        while epoch < run.steps.first_epoch + len(run.steps.early) and not self.ends_before(epoch, step):
            steps = self.cut(run.steps.of_epoch(epoch), step)
            found = Rest(found.epochs + bool(steps.batches), found.batches + steps.batches, found.steps + len(steps))
            epoch, step = epoch + 1, step + len(steps)
        each = run.steps.of_epoch(epoch)
        if self.ends_before(epoch, step) or not len(each):
            return found
        whole = [] if self.stop_epoch is None else [self.stop_epoch - epoch]
        whole += [] if self.max_steps is None else [(self.max_steps - step) // len(each)]
        epochs = min(whole)
        step += epochs * len(each)
        last = EpochSteps(done=0, batches=0, accumulate=1) if self.ends_before(epoch + epochs, step) else each
        last = self.cut(last, step)
        return Rest(
            found.epochs + epochs + bool(last.batches),
            found.batches + epochs * each.batches + last.batches,
            found.steps + epochs * len(each) + len(last),
        )

    def of_run(self, run: TracedRun) -> Rest:
        """All that a run reads."""
        epoch, step = run.begins.epoch, run.steps.first_step
        if self.ends_before(epoch, step):
            return Rest()
        first = self.cut(run.steps.of_epoch(epoch), step)
        rest = self.rest(run, epoch + 1, step + len(first))
        return Rest(rest.epochs + bool(first.batches), rest.batches + first.batches, rest.steps + len(first))


def extent_of(run: TracedRun, epochs: int | None, steps: int | None) -> RunEnd:
    """Where the run ends that is planned.

    Args:
        run: As its trainer is configured.
        epochs: How many epochs to plan that have batches; None for what the trainer says.
        steps: Up to which step to plan; None for what the trainer says.
    """
    stop_epoch = run.steps.stop_epoch if epochs is None else run.steps.after(epochs)
    max_steps = run.steps.max_steps if steps is None else steps
    mixture = run.order.order.mixture
    if mixture is not None and mixture.is_cut:
        stop_epoch = 1
    if stop_epoch is not None or max_steps is not None:
        return RunEnd(stop_epoch=stop_epoch, max_steps=max_steps)
    told = "the configuration says neither max_epochs nor max_steps; one epoch is planned, see --epochs and --steps"
    return RunEnd(stop_epoch=run.steps.after(1), max_steps=None, assumed=told)


def epochs_of(run: TracedRun, extent: RunEnd) -> Iterator[PlannedEpoch]:
    """The epochs of the run that have batches, one after another; each is drawn when its turn comes.

    Args:
        run: The run.
        extent: Where it ends.
    """
    epoch, step, order = run.begins.epoch, run.steps.first_step, run.order
    while not extent.ends_before(epoch, step):
        whole = run.steps.of_epoch(epoch)
        if not whole.batches and epoch >= run.steps.first_epoch + len(run.steps.early):
            return  # nor has any after it
        steps = extent.cut(whole, step)
        cursor = order.normalise(run.begins if epoch == run.begins.epoch else Cursor(epoch, 0))
        if steps.batches and cursor.epoch == epoch:
            read = order.at(cursor).epoch(cursor)
            yield PlannedEpoch(
                number=epoch,
                read=read,
                sequence=drawn_sequence(read),
                steps=steps,
                first_step=step,
                is_last=extent.ends_before(epoch + 1, step + len(steps)),
            )
        epoch, step = epoch + 1, step + len(steps)
