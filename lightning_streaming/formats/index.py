"""``index.json``: the shards that a dataset consists of, read and written.

A writer's shards differ only in names, sizes and hashes. The text of a shard that was parsed and checked becomes a
regular expression with groups for these, and all other characters unchanged. A text that matches has the same keys and
other values, so only the groups are checked. That is several times faster than parsing each as JSON. Memory holds the
table, and a few megabytes of the text at a time.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, IndexFormatError
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.algorithms import extension
from lightning_streaming.formats.shard_table import (
    INDEX_BASENAME,
    INDEX_VERSION,
    MAX_RAW_BYTES,
    OTHER_FORMATS,
    PART,
    FileInfo,
    ShardInfo,
    ShardKind,
    ShardTable,
    TableBuilder,
    shared_entry,
    table_of,
)
from lightning_streaming.formats.values import brief
from lightning_streaming.units import parse_bytes

__all__ = [
    "INDEX_BASENAME",
    "INDEX_VERSION",
    "MAX_RAW_BYTES",
    "DatasetIndex",
    "FileInfo",
    "ShardInfo",
    "dump_index",
    "dump_merged_index",
    "parse_index",
    "read_index",
]


_Type = TypeVar("_Type")

Read = Callable[[int], bytes]
"""Returns up to that many bytes of a file, none at its end."""


class DatasetIndex:
    """A dataset: its shards in sample order.

    Args:
        shards: The shards; may be empty.
        data_digest: The :attr:`data_digest`, if it is known already.
    """

    def __init__(self, shards: Iterable[ShardInfo], data_digest: str | None = None) -> None:
        self.shards: ShardTable = table_of(shards)
        if data_digest is not None:
            self.data_digest = data_digest

    @cached_property
    def num_samples(self) -> int:
        """Number of samples of all shards."""
        return int(self.shards.samples.sum())

    @cached_property
    def data_digest(self) -> str:
        """Digest that identifies the data, independent of location and storage: names, samples, sizes and hashes."""
        return self.shards.digest()

    def samples_per_shard(self) -> NDArray[np.int64]:
        """Return the samples of each shard, of shape (shards,); must not be changed."""
        return self.shards.samples

    def head(self, shards: int) -> DatasetIndex:
        """Return the dataset with only its first ``shards`` shards."""
        return DatasetIndex(self.shards.head(shards))

    def begins_like(self, other: DatasetIndex) -> bool:
        """Return whether its first shards hold the same data as all shards of another index of the same location."""
        count = len(other.shards)
        if count > len(self.shards) or self.head(count).data_digest != other.data_digest:
            return False
        return not self.shards.has_other_versions(other.shards)

    def __eq__(self, other: object) -> bool:
        return self.shards == other.shards if isinstance(other, DatasetIndex) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DatasetIndex({self.shards!r})"


def dump_index(shards: Iterable[ShardInfo], *, versions: bool = False) -> bytes:
    """Return the text of ``index.json``, byte for byte as the original writer creates it.

    Args:
        shards: The shards in sample order.
        versions: Whether to write the versions of files, which are valid only at the location of the listing.
    """
    return _dumped(b'{"shards": [', shards, f'], "version": {INDEX_VERSION}}}'.encode(), versions=versions)


def dump_merged_index(shards: Iterable[ShardInfo]) -> bytes:
    """Return the text of a merged index, byte for byte as the original creates it: the version is first."""
    return _dumped(f'{{"version": {INDEX_VERSION}, "shards": ['.encode(), shards, b"]}")


def _dumped(start: bytes, shards: Iterable[ShardInfo], end: bytes, *, versions: bool = False) -> bytes:
    text, separator = io.BytesIO(), start
    for shard in shards:
        text.write(separator)
        entry = shard_to_json(shard)
        if not versions:
            for file in filter(None, map(entry.get, _FILE_KEYS)):
                file.pop("version", None)
        text.write(json.dumps(entry, sort_keys=True).encode())
        separator = b", "
    text.write(end if separator == b", " else start + end)
    return text.getvalue()


def parse_index(data: bytes, source: str) -> DatasetIndex:
    """Parse the text of ``index.json``. Unknown keys are ignored.

    All formats of the specification are parsed; :func:`~lightning_streaming.formats.shard.check_shard` checks whether a
    shard can also be read.

    Args:
        data: The whole file.
        source: Its path or URL, for errors.

    Raises:
        IndexFormatError: It is not an index of version 2, or a shard contradicts itself or has a path outside the
            dataset's directory; the message has the number of the shard.
    """
    return read_index(io.BytesIO(data).read, source)


def read_index(read: Read, source: str) -> DatasetIndex:
    """Read ``index.json`` without holding its text, which may be hundreds of megabytes.

    Args:
        read: Returns up to that many bytes of the file, from its beginning, and none at its end.
        source: Its path or URL, for errors.

    Raises:
        IndexFormatError: As for :func:`parse_index`.
    """
    try:
        shards = _read_root(_Text(read))
    except IndexFormatError as error:
        raise IndexFormatError(f"{source}: {shortened(str(error.args[0]))}", hint=error.hint, path=source) from None
    if shards.error is not None:
        raise IndexFormatError(
            f"{source}, shard {len(shards.builder)}: {shortened(str(shards.error.args[0]))}",
            hint=shards.error.hint,
            path=source,
        )
    return DatasetIndex(shards.builder.table())


# --- one shard ---

_SCHEMA_KEYS = {
    "mds": ("column_names", "column_encodings", "column_sizes"),
    "json": ("columns", "newline"),
    "csv": ("column_names", "column_encodings", "newline"),
    "tsv": ("column_names", "column_encodings", "newline"),
    "xsv": ("column_names", "column_encodings", "newline", "separator"),
    **dict.fromkeys(OTHER_FORMATS, ("column_names", "column_encodings", "described")),
}
_FILE_KEYS = ("raw_data", "raw_meta", "zip_data", "zip_meta")
_PARALLEL = ("column_names", "column_encodings", "column_sizes")
"""Lists with an item for each column, if a format has them."""


def parse_shard(entry: Any, schema_before: Mapping[str, Any]) -> ShardInfo:
    """Parse one entry of the list of shards.

    Args:
        entry: The parsed JSON.
        schema_before: A schema that is shared if it is equal.

    Raises:
        IndexFormatError: It is not the entry of a shard.
    """
    if type(entry) is not dict:
        raise IndexFormatError(f"a shard must be a JSON object, but is {brief(entry)}")
    check_version(entry)
    shard_format = _take(entry, "format", str)
    schema = _take_schema(entry, shard_format)
    has_meta = shard_format != "mds" and (shard_format not in OTHER_FORMATS or "raw_meta" in entry)
    shard = ShardInfo(
        format=shard_format,
        samples=_take(entry, "samples", int),
        compression=_take_compression(entry),
        hashes=_take_texts(entry, "hashes"),
        size_limit=_take_size_limit(entry),
        raw_data=_take_file(entry, "raw_data"),
        zip_data=_take_file(entry, "zip_data") if entry.get("zip_data") is not None else None,
        raw_meta=_take_file(entry, "raw_meta") if has_meta else None,
        zip_meta=_take_file(entry, "zip_meta") if has_meta and entry.get("zip_meta") is not None else None,
        schema=schema_before if schema == schema_before else schema,
        column_bytes=_take(entry, "column_bytes", str) if "column_bytes" in entry else None,
    )
    with_offsets = shard.raw_meta or shard.raw_data
    if shard_format not in OTHER_FORMATS and 4 * (shard.samples + 2) > with_offsets.bytes:
        raise IndexFormatError(
            f"{with_offsets.basename} has {with_offsets.bytes} bytes, too few for offsets of {shard.samples} samples",
            path=with_offsets.basename,
        )
    return shard


def check_version(entry: dict[str, Any]) -> None:
    """Raise IndexFormatError if an entry has another version.

    Raises:
        IndexFormatError: The version differs, or is missing.
    """
    version = _take(entry, "version", int)
    if version != INDEX_VERSION:
        raise IndexFormatError(f"only version {INDEX_VERSION} is supported, but version is {version}")


def shard_to_json(shard: ShardInfo) -> dict[str, Any]:
    """Return the entry of a shard as JSON values."""
    entry = shared_entry(shard.schema, shard.format, shard.compression, shard.hashes, shard.size_limit)
    entry |= {
        "raw_data": _file_to_json(shard.raw_data),
        "samples": shard.samples,
        "zip_data": shard.zip_data and _file_to_json(shard.zip_data),
    }
    if shard.raw_meta is not None:
        entry["raw_meta"] = _file_to_json(shard.raw_meta)
        entry["zip_meta"] = shard.zip_meta and _file_to_json(shard.zip_meta)
    if shard.column_bytes is not None:
        entry["column_bytes"] = shard.column_bytes
    return entry


def _file_to_json(file: FileInfo) -> dict[str, Any]:
    entry = {"basename": file.basename, "bytes": file.bytes, "hashes": dict(file.hashes)}
    return {**entry, "version": file.version} if file.version else entry


def _take(entry: dict[str, Any], key: str, kind: type[_Type]) -> _Type:
    """Return the value of ``key``, which must exist and have this JSON type."""
    if key not in entry:
        raise IndexFormatError(f"the key {key!r} is missing")
    value = entry[key]
    if type(value) is not kind:  # not isinstance: true is not a number here
        raise IndexFormatError(f"{key} must be {kind.__name__}, but is {brief(value)}")
    return value


def _take_file(entry: dict[str, Any], key: str) -> FileInfo:
    file = _take(entry, key, dict)
    try:
        return FileInfo(
            basename=_take(file, "basename", str),
            bytes=_take(file, "bytes", int),
            hashes=_take_text_mapping(file, "hashes"),
            version=_take(file, "version", str) if "version" in file else "",
        )
    except IndexFormatError as error:
        raise IndexFormatError(f"{key}: {error}") from None


def _take_compression(entry: dict[str, Any]) -> str | None:
    """Return a known algorithm, or None."""
    if entry.get("compression") is None:
        return None
    compression = _take(entry, "compression", str)
    if compression == PART and entry.get("format") in OTHER_FORMATS:
        return compression
    try:
        extension(compression)
    except ConfigError as error:
        raise IndexFormatError(str(error)) from None
    return compression


def _take_size_limit(entry: dict[str, Any]) -> int | None:
    """Return the bytes per shard, which may be written as ``"64mb"``, or None."""
    size_limit = entry.get("size_limit")
    if size_limit is None or type(size_limit) is int:
        return size_limit
    try:
        return parse_bytes(_take(entry, "size_limit", str), "size_limit")
    except (ValueError, OverflowError) as error:  # the latter for "9…9.5kb" of hundreds of digits
        raise IndexFormatError(f"size_limit is invalid: {error}") from None


def _take_schema(entry: dict[str, Any], shard_format: str) -> dict[str, Any]:
    """Return the format's keys of columns; lists become tuples."""
    if shard_format not in _SCHEMA_KEYS:
        raise IndexFormatError(f"format must be one of {', '.join(_SCHEMA_KEYS)}, but is {shard_format!r}")
    schema = {key: _SCHEMA_FIELDS[key](entry, key) for key in _SCHEMA_KEYS[shard_format]}
    lengths = {key: len(schema[key]) for key in _PARALLEL if key in schema}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise IndexFormatError(f"lists of columns must have the same length, but {counts}")
    return schema


