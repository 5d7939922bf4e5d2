"""Split shards: ``json``, ``csv``, ``tsv`` and ``xsv``, each a data file that people can read and a meta file.

    data file    header (json has none), then rows back to back
    meta file    uint32 n, the number of samples
                 uint32 offsets[n + 1] in the data file: where each row starts, and where the last one ends
                 config, JSON text up to the end

All integers are little-endian. A row is a sample as JSON text, or as fields with a separator between them, and its
newline. The config repeats what the index says of the columns; the index is what we believe.
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

from lightning_streaming.errors import ConfigError, EncodingError, IndexFormatError, ShardCorruptError
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.encodings import Encoding, encoding
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.mds.samples import check_names
from lightning_streaming.formats.mds.shard import (
    MappedShard,
    check_shard_bytes,
    read_places,
    shard_bytes,
    write_offsets,
)
from lightning_streaming.formats.shard_table import check_columns
from lightning_streaming.formats.values import brief, check_type

_FORMATS = ("json", "csv", "tsv", "xsv")
_SEPARATORS = {"csv": ",", "tsv": "\t"}
_COLUMN_TYPES: Mapping[str, type[str | int | float]] = {"str": str, "int": int, "float": float}
"""The encodings that a column of a split shard can have, and the Python type of each."""
_AS_TEXT: Mapping[str, str] = {"str": "str", "int": "str_int", "float": "str_float"}
"""Which MDS encoding writes the same text."""
_TEXT = encoding("str")
_JSON = encoding("json")

# --- samples and rows ---


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitLayout:
    """How samples of a split dataset become rows, and come back; made by :func:`make_split_layout`."""

    format: str
    """``json``, ``csv``, ``tsv`` or ``xsv``."""
    names: tuple[str, ...]
    """Column names, in the order they are stored; a writer sorts them."""
    encoding_names: tuple[str, ...]
    """``str``, ``int`` or ``float``, for each column."""
    newline: str
    """What every row ends in."""
    separator: str | None
    """What is between two fields; None for json."""
    header: bytes
    """What a data file has before its first row: the row of the names, or nothing."""
    smallest_bytes: int
    """Bytes that every row has, whatever its values are."""

    @property
    def schema(self) -> dict[str, Any]:
        """The keys by which an index describes these columns."""
        if self.format == "json":
            return {"columns": dict(zip(self.names, self.encoding_names, strict=True)), "newline": self.newline}
        schema = {"column_names": self.names, "column_encodings": self.encoding_names, "newline": self.newline}
        return schema | {"separator": self.separator} if self.format == "xsv" else schema

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """Turn a sample into a row with its newline. What it holds beside the columns is left out.

        Raises:
            EncodingError: A column is missing, its value has another type, or its text would be taken for more fields
                or rows.
        """
        try:
            values = [sample[name] for name in self.names]
        except KeyError as error:
            found = ", ".join(map(repr, sample)) or "none"
            raise EncodingError(f"column {error.args[0]!r} is missing; the sample has {found}") from None
        return self._join(values) + self.newline.encode()

    def decode(self, row: bytes | memoryview, columns: Container[str] | None = None) -> dict[str, Any]:
        """Turn a row into its columns.

        Args:
            row: One row, with its newline.
            columns: Names of the columns to decode; None for all.

        Raises:
            ShardCorruptError: It is not one row.
            EncodingError: It does not hold what its columns say.
        """
        data, newline = bytes(row), self.newline.encode()
        if not data.endswith(newline):
            raise ShardCorruptError(f"expected a row that ends in {newline!r}, but found {brief(data[-40:])}")
        return self._split(data[: len(data) - len(newline)], columns)

    def _join(self, values: Sequence[Any]) -> bytes:
        """A sample's values, in column order, without the newline."""
        raise NotImplementedError

    def _split(self, body: bytes, columns: Container[str] | None) -> dict[str, Any]:
        """The wanted columns of a row without its newline."""
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
                _encode_field(name, _TEXT, value)  # JSON would take half a surrogate pair, and join two halves
        try:
            return json.dumps(dict(zip(self.names, values, strict=True)), sort_keys=True).encode()
        except ValueError as error:
            raise EncodingError(f"expected numbers that Python can write in digits ({error})") from None

    def _split(self, body: bytes, columns: Container[str] | None) -> dict[str, Any]:
        found = _JSON.decode(body)
        if type(found) is not dict:
            raise EncodingError(f"expected a JSON object, but found {brief(found)}")
        sample: dict[str, Any] = {}
        for name, kind in zip(self.names, self.types, strict=True):
            if columns is not None and name not in columns:
                continue
            if name not in found:
                raise EncodingError(f"column {name!r} is missing; the row has {brief(list(found))}")
            _check_value(name, kind, found[name])
            sample[name] = found[name]
        return sample


