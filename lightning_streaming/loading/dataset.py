"""The streaming dataset: streams, order and cache brought together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

from torch.utils.data import get_worker_info

from lightning_streaming.cache import ShardCache
from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.arguments import check_at_least, parse_epoch_size
from lightning_streaming.loading.cursor import Cursor, PassCounter, PassStart
from lightning_streaming.loading.description import describe_dataset
from lightning_streaming.loading.epochs import Epochs, OnChange
from lightning_streaming.loading.keyed_access import KeyedAccess
from lightning_streaming.loading.meter import Meter
from lightning_streaming.loading.reading import WorkerPass
from lightning_streaming.loading.samples import WorkerSamples
from lightning_streaming.loading.share import Share
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.loading.state import read_state
from lightning_streaming.loading.stream import Stream, StreamDefaults, named_streams
from lightning_streaming.loading.transform import keyed_transform
from lightning_streaming.loading.watchers import WatchSettings
from lightning_streaming.loading.worker import prepare_worker_process
from lightning_streaming.order.names import BatchingMethod, PartitionAlgo, SamplingMethod, ShuffleAlgo
from lightning_streaming.order.seeds import stretched_seed
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.units import parse_bytes
from lightning_streaming.world import World


class StreamingDataset(KeyedAccess):
    """Samples of one or several streams of shards, in an order that does not depend on how many machines read them.

    Making one does no I/O: indexes are read at the first ``len``, ``iter`` or ``[i]``. Iterate over it through
    :class:`~lightning_streaming.StreamingDataLoader`, which keeps count and can save and restore its place.

    Args:
        streams: Streams by name, or in a list. Either this or ``remote``/``local``.
        remote: Where the only stream's shards come from; see :class:`~lightning_streaming.Stream`.
        local: The only stream's directory on this node.
        split: Subdirectory of every stream that names none itself.
        storage_options: Passed to fsspec for the only stream.
        download_retry: Attempts per file after the first, for streams that do not say.
        download_timeout: Seconds without a byte arriving after which an attempt ends, for streams that do not say.
        validate_hash: Hash to check downloads with, for streams that do not say. None: one that the index offers.
        keep_zip: Keep compressed files, for streams that do not say.
        epoch_size: Samples per epoch, like 50000 or "1.5m" (k, m, b, t: powers of 1000). None: all, after weighting.
        predownload: Samples ahead of each worker for which shards are fetched. None: 8 batches, and 4 shards where
            they are read in order.
        cache_limit: Most bytes that the streams' directories on this node may hold, like "200gb"; the shards used
            longest ago then make room. None: no limit. See docs/cache.md.
        on_demand: Whether ``dataset[i]`` and ``restore_sample`` read one sample by its bytes alone where its shard is
            stored uncompressed and is not here, rather than fetch the shard.
        sampling_method: "balanced" draws anew each epoch what a weight below or above 1 leaves open; "fixed" always
            draws the same.
        sampling_granularity: Samples drawn from a shard at a time.
        partition_algo: "relaxed" lets a run go on on any number of nodes; "orig" on those that the canonical nodes fit.
        num_canonical_nodes: Slices of the sample space that make the order independent of the machine count. None:
            one per node of the first run (64 for "py1s" and "py2s", 16 for "blockwise"), kept in every saved position.
        batch_size: Samples per batch on each rank. The loader gives its own if this is None.
        shuffle: Whether to shuffle.
        shuffle_algo: "py1e", "blockwise", "py1br", "py1s", "py2s", "naive" or, deprecated, "py1b"; see docs/order.md.
        shuffle_seed: Seed of everything random about the order.
        shuffle_block_size: Samples within which "py1e", "py1br", "py1b" and "blockwise" mix. None: 4 million over all
            canonical nodes, at least 262144 in each (16384 with "blockwise").
        batching_method: Which samples share a batch: "random", "stratified", "per_stream" or "device_per_stream".
        skip: Global batches to leave out, counted over the whole run, like ["12000-12100"]; see docs/resume.md.
        stretch_seed: Use the seed that MosaicML Streaming 0.2 made of ``shuffle_seed``; with "py2s" this is its order.
        allow_unsafe_types: Whether columns may be unpickled. Unpickling runs code found in the data.
        columns: Names of the columns to read; the others are not decoded, and need not be readable. None: all. Every
            shard must have them. Neither order nor saved positions depend on it.
        replication: This many consecutive ranks read the same samples (tensor or sequence parallelism).
        transform: Applied to each decoded sample in the worker. If it has a parameter ``rng`` it is given a
            ``numpy.random.Generator`` keyed by the sample, so that augmentation survives any resume.
        seed_global_rng: Also seed ``random``, ``numpy.random`` and torch from that key before each transform.
        sample_log: Directory for a log of the samples that each worker read, to write or add to; see docs/loading.md.
        watchdog_seconds: When one sample takes longer than this, tell on stderr which it is and where its worker is.
        world: This process among all that train. None: found when iteration starts, see :meth:`World.detect`.

    Raises:
        ConfigError: A setting cannot work, or settings contradict each other.
    """

    def __init__(
        self,
        *,
        streams: Sequence[Stream] | Mapping[str, Stream] | None = None,
        remote: str | None = None,
        local: str | None = None,
        split: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        download_retry: int = 2,
        download_timeout: float = 60.0,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        epoch_size: int | float | str | None = None,
        predownload: int | None = None,
        cache_limit: int | float | str | None = None,
        on_demand: bool = False,
        sampling_method: SamplingMethod = "balanced",
        sampling_granularity: int = 1,
        partition_algo: PartitionAlgo = "relaxed",
        num_canonical_nodes: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_algo: ShuffleAlgo = "py1e",
        shuffle_seed: int = 9176,
        shuffle_block_size: int | None = None,
        batching_method: BatchingMethod = "random",
        skip: Sequence[int | str] = (),
        stretch_seed: bool = False,
        allow_unsafe_types: bool = False,
        columns: Sequence[str] | None = None,
        replication: int | None = None,
        transform: Callable[..., Any] | None = None,
        seed_global_rng: bool = False,
        sample_log: str | os.PathLike[str] | None = None,
        watchdog_seconds: float | None = None,
        world: World | None = None,
    ) -> None:
        asked = {**locals()}
        check_at_least("batch_size", batch_size, 1)
        check_at_least("predownload", predownload, 1)
        check_at_least("replication", replication, 1)
        self.streams = named_streams(streams, remote, local, storage_options)
        self.batch_size = batch_size
        self.predownload = predownload
        self.replication = replication
        self.world = world
        self._watched = WatchSettings(sample_log, watchdog_seconds)
        settings = OrderSettings(
            shuffle=shuffle,
            shuffle_algo=shuffle_algo,
            shuffle_seed=shuffle_seed,
            shuffle_block_size=shuffle_block_size,
            num_canonical_nodes=num_canonical_nodes,
            sampling_method=sampling_method,
            sampling_granularity=sampling_granularity,
            partition_algo=partition_algo,
            batching_method=batching_method,
        )
        if stretch_seed:
            settings = replace(settings, shuffle_seed=stretched_seed(settings.shuffle_seed))
        if shuffle_algo == "py1b":
            warnings.warn("shuffle_algo='py1b' is deprecated; use 'py1br'", DeprecationWarning, stacklevel=2)
        defaults = StreamDefaults(
            split=split,
            download_retry=download_retry,
            download_timeout=download_timeout,
            validate_hash=validate_hash,
            keep_zip=keep_zip,
        )
        caches = {name: ShardCache(stream.cache_config(name, defaults)) for name, stream in self.streams.items()}
        limit = None if cache_limit is None else parse_bytes(cache_limit, "cache_limit")
        self._caches = caches
        source = SampleSource(caches, allow_unsafe_types, columns, limit)
        super().__init__(source, on_demand, transform, seed_global_rng)
        self._misses = {name: cache.misses for name, cache in caches.items()}
        weights = [stream.weight() for stream in self.streams.values()]
        samples = parse_epoch_size(epoch_size)
        self.epochs = Epochs(settings, weights, samples, self._source, batch_size, skip)
        log = None if sample_log is None else os.fspath(sample_log)
        parsed = {"streams": self.streams, "epoch_size": samples, "cache_limit": limit, "sample_log": log}
        self._config = describe_dataset({**asked, **parsed})
        self._next = Cursor(0, 0)
        self._counter = PassCounter()
        self._assigned: WorkerPass | None = None
        self._latest: PassStart | None = None
        self._handed_out: Cursor | None = None
        self._reading: WorkerSamples | None = None

    @property
    def epoch_size(self) -> int:
        """Samples drawn per epoch, after weighting."""
        return self.epochs.weights.epoch_size

    def __len__(self) -> int:
        """Samples per epoch and rank: the epoch's size divided among ranks, rounded up."""
        return ceil(self.epoch_size / self.current_world().num_ranks)

    def config(self) -> dict[str, Any]:
        """What was asked for, as plain values without secrets: to log, and to compare with that of another run."""
        return deepcopy(self._config)

    @property
    def next_epoch(self) -> int:
        """The epoch that the next pass reads; may be set, which also forgets a place within an epoch."""
        return self.next_cursor().epoch

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        check_at_least("next_epoch", epoch, 0)
        self.seek(Cursor(epoch, 0))

    def next_cursor(self) -> Cursor:
        """Where the next pass begins."""
        return self._next.passes_later(self._counter.passes_counted())

    def seek(self, cursor: Cursor) -> None:
        """Let the next pass begin at ``cursor``; a pass under way goes on undisturbed, and counts no longer."""
        self._next = cursor
        self._counter.reset(cursor)
        self._latest = self._handed_out = self._reading = self._assigned = None

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = False) -> dict[str, Any]:
        """The place of the pass under way, or of the next one if none is, as plain values.

        Args:
            num_samples: Samples read in this pass, over all ranks. None: those that a loader has handed out, or as many
                as were taken from ``iter(dataset)`` in this process, times the number of ranks.
            from_beginning: Whether ``num_samples`` counts from the beginning of the epoch rather than from where the
                pass began.
        """
        if num_samples is None and self._handed_out is not None and not self._counter.passes_counted():
            return self.state_at(self._handed_out)
        began, world = self._pass_began(), self.current_world()
        if num_samples is None:
            num_samples, from_beginning = self._samples_read() * world.num_ranks, False
        began = Cursor(began.epoch, 0) if from_beginning else began
        return self.state_at(self.epochs.later(began, num_samples, world))

    def state_at(self, cursor: Cursor) -> dict[str, Any]:
        """The state of a reader who stands at ``cursor``; the end of an epoch is the beginning of the next."""
        world = self.current_world()
        return self.epochs.saved(self.epochs.normalise(cursor, world), world).as_state()

    def load_state_dict(self, state: Mapping[str, Any], on_change: OnChange = "error") -> None:
        """Let the next pass begin where ``state`` was taken, with its seed and canonical nodes.

        Whether the state belongs to this data is checked when the data is next looked at, not here.

        Args:
            state: From :meth:`state_dict`, from a loader, or from MosaicML Streaming.
            on_change: Whether changed data or settings are then an error or a warning.

        Raises:
            StateError: This is not a saved position.
        """
        saved = read_state(state)
        self.epochs.load(saved, on_change)
        self.seek(saved.cursor)

    def say_whose(self, place: str) -> None:
        """Let errors say where the streams are configured, like ``data.val``."""
        for name, cache in self._caches.items():  # a stream without a name is the only one there
            cache.label = place if list(self._caches) == ["0"] else f"stream {name!r} of {place}"

    def current_world(self) -> World:
        """This process among those that read different samples."""
        return (self.world or World.detect()).replicated(self.replication)

    def begin_pass(self, batch_size: int, drop_last: bool = False) -> PassStart:
        """Begin the next pass and say where; the pass after it is that of the next epoch."""
        self._source.prepare()
        start = self.epochs.start(self.next_cursor(), self.current_world(), batch_size, drop_last)
        self.seek(start.cursor.passes_later(1))
        self._latest = start
        return start

    def worker_pass(self, start: PassStart, worker: int, num_workers: int, *, is_measured: bool = False) -> WorkerPass:
        """What one of a loader's workers, or the only reader there is, reads of a pass that was begun."""
        return WorkerPass(
            make_share=partial(_share, self.epochs, start, worker, num_workers),
            source=self._source,
            transform=keyed_transform(self.transform, self.seed_global_rng, start.shuffle_seed, start.cursor.epoch),
            predownload=self.predownload,
            near_end=partial(self.epochs.prepare_next, start),
            meter=Meter(self._misses, is_read=is_measured),
            watch=self._watched.watch(self._source, start, worker),
        )

    def assign(self, of_pass: WorkerPass) -> None:
        """Let the next ``iter`` in this process read this."""
        self._assigned = of_pass

    def handed_out(self, start: PassStart, end: Cursor) -> None:
        """Take note that a loader has handed out a pass up to here; of no meaning if another has begun since."""
        if start is self._latest:
            self._handed_out = end

    def __iter__(self) -> WorkerSamples:
        """This worker's samples of the next pass, in order."""
        of_pass, self._assigned = self._assigned, None
        info = get_worker_info()
        if info is not None:
            prepare_worker_process()
            return WorkerSamples(of_pass or self._next_pass_of_worker(info.id, info.num_workers))
        if of_pass is not None:
            return WorkerSamples(of_pass)
        self._reading = WorkerSamples(self.worker_pass(self.begin_pass(self._own_batch_size()), 0, 1))
        return self._reading

    def close(self) -> None:
        """Stop fetching and unmap every shard. The dataset may be used again; it then opens what it needs."""
        if self._reading is not None:
            self._reading.close()
        self.epochs.close()
        self._source.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_assigned": None}

    def _next_pass_of_worker(self, worker: int, num_workers: int) -> WorkerPass:
        """In a worker of a plain torch DataLoader, which tells it nothing."""
        start = self.epochs.start(self._counter.count_pass(worker), self.current_world(), self._own_batch_size())
        return self.worker_pass(start, worker, num_workers)

    def _pass_began(self) -> Cursor:
        passes = self._counter.passes_counted()
        if passes:
            return self._next.passes_later(passes - 1)
        return self._next if self._latest is None else self._latest.cursor

    def _samples_read(self) -> int:
        """Samples of the pass under way that were taken in this process."""
        if self._reading is None or self._counter.passes_counted():
            return 0
        return self._reading.samples_read

    def _own_batch_size(self) -> int:
        if self.batch_size is None:
            raise ConfigError("pass batch_size= to the dataset, or iterate through a StreamingDataLoader that has one")
        return self.batch_size


def _share(epochs: Epochs, start: PassStart, worker: int, num_workers: int) -> Share:
    return Share(
        plan=epochs.plan(start),
        deal=epochs.deal(start),
        node=start.world.node,
        rank_of_node=start.world.rank_of_node,
        worker=worker,
        num_workers=num_workers,
    )
