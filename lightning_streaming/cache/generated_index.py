"""The index of data that other libraries wrote: found by a look at its files, or read where somebody had it made ahead.

Once made, it is an index like any other, in the cache directory of the node.
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
from lightning_streaming.storage.urls import HTTP_SCHEMES, is_plain_name, match_names, scheme_of
from lightning_streaming.storage.versions import Pin
from lightning_streaming.waits import ProgressCallback, progress

_logger = package_logger(__name__)

_CLOCKS_DIFFER = 60.0
"""Seconds by which a store's clock may differ from ours."""
_FEW_FILES = 4
"""So few files are listed one by one; of more, the directory."""
_FEW_DIRECTORIES = 16
"""So few directories are listed one by one; of more, all that is below the directory that they have in common."""
_MOST_REQUESTS = 1000
"""Files that are asked about one by one over HTTP, where directories cannot be listed."""
_CLOCK_TICK = 0.05
"""Seconds by which a change time may be behind the clock: filesystems read the clock of the kernel's last tick."""


class KnownIndex(NamedTuple):
    """What is known of some files."""

    shards: Sequence[ShardInfo]
    looked_at: float
    """When they were looked at, in seconds since the epoch."""
    listing: str = ""
    """The :attr:`FilesAt.digest` of that time; "" if that is not known."""


class GeneratedIndex(NamedTuple):
    """An index that was made, or found beside the data."""

    text: bytes
    """Of an ``index.json``."""
    listing: str
    """The :attr:`FilesAt.digest` that goes with it; "" where no files were listed."""


class FilesAt:
    """The files below a location.

    Args:
        location: The directory, or URL.
        pattern: Which of its files; None for all.
    """

    def __init__(self, location: Location, pattern: str | None = None) -> None:
        self._location = location
        self._pattern = pattern

    @property
    def shown(self) -> str:
        """What to call the place in an error."""
        return str(self._location if self._pattern is None else self._location / self._pattern)

    def shown_file(self, name: str) -> str:
        """Return the path or URL of a file, without secrets."""
        return str(self._location / name)

    @cached_property
    def _files(self) -> Mapping[str, ListedFile]:
        if self._pattern is None:
            return _data_below(self._location)
        if is_plain_name(self._pattern):
            return self._of_one_name(self._pattern)
        listed = _data_below(self._location)
        return {name: listed[name] for name in match_names(self._pattern, list(listed))}

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return {name: found.size for name, found in self._files.items()}

    @cached_property
    def digest(self) -> str:
        """What tells the files from others, or from these after one was written again, as far as a listing does."""
        files = [(name, *found) for name, found in self._files.items()]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]

    def has_changed(self, file: FileInfo, known: KnownIndex) -> bool:
        """Return whether a file of an index is another version by now, or may be, as far as a listing tells.

        A file of this machine that was moved or copied here keeps its modification time; its change time is new.
        """
        listed = self._files.get(file.basename)
        if listed is None or known.listing == self.digest:
            return False
        if file.version and listed.version and (self._location.path is None or file.version != listed.version):
            return file.version != listed.version
        if listed.modified is not None and listed.modified > known.looked_at - _CLOCKS_DIFFER:
            return True
        return self._was_replaced_here(file.basename, known.looked_at - _CLOCK_TICK)

    def _was_replaced_here(self, name: str, since: float) -> bool:
        root = self._location.path
        if root is None:
            return False
        with system_errors(f"inspect the files of {root}"):
            return (root / name).stat().st_ctime > since

    def with_versions(self, shard: ShardInfo) -> ShardInfo:
        """Return a shard whose stored files have the versions of the listing."""
        return with_versions(shard, self._versions)

    @cached_property
    def _versions(self) -> Mapping[str, str]:
        return {name: one.version for name, one in self._files.items()}

    def _of_one_name(self, name: str) -> Mapping[str, ListedFile]:
        """A file, of a place that may not be listed, as over HTTP; or those below a directory, as Spark writes them."""
        place = self._location / name
        is_directory = place.path is not None and place.path.is_dir()
        listed = None if is_directory else place.listed()
        if listed is not None and listed.size:
            return {name: listed}
        # Stores have no directories, or say that they are empty files.
        with suppress(ObjectNotFoundError):
            below = _data_below(place)
            if below:
                return {f"{name}/{one}": found for one, found in below.items()}
        return {} if listed is None else {name: listed}

    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file at any depth, by its path with forward slashes, sorted; but for hidden ones."""
        return self._sizes

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Some bytes of a file; fewer where it ends before them.

        Raises:
            StorageError: They could not be read.
        """
        listed = self._files[name]
        return (self._location / name).read_range(start, min(stop, listed.size), Pin(listed.size, listed.version))

    def read_if_there(self, name: str) -> bytes | None:
        """A whole file, also one that is hidden; None if there is none.

        Raises:
            StorageError: It could not be read.
        """
        return (self._location / name).read_if_there()


