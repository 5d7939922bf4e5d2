"""What a writer that may be killed writes down for the one that goes on, and where that one begins.

Shard 12 is stored, then a record says so; only then it counts. A record is an index of this shard, so it tells the
settings, the columns, the sizes and the hashes too. Records appear in the order of the shards. Each also tells of the
shard before: so one that a crash of the machine damaged costs nothing, as long as the next one can be read.

A shard that replaces a published one is kept aside, so that readers of the published index find what it promises. When
all shards are stored, the index that will follow is put beside it: with that the change is decided. Whoever comes next
carries it out, as often as it takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, takewhile
from operator import itemgetter
from typing import TypeVar

from lightning_streaming.errors import ConfigError, IndexFormatError, IntegrityError, ShardCorruptError
from lightning_streaming.formats.compression import decompress
from lightning_streaming.formats.hashing import hash_bytes
from lightning_streaming.formats.index import INDEX_BASENAME, FileInfo, ShardInfo, dump_index, parse_index
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
from lightning_streaming.writing.shard_encoders import ShardEncoder, shard_name
from lightning_streaming.writing.writer_options import Mode

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
        self._aside = destination.truth / WRITING

    def mark(self) -> None:
        """Say in directories that a writer is at work which can be continued."""
        self._destination.make_folder(WRITING)

    def record(self, number: int, shard: ShardInfo, before: Sequence[ShardInfo]) -> None:
        """Say that a shard is stored, behind those before."""
        (self._truth / record_name(number)).put(dump_index([shard, *before[-1:]]))

    def records(self) -> dict[int, ShardInfo]:
        """The shards that there are records of, by number, but for those that no record tells of that can be read."""
        numbers = (record_number(name) for name in self._aside.sizes())
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
        sizes = {WRITING: self._aside.sizes(), "": self._truth.sizes()}

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
        return INDEX_BASENAME in self._aside.sizes()

    def decide(self, index: bytes) -> None:
        """All shards of this index are stored, some of them aside: from here on it will be published."""
        (self._truth / _DECISION).put(index)

    def carry_out(self) -> None:
        """Publish what was decided, if anything was: the shards that were kept aside, then the index.

        Raises:
            IntegrityError: A shard that was kept aside is not what the index promises.
        """
        text = (self._truth / _DECISION).read_if_there()
        if text is None:
            return
        aside = self._aside.sizes()
        for shard in parse_index(text, _DECISION).shards:
            names = [file.basename for file in shard.stored]
            if not aside.keys() & set(names):
                continue
            if not self._is_stored(shard, WRITING, aside):
                raise IntegrityError(
                    f"{WRITING}/{names[-1]} is not what {_DECISION} promises; the dataset is as it was"
                )
            for name in names:
                self._destination.put(name, (self._aside / name).read())
        self._destination.put(INDEX_BASENAME, text)

    def keep_only(self, shards: Mapping[int, ShardInfo]) -> None:
        """Remove what does not belong to these shards; the decision first, without which the rest means nothing."""
        kept = {record_name(number).removeprefix(f"{WRITING}/") for number in shards}
        kept.update(file.basename for shard in shards.values() for file in shard.stored)
        found = self._aside.sizes()
        if INDEX_BASENAME in found:
            (self._truth / _DECISION).remove()
        ours = [name for name in found.keys() - kept if is_shard_file(name) or record_number(name) is not None]
        _at_once(Location.remove, [self._aside / name for name in ours])

    def close(self) -> None:
        """All is published: nothing needs to be said any more."""
        self.keep_only({})
        self._destination.remove_folder(WRITING)

    def _read_record(self, number: int) -> tuple[ShardInfo, ...]:
        """The shard of this number, and the one before if there is one; nothing if the record cannot be read."""
        name = record_name(number)
        try:
            return tuple(parse_index((self._truth / name).read(), name).shards)
        except IndexFormatError:
            return ()

    def _is_stored(self, shard: ShardInfo, folder: str, sizes: Mapping[str, int]) -> bool:
        if any(sizes.get(file.basename) != file.bytes for file in shard.stored):
            return False
        if self._truth.path is None:
            # A hash would cost a download. Stores check what they receive, and keep a file whole or not at all.
            return True
        root = self._truth.path / folder
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
    """The first shards of the dataset to be: stored, and not to be made again."""
    reopened: ShardInfo | None = None
    """The published shard after those, to which samples may be added."""
    is_finished: bool = False
    """Whether nothing is to be added."""

    @property
    def num_samples(self) -> int:
        """Samples that are there already."""
        return sum(shard.samples for shard in self.known)

    @property
    def known(self) -> tuple[ShardInfo, ...]:
        """Every shard that is there, in order."""
        return self.safe if self.reopened is None else (*self.safe, self.reopened)


def find_start(mode: Mode, destination: Destination, *, exist_ok: bool) -> Start:
    """Where a writer begins. Only ``"create"``, and an append that was decided before, change anything.

    Raises:
        ConfigError: There is something where nothing should be, or nothing where something should be.
        StorageError: The store does not say what is there.
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
    if journal.is_decided or not _are_published(records, shards):
        raise ConfigError("an append to this dataset was not finished; mode='append' goes on with it")
    return Start(published=shards, index=text, safe=shards, is_finished=True)


