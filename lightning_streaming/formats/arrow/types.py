"""Kinds of values for Arrow's types, from the schema alone.

Hugging Face datasets describes columns next to a schema, as JSON::

    {"info": {"features": {"picture": {"_type": "Image"}, "grid": {"_type": "Array2D", "shape": [2, 3]}}}}

That distinguishes images and arrays of several dimensions from structs and lists of lists. Extension types are read as
their storage, except ``arrow.fixed_shape_tensor``, whose type has a shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_streaming.errors import ConfigError, UnsupportedError
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.arrow.values import (
    ArrowKind,
    Binary,
    Bool,
    Clock,
    Coded,
    FixedBinary,
    ImageStruct,
    Listed,
    Lists,
    Moment,
    Null,
    Number,
    Numbers,
    Pairs,
    Rare,
    Record,
    Shaped,
    Text,
    require_pyarrow,
)

_MAX_BYTES = 2**31 - 1
"""Most bytes of one item of an array in numpy."""
_MAX_DIMENSIONS = 32
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_MAX_NAMES = 20


@dataclass(frozen=True, slots=True)
class ArrowColumn:
    """One column of a schema."""

    name: str
    kind: ArrowKind
    """Kind of its values."""
    type: str
    """Arrow's name of its type, shortened."""

    @property
    def encoding(self) -> str:
        """The MDS encoding that would hold such values; Arrow's type if there is none."""
        return "null" if isinstance(self.kind, Null) else self.kind.encoding or self.type


def arrow_columns(schema: Any, columns: Sequence[str] | None, shown: str) -> dict[str, ArrowColumn]:
    """Return the columns of a schema by name, in its order.

    Args:
        schema: A ``pyarrow.Schema``.
        columns: Names of the requested ones; None for all.
        shown: Name of the file in errors.

    Raises:
        ConfigError: A requested column is missing.
        UnsupportedError: A column has a type that is not supported, or two have one name.
        MissingDependencyError: pyarrow is not installed.
    """
    require_pyarrow()
    names, hints = list(schema.names), _hints(schema.metadata)
    missing = [name for name in columns or () if name not in names]
    if missing:
        has = shortened(", ".join(map(repr, names[:_MAX_NAMES])))
        raise ConfigError(f"{shown} has no column {missing[0]!r}; it has {has}", option="columns", path=shown)
    result = dict[str, ArrowColumn]()
    for field in schema:
        if columns is not None and field.name not in columns:
            continue
        if field.name in result:
            raise UnsupportedError(
                f"{shown} has several columns named {shortened(repr(field.name))}",
                hint="rename them, or read only others with columns=[...]",
                path=shown,
            )
        try:
            kind = _kind(field.type, hints.get(field.name))
        except _UnsupportedTypeError as error:
            raise UnsupportedError(
                f"{shown}: column {shortened(repr(field.name))} has Arrow's type {shortened(str(field.type))}, but "
                f"{error}",
                hint="leave it out with columns=[...], or write the data again with another type",
                path=shown,
            ) from None
        result[field.name] = ArrowColumn(field.name, kind, shortened(str(field.type), 100))
    return result


class _UnsupportedTypeError(Exception):
    """A type that is not supported; says why."""


# --- types ---


def _kind(kind: Any, hint: Any) -> ArrowKind:
    """Return the kind of a type's values.

    Args:
        kind: A ``pyarrow.DataType``.
        hint: The description by Hugging Face datasets, or None.
    """
    pa = require_pyarrow()
    if isinstance(kind, pa.BaseExtensionType):
        tensor = _tensor(kind)
        return _kind(kind.storage_type, hint) if tensor is None else tensor
    if pa.types.is_dictionary(kind):
        return Coded(np.dtype(kind.index_type.to_pandas_dtype()), _kind(kind.value_type, hint))
    lists = _lists(kind)
    if lists is not None:
        return _of_lists(kind, lists, hint)
    if pa.types.is_struct(kind):
        return _of_struct(kind, hint)
    if pa.types.is_map(kind):
        return Pairs(_kind(kind.key_type, None), _kind(kind.item_type, None))
    simple = _number(kind) or _text(kind) or _time(kind)
    if simple is None:
        raise _UnsupportedTypeError(f"values of type {shortened(str(kind), 100)} are not supported")
    return simple


def _number(kind: Any) -> Number | Bool | None:
    types = require_pyarrow().types
    if types.is_boolean(kind):
        return Bool()
    if types.is_integer(kind) or types.is_floating(kind):
        return Number(np.dtype(kind.to_pandas_dtype()))
    return None


def _text(kind: Any) -> ArrowKind | None:
    types = require_pyarrow().types
    if types.is_string(kind) or types.is_large_string(kind):
        return Text(large=types.is_large_string(kind))
    if types.is_binary(kind) or types.is_large_binary(kind):
        return Binary(large=types.is_large_binary(kind))
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return FixedBinary(kind.byte_width)
    if types.is_decimal(kind):
        return Rare("str_decimal")
    if types.is_null(kind):
        return Null()
    views = {"string_view": "str", "binary_view": "bytes"}
    return Rare(views[str(kind)]) if str(kind) in views else None


