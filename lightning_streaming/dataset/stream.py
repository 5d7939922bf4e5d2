"""Streams as the user configures them, and as they are in their dataset: location, and share of an epoch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.options.groups import OptionGroup, group_of, named_groups, store_group, store_plain
from lightning_streaming.options.selection import SelectionConfig
from lightning_streaming.options.storage import JoinConfig, Joins, StorageConfig
from lightning_streaming.selection.joins import JoinedDataset, JoinSource, joined_label
from lightning_streaming.sequence.weights import ResolvedWeights, StreamWeight
from lightning_streaming.signatures import explains_options_of, public, suggests_names
from lightning_streaming.storage import is_url, join_url, mask_url
from lightning_streaming.units import check_path, check_text

if TYPE_CHECKING:
    from lightning_streaming.dataset.samples import SampleSource

_FETCHING = ("get_shards", "prepare_shard", "set_up_local", "apply_default", "get_index_size", "_download_file")
"""What a subclass of MosaicML Streaming's ``Stream`` overrides to fetch in its own way."""
_MOST_NAMES = 5
"""Names of streams that an error lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredOptions:
    """Options of the data at a stream's ``remote``, and of fetching it; None for the option of the dataset.

    Args:
        split: Subdirectory of ``remote`` and ``local``, like "train".
        selection: Selection of the samples that are read: fields of :class:`~lightning_streaming.SelectionConfig`, like
            ``{"where": "score >= 0.8", "fraction": "0%:98%"}``.
        storage: Access to its store: fields of :class:`~lightning_streaming.StorageConfig`, like
            ``{"options": {"anon": True}}``.
        download_retry: Attempts per file, or part of a large one, after the first.
        download_timeout: Seconds without a byte arriving after which an attempt ends.
            A slow transfer continues, unless it is slower than 4 KiB a second.
        validate_hash: Hash to check downloaded files with. None: one that the index offers.
        keep_zip: Keep compressed files next to the decompressed ones.
        format: Format of the data, if it is not MDS: "parquet", "webdataset", "npy", "megatron" or "litdata". The files
            are read in place, without conversion; ``remote`` is then their directory, a file or a pattern like
            "data/train-*.parquet". See docs/other-formats.md.
        block_length: With ``format`` "npy", "megatron" or "litdata", of tokens: a sample is a block of so many,
            across the bounds of documents.
    """

    split: str | None = None
    selection: SelectionConfig | Mapping[str, Any] | None = None
    storage: StorageConfig | Mapping[str, Any] | None = field(default=None, repr=False)
    download_retry: int | None = None
    download_timeout: float | None = None
    validate_hash: str | None = None
    keep_zip: bool | None = None
    format: str | None = None
    block_length: int | None = None


@public()
@suggests_names
@explains_options_of(StoredOptions)
@dataclass(frozen=True, kw_only=True, slots=True)
class Stream(StoredOptions):
    """Location of a dataset, with ``index.json`` or of another format, and its share of an epoch.

    Args:
        remote: Where the shards come from: a path, or any URL fsspec knows (``s3://``, ``gs://``, ``https://``, ...).
        local: Directory of this node that keeps downloaded shards. None: a directory under the user's cache, named
            after ``remote``; or, where ``remote`` is a path of this machine, no copy at all, though Parquet is unpacked
            there. With ``local`` alone the dataset is read in place.
        proportion: Share of an epoch drawn from this stream, relative to the other streams.
        repeat: How often an epoch goes through this stream; 0.5 draws half of its samples.
        choose: How many samples an epoch draws from this stream.
        join: Datasets whose columns are added to its samples, by name: fields of
            :class:`~lightning_streaming.JoinConfig`, like ``{"captions": {"remote": "s3://captions", "key": "id"}}``.
        follow_appends: Whether epochs that have not started read data that was appended meanwhile; otherwise a run
            keeps the shards that it started with. See docs/resume.md.
    """

    remote: str | None = None
    local: str | None = None
    proportion: float | None = None
    repeat: float | None = None
    choose: int | None = None
    join: Joins | None = None
    follow_appends: bool | None = None

    def __post_init__(self) -> None:
        store_plain(self, leave=("selection", "storage", "join"))
        for option in ("remote", "local"):
            object.__setattr__(self, option, _as_text(option, getattr(self, option)))
        if self.remote is None and self.local is None:
            raise ConfigError("a stream needs remote=, local=, or both", option="remote")
        _check_split(self.split)
        store_group(self, SelectionConfig)
        store_group(self, StorageConfig)
        StorageConfig.check_has_options_only(self.storage, "a stream")
        object.__setattr__(self, "join", named_groups(JoinConfig, self.join))
        weight_of(self)

    def __repr__(self) -> str:
        remote = None if self.remote is None else mask_url(self.remote)
        return f"Stream(remote={remote!r}, local={self.local!r}, {weight_of(self)})"


@dataclass(frozen=True, kw_only=True)
class StreamDefaults:
    """Defaults of the options of streams; the fields are those of :class:`Stream`.

    Args:
        split: Subdirectory of every stream that names none, like "train".
        selection: Selection of the samples that are read: fields of :class:`~lightning_streaming.SelectionConfig`, like
            ``{"where": "score >= 0.8", "fraction": "0%:98%"}``. Streams replace single fields.
        download_retry: Attempts per file, or part of a large one, after the first, for streams that do not say.
        download_timeout: Seconds without a byte arriving after which an attempt ends, for streams that do not say.
            A slow transfer continues, unless it is slower than 4 KiB a second.
        validate_hash: Hash to check downloads with, for streams that do not say. None: one that the index offers.
        keep_zip: Keep compressed files next to the decompressed ones, for streams that do not say.
        format: Format of the data, if it is not MDS, for streams that set none: "parquet", "webdataset", "npy",
            "megatron" or "litdata". The files are read in place, without conversion; ``remote`` is then their
            directory, a file or a pattern like "data/train-*.parquet". See docs/other-formats.md.
        block_length: With ``format`` "npy", "megatron" or "litdata" of tokens: a sample is a block of so many, for
            streams that do not say.
        follow_appends: Whether epochs that have not started read data that was appended meanwhile, for streams that do
            not set it.
        storage: Access to stores: fields of :class:`~lightning_streaming.StorageConfig`, like
            ``{"options": {"anon": True}}``. The options are those of streams that have none.
    """

    split: str | None = None
    selection: SelectionConfig | Mapping[str, Any] | None = None
    download_retry: int = 2
    download_timeout: float = 60.0
    validate_hash: str | None = None
    keep_zip: bool = False
    format: str | None = None
    block_length: int | None = None
    follow_appends: bool = False
    storage: StorageConfig | Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_split(self.split)
        store_group(self, SelectionConfig)
        store_group(self, StorageConfig)


def weight_of(stream: Stream) -> StreamWeight:
    """Return a stream's share of an epoch.

    Raises:
        ConfigError: More than one of proportion, repeat and choose is given, or one is negative.
    """
    return StreamWeight(proportion=stream.proportion, repeat=stream.repeat, choose=stream.choose)


def options_of(stream: Stream, defaults: StreamDefaults) -> StreamDefaults:
    """Return the options of a stream, with fields that are None taken from ``defaults``."""
    own = {item.name: getattr(stream, item.name) for item in fields(StreamDefaults)}
    known: dict[str, Any] = {
        name: value.over(getattr(defaults, name)) if isinstance(value, OptionGroup) else value
        for name, value in own.items()
        if value is not None
    }
    return replace(defaults, **known)


def cache_config_of(stream: Stream, name: str, defaults: StreamDefaults) -> CacheConfig:
    """Return where and how a stream's files are fetched."""
    options = options_of(stream, defaults)
    return CacheConfig(
        name=name,
        remote=_with_subdirectory(stream.remote, options.split),
        local=_with_subdirectory(stream.local, options.split),
        storage_options=StorageConfig.options_of(options.storage),
        download_retry=options.download_retry,
        download_timeout=options.download_timeout,
        validate_hash=options.validate_hash,
        keep_zip=options.keep_zip,
        format=options.format,
        block_length=options.block_length,
    )


def joins_of(stream: Stream) -> Mapping[str, JoinConfig]:
    """Return the datasets whose columns are added to a stream's samples, by name."""
    return named_groups(JoinConfig, stream.join) or {}


def join_sources_of(stream: Stream, name: str, defaults: StreamDefaults) -> dict[str, JoinSource]:
    """Return where and how the files of joined datasets are fetched: as the stream's own, from other locations."""
    own = cache_config_of(stream, name, defaults)
    sources = {}
    for join, config in joins_of(stream).items():
        joined = replace(
            own,
            name=f"{name}.join.{join}",
            remote=config.remote,
            local=config.local,
            storage_options=StorageConfig.options_of(config.storage),
            format=None,
            block_length=None,
        )
        sources[join] = JoinSource(config, ShardCache(joined))
        sources[join].cache.label, sources[join].cache.stream = joined_label(f"stream {name!r}", join), name
    return sources


def selection_of(stream: Stream, defaults: StreamDefaults) -> SelectionConfig:
    """Return which of a stream's samples are read."""
    return group_of(options_of(stream, defaults), SelectionConfig).resolved()


def named_streams(
    streams: StreamSpec | None,
    only: Mapping[str, Any],
    stream_config: Mapping[str, Any] | None = None,
) -> dict[str, Stream]:
    """Return the streams by name, from ``streams`` or from the arguments of the only stream.

    Streams of a list are named by their number: "0", "1", ... Those of another dataset are taken as they were
    configured, without its seed and indexes.

    Args:
        streams: By name, or in a list.
        only: Arguments of the dataset for its only stream: remote, local and the like; None if not passed.
        stream_config: More arguments of the only stream.

    Raises:
        ConfigError: Both ways are used, or neither.
    """
    if bool(streams) == (only["remote"] is not None or only["local"] is not None):
        raise ConfigError(
            "pass exactly one of streams= and remote=/local=", option="remote" if streams is None else "streams"
        )
    if not streams:
        if unnamed := [name for name in stream_config or {} if not isinstance(name, str)]:
            raise ConfigError(
                f"stream_config must map arguments of Stream to values, but has {short_repr(unnamed[0])}",
                option="stream_config",
            )
        own = {name: value for name, value in only.items() if value is not None}
        try:
            return {"0": Stream(**{**(stream_config or {}), **own})}
        except ConfigError as error:
            option = error.option or ""
            if any(option == name or option.startswith(f"{name}.") for name in stream_config or {}):
                error.option = f"stream_config.{error.option}"
            raise
    for name, value in (("stream_config", stream_config), ("join", only["join"])):
        if value:
            raise ConfigError(f"with streams=, {name} belongs to each stream", option=name)
    items = (
        streams.items()
        if isinstance(streams, Mapping)
        else ((str(place), stream) for place, stream in enumerate(streams))
    )
    named = {name: _as_stream(name, stream) for name, stream in items}
    for name, stream in named.items():
        overridden = sorted(hook for hook in _FETCHING if hasattr(type(stream), hook))
        if overridden:
            raise ConfigError(
                f"stream {name!r} is a {type(stream).__name__}, whose {overridden[0]} is never called: streams are "
                "fetched by fsspec",
                hint="register a filesystem there for a store of your own, and give its URL as remote=",
                option="streams",
                stream=str(name),
            )
        if not isinstance(stream, Stream):
            raise ConfigError(
                f"stream {name!r} must be a Stream, like Stream(remote=...), or a mapping of its fields, but is a "
                f"{type(stream).__name__}",
                option="streams",
                stream=str(name),
            )
    _check_proportions(named)
    return named


def _as_stream(name: str, stream: Any) -> Any:
    """Return a stream that may be one of another dataset, or a mapping of its fields."""
    if isinstance(stream, DatasetStream):
        return stream.asked
    if not isinstance(stream, Mapping) or not all(isinstance(field, str) for field in stream):
        return stream
    try:
        return Stream(**stream)
    except ConfigError as error:
        named = error.with_context(f"stream {name!r}", stream=str(name))
        named.option = f"streams.{name}.{error.option}"
        raise named from error.__cause__


def selections_of(streams: Mapping[str, Stream], defaults: StreamDefaults) -> dict[str, SelectionConfig]:
    """Return which samples of each stream are read.

    Raises:
        ConfigError: ``group_by`` is given without a ``fraction``.
    """
    selections = {name: selection_of(stream, defaults) for name, stream in streams.items()}
    aimless = [name for name, of_stream in selections.items() if of_stream.group_by and of_stream.fraction is None]
    own = [name for name in aimless if group_of(streams[name], SelectionConfig).group_by is not None]
    if own or (aimless and len(aimless) == len(selections)):
        raise ConfigError(
            f"selection.group_by={selections[aimless[0]].group_by!r} keeps samples together in a fraction, but "
            f"{_listed(own or aimless)} no fraction",
            hint="give one, like fraction='0%:98%', or leave group_by out",
            option="selection.group_by",
        )
    return selections


def _as_text(option: str, place: Any) -> str | None:
    """Return a path or URL as text.

    Raises:
        ConfigError: It is neither.
    """
    if place is None or (isinstance(place, str) and not place):
        return place
    if isinstance(place, str | os.PathLike):
        return check_path(option, place, "a path or URL")
    raise ConfigError(
        f"{option} of a stream must be one path or URL, but is a {type(place).__name__}",
        hint="name several files by a pattern like data/{a,b}.parquet, and several locations with streams=",
        option=option,
    )


def _check_proportions(streams: Mapping[str, Stream]) -> None:
    """Check that all streams have a proportion, or none has."""
    lacking = [name for name, stream in streams.items() if stream.proportion is None]
    if 0 < len(lacking) < len(streams):
        having = [name for name in streams if name not in lacking]
        raise ConfigError(
            f"proportion must be given for all {len(streams)} streams or for none, but {_listed(having)} one and "
            f"{_listed(lacking)} none",
            option="proportion",
            stream=lacking[0],
        )


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:_MOST_NAMES]]
    more = len(names) - len(shown)
    return f"{', '.join(shown)}{f' and {more} more' if more else ''} {'has' if len(names) == 1 else 'have'}"


