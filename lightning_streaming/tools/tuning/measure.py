"""Measurements of a run on this machine: sizes of its shards, download speed, and speed of its loaders."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.dataset.stream import Stream
from lightning_streaming.errors import ConfigError, SampleError, StorageError, StreamingError, UnsupportedError
from lightning_streaming.escaping import in_one_line
from lightning_streaming.formats.index import dump_index
from lightning_streaming.options.groups import group_of
from lightning_streaming.options.reading import BadSamplesConfig
from lightning_streaming.options.selection import SelectionConfig
from lightning_streaming.reading.dataset import StreamingDataset, dataset_world, run_state_of, source_of
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.measures import LoaderStatistics
from lightning_streaming.reading.position import position_of
from lightning_streaming.tools.commands import STAGES, count_ranks, read_run_files
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.runs.describe import cache_configs, is_in_place, only_loader
from lightning_streaming.world import World

_CONCURRENT_FETCHES = 4
"""Number of shards that a worker downloads at a time."""
_MAX_FIRST_WAIT = 120.0
"""Seconds to wait for the first shard; slower data is hardly usable for training."""
WORTHWHILE = 1.1
"""Smallest ratio of two speeds that is more than noise."""
_TRACEBACK = "Traceback (most recent call last):\n"
_CONTROL_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_OWN_STREAM = {"remote": None, "local": None, "storage": None}
_READ_ALL = {"split": None, "validate_hash": None, "epoch_size": None, "batching_method": "random", "cache_limit": None}


class TunedRun:
    """A data module of a configuration that was read, and the stage of it that is tuned; no data is opened.

    Args:
        args: Arguments of ``tune``.

    Raises:
        ConfigError: The configuration does not describe a run that can be tuned.
    """

    def __init__(self, args: Namespace) -> None:
        self._stage, self.data = args.stage, STAGES[args.stage]
        batch_size = "batch_size" if args.stage == "fit" else "eval_batch_size"
        changes = {} if args.batch_size is None else {batch_size: str(args.batch_size)}
        written = read_run_files(args.config, changes, self.data)
        configured, left_open = count_ranks(written.trainer)
        ranks, self.assumed = args.ranks_per_node or configured, None if args.ranks_per_node else left_open
        self.world = World(num_nodes=args.nodes or int(written.trainer.get("num_nodes", 1)), ranks_per_node=ranks)
        """The ranks that will read; loaders read as rank 0."""
        self._module = module = written.datamodule
        self.config = module.configs[self.data]
        """Configuration of the stage's data, a ``StreamingConfig``."""
        self.start_method: str | None = module.multiprocessing_context
        self._loader_settings = {"num_workers": module.num_workers, "prefetch_factor": module.prefetch_factor}

    def setting(self, name: str) -> Any:
        """Return the configured value of a setting of the loader or the data."""
        return self._loader_settings[name] if name in self._loader_settings else getattr(self.config, name)

    def use(self, config: Any) -> None:
        """Let further loaders read this data: a ``StreamingConfig``."""
        self._module.configs[self.data] = config
        self._module.setup(self._stage)

    def loader(self, num_workers: int, world: World | None = None) -> StreamingDataLoader:
        """Return a loader of the data in use, with the transform and the collate function of the data module.

        Its workers persist over epochs, so that short epochs are measured like long ones.

        Args:
            num_workers: Number of workers.
            world: The ranks that read; None for that of this process.

        Raises:
            ConfigError: The data module returns something else.
        """
        module = self._module
        module.num_workers = num_workers
        module.persistent_workers = num_workers > 0
        module.prefetch_factor = self.setting("prefetch_factor") if num_workers else None
        loader = only_loader(module, self.data, option=f"data.{self.data}")
        if loader.num_workers != num_workers:
            set_to, returned = f"num_workers={num_workers} is set", f"returns a loader with {loader.num_workers}"
            hint = "let it use self.num_workers"
            raise ConfigError(
                f"{set_to}, but this data module's build_dataloader {returned}", hint=hint, option="num_workers"
            )
        if world is not None:
            loader.dataset.world = world
        return loader


def batch_size_of(loader: StreamingDataLoader) -> int:
    """Return the number of samples, or packs, of a batch of one rank."""
    return position_of(loader).samples_per_global_batch // dataset_world(loader.dataset).num_ranks


