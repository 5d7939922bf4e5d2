"""One MDS sample out of its bytes: all of its columns, or those that are wanted."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    IndexFormatError,
    MissingDependencyError,
    ShardCorruptError,
)
from lightning_streaming.formats.checks import shortened
from lightning_streaming.formats.encodings import Encoding, encoding, is_unsafe
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.mds_sample import check_names
from lightning_streaming.formats.scalars import IntEncoding, NumpyFloatEncoding, NumpyIntegerEncoding

_NUMBERS = (IntEncoding, NumpyIntegerEncoding, NumpyFloatEncoding)

_Piece = tuple[str, tuple[str, ...], Any, int | None]
"""A column; or a run of columns, numbers of one type that follow each other, which are read at once.

Its name, or that of the run's first; the names in the run, none where it is one column; what decodes it (a column's
``Encoding.decode``, a run's ``DecodeMany``), None if it is not wanted; and its bytes, None if they vary.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDecoder:
    """Reads samples of one schema; made once for all its shards by :func:`read_decoder`."""

    header: struct.Struct
    """Sizes of the columns that vary."""
    smallest_bytes: int
    """Bytes of a sample whose columns that vary are empty."""
    pieces: tuple[_Piece, ...]
    """All columns in the order in which they are stored, up to the last that is wanted."""

    def decode(self, data: memoryview, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """Turn the bytes of a sample into its wanted columns.

        Args:
            data: What holds the sample.
            start: Where the sample starts in it.
            stop: Where the sample ends, within ``data``; None where that ends.

        Raises:
            ShardCorruptError: The sizes in the bytes do not add up to their length.
            EncodingError: A payload is not one of its column's encoding.
        """
        sample: dict[str, Any] = {}
        length, name = (len(data) if stop is None else stop) - start, ""
        head = self.header.size
        varying = iter(self._varying_sizes(data, start, length) if head or length != self.smallest_bytes else ())
        start += head
        try:
            for name, run, decode, size in self.pieces:
                end = start + (next(varying) if size is None else size)
                if run:
                    sample.update(zip(run, decode(data, start)))  # noqa: B905  # it gives as many
                elif decode is not None:
                    sample[name] = decode(data[start:end])
                start = end
        except EncodingError as error:
            raise EncodingError(f"column {name!r}: {error}") from error
        return sample

    def _varying_sizes(self, data: memoryview, start: int, length: int) -> Sequence[int]:
        if length < self.smallest_bytes:
            raise ShardCorruptError(f"expected at least {self.smallest_bytes} bytes, but found {length}")
        varying = self.header.unpack_from(data, start)
        expected = self.smallest_bytes + sum(varying)
        if expected != length:
            raise ShardCorruptError(f"expected {expected} bytes by the column sizes, but found {length}")
        return varying


def read_decoder(info: ShardInfo, *, allow_unsafe_types: bool, columns: Sequence[str] | None = None) -> SampleDecoder:
    """What reads a shard's samples, or why nothing can. What is not wanted need not be readable.

    Args:
        info: The shard, as its index describes it.
        allow_unsafe_types: Whether encodings may be read that can run code of whoever wrote the data.
        columns: The columns wanted, which the shard has; None for all.

    Raises:
        IndexFormatError: The index describes columns that cannot be.
        ConfigError: A wanted column is unsafe and that was not allowed.
        MissingDependencyError: A wanted column needs a package that is not installed.
    """
    names, encoding_names = info.schema["column_names"], info.schema["column_encodings"]
    if not allow_unsafe_types:
        check_safe(info, columns)
    wanted = None if columns is None else frozenset(columns)
    try:
        return _compile_decoder(names, encoding_names, info.schema["column_sizes"], wanted)
    except MissingDependencyError as error:
        raise MissingDependencyError(f"{info.raw_data.basename} cannot be read: {shortened(str(error))}") from None
    except ConfigError as error:
        raise IndexFormatError(
            f"the index entry of {info.raw_data.basename} cannot be read: {shortened(str(error))}"
        ) from None


def check_safe(info: ShardInfo, columns: Sequence[str] | None) -> None:
    """Refuse a shard with a wanted column that can run code of whoever wrote it.

    Raises:
        ConfigError: Names the shard and the encoding.
    """
    if info.format != "mds":  # others hold texts and numbers only
        return
    pairs = zip(info.schema["column_names"], info.schema["column_encodings"], strict=False)
    unsafe = [one for name, one in pairs if is_unsafe(one) and _wanted(name, columns)]
    if unsafe:
        raise ConfigError(
            f"{info.raw_data.basename} has a column of encoding {unsafe[0]}, which can run any code when it is read; "
            "pass allow_unsafe_types=True if you trust whoever wrote it, or columns= to read others only"
        )


@lru_cache(maxsize=1024)
def _compile_decoder(
    names: tuple[str, ...],
    encoding_names: tuple[str, ...],
    sizes: tuple[int | None, ...],
    wanted: frozenset[str] | None,
) -> SampleDecoder:
    check_names(names, encoding_names)
    if len(sizes) != len(names):
        raise ConfigError(f"column_sizes must be {len(names)}, one for each column, but are {sizes}")
    columns = [
        (name, _encoding(encoding_name, size, wanted=_wanted(name, wanted)), size)
        for name, encoding_name, size in zip(names, encoding_names, sizes, strict=True)
    ]
    varying, last = sizes.count(None), max(place for place, column in enumerate(columns) if column[1] is not None)
    return SampleDecoder(
        header=struct.Struct(f"<{varying}I"),
        smallest_bytes=4 * varying + sum(size or 0 for size in sizes),
        pieces=tuple(_pieces(columns[: last + 1])),
    )


def _encoding(encoding_name: str, size: int | None, *, wanted: bool) -> Encoding | None:
    """A column's encoding; None if it is not wanted, which then may be anything of the size that the index says."""
    try:
        found = encoding(encoding_name)
    except (ConfigError, MissingDependencyError):
        if wanted:
            raise
        return None
    if found.size != size:
        raise ConfigError(f"column_sizes has {size} for encoding {encoding_name}, which has {found.size}")
    return found if wanted else None


def _pieces(columns: Iterable[tuple[str, Encoding | None, int | None]]) -> Iterator[_Piece]:
    for _, group in groupby(columns, key=lambda column: id(column[1])):
        run = list(group)
        first, one, size = run[0]
        if size is not None and len(run) > 1 and isinstance(one, _NUMBERS):
            yield first, tuple(name for name, _, _ in run), one.decoder_of(len(run)), size * len(run)
        else:
            yield from ((name, (), None if one is None else one.decode, size) for name, one, size in run)


def _wanted(name: str, columns: Sequence[str] | frozenset[str] | None) -> bool:
    return columns is None or name in columns
