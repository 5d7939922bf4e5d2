"""Encodings of columns by name: built-in ones, those that users register, and checks of changed values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats.images import (
    ImageFileEncoding,
    ImageListEncoding,
    JpegArrayEncoding,
    PilEncoding,
    check_whole,
    require_pillow,
)
from lightning_streaming.formats.values import (
    BytesEncoding,
    IntEncoding,
    JsonEncoding,
    NumberTextEncoding,
    NumpyFloatEncoding,
    NumpyIntegerEncoding,
    PickleEncoding,
    StrEncoding,
    brief,
    check_length,
    parse_ndarray,
)


class Encoding(Protocol):
    """Encoder and decoder of the values of one column."""

    @property
    def size(self) -> int | None:
        """Bytes of every payload, or None if they vary."""
        ...

    def encode(self, value: Any) -> bytes:
        """Return the payload of a value.

        Raises:
            EncodingError: The value does not fit; the message states the expected and the actual value.
        """
        ...

    def decode(self, data: bytes | memoryview) -> Any:
        """Return the value of a payload, which shares no memory with it.

        Raises:
            EncodingError: The payload is not one of this encoding.
        """
        ...


_ENCODINGS: Mapping[str, Encoding] = {
    "bytes": BytesEncoding(),
    "str": StrEncoding(),
    "int": IntEncoding(),
    **{f"uint{8 * size}": NumpyIntegerEncoding(np.dtype(f"<u{size}")) for size in (1, 2, 4, 8)},
    **{f"int{8 * size}": NumpyIntegerEncoding(np.dtype(f"<i{size}")) for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": NumpyFloatEncoding(np.dtype(f"<f{size}")) for size in (2, 4, 8)},
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

# Global, because a name must mean the same to every dataset and writer of the process. Datasets pass it to their worker
# processes.
_REGISTERED: dict[str, _UserEncoding] = {}


def encoding(name: str) -> Encoding:
    """Find an encoding by its name, for example ``"int"`` or ``"ndarray:float32:2,3"``.

    Raises:
        ConfigError: The encoding is unknown.
        MissingDependencyError: It is for images, and Pillow is not installed.
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
        f"an encoding must be one of {known}, but got {name!r}",
        hint="if it is your own, call register_encoding first",
        option="columns",
    )


_parsed_ndarray = lru_cache(maxsize=1024)(parse_ndarray)


def register_encoding(name: str, encoding_class: type[EncodingClass]) -> None:
    """Register a custom encoding in this process, for writers and readers.

    A dataset passes it on to its DataLoader workers. Any other process that reads or writes the column must register it
    too, under the same name: the data contains only the name. Registering the same class again has no effect.

    Args:
        name: Name of the encoding in ``columns``; not a built-in one, and without colon.
        encoding_class: Class of the encoding, called without arguments. It must be defined at the top of a module, so
            that worker processes can import it. It has ``size``, the bytes of every payload or None if they vary;
            ``encode(value) -> bytes``; and ``decode(data: bytes)``, which returns the value.

    Raises:
        ConfigError: The name is taken or invalid, or the class lacks one of these.
    """
    if not isinstance(name, str) or not name or ":" in name:
        raise ConfigError(f"an encoding's name must be a text with no colon, but got {name!r}", option="name")
    if name in _ENCODINGS or name in _IMAGE_ENCODINGS or name == "ndarray":
        raise ConfigError(f"{name} is a built-in encoding", hint="choose another name", option="name")
    registered = _REGISTERED.get(name) or _UserEncoding(name, encoding_class)
    if registered.kind is not encoding_class:
        raise ConfigError(
            f"{name} is registered as {registered.kind.__qualname__} already", hint="choose another name", option="name"
        )
    _REGISTERED[name] = registered


def registered_encodings() -> dict[str, type[EncodingClass]]:
    """Return the encodings registered in this process, name to class, to register them in another."""
    return {name: registered.kind for name, registered in _REGISTERED.items()}


def is_unsafe(name: str) -> bool:
    """Return whether reading this encoding may run code chosen by the data's author."""
    return name in _UNSAFE


