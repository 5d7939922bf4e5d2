"""Puts sound files where bad ones are. Nothing is deleted: a bad file is renamed, and stays."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_streaming.cache.verify import unpack
from lightning_streaming.errors import IndexFormatError, IntegrityError, ObjectNotFoundError
from lightning_streaming.files import appears_whole, join_under
from lightning_streaming.formats.hashing import hash_names
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, parse_index
from lightning_streaming.storage import mask_url
from lightning_streaming.tools.examine import Job, examine, fetch_checked, present_files, stored_files
from lightning_streaming.tools.stored_dataset import StoredDataset

DAMAGED = ".damaged"
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
        check_hash_names(index, mask_url(place.url(INDEX_BASENAME)))
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
    present = {file.basename for file in present_files(job.place, job.shard)}
    for raw, compressed in job.shard.files:
        if compressed is not None and raw.basename in present:
            path = staged.path(compressed.basename)
            destination = staged.path(raw.basename)
            destination.parent.mkdir(parents=True, exist_ok=True)
            unpack(path, compressed.basename, raw, job.shard.compression, destination)


def _replace_bad(job: Job, staged: StoredDataset) -> Iterator[str]:
    directory = job.place.directory
    assert directory is not None
    for file in present_files(job.place, job.shard):
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
    aside = path.with_name(f"{path.name}{DAMAGED}")
    number = 2
    while aside.exists():
        aside = path.with_name(f"{path.name}{DAMAGED}.{number}")
        number += 1
    return path.rename(aside)
