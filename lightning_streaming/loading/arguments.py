"""Looks at arguments of the dataset before anything is done with them."""

from __future__ import annotations

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


def check_at_least(name: str, value: int | None, least: int) -> None:
    """Refuse what is neither None nor a whole number of at least ``least``.

    Raises:
        ConfigError: This is.
    """
    if value is not None and not (isinstance(value, (int, np.integer)) and value >= least):
        raise ConfigError(f"{name} must be a whole number of at least {least}, but got {value!r}")
