"""MDS shards: the file and its reader, the bytes of a sample, and the table of offsets that split shards share.

    bytes        content of a file
    4            uint32 n, the number of samples
    4 (n + 1)    uint32 offsets from the start of the file: where each sample starts, and where the last one ends
    any          config, JSON text that ends where the first sample starts
    any          the samples, back to back

All integers are little-endian. The config repeats the columns of the index, which is authoritative. The meta
file of a split shard begins with the same table of offsets. A sample is::

    uint32 size of each column whose size varies, in column order
    payload of each column, in column order

Names are not stored. A writer sorts the columns by name, and the index lists them in that order.

Samples of only numbers, and arrays of one shape, are :class:`PlainRows`. If arrays may have any shape, each sample
states the shapes before the values; as long as all state the same, they are such rows with heads that are skipped.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    MissingDependencyError,
    ObjectNotFoundError,
    ShardCorruptError,
    StorageError,
)
from lightning_streaming.escaping import shortened
from lightning_streaming.files import join_under, open_regular
from lightning_streaming.formats.encodings import Encoding, encode_value, encoding, is_unsafe
from lightning_streaming.formats.shard_format import PlainRows, no_such_sample, plain_rows
from lightning_streaming.formats.shard_table import MAX_RAW_BYTES, ShardInfo, check_columns, entry_error, shared_entry
from lightning_streaming.formats.values import NUMBERS, IntEncoding, NdarrayEncoding

if TYPE_CHECKING:
    from typing_extensions import Buffer

# --- encoding samples ---

_SIZE = struct.Struct("<I")
_PACKED: Mapping[str, str] = {
    "int": "q",
    **dict(zip(("int8", "int16", "int32", "int64"), "bhiq", strict=True)),
    **dict(zip(("uint8", "uint16", "uint32", "uint64"), "BHIQ", strict=True)),
    **dict(zip(("float32", "float64"), "fd", strict=True)),
}
"""Encodings that :mod:`struct` writes like numpy, if the value is a Python int or float and fits.

Except ``int``, they also take a number of the numpy type.
"""


@dataclass(frozen=True, slots=True)
class _PlainNumbers:
    """Samples of only numbers, written in one step if all values are Python's, or all are numpy's."""

    names: tuple[str, ...]
    own_types: list[type]
    numpy_types: list[type]
    packed: struct.Struct

    def parts(self, sample: Mapping[str, Any]) -> tuple[bytes] | None:
        """Return the sample's bytes; None if a value needs more checks."""
        try:
            values = [sample[name] for name in self.names]
            types = list(map(type, values))
            if types == self.own_types:
                return (self.packed.pack(*values),)
            if types == self.numpy_types:
                data = self.packed.pack(*values)
                # There are many NaNs, and conversion to a Python float may turn one into another.
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
        """Return the sample's bytes; None if the value needs more checks."""
        value = sample.get(self.name)
        if type(value) is not np.ndarray or value.nbytes > MAX_RAW_BYTES // 2:
            return None
        try:
            head, values = self.encoding.parts(value)
        except EncodingError as error:
            raise error.with_context(f"column {self.name!r}") from error
        if self.encoding.shape:
            return (values,)
        return _SIZE.pack(len(head) + values.nbytes), head, values


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLayout:
    """Layout of the columns of a sample; created once for all shards of a schema by :func:`compile_layout`."""

    names: tuple[str, ...]
    """Column names, in the order the columns are stored."""
    encoding_names: tuple[str, ...]
    """The encoding of each column, by name."""
    encodings: tuple[Encoding, ...]
    """The encoding of each column."""
    sizes: tuple[int | None, ...]
    """Bytes of each column, or None if they vary."""
    header: struct.Struct
    """Sizes of the columns that vary."""
    varying: tuple[int, ...]
    """Numbers of the columns that vary."""
    quick: _PlainNumbers | _OneArray | None
    """A faster writer for samples of only numbers, or of one array."""

    @property
    def schema(self) -> dict[str, Any]:
        """The keys by which an index describes these columns."""
        return {
            "column_names": self.names,
            "column_encodings": self.encoding_names,
            "column_sizes": self.sizes,
        }

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """Encode a sample. Other keys than the columns are ignored.

        Raises:
            EncodingError: A column is missing, or its value does not fit.
        """
        return b"".join(self.parts(sample))

    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        """Encode a sample in consecutive parts. The part of an array is the array.

        Raises:
            EncodingError: A column is missing, or its value does not fit.
        """
        if self.quick is not None and type(sample) is dict:  # another mapping may compute missing keys
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
        """Add the payload of one column, and return its size."""
        name, column_encoding = self.names[place], self.encodings[place]
        if name not in sample:
            names = ", ".join(map(repr, sample)) or "none"
            raise EncodingError(f"column {name!r} is missing; the sample has {names}")
        value = sample[name]
        try:
            if isinstance(value, np.ndarray) and isinstance(column_encoding, NdarrayEncoding):
                head, values = column_encoding.parts(value)
                parts += (head, values)
                return len(head) + int(values.nbytes)
            data = encode_value(column_encoding, value)
        except EncodingError as error:
            raise error.with_context(f"column {name!r}") from error
        parts.append(data)
        return len(data)


