"""The encodings of columns, by name."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from lightning_streaming.errors import ConfigError, EncodingError, UnsupportedError
from lightning_streaming.formats.ndarray import parse_ndarray
from lightning_streaming.formats.scalars import (
    BytesEncoding,
    IntEncoding,
    JsonEncoding,
    NumberTextEncoding,
    NumpyFloatEncoding,
    NumpyIntegerEncoding,
    StrEncoding,
)


class Encoding(Protocol):
    """How the values of one column become bytes and come back."""

    @property
    def size(self) -> int | None:
        """Bytes of every payload, or None where they vary."""
        ...

    def encode(self, value: Any) -> bytes:
        """Turn a value into its payload.

        Raises:
            EncodingError: The value does not fit; the message names what was expected and what was found.
        """
        ...

    def decode(self, data: bytes | memoryview) -> Any:
        """Turn a payload into a value that shares no memory with it.

        Raises:
            EncodingError: The payload is not one of this encoding.
        """
        ...


_ENCODINGS: Mapping[str, Encoding] = {
    "bytes": BytesEncoding(),
    "str": StrEncoding(),
    "int": IntEncoding(),
    "uint8": NumpyIntegerEncoding(np.dtype("<u1")),
    "uint16": NumpyIntegerEncoding(np.dtype("<u2")),
    "uint32": NumpyIntegerEncoding(np.dtype("<u4")),
    "uint64": NumpyIntegerEncoding(np.dtype("<u8")),
    "int8": NumpyIntegerEncoding(np.dtype("<i1")),
    "int16": NumpyIntegerEncoding(np.dtype("<i2")),
    "int32": NumpyIntegerEncoding(np.dtype("<i4")),
    "int64": NumpyIntegerEncoding(np.dtype("<i8")),
    "float16": NumpyFloatEncoding(np.dtype("<f2")),
    "float32": NumpyFloatEncoding(np.dtype("<f4")),
    "float64": NumpyFloatEncoding(np.dtype("<f8")),
    "str_int": NumberTextEncoding(int),
    "str_float": NumberTextEncoding(float),
    "str_decimal": NumberTextEncoding(Decimal),
    "json": JsonEncoding(),
}
_NOT_SERVED = ("pil", "jpeg", "png", "jpeg_array", "jpegarray", "list[pil]", "list[jpeg]", "list[png]", "pkl")
_UNSAFE = ("pkl",)


@lru_cache(maxsize=1024)
def encoding(name: str) -> Encoding:
    """Find an encoding by its name, for example ``"int"`` or ``"ndarray:float32:2,3"``.

    Raises:
        ConfigError: There is no such encoding.
        UnsupportedError: This version does not serve it.
    """
    if name in _ENCODINGS:
        return _ENCODINGS[name]
    family, _, config = name.partition(":")
    if family == "ndarray":
        return parse_ndarray(config)
    if name in _NOT_SERVED:
        raise UnsupportedError(f"the encoding {name} is not served by this version")
    known = ", ".join([*_ENCODINGS, "ndarray", *_NOT_SERVED])
    raise ConfigError(f"an encoding must be one of {known}, but got {name!r}")


def is_unsafe(name: str) -> bool:
    """Whether reading this encoding may run code that whoever wrote the data chose."""
    return name in _UNSAFE


def encode_value(column_encoding: Encoding, value: Any) -> bytes:
    """Encode a value, unless it is ``bytes`` already: those are stored as they are, whatever the encoding.

    Raises:
        EncodingError: The value does not fit, or the bytes have not the size that this encoding fixes.
    """
    data = value if isinstance(value, bytes) else column_encoding.encode(value)
    if column_encoding.size is not None and len(data) != column_encoding.size:
        raise EncodingError(f"expected {column_encoding.size} bytes, but got {len(data)}")
    return data
