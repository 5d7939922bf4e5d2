"""Values of samples as a person can read them: short, on one line, and harmless to a terminal."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.tools.console import counted

_MOST_CHARACTERS = 160
_MOST_BYTES = 24
_MOST_NUMBERS = 8
_MOST_ITEMS = 4
_DEEPEST = 3


def render(value: Any, depth: int = 0) -> str:
    """Describe a value.

    Texts are quoted, and long ones cut; arrays show dtype, shape and their ends; images mode and size; bytes their
    number and beginning. For example ``uint16[2049] 17 4 901 7 … 3 0 12 9``.

    Args:
        value: What a column was decoded to.
        depth: In how many lists or mappings it lies.
    """
    if isinstance(value, str):
        return _cut_text(value)
    if isinstance(value, bytes):
        return _cut_bytes(value)
    if isinstance(value, np.ndarray):
        return _ends(value)
    if isinstance(value, np.generic | Decimal | bool | float | None):
        return str(value)
    if is_image(value):
        return f"image {value.mode} {value.width}×{value.height}"
    if isinstance(value, Mapping):
        items = (f"{name(str(key))}: {render(item, depth + 1)}" for key, item in value.items())
        return "{" + _first_of(items, len(value), depth) + "}"
    if isinstance(value, list | tuple):
        return "[" + _first_of((render(item, depth + 1) for item in value), len(value), depth) + "]"
    return _cut_repr(value)


def name(text: str) -> str:
    """A name as it is, or quoted if it would do something to a terminal."""
    return text if text.isprintable() and text else repr(text)


def is_image(value: object) -> bool:
    """Whether a value is a PIL image; where PIL is not imported, nothing is."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def _cut_text(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return repr(text)
    return f"{text[:_MOST_CHARACTERS]!r}… ({len(text):,} characters)"


def _cut_bytes(data: bytes) -> str:
    more = "…" if len(data) > _MOST_BYTES else ""
    return f"{counted(len(data), 'byte')} {data[:_MOST_BYTES]!r}{more}"


def _ends(array: NDArray[Any]) -> str:
    shape = "×".join(map(str, array.shape))
    half = _MOST_NUMBERS // 2
    if array.size <= _MOST_NUMBERS:
        numbers = " ".join(map(str, array.flat))
    else:
        numbers = " ".join([*map(str, array.flat[:half]), "…", *map(str, array.flat[-half:])])
    return f"{array.dtype}[{shape}] {numbers}".rstrip()


def _first_of(items: Any, length: int, depth: int) -> str:
    if depth >= _DEEPEST and length:
        return f"… {counted(length, 'item')}"
    shown = [item for item, _ in zip(items, range(_MOST_ITEMS), strict=False)]
    return ", ".join(shown) + (f", … {length:,} items" if length > _MOST_ITEMS else "")


def _cut_repr(value: object) -> str:
    try:
        text = reprlib.repr(value)
    except ValueError:  # Python refuses to write ints of thousands of digits
        return f"a huge {type(value).__name__}"
    return "".join(character if character.isprintable() else " " for character in text)
