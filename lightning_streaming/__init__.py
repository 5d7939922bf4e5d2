"""Streaming datasets for PyTorch Lightning that resume mid-epoch with no sample repeated and none skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_streaming import errors
from lightning_streaming.loading.dataloader import StreamingDataLoader
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.rng import rng_for
from lightning_streaming.loading.stream import Stream
from lightning_streaming.world import World
from lightning_streaming.writing.writer import MDSWriter

if TYPE_CHECKING:
    from lightning_streaming.trainer.config import StreamingConfig
    from lightning_streaming.trainer.datamodule import StreamingDataModule
    from lightning_streaming.trainer.state_callback import StreamingStateCallback

__version__ = "0.1.0"

__all__ = [
    "MDSWriter",
    "Stream",
    "StreamingConfig",
    "StreamingDataLoader",
    "StreamingDataModule",
    "StreamingDataset",
    "StreamingStateCallback",
    "World",
    "errors",
    "rng_for",
]

# Found when first asked for, so that a worker process, which has no use for them, does not import lightning.
_FROM_TRAINER = {
    "StreamingConfig": "lightning_streaming.trainer.config",
    "StreamingDataModule": "lightning_streaming.trainer.datamodule",
    "StreamingStateCallback": "lightning_streaming.trainer.state_callback",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM_TRAINER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_FROM_TRAINER[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
