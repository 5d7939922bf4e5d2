"""``tune``: measure a run's loaders and its link, recommend settings, and print them."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.eviction import least_limit
from lightning_streaming.escaping import in_lines
from lightning_streaming.reading.dataset import StreamingDataset, dataset_world, source_of
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.measures import WaitTimes
from lightning_streaming.reading.position import run_of
from lightning_streaming.reading.prefetch import default_lookahead
from lightning_streaming.resume.run_state import drawn_sequence
from lightning_streaming.resume.state import Cursor
from lightning_streaming.sequence.quality import Visits, open_at_once, shard_visits
from lightning_streaming.tools.commands import usable_cpus
from lightning_streaming.tools.console import FINE, counted, print_json, print_line, print_note, print_table, progress
from lightning_streaming.tools.runs.describe import RunDescription, cache_configs, index_bytes, is_in_place
from lightning_streaming.tools.stored.stored_dataset import default_caches_in
from lightning_streaming.tools.tuning import measure
from lightning_streaming.tools.tuning.measure import WORTHWHILE, LinkSpeed, Speed, TunedRun, batch_size_of
from lightning_streaming.units import bytes_as_written, format_bytes
from lightning_streaming.world import World

_NO_CONSUMER = (
    "a step is assumed to do nothing but wait for its batch; with --consumer-ms, the duration of your step, "
    "settings are rated by how long it waits\n"
)
_FETCHING_SECONDS = 10.0
"""Maximum duration of the measurement of the link."""
_SWEPT_TO = 0.9
"""Part of a limit that eviction leaves filled; see docs/internals/cache.md."""
_OUT_OF_STEP = 1.15
"""Ratio of the shards that are open to those that would be if all readers were in the same batch."""
_PREFETCHED = 4
"""Shards that all readers of a node together prefetch by default."""
_DISK_MARGIN = 0.9
"""Largest part of the free space that a cache should take."""
_MAX_SAMPLES = 200_000_000
"""Longer epochs are not simulated: it would take minutes."""
_WINDOW = 1 << 18
"""Samples that are looked up at once."""
_MIB = 2**20
_HEADS = ("workers", "samples/s", "MB/s", "batches/s", "first batch")
_MIN_SHARE = 0.005
"""Smallest share of the time at which a kind of waiting is shown."""


def tune_run(args: Namespace) -> int:
    """Measure, and print what to set."""
    run = TunedRun(args)
    if run.assumed is not None:
        print_note("tune", run.assumed)
    report = _measure_and_recommend(run, args)
    if args.json:
        print_json(report)
    elif args.yaml:
        sys.stdout.write(in_lines(_fragment(run, report)))
    else:
        _print_report(run, report, caveat=_NO_CONSUMER if args.consumer_ms is None else None)
    return FINE


def doublings(most: int) -> list[int]:
    """Return the numbers of workers to try: 0, 1, 2, 4, ... and ``most``."""
    return sorted({0, most, *(2**power for power in range(most.bit_length()))})


def _measure_and_recommend(run: TunedRun, args: Namespace) -> dict[str, Any]:
    """Measure a run's data on this machine.

    Data is downloaded and decompressed into a temporary directory, which is always removed; of the run's own caches
    only the size is read.

    Returns:
        The report, for programs. Times are in seconds.

    Raises:
        ConfigError: The run cannot be tuned.
        StorageError: Its data could not be downloaded.
    """
    consumer = (args.consumer_ms or 0.0) / 1000
    cores = min([usable_cpus(), *measure.quotas()])
    most = max(1, cores // run.world.ranks_per_node)
    candidates = args.num_workers or doublings(most)
    with TemporaryDirectory(prefix="lightning-streaming-tune-") as name:
        directory = Path(name)
        run.use(measure.without_side_effects(run.config, directory))
        with closing(run.loader(0)) as own:
            measure.check_joins(own.dataset)
            room = _cache_room(own.dataset) if args.disk is None else args.disk
            is_remote = not all(map(is_in_place, cache_configs(own.dataset).values()))
            # Those of shards that are compressed in place, and of large indexes.
            with default_caches_in(directory / "default"):
                run.use(measure.cached_in(run.config, own.dataset, directory))
                with closing(run.loader(0, run.world)) as whole:
                    measure.check_directories(whole.dataset, directory)
                    described, link = RunDescription(dataset=whole.dataset, run=run_of(whole)), None
                    if is_remote:
                        sizes, streams = described.shard_bytes
                        shards = measure.shards_to_fetch(sizes.fetched, streams, args.fetch)
                        with progress(len(shards), "fetch", "shard") as advance:
                            arrivals = measure.fetch_shards(
                                whole.dataset, shards, _FETCHING_SECONDS, run.start_method, advance
                            )
                        link = measure.link_of(arrivals, sizes.fetched)
                    run.use(measure.by_single_rank(run.config, directory, whole.dataset, link.shards if link else None))
                    speeds = _measure_speeds(run, candidates, args.seconds, consumer)
                    advice = _recommend(described, whole, link, speeds, consumer, room)
        batch_size, unit = batch_size_of(whole), described.unit
    return {
        "data": run.data,
        "batch_size": batch_size,
        **({} if unit == "sample" else {"batches_of": "packs" if unit == "pack" else unit}),
        "ranks_per_node": run.world.ranks_per_node,
        "link": link
        and {
            "shards": len(link.shards),
            "bytes": link.stored_bytes,
            "bytes_per_second": link.bytes_per_second,
            "seconds_per_shard": link.each,
            "seconds_of_first_shard": link.alone,
        },
        "measured": [
            {
                "num_workers": speed.workers,
                "samples_per_second": speed.samples_per_second,
                "bytes_per_second": speed.read.sample_bytes / speed.seconds,
                "batches_per_second": 1 / speed.batch_seconds,
                "first_batch": speed.first_batch,
                # Shares of the duration.
                "wait": {reason: waited / speed.seconds for reason, waited in speed.read.wait._asdict().items()},
                "step_waits": 1 - consumer / speed.step_seconds(consumer) if consumer else None,
            }
            for speed in speeds
        ],
        "recommended": {
            name: {"now": run.setting(name), "better": setting.value, "why": setting.why}
            for name, setting in advice.items()
        },
    }


def _measure_speeds(run: TunedRun, candidates: Sequence[int], seconds: float, consumer: float) -> list[Speed]:
    with progress(len(candidates), "measure", "setting") as advance:

        def report(speed: Speed) -> None:
            advance(1)
            if not sys.stderr.isatty():
                print_note("tune", f"read with {counted(speed.workers, 'worker')}")

        return measure.measure_each(lambda workers: run.loader(workers, World()), candidates, seconds, consumer, report)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The recommended value of a setting."""

    value: int | str | None
    """Value as written in a configuration."""
    why: str


