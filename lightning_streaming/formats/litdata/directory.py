"""Directories that litData optimised, read as they lie: their ``index.json``, and the chunks that it names.

chunks          of each: filename, chunk_size (samples), chunk_bytes (of the file before it is zipped as a whole; in
                earlier releases without the table at its beginning), and dim, the values of all samples together where
                these are rows of tokens
config          data_format    the serializer of each leaf of a sample
                data_spec      how a sample is built of its leaves
                compression    null or "zstd", or that with a level
                compression_level    what is zipped: the "chunk", also where it is missing, a "batch" of samples, or
                                     each "sample"
                types          what the samples hold; where all of it is JSON, they lie as rows of Arrow
                item_loader    what reads the chunks: "PyTreeLoader", also where it is missing, or "TokensLoader"
                encryption     null
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_streaming.errors import (
    ConfigError,
    IndexFormatError,
    ShardCorruptError,
    UnsupportedError,
)
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.arrow.rows import PlainArrow, plain_arrow
from lightning_streaming.formats.arrow.values import require_pyarrow
from lightning_streaming.formats.compression import ZSTD_HEAD_BYTES, check_algorithm, declared_zstd_bytes
from lightning_streaming.formats.litdata.chunks import (
    FramedChunk,
    PlainChunk,
    TokensChunk,
)
from lightning_streaming.formats.litdata.leaves import item_bytes, leaf_decoder
from lightning_streaming.formats.litdata.rows import ArrowChunk, has_arrow_rows
from lightning_streaming.formats.litdata.samples import (
    LitDataDecoder,
    PlainLeaves,
    parse_tree,
    plain_blocks,
    plain_leaves,
    sample_decoder,
    unsafe_leaves,
)
from lightning_streaming.formats.mds.shard import table_bytes
from lightning_streaming.formats.readers import PlainRows, ShardReader
from lightning_streaming.formats.shard_format import StoredFiles, described, other_shard
from lightning_streaming.formats.shard_table import INDEX_BASENAME, FileInfo, ShardInfo, check_columns
from lightning_streaming.formats.values import brief

_NAME = "litdata"
_JSON_KINDS = frozenset({"str", "int", "float", "bool", "bytes", "null", "list", "map", "struct"})
_JSON_SERIALIZERS = frozenset({"str", "text", "int", "float", "bool", "bytes", "json", "pickle"})


@dataclass(frozen=True, slots=True)
class LitDataFormat:
    """Chunks of litData."""

    block_length: int | None
    """Values of each sample, of data that ``TokensLoader`` wrote; what is left of a chunk is not read. Else None."""
    allow_unsafe_types: bool = False
    """Whether leaves may be unpickled, which runs code of whoever wrote them."""
    as_files: frozenset[str] = frozenset()
    """Columns whose image files are given as bytes."""

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:  # noqa: ARG002
        """The shards that litData's index names, in its order; see :class:`ShardFormat`. No chunk is looked at."""
        index = files.read_if_there(INDEX_BASENAME)
        if index is None:
            raise ConfigError(
                f"{files.shown} has no {INDEX_BASENAME}, so litData did not finish it",
                hint="give the directory that litdata.optimize wrote as output_dir",
                path=files.shown,
            )
        try:
            yield from self._shards(_parse_index(index), files)
        except (IndexFormatError, UnsupportedError) as error:
            where = files.shown_file(INDEX_BASENAME)
            raise type(error)(f"{where}: {shortened(str(error.args[0]))}", hint=error.hint, path=where) from None
        except ShardCorruptError as error:
            words = shortened(str(error.args[0]))
            raise ShardCorruptError(f"{files.shown}: {words}", path=files.shown_file(error.path or "")) from None

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:
        """Refuse a shard that could not be read; see :class:`ShardFormat`. ConfigError where a leaf is not read."""
        how = _how(info)
        check_columns(info, columns)
        try:
            if "block_length" in how:
                leaf_decoder(how["data_format"][0])
            elif how["arrow"]:
                require_pyarrow()
            else:
                self._decoder(how, columns)
        except (ConfigError, IndexFormatError) as error:
            raise type(error)(
                f"{info.raw_data.basename} cannot be read: {shortened(str(error.args[0]))}",
                hint=error.hint,
                option=error.option,
                path=info.raw_data.basename,
            ) from None
        if how["zipped"] is not None:
            check_algorithm("zstd")

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> ShardReader:
        """Open a chunk; see :class:`ShardFormat`."""
        self.check(info, columns)
        how = _how(info)
        if "block_length" in how:
            serializer = how["data_format"][0]
            size = how["block_length"] * (item_bytes(serializer) or 1)
            return TokensChunk(info, directory, serializer, plain_blocks(serializer, how["block_length"]), size)
        if how["zipped"] != "batch" and has_arrow_rows(info, directory):
            return ArrowChunk(info, directory, columns)
        decoder = self._decoder(how, columns)
        leaves = plain_leaves(how["data_spec"], how["data_format"], columns)
        if how["zipped"] == "batch":
            return FramedChunk(info, directory, decoder, leaves)
        return PlainChunk(info, directory, decoder, leaves, zipped=how["zipped"] == "sample")

    def _decoder(self, how: Mapping[str, Any], columns: Sequence[str] | None) -> LitDataDecoder:
        unsafe, as_files = self.allow_unsafe_types, self.as_files
        return sample_decoder(
            how["data_spec"], how["data_format"], columns, allow_unsafe_types=unsafe, as_files=as_files
        )

    def _shards(self, index: _Index, files: StoredFiles) -> Iterator[ShardInfo]:
        value_bytes = self._value_bytes(index)
        how: dict[str, Any] = {"data_format": list(index.data_format), "data_spec": index.data_spec}
        how |= {"zipped": index.zipped, "arrow": index.has_arrow_rows}
        if self.block_length is not None:
            how["block_length"] = self.block_length
        tree = parse_tree(index.data_spec, len(index.data_format))
        columns = tree.encodings(index.data_format)
        sizes, without_tables = files.sizes(), _is_without_tables(index, files)
        for chunk in index.chunks:
            raw, stored = _files(chunk, index.compression, sizes, without_tables=without_tables)
            samples = chunk.samples
            if value_bytes:
                samples = _values(chunk, raw.bytes, value_bytes) // (self.block_length or 1)
            yield other_shard(
                _NAME,
                samples,
                raw,
                columns,
                how,
                compression=None if stored is None else index.compression,
                zip_data=stored,
            )

    def _value_bytes(self, index: _Index) -> int | None:
        """Bytes of each value of rows of tokens; None of other samples.

        Raises:
            ConfigError: It is one, but there is a block length only for the other.
        """
        if not index.has_tokens:
            if self.block_length is not None:
                raise ConfigError(
                    f"block_length is {self.block_length}, but TokensLoader did not write this data, so it is not cut "
                    "into blocks",
                    hint="leave block_length out",
                    option="block_length",
                )
            return None
        if self.block_length is None:
            raise ConfigError(
                "TokensLoader wrote this data, so block_length must say how many tokens make a sample, as block_size "
                "does for litData",
                option="block_length",
            )
        found = item_bytes(index.data_format[0]) if len(index.data_format) == 1 else None
        tree = parse_tree(index.data_spec, len(index.data_format))
        if found is None or index.zipped is not None or not tree.is_leaf:
            raise IndexFormatError(f"data_format must be of one row of tokens, but is {brief(index.data_format)}")
        return found


