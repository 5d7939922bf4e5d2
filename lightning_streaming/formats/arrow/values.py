"""Values of Arrow's columns: each kind of column reads its values from the buffers of one record batch.

A kind inspects its array once, and returns a function from row to value. Numpy slices numbers, texts, bytes and arrays
out of the buffers; pyarrow reads rare types::

    list<int32>     offsets  0   3   3   5            row 0 is values[0:3], row 1 is empty, row 2 is values[3:5]
                    values   7 8 9 1 2

Arrays must have been validated in full: offsets and indices are trusted here. No value shares memory with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import time, timedelta
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.images import IMAGE_FORMATS, open_image_file
from lightning_streaming.formats.values import brief

Read = Callable[[int], Any]
"""Returns the value of a row, in [0, rows) of one array. Raises EncodingError, or ValueError for damaged texts."""


def require_pyarrow() -> Any:
    """Return the module ``pyarrow``.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise MissingDependencyError(
            "rows of Arrow, and Parquet files, need the pyarrow package",
            hint="run: pip install 'lightning-streaming[parquet]'",
        ) from None
    return pyarrow


def require_compute() -> Any:
    """Return the module ``pyarrow.compute``.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    require_pyarrow()
    import pyarrow.compute

    return pyarrow.compute


def require_parquet() -> Any:
    """Return the module ``pyarrow.parquet``.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    require_pyarrow()
    import pyarrow.parquet

    return pyarrow.parquet


class ArrowKind(Protocol):
    """A kind of values of a column."""

    @property
    def encoding(self) -> str | None:
        """The MDS encoding that would hold such values, or None."""
        ...

    def read(self, array: Any) -> Read:
        """Return a function that reads an array's values that are not null."""
        ...


def reader_of(kind: ArrowKind, array: Any) -> Read:
    """Return a function that reads an array's values; None for those that are null."""
    array = stored(array)
    read = kind.read(array)
    if not array.null_count or isinstance(kind, Null):  # whose length may be anything
        return read
    is_valid = quick(validity_of(array))
    return lambda row: read(row) if is_valid[row] else None


def stored(array: Any) -> Any:
    """Return the storage of an array of an extension type; other arrays unchanged."""
    while hasattr(array, "storage"):
        array = array.storage
    return array


# --- buffers ---

_BOOL = np.dtype("?")


def validity_of(array: Any) -> NDArray[np.bool_]:
    """Return which values are not null."""
    validity: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return validity


