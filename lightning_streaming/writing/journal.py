"""Records of stored shards, by which a writer continues after one that was killed, and the search for the start.

Shard 12 is stored, then its record is written; only then it counts. A record is an index of this shard, with settings,
columns, sizes and hashes. Records appear in the order of the shards. Each also contains the shard before: if a crash of
the machine damages one record, the next one replaces it.

An append adds shards after those of the published index, which stay unchanged. A writer of an earlier version extended
the last of them: it kept a replacement in the folder of the records, and then, when all was stored, the index that
should follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import TypeVar

from lightning_streaming.errors import ConfigError, IndexFormatError
from lightning_streaming.formats.index import INDEX_BASENAME, ShardInfo, dump_index, parse_index
from lightning_streaming.formats.mds import encode_config
from lightning_streaming.storage import Location
from lightning_streaming.writing.destination import (
    PARTS_PLAN,
    WRITING,
    Destination,
    has_first_hash,
    is_shard_file,
    record_name,
    record_number,
)
from lightning_streaming.writing.shards import ShardEncoder, shard_name

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_THREADS = 16
"""Concurrent requests: there is a record per shard, and there may be many shards."""


class Journal:
    """The records of one dataset, at the location of its shards."""

    def __init__(self, destination: Destination) -> None:
        """Read and write nothing yet."""
        self._destination = destination
        self._truth = destination.truth
        self._folder = destination.truth / WRITING

    def mark(self) -> None:
        """Mark directories as those of an unfinished writer that can be continued."""
        self._destination.make_folder(WRITING)

    def record(self, number: int, shard: ShardInfo, before: Sequence[ShardInfo]) -> None:
        """Write the record of a stored shard, with the last one before it."""
        (self._truth / record_name(number)).put(dump_index([shard, *before[-1:]]))

    def records(self) -> dict[int, ShardInfo]:
        """Return the recorded shards by number, except those of which no record can be read."""
        numbers = (record_number(name) for name in self._folder.sizes())
        known = sorted(number for number in numbers if number is not None)
        read = dict(zip(known, _concurrently(self._read_record, known), strict=True))
        recorded = {number: shards[:1] or read.get(number + 1, ())[1:] for number, shards in read.items()}
        return {number: shards[0] for number, shards in recorded.items() if shards}

    def appended(self, published: tuple[ShardInfo, ...]) -> list[ShardInfo]:
        """Return the shards that an append stored after published ones, up to the first that is not intact."""
        count = len(published)
        added = {number: shard for number, shard in self.records().items() if number >= count}
        # A writer of an earlier version stored them after a last shard that it had extended.
        is_next = count in added and self._read_record(count)[1:] == published[-1:]
        return self.stored(added) if is_next else []

    def stored(self, shards: Mapping[int, ShardInfo]) -> list[ShardInfo]:
        """Return the shards, given by number, whose files are intact, up to the first whose are not."""
        sizes, root = self._truth.sizes(), self._truth.path

        def is_intact(number: int) -> bool:
            shard = shards[number]
            if any(sizes.get(file.basename) != file.bytes for file in shard.stored):
                return False
            # On a store a hash would cost a download. Stores check what they receive, and store whole files only.
            return root is None or all(
                has_first_hash(root / file.basename, file, shard.hashes) for file in shard.stored
            )

        first = min(shards, default=0)
        in_a_row = [number for expected, number in enumerate(shards, first) if expected == number]
        intact = zip(in_a_row, _concurrently(is_intact, in_a_row), strict=True)
        return [shards[number] for number, _ in takewhile(itemgetter(1), intact)]

    def check_no_replacement(self, published: bytes) -> None:
        """Check that no writer of an earlier version was stopped while it replaced the last shard.

        Raises:
            ConfigError: One was. It is unknown whether the shard is replaced already, and which one readers expect.
        """
        if (self._folder / INDEX_BASENAME).read_if_there() in (None, published):
            return
        moved = [*sorted(filter(is_shard_file, self._folder.sizes())), INDEX_BASENAME]
        raise ConfigError(
            f"an earlier version was stopped while it published an append to {self._truth}",
            hint="finish that by hand: move "
            f"these files out of {WRITING}/ to the index, over those of the same names, in this order: "
            f"{', '.join(moved)}",
            path=str(self._truth),
        )

    def forget(self, first: int) -> None:
        """Remove the records of this shard and all after it, and other files of writers of an earlier version."""
        numbers = {name: record_number(name) for name in self._folder.sizes()}
        removed = [
            name
            for name, number in numbers.items()
            if (number is not None and number >= first) or is_shard_file(name) or name == INDEX_BASENAME
        ]
        _concurrently(Location.remove, [self._folder / name for name in removed])

    def close(self) -> None:
        """Remove all records, once all is published."""
        self.forget(0)
        self._destination.remove_folder(WRITING)

    def _read_record(self, number: int) -> tuple[ShardInfo, ...]:
        """Return the shard of this number, and the one before if there is one; empty if the record is unreadable."""
        name = record_name(number)
        try:
            return tuple(parse_index((self._truth / name).read(), name).shards)
        except IndexFormatError:
            return ()


def _concurrently(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Return the results of a function that mostly waits for a store, in order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The part of a dataset that exists before a writer starts."""

    published: tuple[ShardInfo, ...] | None = None
    """The shards of the index; None while there is none."""
    index: bytes | None = None
    """The text of the index."""
    stored: tuple[ShardInfo, ...] = ()
    """The first shards of the dataset, including the published ones, which are stored and not written again."""
    is_finished: bool = False
    """Whether nothing will be added."""


