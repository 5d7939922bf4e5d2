"""Windows of consecutive documents, packed each by itself: from lengths to the arrays of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.packing.best_fit_compiled import Fill
from lightning_streaming.sequence.packing.length_groups import grouped
from lightning_streaming.sequence.packing.settings import AnyPackSettings, BudgetSettings, PackSettings
from lightning_streaming.sequence.permutation import Permutations, numbered_keys

_PLACE_BITS = 16
_PLACES = (1 << _PLACE_BITS) - 1
_PURPOSE = 0x7061636B
"""Tells the keys of packs from other keys made of the same seed."""


@dataclass(frozen=True, slots=True)
class WindowPacker:
    """Packs windows that follow each other. May be used from several threads."""

    settings: AnyPackSettings
    seed: int
    epoch: int
    fill: Fill
    """Best fit."""

    def planned(self, lengths: NDArray[np.int64], first_window: int) -> dict[str, NDArray[Any]]:
        """The arrays of a plan, of these windows alone.

        Args:
            lengths: Tokens of the documents of whole windows; of the epoch's last window what there is.
            first_window: The number of the first of them in the epoch.

        Returns:
            The arrays of a plan by name, but with packs and rows *of* each window in place of those before it; rows of
            ``piece_rows`` count from 0; and ``tokens`` and ``room``, single numbers: those in packs, and those that
            packs have room for.
        """
        settings = self.settings
        here = lengths[lengths > settings.capacity]
        if here.size and settings.longer == "error":
            self._refuse(lengths, first_window)
        filled = (
            _group(lengths, settings)
            if isinstance(settings, BudgetSettings)
            else _best_fit(lengths, settings, self.fill)
        )
        tokens = int(lengths.sum())
        if settings.longer == "truncate":
            tokens -= int((here - settings.capacity).sum())
        elif settings.longer == "drop":
            tokens -= int(here.sum())
        arrays = _arranged(filled, first_window, self._key())
        return {**arrays, "tokens": np.asarray(tokens), "room": np.asarray(filled.room)}

    def _key(self) -> NDArray[np.uint64]:
        seeded = numbered_keys(np.asarray([self.seed], np.uint64), np.asarray([_PURPOSE]))
        return numbered_keys(seeded, np.asarray([self.epoch]))

    def _refuse(self, lengths: NDArray[np.int64], first_window: int) -> None:
        place = int((lengths > self.settings.capacity).argmax())
        is_budget = isinstance(self.settings, BudgetSettings)
        name, ways = ("tokens", "") if is_budget else ("capacity", "'split', ")
        raise ConfigError(
            f"the document at position {first_window * self.settings.window + place} of the epoch's order has "
            f"{lengths[place]} tokens, more than {name}={self.settings.capacity} with longer='error'",
            hint=f"pass longer={ways}'truncate' or 'drop', or a larger {name}",
            option="token_budget.longer" if is_budget else "packing.longer",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Filled:
    """Packs of several windows, counted over all of them as they were made."""

    num_packs: NDArray[np.int64]
    """Of each window."""
    row_packs: NDArray[np.int64]
    """Of each row, in no order: its pack."""
    row_places: NDArray[np.uint16]
    """Of each row: the place of its document in the window."""
    piece_numbers: NDArray[np.int64]
    """Of the last rows: they are full pieces of documents longer than a pack, and which ones of them."""
    room: int
    """Tokens that all packs have room for."""


def _best_fit(lengths: NDArray[np.int64], settings: PackSettings, fill: Fill) -> _Filled:
    capacity, num_windows = settings.capacity, -(-len(lengths) // settings.window)
    width = min(settings.window, len(lengths))
    whole = np.zeros(num_windows * width, np.int64)
    is_longer = lengths > capacity
    whole[: len(lengths)] = np.where(is_longer, _of_longer(lengths, settings), lengths)
    by_length, places = _longest_first(whole.reshape(num_windows, width), capacity)
    packs = fill(by_length, capacity)

    are_rows = by_length > 0
    counts = np.where(are_rows, packs, np.int32(-1)).max(axis=1).astype(np.int64) + 1
    longer = np.flatnonzero(is_longer) if settings.longer == "split" else np.zeros(0, np.int64)
    pieces = lengths[longer] // capacity
    piece_windows = np.repeat(longer // settings.window, pieces)
    num_packs = counts + np.bincount(piece_windows, minlength=num_windows)
    before = np.cumsum(num_packs) - num_packs
    numbers = np.arange(len(piece_windows))
    # The packs of full pieces follow the others of their window.
    first_of_window = np.searchsorted(piece_windows, np.arange(num_windows))
    piece_packs = (before + counts - first_of_window)[piece_windows] + numbers
    return _Filled(
        num_packs=num_packs,
        row_packs=np.concatenate([(before[:, None] + packs)[are_rows], piece_packs]),
        row_places=np.concatenate([places[are_rows], np.repeat(longer % settings.window, pieces).astype(np.uint16)]),
        piece_numbers=numbers - np.repeat(np.cumsum(pieces) - pieces, pieces),
        room=int(num_packs.sum()) * capacity,
    )


def _of_longer(lengths: NDArray[np.int64], settings: PackSettings) -> NDArray[np.int64] | int:
    """What is packed like a whole document of one that is longer than a pack."""
    if settings.longer == "split":
        return lengths % settings.capacity
    return settings.capacity if settings.longer == "truncate" else 0


def _longest_first(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
    """Sort each window, earlier documents before later ones of the same length; lengths, and places."""
    keys = (capacity - lengths).astype(np.uint32 if capacity <= _PLACES else np.uint64)
    keys <<= keys.dtype.type(_PLACE_BITS)
    keys |= np.arange(lengths.shape[1], dtype=keys.dtype)
    keys.sort(axis=1)
    places = keys.astype(np.uint16)
    keys >>= keys.dtype.type(_PLACE_BITS)
    by_length = keys.astype(np.int32)
    np.subtract(capacity, by_length, out=by_length)
    return by_length, places


def _group(lengths: NDArray[np.int64], settings: BudgetSettings) -> _Filled:
    kept = np.minimum(lengths, settings.tokens)
    if settings.longer == "drop":
        kept[lengths > settings.tokens] = 0
    documents, begins = grouped(kept, settings.window, settings.tokens, settings.buckets)
    windows, firsts = documents[begins] // settings.window, np.flatnonzero(begins)
    longest = np.maximum.reduceat(kept[documents], firsts) if firsts.size else firsts
    return _Filled(
        num_packs=np.bincount(windows, minlength=-(-len(lengths) // settings.window)),
        row_packs=np.cumsum(begins) - 1,
        row_places=(documents % settings.window).astype(np.uint16),
        piece_numbers=np.zeros(0, np.int64),
        room=int((longest * np.diff(firsts, append=len(documents))).sum()),
    )


def _arranged(filled: _Filled, first_window: int, key: NDArray[np.uint64]) -> dict[str, NDArray[Any]]:
    """Put the packs of each window in random order, and the rows of each pack in the epoch's order."""
    num_packs = filled.num_packs
    before = np.cumsum(num_packs) - num_packs
    windows = np.repeat(np.arange(len(num_packs)), num_packs)
    first = np.repeat(before, num_packs)
    keys = numbered_keys(np.broadcast_to(key, windows.shape), first_window + windows)
    turns = Permutations(num_packs).permuted(windows, np.arange(len(windows)) - first, keys)
    turns += first

    # Half as wide numbers are sorted twice as soon.
    rows = turns.astype(np.uint32 if len(turns) <= 1 << _PLACE_BITS else np.uint64)[filled.row_packs]
    rows <<= rows.dtype.type(_PLACE_BITS)
    rows |= filled.row_places
    num_pieces = len(filled.piece_numbers)
    piece_packs = rows[len(rows) - num_pieces :] >> rows.dtype.type(_PLACE_BITS)
    rows.sort()
    row_places = rows.astype(np.uint16)
    rows >>= rows.dtype.type(_PLACE_BITS)
    ends = np.cumsum(np.bincount(rows.astype(np.int64), minlength=len(windows)))
    row_stops = np.concatenate([[0], ends])[before + num_packs]
    num_rows = np.diff(row_stops, prepend=0)
    # A full piece is its pack's only row.
    piece_rows = ends[piece_packs] - 1
    in_order = np.argsort(piece_rows)
    return {
        "packs_before": num_packs,
        "rows_before": num_rows,
        "row_ends": (ends - np.repeat(row_stops - num_rows, num_packs)).astype(np.uint32),
        "row_places": row_places,
        "piece_rows": piece_rows[in_order],
        "piece_numbers": filled.piece_numbers[in_order].astype(np.uint32),
    }