def _time(kind: Any) -> ArrowKind | None:
    types = require_pyarrow().types
    if types.is_date(kind):
        return Moment(np.dtype(f"<i{kind.bit_width // 8}"), np.dtype("M8[D]" if types.is_date32(kind) else "M8[ms]"))
    if types.is_timestamp(kind):
        return Moment(np.dtype("<i8"), np.dtype(f"M8[{kind.unit}]"))
    if types.is_duration(kind):
        return Moment(np.dtype("<i8"), np.dtype(f"m8[{kind.unit}]"))
    if types.is_time(kind):
        return Clock(np.dtype(f"<i{kind.bit_width // 8}"), _PER_SECOND[kind.unit])
    return None


# --- lists and structs ---


def _lists(kind: Any) -> Lists | None:
    types = require_pyarrow().types
    if types.is_fixed_size_list(kind):
        return Lists(kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return Lists(None, large=types.is_large_list(kind))
    return None


def _of_lists(kind: Any, lists: Lists, hint: Any) -> ArrowKind:
    if _type_of(hint).startswith("Array"):
        shaped = _shaped(kind, hint)
        if shaped is not None:
            return shaped
    numbers = _numbers(kind, lists)
    if numbers is not None:
        return numbers
    inner = hint[0] if isinstance(hint, list) and hint else hint.get("feature") if isinstance(hint, Mapping) else None
    return Listed(lists, _kind(kind.value_type, inner))


def _numbers(kind: Any, lists: Lists) -> Numbers | None:
    """Return the kind of lists of numbers, or of lists of a fixed size; None for others."""
    inner, below = list[int](), _stored(kind.value_type)
    while (nested := _lists(below)) is not None and nested.size is not None:
        inner.append(nested.size)
        below = _stored(below.value_type)
    number = _number(below)
    if number is None or 0 in inner or not _is_shape([lists.size or 1, *inner], number.dtype):
        return None
    return Numbers(lists, number.dtype, tuple(inner))


def _stored(kind: Any) -> Any:
    """Return the storage of a type; a tensor type unchanged."""
    while hasattr(kind, "storage_type") and _tensor(kind) is None:
        kind = kind.storage_type
    return kind


def _is_shape(shape: Sequence[Any], dtype: np.dtype[Any]) -> bool:
    """Return whether numpy has such arrays."""
    if not 0 < len(shape) <= _MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        return False
    return int(np.prod([max(size, 1) for size in shape], dtype=object)) * dtype.itemsize <= _MAX_BYTES


def _tensor(kind: Any) -> Numbers | None:
    """Return the kind of ``arrow.fixed_shape_tensor``; None for other types."""
    if getattr(kind, "extension_name", "") != "arrow.fixed_shape_tensor" or not hasattr(kind, "permutation"):
        return None
    number, lists = _number(kind.value_type), _lists(kind.storage_type)
    if number is None or lists is None or lists.size is None or not _is_shape(kind.shape, number.dtype):
        return None
    if np.prod(kind.shape, dtype=object) != lists.size or not lists.size:
        return None
    axes = None if kind.permutation is None else tuple(kind.permutation)
    if axes is not None and sorted(axes) != list(range(len(kind.shape))):
        return None
    return Numbers(lists, number.dtype, final=tuple(kind.shape), axes=axes)


def _of_struct(kind: Any, hint: Any) -> ArrowKind:
    fields = [kind.field(place) for place in range(kind.num_fields)]
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise _UnsupportedTypeError("two fields of a struct have the same name")
    if _type_of(hint) == "Image" and "bytes" in names:
        path = _kind(fields[names.index("path")].type, None) if "path" in names else None
        return ImageStruct(tuple(names), _kind(fields[names.index("bytes")].type, None), path)
    inner = hint if isinstance(hint, Mapping) else {}
    if _type_of(hint) == "Sequence" and isinstance(inner.get("feature"), Mapping):  # stored as a struct of lists
        inner = {name: {"_type": "Sequence", "feature": feature} for name, feature in inner["feature"].items()}
    return Record(tuple((field.name, _kind(field.type, inner.get(field.name))) for field in fields))


# --- descriptions by Hugging Face datasets ---

_ARRAY = re.compile(r"Array[2-5]D")


def _type_of(hint: Any) -> str:
    name = hint.get("_type") if isinstance(hint, Mapping) else None
    return name if isinstance(name, str) else ""


def _hints(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Return the description of each column; empty if it cannot be parsed."""
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        if isinstance(features, dict):
            return features
    return {}


def _shaped(kind: Any, hint: Mapping[str, Any]) -> Shaped | None:
    """Return the kind of arrays of several dimensions; None if they are stored in another way."""
    shape, levels = hint.get("shape"), list[Lists]()
    while (lists := _lists(kind)) is not None:
        levels.append(lists)
        kind = _stored(kind.value_type)
    number = _number(kind)
    if not _ARRAY.fullmatch(_type_of(hint)) or not isinstance(shape, list) or len(shape) != len(levels):
        return None
    sizes = [1 if size is None and not place else size for place, size in enumerate(shape)]
    if number is None or not _is_shape(sizes, number.dtype):
        return None
    return Shaped(tuple(levels), number.dtype, tuple(shape))