def numbers_of(array: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the values of an array of numbers or bools; any value where they are null."""
    if not len(array):
        return np.empty(0, dtype)
    buffer = array.buffers()[1]
    if dtype != _BOOL:
        return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)
    first, ahead = divmod(array.offset, 8)
    bits = np.frombuffer(buffer, np.uint8, (ahead + len(array) + 7) // 8, first)
    return np.unpackbits(bits, bitorder="little")[ahead : ahead + len(array)].view(_BOOL)


def offsets_of(array: Any, *, large: bool) -> NDArray[Any]:
    """Return the positions where the values of each row begin, and where those of the last row end."""
    dtype = np.dtype(np.int64 if large else np.int32)
    if not len(array):
        return np.zeros(1, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array) + 1, array.offset * dtype.itemsize)


def quick(values: NDArray[Any]) -> memoryview:
    """Return a view whose items are Python's numbers, which is faster for single values."""
    return memoryview(np.require(values, requirements="A"))  # type: ignore[arg-type]  # of numpy's stubs


def _bytes(array: Any) -> memoryview:
    """Return the texts of all rows."""
    buffer = array.buffers()[2]
    return memoryview(b"" if buffer is None else buffer)


# --- single values ---


@dataclass(frozen=True, slots=True)
class Null:
    """Nulls."""

    encoding: str | None = "json"

    def read(self, array: Any) -> Read:  # noqa: ARG002
        return lambda _: None


@dataclass(frozen=True, slots=True)
class Number:
    """A numpy number of the stored dtype."""

    dtype: np.dtype[Any]

    @property
    def encoding(self) -> str:
        return str(self.dtype.name)

    def read(self, array: Any) -> Read:
        read: Read = numbers_of(array, self.dtype).__getitem__
        return read

    def dense(self, array: Any) -> NDArray[Any] | None:
        return None if array.null_count else numbers_of(array, self.dtype)


@dataclass(frozen=True, slots=True)
class Bool:
    """A Python bool."""

    dtype: np.dtype[Any] = _BOOL
    encoding: str = "int"

    def read(self, array: Any) -> Read:
        return quick(numbers_of(array, _BOOL)).__getitem__

    def dense(self, array: Any) -> NDArray[Any] | None:
        return None if array.null_count else numbers_of(array, _BOOL)


@dataclass(frozen=True, slots=True)
class Text:
    """A text."""

    large: bool
    """Whether its offsets have 64 bits."""
    encoding: str = "str"

    def flat(self, array: Any) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """Return the bytes of all rows, and the positions where each row begins and the last one ends."""
        return np.frombuffer(_bytes(array), np.uint8), offsets_of(array, large=self.large)

    def read(self, array: Any) -> Read:
        offsets, data = quick(offsets_of(array, large=self.large)), _bytes(array)

        def read(row: int) -> str:
            return str(data[offsets[row] : offsets[row + 1]], "utf-8")

        return read


@dataclass(frozen=True, slots=True)
class Binary:
    """Bytes."""

    large: bool
    encoding: str = "bytes"

    def flat(self, array: Any) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """Return the bytes of all rows, and the positions where each row begins and the last one ends."""
        return np.frombuffer(_bytes(array), np.uint8), offsets_of(array, large=self.large)

    def read(self, array: Any) -> Read:
        offsets, data = quick(offsets_of(array, large=self.large)), _bytes(array)
        return lambda row: bytes(data[offsets[row] : offsets[row + 1]])


@dataclass(frozen=True, slots=True)
class FixedBinary:
    """Bytes of a fixed size."""

    size: int
    encoding: str = "bytes"

    def read(self, array: Any) -> Read:
        size, buffer = self.size, array.buffers()[1]
        data = memoryview(b"" if buffer is None else buffer)[array.offset * size :]
        return lambda row: bytes(data[row * size : (row + 1) * size])


@dataclass(frozen=True, slots=True)
class Moment:
    """A numpy date, time or duration."""

    stored: np.dtype[Any]
    """Integers of 32 or 64 bits."""
    dtype: np.dtype[Any]
    """Of dates or durations, with their unit."""
    encoding: None = None

    def read(self, array: Any) -> Read:
        return numbers_of(array, self.stored).astype(self.dtype).__getitem__


@dataclass(frozen=True, slots=True)
class Clock:
    """A Python time of day, truncated to microseconds."""

    stored: np.dtype[Any]
    per_second: int
    encoding: None = None

    def read(self, array: Any) -> Read:
        values, per_second = quick(numbers_of(array, self.stored)), self.per_second

        def read(row: int) -> time:
            seconds, part = divmod(values[row], per_second)
            minutes, second = divmod(seconds, 60)
            try:
                return time(*divmod(minutes, 60), second, part * 1_000_000 // per_second)
            except ValueError:
                raise EncodingError(f"expected a time of day, but found {timedelta(seconds=seconds)}") from None

        return read


@dataclass(frozen=True, slots=True)
class Rare:
    """Values as pyarrow converts them."""

    encoding: str | None

    def read(self, array: Any) -> Read:
        return lambda row: array[row].as_py()


# --- values of values ---


@dataclass(frozen=True, slots=True)
class Lists:
    """Layout of a column of lists in the array of their elements."""

    size: int | None
    """Elements of each list; None if they differ."""
    large: bool = False

    def offsets(self, array: Any) -> NDArray[Any]:
        """Return the positions in :meth:`values` where the lists begin, and where the last one ends."""
        if self.size is None:
            return offsets_of(array, large=self.large)
        return np.arange(len(array) + 1, dtype=np.int64) * self.size

    def values(self, array: Any) -> Any:
        """Return the array of the elements."""
        below = stored(array.values)
        return below if self.size is None else below.slice(array.offset * self.size, len(array) * self.size)


@dataclass(frozen=True, slots=True)
class Listed:
    """A list."""

    lists: Lists
    element: ArrowKind

    @property
    def encoding(self) -> str | None:
        if self.element.encoding == "pil":
            return "list[pil]"
        return "json" if is_json(self.element) else None

    def read(self, array: Any) -> Read:
        offsets, element = quick(self.lists.offsets(array)), reader_of(self.element, self.lists.values(array))
        return lambda row: [element(place) for place in range(offsets[row], offsets[row + 1])]


@dataclass(frozen=True, slots=True)
class Record:
    """A dict."""

    fields: tuple[tuple[str, ArrowKind], ...]

    @property
    def encoding(self) -> str | None:
        return "json" if all(is_json(kind) for _, kind in self.fields) else None

    def read(self, array: Any) -> Read:
        reads = [(name, reader_of(kind, array.field(place))) for place, (name, kind) in enumerate(self.fields)]
        return lambda row: {name: read(row) for name, read in reads}


@dataclass(frozen=True, slots=True)
class Pairs:
    """A list of keys with their values."""

    key: ArrowKind
    value: ArrowKind
    encoding: None = None

    def read(self, array: Any) -> Read:
        offsets = quick(offsets_of(array, large=False))
        key, value = reader_of(self.key, array.keys), reader_of(self.value, array.items)
        return lambda row: [(key(place), value(place)) for place in range(offsets[row], offsets[row + 1])]


@dataclass(frozen=True, slots=True)
class Coded:
    """A value of a dictionary, in which each is stored once."""

    index: np.dtype[Any]
    value: ArrowKind

    @property
    def encoding(self) -> str | None:
        return self.value.encoding

    def read(self, array: Any) -> Read:
        indices, value = quick(numbers_of(array.indices, self.index)), reader_of(self.value, array.dictionary)
        return lambda row: value(indices[row])


@dataclass(frozen=True, slots=True)
class ImageStruct:
    """An image file stored by Hugging Face datasets, opened; its pixels are decoded on first access."""

    names: tuple[str, ...]
    """Names of the fields of its struct."""
    file: ArrowKind
    """Its bytes."""
    path: ArrowKind | None
    encoding: str = "pil"

    def read(self, array: Any) -> Read:
        file = reader_of(self.file, array.field(self.names.index("bytes")))
        path = None if self.path is None else reader_of(self.path, array.field(self.names.index("path")))

        def read(row: int) -> Any:
            data = file(row)
            if data is None:
                name = None if path is None else path(row)
                raise EncodingError(
                    f"expected the bytes of an image file, but found only its path, {shortened(brief(name))}",
                    hint="embed the images with dataset.with_format('arrow').map(datasets.table.embed_table_storage, "
                    "batched=True) and write the data again, or leave the column out with columns=[...]",
                )
            return open_image_file(data, IMAGE_FORMATS)

        return read


def is_json(kind: ArrowKind) -> bool:
    """Return whether JSON can represent the values, with numpy numbers and arrays as numbers and lists."""
    if isinstance(kind, Coded):
        return is_json(kind.value)
    return isinstance(kind, (Number, Bool, Text)) or (kind.encoding or "").partition(":")[0] in ("json", "ndarray")


# --- arrays ---
#
# Lists of numbers, and lists of lists that are arrays of several dimensions, are read as numpy arrays. If all of a
# batch have one shape, the batch is one array:
#
#     list<int32>     offsets  0   2   4   6            dense    [[7, 8],
#                     values   7 8 9 1 2 5                        [9, 1],
#                                                                 [2, 5]]


@runtime_checkable
class DenseKind(ArrowKind, Protocol):
    """Numbers, or arrays of them."""

    def dense(self, array: Any) -> NDArray[Any] | None:
        """Return all values as one array of shape (rows, ...); None if any is null or empty, or shapes differ."""
        ...


def _null_inside(where: str = "") -> EncodingError:
    return EncodingError(
        f"{where}expected numbers, but found a null among them",
        hint="leave the column out with columns=[...], or replace nulls by a number",
    )


@dataclass(frozen=True, slots=True)
class Numbers:
    """A one-dimensional array; or one of more dimensions, all but the first of which are fixed."""

    lists: Lists
    dtype: np.dtype[Any]
    inner: tuple[int, ...] = ()
    """Shape of an element."""
    final: tuple[int, ...] | None = None
    """Shape of a value, if it differs from that of fixed-size lists."""
    axes: tuple[int, ...] | None = None
    """Permutation of its axes; None to keep them."""

    @property
    def encoding(self) -> str | None:
        shape: tuple[int | None, ...] = self.final or (self.lists.size, *self.inner)
        return _encoding(self.dtype, shape if self.axes is None else tuple(shape[axis] for axis in self.axes))

    def read(self, array: Any) -> Read:
        values, validity = self._elements(self.lists.values(array))
        if self.lists.size is not None:
            table = self._table(values, len(array))
            if validity is None:
                return lambda row: table[row].copy()
        offsets = quick(self.lists.offsets(array))
        if validity is None:
            return lambda row: values[offsets[row] : offsets[row + 1]].copy()

        def read(row: int) -> NDArray[Any]:
            start, stop = offsets[row], offsets[row + 1]
            if not validity[start:stop].all():
                raise _null_inside()
            value: NDArray[Any] = (values[start:stop] if self.lists.size is None else table[row]).copy()
            return value

        return read

    def flat(self, array: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the values of one-dimensional arrays, and the positions where each row begins and the last ends.

        Raises:
            EncodingError: A row is null, or one of its numbers is.
        """
        values, validity = self._elements(self.lists.values(array))
        offsets = self.lists.offsets(array)
        if array.null_count:
            raise EncodingError(f"row {int(validity_of(array).argmin())} has null instead of an array")
        if validity is not None and not validity[offsets[0] : offsets[-1]].all():
            first = int(offsets[0] + validity[offsets[0] : offsets[-1]].argmin())
            row = int(np.searchsorted(offsets, first, "right")) - 1
            raise _null_inside(f"row {row}: ")
        return values, offsets

    def dense(self, array: Any) -> NDArray[Any] | None:
        if array.null_count or not len(array):
            return None
        values, validity = self._elements(self.lists.values(array))
        offsets = self.lists.offsets(array)
        width = int(offsets[1] - offsets[0])
        if not width * math.prod(self.inner) or (validity is not None and not validity.all()):
            return None
        if self.lists.size is not None:
            return self._table(values, len(array))
        if (np.diff(offsets) != width).any():
            return None
        return values[offsets[0] : offsets[-1]].reshape(len(array), width, *self.inner)

    def _elements(self, array: Any) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Return the elements, of shape (elements, ...), and which are not null; None if all are."""
        rows, validities = len(array), list[NDArray[np.bool_]]()
        for size in self.inner:
            if array.null_count:
                validities.append(validity_of(array))
            array = stored(array.values).slice(array.offset * size, len(array) * size)
        if array.null_count:
            validities.append(validity_of(array))
        values = numbers_of(array, self.dtype).reshape(rows, *self.inner)
        if not validities:
            return values, None
        each = (part.reshape(rows, len(part) // rows).all(axis=1) for part in validities)
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
    """The first may be None: it differs between rows."""

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
            for (offsets, validity), size in zip(chain, self.shape, strict=True):
                sizes = np.diff(offsets[start : stop + 1])
                actual = int(sizes[0]) if len(sizes) else size or 0
                if (sizes != (actual if size is None else size)).any():
                    raise EncodingError(f"expected an array of shape {self.shape}, but found lists of other lengths")
                start, stop = int(offsets[start]), int(offsets[stop])
                shape.append(actual)
                if validity is not None and not validity[start:stop].all():
                    raise _null_inside()
            value: NDArray[Any] = leaf[start:stop].reshape(shape).copy()
            return value

        return read

    def dense(self, array: Any) -> NDArray[Any] | None:
        rows, sizes = len(array), [size for size in self.shape if size]
        if array.null_count or not rows or len(sizes) < len(self.shape):
            return None
        chain, leaf = self._chain(array)
        start, stop = 0, rows
        for (offsets, validity), size in zip(chain, sizes, strict=True):
            if (np.diff(offsets[start : stop + 1]) != size).any():
                return None
            start, stop = int(offsets[start]), int(offsets[stop])
            if validity is not None and not validity[start:stop].all():
                return None
        return leaf[start:stop].reshape(rows, *sizes)

    def _chain(self, array: Any) -> tuple[list[tuple[NDArray[Any], NDArray[np.bool_] | None]], NDArray[Any]]:
        """Return the offsets of each level, with the validity of the values below; and the innermost numbers."""
        chain = list[tuple[NDArray[Any], NDArray[np.bool_] | None]]()
        for lists in self.levels:
            below = lists.values(array)
            chain.append((lists.offsets(array), validity_of(below) if below.null_count else None))
            array = below
        return chain, numbers_of(array, self.dtype)


def _encoding(dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> str | None:
    """Return the encoding of arrays, if there is one; without shape if shapes differ."""
    name = f"ndarray:{dtype.name}" + ("" if None in shape else f":{','.join(map(str, shape))}")
    try:
        encoding(name)
    except ConfigError:
        return None
    return name
