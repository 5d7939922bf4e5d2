"""Encodings of values: bytes, text, numbers, arrays, JSON and pickles; and checks that all encodings share.

Numbers are little-endian. Reading a pickle runs code chosen by the data's author. Layouts of arrays:

    name                       payload                                  size
    ndarray                    dtype code, shape header, values         variable
    ndarray:int32              shape header, values                     variable
    ndarray:int32:2,3          values                                   2 · 3 · 4 bytes

The dtype code is one byte. The shape header is one byte ``(ndim << 2) | w``, then ndim unsigned integers of 2^w bytes.
The values follow in row-major order. All numbers are little-endian.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import reprlib
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError


def check_type(value: object, expected: type) -> None:
    """Raise EncodingError if a value has another type.

    Raises:
        EncodingError: States the expected type and the value.
    """
    if not isinstance(value, expected):
        raise EncodingError(f"expected {expected.__name__}, but got {type(value).__name__} {brief(value)}")


def check_length(data: bytes | memoryview, expected: int) -> None:
    """Raise EncodingError if a payload has another length.

    Raises:
        EncodingError: States the expected and the actual length.
    """
    if len(data) != expected:
        raise EncodingError(f"expected {expected} bytes, but found {len(data)}")


def brief(value: object) -> str:
    """Return the start of a value's repr, short enough for an error."""
    if isinstance(value, memoryview):
        value = bytes(value[:40])
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not write ints of thousands of digits
        return f"a huge {type(value).__name__}"


_IS_LITTLE_ENDIAN = sys.byteorder == "little"
_INT = struct.Struct("<q")
_JSON_DECODER = json.JSONDecoder()

DecodeMany = Callable[[memoryview, int], Iterable[Any]]
"""Returns the numbers of consecutive payloads: (bytes, position of the first payload)."""


@dataclass(frozen=True, slots=True)
class BytesEncoding:
    """Bytes, unchanged."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        check_type(value, bytes)
        return bytes(value)

    def decode(self, data: bytes | memoryview) -> bytes:
        return bytes(data)


@dataclass(frozen=True, slots=True)
class StrEncoding:
    """Text as UTF-8."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        check_type(value, str)
        try:
            return str(value).encode()
        except UnicodeEncodeError as error:
            raise EncodingError(f"expected text that UTF-8 can hold, but got {brief(value)} ({error})") from None

    def decode(self, data: bytes | memoryview) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise EncodingError(f"expected UTF-8 text, but found {error}") from None


@dataclass(frozen=True, slots=True)
class IntEncoding:
    """A Python int in 64 bits. A numpy integer is refused; a bool counts as an int."""

    size: int = 8
    dtype: ClassVar[np.dtype[Any]] = np.dtype("<i8")

    def encode(self, value: Any) -> bytes:
        check_type(value, int)
        return _integer_bytes(value, self.size, signed=True)

    def decode(self, data: bytes | memoryview) -> int:
        if len(data) != self.size:
            check_length(data, self.size)
        number: int = _INT.unpack(data)[0]
        return number

    def decoder_of(self, count: int) -> DecodeMany:
        """Return the decoder of that many consecutive payloads."""
        return struct.Struct(f"<{count}q").unpack_from


@dataclass(frozen=True, slots=True)
class _NumpyEncoding:
    """A numpy number."""

    dtype: np.dtype[Any]
    """Little-endian."""

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    def decode(self, data: bytes | memoryview) -> Any:
        if len(data) != self.dtype.itemsize:
            check_length(data, self.size)
        return np.frombuffer(data, self.dtype)[0]

    def decoder_of(self, count: int) -> DecodeMany:
        """Return the decoder of that many consecutive payloads."""
        dtype, read = self.dtype, np.frombuffer
        return lambda data, start: read(data, dtype, count, start).flat  # creates numbers faster than the array itself


@dataclass(frozen=True, slots=True)
class NumpyIntegerEncoding(_NumpyEncoding):
    """A numpy integer. Any value that ``int()`` takes may be written (3.7 becomes 3) if it is in range."""

    def encode(self, value: Any) -> bytes:
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            raise _not_a_number(self.dtype, value) from None
        return _integer_bytes(number, self.size, signed=self.dtype.kind == "i")


