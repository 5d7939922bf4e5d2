"""Shards: their options, the encoding of samples, the buffers that gather them, and the files that they become."""

from __future__ import annotations

import mmap
import sys
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.algorithms import check_algorithm, compress, extension, hash_bytes
from lightning_streaming.formats.encodings import Check, find_check
from lightning_streaming.formats.index import MAX_RAW_BYTES, FileInfo, ShardInfo
from lightning_streaming.formats.mds import (
    SampleLayout,
    check_shard_bytes,
    compile_layout,
    encode_config,
    head_bytes,
    shard_bytes,
)
from lightning_streaming.formats.split import SplitLayout, make_split_layout, meta_bytes
from lightning_streaming.storage import StorageOptions
from lightning_streaming.units import parse_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Options = TypeVar("_Options")
Sample = Mapping[str, Any]

_FIRST_ROOM = 2**16
_HUGE_PAGES_FROM = 2**22
"""Room from which pages of 2 MB are requested; less would be mostly empty."""
_SMALLEST_KEPT = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSettings:
    """Size limit, compression and hashes of shards."""

    compression: str | None
    """Algorithm, for example ``zstd:7``."""
    hashes: tuple[str, ...]
    """Names of the hashes to record of each file; sorted."""
    size_limit: int | None
    """Maximum raw bytes per shard; None for one shard of any size."""

    def __post_init__(self) -> None:
        if self.compression is not None:
            check_algorithm(self.compression)
        if list(self.hashes) != sorted(set(self.hashes)):
            raise ConfigError(
                f"hashes must be sorted, without duplicates, but got {list(self.hashes)}", option="hashes"
            )
        for name in self.hashes:
            hash_bytes(name, b"")  # raises if it cannot be computed
        if self.size_limit is not None and not 0 < self.size_limit <= MAX_RAW_BYTES:
            raise ConfigError(
                f"size_limit must be in (0, {MAX_RAW_BYTES}] bytes, but got {self.size_limit}", option="size_limit"
            )


def parse_settings(
    compression: str | None, hashes: Sequence[str] | None, size_limit: int | float | str | None
) -> ShardSettings:
    """Return the settings of a user's options: empty for none, sizes like ``"64mb"``, None or 0 for no size limit.

    Raises:
        ConfigError: An option is invalid.
        UnsupportedError: This version does not support the compression.
        MissingDependencyError: A package that an option needs is not installed.
    """
    if isinstance(hashes, str):
        raise ConfigError(
            f"hashes must be a list of names, but got the text {short_repr(hashes)}",
            hint=f"write [{hashes!r}]",
            option="hashes",
        )
    if not isinstance(hashes or (), Sequence) or not all(isinstance(name, str) for name in hashes or ()):
        raise ConfigError(f"hashes must be a list of names, but got {short_repr(hashes)}", option="hashes")
    if not isinstance(compression or "", str):
        raise ConfigError(
            f"compression must be a name like 'zstd' or 'zstd:19', but got {short_repr(compression)}",
            option="compression",
        )
    if isinstance(size_limit, bool) or not isinstance(size_limit, Real | str | None):
        raise ConfigError(
            f"size_limit must be a size like '64mb', or None for no limit, but got {short_repr(size_limit)}",
            option="size_limit",
        )
    num_bytes = 0 if size_limit is None else parse_bytes(size_limit, "size_limit")
    if not num_bytes and any(digit in str(size_limit) for digit in "123456789"):  # 0.5, for example
        raise ConfigError(
            f"size_limit must be at least 1 byte, or None for no limit, but got {short_repr(size_limit)}",
            option="size_limit",
        )
    return ShardSettings(compression=compression or None, hashes=tuple(hashes or ()), size_limit=num_bytes or None)


