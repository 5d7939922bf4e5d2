"""The run that is tuned, how fast its shards arrive on this machine, and how fast its loader hands out batches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.config import CACHE_VARIABLE
from lightning_streaming.dataset.stream import Stream
from lightning_streaming.errors import ConfigError, SampleError, StorageError, StreamingError, UnsupportedError
from lightning_streaming.escaping import in_one_line
from lightning_streaming.formats.index import ShardInfo, dump_index
from lightning_streaming.options.bad_samples import BadSamplesConfig
from lightning_streaming.options.groups import group_of
from lightning_streaming.options.selection import SelectionConfig
from lightning_streaming.options.token_budget import TokenBudget
from lightning_streaming.reading.dataset import StreamingDataset, dataset_world
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.measures import LoaderStatistics
from lightning_streaming.reading.passes import passes_of
from lightning_streaming.reading.position import position_of
from lightning_streaming.tools.commands import STAGES, count_ranks, read_run_files, usable_cpus
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.runs.describe import cache_configs, is_in_place
from lightning_streaming.world import World


class TunedRun:
    """A data module, and the one stage of it that is tuned.

    Args:
        module: A ``StreamingDataModule`` that is not set up.
        stage: One of :data:`STAGES`.
        world: The ranks that are to read, as rank 0 of which the loaders read.
        assumed: What nobody said and is taken to be so.
    """

    def __init__(self, module: Any, stage: str, world: World, assumed: str | None) -> None:
        self.world = world
        self.assumed = assumed
        self._of_loader = {"num_workers": module.num_workers, "prefetch_factor": module.prefetch_factor}
        self.config = module.configs[STAGES[stage]]
        """The stage's data as the configuration has it: a ``StreamingConfig``."""
        self._module = module
        self._stage = stage

    @property
    def data(self) -> str:
        """What the data of the stage is called in the configuration."""
        return STAGES[self._stage]

    def setting(self, name: str) -> Any:
        """What the configuration has for a setting of the loader or the data."""
        return self._of_loader[name] if name in self._of_loader else getattr(self.config, name)

    @property
    def start_method(self) -> str | None:
        """How the configuration wants processes to start; None for the platform's default."""
        method: str | None = self._module.multiprocessing_context
        return method

    def use(self, config: Any) -> None:
        """Let the loaders that are made from now on read this data: a ``StreamingConfig``."""
        self._module.configs[self.data] = config
        self._module.setup(self._stage)

    def loader(self, num_workers: int) -> StreamingDataLoader:
        """A loader of the data in use, with the transform and the collate function of the data module.

        Its workers live on from epoch to epoch, so that epochs that are short here count like long ones.

        Raises:
            ConfigError: The data module makes something else.
        """
        module = self._module
        module.num_workers = num_workers
        module.persistent_workers = num_workers > 0
        module.prefetch_factor = self.setting("prefetch_factor") if num_workers else None
        made = getattr(module, f"{self.data}_dataloader")()
        if isinstance(made, Mapping) and len(made) == 1:
            made = next(iter(made.values()))
        if not isinstance(made, StreamingDataLoader):
            raise ConfigError(
                f"a run with one StreamingDataLoader for {self.data!r} can be tuned, but this data module's "
                f"{self.data}_dataloader gives a {type(made).__name__}",
                option=f"data.{self.data}",
            )
        if made.num_workers != num_workers:
            raise ConfigError(
                f"num_workers={num_workers} was asked for, but this data module's build_dataloader makes loaders with "
                f"{made.num_workers}",
                hint="let it use self.num_workers",
                option="num_workers",
            )
        return made


def tuned_run(
    configs: Sequence[str], changes: Mapping[str, str], stage: str, nodes: int | None, ranks_per_node: int | None
) -> TunedRun:
    """Read the configuration; nothing is opened.

    Args:
        configs: Paths of its files.
        changes: More settings of the data.
        stage: One of :data:`STAGES`.
        nodes: How many there are; None where the configuration is to say it.
        ranks_per_node: The same.

    Raises:
        ConfigError: It does not describe a run that can be tuned.
    """
    written = read_run_files(configs, changes, STAGES[stage])
    ranks, assumed = (ranks_per_node, None) if ranks_per_node else count_ranks(written.trainer)
    world = World(num_nodes=nodes or int(written.trainer.get("num_nodes", 1)), ranks_per_node=ranks)
    return TunedRun(written.datamodule, stage, world, assumed)


