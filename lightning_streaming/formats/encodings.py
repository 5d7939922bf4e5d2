"""The encodings of columns, by name."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.checks import check_length
from lightning_streaming.formats.images import (
    ImageFileEncoding,
    ImageListEncoding,
    JpegArrayEncoding,
    PilEncoding,
)
from lightning_streaming.formats.ndarray import parse_ndarray
from lightning_streaming.formats.pickles import PickleEncoding
from lightning_streaming.formats.pillow import require_pillow
from lightning_streaming.formats.scalars import (
    BytesEncoding,
    IntEncoding,
    JsonEncoding,
    NumberTextEncoding,
    NumpyFloatEncoding,
    NumpyIntegerEncoding,
    StrEncoding,
)
from lightning_streaming.formats.user_encodings import EncodingClass, UserEncoding


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
    "pkl": PickleEncoding(),
}
_IMAGE_ENCODINGS: Mapping[str, Encoding] = {
    "pil": PilEncoding(),
    "jpeg": ImageFileEncoding("JPEG"),
    "png": ImageFileEncoding("PNG"),
    "jpeg_array": JpegArrayEncoding(),
    "jpegarray": JpegArrayEncoding(),
    "list[pil]": ImageListEncoding(PilEncoding()),
    "list[jpeg]": ImageListEncoding(ImageFileEncoding("JPEG")),
    "list[png]": ImageListEncoding(ImageFileEncoding("PNG")),
}
_UNSAFE = ("pkl",)

# Of the whole process, because a name must mean one thing to every dataset and writer in it. Datasets carry what is
# here to their worker processes.
_REGISTERED: dict[str, UserEncoding] = {}


def encoding(name: str) -> Encoding:
    """Find an encoding by its name, for example ``"int"`` or ``"ndarray:float32:2,3"``.

    Raises:
        ConfigError: There is no such encoding.
        MissingDependencyError: It is one of images, and Pillow is not installed.
    """
    if name in _ENCODINGS:
        return _ENCODINGS[name]
    if name in _IMAGE_ENCODINGS:
        require_pillow()
        return _IMAGE_ENCODINGS[name]
    family, _, config = name.partition(":")
    if family == "ndarray":
        return _parsed_ndarray(config)
    if name in _REGISTERED:
        return _REGISTERED[name]
    known = ", ".join([*_ENCODINGS, "ndarray", *_IMAGE_ENCODINGS, *_REGISTERED])
    raise ConfigError(
        f"an encoding must be one of {known}, but got {name!r}; if it is your own, call register_encoding first"
    )


_parsed_ndarray = lru_cache(maxsize=1024)(parse_ndarray)


def register_encoding(name: str, encoding_class: type[EncodingClass]) -> None:
    """Make an encoding of your own known in this process, to writers and readers.

    A dataset takes it along to its DataLoader workers. Any other process that reads or writes the column must register
    it too, under the same name: the data holds the name only. Saying the same twice changes nothing.

    Args:
        name: What columns call it; no built-in one, and with no colon.
        encoding_class: Makes the encoding, with no arguments. Must stand at the top of a module, so that worker
            processes find it. It has ``size``, the bytes of every payload or None where they vary;
            ``encode(value) -> bytes``; and ``decode(data: bytes)``, which gives the value back.

    Raises:
        ConfigError: The name is taken or cannot be one, or the class is not like this.
    """
    if not isinstance(name, str) or not name or ":" in name:
        raise ConfigError(f"an encoding's name must be a text with no colon, but got {name!r}")
    if name in _ENCODINGS or name in _IMAGE_ENCODINGS or name == "ndarray":
        raise ConfigError(f"{name} is a built-in encoding; choose another name")
    made = _REGISTERED.get(name) or UserEncoding(name, encoding_class)
    if made.kind is not encoding_class:
        raise ConfigError(f"{name} is registered as {made.kind.__qualname__} already; choose another name")
    _REGISTERED[name] = made


def registered_encodings() -> dict[str, type[EncodingClass]]:
    """Name to class of every encoding registered in this process, to register them in another."""
    return {name: one.kind for name, one in _REGISTERED.items()}


def is_unsafe(name: str) -> bool:
    """Whether reading this encoding may run code that whoever wrote the data chose."""
    return name in _UNSAFE


def encode_value(column_encoding: Encoding, value: Any) -> bytes:
    """Encode a value, unless it is ``bytes`` already: those are stored as they are, whatever the encoding.

    Raises:
        EncodingError: The value does not fit, or the bytes have not the size that this encoding fixes.
    """
    data = value if isinstance(value, bytes) else column_encoding.encode(value)
    if column_encoding.size is not None:
        check_length(data, column_encoding.size)
    return data
