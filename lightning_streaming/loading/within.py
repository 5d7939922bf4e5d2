"""Datasets within datasets: who reads ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.utils.data import Dataset

_Holders = (Dataset, dict, list, tuple)  # no other mapping: a file's, say, would read all its values
_MOST_HELD = 100_000
"""Entries of a list or dict beyond which it holds samples, not datasets."""


def datasets_within(holder: object) -> Iterator[object]:
    """A dataset and all that it holds, also in lists and dicts; nothing for anything else."""
    yield from _within([holder], set())


def _within(holders: Iterable[object], known: set[int]) -> Iterator[object]:
    for holder in holders:
        if not isinstance(holder, _Holders) or id(holder) in known:
            continue
        known.add(id(holder))
        if isinstance(holder, Dataset):
            yield holder
            yield from _within(vars(holder).values(), known)
        elif len(holder) <= _MOST_HELD:
            yield from _within(holder.values() if isinstance(holder, dict) else holder, known)