def options_from(kind: type[_Options], values: Mapping[str, Any]) -> _Options:
    """Return checked options with values from the arguments of a call.

    Args:
        kind: Class of the options.
        values: Arguments by name, and possibly more.
    """
    return kind(**{option.name: values[option.name] for option in fields(kind)})  # type: ignore[arg-type]  # a dataclass


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Options of shards.

    Args:
        columns: Column name to encoding, for example ``{"id": "int", "image": "ndarray:uint8:32,32,3"}``. Other values
            of samples are not written. None infers the columns from the first sample; all others must have the same.
        compression: Algorithm, for example ``"zstd"`` or ``"zstd:19"``; None for raw shards.
        hashes: Names of the hashes to record of each file, sorted.
        size_limit: Maximum raw bytes of a shard, as a number or like ``"64mb"``; a larger sample gets a separate shard.
            None, 0 or ``"0"`` for one shard of any size below 4 GiB.
        storage_options: Arguments for the filesystem of the URL.
        strict: Whether to refuse a value that would be read as another one: 1.5 or ``"3"`` in a column of integers, a
            bool as a number, 1e300 in ``float32``, NaN in JSON. Without it they are converted as MosaicML Streaming
            does; all other bytes are the same.
    """

    columns: Mapping[str, str] | None = None
    compression: str | None = None
    hashes: Sequence[str] | None = None
    size_limit: int | float | str | None = 2**26
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    strict: bool = False

    def __post_init__(self) -> None:
        parse_settings(self.compression, self.hashes, self.size_limit)  # raises if they are invalid
        object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))

    @property
    def settings(self) -> ShardSettings:
        """The parsed settings of shards."""
        return parse_settings(self.compression, self.hashes, self.size_limit)

    def of_shards(self) -> dict[str, Any]:
        """Return only these options, as keyword arguments."""
        return {option.name: getattr(self, option.name) for option in fields(ShardOptions)}


def shard_name(number: int, shard_format: str) -> str:
    """Return the name of the raw data file of a shard: ``shard.00012.mds``."""
    return f"shard.{number:05}.{shard_format}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEncoder(ABC):
    """Encoder of all shards of one writer: samples to bytes, and those to files and an entry of the index."""

    format: str
    """``mds``, ``json``, ``csv``, ``tsv`` or ``xsv``."""
    settings: ShardSettings
    """Size limit, compression and hashes."""
    config: bytes
    """The text in every shard that describes settings and columns."""
    schema: Mapping[str, Any]
    """The columns as the index describes them."""
    uncounted_bytes: int = 0
    """Bytes of the raw data file that ``size_limit`` does not count."""

    @abstractmethod
    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        """Encode a sample as bytes, in parts that follow each other. They may share the memory of its values.

        Raises:
            EncodingError: A column is missing, or its value does not fit.
        """

    @abstractmethod
    def raw_bytes(self, num_samples: int, data_bytes: int) -> int:
        """Return the size that ``size_limit`` limits, of a shard with so many samples and bytes of samples.

        It is linear: each further byte adds one, and each sample adds a constant to that.
        """

    @abstractmethod
    def make(self, number: int, samples: EncodedSamples) -> EncodedShard:
        """Create shard ``number``, from 0, of samples, possibly none, whose memory it shares.

        Raises:
            ConfigError: A file of it would have 4 GiB or more.
        """

    def _shard(self, samples: int, data: StoredFile, meta: StoredFile | None = None) -> EncodedShard:
        info = ShardInfo(
            format=self.format,
            samples=samples,
            **asdict(self.settings),
            raw_data=data.raw,
            zip_data=data.compressed,
            raw_meta=None if meta is None else meta.raw,
            zip_meta=None if meta is None else meta.compressed,
            schema=self.schema,
        )
        return EncodedShard(info=info, files=(data,) if meta is None else (meta, data))


@dataclass(frozen=True, kw_only=True, slots=True)
class _MDSShardEncoder(ShardEncoder):
    """Encoder of one file per shard; ``size_limit`` counts the whole file."""

    layout: SampleLayout

    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        return self.layout.parts(sample)

    def raw_bytes(self, num_samples: int, data_bytes: int) -> int:
        return shard_bytes(num_samples, data_bytes, len(self.config))

    def make(self, number: int, samples: EncodedSamples) -> EncodedShard:
        head = head_bytes(samples.ends, self.config)
        return self._shard(len(samples), _make_file(shard_name(number, self.format), head, self.settings, samples))


def make_mds_encoder(columns: Mapping[str, str], settings: ShardSettings) -> ShardEncoder:
    """Return the encoder of MDS shards with these columns, sorted by name.

    Raises:
        ConfigError: There are no columns, the name of one is no text, or an encoding does not exist.
        UnsupportedError: This version does not support an encoding.
    """
    _check_columns(columns)
    names = tuple(sorted(columns))
    layout = compile_layout(names, tuple(columns[name] for name in names))
    schema = layout.schema
    config = encode_config(schema, **asdict(settings))
    return _MDSShardEncoder(format="mds", layout=layout, settings=settings, config=config, schema=schema)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SplitShardEncoder(ShardEncoder):
    """Encoder of a data file and a meta file per shard; ``size_limit`` counts only the rows."""

    layout: SplitLayout

    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        return (self.layout.encode(sample),)

    def raw_bytes(self, num_samples: int, data_bytes: int) -> int:  # noqa: ARG002 other formats count them
        return data_bytes

    def make(self, number: int, samples: EncodedSamples) -> EncodedShard:
        basename, header = shard_name(number, self.format), self.layout.header
        offsets = np.concatenate([[0], samples.ends]) + len(header)
        meta = _make_file(f"{basename}.meta", meta_bytes(offsets, self.config), self.settings)
        return self._shard(len(samples), _make_file(basename, header, self.settings, samples), meta)


def make_split_encoder(
    shard_format: str,
    columns: Mapping[str, str],
    settings: ShardSettings,
    *,
    newline: str,
    separator: str | None = None,
) -> ShardEncoder:
    """Return the encoder of JSONL, CSV, TSV or XSV shards with these columns, sorted by name.

    Raises:
        ConfigError: There are no columns, the name of one is no text, an encoding is not ``str``, ``int`` or ``float``,
            or ``newline`` or ``separator`` is invalid.
    """
    _check_columns(columns)
    layout = make_split_layout(shard_format, columns, newline, separator)
    config = encode_config(layout.schema, layout.format, **asdict(settings))
    return _SplitShardEncoder(
        format=layout.format,
        layout=layout,
        settings=settings,
        config=config,
        schema=layout.schema,
        uncounted_bytes=len(layout.header),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSamples:
    """Samples as bytes; valid within the block of :meth:`ShardBuffer.samples`."""

    data: memoryview
    """Their bytes, back to back; of unsigned bytes."""
    ends: NDArray[np.int64]
    """The end of each in the data; of shape (samples,)."""
    memory: mmap.mmap
    """The memory that starts with the data; the rest is free."""

    def __len__(self) -> int:
        return len(self.ends)

    def behind(self, head: bytes) -> bytes | memoryview:
        """Return ``head`` and all samples in one piece. The samples are moved: ``data`` is invalid afterwards."""
        size = len(head) + len(self.data)
        if size > len(self.memory):
            return b"".join((head, self.data))
        self.memory.move(len(head), 0, len(self.data))
        self.memory[: len(head)] = head
        return memoryview(self.memory)[:size]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedShard:
    """A shard in memory."""

    info: ShardInfo
    """Its entry in the index."""
    files: tuple[StoredFile, ...]
    """The files to store, the meta file before the data file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file of a shard, ready to store."""

    raw: FileInfo
    """The file before compression."""
    compressed: FileInfo | None
    """The compressed file; None without compression."""
    pieces: tuple[bytes | memoryview, ...]
    """The content of the stored one: the compressed file, or else the raw one."""

    @property
    def basename(self) -> str:
        """The name of the stored file."""
        return (self.compressed or self.raw).basename


def _make_file(
    basename: str, head: bytes, settings: ShardSettings, samples: EncodedSamples | None = None
) -> StoredFile:
    """Hash a raw file, and compress it according to the settings.

    Args:
        basename: Name of the raw file.
        head: Its first bytes.
        settings: Compression and hashes.
        samples: The rest of its bytes, if there is any. After compression the samples are invalid.
    """

    def info(name: str, pieces: Sequence[bytes | memoryview]) -> FileInfo:
        hashes = {kind: hash_bytes(kind, *pieces) for kind in settings.hashes}
        return FileInfo(basename=name, bytes=sum(map(len, pieces)), hashes=hashes)

    pieces = (head,) if samples is None else (head, samples.data)
    raw = info(basename, pieces)
    if settings.compression is None:
        return StoredFile(raw=raw, compressed=None, pieces=pieces)
    with memoryview(head if samples is None else samples.behind(head)) as whole:
        data = compress(settings.compression, whole)
    compressed = info(f"{basename}.{extension(settings.compression)}", (data,))
    return StoredFile(raw=raw, compressed=compressed, pieces=(data,))


# The first type that fits decides, so bool is before int: JSON returns True, where int would return 1.
_ENCODING_OF_TYPE = (
    (bool, "json"),
    (bytes, "bytes"),
    (str, "str"),
    (int, "int"),
    (float, "float64"),
    (Decimal, "str_decimal"),
    (np.ndarray, "ndarray"),
    (dict, "json"),
    (list, "json"),
)

_TEXT_TYPES = (str, int, float)


def infer_columns(sample: Mapping[str, Any]) -> dict[str, str]:
    """Choose an encoding for each column of a sample, by the type of its value.

    bytes, str and int keep their names, float becomes float64, a numpy number its dtype, an array ``ndarray`` (of any
    dtype and shape), Decimal ``str_decimal``; bool, dict and list become ``json``.

    Returns:
        Column name to encoding name.

    Raises:
        ConfigError: A value has another type.
    """

    def infer(value: object) -> str | None:
        for kind, encoding in _ENCODING_OF_TYPE:
            if isinstance(value, kind):
                return encoding
        if isinstance(value, np.number) and value.dtype.kind in "iuf" and value.dtype.itemsize <= 8:
            return str(value.dtype.name)
        return None

    inferred = {name: infer(value) for name, value in sample.items()}
    missing = [name for name, encoding in inferred.items() if encoding is None]
    if missing:
        shown = ", ".join(f"{name!r}, a {type(sample[name]).__name__}" for name in missing)
        columns = {name: encoding or "..." for name, encoding in inferred.items()}
        raise ConfigError(f"no encoding for column {shown}", hint=f"pass columns={columns}", option="columns")
    return {name: encoding for name, encoding in inferred.items() if encoding is not None}


def infer_text_columns(sample: Mapping[str, Any]) -> dict[str, str]:
    """Choose ``str``, ``int`` or ``float`` for each column of a sample, for the formats that have no other encoding.

    Returns:
        Column name to encoding name.

    Raises:
        ConfigError: A value has another type; bool too, which would be read as a number or a text.
    """
    wrong = [
        f"{name!r} is a {type(value).__name__}" for name, value in sample.items() if type(value) not in _TEXT_TYPES
    ]
    if wrong:
        raise ConfigError(
            f"column {', '.join(wrong)}, but this format supports only str, int and float",
            hint="convert it to one of them, or use MDSWriter",
            option="columns",
        )
    return {name: type(value).__name__ for name, value in sample.items()}


def _check_columns(columns: object) -> None:
    """Check that columns are a mapping from texts to texts."""
    if not isinstance(columns, Mapping) or not all(isinstance(text, str) for pair in columns.items() for text in pair):
        shown = dict(columns) if isinstance(columns, Mapping) else columns
        raise ConfigError(
            f"columns must map names to encodings, all of them texts, but got {short_repr(shown)}", option="columns"
        )


def columns_of(schema: Mapping[str, Any]) -> dict[str, str]:
    """Return column name to encoding name, from an index's description of the columns in any format."""
    if "columns" in schema:
        return dict(schema["columns"])
    return dict(zip(schema["column_names"], schema["column_encodings"], strict=True))


