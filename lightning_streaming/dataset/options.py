"""The options of a dataset: each once, with its type, default, meaning and check.

The dataset and the stages of a data module take their documentation from here; see
:mod:`lightning_streaming.signatures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from lightning_streaming.dataset.stream import Stream, StreamDefaults, StreamSpec, joins_of, named_streams, weight_of
from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.options.groups import (
    OptionGroup,
    as_group,
    as_plain,
    group_of,
    named_groups,
    store_group,
    store_plain,
)
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.options.mixing import MixingConfig
from lightning_streaming.options.packing import Packing, PackingConfig, TokenBudget
from lightning_streaming.options.reading import BadSamplesConfig, DebugConfig, DecodeConfig
from lightning_streaming.options.schedule import Schedule, check_mixes, named_phases, resolved_phases
from lightning_streaming.options.selection import SelectionConfig
from lightning_streaming.options.storage import JoinConfig, Joins
from lightning_streaming.sequence.phases import ResolvedPhase
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.sequence.skips import parse_batch_ranges
from lightning_streaming.sequence.steps import SequenceStep, check_steps
from lightning_streaming.sequence.weights import StreamWeight
from lightning_streaming.storage import mask_url
from lightning_streaming.units import check_truth, is_one_of, parse_bytes, parse_count, store_whole
from lightning_streaming.world import World

_Part = TypeVar("_Part", OrderSettings, StreamDefaults)

_NOT_SHOWN = {"remote", "local", "join", "world", "stream_name", "stream_config"}
"""What the streams say, may be secret, or belongs to the machines."""


_NOT_PLAIN = {"streams", "sequence", "selection", "join", "storage", "transform", "world", "stream_config"}
"""Options that hold other objects than plain values, or check themselves what they hold."""
_TRUTHS = ("shuffle", "allow_unsafe_types", "seed_global_rng", "keep_zip", "follow_appends")


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of the streams that are read.

    Args:
        streams: Streams by name, or in a list. Either this or ``remote``/``local``. ``schedule`` needs names.
        remote: Where the only stream's shards come from: a path, or any URL fsspec knows (s3://, gs://, https://, ...).
        local: The only stream's directory on this node. None: under the user's cache directory, or none at all where
            ``remote`` is a path of this machine.
        schedule: Mixtures of the streams that follow each other within an epoch, instead of ``proportion``, ``repeat``
            and ``choose``. Phases by a name of your choice, in the order in which they are read, each with fields of
            :class:`~lightning_streaming.MixturePhase`, like ``{"main": {"mix": {"web": 0.8, "code": 0.2}, "end":
            "90%"}, "last": {"mix": {"code": 1}}}``. ``epoch_size``, or the last ``end``, is then required. See
            docs/mixtures.md.
        mixing: Unit and limits of the weights of a mixture: fields of :class:`~lightning_streaming.MixingConfig`, like
            ``{"weights_in": "tokens"}``. See docs/mixtures.md.
        join: Datasets whose columns are added to the samples of the only stream, by name: fields of
            :class:`~lightning_streaming.JoinConfig`, like ``{"captions": {"remote": "s3://captions", "key": "id"}}``.
        packing: Packing of documents into rows of equally many tokens, for language models: fields of
            :class:`~lightning_streaming.PackingConfig`, like ``{"column": "tokens", "capacity": 8192}``. See
            docs/packing.md.
        token_budget: Tokens that a batch may have, instead of a number of samples: batches are then groups of whole
            documents of about one length, padded to the longest. Fields of
            :class:`~lightning_streaming.TokenBudget`, like ``{"column": "tokens", "tokens": 65536}``. See
            docs/packing.md.
    """

    streams: StreamSpec | None = None
    remote: str | None = field(default=None, repr=False)
    local: str | None = None
    schedule: Schedule | None = None
    mixing: MixingConfig | Mapping[str, Any] | None = None
    join: Joins | None = field(default=None, repr=False)
    packing: PackingConfig | Mapping[str, Any] | None = None
    token_budget: TokenBudget | Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class DataOptions(OrderSettings, StreamDefaults, StreamOptions):
    """Options of the data, its order and its cache: all that a configuration can set.

    Args:
        epoch_size: Samples per epoch, like 50000 or "1.5m" (k, m, b, t: powers of 1000); with ``packing`` documents, or
            tokens with ``mixing: {weights_in: tokens}``. None: all, after weighting; with ``schedule``, up to the
            ``end`` of its last phase.
        predownload: Samples ahead of each worker for which shards are fetched. None: 8 batches, and 4 shards where
            they are read in order.
        cache_limit: Most bytes that the streams' directories on this node may hold, like "200gb"; the shards used
            longest ago then make room. None: no limit. See docs/cache.md.
        skip: Global batches of the whole run to leave out, counted from 0, like ["12000-12100"]. Their samples stay the
            same when ranks or batch size change. See docs/resume.md.
        allow_unsafe_types: Whether columns may be unpickled. Unpickling runs code found in the data.
        columns: Names of the columns to read; the others are not decoded, and may be unreadable. None: all. Every
            shard must have them. Neither order nor saved positions depend on it.
        sequence: Steps of your own between the shuffle and the batches: objects of
            :class:`~lightning_streaming.sequence.SequenceStep`; in YAML each with ``class_path`` and ``init_args``. See
            docs/internals/order.md, "Sequence steps".
        replication: This many consecutive ranks read the same samples (tensor or sequence parallelism).
        seed_global_rng: Also seed ``random``, ``numpy.random`` and torch from each sample's key before each transform,
            or before each call of an overridden ``__getitem__``.
        bad_samples: Handling of samples that cannot be read: fields of
            :class:`~lightning_streaming.BadSamplesConfig`, like ``{"action": "replace", "log": "logs/bad"}``. None:
            they are errors. See docs/bad_samples.md.
        decode: Decoding of columns of pictures: fields of :class:`~lightning_streaming.DecodeConfig`, like
            ``{"columns": {"image": "array"}}``. See docs/images.md.
        debug: Tools to find the sample at which a worker fails or hangs: fields of
            :class:`~lightning_streaming.DebugConfig`, like ``{"sample_log": "logs"}``.
    """

    epoch_size: int | float | str | None = None
    predownload: int | None = None
    cache_limit: int | float | str | None = None
    skip: Sequence[int | str] = ()
    allow_unsafe_types: bool = False
    columns: Sequence[str] | None = None
    sequence: Sequence[SequenceStep] = ()
    replication: int | None = None
    seed_global_rng: bool = False
    bad_samples: BadSamplesConfig | Mapping[str, Any] | None = None
    decode: DecodeConfig | Mapping[str, Any] | None = None
    debug: DebugConfig | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._store_streams()
        store_plain(self, leave=_NOT_PLAIN)
        OrderSettings.__post_init__(self)
        StreamDefaults.__post_init__(self)
        for kind in (MixingConfig, PackingConfig, TokenBudget, BadSamplesConfig, DecodeConfig, DebugConfig):
            store_group(self, kind)
        for name in _TRUTHS:
            check_truth(name, getattr(self, name))
        self._check_decoding()
        store_whole(self, "predownload", 1, or_none=True)
        store_whole(self, "replication", 1, or_none=True)
        parse_batch_ranges(self.skip, "skip")
        object.__setattr__(self, "skip", tuple(self.skip))
        object.__setattr__(self, "sequence", check_steps(self.sequence))
        if self.schedule is not None:
            object.__setattr__(self, "schedule", named_phases(self.schedule))
        phases = self.resolved_phases()
        self._check_packing(phases)
        self._check_mixing(phases)
        object.__setattr__(self, "join", named_groups(JoinConfig, self.join))

    def _store_streams(self) -> None:
        streams = self.streams
        if not isinstance(streams, Mapping | Sequence | None) or isinstance(streams, str | bytes):
            raise ConfigError(f"streams must map names to streams, but is a {type(streams).__name__}", option="streams")
        if not isinstance(streams, Mapping):
            return
        if unnamed := [name for name in streams if not isinstance(name, str)]:
            raise ConfigError(f"names of streams must be texts, but one is {unnamed[0]!r}", option="streams")
        object.__setattr__(self, "streams", {as_plain(name): stream for name, stream in streams.items()})

    def documents(self) -> Packing | None:
        """Return how documents are packed, or grouped within a budget; None if they are not."""
        return as_group(PackingConfig, self.packing) or as_group(TokenBudget, self.token_budget)

    def _check_decoding(self) -> None:
        decode = group_of(self, DecodeConfig)
        if decode.threads and self.seed_global_rng:
            raise ConfigError(
                "seed_global_rng seeds generators that all threads share, so samples made in decode.threads would draw "
                "each other's numbers",
                hint="give transform a parameter rng, which is the sample's own, or leave one of the two options out",
                option="decode.threads",
            )
        documents = self.documents()
        tokenizer = None if documents is None else documents.tokenizer
        for name in () if tokenizer is None else tokenizer.columns:
            if self.columns is not None and name not in self.columns:
                raise ConfigError(
                    f"tokenize names {name!r}, which columns={list(self.columns)} leaves out", option="columns"
                )
        lacking = [name for name in decode.columns or () if self.columns is not None and name not in self.columns]
        if lacking:
            raise ConfigError(
                f"decode.columns names {lacking[0]!r}, which columns={list(self.columns or ())} leaves out",
                option=f"decode.columns.{lacking[0]}",
            )

    def _check_packing(self, phases: Sequence[ResolvedPhase]) -> None:
        documents = self.documents()
        ended = [phase.name for phase in phases if phase.cut is not None]
        if ended and (documents is not None or self.sequence):
            option = "sequence" if documents is None else documents.option
            raise ConfigError(
                f"schedule.{ended[0]}.ended_at counts samples as they are drawn, which {option} changes",
                hint="leave one of them out",
                option=f"schedule.{ended[0]}.ended_at",
            )
        if documents is None:
            return
        if self.packing is not None and self.token_budget is not None:
            raise ConfigError(
                "packing makes rows of equally many tokens, and token_budget batches of whole documents",
                hint="give one of them",
                option="token_budget",
            )
        if self.batching_method != "random":
            raise ConfigError(
                f"{documents.option} mixes documents of all streams, "
                f"and batching_method={short_repr(self.batching_method)} "
                "composes batches by stream",
                hint="use batching_method='random'",
                option="batching_method",
            )

    def lengths_request(self) -> LengthsRequest | None:
        """Return the request for lengths of samples; None if they are not needed."""
        documents, mixing = self.documents(), group_of(self, MixingConfig)
        return mixing.request() if documents is None else documents.request()

    def _check_mixing(self, phases: Sequence[ResolvedPhase]) -> None:
        mixing, documents = as_group(MixingConfig, self.mixing), self.documents()
        if mixing is None:
            return
        streams = dict(self.streams) if isinstance(self.streams, Mapping) else {}
        for name in mixing.max_repeats:
            if name not in streams:
                raise ConfigError(
                    f"mixing.max_repeats names {name!r}, and the streams are {', '.join(map(repr, streams))}",
                    option="mixing.max_repeats",
                )
        for name, stream in streams.items():
            weight = weight_of(stream) if isinstance(stream, Stream) else StreamWeight()
            if weight.repeat is not None or weight.choose is not None:
                raise ConfigError(
                    f"mixing is about weights, and stream {name!r} has repeat or choose",
                    hint="give it a proportion, or leave mixing out",
                    option="mixing",
                    stream=name,
                )
        if not mixing.in_tokens:
            return
        if documents is None and mixing.request() is None:
            raise ConfigError(
                "mixing.weights_in='tokens' needs the lengths of samples",
                hint="set mixing.column to the column of tokens, or mixing.lengths to a column with their number",
                option="mixing.lengths",
            )
        if documents is not None and mixing.request() is not None:
            raise ConfigError(
                f"the lengths of samples are given by both {documents.option} and mixing",
                hint="leave those of mixing out",
                option="mixing.lengths",
            )
        if self.batching_method != "random":
            raise ConfigError(
                f"mixing.weights_in='tokens' mixes samples of all streams, and batching_method="
                f"{short_repr(self.batching_method)} composes batches by stream",
                hint="use batching_method='random'",
                option="batching_method",
            )
        ended = [phase.name for phase in phases if phase.cut is not None]
        if ended:
            raise ConfigError(
                f"schedule.{ended[0]}.ended_at counts samples, and mixing.weights_in tokens",
                hint="leave one of them out",
                option=f"schedule.{ended[0]}.ended_at",
            )

    def samples_per_epoch(self) -> int | None:
        """Return the epoch size as a number; None for None, 0 and "", as in MosaicML Streaming.

        Raises:
            ConfigError: It is not a count of samples.
        """
        if self.epoch_size is None or (isinstance(self.epoch_size, str) and not self.epoch_size):
            return None
        samples = parse_count(self.epoch_size, "epoch_size")
        if samples == 0 and isinstance(self.epoch_size, str):
            raise ConfigError(
                f"epoch_size must be at least one sample, but got {short_repr(self.epoch_size)}", option="epoch_size"
            )
        return samples or None

    def resolved_phases(self) -> tuple[ResolvedPhase, ...]:
        """Return the resolved phases, checked.

        Raises:
            ConfigError: They cannot follow each other so, or the streams do not fit them.
        """
        if self.schedule is None:
            return ()
        phases = named_phases(self.schedule)
        if not isinstance(self.streams, Mapping):
            raise ConfigError(
                "schedule names streams, so streams= must map names to them, like {'web': Stream(...)}",
                option="streams",
            )
        weighted = [
            name
            for name, stream in self.streams.items()
            if isinstance(stream, Stream) and not weight_of(stream).is_unsaid
        ]
        if weighted:
            raise ConfigError(
                f"schedule sets how much is read of each stream, so stream {weighted[0]!r} can have no proportion, "
                "repeat or choose",
                hint="leave these, or schedule, out",
                option="schedule",
                stream=weighted[0],
            )
        check_mixes(phases, self.streams)
        size = self.samples_per_epoch()
        if size is None and self.epoch_size is not None:
            raise ConfigError(
                f"epoch_size={short_repr(self.epoch_size)} means all samples of the streams, "
                f"but with a schedule the weights "
                "decide what an epoch reads",
                hint="give its samples, like 800m, or leave epoch_size out and give the last phase an end",
                option="epoch_size",
            )
        return resolved_phases(phases, size)


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(DataOptions):
    """All options of a dataset.

    Args:
        batch_size: Samples per batch on each rank. Required to iterate over the dataset itself, with a plain ``for``;
            the loader gives its own if this is None. With ``token_budget`` a batch is one group, so it is 1.
        transform: Applied to each decoded sample in the worker. If it has a parameter ``rng`` it is given a
            ``numpy.random.Generator`` keyed by the sample, so that augmentation survives any resume. ``dataset[i]``
            applies it too.
        world: This process among all that train. None: found when iteration starts, see :meth:`World.detect`.
        stream_name: Only "stream"; it is here for scripts that pass it on.
        stream_config: More arguments of the only :class:`~lightning_streaming.Stream`, like ``{"repeat": 0.5}``.
    """

    batch_size: int | None = None
    transform: Callable[..., Any] | None = None
    world: World | None = None
    stream_name: str = "stream"
    stream_config: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        store_whole(self, "batch_size", 1, or_none=True)
        if self.token_budget is not None:
            check_batch_of_budget(1 if self.batch_size is None else self.batch_size)
            object.__setattr__(self, "batch_size", 1)
        if not isinstance(self.world, World | None):
            raise ConfigError(
                f"world must be a World, like World(rank=0, num_nodes=2), but is a {type(self.world).__name__}",
                option="world",
            )
        if not isinstance(self.stream_config, Mapping | None):
            raise ConfigError(
                f"stream_config must map arguments of Stream to values, but got a {type(self.stream_config).__name__}",
                option="stream_config",
            )
        if not is_one_of(self.stream_name, ("stream",)):
            raise ConfigError(
                f"stream_name={short_repr(self.stream_name)} would name a class in a registry, which is not supported",
                hint="make the stream and give it as streams=[Stream(remote=..., storage=...)]",
                option="stream_name",
            )

    def order(self) -> OrderSettings:
        """Return the options of the order: they are compared, digested and saved."""
        return self._part(OrderSettings)

    def defaults(self) -> StreamDefaults:
        """Return the defaults of streams."""
        return self._part(StreamDefaults)

    def named_streams(self) -> dict[str, Stream]:
        """Return the streams by name, from ``streams`` or from ``remote`` and ``local``.

        Raises:
            ConfigError: They are passed in both ways, or in neither, or are no streams.
        """
        only = {name: getattr(self, name) for name in ("remote", "local", "join")}
        if self.streams and group_of(self, SelectionConfig).indices is not None:
            raise ConfigError(
                "selection.indices numbers the samples of one stream; give it to the stream", option="selection.indices"
            )
        return named_streams(self.streams, only, self.stream_config)

    def cache_bytes(self) -> int | None:
        """Return the cache limit as a number; None for no limit."""
        return None if self.cache_limit is None else parse_bytes(self.cache_limit, "cache_limit")

    def described(self, streams: Mapping[str, Stream]) -> dict[str, Any]:
        """Return the options as plain values, parsed; URLs without passwords, no storage options.

        Args:
            streams: As :meth:`named_streams` gave them.
        """
        parsed = {
            "epoch_size": self.samples_per_epoch(),
            "cache_limit": self.cache_bytes(),
            "streams": {name: _describe_stream(stream) for name, stream in streams.items()},
        }
        options = {name: value for name, value in vars(self).items() if name not in _NOT_SHOWN}
        return describe("StreamingDataset", {**options, **parsed})

    def _part(self, kind: type[_Part]) -> _Part:
        return kind(**{item.name: getattr(self, item.name) for item in fields(kind)})