def _take_texts(entry: dict[str, Any], key: str) -> tuple[str, ...]:
    texts = _take(entry, key, list)
    if not all(type(text) is str for text in texts):
        raise IndexFormatError(f"{key} must be a list of str, but is {brief(texts)}")
    return tuple(texts)


def _take_text_mapping(entry: dict[str, Any], key: str) -> dict[str, str]:
    texts = _take(entry, key, dict)
    if not all(type(text) is str for text in texts.values()):
        raise IndexFormatError(f"{key} must map str to str, but is {brief(texts)}")
    return texts


def _take_sizes(entry: dict[str, Any], key: str) -> tuple[int | None, ...]:
    """Return a list of fixed sizes in bytes; None, in the file also 0, if the size varies."""
    sizes = _take(entry, key, list)
    if not all(size is None or (type(size) is int and size >= 0) for size in sizes):
        raise IndexFormatError(f"{key} must be a list of sizes and nulls, but is {brief(sizes)}")
    return tuple(size or None for size in sizes)


_SCHEMA_FIELDS: Mapping[str, Callable[[dict[str, Any], str], Any]] = {
    "column_names": _take_texts,
    "column_encodings": _take_texts,
    "column_sizes": _take_sizes,
    "columns": _take_text_mapping,
    "newline": partial(_take, kind=str),
    "separator": partial(_take, kind=str),
    "described": partial(_take, kind=str),
}

