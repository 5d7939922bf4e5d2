"""What to set, and why: numbers in, recommendations out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from lightning_streaming.cache.limits import least_limit
from lightning_streaming.tools.tuning.speeds import WORTHWHILE, Speed
from lightning_streaming.units import format_bytes

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


def no_limit(disk: Disk) -> Advice:
    """What to say where all data can stay."""
    return Advice(value=None, why=f"all {format_bytes(disk.data)} fit into the {format_bytes(disk.room)} there are")


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
        return Advice(value=written(possible), why=f"{size}; the epoch is too long to say what it opens at once")
    opened = f"an epoch has up to {format_bytes(open_bytes)} of them open at once"
    if possible == least:
        return Advice(value=written(possible), why=f"{size}; {opened}, so this should fetch none twice")
    cost = "" if fetched_again is None else f": this fetches each {rate(fetched_again)} times an epoch"
    return Advice(
        value=written(possible),
        why=f"{size}; {opened}, which takes {format_bytes(least)}{cost}; a smaller shuffle_block_size opens fewer, "
        "see docs/order.md",
    )


def possible_limit(disk: Disk, least: int) -> int:
    """The limit that is recommended: the smallest that is good, or what the disk has room for."""
    return min(least, floor(disk.room * _DISK_MARGIN))


def written(size: int) -> str:
    """A limit as a configuration has it, rounded up: ``"1200mb"``, or ``"5400kb"`` where megabytes are too coarse."""
    unit, name = (2**20, "mb") if size >= 100 * 2**20 else (2**10, "kb")
    return f"{ceil(size / unit)}{name}"


def round_up(number: float) -> int:
    """The next number of two digits and zeros: 1234 becomes 1300."""
    unit = 10.0 ** max(0, floor(log10(max(1, number))) - 1)
    return int(ceil(number / unit) * unit)


def rate(number: float) -> str:
    """A number as people read it: 3 digits, thousands set apart."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds(number: float) -> str:
    return f"{number:.3g} s" if number >= 1 else f"{1000 * number:.3g} ms"
