"""The packs of an epoch: which tokens of which documents each holds, at random access.

Packs          the packs of one plan
PackedEpoch    the packs of an epoch, as a batching step: positions count packs
plan_epoch     the plans that it needs

Each slice of an order, a canonical node, is packed separately, so that a node reads the shards of its own slices only.
The packs of the slices are dealt in turn; when one has no more, the others continue:

    slice 0     a0 a1 a2 a3
    slice 1     b0 b1
    slice 2     c0 c1 c2
    read as     a0 b0 c0  a1 b1 c1  a2 c2  a3

With a schedule each mixture step is packed separately, so later steps do not change earlier packs.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.sequence.base import check_entries, digest_of
from lightning_streaming.sequence.batching import Batched, RowPieces, Rows
from lightning_streaming.sequence.draw import EpochPart
from lightning_streaming.sequence.packing.plan import (
    BLOCK,
    IdsBetween,
    Lengths,
    PackPlan,
    is_concat,
    lengths_of,
    plan_packs,
)
from lightning_streaming.sequence.packing.settings import AnyPackSettings

IdsAt = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Function that returns sample ids at positions of the epoch's order."""
_CACHED_IDS = 1 << 18
"""Sample ids of the last windows that are cached: two megabytes."""


class Packs:
    """The packs of a plan, at random access. Use it from one thread at a time.

    Args:
        plan: The plan of the same documents.
        ids_between: Returns sample ids in the epoch's order.
        lengths: Returns the tokens of samples.
        ids_at: Returns sample ids at positions in any order, if that takes about as long for each as ``ids_between``.
            Without it, ids of whole windows are requested, and those of the last windows are cached.
    """

    def __init__(self, plan: PackPlan, ids_between: IdsBetween, lengths: Lengths, ids_at: IdsAt | None = None) -> None:
        self.plan = plan
        of_plan = _CutPacks if is_concat(plan.settings) else _WindowPacks
        self._reader = of_plan(plan, ids_between, lengths, ids_at)

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all packs."""
        return self.plan.num_tokens

    @property
    def token_room(self) -> int:
        """Number of tokens that all packs have room for."""
        return self.plan.token_room

    def rows(self, packs: NDArray[np.int64]) -> RowPieces:
        """Return the contents of packs.

        Args:
            packs: Numbers in ``[0, len(self))``, in one dimension, in any order, possibly repeated.

        Raises:
            SampleIndexError: There is no such pack.
        """
        check_entries(packs, len(self), "packs")
        return self._reader.rows(np.asarray(packs, np.int64))

    def first_position(self, pack: int) -> int:
        """Return the position before which neither this pack nor a later one needs a document.

        Args:
            pack: In ``[0, len(self)]``; for ``len(self)`` it is the position after all documents.

        Raises:
            SampleIndexError: There is no such pack.
        """
        check_entries(np.asarray([pack]), len(self) + 1, "packs")
        return self.plan.num_positions if pack == len(self) else self._reader.bounds(pack)[0]

    def last_position(self, pack: int) -> int:
        """Return a position after all documents of this pack and of earlier ones: with windows, its window's end.

        Args:
            pack: In ``[0, len(self))``.

        Raises:
            SampleIndexError: There is no such pack.
        """
        check_entries(np.asarray([pack]), len(self), "packs")
        return self._reader.bounds(pack)[1]


class _CutPacks:
    """Reader of a "concat" plan, whose documents are cut where packs end."""

    def __init__(self, plan: PackPlan, ids_between: IdsBetween, lengths: Lengths, ids_at: IdsAt | None) -> None:
        self._plan, self._ids_between, self._lengths, self._ids_at = plan, ids_between, lengths, ids_at
        self._tokens_before = plan.named["tokens_before"]

    def rows(self, packs: NDArray[np.int64]) -> RowPieces:
        capacity = self._plan.settings.capacity
        begins = packs * capacity
        ends = np.minimum(begins + capacity, self._plan.num_tokens)
        # All documents of the needed blocks, and the first and last token of each in the epoch.
        first, last = _joined(
            np.searchsorted(self._tokens_before, begins, side="right") - 1,
            np.searchsorted(self._tokens_before, ends, side="left"),
        )
        firsts = first * BLOCK
        counts = np.minimum(last * BLOCK, self._plan.num_positions) - firsts
        positions, of_run = _spread(firsts, counts)
        ids = _ids_of_runs(self._ids_between, firsts, counts) if self._ids_at is None else self._ids_at(positions)
        sizes = lengths_of(self._lengths, ids, len(positions))
        starts = np.cumsum(sizes) - sizes
        starts += (self._tokens_before[first] - starts[np.cumsum(counts) - counts])[of_run]
        stops = starts + sizes
        # A document without tokens begins where the next one does, and is left out below.
        first = np.searchsorted(stops, begins, side="right")
        counts = np.searchsorted(starts, ends, side="left") - first
        documents, of_row = _spread(first, counts)
        row_starts = np.maximum(begins[of_row] - starts[documents], 0)
        lengths = np.minimum(ends[of_row], stops[documents]) - starts[documents] - row_starts
        held = lengths > 0
        return RowPieces(
            entries=of_row[held],
            positions=positions[documents[held]],
            ids=ids[documents[held]],
            starts=row_starts[held],
            lengths=lengths[held],
            are_ends=(row_starts + lengths == stops[documents] - starts[documents])[held],
        )

    def bounds(self, pack: int) -> tuple[int, int]:
        positions = self.rows(np.asarray([pack])).positions
        return int(positions[0]), int(positions[-1]) + 1


class _WindowPacks:
    """Reader of a plan whose windows were packed separately."""

    def __init__(self, plan: PackPlan, ids_between: IdsBetween, lengths: Lengths, ids_at: IdsAt | None) -> None:
        self._plan, self._ids_between, self._lengths, self._ids_at = plan, ids_between, lengths, ids_at
        self._cached: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def rows(self, packs: NDArray[np.int64]) -> RowPieces:
        held, settings = self._plan.named, self._plan.settings
        windows = self._windows(packs)
        ends = held["row_ends"]
        begins_window = packs == held["packs_before"][windows]
        first = np.where(begins_window, 0, ends[packs - ~begins_window]).astype(np.int64)
        counts = ends[packs] - first
        rows, of_row = _spread(held["rows_before"][windows] + first, counts)
        places, windows = held["row_places"][rows].astype(np.int64), windows[of_row]
        positions = windows * settings.window + places
        ids = self._ids(windows, places) if self._ids_at is None else self._ids_at(positions)
        whole = lengths_of(self._lengths, ids, len(positions))
        starts, lengths = self._taken(rows, whole)
        are_ends = starts + lengths == whole
        return RowPieces(
            entries=of_row, positions=positions, ids=ids, starts=starts, lengths=lengths, are_ends=are_ends
        )

    def bounds(self, pack: int) -> tuple[int, int]:
        size = self._plan.settings.window
        window = int(self._windows(np.asarray([pack]))[0])
        return window * size, min((window + 1) * size, self._plan.num_positions)

    def _windows(self, packs: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._plan.named["packs_before"], packs, side="right") - 1

    def _taken(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where each row begins in its document, and how many tokens it has, from the documents' lengths."""
        settings: AnyPackSettings = self._plan.settings
        starts = np.zeros(len(rows), np.int64)
        if settings.longer != "split":
            return starts, np.minimum(lengths, settings.capacity)
        longer = np.flatnonzero(lengths > settings.capacity)
        if not longer.size:
            return starts, lengths
        piece_rows, numbers = self._plan.named["piece_rows"], self._plan.named["piece_numbers"]
        lengths, of_longer = lengths.copy(), lengths[longer]
        at = np.searchsorted(piece_rows, rows[longer])
        is_full = np.zeros(len(longer), np.bool_)
        inside = at < len(piece_rows)
        is_full[inside] = piece_rows[at[inside]] == rows[longer[inside]]
        # A row that is no full piece is the rest after all of them.
        pieces = of_longer // settings.capacity
        pieces[is_full] = numbers[at[is_full]]
        starts[longer] = pieces * settings.capacity
        lengths[longer] = np.minimum(of_longer - starts[longer], settings.capacity)
        return starts, lengths

    def _ids(self, windows: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return sample ids at places of windows."""
        needed, of_needed = np.unique(windows, return_inverse=True)
        if not needed.size:
            return np.zeros(0, np.int64)
        size = self._plan.settings.window
        missing = np.asarray([window for window in needed.tolist() if window not in self._cached])
        if missing.size:  # consecutive windows are loaded together
            first, stops = _joined(missing, missing + 1)
            counts = np.minimum(stops * size, self._plan.num_positions) - first * size
            ids = _ids_of_runs(self._ids_between, first * size, counts)
            # Only the epoch's last window may be shorter than the others.
            self._cached.update(zip(missing.tolist(), np.split(ids, np.arange(size, len(ids), size)), strict=True))
        for window in needed.tolist():
            self._cached.move_to_end(window)
        here = [self._cached[window] for window in needed.tolist()]
        before = np.cumsum([0, *map(len, here[:-1])])
        while len(self._cached) > max(_CACHED_IDS // size, 1):
            self._cached.popitem(last=False)
        return np.concatenate(here)[before[of_needed] + places]


def _spread(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of runs ``[first, first + count)``, one run after another, and the run of each number."""
    runs = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(runs)) + (firsts - np.cumsum(counts) + counts)[runs], runs