# --- shards of one kind ---

_NUMBER = r"(0|[1-9][0-9]{0,17})"
# Names that are certainly inside their directory and have a valid length; others are parsed one by one.
_NAME = r'"(?=[^"]{1,255}")((?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*(?!index\.json")[A-Za-z0-9_-][A-Za-z0-9._-]*)"'
_HASH = r'"([ !#-\[\]-~]*)"'
_SPACE = re.compile(r"[ \t\n\r]*")
_TOKEN = re.compile(r'[ \t\n\r]*("(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^ \t\n\r{}\[\]:,"]+)', re.DOTALL)

_Path = tuple[str, ...]
"""Keys from the outside in, like ``("raw_data", "bytes")``; the key of list items is "[]"."""


@dataclass(frozen=True, kw_only=True)
class _Template:
    """The common text of shards of a kind."""

    kind: int
    """Number of the kind in its builder."""
    pattern: str
    """Pattern of a shard and the comma after it, with a group for each value that differs."""
    groups: tuple[_Path, ...]
    """Path of the value of each group."""


def _template_of(text: str, number: int, kind: ShardKind) -> _Template | None:
    """Return the template of a shard's text; None if only a JSON parser can read it.

    Args:
        text: The JSON object, without spaces around it.
        number: Number of its kind.
        kind: Its kind.
    """
    wanted: dict[_Path, str] = {
        ("samples",): _NUMBER,
        **{(name, "bytes"): _NUMBER for name in kind.files},
        **{path: _NAME if path[1:] == ("basename",) else _HASH for path in _text_paths(kind)},
    }
    pieces: list[str] = []
    groups: list[_Path] = []
    done = 0
    for path, start, stop in _values(text):
        if path in groups or any("\\" in key for key in path):  # a key that exists twice, or may
            return None
        if path not in wanted:
            continue
        group = wanted.pop(path)
        if re.fullmatch(group, text[start:stop]) is None:
            return None
        pieces += re.escape(text[done:start]), group
        groups.append(path)
        done = stop
    if wanted:
        return None
    pattern = "".join([*pieces, re.escape(text[done:]), _SPACE.pattern, ",", _SPACE.pattern])
    return _Template(kind=number, pattern=pattern, groups=tuple(groups))