@lru_cache(maxsize=1024)
def compile_layout(names: tuple[str, ...], encoding_names: tuple[str, ...]) -> SampleLayout:
    """Return the layout of the columns of a sample.

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
    """Raise ConfigError if no sample can have these columns.

    Raises:
        ConfigError: There are none, two share a name, or one lacks an encoding.
    """
    if not names or len(names) != len(encoding_names) or len(set(names)) != len(names):
        raise ConfigError(
            f"a sample needs at least one column, and for each its own name and an encoding, but got {names} "
            f"and {encoding_names}",
            option="columns",
        )


def _quick_way(
    names: tuple[str, ...], encoding_names: tuple[str, ...], encodings: tuple[Encoding, ...]
) -> _PlainNumbers | _OneArray | None:
    if len(names) == 1 and isinstance(encodings[0], NdarrayEncoding):
        return _OneArray(names[0], encodings[0])
    if not all(name in _PACKED for name in encoding_names):
        return None
    return _PlainNumbers(
        names,
        own_types=[float if name.startswith("float") else int for name in encoding_names],
        numpy_types=[int if name == "int" else np.dtype(name).type for name in encoding_names],
        packed=struct.Struct("<" + "".join(_PACKED[name] for name in encoding_names)),
    )


# --- decoding samples ---

_Piece = tuple[str, tuple[str, ...], Any, int | None]
"""A column; or a run of columns, consecutive numbers of one type, which are read at once.

