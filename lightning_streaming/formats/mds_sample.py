"""One MDS sample: its columns in bytes.

    uint32 size of each column whose size varies, in column order
    payload of each column, in column order

Names are not stored. A writer sorts the columns by name, and the index lists them in that order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_streaming.errors import ConfigError, EncodingError, ShardCorruptError
from lightning_streaming.formats.encodings import Encoding, encode_value, encoding
from lightning_streaming.formats.index import MAX_RAW_BYTES


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
    smallest_bytes: int
    """Bytes of a sample whose columns that vary are empty."""

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
        payloads = [_encode_column(sample, *column) for column in zip(self.names, self.encodings, strict=True)]
        if sum(map(len, payloads)) > MAX_RAW_BYTES:
            raise EncodingError(f"a sample can have {MAX_RAW_BYTES} bytes, but got {sum(map(len, payloads))}")
        varying = (len(payload) for payload, size in zip(payloads, self.sizes, strict=True) if size is None)
        return b"".join([self.header.pack(*varying), *payloads])

    def decode(self, data: memoryview) -> dict[str, Any]:
        """Turn the bytes of a sample into its columns.

        Raises:
            ShardCorruptError: The sizes in the bytes do not add up to their length.
            EncodingError: A payload is not one of its column's encoding.
        """
        if len(data) < self.smallest_bytes:
            raise ShardCorruptError(f"expected at least {self.smallest_bytes} bytes, but found {len(data)}")
        varying = self.header.unpack_from(data)
        if self.smallest_bytes + sum(varying) != len(data):
            raise ShardCorruptError(
                f"expected {self.smallest_bytes + sum(varying)} bytes by the column sizes, but found {len(data)}"
            )
        sample: dict[str, Any] = {}
        next_varying = iter(varying)
        start = self.header.size
        for name, column_encoding, size in zip(self.names, self.encodings, self.sizes, strict=True):
            stop = start + (next(next_varying) if size is None else size)
            try:
                sample[name] = column_encoding.decode(data[start:stop])
            except EncodingError as error:
                raise EncodingError(f"column {name!r}: {error}") from error
            start = stop
        return sample


@lru_cache(maxsize=1024)
def compile_layout(names: tuple[str, ...], encoding_names: tuple[str, ...]) -> SampleLayout:
    """Lay out the columns of a sample.

    Args:
        names: Column names, in the order they are stored; a writer sorts them.
        encoding_names: The encoding of each.

    Raises:
        ConfigError: There are no columns, two share a name, or an encoding does not exist.
        UnsupportedError: This version does not serve an encoding.
    """
    if not names or len(names) != len(encoding_names) or len(set(names)) != len(names):
        raise ConfigError(
            f"a sample needs at least one column, and for each its own name and an encoding, but got {names} "
            f"and {encoding_names}"
        )
    encodings = tuple(map(encoding, encoding_names))
    sizes = tuple(column_encoding.size for column_encoding in encodings)
    header = struct.Struct(f"<{sizes.count(None)}I")
    return SampleLayout(
        names=names,
        encoding_names=encoding_names,
        encodings=encodings,
        sizes=sizes,
        header=header,
        smallest_bytes=header.size + sum(size for size in sizes if size is not None),
    )


def _encode_column(sample: Mapping[str, Any], name: str, column_encoding: Encoding) -> bytes:
    if name not in sample:
        raise EncodingError(f"column {name!r} is missing; the sample has {', '.join(map(repr, sample)) or 'none'}")
    try:
        return encode_value(column_encoding, sample[name])
    except EncodingError as error:
        raise EncodingError(f"column {name!r}: {error}") from error
