"""The plan of an epoch's packs: computed once from all lengths, kept in plain arrays, with random access.

PackPlan       the arrays
plan_packs     computes them
WindowPacker   packs some windows of consecutive documents, each separately

    concat             tokens_before   int64    before each 256th document, and after the last
    best_fit, budget   packs_before    int64    before each window, and after the last
                       rows_before     int64    the same of rows: a row is the part of a document in a pack
                       row_ends        uint32   of each pack: rows of its window up to its last
                       row_places      uint16   of each row: its document's place in the window
                       piece_rows      int64    rows, rising, that are full pieces of documents longer than a pack
                       piece_numbers   uint32   of each of these: which piece of its document
    all                totals          int64    documents, tokens in packs, and tokens that these have room for

So readers never pack again: a plan takes two bytes for each document, and four for each pack. Several windows are
planned at a time, in threads, and their parts of the arrays are appended in order; which windows are planned together
makes no difference to the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, FormatError, MissingDependencyError
from lightning_streaming.escaping import package_logger
from lightning_streaming.sequence.packing.fill import (
    ANY_NUMBER,
    Fill,
    compiled_fill,
    fill_windows_in_python,
    grouped,
    has_compiler,
)
from lightning_streaming.sequence.packing.settings import AnyPackSettings, BudgetSettings, PackSettings
from lightning_streaming.sequence.permutation import Permutations, numbered_keys

_log = package_logger(__name__)
BLOCK = 256
"""Documents between two entries of ``tokens_before``."""
_CONCAT = {"tokens_before": np.int64, "totals": np.int64}
_WINDOWED = {
    "packs_before": np.int64,
    "rows_before": np.int64,
    "row_ends": np.uint32,
    "row_places": np.uint16,
    "piece_rows": np.int64,
    "piece_numbers": np.uint32,
    "totals": np.int64,
}
_CHUNK = 1 << 19
"""Documents planned together: some 100 bytes for each are needed meanwhile."""
_WORTH_COMPILING = 1 << 23
"""Documents from which compiling takes less time than it saves: with the import of numba, it takes some 2.5 seconds."""
_THREADS = 2
_AGAIN = "plan the packs again"
_PLACE_BITS = 16
_PLACES = (1 << _PLACE_BITS) - 1
_PURPOSE = 0x7061636B
"""Distinguishes the keys of packs from other keys derived from the same seed."""

IdsBetween = Callable[[int, int], NDArray[np.int64]]
"""Sample ids at the positions ``[start, stop)`` of the epoch's order."""
Lengths = Callable[[NDArray[np.int64]], NDArray[np.integer[Any]]]
"""Tokens of each of these samples."""


class PlanArrays(Protocol):
    """Storage of a plan's arrays while they grow, in files or in memory."""

    def append(self, name: str, array: NDArray[Any]) -> None:
        """Append to the array of this name. Each name occurs at least once, possibly with an empty array."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole arrays; called once, after everything was appended."""


class GrowingArrays:
    """Arrays of a plan that grow in this process's memory."""

    def __init__(self) -> None:
        self._parts: dict[str, NDArray[Any]] = {}
        self._sizes: dict[str, int] = {}

    def append(self, name: str, array: NDArray[Any]) -> None:
        """See :class:`PlanArrays`."""
        held = self._parts.setdefault(name, np.empty(0, array.dtype))
        size = self._sizes.get(name, 0)
        self._sizes[name] = size + len(array)
        if self._sizes[name] > len(held):
            held.resize(self._sizes[name] + (self._sizes[name] >> 3), refcheck=False)
        held[size : self._sizes[name]] = array

    def arrays(self) -> dict[str, NDArray[Any]]:
        """See :class:`PlanArrays`."""
        for name, held in self._parts.items():
            held.resize(self._sizes[name], refcheck=False)
        return dict(self._parts)


