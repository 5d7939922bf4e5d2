"""Checkpoints that appear whole or not at all, whatever strategy writes them."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_streaming.files import PARTIAL_SUFFIX

_REPLACED_SUFFIX = ".replaced"


def save_whole(trainer: Trainer, path: str) -> None:
    """Save a checkpoint beside ``path``, bring it to disk, and rename it. To be called on all ranks.

    A checkpoint in a directory, as sharded strategies write them, cannot take another's name in one step: the one
    before it is moved aside first, to ``*.replaced``, and removed after. A path that is a URL is written to as it is:
    an object store shows an object when all of it has arrived.
    """
    if "://" in path:
        trainer.save_checkpoint(path)
        _wait_until_written(trainer)
        trainer.strategy.barrier("checkpoint in place")
        return
    final = Path(path)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)  # the same for all ranks, which may all write to it
    if trainer.is_global_zero:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)  # a killed run's
    trainer.strategy.barrier("checkpoint begun")
    trainer.save_checkpoint(partial)
    _wait_until_written(trainer)
    trainer.strategy.barrier("checkpoint written")
    if trainer.is_global_zero:
        _bring_to_disk(partial)
        _put_in_place(partial, final)
    trainer.strategy.barrier("checkpoint in place")


def _wait_until_written(trainer: Trainer) -> None:
    writer = getattr(trainer.strategy, "_checkpoint_io", None)  # strategies without one refuse to be asked
    if isinstance(writer, AsyncCheckpointIO):
        writer.teardown()  # waits, and raises what went wrong; the next save sets it up again


def _bring_to_disk(path: Path) -> None:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(partial: Path, final: Path) -> None:
    replaced = final.with_name(final.name + _REPLACED_SUFFIX)
    if partial.is_dir() or final.is_dir():
        _remove(replaced)
        with suppress(FileNotFoundError):
            os.replace(final, replaced)
    os.replace(partial, final)
    _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
