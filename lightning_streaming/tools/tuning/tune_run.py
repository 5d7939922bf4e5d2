"""What ``tune`` does: measures a run's loaders and its link, and puts the advice together."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lightning_streaming.escaping import in_lines
from lightning_streaming.reading.dataset import StreamingDataset, dataset_world
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.measures import WaitTimes
from lightning_streaming.reading.passes import passes_of
from lightning_streaming.reading.prefetch import default_lookahead
from lightning_streaming.tools.console import FINE, counted, print_json, print_line, print_note, print_table, progress
from lightning_streaming.tools.runs.describe import cache_configs, is_in_place
from lightning_streaming.tools.tuning import advice as advising
from lightning_streaming.tools.tuning import measure
from lightning_streaming.tools.tuning.advice import Advice, rate
from lightning_streaming.tools.tuning.measure import LinkSpeed, Sizes, Speed, TunedRun
from lightning_streaming.units import format_bytes
from lightning_streaming.world import World

_NO_CONSUMER = (
    "a step was taken to do nothing but ask for the next batch; say with --consumer-ms how long yours takes, and "
    "settings are judged by whether it waits\n"
)


def tune_run(args: Namespace) -> int:
    """Measure, and print what to set."""
    size = "eval_batch_size" if args.stage != "fit" else "batch_size"
    changes = {} if args.batch_size is None else {size: str(args.batch_size)}
    tuned = measure.tuned_run(args.config, changes, args.stage, args.nodes, args.ranks_per_node)
    if tuned.assumed is not None:
        print_note("tune", tuned.assumed)
    report = _measure_and_advise(tuned, args)
    if args.json:
        print_json(report)
    elif args.yaml:
        sys.stdout.write(in_lines(_fragment(tuned, report)))
    else:
        _print_report(tuned, report, caveat=_NO_CONSUMER if args.consumer_ms is None else None)
    return FINE


def doublings(most: int) -> list[int]:
    """Numbers of workers to try: 0, 1, 2, 4, ... and ``most``."""
    return sorted({0, most, *(2**power for power in range(most.bit_length()))})


_FETCHING_SECONDS = 10.0
"""After which no more is fetched to see how fast it comes."""


def _measure_and_advise(run: TunedRun, args: Namespace) -> dict[str, Any]:
    """Measure a run's data on this machine.

    What is fetched or decompressed goes into a temporary directory, which is removed in any case; the run's own caches
    are only asked for their size.

    Returns:
        What was measured and is recommended, for programs. Times in seconds.

    Raises:
        ConfigError: The run cannot be tuned.
        StorageError: Its data could not be fetched.
    """
    consumer = (args.consumer_ms or 0.0) / 1000
    candidates = args.num_workers or doublings(max(1, measure.usable_cores() // run.world.ranks_per_node))
    with TemporaryDirectory(prefix="lightning-streaming-tune-") as directory, closing(_quiet(run, directory)) as home:
        measure.check_joins(home.dataset)
        room = advising.room_of(home.dataset) if args.disk is None else args.disk
        is_far = not all(map(is_in_place, cache_configs(home.dataset).values()))
        with measure.default_caches_in(Path(directory, "default")):
            run.use(measure.away_from_home(run.config, home.dataset, Path(directory)))
            with closing(run.loader(0)) as whole:
                whole.dataset.world = run.world
                measure.check_directories(whole.dataset, Path(directory))
                sizes = measure.sizes_of(whole.dataset)
                link = _measured_link(whole.dataset, run, args.fetch, sizes) if is_far else None
                run.use(
                    measure.excerpt(run.config, Path(directory), whole.dataset, link.shards)
                    if link
                    else measure.by_one_rank(run.config, Path(directory))
                )
                speeds = _measured_speeds(run, candidates, args.seconds, consumer)
                advice = _advice(whole, sizes, link, speeds, consumer, room)
        batch_size, batches_of = measure.batch_size_of(whole), measure.batches_of(whole.dataset)
    return {
        "data": run.data,
        "batch_size": batch_size,
        **({} if batches_of == "samples" else {"batches_of": batches_of}),
        "ranks_per_node": run.world.ranks_per_node,
        "link": link
        and {
            "shards": len(link.shards),
            "bytes": link.stored_bytes,
            "bytes_per_second": link.bytes_per_second,
            "seconds_per_shard": link.each,
            "seconds_of_first_shard": link.alone,
        },
        "measured": [_speed_as_json(speed, consumer) for speed in speeds],
        "recommended": {
            name: {"now": run.setting(name), "better": one.value, "why": one.why} for name, one in advice.items()
        },
    }


def _quiet(run: TunedRun, directory: str) -> StreamingDataLoader:
    """A loader of the run, which writes into this directory alone."""
    run.use(measure.quiet(run.config, Path(directory)))
    return run.loader(0)


def _speed_as_json(speed: Speed, consumer: float) -> dict[str, Any]:
    return {
        "num_workers": speed.workers,
        "samples_per_second": speed.samples_per_second,
        "bytes_per_second": speed.read.sample_bytes / speed.seconds,
        "batches_per_second": 1 / speed.batch_seconds,
        "first_batch": speed.first_batch,
        # Parts of the time that passed.
        "wait": {reason: waited / speed.seconds for reason, waited in speed.read.wait._asdict().items()},
        "step_waits": 1 - consumer / speed.step_seconds(consumer) if consumer else None,
    }


def _measured_link(dataset: StreamingDataset, run: TunedRun, most_bytes: int, sizes: Sizes) -> LinkSpeed:
    shards = measure.shards_to_fetch(sizes.fetched, passes_of(dataset).catalog.stream_of_shard, most_bytes)
    with progress(len(shards), "fetch", "shard") as tell:
        arrivals = measure.fetch_shards(dataset, shards, _FETCHING_SECONDS, run.start_method, tell)
    return measure.link_of(arrivals, sizes.fetched)


def _measured_speeds(run: TunedRun, candidates: Sequence[int], seconds: float, consumer: float) -> list[Speed]:
    with progress(len(candidates), "measure", "setting") as advance:

        def tell(speed: Speed) -> None:
            advance(1)
            if not sys.stderr.isatty():
                print_note("tune", f"read with {counted(speed.workers, 'worker')}")

        def loader(num_workers: int) -> StreamingDataLoader:
            made = run.loader(num_workers)
            made.dataset.world = World()
            return made

        return measure.measure_each(loader, candidates, seconds, consumer, tell)


def _advice(
    whole: StreamingDataLoader, sizes: Sizes, link: LinkSpeed | None, speeds: list[Speed], consumer: float, room: int
) -> dict[str, Advice]:
    advice = {"num_workers": advising.advise_workers(speeds, consumer)}
    chosen = next(speed for speed in speeds if speed.workers == advice["num_workers"].value)
    catalog, ranks = passes_of(whole.dataset).catalog, dataset_world(whole.dataset).ranks_per_node
    workers = max(1, chosen.workers)
    samples_per_batch = measure.batch_size_of(whole)
    if measure.batches_of(whole.dataset) != "samples":
        samples_per_batch = round(chosen.read.samples / chosen.read.batches)
    if link is not None:
        per_shard = catalog.num_samples / len(catalog.shards)
        advice["predownload"] = advising.advise_predownload(
            samples_per_second=chosen.read.samples / chosen.read.batches / chosen.step_seconds(consumer),
            readers=workers,
            shard_seconds=link.each,
            link_samples_per_second=link.bytes_per_second / _bytes_per_sample(whole.dataset, sizes) / ranks,
            default=default_lookahead(samples_per_batch, per_shard, workers * ranks).later,
        )
    if sizes.kept.any():
        advice["cache_limit"] = advising.advise_cache(whole, sizes, room, workers * ranks)
    return advice


def _bytes_per_sample(dataset: StreamingDataset, sizes: Sizes) -> float:
    """Bytes that must come for a sample of an epoch, on average over the streams it is drawn from."""
    catalog, shares = passes_of(dataset).catalog, np.asarray(passes_of(dataset).run.weights.choose)
    stored = np.bincount(catalog.stream_of_shard, weights=sizes.fetched, minlength=len(shares))
    return float((stored / np.asarray(catalog.samples_per_stream) * shares).sum() / shares.sum())


_MIB = 2**20
_HEADS = ("workers", "samples/s", "MB/s", "batches/s", "first batch")
_LEAST_SHOWN = 0.005


def _print_report(run: TunedRun, report: Mapping[str, Any], caveat: str | None) -> None:
    """Print what was measured, how far it holds, what to set and why, and YAML at the end."""
    link, speeds = report["link"], report["measured"]
    if link:
        print_line(
            f"fetched {counted(link['shards'], 'shard')} ({format_bytes(link['bytes'])}) to measure: "
            f"{format_bytes(link['bytes_per_second'])}/s, {link['seconds_per_shard']:.3g} s each; "
            f"the first {link['seconds_of_first_shard']:.3g} s\n"
        )
    reasons = [one for one in WaitTimes._fields if any(speed["wait"][one] >= _LEAST_SHOWN for speed in speeds)]
    has_consumer = speeds[0]["step_waits"] is not None
    heads = [*_HEADS, *reasons, "rest", *(["a step waits"] if has_consumer else [])]
    batch = f"{report['batch_size']} {report['batches_of']}" if "batches_of" in report else str(report["batch_size"])
    title = f"reading {report['data']} in batches of {batch}, and what is waited for"
    print_table(title, heads, [_row(speed, reasons) for speed in speeds], right=heads)
    if caveat is not None:
        print_line(caveat)
    worth_setting = _worth_setting(report)
    settings = [[name, _yaml(one["now"]), _yaml(one["better"]), one["why"]] for name, one in worth_setting.items()]
    print_table("recommended", ["setting", "now", "better", "why"], settings)
    for name, one in report["recommended"].items():
        if name not in worth_setting:
            print_line(f"{name} may stay at its default: {one['why']}\n")
    left_out = [name for name in ("predownload", "cache_limit") if name not in report["recommended"]]
    if left_out:
        print_line(f"nothing to recommend for {' and '.join(left_out)}, as the data is read in place\n")
    sys.stdout.write(in_lines(_fragment(run, report)))


def _fragment(run: TunedRun, report: Mapping[str, Any]) -> str:
    """The recommended settings, as a configuration that goes after the run's own; defaults that stay are left out."""
    of_data = {name: one["better"] for name, one in _worth_setting(report).items()}
    num_workers = report["recommended"]["num_workers"]["better"]
    of_data.pop("num_workers", None)
    lines = ["data:", "  init_args:", f"    num_workers: {num_workers}"]
    if not num_workers and run.setting("prefetch_factor") is not None:
        lines.append("    prefetch_factor: null")  # which torch takes with workers only
    if of_data:
        lines += [f"    {run.data}:", *(f"      {name}: {_yaml(better)}" for name, better in of_data.items())]
    return "\n".join(lines) + "\n"


def _worth_setting(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is recommended, but for what is at its default and should stay there."""
    recommended = report["recommended"].items()
    return {name: one for name, one in recommended if one["better"] is not None or one["now"] is not None}


def _row(speed: Mapping[str, Any], reasons: Sequence[str]) -> list[str]:
    parts = [round(100 * speed["wait"][reason]) for reason in reasons]
    return [
        str(speed["num_workers"]),
        rate(speed["samples_per_second"]),
        rate(speed["bytes_per_second"] / _MIB),
        rate(speed["batches_per_second"]),
        f"{rate(1000 * speed['first_batch'])} ms",
        *(f"{part}%" for part in [*parts, max(0, 100 - sum(parts))]),
        *([] if speed["step_waits"] is None else [f"{speed['step_waits']:.0%}"]),
    ]


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)
