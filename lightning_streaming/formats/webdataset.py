"""WebDataset: tar files in which consecutive members of one name are a sample.

    00000.tar    dogs/0001.jpg    \\
                 dogs/0001.json    > {"__key__": "dogs/0001", "jpg": image, "json": {...}}
                 dogs/0002.jpg    ...

Every file of a location that ends in ``.tar``, ``.tar.gz`` or ``.tgz`` is a shard, in the order of their paths. The key
of a member is its path up to the first dot of the file name, the column the rest after that dot, in lower case. Ignored
are members that are not plain files, files without suffix or that begin with a dot, and members with a first path part
like ``__meta__``.

A sample has the columns whose members it has; an index lists those of all samples of a shard. The number of samples
comes from the headers of a shard, or from an index of another library next to it; then only the columns of its first
samples are known.

The suffix determines the value::

    suffix                                        value
    json, jsn                                     parsed JSON
    txt, text, transcript, caption                str
    cls, cls2, index, inx, id                     int
    jpg, jpeg, png, webp                          PIL image
    npy                                           numpy array
    npz                                           dict of numpy arrays, by name
    pkl, pickle, pyd                              any pickled value; reading it can run code, so it must be allowed
    pth, pt                                       refused: pickles of torch
    gz after another, like txt.gz                 the same, decompressed
    any other                                     bytes

The size of arrays that a file states is checked against its bytes, and compressed data has at most 1 GiB when it is
decompressed.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import math
import zipfile
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    MissingDependencyError,
    ShardCorruptError,
)
from lightning_streaming.escaping import shortened
from lightning_streaming.files import join_under
from lightning_streaming.formats.images import IMAGE_FORMATS, open_image_file, require_pillow
from lightning_streaming.formats.mds import map_file
from lightning_streaming.formats.npy import NpyHeader, read_header
from lightning_streaming.formats.shard_format import StoredFiles, map_unknown, no_such_sample, other_shard
from lightning_streaming.formats.shard_table import FileInfo, ShardInfo, check_columns, column_names, entry_error
from lightning_streaming.formats.tar_members import BLOCK, Members, StoredWindow, UnpackedWindow, read_members
from lightning_streaming.formats.values import BytesEncoding, JsonEncoding, PickleEncoding, StrEncoding, brief

if TYPE_CHECKING:
    from PIL.Image import Image

KEY = "__key__"
"""Column of the samples' keys."""
_NAME = "webdataset"
_PACKED = {".tar": None, ".tar.gz": "gz", ".tgz": "gz"}
"""Compression of files, by the end of their names."""
_NO_KEY = ("", "/")
"""Ends of the keys of files whose name begins with a dot."""
_PROBED_SAMPLES = 16
"""Samples that determine the columns of a file whose count is known."""


@dataclass(frozen=True, slots=True)
class WebDatasetFormat:
    """Tar files of samples."""

    allow_unsafe_types: bool = False
    """Whether members may be unpickled, which runs code of their author."""
    as_files: frozenset[str] = frozenset()
    """Columns whose image files are given as bytes."""

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """Yield the shards at a location; see :class:`ShardFormat`."""
        tars = _tar_files(files)
        before = [known.get(tar.raw_name) for tar in tars]
        same = [info if info and tar.is_file_of(info) else None for tar, info in zip(tars, before, strict=True)]
        counts = _published_counts(files) if None in same else {}
        yield from map_unknown(
            lambda files, tar: _described(files, tar, counts.get(tar.name)), files, zip(tars, same, strict=True)
        )

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:
        """Raise if a shard could not be read; see :class:`ShardFormat`.

        Raises:
            ConfigError: A requested column can run code of its author.
        """
        names = column_names(info)
        if KEY not in names:
            raise entry_error(info, f"must have the column {KEY}")
        wanted = [name for name in names if columns is None or name in columns]
        for name in filter(is_unsafe_member, wanted):
            if is_never_read(name):
                raise ConfigError(
                    f"{info.raw_data.basename} has a column {name!r}, which is a pickle of torch and never read",
                    hint="list the other columns in columns=",
                    option="columns",
                    path=info.raw_data.basename,
                )
            if not self.allow_unsafe_types:
                raise ConfigError(
                    f"{info.raw_data.basename} has a column {name!r}, which can run any code when it is read",
                    hint="pass allow_unsafe_types=True if you trust its author, or list the other columns in columns=",
                    option="allow_unsafe_types",
                    path=info.raw_data.basename,
                )
        if any(map(is_image, wanted)):
            try:
                require_pillow()
            except MissingDependencyError as error:
                file = info.raw_data.basename
                raise error.with_context(f"{file} cannot be read", path=file) from None

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> TarSamples:
        """Open a tar file; see :class:`ShardFormat`.

        Raises:
            ConfigError: The shard lacks a requested column, or one can run code of its author.
            MissingDependencyError: A requested column needs a package that is not installed.
        """
        check_columns(info, columns)
        self.check(info, columns)
        return TarSamples(info, directory, columns, self.as_files)