def _text_paths(kind: ShardKind) -> Iterator[_Path]:
    """Yield the paths of a shard's texts, in the order of its table."""
    for name, file in kind.files.items():
        yield name, "basename"
        yield from ((name, "hashes", hash_name) for hash_name in file.hashes)
        if file.version:
            yield name, "version"
    if kind.has_column_bytes:
        yield ("column_bytes",)


def _values(text: str) -> Iterator[tuple[_Path, int, int]]:
    """Yield the path and position of each scalar in a JSON object; escapes in keys are kept."""
    path: list[str] = []
    around: list[str] = []
    key_next = False
    for match in _TOKEN.finditer(text):
        piece = match[1]
        if piece in "{[":
            path.append("[]")
            around.append(piece)
            key_next = piece == "{"
        elif piece in "}]":
            path.pop()
            around.pop()
        elif piece in ",:":
            key_next = piece == "," and around[-1] == "{"
        elif key_next:
            path[-1] = piece[1:-1]
        else:
            yield tuple(path), match.start(1), match.end(1)


def _add_rows(builder: TableBuilder, template: _Template, rows: Sequence[Sequence[str]]) -> bool:
    """Add the shards that a template matched; return False if one is invalid: parsing it raises the error."""
    kind = builder.kind(template.kind)
    columns = dict(zip(template.groups, zip(*rows, strict=True), strict=True))
    samples = list(map(int, columns["samples",]))
    sizes = {name: list(map(int, columns[name, "bytes"])) for name in kind.files}
    raw = [values for name, values in sizes.items() if name.startswith("raw")]
    is_own = kind.example.format not in OTHER_FORMATS
    if (is_own and max(map(max, raw)) > MAX_RAW_BYTES) or max(samples) > MAX_RAW_BYTES:
        return False
    # The offsets of the samples are in the last raw file: the meta file, or the only one.
    if is_own and any(4 * (count + 2) > size for count, size in zip(samples, raw[-1], strict=True)):
        return False
    builder.add_many(template.kind, samples, list(sizes.values()), [columns[path] for path in _text_paths(kind)])
    return True


