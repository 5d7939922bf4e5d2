"""The index of data that other libraries wrote: found by a look at its files, or read where somebody had it made ahead.

Once made, it is an index like any other, in the cache directory of the node.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from time import perf_counter, time
from typing import NamedTuple

from lightning_streaming.cache.config import MANIFEST_BASENAME, CacheConfig
from lightning_streaming.errors import AccessDeniedError, ConfigError, FormatError, ObjectNotFoundError
from lightning_streaming.escaping import package_logger
from lightning_streaming.formats.index import (
    INDEX_BASENAME,
    ShardInfo,
    dump_index,
    parse_index,
    parse_shard,
    shard_to_json,
)
from lightning_streaming.formats.other_formats import described
from lightning_streaming.formats.shard import other_format
from lightning_streaming.formats.shard_table import PART
from lightning_streaming.storage import Location
from lightning_streaming.storage.file_patterns import is_one_name, matching
from lightning_streaming.storage.location import ListedFile
from lightning_streaming.waits import Tell, progress

_logger = package_logger(__name__)

_CLOCKS_DIFFER = 60.0
"""Seconds by which a store's clock may differ from ours."""


class KnownIndex(NamedTuple):
    """What is known of some files."""

    shards: Sequence[ShardInfo]
    looked_at: float
    """When they were looked at, in seconds since the epoch."""
    listing: str = ""
    """The :attr:`FilesAt.digest` of that time; "" if that is not known."""


class MadeIndex(NamedTuple):
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

    @cached_property
    def _files(self) -> Mapping[str, ListedFile]:
        if self._pattern is None:
            return _data_below(self._location)
        if is_one_name(self._pattern):
            return self._of_one_name(self._pattern)
        listed = _data_below(self._location)
        return {name: listed[name] for name in matching(self._pattern, list(listed))}

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return {name: found.size for name, found in self._files.items()}

    @cached_property
    def digest(self) -> str:
        """What tells the files from others, or from these after one was written again, as far as a listing does."""
        files = [(name, *found) for name, found in self._files.items()]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]

    def changed(self, known: KnownIndex) -> set[str]:
        """The files that were written since they were looked at, or about then, as far as is told."""
        if known.listing == self.digest:
            return set()
        after = known.looked_at - _CLOCKS_DIFFER
        return {name for name, one in self._files.items() if one.modified is not None and one.modified > after}

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
        return (self._location / name).read_range(start, min(stop, self._sizes[name]))

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


def made_index(
    place: Location | FilesAt,
    shard_format: str,
    block_length: int | None = None,
    *,
    known: KnownIndex | None = None,
    journal: Path | None = None,
    progress: Tell | None = None,
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
    told = [one for one in (known, noted) if one is not None]
    changed = list(map(files.changed, told))
    before = {
        shard.raw_data.basename: shard
        for one, written in zip(told, changed, strict=True)
        for shard in one.shards
        if written.isdisjoint(file.basename for file in shard.stored)
    }
    shards = list[ShardInfo]()
    with ExitStack() as stack:
        lines = None if journal is None else stack.enter_context(journal.open("w"))
        if lines is not None:
            lines.write(f"{time() if noted is None else noted.looked_at}\n")
        found = other_format(shard_format, block_length).describe(files, before)
        for shard in stack.enter_context(closing(found)):  # which ends its threads
            shards.append(shard)
            if lines is not None:
                lines.write(json.dumps(shard_to_json(shard)) + "\n")
                lines.flush()
            if progress is not None:
                progress(1)
    if journal is not None:
        journal.unlink()
    return dump_index(shards)


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


def found_or_made(config: CacheConfig, known: KnownIndex | None) -> MadeIndex:
    """The index that ``lightning-streaming index`` left beside the data; else one that is made now.

    Args:
        config: The stream, which is of another format.
        known: An index that was made before.

    Raises:
        StreamingError: As for :func:`made_index`.
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
            return MadeIndex(left if config.pattern is None else _of_files(shards, config.pattern, location), "")
    shown = config.shown
    _logger.info("%s has no index of its own: its %s files are looked at", shown, shard_format)
    began = perf_counter()
    files = FilesAt(location, config.pattern)
    with progress(None, "shards", f"looking at the {shard_format} files of {shown}") as tell:
        text = made_index(files, shard_format, block_length, known=known, progress=tell)
    _logger.info("an index of %s was made in %.1f s", shown, perf_counter() - began)
    return MadeIndex(text, files.digest)


def _left_beside(config: CacheConfig) -> bytes | None:
    """What lies under the name of an index beside the data, if it may be read."""
    try:
        return (config.location / INDEX_BASENAME).read_if_there()
    except AccessDeniedError:
        if config.pattern is None or not is_one_name(config.pattern):
            raise
        return None  # a signed URL is for one file alone; whether that may be read is told when it is


def _of_files(shards: Sequence[ShardInfo], pattern: str, location: Location) -> bytes:
    """The index of those shards alone whose files a pattern names.

    Raises:
        ConfigError: There is none.
    """
    stored = {(shard.zip_data or shard.raw_data).basename for shard in shards}
    named = set(matching(pattern, list(stored)))
    found = [shard for shard in shards if (shard.zip_data or shard.raw_data).basename in named]
    if not found:
        raise ConfigError(
            f"{location / INDEX_BASENAME} has no file that {pattern!r} names; correct that, or if files came since "
            "that index was made, make it again with: lightning-streaming index"
        )
    return dump_index(found)
