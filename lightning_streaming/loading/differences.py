"""What differs between a saved fingerprint and today's, and how to say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import indent
from typing import Any, NamedTuple


class Difference(NamedTuple):
    """One setting, or one number of the data, that is not what it was."""

    setting: str
    """Where it is in the fingerprint, like "order.shuffle"."""
    saved: str
    """What it was, in few words."""
    now: str
    """What it is."""


_MOST_ROWS = 24
"""Differences that are told one by one."""


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Each difference between two fingerprints.

    >>> differences({"order": {"shuffle": True}}, {"order": {"shuffle": False}})
    [Difference(setting='order.shuffle', saved='True', now='False')]
    """
    return list(_differences(saved, now, ""))


def in_words(found: Sequence[Difference]) -> str:
    """Differences as plain text: one as a phrase, several as a table whose columns are two spaces apart.

    >>> in_words([Difference("order.shuffle", "True", "False")])
    'order.shuffle: saved True, now False'
    >>> print(in_words([Difference("order.shuffle", "True", "False"), Difference("streams.0.shards", "6", "3")]))
    setting           saved  now
    order.shuffle     True   False
    streams.0.shards  6      3
    """
    if len(found) == 1:
        return f"{found[0].setting}: saved {found[0].saved}, now {found[0].now}"
    rows = [("setting", "saved", "now"), *found[:_MOST_ROWS]]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, wide, strict=True)).rstrip() for row in rows]
    more = len(found) - _MOST_ROWS
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def refusal(found: Sequence[Difference]) -> str:
    """What to say of a saved position that is refused for these differences, with the way out."""
    table = f"the saved position belongs to other data or another order:\n{indent(in_words(found), '  ')}"
    way_out = 'resume with on_change="warn" to go on from the same position all the same.'
    hashes = [one for one in found if one.setting.endswith(".hashes")]
    if not hashes:
        return f"{table}\nPut these back, or {way_out}"
    changes = "; ".join(dict.fromkeys(f"{one.saved} → {one.now}" for one in hashes))
    if len(hashes) == len(found):
        return (
            f"{table}\nOnly what the indexes tell of the shards differs (hashes: {changes}); their names, samples and "
            f"sizes are the same. If the shards were not written anew, {way_out}"
        )
    anew = f"Data that is written anew with other hashes (hashes: {changes}) has other shards."
    return f"{table}\n{anew} Put it back, or {way_out}"


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> Iterator[Difference]:
    for key in [*saved, *(key for key in now if key not in saved)]:
        name = f"{where}.{key}" if where else str(key)
        before, after = saved.get(key, "absent"), now.get(key, "absent")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, name)
        elif before != after:
            yield Difference(name, _brief(before), _brief(after))


def _brief(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{value.get('samples', '?')} samples"
    return repr(value)
