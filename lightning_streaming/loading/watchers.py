"""Who watches the samples of a worker: the log of what was read, and the watchdog."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.cursor import PassStart
from lightning_streaming.loading.sample_log import SampleLog, sample_log_path
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.loading.watch import SampleWatch, Watcher, keys_of_rows
from lightning_streaming.loading.watchdog import Watchdog

_TOO_LONG = 10**6
"""Seconds that no sample takes, and that every clock can wait."""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Which watch a person asked for."""

    sample_log: str | os.PathLike[str] | None
    """Directory for logs of the samples read; None for no log."""
    watchdog_seconds: float | None
    """How long one sample may take before the watchdog tells; None for no watchdog."""

    def __post_init__(self) -> None:
        if self.sample_log is not None and not (isinstance(self.sample_log, (str, os.PathLike)) and self.sample_log):
            raise ConfigError(f"sample_log must be a directory to write logs to, but got {self.sample_log!r}")
        if self.watchdog_seconds is not None:
            _require_seconds("watchdog_seconds", self.watchdog_seconds)

    def watch(self, source: SampleSource, start: PassStart, worker: int) -> SampleWatch | None:
        """The watch over a worker's pass; None if nobody asked for any."""
        if self.sample_log is None and self.watchdog_seconds is None:
            return None
        return SampleWatch(partial(self._watchers, source, start, worker))

    def _watchers(self, source: SampleSource, start: PassStart, worker: int) -> Sequence[Watcher]:
        key = keys_of_rows(source.catalog, start)
        rank = start.world.rank
        log = None if self.sample_log is None else sample_log_path(self.sample_log, rank, worker)
        watchers: list[Watcher] = [] if log is None else [SampleLog(log, key)]
        if self.watchdog_seconds is not None:
            stacks = None if log is None else log.with_suffix(".stacks")
            watchers.append(Watchdog(self.watchdog_seconds, f"worker {worker} of rank {rank}", key, stacks))
        return watchers


def _require_seconds(setting: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < _TOO_LONG:
        raise ConfigError(f"{setting} must be a number of seconds above 0 and below 10**6, but got {seconds!r}")
