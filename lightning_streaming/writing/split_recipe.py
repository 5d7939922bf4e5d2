"""The recipe of JSONL, CSV, TSV and XSV shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.split import SplitLayout, encode_split_shard, make_split_layout, split_config
from lightning_streaming.writing.names import shard_name
from lightning_streaming.writing.recipe import MadeShard, cut_samples, store_file
from lightning_streaming.writing.settings import ShardSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRecipe:
    """A data file and a meta file a shard; ``size_limit`` counts the rows alone."""

    layout: SplitLayout
    """The columns."""
    settings: ShardSettings
    """How to cut, compress and hash."""
    config: bytes
    """The text that describes both, and stands in every meta file."""
    schema: Mapping[str, Any]
    """What the index says of the columns."""

    @property
    def format(self) -> str:
        return self.layout.format

    @property
    def uncounted_bytes(self) -> int:
        return len(self.layout.header)

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        return self.layout.encode(sample)

    def raw_bytes(self, num_samples: int, data_bytes: int) -> int:  # noqa: ARG002 other formats count them
        return data_bytes

    def make(self, number: int, samples: Sequence[bytes]) -> MadeShard:
        meta_content, data_content = encode_split_shard(samples, self.layout, self.config)
        basename = shard_name(number, self.format)
        meta = store_file(f"{basename}.meta", meta_content, self.settings)
        data = store_file(basename, data_content, self.settings)
        info = ShardInfo(
            format=self.format,
            samples=len(samples),
            compression=self.settings.compression,
            hashes=self.settings.hashes,
            size_limit=self.settings.size_limit,
            raw_data=data.raw,
            zip_data=data.compressed,
            raw_meta=meta.raw,
            zip_meta=meta.compressed,
            schema=self.schema,
        )
        return MadeShard(info=info, files=(meta.stored, data.stored))

    def samples_in(self, contents: Sequence[bytes]) -> list[bytes]:
        meta, data = contents
        return cut_samples(meta, data)


def make_split_recipe(
    shard_format: str,
    columns: Mapping[str, str],
    settings: ShardSettings,
    *,
    newline: str,
    separator: str | None = None,
) -> SplitRecipe:
    """Lay out the columns, sorted by name.

    Raises:
        ConfigError: There are no columns, one is not named by a text, an encoding is not ``str``, ``int`` or ``float``,
            or ``newline`` or ``separator`` cannot work.
    """
    if not all(isinstance(text, str) for pair in columns.items() for text in pair):
        raise ConfigError(f"columns must map names to encodings, all of them texts, but got {dict(columns)}")
    layout = make_split_layout(shard_format, columns, newline, separator)
    config = split_config(
        layout, compression=settings.compression, hashes=settings.hashes, size_limit=settings.size_limit
    )
    return SplitRecipe(layout=layout, settings=settings, config=config, schema=layout.schema)
