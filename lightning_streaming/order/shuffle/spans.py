"""Runs of consecutive samples, shuffled and cut into one part per canonical node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.run_ids import write_runs
from lightning_streaming.order.shuffle.items import shuffle_items
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

    def write(self, out: NDArray[np.integer[Any]]) -> None:
        """Fill ``out`` with the spans' samples, one span after another."""
        write_runs(self.firsts, self.sizes, out)

    def write_shuffled(self, out: NDArray[np.integer[Any]], generator: np.random.Generator) -> None:
        """Fill ``out`` with the spans' samples, one span after another, each shuffled within itself."""
        self.write(out)
        shuffle_runs(self.sizes, out, generator)


def shuffle_runs(sizes: NDArray[np.int64], items: NDArray[np.integer[Any]], generator: np.random.Generator) -> None:
    """Shuffle each of the runs that ``items`` consists of within itself, in place."""
    stop = 0
    for size in sizes.tolist():
        start, stop = stop, stop + size
        shuffle_items(items[start:stop], generator)


def unit_spans(task: ShuffleTask) -> Spans:
    """The runs to shuffle, in the order of their ids."""
    return Spans(np.cumsum(task.units) - task.units, task.units)


def epoch_parts(task: ShuffleTask, generator: np.random.Generator) -> list[Spans]:
    """Give each canonical node its spans, in this epoch's order.

    Which spans a canonical node has is the same in all epochs, so that a node finds in its cache what it read before.

    Args:
        task: What to shuffle.
        generator: This epoch's; what it gives next goes on from here.

    Returns:
        One per canonical node; empty where there are more of them than samples.
    """
    parts = cut(shuffled(unit_spans(task), task.run_generator()), task.num_canonical_nodes)
    return [shuffled(part, generator) for part in parts]


def shuffled(spans: Spans, generator: np.random.Generator) -> Spans:
    """The same spans in random order."""
    if len(spans.sizes) < 2:  # takes no random number
        return spans
    return spans[generator.permutation(len(spans.sizes))]


def in_rooms(parts: Iterable[Spans], out: NDArray[np.integer[Any]]) -> Iterator[tuple[Spans, NDArray[np.integer[Any]]]]:
    """Each part with the stretch of ``out`` that is its own."""
    stop = 0
    for part in parts:
        start, stop = stop, stop + part.num_samples
        yield part, out[start:stop]


def joined_spans(parts: Sequence[Spans]) -> Spans:
    """All parts' spans, one part after another."""
    return Spans(np.concatenate([part.firsts for part in parts]), np.concatenate([part.sizes for part in parts]))


def cut(spans: Spans, num_parts: int) -> list[Spans]:
    """Cut spans, as they follow each other, into parts of equal size.

    Part ``c`` ends after ``n * (c + 1) // num_parts`` samples; a span that reaches across is cut in two. For example
    spans of 4 and 6 samples in two parts give spans of 4 and 1, and one of 5.
    """
    stops = np.cumsum(spans.sizes)
    id_minus_position = spans.firsts - (stops - spans.sizes)
    borders = spans.num_samples * np.arange(1, num_parts + 1) // num_parts
    inside = borders[np.diff(borders, prepend=0) > 0]
    owners = np.searchsorted(stops, inside)
    across = stops[owners] != inside
    inside, owners = inside[across], owners[across]

    piece_stops = np.insert(stops, owners, inside)
    piece_owners = np.insert(np.arange(len(stops)), owners, owners)
    sizes = np.diff(piece_stops, prepend=0)
    pieces = Spans(piece_stops - sizes + id_minus_position[piece_owners], sizes)

    ends = np.searchsorted(piece_stops, borders, side="right").tolist()
    return [pieces[start:end] for start, end in zip([0, *ends], ends, strict=False)]
