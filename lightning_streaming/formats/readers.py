"""Readers of shards: single samples, and many samples at once without decoding each.

Samples of nothing but numbers, and arrays of one shape, are :class:`PlainRows`: their bytes, one below the other, are a
table, of which nothing has to be decoded one by one::

    sample 0 | label int64 | pixels 2 x 3 x float32 |         columns: label    int64    (samples,)
    sample 1 | label int64 | pixels 2 x 3 x float32 |                  pixels   float32  (samples, 2, 3)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import SampleIndexError

Allocate = Callable[[Sequence[int], np.dtype[Any]], NDArray[Any]]
"""Returns an uninitialised array of a shape and a dtype, as ``numpy.empty`` does."""


class ShardReader(Protocol):
    """The samples of one shard, read from its raw files."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the sample at ``index`` in [0, len), as column name to value. It shares no memory with the shard.

        Raises:
            SampleIndexError: The index is out of range.
            FormatError: The sample's bytes are not what the format says.
        """
        ...

    def close(self) -> None:
        """Release the files; nothing can be read afterwards."""
        ...


def no_such_sample(shown: Path | str, count: int, index: int, path: str | None = None) -> SampleIndexError:
    """Return the error of an index that is out of range.

    Args:
        shown: The shard, as errors show it.
        count: Number of its samples.
        index: The index.
        path: The file, if it is not ``shown``.
    """
    message = f"{shown} has {count} samples, but sample {index} was requested"
    return SampleIndexError(message, path=path or str(shown), sample=index)


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Layout of such samples in their bytes. Equal layouts are one object, so that they compare by identity."""

    row: np.dtype[np.void]
    """A sample's bytes, as something that numpy copies whole."""
    columns: np.dtype[np.void]
    """The same bytes by requested column."""
    heads: tuple[tuple[int, bytes], ...]
    """The sizes and shapes that every sample must state, each with its position."""

    def are(self, rows: NDArray[np.void]) -> bool:
        """Return whether samples have this layout.

        Args:
            rows: Their bytes, of shape (samples,) and dtype :attr:`row`.
        """
        table = rows.view(np.uint8).reshape(len(rows), self.row.itemsize)
        heads = ((table[:, start : start + len(head)], head) for start, head in self.heads)
        return all(bool((actual == np.frombuffer(head, np.uint8)).all()) for actual, head in heads)

    @property
    def is_column(self) -> bool:
        """Whether samples consist of one column and nothing else, so that their bytes are its values."""
        kinds = [self.columns[name] for name in self.columns.names or ()]
        return len(kinds) == 1 and kinds[0].itemsize == self.row.itemsize

    def columns_of(self, rows: NDArray[np.void], empty: Allocate = np.empty) -> dict[str, NDArray[Any]]:
        """Return the columns of some samples, by name, each of shape (samples, ...); a copy unless it is the only one.

        Args:
            rows: The samples' bytes, of shape (samples,) and dtype :attr:`row`.
            empty: Returns the memory of copies.
        """
        table = rows.view(self.columns)
        columns = {name: table[name] for name in self.columns.names or ()}
        if self.is_column:
            return columns
        for name, part in columns.items():
            # Even of a single sample, which is contiguous already: it may be at any address.
            columns[name] = empty(part.shape, part.dtype)
            columns[name][...] = part
        return columns


@lru_cache(maxsize=1024)
def plain_rows(
    size: int, fields: tuple[tuple[str, int, np.dtype[Any]], ...], heads: tuple[tuple[int, bytes], ...] = ()
) -> PlainRows:
    """Return the only object of this layout.

    Args:
        size: Bytes of a sample.
        fields: The requested columns: name, first byte, and dtype, which has a shape if a value is an array.
        heads: See :attr:`PlainRows.heads`.
    """
    names, offsets, formats = zip(*fields, strict=True)
    table: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
    return PlainRows(np.dtype(f"V{size}"), np.dtype(table), heads)


class PlainReader(Protocol):
    """A shard whose samples may be plain."""

    def plain_rows(self) -> PlainRows | None:
        """Return the layout of the first sample, if it may be plain and all samples have the same size; else None."""
        ...

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy the bytes of some samples of a shard that has :meth:`plain_rows`.

        Args:
            indexes: Which samples, each in [0, len); of shape (samples,).
            rows: The destination; of shape (samples,), and the dtype of the plain rows.
        """
        ...


class ColumnReader(ABC):
    """A shard that can build batches column by column."""

    @abstractmethod
    def take(self, indexes: NDArray[np.int64]) -> dict[str, NDArray[Any] | list[Any]] | None:
        """Return the values of some samples, by column: arrays of shape (samples, ...), or lists of texts or of bytes.

        Args:
            indexes: Which samples, each in [0, len); of shape (samples,), at least one.

        Returns:
            Values that share no memory with the shard; None if these samples have to be decoded one by one.
        """


class FlatColumn(NamedTuple):
    """A column of one-dimensional arrays, by the positions of their values in the shard's file."""

    data: memoryview
    """The file, valid while its reader is open."""
    dtype: np.dtype[Any]
    starts: NDArray[np.int64]
    """Byte at which the values of each sample start."""
    counts: NDArray[np.int64]
    """Number of values of each sample."""


class FlatReader(Protocol):
    """A shard with columns of one-dimensional arrays."""

    def flat_column(self, name: str) -> FlatColumn:
        """Return the positions of the values of such a column.

        Raises:
            EncodingError: The column is not one of one-dimensional arrays.
        """
        ...