def batch_size_of(loader: StreamingDataLoader) -> int:
    """Samples, or packs, of a batch of one rank."""
    return position_of(loader).samples_per_global_batch // dataset_world(loader.dataset).num_ranks


def batches_of(dataset: StreamingDataset) -> str:
    """What batches are of: samples, or packs or a group of documents."""
    packing = passes_of(dataset).run.asked.pack
    if packing is None:
        return "samples"
    return "group" if isinstance(packing, TokenBudget) else "packs"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sizes:
    """Bytes of each shard over all streams; arrays of shape (shards,)."""

    fetched: NDArray[np.int64]
    """Over the link; 0 where a shard is read in place."""
    kept: NDArray[np.int64]
    """In a cache directory of this node; 0 where nothing is written."""
    making: NDArray[np.int64]
    """The same while a shard is decompressed, which takes room for both of its forms."""
    index: int
    """Of the indexes that are kept too."""


def check_joins(dataset: StreamingDataset) -> None:
    """Refuse joined data that is not all read in place: of what is fetched an excerpt is measured, whose samples would
    lack the ones that belong to them.

    Raises:
        UnsupportedError: Naming stream and join, and what would be fetched.
    """
    far = next((name for name, cache in cache_configs(dataset).items() if not is_in_place(cache)), None)
    for name, stream in dataset.streams.items():
        for join, source in stream.join_sources().items():
            if far is not None:
                why = f"stream {far!r} is fetched"
            elif not source.cache.reads_in_place:
                why = "its shards are fetched"
            elif source.cache.needs_room(source.cache.read_index()):
                why = "its shards are compressed"
            else:
                continue
            raise UnsupportedError(
                f"stream {name!r} has join {join!r}, and {why}; tune measures fetched or decompressed data by an "
                "excerpt, in which samples would lack those that they are joined with",
                hint="tune with copies of all these datasets in directories of this machine, uncompressed, as "
                "`lightning-streaming copy` makes them; or leave join out, with what needs its columns, to tune "
                "for the stream's own data",
                option="join",
                stream=name,
            )


def sizes_of(dataset: StreamingDataset) -> Sizes:
    """Add up what the indexes say; these are read, and fetched where they are not here.

    Raises:
        StorageError: An index could not be fetched.
    """
    fetched, kept, making, index_bytes = [], [], [], 0
    for cache, index in zip(cache_configs(dataset).values(), passes_of(dataset).catalog.indexes, strict=True):
        raw, packed = _raw_and_packed(index.shards)
        if is_in_place(cache):
            fetched.append(np.zeros_like(raw))
            kept.append(np.where(packed, raw, 0))
            making.append(kept[-1])
        else:
            fetched.append(np.where(packed, packed, raw))
            kept.append(raw + packed if cache.keep_zip else raw)
            making.append(raw + packed)
            index_bytes += _size(cache.cache_directory() / "index.json")
    arrays = {"fetched": fetched, "kept": kept, "making": making}
    return Sizes(**{name: np.concatenate(parts) for name, parts in arrays.items()}, index=index_bytes)


def _raw_and_packed(shards: Iterable[ShardInfo]) -> NDArray[np.int64]:
    """Bytes of each shard's raw files, and of its compressed ones: 0 where it has none; of shape (2, shards)."""
    pairs = ([(raw.bytes, packed.bytes if packed else 0) for raw, packed in shard.files] for shard in shards)
    sums: NDArray[np.int64] = np.array([np.sum(one, axis=0) for one in pairs], np.int64).reshape(-1, 2).T
    return sums


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


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
    return replace(quiet(config, directory), streams=streams, **_NO_STREAM_OF_ITS_OWN, cache_limit=None)


