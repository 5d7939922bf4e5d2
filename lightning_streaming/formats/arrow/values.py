"""The values of Arrow's columns: of each kind of column, how a value is read out of the buffers of one record batch.

A kind looks at its array once, and gives a function from row to value. Numbers, texts, bytes and arrays are cut out of
the buffers by numpy; what is rare is left to pyarrow::

    list<int32>     offsets  0   3   3   5            row 0 is values[0:3], row 1 is empty, row 2 is values[3:5]
                    values   7 8 9 1 2

Arrays must have been validated in full: offsets and indices are believed here. No value shares memory with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import time, timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import EncodingError, MissingDependencyError
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.images.encodings import IMAGE_FORMATS, open_image_file
from lightning_streaming.formats.values import brief

Read = Callable[[int], Any]
"""The value of a row, in [0, rows) of one array. Raises EncodingError, or ValueError of damaged texts."""


def require_pyarrow() -> Any:
    """The module ``pyarrow``.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise MissingDependencyError(
            "samples that lie as rows of Arrow, or in Parquet files, need the pyarrow package",
            hint="run: pip install 'lightning-streaming[parquet]'",
        ) from None
    return pyarrow


def require_compute() -> Any:
    """The module ``pyarrow.compute``.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    require_pyarrow()
    import pyarrow.compute

    return pyarrow.compute


def require_parquet() -> Any:
    """The module ``pyarrow.parquet``.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    require_pyarrow()
    import pyarrow.parquet

    return pyarrow.parquet


class ArrowKind(Protocol):
    """What the values of a column are."""

    @property
    def encoding(self) -> str | None:
        """The MDS encoding that would hold such values; None where there is none."""
        ...

    def read(self, array: Any) -> Read:
        """What reads an array's values, which are not null."""
        ...


def reader_of(kind: ArrowKind, array: Any) -> Read:
    """What reads an array's values; None of those that are null."""
    array = stored(array)
    read = kind.read(array)
    if not array.null_count or isinstance(kind, Null):  # the latter may say of itself that it is of any length
        return read
    is_there = quick(are_there_in(array))
    return lambda row: read(row) if is_there[row] else None


def stored(array: Any) -> Any:
    """An array as it is stored, where it is of an extension type."""
    while hasattr(array, "storage"):
        array = array.storage
    return array


# --- buffers ---

_BOOL = np.dtype("?")


def are_there_in(array: Any) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return found


def numbers_of(array: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values of an array of numbers or bools, whatever is null."""
    if not len(array):
        return np.empty(0, dtype)
    buffer = array.buffers()[1]
    if dtype != _BOOL:
        return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)
    first, ahead = divmod(array.offset, 8)
    bits = np.frombuffer(buffer, np.uint8, (ahead + len(array) + 7) // 8, first)
    return np.unpackbits(bits, bitorder="little")[ahead : ahead + len(array)].view(_BOOL)


def offsets_of(array: Any, *, large: bool) -> NDArray[Any]:
    """Where the values of each row begin, and where the last one's end."""
    dtype = np.dtype(np.int64 if large else np.int32)
    if not len(array):
        return np.zeros(1, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array) + 1, array.offset * dtype.itemsize)


def quick(values: NDArray[Any]) -> memoryview:
    """The same values, to be asked for one by one, which are then Python's own."""
    return memoryview(np.require(values, requirements="A"))  # type: ignore[arg-type]  # of numpy's stubs


def _bytes(array: Any) -> memoryview:
    """The texts of all rows."""
    buffer = array.buffers()[2]
    return memoryview(b"" if buffer is None else buffer)


# --- single values ---


@dataclass(frozen=True, slots=True)
class Null:
    """Nothing."""

    encoding: str | None = "json"

    def read(self, array: Any) -> Read:  # noqa: ARG002
        return lambda _: None


@dataclass(frozen=True, slots=True)
class Number:
    """A number of numpy's own, of the dtype as it is stored."""

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
    """A bool of Python."""

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
    """Whether its offsets are of 64 bits."""
    encoding: str = "str"

    def flat(self, array: Any) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """The bytes of all rows, and where in them each row begins and the last one ends."""
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
        """The bytes of all rows, and where in them each row begins and the last one ends."""
        return np.frombuffer(_bytes(array), np.uint8), offsets_of(array, large=self.large)

    def read(self, array: Any) -> Read:
        offsets, data = quick(offsets_of(array, large=self.large)), _bytes(array)
        return lambda row: bytes(data[offsets[row] : offsets[row + 1]])


@dataclass(frozen=True, slots=True)
class FixedBinary:
    """Bytes, as many in each row."""

    size: int
    encoding: str = "bytes"

    def read(self, array: Any) -> Read:
        size, buffer = self.size, array.buffers()[1]
        data = memoryview(b"" if buffer is None else buffer)[array.offset * size :]
        return lambda row: bytes(data[row * size : (row + 1) * size])


@dataclass(frozen=True, slots=True)
class Moment:
    """A date, a moment or a duration, of numpy's own."""

    stored: np.dtype[Any]
    """Integers of 32 or 64 bits."""
    dtype: np.dtype[Any]
    """Of dates or durations, with their unit."""
    encoding: None = None

    def read(self, array: Any) -> Read:
        return numbers_of(array, self.stored).astype(self.dtype).__getitem__


@dataclass(frozen=True, slots=True)
class Clock:
    """A time of day; what it has beyond microseconds is left off, which Python has no room for."""

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
    """Values as pyarrow itself gives them."""

    encoding: str | None

    def read(self, array: Any) -> Read:
        return lambda row: array[row].as_py()


# --- values of values ---


@dataclass(frozen=True, slots=True)
class Lists:
    """How the values of a column of lists lie in the array below it."""

    size: int | None
    """Of each list; None where they differ."""
    large: bool = False

    def offsets(self, array: Any) -> NDArray[Any]:
        """Where in :meth:`values` the lists begin, and where the last one ends."""
        if self.size is None:
            return offsets_of(array, large=self.large)
        return np.arange(len(array) + 1, dtype=np.int64) * self.size

    def values(self, array: Any) -> Any:
        """The array below."""
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
    """A value that is stored once, however often it comes."""

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
    """An image file that Hugging Face datasets stored, opened; its pixels are decoded when they are first needed."""

    names: tuple[str, ...]
    """Of the fields that it is stored in."""
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
                named = None if path is None else path(row)
                raise EncodingError(
                    f"expected the bytes of an image file, but found only its path, {shortened(brief(named))}",
                    hint="write "
                    "the data again with its images in it, which dataset.with_format('arrow').map(datasets.table."
                    "embed_table_storage, batched=True) puts there, or leave the column out with columns=[...]",
                )
            return open_image_file(data, IMAGE_FORMATS)

        return read


def is_json(kind: ArrowKind) -> bool:
    """Whether JSON can say the values, numbers and arrays of numpy's own being numbers and lists."""
    if isinstance(kind, Coded):
        return is_json(kind.value)
    return isinstance(kind, (Number, Bool, Text)) or (kind.encoding or "").partition(":")[0] in ("json", "ndarray")