def _check_split(split: object) -> None:
    if split is not None:
        check_text("split", split, "a subdirectory, like 'train'")


def _with_subdirectory(location: str | None, subdirectory: str | None) -> str | None:
    if location is None or not subdirectory:
        return location
    if is_url(location):
        return join_url(location, subdirectory)
    return str(Path(location) / subdirectory)


class KnowsWeights(Protocol):
    """Provides the weights of the streams, as the run of a dataset does."""

    @property
    def weights(self) -> ResolvedWeights:
        """Return one entry for each stream."""


@suggests_names
class DatasetStream:
    """A stream in its dataset, with the dataset's defaults and its share of an epoch.

    Creating one reads nothing; :attr:`proportion`, :attr:`repeat`, :attr:`choose` and the shards need the indexes of
    all streams. :attr:`asked` is the :class:`~lightning_streaming.Stream` of the user, unchanged.
    """

    def __init__(
        self,
        name: str,
        place: int,
        stream: Stream,
        defaults: StreamDefaults,
        shares: KnowsWeights,
        source: SampleSource,
    ) -> None:
        self.name = name
        """Name in the dataset."""
        self.place = place
        """Number among its streams, from 0."""
        self.asked = stream
        """The user's :class:`~lightning_streaming.Stream`."""
        self._defaults = defaults
        self._shares = shares
        self._source = source

    def __repr__(self) -> str:
        return f"<{self.name!r}: {self.asked!r}>"

    @property
    def remote(self) -> str | None:
        """Location of its shards, without the subdirectory of :attr:`split`."""
        return self.asked.remote

    @property
    def local(self) -> str | None:
        """Configured directory of this node, without the subdirectory of :attr:`split`; None for the default."""
        return self.asked.local

    @property
    def split(self) -> str:
        """Subdirectory of both; empty for none."""
        return (self._defaults.split if self.asked.split is None else self.asked.split) or ""

    @property
    def selection(self) -> SelectionConfig:
        """Selection of the samples that are read."""
        return selection_of(self.asked, self._defaults)

    @property
    def joined(self) -> Sequence[JoinedDataset]:
        """Datasets whose columns are added to its own."""
        joins = self._source.catalog.joins
        return joins.streams[self.place].all if joins is not None and self.place in joins.streams else ()

    def join_sources(self) -> Mapping[str, JoinSource]:
        """Return where the files of joined datasets are, by the names of joins; nothing is read."""
        return join_sources_of(self.asked, self.name, self._defaults)

    @property
    def num_stored(self) -> int:
        """Number of its stored samples."""
        return self._source.catalog.indexes[self.place].num_samples

    @property
    def num_selected(self) -> int:
        """Number of its samples that :attr:`selection` keeps."""
        return self._source.catalog.samples_per_stream[self.place]

    @property
    def storage(self) -> StorageConfig:
        """Access to its store."""
        return StorageConfig(options=self.cache_config().storage_options)

    @property
    def download_retry(self) -> int:
        """Attempts per file after the first."""
        return self.cache_config().download_retry

    @property
    def download_timeout(self) -> float:
        """Seconds without a byte arriving after which an attempt ends."""
        return self.cache_config().download_timeout

    @property
    def validate_hash(self) -> str | None:
        """Hash to check downloaded files with; None for one that the index offers."""
        return self.cache_config().validate_hash

    @property
    def keep_zip(self) -> bool:
        """Whether compressed files are kept next to the decompressed ones."""
        return self.cache_config().keep_zip

    @property
    def follow_appends(self) -> bool:
        """Whether epochs that have not started read data that was appended meanwhile."""
        return options_of(self.asked, self._defaults).follow_appends

    @property
    def proportion(self) -> float:
        """Its share of an epoch; those of all streams sum to 1."""
        return self._shares.weights.proportion[self.place]

    @property
    def repeat(self) -> float:
        """How often an epoch reads each of its samples, on average."""
        return self._shares.weights.repeat[self.place]

    @property
    def choose(self) -> int:
        """Samples that an epoch draws from it."""
        return self._shares.weights.choose[self.place]

    def get_shards(self) -> Sequence[ShardInfo]:
        """Return the entries of its index, one for each shard, in order."""
        return self._source.catalog.indexes[self.place].shards

    def prepare_shard(self, shard: int | ShardInfo, blocking: bool = True) -> bool:
        """Fetch one of its shards to this node.

        Args:
            shard: Of :meth:`get_shards`, or its place there.
            blocking: Whether to wait while another process fetches it, or for room.

        Returns:
            Whether it is here.

        Raises:
            StorageError: It could not be fetched.
        """
        place = self.get_shards().index(shard) if isinstance(shard, ShardInfo) else range(len(self.get_shards()))[shard]
        return self._source.fetch(self._source.catalog.first_shard(self.place) + place, wait=blocking)

    def cache_config(self) -> CacheConfig:
        """Return where and how its files are fetched."""
        return cache_config_of(self.asked, self.name, self._defaults)


