"""One row of a split shard: a sample as JSON text, or as fields with a separator between them, with its newline."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_streaming.errors import ConfigError, EncodingError, ShardCorruptError
from lightning_streaming.formats.checks import brief, check_type
from lightning_streaming.formats.encodings import Encoding, encoding

KINDS: Mapping[str, type[str | int | float]] = {"str": str, "int": int, "float": float}
"""The encodings that a column of a split shard can have, and the Python type of each."""

_AS_TEXT: Mapping[str, str] = {"str": "str", "int": "str_int", "float": "str_float"}
"""Which MDS encoding writes the same text."""

_TEXT = encoding("str")
_JSON = encoding("json")


class Rows(Protocol):
    """How samples become rows and come back."""

    @property
    def header(self) -> bytes:
        """What a data file has before its first row."""
        ...

    @property
    def smallest_bytes(self) -> int:
        """Bytes that every row has, whatever its values are."""
        ...

    def encode(self, values: Sequence[Any]) -> bytes:
        """Turn a sample's values, in column order, into a row.

        Raises:
            EncodingError: A value does not fit.
        """
        ...

    def decode(self, row: bytes | memoryview, columns: Container[str] | None) -> dict[str, Any]:
        """Turn a row into those of its columns that are asked for; None asks for all.

        Raises:
            ShardCorruptError: It is not one row.
            EncodingError: It does not hold what its columns say.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonRows:
    """Rows that are JSON objects with sorted keys, of ASCII characters only.

    Other keys than the columns are ignored when a row is read.
    """

    names: tuple[str, ...]
    """Column names, sorted."""
    kinds: tuple[type[str | int | float], ...]
    """The type of each."""
    newline: bytes
    """What every row ends in."""
    header: bytes = b""

    @property
    def smallest_bytes(self) -> int:
        return len(b"{}") + len(self.newline)

    def encode(self, values: Sequence[Any]) -> bytes:
        for name, kind, value in zip(self.names, self.kinds, values, strict=True):
            _check_value(name, kind, value)
            if kind is str:
                _encode_field(name, _TEXT, value)  # JSON would take half a surrogate pair, and join two halves
        try:
            return json.dumps(dict(zip(self.names, values, strict=True)), sort_keys=True).encode() + self.newline
        except ValueError as error:
            raise EncodingError(f"expected numbers that Python can write in digits ({error})") from None

    def decode(self, row: bytes | memoryview, columns: Container[str] | None) -> dict[str, Any]:
        found = _JSON.decode(_without_newline(row, self.newline))
        if type(found) is not dict:
            raise EncodingError(f"expected a JSON object, but found {brief(found)}")
        sample: dict[str, Any] = {}
        for name, kind in zip(self.names, self.kinds, strict=True):
            if columns is not None and name not in columns:
                continue
            if name not in found:
                raise EncodingError(f"column {name!r} is missing; the row has {brief(list(found))}")
            _check_value(name, kind, found[name])
            sample[name] = found[name]
        return sample


@dataclass(frozen=True, kw_only=True, slots=True)
class SeparatedRows:
    """Rows that are fields with a separator between them: nothing is quoted, nothing escaped."""

    names: tuple[str, ...]
    """Column names, in the order of the fields."""
    encodings: tuple[Encoding, ...]
    """How each field is written."""
    newline: bytes
    """What every row ends in."""
    separator: bytes
    """What is between two fields."""
    header: bytes
    """The row of the names."""

    @property
    def smallest_bytes(self) -> int:
        return (len(self.names) - 1) * len(self.separator) + len(self.newline)

    def encode(self, values: Sequence[Any]) -> bytes:
        fields = [_encode_field(*column) for column in zip(self.names, self.encodings, values, strict=True)]
        return _join(self.names, fields, self.separator, self.newline)

    def decode(self, row: bytes | memoryview, columns: Container[str] | None) -> dict[str, Any]:
        body = _without_newline(row, self.newline)
        # Bytes can be split before they are decoded: in UTF-8 no character is found inside of another.
        fields = body.split(self.separator)
        if len(fields) != len(self.names):
            raise ShardCorruptError(f"expected {len(self.names)} fields, but found {len(fields)} in {brief(body)}")
        if self.newline in body and any(self.newline in field for field in fields):
            raise ShardCorruptError(f"expected one row, but found more in {brief(body)}")
        sample: dict[str, Any] = {}
        for name, column_encoding, field in zip(self.names, self.encodings, fields, strict=True):
            if columns is not None and name not in columns:
                continue
            try:
                sample[name] = column_encoding.decode(field)
            except EncodingError as error:
                raise EncodingError(f"column {name!r}: {error}") from error
        return sample


def json_rows(names: tuple[str, ...], encoding_names: tuple[str, ...], newline: str) -> JsonRows:
    """Rows of JSON objects; the encodings are keys of :data:`KINDS`."""
    return JsonRows(names=names, kinds=tuple(KINDS[name] for name in encoding_names), newline=newline.encode())


def separated_rows(
    names: tuple[str, ...], encoding_names: tuple[str, ...], newline: str, separator: str
) -> SeparatedRows:
    """Rows of separated fields; the encodings are keys of :data:`KINDS`.

    Raises:
        ConfigError: A name would be taken for more columns or rows.
    """
    try:
        header = _join(names, [name.encode() for name in names], separator.encode(), newline.encode())
    except EncodingError as error:
        raise ConfigError(f"the columns' names cannot be a header: {error}") from None
    return SeparatedRows(
        names=names,
        encodings=tuple(encoding(_AS_TEXT[name]) for name in encoding_names),
        newline=newline.encode(),
        separator=separator.encode(),
        header=header,
    )


def _join(names: tuple[str, ...], fields: list[bytes], separator: bytes, newline: bytes) -> bytes:
    """Make a row of fields that will be found in it again.

    With the separator ``||`` it is not enough that no field contains it: ``a|`` and ``b`` would come back as ``a`` and
    ``|b``.
    """
    body = separator.join(fields)
    found = body.split(separator)
    if found == fields and not (newline in body and any(newline in field for field in fields)):
        return body + newline
    columns = zip(names, fields, found, strict=False)  # more are found where a field holds a separator
    name, field = next((name, field) for name, field, back in columns if field != back or newline in field)
    raise EncodingError(
        f"column {name!r}: text must be free of the newline {newline.decode()!r}, and of the separator "
        f"{separator.decode()!r} also where it meets one, because nothing is quoted, but got {brief(field.decode())}; "
        "write json or MDS instead"
    )


def _check_value(name: str, kind: type, value: object) -> None:
    try:
        check_type(value, kind)
    except EncodingError as error:
        raise EncodingError(f"column {name!r}: {error}") from None


def _encode_field(name: str, column_encoding: Encoding, value: object) -> bytes:
    try:
        return column_encoding.encode(value)
    except EncodingError as error:
        raise EncodingError(f"column {name!r}: {error}") from None


def _without_newline(row: bytes | memoryview, newline: bytes) -> bytes:
    data = bytes(row)
    if not data.endswith(newline):
        raise ShardCorruptError(f"expected a row that ends in {newline!r}, but found {brief(data[-40:])}")
    return data[: len(data) - len(newline)]
