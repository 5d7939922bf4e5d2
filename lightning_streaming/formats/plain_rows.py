"""Samples of nothing but numbers, and arrays of one shape: their bytes, one below the other, are a table.

    sample 0 | label int64 | pixels 2 x 3 x float32 |         columns: label    int64    (samples,)
    sample 1 | label int64 | pixels 2 x 3 x float32 |                  pixels   float32  (samples, 2, 3)

Nothing need be decoded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.ndarray import NdarrayEncoding
from lightning_streaming.formats.scalars import IntEncoding, NumpyFloatEncoding, NumpyIntegerEncoding


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The columns of such samples; see :func:`plain_rows`."""

    row: np.dtype[np.void]
    """A sample's bytes, as something that numpy copies whole."""
    columns: np.dtype[np.void]
    """The same bytes by wanted column."""

    @property
    def row_bytes(self) -> int:
        """Bytes of each sample."""
        return self.row.itemsize

    def columns_of(self, rows: NDArray[np.void]) -> dict[str, NDArray[Any]]:
        """The columns of some samples, by name, each of shape (samples, ...); a copy unless there is only one.

        Args:
            rows: The samples' bytes, of shape (samples,) and dtype :attr:`row`.
        """
        table = rows.view(self.columns)
        return {name: np.ascontiguousarray(table[name]) for name in self.columns.names or ()}


def plain_rows(info: ShardInfo, columns: Sequence[str] | None = None) -> PlainRows | None:
    """How to read a shard's samples as a table; None where some size varies, or something wanted is no plain number.

    Args:
        info: The shard, as its index describes it.
        columns: The columns wanted, which the shard has; None for all.
    """
    if info.format != "mds":
        return None
    names, encodings, sizes = (info.schema[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    if None in sizes or not sum(sizes):
        return None
    return _plain_columns(names, encodings, sizes, None if columns is None else frozenset(columns))


@lru_cache(maxsize=1024)
def _plain_columns(
    names: tuple[str, ...], encodings: tuple[str, ...], sizes: tuple[int, ...], wanted: frozenset[str] | None
) -> PlainRows | None:
    columns = dict[str, tuple[int, np.dtype[Any]]]()
    for name, encoding_name, stop, size in zip(names, encodings, accumulate(sizes), sizes, strict=True):
        if wanted is None or name in wanted:
            dtype = _dtype(encoding_name)
            if dtype is None or dtype.itemsize != size:  # an index that is wrong is for whoever opens the shard
                return None
            columns[name] = stop - size, dtype
    offsets, formats = zip(*columns.values(), strict=True)
    table: Any = {"names": list(columns), "formats": formats, "offsets": offsets, "itemsize": sum(sizes)}
    return PlainRows(np.dtype(f"V{sum(sizes)}"), np.dtype(table))


def _dtype(encoding_name: str) -> np.dtype[Any] | None:
    """What numpy calls a value of this encoding; None if it is no number and no array of numbers of one shape."""
    try:
        found = encoding(encoding_name)
    except (ConfigError, MissingDependencyError):
        return None  # whoever opens the shard says why it cannot be read
    if isinstance(found, IntEncoding):
        return np.dtype("<i8")
    if isinstance(found, (NumpyIntegerEncoding, NumpyFloatEncoding)):
        return found.dtype
    if isinstance(found, NdarrayEncoding) and found.dtype is not None and found.shape is not None:
        return np.dtype((np.dtype(found.dtype).newbyteorder("<"), found.shape))
    return None
