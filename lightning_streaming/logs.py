"""What runs report: readers of their logs, and the statistics of a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_streaming.exports import lazy_exports

if TYPE_CHECKING:
    from lightning_streaming.dataset.bad_log import BadSample as BadSample
    from lightning_streaming.dataset.bad_log import read_bad_samples as read_bad_samples
    from lightning_streaming.dataset.step_lines import PartKey as PartKey
    from lightning_streaming.dataset.step_lines import read_step_log as read_step_log
    from lightning_streaming.reading.measures import LoaderStatistics as LoaderStatistics
    from lightning_streaming.reading.measures import WaitTimes as WaitTimes
    from lightning_streaming.reading.sample_log import LoggedSample as LoggedSample
    from lightning_streaming.reading.sample_log import read_sample_log as read_sample_log
    from lightning_streaming.sequence.phases import WeightChange as WeightChange
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
