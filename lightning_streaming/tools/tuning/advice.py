"""What to set, and why: numbers in, recommendations out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.eviction import least_limit
from lightning_streaming.reading.dataset import StreamingDataset, dataset_world
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.passes import drawn_sequence, passes_of
from lightning_streaming.reading.position import run_of
from lightning_streaming.resume.state import Cursor
from lightning_streaming.sequence.quality import Visits, lru_downloads, open_at_once, shard_visits
from lightning_streaming.tools.runs.describe import cache_configs
from lightning_streaming.tools.tuning.measure import WORTHWHILE, Sizes, Speed, batch_size_of
from lightning_streaming.units import bytes_as_written, format_bytes

_SWEPT_TO = 0.9
"""Part of a limit that a sweep leaves filled; see docs/cache.md."""
_OUT_OF_STEP = 1.15
"""How much more is open than if all readers were in the same batch."""
_AHEAD = 4
"""Shards that all readers of a node together fetch ahead by default."""
_DISK_MARGIN = 0.9
"""Part of a disk's room that a cache should take at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to set one setting to."""

    value: int | str | None
    """As it is written in a configuration."""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The room that there is for a cache, and what the data wants of it; in bytes."""

    room: int
    """Free, or taken by this cache already; or as much as it is to have."""
    data: int
    """Of all shards as they are kept."""
    largest_shard: int
    index: int


def advise_workers(speeds: Sequence[Speed], consumer: float) -> Advice:
    """The fewest workers that are about as good as the best.

    Args:
        speeds: Of at least one number of workers, in ascending order.
        consumer: Seconds that a training step takes; 0 if nobody knows.
    """
    steps = [speed.step_seconds(consumer) for speed in speeds]
    chosen = next(place for place, step in enumerate(steps) if step <= min(steps) * WORTHWHILE)
    speed = speeds[chosen]
    words = [f"{rate(speed.samples_per_second)} samples/s, a batch in {_seconds(speed.batch_seconds)}"]
    if chosen:
        fewer = speeds[chosen - 1]
        words.append(f"a step takes {steps[chosen - 1] / steps[chosen]:.2g} times as long with {fewer.workers}")
    if chosen + 1 < len(speeds):
        words.append(f"more do not make a step {WORTHWHILE - 1:.0%} shorter")
    if consumer:
        waited = 1 - consumer / steps[chosen]
        words.append(f"of a step of {_seconds(steps[chosen])}, {waited:.0%} is waiting")
    return Advice(value=speed.workers, why="; ".join(words))


def advise_predownload(
    *, samples_per_second: float, readers: int, shard_seconds: float, link_samples_per_second: float, default: int
) -> Advice:
    """How far a worker must look ahead to have each shard when it gets there.

    While one shard is on its way, a worker reads on. So many samples it must look ahead, on average, in any order.

    Args:
        samples_per_second: What all workers of one rank read.
        readers: How many these are.
        shard_seconds: How long a shard is on its way.
        link_samples_per_second: Samples in the shards that come in a second.
        default: How far a worker looks ahead by default.
    """
    if link_samples_per_second < samples_per_second:
        needed = link_samples_per_second * shard_seconds / readers
        pace = (
            f"the link brings {rate(link_samples_per_second)} samples/s and is slower than reading: an epoch that must "
            "be fetched takes as long as the link"
        )
    else:
        needed = samples_per_second * shard_seconds / readers
        pace = f"the link brings {rate(link_samples_per_second)} samples/s, more than are read"
    ahead = f"while a shard comes, in {_seconds(shard_seconds)}, a worker reads {rate(needed)} samples"
    if needed <= default:
        return Advice(value=None, why=f"{pace}; {ahead}, and looks {default:,} ahead by default")
    return Advice(value=round_up(needed), why=f"{pace}; {ahead}, but looks only {default:,} ahead by default")


def fits(disk: Disk) -> bool:
    """Whether all data can stay on the disk."""
    return disk.data + disk.index <= disk.room * _DISK_MARGIN


def least_good_limit(disk: Disk, open_bytes: int, readers: int) -> int:
    """The smallest limit with which no shard should have to be fetched twice.

    Room, when a sweep has just been, for what is open at once; for 4 shards that are fetched ahead, as by default, and
    one that each reader takes beside; and a margin, as readers do not go through an epoch in step.

    Args:
        disk: What there is.
        open_bytes: The most that is open at once.
        readers: Workers of all ranks of a node.
    """
    good = disk.index + ceil((_OUT_OF_STEP * open_bytes + (_AHEAD + readers) * disk.largest_shard) / _SWEPT_TO)
    return max(good, least_limit(disk.index, disk.largest_shard))


def advise_limit(disk: Disk, open_bytes: int | None, least: int, fetched_again: float | None) -> Advice:
    """What to do where not all data can stay.

    Args:
        disk: What there is.
        open_bytes: The most that is open at once; None if it is not known.
        least: See :func:`least_good_limit`.
        fetched_again: How often each shard is fetched in an epoch with the limit that :func:`possible_limit` gives;
            None if it is not known.
    """
    size = f"{format_bytes(disk.data)} of shards, and room for {format_bytes(disk.room)}"
    possible = possible_limit(disk, least)
    if possible < least_limit(disk.index, disk.largest_shard):
        return Advice(value=None, why=f"{size}: no limit works where not even two of the largest have room")
    if open_bytes is None:
        return Advice(
            value=bytes_as_written(possible), why=f"{size}; the epoch is too long to say what it opens at once"
        )
    opened = f"an epoch has up to {format_bytes(open_bytes)} of them open at once"
    if possible == least:
        return Advice(value=bytes_as_written(possible), why=f"{size}; {opened}, so this should fetch none twice")
    cost = "" if fetched_again is None else f": this fetches each {rate(fetched_again)} times an epoch"
    return Advice(
        value=bytes_as_written(possible),
        why=f"{size}; {opened}, which takes {format_bytes(least)}{cost}; a smaller shuffle_block_size opens fewer, "
        "see docs/order.md",
    )


def possible_limit(disk: Disk, least: int) -> int:
    """The limit that is recommended: the smallest that is good, or what the disk has room for."""
    return min(least, floor(disk.room * _DISK_MARGIN))


def round_up(number: float) -> int:
    """The next number of two digits and zeros: 1234 becomes 1300."""
    unit = 10.0 ** max(0, floor(log10(max(1, number))) - 1)
    return int(ceil(number / unit) * unit)


def rate(number: float) -> str:
    """A number as people read it: 3 digits, thousands set apart."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds(number: float) -> str:
    return f"{number:.3g} s" if number >= 1 else f"{1000 * number:.3g} ms"


