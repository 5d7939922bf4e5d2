"""Values of a source to what an encoding takes. What does not fit is an error: nothing is cut, wrapped or parsed.

Only a float may be rounded, to the width of the encoding that was chosen for it, and never to infinity or zero.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, time
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats.encodings import encoding as find_encoding
from lightning_streaming.formats.exact import check_float
from lightning_streaming.formats.image_files import BEGINNINGS, check_whole

IMAGE_BEGINNINGS = {kind.lower(): beginning for kind, beginning in BEGINNINGS.items()}
"""The first bytes of an image file, by the encoding that stores it."""

_FLOAT64 = np.dtype("float64")

Converter = Callable[[Any], Any]


def converter(encoding: str) -> Converter:
    """A function from a value, as JSON, Arrow or numpy give it, to what an encoding takes.

    Integers go into floats that hold them exactly, lists of numbers into arrays, dates and times into ``str`` (ISO
    8601), files of JPEG and PNG as they are into ``jpeg`` and ``png``. Other values must be of the encoding's own type.

    Raises:
        ConfigError: There is no such encoding, or none of these values can have it.
    """
    find_encoding(encoding)  # raises for what does not exist
    family, _, config = encoding.partition(":")
    if family == "ndarray":
        dtype = config.partition(":")[0]
        return partial(_array, dtype=np.dtype(dtype) if dtype else None)
    if encoding in IMAGE_BEGINNINGS:
        return partial(_image, encoding=encoding)
    if encoding not in _CONVERTERS:
        raise ConfigError(
            f"convert does not write the encoding {encoding}; choose one of {', '.join(sorted(_CONVERTERS))}, ndarray, "
            f"{', '.join(IMAGE_BEGINNINGS)}"
        )
    return _CONVERTERS[encoding]


def image_encoding(data: bytes | None) -> str:
    """``jpeg`` or ``png`` by the first bytes of a file; ``bytes`` for anything else."""
    for encoding, beginning in IMAGE_BEGINNINGS.items():
        if data is not None and data.startswith(beginning):
            return encoding
    return "bytes"


def check_image_file(data: bytes) -> None:
    """Refuse an empty file, and a JPEG or PNG file that was cut off.

    Raises:
        EncodingError: It is one of these, or no JPEG or PNG file.
    """
    if not data:
        raise EncodingError("the file is empty; take it away, or put the image there")
    check_whole(data)


def _integer(value: Any) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise _expected("an integer", value)


def _float(value: Any, dtype: np.dtype[Any] = _FLOAT64) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise _expected("a number", value)
    check_float(value, dtype)
    return float(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (date, time)):  # datetime is a date
        return value.isoformat()
    raise _expected("text", value)


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    raise _expected("bytes", value)


def _decimal(value: Any) -> Decimal:
    if isinstance(value, (Decimal, int)) and not isinstance(value, bool):
        return Decimal(value)
    if isinstance(value, str):
        try:
            return Decimal(value)
        except InvalidOperation:
            pass
    raise _expected("a decimal number", value)


def _json(value: Any) -> Any:
    # Bytes are stored as they are, whatever the encoding, and would not be JSON.
    if isinstance(value, bytes):
        raise _expected("what JSON can say", value)
    return value


def _array(value: Any, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise EncodingError(f"expected numbers in rows of one length: {error}") from None
    if found.dtype.kind not in "iuf":
        raise _expected("a list of numbers", value)
    if not isinstance(value, np.ndarray):
        _check_list(value, found.dtype)
    if dtype is None or dtype == found.dtype:
        return found
    if dtype.kind != "f" and found.size and found.dtype.kind == "f":
        raise EncodingError(f"expected {dtype} numbers, but got fractions ({found.dtype})")
    with np.errstate(all="ignore"):
        made = found.astype(dtype)
    if found.size and _is_changed(made, found):
        raise EncodingError(f"expected numbers that {dtype} can hold, but got {found.min()} to {found.max()}")
    return made


def _check_list(value: Any, dtype: np.dtype[Any]) -> None:
    """Refuse what numpy changed to make numbers of one kind of a list: bools, and integers among fractions."""
    if isinstance(value, (list, tuple)):
        kinds = set(map(type, value))
        if bool in kinds:
            raise _expected("a list of numbers", value)
        if kinds & {list, tuple} or (dtype.kind == "f" and kinds - {float}):
            for one in value:
                _check_list(one, dtype)
    elif isinstance(value, int):
        check_float(value, dtype)


def _is_changed(made: NDArray[Any], found: NDArray[Any]) -> bool:
    """Whether another dtype holds other numbers, beyond the rounding of fractions."""
    if made.dtype.kind != "f":
        return not np.array_equal(made, found)
    if found.dtype.kind == "f":
        return bool((np.isfinite(found) & ~np.isfinite(made)).any() or ((found != 0) & (made == 0)).any())
    return not np.isfinite(made).all() or made.ravel().tolist() != found.ravel().tolist()


def _image(value: Any, encoding: str) -> bytes:
    if not isinstance(value, bytes) or not value.startswith(IMAGE_BEGINNINGS[encoding]):
        raise _expected(f"the bytes of a {encoding.upper()} file", value)
    check_whole(value)
    return value


def _expected(what: str, value: object) -> EncodingError:
    if value is None:
        return EncodingError(f"expected {what}, but there is no value")
    shown = f"{len(value)} bytes" if isinstance(value, bytes) else _short(repr(value))
    return EncodingError(f"expected {what}, but got {shown} ({type(value).__name__})")


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


_WIDTHS = (8, 16, 32, 64)
_CONVERTERS: dict[str, Converter] = {
    "int": _integer,
    **{f"{kind}{width}": _integer for kind in ("int", "uint") for width in _WIDTHS},
    **{f"float{width}": partial(_float, dtype=np.dtype(f"float{width}")) for width in (16, 32, 64)},
    "str": _text,
    "bytes": _bytes,
    "json": _json,
    "str_int": _integer,
    "str_float": _float,
    "str_decimal": _decimal,
}