def check_joins(dataset: StreamingDataset) -> None:
    """Check that joined data is read in place: downloaded data is measured by an excerpt, without the joined samples.

    Raises:
        UnsupportedError: It is not; the error names stream, join and what would be downloaded.
    """
    remote = next((name for name, cache in cache_configs(dataset).items() if not is_in_place(cache)), None)
    for name, stream in dataset.streams.items():
        for join, source in stream.join_sources().items():
            if remote is not None:
                why = f"stream {remote!r} is fetched"
            elif not source.cache.reads_in_place:
                why = "its shards are fetched"
            elif source.cache.needs_room(source.cache.read_index()):
                why = "its shards are compressed"
            else:
                continue
            raise UnsupportedError(
                f"stream {name!r} has join {join!r}, and {why}; tune measures fetched or decompressed data by an "
                "excerpt, in which samples would lack those that they are joined with",
                hint="tune with uncompressed copies of all these datasets in directories of this machine, written by "
                "`lightning-streaming copy`; or omit join, and what needs its columns, to tune for the stream's own "
                "data",
                option="join",
                stream=name,
            )


def check_directories(dataset: StreamingDataset, directory: Path) -> None:
    """Check that all downloads go to a directory.

    Raises:
        ConfigError: The data module uses another cache directory than its configuration says.
    """
    for name, cache in cache_configs(dataset).items():
        if not is_in_place(cache) and not cache.cache_directory().is_relative_to(directory):
            raise ConfigError(
                f"stream {name!r} must be fetched into a temporary directory, but this data module's build_dataset "
                f"uses {cache.cache_directory()}",
                hint="let it use the streams of the configuration that it receives",
                stream=name,
            )


def without_side_effects(config: Any, directory: Path) -> Any:
    """Return the same data without writing to the run's logs, and without skipping batches, which the run counts.

    Args:
        config: The ``StreamingConfig`` of the data.
        directory: Where to log bad samples, if they are replaced.
    """
    config = replace(config, debug=None, skip=())
    if not group_of(config, BadSamplesConfig).replaces:
        return config
    return replace(config, bad_samples={"action": "replace", "log": str(directory / "bad"), "max": "100%"})


def cached_in(config: Any, dataset: StreamingDataset, directory: Path) -> Any:
    """Return the same data with other cache directories than those of the run, and without a limit.

    Args:
        config: The ``StreamingConfig`` of the data.
        dataset: Its dataset.
        directory: Parent of the cache directories; streams that are read in place need none.
    """
    caches = cache_configs(dataset)
    streams = {
        name: stream.asked if is_in_place(caches[name]) else replace(stream.asked, local=str(directory / str(number)))
        for number, (name, stream) in enumerate(dataset.streams.items())
    }
    return replace(without_side_effects(config, directory), streams=streams, **_NO_OWN_STREAM, cache_limit=None)