@dataclass(frozen=True, kw_only=True, slots=True)
class _SeparatedLayout(SplitLayout):
    """Rows that are fields with a separator between them: nothing is quoted, nothing escaped."""

    encodings: tuple[Encoding, ...]
    """How each field is written."""
    between: bytes
    """The separator."""
    end: bytes
    """The newline."""

    def _join(self, values: Sequence[Any]) -> bytes:
        fields = [_encode_field(*column) for column in zip(self.names, self.encodings, values, strict=True)]
        return _join_fields(self.names, fields, self.between, self.end)

    def _split(self, body: bytes, columns: Container[str] | None) -> dict[str, Any]:
        # Bytes can be split before they are decoded: in UTF-8 no character is found inside of another.
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
    """Make a row of fields that will be found in it again.

    With the separator ``||`` it is not enough that no field contains it: ``a|`` and ``b`` would come back as ``a`` and
    ``|b``.
    """
    body = separator.join(fields)
    found = body.split(separator)
    if found == fields and not (newline in body and any(newline in field for field in fields)):
        return body
    columns = zip(names, fields, found, strict=False)  # more are found where a field holds a separator
    name, field = next((name, field) for name, field, back in columns if field != back or newline in field)
    raise EncodingError(
        f"column {name!r}: text must be free of the newline {newline.decode()!r}, and of the separator "
        f"{separator.decode()!r} also where it meets one, because nothing is quoted, but got {brief(field.decode())}",
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


# --- which columns there are ---


def make_split_layout(
    shard_format: str, columns: Mapping[str, str], newline: str = "\n", separator: str | None = None
) -> SplitLayout:
    """Lay out the columns of a new dataset.

    Args:
        shard_format: ``json``, ``csv``, ``tsv`` or ``xsv``.
        columns: Column name to ``str``, ``int`` or ``float``.
        newline: What every row ends in.
        separator: What is between two fields; for ``xsv`` only, which needs it.

    Raises:
        ConfigError: There is no such format or encoding, there are no columns, ``separator`` is given where it is fixed
            or is missing where it is not, or a column's name cannot be written.
    """
    names = tuple(sorted(columns))
    return _compile(shard_format, names, tuple(columns[name] for name in names), newline, separator)


def read_split_layout(info: ShardInfo) -> SplitLayout:
    """The layout of a shard's samples, as its index describes it.

    Raises:
        IndexFormatError: The index describes columns that cannot be.
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
        raise IndexFormatError(
            f"the index entry of {info.raw_data.basename} cannot be read: {shortened(str(error))}",
            path=info.raw_data.basename,
        ) from None


@lru_cache(maxsize=1024)
def _compile(
    shard_format: str, names: tuple[str, ...], encoding_names: tuple[str, ...], newline: str, separator: str | None
) -> SplitLayout:
    _check_columns(shard_format, names, encoding_names)
    separator = _check_separator(shard_format, separator)
    _check_text("newline", newline, "newline", may_be_empty=shard_format == "json")  # whose rows end by themselves
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


def _check_columns(shard_format: str, names: tuple[str, ...], encoding_names: tuple[str, ...]) -> None:
    if shard_format not in _FORMATS:
        raise ConfigError(f"format must be one of {', '.join(_FORMATS)}, but got {shard_format!r}", option="format")
    check_names(names, encoding_names)
    for name, encoding_name in zip(names, encoding_names, strict=True):
        _check_text("a column's name", name, "columns", may_be_empty=True)
        if encoding_name not in _COLUMN_TYPES:
            raise ConfigError(
                f"columns of {shard_format} shards must be {', '.join(_COLUMN_TYPES)}, but column {name!r} is "
                f"{encoding_name!r}",
                hint="MDS takes every encoding",
                option="columns",
            )


def _check_separator(shard_format: str, separator: str | None) -> str | None:
    """The separator of a format; None for json."""
    if (separator is not None) != (shard_format == "xsv"):
        wanted = (
            "xsv needs a separator" if shard_format == "xsv" else f"{shard_format} takes no separator, only xsv does"
        )
        raise ConfigError(f"{wanted}, but got {separator!r}", option="separator")
    return separator if shard_format == "xsv" else _SEPARATORS.get(shard_format)


def _check_text(what: str, text: str, option: str, *, may_be_empty: bool = False) -> None:
    try:
        sound = bool(text.encode()) or may_be_empty
    except (UnicodeEncodeError, AttributeError):
        sound = False
    if not sound:
        nature = "text that UTF-8 can hold" + ("" if may_be_empty else ", and not empty")
        raise ConfigError(f"{what} must be {nature}, but got {brief(text)}", option=option)


# --- files ---


def meta_bytes(offsets: Sequence[int] | NDArray[np.int64], config: bytes) -> bytes:
    """The meta file of a shard.

    Args:
        offsets: Where each row starts in the data file, and where the last one ends; of shape (samples + 1,).
        config: What :func:`~lightning_streaming.formats.mds.shard.encode_config` gives.

    Raises:
        ConfigError: One of the two files would have 4 GiB or more.
    """
    table = np.asarray(offsets, np.int64)
    check_shard_bytes(int(table[-1]))
    check_shard_bytes(shard_bytes(len(table) - 1, 0, len(config)))
    return write_offsets(table) + config


@dataclass(frozen=True, slots=True)
class RowDecoder:
    """Reads rows of one layout."""

    layout: SplitLayout
    columns: Container[str] | None
    """Names of the columns to decode; None for all."""

    @property
    def smallest_bytes(self) -> int:
        return self.layout.smallest_bytes

    def decode(self, data: memoryview, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        if start > len(self.layout.header):  # of an offset into the middle of a row, what is left can look like one
            newline = self.layout.newline.encode()
            found = bytes(data[start - len(newline) : start])
            if found != newline:
                raise ShardCorruptError(
                    f"expected {newline!r} before byte {start}, where it starts, but found {found!r}"
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
        found = bytes(self._data[: len(layout.header)])
        if found != layout.header:
            raise ShardCorruptError(
                f"{self._path} must start with {brief(layout.header)}, its columns, but starts with {brief(found)}",
                path=str(self._path),
            )
