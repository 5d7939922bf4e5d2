"""The index of data that other libraries wrote: found by a look at its files, or read where somebody had it made ahead.

Once made, it is an index like any other, in the cache directory of the node.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from pathlib import Path
from time import perf_counter

from lightning_streaming.errors import FormatError
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
from lightning_streaming.storage import Location

_logger = logging.getLogger(__name__)

Progress = Callable[[int], object]
"""Told how many shards were found since it was last told."""


class FilesAt:
    """The files below a location."""

    def __init__(self, location: Location) -> None:
        self._location = location

    @property
    def shown(self) -> str:
        """What to call the place in an error."""
        return str(self._location)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return self._location.walk_sizes()

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


def made_index(
    location: Location,
    shard_format: str,
    block_length: int | None = None,
    *,
    known: DatasetIndex | None = None,
    journal: Path | None = None,
    progress: Progress | None = None,
) -> bytes:
    """Look at data of another format, and describe it.

    Args:
        location: The directory, or URL, of the data.
        shard_format: What lies there.
        block_length: Tokens of a sample, where the format has no other borders.
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
        found = other_format(shard_format, block_length).describe(FilesAt(location), before)
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
    """The shards that a journal holds; a last line that was cut short is left out."""
    shards = list[ShardInfo]()
    with suppress(FileNotFoundError, ValueError, FormatError), journal.open() as lines:
        for line in lines:
            shards.append(parse_shard(json.loads(line), {}))
    return shards


def found_or_made(location: Location, shard_format: str, block_length: int | None, known: DatasetIndex | None) -> bytes:
    """The index that ``lightning-streaming index`` left beside the data; else one that is made now.

    Raises:
        StreamingError: As for :func:`made_index`.
    """
    left = (location / INDEX_BASENAME).read_if_there()
    if left is not None:
        with suppress(FormatError):  # what is called so there is of another library
            shards = parse_index(left, str(location / INDEX_BASENAME)).shards
            told = [(one.format, described(one).get("block_length")) for _, one in shards.examples()]
            if told and all(one == (shard_format, block_length) for one in told):
                return left
    _logger.info("%s has no index of its own: its %s files are looked at", location, shard_format)
    began = perf_counter()
    text = made_index(location, shard_format, block_length, known=known)
    _logger.info("an index of %s was made in %.1f s", location, perf_counter() - began)
    return text
