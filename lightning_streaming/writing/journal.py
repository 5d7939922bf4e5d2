"""What a writer that may be killed writes down for the one that goes on, and where that one begins.

Shard 12 is stored, then a record says so; only then it counts. A record is an index of this shard, so it tells the
settings, the columns, the sizes and the hashes too. Records appear in the order of the shards. Each also tells of the
shard before: so one that a crash of the machine damaged costs nothing, as long as the next one can be read.

What is appended goes behind the shards of the published index, none of which is touched. A writer of an earlier version
filled up the last of them: it kept a replacement in the folder of the records, and then, when all was stored, the index
that was to follow.
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
from lightning_streaming.formats.mds.shard import encode_config
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
from lightning_streaming.writing.shard_encoders import ShardEncoder, shard_name
from lightning_streaming.writing.writer_options import Mode

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_THREADS = 16
"""Requests at a time: there is a record a shard, and there may be many shards."""


class Journal:
    """The records of one dataset, where its shards are."""

    def __init__(self, destination: Destination) -> None:
        """Nothing is touched yet."""
        self._destination = destination
        self._truth = destination.truth
        self._folder = destination.truth / WRITING

    def mark(self) -> None:
        """Say in directories that a writer is at work which can be continued."""
        self._destination.make_folder(WRITING)

    def record(self, number: int, shard: ShardInfo, before: Sequence[ShardInfo]) -> None:
        """Say that a shard is stored, behind those before."""
        (self._truth / record_name(number)).put(dump_index([shard, *before[-1:]]))

    def records(self) -> dict[int, ShardInfo]:
        """The shards that there are records of, by number, but for those that no record tells of that can be read."""
        numbers = (record_number(name) for name in self._folder.sizes())
        known = sorted(number for number in numbers if number is not None)
        read = dict(zip(known, _at_once(self._read_record, known), strict=True))
        told = {number: shards[:1] or read.get(number + 1, ())[1:] for number, shards in read.items()}
        return {number: shards[0] for number, shards in told.items() if shards}

    def appended(self, published: tuple[ShardInfo, ...]) -> list[ShardInfo]:
        """The shards that an append has stored behind published ones, up to the first that is not as it was stored."""
        count = len(published)
        behind = {number: shard for number, shard in self.records().items() if number >= count}
        # A writer of an earlier version stored them behind a last shard that it had filled up.
        is_next = count in behind and self._read_record(count)[1:] == published[-1:]
        return self.stored(behind) if is_next else []

    def stored(self, shards: Mapping[int, ShardInfo]) -> list[ShardInfo]:
        """Those shards, by number, whose files are what their records say, up to the first that is not."""
        sizes = self._truth.sizes()
        in_a_row = [number for place, number in enumerate(shards, min(shards, default=0)) if place == number]
        sound = zip(in_a_row, _at_once(lambda number: self._is_stored(shards[number], sizes), in_a_row), strict=True)
        return [shards[number] for number, _ in takewhile(itemgetter(1), sound)]

    def check_nothing_waits(self, published: bytes) -> None:
        """Refuse a dataset in which a writer of an earlier version was stopped while it replaced the last shard.

        Raises:
            ConfigError: It was. Whether the shard is replaced already is not known here, nor which one readers expect.
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
        """Remove the records of this shard and all after it, and what a writer of an earlier version kept beside."""
        found = ((name, record_number(name)) for name in self._folder.sizes())
        ours = [
            name
            for name, number in found
            if (number is not None and number >= first) or is_shard_file(name) or name == INDEX_BASENAME
        ]
        _at_once(Location.remove, [self._folder / name for name in ours])

    def close(self) -> None:
        """All is published: nothing needs to be said any more."""
        self.forget(0)
        self._destination.remove_folder(WRITING)

    def _read_record(self, number: int) -> tuple[ShardInfo, ...]:
        """The shard of this number, and the one before if there is one; nothing if the record cannot be read."""
        name = record_name(number)
        try:
            return tuple(parse_index((self._truth / name).read(), name).shards)
        except IndexFormatError:
            return ()

    def _is_stored(self, shard: ShardInfo, sizes: Mapping[str, int]) -> bool:
        if any(sizes.get(file.basename) != file.bytes for file in shard.stored):
            return False
        root = self._truth.path
        if root is None:
            # A hash would cost a download. Stores check what they receive, and keep a file whole or not at all.
            return True
        return all(has_first_hash(root / file.basename, file, shard.hashes) for file in shard.stored)