def quiet(config: Any, directory: Path) -> Any:
    """The same data; nothing is added to the run's logs, and no batches are skipped, which are numbers of the run.

    Args:
        config: The ``StreamingConfig`` of the data.
        directory: Where to write down bad samples, if they are replaced.
    """
    config = replace(config, debug=None, skip=())
    if not group_of(config, BadSamplesConfig).replaces:
        return config
    return replace(config, bad_samples={"action": "replace", "log": str(directory / "bad"), "max": "100%"})


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
                f"has it in {cache.cache_directory()}",
                hint="let it use the streams of the configuration that it is given",
                stream=name,
            )


def by_one_rank(config: Any, directory: Path) -> Any:
    """The same data for a single process, which shares no samples with others."""
    return replace(quiet(config, directory), replication=None)


def excerpt(config: Any, directory: Path, dataset: StreamingDataset, shards: Sequence[int]) -> Any:
    """Configuration of what is here of the data, read in place; streams of which nothing is here are left out.

    Streams come with the shares that they have of an epoch of all the data. Batches are not composed by stream, as
    streams may be too short for that now.

    Args:
        config: The ``StreamingConfig`` of the data.
        directory: As for :func:`quiet`.
        dataset: Made of it; its directories get an index of these shards alone.
        shards: Those that were fetched, counted over all streams.
    """
    shares = passes_of(dataset).run.weights.choose
    streams: dict[str, Stream] = {}
    first, caches = 0, cache_configs(dataset)
    for number, (name, index) in enumerate(zip(caches, passes_of(dataset).catalog.indexes, strict=True)):
        here = [index.shards[shard - first] for shard in shards if first <= shard < first + len(index.shards)]
        first += len(index.shards)
        place = caches[name].source_directory()
        if place is None and here:
            place = caches[name].cache_directory()
            (place / "index.json").write_bytes(dump_index(here))
        if place is not None and shares[number]:
            streams[name] = Stream(local=str(place), proportion=float(shares[number]))
    selection = SelectionConfig(where=group_of(config, SelectionConfig).where)
    settings = {**_NO_STREAM_OF_ITS_OWN, **_AS_THEY_COME, "selection": selection}
    return replace(by_one_rank(config, directory), streams=streams, **settings)


_NO_STREAM_OF_ITS_OWN = {"remote": None, "local": None, "storage": None}
_AS_THEY_COME = {
    "split": None,
    "validate_hash": None,
    "epoch_size": None,
    "batching_method": "random",
    "cache_limit": None,
}


_AT_A_TIME = 4
"""Shards that a worker fetches at a time."""
_PATIENCE = 120.0
"""Seconds to wait for the first shard; what is slower can hardly be trained from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One shard that was fetched; times in seconds since the first was asked for."""

    shard: int
    """Counted over all streams."""
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """What fetching some shards has shown."""

    shards: list[int]
    """Those that are here now, counted over all streams."""
    stored_bytes: int
    """Bytes of these, as they travelled."""
    alone: float
    """Seconds that the first took, on its own; with it clients are made and connections opened."""
    each: float
    """Seconds that one takes while others come beside it: the median."""
    bytes_per_second: float
    """Of all that came beside each other; of the first where there was no other."""


def shards_to_fetch(stored: NDArray[np.int64], stream_of_shard: NDArray[np.int64], most_bytes: int) -> list[int]:
    """Some shards of every stream that has any to fetch: the first of each stream, then the second of each, and so on.

    Args:
        stored: Bytes of each shard as it travels, 0 for one that is read in place; of shape (shards,).
        stream_of_shard: Of the same shape.
        most_bytes: Bytes of all together, unless the first of each stream take more.
    """
    remote = np.flatnonzero(stored)
    streams, firsts = np.unique(stream_of_shard[remote], return_index=True)
    rounds = np.arange(len(remote)) - firsts[np.searchsorted(streams, stream_of_shard[remote])]
    in_turn = remote[np.argsort(rounds, kind="stable")]
    within = int(np.searchsorted(np.cumsum(stored[in_turn]), most_bytes, side="right"))
    return [int(shard) for shard in in_turn[: max(within, len(streams))]]


