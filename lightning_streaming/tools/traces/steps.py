"""Which batches a trainer makes a step of: arithmetic on counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_streaming.errors import ConfigError


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
class Stop:
    """Where the trainer is told to stop; None where it is not."""

    steps: int | None = None
    epochs: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSteps:
    """The steps of a run, epoch after epoch."""

    first_step: int
    """The trainer's ``global_step`` where the run begins."""
    first_epoch: int
    """The epoch in which it begins."""
    early: Sequence[EpochSteps]
    """Of that epoch, and of those after it up to the last one of which anything is skipped."""
    whole: EpochSteps
    """Of each epoch after those."""
    stop: Stop = Stop()

    def find(self, step: int) -> tuple[int, int]:
        """The epoch of a global step, and which of the steps read in that epoch it is.

        Raises:
            ConfigError: It lies before the run or after its end, or an epoch has no steps.
        """
        epoch, of_epoch = self._find(step)
        if self.stop.steps is not None and step >= self.stop.steps:
            raise ConfigError(f"there is no step {step}: the run ends after max_steps={self.stop.steps}")
        if self.stop.epochs is not None and epoch >= self.stop.epochs:
            raise ConfigError(f"there is no step {step}: the run ends after max_epochs={self.stop.epochs}")
        return epoch, of_epoch

    def _find(self, step: int) -> tuple[int, int]:
        if step < self.first_step:
            raise ConfigError(
                f"step {step} was done before the checkpoint, which is at step {self.first_step}; trace the run that "
                "saved it, without --ckpt, or with the checkpoint that it began with"
            )
        after, epoch = step - self.first_step, self.first_epoch
        for steps in self.early:
            if after < len(steps):
                return epoch, after
            after -= len(steps)
            epoch += 1
        if not len(self.whole):
            raise ConfigError("an epoch has no batch, so there is no such step; see drop_last and limit_train_batches")
        epochs, of_epoch = divmod(after, len(self.whole))
        return epoch + epochs, of_epoch

    def of_epoch(self, epoch: int) -> EpochSteps:
        """The steps read in an epoch, from the one in which the run begins on."""
        place = epoch - self.first_epoch
        return self.early[place] if place < len(self.early) else self.whole

    def global_step(self, epoch: int, batch: int) -> int:
        """The trainer's ``global_step`` while it trains on a batch, counted from the first one read in the epoch."""
        place = epoch - self.first_epoch
        before = sum(map(len, self.early[:place])) + max(0, place - len(self.early)) * len(self.whole)
        return self.first_step + before + self.of_epoch(epoch).step_of(batch)
