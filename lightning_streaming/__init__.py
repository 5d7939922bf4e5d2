"""Streaming datasets for PyTorch Lightning that resume mid-epoch with no sample repeated and none skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_streaming import errors, replaced_names

if TYPE_CHECKING:
    from lightning_streaming.formats.encodings import register_encoding, registered_encodings
    from lightning_streaming.formats.pictures import Picture
    from lightning_streaming.loading.bad_log import BadSample, read_bad_samples
    from lightning_streaming.loading.bad_samples_config import BadSamplesConfig
    from lightning_streaming.loading.dataloader import StreamingDataLoader
    from lightning_streaming.loading.dataset import StreamingDataset
    from lightning_streaming.loading.debug_config import DebugConfig
    from lightning_streaming.loading.decode_config import DecodeConfig
    from lightning_streaming.loading.following import read_appended
    from lightning_streaming.loading.join_options import Join
    from lightning_streaming.loading.measures import LoaderStatistics, WaitTimes
    from lightning_streaming.loading.pack_options import Budget, Pack
    from lightning_streaming.loading.phase_options import Phase
    from lightning_streaming.loading.ranks import gather_in_order, restore_state_global, save_state_global
    from lightning_streaming.loading.sample_access import LocalDataset
    from lightning_streaming.loading.sample_key import KeyedBatch, SampleKey, SampleKeys
    from lightning_streaming.loading.sample_log import LoggedSample, read_sample_log
    from lightning_streaming.loading.storage_config import StorageConfig
    from lightning_streaming.loading.stream import Stream
    from lightning_streaming.loading.transform import rng_for
    from lightning_streaming.trainer.config import StreamingConfig
    from lightning_streaming.trainer.datamodule import StreamingDataModule
    from lightning_streaming.trainer.monitor import StreamingMonitor
    from lightning_streaming.trainer.preemption import Preempted, PreemptionCheckpoint
    from lightning_streaming.trainer.state_callback import StreamingStateCallback
    from lightning_streaming.trainer.step_log import PartKey, StepLog, read_step_log
    from lightning_streaming.world import World
    from lightning_streaming.writing.merge import merge, merge_under
    from lightning_streaming.writing.parallel import write_parallel
    from lightning_streaming.writing.parts import PartJob, plan_parts
    from lightning_streaming.writing.writers import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter

__version__ = "0.1.0"

__all__ = [
    "BadSample",
    "BadSamplesConfig",
    "Budget",
    "CSVWriter",
    "DebugConfig",
    "DecodeConfig",
    "JSONWriter",
    "Join",
    "KeyedBatch",
    "LoaderStatistics",
    "LocalDataset",
    "LoggedSample",
    "MDSWriter",
    "Pack",
    "PartJob",
    "PartKey",
    "Phase",
    "Picture",
    "Preempted",
    "PreemptionCheckpoint",
    "SampleKey",
    "SampleKeys",
    "StepLog",
    "StorageConfig",
    "Stream",
    "StreamingConfig",
    "StreamingDataLoader",
    "StreamingDataModule",
    "StreamingDataset",
    "StreamingMonitor",
    "StreamingStateCallback",
    "TSVWriter",
    "WaitTimes",
    "World",
    "XSVWriter",
    "errors",
    "gather_in_order",
    "merge",
    "merge_under",
    "plan_parts",
    "read_appended",
    "read_bad_samples",
    "read_sample_log",
    "read_step_log",
    "register_encoding",
    "registered_encodings",
    "restore_state_global",
    "rng_for",
    "save_state_global",
    "write_parallel",
]

# Found when first asked for: a tool or a writer has no use for torch, and a worker process none for lightning.
_MODULE_OF = {
    "BadSample": "loading.bad_log",
    "BadSamplesConfig": "loading.bad_samples_config",
    "Budget": "loading.pack_options",
    "CSVWriter": "writing.writers",
    "DebugConfig": "loading.debug_config",
    "DecodeConfig": "loading.decode_config",
    "JSONWriter": "writing.writers",
    "Join": "loading.join_options",
    "KeyedBatch": "loading.sample_key",
    "LoaderStatistics": "loading.measures",
    "LocalDataset": "loading.sample_access",
    "LoggedSample": "loading.sample_log",
    "MDSWriter": "writing.writers",
    "Pack": "loading.pack_options",
    "PartJob": "writing.parts",
    "PartKey": "trainer.step_log",
    "Phase": "loading.phase_options",
    "Picture": "formats.pictures",
    "Preempted": "trainer.preemption",
    "PreemptionCheckpoint": "trainer.preemption",
    "SampleKey": "loading.sample_key",
    "SampleKeys": "loading.sample_key",
    "StepLog": "trainer.step_log",
    "StorageConfig": "loading.storage_config",
    "Stream": "loading.stream",
    "StreamingConfig": "trainer.config",
    "StreamingDataLoader": "loading.dataloader",
    "StreamingDataModule": "trainer.datamodule",
    "StreamingDataset": "loading.dataset",
    "StreamingMonitor": "trainer.monitor",
    "StreamingStateCallback": "trainer.state_callback",
    "TSVWriter": "writing.writers",
    "WaitTimes": "loading.measures",
    "World": "world",
    "XSVWriter": "writing.writers",
    "gather_in_order": "loading.ranks",
    "merge": "writing.merge",
    "merge_under": "writing.merge",
    "plan_parts": "writing.parts",
    "read_appended": "loading.following",
    "read_bad_samples": "loading.bad_log",
    "read_sample_log": "loading.sample_log",
    "read_step_log": "trainer.step_log",
    "register_encoding": "formats.encodings",
    "registered_encodings": "formats.encodings",
    "restore_state_global": "loading.ranks",
    "rng_for": "loading.transform",
    "save_state_global": "loading.ranks",
    "write_parallel": "writing.parallel",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise replaced_names.unknown_name(__name__, name, __all__)
    from importlib import import_module

    found = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
