"""Looks for everything that can be wrong with one shard."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_streaming.cache.verify import check_hash, find_size, unpack
from lightning_streaming.errors import FormatError, IntegrityError, ObjectNotFoundError
from lightning_streaming.files import join_under
from lightning_streaming.formats.image_files import load_whole
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.formats.pillow import PILLOW_ERRORS
from lightning_streaming.formats.raw_forms import was_written_for
from lightning_streaming.formats.shard import ShardReader, open_shard
from lightning_streaming.tools.render import is_image
from lightning_streaming.tools.stored_dataset import StoredDataset

_MOST_SAMPLES_NAMED = 3
_LEFT_BEHIND = "it is of another dataset that was here, and some readers would take it for this one's"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a shard."""

    file: str
    """Name of the file, as the index has it."""
    words: str
    """What is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to be looked at, and how."""

    place: StoredDataset
    """The dataset."""
    shard: ShardInfo
    """An entry of its index."""
    quick: bool
    """Whether only sizes and hashes of stored files are checked."""
    allow_unsafe_types: bool
    """Whether samples may be decoded that can run code of whoever wrote the data."""


def examine(job: Job) -> tuple[Problem, ...]:
    """Check a shard's files: presence, sizes, every recorded hash; then offsets and every sample.

    Files on a store are fetched into a temporary directory, one shard at a time.

    Returns:
        All that is wrong, up to the step after which nothing more can be told.

    Raises:
        StorageError: The store does not answer.
        ConfigError: A column is unsafe and that was not allowed, or a hash is unknown.
        MissingDependencyError: A package is needed that is not installed.
    """
    with TemporaryDirectory(prefix="lightning_streaming_") as name:
        scratch = Path(name)
        place = job.place
        if place.directory is None:
            problems = tuple(_fetch(place, job.shard, scratch))
            place = StoredDataset(location=str(scratch), options={})
        else:
            problems = tuple(_check_stored(place, job.shard))
        if problems or job.quick:
            return problems
        return tuple(_check_content(place, job.shard, scratch, job.allow_unsafe_types))


def check_hashes(path: Path, file: FileInfo) -> None:
    """Compare a file with all of its recorded hashes.

    Raises:
        IntegrityError: One differs.
    """
    for name in sorted(file.hashes):
        check_hash(path, file.basename, file, name)


def stored_files(shard: ShardInfo) -> list[FileInfo]:
    """The files of a shard that a store has: compressed, or raw if there is no compression."""
    return [compressed or raw for raw, compressed in shard.files]


def present_files(place: StoredDataset, shard: ShardInfo) -> Iterator[FileInfo]:
    """The files of a shard that a directory has, of each pair at least one: the stored one, if there is none.

    A cache keeps raw files of a compressed dataset, with or without the compressed ones.
    """
    for raw, compressed in shard.files:
        forms = [file for file in (compressed, raw) if file is not None]
        yield from [file for file in forms if find_size(place.path(file.basename)) is not None] or forms[:1]


def not_compared(place: StoredDataset, shard: ShardInfo) -> list[str]:
    """Raw files in a directory beside the compressed ones, of which only the size can be checked without these."""
    pairs = [(raw, compressed) for raw, compressed in shard.files if compressed is not None and not raw.hashes]
    return [
        raw.basename
        for raw, compressed in pairs
        if None not in (find_size(place.path(raw.basename)), find_size(place.path(compressed.basename)))
    ]


def fetch_checked(place: StoredDataset, file: FileInfo, destination: Path) -> None:
    """Bring a file to this machine, with the size and all the hashes that its index promises.

    Raises:
        IntegrityError: Time after time another one arrives.
        StorageError: It could not be fetched.
    """
    place.fetch(file, destination, lambda path: check_hashes(path, file))


def _fetch(place: StoredDataset, shard: ShardInfo, scratch: Path) -> Iterator[Problem]:
    for file in stored_files(shard):
        problem = _fetch_one(place, file, scratch)
        if problem is not None:
            yield problem


