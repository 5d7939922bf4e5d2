"""Waiting of every rank: metrics, and which rank waits longer than the others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from lightning_streaming.reading.measures import LoaderStatistics

_STANDS_OUT = 2
"""How many times as long as the median rank a straggler waits."""


class RankWait(NamedTuple):
    """Statistics of the loader of one rank in some seconds of training."""

    statistics: LoaderStatistics
    seconds: float

    @property
    def share(self) -> float:
        """Return the share of the time that was spent waiting."""
        return self.statistics.wait.total / self.seconds

    @property
    def ready_share(self) -> float:
        """Return the share of batches that were ready when they were needed."""
        return self.statistics.ready_batches / max(1, self.statistics.batches)


def rank_metrics(ranks: Sequence[RankWait]) -> dict[str, float]:
    """Return the metrics of all ranks; docs/monitoring.md explains each."""
    shares = [rank.share for rank in ranks]
    return {
        "rank_wait_share/mean": fmean(shares),
        "rank_wait_share/max": max(shares),
        "slowest_rank": shares.index(max(shares)),
        **{f"rank_wait_share/{number}": share for number, share in enumerate(shares)},
        **{f"rank_ready_share/{number}": rank.ready_share for number, rank in enumerate(ranks)},
    }


def straggler(ranks: Sequence[RankWait]) -> int | None:
    """Return the rank that waited the longest, if the median rank waited less than half as long; else None."""
    shares = [rank.share for rank in ranks]
    longest = max(shares)
    return shares.index(longest) if longest > _STANDS_OUT * median(shares) else None