def exact_checks(schema: Mapping[str, Any]) -> tuple[tuple[str, Check], ...]:
    """Return columns with the checks that their values are read as they were written."""
    checks = ((name, find_check(encoding)) for name, encoding in columns_of(schema).items())
    return tuple((name, check) for name, check in checks if check is not None)


def check_exact(sample: Mapping[str, Any], checks: Iterable[tuple[str, Check]]) -> None:
    """Check that all values of a sample would be read as they are.

    Raises:
        EncodingError: A value would be read as another one.
    """
    for name, check in checks:
        if name in sample:  # the encoder raises an error for missing ones
            try:
                check(sample[name])
            except EncodingError as error:
                raise error.with_context(f"column {name!r}") from None


class ShardBuilder:
    """Builder of one shard after another: gathers encoded samples up to the size limit."""

    def __init__(self, encoder: ShardEncoder, *, number: int = 0) -> None:
        """Start an empty shard.

        Args:
            encoder: Encoder of the shards.
            number: Number of the first shard.
        """
        self.encoder = encoder
        self.number = number
        """The number of the current shard."""
        self._size_limit = encoder.settings.size_limit
        self._expected = self._size_limit or MAX_RAW_BYTES
        self._buffer = ShardBuffer(self._expected)
        self._spare: deque[ShardBuffer] = deque()
        size_of_none = encoder.raw_bytes(0, 0)
        self._bytes_per_sample = encoder.raw_bytes(1, 0) - size_of_none  # in addition to its own
        largest = MAX_RAW_BYTES - encoder.uncounted_bytes
        self._safe_bytes = (largest if self._size_limit is None else min(self._size_limit, largest)) - size_of_none

    @property
    def has_samples(self) -> bool:
        """Whether the current shard has samples."""
        return len(self._buffer) > 0

    def add(self, parts: Sequence[Buffer]) -> bool:
        """Add an encoded sample, in parts, which are copied. If it raises, the sample was not added.

        Returns:
            Whether it was added; if not, the shard ends before it: it belongs into the buffer of :meth:`following`.

        Raises:
            ConfigError: The shard would have 4 GiB or more, or the system has no memory for it.
        """
        if self._buffer.append(parts, self._safe_bytes, self._bytes_per_sample):
            return True
        # The sample exceeds the limit: it is alone in its shard, or the shard ends before it.
        data_bytes = count_bytes(parts)
        size = self.encoder.raw_bytes(len(self._buffer) + 1, self._buffer.num_bytes + data_bytes)
        is_cut = self._size_limit is not None and size > self._size_limit and (self.has_samples or self.number == 0)
        if is_cut:
            size = self.encoder.raw_bytes(1, data_bytes)
        check_shard_bytes(size + self.encoder.uncounted_bytes)
        return not is_cut and self._buffer.append(parts)

    def following(self, parts: Sequence[Buffer]) -> ShardBuffer:
        """Return the buffer of the next shard, with its first sample. Nothing is changed yet."""
        following = self._spare.pop() if self._spare else ShardBuffer(self._expected)
        following.append(parts)
        return following

    def cut(self, following: ShardBuffer) -> ShardBuffer:
        """End the current shard, and continue with the buffer that :meth:`following` returned.

        Returns:
            The samples of the ended shard. There are none if the first sample of a dataset is larger than the limit:
            MosaicML Streaming writes an empty shard 0.
        """
        ended, self._buffer = self._buffer, following
        self.number += 1
        return ended

    def last(self) -> ShardBuffer:
        """Return the samples of the last shard; none may be added any more."""
        return self._buffer

    def reuse(self, stored: ShardBuffer) -> None:
        """Take back a buffer once it is stored; in any thread."""
        if stored.room <= max(2 * self._expected, _SMALLEST_KEPT):  # else a huge sample was in it
            stored.clear()
            self._spare.append(stored)


