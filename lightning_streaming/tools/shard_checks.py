"""Everything that can be wrong with one shard, and sound files put where bad ones are.

Repairing deletes nothing: a bad file is renamed, and stays.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from lightning_streaming.cache.sources import check_hash, find_size, unpack
from lightning_streaming.errors import FormatError, IndexFormatError, IntegrityError, ObjectNotFoundError
from lightning_streaming.files import appears_whole, join_under
from lightning_streaming.formats.hashing import hash_names
from lightning_streaming.formats.images import PILLOW_ERRORS, load_whole
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, parse_index
from lightning_streaming.formats.shard import ShardReader, open_shard, was_written_for
from lightning_streaming.tools.console import counted, is_image
from lightning_streaming.tools.stored_dataset import StoredDataset
from lightning_streaming.writing.destination import is_shard_file, whole_name

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


def _present_files(place: StoredDataset, shard: ShardInfo) -> Iterator[FileInfo]:
    """The files of a shard that a directory has, of each pair at least one: the stored one, if there is none.

    A cache keeps raw files of a compressed dataset, with or without the compressed ones.
    """
    for raw, compressed in shard.files:
        forms = [file for file in (compressed, raw) if file is not None]
        yield from [file for file in forms if place.size_of(file.basename) is not None] or forms[:1]


def not_compared(place: StoredDataset, shard: ShardInfo) -> list[str]:
    """Raw files in a directory beside the compressed ones, of which only the size can be checked without these."""
    pairs = [(raw, compressed) for raw, compressed in shard.files if compressed is not None and not raw.hashes]
    return [
        raw.basename
        for raw, compressed in pairs
        if None not in (place.size_of(raw.basename), place.size_of(compressed.basename))
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
    for file in _present_files(place, shard):
        size = place.size_of(file.basename)
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
        if place.size_of(compressed.basename) is not None:
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
        raw.hashes or (compressed is not None and place.size_of(compressed.basename) is not None)
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


_DAMAGED = ".damaged"
"""What the name of a bad file that was set aside ends in; or in this and a number, where that is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """What became of a shard that was to be repaired."""

    failure: str | None
    """Why it was not; None if it was."""
    kept_aside: tuple[str, ...] = ()
    """The bad files under their new names, relative to the dataset."""


def check_hash_names(index: DatasetIndex, source: str) -> None:
    """Refuse an index whose hashes nobody can compute, once for all shards that are alike.

    Raises:
        IndexFormatError: Names it, a file and the hash.
    """
    for _, shard in index.shards.examples():
        named = {(name, file.basename) for pair in shard.files for file in pair if file for name in file.hashes}
        unknown = sorted(one for one in named if one[0] not in hash_names())
        if unknown:
            name, basename = unknown[0]
            raise IndexFormatError(
                f"{source} records of {basename} the hash {name!r:.60}, which there is not; known are "
                f"{', '.join(hash_names())}"
            )


def find_index(place: StoredDataset, source: StoredDataset | None) -> tuple[DatasetIndex, Repair | None]:
    """The index of a dataset; if it is missing or cannot be used, that of the source, which takes its place.

    Returns:
        The index, and what was done to it, if anything.

    Raises:
        IndexFormatError: Neither can be used.
        ObjectNotFoundError: There is none.
        StorageError: A store does not give it.
    """
    try:
        index = place.read_index()
        check_hash_names(index, str(place.at / INDEX_BASENAME))
    except (IndexFormatError, ObjectNotFoundError):
        if source is None or place.directory is None:
            raise
    else:
        return index, None
    text = source.read_index_text()
    index = parse_index(text, source.shown)
    check_hash_names(index, source.shown)
    place.directory.mkdir(parents=True, exist_ok=True)
    with appears_whole(place.path(INDEX_BASENAME)) as partial:
        partial.write_bytes(text)
        aside = _set_aside(place.path(INDEX_BASENAME))
    return index, Repair(failure=None, kept_aside=() if aside is None else (aside.name,))


