"""Schemas and batches of Arrow: what encodings follow, and the values of each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_streaming.errors import FormatError, MissingDependencyError, StreamingError
from lightning_streaming.tools.sources.source import Found, Schema
from lightning_streaming.tools.sources.values import image_encoding

BATCH_ROWS = 256
"""Rows decoded at a time; large enough to be fast, small enough for rows that are images."""
_IMAGE_FIELDS = {"bytes", "path"}


def require_pyarrow() -> Any:
    """The pyarrow package.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise MissingDependencyError(
            "reading Parquet and Arrow files needs the pyarrow package; run: pip install 'lightning-streaming[parquet]'"
        ) from None
    return pyarrow


@contextmanager
def reading(path: str, what: str) -> Iterator[Any]:
    """A block that reads a file with pyarrow, which it gives.

    Raises:
        FormatError: The file cannot be read; the message names it and says ``what`` it should be.
        MissingDependencyError: pyarrow is not installed.
    """
    pa = require_pyarrow()
    try:
        yield pa
    except StreamingError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, TypeError) as error:  # of values too
        raise FormatError(f"{path} cannot be read as {what}: {error}") from error


def tell_schema(schema: Any, rows: Iterator[tuple[int, Mapping[str, Any]]], told_by: str) -> Schema:
    """The encodings that follow from the schema of a file; those of images, from the first of its rows too.

    Raises:
        FormatError: Two columns have one name.
    """
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise FormatError(f"{told_by} has several columns of the name {twice[0]!r}; give each its own")
    _, first = next(rows, (0, {}))
    return Schema({field.name: _found(field.type, first.get(field.name)) for field in schema}, told_by)


def batch_rows(batch: Any, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a record batch.

    Args:
        batch: A pyarrow RecordBatch.
        names: The columns to give.
    """
    columns = [_values(batch.column(name)) for name in names]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def check_same_columns(found: Any, expected: Any, path: str, first: str) -> None:
    """Check that a file has the columns of the first one.

    Raises:
        FormatError: It has not; the message names them.
    """
    here, there = ({field.name: str(field.type) for field in schema} for schema in (found, expected))
    differ = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    if differ:
        name = differ[0]
        raise FormatError(
            f"the column {name!r} is {here.get(name, 'missing')} in {path}, but {there.get(name, 'missing')} in {first}"
        )


def _found(kind: Any, first: Any) -> Found:
    pa = require_pyarrow()
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _found(kind.storage_type, first)
    if types.is_dictionary(kind):
        return _found(kind.value_type, first)
    if _is_image(kind):
        return Found(image_encoding(first), "images")
    if _is_list(kind) and (number := _number_encoding(kind.value_type)):
        return Found(f"ndarray:{number}" + _shape(kind), str(kind))
    simple = (
        (types.is_boolean, "json"),
        (types.is_decimal, "str_decimal"),
        (_is_text, "str"),
        (_is_binary, "bytes"),
        (types.is_nested, "json"),
    )
    encoding = _number_encoding(kind) or next((name for fits, name in simple if fits(kind)), None)
    return Found(encoding, str(kind))


def _number_encoding(kind: Any) -> str | None:
    types = require_pyarrow().types
    if types.is_integer(kind):
        return str(kind)
    return f"float{kind.bit_width}" if types.is_floating(kind) else None


def _shape(kind: Any) -> str:
    return f":{kind.list_size}" if require_pyarrow().types.is_fixed_size_list(kind) and kind.list_size else ""


def _is_text(kind: Any) -> bool:
    types = require_pyarrow().types
    return any(is_kind(kind) for is_kind in (types.is_string, types.is_large_string, types.is_string_view))


def _is_binary(kind: Any) -> bool:
    types = require_pyarrow().types
    kinds = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(is_kind(kind) for is_kind in kinds)


def _is_list(kind: Any) -> bool:
    types = require_pyarrow().types
    return any(is_kind(kind) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def _is_image(kind: Any) -> bool:
    """Whether it is how Hugging Face datasets stores an image or a sound: the file's bytes, or its path."""
    if not require_pyarrow().types.is_struct(kind) or {field.name for field in kind} != _IMAGE_FIELDS:
        return False
    return _is_binary(kind.field("bytes").type) and _is_text(kind.field("path").type)


def _values(column: Any) -> list[Any]:
    pa = require_pyarrow()
    if isinstance(column.type, pa.BaseExtensionType):
        return _values(column.storage)
    if pa.types.is_dictionary(column.type):
        return _values(column.dictionary_decode())
    if _is_image(column.type):
        return [value and _file_bytes(value) for value in column.to_pylist()]
    if _is_list(column.type) and _number_encoding(column.type.value_type):
        return _arrays(column)
    values: list[Any] = column.to_pylist()
    return values


def _arrays(column: Any) -> list[Any]:
    """Lists of numbers as numpy arrays, which share the memory of the batch."""
    values: list[Any] = [scalar.values for scalar in column]
    # A null among the numbers would become NaN, and integers floats: as lists they are refused later.
    return [
        value if value is None else value.to_pylist() if value.null_count else value.to_numpy(zero_copy_only=False)
        for value in values
    ]


def _file_bytes(value: Mapping[str, Any]) -> bytes:
    if value["bytes"] is not None:
        found: bytes = value["bytes"]
        return found
    try:
        return Path(value["path"] or "").read_bytes()
    except OSError as error:
        raise FormatError(f"a row names a file instead of holding its bytes: {error}") from error
