"""Measure how fast a run's data is read on this machine, and recommend num_workers, predownload and cache_limit.

C is a configuration of `lightning-streaming fit`. Its data module is made as training would make it, with its transform
and collate function, and read for a few seconds with each number of workers; no trainer runs, no model is imported.
Data that has to be fetched comes from a few shards, in a temporary directory (see TMPDIR) that is removed in the end;
the run's own cache is not touched.

Say how long a training step takes when its batch is there, and settings are judged by whether it waits.

    lightning-streaming tune --config run.yaml
    lightning-streaming tune --config run.yaml --consumer-ms 120
    lightning-streaming tune --config run.yaml --yaml > tuned.yaml
    lightning-streaming fit --config run.yaml --config tuned.yaml
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.dataloader import StreamingDataLoader
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.measures import WaitTimes
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.loading.prefetch import default_lookahead
from lightning_streaming.tools import tune_advice, tune_measure
from lightning_streaming.tools.console import FINE, counted, print_json, print_note, print_table, progress
from lightning_streaming.tools.options import add_json, add_run
from lightning_streaming.tools.tune_advice import Advice, rate
from lightning_streaming.tools.tune_measure import LinkSpeed, Sizes, Speed, TunedRun
from lightning_streaming.units import format_bytes, parse_bytes
from lightning_streaming.world import World

_PROGRAM = "lightning-streaming tune"
_NO_CONSUMER = (
    "\na step was taken to do nothing but ask for the next batch; say with --consumer-ms how long yours takes, and "
    "settings are judged by whether it waits"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Say what it can be told."""
    parser.add_argument(
        "--stage", choices=tune_measure.STAGES, default="fit", help="whose data to read; fit by default: data.train"
    )
    parser.add_argument(
        "--num-workers",
        metavar="N,N,...",
        type=_parse_candidates,
        help="numbers of workers to try; by default 0, 1, 2, 4, ... as long as more help, up to the cores that there "
        "are for each rank",
    )
    parser.add_argument(
        "--seconds", metavar="S", type=_positive_number, default=3.0, help="for each of them; 3 by default"
    )
    parser.add_argument(
        "--consumer-ms",
        metavar="MS",
        type=_not_negative_number,
        help="how long a training step takes when its batch is there, in milliseconds; 0 for steps that do nothing",
    )
    add_run(parser)
    parser.add_argument(
        "--fetch", metavar="SIZE", type=_parse_size, default=parse_bytes("256mb"),
        help="how much to fetch at most, but one shard of each stream at least; 256mb by default",
    )  # fmt: skip
    parser.add_argument(
        "--disk", metavar="SIZE", type=_parse_size, help="room that the cache may take; by default what its disk has"
    )
    parser.add_argument("--yaml", action="store_true", help="print only the settings, as a configuration")
    add_json(parser)