def unsafe_members(info: ShardInfo) -> list[str]:
    """Return the columns of a shard whose values can run code of their author when they are read."""
    return [name for name in column_names(info) if is_unsafe_member(name)]


# --- files of a location ---


class _TarFile(NamedTuple):
    """A stored tar file."""

    name: str
    raw_name: str
    size: int
    compression: str | None

    def is_file_of(self, info: ShardInfo) -> bool:
        """Return whether a known shard is of a file like this."""
        (stored,) = info.stored
        return (stored.basename, stored.bytes, info.compression) == (self.name, self.size, self.compression)


def _tar_files(files: StoredFiles) -> list[_TarFile]:
    """Return all tar files, in the order of their paths.

    Raises:
        ConfigError: There are none, or two would have the same name when decompressed.
    """
    tars = dict[str, _TarFile]()
    for name, size in files.sizes().items():
        suffix = next((suffix for suffix in _PACKED if name.endswith(suffix)), None)
        if suffix is None or any(part.startswith(".") for part in PurePosixPath(name).parts):
            continue
        tar = _TarFile(name, name.removesuffix(suffix) + ".tar", size, _PACKED[suffix])
        other = tars.setdefault(tar.raw_name, tar)
        if other is not tar:
            raise ConfigError(
                f"{files.shown} has {other.name} and {name}, which are one shard",
                hint="remove one of them",
                path=files.shown,
            )
    if not tars:
        raise ConfigError(
            f"{files.shown} has no file of format={_NAME!r}: none ends in {', '.join(_PACKED)}", path=files.shown
        )
    return sorted(tars.values(), key=lambda tar: tar.name)


def _described(files: StoredFiles, tar: _TarFile, count: int | None) -> ShardInfo:
    """Read all headers of a file; or only the first ones, if its number of samples is published."""
    shown = files.shown_file(tar.name)
    stored = FileInfo(basename=tar.name, bytes=tar.size, hashes={})
    if tar.compression is None:
        samples = Samples(shown)
        for members in read_members(StoredWindow(files, tar.name, tar.size), shown):
            samples.add(members)
            if count is not None and _PROBED_SAMPLES < len(samples) <= count:
                return other_shard(_NAME, count, stored, samples.kinds, {})
        return other_shard(_NAME, len(samples), stored, samples.kinds, {})
    window = UnpackedWindow(files, tar.name, tar.size)
    samples = Samples.of(read_members(window, shown), shown)
    raw = FileInfo(basename=tar.raw_name, bytes=window.raw_bytes(), hashes={})
    return other_shard(_NAME, len(samples), raw, samples.kinds, {}, compression=tar.compression, zip_data=stored)


# --- published counts of samples ---
#
#     .nv-meta/.info.json, .nv-meta/.info.yaml    Megatron Energon: "shard_counts", samples by path
#     *.json                                      wids: "shardlist", of each file its "url", "nsamples" and "filesize"
#
# The count of a file of another size is not trusted, nor damaged counts, nor more samples than a file of its size can
# have: such files are read instead.

