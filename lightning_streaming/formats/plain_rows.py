"""Many samples at once, without a look at each: rows of a table, and arrays that follow each other in a file.

Samples of nothing but numbers, and arrays of one shape, are :class:`PlainRows`: their bytes, one below the other, are a
table, of which nothing need be decoded one by one::

    sample 0 | label int64 | pixels 2 x 3 x float32 |         columns: label    int64    (samples,)
    sample 1 | label int64 | pixels 2 x 3 x float32 |                  pixels   float32  (samples, 2, 3)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PlainRows:
    """How such samples lie in their bytes. There is but one of each kind, so that kinds compare by identity."""

    row: np.dtype[np.void]
    """A sample's bytes, as something that numpy copies whole."""
    columns: np.dtype[np.void]
    """The same bytes by wanted column."""
    heads: tuple[tuple[int, bytes], ...]
    """What every sample has to say of its sizes and shapes, and where."""

    def are(self, rows: NDArray[np.void]) -> bool:
        """Whether samples lie like that.

        Args:
            rows: Their bytes, of shape (samples,) and dtype :attr:`row`.
        """
        table = rows.view(np.uint8).reshape(len(rows), self.row.itemsize)
        found = ((table[:, start : start + len(head)], head) for start, head in self.heads)
        return all(bool((said == np.frombuffer(head, np.uint8)).all()) for said, head in found)

    def columns_of(self, rows: NDArray[np.void]) -> dict[str, NDArray[Any]]:
        """The columns of some samples, by name, each of shape (samples, ...); a copy unless a column is all there is.

        Args:
            rows: The samples' bytes, of shape (samples,) and dtype :attr:`row`.
        """
        table = rows.view(self.columns)
        columns = {name: table[name] for name in self.columns.names or ()}
        # Even of a single sample, which is contiguous as it is: it may lie at any address.
        return {name: one if one.nbytes == table.nbytes else one.copy() for name, one in columns.items()}


@lru_cache(maxsize=1024)
def plain_rows(
    size: int, fields: tuple[tuple[str, int, np.dtype[Any]], ...], heads: tuple[tuple[int, bytes], ...] = ()
) -> PlainRows:
    """The one of its kind.

    Args:
        size: Bytes of a sample.
        fields: The wanted columns: name, first byte, and dtype, which is one with a shape where a value is an array.
        heads: See :attr:`PlainRows.heads`.
    """
    names, offsets, formats = zip(*fields, strict=True)
    table: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
    return PlainRows(np.dtype(f"V{size}"), np.dtype(table), heads)


class PlainReader(Protocol):
    """A shard whose samples may be plain."""

    def plain_rows(self) -> PlainRows | None:
        """How the first sample lies in its bytes, if it may be plain and all samples have as many; else None."""
        ...

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy the bytes of some samples of a shard that has :meth:`plain_rows`.

        Args:
            indexes: Which samples, each in [0, len); of shape (samples,).
            rows: Where to; of shape (samples,), and the dtype of the plain rows.
        """
        ...


class ColumnReader(ABC):
    """A shard of which batches can be made column by column."""

    @abstractmethod
    def take(self, indexes: NDArray[np.int64]) -> dict[str, NDArray[Any] | list[Any]] | None:
        """The values of some samples, by column: an array of shape (samples, ...), or a list of texts or of bytes.

        Args:
            indexes: Which samples, each in [0, len); of shape (samples,), at least one.

        Returns:
            Values that share no memory with the shard; None where these samples need a look at each.
        """


class FlatColumn(NamedTuple):
    """A column of one-dimensional arrays, by where their values lie in the shard's file."""

    data: memoryview
    """The file, as long as its reader is open."""
    dtype: np.dtype[Any]
    starts: NDArray[np.int64]
    """Byte at which the values of each sample start."""
    counts: NDArray[np.int64]
    """How many there are."""


class FlatReader(Protocol):
    """A shard with columns of one-dimensional arrays."""

    def flat_column(self, name: str) -> FlatColumn:
        """Where the values of such a column lie.

        Raises:
            EncodingError: It is not one.
        """
        ...
