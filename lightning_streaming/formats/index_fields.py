"""Fields of an index's JSON objects, each with the type the format gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning_streaming.errors import ConfigError, IndexFormatError
from lightning_streaming.formats.checks import brief
from lightning_streaming.formats.compression import extension
from lightning_streaming.units import parse_bytes

_Kind = TypeVar("_Kind")


def take(entry: dict[str, Any], key: str, kind: type[_Kind]) -> _Kind:
    """The value of ``key``, which must be there and be of this JSON type.

    Raises:
        IndexFormatError: It is missing or of another type.
    """
    if key not in entry:
        raise IndexFormatError(f"the key {key!r} is missing")
    value = entry[key]
    if type(value) is not kind:  # not isinstance: true is no number here
        raise IndexFormatError(f"{key} must be {kind.__name__}, but is {brief(value)}")
    return value


def take_compression(entry: dict[str, Any]) -> str | None:
    """A known algorithm, or None where there is none."""
    if entry.get("compression") is None:
        return None
    compression = take(entry, "compression", str)
    try:
        extension(compression)
    except ConfigError as error:
        raise IndexFormatError(str(error)) from None
    return compression


def take_size_limit(entry: dict[str, Any]) -> int | None:
    """Bytes per shard, which may be written as ``"64mb"``, or None."""
    size_limit = entry.get("size_limit")
    if size_limit is None or type(size_limit) is int:
        return size_limit
    try:
        return parse_bytes(take(entry, "size_limit", str), "size_limit")
    except (ValueError, OverflowError) as error:  # the latter for "9…9.5kb" of hundreds of digits
        raise IndexFormatError(f"size_limit cannot be used: {error}") from None


def take_text(entry: dict[str, Any], key: str) -> str:
    """One text."""
    return take(entry, key, str)


def take_texts(entry: dict[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts."""
    texts = take(entry, key, list)
    if not all(type(text) is str for text in texts):
        raise IndexFormatError(f"{key} must be a list of str, but is {brief(texts)}")
    return tuple(texts)


def take_text_mapping(entry: dict[str, Any], key: str) -> dict[str, str]:
    """An object whose values are texts."""
    texts = take(entry, key, dict)
    if not all(type(text) is str for text in texts.values()):
        raise IndexFormatError(f"{key} must map str to str, but is {brief(texts)}")
    return texts


def take_sizes(entry: dict[str, Any], key: str) -> tuple[int | None, ...]:
    """A list of fixed sizes in bytes; None, in the file also 0, where the size varies."""
    sizes = take(entry, key, list)
    if not all(size is None or (type(size) is int and size >= 0) for size in sizes):
        raise IndexFormatError(f"{key} must be a list of sizes and nulls, but is {brief(sizes)}")
    return tuple(size or None for size in sizes)


_SCHEMA_KEYS = {
    "mds": ("column_names", "column_encodings", "column_sizes"),
    "json": ("columns", "newline"),
    "csv": ("column_names", "column_encodings", "newline"),
    "tsv": ("column_names", "column_encodings", "newline"),
    "xsv": ("column_names", "column_encodings", "newline", "separator"),
}
_PARALLEL = ("column_names", "column_encodings", "column_sizes")
"""Lists that say something of each column, where a format has them."""
_SCHEMA_FIELDS: Mapping[str, Callable[[dict[str, Any], str], Any]] = {
    "column_names": take_texts,
    "column_encodings": take_texts,
    "column_sizes": take_sizes,
    "columns": take_text_mapping,
    "newline": take_text,
    "separator": take_text,
}


def take_schema(entry: dict[str, Any], shard_format: str) -> dict[str, Any]:
    """What the format says of its columns, under the format's own keys; lists become tuples.

    Raises:
        IndexFormatError: No format has this name, one of its keys is missing or of another type, or the lists that say
            something of each column are not of one length.
    """
    if shard_format not in _SCHEMA_KEYS:
        raise IndexFormatError(f"format must be one of {', '.join(_SCHEMA_KEYS)}, but is {shard_format!r}")
    schema = {key: _SCHEMA_FIELDS[key](entry, key) for key in _SCHEMA_KEYS[shard_format]}
    lengths = {key: len(schema[key]) for key in _PARALLEL if key in schema}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise IndexFormatError(f"each column must have a name and what belongs to it, but {told}")
    return schema
