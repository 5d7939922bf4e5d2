"""Which ids of a stream's selected samples a joined dataset lacks, looked for in the whole stream ahead of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.formats.columns import listed
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.selection.bitmap import Selection
from lightning_streaming.selection.evaluate import select_partners
from lightning_streaming.selection.joins import JoinedDataset
from lightning_streaming.selection.scanning import ShardScan
from lightning_streaming.waits import ProgressCallback

MOST_TOLD = 10
"""Ids that are told one by one."""
_AT_ONCE = 1 << 20
"""Samples that are looked through together."""


class MissingIds(NamedTuple):
    """Ids of a stream that a joined dataset has not."""

    join: str
    """What errors call the joined dataset."""
    on: str
    """The column of the ids."""
    samples: int
    """Selected samples of the stream that have one of them."""
    first: int
    """The first of these, by its number in the stream."""
    values: tuple[Any, ...]
    """The ids of the first of them, ``MOST_TOLD`` at most."""


def find_missing_ids(
    index: DatasetIndex,
    cache: ShardCache,
    joined: JoinedDataset,
    selection: Selection | None,
    room: CacheQuota,
    progress: ProgressCallback | None,
) -> MissingIds | None:
    """The ids of a stream's selected samples that a dataset has not which is joined with it by id; None if it has all.

    Args:
        index: The stream's.
        cache: Where the stream's files are.
        joined: The dataset, its ids indexed.
        selection: The stream's; None where nothing is left out.
        room: Where what is fetched is counted.
        progress: Is told how far it is; None to log it.

    Raises:
        FormatError: A shard is damaged.
        StorageError: A shard could not be fetched, or the index of ids is damaged.
    """
    on, ids = joined.asked.key, joined.ids
    assert on is not None, "it is joined by id"
    assert ids is not None, "its ids are indexed"
    version = joined.cache.data_version(joined.index)
    found = select_partners(on, ids, version, selection, index, cache, room, progress)
    samples = (index.num_samples if selection is None else len(selection)) - len(found)
    if not samples:
        return None
    joined.check_index_of_ids()
    scan = ShardScan(index=index, cache=cache, room=room)
    numbers = list(_first_without(found, selection))
    return MissingIds(joined.cache.label, on, samples, numbers[0], tuple(_values(scan, on, numbers)))


def _first_without(found: Selection, selection: Selection | None) -> Iterator[int]:
    """The first selected samples that are not among those found."""
    left = MOST_TOLD
    for first in range(0, found.num_stored, _AT_ONCE):
        numbers = np.arange(first, min(first + _AT_ONCE, found.num_stored))
        lacks = ~found.has(numbers)
        if selection is not None:
            lacks &= selection.has(numbers)
        here = numbers[lacks][:left].tolist()
        yield from here
        left -= len(here)
        if not left:
            return


def _values(scan: ShardScan, column: str, numbers: list[int]) -> Iterator[Any]:
    stops = np.cumsum(scan.index.samples_per_shard())
    for number in numbers:
        shard = int(np.searchsorted(stops, number, side="right"))
        first = int(stops[shard]) - scan.index.shards[shard].samples
        yield listed(scan.columns([shard], [column])[column])[number - first]