def _find_published(destination: Destination, journal: Journal) -> Start:
    """Where to go on with a dataset that was finished; an append that was decided is carried out first.

    Raises:
        ConfigError: There is no such dataset, or it was not made by one writer.
    """
    journal.carry_out()
    found = destination.published()
    if found is None:
        raise ConfigError("there is no finished dataset to append to; write one with mode='create' or 'resume'")
    index, text = found
    shards = tuple(index.shards)
    _check_one_writer(shards)
    count, records = len(shards), journal.records()
    first = min(records, default=count)
    kept: list[ShardInfo] = []
    if first in (count - 1, count) and not _are_published(records, shards):
        kept = journal.stored(records, aside_below=count)
    if kept:
        return Start(published=shards, index=text, safe=(*shards[:first], *kept))
    last = shards[-1] if count else None
    return Start(published=shards, index=text, safe=shards[:-1], reopened=last)


def go_on(start: Start, destination: Destination, journal: Journal, encoder: ShardEncoder | None) -> list[bytes]:
    """Remove what does not belong to the start, and make ready for what follows.

    Returns:
        The samples of the shard that is opened again.

    Raises:
        ConfigError: A directory holds files named like those of shards that no writer left.
        ShardCorruptError: A shard is not what the index promises.
    """
    published = start.published or ()
    if start.is_finished:
        destination.fill(published, start.index)
        journal.close()
        return []
    destination.tidy(chain(published, start.safe))
    destination.fill(chain(published, start.safe[len(published) :]), start.index)
    journal.mark()
    journal.keep_only({n: one for n, one in enumerate(start.safe) if n >= len(published) or one != published[n]})
    if start.reopened is None or encoder is None:
        return []
    return _open_again(start.reopened, destination.truth, encoder)


def check_format(shards: Sequence[ShardInfo], expected: str) -> None:
    """Refuse to go on with a dataset of another format.

    Raises:
        ConfigError: A shard has another.
    """
    for shard in shards:
        if shard.format != expected:
            raise ConfigError(
                f"{shard.raw_data.basename} is of format {shard.format}, but this writer makes {expected}"
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
            raise ConfigError(f"{shard.raw_data.basename} was written with other settings: {told}")


def _check_no_parts(destination: Destination) -> None:
    if (destination.truth / PARTS_PLAN).read_if_there() is not None:
        raise ConfigError(
            f"a dataset in parts was begun here, as {PARTS_PLAN} tells; go on with it by the same call of "
            "write_parallel with mode='resume', or choose another place"
        )


def _are_published(records: Mapping[int, ShardInfo], shards: Sequence[ShardInfo]) -> bool:
    """Whether records were only left over, because the index says it all."""
    return all(number < len(shards) and shards[number] == shard for number, shard in records.items())


def _check_one_writer(shards: Sequence[ShardInfo]) -> None:
    for number, shard in enumerate(shards):
        expected = shard_name(number, shard.format)
        if shard.raw_data.basename != expected or _config_of(shard) != _config_of(shards[0]):
            raise ConfigError(
                f"only a dataset of one writer can be appended to, but its shard {number} is "
                f"{shard.raw_data.basename}; write another dataset, and merge both"
            )


def _config_of(shard: ShardInfo) -> bytes:
    """The config that stands in a shard, which tells all that the shards of one writer have in common."""
    return encode_config(
        shard.schema, shard.format, compression=shard.compression, hashes=shard.hashes, size_limit=shard.size_limit
    )


def _open_again(shard: ShardInfo, location: Location, encoder: ShardEncoder) -> list[bytes]:
    contents = [_raw_content(shard, raw, compressed, location) for raw, compressed in shard.files]
    samples = encoder.samples_in(contents)
    if len(samples) != shard.samples:
        raise ShardCorruptError(
            f"{shard.raw_data.basename} must have {shard.samples} samples by its index, but has {len(samples)}"
        )
    return samples


def _raw_content(shard: ShardInfo, raw: FileInfo, compressed: FileInfo | None, location: Location) -> bytes:
    stored = compressed or raw
    data = (location / stored.basename).read()
    wrong = [name for name, expected in stored.hashes.items() if hash_bytes(name, data) != expected]
    if len(data) != stored.bytes or wrong:
        raise ShardCorruptError(f"{stored.basename} is not what the index promises; it cannot be appended to")
    return data if shard.compression is None else decompress(shard.compression, data, raw.bytes)
