"""Base class of the steps of an epoch's order, and digests of their facts."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import SampleIndexError
from lightning_streaming.signatures import public


@public("sequence")
class SampleSequence(ABC):
    """Sample ids in an order, with random access: one step of the chain.

    A step of your own implements ``__len__`` and ``ids`` alone. *Entries* are what a step counts for itself.
    *Positions* are the entries of the batching step, which saved states count. Sequences up to the batching step have
    positions equal to entries; a sequence after it maps its entries to positions.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of entries."""

    @abstractmethod
    def ids(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids of entries in ``[0, len(self))``, of any shape."""

    @property
    def digest(self) -> str:
        """Digest of all that the ids depend on, 32 hexadecimal digits, known without drawing.

        Sequences of the user's steps need none: the facts of their step are used.
        """
        raise NotImplementedError(f"{type(self).__name__} has no digest")

    def positions(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of entries, of the same shape."""
        return entries

    def entries_before(self, position: int) -> int:
        """Return the number of entries before a position."""
        return position

    @property
    def end(self) -> int:
        """The position after all entries."""
        return len(self)

    def positions_after(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position after the last of so many entries."""
        return np.where(entries < len(self), self.positions(entries - 1) + 1, self.end)


def digest_of(*facts: object) -> str:
    """Return the digest of facts that JSON can hold, 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def check_entries(entries: NDArray[np.int64], length: int, called: str = "positions") -> None:
    """Check that entries are in ``[0, length)``.

    Raises:
        SampleIndexError: An entry is outside.
    """
    if entries.size and not (entries.min() >= 0 and entries.max() < length):
        raise SampleIndexError(f"{called} must be in [0, {length}), but range from {entries.min()} to {entries.max()}")
