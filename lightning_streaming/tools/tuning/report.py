"""All of it, in order: what is fetched, what is measured, and what is recommended for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from lightning_streaming.loading.dataloader import StreamingDataLoader
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.loading.prefetch import default_reach
from lightning_streaming.tools.console import counted, print_note, progress
from lightning_streaming.tools.tuning.advice import Advice, advise_predownload, advise_workers
from lightning_streaming.tools.tuning.excerpt import (
    away_from_home,
    by_one_rank,
    check_directories,
    default_caches_in,
    excerpt,
    quiet,
)
from lightning_streaming.tools.tuning.limits import advise_cache, room_of
from lightning_streaming.tools.tuning.link import Link, fetch, link_of, shards_to_fetch
from lightning_streaming.tools.tuning.run import TunedRun, batch_size_of
from lightning_streaming.tools.tuning.sizes import Sizes, cache_configs, is_in_place, sizes_of
from lightning_streaming.tools.tuning.speeds import Speed, measure_each
from lightning_streaming.world import World

_FETCHING_SECONDS = 10.0
"""After which no more is fetched to see how fast it comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
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
class Report:
    """What was measured and is recommended."""

    batch_size: int
    link: Link | None
    """None where all data is read in place."""
    speeds: list[Speed]
    advice: dict[str, Advice]
    """By setting; those of which nothing is to be said are left out."""


def tune(run: TunedRun, effort: Effort) -> Report:
    """Measure a run's data on this machine.

    What is fetched or decompressed goes into a temporary directory, which is removed in any case; the run's own caches
    are only asked for their size.

    Raises:
        ConfigError: The run cannot be tuned.
        StorageError: Its data could not be fetched.
    """
    run.use(quiet(run.config))
    with closing(run.loader(0)) as home, TemporaryDirectory(prefix="lightning-streaming-tune-") as directory:
        room = room_of(home.dataset) if effort.disk is None else effort.disk
        is_far = not all(map(is_in_place, cache_configs(home.dataset).values()))
        with default_caches_in(Path(directory, "default")):
            run.use(away_from_home(run.config, home.dataset, Path(directory)))
            with closing(run.loader(0)) as whole:
                whole.dataset.world = run.world
                check_directories(whole.dataset, Path(directory))
                sizes = sizes_of(whole.dataset)
                link = _measured_link(whole.dataset, run, effort, sizes) if is_far else None
                run.use(excerpt(run.config, whole.dataset, link.shards) if link else by_one_rank(run.config))
                speeds = _measured_speeds(run, effort)
                advice = _advice(whole, sizes, link, speeds, effort, room)
        return Report(batch_size=batch_size_of(whole), link=link, speeds=speeds, advice=advice)


def _measured_link(dataset: StreamingDataset, run: TunedRun, effort: Effort, sizes: Sizes) -> Link:
    shards = shards_to_fetch(sizes.fetched, passes_of(dataset).catalog.stream_of_shard, effort.most_fetched)
    with progress(len(shards), "fetch", "shard") as tell:
        arrivals = fetch(dataset, shards, _FETCHING_SECONDS, run.start_method, tell)
    return link_of(arrivals, sizes.fetched)


def _measured_speeds(run: TunedRun, effort: Effort) -> list[Speed]:
    with progress(len(effort.candidates), "measure", "setting") as advance:

        def tell(speed: Speed) -> None:
            advance(1)
            if not sys.stderr.isatty():
                print_note("lightning-streaming tune", f"read with {counted(speed.workers, 'worker')}")

        def loader(num_workers: int) -> StreamingDataLoader:
            made = run.loader(num_workers)
            made.dataset.world = World()
            return made

        return measure_each(loader, effort.candidates, effort.seconds, effort.consumer, tell)


def _advice(
    whole: StreamingDataLoader, sizes: Sizes, link: Link | None, speeds: list[Speed], effort: Effort, room: int
) -> dict[str, Advice]:
    advice = {"num_workers": advise_workers(speeds, effort.consumer)}
    chosen = next(speed for speed in speeds if speed.workers == advice["num_workers"].value)
    catalog, ranks = passes_of(whole.dataset).catalog, whole.dataset.current_world().ranks_per_node
    workers = max(1, chosen.workers)
    if link is not None:
        per_shard = catalog.num_samples / len(catalog.shards)
        advice["predownload"] = advise_predownload(
            samples_per_second=chosen.samples / chosen.batches / chosen.step_seconds(effort.consumer),
            readers=workers,
            shard_seconds=link.each,
            link_samples_per_second=link.bytes_per_second / _bytes_per_sample(whole.dataset, sizes) / ranks,
            default=default_reach(batch_size_of(whole), per_shard, workers * ranks).later,
        )
    if sizes.kept.any():
        advice["cache_limit"] = advise_cache(whole, sizes, room, workers * ranks)
    return advice


def _bytes_per_sample(dataset: StreamingDataset, sizes: Sizes) -> float:
    """Bytes that must come for a sample of an epoch, on average over the streams it is drawn from."""
    catalog, shares = passes_of(dataset).catalog, np.asarray(passes_of(dataset).epochs.weights.choose)
    stored = np.bincount(catalog.stream_of_shard, weights=sizes.fetched, minlength=len(shares))
    return float((stored / np.asarray(catalog.samples_per_stream) * shares).sum() / shares.sum())