# --- the whole index ---

_AT_ONCE = 4 * 2**20
"""Bytes read at a time."""
_ENOUGH = 4
"""Bytes that determine the encoding of a JSON text."""
_FEW = 4
"""Shards that are parsed one by one before a template is created for the next ones."""


def _read_root(text: _Text) -> _Shards:
    shards = _Shards()
    if text.peek() != "{":
        root = text.value()
        text.expect_end()
        raise IndexFormatError(f"an index must be a JSON object, but is {brief(root)}")
    root = {}
    for _ in text.items("{", "}"):
        if text.peek() != '"':
            text.fail("expecting a key in double quotes", text.place)
        key = text.value()
        text.expect(":")
        if key == "shards" and text.peek() == "[":
            shards = _Shards()  # of two equal keys the last counts
            shards.read(text)
            root[key] = []
        else:
            root[key] = text.value()
    text.expect_end()
    if "chunks" in root and "config" in root and "shards" not in root:
        raise IndexFormatError("this is an index of litData", hint='read it with format="litdata"')
    check_version(root)
    _take(root, "shards", list)
    return shards


class _Shards:
    """The list of shards, the main part of an index."""

    def __init__(self) -> None:
        self.builder = TableBuilder()
        self.error: IndexFormatError | None = None
        """The error of the first invalid shard; raised only if the whole file is valid JSON."""
        self._template: _Template | None = None
        self._seen: _Template | None = None
        self._pattern: re.Pattern[str] | None = None
        self._one_by_one = 0  # characters of the file before which the template does not apply

    def read(self, text: _Text) -> None:
        """Parse the list, from its opening bracket to its closing one."""
        for _ in text.items("[", "]"):
            if self._pattern is not None and text.offset >= self._one_by_one:
                self._add_alike(text, self._pattern)
            entry = text.value()
            if self.error is None:
                self._add(entry, text)

    def _add_alike(self, text: _Text, pattern: re.Pattern[str]) -> None:
        """Add the following shards of the template, as far as the text was read."""
        assert self._template is not None, "the pattern has one"
        rows, match, content, place = [], pattern.match, text.text, text.place
        while (matched := match(content, place)) is not None:
            rows.append(matched.groups())
            place = matched.end()
        if not rows:
            return
        if _add_rows(self.builder, self._template, rows):
            text.place = place
        else:
            self._one_by_one = text.offset + place - text.place

    def _add(self, entry: Any, text: _Text) -> None:
        """Add the shard that was just parsed."""
        try:
            shard = parse_shard(entry, self.builder.schema_before())
        except IndexFormatError as error:
            self.error, self._pattern = error, None
            return
        number = self.builder.add(shard)
        if len(self.builder) <= _FEW:
            return
        template = _template_of(text.latest(), number, self.builder.kind(number))
        # Created for the second equal shard: for a text that does not repeat, it would be useless.
        if template is not None and template == self._seen and template != self._template:
            self._template, self._pattern = template, re.compile(template.pattern)
        self._seen = template


