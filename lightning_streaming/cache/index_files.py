"""The files of an index in a cache directory: itself, its parsed form, and the lock under which both are written.

A large index is parsed once; the parsed form, named by the hash of the index, is mapped by every process. One process
of a node fetches and parses an index, while others wait for it. A parsed form is::

    0      magic with the version · length and CRC-32 of the description
    64     identity of index.json (size, modification time, inode) and its CRC-32; may be overwritten in place
    128    description: JSON with SHA-256 of index.json, the kinds, the data digest, and length and CRC-32 of each array
    ...    the arrays, each at a multiple of 4096

It is a copy of the contents of ``index.json``, so one that is damaged in any way is not used.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import shared_files
from lightning_streaming.cache.config import PARSED_INDEX_PREFIX, STAGING_BASENAME
from lightning_streaming.cache.file_states import claim, has_dead_writer, is_written, staging_path
from lightning_streaming.cache.records import staging_files
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import PARTIAL_SUFFIX, Identity, open_regular
from lightning_streaming.formats.index import (
    INDEX_BASENAME,
    DatasetIndex,
    parse_index,
    parse_shard,
    read_index,
    shard_to_json,
)
from lightning_streaming.formats.shard_table import ShardKind, ShardTable

LARGE_INDEX_BYTES = 2**20
"""Size from which an index has a parsed form next to it; a smaller one is parsed whenever it is needed."""
_BLOCK_BYTES = 2**20
_DIGEST_DIGITS = 16
_SCRATCH_SUFFIX = ".scratch"
_MAGIC = b"LSINDEX1"
_HEAD = struct.Struct("<8sQI")
_IDENTITY = struct.Struct("<qqqI")
_IDENTITY_PLACE, _DESCRIPTION_PLACE, _PAGE = 64, 128, 4096
_ARRAYS = {"kind_of_shard": "<i4", "samples": "<i8", "sizes": "<i8", "text_stops": "<i8", "text": "|u1"}

_logger = package_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """An index that was read from a file."""

    index: DatasetIndex
    digest: str
    """SHA-256 of its text."""
    text: bytes | None = None
    """The text of a small one; a large one is read from a parsed form."""
    is_new: bool = False
    """Whether a parsed form was written just now, so that there may be older ones."""


class IndexForms:
    """Reader of indexes, which writes parsed forms of large ones into one directory.

    A mapped form is locked, shared, so that no process removes it.

    Args:
        directory: The directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(
        self, path: Path, *, shown: str | None = None, scratch: Path | None = None, likely: str | None = None
    ) -> LoadedIndex:
        """Read an index from a file, or from its parsed form if there is one.

        Args:
            path: The file.
            shown: Its name in errors; None for its path.
            scratch: File to which a missing parsed form may be written; None to write none.
            likely: The digest that the file had when it was last read; None if unknown.

        Raises:
            IndexFormatError: It is invalid.
            FileNotFoundError: There is no such file.
        """
        shown = shown or str(path)
        with open(path, "rb", opener=open_regular) as file:
            identity = Identity.of(file.fileno())
            if identity.size < LARGE_INDEX_BYTES:
                text = file.read()
                return LoadedIndex(parse_index(text, shown), hashlib.sha256(text).hexdigest(), text)
            form = self.find(identity, likely)
            if form is not None:
                return LoadedIndex(form.index, form.digest)
            hasher = hashlib.sha256()
            while block := file.read(_BLOCK_BYTES):
                hasher.update(block)
            digest = hasher.hexdigest()
            form = self.open(digest)
            if form is not None:
                # The same index is in another file now, or was touched.
                with suppress(OSError), open(self._path(digest), "r+b", opener=shared_files.open_no_link) as stored:
                    write_identity(stored, identity)
                return LoadedIndex(form.index, digest)
            file.seek(0)
            index = read_index(file.read, shown)
            is_unchanged = Identity.of(file.fileno()) == identity  # no process wrote to it meanwhile
        if scratch is not None and is_unchanged:
            form = self._store(index, digest, identity, scratch)
        return LoadedIndex(index, digest) if form is None else LoadedIndex(form.index, digest, is_new=True)

    def find(self, identity: Identity, likely: str | None) -> IndexForm | None:
        """Return the form of an index file that has not changed since the form was written; None if there is none.

        Args:
            identity: Identity of the index file.
            likely: Its last digest, which saves listing a directory of many shards.
        """
        first = [] if likely is None else [self._path(likely)]
        for path in chain(first, self._paths()):
            with _opened(path) as file:
                if file is not None and identity_of(file) == identity:
                    return read_form(file)
        return None

    def open(self, digest: str) -> IndexForm | None:
        """Return the form of the index with this SHA-256; None if there is none."""
        with _opened(self._path(digest)) as file:
            form = None if file is None else read_form(file)
        return form if form is not None and form.digest == digest else None

    def _store(self, index: DatasetIndex, digest: str, identity: Identity, scratch: Path) -> IndexForm | None:
        """Write a form, and map it instead of the index in memory; return None if that is not possible here.

        Args:
            index: The index that was read.
            digest: SHA-256 of the index file.
            identity: Identity of the index file.
            scratch: A file in the directory that no other process writes.
        """
        try:
            with open(scratch, "w+b", opener=shared_files.open_no_link) as file:
                write_form(file, index, digest, identity)
                shared_files.adopt_file(file.fileno(), self._directory)
            os.replace(scratch, self._path(digest))
        except OSError as error:
            _logger.debug("cannot cache the parsed index in %s: %s", self._directory, error)
            scratch.unlink(missing_ok=True)
            return None
        return self.open(digest)

    def sweep(self, keep: str) -> None:
        """Remove the forms that no process uses, except that of the index with digest ``keep``."""
        for path in self._paths():
            if path != self._path(keep):
                remove_unlocked(path)

    def _path(self, digest: str) -> Path:
        return self._directory / form_name(digest)

    def _paths(self) -> Iterator[Path]:
        length = len(PARSED_INDEX_PREFIX) + _DIGEST_DIGITS
        with suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.startswith(PARSED_INDEX_PREFIX) and len(entry.name) == length:
                    yield self._directory / entry.name