def fetch_shards(
    dataset: StreamingDataset,
    shards: Sequence[int],
    seconds: float,
    start_method: str | None,
    tell: Callable[[int], object],
) -> list[Arrival]:
    """Fetch shards in another process, which is killed when the time is up, or when this one is interrupted.

    Args:
        dataset: Where from, and where to.
        shards: In this order; the first by itself, then some at a time.
        seconds: How long to go on; the first is waited for in any case.
        start_method: How the process starts; None for the platform's default.
        tell: Told how many shards have come since it was last told.

    Raises:
        StorageError: One could not be fetched, or the first did not come for long.
    """
    context: Any = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_fetch_all, args=(dataset, shards, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return _arrivals(ours, len(shards), seconds, tell)
    finally:
        process.kill()  # and not told to end: it may be in the middle of a download
        process.join()
        ours.close()


def link_of(arrivals: Sequence[Arrival], stored: NDArray[np.int64]) -> LinkSpeed:
    """What the times of some shards, at least one, say about the link.

    Args:
        arrivals: In the order in which they came; the first came by itself.
        stored: Bytes of each shard as it travels, of shape (shards,).
    """
    first, *others = arrivals
    timed = others or [first]
    passed = max(one.ended for one in timed) - min(one.began for one in timed)
    return LinkSpeed(
        shards=sorted(one.shard for one in arrivals),
        stored_bytes=sum(int(stored[one.shard]) for one in arrivals),
        alone=first.ended - first.began,
        each=median(one.ended - one.began for one in timed),
        bytes_per_second=sum(int(stored[one.shard]) for one in timed) / passed,
    )


def _arrivals(pipe: Connection, expected: int, seconds: float, tell: Callable[[int], object]) -> list[Arrival]:
    arrivals: list[Arrival] = []
    began = perf_counter()
    while len(arrivals) < expected:
        patience = seconds if arrivals else _PATIENCE
        if not pipe.poll(max(0.0, began + patience - perf_counter())):
            break
        try:
            came = pipe.recv()
        except EOFError:
            raise StorageError("the process that fetched shards to measure the link has died") from None
        if isinstance(came, Exception):
            raise came
        arrivals.append(came)
        tell(1)
    if not arrivals:
        raise StorageError(f"no shard came within {_PATIENCE:.0f} s, so the data cannot be measured")
    return arrivals


def _fetch_all(dataset: StreamingDataset, shards: Sequence[int], pipe: Connection) -> None:
    """In the process that fetches: ended by whoever started it, so it heeds nobody else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    began = perf_counter()

    def timed(shard: int) -> Arrival:
        asked = perf_counter()
        dataset.prepare_shard(shard)
        return Arrival(shard=shard, began=asked - began, ended=perf_counter() - began)

    try:
        pipe.send(timed(shards[0]))
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            for came in [pool.submit(timed, shard) for shard in shards[1:]]:
                pipe.send(came.result())
    except Exception as error:  # noqa: BLE001  raised again by who waits for shards
        pipe.send(error)


WORTHWHILE = 1.1
"""A setting this many times as fast as another is better than noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What one loader has handed out after its first batch, and how long that took in seconds."""

    workers: int
    seconds: float
    read: LoaderStatistics
    first_batch: float
    """Seconds from making the loader to its first batch."""

    @property
    def batch_seconds(self) -> float:
        """Seconds from one batch to the next."""
        return self.seconds / self.read.batches

    @property
    def samples_per_second(self) -> float:
        """Samples handed out in a second."""
        return self.read.samples / self.seconds

    def step_seconds(self, consumer: float) -> float:
        """Seconds from one training step to the next.

        Workers make batches while a step is taken, the training process itself makes them between two.

        Args:
            consumer: Seconds that a step takes when its batch is there.
        """
        return max(self.batch_seconds, consumer) if self.workers else self.batch_seconds + consumer


def measure(loader: StreamingDataLoader, seconds: float) -> Speed:
    """Read an epoch from its beginning, again and again if it is short, then close the loader.

    Args:
        loader: A new one.
        seconds: How long to go on after the first batch; at least one more batch is read.

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
    make: Callable[[int], StreamingDataLoader],
    candidates: Iterable[int],
    seconds: float,
    consumer: float,
    tell: Callable[[Speed], object],
) -> list[Speed]:
    """Measure one number of workers after another, until more of them do not help any more.

    Before that, the first is read for as long without being counted, so that all find the data in memory alike.

    Args:
        make: Makes a loader with so many workers.
        candidates: Numbers of workers, in ascending order.
        seconds: For each.
        consumer: Seconds that a training step takes; 0 if nobody knows.
        tell: Told of each.

    Raises:
        ConfigError: An epoch has no batch, or a function of the run failed.
        StreamingError: The data could not be read.
    """
    speeds: list[Speed] = []
    for workers in candidates:
        try:
            if not speeds:
                measure(make(workers), seconds)
            speeds.append(measure(make(workers), seconds))
        except Exception as error:
            if isinstance(error, StreamingError) and not isinstance(error, SampleError):
                raise
            raise _reading_failed(workers, error) from error
        tell(speeds[-1])
        if is_enough(speeds, consumer):
            break
    return speeds


