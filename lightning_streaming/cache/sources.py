"""Sources of raw files: a directory that is read in place, a remote, and parts of stored files; checks of files."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.records import OwnTags, tag_of_original, verified_tag
from lightning_streaming.cache.shared_files import open_no_link
from lightning_streaming.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    MissingDependencyError,
    ObjectNotFoundError,
    ShardCorruptError,
)
from lightning_streaming.escaping import package_logger, shortened
from lightning_streaming.files import disk_errors, join_under, system_errors
from lightning_streaming.formats.algorithms import CHEAPEST_FIRST, decompressed_pieces, hash_bytes, hash_file
from lightning_streaming.formats.index import DatasetIndex, FileInfo, ShardInfo
from lightning_streaming.formats.shard import range_readable_format, was_written_for
from lightning_streaming.formats.shard_format import RangedFile
from lightning_streaming.storage import Location
from lightning_streaming.storage.requests import NO_PIN, Pin, check_local

_logger = package_logger(__name__)

_MAX_METADATA = 64
"""Maximum number of files whose metadata is cached in memory: of Parquet the footer, usually up to a megabyte."""


def find_size(path: Path) -> int | None:
    """Return the bytes of a file; None if there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def choose_hash(file: FileInfo, wanted: str | None) -> str | None:
    """Return the recorded hash by which a file is checked.

    Args:
        file: The file, with the hashes that the index records.
        wanted: Name of the requested hash; None or empty for the cheapest recorded one that can be computed here.

    Returns:
        Its name; None if none is recorded, or only those of packages that are not installed.

    Raises:
        ConfigError: The requested hash is not recorded.
    """
    if wanted:
        if wanted not in file.hashes:
            recorded = shortened(", ".join(sorted(file.hashes)) or "none")
            raise ConfigError(
                f"validate_hash is {wanted!r}, but the hashes recorded for {file.basename} are: {recorded}",
                hint="use one of these, or omit validate_hash",
                option="validate_hash",
                path=file.basename,
            )
        return wanted
    for name in CHEAPEST_FIRST:
        if name in file.hashes:
            with suppress(MissingDependencyError):
                hash_bytes(name, b"")
                return name
    return None


def check_hash(path: Path, shown: str, file: FileInfo, name: str | None) -> None:
    """Compare a file with its recorded hash.

    Args:
        path: The file to read.
        shown: Its name in errors.
        file: Its entry in the index.
        name: The recorded hash to compare; None to skip the check.

    Raises:
        IntegrityError: They differ.
    """
    if name is None:
        return
    computed = hash_file(name, path)
    if computed != file.hashes[name]:
        raise IntegrityError(
            f"{name} of {shown} must be {shortened(file.hashes[name], 150)}, but is {computed}", path=shown
        )