@dataclass(frozen=True, kw_only=True)
class IndexForm:
    """A parsed form that was read and checked."""

    index: DatasetIndex
    """The index, whose arrays are mapped from the file, which stays locked (shared) as long as they are in use."""
    digest: str
    """SHA-256 of its ``index.json``."""


def write_form(file: BinaryIO, index: DatasetIndex, digest: str, identity: Identity) -> None:
    """Write a parsed form.

    Args:
        file: An empty, seekable file.
        index: The index.
        digest: SHA-256 of ``index.json``, hexadecimal.
        identity: Identity of ``index.json``.
    """
    table = index.shards
    arrays = {name: np.ascontiguousarray(getattr(table, name), kind) for name, kind in _ARRAYS.items()}
    description = {
        "digest": digest,
        "data_digest": index.data_digest,
        "kinds": [shard_to_json(kind.example) for kind in table.kinds],
        "arrays": {name: [len(values), zlib.crc32(values.data)] for name, values in arrays.items()},
    }
    text = json.dumps(description).encode()
    file.write(_HEAD.pack(_MAGIC, len(text), zlib.crc32(text)))
    file.seek(_IDENTITY_PLACE)
    file.write(_pack(identity))
    file.seek(_DESCRIPTION_PLACE)
    file.write(text)
    offsets = _array_offsets(len(text), (values.nbytes for values in arrays.values()))
    for offset, values in zip(offsets, arrays.values(), strict=True):
        file.seek(offset)
        file.write(values.data)
    file.truncate(max(file.tell(), _DESCRIPTION_PLACE + len(text)))