def _recommend(
    described: RunDescription,
    loader: StreamingDataLoader,
    link: LinkSpeed | None,
    speeds: list[Speed],
    consumer: float,
    room: int,
) -> dict[str, Advice]:
    """Return the recommended settings.

    Args:
        described: The run.
        loader: Its loader of all data, in the world that will read it.
        link: Download speed; None if all data is read in place.
        speeds: Speed of each number of workers.
        consumer: Seconds of a training step; 0 if unknown.
        room: Bytes that the cache may take.
    """
    advice = {"num_workers": advise_workers(speeds, consumer)}
    chosen = next(speed for speed in speeds if speed.workers == advice["num_workers"].value)
    (sizes, stream_of_shard), catalog = described.shard_bytes, described.catalog
    workers, ranks = max(1, chosen.workers), dataset_world(loader.dataset).ranks_per_node
    if link is not None:
        samples_per_batch = chosen.read.samples / chosen.read.batches
        # Bytes to download for a sample of an epoch, on average over the streams it is drawn from.
        shares = np.asarray(described.run.order.weights.choose)
        stored = np.bincount(stream_of_shard, weights=sizes.fetched, minlength=len(shares))
        sample_bytes = float((stored / np.asarray(catalog.samples_per_stream) * shares).sum() / shares.sum())
        lookahead = default_lookahead(
            batch_size_of(loader) if described.packing is None else round(samples_per_batch),
            catalog.num_samples / len(catalog.shards),
            workers * ranks,
        )
        advice["predownload"] = advise_predownload(
            samples_per_second=samples_per_batch / chosen.step_seconds(consumer),
            readers=workers,
            shard_seconds=link.each,
            link_samples_per_second=link.bytes_per_second / sample_bytes / ranks,
            default=lookahead.later,
        )
    if sizes.kept.any():
        disk = Disk(
            room=room,
            data=int(sizes.kept.sum()),
            largest_shard=int(sizes.making.max()),
            index=index_bytes(loader.dataset),
        )
        is_short = len(loader.dataset) * ranks <= _MAX_SAMPLES
        advice["cache_limit"] = advise_limit(
            disk, workers * ranks, lambda: max_open_bytes(loader, sizes.kept) if is_short else None
        )
    return advice


