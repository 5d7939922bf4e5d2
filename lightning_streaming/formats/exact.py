"""Values that an encoding would change: it may take them, as the reference does, but they would not come back.

A float may be rounded to the width of its column, because whoever chose the width chose that. Nothing else may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.checks import brief
from lightning_streaming.formats.image_files import check_whole

_SAFE_DIGITS = 15
"""Digits of a decimal number that a float64 keeps, whichever they are."""
_MOST_DIGITS = 767
"""Digits of the longest number that a float64 is exactly."""
_WIDTHS = (8, 16, 32, 64)

Check = Callable[[Any], None]
"""Raises EncodingError where a value would change."""


def find_check(encoding_name: str) -> Check | None:
    """What a value must pass so that it comes back from this encoding as it is; None where the encoding sees to it."""
    return _CHECKS.get(encoding_name)


def check_float(value: Any, dtype: np.dtype[Any]) -> None:
    """Refuse a number that a float of some width would make infinite or zero, and an integer whose digits it loses.

    Args:
        value: A number of Python or numpy.
        dtype: The float.

    Raises:
        EncodingError: It would be another number than rounding makes of it.
    """
    try:
        with np.errstate(all="ignore"):
            made = dtype.type(value)
    except OverflowError:
        made = dtype.type(math.inf)
    if isinstance(value, (int, np.integer)):
        if not np.isfinite(made) or int(made) != int(value):
            raise EncodingError(
                f"{brief(int(value))} would lose digits as {dtype.name}; choose a wider encoding, or int"
            )
    elif np.isfinite(value) and not np.isfinite(made):
        raise EncodingError(f"{value} is too large for {dtype.name}, where it would be {made}; choose a wider encoding")
    elif value != 0 and made == 0:
        raise EncodingError(f"{value} is too small for {dtype.name}, where it would be 0; choose a wider encoding")


def parse_exact_float(text: str) -> float:
    """A number in decimal digits as a float that says all of them.

    ``0.1`` and ``0.10000000000000001`` are both what a program writes of one float, and taken. What has more digits
    than a float keeps, or is out of its range, is not.

    Raises:
        EncodingError: Digits would be lost.
    """
    number = float(text)
    if (len(text) <= _SAFE_DIGITS and "e" not in text and "E" not in text) or repr(number) == text:
        return number  # nearly all, because what follows takes ten times as long
    if not math.isfinite(number):
        if any(digit in text for digit in "0123456789"):
            raise EncodingError(f"{text:.60} is too large for a float, where it would be {number}; write it as text")
        return number  # it says so itself
    said = Decimal(text)
    digits = len("".join(map(str, said.as_tuple().digits)).strip("0")) or 1
    if digits > _MOST_DIGITS or Decimal(f"{number:.{digits - 1}e}") != said:
        raise EncodingError(f"{text:.60} would lose digits as a float, where it is {number!r}; write it as text")
    return number


def _refuse_change(value: Any, kind: str, becomes: str) -> None:
    raise EncodingError(
        f"expected {kind}, but got {type(value).__name__} {brief(value)}, which {becomes}; convert it yourself if that "
        "is meant"
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
    """Refuse what JSON cannot say, or gives back as something else."""
    try:
        _check_said(value)
    except RecursionError:
        raise EncodingError(f"expected a value of JSON, but {brief(value)} is nested too deep") from None


def _check_said(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                _refuse_change(key, "a key that is text", "would come back as text")
            _check_said(item)
    elif isinstance(value, list):
        for item in value:
            _check_said(item)
    elif type(value) not in (str, int, float, bool, type(None)):
        _refuse_change(value, "a value of JSON", "would come back as something else, or not at all")
    elif isinstance(value, float) and not math.isfinite(value):
        _refuse_change(value, "a number of JSON", "JSON cannot say")


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
"""By encoding. ``int`` and ``float`` are also those of split shards. Arrays are of one dtype and shape anyway."""
