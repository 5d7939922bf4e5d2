"""Entries of an index: a shard and its files, and a table of very many shards.

A :class:`ShardInfo` and a :class:`FileInfo` are valid once they exist: sizes are in range, file names are inside the
dataset, and each shard has the files that its compression requires.

A :class:`ShardTable` stores shards as a few arrays, so that a million of them take megabytes and are created at once.
Common facts of a writer's shards are stored once, as a *kind*. The rest are numbers and texts. With kinds k0 (one file,
one hash) and k1 (raw and compressed, no hash), three shards are::

    kinds     k0         k1                  k0
    samples   10         11                  12
    sizes     99         99     70           99           bytes of each file
    texts     a.mds ab   b.mds  b.mds.gz     c.mds cd     each file's name and hashes, end to end in one text
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from itertools import chain, pairwise
from json.encoder import encode_basestring_ascii as quote
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, IndexFormatError
from lightning_streaming.escaping import short_repr, shortened
from lightning_streaming.files import join_under
from lightning_streaming.formats.values import brief

INDEX_VERSION = 2
INDEX_BASENAME = "index.json"

MAX_RAW_BYTES = 2**32 - 1
"""Most bytes of a raw file, and most samples of a shard: both are written in 32 bits."""
OTHER_FORMATS = ("parquet", "webdataset", "npy", "megatron", "litdata")
"""Formats of other libraries; their files are read in place, at any size."""

FILE_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".parq", ".pq"),
    "webdataset": (".tar", ".tar.gz", ".tgz"),
    "npy": (".npy",),
    "megatron": (".bin", ".idx"),
}
"""Suffixes of a format's files, if a file can be given by its name."""

PART = "part"
"""Used as algorithm: the stored file holds several shards, and the raw file is created from a part of it."""

