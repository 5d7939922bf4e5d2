"""The names of all files that a writer makes, what may lie in its directory, and the lock that keeps others out.

index.json                        what makes the shards a dataset
shard.00012.mds.zstd              a shard
.writing/00012.json               says that shard 12 is stored, while there is no index that does
.writing/shard.00012.mds.zstd     a shard that will replace a published one of this name
.writing/index.json               the index that will follow it
parts.plan                        what the parts of a dataset are made of
convert.plan                      what a conversion was begun with
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_streaming.errors import ConfigError
from lightning_streaming.files import PARTIAL_SUFFIX, remove_partials
from lightning_streaming.formats.hashing import hash_file
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, parse_index
from lightning_streaming.storage.sinks import system_errors

WRITING = ".writing"
"""The folder of a dataset that is being written."""

PARTS_PLAN = "parts.plan"
"""Beside the parts. It does not end in ``.json``, because the original takes every such file for an index."""

CONVERSION_PLAN = "convert.plan"
"""Beside the index. It says nothing without the dataset that it is of, and goes where that is replaced."""

_SHARD = r"shard\.\d{5,}\.(mds|json|csv|tsv|xsv)(\.meta)?(\.(br|bz2|gz|snappy|zstd))?"
_SHARD_FILE = re.compile(_SHARD, re.ASCII)
_RECORD = re.compile(r"(\d{5,})\.json", re.ASCII)
_PARTIAL = re.compile(rf"({_SHARD}|\d{{5,}}\.json|index\.json)\..*{re.escape(PARTIAL_SUFFIX)}", re.ASCII)


def shard_name(number: int, shard_format: str) -> str:
    """The raw data file of a shard: ``shard.00012.mds``."""
    return f"shard.{number:05}.{shard_format}"


def is_shard_file(name: str) -> bool:
    """Whether a writer gives this name to a file of a shard."""
    return _SHARD_FILE.fullmatch(name) is not None


def is_raw_form(name: str, shard_format: str) -> bool:
    """Whether the raw file of a shard of this format would have this name."""
    return is_shard_file(name) and re.fullmatch(rf"shard\.\d+\.{shard_format}(\.meta)?", name) is not None


def record_name(number: int) -> str:
    """Where it says that a shard is stored."""
    return f"{WRITING}/{number:05}.json"


def record_number(name: str) -> int | None:
    """The shard whose record has this name in its folder; None if it is no record."""
    match = _RECORD.fullmatch(name)
    return int(match[1]) if match else None


def whole_name(name: str) -> str | None:
    """The file that an unfinished one, as a killed writer leaves it, was to become; None if it is something else."""
    match = _PARTIAL.fullmatch(name)
    return match[1] if match else None


def stored_names(shard: ShardInfo) -> list[str]:
    """The files of a shard that are stored, the meta file before the data file."""
    return [(compressed or raw).basename for raw, compressed in shard.files]


@system_errors("make room for a dataset")
def prepare_directory(directory: Path, *, exist_ok: bool) -> None:
    """Make an empty directory, out of a missing one or, with ``exist_ok``, out of one that holds a dataset.

    Only the index and the files that it names are removed; and, of a dataset that was not finished, what its writer
    left. The index first, so that no half dataset looks whole. If there is anything else, nothing is removed.

    Raises:
        ConfigError: The directory is a file, or holds something that may not be removed.
        IndexFormatError: The directory holds an index that cannot be read.
    """
    check_is_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    found = sorted(directory.iterdir())
    if found and not exist_ok:
        raise ConfigError(f"{directory} must be empty, but holds {found[0].name}; {_way_out(directory)}")
    unfinished = _names_of_unfinished(directory)
    named = dict.fromkeys([*_names_of_dataset(directory), *(unfinished or ()), CONVERSION_PLAN])
    folders = [] if unfinished is None else [WRITING]
    foreign = [path.name for path in found if path.name not in folders and (path.name not in named or path.is_dir())]
    if foreign:
        raise ConfigError(
            f"{directory} holds {foreign[0]}, which no index names as part of a dataset; remove it, or choose another "
            "directory"
        )
    for name in named:  # in order, the index first
        (directory / name).unlink(missing_ok=True)
    if folders:
        (directory / WRITING).rmdir()


@system_errors("remove what a writer left")
def tidy_directory(directory: Path, named: Container[str], *, is_copy: bool) -> None:
    """Remove what a killed writer left in a directory where another goes on.

    Args:
        directory: May be missing.
        named: Files that stay.
        is_copy: Whether the dataset is another place's, and only copied here; records that lie here then belong to
            another dataset.

    Raises:
        ConfigError: The directory is a file, has files named like those of shards that no writer left, or holds a
            dataset of its own, be it unfinished.
        IndexFormatError: The directory holds an index that cannot be read.
    """
    check_is_directory(directory)
    if not directory.is_dir():
        return
    strays = [path for path in sorted(directory.iterdir()) if is_shard_file(path.name) and path.name not in named]
    if strays and not _is_marked(directory):
        raise ConfigError(
            f"{directory} holds {strays[0].name}, which no index names and no writer left that can be continued; "
            "remove it, or choose another directory"
        )
    own = {*_names_of_dataset(directory), *(_recorded_shards(directory) if is_copy else ())}
    kept = [path.name for path in strays if path.name in own]
    if kept:
        raise ConfigError(
            f"{directory} holds a dataset of its own, with {kept[0]}, which is not part of the one to go on with; "
            "go on with it where it was written, or choose another directory"
        )
    for path in strays:
        path.unlink()
    for folder in (directory, directory / WRITING):
        for name in {whole_name(path.name) for path in folder.iterdir()} if folder.is_dir() else ():
            if name is not None:
                remove_partials(folder / name)


def _recorded_shards(directory: Path) -> list[str]:
    """Files of the shards that a writer has recorded in this directory as whole."""
    if not _is_marked(directory):
        return []
    numbers = {record_number(path.name) for path in (directory / WRITING).iterdir()} - {None}
    begins = tuple(f"shard.{number:05}." for number in numbers)
    return [path.name for path in directory.iterdir() if path.name.startswith(begins)]


@system_errors("read what is stored")
def has_first_hash(path: Path, file: FileInfo, kinds: Sequence[str]) -> bool:
    """Whether a file is the one that an index describes, by the first recorded kind of hash; yes if there is none."""
    return all(hash_file(kind, path) == file.hashes.get(kind) for kind in kinds[:1])


@system_errors("look at a directory")
def check_is_directory(directory: Path) -> None:
    """Refuse a file.

    Raises:
        ConfigError: It is one.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} must be a directory, but is a file")


