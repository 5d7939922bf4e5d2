"""Directories that litData optimised, read in place: their ``index.json``, and the chunks that it lists.

chunks          for each: filename, chunk_size (samples), chunk_bytes (of the file before it is zipped as a whole; in
                earlier releases without the table at its start), and dim, the number of values of all samples if these
                are rows of tokens
config          data_format    the serializer of each leaf of a sample
                data_spec      the tree of leaves of a sample
                compression    null or "zstd", or that with a level
                compression_level    the zipped unit: the "chunk", also if it is missing, a "batch" of samples, or each
                                     "sample"
                types          types of the samples; if all are JSON, they are stored as rows of Arrow
                item_loader    reader of the chunks: "PyTreeLoader", also if it is missing, or "TokensLoader"
                encryption     null
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError, IndexFormatError, ShardCorruptError, UnsupportedError
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.algorithms import ZSTD_HEAD_BYTES, check_algorithm, declared_zstd_bytes
from lightning_streaming.formats.arrow.rows import PlainArrow, plain_arrow
from lightning_streaming.formats.arrow.values import require_pyarrow
from lightning_streaming.formats.litdata.chunks import ArrowChunk, FramedChunk, PlainChunk, TokensChunk, has_arrow_rows
from lightning_streaming.formats.litdata.leaves import item_bytes, leaf_decoder
from lightning_streaming.formats.litdata.samples import (
    LitDataDecoder,
    PlainLeaves,
    parse_tree,
    plain_blocks,
    plain_leaves,
    sample_decoder,
    unsafe_leaves,
)
from lightning_streaming.formats.mds import table_bytes
from lightning_streaming.formats.shard_format import PlainRows, ShardReader, StoredFiles, described, other_shard
from lightning_streaming.formats.shard_table import INDEX_BASENAME, FileInfo, ShardInfo, check_columns, entry_error
from lightning_streaming.formats.values import brief

_NAME = "litdata"
_JSON_KINDS = frozenset({"str", "int", "float", "bool", "bytes", "null", "list", "map", "struct"})
_JSON_SERIALIZERS = frozenset({"str", "text", "int", "float", "bool", "bytes", "json", "pickle"})


@dataclass(frozen=True, slots=True)
class LitDataFormat:
    """Chunks of litData."""

    block_length: int | None
    """Values of each sample of data for ``TokensLoader``; the rest of a chunk is not read. Else None."""
    allow_unsafe_types: bool = False
    """Whether leaves may be unpickled, which runs code of their author."""
    as_files: frozenset[str] = frozenset()
    """Columns whose image files are returned as bytes."""

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:  # noqa: ARG002
        """Yield the shards that litData's index lists, in its order; see :class:`ShardFormat`. No chunk is read."""
        index = files.read_if_there(INDEX_BASENAME)
        if index is None:
            raise ConfigError(
                f"{files.shown} has no {INDEX_BASENAME}, so litData did not finish it",
                hint="pass the output_dir of litdata.optimize",
                path=files.shown,
            )
        try:
            yield from self._shards(_parse_index(index), files)
        except (IndexFormatError, UnsupportedError) as error:
            where = files.shown_file(INDEX_BASENAME)
            raise type(error)(f"{where}: {shortened(str(error.args[0]))}", hint=error.hint, path=where) from None
        except ShardCorruptError as error:
            text = shortened(str(error.args[0]))
            raise ShardCorruptError(f"{files.shown}: {text}", path=files.shown_file(error.path or "")) from None

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:
        """Raise if a shard could not be read; see :class:`ShardFormat`. ConfigError if a leaf is not supported."""
        facts = _facts_of(info)
        check_columns(info, columns)
        try:
            if "block_length" in facts:
                leaf_decoder(facts["data_format"][0])
            elif facts["arrow"]:
                require_pyarrow()
            else:
                self._decoder(facts, columns)
        except (ConfigError, IndexFormatError) as error:
            raise type(error)(
                f"{info.raw_data.basename} cannot be read: {shortened(str(error.args[0]))}",
                hint=error.hint,
                option=error.option,
                path=info.raw_data.basename,
            ) from None
        if facts["zipped"] is not None:
            check_algorithm("zstd")

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> ShardReader:
        """Open a chunk; see :class:`ShardFormat`."""
        self.check(info, columns)
        facts = _facts_of(info)
        if "block_length" in facts:
            serializer = facts["data_format"][0]
            size = facts["block_length"] * (item_bytes(serializer) or 1)
            return TokensChunk(info, directory, serializer, plain_blocks(serializer, facts["block_length"]), size)
        if facts["zipped"] != "batch" and has_arrow_rows(info, directory):
            return ArrowChunk(info, directory, columns)
        decoder = self._decoder(facts, columns)
        leaves = plain_leaves(facts["data_spec"], facts["data_format"], columns)
        if facts["zipped"] == "batch":
            return FramedChunk(info, directory, decoder, leaves)
        return PlainChunk(info, directory, decoder, leaves, zipped=facts["zipped"] == "sample")

    def _decoder(self, facts: Mapping[str, Any], columns: Sequence[str] | None) -> LitDataDecoder:
        unsafe, as_files = self.allow_unsafe_types, self.as_files
        return sample_decoder(
            facts["data_spec"], facts["data_format"], columns, allow_unsafe_types=unsafe, as_files=as_files
        )

    def _shards(self, index: _Index, files: StoredFiles) -> Iterator[ShardInfo]:
        value_bytes = self._value_bytes(index)
        facts: dict[str, Any] = {"data_format": list(index.data_format), "data_spec": index.data_spec}
        facts |= {"zipped": index.zipped, "arrow": index.has_arrow_rows}
        if self.block_length is not None:
            facts["block_length"] = self.block_length
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
                facts,
                compression=None if stored is None else index.compression,
                zip_data=stored,
            )

    def _value_bytes(self, index: _Index) -> int | None:
        """Return the bytes of each value of rows of tokens; None for other samples.

        Raises:
            ConfigError: A block length is missing, or given for other samples.
        """
        if not index.has_tokens:
            if self.block_length is not None:
                raise ConfigError(
                    f"block_length is {self.block_length}, but this data is not for TokensLoader, so it has no blocks",
                    hint="leave block_length out",
                    option="block_length",
                )
            return None
        if self.block_length is None:
            raise ConfigError(
                "this data is for TokensLoader, so it needs block_length, the tokens of a sample",
                option="block_length",
            )
        size = item_bytes(index.data_format[0]) if len(index.data_format) == 1 else None
        tree = parse_tree(index.data_spec, len(index.data_format))
        if size is None or index.zipped is not None or not tree.is_leaf:
            raise IndexFormatError(f"data_format must be one row of tokens, but is {brief(index.data_format)}")
        return size


