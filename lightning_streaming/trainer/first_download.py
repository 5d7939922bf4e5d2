"""Shows what a trainer's run waits for, and above all what is fetched before the first batch is there.

That may take minutes in which nothing else would be said. On a terminal it is one line that is gone with the first
batch; else the log is told now and then.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from lightning.pytorch import Trainer

from lightning_streaming.reading.arrivals import DownloadCallback, Fetched
from lightning_streaming.trainer import lightning_internals
from lightning_streaming.units import format_bytes
from lightning_streaming.waits import ProgressDisplay, waiting


def shown_by(trainer: Trainer) -> ProgressDisplay:
    """How the waits of a trainer's process are shown.

    Its first rank draws bars, within Lightning's display where that draws itself anew all the time, or else below it;
    unless progress bars are turned off. The first rank of each node tells the log.
    """
    return ProgressDisplay(
        bars=trainer.is_global_zero and getattr(trainer.progress_bar_callback, "is_enabled", False),
        lines=trainer.local_rank == 0,
        display=partial(lightning_internals.line_in_rich_bar, trainer),
    )


def first_download(trainer: Trainer) -> DownloadCallback | None:
    """What shows the first download of one of a trainer's loaders.

    Returns:
        None where nobody would see it.
    """
    shown = shown_by(trainer)
    return _FirstDownload(shown) if shown.lines or shown.draws() else None


class _FirstDownload:
    """Is told what was fetched, and shows it from the first shard on."""

    def __init__(self, shown: ProgressDisplay) -> None:
        self._shown = shown
        self._latest: Fetched | None = None
        self._wait = ExitStack()

    def __call__(self, fetched: Fetched | None) -> None:
        if fetched is None:
            self._wait.close()
            return
        is_first, self._latest = self._latest is None, fetched
        if is_first:
            with self._shown.here():
                self._wait.enter_context(waiting(self._words))

    def _words(self) -> str:
        assert self._latest is not None, "it is not shown before"
        return words_of(self._latest)


def words_of(fetched: Fetched) -> str:
    """For example ``"fetching 3 of 812 shards: 128 MB here, 64 MB/s"``."""
    rate = f", {format_bytes(int(fetched.bytes / fetched.seconds))}/s" if fetched.bytes and fetched.seconds else ""
    here = f": {fetched.here} here, {format_bytes(fetched.bytes)}{rate}" if fetched.here else ""
    return f"fetching {fetched.begun:,} of {fetched.of:,} shards{here}"
