"""What every step of an epoch's order answers, so that each can stand on another."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import SampleIndexError


class SampleSequence(ABC):
    """Sample ids in an order, at random access: one step of the chain.

    A step of your own implements ``__len__`` and ``ids`` alone. *Entries* are what a step counts for itself.
    *Positions* are the entries of the batching step, which saved states count. Sequences up to the batching step have
    positions equal to entries; a sequence after it maps its entries to positions.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Entries."""

    @abstractmethod
    def ids(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids of entries in ``[0, len(self))``, of any shape."""

    @property
    def digest(self) -> str:
        """32 hexadecimal digits: a name of all that the ids depend on, known without drawing.

        Sequences of the user's steps need none: the facts of their step are used.
        """
        raise NotImplementedError(f"{type(self).__name__} has no digest")

    def positions(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of entries, of the same shape."""
        return entries

    def entries_before(self, position: int) -> int:
        """Entries that lie before a position."""
        return position

    @property
    def end(self) -> int:
        """The position after all entries."""
        return len(self)

    def positions_after(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where readers stand who have read so many entries: right after the last one."""
        return np.where(entries < len(self), self.positions(entries - 1) + 1, self.end)


def digest_of(*facts: object) -> str:
    """A name of facts that JSON can hold: 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def check_entries(entries: NDArray[np.int64], length: int, called: str = "positions") -> None:
    """Refuse entries outside ``[0, length)``.

    Raises:
        SampleIndexError: There is one.
    """
    if entries.size and not (entries.min() >= 0 and entries.max() < length):
        raise SampleIndexError(f"{called} must be in [0, {length}), but range from {entries.min()} to {entries.max()}")