def unpack(path: Path, shown: str, raw: FileInfo, algorithm: str, destination: Path) -> None:
    """Decompress a file into another, with little memory except for snappy.

    An existing file is overwritten in place: it keeps its inode, its locks, and its size, if that is right. A missing
    one is created, in an existing directory.

    Args:
        path: The compressed file.
        shown: Its name in errors.
        raw: The entry of the raw file in the index.
        algorithm: Compression algorithm.
        destination: The raw file to write.

    Raises:
        IntegrityError: The data is damaged, or the raw file has another size than recorded.
        DiskFullError: There is no room for the raw file.
        StorageError: It cannot be written.
        MissingDependencyError: The package that decompresses it is not installed.
    """
    with path.open("rb") as packed, disk_errors(destination, f"decompress {shown} into"):
        try:
            with os.fdopen(open_no_link(destination, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                for piece in decompressed_pieces(algorithm, packed, raw.bytes):
                    file.write(piece)
        except ShardCorruptError as error:
            raise IntegrityError(f"{shown} cannot be decompressed: {error}", path=shown) from error


def takes_room_in_place(shard: ShardInfo) -> bool:
    """Return whether a shard on this machine is decompressed before it is read."""
    parts = range_readable_format(shard)
    return shard.compression is not None if parts is None else not parts.is_read_in_place


def pin_of(file: FileInfo, config: CacheConfig, first: dict[str, str] | None = None) -> Pin:
    """Return the version that a file must have: the recorded one, and that of the first response.

    An index in a directory may be a copy of the one of a cache, whose versions belong to another location.

    Args:
        file: The file.
        config: The stream that it belongs to.
        first: Versions of first responses, to which its version is added; None to pin the file to none of them.
    """
    return Pin(file.bytes, "" if config.format is None else file.version, first)


_IN_PLACE = "the dataset is read in place: replace the file"
_OR_INDEX_AGAIN = (
    "; or, if the change is intended, restart the run; if the index was written beforehand, write it again with: "
    "lightning-streaming index"
)


@dataclass(frozen=True, slots=True)
class InPlaceSource:
    """A directory of this machine that is only read."""

    directory: Path
    """The directory of the dataset."""
    config: CacheConfig
    """The stream that it belongs to."""
    first: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Versions of files, by path, when the run listed them, or else when this process first read them."""

    def holds_raw(self, shard: ShardInfo, tag: int | None) -> bool:
        """Return whether a shard's raw files can be read in place; False if they must be decompressed first.

        A raw file next to a compressed one may belong to another dataset that was there before. So it is used only if
        its recorded hash, or a tag, proves that it is of this shard. Without a compressed file, its content must at
        least match the index.

        Args:
            shard: An entry of the index there.
            tag: The tag of files that were fetched there and checked by this index; None if there are none.

        Raises:
            ObjectNotFoundError: A raw file does not exist, and no compressed one is recorded.
            ShardCorruptError: A raw file without a compressed one differs from the index.
            ConfigError: The requested hash is not recorded.
        """
        if shard.compression is None:
            for raw, _ in shard.files:
                self._check_raw(raw)
            return True
        parts = range_readable_format(shard)
        if parts is not None and shard.zip_data is not None:
            if not self._has(shard.zip_data) and self._has(shard.raw_data):  # as in a directory that was a cache
                self._sound_path(shard.raw_data)
                return True
            self._sound_path(shard.zip_data)
            return parts.is_read_in_place
        if all(self._is_proven(raw, tag) for raw, _ in shard.files):
            return True
        packed = [compressed for _, compressed in shard.files if compressed is not None]
        if any(map(self._has, packed)) or not all(self._has(raw) for raw, _ in shard.files):
            return False
        for raw, _ in shard.files:
            self._check_raw(raw)
        if not was_written_for(shard, self.directory):
            raise ShardCorruptError(
                f"{join_under(self.directory, packed[-1].basename)} does not exist, and the "
                f"{shard.raw_data.basename} next to it is of another dataset",
                hint="restore the compressed file",
                path=str(join_under(self.directory, packed[-1].basename)),
            )
        return True

    def _check_raw(self, raw: FileInfo) -> None:
        """Raise an error for a raw file that is missing, or has another size, or another hash if one was requested."""
        path = self._sound_path(raw)
        if self.config.validate_hash:
            try:
                check_hash(path, str(path), raw, choose_hash(raw, self.config.validate_hash))
            except IntegrityError as error:
                raise ShardCorruptError(str(error.args[0]), hint=_IN_PLACE, path=error.path) from error

    def _is_proven(self, raw: FileInfo, tag: int | None) -> bool:
        """Return whether a hash or a tag proves that a raw file is the decompressed one of the index."""
        path = join_under(self.directory, raw.basename)
        name = choose_hash(raw, self.config.validate_hash)
        try:
            status = path.stat()
            if status.st_size != raw.bytes:
                return False
            if tag is not None and not self.config.validate_hash and status.st_mtime_ns in (tag, verified_tag(tag)):
                return True
            check_hash(path, str(path), raw, name)
        except (FileNotFoundError, IntegrityError):
            return False
        return name is not None

    def unpack_raw(self, raw: FileInfo, compressed: FileInfo, algorithm: str, destination: Path) -> int:
        """Decompress a file into another directory.

        Returns:
            The tag of the raw file; another one once the compressed file has changed.

        Raises:
            ObjectNotFoundError: The compressed file does not exist.
            ShardCorruptError: It differs from the index.
            IntegrityError: It was replaced during the run.
            DiskFullError: There is no room for the raw file.
        """
        path = self._sound_path(compressed)
        status = path.stat()
        self._check_version(compressed, status)
        try:
            check_hash(path, str(path), compressed, choose_hash(compressed, self.config.validate_hash))
            unpack(path, str(path), raw, algorithm, destination)
        except IntegrityError as error:
            self._check_version(compressed)
            raise ShardCorruptError(str(error.args[0]), hint=_IN_PLACE, path=error.path) from error
        self._check_version(compressed)
        return tag_of_original(status)

    def data_version(self, index: DatasetIndex) -> str:
        """Return the version of the data on the disk; see :meth:`ShardCache.data_version`."""
        if all(shard.raw_data.hashes for _, shard in index.shards.examples()):
            return index.data_digest
        names = dict.fromkeys(
            (compressed or raw).basename
            for shard in index.shards
            if not shard.raw_data.hashes
            for raw, compressed in shard.files
        )
        hasher = hashlib.blake2b(index.data_digest.encode(), digest_size=16)
        for name in names:  # checked to be below the directory when the index was read
            # No inode: some filesystems in user space change it.
            facts: tuple[int, int, int] | None = None
            with suppress(FileNotFoundError):
                status = os.stat(f"{self.directory}/{name}")  # noqa: PTH116  a Path takes several times as long
                facts = status.st_size, status.st_mtime_ns, status.st_ctime_ns
            hasher.update(f"{name!r}{facts}".encode("utf-8", "surrogatepass"))
        return hasher.hexdigest()

    def stored(self, file: FileInfo) -> StoredInPlace:
        """Return a stored file of which ranges are read.

        Raises:
            ObjectNotFoundError: It does not exist.
            ShardCorruptError: It has another size than in the index.
        """
        return StoredInPlace(self._sound_path(file), file.bytes, pin_of(file, self.config, self.first))

    def list_versions(self, shards: Iterable[ShardInfo]) -> None:
        """Record the current versions of the files of some shards, unless they are recorded already."""
        for file in (file for shard in shards for file in chain(*shard.files) if file is not None):
            path = f"{self.directory}/{file.basename}"  # checked to be below the directory when the index was read
            with suppress(OSError):  # the reader that needs it raises the error
                check_local(Pin(first=self.first), path, os.stat(path))  # noqa: PTH116  a Path takes several times as long

    def check_versions(self, shard: ShardInfo) -> None:
        """Raise an error for a shard whose files were replaced since they were indexed, or since the run began.

        Raises:
            IntegrityError: One was.
        """
        stored = shard.stored
        if range_readable_format(shard) is None or not self._has(stored[0]):
            stored = tuple(raw for raw, _ in shard.files)
        for file in stored:
            with suppress(FileNotFoundError):  # the reader that opens it raises the error
                self._check_version(file)

    def _check_version(self, file: FileInfo, status: os.stat_result | None = None) -> None:
        path = join_under(self.directory, file.basename)
        check_local(pin_of(file, self.config, self.first), str(path), path.stat() if status is None else status)

    def tag_of(self, file: FileInfo) -> int:
        """Return the tag of files created from the current version of a file.

        Raises:
            ObjectNotFoundError: It does not exist.
            ShardCorruptError: It has another size than in the index.
        """
        return tag_of_original(self._sound_path(file).stat())

    def knows_tag(self, modified: int, own: OwnTags, compressed: FileInfo | None) -> bool:
        """Return whether a raw file of this time was decompressed from the current compressed file.

        Otherwise the old version of a dataset that is written again at the same location would be read if sizes agree.
        """
        if compressed is None:
            return own.include(modified)
        try:
            return modified == tag_of_original(join_under(self.directory, compressed.basename).stat())
        except FileNotFoundError:
            return False

    def _has(self, file: FileInfo) -> bool:
        return find_size(join_under(self.directory, file.basename)) is not None

    def _sound_path(self, file: FileInfo) -> Path:
        """Return the path of a file that exists and has the right size."""
        path = join_under(self.directory, file.basename)
        size = find_size(path)
        if size is None:
            raise ObjectNotFoundError(
                f"{path} does not exist",
                hint=f"the dataset at {self.directory} is read in place: restore the file, or, to fill this directory "
                "from a remote, pass that as remote= and this as local=",
                path=str(path),
            )
        if size != file.bytes:
            raise ShardCorruptError(
                f"{path} has {size} bytes, but index.json says {file.bytes}",
                hint=_IN_PLACE if self.config.format is None else _IN_PLACE + _OR_INDEX_AGAIN,
                path=str(path),
            )
        return path


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """A store or directory from which files are fetched, and checked."""

    config: CacheConfig
    """The stream that it belongs to."""
    spent: bool = False
    """Whether a prefetch has made all attempts but the last just now."""
    first: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Versions in the first responses to this process, by file; except of files with a hash to check."""

    def fetch(self, file: FileInfo, destination: Path, accept: Callable[[Path], None] | None = None) -> None:
        """Fetch a file into an existing one, and check its size, its hash, and ``accept``, if given.

        Raises:
            IntegrityError: The fetched file differs from the index, or from the version that this process fetched
                before, time after time.
            DiskFullError: There is no room for it.
            StorageError: It could not be fetched.
            ConfigError: The hash to check is not recorded.
        """
        name, shown = choose_hash(file, self.config.validate_hash), self.shown(file)
        known = self.first if name is None and shown in self.first else None

        def check(path: Path) -> None:
            check_hash(path, shown, file, name)
            if accept is not None:
                accept(path)

        pin = replace(pin_of(file, self.config, known), size=None)
        version = self._at(file).download(destination, size=file.bytes, check=check, pin=pin)
        if name is None and version:
            self.first.setdefault(shown, version)
        elif name is None and known is None:
            _warn_without_versions(self.config.location)
        _logger.debug("downloaded: %s (%d bytes)", shown, file.bytes)

    def read_bytes(self, file: FileInfo, start: int, stop: int) -> bytes:
        """Fetch a range of a file.

        Raises:
            StorageError: The range could not be fetched.
        """
        return self._at(file).read_range(start, stop, pin_of(file, self.config, self.first))

    def stored(self, file: FileInfo) -> StoredRemotely:
        """Return a stored file of which ranges are read."""
        return StoredRemotely(self._at(file), file.bytes, pin_of(file, self.config, self.first))

    def _at(self, file: FileInfo) -> Location:
        return replace(self.config.location / file.basename, spent=self.spent)

    def check(self, file: FileInfo, path: Path) -> bool:
        """Compare a local file with its recorded hash; return False if there is none.

        Raises:
            IntegrityError: They differ.
            ConfigError: The hash to check is not recorded.
        """
        name = choose_hash(file, self.config.validate_hash)
        check_hash(path, str(path), file, name)
        return name is not None

    def data_version(self, index: DatasetIndex) -> str:
        """Return the version of the data; see :meth:`ShardCache.data_version`."""
        if not any(file.version for _, shard in index.shards.examples() for file in shard.stored):
            return index.data_digest
        hasher = hashlib.blake2b(index.data_digest.encode(), digest_size=16)
        for shard in index.shards:
            for file in shard.stored:
                hasher.update(f"{file.basename!r} {file.version!r}".encode("utf-8", "surrogatepass"))
        return hasher.hexdigest()

    def knows_tag(self, modified: int, own: OwnTags, compressed: FileInfo | None) -> bool:  # noqa: ARG002
        """Return whether a file of this time was checked before, by the current index, and is unchanged."""
        return modified == own.of_remote or modified == verified_tag(own.of_remote)

    def shown(self, file: FileInfo) -> str:
        """Return the name of a file in errors."""
        return str(self._at(file))


_without_versions = set[str]()
"""Hosts for which this process has logged the warning."""


def _warn_without_versions(location: Location) -> None:
    """Log, once for each host, that replaced files cannot be detected."""
    host = str(location).partition("://")[2].partition("/")[0]
    if host and host not in _without_versions:
        _without_versions.add(host)
        _logger.warning(
            "%s reports no versions of its files (neither ETag nor Last-Modified), so a file that is replaced "
            "during the run by one of the same size is not detected; write the dataset with hashes",
            host,
        )


@dataclass(frozen=True, slots=True)
class StoredInPlace:
    """A file of this machine of which ranges are read."""

    path: Path
    size: int
    """Bytes."""
    pin: Pin = NO_PIN
    """The version that must be read."""

    @property
    def shown(self) -> str:
        """Its name in errors."""
        return str(self.path)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read some ranges.

        Raises:
            ShardCorruptError: The file ends before.
            IntegrityError: The file was replaced since it was indexed.
            StorageError: It cannot be read.
        """
        parts = list[bytes]()
        # Buffered, because the system reads at most 2 GiB at once.
        with system_errors(f"read {self.path}"), self.path.open("rb") as file:
            check_local(self.pin, self.shown, os.fstat(file.fileno()))
            for start, stop in ranges:
                file.seek(start)
                parts.append(file.read(stop - start))
                if len(parts[-1]) < stop - start:
                    raise ShardCorruptError(
                        f"{self.path} must have {self.size} bytes, but ends before byte {stop}", path=str(self.path)
                    )
            check_local(self.pin, self.shown, os.fstat(file.fileno()))
        return parts


@dataclass(frozen=True, slots=True)
class StoredRemotely:
    """A file of a remote of which ranges are fetched."""

    location: Location
    size: int
    """Bytes."""
    pin: Pin = NO_PIN
    """The version that must be read."""

    @property
    def shown(self) -> str:
        """Its name in errors."""
        return str(self.location)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Fetch some ranges.

        Raises:
            StorageError: They could not be fetched.
        """
        parts = self.location.read_ranges(ranges, self.pin)
        if not self.pin.version and self.shown not in (self.pin.first or ()):
            _warn_without_versions(self.location)
        return parts


class Unpacked(NamedTuple):
    """The result of creating a raw file of a part of a stored one."""

    num_bytes: int
    """Bytes that were read of the stored file."""
    read_until: int
    """Time when the last of them had been read, by ``perf_counter_ns``; then the raw file was created."""


class FilePartUnpacker:
    """Unpacker of parts of stored files, such as row groups of Parquet, with a cache of the files' metadata.

    For one stream, and several threads. A copy in another process starts with an empty cache.
    """

    def __init__(self) -> None:
        self._metadata: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def unpack(self, shard: ShardInfo, stored: RangedFile, destination: Path, *, version: str = "") -> Unpacked:
        """Create the raw file of a shard.

        The metadata of a file that does not fit the cached one, or the index, is read once more.

        Args:
            shard: The shard, a part of a file.
            stored: That file.
            destination: The raw file.
            version: Version of that file: cached metadata of another version is not used.

        Raises:
            FormatError: The stored file is damaged, or another one than when the index was created.
            DiskFullError: There is no room for the raw file.
            StorageError: The stored file could not be read, or the raw one not be written.
        """
        parts = range_readable_format(shard)
        assert parts is not None, "the shard is a part of a file"
        timed, key = _TimedFile(stored), (stored.shown, version)
        with disk_errors(destination):
            with self._lock:
                metadata = self._metadata.get(key)
                if metadata is not None:
                    self._metadata.move_to_end(key)
            if metadata is not None:
                # The metadata may be of another file that had this name before.
                with suppress(FormatError):
                    num_bytes = parts.unpack(shard, metadata, timed, destination)
                    return Unpacked(num_bytes, timed.read_until)
            metadata = parts.read_metadata(timed)
            num_bytes = parts.unpack(shard, metadata, timed, destination)
            with self._lock:
                self._metadata[key] = metadata
                self._metadata.move_to_end(key)
                while len(self._metadata) > _MAX_METADATA:
                    self._metadata.popitem(last=False)
            return Unpacked(num_bytes, timed.read_until)


class _TimedFile:
    """A stored file, with the time of the last read."""

    def __init__(self, stored: RangedFile) -> None:
        self._stored, self.shown, self.size = stored, stored.shown, stored.size
        self.read_until = perf_counter_ns()

    def read(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes | memoryview]:
        """Return the bytes of some ranges; see :class:`RangedFile`."""
        data = self._stored.read(ranges)
        self.read_until = perf_counter_ns()
        return data