def litdata_plain_kind(info: ShardInfo, columns: Sequence[str] | None) -> PlainArrow | PlainLeaves | PlainRows | None:
    """What shards have in common whose samples may be plain together; None where those of this one are not.

    Args:
        info: The shard, as its index describes it.
        columns: The columns wanted, which the shard has; None for all.

    Raises:
        IndexFormatError: Its entry in the index is not of this format.
    """
    how = _how(info)
    if "block_length" in how:
        return plain_blocks(how["data_format"][0], how["block_length"])
    if how["arrow"] and how["zipped"] != "batch":
        serializers = ["int" if one == "bool" else one for one in how["data_format"]]
        encodings = parse_tree(how["data_spec"], len(serializers)).encodings(serializers)
        return plain_arrow({name: one for name, one in encodings.items() if columns is None or name in columns})
    return None if how["zipped"] == "sample" else plain_leaves(how["data_spec"], how["data_format"], columns)


def litdata_unsafe_columns(info: ShardInfo) -> list[str]:
    """The columns of a shard whose values can run code of whoever wrote them when they are read.

    Raises:
        IndexFormatError: Its entry in the index is not of this format.
        ConfigError: Its samples are made of types that are not read.
    """
    how = _how(info)
    return [] if how["arrow"] else unsafe_leaves(how["data_spec"], how["data_format"])


