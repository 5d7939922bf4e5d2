"""Signatures of public classes: their arguments explained once, hints for wrong names, and checks of users' functions.

``@suggests_names`` makes a class check the names that it is called with; ``HINTS`` has what replaces a name of MosaicML
Streaming or litData. ``@explains_options_of(Config)`` adds what the docstring of ``Config`` says of each option to that
of a class or function. ``@public()`` gives a class the module that exports it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from itertools import chain
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from lightning_streaming.errors import ConfigError, MissingArgumentError, UnknownArgumentError

_Class = TypeVar("_Class", bound=type)
_Documented = TypeVar("_Documented")

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ARGUMENT = re.compile(r"^    (\w+):", re.MULTILINE)
_SECTION = re.compile(r"^\w+:$", re.MULTILINE)

_REMOTE = "remote= is the location of the shards, local= a directory of this machine"
_DIRECTORY = "out= is the directory or URL, or (directory, URL) for both"
_OF_STREAMS = "a stream of a dataset has it: dataset.streams[0].{}"
_OF_LOADER = "pass it to the loader: StreamingDataLoader(dataset, {}=...)"
_OF_MODULE = "pass it to the data module: StreamingDataModule(train=..., {}=...)"
SUBCLASS_HINT = "subclass StreamingDataset, or pass transform=; docs/migrate-from-mosaicml.md has both"
_PACK = "capacity= is the number of tokens in a pack"
_PER_STREAM = ("remote", "local", "split", "storage", "download_retry", "download_timeout", "validate_hash", "keep_zip")

_STREAM = {
    **dict.fromkeys(("input_dir", "url", "path", "dirname"), _REMOTE),
    **dict.fromkeys(
        ("storage_options", "session_options"), "pass storage={'options': {...}}; fsspec takes the options"
    ),
    "samples": "choose= is how many samples an epoch draws",
    "weight": "proportion= is a stream's share of an epoch",
    "safe_keep_zip": "keep_zip is whether compressed files are kept",
    "set_up_local": "the cache creates its directory when it is first used",
    "get_index_size": "dataset.cache_usage counts indexes too",
}

_DATASET = {
    **_STREAM,
    **dict.fromkeys(("group_method", "tokenizer_name", "max_seq_len", "transforms", "target_transform"), SUBCLASS_HINT),
    "samples": "epoch_size= is how many samples an epoch draws; Stream(choose=...), from one stream",
    "samples_per_epoch": "epoch_size= is how many samples an epoch draws",
    "subsample": "epoch_size= draws fewer samples, Stream(repeat=0.1) a tenth of a stream",
    "cache_dir": "local= is the directory on this node",
    "max_cache_size": "cache_limit= is the maximum number of bytes on the node, not a share of its disk",
    "seed": "shuffle_seed= is the seed of the order",
    "drop_last": _OF_LOADER.format("drop_last"),
    "num_workers": _OF_LOADER.format("num_workers"),
    "spanner": "np.searchsorted(dataset.sample_offset_per_shard, sample_id, 'right') - 1 is a sample's shard",
    "resample_streams": "lightning-streaming trace shows which samples a step reads",
    "on_exception": "a failure is raised in the step that needs the sample",
    "current_epoch": "dataset.next_epoch is the epoch of the next pass",
}

HINTS: Mapping[str, Mapping[str, str]] = {
    "StreamingDataset": {
        **_DATASET,
        **{name: _OF_STREAMS.format(name) for name in _PER_STREAM},
        **dict.fromkeys(("stream_name", "stream_config"), "dataset.streams has each stream by name"),
    },
    "StreamingConfig": {
        **_DATASET,
        **{name: _OF_MODULE.format(name) for name in ("batch_size", "drop_last", "num_workers")},
        **dict.fromkeys(("stream_name", "stream_config"), "pass streams={name: Stream(...)}"),
        "transform": "it is code: override StreamingDataModule.transform",
        "world": "the data module takes it from the trainer",
    },
    "Stream": {
        **_STREAM,
        **{name: _OF_STREAMS.format(name) for name in ("get_shards", "prepare_shard")},
        "apply_default": "dataset.streams[0] has the dataset's defaults; the Stream itself stays unchanged",
        "apply_weights": "dataset.streams[0] has the resolved proportion, repeat and choose",
        "validate_weights": "a Stream checks its weight when it is created, the dataset those of all streams",
    },
    "DatasetStream": _STREAM,
    "LocalDataset": {
        "remote": "a LocalDataset reads a directory of this machine; StreamingDataset reads a remote",
        "transform": "transform samples in the collate function, or override get_item",
    },
    "StreamingDataLoader": {
        **dict.fromkeys(
            ("set_epoch", "current_epoch"), "the loader counts epochs itself; dataset.next_epoch may be set"
        ),
        "num_samples_yielded": 'state_dict()["sample_in_epoch"] is the position over all ranks',
    },
    "ShardWriter": {
        **dict.fromkeys(("dirname", "local", "remote", "output_dir", "cache_dir"), _DIRECTORY),
        **dict.fromkeys(("chunk_size", "chunk_bytes"), "size_limit= is the maximum number of bytes in a shard"),
        **dict.fromkeys(
            ("extra_bytes_per_shard", "extra_bytes_per_sample"), "size_limit= includes what the format adds"
        ),
        **dict.fromkeys(("compression", "hashes", "size_limit"), "get_config() has it"),
        "shards": "num_samples counts what is stored; finish() writes index.json, which names the shards",
        "flush_shard": "shards are stored as soon as they are full; finish() stores the last one",
        "cloud_writer": "the writer stores its files itself; storage_options= is for the store",
        "encode_sample": "write(sample) encodes it; register_encoding adds an encoding",
    },
    "PackingConfig": dict.fromkeys(("max_length", "max_seq_len", "seq_length", "block_size"), _PACK),
    "MixturePhase": {"name": "it is the key in schedule"},
    "JoinConfig": {"on": "key= is the column of both datasets"},
}
"""Arguments and attributes of other libraries, by the class here that is used in their place, or a base of it."""


def public(topic: str | None = None) -> Callable[[_Class], _Class]:
    """Let a class be pickled, printed and saved in configurations by its public name, which stays if its file moves.

    ``inspect.getsource`` of the class fails, because it looks in that module; that of its methods works.

    Args:
        topic: Module of the package that exports it; None for the package itself.
    """

    def decorate(cls: _Class) -> _Class:
        if own := vars(cls).get("__annotations__"):  # which others resolve in the module of the class
            alone = type(cls.__name__, (), {"__annotations__": own, "__module__": cls.__module__})
            cls.__annotations__ = get_type_hints(alone, include_extras=True)
        package = __name__.partition(".")[0]
        cls.__module__ = package if topic is None else f"{package}.{topic}"
        return cls

    return decorate


def suggests_names(cls: _Class) -> _Class:
    """Let a class raise errors with hints for wrong and missing arguments, and for attributes of other libraries.

    Raises:
        UnknownArgumentError: In a call of the class, for an argument that it does not take.
        MissingArgumentError: In a call of the class without a required argument.
    """
    init = cls.__init__  # type: ignore[misc]  # the one of this class
    own = [*inspect.signature(init).parameters.values()][1:]
    positional = [item.name for item in own if item.kind is item.POSITIONAL_OR_KEYWORD]
    required = [item.name for item in own if item.kind in _BY_NAME and item.default is item.empty]
    accepted = frozenset(_accepted(cls))

    @functools.wraps(init)
    def checked(self: object, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in accepted:
                raise _unknown_argument(type(self), name)
        caller = type(self).__name__
        if len(args) > len(positional):
            most = f"at most {len(positional)}" if positional else "no"
            example = next(name for name in ("remote", "out", "num_workers", *accepted) if name in accepted)
            raise UnknownArgumentError(
                f"{caller} takes {most} positional arguments, but got {len(args)}: name them, as in "
                f"{caller}({'..., ' if positional else ''}{example}=...)"
            )
        for name in required:
            if name not in kwargs and name not in positional[: len(args)]:
                example = f", like {cls.example}" if hasattr(cls, "example") else ""
                raise MissingArgumentError(f"{caller} needs {name}={example}", option=_option(cls, name))
        init(self, *args, **kwargs)

    if "__dataclass_fields__" in vars(cls):  # command lines read the types of fields, each a text in its base's module
        checked.__annotations__ = {**get_type_hints(cls), "return": type(None)}
    setattr(cls, "__init__", checked)  # noqa: B010 mypy knows a class's own as fixed
    for name, hint in HINTS.get(cls.__name__, {}).items():
        if not hasattr(cls, name) and name not in getattr(cls, "__dataclass_fields__", ()):
            setattr(cls, name, _Replaced(cls.__name__, name, hint))
    return cls


class _Replaced:
    """An attribute that raises: a ``__getattr__`` would slow down the access to any attribute."""

    def __init__(self, kind: str, name: str, hint: str) -> None:
        self._message = f"{kind!r} object has no attribute {name!r}: {hint}"

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self._message)


def argument_hint(kind: Any, name: str) -> str | None:
    """Return what to write instead of an argument that a class does not take; None if nothing replaces it."""
    for base in kind.__mro__ if inspect.isclass(kind) else ():
        if name in HINTS.get(base.__name__, {}):
            return HINTS[base.__name__][name]
        with suppress(NameError):  # a type that is imported for type checkers only
            typed = base if "__dataclass_fields__" in vars(base) else getattr(base, "__init__")  # noqa: B009 as above
            for hint in get_type_hints(typed).values():
                for group in get_args(hint):
                    if hasattr(group, "option") and name in group.__dataclass_fields__:
                        return f"its name is {group.option}.{name}"
    return None


def _accepted(cls: type) -> list[str]:
    """Return the names of arguments that calling a class may pass, whichever of its bases takes them."""
    names = []
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = [*inspect.signature(vars(base)["__init__"]).parameters.values()][1:]
            names += [item.name for item in parameters if item.kind in _BY_NAME]
            if not any(item.kind is item.VAR_KEYWORD for item in parameters):
                break
    return names


def _unknown_argument(cls: type, name: str) -> UnknownArgumentError:
    accepted = sorted({*_accepted(cls)})
    hint = argument_hint(cls, name) or did_you_mean(f"{name}=", [f"{known}=" for known in accepted])
    if not hint:
        hint = f"it takes {', '.join(accepted)}" if len(accepted) <= 12 else f"see help({cls.__name__})"
    return UnknownArgumentError(f"{cls.__name__} takes no argument {name!r}: {hint}", option=_option(cls, name))


def _option(cls: type, name: str) -> str:
    group = getattr(cls, "option", None)
    return f"{group}.{name}" if isinstance(group, str) else name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, [*known], 1, 0.7)
    return f"did you mean {close[0]}?" if close else ""


def explains_options_of(config: type) -> Callable[[_Documented], _Documented]:
    """Add the explanations of options to the docstring of a class or function, which may have explanations itself."""

    def decorate(cls: _Documented) -> _Documented:
        if cls.__doc__ is not None:  # python -OO drops them all
            said = explanations_of(config) | _arguments_in(cls.__doc__)
            signatures = (inspect.signature(kind).parameters for kind in (cls, config))  # type: ignore[arg-type]
            said = {name: said[name] for name in dict.fromkeys([*chain(*signatures), *said]) if name in said}
            summary, *sections = re.split(r"^(?=\w+:$)", inspect.cleandoc(cls.__doc__), flags=re.MULTILINE)
            others = [section for section in sections if not section.startswith("Args:")]
            cls.__doc__ = "\n\n".join(map(str.rstrip, [summary, "\n".join(["Args:", *said.values()]), *others]))
        return cls

    return decorate


def has_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name; False if Python cannot read its signature."""
    signature = _signature_of(function)
    return signature is not None and name in signature.parameters


