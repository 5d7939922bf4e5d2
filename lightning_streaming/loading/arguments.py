"""Looks at arguments of the dataset before anything is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.units import parse_count


def parse_epoch_size(epoch_size: int | float | str | None) -> int | None:
    """The epoch size as a number; None for None, 0 and "", as MosaicML Streaming has it."""
    if not epoch_size:
        return None
    samples = parse_count(epoch_size, "epoch_size")
    if samples == 0:
        raise ConfigError(f"epoch_size must be at least one sample, but got {epoch_size!r}")
    return samples


def check_stream_class(stream_name: str, stream_config: Mapping[str, Any] | None) -> None:
    """Refuse what would be looked up in a registry of stream classes, and arguments that are none.

    Raises:
        ConfigError: It is another name than "stream", or ``stream_config`` is no mapping.
    """
    if not isinstance(stream_config or {}, Mapping):
        raise ConfigError(
            f"stream_config must map arguments of Stream to values, but got a {type(stream_config).__name__}"
        )
    if stream_name != "stream":
        raise ConfigError(
            f"stream_name={stream_name!r} would name a class in a registry, which is not served; make the stream and "
            "give it as streams=[Stream(remote=..., storage_options=...)]"
        )


def check_at_least(name: str, value: int | None, least: int) -> None:
    """Refuse what is neither None nor a whole number of at least ``least``.

    Raises:
        ConfigError: This is.
    """
    if value is not None and not (isinstance(value, (int, np.integer)) and value >= least):
        raise ConfigError(f"{name} must be a whole number of at least {least}, but got {value!r}")
