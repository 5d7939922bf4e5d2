"""Names that nothing here has: an error says which of ours is meant, or what takes the place of another library's.

REPLACED     what users of MosaicML Streaming and litData write, by the class they write it to, and what to write
tells_unknown_arguments, tells_replacements, unknown_name
             where it is told: calls of a class, attributes of an object, names of a module
replaced_argument
             the same words for fields of a configuration
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn, TypeVar, get_type_hints

from lightning_streaming.errors import UnknownArgumentError

_Class = TypeVar("_Class", bound=type)

_ON_EACH_STREAM = "it belongs to each stream: dataset.streams[0].{}"
_IN_STORAGE_OPTIONS = "give storage={'options': {...}}, which fsspec's filesystem of the URL takes"
_KEEP_RAW = "cache_limit= lets shards go when there is no more room, those used longest ago first"
_SHARD_BYTES = "shards are cut by bytes: size_limit="
_EXTRA_BYTES = "the writer counts what its format adds; size_limit= is the limit of a whole shard"
_PROFILE = "StreamingMonitor and loader.statistics() tell where time goes"
_WRITE = "write_parallel writes a dataset from many inputs, MDSWriter from one"
_CONVERT = "on a command line: lightning-streaming convert"
_WEIGHTED = "StreamingDataset(streams={name: Stream(remote=..., proportion=...), ...}) mixes datasets by weight"
_SUBCLASS = "subclass StreamingDataset, or give transform=; docs/migrate-from-mosaicml.md has both"
_EPOCH = "the loader counts epochs itself; dataset.next_epoch may be set"
_NOTHING_TO_CLEAN = "there is no shared memory to clean up: a new start just works, after kill -9 too"

_OLDER = {
    "where": "selection.where",
    "split_by": "selection.group_by",
    "split_seed": "selection.seed",
    "select": "selection.indices",
    "on_demand": "storage.on_demand",
    "follow": "follow_appends",
    "phases": "schedule",
    "pack": "packing",
    "budget": "token_budget",
    "on_bad_sample": "bad_samples.action",
    "max_bad": "bad_samples.max",
    "bad_log": "bad_samples.log",
    "decode_threads": "decode.threads",
    "sample_log": "debug.sample_log",
    "watchdog_seconds": "debug.watchdog_seconds",
}
"""Names before 0.1.0 of options of ours."""
_OLDER_ARGUMENTS = {name: f"its name is {option}" for name, option in _OLDER.items()}
_OLDER_OF_LOADER = {
    "with_keys": "its name is return_keys",
    "with_valid": "its name is return_valid_mask",
    "repeat_epoch": "its name is fixed_epoch",
}

_STREAM_ARGUMENTS = {
    **{name: _OLDER_ARGUMENTS[name] for name in ("where", "split_by", "split_seed", "select", "follow")},
    **dict.fromkeys(("storage_options", "session_options"), _IN_STORAGE_OPTIONS),
    "samples": "choose= is how many samples an epoch draws",
    "weight": "proportion= is a stream's share of an epoch",
    "keep_raw": _KEEP_RAW,
    "input_dir": "remote= is where the shards come from",
    "url": "remote= is where the shards come from",
    "path": "remote= is where the shards come from, local= a directory of this machine",
}

_DATASET_ARGUMENTS = {
    **_OLDER_ARGUMENTS,
    **_STREAM_ARGUMENTS,
    "samples": "epoch_size= is how many samples an epoch draws; Stream(choose=...), from one stream",
    "dirname": "local= is the directory",
    "index_size": "the index tells its own size",
    "samples_per_epoch": "epoch_size= is how many samples an epoch draws",
    "group_method": _SUBCLASS,
    "tokenizer_name": _SUBCLASS,
    "max_seq_len": _SUBCLASS,
    "transforms": _SUBCLASS,
    "target_transform": _SUBCLASS,
    "cache_dir": "local= is the directory on this node",
    "item_loader": "how a sample is stored belongs to its columns; tokens are ndarray:uint16:2049",
    "drop_last": "give it to the loader: StreamingDataLoader(dataset, drop_last=True)",
    "seed": "shuffle_seed= is the seed of the order",
    "serializers": "register_encoding adds an encoding of your own",
    "max_cache_size": "cache_limit= is the most bytes that the node keeps, not a share of its disk",
    "subsample": "epoch_size= draws fewer samples, Stream(repeat=0.1) a tenth of a stream",
    "encryption": "shards are not encrypted; let the store encrypt, or register_encoding for a column",
    "max_pre_download": "predownload= is how many samples ahead shards are fetched",
    "index_path": "the index is index.json beside the shards; " + _CONVERT + " makes a dataset of Parquet files",
    "force_override_state_dict": 'load_state_dict(state, on_mismatch="warn") goes on with other settings',
    "weights": "a stream's share is its own: Stream(remote=..., proportion=0.7)",
    "datasets": _WEIGHTED,
    "iterate_over_all": "Stream(repeat=...) says how often an epoch goes through a stream",
    "num_workers": "give it to the loader: StreamingDataLoader(dataset, num_workers=4)",
}

REPLACED_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "StreamingDataset": _DATASET_ARGUMENTS,
    "StreamingConfig": {
        **_DATASET_ARGUMENTS,
        "drop_last": "it belongs to the data module: StreamingDataModule(train=..., drop_last=True)",
        "batch_size": "it belongs to the data module: StreamingDataModule(train=..., batch_size=32)",
        "num_workers": "it belongs to the data module: StreamingDataModule(train=..., num_workers=4)",
        "transform": "it is code, so it belongs to the data module: override StreamingDataModule.transform",
        "world": "the data module takes it from the trainer",
        "stream_name": "give streams={name: Stream(...)}",
        "stream_config": "give streams={name: Stream(...)}",
    },
    "Stream": _STREAM_ARGUMENTS,
    "MixturePhase": {"until": "its name is end", "cut": "its name is ended_at", "name": "it is the key in schedule"},
    "JoinConfig": {"on": "its name is key"},
    "StreamingDataModule": _OLDER_OF_LOADER,
    "StreamingDataLoader": {
        **_OLDER_OF_LOADER,
        "profile_batches": _PROFILE,
        "profile_skip_batches": _PROFILE,
        "profile_dir": _PROFILE,
        "profile_cprofile": _PROFILE,
    },
    "ShardWriter": {
        "dirname": "out= is the directory or URL",
        "local": "out= is the directory, or (directory, URL) for both",
        "remote": "out= is the URL, or (directory, URL) for both",
        "output_dir": "out= is the directory or URL",
        "cache_dir": "out= is the directory or URL",
        "extra_bytes_per_shard": _EXTRA_BYTES,
        "extra_bytes_per_sample": _EXTRA_BYTES,
        "chunk_size": _SHARD_BYTES,
        "chunk_bytes": _SHARD_BYTES,
        "compression_level": 'it is part of the name: compression="zstd:7"',
        "encryption": "shards are not encrypted; let the store encrypt, or register_encoding for a column",
        "item_loader": "how a sample is stored belongs to its columns; tokens are ndarray:uint16:2049",
        "num_workers": "write_parallel writes with many processes; max_workers= is how many threads store shards",
    },
    "LocalDataset": {
        "remote": "StreamingDataset reads a remote; a LocalDataset is here",
        "transform": "transform in the collate function, or override get_item",
    },
}
"""By class, or one of its bases, and argument: what to write instead."""

REPLACED_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "StreamingDataset": {
        "spanner": "np.searchsorted(dataset.sample_offset_per_shard, sample_id, 'right') - 1 is a sample's shard",
        "resample_streams": "lightning-streaming trace tells which samples a step reads",
        "on_exception": "a failure is raised in the step that needed the sample",
        **{name: _ON_EACH_STREAM.format(name) for name in ("remote", "local", "split", "storage")},
        **{name: _ON_EACH_STREAM.format(name) for name in ("download_retry", "download_timeout")},
        **{name: _ON_EACH_STREAM.format(name) for name in ("validate_hash", "keep_zip")},
        "stream_name": "dataset.streams has each stream by name",
        "stream_config": "dataset.streams has each stream by name",
        "input_dir": _ON_EACH_STREAM.format("remote"),
        "cache_dir": _ON_EACH_STREAM.format("local"),
        "seed": "dataset.shuffle_seed is the seed of the order",
        "max_cache_size": "dataset.cache_limit is the most that the node keeps",
        "current_epoch": "dataset.next_epoch is the epoch of the next pass",
        "set_shuffle": "give shuffle= to StreamingDataset",
        "set_drop_last": "give drop_last= to StreamingDataLoader",
        "set_batch_size": "give batch_size= to StreamingDataset or StreamingDataLoader",
        "set_num_workers": "give num_workers= to StreamingDataLoader",
    },
    "DatasetStream": {
        "safe_keep_zip": "keep_zip tells whether compressed files are kept",
        "set_up_local": "the cache sets up its directory itself, at first need",
        "get_index_size": "dataset.cache_usage counts indexes too",
    },
    "Stream": {
        **dict.fromkeys(("get_shards", "prepare_shard"), "a stream of a dataset has it: dataset.streams[0].{name}"),
        "apply_default": "dataset.streams[0] has the dataset's defaults filled in; the Stream given stays as it is",
        "apply_weights": "dataset.streams[0] has proportion, repeat and choose worked out",
        "validate_weights": "a Stream checks its weight when it is made, the dataset those of all at the first look",
        "set_up_local": "the cache sets up its directory itself, at first need",
        "get_index_size": "dataset.cache_usage counts indexes too",
        "safe_keep_zip": "keep_zip tells whether compressed files are kept",
    },
    "StreamingDataLoader": {
        **dict.fromkeys(("restore_sample", "can_restore_sample"), "the dataset has it: loader.dataset.{name}(key)"),
        "num_samples_yielded": 'state_dict()["sample_in_epoch"] is the place over all ranks',
        "set_epoch": _EPOCH,
        "current_epoch": _EPOCH,
    },
    "ShardWriter": {
        "shards": "num_samples tells what is safe; finish() publishes index.json, which names the shards",
        "flush_shard": "shards are stored as soon as they are full; finish() stores the last one",
        "cloud_writer": "the writer stores its files itself; storage_options= is for the store",
        "encode_sample": "write(sample) encodes it; register_encoding adds an encoding",
        **dict.fromkeys(("compression", "hashes", "size_limit"), "get_config() tells it"),
    },
}
"""By class, or one of its bases, and attribute: where it is told instead."""

TOPICS = ("distributed", "formats", "logs", "sequence", "writing")
"""Modules of public names that only some programs need."""

REPLACED_IN_MODULE: Mapping[str, str] = {
    "clean_stale_shared_memory": _NOTHING_TO_CLEAN,
    "merge_index": "writing.merge(parts, out) joins the parts named, writing.merge_recursive(out) all of them",
    "get_list_arg": "text.split(',') does it",
    "streams_registry": "make each Stream yourself, and give streams=[...]",
    "dataframe_to_mds": "write_parallel writes parts on a cluster; docs/parallel-writing.md",
    "StreamingVisionDataset": _SUBCLASS,
    **dict.fromkeys(("StreamingCIFAR10", "StreamingImageNet", "StreamingCOCO", "StreamingADE20K"), _SUBCLASS),
    **dict.fromkeys(("StreamingC4", "StreamingPile", "StreamingEnWiki"), _SUBCLASS),
    **dict.fromkeys(("text", "vision", "multimodal"), _SUBCLASS),
    "base": "public names are in lightning_streaming itself, or in its modules " + ", ".join(TOPICS),
    "optimize": _WRITE,
    "map": _WRITE,
    "merge_datasets": "merge(parts, out) joins datasets without moving a shard",
    "CombinedStreamingDataset": _WEIGHTED,
    "ParallelStreamingDataset": "a CombinedLoader of Lightning takes a StreamingDataLoader for each dataset",
    "TokensLoader": _CONVERT + " --tokenize makes blocks of tokens, read as ndarray columns",
    "train_test_split": "write each part as a dataset of its own, or give selection={'fraction': '0%:98%'}",
    **dict.fromkeys(("index_parquet_dataset", "index_hf_dataset", "optimize_hf"), _CONVERT),
}
"""By name: what to use instead."""


_FEW_ARGUMENTS = 12
"""That an error may list."""


def tells_unknown_arguments(cls: _Class) -> _Class:
    """Let a class refuse arguments that it does not take with an error that says which one is meant.

    Raises:
        UnknownArgumentError: When it is called so: by the class, not here.
    """
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]  # that of this very class
    accepted = frozenset(_accepted(cls))
    places = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in inspect.signature(init).parameters.values())

    @functools.wraps(init)
    def checked(self: object, *args: Any, **kwargs: Any) -> None:
        if not accepted.issuperset(kwargs):
            _refuse(type(self), next(name for name in kwargs if name not in accepted))
        if len(args) >= places:  # which counts self
            _refuse_places(type(self), places - 1, len(args))
        init(self, *args, **kwargs)

    if hasattr(cls, "option"):  # command lines read the types of a group's fields, each a text in its own base's module
        kinds = {**get_type_hints(cls), "return": type(None)}
        checked.__annotations__ = {name: kinds[name] for name in init.__annotations__}
    setattr(cls, "__init__", checked)  # noqa: B010 mypy knows a class's own as fixed
    return cls


def tells_replacements(cls: _Class) -> _Class:
    """Let a class and its objects say of names of other libraries what to use instead.

    By an attribute for each, which raises: a ``__getattr__`` would slow down every look-up of any attribute.
    """
    for name, said in REPLACED_ATTRIBUTES[cls.__name__].items():
        if not hasattr(cls, name):
            setattr(cls, name, _Replaced(cls.__name__, name, said))
    return cls


class _Replaced:
    """A name that is not there; a subclass may set it to something of its own."""

    def __init__(self, kind: str, name: str, said: str) -> None:
        self._words = f"{kind!r} object has no attribute {name!r}: {said.format(name=name)}"

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self._words)


def unknown_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error to raise where a module has no such name."""
    said = _said_of_modules(name) or _meant(name, known)
    return AttributeError(f"module {module!r} has no attribute {name!r}{f': {said}' if said else ''}")


