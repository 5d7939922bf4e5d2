"""JSON in which no key is there twice: parsers keep the last of several values, and the others would be lost unseen."""

from __future__ import annotations

import json
from typing import Any


class RepeatedKeyError(ValueError):
    """An object has a key twice."""


def parse_json(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        RepeatedKeyError: An object in it, at any depth, has a key twice.
        ValueError: It is not JSON.
        RecursionError: It is too deep.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"the key {twice!r} is there twice; keep one of them")
    return made