def room_of(dataset: StreamingDataset) -> int:
    """Bytes that the dataset's cache directories have or could get: free, or taken by this dataset already."""
    free: dict[int, int] = {}
    for cache in cache_configs(dataset).values():
        wanted = cache.cache_directory()
        directory = next(parent for parent in (wanted, *wanted.parents) if parent.exists())
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
        return Advice(value=None, why=f"all {format_bytes(disk.data)} fit into the {format_bytes(disk.room)} there are")
    dataset = loader.dataset
    if len(dataset) * dataset_world(dataset).ranks_per_node > _MOST_SAMPLES:
        return advise_limit(disk, open_bytes=None, least=disk.data + disk.index, fetched_again=None)
    open_bytes = most_open_bytes(loader, sizes.kept)
    least = least_good_limit(disk, open_bytes, readers)
    possible = possible_limit(disk, least)
    again = times_fetched(loader, sizes.kept, max(0, possible - disk.index)) if possible < least else None
    return advise_limit(disk, open_bytes, least, again)


_MOST_SAMPLES = 200_000_000
"""Of longer epochs nothing is worked out: it would take minutes."""
_MOST_REMEMBERED = 10_000_000
"""Samples whose shards are remembered one by one: up to 160 bytes for each ten of them."""
_AT_ONCE = 1 << 18
"""Samples that are looked up together."""


def most_open_bytes(loader: StreamingDataLoader, shard_bytes: NDArray[np.int64]) -> int:
    """The most bytes of shards that the first node has begun and not finished, at any time of the first epoch.

    Args:
        loader: Of a rank of that node.
        shard_bytes: Bytes of each shard, of shape (shards,).
    """
    firsts = np.full(len(shard_bytes), -1, np.int64)
    lasts = firsts.copy()
    before = 0
    for visits in _windows(loader):
        used = visits.used()
        lasts[used] = before + visits.last_batches()[used]
        new = used[firsts[used] < 0]
        firsts[new] = before + visits.first_batches()[new]
        before += visits.num_batches
    used = np.flatnonzero(firsts >= 0)
    ends = np.unique(np.stack([np.concatenate([firsts[used], lasts[used]]), np.tile(used, 2)]), axis=1)
    whole = Visits(batches=ends[0], shards=ends[1], num_batches=before, num_shards=len(shard_bytes))
    return int(open_at_once(whole, shard_bytes).max(initial=0))


def times_fetched(loader: StreamingDataLoader, shard_bytes: NDArray[np.int64], limit: int) -> float | None:
    """How often a shard is fetched in an epoch, on average, by a node whose cache holds so many bytes.

    Args:
        loader: Of a rank of that node.
        shard_bytes: Bytes of each shard, of shape (shards,).
        limit: Bytes of shards that the cache may hold.

    Returns:
        1 where none is fetched twice; where a batch alone needs more than the limit, as often as batches use a shard.
        None where the epoch is too long to be gone through like that.
    """
    if len(loader.dataset) * dataset_world(loader.dataset).ranks_per_node > _MOST_REMEMBERED:
        return None
    parts = list(_windows(loader))
    starts = np.cumsum([0, *(part.num_batches for part in parts)])
    visits = Visits(
        batches=np.concatenate([part.batches + start for part, start in zip(parts, starts[:-1], strict=True)]),
        shards=np.concatenate([part.shards for part in parts]),
        num_batches=int(starts[-1]),
        num_shards=len(shard_bytes),
    )
    of_batches = np.bincount(visits.batches, weights=shard_bytes[visits.shards])
    fetched = len(visits.batches) if of_batches.max() > limit else lru_downloads(visits, shard_bytes, limit)
    return fetched / len(visits.used())


def _windows(loader: StreamingDataLoader) -> Iterator[Visits]:
    """Visits of the first node in the first epoch, some batches at a time, each window counted from its own start."""
    dataset, batch_size, run = loader.dataset, batch_size_of(loader), run_of(loader)
    epoch = run.epoch(run.normalise(Cursor(0, 0)))
    plan, partition, world = drawn_sequence(epoch), epoch.partition, dataset_world(dataset)
    ranks = range(world.ranks_per_node)
    step = max(1, _AT_ONCE // (batch_size * len(ranks)))
    for first in range(0, partition.num_batches(), step):
        batches = np.arange(first, min(first + step, partition.num_batches()))
        positions = np.hstack([partition.batches(batches, world.node, rank) for rank in ranks])
        ids = np.where(positions < 0, -1, plan.ids(np.maximum(positions, 0)))
        yield shard_visits(ids, passes_of(dataset).catalog.samples_per_shard)
