"""The callback that lets the workers of one stage run at a time: those of train, or those of validation."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_streaming.trainer import lightning_internals


class PauseWorkers(Callback):
    """Callback that ends train workers when a validation starts, and validation workers when it ends.

    The next batch of a loader starts its workers again, at the sample after the latest batch.
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the workers of the train loaders, if this is a validation of ``fit``."""
        if _is_on(trainer) and lightning_internals.has_loaders(trainer):
            for loader in lightning_internals.streaming_loaders(trainer).values():
                loader.pause_workers()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the workers of the validation loaders, also after Lightning's sanity check."""
        if _is_on(trainer):
            for loader in lightning_internals.validation_loaders(trainer):
                loader.pause_workers()


def _is_on(trainer: Trainer) -> bool:
    """Return whether this is ``fit`` with a data module that wants pauses; that of an earlier run may not count."""
    datamodule = lightning_internals.datamodule_of(trainer)
    return trainer.state.fn == TrainerFn.FITTING and getattr(datamodule, "pause_workers", False)
