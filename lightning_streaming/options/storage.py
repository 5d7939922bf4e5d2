"""Options of stored data: access to its store, and the datasets that are joined with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.shard_table import check_selection
from lightning_streaming.options.groups import OptionGroup, as_group, fields_of, store_group, store_plain
from lightning_streaming.signatures import public, suggests_names
from lightning_streaming.storage import StorageOptions, mask_url
from lightning_streaming.units import check_path, check_truth


@public()
@suggests_names
@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig(OptionGroup):
    """Access to the storage that holds the data.

    Args:
        options: Passed to fsspec: ``key``, ``secret``, ``endpoint_url``, ``token``, ``anon``, ... A value may name
            environment variables, like "${PARTNER_KEY}". A stream without options uses those of its dataset; one with
            options uses its own alone.
        on_demand: Whether ``dataset[i]`` and ``restore_sample`` read the bytes of one sample from an uncompressed shard
            that is not on this node, instead of fetching the shard. For the whole dataset.

    Raises:
        ConfigError: A field has a value that cannot work.
    """

    option: ClassVar[str] = "storage"
    example: ClassVar[str] = "{options: {anon: true}}"

    options: Mapping[str, Any] | None = field(default=None, repr=False)
    on_demand: bool = False

    def __post_init__(self) -> None:
        store_plain(self, leave=("options",))  # whose values are those of a client
        check_truth("storage.on_demand", self.on_demand)
        if self.options is not None:
            object.__setattr__(self, "options", StorageOptions(self.options, "storage.options"))

    @classmethod
    def options_of(cls, storage: StorageConfig | Mapping[str, Any] | None) -> StorageOptions:
        """Return the options for fsspec, empty by default."""
        config = as_group(cls, storage)
        return StorageOptions(None if config is None else config.options, "storage.options")

    @staticmethod
    def check_has_options_only(storage: StorageConfig | Mapping[str, Any] | None, owner: str) -> None:
        """Raise ConfigError for a field that only the storage of a dataset can have."""
        if isinstance(storage, StorageConfig) and storage.on_demand:
            raise ConfigError(f"storage.on_demand belongs to the dataset, not to {owner}", option="storage.on_demand")

    def described(self) -> dict[str, Any]:
        """Return the fields by name, without options: they may be secret."""
        return {"on_demand": self.on_demand}


@public()
@suggests_names
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinConfig(OptionGroup):
    """A dataset whose columns are added to the samples of a stream.

    Args:
        remote: Location of its shards: a path, or any URL fsspec knows.
        local: Directory of this node for downloaded shards. None: a directory named after ``remote``, or none if
            ``remote`` is a path of this machine. With ``local`` alone the dataset is read in place.
        key: Column of both datasets, of whole numbers, text or bytes: samples with the same value are joined. None:
            samples with the same number are joined, and both datasets have the same size.
        columns: The columns to add, by their names there. None: all, except ``key``.
        prefix: Prefix of their names in the sample, like "clip_".
        storage: Access to its store, as for a stream; the stream's own ``storage`` is not used.

    Raises:
        ConfigError: The location is missing, or a field has a value that cannot work.
    """

    option: ClassVar[str] = "join"
    example: ClassVar[str] = "{remote: s3://corpus/captions, key: id}"

    remote: str | None = None
    local: str | None = None
    key: str | None = None
    columns: Sequence[str] | None = None
    prefix: str = ""
    storage: StorageConfig | Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        store_plain(self, leave=("storage",))
        for name in ("remote", "local"):
            path = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, check_path(f"join.{name}", path, "a path or URL"))
        if self.remote is None and self.local is None:
            raise ConfigError("a join needs remote=, local=, or both", option="join.remote")
        if self.key is not None and (not isinstance(self.key, str) or not self.key):
            raise ConfigError(
                f"join.key must be the name of a column of both datasets, but is {short_repr(self.key)}",
                option="join.key",
            )
        if not isinstance(self.prefix, str):
            raise ConfigError(f"join.prefix must be a text, but is {short_repr(self.prefix)}", option="join.prefix")
        with fields_of("join"):
            object.__setattr__(self, "columns", check_selection(self.columns))
            store_group(self, StorageConfig)
            StorageConfig.check_has_options_only(self.storage, "a join")

    def __repr__(self) -> str:
        remote = None if self.remote is None else mask_url(self.remote)
        return f"JoinConfig(remote={remote!r}, local={self.local!r}, key={self.key!r})"

    def described(self) -> dict[str, Any]:
        """Return the fields by name, without secrets."""
        remote = None if self.remote is None else mask_url(self.remote)
        return {"remote": remote, "local": self.local, "key": self.key, "columns": self.columns, "prefix": self.prefix}

    def in_words(self) -> str:
        """Return how samples are joined, as messages say it."""
        return "by position" if self.key is None else f"on {self.key!r}"


Joins = Mapping[str, JoinConfig | Mapping[str, Any]]
"""Joined datasets by name."""
