"""What may lie in a local directory before a dataset is written there, and what of it is removed."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

from lightning_streaming.errors import ConfigError
from lightning_streaming.files import remove_partials
from lightning_streaming.formats.hashing import hash_file
from lightning_streaming.formats.index import INDEX_BASENAME, FileInfo, ShardInfo, parse_index
from lightning_streaming.writing.names import CONVERSION_PLAN, WRITING, is_shard_file, record_number, whole_name
from lightning_streaming.writing.system_errors import system_errors


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
    if not all(map(is_of_writer, records)):
        return None
    shards = [path.name for path in sorted(directory.iterdir()) if is_shard_file(whole_name(path.name) or path.name)]
    return [*(f"{WRITING}/{name}" for name in records), *shards]


def is_of_writer(name: str) -> bool:
    """Whether a writer gives this name to a file in its own folder, be it unfinished."""
    whole = whole_name(name) or name
    return whole == INDEX_BASENAME or is_shard_file(whole) or record_number(whole) is not None
