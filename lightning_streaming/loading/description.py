"""Datasets and loaders as plain dicts of what was asked for: to log, and to compare with what another run asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_streaming.loading.stream import Stream
from lightning_streaming.storage import mask_url

_NOT_SHOWN = {"self", "__class__", "remote", "local", "storage_options", "world", "stream_name", "stream_config"}
"""What the streams say, may be secret, or belongs to the machines."""

LOADER_SETTINGS = (
    "batch_size",
    "repeat_epoch",
    "drop_last",
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "collate_fn",
    "with_keys",
    "with_valid",
)
"""What a loader tells of itself."""


def describe_dataset(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a dataset as plain values; URLs without passwords, nothing of the storage options.

    Args:
        arguments: By name, parsed; ``streams`` as named :class:`~lightning_streaming.Stream` values.
    """
    shown = {name: _plain(value) for name, value in arguments.items() if name not in _NOT_SHOWN}
    streams = {name: _describe_stream(stream) for name, stream in arguments["streams"].items()}
    return {"type": "StreamingDataset", **shown, "streams": streams}


def describe(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Some arguments as plain values.

    Args:
        kind: What they are the arguments of.
        arguments: By name.
    """
    return {"type": kind, **{name: _plain(value) for name, value in arguments.items()}}


def _describe_stream(stream: Stream) -> dict[str, Any]:
    return {
        "remote": None if stream.remote is None else mask_url(str(stream.remote)),  # a Path is taken too
        "local": None if stream.local is None else str(stream.local),
        "split": stream.split,
        "proportion": stream.proportion,
        "repeat": stream.repeat,
        "choose": stream.choose,
        "download_retry": stream.download_retry,
        "download_timeout": stream.download_timeout,
        "validate_hash": stream.validate_hash,
        "keep_zip": stream.keep_zip,
    }


def _plain(value: Any) -> Any:
    """The value as JSON has it; functions by name."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if value is None or isinstance(value, (str, int, float)):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
