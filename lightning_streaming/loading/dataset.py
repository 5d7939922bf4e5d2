"""The streaming dataset: streams, order and cache brought together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from itertools import islice
from math import ceil
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from lightning_streaming.cache import ShardCache
from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.epochs import Epochs, OnChange
from lightning_streaming.loading.other_trainers import AcceleratedDataset
from lightning_streaming.loading.passes import Passes, WorkerPass, WorkerSamples
from lightning_streaming.loading.reference_names import ReferenceNames, told
from lightning_streaming.loading.sample_log import WatchSettings
from lightning_streaming.loading.sample_source import SampleSource
from lightning_streaming.loading.state import Cursor, read_state
from lightning_streaming.loading.stream import Asked, DatasetStreams, Stream, StreamDefaults, as_asked, named_streams
from lightning_streaming.loading.workers import prepare_worker_process
from lightning_streaming.order.settings import (
    BatchingMethod,
    OrderSettings,
    PartitionAlgo,
    SamplingMethod,
    ShuffleAlgo,
    stretched_seed,
)
from lightning_streaming.replaced_names import tells_replacements, tells_unknown_arguments
from lightning_streaming.storage import mask_url
from lightning_streaming.units import check_at_least, parse_bytes, parse_count
from lightning_streaming.world import World

_MOST_STREAMS = 4
"""Streams that are shown one by one."""
_NOT_SHOWN = {"self", "__class__", "remote", "local", "storage_options", "world", "stream_name", "stream_config"}
"""What the streams say, may be secret, or belongs to the machines."""
_STREAM_SETTINGS = (
    *("split", "proportion", "repeat", "choose"),
    *("download_retry", "download_timeout", "validate_hash", "keep_zip"),
)
"""What a stream tells of itself beside where it is."""


@tells_replacements
@tells_unknown_arguments
class StreamingDataset(AcceleratedDataset, ReferenceNames):
    """Samples of one or several streams of shards, in an order that does not depend on how many machines read them.

    Making one does no I/O: indexes are read at the first ``len``, ``iter`` or ``[i]``. Iterate over it through
    :class:`~lightning_streaming.StreamingDataLoader`, which keeps count and can save and restore its place.

    Epochs hand out what ``dataset[i]`` gives: to make samples in a way of your own, pass ``transform``, or override
    ``__getitem__`` or ``get_item`` in a subclass; see docs/loading.md.

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
            ``numpy.random.Generator`` keyed by the sample, so that augmentation survives any resume. ``dataset[i]``
            applies it too.
        seed_global_rng: Also seed ``random``, ``numpy.random`` and torch from that key before each transform, or before
            each call of an overridden ``__getitem__``.
        sample_log: Directory for a log of the samples that each worker read, to write or add to; see docs/loading.md.
        watchdog_seconds: When one sample takes longer than this, tell on stderr which it is and where its worker is.
        world: This process among all that train. None: found when iteration starts, see :meth:`World.detect`.
        stream_name: Only "stream"; it is here for scripts that pass it on.
        stream_config: More arguments of the only :class:`~lightning_streaming.Stream`, like ``{"repeat": 0.5}``.

    Raises:
        ConfigError: A setting cannot work, or settings contradict each other.
    """

    def __init__(
        self,
        *,
        streams: Asked | None = None,
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
        stream_name: str = "stream",
        stream_config: Mapping[str, Any] | None = None,
    ) -> None:
        asked = {**locals()}
        self._given = {name: one for name, one in asked.items() if isinstance(getattr(type(self), name, None), told)}
        check_at_least("batch_size", batch_size, 1)
        check_at_least("predownload", predownload, 1)
        check_at_least("replication", replication, 1)
        _check_stream_class(stream_name, stream_config)
        named = named_streams(as_asked(streams), remote, local, storage_options, stream_config)
        self.batch_size = batch_size
        self.predownload = predownload
        self.replication = replication
        self.world = world
        watched = WatchSettings(sample_log, watchdog_seconds)
        settings = OrderSettings(**_of_fields(OrderSettings, asked))
        if stretch_seed:
            settings = replace(settings, shuffle_seed=stretched_seed(settings.shuffle_seed))
        if shuffle_algo == "py1b":
            warnings.warn("shuffle_algo='py1b' is deprecated; use 'py1br'", DeprecationWarning, stacklevel=2)
        defaults = StreamDefaults(**_of_fields(StreamDefaults, asked))
        caches = {name: ShardCache(stream.cache_config(name, defaults)) for name, stream in named.items()}
        limit = None if cache_limit is None else parse_bytes(cache_limit, "cache_limit")
        source = SampleSource(caches, allow_unsafe_types, columns, limit)
        super().__init__(source, on_demand, transform, seed_global_rng, settings.shuffle_seed)
        misses = {name: cache.misses for name, cache in caches.items()}
        weights = [stream.weight() for stream in named.values()]
        samples = _parse_epoch_size(epoch_size)
        epochs = Epochs(settings, weights, samples, source, batch_size, skip)
        self._passes = Passes(epochs, source, misses, predownload, watched)
        self.streams = DatasetStreams(named, defaults, epochs, source)
        log = None if sample_log is None else os.fspath(sample_log)
        parsed = {"streams": named, "epoch_size": samples, "cache_limit": limit, "sample_log": log}
        self._asked = _describe_dataset({**asked, **parsed})

    @told
    def epoch_size(self) -> int:
        """Samples drawn per epoch, after weighting."""
        return self._passes.epochs.weights.epoch_size

    def __len__(self) -> int:
        """Samples per epoch and rank: the epoch's size divided among ranks, rounded up."""
        return ceil(self.epoch_size / self.current_world().num_ranks)

    def __repr__(self) -> str:
        streams = islice(self.streams.items(), _MOST_STREAMS)
        shown = [f"{name}={_where(stream.asked)!r}" for name, stream in streams]
        if len(self.streams) > _MOST_STREAMS:
            shown.append(f"and {len(self.streams) - _MOST_STREAMS} more streams")
        catalog = self._source.known_catalog
        size = "index not read" if catalog is None else f"{catalog.num_samples} samples"
        return f"<StreamingDataset: {', '.join(shown)}; {size}; at {self._passes.handed_out() or self.next_cursor()}>"

    def config(self) -> dict[str, Any]:
        """What was asked for, as plain values without secrets: to log, and to compare with that of another run."""
        return deepcopy(self._asked)

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
        return self._passes.next_cursor()

    def seek(self, cursor: Cursor) -> None:
        """Let the next pass begin at ``cursor``; a pass under way goes on undisturbed, and counts no longer."""
        self._passes.seek(cursor)

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = False) -> dict[str, Any]:
        """The place of the pass under way, or of the next one if none is, as plain values.

        Args:
            num_samples: Samples read in this pass, over all ranks. None: those that a loader has handed out, or as many
                as were taken from ``iter(dataset)`` in this process, times the number of ranks.
            from_beginning: Whether ``num_samples`` counts from the beginning of the epoch rather than from where the
                pass began.
        """
        if num_samples is None:
            self._check_is_counted_here()
        passes, world = self._passes, self.current_world()
        handed_out, began = passes.handed_out(), passes.began()
        if num_samples is None and handed_out is not None:
            return self.state_at(handed_out)
        if num_samples is None:
            num_samples, from_beginning = passes.samples_read() * world.num_ranks, False
        began = Cursor(began.epoch, 0) if from_beginning else began
        return self.state_at(self._passes.epochs.later(began, num_samples, world))

    def state_at(self, cursor: Cursor) -> dict[str, Any]:
        """The state of a reader who stands at ``cursor``; the end of an epoch is the beginning of the next."""
        world = self.current_world()
        epochs = self._passes.epochs
        return epochs.saved(epochs.normalise(cursor, world), world).as_state()

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
        self._passes.epochs.load(saved, on_change)
        self.seek(saved.cursor)
        self._loaded = saved.cursor

    def current_world(self) -> World:
        """This process among those that read different samples."""
        return (self.world or World.detect()).replicated(self.replication)

    def __iter__(self) -> WorkerSamples:
        """This worker's samples of the next pass, in order: each is what ``dataset[i]`` makes of it."""
        passes, info = self._passes, get_worker_info()
        of_pass = passes.take_assigned()
        if info is not None:
            prepare_worker_process()
            return WorkerSamples(of_pass or self._next_pass_of_worker(info.id, info.num_workers))
        if of_pass is not None:
            return WorkerSamples(of_pass)
        self._check_reader(passes.next_cursor())
        start = passes.begin(self.current_world(), self._own_batch_size())
        passes.tell_unsuited(start)
        return passes.read_here(passes.of_worker(self._making, start, 0, 1))

    def close(self) -> None:
        """Stop fetching and unmap every shard. The dataset may be used again; it then opens what it needs."""
        self._passes.close()
        self._source.close()

    def __getstate__(self) -> dict[str, Any]:
        self._check_reader(None)  # a worker that is spawned knows nothing of its reader
        return dict(self.__dict__)

    def _iterates_as_usual(self) -> bool:
        """Whether a pass hands out what :meth:`__iter__` of this class gives, not that of a subclass."""
        return type(self).__iter__ is StreamingDataset.__iter__

    def _next_pass_of_worker(self, worker: int, num_workers: int) -> WorkerPass:
        """In a worker of a plain torch DataLoader."""
        start = self._passes.begin_in_worker(worker, self.current_world(), self._own_batch_size())
        self._check_reader_of_worker(start.cursor)
        return self._passes.of_worker(self._making, start, worker, num_workers)

    def _own_batch_size(self) -> int:
        if self.batch_size is None:
            raise ConfigError("pass batch_size= to the dataset, or iterate through a StreamingDataLoader that has one")
        return self.batch_size