class ShardBuffer:
    """Memory with the bytes of samples, each copied once.

    Touching memory for the first time costs more than filling it, because of the page fault every 4 KiB. So memory is
    requested in huge pages, where the system has them, and :meth:`clear` keeps it for the next shard.
    """

    def __init__(self, expected: int = 0) -> None:
        """Allocate little memory, which grows with the samples.

        Args:
            expected: Expected total size. Up to it the memory is doubled when it is full, and beyond it grows only as
                needed.
        """
        self._expected = expected
        try:
            self._memory = _allocate(_FIRST_ROOM)
        except (OSError, MemoryError):
            raise _no_memory(_FIRST_ROOM) from None
        self._ends = array("Q")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._ends)

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples."""
        return self._ends[-1] if self._ends else 0

    @property
    def room(self) -> int:
        """Bytes that it could hold, and that may have been touched."""
        return len(self._memory)

    def append(self, parts: Sequence[Buffer], most: int = sys.maxsize, each: int = 0) -> bool:
        """Add a sample, whole or not at all, if it is within the limit. If it raises, the sample was not added.

        Args:
            parts: Its bytes; contiguous in memory, and of any type of values.
            most: Maximum bytes of all samples.
            each: Bytes that each sample counts in addition to its own.

        Returns:
            Whether it was added.

        Raises:
            ConfigError: The system has no memory for it.
        """
        ends = self._ends
        count = len(ends)
        try:
            memory = self._memory
            memory.seek(ends[-1] if count else 0)  # an interrupted call may have moved it
            try:
                for part in parts:
                    memory.write(part)
            except ValueError:  # a map without enough room raises it
                if not self._make_room(parts, most - each * (count + 1)):
                    return False
            stop = self._memory.tell()
            if stop + each * (count + 1) > most:
                return False
            ends.append(stop)
        except BaseException:  # of a signal, which may be raised as late as when the last call returns
            del ends[count:]
            raise
        return True

    @contextmanager
    def samples(self) -> Iterator[EncodedSamples]:
        """Yield the samples. In the block none may be added."""
        with memoryview(self._memory)[: self.num_bytes] as data:
            yield EncodedSamples(data=data, ends=np.array(self._ends, np.int64), memory=self._memory)

    def clear(self) -> None:
        """Remove all samples; keep the memory."""
        del self._ends[:]

    def _make_room(self, parts: Sequence[Buffer], most: int) -> bool:
        """Write a sample for which there was no room, unless it exceeds the limit, which is checked before copying."""
        needed = self.num_bytes + count_bytes(parts)
        if needed > most:
            return False
        if needed > self.room:
            self._grow(needed, min(2 * self.room, self._expected))
        self._memory.seek(self.num_bytes)
        for part in parts:
            self._memory.write(part)
        return True

    def _grow(self, needed: int, preferred: int) -> None:
        """Grow the memory to the preferred size, or to the needed one if the system refuses that."""
        for size in sorted({needed, max(needed, preferred)}, reverse=True):
            with suppress(OSError, MemoryError):
                try:
                    self._memory.resize(size)  # its pages get other addresses; nothing is copied
                    _use_huge_pages(self._memory)
                except SystemError:  # the system cannot resize maps
                    larger = _allocate(size)
                    with memoryview(self._memory)[: self.num_bytes] as data:
                        larger.write(data)
                    self._memory = larger
                return
        raise _no_memory(needed)


def count_bytes(parts: Sequence[Buffer]) -> int:
    """Return the bytes of a sample."""
    return sum(memoryview(part).nbytes for part in parts)


def _allocate(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _use_huge_pages(memory)
    return memory


def _use_huge_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE") and len(memory) >= _HUGE_PAGES_FROM:
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def _no_memory(size: int) -> ConfigError:
    return ConfigError(
        f"the system refuses {size} bytes of memory for a shard",
        hint="choose a smaller size_limit or max_workers, or have fewer writers at a time",
        option="size_limit",
    )
