"""What a writer that may be killed has to say to the one that goes on.

Shard 12 is stored, then a record says so; only then it counts. A record is an index of this shard, so it tells the
settings, the columns, the sizes and the hashes too. Records appear in the order of the shards. Each also tells of the
shard before: so one that a crash of the machine damaged costs nothing, as long as the next one can be read.

A shard that replaces a published one is kept aside, so that readers of the published index find what it promises. When
all shards are stored, the index that will follow is put beside it: with that the change is decided. Whoever comes next
carries it out, as often as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from operator import itemgetter
from typing import TypeVar

from lightning_streaming.errors import IndexFormatError, IntegrityError, ObjectNotFoundError
from lightning_streaming.formats.index import INDEX_BASENAME, ShardInfo, dump_index, parse_index
from lightning_streaming.writing.destination import Destination
from lightning_streaming.writing.directories import has_first_hash, stored_names
from lightning_streaming.writing.names import WRITING, is_shard_file, record_name, record_number
from lightning_streaming.writing.place import Directory

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_THREADS = 16
"""Requests at a time: there is a record a shard, and there may be many shards."""
_DECISION = f"{WRITING}/{INDEX_BASENAME}"


class Journal:
    """The records of one dataset, where its shards are."""

    def __init__(self, destination: Destination) -> None:
        """Nothing is touched yet."""
        self._destination = destination
        self._truth = destination.truth

    def mark(self) -> None:
        """Say in directories that a writer is at work which can be continued."""
        self._destination.make_folder(WRITING)

    def record(self, number: int, shard: ShardInfo, before: Sequence[ShardInfo]) -> None:
        """Say that a shard is stored, behind those before."""
        self._truth.put(record_name(number), dump_index([shard, *before[-1:]]))

    def records(self) -> dict[int, ShardInfo]:
        """The shards that there are records of, by number, but for those that no record tells of that can be read."""
        numbers = (record_number(name) for name in self._truth.sizes(WRITING))
        known = sorted(number for number in numbers if number is not None)
        read = dict(zip(known, _at_once(self._read_record, known), strict=True))
        told = {number: shards[:1] or read.get(number + 1, ())[1:] for number, shards in read.items()}
        return {number: shards[0] for number, shards in told.items() if shards}

    def stored(self, shards: Mapping[int, ShardInfo], *, aside_below: int = 0) -> list[ShardInfo]:
        """Those shards whose files are what their records say, up to the first that is not.

        Args:
            shards: By number.
            aside_below: Shards of smaller numbers are kept aside.
        """
        sizes = {folder: self._truth.sizes(folder) for folder in (WRITING, "")}

        def is_sound(number: int) -> bool:
            folder = WRITING if number < aside_below else ""
            return self._is_stored(shards[number], folder, sizes[folder])

        in_a_row = [number for place, number in enumerate(shards, min(shards, default=0)) if place == number]
        sound = zip(in_a_row, _at_once(is_sound, in_a_row), strict=True)
        return [shards[number] for number, _ in takewhile(itemgetter(1), sound)]

    def put_aside(self, name: str, *pieces: bytes | memoryview) -> None:
        """Keep a file that will replace a published one."""
        self._destination.put_aside(f"{WRITING}/{name}", *pieces)

    @property
    def is_decided(self) -> bool:
        """Whether an index waits to be published."""
        return INDEX_BASENAME in self._truth.sizes(WRITING)

    def decide(self, index: bytes) -> None:
        """All shards of this index are stored, some of them aside: from here on it will be published."""
        self._truth.put(_DECISION, index)

    def carry_out(self) -> None:
        """Publish what was decided, if anything was: the shards that were kept aside, then the index.

        Raises:
            IntegrityError: A shard that was kept aside is not what the index promises.
        """
        try:
            text = self._truth.get(_DECISION)
        except ObjectNotFoundError:
            return
        aside = self._truth.sizes(WRITING)
        for shard in parse_index(text, _DECISION).shards:
            names = stored_names(shard)
            if not aside.keys() & set(names):
                continue
            if not self._is_stored(shard, WRITING, aside):
                raise IntegrityError(
                    f"{WRITING}/{names[-1]} is not what {_DECISION} promises; the dataset is as it was"
                )
            for name in names:
                self._destination.put(name, self._truth.get(f"{WRITING}/{name}"))
        self._destination.put(INDEX_BASENAME, text)

    def keep_only(self, shards: Mapping[int, ShardInfo]) -> None:
        """Remove what does not belong to these shards; the decision first, without which the rest means nothing."""
        kept = {record_name(number).removeprefix(f"{WRITING}/") for number in shards}
        kept.update(name for shard in shards.values() for name in stored_names(shard))
        found = self._truth.sizes(WRITING)
        if INDEX_BASENAME in found:
            self._truth.remove(_DECISION)
        ours = [name for name in found.keys() - kept if is_shard_file(name) or record_number(name) is not None]
        _at_once(self._truth.remove, [f"{WRITING}/{name}" for name in ours])

    def close(self) -> None:
        """All is published: nothing needs to be said any more."""
        self.keep_only({})
        self._destination.remove_folder(WRITING)

    def _read_record(self, number: int) -> tuple[ShardInfo, ...]:
        """The shard of this number, and the one before if there is one; nothing if the record cannot be read."""
        name = record_name(number)
        try:
            return tuple(parse_index(self._truth.get(name), name).shards)
        except IndexFormatError:
            return ()

    def _is_stored(self, shard: ShardInfo, folder: str, sizes: Mapping[str, int]) -> bool:
        files = [compressed or raw for raw, compressed in shard.files]
        if any(sizes.get(file.basename) != file.bytes for file in files):
            return False
        if not isinstance(self._truth, Directory):
            # A hash would cost a download. Stores check what they receive, and keep a file whole or not at all.
            return True
        root = self._truth.path / folder
        return all(has_first_hash(root / file.basename, file, shard.hashes) for file in files)


def _at_once(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """The results of a function that mostly waits for a store, in order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))