def encode_value(column_encoding: Encoding, value: Any) -> bytes:
    """Encode a value; ``bytes`` are stored unchanged with any encoding.

    Raises:
        EncodingError: The value does not fit, or the bytes do not have the size that this encoding fixes.
    """
    data = value if isinstance(value, bytes) else column_encoding.encode(value)
    if column_encoding.size is not None:
        check_length(data, column_encoding.size)
    return data


# --- encodings of users ---


class EncodingClass(Protocol):
    """Interface of a user's class, which is created without arguments."""

    @property
    def size(self) -> int | None:
        """Bytes of every payload, or None if they vary. May be a class attribute."""
        ...

    def encode(self, value: Any, /) -> bytes:
        """Return the payload of a value."""
        ...

    def decode(self, data: bytes, /) -> Any:
        """Return the value of a payload, which is a copy of the shard's bytes."""
        ...


@dataclass(frozen=True, slots=True)
class _UserEncoding:
    """An encoding of a user's class. Errors of the class become an EncodingError that names it.

    Raises:
        ConfigError: The class cannot be imported by its name, cannot be created, or lacks a method.
    """

    name: str
    """Its name in columns."""
    kind: type[EncodingClass]
    """The user's class."""
    size: int | None = field(init=False)
    """Bytes of every payload, or None if they vary."""
    _encoding: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_importable(self.kind)
        try:
            instance = self.kind()
        except TypeError as error:
            raise ConfigError(
                f"{self.kind.__qualname__} must be callable without arguments, but {error}", option="encoding_class"
            ) from error
        size = getattr(instance, "size", "no such attribute")
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(
                f"{self.kind.__qualname__}.size must be the bytes of every payload, or None if they vary, but is "
                f"{size!r}",
                option="encoding_class",
            )
        for method in ("encode", "decode"):
            if not callable(getattr(instance, method, None)):
                raise ConfigError(f"{self.kind.__qualname__} must have a method {method}", option="encoding_class")
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "_encoding", instance)

    def encode(self, value: Any) -> bytes:
        try:
            data = self._encoding.encode(value)
        except Exception as error:  # a user's code may raise anything
            raise self._failed("encode", value, error) from error
        if not isinstance(data, bytes):
            raise EncodingError(f"{self.kind.__qualname__}.encode must return bytes, but returned {brief(data)}")
        return data

    def decode(self, data: bytes | memoryview) -> Any:
        if self.size is not None:
            check_length(data, self.size)
        try:
            return self._encoding.decode(bytes(data))
        except Exception as error:  # a user's code may raise anything
            raise self._failed("decode", data, error) from error

    def _failed(self, method: str, value: object, error: Exception) -> EncodingError:
        return EncodingError(
            f"{self.kind.__qualname__}.{method} raised {type(error).__name__}: {error} (for {brief(value)})"
        )


def _check_importable(kind: object) -> None:
    """Raise ConfigError if a worker process could not import a class by its module and name."""
    if not isinstance(kind, type):
        raise ConfigError(f"an encoding must be given as a class, but got {kind!r}", option="encoding_class")
    if "<locals>" in kind.__qualname__:
        raise ConfigError(
            f"{kind.__qualname__} must be defined at the top of a module, so that worker processes can import it",
            option="encoding_class",
        )


# --- values that an encoding would change ---
#
# An encoding may take them, like the reference, but decoding returns other values. A float may be rounded to the width
# of its column, because the user chose the width. Nothing else may change.

_SAFE_DIGITS = 15
"""Digits of a decimal number that a float64 always keeps."""
_MAX_DIGITS = 767
"""Digits of the longest number that a float64 can represent exactly."""
_WIDTHS = (8, 16, 32, 64)

Check = Callable[[Any], None]
"""Raises EncodingError if a value would change."""


def find_check(encoding_name: str) -> Check | None:
    """Return the check that a value stays unchanged with this encoding; None if the encoding checks it."""
    return _CHECKS.get(encoding_name)


