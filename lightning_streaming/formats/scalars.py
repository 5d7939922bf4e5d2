"""Encodings of single values: bytes, text, numbers, JSON and pickles; and the checks that all encodings share.

Numbers are little-endian. Reading a pickle runs code that whoever wrote the data chose.
"""

from __future__ import annotations

import json
import pickle
import reprlib
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar

import numpy as np

from lightning_streaming.errors import EncodingError


def check_type(value: object, expected: type) -> None:
    """Refuse a value of another type.

    Raises:
        EncodingError: Naming what was expected and what was found.
    """
    if not isinstance(value, expected):
        raise EncodingError(f"expected {expected.__name__}, but got {type(value).__name__} {brief(value)}")


def check_length(data: bytes | memoryview, expected: int) -> None:
    """Refuse a payload of another length.

    Raises:
        EncodingError: Naming what was expected and what was found.
    """
    if len(data) != expected:
        raise EncodingError(f"expected {expected} bytes, but found {len(data)}")


def shortened(words: str, most: int = 400) -> str:
    """An error's words without their middle, where damaged data made them long: the way out is at their end."""
    if len(words) <= most:
        return words
    end = most // 3
    return f"{words[: most - end - 5]} ... {words[-end:]}"


def brief(value: object) -> str:
    """The start of a value's repr, short enough for an error."""
    if isinstance(value, memoryview):
        value = bytes(value[:40])
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to write ints of thousands of digits
        return f"a huge {type(value).__name__}"


_IS_LITTLE_ENDIAN = sys.byteorder == "little"
_INT = struct.Struct("<q")
_JSON_DECODER = json.JSONDecoder()

DecodeMany = Callable[[memoryview, int], Iterable[Any]]
"""Gives the numbers of payloads that follow each other: (bytes, where the first payload starts in them)."""


@dataclass(frozen=True, slots=True)
class BytesEncoding:
    """Bytes as they are."""

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
        """What decodes so many payloads that follow each other."""
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
        """What decodes so many payloads that follow each other."""
        dtype, read = self.dtype, np.frombuffer
        return lambda data, start: read(data, dtype, count, start).flat  # makes numbers quicker than the array itself


@dataclass(frozen=True, slots=True)
class NumpyIntegerEncoding(_NumpyEncoding):
    """A numpy integer. Whatever ``int()`` takes may be written (3.7 becomes 3) as long as it is in range."""

    def encode(self, value: Any) -> bytes:
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            raise _not_a_number(self.dtype, value) from None
        return _integer_bytes(number, self.size, signed=self.dtype.kind == "i")


@dataclass(frozen=True, slots=True)
class NumpyFloatEncoding(_NumpyEncoding):
    """A numpy float. Whatever numpy takes as one float may be written, rounded to this width."""

    def encode(self, value: Any) -> bytes:
        if type(value) is self.dtype.type and _IS_LITTLE_ENDIAN:
            return bytes(value)  # its memory, which is much quicker than tobytes()
        try:
            number = np.asarray(value, self.dtype)
        except (TypeError, ValueError, OverflowError):
            raise _not_a_number(self.dtype, value) from None
        if number.ndim or value is None:  # numpy would make None a NaN, and a list an array
            raise _not_a_number(self.dtype, value)
        return number.tobytes()


NUMBERS = (IntEncoding, NumpyIntegerEncoding, NumpyFloatEncoding)
"""Encodings whose payloads are what numpy has of their ``dtype``."""


@dataclass(frozen=True, slots=True)
class NumberTextEncoding:
    """A number as its decimal text, for those that no fixed width can hold."""

    kind: type[int | float | Decimal]
    """The Python type that is written and read."""
    size: None = None

    def encode(self, value: Any) -> bytes:
        check_type(value, self.kind)
        try:
            # Made anew from the plain type, because a subclass writes itself differently: True is 1 here.
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
    """Whatever JSON can say, NaN and Infinity too; a numpy array becomes nested lists."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        try:
            return json.dumps(value, default=_array_to_list).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EncodingError(f"expected a value that JSON can say, but got {brief(value)} ({error})") from None

    def decode(self, data: bytes | memoryview) -> Any:
        try:
            return _read_json(str(data, "utf-8"))
        except (ValueError, RecursionError) as error:
            raise EncodingError(f"expected JSON, but found {brief(data)} ({error})") from None


def _read_json(text: str) -> Any:
    """What ``json.loads`` makes of a text, in less time where there are no spaces around it."""
    try:
        value, stop = _JSON_DECODER.raw_decode(text)
    except json.JSONDecodeError:
        return json.loads(text)
    return value if stop == len(text) else json.loads(text)


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
"""The default of Python 3.8 to 3.13, so the bytes do not depend on which of them writes."""


@dataclass(frozen=True, slots=True)
class PickleEncoding:
    """Whatever pickle can write."""

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
        except Exception as error:  # damaged pickles, and the code in sound ones, raise anything
            raise EncodingError(f"expected a pickle, but found {brief(data)} ({_named(error)})") from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
