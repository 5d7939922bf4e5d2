"""What to do about data that training waits for: a run's measures, in one line of words."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_streaming.loading.measures import LoaderStatistics, WaitTimes

_BOTTLENECK = 0.1
"""Share of the time waited from which data is worth a word."""
_REASONS = {
    "download": "downloads",
    "decompress": "decompression",
    "decode": "reading, decoding and collating",
    "queue": "batches on their way from worker processes",
    "start": "passes to begin",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingSetup:
    """How a loader loads: what advice depends on."""

    name: str
    """The loader's name among the train loaders."""
    num_workers: int
    persistent_workers: bool


def advice(statistics: LoaderStatistics, seconds: float, setup: LoadingSetup) -> str | None:
    """One line for a run that waited for its data; None for one that did not.

    Args:
        statistics: What the loader handed out in this run.
        seconds: How long training took, without validation.
        setup: How the loader loads.
    """
    waited = statistics.wait.total
    if not statistics.batches or waited < _BOTTLENECK * seconds:
        return None
    reason = main_reason(statistics.wait)
    share = getattr(statistics.wait, reason) / waited
    return (
        f"Waited for the data of {setup.name!r} {waited / seconds:.0%} of the training time ({waited:.1f} of "
        f"{seconds:.1f} s), mostly for {_REASONS[reason]} ({share:.0%} of it): {_way_out(reason, setup)}."
    )


def main_reason(wait: WaitTimes) -> str:
    """The field of :class:`WaitTimes` that is the largest."""
    return max(WaitTimes._fields, key=lambda name: float(getattr(wait, name)))


def _way_out(reason: str, setup: LoadingSetup) -> str:
    more_workers = "raise num_workers" if setup.num_workers else "load in other processes with num_workers=1 or more"
    if reason == "download":
        return f"raise predownload, {more_workers}, keep a cache across runs with local=, or bring the data nearer"
    if reason == "decompress":
        return f"raise predownload, {more_workers}, or store the data with a faster compression"
    if reason == "decode":
        return f"{more_workers}, read fewer columns=, or make the transform cheaper"
    if reason == "queue":
        return "hand out fewer bytes per batch, or start no more workers than the machine has cores for"
    if setup.num_workers and not setup.persistent_workers:
        return "set persistent_workers=True, so that workers are started once and not in every epoch"
    return "begin fewer passes, with a larger epoch_size"
