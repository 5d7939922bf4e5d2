"""One shard: from encoded samples to the file that is stored and the entry of the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.compression import compress, extension
from lightning_streaming.formats.hashing import hash_bytes
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.formats.mds import encode_config, encode_shard
from lightning_streaming.formats.mds_sample import SampleLayout, compile_layout
from lightning_streaming.writing.settings import ShardSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecipe:
    """What all shards of one writer share."""

    layout: SampleLayout
    """The columns."""
    settings: ShardSettings
    """How to compress and hash."""
    config: bytes
    """The text that describes both, and stands in every shard."""


def make_recipe(columns: Mapping[str, str], settings: ShardSettings) -> ShardRecipe:
    """Lay out the columns, sorted by name.

    Raises:
        ConfigError: There are no columns, one is not named by a text, or an encoding does not exist.
        UnsupportedError: This version does not serve an encoding.
    """
    if not all(isinstance(text, str) for pair in columns.items() for text in pair):
        raise ConfigError(f"columns must map names to encodings, all of them texts, but got {dict(columns)}")
    names = tuple(sorted(columns))
    layout = compile_layout(names, tuple(columns[name] for name in names))
    config = encode_config(
        layout.schema,
        compression=settings.compression,
        hashes=settings.hashes,
        size_limit=settings.size_limit,
    )
    return ShardRecipe(layout=layout, settings=settings, config=config)


def make_shard(number: int, samples: Sequence[bytes], recipe: ShardRecipe) -> tuple[ShardInfo, bytes]:
    """Make a shard, in memory.

    Args:
        number: Place among the shards, from 0.
        samples: Encoded by the recipe's layout; may be none.
        recipe: What the shard shares with the others.

    Returns:
        The entry of the index, and the content of the one file that is stored: the raw one, or with compression the
        compressed one.

    Raises:
        ConfigError: The shard would have 4 GiB or more.
    """
    settings = recipe.settings
    stored = encode_shard(samples, recipe.config)
    raw_data = _file_info(f"shard.{number:05}.mds", stored, settings)
    zip_data = None
    if settings.compression is not None:
        stored = compress(settings.compression, stored)
        zip_data = _file_info(f"{raw_data.basename}.{extension(settings.compression)}", stored, settings)
    info = ShardInfo(
        format="mds",
        samples=len(samples),
        compression=settings.compression,
        hashes=settings.hashes,
        size_limit=settings.size_limit,
        raw_data=raw_data,
        zip_data=zip_data,
        schema=recipe.layout.schema,
    )
    return info, stored


def _file_info(basename: str, data: bytes, settings: ShardSettings) -> FileInfo:
    hashes = {name: hash_bytes(name, data) for name in settings.hashes}
    return FileInfo(basename=basename, bytes=len(data), hashes=hashes)
