"""Configuration of the data of a stage, and configurations as they may be printed and saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

import jsonargparse
import yaml  # type: ignore[import-untyped]

from lightning_streaming.dataset.options import DataOptions, plain_values
from lightning_streaming.dataset.stream import Stream
from lightning_streaming.errors import ConfigError
from lightning_streaming.options.groups import OptionGroup
from lightning_streaming.options.storage import StorageConfig
from lightning_streaming.sequence.steps import SequenceStep
from lightning_streaming.signatures import explains_options_of, public, suggests_names
from lightning_streaming.storage import StorageOptions, mask_url
from lightning_streaming.storage.secrets import shown_options
from lightning_streaming.storage.urls import user_of


@public()
@suggests_names
@explains_options_of(DataOptions)
@dataclass(frozen=True, kw_only=True)
class StreamingConfig(DataOptions):
    """Data of one stage: one dataset (``remote``), or several streams mixed by weight (``streams``).

    The fields are the arguments of :class:`~lightning_streaming.StreamingDataset` of the same names.

    Args:
        streams: Streams by name, each with its ``remote`` and, if several are mixed, its ``proportion``.
        shuffle: Shuffle the samples. None: only for training.
        replication: Number of consecutive ranks that read the same samples. None: from the device mesh of the strategy.

    Raises:
        ConfigError: An option is invalid, or there is no location of the data.
    """

    streams: Mapping[str, Stream] | None = None
    shuffle: bool | None = None  # type: ignore[assignment]  # None until the stage is known

    def __post_init__(self) -> None:
        if not self.streams and self.remote is None and self.local is None:
            raise ConfigError("the data of a stage needs streams=, remote= or local=", option="remote")
        super().__post_init__()

    def dataset_arguments(self, *, shuffle_by_default: bool) -> dict[str, Any]:
        """Return the arguments for :class:`~lightning_streaming.StreamingDataset`."""
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
            f"{type(stage).__name__}",
            option="data",
        )
    streams = stage.get("streams")
    if streams is not None:
        streams = {name: Stream(**one) if isinstance(one, Mapping) else one for name, one in streams.items()}
    return StreamingConfig(**{**stage, "streams": streams})


_Hide = Callable[[Mapping[str, Any]], Mapping[str, Any]]
_SECRETS = ("storage", "storage_options")
"""Fields below which anything may be secret."""
_OF_USER = ("model", "trainer", "optimizer", "lr_scheduler")
"""Fields below which a ``storage`` of other fields than ours is an argument of the user's own."""
_BY_NAME = ("streams", "join", "schedule", "mix", "max_repeats", "columns")
"""Fields whose keys are names that the user chose, not names of fields."""


def shown(value: Any, name: str = "", hide: _Hide = shown_options) -> Any:
    """A part of a configuration without secrets: itself if it has none, else a copy.

    Args:
        value: A stage, a stream or a group, storage options, or what holds them at any depth: namespaces, mappings,
            lists. Stages, streams and groups become mappings of their fields.
        name: Its field.
        hide: Makes of storage options what may be shown.
    """
    if isinstance(value, StorageOptions) or (name in _SECRETS and isinstance(value, Mapping)):
        return hide(value)
    if isinstance(value, OptionGroup | Stream | StreamingConfig):
        return {one.name: shown(getattr(value, one.name), one.name, hide) for one in fields(value) if one.init}
    if isinstance(value, SequenceStep):
        facts = value.facts
        return {"class_path": facts["class"], "init_args": facts["arguments"]}
    if isinstance(value, jsonargparse.Namespace):
        copied, own = copy(value), vars(value)
        if name in _SECRETS and "init_args" not in own:
            vars(copied).clear()
            own = dict(hide(own))
        parts = {
            key: shown(one, name if key == "init_args" else _field(name, key, one), hide) for key, one in own.items()
        }
        vars(copied).update(_listed(parts))
        return copied
    if isinstance(value, str | os.PathLike):
        return _shown_text(value, name)
    inner: Any = None
    if type(value) is dict:
        inner = {key: shown(one, _field(name, str(key), one), hide) for key, one in value.items()}
        is_same = all(inner[key] is one for key, one in value.items())
    elif type(value) in (list, tuple):
        inner = type(value)(shown(one, name, hide) for one in value)
        is_same = all(mine is one for mine, one in zip(inner, value, strict=True))
    return value if inner is None or is_same else inner


def _listed(value: Any) -> Any:
    """Return values with lists instead of tuples, which YAML and JSON do not have."""
    if type(value) is dict:
        return {name: _listed(part) for name, part in value.items()}
    return [_listed(part) for part in value] if type(value) in (list, tuple) else value


def _field(parent: str, key: str, value: Any) -> str:
    if parent in _OF_USER and key not in ("remote", "storage_options") and not (key == "storage" and _is_ours(value)):
        return parent
    return "" if parent in _BY_NAME else key


def _is_ours(storage: Any) -> bool:
    names = vars(storage) if isinstance(storage, jsonargparse.Namespace) else storage
    return isinstance(names, Mapping) and {item.name for item in fields(StorageConfig)}.issuperset(names)


def _shown_text(text: str | os.PathLike[str], name: str) -> Any:
    location = os.fspath(text)
    if name == "remote":
        return mask_url(location)
    return location.replace(f"{user_of(location)}@", "", 1) if "://" in location and user_of(location) else text


def _represent(dumper: Any, value: Any) -> Any:
    sorts, dumper.sort_keys = dumper.sort_keys, False  # keys of a schedule keep their order
    try:
        return dumper.represent_data(plain_values(shown(value)))
    finally:
        dumper.sort_keys = sorts


# Known to all of the process, because loggers write hyperparameters with yaml.dump, which would else write every field.
for _kind in (Stream, StreamingConfig, StorageOptions):
    yaml.add_representer(_kind, _represent)
yaml.add_multi_representer(OptionGroup, _represent)
