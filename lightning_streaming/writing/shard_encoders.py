"""How shards are compressed and hashed, how a sample becomes bytes, and how bytes become the files of a shard."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.compression import check_algorithm, compress, extension
from lightning_streaming.formats.encodings import Check, find_check
from lightning_streaming.formats.hashing import hash_bytes
from lightning_streaming.formats.index import MAX_RAW_BYTES, FileInfo, ShardInfo
from lightning_streaming.formats.mds.samples import SampleLayout, compile_layout
from lightning_streaming.formats.mds.shard import encode_config, head_bytes, shard_bytes
from lightning_streaming.formats.split import SplitLayout, make_split_layout, meta_bytes
from lightning_streaming.units import parse_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSettings:
    """How shards are cut, compressed and hashed."""

    compression: str | None
    """Algorithm, for example ``zstd:7``."""
    hashes: tuple[str, ...]
    """Names of the hashes to record of each file; sorted."""
    size_limit: int | None
    """Most raw bytes per shard; None for one shard of any size."""

    def __post_init__(self) -> None:
        if self.compression is not None:
            check_algorithm(self.compression)
        if list(self.hashes) != sorted(set(self.hashes)):
            raise ConfigError(
                f"hashes must be sorted and each be there once, but got {list(self.hashes)}", option="hashes"
            )
        for name in self.hashes:
            hash_bytes(name, b"")  # raises where it could not be computed
        if self.size_limit is not None and not 0 < self.size_limit <= MAX_RAW_BYTES:
            raise ConfigError(
                f"size_limit must be in (0, {MAX_RAW_BYTES}] bytes, but got {self.size_limit}", option="size_limit"
            )


def parse_settings(
    compression: str | None, hashes: Sequence[str] | None, size_limit: int | float | str | None
) -> ShardSettings:
    """Settings as a user writes them: empty for none, sizes like ``"64mb"``; of sizes None and 0 mean none.

    Raises:
        ConfigError: One of them cannot work.
        UnsupportedError: This version does not serve the compression.
        MissingDependencyError: A package that one of them needs is not installed.
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
    return ShardSettings(
        compression=compression or None,
        hashes=tuple(hashes or ()),
        size_limit=_parse_size_limit(size_limit),
    )


def _parse_size_limit(size_limit: int | float | str | None) -> int | None:
    """Bytes; None for no limit, which is written None or 0, and not as what only comes to 0."""
    if size_limit is None:
        return None
    if isinstance(size_limit, bool) or not isinstance(size_limit, Real | str):
        raise ConfigError(
            f"size_limit must be a size like '64mb', or None for no limit, but got {short_repr(size_limit)}",
            option="size_limit",
        )
    found = parse_bytes(size_limit, "size_limit")
    if not found and any(digit in str(size_limit) for digit in "123456789"):
        raise ConfigError(
            f"size_limit must be at least 1 byte, or None for no limit, but got {short_repr(size_limit)}",
            option="size_limit",
        )
    return found or None