def _said_of_modules(name: str) -> str:
    package = __name__.partition(".")[0]
    homes = (f"{package}.{topic}" for topic in TOPICS)
    home = next((home for home in homes if name in import_module(home).__all__), None)
    return f"from {home} import {name}" if home else REPLACED_IN_MODULE.get(name, "")


def _accepted(cls: type) -> Iterator[str]:
    """Names of arguments that calling a class may give, whichever of its bases takes them."""
    for one in cls.__mro__:
        if "__init__" not in vars(one):
            continue
        parameters = list(inspect.signature(vars(one)["__init__"]).parameters.values())[1:]
        yield from (of.name for of in parameters if of.kind in (of.POSITIONAL_OR_KEYWORD, of.KEYWORD_ONLY))
        if not any(of.kind is of.VAR_KEYWORD for of in parameters):
            return


def _refuse(cls: type, name: str) -> NoReturn:
    accepted = sorted(set(_accepted(cls)))
    said = _said_of(cls, REPLACED_ARGUMENTS).get(name) or _meant(f"{name}=", [f"{one}=" for one in accepted])
    few = len(accepted) <= _FEW_ARGUMENTS
    said = said or (f"it takes {', '.join(accepted)}" if few else f"see help({cls.__name__})")
    group = getattr(cls, "option", None)
    option = f"{group}.{name}" if isinstance(group, str) else name
    raise UnknownArgumentError(f"{cls.__name__} takes no argument {name!r}: {said}", option=option)


def _refuse_places(cls: type, places: int, given: int) -> NoReturn:
    accepted = list(_accepted(cls))
    example = next((name for name in ("remote", "out", "num_workers") if name in accepted), accepted[0])
    most = f"at most {places}" if places else "no"
    raise UnknownArgumentError(
        f"{cls.__name__} takes {most} arguments by place, but got {given}: name them, as in "
        f"{cls.__name__}({'...' + ', ' if places else ''}{example}=...)"
    )


def replaced_argument(kind: Any, name: str) -> str | None:
    """What to write instead of an argument that a class does not have; None if nothing takes its place."""
    return _said_of(kind, REPLACED_ARGUMENTS).get(name) if inspect.isclass(kind) else None


def _said_of(cls: type, table: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    return next((table[one.__name__] for one in cls.__mro__ if one.__name__ in table), {})


def _meant(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), 1, 0.7)
    return f"did you mean {close[0]}?" if close else ""
