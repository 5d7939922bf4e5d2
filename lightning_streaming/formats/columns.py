"""Whole columns of a shard, for conditions over them: the other columns are not decoded."""

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
"""Samples whose places are worked out together."""
WHOLE_NUMBERS = ("int", "str_int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
"""Encodings whose values are whole numbers."""
_LISTED = ("str", "bytes", "json", "str_int", "str_float", "str_decimal")
_HEADER = np.dtype("<u4")


def encodings_of(info: ShardInfo) -> Mapping[str, str]:
    """The columns of a shard, each with the name of its encoding, or of one that has such values."""
    schema = info.schema
    if isinstance(schema.get("columns"), Mapping):
        return dict(schema["columns"])
    return dict(zip(schema["column_names"], schema["column_encodings"], strict=True))


def check_columns_tell(
    info: ShardInfo,
    names: Sequence[str],
    asked: str,
    hints: Mapping[str, str] = MappingProxyType({}),
    option: str | None = None,
    other_hint: str | None = None,
) -> None:
    """Refuse columns that a condition cannot look at.

    Args:
        info: A shard, as its index describes it.
        names: The columns that are looked at.
        asked: What looks at them, as an error calls it.
        hints: What may have been meant by a name, where no column has it.
        option: Name of the option that looks at them.
        other_hint: The hint for a name that is like no column's.

    Raises:
        ConfigError: The shard lacks one, or it holds neither numbers nor text.
    """
    known = encodings_of(info)
    for name in names:
        if name not in known:
            raise no_such_column(asked, name, known, hints, option, other_hint)
        if known[name] not in _LISTED and not isinstance(_number(known[name]), NUMBERS):
            raise ConfigError(
                f"{asked} looks at column {name!r}, which is {known[name]!r}",
                hint="only numbers, text, bytes and json can be looked at",
                option=option,
            )


def no_such_column(
    asked: str,
    name: str,
    known: Mapping[str, str],
    hints: Mapping[str, str] = MappingProxyType({}),
    option: str | None = None,
    other_hint: str | None = None,
) -> ConfigError:
    """What to say of a column that a shard lacks.

    Args:
        asked: What looks at it, as an error calls it.
        name: The column.
        known: The shard's own, by name.
        hints: What else to say of some columns, by name.
        option: Name of the option that looks at it.
        other_hint: The hint for a name that is like no column's.
    """
    close = get_close_matches(name, known, 1)
    hint = hints.get(name) or (f"did you mean {close[0]!r}?" if close else other_hint)
    return ConfigError(
        f"{asked} looks at column {name!r}, which is not there; there are {', '.join(known)}", hint=hint, option=option
    )


def read_columns(info: ShardInfo, directory: Path, names: Sequence[str]) -> dict[str, ColumnValues]:
    """Some columns of all samples of a shard.

    Args:
        info: The shard, as its index describes it; :func:`check_columns_tell` accepts the columns.
        directory: Where its raw files are.
        names: Which columns.

    Returns:
        By name; json as its text.

    Raises:
        FormatError: The shard is damaged.
        StorageError: A file of it cannot be opened.
    """
    reader = open_shard(info, directory, columns=list(names))
    try:
        if isinstance(reader, MDSReader):
            return {name: _of_mds(reader, info, name) for name in names}
        if isinstance(reader, RowsReader):
            return {name: reader.column(name) for name in names}
        if isinstance(reader, ArrowRows):
            return {name: reader.column(name) for name in names}
        rows = [reader[index] for index in range(len(reader))]
        return {name: [row[name] for row in rows] for name in names}
    finally:
        reader.close()


def flat_column(reader: ShardReader, info: ShardInfo, name: str, dtype: str | None = None) -> FlatColumn:
    """Where the values of a column of arrays lie.

    Args:
        reader: Of the shard, which :func:`may_be_flat`.
        info: The shard, as its index describes it.
        name: The column.
        dtype: What bytes are to be read as, where the column is of bytes.

    Raises:
        EncodingError: The column is of other values, or one of them is no one-dimensional array.
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
                f"{file}, column {name!r}: sample {worst} is not of whole {dtype} values", path=file, sample=worst
            )
        return FlatColumn(data, values, starts, counts)
    if not isinstance(its_encoding, NdarrayEncoding):
        raise EncodingError(
            f"{info.raw_data.basename}, column {name!r} is {encodings[place]!r}, not of arrays with a value for "
            "each token",
            hint="name no such column in column= or along=",
            path=info.raw_data.basename,
        )
    try:
        return FlatColumn(data, *flat_layouts(its_encoding, np.frombuffer(data, np.uint8), starts, stops))
    except EncodingError as error:
        file = info.raw_data.basename
        raise error.with_context(f"{file}, column {name!r}", path=file) from error


def joined(parts: Sequence[ColumnValues]) -> ColumnValues:
    """A column of several shards; numbers as an array where all are of one type: none is rounded to another's."""
    if len({part.dtype if isinstance(part, np.ndarray) else None for part in parts} - {None}) == 1:
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if len(arrays) == len(parts):
            return np.concatenate(arrays)
    return [value for part in parts for value in listed(part)]


def listed(values: ColumnValues) -> list[Any]:
    """A column as Python's own values."""
    return values.tolist() if isinstance(values, np.ndarray) else values


def _number(encoding_name: str) -> Encoding | None:
    try:
        return encoding(encoding_name)
    except (ConfigError, ImportError):
        return None


def _of_mds(reader: MDSReader, info: ShardInfo, name: str) -> ColumnValues:
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
    """Where a column's bytes start and stop in the file, sample by sample: after the sizes of those that vary."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    varying = [at for at, size in enumerate(sizes) if size is None]
    header = len(varying) * _HEADER.itemsize
    said = (
        gather(data, starts, header).view(_HEADER).astype(np.int64) if varying else np.empty((len(starts), 0), np.int64)
    )
    fixed = sum(size for size in sizes if size is not None)
    if (header + fixed + said.sum(axis=1) != lengths).any():
        worst = int((header + fixed + said.sum(axis=1) != lengths).argmax())
        raise ShardCorruptError(
            f"{info.raw_data.basename}: sample {worst} after byte {offsets[0]} has other bytes than it says",
            path=info.raw_data.basename,
        )
    before = starts + header + sum(size for size in sizes[:place] if size is not None)
    before = before + said[:, : sum(1 for at in varying if at < place)].sum(axis=1)
    own = sizes[place]
    return before, before + (said[:, varying.index(place)] if own is None else own)


def _numbers(data: memoryview, starts: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    step = int(starts[1] - starts[0]) if len(starts) > 1 else dtype.itemsize
    if (np.diff(starts) == step).all():  # the quick way, of samples that are all equally long
        strided = np.ndarray((len(starts),), dtype, data, int(starts[0]), (step,))
        copied: NDArray[Any] = strided.copy()
        return copied
    numbers: NDArray[Any] = gather(data, starts, dtype.itemsize).view(dtype)[:, 0]
    return numbers


def gather(data: memoryview, starts: NDArray[np.int64], count: int) -> NDArray[np.uint8]:
    """So many bytes from each place on; of shape (places, count)."""
    bytes_: NDArray[np.uint8] = np.frombuffer(data, np.uint8)[starts[:, None] + np.arange(count)]
    return bytes_