class _Text:
    """JSON that is read as far as needed."""

    def __init__(self, read: Read) -> None:
        first = b""
        while len(first) < _ENOUGH and (piece := read(_AT_ONCE)):
            first += piece
        self._read = read
        self._decoder = codecs.getincrementaldecoder(json.detect_encoding(first))("surrogatepass")
        self._decode = json.JSONDecoder().raw_decode
        self._dropped = self._began = 0
        self._is_whole = False  # whether everything was read
        self.text = ""
        """The text that was read and not dropped yet."""
        self.place = 0
        """Position in ``text``."""
        self._take(first)

    @property
    def offset(self) -> int:
        """Position in the file, in characters."""
        return self._dropped + self.place

    def latest(self) -> str:
        """Return the text of the value that was just parsed."""
        return self.text[self._began : self.place]

    def items(self, opening: str, closing: str) -> Iterator[None]:
        """Yield before each item of an object or a list, which the caller parses; skip the rest."""
        self.expect(opening)
        if self.peek() != closing:
            yield
            while self.peek() != closing:
                self.expect(",")
                self.peek()
                yield
        self.place += 1

    def peek(self) -> str:
        """Return the next character that is not a space; empty at the end."""
        while True:
            self.place = _SPACE.match(self.text, self.place).end()  # type: ignore[union-attr]  # it always matches
            if self.place < len(self.text) or self._is_whole:
                return self.text[self.place : self.place + 1]
            self._more()

    def expect(self, character: str) -> None:
        """Skip a character.

        Raises:
            IndexFormatError: The next character differs.
        """
        if self.peek() != character:
            self.fail(f"expecting {character!r}", self.place)
        self.place += 1

    def expect_end(self) -> None:
        """Raise IndexFormatError if any text follows the JSON."""
        if self.peek():
            self.fail("extra data", self.place)

    def value(self) -> Any:
        """Parse a value.

        Raises:
            IndexFormatError: It is not JSON.
        """
        self.peek()
        while True:
            try:
                value, end = self._decode(self.text, self.place)
            except (ValueError, RecursionError) as error:
                if self._is_whole or isinstance(error, RecursionError):
                    self.fail(getattr(error, "msg", str(error)), getattr(error, "pos", self.place))
            else:
                # A number at the end of the text may be incomplete.
                if end < len(self.text) or self._is_whole:
                    self._began, self.place = self.place, end
                    return value
            self._more()

    def fail(self, problem: str, place: int) -> NoReturn:
        """Raise IndexFormatError for a text that is not JSON, with the position."""
        raise IndexFormatError(f"an index must be JSON, but {problem} at character {self._dropped + place}")

    def _more(self) -> None:
        """Drop the parsed text, and read at least as much as remains."""
        self._dropped += self.place
        self.text, self.place = self.text[self.place :], 0
        self._take(self._read(max(_AT_ONCE, len(self.text))))

    def _take(self, data: bytes) -> None:
        self._is_whole = not data
        try:
            self.text += self._decoder.decode(data, self._is_whole)
        except UnicodeDecodeError as error:
            raise IndexFormatError(f"an index must be JSON, but {error}") from None