def check_batch_of_budget(batch_size: int) -> None:
    """Check that a batch is one group.

    Raises:
        ConfigError: It is not.
    """
    if batch_size != 1:
        raise ConfigError(
            "with token_budget each batch is one group, of as many documents as token_budget.tokens allows, so "
            f"batch_size must be 1, but is {batch_size}",
            hint="leave it out (of a data module: batch_size for train, eval_batch_size for the other stages), and "
            "change token_budget.tokens",
            option="batch_size",
        )


def describe(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return some arguments as plain values.

    Args:
        kind: Class that has these arguments.
        arguments: By name.
    """
    return {"type": kind, **{name: plain_values(value) for name, value in arguments.items()}}


def _describe_stream(stream: Stream) -> dict[str, Any]:
    options = {item.name: getattr(stream, item.name) for item in fields(Stream) if item.name != "storage"}
    return {
        **options,
        "remote": None if stream.remote is None else mask_url(str(stream.remote)),  # a Path is taken too
        "local": None if stream.local is None else str(stream.local),
        "join": joins_of(stream) or None,
    }


def plain_values(value: Any) -> Any:
    """Return values as JSON and YAML have them; functions and other objects by name."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if isinstance(value, OptionGroup):
        return plain_values(value.described())
    if isinstance(value, SequenceStep):
        return value.facts
    if isinstance(value, Mapping):
        return {str(name): plain_values(item) for name, item in value.items()}
    value = as_plain(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    named = value if hasattr(value, "__qualname__") and hasattr(value, "__module__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
