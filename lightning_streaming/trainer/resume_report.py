"""Says where a resumed run goes on, and what is different from the run that was saved."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.loading.dataloader import StreamingDataLoader


def report_resume(
    trainer: Trainer,
    cursors: Mapping[str, Cursor],
    loaders: Mapping[str, StreamingDataLoader],
    global_batches_then: Mapping[str, int],
) -> None:
    """One line for each loader, and another where its batches were of another size over all ranks."""
    for name, cursor in cursors.items():
        rank_zero_info(
            f"Resumed {name!r} at epoch {cursor.epoch}, sample {cursor.sample_in_epoch} "
            f"(step {trainer.global_step}, {trainer.ckpt_path})."
        )
        loader = loaders[name]
        then, now = global_batches_then.get(name), loader.samples_per_global_batch
        if then is not None and then != now:
            rank_zero_info(
                f"The global batch of {name!r} was {then} samples and is {now} now: {loader.batches_left(cursor)} "
                f"batches are left of epoch {cursor.epoch}, and a whole one has {len(loader)}."
            )