def advise_workers(speeds: Sequence[Speed], consumer: float) -> Advice:
    """Recommend the fewest workers that are about as fast as the best.

    Args:
        speeds: Speed of each number of workers, ascending; at least one.
        consumer: Seconds of a training step; 0 if unknown.
    """
    steps = [speed.step_seconds(consumer) for speed in speeds]
    chosen = next(number for number, step in enumerate(steps) if step <= min(steps) * WORTHWHILE)
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
    """Recommend how many samples a worker prefetches so that each shard arrives in time.

    A worker reads on while a shard is downloaded; in any order it must prefetch that many samples on average.

    Args:
        samples_per_second: Samples per second that all workers of one rank read.
        readers: Number of these workers.
        shard_seconds: Duration of the download of a shard.
        link_samples_per_second: Samples in the shards that arrive per second.
        default: Number of samples that a worker prefetches by default.
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
    meanwhile = f"while a shard arrives, in {_seconds(shard_seconds)}, a worker reads {rate(needed)} samples"
    if needed <= default:
        return Advice(value=None, why=f"{pace}; {meanwhile}, and prefetches {default:,} by default")
    return Advice(value=round_up(needed), why=f"{pace}; {meanwhile}, but prefetches only {default:,} by default")


def _cache_room(dataset: StreamingDataset) -> int:
    """Return the bytes that the dataset's cache directories have or could get: free, or taken by it already."""
    free: dict[int, int] = {}
    for cache in cache_configs(dataset).values():
        wanted = cache.cache_directory()
        directory = next(parent for parent in (wanted, *wanted.parents) if parent.exists())
        free[directory.stat().st_dev] = shutil.disk_usage(directory).free
    return sum(free.values()) + dataset.cache_usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """Space for a cache, and what the data needs, in bytes."""

    room: int
    """Free space, and what this cache takes already; or the space it should have."""
    data: int
    """Size of all shards in the cache."""
    largest_shard: int
    index: int


def advise_limit(disk: Disk, readers: int, open_bytes: Callable[[], int | None]) -> Advice:
    """Recommend a limit of the cache: the smallest with which no shard should be downloaded twice, if there is room.

    After eviction there must be room for the open shards, for those that are prefetched by default, for one more of
    each reader, and a margin, because readers are not in step.

    Args:
        disk: The space and the sizes.
        readers: Workers of all ranks of a node.
        open_bytes: Returns the most bytes of shards that are open at once; None if that is unknown.
    """
    usable = floor(disk.room * _DISK_MARGIN)
    if disk.data + disk.index <= usable:
        return Advice(value=None, why=f"all {format_bytes(disk.data)} fit into the {format_bytes(disk.room)} there are")
    size = f"{format_bytes(disk.data)} of shards, and room for {format_bytes(disk.room)}"
    smallest = least_limit(disk.index, disk.largest_shard)
    if usable < smallest:
        return Advice(value=None, why=f"{size}: not even two of the largest shards fit, so no limit works")
    opened = open_bytes()
    if opened is None:
        return Advice(value=bytes_as_written(usable), why=f"{size}; the epoch is too long to simulate what it opens")
    good = disk.index + ceil((_OUT_OF_STEP * opened + (_PREFETCHED + readers) * disk.largest_shard) / _SWEPT_TO)
    good, why = max(good, smallest), f"{size}; an epoch has up to {format_bytes(opened)} of them open at once"
    if good <= usable:
        return Advice(value=bytes_as_written(good), why=f"{why}, so this should fetch none twice")
    return Advice(
        value=bytes_as_written(usable),
        why=f"{why}, which takes {format_bytes(good)}: `lightning-streaming plan` predicts how often each is fetched; "
        "a smaller shuffle_block_size opens fewer, see docs/order.md",
    )