def read_form(file: BinaryIO) -> IndexForm | None:
    """Map a parsed form; return None if it is damaged, or of another version.

    Args:
        file: A file open for reading. It may be closed afterwards: the map has another descriptor, with the same locks.
    """
    try:
        return _checked(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError):
        return None


def identity_of(file: BinaryIO) -> Identity | None:
    """Return the identity of the ``index.json`` of a parsed form; None if it is damaged."""
    data = os.pread(file.fileno(), _IDENTITY_PLACE + _IDENTITY.size, 0)
    if len(data) < _IDENTITY_PLACE + _IDENTITY.size or not data.startswith(_MAGIC):
        return None
    *fields, check = _IDENTITY.unpack_from(data, _IDENTITY_PLACE)
    identity = Identity(*fields)
    return identity if _pack(identity) == _IDENTITY.pack(*fields, check) else None


def write_identity(file: BinaryIO, identity: Identity) -> None:
    """Write another identity of ``index.json``, whose content is the same."""
    os.pwrite(file.fileno(), _pack(identity), _IDENTITY_PLACE)


def _pack(identity: Identity) -> bytes:
    return _IDENTITY.pack(*identity, zlib.crc32(repr(tuple(identity)).encode()))


def _checked(data: memoryview) -> IndexForm:
    """Check every byte of a form, which takes a fraction of a second for a million shards.

    Raises:
        ValueError: It is damaged; also KeyError, TypeError and struct.error.
    """
    magic, length, check = _HEAD.unpack_from(data)
    text = data[_DESCRIPTION_PLACE : _DESCRIPTION_PLACE + length]
    _demand(magic == _MAGIC and len(text) == length and zlib.crc32(text) == check)
    description = json.loads(bytes(text))
    table = ShardTable(
        kinds=tuple(ShardKind(example=parse_shard(entry, {})) for entry in description["kinds"]),
        **_arrays(data, length, description["arrays"]),
    )
    kinds, samples, sizes, stops = table.kind_of_shard, table.samples, table.sizes, table.text_stops
    _demand(len(kinds) == len(samples) and (not len(kinds) or 0 <= kinds.min() <= kinds.max() < len(table.kinds)))
    _demand(len(sizes) == table.first_file[-1] and len(stops) == table.first_text[-1])
    _demand(bool((np.diff(stops, prepend=0) >= 0).all()) and len(table.text) == (stops[-1] if len(stops) else 0))
    _demand(int(samples.min(initial=0)) >= 0 and int(sizes.min(initial=0)) >= 0)
    return IndexForm(index=DatasetIndex(table, description["data_digest"]), digest=description["digest"])


def _arrays(data: memoryview, description_length: int, described: dict[str, Any]) -> dict[str, NDArray[Any]]:
    counts = [int(described[name][0]) for name in _ARRAYS]
    lengths = [count * np.dtype(kind).itemsize for count, kind in zip(counts, _ARRAYS.values(), strict=True)]
    arrays = {}
    for name, offset, length in zip(_ARRAYS, _array_offsets(description_length, lengths), lengths, strict=True):
        part = data[offset : offset + length]
        _demand(len(part) == length and zlib.crc32(part) == described[name][1])
        arrays[name] = np.frombuffer(part, _ARRAYS[name])
    return arrays


def _demand(is_sound: bool) -> None:
    if not is_sound:
        raise ValueError("a parsed form that is damaged")


