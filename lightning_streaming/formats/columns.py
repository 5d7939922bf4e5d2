"""Whole columns of a shard, and the lengths of arrays in a column, without decoding the other columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    MissingDependencyError,
    ShardCorruptError,
)
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.arrow.rows import ArrowRows
from lightning_streaming.formats.encodings import Encoding, encoding
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.formats.mds import MDSReader, read_places, table_bytes
from lightning_streaming.formats.megatron import DocumentLengths
from lightning_streaming.formats.npy import RowsReader
from lightning_streaming.formats.shard import may_be_flat, open_shard
from lightning_streaming.formats.shard_format import FlatColumn, FlatReader, ShardReader
from lightning_streaming.formats.shard_table import OTHER_FORMATS, check_columns
from lightning_streaming.formats.values import BYTES_OF_CODE, NUMBERS, BytesEncoding, NdarrayEncoding, flat_layouts

ColumnValues = NDArray[Any] | list[Any]
"""A column of a shard: numbers as an array of shape (samples,); text, bytes and long numbers as a list."""

_AT_ONCE = 1 << 16
"""Samples whose positions are computed together."""
WHOLE_NUMBERS = ("int", "str_int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
"""Encodings of integers."""
_LISTED = ("str", "bytes", "json", "str_int", "str_float", "str_decimal")
_HEADER = np.dtype("<u4")
_TOKENIZE_HINT = {
    kind: f"tokenize it as it is read: tokenize={{{{'tokenizer': 'tokenizer.json', '{field}': {{}}}}}}, and name the "
    "column 'tokens', whose lengths are then counted; or tokenize it once with `lightning-streaming convert`"
    for kind, field in (("str", "text"), ("json", "chat"))
}
"""Hints for columns of text and of conversations, which have no tokens."""


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
    starts, stops = _payloads(data, offsets, sizes, place, info)
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
    for first in range(0, info.samples, _AT_ONCE):
        starts, stops = _payloads(data, offsets[first : first + _AT_ONCE + 1], sizes, place, info)
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


def _payloads(
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


# --- lengths of arrays, without decoding them ---
#
# If the column is the only one whose size varies, the sizes of its payloads follow from the offsets at a shard's head:
#
#     bytes of sample k  =  4  +  fixed sizes of the other columns  +  bytes of the payload
#     bytes of a payload =  dtype code?  +  shape header (1 + width of the length)  +  length * bytes of an element
#
# A writer takes the least width that holds the length, so the length follows from the number of bytes. The heads of
# some samples are compared with that. In other shards the head of each sample is read.

ReadPart = Callable[[FileInfo, int, int], bytes]
"""Returns the bytes of a file from one position up to before another."""

_MAX_HEAD_BYTES = 10
"""Bytes before the elements of an array of one dimension: dtype code, shape header, length."""
_EXTRA_BYTES = 4096
"""Bytes after the offsets that are read with them: they usually include the first sample's head."""
_PROBES = 16
"""Samples of a local shard whose heads are compared with the offsets."""
_WIDTHS = (1, 2, 4, 8)
"""Bytes of an element, and of a length in a shape header."""
_WIDTH_MASKS = np.array([2 ** (8 * width) - 1 for width in _WIDTHS], np.uint64)


def check_dtype(dtype: str) -> int:
    """Return the bytes of an element.

    Args:
        dtype: Name of a dtype of integers or floats, like "uint16".

    Raises:
        ConfigError: It is another dtype, or unknown.
    """
    try:
        known = np.dtype(dtype)
    except TypeError:
        known = np.dtype(object)
    if not isinstance(dtype, str) or known.kind not in "iuf" or known.itemsize not in _WIDTHS:
        raise ConfigError(
            f"dtype must be one of numbers, like 'uint16' or 'int32', but is {short_repr(dtype)}", option="dtype"
        )
    return known.itemsize