def by_single_rank(config: Any, directory: Path, dataset: StreamingDataset, shards: Sequence[int] | None) -> Any:
    """Return the same data for a single process; of downloaded data only the downloaded shards, in place.

    Streams without downloaded shards are omitted; the others have the shares of an epoch of all the data. Batches are
    not composed by stream, because streams may be too short for that.

    Args:
        config: The ``StreamingConfig`` of the data.
        directory: As for :func:`without_side_effects`.
        dataset: Its dataset; the directories get an index of these shards alone.
        shards: Numbers of the downloaded shards, over all streams; None if all data is read in place.
    """
    config = replace(without_side_effects(config, directory), replication=None)
    if shards is None:
        return config
    shares = run_state_of(dataset).weights.choose
    streams: dict[str, Stream] = {}
    first, caches = 0, cache_configs(dataset)
    for number, (name, index) in enumerate(zip(caches, source_of(dataset).catalog.indexes, strict=True)):
        present = [index.shards[shard - first] for shard in shards if first <= shard < first + len(index.shards)]
        first += len(index.shards)
        source = caches[name].source_directory()
        if source is None and present:
            source = caches[name].cache_directory()
            (source / "index.json").write_bytes(dump_index(present))
        if source is not None and shares[number]:
            streams[name] = Stream(local=str(source), proportion=float(shares[number]))
    selection = SelectionConfig(where=group_of(config, SelectionConfig).where)
    return replace(config, streams=streams, **_NO_OWN_STREAM, **_READ_ALL, selection=selection)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One shard that was downloaded; times in seconds since the first request."""

    shard: int
    """Number over all streams."""
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """The download speed of some shards."""

    shards: list[int]
    """Numbers of the downloaded shards, over all streams."""
    stored_bytes: int
    """Bytes of these, as stored."""
    alone: float
    """Seconds of the first, which was downloaded alone, including the creation of clients and connections."""
    each: float
    """Median seconds of one of several that are downloaded at a time."""
    bytes_per_second: float
    """Bytes per second of those downloaded at a time; of the first if there was no other."""


def shards_to_fetch(stored: NDArray[np.int64], stream_of_shard: NDArray[np.int64], max_bytes: int) -> list[int]:
    """Return shards of every remote stream in turn: the first of each stream, then the second of each, and so on.

    Args:
        stored: Bytes to download of each shard, 0 for one that is read in place; of shape (shards,).
        stream_of_shard: Stream of each shard.
        max_bytes: Maximum sum of bytes, unless the first of each stream have more.
    """
    remote = np.flatnonzero(stored)
    streams, firsts = np.unique(stream_of_shard[remote], return_index=True)
    rounds = np.arange(len(remote)) - firsts[np.searchsorted(streams, stream_of_shard[remote])]
    ordered = remote[np.argsort(rounds, kind="stable")]
    within = int(np.searchsorted(np.cumsum(stored[ordered]), max_bytes, side="right"))
    return [int(shard) for shard in ordered[: max(within, len(streams))]]


def fetch_shards(
    dataset: StreamingDataset,
    shards: Sequence[int],
    seconds: float,
    start_method: str | None,
    advance: Callable[[int], object],
) -> list[Arrival]:
    """Download shards in another process, which is killed when the time is up, or when this one is interrupted.

    Args:
        dataset: The dataset, with the cache directories to fill.
        shards: Their numbers: the first is downloaded alone, then several at a time.
        seconds: Maximum duration, but the first shard is awaited in any case.
        start_method: Start method of the process; None for the platform's default.
        advance: Receives the number of shards that arrived since its last call.

    Raises:
        StorageError: One could not be downloaded, or the first took too long.
    """
    context: Any = multiprocessing.get_context(start_method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_fetch_all, args=(dataset, shards, sender), daemon=True)
    process.start()
    sender.close()
    arrivals: list[Arrival] = []
    began = perf_counter()
    try:
        while len(arrivals) < len(shards):
            limit = seconds if arrivals else _MAX_FIRST_WAIT
            if not receiver.poll(max(0.0, began + limit - perf_counter())):
                break
            try:
                received = receiver.recv()
            except EOFError:
                raise StorageError("the process that fetched shards to measure the link has died") from None
            if isinstance(received, Exception):
                raise received
            arrivals.append(received)
            advance(1)
    finally:
        process.kill()  # not terminated: it may be in the middle of a download
        process.join()
        receiver.close()
    if not arrivals:
        raise StorageError(f"no shard arrived within {_MAX_FIRST_WAIT:.0f} s, so the data cannot be measured")
    return arrivals


def _fetch_all(dataset: StreamingDataset, shards: Sequence[int], pipe: Connection) -> None:
    """Download shards, in a process that its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    began = perf_counter()

    def timed(shard: int) -> Arrival:
        requested = perf_counter()
        dataset.prepare_shard(shard)
        return Arrival(shard=shard, began=requested - began, ended=perf_counter() - began)

    try:
        pipe.send(timed(shards[0]))
        with ThreadPoolExecutor(_CONCURRENT_FETCHES) as pool:
            for arrival in [pool.submit(timed, shard) for shard in shards[1:]]:
                pipe.send(arrival.result())
    except Exception as error:  # noqa: BLE001  the parent raises it
        pipe.send(error)


