"""What this package knows of how Lightning answers signals, requeues SLURM jobs, and goes on with a validation.

Lightning sets its handlers after ``on_fit_start``, and puts back at the end of every ``fit`` what was there before.
Its own save, or talk to other ranks, in the middle of whatever the process was doing; so a signal that
:class:`PreemptionCheckpoint` listens to is taken from them, for as long as Lightning would have had it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

Handler = Callable[[int, FrameType | None], None]


def put_last(trainer: Trainer, callback: Callback) -> None:
    """Have Lightning call ``callback`` after all others. Safe in its ``setup``: the list gone through is kept."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's connector
    others = [one for one in callbacks if one is not callback]
    trainer.callbacks = [*others, callback]  # type: ignore[attr-defined]


def take_over(trainer: Trainer, signals: Iterable[signal.Signals], handler: Handler) -> None:
    """Put ``handler`` in the place of Lightning's as soon as Lightning has set its own; Lightning puts back the former.

    Outside the main thread nobody can handle signals, Lightning neither.
    """
    connector = trainer._signal_connector

    def register() -> None:
        type(connector).register_signal_handlers(connector)
        for signum in signals:
            connector._register_signal(signum, handler)

    connector.register_signal_handlers = register  # type: ignore[method-assign]


def give_back(trainer: Trainer) -> None:
    """Let Lightning's next ``fit`` set its own handlers."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)


def in_this_process_alone(note: Callable[[signal.Signals], None]) -> Handler:
    """A handler that a forked child does not take over: a program's other children still end when told to."""
    owner = os.getpid()

    def handle(signum: int, _frame: FrameType | None) -> None:
        if os.getpid() == owner:
            note(signal.Signals(signum))
        elif signum == signal.SIGTERM:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    return handle


def asks_for_requeue(trainer: Trainer, signals: Iterable[signal.Signals]) -> bool:
    """Whether SLURM has sent the signal on which Lightning would requeue the job."""
    environment = trainer._accelerator_connector.cluster_environment
    return (
        isinstance(environment, SLURMEnvironment)
        and environment.auto_requeue
        and environment.requeue_signal in {*signals}
    )


def requeue() -> None:
    """Have SLURM run this job, or this task of an array, again. On one rank only."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        rank_zero_warn(f"cannot requeue SLURM job {job}: scontrol is not on the PATH; the checkpoint is saved")
        return
    asked = subprocess.run([scontrol, "requeue", job], check=False, capture_output=True, text=True)  # noqa: S603
    if asked.returncode:
        rank_zero_warn(f"SLURM did not requeue job {job} (status {asked.returncode}): {asked.stderr.strip()}")
    else:
        rank_zero_info(f"Requeued SLURM job {job}.")


def exit_status(trainer: Trainer, signum: signal.Signals) -> int:
    """What the process is to exit with: as if the signal had ended it, or 0 where another process speaks for it.

    Lightning kills all ranks that it started, its own process first, when one of them ends with another status than 0.
    """
    environment = trainer._accelerator_connector.cluster_environment
    started_by_lightning = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
    return 0 if started_by_lightning else 128 + signum


def repeat_validation(checkpoint: dict[str, Any]) -> None:
    """Let a checkpoint saved in mid-validation say so, in the shape from which Lightning begins it again."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    for tracker in (progress["total"], progress["current"]):
        tracker.update(ready=1, started=1, processed=0, completed=0)
    progress["is_last_batch"] = False
