"""What ``lightning-streaming view`` looks at: a dataset, or the streams of a run; read when first looked at."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_streaming.tools.stored.sample_reader import SampleReader
from lightning_streaming.tools.stored.stored_dataset import StoredDataset
from lightning_streaming.tools.stored.summary import summarize
from lightning_streaming.tools.viewing.column_statistics import Statistics, statistics_of

if TYPE_CHECKING:
    from lightning_streaming.selection.bitmap import Selection
    from lightning_streaming.tools.viewing.viewed_run import ViewedRun

_LOOKED_AT = 1 << 16
"""Samples of which it is looked up together whether they are selected."""
_ATTEMPTS, _TIMEOUT = 2, 20.0
"""Of transfers from stores: somebody waits for the page."""


class ViewedStream:
    """One dataset, and what it is in a run.

    Args:
        place: Where it is.
        label: What it is called.
        allow_unsafe_types: Whether columns may be decoded that can run code of whoever wrote the data.
        stage: The stage that reads it; empty for a dataset that is looked at alone.
        name: The stream's.
        only: Which of its samples are read, in words; empty for all.
    """

    def __init__(
        self,
        place: StoredDataset,
        label: str,
        allow_unsafe_types: bool,
        stage: str = "",
        name: str = "",
        only: str = "",
    ) -> None:
        self.place = replace(place, attempts=_ATTEMPTS, timeout=_TIMEOUT)
        self.label, self.stage, self.name, self.only = label, stage, name, only
        self._allows_unsafe = allow_unsafe_types
        self._lock = threading.Lock()
        self._reader: SampleReader | None = None
        self._summary: Mapping[str, Any] | None = None
        self._statistics: Statistics | None = None

    @property
    def title(self) -> str:
        """What its pages are called."""
        return f"{self.stage}: {self.label}" if self.stage else self.label

    @property
    def reader(self) -> SampleReader:
        """Reads its samples; the index is read at the first look.

        Raises:
            StreamingError: As for ``StoredDataset.read_index``.
        """
        with self._lock:
            if self._reader is None:
                cache = self.place.cache()
                index = self.place.read_index() if self.place.format is None else cache.read_index()
                self._reader = SampleReader(self.place, cache, index, self._allows_unsafe)
            return self._reader

    def summary(self) -> Mapping[str, Any]:
        """What ``summarize`` reports of its index: it looks at every shard, of which there may be a million.

        Raises:
            StreamingError: As for :attr:`reader`.
        """
        if self._summary is None:
            self._summary = summarize(self.reader.index)
        return self._summary

    def statistics(self, *, is_asked: bool) -> Statistics:
        """What is in its columns, told from some samples; from those again where some could not be read.

        Raises:
            StreamingError: As for :attr:`reader`.
        """
        reader, kept = self.reader, self._statistics
        if kept is not None and not (is_asked and kept.left_out):
            return kept
        encodings = {one["name"]: one["encoding"] for one in self.summary()["columns"]}
        found = statistics_of(reader, encodings, is_asked=is_asked)
        if all(one.may_be_asked for one in found.left_out):
            self._statistics = found
        return found

    def filtered(self, selection: Selection | None, first: int, most: int, *, is_selected: bool) -> list[int]:
        """Some samples that a run reads, or leaves out.

        Args:
            selection: Those that it reads; None for all.
            first: The first that may be among them.
            most: How many are wanted.
            is_selected: Whether those that are read are wanted, or the others.
        """
        total, found = self.reader.index.num_samples, list[int]()
        for start in range(first, total, _LOOKED_AT):
            numbers = np.arange(start, min(start + _LOOKED_AT, total))
            has = np.ones(len(numbers), np.bool_) if selection is None else selection.has(numbers)
            found += numbers[has == is_selected][: most - len(found)].tolist()
            if len(found) >= most:
                break
        return found

    def close(self) -> None:
        """Let go of what is open."""
        if self._reader is not None:
            self._reader.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewed:
    """What is looked at."""

    shown: str
    """It, as it may be shown."""
    streams: Sequence[ViewedStream]
    run: ViewedRun | None = None
    """The run that reads the streams; None where a dataset is looked at alone."""

    def close(self) -> None:
        """Let go of what is open."""
        for one in self.streams:
            one.close()
        if self.run is not None:
            self.run.close()