# --- the index ---


@dataclass(frozen=True, slots=True)
class _ChunkEntry:
    """One entry of the list of chunks."""

    filename: str
    samples: int
    bytes: int
    dim: int | None


@dataclass(frozen=True, slots=True)
class _Index:
    """What litData's index says."""

    chunks: tuple[_ChunkEntry, ...]
    data_format: tuple[str, ...]
    data_spec: str
    compression: str | None
    """Of whole chunks."""
    zipped: str | None
    """What is zipped inside of chunks: a ``batch`` or a ``sample``."""
    has_tokens: bool
    has_arrow_rows: bool
    """By its types. A chunk has the last word."""


def _parse_index(data: bytes) -> _Index:
    try:
        root = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IndexFormatError(f"an index must be JSON, but is not ({error})") from None
    if type(root) is not dict or "chunks" not in root or "config" not in root:
        raise IndexFormatError(f"litData's index must have chunks and config, but is {brief(root)}")
    chunks = tuple(map(_chunk, _take(root, "chunks", list)))
    names = {chunk.filename for chunk in chunks}
    if len(names) < len(chunks):
        raise IndexFormatError("two chunks have the same filename")
    config = _take(root, "config", dict)
    loader = config.get("item_loader") or "PyTreeLoader"
    if config.get("encryption"):
        raise UnsupportedError(
            "the chunks are encrypted, which is not read", hint="write the data again without encryption"
        )
    if loader not in ("PyTreeLoader", "TokensLoader") or "format" in config:
        raise UnsupportedError(
            f"the chunks are those of {brief(config.get('format', loader))}, but only what PyTreeLoader and "
            "TokensLoader write is read",
            hint="write the data again with one of these",
        )
    return _index(config, chunks, loader)


def _index(config: dict[str, Any], chunks: tuple[_ChunkEntry, ...], loader: str) -> _Index:
    data_format = _take(config, "data_format", list)
    if not data_format or not all(isinstance(one, str) for one in data_format):
        raise IndexFormatError(f"data_format must name the serializer of each leaf, but is {brief(data_format)}")
    compression = config.get("compression")
    level = config.get("compression_level") or "chunk"
    if compression is not None and (not isinstance(compression, str) or compression.partition(":")[0] != "zstd"):
        raise IndexFormatError(f"compression must be zstd or null, but is {brief(compression)}")
    if level not in ("chunk", "batch", "sample"):
        raise IndexFormatError(f"compression_level must be chunk, batch or sample, but is {brief(level)}")
    return _Index(
        chunks,
        tuple(data_format),
        _take(config, "data_spec", str),
        compression if level == "chunk" else None,
        None if level == "chunk" else level,
        has_tokens=loader == "TokensLoader" or any(chunk.dim is not None for chunk in chunks),
        has_arrow_rows=_is_json(config.get("types")) and _JSON_SERIALIZERS.issuperset(data_format),
    )


def _is_json(types: Any) -> bool:
    """Whether samples are dicts of nothing but JSON values, and bytes, which litData writes as rows of Arrow."""
    left, found = [types], 0
    while left:
        fields = left.pop()
        if not isinstance(fields, dict) or not fields:
            return False
        for one in fields.values():
            about = one if isinstance(one, dict) else {"type": one}
            if not isinstance(about.get("type"), str) or about["type"] not in _JSON_KINDS:
                return False
            left += [about["fields"]] if about.get("fields") else []
            left += [{"": about["value"]}] if about.get("value") else []
            found += 1
    return found > 0


def _chunk(entry: Any) -> _ChunkEntry:
    if type(entry) is not dict:
        raise IndexFormatError(f"a chunk must be a JSON object, but is {brief(entry)}")
    name = _take(entry, "filename", str)
    samples, size = _take(entry, "chunk_size", int), _take(entry, "chunk_bytes", int)
    dim = _take(entry, "dim", int) if entry.get("dim") is not None else None
    if min(samples, size, dim or 0) < 0:
        raise IndexFormatError(f"chunk {brief(name)} must have no negative numbers, but is {brief(entry)}")
    return _ChunkEntry(name, samples, size, dim)