def shard_name(number: int, shard_format: str) -> str:
    """The raw data file of a shard: ``shard.00012.mds``."""
    return f"shard.{number:05}.{shard_format}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEncoder(ABC):
    """What all shards of one writer share: how samples become bytes, and these its files and entry in the index."""

    format: str
    """``mds``, ``json``, ``csv``, ``tsv`` or ``xsv``."""
    settings: ShardSettings
    """How to cut, compress and hash."""
    config: bytes
    """The text that describes settings and columns, and stands in every shard."""
    schema: Mapping[str, Any]
    """What the index says of the columns."""
    uncounted_bytes: int = 0
    """Bytes of the raw data file that ``size_limit`` does not count."""

    @abstractmethod
    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        """Turn a sample into bytes, in parts that follow each other. They may be the memory of its values.

        Raises:
            EncodingError: A column is missing, or its value does not fit.
        """

    @abstractmethod
    def raw_bytes(self, num_samples: int, data_bytes: int) -> int:
        """What ``size_limit`` counts of a shard with so many samples, of so many bytes together.

        One byte more is one more, and each sample adds the same beside its bytes.
        """

    @abstractmethod
    def make(self, number: int, samples: EncodedSamples) -> EncodedShard:
        """Make the shard at place ``number``, from 0, of samples, which may be none and whose memory it keeps using.

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
    """One file a shard; ``size_limit`` counts all of it."""

    layout: SampleLayout

    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        return self.layout.parts(sample)

    def raw_bytes(self, num_samples: int, data_bytes: int) -> int:
        return shard_bytes(num_samples, data_bytes, len(self.config))

    def make(self, number: int, samples: EncodedSamples) -> EncodedShard:
        head = head_bytes(samples.ends, self.config)
        return self._shard(len(samples), _make_file(shard_name(number, self.format), head, self.settings, samples))


def make_mds_encoder(columns: Mapping[str, str], settings: ShardSettings) -> ShardEncoder:
    """Lay out the columns of MDS shards, sorted by name.

    Raises:
        ConfigError: There are no columns, one is not named by a text, or an encoding does not exist.
        UnsupportedError: This version does not serve an encoding.
    """
    _check_columns(columns)
    names = tuple(sorted(columns))
    layout = compile_layout(names, tuple(columns[name] for name in names))
    schema = layout.schema
    config = encode_config(schema, **asdict(settings))
    return _MDSShardEncoder(format="mds", layout=layout, settings=settings, config=config, schema=schema)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SplitShardEncoder(ShardEncoder):
    """A data file and a meta file a shard; ``size_limit`` counts the rows alone."""

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
    """Lay out the columns of JSONL, CSV, TSV or XSV shards, sorted by name.

    Raises:
        ConfigError: There are no columns, one is not named by a text, an encoding is not ``str``, ``int`` or ``float``,
            or ``newline`` or ``separator`` cannot work.
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
    """Samples as bytes, to be looked at while their buffer lends them."""

    data: memoryview
    """All of them, back to back; of unsigned bytes."""
    ends: NDArray[np.int64]
    """Where each ends in the data; of shape (samples,)."""
    memory: mmap.mmap
    """What the data begins; the rest is room."""

    def __len__(self) -> int:
        return len(self.ends)

    def behind(self, head: bytes) -> bytes | memoryview:
        """All of them behind ``head``, in one piece. They are moved to where it ends: ``data`` is void afterwards."""
        size = len(head) + len(self.data)
        if size > len(self.memory):
            return b"".join((head, self.data))
        self.memory.move(len(head), 0, len(self.data))
        self.memory[: len(head)] = head
        return memoryview(self.memory)[:size]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedShard:
    """A shard, in memory."""

    info: ShardInfo
    """The entry of the index."""
    files: tuple[StoredFile, ...]
    """What is to be stored, the meta file before the data file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """One file of a shard, ready to be stored."""

    raw: FileInfo
    """The file before compression."""
    compressed: FileInfo | None
    """The compressed file; None without compression."""
    pieces: tuple[bytes | memoryview, ...]
    """The content of the one of both that is stored."""

    @property
    def basename(self) -> str:
        """Where it is stored."""
        return (self.compressed or self.raw).basename


def _make_file(
    basename: str, head: bytes, settings: ShardSettings, samples: EncodedSamples | None = None
) -> StoredFile:
    """Hash a raw file, and compress it where the settings say so.

    Args:
        basename: Name of the raw file.
        head: What it begins with.
        settings: How to hash and compress.
        samples: What follows, if anything does. After compression they are not to be looked at.
    """
    pieces = (head,) if samples is None else (head, samples.data)
    raw = _file_info(basename, pieces, settings)
    if settings.compression is None:
        return StoredFile(raw=raw, compressed=None, pieces=pieces)
    with memoryview(head if samples is None else samples.behind(head)) as whole:
        data = compress(settings.compression, whole)
    compressed = _file_info(f"{basename}.{extension(settings.compression)}", (data,), settings)
    return StoredFile(raw=raw, compressed=compressed, pieces=(data,))


def _file_info(basename: str, pieces: Sequence[bytes | memoryview], settings: ShardSettings) -> FileInfo:
    hashes = {name: hash_bytes(name, *pieces) for name in settings.hashes}
    return FileInfo(basename=basename, bytes=sum(map(len, pieces)), hashes=hashes)


# The first type that fits decides, so bool stands before int: JSON gives True back, where int would give 1.
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
    found = {name: _infer_encoding(value) for name, value in sample.items()}
    missing = [name for name, encoding in found.items() if encoding is None]
    if missing:
        held = ", ".join(f"{name!r}, a {type(sample[name]).__name__}" for name in missing)
        columns = {name: encoding or "..." for name, encoding in found.items()}
        raise ConfigError(f"no encoding follows from column {held}", hint=f"pass columns={columns}", option="columns")
    return {name: encoding for name, encoding in found.items() if encoding is not None}


def infer_text_columns(sample: Mapping[str, Any]) -> dict[str, str]:
    """Choose ``str``, ``int`` or ``float`` for each column of a sample, for the formats that know no other.

    Returns:
        Column name to encoding name.

    Raises:
        ConfigError: A value has another type; bool too, which would come back as a number or a text.
    """
    wrong = [
        f"{name!r} is a {type(value).__name__}" for name, value in sample.items() if type(value) not in _TEXT_TYPES
    ]
    if wrong:
        raise ConfigError(
            f"column {', '.join(wrong)}, but this format knows str, int and float only",
            hint="turn it into one of them, or use MDSWriter",
            option="columns",
        )
    return {name: type(value).__name__ for name, value in sample.items()}


def _check_columns(columns: object) -> None:
    """Refuse what does not say of columns what their encodings are.

    Raises:
        ConfigError: It maps no texts to texts.
    """
    if not isinstance(columns, Mapping) or not all(isinstance(text, str) for pair in columns.items() for text in pair):
        shown = dict(columns) if isinstance(columns, Mapping) else columns
        raise ConfigError(
            f"columns must map names to encodings, all of them texts, but got {short_repr(shown)}", option="columns"
        )


def columns_of(schema: Mapping[str, Any]) -> dict[str, str]:
    """Column name to encoding name, from what an index says of the columns in any format."""
    if "columns" in schema:
        return dict(schema["columns"])
    return dict(zip(schema["column_names"], schema["column_encodings"], strict=True))


def _infer_encoding(value: object) -> str | None:
    for kind, encoding_name in _ENCODING_OF_TYPE:
        if isinstance(value, kind):
            return encoding_name
    if isinstance(value, np.number) and value.dtype.kind in "iuf" and value.dtype.itemsize <= 8:
        return str(value.dtype.name)
    return None


def exact_checks(schema: Mapping[str, Any]) -> tuple[tuple[str, Check], ...]:
    """Columns with what their values must pass to come back as they are."""
    found = ((name, find_check(encoding)) for name, encoding in columns_of(schema).items())
    return tuple((name, check) for name, check in found if check is not None)


def check_exact(sample: Mapping[str, Any], checks: Iterable[tuple[str, Check]]) -> None:
    """Refuse a sample with a value that would come back as another one.

    Raises:
        EncodingError: Says which, and how.
    """
    for name, check in checks:
        if name in sample:  # the encoder says what is missing
            try:
                check(sample[name])
            except EncodingError as error:
                raise error.with_context(f"column {name!r}") from None
