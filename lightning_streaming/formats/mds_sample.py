"""One MDS sample in bytes, as it is written; mds_decoder reads it.

    uint32 size of each column whose size varies, in column order
    payload of each column, in column order

Names are not stored. A writer sorts the columns by name, and the index lists them in that order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats.encodings import Encoding, encode_value, encoding
from lightning_streaming.formats.index import MAX_RAW_BYTES
from lightning_streaming.formats.ndarray import NdarrayEncoding

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SIZE = struct.Struct("<I")

_NUMBERS: Mapping[str, tuple[str, type]] = {
    "int": ("q", int),
    "int8": ("b", int),
    "int16": ("h", int),
    "int32": ("i", int),
    "int64": ("q", int),
    "uint8": ("B", int),
    "uint16": ("H", int),
    "uint32": ("I", int),
    "uint64": ("Q", int),
    "float32": ("f", float),
    "float64": ("d", float),
}
"""Encodings that :mod:`struct` writes as numpy does, as long as the value is of exactly this type and fits.

They take a number of numpy's own type too, except ``int``.
"""


@dataclass(frozen=True, slots=True)
class _PlainNumbers:
    """Samples of nothing but numbers, written in one step where all values are Python's own, or numpy's."""

    names: tuple[str, ...]
    own_types: list[type]
    numpy_types: list[type]
    packed: struct.Struct

    def parts(self, sample: Mapping[str, Any]) -> tuple[bytes] | None:
        """The sample's bytes; None where a value needs a closer look."""
        try:
            values = [sample[name] for name in self.names]
            types = list(map(type, values))
            if types == self.own_types:
                return (self.packed.pack(*values),)
            if types == self.numpy_types:
                data = self.packed.pack(*values)
                # There are many NaNs, and on the way through a Python float one may become another.
                return None if math.isnan(sum(self.packed.unpack(data))) else (data,)
        except (KeyError, OverflowError, struct.error):
            pass
        return None


@dataclass(frozen=True, slots=True)
class _OneArray:
    """Samples of one array."""

    name: str
    encoding: NdarrayEncoding

    def parts(self, sample: Mapping[str, Any]) -> tuple[Buffer, ...] | None:
        """The sample's bytes; None where the value needs a closer look."""
        value = sample.get(self.name)
        if type(value) is not np.ndarray or value.nbytes > MAX_RAW_BYTES // 2:
            return None
        try:
            head, values = self.encoding.parts(value)
        except EncodingError as error:
            raise EncodingError(f"column {self.name!r}: {error}") from error
        if self.encoding.shape:
            return (values,)
        return _SIZE.pack(len(head) + values.nbytes), head, values


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLayout:
    """Where each column of a sample lies; made once for all shards of one schema by :func:`compile_layout`."""

    names: tuple[str, ...]
    """Column names, in the order the columns are stored."""
    encoding_names: tuple[str, ...]
    """The encoding of each column, by name."""
    encodings: tuple[Encoding, ...]
    """The encoding of each column."""
    sizes: tuple[int | None, ...]
    """Bytes of each column, or None where they vary."""
    header: struct.Struct
    """Sizes of the columns that vary."""
    varying: tuple[int, ...]
    """Places of the columns that vary."""
    quick: _PlainNumbers | _OneArray | None
    """A quick way for samples of numbers alone, or of one array alone."""

    @property
    def schema(self) -> dict[str, Any]:
        """The keys by which an index describes these columns."""
        return {
            "column_names": self.names,
            "column_encodings": self.encoding_names,
            "column_sizes": self.sizes,
        }

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """Turn a sample into bytes. What it holds beside the columns is left out.

        Raises:
            EncodingError: A column is missing, or its value does not fit.
        """
        return b"".join(self.parts(sample))

    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        """Turn a sample into bytes, in parts that follow each other. An array's part is the array.

        Raises:
            EncodingError: A column is missing, or its value does not fit.
        """
        if self.quick is not None and type(sample) is dict:  # another mapping may make up what it lacks
            quick = self.quick.parts(sample)
            if quick is not None:
                return quick
        parts: list[Buffer] = [b""]
        sizes = [self._add_column(place, sample, parts) for place in range(len(self.names))]
        if sum(sizes) > MAX_RAW_BYTES:
            raise EncodingError(f"a sample can have {MAX_RAW_BYTES} bytes, but got {sum(sizes)}")
        parts[0] = self.header.pack(*[sizes[place] for place in self.varying])
        return parts

    def _add_column(self, place: int, sample: Mapping[str, Any], parts: list[Buffer]) -> int:
        """Add the payload of one column, and give its size."""
        name, column_encoding = self.names[place], self.encodings[place]
        if name not in sample:
            found = ", ".join(map(repr, sample)) or "none"
            raise EncodingError(f"column {name!r} is missing; the sample has {found}")
        value = sample[name]
        try:
            if isinstance(value, np.ndarray) and isinstance(column_encoding, NdarrayEncoding):
                head, values = column_encoding.parts(value)
                parts += (head, values)
                return len(head) + int(values.nbytes)
            data = encode_value(column_encoding, value)
        except EncodingError as error:
            raise EncodingError(f"column {name!r}: {error}") from error
        parts.append(data)
        return len(data)


@lru_cache(maxsize=1024)
def compile_layout(names: tuple[str, ...], encoding_names: tuple[str, ...]) -> SampleLayout:
    """Lay out the columns of a sample.

    Args:
        names: Column names, in the order they are stored; a writer sorts them.
        encoding_names: The encoding of each.

    Raises:
        ConfigError: There are no columns, two share a name, or an encoding does not exist.
        MissingDependencyError: An encoding needs a package that is not installed.
    """
    check_names(names, encoding_names)
    encodings = tuple(map(encoding, encoding_names))
    sizes = tuple(column_encoding.size for column_encoding in encodings)
    varying = tuple(place for place, size in enumerate(sizes) if size is None)
    return SampleLayout(
        names=names,
        encoding_names=encoding_names,
        encodings=encodings,
        sizes=sizes,
        header=struct.Struct(f"<{len(varying)}I"),
        varying=varying,
        quick=_quick_way(names, encoding_names, encodings),
    )


def check_names(names: tuple[str, ...], encoding_names: tuple[str, ...]) -> None:
    """Refuse columns that no sample can have.

    Raises:
        ConfigError: There are none, two share a name, or one lacks an encoding.
    """
    if not names or len(names) != len(encoding_names) or len(set(names)) != len(names):
        raise ConfigError(
            f"a sample needs at least one column, and for each its own name and an encoding, but got {names} "
            f"and {encoding_names}"
        )


def _quick_way(
    names: tuple[str, ...], encoding_names: tuple[str, ...], encodings: tuple[Encoding, ...]
) -> _PlainNumbers | _OneArray | None:
    if len(names) == 1 and isinstance(encodings[0], NdarrayEncoding):
        return _OneArray(names[0], encodings[0])
    if not all(name in _NUMBERS for name in encoding_names):
        return None
    return _PlainNumbers(
        names,
        own_types=[_NUMBERS[name][1] for name in encoding_names],
        numpy_types=[int if name == "int" else np.dtype(name).type for name in encoding_names],
        packed=struct.Struct("<" + "".join(_NUMBERS[name][0] for name in encoding_names)),
    )