def check_float(value: Any, dtype: np.dtype[Any]) -> None:
    """Raise EncodingError if a float would turn a number into infinity or zero, or lose digits of an integer.

    Args:
        value: A number of Python or numpy.
        dtype: Dtype of the float.

    Raises:
        EncodingError: It would change by more than rounding.
    """
    try:
        with np.errstate(all="ignore"):
            rounded = dtype.type(value)
    except OverflowError:
        rounded = dtype.type(math.inf)
    if isinstance(value, (int, np.integer)):
        if not np.isfinite(rounded) or int(rounded) != int(value):
            raise EncodingError(
                f"{brief(int(value))} would lose digits as {dtype.name}", hint="choose a wider encoding, or int"
            )
    elif np.isfinite(value) and not np.isfinite(rounded):
        raise EncodingError(
            f"{value} is too large for {dtype.name}, where it would be {rounded}", hint="choose a wider encoding"
        )
    elif value != 0 and rounded == 0:
        raise EncodingError(
            f"{value} is too small for {dtype.name}, where it would be 0", hint="choose a wider encoding"
        )


def parse_exact_float(text: str) -> float:
    """Parse decimal digits as a float that keeps all of them.

    ``0.1`` and ``0.10000000000000001`` are both common texts of one float, and accepted. Numbers with more digits than
    a float keeps, or out of its range, are not.

    Raises:
        EncodingError: Digits would be lost.
    """
    number = float(text)
    if (len(text) <= _SAFE_DIGITS and "e" not in text and "E" not in text) or repr(number) == text:
        return number  # nearly all; the rest takes ten times as long
    if not math.isfinite(number):
        if any(digit in text for digit in "0123456789"):
            raise EncodingError(
                f"{text:.60} is too large for a float, where it would be {number}", hint="write it as text"
            )
        return number  # the text is inf or nan
    exact = Decimal(text)
    digits = len("".join(map(str, exact.as_tuple().digits)).strip("0")) or 1
    if digits > _MAX_DIGITS or Decimal(f"{number:.{digits - 1}e}") != exact:
        raise EncodingError(f"{text:.60} would lose digits as a float, where it is {number!r}", hint="write it as text")
    return number


def _refuse_change(value: Any, kind: str, becomes: str) -> None:
    raise EncodingError(
        f"expected {kind}, but got {type(value).__name__} {brief(value)}, which {becomes}",
        hint="convert it explicitly if that is intended",
    )


def _check_integer(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        _refuse_change(value, "an integer", "would be written as one")


def _check_number(value: Any, dtype: np.dtype[Any]) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        _refuse_change(value, "a number", "would be written as one")
    check_float(value, dtype)


def _check_text(value: Any) -> None:
    if not isinstance(value, str):
        _refuse_change(value, "text", "would be read as UTF-8")


def _check_json(value: Any) -> None:
    """Raise EncodingError if JSON cannot represent a value, or would change it."""
    try:
        _check_json_value(value)
    except RecursionError:
        raise EncodingError(f"expected a value of JSON, but {brief(value)} is nested too deeply") from None


def _check_json_value(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                _refuse_change(key, "a key that is text", "would be read as text")
            _check_json_value(item)
    elif isinstance(value, list):
        for item in value:
            _check_json_value(item)
    elif type(value) not in (str, int, float, bool, type(None)):
        _refuse_change(value, "a value of JSON", "would be read as another value, or fail")
    elif isinstance(value, float) and not math.isfinite(value):
        _refuse_change(value, "a number of JSON", "JSON cannot represent")


def _check_file(value: Any) -> None:
    if isinstance(value, bytes):
        check_whole(value)


_CHECKS: dict[str, Check] = {
    "int": _check_integer,
    "str_int": _check_integer,
    "float": partial(_check_number, dtype=np.dtype("float64")),
    "str_float": partial(_check_number, dtype=np.dtype("float64")),
    "str": _check_text,
    "json": _check_json,
    "jpeg": _check_file,
    "png": _check_file,
    **{f"{kind}{width}": _check_integer for kind in ("int", "uint") for width in _WIDTHS},
    **{f"float{width}": partial(_check_number, dtype=np.dtype(f"float{width}")) for width in _WIDTHS[1:]},
}
"""By encoding. ``int`` and ``float`` are also those of split shards. Arrays check their dtype and shape."""
