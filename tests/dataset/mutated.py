"""Saved states with one thing wrong: every key dropped, and every value replaced by each of many that it cannot be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tests.helpers import State

Path = tuple[Any, ...]
WRONG: tuple[Any, ...] = (
    None,
    "x",
    "",
    True,
    False,
    0,
    -1,
    10**6,
    10**9,
    2**31,
    2**62,
    2**63,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    [],
    [1],
    {},
    {"x": 1},
    {1: 2},
)


def mutations(state: State) -> Iterator[tuple[str, Any]]:
    """Each state with one change, and what the change is."""
    for wrong in WRONG:
        yield f"all -> {wrong!r}", wrong
    for path in _paths(state, ()):
        where = ".".join(map(str, path))
        yield f"{where} dropped", _changed(state, path, drop=True)
        yield f"{where} renamed", _renamed(state, path)
        for wrong in WRONG:
            yield f"{where} -> {wrong!r}", _changed(state, path, wrong)


def _paths(value: Any, path: Path) -> Iterator[Path]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def _changed(state: State, path: Path, value: Any = None, *, drop: bool = False) -> State:
    changed = copy.deepcopy(state)
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    if drop:
        del holder[path[-1]]
    else:
        holder[path[-1]] = copy.deepcopy(value)
    return changed


def _renamed(state: State, path: Path) -> State:
    changed = copy.deepcopy(state)
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    value = holder.pop(path[-1])
    if isinstance(holder, dict):
        holder[f"{path[-1]}x"] = value
    else:
        holder.append(value)
    return changed