Its name, or that of the run's first; the names in the run, none for one column; its decoder (``Encoding.decode`` of a
column, ``DecodeMany`` of a run), None if it is not requested; and its bytes, None if they vary.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDecoder:
    """Decoder of samples of a schema; created once for all its shards by :func:`read_decoder`."""

    header: struct.Struct
    """Sizes of the columns that vary."""
    smallest_bytes: int
    """Bytes of a sample whose columns that vary are empty."""
    pieces: tuple[_Piece, ...]
    """All columns in the order in which they are stored, up to the last that is requested."""

    def decode(self, data: memoryview, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """Decode the requested columns of a sample.

        Args:
            data: Bytes that include the sample.
            start: Position of the sample's first byte.
            stop: Position after its last byte; None if it ends with ``data``.

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
                    sample.update(zip(run, decode(data, start)))  # noqa: B905  # both have the same length
                elif decode is not None:
                    sample[name] = decode(data[start:end])
                start = end
        except EncodingError as error:
            raise error.with_context(f"column {name!r}") from error
        return sample

    def _varying_sizes(self, data: memoryview, start: int, length: int) -> Sequence[int]:
        if length < self.smallest_bytes:
            raise ShardCorruptError(f"expected at least {self.smallest_bytes} bytes, but found {length}")
        varying = self.header.unpack_from(data, start)
        expected = self.smallest_bytes + sum(varying)
        if expected != length:
            raise ShardCorruptError(f"expected {expected} bytes by the column sizes, but found {length}")
        return varying


def read_decoder(
    info: ShardInfo,
    *,
    allow_unsafe_types: bool,
    columns: Sequence[str] | None = None,
    as_files: Collection[str] = (),
) -> SampleDecoder:
    """Return the decoder of a shard's samples. Columns that are not requested do not have to be readable.

    Args:
        info: The shard, as its index describes it.
        allow_unsafe_types: Whether encodings may be read that can run code of the data's author.
        columns: The requested columns, which the shard has; None for all.
        as_files: Columns whose image files are returned as bytes.

    Raises:
        IndexFormatError: The index describes invalid columns.
        ConfigError: A requested column is unsafe and that was not allowed.
        MissingDependencyError: A requested column needs a package that is not installed.
    """
    names, encoding_names = info.schema["column_names"], info.schema["column_encodings"]
    if not allow_unsafe_types:
        check_safe(info, columns)
    wanted = None if columns is None else frozenset(columns)
    try:
        return _compile_decoder(names, encoding_names, info.schema["column_sizes"], wanted, frozenset(as_files))
    except MissingDependencyError as error:
        file = info.raw_data.basename
        raise error.with_context(f"{file} cannot be read", path=file) from None
    except ConfigError as error:
        raise entry_error(info, f"cannot be read: {shortened(str(error))}") from None


def check_safe(info: ShardInfo, columns: Sequence[str] | None) -> None:
    """Raise ConfigError if a requested column can run code of its author.

    Raises:
        ConfigError: Names the shard and the encoding.
    """
    if info.format != "mds":  # others have texts and numbers only
        return
    pairs = zip(info.schema["column_names"], info.schema["column_encodings"], strict=False)
    unsafe = [kind for name, kind in pairs if is_unsafe(kind) and (columns is None or name in columns)]
    if unsafe:
        raise ConfigError(
            f"{info.raw_data.basename} has a column of encoding {unsafe[0]}, which can run any code when it is read",
            hint="pass allow_unsafe_types=True if you trust its author, or list the other columns in columns=",
            option="allow_unsafe_types",
            path=info.raw_data.basename,
        )


@lru_cache(maxsize=1024)
def _compile_decoder(
    names: tuple[str, ...],
    encoding_names: tuple[str, ...],
    sizes: tuple[int | None, ...],
    wanted: frozenset[str] | None,
    as_files: frozenset[str],
) -> SampleDecoder:
    check_names(names, encoding_names)
    if len(sizes) != len(names):
        raise ConfigError(f"column_sizes must have {len(names)} items, one for each column, but is {sizes}")
    columns = list[tuple[str, Encoding | None, int | None]]()
    for name, kind, size in zip(names, encoding_names, sizes, strict=True):
        as_file = name in as_files and kind in ("jpeg", "png")
        is_wanted = wanted is None or name in wanted
        columns.append((name, _encoding("bytes" if as_file else kind, size, wanted=is_wanted), size))
    varying = sizes.count(None)
    last = max((place for place, column in enumerate(columns) if column[1] is not None), default=-1)
    return SampleDecoder(
        header=struct.Struct(f"<{varying}I"),
        smallest_bytes=4 * varying + sum(size or 0 for size in sizes),
        pieces=tuple(_pieces(columns[: last + 1])),
    )


def _encoding(encoding_name: str, size: int | None, *, wanted: bool) -> Encoding | None:
    """Return a column's encoding; None if it is not requested, which then may be anything of the index's size."""
    try:
        known = encoding(encoding_name)
    except (ConfigError, MissingDependencyError):
        if wanted:
            raise
        return None
    if known.size != size:
        raise ConfigError(f"column_sizes has {size} for encoding {encoding_name}, which has {known.size}")
    return known if wanted else None


def _pieces(columns: Iterable[tuple[str, Encoding | None, int | None]]) -> Iterator[_Piece]:
    for _, group in groupby(columns, key=lambda column: id(column[1])):
        run = list(group)
        first, kind, size = run[0]
        if size is not None and len(run) > 1 and isinstance(kind, NUMBERS):
            yield first, tuple(name for name, _, _ in run), kind.decoder_of(len(run)), size * len(run)
        else:
            yield from ((name, (), None if kind is None else kind.decode, size) for name, kind, size in run)


# --- tables of samples ---

_MAX_ROW_BYTES = 2**31 - 1
"""Most bytes of an entry of a table in numpy."""


@dataclass(frozen=True, slots=True)
class PlainSchema:
    """The columns of samples that may be plain; see :func:`plain_schema`."""

    columns: tuple[tuple[str, Encoding, int | None, bool], ...]
    """Name, encoding, bytes if they do not vary, and whether the column is requested."""

    def rows_like(self, sample: memoryview) -> PlainRows | None:
        """Return the layout of samples like this one; None if it cannot be read, or no column is requested."""
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
        heads = [(position, head) for position, head in heads if head]
        if start != len(sample) or start > _MAX_ROW_BYTES or not fields:
            return None
        return plain_rows(start, tuple(fields), tuple(heads))

    def values_of(self, rows: NDArray[np.void], plain: PlainRows) -> tuple[tuple[str, Callable[[int], Any]], ...]:
        """Return for each requested column its name, and a function from a sample's number to the value.

        Args:
            rows: The bytes of samples whose columns all have a fixed size.
            plain: Their layout.
        """
        table = rows.view(plain.columns)
        wanted = [(name, its_encoding) for name, its_encoding, _, is_wanted in self.columns if is_wanted]
        return tuple((name, _value_by_number(its_encoding, table[name])) for name, its_encoding in wanted)


def plain_schema(info: ShardInfo, columns: Sequence[str] | None = None) -> PlainSchema | None:
    """Return what a shard's samples may share; None if a column is neither a number nor an array.

    Args:
        info: The shard, as its index describes it.
        columns: The requested columns, which the shard has; None for all.
    """
    if info.format != "mds":
        return None
    names, encodings, sizes = (info.schema[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    return _schema(names, encodings, sizes, None if columns is None else frozenset(columns))


@lru_cache(maxsize=1024)
def _schema(
    names: tuple[str, ...], encodings: tuple[str, ...], sizes: tuple[int | None, ...], wanted: frozenset[str] | None
) -> PlainSchema | None:
    columns = list[tuple[str, Encoding, int | None, bool]]()
    for name, encoding_name, size in zip(names, encodings, sizes, strict=True):
        try:
            kind = encoding(encoding_name)
        except (ConfigError, MissingDependencyError):
            return None  # opening the shard raises the error, and that of a wrong index
        if not isinstance(kind, (*NUMBERS, NdarrayEncoding)) or kind.size != size:
            return None
        columns.append((name, kind, size, wanted is None or name in wanted))
    return PlainSchema(tuple(columns)) if columns else None


def _value_by_number(its_encoding: Encoding, column: NDArray[Any]) -> Callable[[int], Any]:
    """Return a function from a number to the entry of a column, as the encoding decodes it."""
    if isinstance(its_encoding, NdarrayEncoding):
        return lambda index: column[index].copy()
    return column.item if isinstance(its_encoding, IntEncoding) else column.__getitem__


def _values(its_encoding: Encoding, payload: memoryview) -> tuple[np.dtype[Any], int]:
    """Return the dtype of the values of a payload, and the byte at which they start."""
    if isinstance(its_encoding, NdarrayEncoding):
        shape, dtype, start = its_encoding.read_layout(payload)
        return np.dtype((dtype, shape)), start
    assert isinstance(its_encoding, NUMBERS), "checked by _schema"
    return its_encoding.dtype, 0


_COUNT = struct.Struct("<I")
_OFFSET_PAIR = struct.Struct("<II")
_MORE_FILES = "each shard that is read keeps a file open: allow more files (ulimit -n), or write larger shards"

# --- files of all formats ---


def table_bytes(num_samples: int) -> int:
    """Return the bytes of the table of that many samples."""
    return 4 + 4 * (num_samples + 1)


def read_offsets(start: memoryview, num_samples: int, shown: str) -> NDArray[np.int64]:
    """Read the table.

    Args:
        start: The file that begins with it; bytes after it are not read.
        num_samples: Number of samples according to the index.
        shown: Name of the file in errors.

    Returns:
        Array of shape (num_samples + 1,).

    Raises:
        ShardCorruptError: The file is too short, or states another number of samples.
    """
    stop = table_bytes(num_samples)
    if stop > len(start):
        raise ShardCorruptError(
            f"{shown} must have {stop} bytes for its offsets alone, but has {len(start)}", path=shown
        )
    (count,) = _COUNT.unpack_from(start)
    if count != num_samples:
        raise ShardCorruptError(f"{shown} must have {num_samples} samples by its index, but states {count}", path=shown)
    return np.frombuffer(start, "<u4", num_samples + 1, 4).astype(np.int64)


def write_offsets(offsets: NDArray[np.int64]) -> bytes:
    """Return the table of offsets of shape (samples + 1,)."""
    return _COUNT.pack(len(offsets) - 1) + offsets.astype("<u4").tobytes()


def check_lengths(
    offsets: NDArray[np.int64], smallest_bytes: int, shown: str, largest_bytes: int | None = None
) -> int | None:
    """Raise ShardCorruptError if offsets decrease, or a sample is smaller or larger than possible.

    Args:
        offsets: The result of :func:`read_offsets`.
        smallest_bytes: Smallest size of a sample.
        shown: Name of the file in errors.
        largest_bytes: Largest size of a sample; None if it varies.

    Returns:
        The bytes of each sample if all have the same size; else None, also without samples.

    Raises:
        ShardCorruptError: Names the worst sample.
    """
    lengths = np.diff(offsets)
    if not len(lengths):
        return None
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < smallest_bytes:
        worst, expected = int(lengths.argmin()), f"at least {smallest_bytes}"
    elif largest_bytes is not None and longest > largest_bytes:
        worst, expected = int(lengths.argmax()), f"no more than {largest_bytes}"
    else:
        return shortest if shortest == longest else None
    raise ShardCorruptError(
        f"{shown}, sample {worst}: expected {expected} bytes, but the offsets state {lengths[worst]}",
        path=shown,
        sample=worst,
    )


def read_places(
    table: memoryview, info: ShardInfo, shown: str, earliest: int, smallest_bytes: int, largest_bytes: int | None = None
) -> tuple[NDArray[np.int64], int | None]:
    """Read the offsets of consecutive samples up to the end of their file.

    Args:
        table: The file that begins with them.
        info: The shard, as its index describes it.
        shown: Name of the file in errors.
        earliest: Smallest offset of the first sample.
        smallest_bytes: Smallest size of a sample.
        largest_bytes: Largest size of a sample; None if it varies.

    Returns:
        The results of :func:`read_offsets` and :func:`check_lengths`.

    Raises:
        ShardCorruptError: The offsets contradict the index.
    """
    offsets, end = read_offsets(table, info.samples, shown), info.raw_data.bytes
    is_late = offsets[0] > earliest and info.raw_meta is not None  # before the samples of an MDS file is its config
    if offsets[0] < earliest or is_late or offsets[-1] != end:
        where = f"bytes {earliest} and {end}" + (f" of {info.raw_data.basename}" if info.raw_meta else "")
        raise ShardCorruptError(
            f"{shown} must hold its samples between {where}, but they start at {offsets[0]} and end at {offsets[-1]}",
            path=shown,
        )
    return offsets, check_lengths(offsets, smallest_bytes, shown, largest_bytes)


def map_file(path: Path, expected_bytes: int, start: int = 0, stop: int | None = None) -> memoryview:
    """Map a file of a known size, or some of its bytes; an empty range is an empty view.

    While the map is alive it holds a shared lock on the file, so that a cache knows that it is in use.

    Args:
        path: The file.
        expected_bytes: Its size.
        start: The first byte to map.
        stop: The byte after the last, if the file has it; None for its end.

    Raises:
        ShardCorruptError: It has another size.
        ObjectNotFoundError: It is missing.
        StorageError: It cannot be opened.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            with suppress(OSError):  # a filesystem without locks, or a file that is being removed
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(file.fileno())
            if status.st_nlink and status.st_size != expected_bytes:
                raise ShardCorruptError(
                    f"{path} must have {expected_bytes} bytes by its index, but has {status.st_size}", path=str(path)
                )
            if status.st_nlink:
                # The map keeps the file open, and so the lock. Files are replaced by renaming and never truncated.
                return _mapped(file.fileno(), start, expected_bytes if stop is None else min(stop, expected_bytes))
    except FileNotFoundError:
        pass
    except OSError as error:
        hint = _MORE_FILES if error.errno == errno.EMFILE else None
        raise StorageError(f"{path} cannot be opened: {error}", hint=hint, path=str(path)) from error
    # It may also have been removed from a cache between opening and locking it.
    raise ObjectNotFoundError(f"{path} is missing, but an index lists it", path=str(path))


def _mapped(descriptor: int, start: int, stop: int) -> memoryview:
    if stop <= start:
        return memoryview(b"")
    ahead = start % mmap.ALLOCATIONGRANULARITY
    length, offset = stop - start + ahead, start - ahead
    view = memoryview(mmap.mmap(descriptor, length, access=mmap.ACCESS_READ, offset=offset))
    return view[ahead:] if ahead else view


class Decoder(Protocol):
    """Decodes the bytes of samples to their requested columns."""

    @property
    def smallest_bytes(self) -> int:
        """Smallest size of a sample."""
        ...

    def decode(self, data: memoryview, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """Decode the sample at these positions of its data file, or all of the data.

        Raises:
            FormatError: The bytes are not a sample.
        """
        ...


class MappedShard:
    """The raw files of a shard, memory-mapped. No sample shares memory with the maps, so samples outlive the reader."""

    def __init__(self, info: ShardInfo, directory: Path, decoder: Decoder) -> None:
        """Map the raw files and check their sizes.

        Raises:
            ShardCorruptError: A file is not the one that the index describes.
            ObjectNotFoundError: A file is missing.
            StorageError: A file cannot be opened.
        """
        table = info.raw_meta or info.raw_data
        self._path, self._table_path = (join_under(directory, file.basename) for file in (info.raw_data, table))
        self._num_samples, self._decoder = info.samples, decoder
        self._values: tuple[tuple[str, Callable[[int], Any]], ...] = ()
        """A function from number to value for each column, if samples are alike and any bytes are valid."""
        self._table = map_file(self._table_path, table.bytes)
        self._data = self._table if info.raw_meta is None else map_file(self._path, info.raw_data.bytes)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one sample.

        Raises:
            SampleIndexError: The index is not in [0, len).
            ShardCorruptError: Its bytes are not one sample.
            EncodingError: A column does not hold what its encoding says.
        """
        if not 0 <= index < self._num_samples:
            raise no_such_sample(self._path, self._num_samples, index)
        if self._values:
            return {name: value(index) for name, value in self._values}
        start, stop = _OFFSET_PAIR.unpack_from(self._table, 4 + 4 * index)
        try:
            return self._decoder.decode(self._data, start, stop)
        except FormatError as error:
            shown = str(self._path)
            raise error.with_context(f"{shown}, sample {index}", path=shown, sample=index) from error

    def close(self) -> None:
        """Release the files; nothing can be read afterwards. A map is closed with its last slice.

        Only the traceback of a failed decode can hold such a slice longer.
        """
        self._table.release()
        self._data.release()


# --- MDS files ---


class MDSReader(MappedShard):
    """A shard file."""

    def __init__(
        self,
        info: ShardInfo,
        directory: Path,
        *,
        allow_unsafe_types: bool = False,
        columns: Sequence[str] | None = None,
        as_files: Collection[str] = (),
    ) -> None:
        """Map the raw file and check its size and its offsets; arguments and errors are those of ``open_shard``."""
        check_columns(info, columns)
        decoder = read_decoder(info, allow_unsafe_types=allow_unsafe_types, columns=columns, as_files=as_files)
        super().__init__(info, directory, decoder)
        self._schema = plain_schema(info, columns)
        self._plain: PlainRows | None = None
        self._rows: NDArray[np.void] | None = None
        smallest = decoder.smallest_bytes
        largest = None if decoder.header.size else smallest
        earliest = table_bytes(info.samples)
        _, self._sample_bytes = read_places(self._table, info, str(self._path), earliest, smallest, largest)
        plain = None if decoder.header.size else self.plain_rows()
        if plain is not None and self._schema is not None and self._rows is not None:
            self._values = self._schema.values_of(self._rows, plain)

    def plain_rows(self) -> PlainRows | None:
        """Return the layout of the first sample, if it may be plain and all samples have the same size; else None."""
        if self._plain is None and self._schema is not None and self._sample_bytes is not None:
            start = len(self._data) - self._num_samples * self._sample_bytes
            self._plain = self._schema.rows_like(self._data[start : start + self._sample_bytes])
            if self._plain is None:
                self._schema = None
            else:
                self._rows = np.ndarray((self._num_samples,), self._plain.row, self._data, start)
        return self._plain

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy the bytes of some samples; see :class:`PlainReader`."""
        assert self._rows is not None, "it has plain rows"
        self._rows.take(indexes, out=rows, mode="clip")  # writes directly, unlike the other modes

    def bytes_and_offsets(self) -> tuple[memoryview, NDArray[np.int64]]:
        """Return the file, and the offset of each sample; the last offset is the end of the last sample."""
        return self._data, read_offsets(self._table, self._num_samples, str(self._path))

    def close(self) -> None:
        """Release the file; nothing can be read afterwards."""
        self._schema = self._plain = self._rows = None
        self._values = ()
        super().close()


def encode_config(
    schema: Mapping[str, Any],
    shard_format: str = "mds",
    *,
    compression: str | None,
    hashes: Sequence[str],
    size_limit: int | None,
) -> bytes:
    """Return the config text of a shard, byte for byte as the original writer creates it."""
    return json.dumps(shared_entry(schema, shard_format, compression, hashes, size_limit), sort_keys=True).encode()


def shard_bytes(num_samples: int, samples_bytes: int, config_bytes: int) -> int:
    """Return the size of a shard file with that many samples and bytes of samples."""
    return table_bytes(num_samples) + config_bytes + samples_bytes


def check_shard_bytes(size: int) -> None:
    """Raise ConfigError if a shard file would have 4 GiB or more, which its 32-bit offsets cannot address.

    Raises:
        ConfigError: See above.
    """
    if size > MAX_RAW_BYTES:
        raise ConfigError(
            f"a shard can have {MAX_RAW_BYTES} bytes, but this one would have {size}",
            hint="set size_limit",
            option="size_limit",
        )


def head_bytes(ends: Sequence[int] | NDArray[np.int64], config: bytes) -> bytes:
    """Return the part of a shard file before its samples.

    Args:
        ends: End of each sample, counted from the start of the first; of shape (samples,).
        config: The result of :func:`encode_config`.

    Raises:
        ConfigError: The file would have 4 GiB or more.
    """
    offsets = np.zeros(len(ends) + 1, np.int64)
    offsets[1:] = ends
    offsets += shard_bytes(len(ends), 0, len(config))
    check_shard_bytes(int(offsets[-1]))
    return write_offsets(offsets) + config