def repair(job: Job, source: StoredDataset) -> Repair:
    """Fetch a shard again, check it in full, and put what differs into the dataset's directory.

    Args:
        job: The bad shard, in a directory.
        source: Where to fetch it from.

    Raises:
        StorageError: The source does not answer.
    """
    directory = job.place.directory
    assert directory is not None
    # Beside the dataset's files, so that they can be renamed into place.
    with TemporaryDirectory(prefix=".repair-", dir=directory) as name:
        staged = StoredDataset(location=name, options={})
        try:
            for file in stored_files(job.shard):
                fetch_checked(source, file, staged.path(file.basename))
        except (IntegrityError, ObjectNotFoundError) as error:
            return Repair(failure=str(error))
        problems = examine(replace(job, place=staged))
        if problems:
            return Repair(failure=f"{source.shown} has it no better: {problems[0].words}")
        _unpack_present(job, staged)
        return Repair(failure=None, kept_aside=tuple(_replace_bad(job, staged)))


def _unpack_present(job: Job, staged: StoredDataset) -> None:
    """Decompress files whose raw form is in the dataset's directory too, as in a cache."""
    if job.shard.compression is None:
        return
    present = {file.basename for file in _present_files(job.place, job.shard)}
    for raw, compressed in job.shard.files:
        if compressed is not None and raw.basename in present:
            path = staged.path(compressed.basename)
            destination = staged.path(raw.basename)
            destination.parent.mkdir(parents=True, exist_ok=True)
            unpack(path, compressed.basename, raw, job.shard.compression, destination)


def _replace_bad(job: Job, staged: StoredDataset) -> Iterator[str]:
    directory = job.place.directory
    assert directory is not None
    for file in _present_files(job.place, job.shard):
        good, target = staged.path(file.basename), join_under(directory, file.basename)
        if target.exists() and filecmp.cmp(good, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = _set_aside(target)
        os.replace(good, target)
        if aside is not None:
            yield aside.relative_to(directory).as_posix()


def _set_aside(path: Path) -> Path | None:
    """Rename a file to ``NAME.damaged``, or ``NAME.damaged.2`` if that is taken; None if there is no file."""
    if not path.exists():
        return None
    aside = path.with_name(f"{path.name}{_DAMAGED}")
    number = 2
    while aside.exists():
        aside = path.with_name(f"{path.name}{_DAMAGED}.{number}")
        number += 1
    return path.rename(aside)


_MOST_SHOWN = 5


def unnamed_files(names: Iterable[str], index: DatasetIndex) -> list[str]:
    """Those that look like a shard, also an unfinished or a damaged one, and are not named.

    Directories that have an index of their own are left out, and so are hidden ones: what is there is not for this
    index to name.

    Args:
        names: Files where the dataset is, relative to it.
        index: Its index.
    """
    found = {PurePosixPath(name) for name in names}
    named = {PurePosixPath(file.basename) for shard in index.shards for pair in shard.files for file in pair if file}
    others = {path.parent for path in found if path.name == INDEX_BASENAME} - {PurePosixPath()}
    stray = [path for path in found - named if _looks_like_shard(path.name) and not _is_elsewhere(path, others)]
    return sorted(map(str, stray))


def first_few(files: Sequence[str]) -> str:
    """How many, and the first ones."""
    more = ", ..." if len(files) > _MOST_SHOWN else ""
    return f"{counted(len(files), 'file')} ({', '.join(files[:_MOST_SHOWN])}{more})"


def _looks_like_shard(name: str) -> bool:
    return is_shard_file(name) or whole_name(name) is not None or is_shard_file(name.partition(_DAMAGED)[0])


def _is_elsewhere(path: PurePosixPath, others: set[PurePosixPath]) -> bool:
    return any(parent in others or parent.name.startswith(".") for parent in path.parents)