def run(args: Namespace) -> int:
    """Measure, and print what to set."""
    if args.json and args.yaml:
        raise ConfigError("--json and --yaml are two ways to print the result; ask for one of them")
    size = "eval_batch_size" if args.stage != "fit" else "batch_size"
    changes = {} if args.batch_size is None else {size: str(args.batch_size)}
    tuned = tune_measure.tuned_run(args.config, changes, args.stage, args.nodes, args.ranks_per_node)
    if tuned.assumed is not None:
        print_note(_PROGRAM, tuned.assumed)
    consumer = (args.consumer_ms or 0.0) / 1000
    effort = _Effort(
        candidates=args.num_workers or doublings(max(1, tune_measure.usable_cores() // tuned.world.ranks_per_node)),
        seconds=args.seconds,
        consumer=consumer,
        most_fetched=args.fetch,
        disk=args.disk,
    )
    report = _measure_and_advise(tuned, effort)
    if args.json:
        print_json(_as_json(tuned, report, consumer))
    elif args.yaml:
        print(_fragment(tuned, report), end="")
    else:
        _print_report(tuned, report, consumer)
        if args.consumer_ms is None:
            print(_NO_CONSUMER)
    return FINE


def doublings(most: int) -> list[int]:
    """Numbers of workers to try: 0, 1, 2, 4, ... and ``most``."""
    return sorted({0, most, *(2**power for power in range(most.bit_length()))})


def _parse_candidates(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ArgumentTypeError(f"must be whole numbers with commas between, like 0,2,4, but got {text!r}")
    return sorted(set(map(int, numbers)))


def _positive_number(text: str) -> float:
    number = _number(text)
    if not 0 < number < inf:
        raise ArgumentTypeError(f"must be a positive number, but got {text!r}")
    return number


def _not_negative_number(text: str) -> float:
    number = _number(text)
    if not 0 <= number < inf:
        raise ArgumentTypeError(f"must be a number of at least 0, but got {text!r}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def _parse_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None


_FETCHING_SECONDS = 10.0
"""After which no more is fetched to see how fast it comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Effort:
    """How much is measured, and what is known of the training that is to come."""

    candidates: Sequence[int]
    """Numbers of workers to try, in ascending order."""
    seconds: float
    """For each of them."""
    consumer: float
    """Seconds that a training step takes when its batch is there; 0 if nobody knows."""
    most_fetched: int
    """Bytes to fetch, to see how fast they come."""
    disk: int | None
    """Bytes that the cache may take; None for what is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TuneReport:
    """What was measured and is recommended."""

    batch_size: int
    link: LinkSpeed | None
    """None where all data is read in place."""
    speeds: list[Speed]
    advice: dict[str, Advice]
    """By setting; those of which nothing is to be said are left out."""


def _measure_and_advise(run: TunedRun, effort: _Effort) -> _TuneReport:
    """Measure a run's data on this machine.

    What is fetched or decompressed goes into a temporary directory, which is removed in any case; the run's own caches
    are only asked for their size.

    Raises:
        ConfigError: The run cannot be tuned.
        StorageError: Its data could not be fetched.
    """
    run.use(tune_measure.quiet(run.config))
    with closing(run.loader(0)) as home, TemporaryDirectory(prefix="lightning-streaming-tune-") as directory:
        room = tune_advice.room_of(home.dataset) if effort.disk is None else effort.disk
        is_far = not all(map(tune_measure.is_in_place, tune_measure.cache_configs(home.dataset).values()))
        with tune_measure.default_caches_in(Path(directory, "default")):
            run.use(tune_measure.away_from_home(run.config, home.dataset, Path(directory)))
            with closing(run.loader(0)) as whole:
                whole.dataset.world = run.world
                tune_measure.check_directories(whole.dataset, Path(directory))
                sizes = tune_measure.sizes_of(whole.dataset)
                link = _measured_link(whole.dataset, run, effort, sizes) if is_far else None
                run.use(
                    tune_measure.excerpt(run.config, whole.dataset, link.shards)
                    if link
                    else tune_measure.by_one_rank(run.config)
                )
                speeds = _measured_speeds(run, effort)
                advice = _advice(whole, sizes, link, speeds, effort, room)
        return _TuneReport(batch_size=tune_measure.batch_size_of(whole), link=link, speeds=speeds, advice=advice)


def _measured_link(dataset: StreamingDataset, run: TunedRun, effort: _Effort, sizes: Sizes) -> LinkSpeed:
    shards = tune_measure.shards_to_fetch(
        sizes.fetched, passes_of(dataset).catalog.stream_of_shard, effort.most_fetched
    )
    with progress(len(shards), "fetch", "shard") as tell:
        arrivals = tune_measure.fetch_shards(dataset, shards, _FETCHING_SECONDS, run.start_method, tell)
    return tune_measure.link_of(arrivals, sizes.fetched)


def _measured_speeds(run: TunedRun, effort: _Effort) -> list[Speed]:
    with progress(len(effort.candidates), "measure", "setting") as advance:

        def tell(speed: Speed) -> None:
            advance(1)
            if not sys.stderr.isatty():
                print_note("lightning-streaming tune", f"read with {counted(speed.workers, 'worker')}")

        def loader(num_workers: int) -> StreamingDataLoader:
            made = run.loader(num_workers)
            made.dataset.world = World()
            return made

        return tune_measure.measure_each(loader, effort.candidates, effort.seconds, effort.consumer, tell)


def _advice(
    whole: StreamingDataLoader,
    sizes: Sizes,
    link: LinkSpeed | None,
    speeds: list[Speed],
    effort: _Effort,
    room: int,
) -> dict[str, Advice]:
    advice = {"num_workers": tune_advice.advise_workers(speeds, effort.consumer)}
    chosen = next(speed for speed in speeds if speed.workers == advice["num_workers"].value)
    catalog, ranks = passes_of(whole.dataset).catalog, whole.dataset.current_world().ranks_per_node
    workers = max(1, chosen.workers)
    if link is not None:
        per_shard = catalog.num_samples / len(catalog.shards)
        advice["predownload"] = tune_advice.advise_predownload(
            samples_per_second=chosen.samples / chosen.batches / chosen.step_seconds(effort.consumer),
            readers=workers,
            shard_seconds=link.each,
            link_samples_per_second=link.bytes_per_second / _bytes_per_sample(whole.dataset, sizes) / ranks,
            default=default_lookahead(tune_measure.batch_size_of(whole), per_shard, workers * ranks).later,
        )
    if sizes.kept.any():
        advice["cache_limit"] = tune_advice.advise_cache(whole, sizes, room, workers * ranks)
    return advice


def _bytes_per_sample(dataset: StreamingDataset, sizes: Sizes) -> float:
    """Bytes that must come for a sample of an epoch, on average over the streams it is drawn from."""
    catalog, shares = passes_of(dataset).catalog, np.asarray(passes_of(dataset).run.weights.choose)
    stored = np.bincount(catalog.stream_of_shard, weights=sizes.fetched, minlength=len(shares))
    return float((stored / np.asarray(catalog.samples_per_stream) * shares).sum() / shares.sum())


_MIB = 2**20
_OF_LOADER = "num_workers"
_HEADS = ("workers", "samples/s", "MB/s", "batches/s", "first batch")
_LEAST_SHOWN = 0.005


def _print_report(run: TunedRun, report: _TuneReport, consumer: float) -> None:
    """Print what was measured, what to set and why, and YAML at the end."""
    if report.link is not None:
        link = report.link
        print(
            f"fetched {counted(len(link.shards), 'shard')} ({format_bytes(link.stored_bytes)}) to measure: "
            f"{format_bytes(link.bytes_per_second)}/s, {link.each:.3g} s each; the first {link.alone:.3g} s\n"
        )
    reasons = [one for one in WaitTimes._fields if any(_shares(speed)[one] >= _LEAST_SHOWN for speed in report.speeds)]
    heads = [*_HEADS, *reasons, "rest", *(["a step waits"] if consumer else [])]
    rows = [_row(speed, reasons, consumer)[: len(heads)] for speed in report.speeds]
    print_table(
        f"reading {run.data} in batches of {report.batch_size}, and what is waited for", heads, rows, right=heads
    )
    worth_setting = _worth_setting(run, report)
    settings = [
        [name, _yaml(_written_in(run, name)), _yaml(advice.value), advice.why] for name, advice in worth_setting.items()
    ]
    print_table("recommended", ["setting", "now", "better", "why"], settings)
    for name, advice in report.advice.items():
        if name not in worth_setting:
            print(f"{name} may stay at its default: {advice.why}\n")
    left_out = [name for name in ("predownload", "cache_limit") if name not in report.advice]
    if left_out:
        print(f"nothing to recommend for {' and '.join(left_out)}, as the data is read in place\n")
    print(_fragment(run, report), end="")


def _fragment(run: TunedRun, report: _TuneReport) -> str:
    """The recommended settings, as a configuration that goes after the run's own; defaults that stay are left out."""
    lines = ["data:", "  init_args:"]
    of_data = [name for name in _worth_setting(run, report) if name != _OF_LOADER]
    lines.append(f"    {_OF_LOADER}: {_yaml(report.advice[_OF_LOADER].value)}")
    if not report.advice[_OF_LOADER].value and run.written["prefetch_factor"] is not None:
        lines.append("    prefetch_factor: null")  # which torch takes with workers only
    if of_data:
        lines.append(f"    {run.data}:")
        lines += [f"      {name}: {_yaml(report.advice[name].value)}" for name in of_data]
    return "\n".join(lines) + "\n"


def _as_json(run: TunedRun, report: _TuneReport, consumer: float) -> dict[str, Any]:
    """The same for programs. Times in seconds."""
    link = report.link
    return {
        "data": run.data,
        "batch_size": report.batch_size,
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
                "bytes_per_second": speed.sample_bytes / speed.seconds,
                "batches_per_second": 1 / speed.batch_seconds,
                "first_batch": speed.first_batch,
                "wait": _shares(speed),
                "step_waits": _step_waits(speed, consumer) if consumer else None,
            }
            for speed in report.speeds
        ],
        "recommended": {
            name: {"now": _written_in(run, name), "better": advice.value, "why": advice.why}
            for name, advice in report.advice.items()
        },
    }


def _written_in(run: TunedRun, name: str) -> Any:
    """What the configuration has for a setting."""
    return run.written[name] if name in run.written else getattr(run.config, name)


def _worth_setting(run: TunedRun, report: _TuneReport) -> dict[str, Advice]:
    """What is recommended, but for what is at its default and should stay there."""
    return {
        name: advice
        for name, advice in report.advice.items()
        if advice.value is not None or _written_in(run, name) is not None
    }


def _row(speed: Speed, reasons: Sequence[str], consumer: float) -> list[str]:
    parts = [round(100 * _shares(speed)[reason]) for reason in reasons]
    return [
        str(speed.workers),
        rate(speed.samples_per_second),
        rate(speed.sample_bytes / speed.seconds / _MIB),
        rate(1 / speed.batch_seconds),
        f"{rate(1000 * speed.first_batch)} ms",
        *(f"{part}%" for part in parts),
        f"{max(0, 100 - sum(parts))}%",
        f"{_step_waits(speed, consumer):.0%}" if consumer else "",
    ]


def _shares(speed: Speed) -> Mapping[str, float]:
    """Parts of the time that passed, by what was waited for."""
    return {one: getattr(speed.wait, one) / speed.seconds for one in WaitTimes._fields}


def _step_waits(speed: Speed, consumer: float) -> float:
    return 1 - consumer / speed.step_seconds(consumer)


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)
