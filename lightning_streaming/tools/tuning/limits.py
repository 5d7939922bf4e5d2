"""Which cache_limit the data wants: what an epoch opens at once, beside the room there is."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning_streaming.loading.dataloader import StreamingDataLoader
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.tools.tuning.advice import (
    Advice,
    Disk,
    advise_limit,
    fits,
    least_good_limit,
    no_limit,
    possible_limit,
)
from lightning_streaming.tools.tuning.sizes import Sizes, cache_configs
from lightning_streaming.tools.tuning.working_set import MOST_SAMPLES, most_open_bytes, times_fetched


def room_of(dataset: StreamingDataset) -> int:
    """Bytes that the dataset's cache directories have or could get: free, or taken by this dataset already."""
    free: dict[int, int] = {}
    for cache in cache_configs(dataset).values():
        directory = _existing(cache.cache_directory())
        free[directory.stat().st_dev] = shutil.disk_usage(directory).free
    return sum(free.values()) + dataset.cache_usage


def advise_cache(loader: StreamingDataLoader, sizes: Sizes, room: int, readers: int) -> Advice:
    """Recommend a limit, or none where all data fits.

    Args:
        loader: Of the whole data, in the world that is to read it.
        sizes: Of its shards.
        room: Bytes that the cache may take.
        readers: Workers of all ranks of a node.
    """
    disk = Disk(room=room, data=int(sizes.kept.sum()), largest_shard=int(sizes.making.max()), index=sizes.index)
    if fits(disk):
        return no_limit(disk)
    dataset = loader.dataset
    if len(dataset) * dataset.current_world().ranks_per_node > MOST_SAMPLES:
        return advise_limit(disk, open_bytes=None, least=disk.data + disk.index, fetched_again=None)
    open_bytes = most_open_bytes(loader, sizes.kept)
    least = least_good_limit(disk, open_bytes, readers)
    possible = possible_limit(disk, least)
    again = times_fetched(loader, sizes.kept, max(0, possible - disk.index)) if possible < least else None
    return advise_limit(disk, open_bytes, least, again)


def _existing(directory: Path) -> Path:
    return next(parent for parent in (directory, *directory.parents) if parent.exists())
