"""What each of Arrow's types becomes in a sample, by the schema alone.

Hugging Face datasets writes next to a schema what it means by its columns, as JSON::

    {"info": {"features": {"picture": {"_type": "Image"}, "grid": {"_type": "Array2D", "shape": [2, 3]}}}}

Of that, images and arrays of several dimensions are told from structs and lists of lists. Extension types are what they
are stored as; but for ``arrow.fixed_shape_tensor``, whose shape the type itself says.
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
from lightning_streaming.formats.arrow.arrays import Numbers, Shaped
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
    Pairs,
    Rare,
    Record,
    Text,
    require_pyarrow,
)

_MOST_BYTES = 2**31 - 1
"""Of one item of an array, to numpy."""
_MOST_DIMENSIONS = 32
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class ArrowColumn:
    """One column of a schema."""

    name: str
    kind: ArrowKind
    """What its values are, and how they are read."""
    type: str
    """Arrow's own name for it, shortened."""

    @property
    def encoding(self) -> str:
        """The MDS encoding that would hold such values; where there is none, Arrow's type."""
        return "null" if isinstance(self.kind, Null) else self.kind.encoding or self.type


def arrow_columns(schema: Any, columns: Sequence[str] | None, shown: str) -> dict[str, ArrowColumn]:
    """The columns of a schema by name, in its order.

    Args:
        schema: A ``pyarrow.Schema``.
        columns: Names of the wanted ones; None for all.
        shown: What to call the file in an error.

    Raises:
        ConfigError: A wanted column is not there.
        UnsupportedError: One is of a type that is not read, or there are two of its name.
        MissingDependencyError: pyarrow is not installed.
    """
    require_pyarrow()
    names, hints = list(schema.names), _hints(schema.metadata)
    missing = [name for name in columns or () if name not in names]
    if missing:
        has = shortened(", ".join(map(repr, names[:_MOST_NAMED])))
        raise ConfigError(f"{shown} has no column {missing[0]!r}; it has {has}", option="columns", path=shown)
    found = dict[str, ArrowColumn]()
    for field in schema:
        if columns is not None and field.name not in columns:
            continue
        if field.name in found:
            raise UnsupportedError(
                f"{shown} has several columns named {shortened(repr(field.name))}",
                hint="give each a name of its own, or read others only with columns=[...]",
                path=shown,
            )
        try:
            kind = _kind(field.type, hints.get(field.name))
        except _NotReadError as error:
            raise UnsupportedError(
                f"{shown}: column {shortened(repr(field.name))} is of Arrow's type {shortened(str(field.type))}, but "
                f"{error}",
                hint="leave it out with columns=[...], or write the data again with another type",
                path=shown,
            ) from None
        found[field.name] = ArrowColumn(field.name, kind, shortened(str(field.type), 100))
    return found


class _NotReadError(Exception):
    """What is the matter with a type."""


# --- types ---


def _kind(kind: Any, hint: Any) -> ArrowKind:
    """What values of a type are.

    Args:
        kind: A ``pyarrow.DataType``.
        hint: What Hugging Face datasets says of it; None where it says nothing.
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
    found = _number(kind) or _text(kind) or _time(kind)
    if found is None:
        raise _NotReadError(f"values of type {shortened(str(kind), 100)} are not read")
    return found


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
    """Lists of numbers, or of lists that are all of one size."""
    inner, below = list[int](), _stored(kind.value_type)
    while (found := _lists(below)) is not None and found.size is not None:
        inner.append(found.size)
        below = _stored(below.value_type)
    number = _number(below)
    if number is None or 0 in inner or not _is_shape([lists.size or 1, *inner], number.dtype):
        return None
    return Numbers(lists, number.dtype, tuple(inner))


def _stored(kind: Any) -> Any:
    """A type as it is stored; one of arrays of several dimensions is left alone."""
    while hasattr(kind, "storage_type") and _tensor(kind) is None:
        kind = kind.storage_type
    return kind


def _is_shape(shape: Sequence[Any], dtype: np.dtype[Any]) -> bool:
    """Whether numpy has arrays like that."""
    if not 0 < len(shape) <= _MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        return False
    return int(np.prod([max(size, 1) for size in shape], dtype=object)) * dtype.itemsize <= _MOST_BYTES


def _tensor(kind: Any) -> Numbers | None:
    """Arrays of ``arrow.fixed_shape_tensor``."""
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
        raise _NotReadError("two fields of a struct have one name")
    if _type_of(hint) == "Image" and "bytes" in names:
        path = _kind(fields[names.index("path")].type, None) if "path" in names else None
        return ImageStruct(tuple(names), _kind(fields[names.index("bytes")].type, None), path)
    inner = _hints_of_fields(hint)
    return Record(tuple((field.name, _kind(field.type, inner.get(field.name))) for field in fields))


# --- what Hugging Face datasets says ---

_ARRAY = re.compile(r"Array[2-5]D")


def _type_of(hint: Any) -> str:
    found = hint.get("_type") if isinstance(hint, Mapping) else None
    return found if isinstance(found, str) else ""


def _hints(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """What is said of each column; empty where it cannot be understood."""
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        found = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        if isinstance(found, dict):
            return found
    return {}


def _hints_of_fields(hint: Any) -> Mapping[str, Any]:
    """Of a struct; a sequence of dicts is stored as a struct of lists."""
    if not isinstance(hint, Mapping):
        return {}
    inner = hint.get("feature")
    if _type_of(hint) == "Sequence" and isinstance(inner, Mapping):
        return {name: {"_type": "Sequence", "feature": one} for name, one in inner.items()}
    return hint


def _shaped(kind: Any, hint: Mapping[str, Any]) -> Shaped | None:
    """Arrays of several dimensions; None where they are not stored as such."""
    shape, levels = hint.get("shape"), list[Lists]()
    while (found := _lists(kind)) is not None:
        levels.append(found)
        kind = _stored(kind.value_type)
    number = _number(kind)
    if not _ARRAY.fullmatch(_type_of(hint)) or not isinstance(shape, list) or len(shape) != len(levels):
        return None
    sizes = [1 if size is None and not place else size for place, size in enumerate(shape)]
    if number is None or not _is_shape(sizes, number.dtype):
        return None
    return Shaped(tuple(levels), number.dtype, tuple(shape))
