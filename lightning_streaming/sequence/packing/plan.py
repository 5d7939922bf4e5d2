"""The plan of an epoch's packs: computed once from all lengths, kept in plain arrays, with random access.

    concat             tokens_before   int64    before each 256th document, and after the last
    best_fit, budget   packs_before    int64    before each window, and after the last
                       rows_before     int64    the same of rows: a row is what a pack takes of a document
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
from lightning_streaming.sequence.packing.best_fit import fill_windows_plainly
from lightning_streaming.sequence.packing.best_fit_compiled import Fill, compiled_fill, has_compiler
from lightning_streaming.sequence.packing.settings import AnyPackSettings, BudgetSettings
from lightning_streaming.sequence.packing.windows import WindowPacker

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
"""Documents from which on compiling takes less than it saves: with the import of numba, it takes some 2.5 seconds."""
_THREADS = 2

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
    """How it was made."""
    named: Mapping[str, NDArray[Any]]
    """Its arrays; see the head of this file."""

    @classmethod
    def of_arrays(cls, settings: AnyPackSettings, arrays: Mapping[str, NDArray[Any]]) -> PackPlan:
        """Return a plan from its stored arrays.

        Args:
            settings: Those that it was made with.
            arrays: What :meth:`arrays` gave; may be mapped read-only.

        Raises:
            FormatError: These are not the arrays of such a plan.
        """
        expected = _CONCAT if is_concat(settings) else _WINDOWED
        found = {name: array.dtype for name, array in arrays.items()}
        if found != {name: np.dtype(kind) for name, kind in expected.items()}:
            raise FormatError(
                f"a plan of {settings} has arrays {sorted(expected)}, but got {found}", hint="make it anew"
            )
        plan = cls(settings, {name: np.asarray(array) for name, array in arrays.items()})
        if not plan._is_whole():
            sizes = {name: array.shape for name, array in arrays.items()}
            raise FormatError(f"the arrays of a plan of {settings} do not go together: {sizes}", hint="make it anew")
        return plan

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return its arrays by name, each in one dimension."""
        return dict(self.named)

    def __len__(self) -> int:
        """Packs."""
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

    def _is_whole(self) -> bool:
        held = self.named
        if any(array.ndim != 1 for array in held.values()) or len(held["totals"]) != 3:
            return False
        if is_concat(self.settings):
            before = held["tokens_before"]
            return len(before) == -(-self.num_positions // BLOCK) + 1 and int(before[-1]) == self.num_tokens
        packs, rows = held["packs_before"], held["rows_before"]
        return (
            len(packs) == len(rows) == -(-self.num_positions // self.settings.window) + 1
            and int(packs[-1]) == len(held["row_ends"])
            and int(rows[-1]) == len(held["row_places"])
            and len(held["piece_rows"]) == len(held["piece_numbers"])
        )


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
        into: Where the arrays grow; None: in memory. Besides them it takes some 200 MiB, for any number of documents.
        compiled: Whether "best_fit" is compiled with numba, which makes no difference to the packs. None: where numba
            is installed and the documents are so many that it takes less time.
        threads: That plan windows.
        at_once: About how many documents are planned together, which makes no difference to the packs. None: as many as
            are quick.

    Raises:
        ConfigError: A document is longer than a pack, and ``longer="error"``; or ``lengths`` or ``ids_between`` gave
            something else than asked.
        MissingDependencyError: ``compiled`` is true, and numba is not installed.
    """
    arrays = GrowingArrays() if into is None else into
    documents = _Documents(ids_between, lengths, num_positions)
    if is_concat(settings):
        _plan_concat(documents, settings.capacity, at_once or _CHUNK, arrays, progress)
    else:
        fill = fill_windows_plainly if isinstance(settings, BudgetSettings) else _chosen_fill(num_positions, compiled)
        windows = max((at_once or _CHUNK) // settings.window, 1)
        _plan_windows(documents, WindowPacker(settings, seed, epoch, fill), windows, threads, arrays, progress)
    return PackPlan.of_arrays(settings, arrays.arrays())


def _chosen_fill(num_positions: int, compiled: bool | None) -> Fill:
    if compiled or (compiled is None and num_positions >= _WORTH_COMPILING and has_compiler()):
        try:
            return compiled_fill()
        except MissingDependencyError as error:
            if compiled:
                raise
            # An installed numba may not go with this numpy; the packs are the same without it.
            _log.warning("packs are planned without it, which takes longer: %s", error)
    return fill_windows_plainly


@dataclass(frozen=True, slots=True)
class _Documents:
    """Ids and lengths of documents, checked."""

    ids_between: IdsBetween
    lengths: Lengths
    num_positions: int

    def parts(self, size: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield, for several positions at a time, where the part ends, and the lengths of its documents."""
        for start in range(0, self.num_positions, size):
            stop = min(start + size, self.num_positions)
            yield stop, lengths_of(self.lengths, self.ids_between(start, stop), stop - start)


def lengths_of(lengths: Lengths, ids: NDArray[np.int64], expected: int) -> NDArray[np.int64]:
    """Return the lengths of samples, checked.

    Raises:
        ConfigError: They are not as many as expected, not whole numbers, or negative.
    """
    found = np.asarray(lengths(ids))
    if ids.shape != (expected,) or found.shape != (expected,):
        raise ConfigError(
            f"{expected} documents were asked about, but ids_between gave {ids.shape} ids and lengths {found.shape} "
            "numbers",
            hint="each must give one for each document",
            option="lengths",
        )
    if found.dtype.kind not in "iu":
        raise ConfigError(
            f"lengths must give whole numbers, but gave {found.dtype}", hint="count tokens", option="lengths"
        )
    of_ids = found.astype(np.int64, copy=False)
    if expected and of_ids.min() < 0:
        raise ConfigError(
            f"sample {ids[of_ids.argmin()]} has a length of {of_ids.min()} tokens",
            hint="lengths must not be negative",
            option="lengths",
            sample=int(ids[of_ids.argmin()]),
        )
    return of_ids


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
    """Plan several windows at a time, and append the results in order."""
    tail = _Tail(arrays, progress)
    for stop, part in _planned_parts(documents, packer, windows, threads):
        tail.append(stop, part)
    arrays.append("totals", np.asarray([documents.num_positions, tail.tokens, tail.room]))


def _planned_parts(
    documents: _Documents, packer: WindowPacker, windows: int, threads: int
) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
    """Yield, for several windows at a time, the position where they end, and their plan."""
    parts = documents.parts(windows * packer.settings.window)
    if documents.num_positions <= windows * packer.settings.window:  # beginning threads would take as long again
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


class _Tail:
    """The end of the arrays: numbers that a part counts from 0 are continued here."""

    def __init__(self, arrays: PlanArrays, progress: Callable[[int], object] | None) -> None:
        self._arrays = arrays
        self._progress = progress
        self.tokens = self.room = self._stop = 0
        self._before = {"packs_before": 0, "rows_before": 0}
        for name, kind in _WINDOWED.items():
            if name != "totals":
                arrays.append(name, np.zeros(int(name in self._before), kind))

    def append(self, stop: int, part: dict[str, NDArray[Any]]) -> None:
        """Append the plan up to a position."""
        self.tokens += int(part.pop("tokens"))
        self.room += int(part.pop("room"))
        part["piece_rows"] += self._before["rows_before"]
        for name, before in self._before.items():
            counts = np.cumsum(part[name])
            counts += before
            part[name] = counts
            self._before[name] = int(counts[-1])
        for name, array in part.items():
            self._arrays.append(name, array)
        if self._progress is not None:
            self._progress(stop - self._stop)
        self._stop = stop