def _at_once(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """The results of a function that mostly waits for a store, in order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What is there already."""

    published: tuple[ShardInfo, ...] | None = None
    """The shards of the index; None while there is none."""
    index: bytes | None = None
    """The text of the index."""
    safe: tuple[ShardInfo, ...] = ()
    """The first shards of the dataset to be, the published ones among them: stored, and not to be made again."""
    is_finished: bool = False
    """Whether nothing is to be added."""


def find_start(mode: Mode, destination: Destination, *, exist_ok: bool) -> Start:
    """Where a writer begins. Only ``"create"`` changes anything.

    Raises:
        ConfigError: There is something where nothing should be, or nothing where something should be.
        StorageError: The store does not say what is there, or a shard of the index is not what it says.
        IndexFormatError: The index cannot be read.
    """
    if mode == "create":
        destination.start_anew(exist_ok=exist_ok)
        return Start()
    return (_find_unfinished if mode == "resume" else _find_published)(destination, Journal(destination))


def _find_unfinished(destination: Destination, journal: Journal) -> Start:
    """Where to go on with a dataset that was not finished.

    Raises:
        ConfigError: It was, and then an append was not; or it was begun in parts.
    """
    found, records = destination.published(), journal.records()
    if found is None:
        _check_no_parts(destination)
        return Start(safe=tuple(journal.stored(records)) if 0 in records else ())
    index, text = found
    shards = tuple(index.shards)
    journal.check_nothing_waits(text)
    if any(shards[number : number + 1] != (shard,) for number, shard in records.items()):
        raise ConfigError(
            "an append to this dataset was not finished", hint="continue it with mode='append'", option="mode"
        )
    return Start(published=shards, index=text, safe=shards, is_finished=True)


def _find_published(destination: Destination, journal: Journal) -> Start:
    """Where to go on behind the shards of a dataset that was finished.

    Raises:
        ConfigError: There is no such dataset, or it was not made by one writer.
        StorageError: A shard is not there, or not of its size.
    """
    found = destination.published()
    if found is None:
        raise ConfigError(
            "there is no finished dataset to append to", hint="write one with mode='create' or 'resume'", option="mode"
        )
    index, text = found
    shards = tuple(index.shards)
    journal.check_nothing_waits(text)
    _check_one_writer(shards)
    destination.check_published(shards)
    return Start(published=shards, index=text, safe=(*shards, *journal.appended(shards)))


def go_on(start: Start, destination: Destination, journal: Journal) -> None:
    """Remove what does not belong to the start, and make ready for what follows.

    Raises:
        ConfigError: A directory holds files named like those of shards that no writer left.
        ShardCorruptError: A shard is not what the index promises.
    """
    destination.tidy(start.safe, is_finished=start.is_finished)
    destination.fill(start.safe, start.index)
    if start.is_finished:
        journal.close()
        return
    journal.mark()
    journal.forget(len(start.safe))


def check_format(shards: Sequence[ShardInfo], expected: str) -> None:
    """Refuse to go on with a dataset of another format.

    Raises:
        ConfigError: A shard has another.
    """
    for shard in shards:
        if shard.format != expected:
            raise ConfigError(
                f"{shard.raw_data.basename} is of format {shard.format}, but this writer makes {expected}",
                path=shard.raw_data.basename,
            )


def check_settings(shards: Sequence[ShardInfo], encoder: ShardEncoder) -> None:
    """Refuse to go on with other settings, or other columns, than a dataset was begun with.

    Raises:
        ConfigError: They differ; all that do are listed.
    """
    for shard in shards:
        if (text := _config_of(shard)) != encoder.config:
            found, asked = json.loads(text), json.loads(encoder.config)
            keys = [key for key in sorted({*asked, *found}) if asked.get(key) != found.get(key)]
            told = "; ".join(f"{key} is {found.get(key)!r} there, but {asked.get(key)!r} here" for key in keys)
            raise ConfigError(
                f"{shard.raw_data.basename} was written with other settings: {told}", path=shard.raw_data.basename
            )


def _check_no_parts(destination: Destination) -> None:
    if (destination.truth / PARTS_PLAN).read_if_there() is not None:
        raise ConfigError(
            f"a dataset in parts was begun here, as {PARTS_PLAN} says",
            hint="continue it by the same call of write_parallel with mode='resume', or choose another place",
            option="mode",
        )


def _check_one_writer(shards: Sequence[ShardInfo]) -> None:
    for number, shard in enumerate(shards):
        expected = shard_name(number, shard.format)
        if shard.raw_data.basename != expected or _config_of(shard) != _config_of(shards[0]):
            raise ConfigError(
                f"only a dataset of one writer can be appended to, but its shard {number} is {shard.raw_data.basename}",
                hint="write another dataset, and merge both",
                option="mode",
                path=shard.raw_data.basename,
            )


def _config_of(shard: ShardInfo) -> bytes:
    """The config that stands in a shard, which tells all that the shards of one writer have in common."""
    return encode_config(
        shard.schema, shard.format, compression=shard.compression, hashes=shard.hashes, size_limit=shard.size_limit
    )