_ENERGON = ".nv-meta/.info"
_WIDS_KIND = "wids-shard-index"
_MAX_JSON_FILES = 8
"""JSON files at the top of a location that are read to detect an index; if there are more they belong to samples."""
_MAX_JSON_BYTES = 2**28


def _published_counts(files: StoredFiles) -> Mapping[str, int]:
    """Return the published numbers of samples of files, by path.

    Raises:
        StorageError: A file could not be read.
    """
    sizes = files.sizes()
    result = dict[str, int]()
    tops = [name for name in sizes if "/" not in name and name.endswith(".json") and sizes[name] <= _MAX_JSON_BYTES]
    for name in tops if len(tops) <= _MAX_JSON_FILES else ():
        result.update(_wids_counts(_parsed(files.read_range(name, 0, sizes[name]), json.loads), sizes))
    for suffix, parse in ((".yaml", _parse_yaml), (".json", json.loads)):  # the last is the newer one
        text = files.read_if_there(_ENERGON + suffix)
        counts = _member(_parsed(text, parse), "shard_counts") if text is not None else None
        if isinstance(counts, dict):
            result.update({name: count for name, count in counts.items() if _is_count(count, sizes.get(name, 0))})
    return result


def _wids_counts(index: Any, sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the counts in an index of wids, of files next to it."""
    shards = _member(index, "shardlist")
    if not str(_member(index, "__kind__")).startswith(_WIDS_KIND) or not isinstance(shards, list):
        return
    for shard in shards:
        url, count = _member(shard, "url"), _member(shard, "nsamples")
        if not isinstance(url, str):
            continue
        path = PurePosixPath(url).as_posix()
        if _is_count(count, sizes.get(path, 0)) and _member(shard, "filesize") in (None, sizes[path]):
            yield path, count


def _parsed(text: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Return the parsed text; None if it is damaged."""
    try:
        return parse(text)
    except (ValueError, RecursionError):
        return None


def _parse_yaml(text: bytes) -> Any:
    import yaml  # type: ignore[import-untyped]  # only needed here

    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  # both are safe
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _is_count(value: Any, size: int) -> bool:
    """Return whether a tar file of ``size`` bytes can have that many samples, each with at least a header."""
    return type(value) is int and 0 <= value * BLOCK < size


# --- members to samples ---


class Samples:
    """The members of each sample, and their positions.

    Args:
        shown: Name of the file in errors.
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._numbers = dict[str, int]()  # of columns, by suffix as it is written
        self._known_keys = set[str]()
        self._seen = 0  # columns of the last sample, one bit each
        self.keys: list[str] = []
        self.columns: list[str] = []
        """Column names, in the order of their first use."""
        self.firsts = array("q", [0])
        """Number of the first member of each sample; and the number of all members."""
        self.column_of = array("q")
        """Column of each member."""
        self.starts, self.stops = array("q"), array("q")
        """Positions of the bytes of each member in the file."""

    @classmethod
    def of(cls, members: Iterable[Members], shown: str) -> Samples:
        """Return the samples of a whole file; raises as :meth:`add` does."""
        samples = cls(shown)
        for some in members:
            samples.add(some)
        return samples

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def kinds(self) -> dict[str, str]:
        """The column of keys, and all columns of samples, sorted; each with the MDS encoding of its values."""
        return {KEY: "str", **{column: kind_of(column) for column in sorted(self.columns)}}

    def add(self, members: Members) -> None:
        """Add the next members.

        Raises:
            ShardCorruptError: A key repeats after others, or a sample has two members of one column.
        """
        numbers, keys, known, firsts = self._numbers, self.keys, self._known_keys, self.firsts
        last, columns, count, seen = keys[-1] if keys else None, list[int](), firsts[-1], self._seen
        for name in members.names:
            key, _, suffix = name.partition(".")
            if "/" in suffix:  # the dot was a directory's
                key, _, suffix = _split(name)
            if not suffix or key[-1:] in _NO_KEY or (name[0] == "_" and _is_meta(name)):
                columns.append(-1)
                continue
            number = numbers.get(suffix)
            if number is None:
                number = self._new_column(suffix, name)
            if key != last:
                if key in known:
                    raise ShardCorruptError(
                        f"{self._shown}: member {name!r} is after other samples, but its sample began before them; "
                        "members of one sample must be consecutive, and no two samples can have the same key",
                        path=self._shown,
                    )
                known.add(key)
                keys.append(key)
                firsts.append(count)
                last, seen = key, 0
            if seen >> number & 1:
                raise ShardCorruptError(
                    f"{self._shown}: member {name!r} is the second of its sample that ends in .{self.columns[number]}",
                    path=self._shown,
                )
            seen |= 1 << number
            columns.append(number)
            count += 1
            firsts[-1] = count
        self._seen = seen
        numbers_of_members = np.asarray(columns, np.int64)
        kept = numbers_of_members >= 0
        starts, sizes = np.asarray(members.starts, np.int64)[kept], np.asarray(members.sizes, np.int64)[kept]
        self.column_of.frombytes(numbers_of_members[kept].tobytes())
        self.starts.frombytes(starts.tobytes())
        self.stops.frombytes((starts + sizes).tobytes())

    def _new_column(self, suffix: str, name: str) -> int:
        column = suffix.lower()
        if column == KEY or not column.isprintable():
            raise ShardCorruptError(
                f"{self._shown}: member {name!r} has a suffix that cannot be a column name", path=self._shown
            )
        if column not in self.columns:
            self.columns.append(column)
        number = self._numbers[suffix] = self.columns.index(column)
        return number


def _split(name: str) -> tuple[str, str, str]:
    """Return a path up to the first dot of the file name, the dot, and the rest."""
    start = name.rfind("/") + 1
    stem, dot, suffix = name[start:].partition(".")
    return name[:start] + stem, dot, suffix


def _is_meta(name: str) -> bool:
    """Return whether a path begins with a name like ``__this__``."""
    first = name.partition("/")[0]
    return len(first) >= 4 and first.endswith("__")


class TarSamples:
    """The samples of a tar file, memory-mapped; see :class:`ShardReader`."""

    def __init__(
        self, info: ShardInfo, directory: Path, columns: Sequence[str] | None, as_files: frozenset[str]
    ) -> None:
        """Map the raw file, and read its headers; arguments and errors are those of ``ShardFormat.open``."""
        self._path = join_under(directory, info.raw_data.basename)
        self._data = map_file(self._path, info.raw_data.bytes)
        samples = Samples.of(read_members(lambda start, _: self._data[start:], str(self._path)), str(self._path))
        if len(samples) != info.samples:
            raise ShardCorruptError(
                f"{self._path} must have {info.samples} samples by its index, but has {len(samples)}: it, or the "
                "source of the index, has changed",
                hint="create the index again",
                path=str(self._path),
            )
        self._keys, self._firsts, self._column_of = samples.keys, samples.firsts, samples.column_of
        self._starts, self._stops = samples.starts, samples.stops
        self._wanted = None if columns is None else frozenset(columns)
        self._has_key = columns is None or KEY in columns
        self._decoders = [
            (name, decoder(name, as_file=name in as_files) if columns is None or name in columns else None)
            for name in samples.columns
        ]

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample; see :class:`ShardReader`.

        Raises:
            SampleIndexError: The index is not in [0, len).
            EncodingError: A member does not hold what its name says, or the sample lacks a requested column.
        """
        if not 0 <= index < len(self._keys):
            raise no_such_sample(self._path, len(self._keys), index)
        data, decoders, name = self._data, self._decoders, ""
        sample: dict[str, Any] = {KEY: self._keys[index]} if self._has_key else {}
        first, last = self._firsts[index], self._firsts[index + 1]
        try:
            for place in range(first, last):
                name, decode = decoders[self._column_of[place]]
                if decode is not None:
                    sample[name] = decode(data[self._starts[place] : self._stops[place]])
        except EncodingError as error:
            member = shortened(f"{self._keys[index]}.{name}")
            shown = str(self._path)
            where = f"{shown}, sample {index}, member {member!r}"
            raise error.with_context(where, path=shown, sample=index) from error
        if self._wanted is not None and len(sample) < len(self._wanted):
            missing = min(self._wanted.difference(sample))
            raise EncodingError(
                f"{self._path}, sample {index}, {self._keys[index]!r}: it has no member .{missing}",
                path=str(self._path),
                sample=index,
            )
        return sample

    def close(self) -> None:
        """Release the file; nothing can be read afterwards."""
        self._data.release()


Decode = Callable[[memoryview], Any]
"""Decodes a file's bytes to its value, which shares no memory with them. Raises EncodingError."""


class _Kind(NamedTuple):
    """The kind of files with some suffixes."""

    encoding: str
    """The MDS encoding that would hold their values."""
    decode: Decode


def kind_of(column: str) -> str:
    """Return the MDS encoding that would hold the values of a column.

    Args:
        column: The part after the first dot of the names of its files, in lower case.
    """
    return _kind(column).encoding


def decoder(column: str, *, as_file: bool = False) -> Decode:
    """Return the decoder of a column's files.

    Args:
        column: As for :func:`kind_of`.
        as_file: Whether images are returned as the bytes of their files.
    """
    decode = bytes if as_file and is_image(column) else _kind(column).decode
    if not _is_packed(column):
        return decode
    return lambda data: decode(_unpacked(data))


def is_unsafe_member(column: str) -> bool:
    """Return whether reading the files of a column can run code of their author."""
    return _kind(column) in (_PICKLE, _TORCH)


def is_never_read(column: str) -> bool:
    """Return whether the files of a column are never read, even if unsafe types are allowed."""
    return _kind(column) is _TORCH


def is_image(column: str) -> bool:
    """Return whether the files of a column are images."""
    return _kind(column).decode is _decode_image


def _kind(column: str) -> _Kind:
    names = column.split(".")
    suffix = names[-1] if not _is_packed(column) else "".join(names[-2:-1])
    return _KINDS.get(suffix, _BYTES)


def _is_packed(column: str) -> bool:
    return column == "gz" or column.endswith(".gz")


def _refuse(data: memoryview) -> Any:
    raise EncodingError(f"{len(data)} bytes are a pickle of torch, which is never read", hint="list others in columns=")


MAX_UNPACKED_BYTES = 2**30
"""Most bytes of a compressed file after decompression; of all arrays of a ``.npz`` file together."""
_PIECE_BYTES = 2**20
_DEFLATE_RATIO = 1032
"""Largest ratio of decompressed to deflated data."""
_SMALL_PIECE_BYTES = 4096
"""Bytes that are read at a time of data of other algorithms, which zipfile decompresses without a limit."""


def _unpacked(data: memoryview) -> memoryview:
    try:
        if len(data) <= MAX_UNPACKED_BYTES // _DEFLATE_RATIO:
            return memoryview(gzip.decompress(data))
        pieces, free = list[bytes](), MAX_UNPACKED_BYTES
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while piece := file.read(min(_PIECE_BYTES, free + 1)):
                pieces.append(piece)
                free -= len(piece)
                if free < 0:
                    raise _too_large(data)
        return memoryview(b"".join(pieces))
    except EncodingError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise EncodingError(f"expected gz data, but found {brief(data)} ({error})") from None


def _too_large(data: memoryview) -> EncodingError:
    return EncodingError(
        f"a file of {len(data)} bytes has more than {MAX_UNPACKED_BYTES} bytes when it is decompressed",
        hint="store it uncompressed, or in several files",
    )


def _decode_json(data: memoryview) -> Any:
    try:
        return JsonEncoding().decode(data)
    except EncodingError:
        try:
            return json.loads(bytes(data))  # which supports UTF-16, and byte order marks
        except (ValueError, RecursionError):
            pass
        raise


def _decode_int(data: memoryview) -> int:
    text = bytes(data)
    try:
        return int(text)
    except ValueError:
        raise EncodingError(f"expected an integer, but found {brief(text)}") from None


def _decode_image(data: memoryview) -> Image:
    return open_image_file(bytes(data), IMAGE_FORMATS)


def _decode_npy(data: memoryview) -> NDArray[Any]:
    width = 2 if bytes(data[6:7]) == b"\1" else 4
    head = npy_head(bytes(data[: 8 + width + int.from_bytes(data[8 : 8 + width], "little")]))
    expected = head.stop + head.dtype.itemsize * math.prod(head.shape)
    if len(data) != expected:
        raise EncodingError(
            f"expected {expected} bytes of {head.dtype} of shape {head.shape}, but found {len(data)} bytes"
        )
    order: Literal["C", "F"] = "F" if head.is_fortran else "C"
    try:
        array: NDArray[Any] = np.ndarray(head.shape, head.dtype, data, head.stop, order=order).copy("K")
    except ValueError as error:  # dimensions that numpy does not support
        raise EncodingError(f"expected an array of shape {head.shape}, but {error}") from None
    return array


@lru_cache(maxsize=256)
def npy_head(head: bytes) -> NpyHeader:
    """Return the parsed head of a .npy file; nearly all files of a dataset share a few heads.

    Raises:
        EncodingError: It is damaged, or of Python objects.
    """
    try:
        header = read_header(lambda start, stop: head[start:stop], len(head), "it")
    except FormatError as error:
        raise EncodingError(f"expected a .npy file, but {error}") from None
    if header.dtype.hasobject:
        raise EncodingError("expected an array of numbers or texts, but found Python objects, which can run any code")
    return header


_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError),
    *(ValueError, NotImplementedError, RuntimeError, KeyError, OverflowError),
)
"""Errors of zipfile for damaged files; RuntimeError for encrypted ones."""


