"""The data that is measured where it has to be fetched: some shards of each stream, in a directory of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_streaming.cache.layout import CACHE_VARIABLE
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import dump_index
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.loading.stream import Stream
from lightning_streaming.tools.tuning.sizes import cache_configs, is_in_place


def away_from_home(config: Any, dataset: StreamingDataset, directory: Path) -> Any:
    """The same data, fetched into other directories than those that the run will use, and without a limit.

    Args:
        config: The ``StreamingConfig`` of the data.
        dataset: Made of it.
        directory: Where to have the other directories; streams that are read in place need none.
    """
    caches = cache_configs(dataset)
    streams = {
        name: stream.asked if is_in_place(caches[name]) else replace(stream.asked, local=str(directory / str(number)))
        for number, (name, stream) in enumerate(dataset.streams.items())
    }
    return replace(quiet(config), streams=streams, **_NO_STREAM_OF_ITS_OWN, cache_limit=None)


def quiet(config: Any) -> Any:
    """The same data; no log is written of it, and no batches are skipped, which are numbers of the run itself."""
    return replace(config, sample_log=None, skip=())


@contextmanager
def default_caches_in(directory: Path) -> Iterator[None]:
    """Have the default cache directories there: of raw files of compressed shards in place, and of large indexes."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE_VARIABLE]
        else:
            os.environ[CACHE_VARIABLE] = before


def check_directories(dataset: StreamingDataset, directory: Path) -> None:
    """See to it that nothing is fetched but into this directory.

    Raises:
        ConfigError: The data module fetches elsewhere than its configuration says.
    """
    for name, cache in cache_configs(dataset).items():
        if not is_in_place(cache) and not cache.cache_directory().is_relative_to(directory):
            raise ConfigError(
                f"stream {name!r} was to be fetched into a temporary directory, but this data module's build_dataset "
                f"has it in {cache.cache_directory()}; let it use the streams of the configuration that it is given"
            )


def by_one_rank(config: Any) -> Any:
    """The same data for a single process, which shares no samples with others."""
    return replace(quiet(config), replication=None)


def excerpt(config: Any, dataset: StreamingDataset, shards: Sequence[int]) -> Any:
    """Configuration of what is here of the data, read in place; streams of which nothing is here are left out.

    Streams come with the shares that they have of an epoch of all the data. Batches are not composed by stream, as
    streams may be too short for that now.

    Args:
        config: The ``StreamingConfig`` of the data.
        dataset: Made of it; its directories get an index of these shards alone.
        shards: Those that were fetched, counted over all streams.
    """
    shares = passes_of(dataset).epochs.weights.choose
    streams: dict[str, Stream] = {}
    first, caches = 0, cache_configs(dataset)
    for number, (name, index) in enumerate(zip(caches, passes_of(dataset).catalog.indexes, strict=True)):
        here = [index.shards[shard - first] for shard in shards if first <= shard < first + len(index.shards)]
        first += len(index.shards)
        directory = caches[name].source_directory()
        if directory is None and here:
            directory = caches[name].cache_directory()
            (directory / "index.json").write_bytes(dump_index(here))
        if directory is not None and shares[number]:
            streams[name] = Stream(local=str(directory), proportion=float(shares[number]))
    return replace(by_one_rank(config), streams=streams, **_NO_STREAM_OF_ITS_OWN, **_AS_THEY_COME)


_NO_STREAM_OF_ITS_OWN = {"remote": None, "local": None, "storage_options": None}
_AS_THEY_COME = {
    "split": None,
    "validate_hash": None,
    "epoch_size": None,
    "batching_method": "random",
    "cache_limit": None,
}
