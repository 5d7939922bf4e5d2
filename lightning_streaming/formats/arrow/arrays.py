"""Arrow's columns of arrays: lists of numbers, and lists of lists that are arrays of several dimensions.

They are read as numpy arrays; where all of a batch are of one shape, the batch is one array of all::

    list<int32>     offsets  0   2   4   6            dense    [[7, 8],
                    values   7 8 9 1 2 5                        [9, 1],
                                                                [2, 5]]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats.arrow.values import (
    ArrowKind,
    Lists,
    Read,
    are_there_in,
    numbers_of,
    quick,
    stored,
)
from lightning_streaming.formats.encodings import encoding


@runtime_checkable
class DenseKind(ArrowKind, Protocol):
    """Numbers, or arrays of them."""

    def dense(self, array: Any) -> NDArray[Any] | None:
        """All values as one array of shape (rows, ...); None where they are null, empty, or not of one shape."""
        ...


def _null_inside(where: str = "") -> EncodingError:
    return EncodingError(
        f"{where}expected numbers, but found a null among them",
        hint="leave the column out with columns=[...], or write another number in its place",
    )


@dataclass(frozen=True, slots=True)
class Numbers:
    """A one-dimensional array; or one of more dimensions, all but the first of which are fixed."""

    lists: Lists
    dtype: np.dtype[Any]
    inner: tuple[int, ...] = ()
    """Shape of what a list holds."""
    final: tuple[int, ...] | None = None
    """Shape of a value, where lists are of one size, and it is another one."""
    axes: tuple[int, ...] | None = None
    """How to turn the axes of that; None to leave them."""

    @property
    def encoding(self) -> str | None:
        shape: tuple[int | None, ...] = self.final or (self.lists.size, *self.inner)
        return _encoding(self.dtype, shape if self.axes is None else tuple(shape[axis] for axis in self.axes))

    def read(self, array: Any) -> Read:
        values, are_there = self._elements(self.lists.values(array))
        if self.lists.size is not None:
            table = self._table(values, len(array))
            if are_there is None:
                return lambda row: table[row].copy()
        offsets = quick(self.lists.offsets(array))
        if are_there is None:
            return lambda row: values[offsets[row] : offsets[row + 1]].copy()

        def read(row: int) -> NDArray[Any]:
            start, stop = offsets[row], offsets[row + 1]
            if not are_there[start:stop].all():
                raise _null_inside()
            found: NDArray[Any] = (values[start:stop] if self.lists.size is None else table[row]).copy()
            return found

        return read

    def flat(self, array: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """The values of one-dimensional arrays, and where in them each row begins and the last one ends.

        Raises:
            EncodingError: A row is null, or one of its numbers is.
        """
        values, are_there = self._elements(self.lists.values(array))
        offsets = self.lists.offsets(array)
        if array.null_count:
            raise EncodingError(f"row {int(are_there_in(array).argmin())} has null instead of an array")
        if are_there is not None and not are_there[offsets[0] : offsets[-1]].all():
            first = int(offsets[0] + are_there[offsets[0] : offsets[-1]].argmin())
            row = int(np.searchsorted(offsets, first, "right")) - 1
            raise _null_inside(f"row {row}: ")
        return values, offsets

    def dense(self, array: Any) -> NDArray[Any] | None:
        if array.null_count or not len(array):
            return None
        values, are_there = self._elements(self.lists.values(array))
        offsets = self.lists.offsets(array)
        width = int(offsets[1] - offsets[0])
        if not width * math.prod(self.inner) or (are_there is not None and not are_there.all()):
            return None
        if self.lists.size is not None:
            return self._table(values, len(array))
        if (np.diff(offsets) != width).any():
            return None
        return values[offsets[0] : offsets[-1]].reshape(len(array), width, *self.inner)

    def _elements(self, array: Any) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """What lists hold, of shape (elements, ...), and which of it is there; None where all is."""
        rows, missing = len(array), list[NDArray[np.bool_]]()
        for size in self.inner:
            if array.null_count:
                missing.append(are_there_in(array))
            array = stored(array.values).slice(array.offset * size, len(array) * size)
        if array.null_count:
            missing.append(are_there_in(array))
        values = numbers_of(array, self.dtype).reshape(rows, *self.inner)
        if not missing:
            return values, None
        each = (one.reshape(rows, len(one) // rows).all(axis=1) for one in missing)
        return values, np.logical_and.reduce(list(each))

    def _table(self, values: NDArray[Any], rows: int) -> NDArray[Any]:
        table = values.reshape(rows, *(self.final or (self.lists.size or 0, *self.inner)))
        return table if self.axes is None else table.transpose(0, *(1 + axis for axis in self.axes))


@dataclass(frozen=True, slots=True)
class Shaped:
    """An array of a known shape, stored as lists of lists."""

    levels: tuple[Lists, ...]
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    """The first may be None: rows have their own."""

    @property
    def encoding(self) -> str | None:
        return _encoding(self.dtype, self.shape)

    def read(self, array: Any) -> Read:
        table = self.dense(array)
        if table is not None:
            return lambda row: table[row].copy()
        chain, leaf = self._chain(array)

        def read(row: int) -> NDArray[Any]:
            start, stop, shape = row, row + 1, list[int]()
            for (offsets, is_there), size in zip(chain, self.shape, strict=True):
                sizes = np.diff(offsets[start : stop + 1])
                found = int(sizes[0]) if len(sizes) else size or 0
                if (sizes != (found if size is None else size)).any():
                    raise EncodingError(f"expected an array of shape {self.shape}, but found lists of other lengths")
                start, stop = int(offsets[start]), int(offsets[stop])
                shape.append(found)
                if is_there is not None and not is_there[start:stop].all():
                    raise _null_inside()
            found_all: NDArray[Any] = leaf[start:stop].reshape(shape).copy()
            return found_all

        return read

    def dense(self, array: Any) -> NDArray[Any] | None:
        rows, sizes = len(array), [size for size in self.shape if size]
        if array.null_count or not rows or len(sizes) < len(self.shape):
            return None
        chain, leaf = self._chain(array)
        start, stop = 0, rows
        for (offsets, is_there), size in zip(chain, sizes, strict=True):
            if (np.diff(offsets[start : stop + 1]) != size).any():
                return None
            start, stop = int(offsets[start]), int(offsets[stop])
            if is_there is not None and not is_there[start:stop].all():
                return None
        return leaf[start:stop].reshape(rows, *sizes)

    def _chain(self, array: Any) -> tuple[list[tuple[NDArray[Any], NDArray[np.bool_] | None]], NDArray[Any]]:
        """Of each level its offsets, and which of the values below are there; and the numbers at the end."""
        chain = list[tuple[NDArray[Any], NDArray[np.bool_] | None]]()
        for lists in self.levels:
            below = lists.values(array)
            chain.append((lists.offsets(array), are_there_in(below) if below.null_count else None))
            array = below
        return chain, numbers_of(array, self.dtype)


def _encoding(dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> str | None:
    """The encoding of arrays, if there is one; without shape of those that differ."""
    name = f"ndarray:{dtype.name}" + ("" if None in shape else f":{','.join(map(str, shape))}")
    try:
        encoding(name)
    except ConfigError:
        return None
    return name
