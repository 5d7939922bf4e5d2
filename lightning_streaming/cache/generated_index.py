"""The index of data that other libraries wrote: generated from the files, or read if it was generated before.

It is an index like any other, in the cache directory of the node.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from time import perf_counter, time
from typing import Any, NamedTuple

from lightning_streaming.cache.config import MANIFEST_BASENAME, CacheConfig
from lightning_streaming.errors import AccessDeniedError, ConfigError, FormatError, ObjectNotFoundError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import system_errors
from lightning_streaming.formats.index import (
    INDEX_BASENAME,
    FileInfo,
    ShardInfo,
    dump_index,
    parse_index,
    parse_shard,
    shard_to_json,
)
from lightning_streaming.formats.shard import other_format
from lightning_streaming.formats.shard_format import described
from lightning_streaming.formats.shard_table import PART
from lightning_streaming.storage import Location
from lightning_streaming.storage.location import ListedFile
from lightning_streaming.storage.requests import Pin
from lightning_streaming.storage.urls import HTTP_SCHEMES, is_plain_name, match_names, scheme_of
from lightning_streaming.waits import ProgressCallback, progress

_logger = package_logger(__name__)

_CLOCKS_DIFFER = 60.0
"""Seconds by which a store's clock may differ from ours."""
_FEW_FILES = 4
"""Up to this number, files are listed one by one; otherwise their directories."""
_FEW_DIRECTORIES = 16
"""Up to this number, directories are listed one by one; otherwise all files below their common directory."""
_MAX_REQUESTS = 1000
"""Maximum number of files that are requested one by one over HTTP, where directories cannot be listed."""
_CLOCK_TICK = 0.05
"""Seconds by which a change time may be behind the clock: filesystems read the clock of the kernel's last tick."""


class KnownIndex(NamedTuple):
    """An index that was generated before."""

    shards: Sequence[ShardInfo]
    scanned: float
    """Time when the files were read, in seconds since the epoch."""
    listing: str = ""
    """The :attr:`FilesAt.digest` at that time; "" if unknown."""


class GeneratedIndex(NamedTuple):
    """An index that was generated, or read from the directory of the data."""

    text: bytes
    """The text of an ``index.json``."""
    listing: str
    """The :attr:`FilesAt.digest` of its files; "" if no files were listed."""


