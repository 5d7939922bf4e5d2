"""Options of storage: arguments of its clients, and fetching of single samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError
from lightning_streaming.options.groups import OptionGroup, as_group, store_plain
from lightning_streaming.replaced_names import suggests_names
from lightning_streaming.storage import StorageOptions
from lightning_streaming.units import check_truth


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