def is_enough(speeds: Sequence[Speed], consumer: float) -> bool:
    """Whether more workers need not be tried: the last ones keep up with training, or two steps up gained nothing.

    One step may gain nothing by chance.
    """
    of_workers = [speed for speed in speeds if speed.workers]
    if of_workers and of_workers[-1].batch_seconds * WORTHWHILE <= consumer:
        return True
    times = [speed.batch_seconds for speed in of_workers[-3:]]
    return len(times) == 3 and times[0] < times[1] * WORTHWHILE and times[1] < times[2] * WORTHWHILE


_TRACEBACK = "Traceback (most recent call last):\n"


def _reading_failed(workers: int, error: Exception) -> ConfigError:
    """An error that says in its first line what went wrong, and where in those after it.

    Args:
        workers: With how many it was read.
        error: What reading raised: an error of ours, whose cause is what a transform or collate function raised; or one
            of torch's, whose message is the traceback of its worker process.
    """
    raised = (error.__cause__ if isinstance(error, SampleError) else None) or error
    lines = "".join(traceback.format_exception(error))
    _, found, last = str(raised).rpartition(_TRACEBACK)
    if found:
        lines = found + last
        where = last.splitlines()
        first = next((line for line in where if not line.startswith(" ")), where[-1])
    else:
        first = traceback.format_exception_only(raised)[0].splitlines()[0]
        lines = lines[max(0, lines.find(_TRACEBACK)) :]
    words = f"reading with {counted(workers, 'worker')} failed: {in_one_line(first)}\n{lines.rstrip()}"
    return ConfigError(message=words)


_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Processors that this process may run on, or as many as its control groups let it use up, if that is less."""
    return min([usable_cpus(), *quotas(_GROUPS, _MEMBERSHIP)])


def quotas(groups: Path, membership: Path) -> Iterator[int]:
    """Processors that each limit of a process's control groups allows, rounded up; none where there are no limits.

    Args:
        groups: Where control groups are mounted.
        membership: The file that says which ones the process is in.
    """
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = groups / "cpu" if controllers else groups
        for parent in (PurePosixPath(path), *PurePosixPath(path).parents):
            found = _quota_of(mounted / str(parent).lstrip("/"))
            if found is not None:
                yield found


def _quota_of(group: Path) -> int | None:
    """Processors of one group: version 2 has ``200000 100000`` in one file, for 2; version 1 has two files."""
    numbers = _read(group / "cpu.max").split() or [
        *_read(group / "cpu.cfs_quota_us").split(),
        *_read(group / "cpu.cfs_period_us").split(),
    ]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):  # max, or -1: no limit
        return None
    quota, period = map(int, numbers)
    return max(1, -(-quota // period)) if period else None


def _read(path: Path) -> str:
    """A file's text; empty where there is none, as on other systems than Linux."""
    return path.read_text() if path.is_file() else ""
