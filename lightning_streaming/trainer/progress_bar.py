"""Tells Lightning's progress bar of an epoch that goes on in its middle."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar


def begin_epoch_at(trainer: Trainer, pl_module: LightningModule, batches: int) -> None:
    """Give the bar the epoch's number and total, which it learns at an epoch's start, and the batches done of it.

    Lightning leaves ``on_train_epoch_start`` out when an epoch goes on. Its bars then know no total, or that of the
    epoch before; their speed would count what an earlier run has done.
    """
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    bar.on_train_epoch_start(trainer, pl_module)
    if isinstance(bar, TQDMProgressBar):
        shown = bar.train_progress_bar
        shown.initial = shown.n = batches
        shown.refresh()
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        bar.progress.reset(bar.train_progress_bar_id, completed=batches)


def begin_epoch_at_zero(trainer: Trainer) -> None:
    """Before the bar is told of the next epoch: let it count from that one's first batch again."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        bar.train_progress_bar.initial = 0