def _data_below(location: Location) -> Mapping[str, ListedFile]:
    """The files below a directory, but for those in our own cache directories, which hold data once more."""
    found, root = location.walk_files(), location.path
    if root is None:
        return found
    directories = {parent for name in found for parent in PurePosixPath(name).parents[:-1]}
    ours = {one for one in directories if (root / one / MANIFEST_BASENAME).is_file()}
    return {name: one for name, one in found.items() if ours.isdisjoint(PurePosixPath(name).parents)}


def generated_index(
    place: Location | FilesAt,
    shard_format: str,
    block_length: int | None = None,
    *,
    known: KnownIndex | None = None,
    journal: Path | None = None,
    progress: ProgressCallback | None = None,
    versions: bool = False,
) -> bytes:
    """Look at data of another format, and describe it.

    Args:
        place: The directory, or URL, of the data; or those of its files that are looked at.
        shard_format: What lies there.
        block_length: Tokens of a sample, where the format has no other borders.
        known: An index that was made before; files that have the same size, and were not written since, are not looked
            at again.
        journal: A file to note each shard in, so that whoever is killed goes on where they were; gone at the end.
        progress: Told of each shard.
        versions: Whether to record the versions of the files; they hold for this location alone.

    Returns:
        The text of an ``index.json``.

    Raises:
        ConfigError: Nothing there is of this format; or there is no such format.
        FormatError: A file is damaged, or unlike the others.
        StorageError: A file could not be read.
        MissingDependencyError: The format needs a package that is not installed.
    """
    files = place if isinstance(place, FilesAt) else FilesAt(place)
    noted = None if journal is None else _noted(journal)
    before = {
        shard.raw_data.basename: shard
        for one in (known, noted)
        if one is not None
        for shard in one.shards
        if not any(files.has_changed(file, one) for file in shard.stored)
    }
    shards = list[ShardInfo]()
    with ExitStack() as stack:
        lines = None if journal is None else stack.enter_context(journal.open("w"))
        if lines is not None:
            lines.write(f"{time() if noted is None else noted.looked_at}\n")
        found = other_format(shard_format, block_length).describe(files, before)
        for described_shard in stack.enter_context(closing(found)):  # which ends its threads
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


def _noted(journal: Path) -> KnownIndex | None:
    """The shards that a journal holds, which begins with the time when it was begun; None if it holds none.

    A last line that was cut short is left out; so are the parts of the last file, of which more may follow.
    """
    shards, begun = list[ShardInfo](), 0.0
    with suppress(FileNotFoundError, ValueError, FormatError), journal.open() as lines:
        begun = float(next(lines, "0"))
        for line in lines:
            shards.append(parse_shard(json.loads(line), {}))
    if not shards:
        return None
    last = shards[-1].zip_data if shards[-1].compression == PART else None
    while last is not None and shards and shards[-1].zip_data == last:
        shards.pop()
    return KnownIndex(shards, begun)


