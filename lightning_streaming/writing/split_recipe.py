"""The recipe of JSONL, CSV, TSV and XSV shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_streaming.formats.split import SplitLayout, make_split_layout, meta_bytes, split_config
from lightning_streaming.writing.columns import check_columns
from lightning_streaming.writing.names import shard_name
from lightning_streaming.writing.recipe import MadeShard, cut_samples, made_shard, make_file
from lightning_streaming.writing.settings import ShardSettings
from lightning_streaming.writing.shard_buffer import EncodedSamples

if TYPE_CHECKING:
    from typing_extensions import Buffer


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

    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        return (self.layout.encode(sample),)

    def raw_bytes(self, num_samples: int, data_bytes: int) -> int:  # noqa: ARG002 other formats count them
        return data_bytes

    def make(self, number: int, samples: EncodedSamples) -> MadeShard:
        basename, header = shard_name(number, self.format), self.layout.header
        offsets = np.concatenate([[0], samples.ends]) + len(header)
        meta = make_file(f"{basename}.meta", meta_bytes(offsets, self.config), self.settings)
        data = make_file(basename, header, self.settings, samples)
        return made_shard(self, len(samples), data, meta)

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
    check_columns(columns)
    layout = make_split_layout(shard_format, columns, newline, separator)
    config = split_config(
        layout, compression=settings.compression, hashes=settings.hashes, size_limit=settings.size_limit
    )
    return SplitRecipe(layout=layout, settings=settings, config=config, schema=layout.schema)