def accepts_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name, or takes any keyword."""
    signature = _signature_of(function)
    kinds = () if signature is None else [parameter.kind for parameter in signature.parameters.values()]
    return has_keyword(function, name) or inspect.Parameter.VAR_KEYWORD in kinds


def check_accepts(function: Callable[..., Any], name: str, form: str, *args: Any, **kwargs: Any) -> None:
    """Raise if a function cannot be called with these arguments; pass one whose signature Python cannot read.

    Args:
        function: A function of the user.
        name: What the message calls it.
        form: What the message says of the arguments, such as ``(sample)``.
        *args: Arguments of the call; their values do not matter.
        **kwargs: The same by name.

    Raises:
        ConfigError: It accepts other arguments.
    """
    signature = _signature_of(function)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{name} must accept {form}; its signature is {signature}: {error}", option=name) from None


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin such as dict
        return None


def explanations_of(config: type) -> dict[str, str]:
    """Return the explanation of each argument in the docstrings of a class and its bases, by name.

    That of a class precedes those of its bases. Each is whole lines, with the name, indented by four.
    """
    said: dict[str, str] = {}
    for base in reversed(config.__mro__):
        said |= _arguments_in(base.__doc__ or "")
    return said


def _arguments_in(docstring: str) -> dict[str, str]:
    section = re.split(r"^Args:$", inspect.cleandoc(docstring), maxsplit=1, flags=re.MULTILINE)[1:]
    text = _SECTION.split(section[0])[0] if section else ""
    starts = [*_ARGUMENT.finditer(text)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    return {match[1]: text[match.start() : end].rstrip() for match, end in zip(starts, ends, strict=False)}
