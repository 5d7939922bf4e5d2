"""A shard as the JSON object that ``index.json`` has of it, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_streaming.errors import IndexFormatError
from lightning_streaming.formats.checks import brief
from lightning_streaming.formats.index_entries import INDEX_VERSION, FileInfo, ShardInfo
from lightning_streaming.formats.index_fields import (
    take,
    take_compression,
    take_schema,
    take_size_limit,
    take_text_mapping,
    take_texts,
)


def parse_shard(entry: Any, schema_before: Mapping[str, Any]) -> ShardInfo:
    """Check one entry of the list of shards.

    Args:
        entry: As it was in JSON.
        schema_before: Shared if it is equal.

    Raises:
        IndexFormatError: It is not the entry of a shard.
    """
    if type(entry) is not dict:
        raise IndexFormatError(f"a shard must be a JSON object, but is {brief(entry)}")
    check_version(entry)
    shard_format = take(entry, "format", str)
    schema = take_schema(entry, shard_format)
    has_meta = shard_format != "mds"
    shard = ShardInfo(
        format=shard_format,
        samples=take(entry, "samples", int),
        compression=take_compression(entry),
        hashes=take_texts(entry, "hashes"),
        size_limit=take_size_limit(entry),
        raw_data=_parse_file(entry, "raw_data"),
        zip_data=_parse_optional_file(entry, "zip_data"),
        raw_meta=_parse_file(entry, "raw_meta") if has_meta else None,
        zip_meta=_parse_optional_file(entry, "zip_meta") if has_meta else None,
        schema=schema_before if schema == schema_before else schema,
    )
    with_offsets = shard.raw_data if shard.raw_meta is None else shard.raw_meta
    if 4 * (shard.samples + 2) > with_offsets.bytes:
        raise IndexFormatError(
            f"{with_offsets.basename} has {with_offsets.bytes} bytes, too few to say where {shard.samples} samples are"
        )
    return shard


def check_version(entry: dict[str, Any]) -> None:
    """Refuse what another version wrote.

    Raises:
        IndexFormatError: The version is another one, or missing.
    """
    version = take(entry, "version", int)
    if version != INDEX_VERSION:
        raise IndexFormatError(f"only version {INDEX_VERSION} can be read, but version is {version}")


def _parse_file(entry: dict[str, Any], key: str) -> FileInfo:
    file = take(entry, key, dict)
    try:
        return FileInfo(
            basename=take(file, "basename", str),
            bytes=take(file, "bytes", int),
            hashes=take_text_mapping(file, "hashes"),
        )
    except IndexFormatError as error:
        raise IndexFormatError(f"{key}: {error}") from None


def _parse_optional_file(entry: dict[str, Any], key: str) -> FileInfo | None:
    return None if entry.get(key) is None else _parse_file(entry, key)


def shard_to_json(shard: ShardInfo) -> dict[str, Any]:
    """The entry of a shard."""
    entry = {
        **shard.schema,
        "compression": shard.compression,
        "format": shard.format,
        "hashes": shard.hashes,
        "raw_data": _file_to_json(shard.raw_data),
        "samples": shard.samples,
        "size_limit": shard.size_limit,
        "version": INDEX_VERSION,
        "zip_data": shard.zip_data and _file_to_json(shard.zip_data),
    }
    if shard.raw_meta is not None:
        entry["raw_meta"] = _file_to_json(shard.raw_meta)
        entry["zip_meta"] = shard.zip_meta and _file_to_json(shard.zip_meta)
    return entry


def _file_to_json(file: FileInfo) -> dict[str, Any]:
    return {"basename": file.basename, "bytes": file.bytes, "hashes": dict(file.hashes)}
