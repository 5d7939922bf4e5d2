"""Names a setting may have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from lightning_streaming.errors import ConfigError

ShuffleAlgo = Literal["blockwise", "naive", "py1b", "py1br", "py1e", "py1s", "py2s"]
PartitionAlgo = Literal["orig", "relaxed"]
SamplingMethod = Literal["balanced", "fixed"]
BatchingMethod = Literal["device_per_stream", "per_stream", "random", "stratified"]


def require_known(setting: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not known.

    Args:
        setting: The setting that got the name, as the user spells it.
        name: What the user wrote.
        known: Names that work.

    Raises:
        ConfigError: ``name`` is none of them.
    """
    known = sorted(known)
    if name not in known:
        raise ConfigError(f"{setting} must be one of {', '.join(known)}, but got {name!r}")
