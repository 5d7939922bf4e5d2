"""Shows what is fetched before the first batch is there, which may take minutes in which nothing else would be said.

Only to somebody who looks at a terminal, in one line that is gone with the first batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from lightning.pytorch import Trainer
from tqdm import tqdm

from lightning_streaming.loading.arrivals import Fetched, LookOn
from lightning_streaming.trainer import lightning_internals
from lightning_streaming.units import format_bytes


def first_download(trainer: Trainer) -> LookOn | None:
    """What shows the first download of one of a trainer's loaders.

    Returns:
        None where nobody would see it: on other ranks than the first, where standard error is no terminal, and where
        progress bars are turned off.
    """
    bar = trainer.progress_bar_callback
    is_shown = trainer.is_global_zero and sys.stderr.isatty() and getattr(bar, "is_enabled", False)
    return _Line(trainer) if is_shown else None


class _Bar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
    """A bar without tqdm's thread that watches bars: forked workers should find no threads."""

    monitor_interval = 0


class _Line:
    """A line within Lightning's display, where that draws itself anew all the time, or else below it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._show: Callable[[str | None], object] | None = None

    def __call__(self, fetched: Fetched | None) -> None:
        if fetched is None:
            if self._show is not None:
                self._show(None)
            return
        if self._show is None:
            self._show = lightning_internals.line_in_rich_bar(self._trainer) or _line_of_its_own()
        self._show(words_of(fetched))


def words_of(fetched: Fetched) -> str:
    """For example ``"fetching 3 of 812 shards: 128 MB here, 64 MB/s"``."""
    rate = f", {format_bytes(int(fetched.bytes / fetched.seconds))}/s" if fetched.bytes and fetched.seconds else ""
    here = f": {fetched.here} here, {format_bytes(fetched.bytes)}{rate}" if fetched.here else ""
    return f"fetching {fetched.begun:,} of {fetched.of:,} shards{here}"


def _line_of_its_own() -> Callable[[str | None], object]:
    # tqdm knows of its other bars, Lightning's too, and goes below them.
    bar = _Bar(bar_format="{desc}", file=sys.stderr, leave=False)
    return lambda words: bar.close() if words is None else bar.set_description_str(words)
