"""Split shards: ``json``, ``csv``, ``tsv`` and ``xsv``, each a text file and a meta file.

    data file    header (json has none), then rows back to back
    meta file    uint32 n, the number of samples
                 uint32 offsets[n + 1] in the data file: where each row starts, and where the last one ends
                 config, JSON text up to the end

All integers are little-endian. A row is a sample as JSON text, or as fields with a separator between them, and its
newline. The config repeats the columns of the index, which is authoritative.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, ShardCorruptError
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.encodings import Encoding, encoding
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.mds import (
    MappedShard,
    check_names,
    check_shard_bytes,
    read_places,
    shard_bytes,
    write_offsets,
)
from lightning_streaming.formats.shard_table import check_columns, entry_error
from lightning_streaming.formats.values import brief, check_type

_FORMATS = ("json", "csv", "tsv", "xsv")
_SEPARATORS = {"csv": ",", "tsv": "\t"}
_COLUMN_TYPES: Mapping[str, type[str | int | float]] = {"str": str, "int": int, "float": float}
"""Encodings of columns of split shards, with their Python types."""
_AS_TEXT: Mapping[str, str] = {"str": "str", "int": "str_int", "float": "str_float"}
"""MDS encodings that write the same text."""
_TEXT = encoding("str")
_JSON = encoding("json")

# --- samples and rows ---


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitLayout:
    """Encoder and decoder of rows of a split dataset; created by :func:`make_split_layout`."""

    format: str
    """``json``, ``csv``, ``tsv`` or ``xsv``."""
    names: tuple[str, ...]
    """Column names, in the order they are stored; a writer sorts them."""
    encoding_names: tuple[str, ...]
    """``str``, ``int`` or ``float``, for each column."""
    newline: str
    """End of every row."""
    separator: str | None
    """Text between two fields; None for json."""
    header: bytes
    """Start of a data file: the row of the names, or nothing."""
    smallest_bytes: int
    """Smallest size of a row."""

    @property
    def schema(self) -> dict[str, Any]:
        """The keys by which an index describes these columns."""
        if self.format == "json":
            return {"columns": dict(zip(self.names, self.encoding_names, strict=True)), "newline": self.newline}
        schema = {"column_names": self.names, "column_encodings": self.encoding_names, "newline": self.newline}
        return schema | {"separator": self.separator} if self.format == "xsv" else schema

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """Encode a sample as a row with its newline. Other keys than the columns are ignored.

        Raises:
            EncodingError: A column is missing, its value has another type, or its text would be read as several
                fields or rows.
        """
        try:
            values = [sample[name] for name in self.names]
        except KeyError as error:
            names = ", ".join(map(repr, sample)) or "none"
            raise EncodingError(f"column {error.args[0]!r} is missing; the sample has {names}") from None
        return self._join(values) + self.newline.encode()

    def decode(self, row: bytes | memoryview, columns: Container[str] | None = None) -> dict[str, Any]:
        """Decode a row.

        Args:
            row: One row, with its newline.
            columns: Names of the columns to decode; None for all.

        Raises:
            ShardCorruptError: It is not one row.
            EncodingError: A field is not one of its column's type.
        """
        data, newline = bytes(row), self.newline.encode()
        if not data.endswith(newline):
            raise ShardCorruptError(f"expected a row that ends in {newline!r}, but found {brief(data[-40:])}")
        return self._split(data[: len(data) - len(newline)], columns)

    def _join(self, values: Sequence[Any]) -> bytes:
        """Return the row of a sample's values, in column order, without the newline."""
        raise NotImplementedError

    def _split(self, body: bytes, columns: Container[str] | None) -> dict[str, Any]:
        """Return the requested columns of a row without its newline."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class _JsonLayout(SplitLayout):
    """Rows that are JSON objects with sorted keys, of ASCII characters only.

    Other keys than the columns are ignored when a row is read.
    """

    types: tuple[type[str | int | float], ...]
    """The type of each column."""

    def _join(self, values: Sequence[Any]) -> bytes:
        for name, kind, value in zip(self.names, self.types, values, strict=True):
            _check_value(name, kind, value)
            if kind is str:
                _encode_field(name, _TEXT, value)  # JSON accepts half a surrogate pair, and joins two halves
        try:
            return json.dumps(dict(zip(self.names, values, strict=True)), sort_keys=True).encode()
        except ValueError as error:
            raise EncodingError(f"expected numbers that Python can write in digits ({error})") from None

    def _split(self, body: bytes, columns: Container[str] | None) -> dict[str, Any]:
        values = _JSON.decode(body)
        if type(values) is not dict:
            raise EncodingError(f"expected a JSON object, but found {brief(values)}")
        sample: dict[str, Any] = {}
        for name, kind in zip(self.names, self.types, strict=True):
            if columns is not None and name not in columns:
                continue
            if name not in values:
                raise EncodingError(f"column {name!r} is missing; the row has {brief(list(values))}")
            _check_value(name, kind, values[name])
            sample[name] = values[name]
        return sample


@dataclass(frozen=True, kw_only=True, slots=True)
class _SeparatedLayout(SplitLayout):
    """Rows that are fields with a separator between them: nothing is quoted, nothing escaped."""

    encodings: tuple[Encoding, ...]
    """Encoding of each field."""
    between: bytes
    """The separator."""
    end: bytes
    """The newline."""

    def _join(self, values: Sequence[Any]) -> bytes:
        fields = [_encode_field(*column) for column in zip(self.names, self.encodings, values, strict=True)]
        return _join_fields(self.names, fields, self.between, self.end)

    def _split(self, body: bytes, columns: Container[str] | None) -> dict[str, Any]:
        # Bytes can be split before they are decoded: in UTF-8 no character is part of another.
        fields = body.split(self.between)
        if len(fields) != len(self.names):
            raise ShardCorruptError(f"expected {len(self.names)} fields, but found {len(fields)} in {brief(body)}")
        if self.end in body and any(self.end in field for field in fields):
            raise ShardCorruptError(f"expected one row, but found more in {brief(body)}")
        sample: dict[str, Any] = {}
        for name, column_encoding, field in zip(self.names, self.encodings, fields, strict=True):
            if columns is not None and name not in columns:
                continue
            try:
                sample[name] = column_encoding.decode(field)
            except EncodingError as error:
                raise error.with_context(f"column {name!r}") from error
        return sample


def _join_fields(names: tuple[str, ...], fields: list[bytes], separator: bytes, newline: bytes) -> bytes:
    """Join fields to a row that is split into the same fields again.

    With the separator ``||`` it is not enough that no field contains it: ``a|`` and ``b`` would be read as ``a`` and
    ``|b``.
    """
    body = separator.join(fields)
    split = body.split(separator)
    if split == fields and not (newline in body and any(newline in field for field in fields)):
        return body
    columns = zip(names, fields, split, strict=False)  # a field with a separator is split into more
    name, field = next((name, field) for name, field, back in columns if field != back or newline in field)
    raise EncodingError(
        f"column {name!r}: text must not contain the newline {newline.decode()!r}, nor, also where it meets one, the "
        f"separator {separator.decode()!r}, as nothing is quoted, but got {brief(field.decode())}",
        hint="write json or MDS instead",
    )


def _check_value(name: str, kind: type, value: object) -> None:
    try:
        check_type(value, kind)
    except EncodingError as error:
        raise error.with_context(f"column {name!r}") from None


def _encode_field(name: str, column_encoding: Encoding, value: object) -> bytes:
    try:
        return column_encoding.encode(value)
    except EncodingError as error:
        raise error.with_context(f"column {name!r}") from None


# --- columns ---


def make_split_layout(
    shard_format: str, columns: Mapping[str, str], newline: str = "\n", separator: str | None = None
) -> SplitLayout:
    """Return the layout of the columns of a new dataset.

    Args:
        shard_format: ``json``, ``csv``, ``tsv`` or ``xsv``.
        columns: Column name to ``str``, ``int`` or ``float``.
        newline: End of every row.
        separator: Text between two fields; only for ``xsv``, which needs it.

    Raises:
        ConfigError: The format or an encoding is unknown, there are no columns, ``separator`` is given for another
            format than xsv or is missing for xsv, or a column's name cannot be written.
    """
    names = tuple(sorted(columns))
    return _compile(shard_format, names, tuple(columns[name] for name in names), newline, separator)


def read_split_layout(info: ShardInfo) -> SplitLayout:
    """Return the layout of a shard's samples, as its index describes it.

    Raises:
        IndexFormatError: The index describes invalid columns.
    """
    schema = info.schema
    if info.format == "json":
        names = tuple(sorted(schema["columns"]))
        encoding_names = tuple(schema["columns"][name] for name in names)
    else:
        names, encoding_names = schema["column_names"], schema["column_encodings"]
    try:
        return _compile(info.format, names, encoding_names, schema["newline"], schema.get("separator"))
    except ConfigError as error:
        raise entry_error(info, f"cannot be read: {shortened(str(error))}") from None


@lru_cache(maxsize=1024)
def _compile(
    shard_format: str, names: tuple[str, ...], encoding_names: tuple[str, ...], newline: str, separator: str | None
) -> SplitLayout:
    if shard_format not in _FORMATS:
        raise ConfigError(f"format must be one of {', '.join(_FORMATS)}, but got {shard_format!r}", option="format")
    check_names(names, encoding_names)
    for name, encoding_name in zip(names, encoding_names, strict=True):
        _check_text("a column's name", name, "columns", may_be_empty=True)
        if encoding_name not in _COLUMN_TYPES:
            raise ConfigError(
                f"columns of {shard_format} shards must be {', '.join(_COLUMN_TYPES)}, but column {name!r} is "
                f"{encoding_name!r}",
                hint="write MDS, which takes every encoding",
                option="columns",
            )
    if (separator is not None) != (shard_format == "xsv"):
        problem = (
            "xsv needs a separator" if shard_format == "xsv" else f"{shard_format} takes no separator, only xsv does"
        )
        raise ConfigError(f"{problem}, but got {separator!r}", option="separator")
    separator = separator if shard_format == "xsv" else _SEPARATORS.get(shard_format)
    _check_text("newline", newline, "newline", may_be_empty=shard_format == "json")  # whose rows have an end
    end = newline.encode()
    common: dict[str, Any] = {
        "format": shard_format,
        "names": names,
        "encoding_names": encoding_names,
        "newline": newline,
        "separator": separator,
    }
    if separator is None:
        types = tuple(_COLUMN_TYPES[name] for name in encoding_names)
        return _JsonLayout(**common, header=b"", smallest_bytes=len(b"{}") + len(end), types=types)
    _check_text("separator", separator, "separator")
    between = separator.encode()
    try:
        header = _join_fields(names, [name.encode() for name in names], between, end) + end
    except EncodingError as error:
        raise ConfigError(f"the columns' names cannot be a header: {error}", option="columns") from None
    encodings = tuple(encoding(_AS_TEXT[name]) for name in encoding_names)
    smallest = (len(names) - 1) * len(between) + len(end)
    return _SeparatedLayout(
        **common, header=header, smallest_bytes=smallest, encodings=encodings, between=between, end=end
    )


def _check_text(what: str, text: str, option: str, *, may_be_empty: bool = False) -> None:
    try:
        is_valid = bool(text.encode()) or may_be_empty
    except (UnicodeEncodeError, AttributeError):
        is_valid = False
    if not is_valid:
        kind = "text that UTF-8 can hold" + ("" if may_be_empty else ", and not empty")
        raise ConfigError(f"{what} must be {kind}, but got {brief(text)}", option=option)


# --- files ---


def meta_bytes(offsets: Sequence[int] | NDArray[np.int64], config: bytes) -> bytes:
    """Return the meta file of a shard.

    Args:
        offsets: Start of each row in the data file, and end of the last; of shape (samples + 1,).
        config: The result of :func:`~lightning_streaming.formats.mds.encode_config`.

    Raises:
        ConfigError: One of the two files would have 4 GiB or more.
    """
    table = np.asarray(offsets, np.int64)
    check_shard_bytes(int(table[-1]))
    check_shard_bytes(shard_bytes(len(table) - 1, 0, len(config)))
    return write_offsets(table) + config


@dataclass(frozen=True, slots=True)
class RowDecoder:
    """Decoder of rows of a layout."""

    layout: SplitLayout
    columns: Container[str] | None
    """Names of the columns to decode; None for all."""

    @property
    def smallest_bytes(self) -> int:
        return self.layout.smallest_bytes

    def decode(self, data: memoryview, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        if start > len(self.layout.header):  # the end of a row can look like a whole one
            newline = self.layout.newline.encode()
            before = bytes(data[start - len(newline) : start])
            if before != newline:
                raise ShardCorruptError(
                    f"expected {newline!r} before byte {start}, where it starts, but found {before!r}"
                )
        return self.layout.decode(data[start:stop], self.columns)


class SplitReader(MappedShard):
    """A data file and its meta file."""

    def __init__(self, info: ShardInfo, directory: Path, *, columns: Sequence[str] | None = None) -> None:
        """Map the raw files and check their sizes, the offsets and the header; errors are those of ``open_shard``."""
        layout = read_split_layout(info)
        check_columns(info, columns)
        super().__init__(info, directory, RowDecoder(layout, None if columns is None else frozenset(columns)))
        read_places(self._table, info, str(self._table_path), len(layout.header), layout.smallest_bytes)
        header = bytes(self._data[: len(layout.header)])
        if header != layout.header:
            raise ShardCorruptError(
                f"{self._path} must start with {brief(layout.header)}, its columns, but starts with {brief(header)}",
                path=str(self._path),
            )
