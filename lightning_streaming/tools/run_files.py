"""The configuration files of a run, read by the module that imports lightning for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from lightning_streaming.errors import ConfigError

_READER = "lightning_streaming.trainer.written_run"
_USES = {"train": "no training", "val": "no validation", "test": "no test", "predict": "nothing to predict"}


def read_run_files(files: Sequence[str], changes: Mapping[str, Any], stage: str = "train") -> Any:
    """What configuration files of ``lightning-streaming fit`` say of data and trainer.

    Args:
        files: Paths; what a later one says overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``.
        stage: The data that is to be there: "train", "val", "test" or "predict".

    Returns:
        A :class:`~lightning_streaming.trainer.written_run.WrittenRun`; its data module is not set up.

    Raises:
        ConfigError: A file cannot be read, its data cannot be made, or the stage has none.
    """
    # Lightning takes seconds to import, and other tools do not need it.
    written = import_module(_READER).read_run(files, changes)
    if written.datamodule.configs[stage] is None:
        raise ConfigError(f"{', '.join(files)}: there is no data.{stage}, so there is {_USES[stage]}")
    return written
