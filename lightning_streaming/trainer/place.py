"""How far training has come, and what that is in batches of this run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil

from lightning.pytorch import Trainer

from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.loading.dataloader import StreamingDataLoader
from lightning_streaming.order.batch_ranges import Counted
from lightning_streaming.trainer import fit_loop


@dataclass(slots=True)
class Place:
    """How far training has come, in the trainer's words and in the data's."""

    epoch: int = 0
    """The trainer's current epoch."""
    batches: int = 0
    """Batches of it whose gradients are in the weights."""
    batches_in_epoch: int = 0
    """Batches that this epoch has for the trainer, on each rank."""
    cursors: dict[str, Cursor] = field(default_factory=dict)
    """For each loader, the end of what the weights have seen."""

    @property
    def is_finished(self) -> bool:
        """Whether the weights have seen the whole epoch, though the trainer may not have closed it yet."""
        return 0 < self.batches_in_epoch <= self.batches


def counted(trainer: Trainer, place: Place, cursor: Cursor) -> Counted:
    """Which number the next batch of a loader has, as loggers count."""
    return Counted(
        steps=fit_loop.batches_trained(trainer, place.epoch, place.batches),
        place=cursor,
        steps_in_epoch=place.batches if cursor.sample_in_epoch else 0,
        limit=trainer.limit_train_batches,
    )


def batches_done(
    trainer: Trainer, place: Place, loaders: Mapping[str, StreamingDataLoader], ended: Collection[str] = ()
) -> int:
    """Batches of the trainer's epoch that lie before the place, in batches of this run.

    They are worked out from what is left of the loader that decides when the epoch ends, because its ranks and batch
    size may have changed since the place was saved.

    Args:
        trainer: The trainer.
        place: Where training stands.
        loaders: The streaming ones, by name.
        ended: Those that have come to the end of the epoch they were in, as today's data or list of batches to skip
            has nothing left of it.
    """
    decides = min if fit_loop.combination_mode(trainer) == "min_size" else max
    name = decides(loaders, key=lambda name: loaders[name].batches_of_epoch())
    loader, cursor = loaders[name], place.cursors[name]
    left, whole = loader.batches_left(cursor), loader.batches_of_epoch()
    limit = fit_loop.batches_in_epoch(trainer)
    if limit > whole or limit == 0:  # another kind of loader decides
        return place.batches
    if name in ended and place.batches:
        return limit
    if limit == whole:
        return limit - left
    if isinstance(trainer.limit_train_batches, int):
        return max(place.batches, limit - left)
    global_batch = loader.samples_per_global_batch
    return limit - ceil(max(0, limit * global_batch - loader.samples_before(cursor)) / global_batch)
