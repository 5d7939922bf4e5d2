"""Streaming datasets for PyTorch Lightning that resume mid-epoch with no sample repeated and none skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_streaming.exports import lazy_exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lightning_streaming import errors as errors
    from lightning_streaming.dataset.sample_access import LocalDataset as LocalDataset
    from lightning_streaming.dataset.sample_key import KeyedBatch as KeyedBatch
    from lightning_streaming.dataset.sample_key import SampleKey as SampleKey
    from lightning_streaming.dataset.stream import Stream as Stream
    from lightning_streaming.formats.images import EncodedImage as EncodedImage
    from lightning_streaming.options.mixing import MixingConfig as MixingConfig
    from lightning_streaming.options.packing import PackingConfig as PackingConfig
    from lightning_streaming.options.packing import TokenBudget as TokenBudget
    from lightning_streaming.options.reading import BadSamplesConfig as BadSamplesConfig
    from lightning_streaming.options.reading import DebugConfig as DebugConfig
    from lightning_streaming.options.reading import DecodeConfig as DecodeConfig
    from lightning_streaming.options.schedule import MixturePhase as MixturePhase
    from lightning_streaming.options.selection import SelectionConfig as SelectionConfig
    from lightning_streaming.options.storage import JoinConfig as JoinConfig
    from lightning_streaming.options.storage import StorageConfig as StorageConfig
    from lightning_streaming.options.tokenize import TokenizeConfig as TokenizeConfig
    from lightning_streaming.reading.dataset import StreamingDataset as StreamingDataset
    from lightning_streaming.reading.loader import StreamingDataLoader as StreamingDataLoader
    from lightning_streaming.trainer.config import StreamingConfig as StreamingConfig
    from lightning_streaming.trainer.datamodule import StreamingDataModule as StreamingDataModule
    from lightning_streaming.trainer.monitor import StreamingMonitor as StreamingMonitor
    from lightning_streaming.trainer.preemption import PreemptedExit as PreemptedExit
    from lightning_streaming.trainer.preemption import PreemptionCheckpoint as PreemptionCheckpoint
    from lightning_streaming.trainer.state_callback import StreamingStateCallback as StreamingStateCallback
    from lightning_streaming.trainer.step_log import StepLog as StepLog
    from lightning_streaming.world import World as World
    from lightning_streaming.writing.writers import CSVWriter as CSVWriter
    from lightning_streaming.writing.writers import JSONWriter as JSONWriter
    from lightning_streaming.writing.writers import MDSWriter as MDSWriter
    from lightning_streaming.writing.writers import TSVWriter as TSVWriter
    from lightning_streaming.writing.writers import XSVWriter as XSVWriter
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
