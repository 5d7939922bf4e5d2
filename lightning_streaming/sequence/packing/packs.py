"""The contents of packs by number: tokens of documents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.sequence.base import check_entries
from lightning_streaming.sequence.packing.plan import BLOCK, IdsBetween, Lengths, PackPlan, is_concat, lengths_of
from lightning_streaming.sequence.packing.settings import AnyPackSettings, BudgetSettings

IdsAt = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Sample ids at positions of the epoch's order."""
_KEPT_IDS = 1 << 18
"""Sample ids of the last windows that are kept: two megabytes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackRows:
    """The contents of packs: arrays of one length, with an entry for each row. A row is a pack's part of a document."""

    packs: NDArray[np.int64]
    """Which of the packs that were asked for, counted from 0; rising."""
    positions: NDArray[np.int64]
    """The document's position in the epoch's order; rising within a pack."""
    ids: NDArray[np.int64]
    """The document's sample id."""
    starts: NDArray[np.int64]
    """The token of the document with which the row begins."""
    lengths: NDArray[np.int64]
    """Tokens; at least 1."""
    are_ends: NDArray[np.bool_]
    """Whether the document ends with the row."""

    def rooms(self, settings: AnyPackSettings) -> NDArray[np.int64]:
        """Tokens that each pack has room for, with those that pad it; of shape (packs,).

        Args:
            settings: How the packs were made, each of which has a row.
        """
        firsts = np.flatnonzero(np.diff(self.packs, prepend=-1))
        if not isinstance(settings, BudgetSettings) or not firsts.size:
            return np.full(len(firsts), settings.capacity)
        longest: NDArray[np.int64] = np.maximum.reduceat(self.lengths, firsts)
        return longest * np.diff(firsts, append=len(self.packs))


class Packs:
    """The packs of an epoch, with random access. Use it from one thread at a time.

    Args:
        plan: Of the same documents.
        ids_between: Gives sample ids in the epoch's order.
        lengths: Gives tokens of samples.
        ids_at: Gives sample ids at positions in any order, if that takes about as long for each as ``ids_between``.
            Without it, ids of whole windows are asked for, and those of the last ones kept.
    """

    def __init__(self, plan: PackPlan, ids_between: IdsBetween, lengths: Lengths, ids_at: IdsAt | None = None) -> None:
        self.plan = plan
        of_plan = _CutPacks if is_concat(plan.settings) else _WindowPacks
        self._reader = of_plan(plan, ids_between, lengths, ids_at)

    def __len__(self) -> int:
        """Packs."""
        return len(self.plan)

    @property
    def num_tokens(self) -> int:
        """Tokens in all packs."""
        return self.plan.num_tokens

    @property
    def token_room(self) -> int:
        """Tokens that all packs have room for."""
        return self.plan.token_room

    def rows(self, packs: NDArray[np.int64]) -> PackRows:
        """Return the contents of packs.

        Args:
            packs: In one dimension, any order, and maybe several times, each in ``[0, len(self))``.

        Raises:
            SampleIndexError: There is no such pack.
        """
        check_entries(packs, len(self), "packs")
        return self._reader.rows(np.asarray(packs, np.int64))

    def first_position(self, pack: int) -> int:
        """Return the position before which no document is needed by this pack or any after it.

        Args:
            pack: In ``[0, len(self)]``; ``len(self)`` has the position after all documents.

        Raises:
            SampleIndexError: There is no such pack.
        """
        check_entries(np.asarray([pack]), len(self) + 1, "packs")
        return self.plan.num_positions if pack == len(self) else self._reader.bounds(pack)[0]

    def last_position(self, pack: int) -> int:
        """Return the position before which all documents of this pack and of those before it lie.

        With windows, the end of the pack's window.

        Args:
            pack: In ``[0, len(self))``.

        Raises:
            SampleIndexError: There is no such pack.
        """
        check_entries(np.asarray([pack]), len(self), "packs")
        return self._reader.bounds(pack)[1]