@system_errors("remove a directory")
def remove_empty_folder(folder: Path) -> None:
    """Remove a folder, unless there is something in it."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _is_marked(directory: Path) -> bool:
    """Whether a writer that can be continued was at work here."""
    return (directory / WRITING).is_dir()


def _way_out(directory: Path) -> str:
    if _is_marked(directory):
        return "a writer was not finished there: mode='resume', or 'append', goes on, exist_ok=True starts anew"
    return "exist_ok=True replaces a dataset"


def _names_of_dataset(directory: Path) -> list[str]:
    """The index, then the files directly in ``directory`` that it names; none if there is no index."""
    path = directory / INDEX_BASENAME
    if not path.is_file():
        return []
    shards = parse_index(path.read_bytes(), str(path)).shards
    basenames = [file.basename for shard in shards for pair in shard.files for file in pair if file is not None]
    return [INDEX_BASENAME, *(name for name in basenames if "/" not in name)]


def _names_of_unfinished(directory: Path) -> list[str] | None:
    """What a writer leaves that can be continued, its records first; None if no such writer was at work here."""
    if not _is_marked(directory):
        return None
    records = [path.name for path in sorted((directory / WRITING).iterdir())]
    if not all(map(_is_of_writer, records)):
        return None
    shards = [path.name for path in sorted(directory.iterdir()) if is_shard_file(whole_name(path.name) or path.name)]
    return [*(f"{WRITING}/{name}" for name in records), *shards]


def _is_of_writer(name: str) -> bool:
    """Whether a writer gives this name to a file in its own folder, be it unfinished."""
    whole = whole_name(name) or name
    return whole == INDEX_BASENAME or is_shard_file(whole) or record_number(whole) is not None


@system_errors("remove what a writer left")
def remove_half_part(directory: Path) -> None:
    """Remove an index, first, and shards, whole or partial; nothing that no writer of a part makes.

    Must be called by the sole writer.
    """
    found = [path.name for path in directory.iterdir() if _is_of_writer(path.name)]
    names = [name for name in found if record_number(whole_name(name) or name) is None]
    for name in sorted(names, key=lambda name: (not name.startswith(INDEX_BASENAME), name)):
        (directory / name).unlink()


@system_errors("look for files of a part")
def has_all_files(directory: Path, index: DatasetIndex) -> bool:
    """Whether every stored file of an index is there in its size; after a crash of the machine it may not be."""
    pairs = [pair for shard in index.shards for pair in shard.files]
    stored = [compressed or raw for raw, compressed in pairs]
    paths = [(directory / file.basename, file.bytes) for file in stored]
    return all(path.exists() and path.stat().st_size == size for path, size in paths)


@contextmanager
def after_others(directory: Path | None) -> Iterator[None]:
    """Make a directory, and wait until no other process is in this block with it.

    The lock is on the directory itself, so no file is left; the kernel gives it back when its owner dies. Some network
    filesystems lock no directories; there nobody is waited for or refused.

    A worker whose program was killed may live a moment longer: the next run waits for it. None is no directory.
    """
    if directory is None:
        yield
        return
    with system_errors("make a directory"):
        directory.mkdir(parents=True, exist_ok=True)
    with _opened(directory) as handle:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def instead_of_others(directory: Path) -> Iterator[None]:
    """Be the only one in this block with a directory, which exists.

    Raises:
        ConfigError: Another one is, in this process or in another.
    """
    owner = os.getpid()
    with _opened(directory) as handle:
        if not _is_locked(handle, directory):
            raise ConfigError(
                f"another writer is at work in {directory}; let it end, or close it if it is of this program"
            )
        try:
            yield
        finally:
            if os.getpid() == owner:  # a child has the handle too, and would give back its parent's lock
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)


def _is_locked(handle: int, directory: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a filesystem without locks
        pass
    # Meanwhile a writer that gave up may have removed the directory, and the next one made another of this name.
    return directory.exists() and os.path.samestat(os.fstat(handle), directory.stat())


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    with system_errors("open a directory"):
        handle = os.open(directory, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
