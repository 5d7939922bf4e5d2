"""JSON of which nothing is lost unseen.

Parsers keep the last of several values of one key, make infinity of a number that is too large, and drop digits that a
float cannot hold.
"""

from __future__ import annotations

import json
from typing import Any

from lightning_streaming.formats.exact import parse_exact_float


class RepeatedKeyError(ValueError):
    """An object has a key twice."""


def parse_json(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        RepeatedKeyError: An object in it, at any depth, has a key twice.
        ValueError: It is not JSON.
        EncodingError: A number in it would lose digits; it is a ValueError too.
        RecursionError: It is too deep.
    """
    return json.loads(text, object_pairs_hook=_object, parse_float=parse_exact_float)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"the key {twice!r} is there twice; keep one of them")
    return made