def litdata_plain_kind(info: ShardInfo, columns: Sequence[str] | None) -> PlainArrow | PlainLeaves | PlainRows | None:
    """Return what shards share whose samples may be plain together; None if the samples of this one are not.

    Args:
        info: The shard, as its index describes it.
        columns: The requested columns, which the shard has; None for all.

    Raises:
        IndexFormatError: Its entry in the index is not of this format.
    """
    facts = _facts_of(info)
    if "block_length" in facts:
        return plain_blocks(facts["data_format"][0], facts["block_length"])
    if facts["arrow"] and facts["zipped"] != "batch":
        serializers = ["int" if name == "bool" else name for name in facts["data_format"]]
        encodings = parse_tree(facts["data_spec"], len(serializers)).encodings(serializers)
        return plain_arrow({name: kind for name, kind in encodings.items() if columns is None or name in columns})
    return None if facts["zipped"] == "sample" else plain_leaves(facts["data_spec"], facts["data_format"], columns)


def litdata_unsafe_columns(info: ShardInfo) -> list[str]:
    """Return the columns of a shard whose values can run code of their author when they are read.

    Raises:
        IndexFormatError: Its entry in the index is not of this format.
        ConfigError: Its samples have types that are not supported.
    """
    facts = _facts_of(info)
    return [] if facts["arrow"] else unsafe_leaves(facts["data_spec"], facts["data_format"])


# --- the index ---


@dataclass(frozen=True, slots=True)
class _ChunkEntry:
    """An entry of the list of chunks."""

    filename: str
    samples: int
    bytes: int
    dim: int | None


@dataclass(frozen=True, slots=True)
class _Index:
    """The index of litData."""

    chunks: tuple[_ChunkEntry, ...]
    data_format: tuple[str, ...]
    data_spec: str
    compression: str | None
    """Compression of whole chunks."""
    zipped: str | None
    """The zipped unit within chunks: a ``batch`` or a ``sample``."""
    has_tokens: bool
    has_arrow_rows: bool
    """Whether its types allow rows of Arrow; each chunk decides."""


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
            "the chunks are encrypted, which is not supported", hint="write the data without encryption"
        )
    if loader not in ("PyTreeLoader", "TokensLoader") or "format" in config:
        raise UnsupportedError(
            f"the chunks are for {brief(config.get('format', loader))}; supported are PyTreeLoader and TokensLoader",
            hint="write the data for one of these",
        )
    return _index(config, chunks, loader)


def _index(config: dict[str, Any], chunks: tuple[_ChunkEntry, ...], loader: str) -> _Index:
    data_format = _take(config, "data_format", list)
    if not data_format or not all(isinstance(name, str) for name in data_format):
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
    """Return whether samples are dicts of JSON values and bytes only, which litData writes as rows of Arrow."""
    pending = [types]
    while pending:
        fields = pending.pop()
        if not isinstance(fields, dict) or not fields:
            return False
        for value in fields.values():
            field = value if isinstance(value, dict) else {"type": value}
            if not isinstance(field.get("type"), str) or field["type"] not in _JSON_KINDS:
                return False
            pending += [field["fields"]] if field.get("fields") else []
            pending += [{"": field["value"]}] if field.get("value") else []
    return True


