"""The index of data that other libraries wrote: found by a look at its files, or read where somebody had it made ahead.

Once made, it is an index like any other, in the cache directory of the node.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from time import perf_counter

from lightning_streaming.cache.config import MANIFEST_BASENAME, CacheConfig
from lightning_streaming.errors import ConfigError, FormatError
from lightning_streaming.formats.index import (
    INDEX_BASENAME,
    DatasetIndex,
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
from lightning_streaming.storage.urls import HTTP_SCHEMES, scheme_of

_logger = logging.getLogger(__name__)

Progress = Callable[[int], object]
"""Told how many shards were found since it was last told."""


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
    def _sizes(self) -> Mapping[str, int]:
        if self._pattern is None:
            return _data_below(self._location)
        if is_one_name(self._pattern):  # of a place that may not be listed, as over HTTP
            named = self._location / self._pattern
            size = named.size()
            if size is not None:
                return {self._pattern: size}
            if scheme_of(self._location.url) in HTTP_SCHEMES:
                return {}
            # Other writers make a directory that is called like a file, and files in it.
            return {f"{self._pattern}/{name}": size for name, size in _data_below(named).items()}
        found = _data_below(self._location)
        return {name: found[name] for name in matching(self._pattern, list(found))}

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


def _data_below(location: Location) -> dict[str, int]:
    """Bytes of each file below a directory, but for those in our own cache directories, which hold data once more."""
    found, root = location.walk_sizes(), location.path
    if root is None:
        return found
    directories = {parent for name in found for parent in PurePosixPath(name).parents[:-1]}
    ours = {one for one in directories if (root / one / MANIFEST_BASENAME).is_file()}
    return {name: size for name, size in found.items() if ours.isdisjoint(PurePosixPath(name).parents)}


def made_index(
    location: Location,
    shard_format: str,
    block_length: int | None = None,
    *,
    pattern: str | None = None,
    known: DatasetIndex | None = None,
    journal: Path | None = None,
    progress: Progress | None = None,
) -> bytes:
    """Look at data of another format, and describe it.

    Args:
        location: The directory, or URL, of the data.
        shard_format: What lies there.
        block_length: Tokens of a sample, where the format has no other borders.
        pattern: Which files there are looked at; None for all.
        known: An index that was made before; files that have not changed since are not looked at again.
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
    noted = () if journal is None else _noted(journal)
    before = {shard.raw_data.basename: shard for shard in (*(known.shards if known is not None else ()), *noted)}
    shards = list[ShardInfo]()
    with ExitStack() as stack:
        lines = None if journal is None else stack.enter_context(journal.open("w"))
        found = other_format(shard_format, block_length).describe(FilesAt(location, pattern), before)
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


def _noted(journal: Path) -> list[ShardInfo]:
    """The shards that a journal holds.

    A last line that was cut short is left out; so are the parts of the last file, of which more may follow.
    """
    shards = list[ShardInfo]()
    with suppress(FileNotFoundError, ValueError, FormatError), journal.open() as lines:
        for line in lines:
            shards.append(parse_shard(json.loads(line), {}))
    last = shards[-1].zip_data if shards and shards[-1].compression == PART else None
    while last is not None and shards and shards[-1].zip_data == last:
        shards.pop()
    return shards


def found_or_made(config: CacheConfig, known: DatasetIndex | None) -> bytes:
    """The index that ``lightning-streaming index`` left beside the data; else one that is made now.

    Args:
        config: The stream, which is of another format.
        known: An index that was made before.

    Raises:
        StreamingError: As for :func:`made_index`.
    """
    location, shard_format, block_length = config.location, config.format, config.block_length
    assert shard_format is not None, "else its index is beside it"
    left = (location / INDEX_BASENAME).read_if_there()
    if left is not None:
        with suppress(FormatError):  # what is called so there is of another library
            shards = parse_index(left, str(location / INDEX_BASENAME)).shards
            told = [(one.format, described(one).get("block_length")) for _, one in shards.examples()]
            if told and all(one == (shard_format, block_length) for one in told):
                return left if config.pattern is None else _of_files(shards, config.pattern, location)
    shown = FilesAt(location, config.pattern).shown
    _logger.info("%s has no index of its own: its %s files are looked at", shown, shard_format)
    began = perf_counter()
    text = made_index(location, shard_format, block_length, pattern=config.pattern, known=known)
    _logger.info("an index of %s was made in %.1f s", shown, perf_counter() - began)
    return text


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