def _array_offsets(description_length: int, lengths: Iterable[int]) -> list[int]:
    """Return the offsets of arrays of these lengths in bytes, after a description."""
    offsets, end = [], _DESCRIPTION_PLACE + description_length
    for length in lengths:
        offsets.append(-(-end // _PAGE) * _PAGE)
        end = offsets[-1] + length
    return offsets


def remove_unlocked(path: Path) -> bool:
    """Remove a file unless a process has it mapped; return whether it was removed."""
    with suppress(OSError), open(path, "rb", opener=open_regular) as file:
        if shared_files.try_lock(file.fileno(), shared=False):
            path.unlink()
            return True
    return False


def form_name(digest: str) -> str:
    """Return the name of the parsed form of the index with this SHA-256."""
    return f"{PARSED_INDEX_PREFIX}{digest[:_DIGEST_DIGITS]}"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | None]:
    """Open and lock a form; yield None if there is none. A map of it keeps the lock after the file is closed."""
    try:
        file = os.fdopen(open_regular(path, os.O_RDONLY), "rb")
    except OSError:
        yield None
        return
    with file:
        with suppress(shared_files.LocksUnsupportedError):
            shared_files.try_lock(file.fileno(), shared=True)
        yield file


@dataclass(frozen=True, slots=True)
class IndexLock:
    """The files that the holder of an index's lock may write."""

    arriving: Path
    """A file for an index that is being fetched."""
    scratch: Path
    """A file for all others, which are then renamed."""

    def clear(self) -> None:
        """Remove both."""
        self.arriving.unlink(missing_ok=True)
        self.scratch.unlink(missing_ok=True)


@contextmanager
def locked_index(directory: Path, stall_seconds: float) -> Iterator[IndexLock]:
    """Hold the lock of a directory's index, and remove files that an earlier holder left.

    Args:
        directory: The cache directory, which exists.
        stall_seconds: Seconds to wait for a holder that makes no progress.

    Raises:
        LockTimeoutError: Another process holds it, and has made no progress for too long.
        StorageError: The directory may not be written to.
    """
    stall = shared_files.StallTimeout(stall_seconds)
    for _ in shared_files.pauses():
        staging = claim(directory, INDEX_BASENAME)
        if staging is not None:
            break
        stall.check([staging_path(directory, INDEX_BASENAME)])
    assert staging is not None, "pauses end only with an error"
    name = f"{PARSED_INDEX_PREFIX}{staging.path.name}"
    lock = IndexLock(directory / name, directory / f"{name}{_SCRATCH_SUFFIX}")
    try:
        lock.clear()
        with staging.beating():  # also while its download waits for others of this process, or a large index is parsed
            yield lock
    finally:
        lock.clear()
        if staging.is_unpublished():
            staging.path.unlink(missing_ok=True)
        staging.close()


def being_fetched(directory: Path) -> Path | None:
    """Return the staging file of a process that fetches the index of a directory just now; None if there is none."""
    ending = staging_path(directory, INDEX_BASENAME).name.rpartition("-")[2]
    paths = (Path(entry.path) for entry in staging_files(directory) if entry.name.endswith(f"-{ending}"))
    return next(filter(is_written, paths), None)


def staging_name_of(name: str) -> str | None:
    """Return the staging file whose lock protects a file in which an index is fetched, or a parsed form written.

    Args:
        name: Name of a file next to an index.

    Returns:
        The name of the staging file; None if it is not such a file.
    """
    staging = name.removeprefix(PARSED_INDEX_PREFIX).removesuffix(_SCRATCH_SUFFIX)
    return staging if staging.endswith(PARTIAL_SUFFIX) else None


def is_leftover(path: Path) -> bool:
    """Return whether the writer of such a file is known to have died; one of another machine after a day."""
    name = staging_name_of(path.name)
    if name is None:
        return False
    lock = path.parent / STAGING_BASENAME / name
    try:
        if lock.exists():
            return not is_written(lock)
        descriptor = shared_files.open_to_lock(path)
    except OSError:  # gone, or not readable
        return False
    try:
        return has_dead_writer(name, descriptor)
    finally:
        shared_files.unlock_and_close(descriptor)


def sweep_leftovers(directory: Path) -> None:
    """Remove files that dead writers of indexes left: other users, and those of before this machine started."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(PARSED_INDEX_PREFIX) and is_leftover(Path(entry.path)):
                with suppress(OSError):  # another user's
                    Path(entry.path).unlink()
