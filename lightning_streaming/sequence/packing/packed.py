"""An epoch of packs: documents are packed slice by slice, and the packs of all slices are read in turn.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.sequence.base import check_entries, digest_of
from lightning_streaming.sequence.batching import Batched
from lightning_streaming.sequence.draw import EpochPart
from lightning_streaming.sequence.packing.packs import PackRows, Packs
from lightning_streaming.sequence.packing.plan import Lengths, PackPlan, plan_packs
from lightning_streaming.sequence.packing.settings import AnyPackSettings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedPart:
    """A part of an epoch that is packed separately: all of it, or a mixture step."""

    order: EpochPart
    """Its documents, by place."""
    first_position: int
    """Where its documents begin among those of the epoch."""

    @property
    def num_slices(self) -> int:
        """Return the number of canonical nodes, at most that of documents."""
        return min(self.order.settings.num_canonical_nodes, len(self.order))

    def slice_starts(self) -> list[int]:
        """Return the place at which each slice begins, and the end of the last."""
        return [number * len(self.order) // self.num_slices for number in range(self.num_slices + 1)]

    def positions(self, number: int, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of a slice's documents in the epoch without packing: slices are read in turn."""
        return self.first_position + documents * self.num_slices + number


class InTurn:
    """Several lists that are read in turn, one item of each at a time.

    Args:
        counts: How many each list has.
    """

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self._rounds = np.unique(np.append(counts, 0))  # at which lists come to their ends
        lists = [np.flatnonzero(counts > first) for first in self._rounds[:-1].tolist()]
        self._num_lists = np.asarray([len(one) for one in lists], np.int64)
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
        parts: Its parts, one after another.
        plans: Of each part, of each of its slices.
        lengths: Tokens of documents, by sample id.
    """

    def __init__(self, parts: Sequence[PackedPart], plans: Sequence[Sequence[PackPlan]], lengths: Lengths) -> None:
        self._parts = list(parts)
        self._packs = [
            [
                Packs(plan, _ids_between(part.order, start, stop), lengths, _ids_at(part.order, start))
                for plan, start, stop in zip(of_part, part.slice_starts(), part.slice_starts()[1:], strict=False)
            ]
            for part, of_part in zip(parts, plans, strict=True)
        ]
        self._in_turn = [InTurn(np.asarray([len(one) for one in of_part])) for of_part in self._packs]
        self._stops = np.cumsum([len(one) for one in self._in_turn])
        self._lock = threading.Lock()  # whoever looks ahead asks too

    def __len__(self) -> int:
        """Packs."""
        return int(self._stops[-1])

    @property
    def num_samples(self) -> int:
        """Packs, too."""
        return len(self)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of documents in all packs."""
        return sum(one.num_tokens for of_part in self._packs for one in of_part)

    @property
    def token_room(self) -> int:
        """Return the tokens that all packs have room for, with padding."""
        return sum(one.token_room for of_part in self._packs for one in of_part)

    @property
    def num_documents(self) -> int:
        """Return the documents that are drawn, with those that are left out of packs."""
        return sum(len(part.order) for part in self._parts)

    @property
    def documents_per_pack(self) -> float:
        """On average."""
        return self.num_documents / max(1, len(self))

    def part_stops(self) -> NDArray[np.int64]:
        """Position at which each part ends."""
        return self._stops

    def steps_begun(self, position: int) -> int:
        """Return how many parts have begun at a position."""
        return min(int(np.searchsorted(self._stops, position, side="left")) + bool(position), len(self._stops))

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`Batched`: packs are read as they are numbered."""
        check_entries(positions, len(self))
        return positions

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample id of the first document of each pack.

        Raises:
            SampleIndexError: A position lies outside the epoch.
        """
        rows = self.rows(positions.reshape(-1))
        _, firsts = np.unique(rows.packs, return_index=True)
        return rows.ids[firsts].reshape(positions.shape)

    @property
    def digest(self) -> str:
        """See :class:`~lightning_streaming.sequence.base.SampleSequence`."""
        return digest_of("packed", [part.order.digest for part in self._parts], len(self))

    def rows(self, positions: NDArray[np.int64]) -> PackRows:
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
        found = list[PackRows]()
        for part in np.unique(parts).tolist():
            here = np.flatnonzero(parts == part)
            first = int(self._stops[part - 1]) if part else 0
            slices, numbers = self._in_turn[part].find(positions[here] - first)
            for number in np.unique(slices).tolist():
                of_slice = np.flatnonzero(slices == number)
                with self._lock:
                    rows = self._packs[part][number].rows(numbers[of_slice])
                documents = self._parts[part].positions(number, rows.positions)
                found.append(replace(rows, packs=here[of_slice][rows.packs], positions=documents))
        if len(found) == 1:
            return found[0]
        columns = {one.name: np.concatenate([getattr(rows, one.name) for rows in found]) for one in fields(PackRows)}
        order = np.argsort(columns["packs"], kind="stable")
        return PackRows(**{name: column[order] for name, column in columns.items()})


