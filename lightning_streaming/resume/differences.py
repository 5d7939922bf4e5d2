"""Differences between two fingerprints, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_streaming.escaping import in_one_line, short_repr, shortened

_MOST_ROWS = 24
"""Differences that are shown one by one."""


class Difference(NamedTuple):
    """A setting, or a number of the data, that has changed."""

    setting: str
    """Where it is in the fingerprint, like "order.shuffle"."""
    saved: str
    """What it was, in few words."""
    now: str
    """What it is."""


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return each difference between two fingerprints, as states hold them.

    >>> differences({"order": {"shuffle": True}}, {"order": {"shuffle": False}})
    [Difference(setting='order.shuffle', saved='True', now='False')]
    """
    return list(_differences(saved, now, ""))


def in_words(items: Sequence[Difference]) -> str:
    """Return differences as plain text: one as a phrase, several as a table whose columns are two spaces apart.

    Names and values of a saved state are escaped, so that they add no lines.

    >>> in_words([Difference("order.shuffle", "True", "False")])
    'order.shuffle: saved True, now False'
    >>> print(in_words([Difference("order.shuffle", "True", "False"), Difference("streams.0.shards", "6", "3")]))
    setting           saved  now
    order.shuffle     True   False
    streams.0.shards  6      3
    """
    items = escaped(items)
    if len(items) == 1:
        return f"{items[0].setting}: saved {items[0].saved}, now {items[0].now}"
    rows = [("setting", "saved", "now"), *items[:_MOST_ROWS]]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, wide, strict=True)).rstrip() for row in rows]
    more = len(items) - _MOST_ROWS
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def escaped(items: Sequence[Difference]) -> list[Difference]:
    return [Difference(*(shortened(in_one_line(text)) for text in item)) for item in items]


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> Iterator[Difference]:
    for key in [*saved, *(key for key in now if key not in saved)]:
        name = f"{where}.{key}" if where else str(key)
        before, after = _by_number(saved.get(key, "absent")), _by_number(now.get(key, "absent"))
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, name)
        elif not _are_equal(before, after):
            yield Difference(name, _brief(before), _brief(after))


def _by_number(value: object) -> object:
    """Return a list of mappings as a mapping, so that they are compared field by field."""
    is_list = isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value)
    return dict(enumerate(value)) if is_list and isinstance(value, list) else value


def _are_equal(before: object, after: object) -> bool:
    try:
        return bool(before == after)
    except (ValueError, RuntimeError):  # an array of several values, of which no run saves any
        return False


def _brief(value: object) -> str:
    if isinstance(value, Mapping) and "class" in value:
        return str(value["class"])
    if isinstance(value, Mapping) and value and all(isinstance(key, int) for key in value):
        return ", ".join(map(_brief, value.values()))
    if isinstance(value, Mapping):
        return f"{value['samples']} samples" if "samples" in value else "there"
    return short_repr(value)