class DatasetStreams(Mapping[str, DatasetStream]):
    """The streams of a dataset by name, and by number, so ``streams[0]`` is the first.

    It is a mapping, so iterating gives names; ``streams.values()`` are the streams.

    Args:
        streams: The user's streams, by name.
        defaults: Defaults of their options.
        shares: Weights of the streams in an epoch.
        source: Their samples.
    """

    def __init__(
        self, streams: Mapping[str, Stream], defaults: StreamDefaults, shares: KnowsWeights, source: SampleSource
    ) -> None:
        self._streams = {
            name: DatasetStream(name, place, stream, defaults, shares, source)
            for place, (name, stream) in enumerate(streams.items())
        }

    def __getitem__(self, key: str | int) -> DatasetStream:
        names = list(self._streams)
        if isinstance(key, int) and -len(names) <= key < len(names):
            return self._streams[names[key]]
        if isinstance(key, str) and key in self._streams:
            return self._streams[key]
        raise KeyError(f"no stream {key!r}; there are {', '.join(map(repr, names))}, by place from 0")

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: {stream.asked!r}' for name, stream in self._streams.items())}}}"


StreamSpec = (
    Sequence[Stream | DatasetStream | Mapping[str, Any]]
    | Mapping[str, Stream]
    | Mapping[str, DatasetStream]
    | Mapping[str, Mapping[str, Any]]
)
"""Streams as a user gives them: new ones, or those of another dataset."""