def _joined(firsts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge ranges in any order into the fewest ascending ones that do not touch."""
    in_order = np.argsort(firsts)
    firsts, stops = firsts[in_order], np.maximum.accumulate(stops[in_order])
    begins = np.ones(len(firsts), np.bool_)
    begins[1:] = firsts[1:] > stops[:-1]
    return firsts[begins], stops[np.append(np.flatnonzero(begins)[1:] - 1, len(stops) - 1)] if len(stops) else stops


def _ids_of_runs(ids_between: IdsBetween, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sample ids of runs of positions, one run after another."""
    runs = zip(firsts.tolist(), (firsts + counts).tolist(), strict=True)
    return np.concatenate([np.zeros(0, np.int64), *(ids_between(start, stop) for start, stop in runs)])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedPart:
    """A part of an epoch that is packed separately: all of it, or a mixture step."""

    order: EpochPart
    """The documents, by place."""
    first_position: int
    """The position of its first document among those of the epoch."""

    @property
    def num_slices(self) -> int:
        """Return the number of canonical nodes, at most that of documents."""
        return min(self.order.settings.num_canonical_nodes, len(self.order))

    def slice_starts(self) -> list[int]:
        """Return the place at which each slice begins, and the end of the last one."""
        return [number * len(self.order) // self.num_slices for number in range(self.num_slices + 1)]

    def positions(self, number: int, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of a slice's documents in the epoch without packing: slices are read in turn."""
        return self.first_position + documents * self.num_slices + number


class InTurn:
    """Several lists that are read in turn, one item of each at a time.

    Args:
        counts: Items in each list.
    """

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self._rounds = np.unique(np.append(counts, 0))  # rounds at which lists end
        lists = [np.flatnonzero(counts > first) for first in self._rounds[:-1].tolist()]
        self._num_lists = np.asarray(list(map(len, lists)), np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._num_lists * np.diff(self._rounds))])
        self._lists = np.concatenate(lists) if lists else np.empty(0, np.int64)
        self._firsts = np.cumsum(self._num_lists) - self._num_lists

    def __len__(self) -> int:
        return int(self._starts[-1])

    def find(self, entries: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the list of each entry, and the number of the item in it."""
        at = np.searchsorted(self._starts, entries, side="right") - 1
        rounds, turns = np.divmod(entries - self._starts[at], self._num_lists[at])
        return self._lists[self._firsts[at] + turns], self._rounds[at] + rounds


class PackedEpoch(Batched):
    """The packs of an epoch, which positions count.

    Args:
        parts: The parts of the epoch, one after another.
        plans: For each part, the plan of each of its slices.
        lengths: Returns the tokens of documents by sample id.
        multiple: Tokens of a unit of the plans; the last unit of a document may have fewer.
    """

    def __init__(
        self, parts: Sequence[PackedPart], plans: Sequence[Sequence[PackPlan]], lengths: Lengths, multiple: int = 1
    ) -> None:
        self._parts = list(parts)
        self._lengths, self._multiple = lengths, multiple
        lengths = _in_units(lengths, multiple)
        self._packs = [
            [
                Packs(plan, _ids_between(part.order, start, stop), lengths, partial(_ids_at, part.order, start))
                for plan, (start, stop) in zip(of_part, itertools.pairwise(part.slice_starts()), strict=False)
            ]
            for part, of_part in zip(parts, plans, strict=True)
        ]
        self._in_turn = [InTurn(np.asarray(list(map(len, of_part)))) for of_part in self._packs]
        self._stops = np.cumsum(list(map(len, self._in_turn)))
        self._lock = threading.Lock()  # prefetch threads read packs too

    def __len__(self) -> int:
        """Return the number of packs."""
        return int(self._stops[-1])

    @property
    def num_samples(self) -> int:
        """Number of packs, as places are packs."""
        return len(self)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of documents in all packs, with their own padding."""
        return self._multiple * sum(packs.num_tokens for of_part in self._packs for packs in of_part)

    @property
    def token_room(self) -> int:
        """Return the tokens that all packs have room for, with padding."""
        return self._multiple * sum(packs.token_room for of_part in self._packs for packs in of_part)

    @property
    def num_documents(self) -> int:
        """Return the documents that are drawn, with those that are left out of packs."""
        return sum(len(part.order) for part in self._parts)

    @property
    def rows_per_entry(self) -> float:
        """Documents per pack, on average."""
        return self.num_documents / max(1, len(self))

    def part_stops(self) -> NDArray[np.int64]:
        """Return the position at which each part ends."""
        return self._stops

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions: packs are read in the order of their numbers."""
        check_entries(positions, len(self))
        return positions

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample id of the first document of each pack.

        Raises:
            SampleIndexError: A position lies outside the epoch.
        """
        rows = self.pack_rows(positions.reshape(-1))
        _, firsts = np.unique(rows.entries, return_index=True)
        return rows.ids[firsts].reshape(positions.shape)

    @property
    def digest(self) -> str:
        """See :class:`~lightning_streaming.sequence.base.SampleSequence`."""
        return digest_of("packed", [part.order.digest for part in self._parts], len(self))

    def rows(self, entries: NDArray[np.int64]) -> Rows:
        """Return the documents and parts of documents of some packs."""
        pieces = self.pack_rows(entries)
        return Rows(pieces.positions, pieces.ids, pieces)

    def pack_rows(self, positions: NDArray[np.int64]) -> RowPieces:
        """Return the contents of some packs.

        Args:
            positions: Packs, of shape (packs,).

        Returns:
            The documents and parts of documents of one pack after another, in the order of ``positions``; their
            positions are those that the documents would have in the epoch without packing.

        Raises:
            SampleIndexError: A position lies outside the epoch.
        """
        check_entries(positions, len(self))
        parts = np.searchsorted(self._stops, positions, side="right")
        chunks = list[RowPieces]()
        for part in np.unique(parts).tolist():
            here = np.flatnonzero(parts == part)
            first = int(self._stops[part - 1]) if part else 0
            slices, numbers = self._in_turn[part].find(positions[here] - first)
            for number in np.unique(slices).tolist():
                of_slice = np.flatnonzero(slices == number)
                with self._lock:
                    rows = self._in_tokens(self._packs[part][number].rows(numbers[of_slice]))
                documents = self._parts[part].positions(number, rows.positions)
                chunks.append(replace(rows, entries=here[of_slice][rows.entries], positions=documents))
        if len(chunks) == 1:
            return chunks[0]
        names = [field.name for field in fields(RowPieces)]
        columns = {name: np.concatenate([getattr(rows, name) for rows in chunks]) for name in names}
        order = np.argsort(columns["entries"], kind="stable")
        return RowPieces(**{name: column[order] for name, column in columns.items()})

    def _in_tokens(self, rows: RowPieces) -> RowPieces:
        if self._multiple == 1:
            return rows
        starts = rows.starts * self._multiple
        left = lengths_of(self._lengths, rows.ids, len(rows.ids)) - starts
        return replace(rows, starts=starts, lengths=np.minimum(rows.lengths * self._multiple, left))


def _in_units(lengths: Lengths, multiple: int) -> Lengths:
    """Return the lengths of documents in units of some tokens, rounded up."""
    return lengths if multiple == 1 else lambda ids: -(-np.asarray(lengths(ids)).astype(np.int64) // multiple)


def _ids_between(order: EpochPart, start: int, stop: int) -> Callable[[int, int], NDArray[np.int64]]:
    """Return a function that returns sample ids of a slice of an order."""

    def ids_between(first: int, last: int) -> NDArray[np.int64]:
        return order.ids(np.arange(start + first, min(start + last, stop)))

    return ids_between


def _ids_at(order: EpochPart, start: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    return order.ids(start + places)


def plan_epoch(
    parts: Sequence[PackedPart],
    lengths: Lengths,
    settings: AnyPackSettings,
    progress: Callable[[int], object] | None = None,
) -> Iterator[list[PackPlan]]:
    """Yield the pack plans of each part.

    Args:
        parts: The parts of the epoch, one after another.
        lengths: Returns the tokens of documents by sample id.
        settings: How documents become packs.
        progress: Called with the number of further documents that are planned.

    Yields:
        For each part, the plan of each of its slices.

    Raises:
        ConfigError: A document is longer than a pack, and ``longer="error"``.
    """
    for number, part in enumerate(parts):
        yield [
            plan_packs(
                _ids_between(part.order, start, stop),
                stop - start,
                _in_units(lengths, settings.multiple),
                settings.in_units,
                seed=int(digest_of(part.order.settings.shuffle_seed, number, slice_number)[:15], 16),
                epoch=part.order.epoch,
                progress=progress,
            )
            for slice_number, (start, stop) in enumerate(itertools.pairwise(part.slice_starts()))
        ]