def _take(entry: Mapping[str, Any], key: str, kind: type) -> Any:
    if type(entry.get(key)) is not kind:
        raise IndexFormatError(f"{key} must be of type {kind.__name__}, but is {brief(entry.get(key))}")
    return entry[key]


def _is_without_tables(index: _Index, files: StoredFiles) -> bool:
    """Whether ``chunk_bytes`` of zipped files are without their tables. One release writes all, so one file tells.

    Raises:
        ShardCorruptError: The file says neither.
        StorageError: It could not be read.
        MissingDependencyError: The package that decompresses it is not installed.
    """
    first = next((one for one in index.chunks if one.filename in files.sizes()), None)
    if first is None or _raw_name(first, index.compression) == first.filename:
        return False
    try:
        found = declared_zstd_bytes(files.read_range(first.filename, 0, ZSTD_HEAD_BYTES))
    except ShardCorruptError as error:
        raise ShardCorruptError(f"{first.filename}: {error}", path=first.filename) from None
    if found - first.bytes not in (0, table_bytes(first.samples)):
        raise ShardCorruptError(
            f"{first.filename} must hold {first.bytes} bytes by {INDEX_BASENAME}, but says that it holds {found}",
            path=first.filename,
        )
    return found != first.bytes


def _raw_name(chunk: _ChunkEntry, compression: str | None) -> str:
    return chunk.filename if compression is None else chunk.filename.replace(f".{compression}", "")


def _files(
    chunk: _ChunkEntry, compression: str | None, sizes: Mapping[str, int], *, without_tables: bool
) -> tuple[FileInfo, FileInfo | None]:
    """The raw file of a chunk, and the stored one if that is zipped as a whole."""
    table, raw_name = table_bytes(chunk.samples), _raw_name(chunk, compression)
    # litData's reader of a local directory unzips chunks there, and deletes the zipped ones.
    name = chunk.filename if chunk.filename in sizes else raw_name
    found = sizes.get(name)
    if found is None:
        raise ShardCorruptError(f"{chunk.filename} is not there, but {INDEX_BASENAME} names it", path=chunk.filename)
    stored = FileInfo(basename=name, bytes=found, hashes={})
    if raw_name != name:
        raw_bytes = chunk.bytes + (table if without_tables else 0)
        return FileInfo(basename=raw_name, bytes=raw_bytes, hashes={}), stored
    if found - chunk.bytes not in (0, table):
        raise ShardCorruptError(f"{name} must have {chunk.bytes} bytes by {INDEX_BASENAME}, but has {found}", path=name)
    return stored, None


def _values(chunk: _ChunkEntry, raw_bytes: int, value_bytes: int) -> int:
    """How many values a chunk of tokens has. Where its first sample is empty, litData does not say."""
    found, left = divmod(raw_bytes - table_bytes(chunk.samples), value_bytes)
    if found < 0 or left or chunk.dim not in (None, found):
        raise IndexFormatError(
            f"{chunk.filename} must have room for dim values of {value_bytes} bytes each after its offsets, but has "
            f"{raw_bytes} bytes, and dim is {chunk.dim}",
            path=chunk.filename,
        )
    return found


def _how(info: ShardInfo) -> dict[str, Any]:
    """What the entry of a shard says of all shards alike.

    Raises:
        IndexFormatError: It is not of this format.
    """
    try:
        how = described(info)
        right = (
            all(isinstance(one, str) for one in how["data_format"])
            and isinstance(how["data_spec"], str)
            and how["zipped"] in (None, "batch", "sample")
            and isinstance(how["arrow"], bool)
            and ("block_length" not in how or _is_blocks(how))
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        right = False
    if not right:
        raise IndexFormatError(
            f"the index entry of {info.raw_data.basename} does not describe a chunk of litData",
            hint="make the index again",
            path=info.raw_data.basename,
        )
    return how


def _is_blocks(how: Mapping[str, Any]) -> bool:
    length = how["block_length"]
    return type(length) is int and length > 0 and item_bytes(how["data_format"][0]) is not None
