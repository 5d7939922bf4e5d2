"""Options for debugging: a log of the samples read, and a watchdog."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.options.groups import OptionGroup, store_plain
from lightning_streaming.replaced_names import suggests_names
from lightning_streaming.units import check_path, plain_number

_TOO_LONG = 10**6
"""Longest timeout in seconds."""


@suggests_names
@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig(OptionGroup):
    """Tools to find the sample at which a worker fails or hangs.

    Args:
        sample_log: Directory for a log of the samples that each worker reads; existing logs are extended. See
            docs/loading.md.
        watchdog_seconds: Seconds that one sample may take before its key and the stacks of its process are written to
            stderr.

    Raises:
        ConfigError: A field has a value that cannot work.
    """

    option: ClassVar[str] = "debug"
    example: ClassVar[str] = "{sample_log: logs}"

    sample_log: str | os.PathLike[str] | None = None
    watchdog_seconds: float | None = None

    def __post_init__(self) -> None:
        store_plain(self)
        log, seconds = self.sample_log, self.watchdog_seconds
        if log is not None:
            path = check_path("debug.sample_log", log, "a directory to write logs to")
            object.__setattr__(self, "sample_log", path)
        if seconds is not None and not 0 < (plain_number(seconds) or 0) < _TOO_LONG:
            raise ConfigError(
                f"debug.watchdog_seconds must be a number of seconds above 0 and below 10**6, "
                f"but got {short_repr(seconds)}",
                option="debug.watchdog_seconds",
            )
