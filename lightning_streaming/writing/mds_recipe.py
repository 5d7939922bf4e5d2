"""The recipe of MDS shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_streaming.formats.mds import encode_config, head_bytes, shard_bytes
from lightning_streaming.formats.mds_sample import SampleLayout, compile_layout
from lightning_streaming.writing.columns import check_columns
from lightning_streaming.writing.names import shard_name
from lightning_streaming.writing.recipe import MadeShard, cut_samples, made_shard, make_file
from lightning_streaming.writing.settings import ShardSettings
from lightning_streaming.writing.shard_buffer import EncodedSamples

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class MDSRecipe:
    """One file a shard; ``size_limit`` counts all of it."""

    layout: SampleLayout
    """The columns."""
    settings: ShardSettings
    """How to cut, compress and hash."""
    config: bytes
    """The text that describes both, and stands in every shard."""
    schema: Mapping[str, Any]
    """What the index says of the columns."""
    format: str = "mds"
    uncounted_bytes: int = 0

    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        return self.layout.parts(sample)

    def raw_bytes(self, num_samples: int, data_bytes: int) -> int:
        return shard_bytes(num_samples, data_bytes, len(self.config))

    def make(self, number: int, samples: EncodedSamples) -> MadeShard:
        head = head_bytes(samples.ends, self.config)
        return made_shard(self, len(samples), make_file(shard_name(number, self.format), head, self.settings, samples))

    def samples_in(self, contents: Sequence[bytes]) -> list[bytes]:
        (data,) = contents
        return cut_samples(data, data)


def make_mds_recipe(columns: Mapping[str, str], settings: ShardSettings) -> MDSRecipe:
    """Lay out the columns, sorted by name.

    Raises:
        ConfigError: There are no columns, one is not named by a text, or an encoding does not exist.
        UnsupportedError: This version does not serve an encoding.
    """
    check_columns(columns)
    names = tuple(sorted(columns))
    layout = compile_layout(names, tuple(columns[name] for name in names))
    schema = layout.schema
    config = encode_config(
        schema, compression=settings.compression, hashes=settings.hashes, size_limit=settings.size_limit
    )
    return MDSRecipe(layout=layout, settings=settings, config=config, schema=schema)