@dataclass(frozen=True, slots=True)
class NumpyFloatEncoding(_NumpyEncoding):
    """A numpy float. Any value that numpy takes as one float may be written, rounded to this width."""

    def encode(self, value: Any) -> bytes:
        if type(value) is self.dtype.type and _IS_LITTLE_ENDIAN:
            return bytes(value)  # its memory, which is much faster than tobytes()
        try:
            number = np.asarray(value, self.dtype)
        except (TypeError, ValueError, OverflowError):
            raise _not_a_number(self.dtype, value) from None
        if number.ndim or value is None:  # numpy would turn None into NaN, and a list into an array
            raise _not_a_number(self.dtype, value)
        return number.tobytes()


NUMBERS = (IntEncoding, NumpyIntegerEncoding, NumpyFloatEncoding)
"""Encodings whose payloads are numpy numbers of their ``dtype``."""


@dataclass(frozen=True, slots=True)
class NumberTextEncoding:
    """A number as its decimal text, for numbers that no fixed width can hold."""

    kind: type[int | float | Decimal]
    """Python type of the values."""
    size: None = None

    def encode(self, value: Any) -> bytes:
        check_type(value, self.kind)
        try:
            # Converted to the plain type, because a subclass may have another text: True is 1 here.
            return str(self.kind(value)).encode()
        except ValueError as error:
            raise EncodingError(f"expected a number that Python can write in digits ({error})") from None

    def decode(self, data: bytes | memoryview) -> int | float | Decimal:
        try:
            return self.kind(str(data, "ascii"))
        except (ValueError, InvalidOperation):
            raise EncodingError(f"expected the text of a {self.kind.__name__}, but found {brief(data)}") from None


@dataclass(frozen=True, slots=True)
class JsonEncoding:
    """A JSON value, also NaN and Infinity; a numpy array becomes nested lists."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        try:
            return json.dumps(value, default=_array_to_list).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EncodingError(f"expected a value that JSON can represent, but got {brief(value)} ({error})") from None

    def decode(self, data: bytes | memoryview) -> Any:
        try:
            text = str(data, "utf-8")
            try:  # in less time than json.loads, for texts without spaces around them
                value, stop = _JSON_DECODER.raw_decode(text)
            except json.JSONDecodeError:
                return json.loads(text)
            return value if stop == len(text) else json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EncodingError(f"expected JSON, but found {brief(data)} ({error})") from None


def _integer_bytes(number: int, size: int, *, signed: bool) -> bytes:
    try:
        return number.to_bytes(size, "little", signed=signed)
    except OverflowError:
        kind = "a signed" if signed else "an unsigned"
        raise EncodingError(f"expected {kind} integer of {8 * size} bits, but got {brief(number)}") from None


def _not_a_number(dtype: np.dtype[Any], value: object) -> EncodingError:
    return EncodingError(f"expected a number for {dtype.name}, but got {type(value).__name__} {brief(value)}")


def _array_to_list(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


_PROTOCOL = 4
"""The default of Python 3.8 to 3.13, so that the bytes do not depend on the version."""


@dataclass(frozen=True, slots=True)
class PickleEncoding:
    """A value that pickle can write."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        try:
            return pickle.dumps(value, _PROTOCOL)
        except Exception as error:  # a value's own __reduce__ may raise anything
            raise EncodingError(
                f"expected a value that pickle can write, but got {type(value).__name__} ({_named(error)})"
            ) from error

    def decode(self, data: bytes | memoryview) -> Any:
        try:
            return pickle.loads(bytes(data))  # noqa: S301  # allowed by the reader: see encodings.is_unsafe
        except Exception as error:  # damaged pickles, and code in valid ones, raise anything
            raise EncodingError(f"expected a pickle, but found {brief(data)} ({_named(error)})") from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# --- numpy arrays ---

