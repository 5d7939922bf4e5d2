"""Datasets within datasets: who reads ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch.utils.data import Dataset

_Holders = (Dataset, Mapping, list, tuple)


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
        elif isinstance(holder, Mapping):
            yield from _within(holder.values(), known)
        else:
            yield from _within(holder, known)
