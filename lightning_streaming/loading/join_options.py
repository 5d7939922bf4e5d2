"""What a user asks of a join: which dataset's columns are read together with those of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_streaming.errors import ConfigError, UnknownArgumentError
from lightning_streaming.formats.shard_table import check_selection
from lightning_streaming.loading.option_groups import store_group
from lightning_streaming.loading.storage_config import StorageConfig
from lightning_streaming.replaced_names import tells_unknown_arguments
from lightning_streaming.storage import mask_url


@tells_unknown_arguments
@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """A dataset whose columns are put into the samples of a stream.

    Args:
        remote: Where its shards come from: a path, or any URL fsspec knows.
        local: Directory of this node that keeps downloaded shards. None: one named after ``remote``, or none at all
            where that is a path of this machine. With ``local`` alone the dataset is read in place.
        on: Column of both, of whole numbers, text or bytes: a sample is joined with the one that has its value there.
            None: with the one of the same number, and both have equally many samples.
        columns: Which of its columns are taken, by their names there. None: all; but not ``on``, which is the same.
        prefix: What the names of its columns begin with in the sample, like "clip_".
        storage: Access to its store, as for a stream; nothing of the stream's is used.

    Raises:
        ConfigError: Nothing says where the dataset is, or an argument is of another kind.
    """

    remote: str | None = None
    local: str | None = None
    on: str | None = None
    columns: Sequence[str] | None = None
    prefix: str = ""
    storage: StorageConfig | Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.remote is None and self.local is None:
            raise ConfigError("a join needs remote=, local=, or both")
        if self.on is not None and (not isinstance(self.on, str) or not self.on):
            raise ConfigError(f"on of a join must be the name of a column of both datasets, but is {self.on!r}")
        if not isinstance(self.prefix, str):
            raise ConfigError(f"prefix of a join must be a text, but is {self.prefix!r}")
        object.__setattr__(self, "columns", check_selection(self.columns))
        store_group(self, StorageConfig)

    def __repr__(self) -> str:
        remote = None if self.remote is None else mask_url(str(self.remote))
        return f"Join(remote={remote!r}, local={self.local!r}, on={self.on!r})"

    def in_words(self) -> str:
        """How samples are put together, as people are told."""
        return "by position" if self.on is None else f"on {self.on!r}"


_ARGUMENTS = ", ".join(one.name for one in fields(Join))


def named_joins(join: Mapping[str, Any] | None) -> Mapping[str, Join] | None:
    """The joins of a stream by name; each may be written as a location, or as a mapping of arguments.

    Raises:
        ConfigError: They are something else.
    """
    if join is None:
        return None
    if not isinstance(join, Mapping):
        raise ConfigError(f"join must map names to datasets, like {{'clip': 'data/clip'}}, but is {_kind(join)}")
    return {name: _join(name, one) for name, one in join.items()}


def _join(name: object, one: Any) -> Join:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"join must map names to datasets, but one of the names is {name!r}")
    if isinstance(one, Join):
        return one
    if isinstance(one, Mapping):
        # YAML reads a key that is written on, without quotes, as true; which JSON then has as a text.
        arguments = {"on" if key is True or key == "true" else key: value for key, value in one.items()}
        if len(arguments) < len(one) or not all(isinstance(key, str) for key in arguments):
            raise ConfigError(f"join {name!r} must map names of arguments to values, each once, but got {dict(one)!r}")
        try:
            return Join(**arguments)
        except UnknownArgumentError as error:
            raise UnknownArgumentError(f"join {name!r}: {error}; a join takes {_ARGUMENTS}") from None
        except ConfigError as error:
            raise type(error)(f"join {name!r}: {error}") from None
    if isinstance(one, str) or hasattr(one, "__fspath__"):
        return Join(remote=str(one))
    raise ConfigError(
        f"join {name!r} must be a path or URL, or what Join takes, like {{'remote': 'data/clip', 'on': 'id'}}, but is "
        f"{_kind(one)}"
    )


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