@dataclass(frozen=True, slots=True, eq=False)
class PackPlan:
    """The documents of each pack of an epoch, as plain arrays.

    :class:`~lightning_streaming.sequence.packing.packs.Packs` reads it.
    """

    settings: AnyPackSettings
    """The settings that it was computed with."""
    named: Mapping[str, NDArray[Any]]
    """Its arrays by name; see the top of this file."""

    @classmethod
    def of_arrays(cls, settings: AnyPackSettings, arrays: Mapping[str, NDArray[Any]]) -> PackPlan:
        """Return a plan from its stored arrays.

        Args:
            settings: The settings that it was computed with.
            arrays: The result of :meth:`arrays`; may be mapped read-only.

        Raises:
            FormatError: These are not the arrays of such a plan.
        """
        expected = _CONCAT if is_concat(settings) else _WINDOWED
        dtypes = {name: array.dtype for name, array in arrays.items()}
        if dtypes != {name: np.dtype(kind) for name, kind in expected.items()}:
            raise FormatError(f"a plan of {settings} has arrays {sorted(expected)}, but got {dtypes}", hint=_AGAIN)
        plan = cls(settings, {name: np.asarray(array) for name, array in arrays.items()})
        named, sizes = plan.named, {name: array.shape for name, array in arrays.items()}
        is_whole = all(len(shape) == 1 for shape in sizes.values()) and sizes["totals"] == (3,)
        if is_whole and is_concat(settings):
            before = named["tokens_before"]
            is_whole = len(before) == -(-plan.num_positions // BLOCK) + 1 and int(before[-1]) == plan.num_tokens
        elif is_whole:
            packs, rows = named["packs_before"], named["rows_before"]
            is_whole = (
                len(packs) == len(rows) == -(-plan.num_positions // settings.window) + 1
                and int(packs[-1]) == len(named["row_ends"])
                and int(rows[-1]) == len(named["row_places"])
                and len(named["piece_rows"]) == len(named["piece_numbers"])
            )
        if not is_whole:
            raise FormatError(f"the arrays of a plan of {settings} do not fit each other: {sizes}", hint=_AGAIN)
        return plan

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return its arrays by name, each in one dimension."""
        return dict(self.named)

    def __len__(self) -> int:
        """Return the number of packs."""
        if is_concat(self.settings):
            return -(-self.num_tokens // self.settings.capacity)
        return int(self.named["packs_before"][-1])

    @property
    def num_positions(self) -> int:
        """Return the documents of the epoch, with those that are left out."""
        return int(self.named["totals"][0])

    @property
    def num_tokens(self) -> int:
        """Return the tokens in all packs."""
        return int(self.named["totals"][1])

    @property
    def token_room(self) -> int:
        """Return the tokens that all packs have room for, with padding."""
        return int(self.named["totals"][2])


def is_concat(settings: AnyPackSettings) -> bool:
    """Return whether documents are cut where packs end, so that there are no windows."""
    return not isinstance(settings, BudgetSettings) and settings.method == "concat"


def plan_packs(
    ids_between: IdsBetween,
    num_positions: int,
    lengths: Lengths,
    settings: AnyPackSettings,
    seed: int,
    epoch: int,
    progress: Callable[[int], object] | None = None,
    *,
    into: PlanArrays | None = None,
    compiled: bool | None = None,
    threads: int = _THREADS,
    at_once: int | None = None,
) -> PackPlan:
    """Plan the packs of an epoch.

    Args:
        ids_between: Gives sample ids in the epoch's order; called in this thread, from the first position to the last.
        num_positions: Documents of the epoch.
        lengths: Gives tokens of samples, not negative; called in this thread.
        settings: How documents become packs.
        seed: Of the order of packs; at least 0.
        epoch: Counts from 0; each has another order of packs.
        progress: Called after each part with the number of further positions that are planned, in this thread.
        into: Where the arrays grow; None: in memory. Planning takes 200 MiB more, for any number of documents.
        compiled: Compile "best_fit" with numba, which makes no difference to the packs. None: if numba is installed and
            there are enough documents for it to take less time.
        threads: Threads that plan windows.
        at_once: About how many documents are planned together, which makes no difference to the packs. None: as many as
            are fast.

    Raises:
        ConfigError: A document is longer than a pack, and ``longer="error"``; or ``lengths`` or ``ids_between``
            returned another number of values than requested.
        MissingDependencyError: ``compiled`` is true, and numba is not installed.
    """
    arrays = GrowingArrays() if into is None else into
    documents = _Documents(ids_between, lengths, num_positions)
    if is_concat(settings):
        _plan_concat(documents, settings.capacity, at_once or _CHUNK, arrays, progress)
    else:
        fill: Fill = fill_windows_in_python
        many = compiled is None and num_positions >= _WORTH_COMPILING and has_compiler()
        if (compiled or many) and not isinstance(settings, BudgetSettings):
            try:
                fill = compiled_fill()
            except MissingDependencyError as error:
                if compiled:
                    raise
                # An installed numba may not work with this numpy; the packs are the same without it.
                _log.warning("packs are planned without it, which takes longer: %s", error)
        windows = max((at_once or _CHUNK) // settings.window, 1)
        _plan_windows(documents, WindowPacker(settings, seed, epoch, fill), windows, threads, arrays, progress)
    return PackPlan.of_arrays(settings, arrays.arrays())


@dataclass(frozen=True, slots=True)
class _Documents:
    """The documents of an epoch's order, with their ids and lengths."""

    ids_between: IdsBetween
    lengths: Lengths
    num_positions: int

    def parts(self, size: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield, for several positions at a time, the position after them, and the lengths of their documents."""
        for start in range(0, self.num_positions, size):
            stop = min(start + size, self.num_positions)
            yield stop, lengths_of(self.lengths, self.ids_between(start, stop), stop - start)


def lengths_of(lengths: Lengths, ids: NDArray[np.int64], expected: int) -> NDArray[np.int64]:
    """Return the lengths of samples.

    Raises:
        ConfigError: They are of another number than expected, not whole, or negative.
    """
    counts: NDArray[Any] = np.asarray(lengths(ids))
    if ids.shape != (expected,) or counts.shape != (expected,):
        raise ConfigError(
            f"lengths of {expected} documents are needed, but ids_between returned {ids.shape} ids and lengths "
            f"{counts.shape} numbers",
            hint="return one for each document",
            option="lengths",
        )
    if counts.dtype.kind not in "iu":
        raise ConfigError(
            f"lengths must return whole numbers, but returned {counts.dtype}", hint="count tokens", option="lengths"
        )
    counts = counts.astype(np.int64, copy=False)
    if expected and counts.min() < 0:
        shortest = int(ids[counts.argmin()])
        raise ConfigError(
            f"sample {shortest} has a length of {counts.min()} tokens",
            hint="lengths must not be negative",
            option="lengths",
            sample=shortest,
        )
    return counts


def _plan_concat(
    documents: _Documents, capacity: int, at_once: int, arrays: PlanArrays, progress: Callable[[int], object] | None
) -> None:
    total = 0
    arrays.append("tokens_before", np.zeros(1, np.int64))
    for _, lengths in documents.parts(-(-at_once // BLOCK) * BLOCK):
        sums = np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK), dtype=np.int64)
        arrays.append("tokens_before", total + np.cumsum(sums))
        total += int(sums.sum())
        if progress is not None:
            progress(len(lengths))
    room = -(-total // capacity) * capacity
    arrays.append("totals", np.asarray([documents.num_positions, total, room]))


def _plan_windows(
    documents: _Documents,
    packer: WindowPacker,
    windows: int,
    threads: int,
    arrays: PlanArrays,
    progress: Callable[[int], object] | None,
) -> None:
    """Plan several windows at a time, and append the results in order; counts of a part begin at 0, and continue."""
    before = {"packs_before": 0, "rows_before": 0}
    for name, kind in _WINDOWED.items():
        if name != "totals":
            arrays.append(name, np.zeros(int(name in before), kind))
    tokens = room = planned = 0
    for stop, part in _planned_parts(documents, packer, windows, threads):
        tokens += int(part.pop("tokens"))
        room += int(part.pop("room"))
        part["piece_rows"] += before["rows_before"]
        for name in before:
            counts = np.cumsum(part[name])
            counts += before[name]
            part[name], before[name] = counts, int(counts[-1])
        for name, array in part.items():
            arrays.append(name, array)
        if progress is not None:
            progress(stop - planned)
        planned = stop
    arrays.append("totals", np.asarray([documents.num_positions, tokens, room]))


def _planned_parts(
    documents: _Documents, packer: WindowPacker, windows: int, threads: int
) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
    """Yield, for several windows at a time, the position after them, and their plan."""
    parts = documents.parts(windows * packer.settings.window)
    if documents.num_positions <= windows * packer.settings.window:  # threads would take longer to start
        yield from ((stop, packer.planned(lengths, 0)) for stop, lengths in parts)
        return
    waiting: deque[tuple[int, Future[dict[str, NDArray[Any]]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="pack-plan") as pool:
        for number, (stop, lengths) in enumerate(parts):
            waiting.append((stop, pool.submit(packer.planned, lengths, number * windows)))
            if len(waiting) > threads:
                stop, future = waiting.popleft()
                yield stop, future.result()
        for stop, future in waiting:
            yield stop, future.result()


@dataclass(frozen=True, slots=True)
class WindowPacker:
    """Packs windows of consecutive documents, each separately; for use from several threads."""

    settings: AnyPackSettings
    seed: int
    epoch: int
    fill: Fill
    """Puts the documents of a window into packs, by best fit."""

    def planned(self, lengths: NDArray[np.int64], first_window: int) -> dict[str, NDArray[Any]]:
        """Return the arrays of a plan, for some windows alone.

        Args:
            lengths: Tokens of the documents of whole windows; the last window of the epoch may have fewer.
            first_window: The number of the first window in the epoch.

        Returns:
            The arrays of a plan by name, but with the packs and rows *of* each window instead of those before it; rows
            of ``piece_rows`` count from 0. Also ``tokens`` and ``room``, single numbers: the tokens in packs, and those
            that packs have room for.

        Raises:
            ConfigError: A document is longer than a pack, and ``longer="error"``.
        """
        settings = self.settings
        here = lengths[lengths > settings.capacity]
        if here.size and settings.longer == "error":
            place = int((lengths > settings.capacity).argmax())
            is_budget = isinstance(settings, BudgetSettings)
            name, choices = ("tokens", "") if is_budget else ("capacity", "'split', ")
            raise ConfigError(
                f"the document at position {first_window * settings.window + place} of the epoch's order has "
                f"{lengths[place]} tokens, more than {name}={settings.capacity} with longer='error'",
                hint=f"pass longer={choices}'truncate' or 'drop', or a larger {name}",
                option="token_budget.longer" if is_budget else "packing.longer",
            )
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
        seeded = numbered_keys(np.asarray([self.seed], np.uint64), np.asarray([_PURPOSE]))
        arrays = _arranged(filled, first_window, numbered_keys(seeded, np.asarray([self.epoch])))
        return {**arrays, "tokens": np.asarray(tokens), "room": np.asarray(filled.room)}


@dataclass(frozen=True, slots=True, eq=False)
class _Filled:
    """The packs of several windows, numbered over all of them in the order in which they were filled."""

    num_packs: NDArray[np.int64]
    """The number of packs of each window."""
    row_packs: NDArray[np.int64]
    """The pack of each row; rows are in no order."""
    row_places: NDArray[np.uint16]
    """The place of each row's document in the window."""
    piece_numbers: NDArray[np.int64]
    """The last rows are full pieces of documents longer than a pack: the number of the piece in its document."""
    room: int
    """Tokens that all packs have room for."""


def _best_fit(lengths: NDArray[np.int64], settings: PackSettings, fill: Fill) -> _Filled:
    capacity, num_windows = settings.capacity, -(-len(lengths) // settings.window)
    width = min(settings.window, len(lengths))
    whole = np.zeros(num_windows * width, np.int64)
    is_longer = lengths > capacity
    # The part of a longer document that is packed like a whole one.
    rest = lengths % capacity if settings.longer == "split" else capacity if settings.longer == "truncate" else 0
    whole[: len(lengths)] = np.where(is_longer, rest, lengths)
    by_length, places = _longest_first(whole.reshape(num_windows, width), capacity)
    packs = fill(by_length, capacity, settings.max_documents or ANY_NUMBER)

    are_rows = by_length > 0
    counts = np.where(are_rows, packs, np.int32(-1)).max(axis=1).astype(np.int64) + 1
    longer = np.flatnonzero(is_longer) if settings.longer == "split" else np.zeros(0, np.int64)
    pieces = lengths[longer] // capacity
    piece_windows = np.repeat(longer // settings.window, pieces)
    num_packs = counts + np.bincount(piece_windows, minlength=num_windows)
    before = np.cumsum(num_packs) - num_packs
    numbers = np.arange(len(piece_windows))
    # The packs of full pieces follow the other packs of their window.
    first_of_window = np.searchsorted(piece_windows, np.arange(num_windows))
    piece_packs = (before + counts - first_of_window)[piece_windows] + numbers
    return _Filled(
        num_packs=num_packs,
        row_packs=np.concatenate([(before[:, None] + packs)[are_rows], piece_packs]),
        row_places=np.concatenate([places[are_rows], np.repeat(longer % settings.window, pieces).astype(np.uint16)]),
        piece_numbers=numbers - np.repeat(np.cumsum(pieces) - pieces, pieces),
        room=int(num_packs.sum()) * capacity,
    )


def _longest_first(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
    """Sort the documents of each window, earlier before later ones of the same length; return lengths and places."""
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

    # Numbers of half the width are sorted twice as fast.
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