class ColumnLengths(Protocol):
    """The lengths of a column's values in one shard; created by :func:`column_lengths`."""

    @property
    def info(self) -> ShardInfo:
        """The shard."""
        ...

    @property
    def constant(self) -> int | None:
        """The length of each sample, if the index fixes it; then no file has to be read."""
        ...

    @property
    def is_in_offsets(self) -> bool:
        """Whether small parts of the shard's files usually suffice."""
        ...

    def read_remote(self, read: ReadPart) -> NDArray[np.int64] | None:
        """Read the lengths from small parts of an uncompressed remote shard; see :class:`ArrayLengths`."""
        ...

    def read_local(self, directory: Path) -> NDArray[np.int64]:
        """Read the lengths from the raw files of the shard; see :class:`ArrayLengths`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ArrayLengths:
    """The lengths of arrays in an MDS shard, or in another shard in which all have the same length."""

    info: ShardInfo
    column: str
    constant: int | None
    """The length of each sample, if the encoding fixes the shape; then no file has to be read."""
    element_bytes: int | None
    """Bytes of an element; None if each payload states its dtype."""
    array: NdarrayEncoding | None
    """The encoding; None for bytes."""

    @cached_property
    def is_in_offsets(self) -> bool:
        """Whether the offsets suffice: no other column varies, and all elements have the same number of bytes."""
        if self.constant is not None:
            return False
        names, sizes = self.info.schema["column_names"], self.info.schema["column_sizes"]
        varying = [name for name, size in zip(names, sizes, strict=False) if size is None]
        return self.element_bytes is not None and varying == [self.column]

    def read_remote(self, read: ReadPart) -> NDArray[np.int64] | None:
        """Read the lengths from one or two small parts of an uncompressed remote shard.

        Args:
            read: Reads a part of it.

        Returns:
            Lengths of shape (samples,); None if the whole shard is needed.

        Raises:
            ShardCorruptError: The offsets contradict the index.
            StorageError: As ``read`` does.
        """
        if self.constant is not None:
            return np.full(self.info.samples, self.constant, np.int64)
        if not self.is_in_offsets:
            return None
        file, table = self.info.raw_data, table_bytes(self.info.samples)
        head = read(file, 0, min(file.bytes, table + _EXTRA_BYTES))
        shown, smallest = file.basename, 4 + self._fixed_bytes(len(self.info.schema["column_sizes"]))
        offsets, _ = read_places(memoryview(head), self.info, shown, table, smallest)
        lengths = self._by_offsets(offsets)
        if lengths is None or self.array is None or not len(lengths):
            return lengths
        sizes = self.info.schema["column_sizes"]
        place = sizes.index(None)
        start = int(offsets[0]) + 4 + self._fixed_bytes(place)
        stop = int(offsets[1]) - (self._fixed_bytes(len(sizes)) - self._fixed_bytes(place))
        end = min(stop, start + _MAX_HEAD_BYTES)
        first = head[start:end] if end <= len(head) else read(file, start, end)
        padded = np.frombuffer(first.ljust(_MAX_HEAD_BYTES, b"\0"), np.uint8)
        return lengths if self._stated(padded[None], np.array([stop - start]))[0] == lengths[0] else None

    def read_local(self, directory: Path) -> NDArray[np.int64]:
        """Read the lengths from the raw file of the shard.

        Args:
            directory: Its directory.

        Returns:
            Lengths of shape (samples,).

        Raises:
            ShardCorruptError: The file is not what the index describes, or a sample's size contradicts its head.
            EncodingError: A payload is not one of its encoding, or not a whole number of elements.
            ConfigError: An array has several dimensions.
            StorageError: It cannot be opened.
        """
        if self.constant is not None:
            return np.full(self.info.samples, self.constant, np.int64)
        reader = MDSReader(self.info, directory, columns=[self.column])
        try:
            data, offsets = reader.bytes_and_offsets()
            lengths = self._by_offsets(offsets) if self.is_in_offsets else None
            if lengths is not None and self._agrees(lengths, data, offsets):
                return lengths
            parts = [
                self._exact(data, offsets[first : first + _AT_ONCE + 1], first)
                for first in range(0, self.info.samples, _AT_ONCE)
            ]
        finally:
            reader.close()
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _fixed_bytes(self, columns: int) -> int:
        """Return the bytes of those of the first columns that do not vary."""
        return sum(size for size in self.info.schema["column_sizes"][:columns] if size is not None)

    def _by_offsets(self, offsets: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the lengths of payloads of such sizes, as a writer writes them; None if a size has no such length."""
        assert self.element_bytes is not None, "is_in_offsets"
        payload_bytes = np.diff(offsets) - (4 + self._fixed_bytes(len(self.info.schema["column_sizes"])))
        least: Any = 0
        if self.array is not None:
            # A length that does not fit into one byte, or two, takes more.
            is_wider, is_widest = (
                payload_bytes > 1 + width + ((1 << 8 * width) - 1) * self.element_bytes for width in (1, 2)
            )
            least = np.where(is_wider, 1 << 8, 1)
            least[is_widest] = 1 << 16
            payload_bytes -= 2 + is_wider + 2 * is_widest
        lengths = payload_bytes >> self.element_bytes.bit_length() - 1
        is_whole = (payload_bytes & (self.element_bytes - 1)) == 0
        return lengths if bool((is_whole & (lengths >= least)).all()) else None

    def _agrees(self, lengths: NDArray[np.int64], data: memoryview, offsets: NDArray[np.int64]) -> bool:
        """Return whether the heads of some samples state the same lengths."""
        if self.array is None or not len(lengths):
            return True
        samples = np.unique(np.linspace(0, len(lengths) - 1, _PROBES).astype(np.int64))
        try:
            return all(
                self._exact(data, offsets[sample : sample + 2], sample)[0] == lengths[sample]
                for sample in samples.tolist()
            )
        except (EncodingError, ConfigError, ShardCorruptError):
            return False  # reading all heads raises the error

    def _exact(self, data: memoryview, offsets: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """Return the lengths that samples state in their heads.

        Args:
            data: The file.
            offsets: Offsets of these samples, and the end of the last.
            first: Number of the first of them in the shard.
        """
        sizes = self.info.schema["column_sizes"]
        place = self.info.schema["column_names"].index(self.column)
        starts, stops = _payloads(data, offsets, sizes, place, self.info)
        if self.array is None:
            assert self.element_bytes is not None, "set by check_dtype"
            lengths, rest = np.divmod(stops - starts, self.element_bytes)
            if rest.any():
                worst = int(rest.argmax())
                raise EncodingError(
                    f"{_shown(self.info, self.column, first + worst)} has {stops[worst] - starts[worst]} bytes, not a "
                    f"multiple of {self.element_bytes} bytes",
                    hint="check dtype",
                    path=self.info.raw_data.basename,
                    sample=first + worst,
                )
            return lengths
        places = np.minimum(starts[:, None] + np.arange(_MAX_HEAD_BYTES), len(data) - 1)
        lengths = self._stated(np.frombuffer(data, np.uint8)[places], stops - starts)
        if (lengths < 0).any():
            worst = int((lengths < 0).argmax())
            try:
                shape, _, _ = self.array.read_layout(bytes(data[int(starts[worst]) : int(stops[worst])]))
            except EncodingError as error:
                shown, file = _shown(self.info, self.column, first + worst), self.info.raw_data.basename
                raise error.with_context(shown, path=file, sample=first + worst) from error
            raise _several_dimensions(self.info, self.column, first + worst, shape)
        return lengths

    def _stated(self, heads: NDArray[np.uint8], payload_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths that arrays state in their heads; -1 if that is not an array of one dimension.

        Args:
            heads: The first bytes of payloads, with any padding; of shape (payloads, 10).
            payload_bytes: Size of each.
        """
        has_code = self.array is not None and self.array.dtype is None
        element: Any = BYTES_OF_CODE[heads[:, 0]] if has_code else self.element_bytes
        at = int(has_code)
        widths = heads[:, at] & 3
        lengths = np.ascontiguousarray(heads[:, at + 1 : at + 9]).view("<u8")[:, 0] & _WIDTH_MASKS[widths]
        is_sound = (heads[:, at] >> 2 == 1) & (lengths > 0) & (lengths < 1 << 32)
        lengths = np.where(is_sound, lengths, 0).astype(np.int64)
        is_sound &= (element > 0) & (at + 1 + (1 << widths.astype(np.int64)) + lengths * element == payload_bytes)
        return np.where(is_sound, lengths, -1)


@dataclass(frozen=True)
class StoredLengths:
    """The lengths of arrays in a shard of another library: from their positions, or else from each array."""

    info: ShardInfo
    column: str
    constant: int | None = None
    is_in_offsets: bool = False

    def read_remote(self, read: ReadPart) -> None:  # noqa: ARG002
        """Return None: the whole shard is needed; see :class:`ArrayLengths`."""
        return

    def read_local(self, directory: Path) -> NDArray[np.int64]:
        """Read the lengths from the raw file; see :class:`ArrayLengths`."""
        reader = open_shard(self.info, directory, columns=[self.column])
        try:
            if may_be_flat(self.info):
                return cast("FlatReader", reader).flat_column(self.column).counts
            lengths = np.empty(len(reader), np.int64)
            for sample in range(len(reader)):
                value = reader[sample][self.column]
                if value.ndim != 1:
                    raise _several_dimensions(self.info, self.column, sample, value.shape)
                lengths[sample] = len(value)
            return lengths
        finally:
            reader.close()


def _shown(info: ShardInfo, column: str, sample: int) -> str:
    return f"{info.raw_data.basename}, sample {sample}, column {column!r}"


def _several_dimensions(info: ShardInfo, column: str, sample: int, shape: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"{_shown(info, column, sample)} is an array of shape {tuple(shape)}, but the tokens of a document have one "
        "dimension",
        hint="write the length to a column of integers, and pass its name as lengths=",
        option="column",
        path=info.raw_data.basename,
        sample=sample,
    )


def array_lengths(info: ShardInfo, column: str, dtype: str | None = None) -> ArrayLengths:
    """Return the lengths of a column's values in one shard.

    Args:
        info: The shard, as its index describes it.
        column: A column of arrays of one dimension, or of bytes that hold elements.
        dtype: The dtype of elements in bytes; arrays state theirs.

    Raises:
        ConfigError: The shard lacks the column; it holds something else, or arrays of another number of dimensions; or
            the dtype is missing, or another than that of the arrays.
    """
    known = encodings_of(info)
    shown = f"column={column!r}"
    if column not in known:
        close = get_close_matches(column, known, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        hint += (
            "If transform creates it, set lengths, a column of numbers or a function. To tokenize text, set tokenize"
        )
        raise no_such_column(shown, column, known, {column: hint}, option="column")
    name = known[column]
    if name == "bytes" and info.format == "mds":
        if dtype is None:
            raise ConfigError(
                f"{shown} has encoding 'bytes'",
                hint="pass their dtype, like dtype='uint16'",
                option="dtype",
            )
        return ArrayLengths(info=info, column=column, constant=None, element_bytes=check_dtype(dtype), array=None)
    try:
        array = encoding(name)
    except (ConfigError, MissingDependencyError):
        array = None
    if not isinstance(array, NdarrayEncoding) or (array.shape is not None and len(array.shape) != 1):
        raise ConfigError(
            f"{shown} has encoding {name!r}, whose tokens cannot be counted; supported are bytes, 'ndarray', "
            "'ndarray:DTYPE' and 'ndarray:DTYPE:LENGTH'",
            hint=_TOKENIZE_HINT[name].format(repr(column))
            if name in _TOKENIZE_HINT
            else "name a column of integers that holds the length, like lengths='num_tokens', or pass a function of "
            "columns, like lengths=lambda text: len(text) // 4",
            option="column",
        )
    if dtype is not None and array.dtype is not None and np.dtype(dtype).name != array.dtype:
        raise ConfigError(
            f"{shown} has encoding {name!r}, but dtype={dtype!r}",
            hint="leave dtype out: these arrays state theirs",
            option="dtype",
        )
    return ArrayLengths(
        info=info,
        column=column,
        constant=None if array.shape is None else array.shape[0],
        element_bytes=None if array.dtype is None else np.dtype(array.dtype).itemsize,
        array=array,
    )


def column_lengths(info: ShardInfo, column: str, dtype: str | None = None) -> ColumnLengths:
    """Return the lengths of a column's values in a shard of any format; see :func:`array_lengths`."""
    lengths = array_lengths(info, column, dtype)
    if lengths.constant is not None or info.format not in OTHER_FORMATS:
        return lengths
    return DocumentLengths(info) if info.format == "megatron" else StoredLengths(info, column)