def find_start(mode: str, destination: Destination, *, exist_ok: bool) -> Start:
    """Return the start of a writer. Only ``"create"`` changes files.

    Raises:
        ConfigError: The destination holds files that ``"create"`` does not replace, a dataset in parts, or an
            unfinished append; or no dataset of one writer to append to.
        StorageError: The store did not answer, or a published shard is missing or has another size.
        IndexFormatError: The index cannot be read.
    """
    if mode == "create":
        destination.clear(exist_ok=exist_ok)
        return Start()
    journal, published = Journal(destination), destination.published()
    if published is None and mode == "append":
        raise ConfigError(
            "there is no finished dataset to append to", hint="write one with mode='create' or 'resume'", option="mode"
        )
    records = journal.records() if mode == "resume" else {}
    if published is None:
        if (destination.truth / PARTS_PLAN).read_if_there() is not None:
            raise ConfigError(
                f"a dataset in parts was started here, as {PARTS_PLAN} shows",
                hint="continue it by the same call of write_parallel with mode='resume', or choose another location",
                option="mode",
            )
        return Start(stored=tuple(journal.stored(records)) if 0 in records else ())
    index, text = published
    shards = tuple(index.shards)
    journal.check_no_replacement(text)
    if mode == "resume":
        if any(shards[number : number + 1] != (shard,) for number, shard in records.items()):
            raise ConfigError(
                "an append to this dataset was not finished", hint="continue it with mode='append'", option="mode"
            )
        return Start(published=shards, index=text, stored=shards, is_finished=True)
    for number, shard in enumerate(shards):
        name = shard.raw_data.basename
        if name != shard_name(number, shard.format) or _config_of(shard) != _config_of(shards[0]):
            raise ConfigError(
                f"only a dataset of one writer can be appended to, but its shard {number} is {name}",
                hint="write another dataset, and merge both",
                option="mode",
                path=name,
            )
    destination.check_published(shards)
    return Start(published=shards, index=text, stored=(*shards, *journal.appended(shards)))


def prepare_start(start: Start, destination: Destination, journal: Journal) -> None:
    """Remove files that do not belong to the start, and mark the dataset as unfinished unless it is finished.

    Raises:
        ConfigError: A directory holds files named like shards that no writer left.
        ShardCorruptError: A shard has another size than the index says.
    """
    destination.tidy(start.stored, is_finished=start.is_finished)
    destination.fill(start.stored, start.index)
    if start.is_finished:
        journal.close()
        return
    journal.mark()
    journal.forget(len(start.stored))


def check_format(shards: Sequence[ShardInfo], expected: str) -> None:
    """Check that a dataset to continue has this format.

    Raises:
        ConfigError: A shard has another.
    """
    for shard in shards:
        if shard.format != expected:
            raise ConfigError(
                f"{shard.raw_data.basename} has format {shard.format}, but this writer writes {expected}",
                path=shard.raw_data.basename,
            )


def check_settings(shards: Sequence[ShardInfo], encoder: ShardEncoder) -> None:
    """Check that a dataset to continue has the settings and columns of this writer.

    Raises:
        ConfigError: They differ; all differences are listed.
    """
    for shard in shards:
        if (text := _config_of(shard)) != encoder.config:
            stored, current = json.loads(text), json.loads(encoder.config)
            differences = "; ".join(
                f"{key} is {stored.get(key)!r} there, but {current.get(key)!r} here"
                for key in sorted({*current, *stored})
                if current.get(key) != stored.get(key)
            )
            raise ConfigError(
                f"{shard.raw_data.basename} was written with other settings: {differences}",
                path=shard.raw_data.basename,
            )


def _config_of(shard: ShardInfo) -> bytes:
    """Return the config in a shard, which describes all that the shards of one writer have in common."""
    return encode_config(
        shard.schema, shard.format, compression=shard.compression, hashes=shard.hashes, size_limit=shard.size_limit
    )
