"""Encodings of single values: bytes, text, numbers and JSON. Numbers are little-endian."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.checks import brief, check_length, check_type

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
class NumpyIntegerEncoding:
    """A numpy integer. Whatever ``int()`` takes may be written (3.7 becomes 3) as long as it is in range."""

    dtype: np.dtype[Any]
    """Little-endian."""

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    def encode(self, value: Any) -> bytes:
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            raise _not_a_number(self.dtype, value) from None
        return _integer_bytes(number, self.size, signed=self.dtype.kind == "i")

    def decode(self, data: bytes | memoryview) -> Any:
        if len(data) != self.dtype.itemsize:
            check_length(data, self.size)
        return np.frombuffer(data, self.dtype)[0]

    def decoder_of(self, count: int) -> DecodeMany:
        """What decodes so many payloads that follow each other."""
        return _numpy_numbers(self.dtype, count)


@dataclass(frozen=True, slots=True)
class NumpyFloatEncoding:
    """A numpy float. Whatever numpy takes as one float may be written, rounded to this width."""

    dtype: np.dtype[Any]
    """Little-endian."""

    @property
    def size(self) -> int:
        return self.dtype.itemsize

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

    def decode(self, data: bytes | memoryview) -> Any:
        if len(data) != self.dtype.itemsize:
            check_length(data, self.size)
        return np.frombuffer(data, self.dtype)[0]

    def decoder_of(self, count: int) -> DecodeMany:
        """What decodes so many payloads that follow each other."""
        return _numpy_numbers(self.dtype, count)


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


def _numpy_numbers(dtype: np.dtype[Any], count: int) -> DecodeMany:
    read = np.frombuffer
    return lambda data, start: read(data, dtype, count, start).flat  # makes numbers quicker than the array itself


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
