"""Saves when the scheduler says that the job is about to be stopped, and ends the run there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.reading.worker_process import SHIELDED_SIGNALS
from lightning_streaming.signatures import public
from lightning_streaming.trainer import lightning_internals
from lightning_streaming.trainer.lightning_internals import save_whole
from lightning_streaming.units import check_whole

DEFAULT_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@public()
class PreemptedExit(SIGTERMException):
    """Exit of a preempted run, raised on every rank once its checkpoint is saved.

    A ``SystemExit`` whose status is 128 + the signal.
    """


@public()
class PreemptionCheckpoint(OnExceptionCheckpoint):
    """Callback that saves ``dirpath/preempted.ckpt`` when a signal announces preemption, and ends the run.

    A signal only sets a flag. At the end of each training step, each validation step, each validation and each epoch,
    all ranks agree whether any of them received one; if so they save, and :class:`PreemptedExit` ends ``fit`` and,
    unless caught, the process. ``Trainer.fit(ckpt_path="last")`` resumes from it, unless a newer checkpoint exists:
    training continues with the next sample, and an interrupted validation starts over. A gradient accumulation that is
    not complete is discarded; its batches are read again.

    It derives from Lightning's ``OnExceptionCheckpoint``: Lightning searches these for the newest checkpoint even when
    ``fit`` gets no ``ckpt_path``, so a job that is restarted with the same command resumes. As with any checkpoint
    callback, Lightning then adds no ``ModelCheckpoint`` by default.

    If Lightning would requeue the SLURM job, so does this callback, after saving. While ``fit`` runs, the signals
    listed here are handled by this callback instead of by Lightning. Before training begins and after it ends, signals
    have their usual effect.

    Args:
        dirpath: Directory or URL of the checkpoint; the one of an earlier preemption is replaced.
        signals: Signals to handle: any of SIGHUP, SIGINT, SIGTERM, SIGUSR1 and SIGUSR2, which DataLoader workers
            ignore. If several arrive, the first of this list decides the exit status.
        every_n_steps: Check with the other ranks after every n-th training step only; a check is one small all-reduce.

    Raises:
        ConfigError: There is no signal, or one that would end the workers, or ``every_n_steps`` is below 1.
    """

    def __init__(
        self, dirpath: str | Path, signals: Sequence[signal.Signals] = DEFAULT_SIGNALS, every_n_steps: int = 1
    ) -> None:
        super().__init__(dirpath, "preempted")
        try:
            self._signals = tuple(signal.Signals(number) for number in signals)
        except (TypeError, ValueError):  # other values than signals, or no list
            self._signals = ()
        if not self._signals or {*self._signals} - {*SHIELDED_SIGNALS}:
            names = ", ".join(sent.name for sent in self._signals)
            raise ConfigError(
                f"signals must be a list of some of {', '.join(known.name for known in SHIELDED_SIGNALS)}, but got "
                f"{names or short_repr(signals)}",
                option="signals",
            )
        self._every_n_steps = check_whole("every_n_steps", every_n_steps, 1)
        self._received: list[signal.Signals] = []
        self._batches = 0
        self._validation_steps_left = 0.0
        self._validating = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move to the end of the callbacks, so that all others have run for the saved step, and set signal handlers."""
        if stage != "fit":
            return
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn(
                "PreemptionCheckpoint receives no signals: only the main thread of a process can handle them."
            )
        self._received, self._batches, self._validating = [], 0, False
        lightning_internals.put_last(trainer, self)
        lightning_internals.take_over(
            trainer, self._signals, lightning_internals.in_this_process_alone(self._received.append)
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check for signals that came during the sanity check."""
        self._stop_if_signaled(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Check for signals."""
        self._batches += 1
        if self._batches % self._every_n_steps == 0:
            self._stop_if_signaled(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check for signals."""
        self._stop_if_signaled(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute for how many steps all ranks validate: after these, they must not wait for each other."""
        self._validating = lightning_internals.is_validation_of_fit(trainer)
        if not self._validating:
            return
        batches = [float(count) for count in trainer.num_val_batches]
        self._validation_steps_left = -_highest(trainer, [-min(batches, default=0.0)])[0]
        if self._validation_steps_left == inf and trainer.world_size > 1:
            self._validation_steps_left = 0.0

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Check for signals."""
        if self._validating and self._validation_steps_left > 0:
            self._validation_steps_left -= 1
            self._stop_if_signaled(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check for signals; the validation is done."""
        if self._validating:
            self._validating = False
            self._stop_if_signaled(trainer)

    def on_exception(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Save nothing: an exception is not a preemption."""
        lightning_internals.give_back(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a signal that arrived after training again, for the handlers that are set now."""
        lightning_internals.give_back(trainer)
        if stage == "fit" and self._received:
            signal.raise_signal(self._received[0])

    def _stop_if_signaled(self, trainer: Trainer) -> None:
        was_sent = _highest(trainer, [float(sent in self._received) for sent in self._signals])
        signals = [sent for sent, is_sent in zip(self._signals, was_sent, strict=True) if is_sent]
        if not signals:
            return
        rank_zero_info(f"{' and '.join(sent.name for sent in signals)} received: saving {self.ckpt_path}.")
        save_whole(trainer, self.ckpt_path)
        if lightning_internals.needs_requeue(trainer, signals) and trainer.is_global_zero:
            lightning_internals.requeue()
        self._received = []
        raise PreemptedExit(lightning_internals.exit_status(trainer, signals[0]))


def _highest(trainer: Trainer, values: list[float]) -> list[float]:
    """Return the highest of each value over all ranks. Every rank must call it at the same point."""
    if trainer.world_size == 1:
        return values
    gathered = torch.tensor(values, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(gathered, op=torch.distributed.ReduceOp.MAX)
    highest: list[float] = gathered.tolist()
    return highest