def _of_fields(config: type[OrderSettings | StreamDefaults], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that a config has fields for."""
    return {field.name: arguments[field.name] for field in fields(config)}


def _parse_epoch_size(epoch_size: int | float | str | None) -> int | None:
    """The epoch size as a number; None for None, 0 and "", as MosaicML Streaming has it."""
    if not epoch_size:
        return None
    samples = parse_count(epoch_size, "epoch_size")
    if samples == 0:
        raise ConfigError(f"epoch_size must be at least one sample, but got {epoch_size!r}")
    return samples


def _check_stream_class(stream_name: str, stream_config: Mapping[str, Any] | None) -> None:
    """Refuse what would be looked up in a registry of stream classes, and arguments that are none.

    Raises:
        ConfigError: It is another name than "stream", or ``stream_config`` is no mapping.
    """
    if not isinstance(stream_config or {}, Mapping):
        raise ConfigError(
            f"stream_config must map arguments of Stream to values, but got a {type(stream_config).__name__}"
        )
    if stream_name != "stream":
        raise ConfigError(
            f"stream_name={stream_name!r} would name a class in a registry, which is not served; make the stream and "
            "give it as streams=[Stream(remote=..., storage_options=...)]"
        )


def _where(stream: Stream) -> str:
    place = stream.local if stream.remote is None else stream.remote
    return mask_url(str(place))


def _describe_dataset(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a dataset as plain values; URLs without passwords, nothing of the storage options.

    Args:
        arguments: By name, parsed; ``streams`` as named :class:`~lightning_streaming.Stream` values.
    """
    shown = {name: _plain(value) for name, value in arguments.items() if name not in _NOT_SHOWN}
    streams = {name: _describe_stream(stream) for name, stream in arguments["streams"].items()}
    return {"type": "StreamingDataset", **shown, "streams": streams}


def describe(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Some arguments as plain values.

    Args:
        kind: What they are the arguments of.
        arguments: By name.
    """
    return {"type": kind, **{name: _plain(value) for name, value in arguments.items()}}


def _describe_stream(stream: Stream) -> dict[str, Any]:
    return {
        "remote": None if stream.remote is None else mask_url(str(stream.remote)),  # a Path is taken too
        "local": None if stream.local is None else str(stream.local),
        **{name: getattr(stream, name) for name in _STREAM_SETTINGS},
    }


def _plain(value: Any) -> Any:
    """The value as JSON has it; functions by name."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if value is None or isinstance(value, (str, int, float)):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
