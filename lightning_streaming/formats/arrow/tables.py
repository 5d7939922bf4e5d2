"""Whole columns of several Arrow record batches, of which the values of many rows are taken at once.

A dense column is numbers, or arrays of one shape: as many bytes in each row. A flat one is texts, bytes or arrays of
any length, by where they lie in one piece of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.arrow.arrays import DenseKind, Numbers
from lightning_streaming.formats.arrow.values import Binary, Coded, Text, numbers_of, reader_of
from lightning_streaming.formats.readers import FlatColumn

_SMALL = 1 << 20
"""Bytes of a batch's column below which all are copied into one: to go from batch to batch takes longer than that."""


@dataclass(frozen=True, slots=True)
class DenseColumn:
    """A column of numbers, or of arrays of one shape."""

    tables: tuple[NDArray[np.void], ...]
    """Of each batch the bytes of its values, of shape (rows,)."""
    firsts: NDArray[np.int64]
    """First row of each batch, among those of all."""
    value: np.dtype[Any]
    """Of a value, with its shape."""

    def take(self, indexes: NDArray[np.int64]) -> NDArray[Any]:
        """The values of some rows, of shape (rows, ...)."""
        found = np.empty(len(indexes), self.tables[0].dtype)
        self.take_into(indexes, found)
        return found.view(self.value.base).reshape(len(indexes), *self.value.shape)

    def take_into(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Write the bytes of some rows to an array of as many."""
        if len(self.tables) == 1:
            # "clip" writes to its place at once, unlike the other modes.
            self.tables[0].take(indexes, out=rows, mode="clip")
            return
        numbers = np.searchsorted(self.firsts, indexes, "right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            rows[places] = self.tables[number].take(indexes[places] - self.firsts[number])


def dense_column(kind: DenseKind, arrays: Sequence[Any], firsts: Sequence[int]) -> DenseColumn | None:
    """That of the arrays of some batches; None where a value is null, empty, or of another shape than the others.

    Args:
        kind: What the values are.
        arrays: One of each batch, none without rows.
        firsts: First row of each.
    """
    found = list[NDArray[Any]]()
    for array in arrays:
        values = kind.dense(array)
        if values is None or (found and found[0].shape[1:] != values.shape[1:]):
            return None
        found.append(np.ascontiguousarray(values))
    if not found:
        return None
    if len(found) > 1 and sum(one.nbytes for one in found) < _SMALL * len(found):
        found, firsts = [np.concatenate(found)], [0]
    value = np.dtype((found[0].dtype, found[0].shape[1:]))
    tables = (one.reshape(len(one), -1).view(np.uint8).view(f"V{value.itemsize}")[:, 0] for one in found)
    return DenseColumn(tuple(tables), np.array(firsts, np.int64), value)


def flat_column(
    kind: Numbers | Text | Binary, arrays: Sequence[Any], firsts: Sequence[int], data: memoryview | None
) -> FlatColumn:
    """Where texts, bytes or one-dimensional arrays lie; of texts and bytes as arrays of bytes.

    Args:
        kind: What the values are.
        arrays: One of each batch, none without rows.
        firsts: First row of each.
        data: What they lie in; where they do not, or it is not known, the values are copied together.

    Raises:
        EncodingError: A row is null or has a null.
    """
    dtype = kind.dtype if isinstance(kind, Numbers) else np.dtype(np.uint8)
    pieces, starts, counts = list[NDArray[Any]](), list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    for first, array in zip(firsts, arrays, strict=False):
        try:
            values, offsets = kind.flat(array)
        except EncodingError as error:
            raise EncodingError(f"in the rows from {first}: {error}") from error
        pieces.append(values[offsets[0] : offsets[-1]])
        starts.append((offsets[:-1] - offsets[0]).astype(np.int64) * dtype.itemsize)
        counts.append(np.diff(offsets).astype(np.int64))
    if not pieces:
        return FlatColumn(memoryview(b""), dtype, np.empty(0, np.int64), np.empty(0, np.int64))
    whole, begins = _together(pieces, data)
    starts = [one + begin for one, begin in zip(starts, begins, strict=True)]
    return FlatColumn(whole, dtype, np.concatenate(starts), np.concatenate(counts))


def _together(pieces: list[NDArray[Any]], data: memoryview | None) -> tuple[memoryview, list[int]]:
    """One piece of memory that holds all these, and the byte at which each begins in it."""
    if data is not None:
        whole = np.frombuffer(data, np.uint8)
        begins = [one.ctypes.data - whole.ctypes.data if one.size else 0 for one in pieces]
        if all(0 <= begin <= len(whole) - one.nbytes for begin, one in zip(begins, pieces, strict=True)):
            return data, begins
    ends = np.cumsum([one.nbytes for one in pieces]).tolist()
    copy: Any = (np.concatenate(pieces) if len(pieces) > 1 else pieces[0]).view(np.uint8)
    return memoryview(copy), [end - one.nbytes for end, one in zip(ends, pieces, strict=True)]


Taken = Callable[[NDArray[np.int64]], "NDArray[Any] | list[Any] | None"]
"""The values of some rows: an array of shape (rows, ...), or a list of texts or bytes."""


def taking_texts(column: FlatColumn, *, are_texts: bool) -> Taken:
    """What takes texts, or bytes, out of a flat column of them."""
    data, _, starts, counts = column
    stops = starts + counts

    def take(indexes: NDArray[np.int64]) -> list[Any]:
        places = zip(starts[indexes].tolist(), stops[indexes].tolist(), strict=True)
        if are_texts:
            return [str(data[start:stop], "utf-8") for start, stop in places]
        return [bytes(data[start:stop]) for start, stop in places]

    return take


def taking_coded(kind: Coded, array: Any) -> Taken:
    """What takes values that are stored once, however often they come, out of an array without nulls."""
    codes, read = numbers_of(array.indices, kind.index), reader_of(kind.value, array.dictionary)
    return lambda indexes: list(map(read, codes[indexes].tolist()))


def taking_arrays(column: FlatColumn) -> Taken:
    """What takes arrays that are all of one length out of a flat column; gives None where they are not."""
    data, dtype, starts, counts = column

    def take(indexes: NDArray[np.int64]) -> NDArray[Any] | None:
        sizes = counts[indexes]
        if not sizes[0] or (sizes != sizes[0]).any():
            return None
        size = int(sizes[0])
        return np.stack([np.frombuffer(data, dtype, size, start) for start in starts[indexes].tolist()])

    return take