class _CutPacks:
    """Packs of documents that are cut where packs end."""

    def __init__(self, plan: PackPlan, ids_between: IdsBetween, lengths: Lengths, ids_at: IdsAt | None) -> None:
        self._plan, self._ids_between, self._lengths, self._ids_at = plan, ids_between, lengths, ids_at
        self._tokens_before = plan.named["tokens_before"]

    def rows(self, packs: NDArray[np.int64]) -> PackRows:
        capacity = self._plan.settings.capacity
        begins = packs * capacity
        ends = np.minimum(begins + capacity, self._plan.num_tokens)
        positions, ids, starts, stops = self._documents(begins, ends)
        # Documents without tokens begin where the next one does: they are left out below.
        first = np.searchsorted(stops, begins, side="right")
        counts = np.searchsorted(starts, ends, side="left") - first
        documents, of_row = _spread(first, counts)
        row_starts = np.maximum(begins[of_row] - starts[documents], 0)
        lengths = np.minimum(ends[of_row], stops[documents]) - starts[documents] - row_starts
        held = lengths > 0
        return PackRows(
            packs=of_row[held],
            positions=positions[documents[held]],
            ids=ids[documents[held]],
            starts=row_starts[held],
            lengths=lengths[held],
            are_ends=(row_starts + lengths == stops[documents] - starts[documents])[held],
        )

    def bounds(self, pack: int) -> tuple[int, int]:
        positions = self.rows(np.asarray([pack])).positions
        return int(positions[0]), int(positions[-1]) + 1

    def _documents(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Positions, ids, and first and last token in the epoch, of all documents of the blocks that are needed."""
        first, last = _joined(
            np.searchsorted(self._tokens_before, begins, side="right") - 1,
            np.searchsorted(self._tokens_before, ends, side="left"),
        )
        firsts = first * BLOCK
        counts = np.minimum(last * BLOCK, self._plan.num_positions) - firsts
        positions, of_run = _spread(firsts, counts)
        ids = _ids_of_runs(self._ids_between, firsts, counts) if self._ids_at is None else self._ids_at(positions)
        lengths = lengths_of(self._lengths, ids, len(positions))
        starts = np.cumsum(lengths) - lengths
        starts += (self._tokens_before[first] - starts[np.cumsum(counts) - counts])[of_run]
        return positions, ids, starts, starts + lengths


class _WindowPacks:
    """Packs of windows that were packed separately."""

    def __init__(self, plan: PackPlan, ids_between: IdsBetween, lengths: Lengths, ids_at: IdsAt | None) -> None:
        self._plan, self._ids_between, self._lengths, self._ids_at = plan, ids_between, lengths, ids_at
        self._kept: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def rows(self, packs: NDArray[np.int64]) -> PackRows:
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
        return PackRows(packs=of_row, positions=positions, ids=ids, starts=starts, lengths=lengths, are_ends=are_ends)

    def bounds(self, pack: int) -> tuple[int, int]:
        size = self._plan.settings.window
        window = int(self._windows(np.asarray([pack]))[0])
        return window * size, min((window + 1) * size, self._plan.num_positions)

    def _windows(self, packs: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._plan.named["packs_before"], packs, side="right") - 1

    def _taken(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each row begins in its document, and how many tokens it has, from the documents' lengths."""
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
        # What is no full piece is the rest behind all of them.
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
        here = [self._kept[window] for window in self._keep(needed)]
        before = np.cumsum([0, *map(len, here[:-1])])
        ids = np.concatenate(here)[before[of_needed] + places]
        self._forget()
        return ids

    def _keep(self, needed: NDArray[np.int64]) -> list[int]:
        """Load the ids of these windows, consecutive ones together; they become the last used."""
        size, missing = self._plan.settings.window, np.asarray([one for one in needed if int(one) not in self._kept])
        if missing.size:
            first, stops = _joined(missing, missing + 1)
            counts = np.minimum(stops * size, self._plan.num_positions) - first * size
            ids = _ids_of_runs(self._ids_between, first * size, counts)
            # Only the epoch's last window may be shorter than the others.
            self._kept.update(zip(missing.tolist(), np.split(ids, np.arange(size, len(ids), size)), strict=True))
        names: list[int] = needed.tolist()
        for window in names:
            self._kept.move_to_end(window)
        return names

    def _forget(self) -> None:
        most = max(_KEPT_IDS // self._plan.settings.window, 1)
        while len(self._kept) > most:
            self._kept.popitem(last=False)


def _spread(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of runs ``[first, first + count)``, one run after another, and of each number its run."""
    runs = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(runs)) + (firsts - np.cumsum(counts) + counts)[runs], runs


def _joined(firsts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ranges in any order as few rising ones that do not touch."""
    in_order = np.argsort(firsts)
    firsts, stops = firsts[in_order], np.maximum.accumulate(stops[in_order])
    begins = np.ones(len(firsts), np.bool_)
    begins[1:] = firsts[1:] > stops[:-1]
    return firsts[begins], stops[np.append(np.flatnonzero(begins)[1:] - 1, len(stops) - 1)] if len(stops) else stops


def _ids_of_runs(ids_between: IdsBetween, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sample ids of runs of positions, one run after another."""
    runs = zip(firsts.tolist(), (firsts + counts).tolist(), strict=True)
    return np.concatenate([np.zeros(0, np.int64), *(ids_between(start, stop) for start, stop in runs)])