def _chunk(entry: Any) -> _ChunkEntry:
    if type(entry) is not dict:
        raise IndexFormatError(f"a chunk must be a JSON object, but is {brief(entry)}")
    name = _take(entry, "filename", str)
    samples, size = _take(entry, "chunk_size", int), _take(entry, "chunk_bytes", int)
    dim = _take(entry, "dim", int) if entry.get("dim") is not None else None
    if min(samples, size, dim or 0) < 0:
        raise IndexFormatError(f"chunk {brief(name)} must not have negative numbers, but is {brief(entry)}")
    return _ChunkEntry(name, samples, size, dim)


def _take(entry: Mapping[str, Any], key: str, kind: type) -> Any:
    if type(entry.get(key)) is not kind:
        raise IndexFormatError(f"{key} must be of type {kind.__name__}, but is {brief(entry.get(key))}")
    return entry[key]


def _is_without_tables(index: _Index, files: StoredFiles) -> bool:
    """Return whether ``chunk_bytes`` of zipped files exclude their tables. One release writes all, so one file decides.

    Raises:
        ShardCorruptError: The file agrees with neither.
        StorageError: It could not be read.
        MissingDependencyError: The package that decompresses it is not installed.
    """
    first = next((chunk for chunk in index.chunks if chunk.filename in files.sizes()), None)
    if first is None or _raw_name(first, index.compression) == first.filename:
        return False
    try:
        actual = declared_zstd_bytes(files.read_range(first.filename, 0, ZSTD_HEAD_BYTES))
    except ShardCorruptError as error:
        raise ShardCorruptError(f"{first.filename}: {error}", path=first.filename) from None
    if actual - first.bytes not in (0, table_bytes(first.samples)):
        raise ShardCorruptError(
            f"{first.filename} must hold {first.bytes} bytes by {INDEX_BASENAME}, but states {actual}",
            path=first.filename,
        )
    return actual != first.bytes


def _raw_name(chunk: _ChunkEntry, compression: str | None) -> str:
    return chunk.filename if compression is None else chunk.filename.replace(f".{compression}", "")


def _files(
    chunk: _ChunkEntry, compression: str | None, sizes: Mapping[str, int], *, without_tables: bool
) -> tuple[FileInfo, FileInfo | None]:
    """Return the raw file of a chunk, and the stored one if it is zipped as a whole."""
    table, raw_name = table_bytes(chunk.samples), _raw_name(chunk, compression)
    # litData's reader of a local directory unzips chunks there, and deletes the zipped ones.
    name = chunk.filename if chunk.filename in sizes else raw_name
    size = sizes.get(name)
    if size is None:
        raise ShardCorruptError(f"{chunk.filename} is missing, but {INDEX_BASENAME} lists it", path=chunk.filename)
    stored = FileInfo(basename=name, bytes=size, hashes={})
    if raw_name != name:
        raw_bytes = chunk.bytes + (table if without_tables else 0)
        return FileInfo(basename=raw_name, bytes=raw_bytes, hashes={}), stored
    if size - chunk.bytes not in (0, table):
        raise ShardCorruptError(f"{name} must have {chunk.bytes} bytes by {INDEX_BASENAME}, but has {size}", path=name)
    return stored, None


def _values(chunk: _ChunkEntry, raw_bytes: int, value_bytes: int) -> int:
    """Return the number of values of a chunk of tokens. If its first sample is empty, litData does not state it."""
    count, rest = divmod(raw_bytes - table_bytes(chunk.samples), value_bytes)
    if count < 0 or rest or chunk.dim not in (None, count):
        raise IndexFormatError(
            f"{chunk.filename} must have room for dim values of {value_bytes} bytes each after its offsets, but has "
            f"{raw_bytes} bytes, and dim is {chunk.dim}",
            path=chunk.filename,
        )
    return count


def _facts_of(info: ShardInfo) -> dict[str, Any]:
    """Return the facts about all shards in a shard's entry.

    Raises:
        IndexFormatError: It is not of this format.
    """
    try:
        facts = described(info)
        is_valid = (
            all(isinstance(name, str) for name in facts["data_format"])
            and isinstance(facts["data_spec"], str)
            and facts["zipped"] in (None, "batch", "sample")
            and isinstance(facts["arrow"], bool)
            and ("block_length" not in facts or _is_blocks(facts))
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise entry_error(info, "does not describe a chunk of litData", hint="create the index again")
    return facts


def _is_blocks(facts: Mapping[str, Any]) -> bool:
    length = facts["block_length"]
    return type(length) is int and length > 0 and item_bytes(facts["data_format"][0]) is not None