def _fetch_one(place: StoredDataset, file: FileInfo, scratch: Path) -> Problem | None:
    try:
        fetch_checked(place, file, join_under(scratch, file.basename))
    except (IntegrityError, ObjectNotFoundError) as error:
        return Problem(file.basename, str(error))
    return None


def _check_stored(place: StoredDataset, shard: ShardInfo) -> Iterator[Problem]:
    for file in present_files(place, shard):
        size = find_size(place.path(file.basename))
        if size is None:
            yield Problem(file.basename, "the file is missing")
        elif size != file.bytes:
            yield Problem(file.basename, f"must have {file.bytes:,} bytes, but has {size:,}")
        else:
            try:
                check_hashes(place.path(file.basename), file)
            except IntegrityError as error:
                yield Problem(file.basename, str(error))


def _check_content(
    place: StoredDataset, shard: ShardInfo, scratch: Path, allow_unsafe_types: bool
) -> Iterator[Problem]:
    directory = place.directory
    assert directory is not None
    try:
        opened = scratch if _unpack(place, shard, scratch) else directory
        reader = open_shard(shard, opened, allow_unsafe_types=allow_unsafe_types)
    except (IntegrityError, FormatError) as error:
        yield Problem(shard.raw_data.basename, _short(error, scratch, directory))
        return
    found = (_failure_of(reader, number) for number in range(len(reader)))
    failures = [_short(error, scratch, directory) for error in found if error is not None]
    reader.close()
    for words in failures[:_MOST_SAMPLES_NAMED]:
        yield Problem(shard.raw_data.basename, words.removeprefix(f"{shard.raw_data.basename}, "))
    if len(failures) > _MOST_SAMPLES_NAMED:
        more = f"and {len(failures) - _MOST_SAMPLES_NAMED:,} more of {shard.samples:,} samples cannot be decoded"
        yield Problem(shard.raw_data.basename, more)


def _failure_of(reader: ShardReader, number: int) -> Exception | None:
    try:
        sample = reader[number]
    except FormatError as error:
        return error
    try:
        _load_images(sample)
    except FormatError as error:
        return FormatError(f"sample {number}: {error}")
    except PILLOW_ERRORS as error:  # of images that a user's own encoding gives
        return FormatError(f"sample {number}: {type(error).__name__}: {error}")
    return None


def _unpack(place: StoredDataset, shard: ShardInfo, scratch: Path) -> bool:
    """Put the raw files of a compressed shard into ``scratch``; False if it is not compressed.

    Raises:
        IntegrityError: One cannot be made, or the file under its name is another.
    """
    if shard.compression is None:
        return False
    for raw, compressed in shard.files:
        assert compressed is not None
        destination, there = join_under(scratch, raw.basename), place.path(raw.basename)
        destination.parent.mkdir(parents=True, exist_ok=True)
        is_there = there != destination and find_size(there) is not None
        if find_size(place.path(compressed.basename)) is not None:
            unpack(place.path(compressed.basename), compressed.basename, raw, shard.compression, destination)
            check_hashes(destination, raw)
            if is_there and not filecmp.cmp(there, destination, shallow=False):
                raise IntegrityError(f"{raw.basename} is not what {compressed.basename} holds; {_LEFT_BEHIND}")
        elif is_there:
            destination.symlink_to(there.absolute())
    if not _has_proof(place, shard) and not was_written_for(shard, scratch):
        name = shard.raw_data.basename
        raise IntegrityError(f"{name} was not written for compression {shard.compression}; {_LEFT_BEHIND}")
    return True


def _has_proof(place: StoredDataset, shard: ShardInfo) -> bool:
    """Whether there is more that speaks for a compressed shard's raw files than their names and sizes."""
    return all(
        raw.hashes or (compressed is not None and find_size(place.path(compressed.basename)) is not None)
        for raw, compressed in shard.files
    )


def _load_images(value: Any) -> None:
    """Decode the pixels of images, which their files need not have been for."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _load_images(item)
    elif is_image(value):
        load_whole(value)


def _short(error: Exception, *directories: Path) -> str:
    """The words of an error with names as the index has them."""
    words = str(error)
    for directory in directories:
        words = words.removeprefix(f"{directory}/")
    return words