def _decode_npz(data: memoryview) -> dict[str, Any]:
    arrays = dict[str, Any]()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(info.file_size for info in archive.infolist()) > MAX_UNPACKED_BYTES:
                raise _too_large(data)
            for info in archive.infolist():
                content = _zipped_file(archive, info)
                is_array = info.filename.endswith(".npy")
                arrays[info.filename.removesuffix(".npy")] = _decode_npy(memoryview(content)) if is_array else content
    except EncodingError:
        raise
    except _ZIP_ERRORS as error:
        raise EncodingError(f"expected a .npz file, but found {brief(data)} ({error})") from None
    return arrays


def _zipped_file(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Read a file of an archive, without decompressing much more than the size that the archive states."""
    with archive.open(info) as file:
        if info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return file.read(info.file_size)
        return b"".join(iter(lambda: file.read(_SMALL_PIECE_BYTES), b""))


_BYTES = _Kind("bytes", BytesEncoding().decode)
_PICKLE, _TORCH = _Kind("pkl", PickleEncoding().decode), _Kind("pkl", _refuse)
_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        **dict.fromkeys(("json", "jsn"), _Kind("json", _decode_json)),
        **dict.fromkeys(("txt", "text", "transcript", "caption"), _Kind("str", StrEncoding().decode)),
        **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _Kind("int", _decode_int)),
        **dict.fromkeys(("jpg", "jpeg"), _Kind("jpeg", _decode_image)),
        "png": _Kind("png", _decode_image),
        "webp": _Kind("pil", _decode_image),
        "npy": _Kind("ndarray", _decode_npy),
        "npz": _Kind("pkl", _decode_npz),
        **dict.fromkeys(("pkl", "pickle", "pyd"), _PICKLE),
        **dict.fromkeys(("pth", "pt"), _TORCH),
    }
)
"""By the last suffix; others are bytes. The only encoding that holds several arrays is pkl."""