class FilesAt:
    """The files below a location.

    Args:
        location: The directory, or URL.
        pattern: Pattern of its files; None for all.
    """

    def __init__(self, location: Location, pattern: str | None = None) -> None:
        self._location = location
        self._pattern = pattern

    @property
    def shown(self) -> str:
        """The location, for errors."""
        return str(self._location if self._pattern is None else self._location / self._pattern)

    def shown_file(self, name: str) -> str:
        """Return the path or URL of a file, without secrets."""
        return str(self._location / name)

    @cached_property
    def _files(self) -> Mapping[str, ListedFile]:
        if self._pattern is None:
            return _data_below(self._location)
        if not is_plain_name(self._pattern):
            files = _data_below(self._location)
            return {name: files[name] for name in match_names(self._pattern, list(files))}
        # A file, without listing its directory; or the files below a directory, as Spark writes them.
        name, location = self._pattern, self._location / self._pattern
        is_directory = location.path is not None and location.path.is_dir()
        listed = None if is_directory else location.listed()
        if listed is not None and listed.size:
            return {name: listed}
        # Stores have no directories, or list them as empty files.
        with suppress(ObjectNotFoundError):
            below = _data_below(location)
            if below:
                return {f"{name}/{path}": file for path, file in below.items()}
        return {} if listed is None else {name: listed}

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return {name: file.size for name, file in self._files.items()}

    @cached_property
    def digest(self) -> str:
        """A digest of the listing, which differs for other files, or other versions of these."""
        files = [(name, *file) for name, file in self._files.items()]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]

    def has_changed(self, file: FileInfo, known: KnownIndex) -> bool:
        """Return whether a file of an index is, or may be, another version now, according to the listing.

        A file that was moved or copied on this machine keeps its modification time; its change time is new.
        """
        listed = self._files.get(file.basename)
        if listed is None or known.listing == self.digest:
            return False
        if file.version and listed.version and (self._location.path is None or file.version != listed.version):
            return file.version != listed.version
        if listed.modified is not None and listed.modified > known.scanned - _CLOCKS_DIFFER:
            return True
        root = self._location.path
        if root is None:
            return False
        with system_errors(f"inspect the files of {root}"):
            return (root / file.basename).stat().st_ctime > known.scanned - _CLOCK_TICK

    def with_versions(self, shard: ShardInfo) -> ShardInfo:
        """Return a shard whose stored files have the versions of the listing."""
        return with_versions(shard, self._versions)

    @cached_property
    def _versions(self) -> Mapping[str, str]:
        return {name: file.version for name, file in self._files.items()}

    def sizes(self) -> Mapping[str, int]:
        """Return the bytes of each file at any depth, by its path with forward slashes, sorted; without hidden ones."""
        return self._sizes

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read a range of a file; the result is shorter if the file ends before ``stop``.

        Raises:
            StorageError: They could not be read.
        """
        listed = self._files[name]
        return (self._location / name).read_range(start, min(stop, listed.size), Pin(listed.size, listed.version))

    def read_if_there(self, name: str) -> bytes | None:
        """Read a whole file, also a hidden one; return None if there is none.

        Raises:
            StorageError: It could not be read.
        """
        return (self._location / name).read_if_there()


def _data_below(location: Location) -> Mapping[str, ListedFile]:
    """Return the files below a directory, without those in cache directories, which are copies."""
    files, root = location.walk_files(), location.path
    if root is None:
        return files
    directories = {parent for name in files for parent in PurePosixPath(name).parents[:-1]}
    caches = {directory for directory in directories if (root / directory / MANIFEST_BASENAME).is_file()}
    return {name: file for name, file in files.items() if caches.isdisjoint(PurePosixPath(name).parents)}


def generated_index(
    data: Location | FilesAt,
    shard_format: str,
    block_length: int | None = None,
    *,
    known: KnownIndex | None = None,
    journal: Path | None = None,
    progress: ProgressCallback | None = None,
    versions: bool = False,
) -> bytes:
    """Generate the index of data of another format.

    Args:
        data: The directory, or URL, of the data; or those of its files to read.
        shard_format: Format of the files.
        block_length: Tokens of a sample, where the format has no other boundaries.
        known: An index that was generated before; files that have the same size, and were not written since, are not
            read again.
        journal: A file to record each shard in, with which a killed process can continue; removed at the end.
        progress: Callback for shards.
        versions: Whether to record the versions of the files, which are those of this location only.

    Returns:
        The text of an ``index.json``.

    Raises:
        ConfigError: No file has this format; or the format is unknown.
        FormatError: A file is damaged, or unlike the others.
        StorageError: A file could not be read.
        MissingDependencyError: The format needs a package that is not installed.
    """
    files = data if isinstance(data, FilesAt) else FilesAt(data)
    recorded = None if journal is None else _read_journal(journal)
    before = {
        shard.raw_data.basename: shard
        for index in (known, recorded)
        if index is not None
        for shard in index.shards
        if not any(files.has_changed(file, index) for file in shard.stored)
    }
    shards = list[ShardInfo]()
    with ExitStack() as stack:
        lines = None if journal is None else stack.enter_context(journal.open("w"))
        if lines is not None:
            lines.write(f"{time() if recorded is None else recorded.scanned}\n")
        generated = other_format(shard_format, block_length).describe(files, before)
        for described_shard in stack.enter_context(closing(generated)):  # which ends its threads
            shard = files.with_versions(described_shard) if versions else described_shard
            shards.append(shard)
            if lines is not None:
                lines.write(json.dumps(shard_to_json(shard)) + "\n")
                lines.flush()
            if progress is not None:
                progress(1)
    if journal is not None:
        journal.unlink()
    return dump_index(shards, versions=versions)


def _read_journal(journal: Path) -> KnownIndex | None:
    """Return the shards of a journal, whose first line is the time when it was started; None if it has none.

    A truncated last line is ignored; so are the parts of the last file, of which more may be missing.
    """
    shards, started = list[ShardInfo](), 0.0
    with suppress(FileNotFoundError, ValueError, FormatError), journal.open() as lines:
        started = float(next(lines, "0"))
        for line in lines:
            shards.append(parse_shard(json.loads(line), {}))
    if not shards:
        return None
    last = shards[-1].zip_data if shards[-1].compression == PART else None
    while last is not None and shards and shards[-1].zip_data == last:
        shards.pop()
    return KnownIndex(shards, started)


def find_or_generate_index(config: CacheConfig, known: KnownIndex | None) -> GeneratedIndex:
    """Return the index that ``lightning-streaming index`` wrote next to the data; else generate one.

    Args:
        config: The stream, which has another format.
        known: An index that was generated before.

    Raises:
        StreamingError: :func:`generated_index` raises it.
    """
    location, shard_format, block_length = config.location, config.format, config.block_length
    assert shard_format is not None, "otherwise it has an index"
    try:
        text = (location / INDEX_BASENAME).read_if_there()
    except AccessDeniedError:
        if config.pattern is None or not is_plain_name(config.pattern):
            raise
        text = None  # a signed URL is for one file only; reading that raises an error if it is denied, too
    if text is not None:
        try:
            shards = parse_index(text, str(location / INDEX_BASENAME)).shards
            formats = [(shard.format, described(shard).get("block_length")) for _, shard in shards.examples()]
        except FormatError as error:
            formats = []
            if shard_format != "litdata":  # whose index has that name
                _logger.warning("the index next to the data is ignored, and its files are read: %s", error)
        if formats and all(one == (shard_format, block_length) for one in formats):
            named = shards if config.pattern is None else _of_files(shards, config.pattern, location)
            stored = {file.basename for shard in named for file in shard.stored}
            before = () if known is None else known.shards
            recorded = {file.basename: file.version for shard in before for file in shard.stored if file.version}
            versions = _versions_at(location, stored, recorded)
            if (
                named is not shards
                or versions
                or any(file.version for _, shard in shards.examples() for file in shard.stored)
            ):
                text = dump_index((with_versions(shard, versions) for shard in named), versions=True)
            return GeneratedIndex(text, "")
    shown = config.shown
    _logger.info("%s has no index: its %s files are read to generate one", shown, shard_format)
    started = perf_counter()
    files = FilesAt(location, config.pattern)
    with progress(None, "shards", f"reading the {shard_format} files of {shown}") as callback:
        text = generated_index(files, shard_format, block_length, known=known, progress=callback, versions=True)
    _logger.info("an index of %s was generated in %.1f s", shown, perf_counter() - started)
    return GeneratedIndex(text, files.digest)


def with_versions(shard: ShardInfo, versions: Mapping[str, str]) -> ShardInfo:
    """Return a shard whose stored files have these versions.

    Args:
        shard: The shard.
        versions: Versions by file name; missing files have none.
    """
    changed = dict[str, Any]()
    for kind in ("data", "meta"):
        name = f"zip_{kind}" if getattr(shard, f"zip_{kind}") is not None else f"raw_{kind}"
        file = getattr(shard, name)
        if file is not None and file.version != versions.get(file.basename, ""):
            changed[name] = replace(file, version=versions.get(file.basename, ""))
    return replace(shard, **changed) if changed else shard


def _versions_at(location: Location, names: Collection[str], recorded: Mapping[str, str]) -> Mapping[str, str]:
    """Return the versions of some files of a store; without those that it does not report.

    An index next to the data has none: it may have been written elsewhere, and copied with the data. Files that are
    read in place are pinned only by the index.

    Args:
        location: The directory, or URL.
        names: The files.
        recorded: Versions in the cached index, returned if the store cannot be reached.
    """
    if location.path is not None:
        return {}
    try:
        if scheme_of(location.url) in HTTP_SCHEMES or len(names) <= _FEW_FILES:
            # Of more files, those without a version are pinned to the first response.
            some = names if len(names) <= _MAX_REQUESTS else recorded.keys() & names
            listed = location.listed_below(sorted(some))
        else:
            listed = _list_directories_of(location, names)
    except StreamingError as error:
        _logger.debug("the versions of the files at %s could not be listed: %s", location, error)
        return recorded
    return {name: file.version for name, file in listed.items() if file is not None and name in names}


def _list_directories_of(location: Location, names: Collection[str]) -> dict[str, ListedFile | None]:
    """Return the entries of the directories of some files; if there are many, of all files below them."""
    parents = sorted({name.rpartition("/")[0] for name in names})
    if len(parents) > _FEW_DIRECTORIES:
        common = "" if "" in parents else posixpath.commonpath(parents)
        below = (location / common if common else location).walk_files()
        return {posixpath.join(common, name): file for name, file in below.items()}
    listed = dict[str, ListedFile | None]()
    for parent in parents:
        files = (location / parent if parent else location).files()
        listed |= {posixpath.join(parent, name): file for name, file in files.items()}
    return listed


def _of_files(shards: Sequence[ShardInfo], pattern: str, location: Location) -> Sequence[ShardInfo]:
    """Return the shards whose files match a pattern.

    Raises:
        ConfigError: There is none.
    """
    stored = {(shard.zip_data or shard.raw_data).basename for shard in shards}
    matching = set(match_names(pattern, list(stored)))
    named = [shard for shard in shards if (shard.zip_data or shard.raw_data).basename in matching]
    if not named:
        raise ConfigError(
            f"{location / INDEX_BASENAME} has no file that matches {pattern!r}",
            hint="correct the pattern, or if there are new files since "
            "that index was written, write it again with: lightning-streaming index",
            option="remote",
            path=str(location / INDEX_BASENAME),
        )
    return named
