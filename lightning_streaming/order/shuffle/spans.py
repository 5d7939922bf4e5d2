"""Runs of consecutive samples, shuffled and cut into one part per canonical node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.shuffle.task import ShuffleTask


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Runs ``[first, first + size)``, in reading order."""

    firsts: NDArray[np.int64]
    """Where each run begins."""
    sizes: NDArray[np.int64]
    """How long each run is."""

    @property
    def num_samples(self) -> int:
        """Samples in all runs."""
        return int(self.sizes.sum())

    def __getitem__(self, which: slice | NDArray[np.int64]) -> Spans:
        return Spans(self.firsts[which], self.sizes[which])


def epoch_parts(task: ShuffleTask, generator: np.random.Generator) -> list[Spans]:
    """Give each canonical node its spans, in this epoch's order.

    Which spans a canonical node has is the same in all epochs, so that a node finds in its cache what it read before.

    Args:
        task: What to shuffle.
        generator: This epoch's; what it gives next goes on from here.

    Returns:
        One per canonical node; empty where there are more of them than samples.
    """
    spans = Spans(np.cumsum(task.units) - task.units, task.units)
    parts = cut(_shuffled(spans, task.run_generator()), task.num_canonical_nodes)
    return [_shuffled(part, generator) for part in parts]


def cut(spans: Spans, num_parts: int) -> list[Spans]:
    """Cut spans, as they follow each other, into parts of equal size.

    Part ``c`` ends after ``n * (c + 1) // num_parts`` samples; a span that reaches across is cut in two. For example
    spans of 4 and 6 samples in two parts give spans of 4 and 1, and one of 5.
    """
    stops = np.cumsum(spans.sizes)
    id_minus_position = spans.firsts - (stops - spans.sizes)
    borders = spans.num_samples * np.arange(1, num_parts + 1) // num_parts
    inside = np.setdiff1d(borders, np.append(stops, 0))

    owners = np.searchsorted(stops, inside)
    piece_stops = np.insert(stops, owners, inside)
    piece_owners = np.insert(np.arange(len(stops)), owners, owners)
    sizes = np.diff(piece_stops, prepend=0)
    pieces = Spans(piece_stops - sizes + id_minus_position[piece_owners], sizes)

    ends = np.searchsorted(piece_stops, borders, side="right").tolist()
    return [pieces[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def write_shuffled(spans: Spans, out: NDArray[np.int64], generator: np.random.Generator) -> None:
    """Fill ``out`` with the spans' samples, one span after another, each shuffled within itself."""
    stop = 0
    for first, size in zip(spans.firsts.tolist(), spans.sizes.tolist(), strict=True):
        start, stop = stop, stop + size
        out[start:stop] = np.arange(first, first + size)
        generator.shuffle(out[start:stop])


def _shuffled(spans: Spans, generator: np.random.Generator) -> Spans:
    return spans[generator.permutation(len(spans.sizes))]
