"""Tells people at the command line from which checkpoint a run goes on, and of which step that is."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lightning_streaming import lightning_checkpoint
from lightning_streaming.errors import StateError
from lightning_streaming.escaping import shell_word
from lightning_streaming.resume.state import CALLBACK_KEY
from lightning_streaming.trainer.lightning_internals import checkpoints_beside, checkpoints_told

_SAVE_SOMETIMES = (
    "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint --trainer.callbacks.every_n_train_steps=100"
)


def tell_after_ctrl_c(trainer: Trainer) -> None:
    """One line on standard error: where the run stood, and the newest checkpoint that holds its place in the data."""
    if not trainer.is_global_zero or trainer.state.fn != TrainerFn.FITTING:
        return
    newest = _newest(checkpoints_told(trainer))
    way_out = f"no checkpoint of it is on this machine; {_SAVE_SOMETIMES} saves some"
    if newest is not None:
        path, step = newest
        way_out = f"go on from step {step} with --ckpt_path {shell_word(str(path))}"
    sys.stderr.write(f"lightning-streaming fit: interrupted in step {trainer.global_step}; {way_out}\n")


@rank_zero_only
def tell_of_earlier_run(trainer: Trainer) -> None:
    """Before a run that begins anew: one line in the log if an earlier one has saved where this one will."""
    newest = _newest(checkpoints_beside(trainer))
    if newest is not None:
        path, step = newest
        rank_zero_info(
            f"This run begins anew, beside a checkpoint of step {step}: --ckpt_path {shell_word(str(path))} goes on "
            "from there. Once this run saves, --ckpt_path last means this one."
        )


def _newest(paths: Iterable[Path]) -> tuple[Path, int] | None:
    """The one written last of those that hold a place in the data, and the step it was saved in."""
    for path in sorted({*paths}, key=_written_at, reverse=True):
        step = _step_of(path)
        if step is not None:
            return path, step
    return None


def _written_at(path: Path) -> int:
    with suppress(OSError):  # another run has removed it just now
        return path.stat().st_mtime_ns
    return 0


def _step_of(path: Path) -> int | None:
    """The step of a checkpoint that holds a place in the data; None of any other file."""
    file = path / lightning_checkpoint.SHARDED_META if path.is_dir() else path
    try:
        content = lightning_checkpoint.read_plain_values(file)
        is_ours = bool(content["callbacks"][CALLBACK_KEY]["loaders"])
        return int(content["global_step"]) if is_ours else None
    except (StateError, OSError, LookupError, TypeError):  # what it is, is for others to say
        return None
