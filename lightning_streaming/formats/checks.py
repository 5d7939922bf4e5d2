"""Checks that the encodings share, and values in the words of an error."""

from __future__ import annotations

import reprlib

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
