"""Where a writer begins: with nothing, behind the last shard that is safe, or behind a whole dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from lightning_streaming.errors import ConfigError, ObjectNotFoundError, ShardCorruptError
from lightning_streaming.formats.compression import decompress
from lightning_streaming.formats.hashing import hash_bytes
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.writing.destination import Destination
from lightning_streaming.writing.journal import Journal
from lightning_streaming.writing.names import PARTS_PLAN, shard_name
from lightning_streaming.writing.place import Place
from lightning_streaming.writing.recipe import ShardRecipe

Mode = Literal["create", "resume", "append"]


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
    return (find_unfinished if mode == "resume" else find_published)(destination, Journal(destination))


def find_unfinished(destination: Destination, journal: Journal) -> Start:
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


def find_published(destination: Destination, journal: Journal) -> Start:
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


def go_on(start: Start, destination: Destination, journal: Journal, recipe: ShardRecipe | None) -> list[bytes]:
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
    if start.reopened is None or recipe is None:
        return []
    return _open_again(start.reopened, destination.truth, recipe)


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


def check_settings(shards: Sequence[ShardInfo], recipe: ShardRecipe) -> None:
    """Refuse to go on with other settings, or other columns, than a dataset was begun with.

    Raises:
        ConfigError: They differ; all that do are listed.
    """
    settings = recipe.settings
    asked = _described(recipe.format, settings.compression, settings.hashes, settings.size_limit, recipe.schema)
    for shard in shards:
        found = _described(*_settings_of(shard))
        if found != asked:
            keys = [key for key in sorted({*asked, *found}) if asked.get(key) != found.get(key)]
            told = "; ".join(f"{key} is {found.get(key)!r} there, but {asked.get(key)!r} here" for key in keys)
            raise ConfigError(f"{shard.raw_data.basename} was written with other settings: {told}")


def _check_no_parts(destination: Destination) -> None:
    try:
        destination.truth.get(PARTS_PLAN)
    except ObjectNotFoundError:
        return
    raise ConfigError(
        f"a dataset in parts was begun here, as {PARTS_PLAN} tells; go on with it by the same call of write_parallel "
        "with mode='resume', or choose another place"
    )


def _are_published(records: Mapping[int, ShardInfo], shards: Sequence[ShardInfo]) -> bool:
    """Whether records were only left over, because the index says it all."""
    return all(number < len(shards) and shards[number] == shard for number, shard in records.items())


def _check_one_writer(shards: Sequence[ShardInfo]) -> None:
    for number, shard in enumerate(shards):
        expected = shard_name(number, shard.format)
        if shard.raw_data.basename != expected or _settings_of(shard) != _settings_of(shards[0]):
            raise ConfigError(
                f"only a dataset of one writer can be appended to, but its shard {number} is "
                f"{shard.raw_data.basename}; write another dataset, and merge both"
            )


def _settings_of(shard: ShardInfo) -> tuple[str, str | None, tuple[str, ...], int | None, Mapping[str, Any]]:
    return shard.format, shard.compression, shard.hashes, shard.size_limit, shard.schema


def _described(
    shard_format: str,
    compression: str | None,
    hashes: tuple[str, ...],
    size_limit: int | None,
    schema: Mapping[str, Any],
) -> dict[str, Any]:
    named = {"format": shard_format, "compression": compression, "hashes": hashes, "size_limit": size_limit, **schema}
    described: dict[str, Any] = json.loads(json.dumps(named))  # lists for tuples
    return described


def _open_again(shard: ShardInfo, place: Place, recipe: ShardRecipe) -> list[bytes]:
    contents = [_raw_content(shard, raw, compressed, place) for raw, compressed in shard.files]
    samples = recipe.samples_in(contents)
    if len(samples) != shard.samples:
        raise ShardCorruptError(
            f"{shard.raw_data.basename} must have {shard.samples} samples by its index, but has {len(samples)}"
        )
    return samples


def _raw_content(shard: ShardInfo, raw: FileInfo, compressed: FileInfo | None, place: Place) -> bytes:
    stored = compressed or raw
    data = place.get(stored.basename)
    wrong = [name for name, expected in stored.hashes.items() if hash_bytes(name, data) != expected]
    if len(data) != stored.bytes or wrong:
        raise ShardCorruptError(f"{stored.basename} is not what the index promises; it cannot be appended to")
    return data if shard.compression is None else decompress(shard.compression, data, raw.bytes)
