"""Samples of nothing but numbers, and arrays of one shape: their bytes, one below the other, are a table.

    sample 0 | label int64 | pixels 2 x 3 x float32 |         columns: label    int64    (samples,)
    sample 1 | label int64 | pixels 2 x 3 x float32 |                  pixels   float32  (samples, 2, 3)

Nothing need be decoded one by one. Where arrays may have any shape, each sample says which its own have, before their
values; as long as all say the same, they are a table with heads that nobody wants.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError
from lightning_streaming.formats.encodings import Encoding, encoding
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.ndarray import NdarrayEncoding
from lightning_streaming.formats.scalars import IntEncoding, NumpyFloatEncoding, NumpyIntegerEncoding

_NUMBERS = (IntEncoding, NumpyIntegerEncoding, NumpyFloatEncoding)


@dataclass(frozen=True, slots=True)
class PlainRows:
    """How such samples lie in their bytes. There is but one of each kind, so that kinds compare by identity."""

    row: np.dtype[np.void]
    """A sample's bytes, as something that numpy copies whole."""
    columns: np.dtype[np.void]
    """The same bytes by wanted column."""
    heads: tuple[tuple[int, bytes], ...]
    """What every sample has to say of its sizes and shapes, and where."""

    def are(self, rows: NDArray[np.void]) -> bool:
        """Whether samples lie like that.

        Args:
            rows: Their bytes, of shape (samples,) and dtype :attr:`row`.
        """
        table = rows.view(np.uint8).reshape(len(rows), self.row.itemsize)
        found = ((table[:, start : start + len(head)], head) for start, head in self.heads)
        return all(bool((said == np.frombuffer(head, np.uint8)).all()) for said, head in found)

    def columns_of(self, rows: NDArray[np.void]) -> dict[str, NDArray[Any]]:
        """The columns of some samples, by name, each of shape (samples, ...); a copy unless a column is all there is.

        Args:
            rows: The samples' bytes, of shape (samples,) and dtype :attr:`row`.
        """
        table = rows.view(self.columns)
        columns = {name: table[name] for name in self.columns.names or ()}
        # Even of a single sample, which is contiguous as it is: it may lie at any address.
        return {name: one if one.nbytes == table.nbytes else one.copy() for name, one in columns.items()}


@dataclass(frozen=True, slots=True)
class PlainSchema:
    """The columns of samples that may be plain; see :func:`plain_schema`."""

    columns: tuple[tuple[str, Encoding, int | None, bool], ...]
    """Name, encoding, bytes if they do not vary, and whether the column is wanted."""

    def rows_like(self, sample: memoryview) -> PlainRows | None:
        """How samples lie in their bytes that are like this one; None if this one cannot be read."""
        varying = [size for _, _, size, _ in self.columns].count(None)
        start = 4 * varying
        if len(sample) < start:
            return None
        sizes = iter(struct.unpack_from(f"<{varying}I", sample))
        fields, heads = list[tuple[str, int, np.dtype[Any]]](), [(0, bytes(sample[:start]))]
        for name, its_encoding, fixed_size, is_wanted in self.columns:
            size = next(sizes) if fixed_size is None else fixed_size
            try:
                dtype, values = _values(its_encoding, sample[start : start + size])
            except (EncodingError, ValueError):  # also a shape that numpy cannot hold
                return None
            if values + dtype.itemsize != size:
                return None
            heads.append((start, bytes(sample[start : start + values])))
            if is_wanted:
                fields.append((name, start + values, dtype))
            start += size
        return _rows(start, tuple(fields), tuple(one for one in heads if one[1])) if start == len(sample) else None


def plain_schema(info: ShardInfo, columns: Sequence[str] | None = None) -> PlainSchema | None:
    """What a shard's samples may have in common; None where a column is neither a number nor an array.

    Args:
        info: The shard, as its index describes it.
        columns: The columns wanted, which the shard has; None for all.
    """
    if info.format != "mds":
        return None
    names, encodings, sizes = (info.schema[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    return _schema(names, encodings, sizes, None if columns is None else frozenset(columns))


@lru_cache(maxsize=1024)
def _schema(
    names: tuple[str, ...], encodings: tuple[str, ...], sizes: tuple[int | None, ...], wanted: frozenset[str] | None
) -> PlainSchema | None:
    found = [_plain_encoding(one) for one in encodings]
    columns = [
        (name, one, size, wanted is None or name in wanted)
        for name, one, size in zip(names, found, sizes, strict=True)
        if one is not None and one.size == size  # an index that is wrong is for whoever opens the shard
    ]
    return PlainSchema(tuple(columns)) if columns and len(columns) == len(names) else None


@lru_cache(maxsize=1024)
def _rows(
    size: int, fields: tuple[tuple[str, int, np.dtype[Any]], ...], heads: tuple[tuple[int, bytes], ...]
) -> PlainRows:
    names, offsets, formats = zip(*fields, strict=True)
    table: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
    return PlainRows(np.dtype(f"V{size}"), np.dtype(table), heads)


def _plain_encoding(name: str) -> Encoding | None:
    try:
        found = encoding(name)
    except (ConfigError, MissingDependencyError):
        return None  # whoever opens the shard says why it cannot be read
    return found if isinstance(found, (*_NUMBERS, NdarrayEncoding)) else None


def _values(its_encoding: Encoding, payload: memoryview) -> tuple[np.dtype[Any], int]:
    """What the values of a payload are to numpy, and at which byte of it they start."""
    if isinstance(its_encoding, NdarrayEncoding):
        shape, dtype, start = its_encoding.read_layout(payload)
        return np.dtype((dtype, shape)), start
    if isinstance(its_encoding, IntEncoding):
        return np.dtype("<i8"), 0
    assert isinstance(its_encoding, (NumpyIntegerEncoding, NumpyFloatEncoding)), "what _plain_encoding lets through"
    return its_encoding.dtype, 0