_CODES = {
    f"{kind}{bits}": bits + place
    for bits in (8, 16, 32, 64)
    for place, kind in enumerate(("uint", "int", "float"))
    if (kind, bits) != ("float", 8)
}
_NAMES = {code: name for name, code in _CODES.items()}
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _CODES}
BYTES_OF_CODE = np.zeros(256, np.int64)
"""Bytes of an element by dtype code; 0 for unknown codes."""
BYTES_OF_CODE[list(_NAMES)] = [np.dtype(name).itemsize for name in _NAMES.values()]
_NAME_OF_DTYPE = {
    **{dtype: name for name, dtype in _DTYPES.items()},
    **{dtype.newbyteorder(">"): name for name, dtype in _DTYPES.items()},
}
"""By a dtype of either byte order. numpy computes ``dtype.name`` on each access, which takes longer than the rest."""
_DIM_DTYPES = ("<u1", "<u2", "<u4", "<u8")
_MAX_DIMS = 63  # six bits of the shape header
_Layout = tuple[tuple[int, ...], np.dtype[Any], int]
"""Shape and dtype of the values of a payload, and their position."""
_SHAPE_TEXT = re.compile(r"[1-9]\d{0,18}(,[1-9]\d{0,18})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class NdarrayEncoding:
    """A numpy array. Decoded arrays are writable, and share no memory with the shard."""

    dtype: str | None = None
    """Name of the only allowed dtype, or None: each payload states its dtype."""
    shape: tuple[int, ...] | None = None
    """The only allowed shape, or None: each payload states its shape. Needs a dtype."""

    size: int | None = field(init=False, repr=False)
    """Bytes of every payload; None if they vary."""
    _layout: _Layout | None = field(init=False, repr=False, compare=False)
    """Layout of every payload; None if it varies."""

    def __post_init__(self) -> None:
        size = layout = None
        if self.dtype is not None and self.shape is not None:
            layout = self.shape, _DTYPES[self.dtype], 0
            size = math.prod(self.shape) * _DTYPES[self.dtype].itemsize
        object.__setattr__(self, "size", size)  # computed once: both are read for each array
        object.__setattr__(self, "_layout", layout)

    def encode(self, value: Any) -> bytes:
        return b"".join(self.parts(value))

    def parts(self, value: Any) -> tuple[bytes, Any]:
        """Return the payload in two parts: the head, and the values as they are stored.

        Returns:
            Bytes, and an array, which type checkers know as a buffer only from Python 3.12.

        Raises:
            EncodingError: The value does not fit.
        """
        if type(value) is not np.ndarray:
            check_type(value, np.ndarray)
            if isinstance(value, np.ma.MaskedArray):
                raise EncodingError(
                    "expected an array without a mask, which cannot be stored, but got a numpy MaskedArray",
                    hint="write value.filled(...), or value.data, and "
                    "numpy.ma.getmaskarray(value).astype('uint8') as another column",
                )
        head, dtype = _head_and_dtype(self.dtype, self.shape, value.dtype, value.shape)
        return head, np.ascontiguousarray(value, dtype)

    def decode(self, data: bytes | memoryview) -> NDArray[Any]:
        layout = self._layout
        shape, dtype, start = layout if layout and len(data) == self.size else self.read_layout(data)
        try:
            array: NDArray[Any] = np.ndarray(shape, dtype, data, start).copy()
        except ValueError as error:  # numpy 1 stops at 32 dimensions
            raise EncodingError(f"numpy cannot hold shape {shape}: {error}") from None
        return array

    def read_layout(self, data: bytes | memoryview) -> _Layout:
        """Return the layout of a payload.

        Raises:
            EncodingError: Its head is invalid, or its size differs from that of its values.
        """
        name, shape, start = self.dtype, self.shape, 0
        if name is None:
            name, start = _NAMES.get(data[0], "") if len(data) else "", 1
            if not name:
                raise EncodingError(f"expected a dtype code, one of {sorted(_NAMES)}, but found {bytes(data[:1])!r}")
        if shape is None:
            ndim, width = divmod(data[start], 4) if len(data) > start else (0, 0)
            stop = start + 1 + (ndim << width)
            if ndim == 0 or len(data) < stop:
                raise EncodingError(f"expected a shape header, but found {brief(data[start:])}")
            shape, start = _dimensions(data[start]).unpack_from(data, start + 1), stop
            if 0 in shape:
                raise EncodingError(f"expected dimensions of at least 1, but found shape {shape}")
        expected = self.size or math.prod(shape) * _DTYPES[name].itemsize
        if len(data) - start != expected:
            raise EncodingError(
                f"expected {expected} bytes for {name} values of shape {shape}, but found {len(data) - start}"
            )
        return shape, _DTYPES[name], start


def flat_layouts(
    encoding: NdarrayEncoding, data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[np.dtype[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Return the layout of many payloads of one-dimensional arrays.

    Args:
        encoding: Encoding of the payloads.
        data: Their file.
        starts: Start of each payload.
        stops: End of each payload.

    Returns:
        The dtype of all; the start of each one's values; and their number.

    Raises:
        EncodingError: A payload is not one-dimensional, or incomplete, or dtypes differ.
    """
    name, firsts = encoding.dtype, starts
    if encoding.shape is None:
        if name is None:
            codes = np.unique(_bytes_at(data, firsts, stops))
            if len(codes) > 1:
                raise EncodingError(
                    f"expected arrays of one dtype, but found {', '.join(str(_NAMES.get(int(code))) for code in codes)}"
                )
            if not len(codes) or int(codes[0]) not in _NAMES:
                raise EncodingError(f"expected a dtype code, but found {int(codes[0]) if len(codes) else None}")
            name, firsts = _NAMES[int(codes[0])], firsts + 1
        heads = _bytes_at(data, firsts, stops)
        if (heads >> 2 != 1).any():
            raise EncodingError(
                f"expected arrays of one dimension, but one has {int((heads[heads >> 2 != 1] >> 2)[0])}"
            )
        firsts = firsts + 1 + (1 << (heads & 3).astype(np.int64))
    elif len(encoding.shape) != 1:
        raise EncodingError(f"expected arrays of one dimension, but they have {len(encoding.shape)}")
    assert name is not None, "set by the encoding or by the payloads"
    counts, rest = np.divmod(stops - firsts, _DTYPES[name].itemsize)
    if (rest != 0).any() or (counts < 0).any():
        raise EncodingError(
            f"expected whole {name} values, but a payload of {int((stops - starts)[0])} bytes has others"
        )
    return _DTYPES[name], firsts, counts


def _bytes_at(data: NDArray[np.uint8], places: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint8]:
    if (places >= stops).any():
        raise EncodingError("expected an array, but found a payload that ends within its header")
    return data[places]


def parse_ndarray(config: str) -> NdarrayEncoding:
    """Parse the part after ``ndarray:``, for example ``""``, ``"int32"`` or ``"int32:2,3"``.

    Raises:
        ConfigError: It is neither a dtype nor a dtype and a shape.
    """
    dtype, colon, shape = config.partition(":")
    if dtype in _CODES and (not colon or _SHAPE_TEXT.fullmatch(shape)):
        dims = tuple(map(int, shape.split(","))) if colon else None
        if dims is None or len(dims) <= _MAX_DIMS:
            return NdarrayEncoding(dtype, dims)
    elif not config:
        return NdarrayEncoding()
    raise ConfigError(
        f"ndarray takes a dtype, or a dtype and a shape, like ndarray:int32:2,3, but got 'ndarray:{config}'; "
        f"dtypes are {', '.join(_CODES)}",
        option="columns",
    )


@lru_cache(maxsize=1024)
def _head_and_dtype(
    fixed_dtype: str | None, fixed_shape: tuple[int, ...] | None, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[bytes, np.dtype[Any]]:
    """Return the head of an array, and the stored dtype of its values; raise EncodingError if it may not be written."""
    name = _NAME_OF_DTYPE.get(dtype)
    if name is None or (fixed_dtype and name != fixed_dtype):
        raise EncodingError(f"expected dtype {fixed_dtype or ' or '.join(_CODES)}, but got {dtype.name}")
    if fixed_shape is not None and shape != fixed_shape:
        raise EncodingError(f"expected shape {fixed_shape}, but got {shape}")
    if not 1 <= len(shape) <= _MAX_DIMS or 0 in shape:
        raise EncodingError(f"expected 1 to {_MAX_DIMS} dimensions and at least one value, but got shape {shape}")
    head = b"" if fixed_dtype else bytes([_CODES[name]])
    if not fixed_shape:
        width = next(w for w in range(4) if max(shape) < 2 ** (8 * 2**w))
        head += bytes([len(shape) << 2 | width]) + np.array(shape, _DIM_DTYPES[width]).tobytes()
    return head, _DTYPES[name]


@lru_cache(maxsize=256)
def _dimensions(ndim_and_width: int) -> struct.Struct:
    ndim, width = divmod(ndim_and_width, 4)
    return struct.Struct(f"<{ndim}{'BHIQ'[width]}")