def max_open_bytes(loader: StreamingDataLoader, shard_bytes: NDArray[np.int64]) -> int:
    """Return the most bytes of shards that the first node has started and not finished at a time, in the first epoch.

    Args:
        loader: Loader of a rank of that node.
        shard_bytes: Bytes of each shard, of shape (shards,).
    """
    dataset, run = loader.dataset, run_of(loader)
    epoch, world = run.epoch(run.normalise(Cursor(0, 0))), dataset_world(dataset)
    plan, partition, ranks = drawn_sequence(epoch), epoch.partition, range(world.ranks_per_node)
    step = max(1, _WINDOW // (batch_size_of(loader) * len(ranks)))
    firsts = np.full(len(shard_bytes), -1, np.int64)
    lasts, num_batches = firsts.copy(), partition.num_batches()
    for before in range(0, num_batches, step):
        batches = np.arange(before, min(before + step, num_batches))
        positions = np.hstack([partition.batches(batches, world.node, rank) for rank in ranks])
        ids = np.where(positions < 0, -1, plan.ids(np.maximum(positions, 0)))
        visits = shard_visits(ids, source_of(dataset).catalog.samples_per_shard)
        used = visits.used()
        lasts[used] = before + visits.last_batches()[used]
        new = used[firsts[used] < 0]
        firsts[new] = before + visits.first_batches()[new]
    used = np.flatnonzero(firsts >= 0)
    ends = np.unique(np.stack([np.concatenate([firsts[used], lasts[used]]), np.tile(used, 2)]), axis=1)
    whole = Visits(batches=ends[0], shards=ends[1], num_batches=num_batches, num_shards=len(shard_bytes))
    return int(open_at_once(whole, shard_bytes).max(initial=0))


def round_up(number: float) -> int:
    """Return the next number of two digits and zeros: 1234 becomes 1300."""
    unit = 10.0 ** max(0, floor(log10(max(1, number))) - 1)
    return int(ceil(number / unit) * unit)


def rate(number: float) -> str:
    """Format a number with 3 digits, and thousands separated."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds(number: float) -> str:
    return f"{number:.3g} s" if number >= 1 else f"{1000 * number:.3g} ms"


def _print_report(run: TunedRun, report: Mapping[str, Any], caveat: str | None) -> None:
    """Print the measurements, their limits, what to set and why, and YAML at the end."""
    link, speeds = report["link"], report["measured"]
    if link:
        print_line(
            f"fetched {counted(link['shards'], 'shard')} ({format_bytes(link['bytes'])}) to measure: "
            f"{format_bytes(link['bytes_per_second'])}/s, {link['seconds_per_shard']:.3g} s each; "
            f"the first {link['seconds_of_first_shard']:.3g} s\n"
        )
    reasons = [reason for reason in WaitTimes._fields if any(speed["wait"][reason] >= _MIN_SHARE for speed in speeds)]
    has_consumer = speeds[0]["step_waits"] is not None
    heads = [*_HEADS, *reasons, "rest", *(["a step waits"] if has_consumer else [])]
    rows = []
    for speed in speeds:
        parts = [round(100 * speed["wait"][reason]) for reason in reasons]
        rows.append(
            [
                str(speed["num_workers"]),
                rate(speed["samples_per_second"]),
                rate(speed["bytes_per_second"] / _MIB),
                rate(speed["batches_per_second"]),
                f"{rate(1000 * speed['first_batch'])} ms",
                *(f"{part}%" for part in [*parts, max(0, 100 - sum(parts))]),
                *([f"{speed['step_waits']:.0%}"] if has_consumer else []),
            ]
        )
    batch = f"{report['batch_size']} {report['batches_of']}" if "batches_of" in report else str(report["batch_size"])
    print_table(f"reading {report['data']} in batches of {batch}, with reasons of waiting", heads, rows, right=heads)
    if caveat is not None:
        print_line(caveat)
    settings = _settings_to_write(report)
    rows = [[name, _yaml(value["now"]), _yaml(value["better"]), value["why"]] for name, value in settings.items()]
    print_table("recommended", ["setting", "now", "better", "why"], rows)
    for name, setting in report["recommended"].items():
        if name not in settings:
            print_line(f"{name} may stay at its default: {setting['why']}\n")
    left_out = [name for name in ("predownload", "cache_limit") if name not in report["recommended"]]
    if left_out:
        print_line(f"nothing to recommend for {' and '.join(left_out)}, as the data is read in place\n")
    sys.stdout.write(in_lines(_fragment(run, report)))


def _fragment(run: TunedRun, report: Mapping[str, Any]) -> str:
    """Return the recommended settings as a configuration to use after the run's own, without unchanged defaults."""
    better = {name: setting["better"] for name, setting in _settings_to_write(report).items()}
    better.pop("num_workers", None)
    num_workers = report["recommended"]["num_workers"]["better"]
    lines = ["data:", "  init_args:", f"    num_workers: {num_workers}"]
    if not num_workers and run.setting("prefetch_factor") is not None:
        lines.append("    prefetch_factor: null")  # torch accepts it with workers only
    if better:
        lines += [f"    {run.data}:", *(f"      {name}: {_yaml(value)}" for name, value in better.items())]
    return "\n".join(lines) + "\n"


def _settings_to_write(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recommended settings, except those that should stay at their default."""
    recommended = report["recommended"].items()
    return {name: value for name, value in recommended if value["better"] is not None or value["now"] is not None}


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)