def find_or_generate_index(config: CacheConfig, known: KnownIndex | None) -> GeneratedIndex:
    """The index that ``lightning-streaming index`` left beside the data; else one that is made now.

    Args:
        config: The stream, which is of another format.
        known: An index that was made before.

    Raises:
        StreamingError: As for :func:`generated_index`.
    """
    location, shard_format, block_length = config.location, config.format, config.block_length
    assert shard_format is not None, "else its index is beside it"
    left = _left_beside(config)
    if left is not None:
        try:
            shards = parse_index(left, str(location / INDEX_BASENAME)).shards
            told = [(one.format, described(one).get("block_length")) for _, one in shards.examples()]
        except FormatError as error:
            told = []
            if shard_format != "litdata":  # whose own index has that name
                _logger.warning("an index beside the data is left aside, and its files are looked at: %s", error)
        if told and all(one == (shard_format, block_length) for one in told):
            found = shards if config.pattern is None else _of_files(shards, config.pattern, location)
            stored = {file.basename for shard in found for file in shard.stored}
            before = () if known is None else known.shards
            recorded = {file.basename: file.version for one in before for file in one.stored if file.version}
            versions = _versions_at(location, stored, recorded)
            if (
                found is not shards
                or versions
                or any(file.version for _, one in shards.examples() for file in one.stored)
            ):
                left = dump_index((with_versions(shard, versions) for shard in found), versions=True)
            return GeneratedIndex(left, "")
    shown = config.shown
    _logger.info("%s has no index of its own: its %s files are looked at", shown, shard_format)
    began = perf_counter()
    files = FilesAt(location, config.pattern)
    with progress(None, "shards", f"looking at the {shard_format} files of {shown}") as tell:
        text = generated_index(files, shard_format, block_length, known=known, progress=tell, versions=True)
    _logger.info("an index of %s was made in %.1f s", shown, perf_counter() - began)
    return GeneratedIndex(text, files.digest)


def _left_beside(config: CacheConfig) -> bytes | None:
    """What lies under the name of an index beside the data, if it may be read."""
    try:
        return (config.location / INDEX_BASENAME).read_if_there()
    except AccessDeniedError:
        if config.pattern is None or not is_plain_name(config.pattern):
            raise
        return None  # a signed URL is for one file alone; whether that may be read is told when it is


def with_versions(shard: ShardInfo, versions: Mapping[str, str]) -> ShardInfo:
    """Return a shard whose stored files have these versions.

    Args:
        shard: The shard.
        versions: Of each file, by its name; none of files that are missing.
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

    An index beside the data has none: it may have been written elsewhere, and copied with the data. Files that are read
    in place are pinned by nothing but what the index says of them.

    Args:
        location: The directory, or URL.
        names: The files.
        recorded: Versions that the index in the cache has: they stay where the store cannot be asked.
    """
    if location.path is not None:
        return {}
    try:
        if scheme_of(location.url) in HTTP_SCHEMES or len(names) <= _FEW_FILES:
            # Of more files, those without a version are pinned to the first answer.
            some = names if len(names) <= _MOST_REQUESTS else recorded.keys() & names
            found = location.listed_below(sorted(some))
        else:
            found = _listed_beside(location, names)
    except StreamingError as error:
        _logger.debug("the versions of the files at %s could not be listed: %s", location, error)
        return recorded
    return {name: one.version for name, one in found.items() if one is not None and name in names}


def _listed_beside(location: Location, names: Collection[str]) -> dict[str, ListedFile | None]:
    """Return the entries of the directories that hold some files; of many directories, of all that is below them."""
    parents = sorted({name.rpartition("/")[0] for name in names})
    if len(parents) > _FEW_DIRECTORIES:
        common = "" if "" in parents else posixpath.commonpath(parents)
        below = (location / common if common else location).walk_files()
        return {posixpath.join(common, name): one for name, one in below.items()}
    found = dict[str, ListedFile | None]()
    for parent in parents:
        files = (location / parent if parent else location).files()
        found |= {posixpath.join(parent, name): one for name, one in files.items()}
    return found


def _of_files(shards: Sequence[ShardInfo], pattern: str, location: Location) -> Sequence[ShardInfo]:
    """The shards whose files a pattern names.

    Raises:
        ConfigError: There is none.
    """
    stored = {(shard.zip_data or shard.raw_data).basename for shard in shards}
    named = set(match_names(pattern, list(stored)))
    found = [shard for shard in shards if (shard.zip_data or shard.raw_data).basename in named]
    if not found:
        raise ConfigError(
            f"{location / INDEX_BASENAME} has no file that {pattern!r} names",
            hint="correct that, or if files came since "
            "that index was made, make it again with: lightning-streaming index",
            option="remote",
            path=str(location / INDEX_BASENAME),
        )
    return found