_MAX_BYTES = 2**63 - 1
"""Largest file of any file system."""
_ANYWHERE = Path()
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 1024
"""Longest file name, and longest key, of file systems and buckets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """One file of a shard."""

    basename: str
    """Path relative to the dataset's directory, with forward slashes."""
    bytes: int
    """Size of the whole file."""
    hashes: Mapping[str, str]
    """Hash name to lowercase hexadecimal digits of the whole file."""
    version: str = ""
    """The version in the store when the file was indexed, like ``etag:5d41402a``; "" if unknown. It does not identify
    the data: a copy of the file at another location has another version."""

    def __post_init__(self) -> None:
        _check_name(self.basename)
        if self.bytes < 0:
            raise IndexFormatError(
                f"bytes of {self.basename} must not be negative, but is {self.bytes}", path=self.basename
            )
        if self.bytes > _MAX_BYTES:
            raise IndexFormatError(
                f"bytes of {self.basename} must be at most {_MAX_BYTES}, but is {brief(self.bytes)}",
                path=self.basename,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One shard: its samples, and each file in its raw form and, if it is compressed, in its stored form."""

    format: str
    """``mds``, ``json``, ``csv``, ``tsv`` or ``xsv``; or one of ``OTHER_FORMATS``."""
    samples: int
    """Number of samples; may be 0."""
    compression: str | None
    """Algorithm, for example ``zstd:7``; or ``PART``."""
    hashes: tuple[str, ...]
    """Names of the hashes recorded of each file, sorted."""
    size_limit: int | None
    """The writer's limit of raw bytes per shard."""
    raw_data: FileInfo
    """The uncompressed data file, also recorded if only the compressed one is stored."""
    zip_data: FileInfo | None
    """The compressed data file."""
    raw_meta: FileInfo | None = None
    """The uncompressed meta file of the formats that have one."""
    zip_meta: FileInfo | None = None
    """The compressed meta file."""
    schema: Mapping[str, Any]
    """The format's keys of columns, with tuples for lists; must not be changed, as a writer's shards share it."""
    column_bytes: str | None = None
    """Size of each column in the raw file, as numbers with commas, if columns are stored separately."""

    def __post_init__(self) -> None:
        if not 0 <= self.samples <= MAX_RAW_BYTES:
            raise IndexFormatError(f"samples must be in [0, {MAX_RAW_BYTES}], but is {self.samples}")
        for raw, compressed in self.files:
            if raw.bytes > MAX_RAW_BYTES and self.format not in OTHER_FORMATS:
                raise IndexFormatError(
                    f"{raw.basename} must be at most {MAX_RAW_BYTES} bytes, but is {raw.bytes}", path=raw.basename
                )
            if (compressed is None) != (self.compression is None):
                wanted = "no compressed file" if self.compression is None else "a compressed file"
                raise IndexFormatError(
                    f"compression is {self.compression!r}, which requires {wanted} of {raw.basename}",
                    path=raw.basename,
                )

    @property
    def files(self) -> tuple[tuple[FileInfo, FileInfo | None], ...]:
        """(raw, compressed) of each file, the meta file before the data file."""
        data = (self.raw_data, self.zip_data)
        return (data,) if self.raw_meta is None else ((self.raw_meta, self.zip_meta), data)

    @property
    def stored(self) -> tuple[FileInfo, ...]:
        """The stored form of each file, the meta file before the data file."""
        return tuple(compressed or raw for raw, compressed in self.files)


def entry_error(info: ShardInfo, problem: str, hint: str | None = None) -> IndexFormatError:
    """Return the error of an index entry that cannot be used."""
    file = info.raw_data.basename
    return IndexFormatError(f"the index entry of {file} {problem}", hint=hint, path=file)


def shared_entry(
    schema: Mapping[str, Any], shard_format: str, compression: str | None, hashes: Sequence[str], size_limit: int | None
) -> dict[str, Any]:
    """Return the common part of a writer's shards in an index, and in the config of each shard."""
    return {
        **schema,
        "compression": compression,
        "format": shard_format,
        "hashes": hashes,
        "size_limit": size_limit,
        "version": INDEX_VERSION,
    }


def _check_name(basename: str) -> None:
    join_under(_ANYWHERE, basename)
    name = basename.encode()
    if len(name) > _MAX_PATH_BYTES or max(map(len, name.split(b"/"))) > _MAX_NAME_BYTES:
        raise IndexFormatError(
            f"a file name can have {_MAX_NAME_BYTES} bytes, and {_MAX_PATH_BYTES} with its directories, but is "
            f"{brief(basename)}",
            path=basename,
        )
    parts = PurePosixPath(basename).parts
    if parts[-1] == INDEX_BASENAME or any(part.startswith(".") for part in parts):
        raise IndexFormatError(
            f"a file of a shard must not be called {INDEX_BASENAME}, nor begin with a dot, nor its directories: such "
            f"names are reserved for files of a cache; but got {brief(basename)}",
            path=basename,
        )


def column_names(info: ShardInfo) -> tuple[str, ...]:
    """Return the names of a shard's columns, in the order of a writer, for any format."""
    names: tuple[str, ...] = tuple(info.schema["columns" if info.format == "json" else "column_names"])
    return tuple(sorted(names)) if info.format == "json" else names


def check_selection(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the columns that a user requests, each once; None for all.

    Raises:
        ConfigError: It is not a list of at least one name.
    """
    if columns is None:
        return None
    if isinstance(columns, (str, bytes)) or not isinstance(columns, Sequence):
        raise ConfigError(
            f"columns must be a list of names, like ['text'], but got {short_repr(columns)}", option="columns"
        )
    if not columns or not all(isinstance(name, str) for name in columns):
        raise ConfigError(
            f"columns must name at least one column, each by a text, but got {short_repr(list(columns))}",
            option="columns",
        )
    return tuple(dict.fromkeys(columns))


def format_of_name(name: str) -> str | None:
    """Return the format of files with a name; None if it is ambiguous or unknown."""
    formats = (kind for kind, suffixes in FILE_SUFFIXES.items() if kind != "megatron" and name.endswith(suffixes))
    return next(formats, None)


def check_columns(info: ShardInfo, columns: Sequence[str] | None) -> None:
    """Raise ConfigError if a shard lacks a requested column.

    Raises:
        ConfigError: States the shard, the column, and the existing columns.
    """
    names = column_names(info)
    missing = [name for name in columns or () if name not in names]
    if missing:
        has = shortened(", ".join(map(repr, names)) or "none")
        close = get_close_matches(missing[0], names, 1)
        file = shown_file(info).basename
        raise ConfigError(
            f"{file} has no column {missing[0]!r}; it has {has}",
            hint=f"did you mean {close[0]!r}?" if close else None,
            option="columns",
            path=file,
        )


def shown_file(info: ShardInfo) -> FileInfo:
    """Return the file to name in errors of a shard: the user's file if the shard is a part of it."""
    return info.zip_data if info.compression == PART and info.zip_data is not None else info.raw_data


FILE_FIELDS = ("raw_data", "zip_data", "raw_meta", "zip_meta")
_AT_ONCE = 4096
"""Shards whose texts are decoded together when all are read."""


@dataclass(frozen=True, kw_only=True)
class ShardKind:
    """Common facts of many shards."""

    example: ShardInfo
    """One of them."""

    @cached_property
    def files(self) -> dict[str, FileInfo]:
        """The example's files by field, in the order of the arrays: data before meta, raw before compressed."""
        return _files_by_field(self.example)

    @cached_property
    def num_texts(self) -> int:
        """Texts of each shard: name, hashes and version of every file; and the bytes of columns, if recorded."""
        return sum(1 + len(file.hashes) + bool(file.version) for file in self.files.values()) + self.has_column_bytes

    @property
    def has_column_bytes(self) -> bool:
        """Whether shards record the size of each column."""
        return self.example.column_bytes is not None

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Key that is equal only for shards of one kind."""
        return _kind_key(self.example)

    def make(self, samples: int, sizes: Iterable[int], texts: Iterator[str]) -> ShardInfo:
        """Return a shard of this kind, from the next sizes and texts."""
        files = {
            field: _unchecked(
                FileInfo,
                basename=next(texts),
                bytes=size,
                hashes=dict(zip(like.hashes, texts)),  # noqa: B905
                version=next(texts) if like.version else "",
            )
            for (field, like), size in zip(self.files.items(), sizes)  # noqa: B905
        }
        columns = {"column_bytes": next(texts)} if self.has_column_bytes else {}
        return _unchecked(ShardInfo, **{**self._fields, **files, **columns, "samples": samples})

    @cached_property
    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self.example, field.name) for field in fields(ShardInfo)}


_Info = TypeVar("_Info", FileInfo, ShardInfo)


def _unchecked(cls: type[_Info], **values: Any) -> _Info:
    """Return a file or a shard whose fields were checked when its index was parsed; requires all fields."""
    info = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(info, name, value)
    return info


@dataclass(frozen=True, eq=False)
class ShardTable(Sequence[ShardInfo]):
    """The shards of an index in sample order; each is created on access.

    Equal to any sequence of equal shards. A slice is a tuple.
    """

    kinds: tuple[ShardKind, ...]
    kind_of_shard: NDArray[np.int32]
    """Number of the kind, of shape (shards,)."""
    samples: NDArray[np.int64]
    """Number of samples, of shape (shards,)."""
    sizes: NDArray[np.int64]
    """Bytes of each file, of shape (files,)."""
    text_stops: NDArray[np.int64]
    """End of each text in ``text``, of shape (texts,)."""
    text: NDArray[np.uint8]
    """All texts end to end, in UTF-8."""

    @cached_property
    def first_file(self) -> NDArray[np.int64]:
        """Position in ``sizes`` of each shard's first file, and the end; of shape (shards + 1,)."""
        return self._starts([len(kind.files) for kind in self.kinds])

    @cached_property
    def first_text(self) -> NDArray[np.int64]:
        """Position in ``text_stops`` of each shard's first text, and the end; of shape (shards + 1,)."""
        return self._starts([kind.num_texts for kind in self.kinds])

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ShardInfo, ...]: ...

    def __getitem__(self, index: int | slice) -> ShardInfo | tuple[ShardInfo, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return tuple(self._created(start, stop))
            return tuple(self[number] for number in range(start, stop, step))
        place = range(len(self))[index]
        return next(self._created(place, place + 1))

    def __iter__(self) -> Iterator[ShardInfo]:
        return chain.from_iterable(
            self._created(start, min(start + _AT_ONCE, len(self))) for start in range(0, len(self), _AT_ONCE)
        )

    def __add__(self, others: Iterable[ShardInfo]) -> tuple[ShardInfo, ...]:
        return (*self, *others)

    def __eq__(self, other: object) -> bool:
        # The arrays may differ for equal shards.
        if isinstance(other, ShardTable) and len(self) == len(other) and self.starts_like(other, len(self)):
            return True
        if not isinstance(other, ShardTable | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(map(ShardInfo.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} shards>"

    def examples(self) -> list[tuple[int, ShardInfo]]:
        """Return the first shard of each kind with its number, in order: to read what all of a kind share."""
        kinds, firsts = np.unique(self.kind_of_shard, return_index=True)
        return [(place, self[place]) for place in sorted(firsts.tolist())] if len(kinds) else []

    def data_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of each shard's raw data file, of shape (shards,)."""
        return self.sizes[self.first_file[:-1]]

    def wanted_bytes(self, columns: Collection[str]) -> NDArray[np.int64]:
        """Return the bytes of some columns in each shard's raw data file, of shape (shards,); all of it if not
        recorded.

        Args:
            columns: Their names.
        """
        total: NDArray[np.int64] = self.data_bytes().copy()
        for number, kind in enumerate(self.kinds):
            if kind.has_column_bytes:
                wanted = [place for place, name in enumerate(column_names(kind.example)) if name in columns]
                for shard in np.flatnonzero(self.kind_of_shard == number).tolist():
                    last = int(self.first_text[shard + 1]) - 1
                    start, stop = int(self.text_stops[last - 1]) if last else 0, int(self.text_stops[last])
                    sizes = self.text[start:stop].tobytes().decode().split(",")
                    with suppress(ValueError, IndexError):  # opening the shard raises the error of a wrong index
                        total[shard] = sum(int(sizes[place]) for place in wanted)
        return total

    def texts(self, start: int, stop: int) -> list[str]:
        """Return the texts of some shards.

        Args:
            start: The first shard.
            stop: The one after the last.
        """
        first, last = int(self.first_text[start]), int(self.first_text[stop])
        begin = int(self.text_stops[first - 1]) if first else 0
        stops = (self.text_stops[first:last] - begin).tolist()
        data = self.text[begin : begin + (stops[-1] if stops else 0)].tobytes()
        starts = chain((0,), stops)
        if data.isascii():
            whole = data.decode("ascii")
            return [whole[begin:end] for begin, end in zip(starts, stops, strict=False)]
        return [data[begin:end].decode("utf-8", "surrogatepass") for begin, end in zip(starts, stops, strict=False)]

    def digest(self, kinds: Collection[str] | None = None) -> str:
        """Return the digest that identifies the data, independent of location and storage: 16 hexadecimal digits.

        It is computed over the JSON text of a list that has, for each shard, its raw data file's name, its samples, and
        the bytes and sorted hashes of that file.

        Args:
            kinds: Names of the hashes to include; None for all.
        """
        hasher = hashlib.blake2b(b"[", digest_size=8)
        separator = ""
        for start, stop in self._runs():
            hasher.update(f"{separator}{self._described(start, stop, kinds)}".encode())
            separator = ", "
        hasher.update(b"]")
        return hasher.hexdigest()

    def outline(self) -> str:
        """Return a digest of only samples, sizes and the first few thousand names: much faster, and without hashes."""
        hasher = hashlib.blake2b(digest_size=8)
        hasher.update(self.samples.astype("<i8").tobytes())
        hasher.update(self.data_bytes().astype("<i8").tobytes())
        few = min(_AT_ONCE, len(self))
        if few:
            places = self.first_text[:few] - self.first_text[0]
            texts = self.texts(0, few)
            hasher.update("\n".join(texts[place] for place in places.tolist()).encode("utf-8", "surrogatepass"))
        return hasher.hexdigest()

    def hash_names(self) -> tuple[str, ...]:
        """Return the names of the recorded hashes of raw data files, sorted."""
        kinds = (self.kinds[number] for number in np.unique(self.kind_of_shard))
        return tuple(sorted({name for kind in kinds for name in kind.example.raw_data.hashes}))

    def _described(self, start: int, stop: int, kinds: Collection[str] | None) -> str:
        """Return JSON of some shards of one kind; joining columns is many times faster than lists of lists."""
        kind = self.kinds[int(self.kind_of_shard[start])]
        texts, step = self.texts(start, stop), kind.num_texts
        names = tuple(kind.example.raw_data.hashes)
        wanted = sorted(name for name in names if kinds is None or name in kinds)
        hashes = ", ".join("[" + quote(name).replace("%", "%%") + ", %s]" for name in wanted)
        columns = [
            map(quote, texts[0::step]),
            self.samples[start:stop].tolist(),
            self.sizes[int(self.first_file[start]) : int(self.first_file[stop]) : len(kind.files)].tolist(),
            *(map(quote, texts[1 + names.index(name) :: step]) for name in wanted),
        ]
        return ", ".join(map(f"[%s, %d, %d, [{hashes}]]".__mod__, zip(*columns, strict=True)))

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield runs of shards of one kind, of limited length."""
        borders = np.flatnonzero(np.diff(self.kind_of_shard)) + 1
        edges = [0, *borders.tolist(), len(self)]
        for first, last in pairwise(edges):
            for start in range(first, last, _AT_ONCE):
                yield start, min(start + _AT_ONCE, last)

    def _created(self, start: int, stop: int) -> Iterator[ShardInfo]:
        if start >= stop:
            return
        texts = iter(self.texts(start, stop))
        sizes = iter(self.sizes[int(self.first_file[start]) : int(self.first_file[stop])].tolist())
        kinds, samples = self.kind_of_shard[start:stop].tolist(), self.samples[start:stop].tolist()
        for kind, count in zip(map(self.kinds.__getitem__, kinds), samples, strict=True):
            yield kind.make(count, sizes, texts)

    def starts_like(self, other: ShardTable, count: int) -> bool:
        """Return whether the first ``count`` shards of both have equal arrays."""
        if min(len(self), len(other)) < count or not np.array_equal(
            self.kind_of_shard[:count], other.kind_of_shard[:count]
        ):
            return False
        kinds = int(self.kind_of_shard[:count].max(initial=-1)) + 1
        if [kind.key for kind in self.kinds[:kinds]] != [kind.key for kind in other.kinds[:kinds]]:
            return False
        files, texts = int(self.first_file[count]), int(self.first_text[count])
        end = int(self.text_stops[texts - 1]) if texts else 0
        return (
            np.array_equal(self.samples[:count], other.samples[:count])
            and np.array_equal(self.sizes[:files], other.sizes[:files])
            and np.array_equal(self.text_stops[:texts], other.text_stops[:texts])
            and np.array_equal(self.text[:end], other.text[:end])
        )

    def has_other_versions(self, other: ShardTable) -> bool:
        """Return whether a stored file of another table has another version in this one, if both record it."""
        kinds = (kind for table in (self, other) for kind in table.kinds)
        if not any(file.version for kind in kinds for file in kind.files.values()):
            return False
        if self.starts_like(other, min(len(self), len(other))):
            return False
        return any(
            mine.version != theirs.version
            for shard, before in zip(self, other, strict=False)
            for mine, theirs in zip(shard.stored, before.stored, strict=False)
            if mine.version and theirs.version
        )

    def head(self, count: int) -> ShardTable:
        """Return the first ``count`` shards, without copying arrays."""
        files, texts = int(self.first_file[count]), int(self.first_text[count])
        return ShardTable(
            kinds=self.kinds,
            kind_of_shard=self.kind_of_shard[:count],
            samples=self.samples[:count],
            sizes=self.sizes[:files],
            text_stops=self.text_stops[:texts],
            text=self.text[: int(self.text_stops[texts - 1]) if texts else 0],
        )

    def _starts(self, counts: Sequence[int]) -> NDArray[np.int64]:
        places = np.zeros(len(self) + 1, np.int64)
        np.cumsum(np.asarray(counts, np.int64)[self.kind_of_shard], out=places[1:]) if len(self) else None
        return places


def _files_by_field(shard: ShardInfo) -> dict[str, FileInfo]:
    files = {field: getattr(shard, field) for field in FILE_FIELDS}
    return {field: file for field, file in files.items() if file is not None}


def _kind_key(shard: ShardInfo) -> tuple[Any, ...]:
    schema = tuple(
        (name, tuple(value.items()) if isinstance(value, dict) else value) for name, value in shard.schema.items()
    )
    files = tuple((field, bool(file.version), *file.hashes) for field, file in _files_by_field(shard).items())
    has_column_bytes = shard.column_bytes is not None
    return shard.format, shard.compression, shard.hashes, shard.size_limit, schema, files, has_column_bytes


class TableBuilder:
    """A growing table."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._examples: list[ShardKind] = []
        self._kind_of_shard = array("i")
        self._samples, self._sizes, self._text_stops = array("q"), array("q"), array("q")
        self._text = bytearray()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, shard: ShardInfo) -> int:
        """Add one shard, and return the number of its kind."""
        key = _kind_key(shard)
        number = self._kinds.get(key)
        if number is None:
            number = self._kinds[key] = len(self._examples)
            self._examples.append(ShardKind(example=shard))
        self._kind_of_shard.append(number)
        self._samples.append(shard.samples)
        for file in _files_by_field(shard).values():
            self._sizes.append(file.bytes)
            self._add_texts(file.basename, *file.hashes.values(), *([file.version] if file.version else ()))
        if shard.column_bytes is not None:
            self._add_texts(shard.column_bytes)
        return number

    def _add_texts(self, *texts: str) -> None:
        for text in texts:
            self._text += text.encode("utf-8", "surrogatepass")
            self._text_stops.append(len(self._text))

    def kind(self, number: int) -> ShardKind:
        """Return a kind by its number."""
        return self._examples[number]

    def schema_before(self) -> Any:
        """Return the schema of the latest kind, for shards to share."""
        return self._examples[-1].example.schema if self._examples else {}

    def add_many(
        self, kind: int, samples: Sequence[int], sizes: Sequence[Sequence[int]], texts: Sequence[Sequence[str]]
    ) -> None:
        """Add shards of one kind.

        Args:
            kind: Number of the kind.
            samples: Number of samples of each shard.
            sizes: For each file of the kind, its size in each shard.
            texts: For each text of the kind, its value in each shard; ASCII only.
        """
        self._kind_of_shard.extend([kind] * len(samples))
        self._samples.extend(samples)
        self._sizes.extend(chain.from_iterable(zip(*sizes, strict=True)))
        flat = list(chain.from_iterable(zip(*texts, strict=True)))
        stops = np.fromiter(map(len, flat), np.int64, len(flat)).cumsum() + len(self._text)
        self._text += "".join(flat).encode("ascii")
        self._text_stops.frombytes(stops.tobytes())

    def table(self) -> ShardTable:
        """Return the table of all shards. Call it once, at the end: the table takes over the builder's memory."""
        return ShardTable(
            kinds=tuple(self._examples),
            kind_of_shard=np.frombuffer(self._kind_of_shard, np.int32),
            samples=np.frombuffer(self._samples, np.int64),
            sizes=np.frombuffer(self._sizes, np.int64),
            text_stops=np.frombuffer(self._text_stops, np.int64),
            text=np.frombuffer(self._text, np.uint8),
        )


def table_of(shards: Iterable[ShardInfo]) -> ShardTable:
    """Return the table of shards; a table unchanged."""
    if isinstance(shards, ShardTable):
        return shards
    builder = TableBuilder()
    for shard in shards:
        builder.add(shard)
    return builder.table()
