"""Sizes and counts as people write them: "64mb" for bytes (powers of 1024), "1.5m" for samples (powers of 1000)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fractions import Fraction
from math import ceil, isfinite
from numbers import Integral, Real

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr

_BYTE_UNITS = {unit: 1024**power for power, unit in enumerate(["b", "kb", "mb", "gb", "tb", "pb", "eb", "zb", "yb"])}
_COUNT_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LONGEST_TEXT = 64
"""Characters; no size or count that means anything is longer."""
LARGEST_COUNT = 2**62 - 1
"""The largest count that has room in 64 bits for what is added to it."""
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)")


def parse_bytes(value: int | float | str, name: str = "size", option: str | None = None) -> int:
    """Turn ``"64mb"``, ``"1.5 gb"``, ``"100"`` or a number into bytes.

    Units are powers of 1024, in either case; a part of a byte is truncated.

    Args:
        value: The size as the user wrote it.
        name: What to call it in an error.
        option: Name of the option. None: ``name``.

    Raises:
        ConfigError: The value is not a size, or the size is negative.
    """
    return int(_parse(value, name, option or name, _BYTE_UNITS, example='"64mb"'))


def parse_count(value: int | float | str, name: str = "count", option: str | None = None) -> int:
    """Turn ``"100k"``, ``"1.5m"``, ``"2b"``, ``"1t"`` or a whole number into a count of samples.

    Units are powers of 1000, in either case.

    Args:
        value: The count as the user wrote it.
        name: What to call it in an error.
        option: Name of the option. None: ``name``.

    Raises:
        ConfigError: The value is not a count, or the count is negative, too large or not whole.
    """
    option = option or name
    count = _parse(value, name, option, _COUNT_UNITS, example='"100k"')
    if count % 1:
        raise ConfigError(f"{name} must be a whole number, but got {short_repr(value)}", option=option)
    if count > LARGEST_COUNT:
        raise ConfigError(f"{name} must be at most {LARGEST_COUNT}, but got {short_repr(value)}", option=option)
    return int(count)


def _parse(
    value: int | float | str, name: str, option: str, units: dict[str, int], example: str
) -> int | float | Fraction:
    if not isinstance(value, str):
        plain = plain_number(value)
        if plain is None or plain < 0:
            raise ConfigError(
                f"{name} must be a finite number that is not negative, or a text like {example}, "
                f"but got {short_repr(value)}",
                option=option,
            )
        return plain
    match = _NUMBER_AND_UNIT.fullmatch(value.strip().lower()) if len(value) <= _LONGEST_TEXT else None
    if match is None or (match[2] and match[2] not in units):
        raise ConfigError(
            f"{name} must be a number, or a number followed by one of {', '.join(units)} (like {example}), "
            f"but got {short_repr(value)}",
            option=option,
        )
    number, unit = match[1], units.get(match[2], 1)
    if unit == 1 and not number.isdigit():
        raise ConfigError(
            f"{name} must be a whole number where its unit is 1, but got {short_repr(value)}", option=option
        )
    return Fraction(number) * unit


def format_bytes(size: float) -> str:
    """Say a number of bytes the way a person would: ``"1.4 GB"``."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PB"


def unit_as_written(size: int) -> tuple[int, str]:
    """Bytes and name of the unit that a configuration has of such a size: one of which it has 100 or more, or bytes."""
    return next(((unit, name) for unit, name in ((2**20, "mb"), (2**10, "kb")) if size >= 100 * unit), (1, "b"))


def bytes_as_written(size: int) -> str:
    """A limit as a configuration has it, rounded up: ``"1200mb"``, or ``"5400kb"`` where megabytes are too coarse."""
    unit, name = unit_as_written(max(size, 100 * 2**10))
    return f"{ceil(size / unit)}{name}"


def plain_number(value: object) -> int | float | None:
    """Return a finite number of Python or NumPy as one of Python; None for anything else, such as True or a text."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if not isfinite(number):
        return None
    return int(value) if isinstance(value, Integral) else number


def check_whole(name: str, value: object, least: int, most: int | None = None, option: str | None = None) -> int:
    """Return a whole number of Python or NumPy as one of Python.

    Args:
        name: What to call it in an error.
        value: As the user wrote it.
        least: The smallest that is allowed.
        most: The largest that is allowed. None: any that counts samples.
        option: Name of the option. None: ``name``.

    Raises:
        ConfigError: ``value`` is not a whole number in this range.
    """
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or not least <= number <= (LARGEST_COUNT if most is None else most):
        allowed = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        raise ConfigError(
            f"{name} must be a whole number {allowed}, but got {short_repr(value)}", option=option or name
        )
    return number


def store_whole(
    options: object, field: str, least: int, most: int | None = None, *, or_none: bool = False, name: str | None = None
) -> None:
    """Check a whole number among some options, and store it there as a number of Python.

    Args:
        options: A dataclass, frozen or not.
        field: Which of its fields.
        least: The smallest that is allowed.
        most: The largest that is allowed. None: any that counts samples.
        or_none: Whether None is allowed, too.
        name: What to call it in an error. None: as the field.

    Raises:
        ConfigError: It is not a whole number in this range.
    """
    value = getattr(options, field)
    if value is not None or not or_none:
        object.__setattr__(options, field, check_whole(name or field, value, least, most, field))


def check_text(option: str, value: object, expected: str) -> None:
    """Check a text: no file name and no program can hold a null byte or a lone surrogate.

    Args:
        option: Name of the option.
        value: The text as the user passed it.
        expected: Description of valid values.

    Raises:
        ConfigError: It is no such text.
    """
    try:
        is_text = isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        is_text = False
    if not is_text:
        raise ConfigError(f"{option} must be {expected}, but got {short_repr(value)}", option=option)


def check_path(option: str, value: object, expected: str) -> str:
    """Return a path or URL, which may be a ``PathLike``, as text.

    Args:
        option: Name of the option.
        value: The path as the user passed it.
        expected: Description of valid values.

    Raises:
        ConfigError: It is none, or holds characters that no file name can.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(path, str) and not path:
        raise ConfigError(f"{option} must be {expected}, but is empty", option=option)
    check_text(option, path, expected)
    return str(path)


def is_one_of(value: object, known: Iterable[str | None]) -> bool:
    """Return whether a value is one of some texts, or None; of an array, which compares each of its values, False."""
    return (value is None or isinstance(value, str)) and value in tuple(known)


def check_truth(name: str, value: object) -> None:
    """Check an option that is true or false: a text such as "false" would count as true.

    Args:
        name: Name of the option.
        value: What the user passed; None where another default holds.

    Raises:
        ConfigError: It is neither a truth value nor a number that is 0 or 1.
    """
    is_truth = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # NumPy's, by both its names
    if value is not None and not is_truth and plain_number(value) not in (0, 1):
        raise ConfigError(f"{name} must be True or False, but got {short_repr(value)}", option=name)