def _ids_between(order: EpochPart, start: int, stop: int) -> Callable[[int, int], NDArray[np.int64]]:
    """Return a function that returns sample ids of a slice of an order."""

    def ids_between(first: int, last: int) -> NDArray[np.int64]:
        return order.ids(np.arange(start + first, min(start + last, stop)))

    return ids_between


def _ids_at(order: EpochPart, start: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return a function that returns sample ids at places of a slice of an order."""
    return lambda places: order.ids(start + places)


def plan_epoch(
    parts: Sequence[PackedPart],
    lengths: Lengths,
    settings: AnyPackSettings,
    progress: Callable[[int], object] | None = None,
) -> Iterator[list[PackPlan]]:
    """Yield the pack plans of each part.

    Args:
        parts: One after another.
        lengths: Tokens of documents, by sample id.
        settings: How.
        progress: Called with the number of further documents that are planned.

    Yields:
        Of each part, the plan of each of its slices.

    Raises:
        ConfigError: A document is longer than a pack, and is not to be cut.
    """
    for number, part in enumerate(parts):
        starts = part.slice_starts()
        yield [
            plan_packs(
                _ids_between(part.order, start, stop),
                stop - start,
                lengths,
                settings,
                seed=int(digest_of(part.order.settings.shuffle_seed, number, slice_number)[:15], 16),
                epoch=part.order.epoch,
                progress=progress,
            )
            for slice_number, (start, stop) in enumerate(itertools.pairwise(starts))
        ]


class Rows(NamedTuple):
    """The samples of some entries of an epoch: one for each entry, or the documents and parts of documents of packs."""

    positions: NDArray[np.int64]
    """Where each would stand in an epoch without packing."""
    ids: NDArray[np.int64]
    pieces: PackRows | None = None
    """Of packs: which of those asked each is in, and which of its tokens."""

    def stops(self, num_entries: int) -> NDArray[np.int64]:
        """Return the number of rows up to the end of each entry."""
        if self.pieces is None:
            return np.arange(1, num_entries + 1)
        return np.searchsorted(self.pieces.packs, np.arange(num_entries), side="right")


def rows_of(sequence: Batched, entries: NDArray[np.int64]) -> Rows:
    """Return the samples of some entries of an epoch.

    Args:
        sequence: The epoch.
        entries: Their positions, of shape (entries,).
    """
    if isinstance(sequence, PackedEpoch):
        pieces = sequence.rows(entries)
        return Rows(pieces.positions, pieces.ids, pieces)
    return Rows(entries, sequence.ids(entries))


def rows_per_entry(sequence: Batched) -> float:
    """Return the number of samples per entry of an epoch, on average."""
    return sequence.documents_per_pack if isinstance(sequence, PackedEpoch) else 1.0
