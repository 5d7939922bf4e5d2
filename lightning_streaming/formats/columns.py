"""Whole columns of a shard, without decoding the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, FormatError, ShardCorruptError
from lightning_streaming.formats.arrays.row_files import RowsReader
from lightning_streaming.formats.arrow.rows import ArrowRows
from lightning_streaming.formats.encodings import Encoding, encoding
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.mds.shard import MDSReader
from lightning_streaming.formats.readers import FlatColumn, FlatReader, ShardReader
from lightning_streaming.formats.shard import open_shard
from lightning_streaming.formats.shard_table import check_columns
from lightning_streaming.formats.values import NUMBERS, BytesEncoding, NdarrayEncoding, flat_layouts

ColumnValues = NDArray[Any] | list[Any]
"""A column of a shard: numbers as an array of shape (samples,); text, bytes and long numbers as a list."""

AT_ONCE = 1 << 16
"""Samples whose positions are computed together."""
WHOLE_NUMBERS = ("int", "str_int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
"""Encodings of integers."""
_LISTED = ("str", "bytes", "json", "str_int", "str_float", "str_decimal")
_HEADER = np.dtype("<u4")


def encodings_of(info: ShardInfo) -> Mapping[str, str]:
    """Return the columns of a shard, each with the name of its encoding, or of one that has such values."""
    schema = info.schema
    if isinstance(schema.get("columns"), Mapping):
        return dict(schema["columns"])
    return dict(zip(schema["column_names"], schema["column_encodings"], strict=True))


def check_readable_columns(
    info: ShardInfo,
    names: Sequence[str],
    subject: str,
    hints: Mapping[str, str] = MappingProxyType({}),
    option: str | None = None,
    other_hint: str | None = None,
) -> None:
    """Raise ConfigError if a condition cannot read columns.

    Args:
        info: A shard, as its index describes it.
        names: The columns that are read.
        subject: The option that reads them, as errors show it.
        hints: Hints for unknown names.
        option: Name of the option.
        other_hint: Hint for a name that is not similar to any column's.

    Raises:
        ConfigError: The shard lacks one, or it holds neither numbers nor text.
    """
    known = encodings_of(info)
    for name in names:
        if name not in known:
            raise no_such_column(subject, name, known, hints, option, other_hint)
        if known[name] not in _LISTED and not isinstance(_number(known[name]), NUMBERS):
            raise ConfigError(
                f"{subject} reads column {name!r}, which is {known[name]!r}",
                hint="name columns of numbers, text, bytes or json",
                option=option,
            )


def no_such_column(
    subject: str,
    name: str,
    known: Mapping[str, str],
    hints: Mapping[str, str] = MappingProxyType({}),
    option: str | None = None,
    other_hint: str | None = None,
) -> ConfigError:
    """Return the error of an unknown column.

    Args:
        subject: The option that reads it, as errors show it.
        name: The column.
        known: The shard's columns, by name.
        hints: Hints for unknown names.
        option: Name of the option.
        other_hint: Hint for a name that is not similar to any column's.
    """
    close = get_close_matches(name, known, 1)
    hint = hints.get(name) or (f"did you mean {close[0]!r}?" if close else other_hint)
    return ConfigError(
        f"{subject}: unknown column {name!r}; the columns are {', '.join(known)}", hint=hint, option=option
    )


def read_columns(info: ShardInfo, directory: Path, names: Sequence[str]) -> dict[str, ColumnValues]:
    """Read some columns of all samples of a shard.

    Args:
        info: The shard, as its index describes it; :func:`check_readable_columns` accepts the columns.
        directory: Directory of its raw files.
        names: Names of the columns.

    Returns:
        Values by column; json as its text.

    Raises:
        FormatError: The shard is damaged.
        StorageError: A file of it cannot be opened.
    """
    reader = open_shard(info, directory, columns=list(names))
    try:
        if isinstance(reader, MDSReader):
            return {name: _mds_column(reader, info, name) for name in names}
        if isinstance(reader, (RowsReader, ArrowRows)):
            return {name: reader.column(name) for name in names}
        rows = [reader[index] for index in range(len(reader))]
        return {name: [row[name] for row in rows] for name in names}
    finally:
        reader.close()


def flat_column(reader: ShardReader, info: ShardInfo, name: str, dtype: str | None = None) -> FlatColumn:
    """Return the positions of the values of a column of arrays.

    Args:
        reader: The reader of the shard, accepted by :func:`may_be_flat`.
        info: The shard, as its index describes it.
        name: The column.
        dtype: The dtype of values in a column of bytes.

    Raises:
        EncodingError: The column has other values, or one of them is not a one-dimensional array.
        ShardCorruptError: The shard is damaged.
        ConfigError: The shard has no such column.
    """
    check_columns(info, [name])
    if not isinstance(reader, MDSReader):
        return cast("FlatReader", reader).flat_column(name)
    data, offsets = reader.bytes_and_offsets()
    names, encodings, sizes = (info.schema[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    place = names.index(name)
    starts, stops = payloads(data, offsets, sizes, place, info)
    its_encoding = encoding(encodings[place])
    if isinstance(its_encoding, BytesEncoding) and dtype is not None:
        values = np.dtype(dtype).newbyteorder("<")
        counts, rest = np.divmod(stops - starts, values.itemsize)
        if rest.any():
            file, worst = info.raw_data.basename, int(rest.argmax())
            raise EncodingError(
                f"{file}, column {name!r}: sample {worst} is not a whole number of {dtype} values",
                path=file,
                sample=worst,
            )
        return FlatColumn(data, values, starts, counts)
    if not isinstance(its_encoding, NdarrayEncoding):
        raise EncodingError(
            f"{info.raw_data.basename}, column {name!r} is {encodings[place]!r}, not arrays with a value per token",
            hint="name columns of arrays in column= and along=",
            path=info.raw_data.basename,
        )
    try:
        return FlatColumn(data, *flat_layouts(its_encoding, np.frombuffer(data, np.uint8), starts, stops))
    except EncodingError as error:
        file = info.raw_data.basename
        raise error.with_context(f"{file}, column {name!r}", path=file) from error


def joined(parts: Sequence[ColumnValues]) -> ColumnValues:
    """Return a column of several shards; numbers as an array if all have one dtype, so that none is rounded."""
    if len({part.dtype if isinstance(part, np.ndarray) else None for part in parts} - {None}) == 1:
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if len(arrays) == len(parts):
            return np.concatenate(arrays)
    return [value for part in parts for value in listed(part)]


def listed(values: ColumnValues) -> list[Any]:
    """Return a column as Python values."""
    return values.tolist() if isinstance(values, np.ndarray) else values


def _number(encoding_name: str) -> Encoding | None:
    try:
        return encoding(encoding_name)
    except (ConfigError, ImportError):
        return None


def _mds_column(reader: MDSReader, info: ShardInfo, name: str) -> ColumnValues:
    data, offsets = reader.bytes_and_offsets()
    names, encodings, sizes = (info.schema[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    place, its_encoding = names.index(name), encoding(encodings[names.index(name)])
    parts: list[Any] = []
    for first in range(0, info.samples, AT_ONCE):
        starts, stops = payloads(data, offsets[first : first + AT_ONCE + 1], sizes, place, info)
        if isinstance(its_encoding, NUMBERS):
            parts.append(_numbers(data, starts, its_encoding.dtype))
        else:
            raw = encodings[place] == "json"
            try:
                parts += [
                    str(data[start:stop], "utf-8") if raw else its_encoding.decode(data[start:stop])
                    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
                ]
            except (FormatError, UnicodeDecodeError) as error:
                file = info.raw_data.basename
                raise EncodingError(f"{file}, column {name!r}: {error}", path=file) from error
    if not isinstance(its_encoding, NUMBERS):
        return parts
    return np.concatenate(parts) if parts else np.empty(0, its_encoding.dtype)


def payloads(
    data: memoryview, offsets: NDArray[np.int64], sizes: Sequence[int | None], place: int, info: ShardInfo
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where a column's bytes start and stop in the file, for each sample."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    varying = [at for at, size in enumerate(sizes) if size is None]
    header = len(varying) * _HEADER.itemsize
    sizes_of_varying = np.empty((len(starts), 0), np.int64)
    if varying:
        sizes_of_varying = _gather(data, starts, header).view(_HEADER).astype(np.int64)
    fixed = sum(size for size in sizes if size is not None)
    is_wrong = header + fixed + sizes_of_varying.sum(axis=1) != lengths
    if is_wrong.any():
        worst = int(is_wrong.argmax())
        raise ShardCorruptError(
            f"{info.raw_data.basename}: sample {worst} after byte {offsets[0]} has another size than its columns state",
            path=info.raw_data.basename,
        )
    before = starts + header + sum(size for size in sizes[:place] if size is not None)
    before = before + sizes_of_varying[:, : sum(1 for at in varying if at < place)].sum(axis=1)
    own = sizes[place]
    return before, before + (sizes_of_varying[:, varying.index(place)] if own is None else own)


def _numbers(data: memoryview, starts: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    step = int(starts[1] - starts[0]) if len(starts) > 1 else dtype.itemsize
    if (np.diff(starts) == step).all():  # faster, for samples of one size
        strided = np.ndarray((len(starts),), dtype, data, int(starts[0]), (step,))
        copied: NDArray[Any] = strided.copy()
        return copied
    numbers: NDArray[Any] = _gather(data, starts, dtype.itemsize).view(dtype)[:, 0]
    return numbers


def _gather(data: memoryview, starts: NDArray[np.int64], count: int) -> NDArray[np.uint8]:
    """Return bytes from each position; of shape (positions, count)."""
    bytes_: NDArray[np.uint8] = np.frombuffer(data, np.uint8)[starts[:, None] + np.arange(count)]
    return bytes_
