"""What a user writes about the data of one stage, and configurations as they may be printed and saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

import jsonargparse
import yaml  # type: ignore[import-untyped]

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.stream import Stream
from lightning_streaming.order.settings import BatchingMethod, PartitionAlgo, SamplingMethod, ShuffleAlgo
from lightning_streaming.order.skips import parse_batch_ranges
from lightning_streaming.replaced_names import tells_unknown_arguments
from lightning_streaming.storage import StorageOptions, mask_url
from lightning_streaming.storage.secrets import shown_options
from lightning_streaming.storage.urls import user_of


@tells_unknown_arguments
@dataclass(frozen=True, kw_only=True)
class StreamingConfig:
    """The data of one stage: one dataset (``remote``), or several streams mixed by weight (``streams``).

    The fields are the arguments of :class:`~lightning_streaming.StreamingDataset` of the same names.

    Args:
        streams: Streams by name, each with its ``remote`` and, if several are mixed, its ``proportion``.
        remote: Where the shards of the only stream come from: a path, or any URL fsspec knows (s3://, gs://, ...).
        local: The only stream's directory on each node. None: under the user's cache directory.
        split: Subdirectory of every stream that names none itself, like "train".
        storage_options: Passed to fsspec for the only stream: key, secret, endpoint_url, token, ...
        download_retry: Attempts per file, or part of a large one, after the first.
        download_timeout: Seconds without a byte arriving after which an attempt ends.
        validate_hash: Hash to check downloads with. None: one that the index offers.
        keep_zip: Keep compressed files beside the decompressed ones.
        epoch_size: Samples per epoch, like 50000 or "10m" (k, m, b, t: powers of 1000). None: all, after weighting.
        predownload: Samples ahead of each worker for which shards are fetched. None: 8 batches, and 4 shards where
            they are read in order.
        cache_limit: Most bytes that the streams' directories on a node may hold, like "200gb". None: no limit.
        on_demand: Whether single samples (``dataset[i]``, ``restore_sample``) are read by their bytes alone where their
            shard is stored uncompressed and is not here.
        sampling_method: "balanced" draws anew each epoch what weights leave open; "fixed" always draws the same.
        sampling_granularity: Samples drawn from a shard at a time.
        partition_algo: "relaxed" lets a run go on on any number of nodes; "orig" on those that the canonical nodes fit.
        num_canonical_nodes: Slices of the sample space that make the order independent of the machine count. None:
            that of the first run, kept in the checkpoint.
        shuffle: Whether to shuffle. None: yes for training, no otherwise.
        shuffle_algo: "py1e", "blockwise", "py1br", "py1s", "py2s", "naive" or, deprecated, "py1b".
        shuffle_seed: Seed of everything random about the order.
        shuffle_block_size: Samples within which "py1e", "py1br", "py1b" and "blockwise" mix. None: 4 million over all
            canonical nodes, at least 262144 in each (16384 with "blockwise").
        batching_method: Which samples share a batch: "random", "stratified" (each global batch holds every stream's
            share), "per_stream" (each is of one stream) or "device_per_stream" (each batch of one rank is).
        skip: Global batches of the run to leave out, counted from 0, like ["12000-12100"]; for training. Their samples
            stay the same when ranks or batch size change. See docs/resume.md.
        stretch_seed: Use the seed that MosaicML Streaming 0.2 made of shuffle_seed; with "py2s" this is its order.
        allow_unsafe_types: Whether columns may be unpickled. Unpickling runs code found in the data.
        columns: Names of the columns to read; the others are not decoded. None: all.
        replication: This many consecutive ranks read the same samples. None: as the strategy's device mesh wants it.
        seed_global_rng: Seed random, numpy.random and torch from each sample's key before its transform.
        sample_log: Directory for a log of the samples that each worker read; see docs/loading.md.
        watchdog_seconds: When one sample takes longer than this, tell on stderr which it is and where its worker is.
    """

    streams: Mapping[str, Stream] | None = None
    remote: str | None = field(default=None, repr=False)
    local: str | None = None
    split: str | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    download_retry: int = 2
    download_timeout: float = 60.0
    validate_hash: str | None = None
    keep_zip: bool = False
    epoch_size: int | float | str | None = None
    predownload: int | None = None
    cache_limit: int | float | str | None = None
    on_demand: bool = False
    sampling_method: SamplingMethod = "balanced"
    sampling_granularity: int = 1
    partition_algo: PartitionAlgo = "relaxed"
    num_canonical_nodes: int | None = None
    shuffle: bool | None = None
    shuffle_algo: ShuffleAlgo = "py1e"
    shuffle_seed: int = 9176
    shuffle_block_size: int | None = None
    batching_method: BatchingMethod = "random"
    skip: Sequence[int | str] = ()
    stretch_seed: bool = False
    allow_unsafe_types: bool = False
    columns: Sequence[str] | None = None
    replication: int | None = None
    seed_global_rng: bool = False
    sample_log: str | None = None
    watchdog_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.streams and self.remote is None and self.local is None:
            raise ConfigError("the data of a stage needs streams=, remote= or local=")
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
        parse_batch_ranges(self.skip, "skip")

    def dataset_arguments(self, *, shuffle_by_default: bool) -> dict[str, Any]:
        """Keyword arguments for :class:`~lightning_streaming.StreamingDataset`."""
        arguments = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.shuffle is None:
            arguments["shuffle"] = shuffle_by_default
        return arguments


def config_of(stage: StreamingConfig | Mapping[str, Any] | None) -> StreamingConfig | None:
    """The data of a stage, also from the plain values that a checkpoint holds of it.

    Raises:
        ConfigError: The values cannot work.
    """
    if stage is None or isinstance(stage, StreamingConfig):
        return stage
    if not isinstance(stage, Mapping):
        raise ConfigError(
            f"the data of a stage must be a StreamingConfig, like StreamingConfig(remote=...), but is of type "
            f"{type(stage).__name__}"
        )
    streams = stage.get("streams")
    if streams is not None:
        streams = {name: Stream(**one) if isinstance(one, Mapping) else one for name, one in streams.items()}
    return StreamingConfig(**{**stage, "streams": streams})


_Hide = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def shown(value: Any, name: str = "", hide: _Hide = shown_options) -> Any:
    """A part of a configuration without secrets: itself if it has none, else a copy.

    Args:
        value: A stage or a stream, storage options, or what holds them at any depth: namespaces, mappings, lists.
            Stages and streams become mappings of their fields.
        name: Its field.
        hide: Makes of storage options what may be shown.
    """
    if isinstance(value, StorageOptions) or (name == "storage_options" and isinstance(value, Mapping)):
        return hide(value)
    if isinstance(value, Stream | StreamingConfig):
        return {one.name: shown(getattr(value, one.name), one.name, hide) for one in fields(value)}
    if isinstance(value, jsonargparse.Namespace):
        copied = copy(value)
        vars(copied).update({key: shown(one, key, hide) for key, one in vars(value).items()})
        return copied
    if isinstance(value, str | os.PathLike):
        return _shown_text(value, name)
    inner: Any = None
    if type(value) is dict:
        inner = {key: shown(one, str(key), hide) for key, one in value.items()}
        is_same = all(inner[key] is one for key, one in value.items())
    elif type(value) in (list, tuple):
        inner = type(value)(shown(one, name, hide) for one in value)
        is_same = all(mine is one for mine, one in zip(inner, value, strict=True))
    return value if inner is None or is_same else inner


def _shown_text(text: str | os.PathLike[str], name: str) -> Any:
    location = os.fspath(text)
    if name == "remote":
        return mask_url(location)
    return location.replace(f"{user_of(location)}@", "", 1) if "://" in location and user_of(location) else text


def _represent(dumper: Any, value: Any) -> Any:
    return dumper.represent_data(shown(value, "storage_options" if isinstance(value, StorageOptions) else ""))


# Known to all of the process, because loggers write hyperparameters with yaml.dump, which would else write every field.
for _kind in (Stream, StreamingConfig, StorageOptions):
    yaml.add_representer(_kind, _represent)