def link_of(arrivals: Sequence[Arrival], stored: NDArray[np.int64]) -> LinkSpeed:
    """Return the download speed from the times of shards.

    Args:
        arrivals: At least one, in order of arrival; the first was downloaded alone.
        stored: Bytes of each shard as stored, of shape (shards,).
    """
    first, *others = arrivals
    timed = others or [first]
    passed = max(arrival.ended for arrival in timed) - min(arrival.began for arrival in timed)
    return LinkSpeed(
        shards=sorted(arrival.shard for arrival in arrivals),
        stored_bytes=sum(int(stored[arrival.shard]) for arrival in arrivals),
        alone=first.ended - first.began,
        each=median(arrival.ended - arrival.began for arrival in timed),
        bytes_per_second=sum(int(stored[arrival.shard]) for arrival in timed) / passed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a loader yielded after its first batch, and the duration in seconds."""

    workers: int
    seconds: float
    read: LoaderStatistics
    first_batch: float
    """Seconds from the creation of the iterator to its first batch."""

    @property
    def batch_seconds(self) -> float:
        """Seconds from one batch to the next."""
        return self.seconds / self.read.batches

    @property
    def samples_per_second(self) -> float:
        """Samples per second."""
        return self.read.samples / self.seconds

    def step_seconds(self, consumer: float) -> float:
        """Return the seconds from one training step to the next.

        Workers create batches during a step, the training process itself between steps.

        Args:
            consumer: Seconds of a step whose batch is ready.
        """
        return max(self.batch_seconds, consumer) if self.workers else self.batch_seconds + consumer


def measure(loader: StreamingDataLoader, seconds: float) -> Speed:
    """Read epochs from the first on, and close the loader.

    Args:
        loader: A new loader.
        seconds: Duration after the first batch; at least one more batch is read.

    Raises:
        ConfigError: An epoch has no batch.
    """
    with closing(loader):
        loader.dataset.next_epoch = 0
        began = perf_counter()
        batches = iter(loader)
        if next(batches, None) is None:
            raise ConfigError(
                "an epoch of this data has no batch", hint="with drop_last it must fill one", option="drop_last"
            )
        first, before = perf_counter() - began, loader.statistics()
        began = perf_counter()
        while True:
            for _ in batches:
                if (passed := perf_counter() - began) >= seconds:
                    read = loader.statistics().since(before)
                    return Speed(workers=loader.num_workers, seconds=passed, read=read, first_batch=first)
            batches = iter(loader)


def measure_each(
    create_loader: Callable[[int], StreamingDataLoader],
    candidates: Iterable[int],
    seconds: float,
    consumer: float,
    report: Callable[[Speed], object],
) -> list[Speed]:
    """Measure increasing numbers of workers until more do not help.

    The first is read once without measuring, so that all find the data in memory alike.

    Args:
        create_loader: Returns a loader with a number of workers.
        candidates: Numbers of workers, ascending.
        seconds: Duration of each.
        consumer: Seconds of a training step; 0 if unknown.
        report: Receives each result.

    Raises:
        ConfigError: An epoch has no batch, or a function of the run failed.
        StreamingError: The data could not be read.
    """
    speeds: list[Speed] = []
    for workers in candidates:
        try:
            if not speeds:
                measure(create_loader(workers), seconds)
            speeds.append(measure(create_loader(workers), seconds))
        except Exception as error:
            if isinstance(error, StreamingError) and not isinstance(error, SampleError):
                raise
            raise _reading_failed(workers, error) from error
        report(speeds[-1])
        if is_enough(speeds, consumer):
            break
    return speeds


def is_enough(speeds: Sequence[Speed], consumer: float) -> bool:
    """Return whether more workers would not help: the last keep up with training, or two increases gained nothing.

    One increase may gain nothing by chance.
    """
    with_workers = [speed for speed in speeds if speed.workers]
    if with_workers and with_workers[-1].batch_seconds * WORTHWHILE <= consumer:
        return True
    times = [speed.batch_seconds for speed in with_workers[-3:]]
    return len(times) == 3 and times[0] < times[1] * WORTHWHILE and times[1] < times[2] * WORTHWHILE


def _reading_failed(workers: int, error: Exception) -> ConfigError:
    """Return an error whose first line is the cause, followed by the traceback.

    An error of ours has that of a transform or collate function as its cause; the message of one of torch's is the
    traceback of a worker process.
    """
    raised = (error.__cause__ if isinstance(error, SampleError) else None) or error
    _, has_traceback, last = str(raised).rpartition(_TRACEBACK)
    if has_traceback:
        text = has_traceback + last
        lines = last.splitlines()
        first = next((line for line in lines if not line.startswith(" ")), lines[-1])
    else:
        first = traceback.format_exception_only(raised)[0].splitlines()[0]
        text = "".join(traceback.format_exception(error))
        text = text[max(0, text.find(_TRACEBACK)) :]
    failed = f"reading with {counted(workers, 'worker')} failed"
    return ConfigError(message=f"{failed}: {in_one_line(first)}\n{text.rstrip()}")


def quotas(groups: Path = _CONTROL_GROUPS, membership: Path = _MEMBERSHIP) -> Iterator[int]:
    """Yield the processors that each limit of a process's control groups allows, rounded up.

    Args:
        groups: Mount point of control groups.
        membership: File that names the groups of the process.
    """

    def read(path: Path) -> list[str]:
        return path.read_text().split() if path.is_file() else []  # missing on other systems than Linux

    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = groups / "cpu" if controllers else groups
        for parent in (PurePosixPath(path), *PurePosixPath(path).parents):
            group = mounted / str(parent).lstrip("/")
            # Version 2 has "200000 100000" in one file, for 2 processors; version 1 has two files.
            numbers = read(group / "cpu.max") or read(group / "cpu.cfs_quota_us") + read(group / "cpu.cfs_period_us")
            if len(numbers) == 2 and all(number.isdecimal() for number in numbers):  # else max, or -1: no limit
                quota, period = map(int, numbers)
                if period:
                    yield max(1, -(-quota // period))
