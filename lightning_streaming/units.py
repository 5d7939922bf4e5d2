"""Sizes and counts as people write them: "64mb" for bytes (powers of 1024), "1.5m" for samples (powers of 1000)."""

from __future__ import annotations

import re
from math import ceil
from numbers import Integral

from lightning_streaming.errors import ConfigError

_BYTE_UNITS = {unit: 1024**power for power, unit in enumerate(["b", "kb", "mb", "gb", "tb", "pb", "eb", "zb", "yb"])}
_COUNT_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LONGEST_TEXT = 64
"""Characters; no size or count that means anything is longer."""
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)")


def parse_bytes(value: int | float | str, name: str = "size") -> int:
    """Turn ``"64mb"``, ``"1.5 gb"``, ``"100"`` or a number into bytes.

    Units are powers of 1024, in either case; a fractional product is truncated.

    Args:
        value: The size as the user wrote it.
        name: What to call it in an error.

    Raises:
        ConfigError: The text is not a size, or the size is negative.
    """
    return _parse(value, name, _BYTE_UNITS, example='"64mb"')


def parse_count(value: int | float | str, name: str = "count") -> int:
    """Turn ``"100k"``, ``"1.5m"``, ``"2b"``, ``"1t"`` or a number into a count of samples.

    Units are powers of 1000, in either case; a fractional product is truncated.

    Args:
        value: The count as the user wrote it.
        name: What to call it in an error.

    Raises:
        ConfigError: The text is not a count, or the count is negative.
    """
    return _parse(value, name, _COUNT_UNITS, example='"100k"')


def _parse(value: int | float | str, name: str, units: dict[str, int], example: str) -> int:
    if not isinstance(value, str):
        if not value >= 0 or value == float("inf"):
            raise ConfigError(f"{name} must be a finite number that is not negative, but got {value}")
        return int(value)
    match = _NUMBER_AND_UNIT.fullmatch(value.strip().lower()) if len(value) <= _LONGEST_TEXT else None
    if match is None or (match[2] and match[2] not in units):
        raise ConfigError(
            f"{name} must be a number, or a number followed by one of {', '.join(units)} (like {example}), "
            f"but got {value!r}"
        )
    number, unit = match[1], match[2]
    if number.isdigit():
        return int(number) * units.get(unit, 1)
    if units.get(unit, 1) == 1:
        raise ConfigError(f"{name} must be a whole number where its unit is 1, but got {value!r}")
    return int(float(number) * units[unit])


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


def check_at_least(name: str, value: int | None, least: int) -> None:
    """Refuse what is neither None nor a whole number of at least ``least``.

    Raises:
        ConfigError: This is.
    """
    if value is not None and not (isinstance(value, Integral) and not isinstance(value, bool) and value >= least):
        raise ConfigError(f"{name} must be a whole number of at least {least}, but got {value!r}")
