"""Samples of nothing but numbers, and arrays of one shape: their bytes, one below the other, are a table.

    sample 0 | label int64 | pixels 2 x 3 x float32 |         columns: label    int64    (samples,)
    sample 1 | label int64 | pixels 2 x 3 x float32 |                  pixels   float32  (samples, 2, 3)

Nothing need be decoded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.ndarray import NdarrayEncoding
from lightning_streaming.formats.scalars import IntEncoding, NumpyFloatEncoding, NumpyIntegerEncoding


@dataclass(frozen=True, slots=True)
class _PlainColumn:
    name: str
    start: int
    """Its first byte in a row."""
    stop: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The columns of such samples; see :func:`plain_rows`."""

    row_bytes: int
    columns: tuple[_PlainColumn, ...]

    def columns_of(self, rows: Sequence[bytes]) -> dict[str, NDArray[Any]]:
        """The columns of some samples, by name, each of shape (samples, ...).

        Args:
            rows: Each sample's bytes.
        """
        table = np.frombuffer(bytearray().join(rows), np.uint8).reshape(len(rows), self.row_bytes)
        columns = {}
        for column in self.columns:
            values = np.ascontiguousarray(table[:, column.start : column.stop]).view(column.dtype)
            columns[column.name] = values.reshape(len(rows), *column.shape)
        return columns


def plain_rows(info: ShardInfo) -> PlainRows | None:
    """How to read all columns of a shard's samples as a table; None where some size varies, or is no plain number's.

    Args:
        info: The shard, as its index describes it.
    """
    if info.format != "mds":
        return None
    names, encodings, sizes = (info.schema[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    return None if None in sizes else _plain_columns(names, encodings, sizes)


@lru_cache(maxsize=1024)
def _plain_columns(names: tuple[str, ...], encoding_names: tuple[str, ...], sizes: tuple[int, ...]) -> PlainRows | None:
    columns, start = list[_PlainColumn](), 0
    for name, encoding_name, size in zip(names, encoding_names, sizes, strict=True):
        plain = _dtype_and_shape(encoding_name)
        if plain is None:
            return None
        columns.append(_PlainColumn(name, start, start + size, *plain))
        start += size
    return PlainRows(start, tuple(columns))


def _dtype_and_shape(encoding_name: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    try:
        found = encoding(encoding_name)
    except (ConfigError, MissingDependencyError):
        return None  # whoever opens the shard says why it cannot be read
    if isinstance(found, IntEncoding):
        return np.dtype("<i8"), ()
    if isinstance(found, (NumpyIntegerEncoding, NumpyFloatEncoding)):
        return found.dtype, ()
    if isinstance(found, NdarrayEncoding) and found.dtype is not None and found.shape is not None:
        return np.dtype(found.dtype).newbyteorder("<"), found.shape
    return None
