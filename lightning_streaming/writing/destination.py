"""The destination of a dataset: a directory, a bucket, or both; the names of all files, and the lock of a writer.

index.json                        makes the shards a dataset
shard.00012.mds.zstd              a shard
.writing/00012.json               the record that shard 12 is stored, until the index is published
.writing/shard.00012.mds.zstd     of an earlier version: a shard that should replace a published one of this name
.writing/index.json               of an earlier version: the index that should follow it
parts.plan                        the inputs and settings of a dataset in parts
convert.plan                      the options of a conversion
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError, ShardCorruptError, StorageError
from lightning_streaming.escaping import short_repr
from lightning_streaming.files import PARTIAL_SUFFIX, remove_partials, system_errors
from lightning_streaming.formats.algorithms import hash_file
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, parse_index
from lightning_streaming.formats.shard import raw_forms
from lightning_streaming.storage import Location, StorageOptions, local_path, mask_url
from lightning_streaming.storage.location import written_whole
from lightning_streaming.waits import bar

WRITING = ".writing"
"""The folder of a dataset that is being written."""

PARTS_PLAN = "parts.plan"
"""A file next to the parts. It does not end in ``.json``: MosaicML Streaming takes every such file for an index."""

CONVERSION_PLAN = "convert.plan"
"""A file next to the index. It is removed when its dataset is replaced."""

_SHARD = r"shard\.\d{5,}\.(mds|json|csv|tsv|xsv)(\.meta)?(\.(br|bz2|gz|snappy|zstd))?"
_SHARD_FILE = re.compile(_SHARD, re.ASCII)
_RECORD = re.compile(r"(\d{5,})\.json", re.ASCII)
_PARTIAL = re.compile(rf"({_SHARD}|\d{{5,}}\.json|index\.json)\..*{re.escape(PARTIAL_SUFFIX)}", re.ASCII)


class Destination:
    """Destination that stores whole files, from any thread.

    It removes only files that a writer wrote, or those of a dataset that may be replaced.
    """

    def __init__(
        self,
        out: str | Path | tuple[str, str],
        *,
        keep_local: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        retry: int = 5,
        progress_bar: bool = False,
    ) -> None:
        """Read and write nothing yet. The arguments are those of a writer.

        Raises:
            ConfigError: ``out`` is no directory, URL or pair, or no filesystem serves its URL.
            MissingDependencyError: The package that serves the URL is not installed.
        """
        directory, remote = parse_out(out)
        if directory is None and keep_local:
            raise ConfigError(
                "keep_local=True needs a directory to keep files in",
                hint="write out=(directory, URL)",
                option="keep_local",
            )
        kept = directory if keep_local or remote is None else None
        for path in (kept, local_path(remote or "")):
            if path is not None:
                check_is_directory(path)
        self.truth = Location(remote or str(directory), storage_options or StorageOptions(), attempts=retry)
        """The location from which the dataset is read."""
        if self.truth.path is None:
            self.truth.prepare_to_write()  # while this process has one thread
        self._is_remote = remote is not None
        self._own = None if kept is None else _OwnDirectory(kept)
        self._progress_lock = threading.Lock()
        self._bar = bar("stored", "B", 0, shown=progress_bar, stays=True)

    def clear(self, *, exist_ok: bool) -> None:
        """Make room for a new dataset.

        Args:
            exist_ok: Whether a dataset in the directory may be removed, and one under the URL overwritten.

        Raises:
            ConfigError: There is a dataset, possibly unfinished, or the directory holds files that may not be removed.
            StorageError: The store did not answer.
        """
        if self._is_remote and not exist_ok:
            # Shards would be overwritten one by one while the index, or the records, still name them.
            for name, dataset, resume in (
                (INDEX_BASENAME, "a dataset", ""),
                (record_name(0), "a dataset that is not finished", "mode='resume' to continue it, "),
            ):
                if (self.truth / name).read_if_there() is not None:
                    raise ConfigError(
                        f"{self.truth} holds {dataset}",
                        hint=f"choose another location, {resume}or exist_ok=True to overwrite it",
                        option="out",
                        path=str(self.truth),
                    )
        for directory in self._directories():
            prepare_directory(directory, exist_ok=exist_ok)
        if self._is_remote and exist_ok:
            # All files that make shards a dataset. The shards are overwritten.
            for name in (INDEX_BASENAME, CONVERSION_PLAN, PARTS_PLAN):
                (self.truth / name).remove()
            folder = self.truth / WRITING
            for name in folder.sizes():
                if name == INDEX_BASENAME or is_shard_file(name) or record_number(name) is not None:
                    (folder / name).remove()
            if folder.path is not None:
                remove_empty_folder(folder.path)

    def check_raw_forms(self, shard_format: str) -> None:
        """Check that there are no files under a URL that readers could take for raw forms of compressed shards.

        Directories are empty by now, or hold files that their writer left.

        Raises:
            ConfigError: There are such files.
        """
        if self.truth.path is not None:
            return
        names = sorted(name for name in self.truth.sizes() if is_raw_form(name, shard_format))
        if names:
            raise ConfigError(
                f"{self.truth} holds {len(names)} uncompressed shards, like {names[0]}, which some readers "
                "would take for the contents of the compressed ones",
                hint="choose another location, or write with mode='create' and "
                "exist_ok=True, which removes those that share a name",
                option="out",
                path=str(self.truth),
            )

    def remove_raw_forms(self, shards: Iterable[ShardInfo]) -> None:
        """Remove uncompressed shards under a URL that compressed ones replaced; directories have none."""
        sizes = self.truth.sizes() if self.truth.path is None else {}
        for raw in raw_forms(shards):
            if raw.basename in sizes:
                (self.truth / raw.basename).remove()

    def tidy(self, shards: Iterable[ShardInfo], *, is_finished: bool) -> None:
        """Remove files that a killed writer left in directories, except those of these shards.

        Args:
            shards: Shards whose files stay.
            is_finished: Whether nothing will be added, so that files of others do not matter.

        Raises:
            ConfigError: A directory holds files named like those of shards that no writer left.
        """
        named = {file.basename for shard in shards for file in shard.stored}
        for directory in self._directories():
            if _is_marked(directory) or not is_finished:
                tidy_directory(directory, named, is_copy=directory != self.truth.path)

    def check_stored(self, shards: Iterable[ShardInfo]) -> None:
        """Check by their sizes, before an index names these shards, that they are stored.

        Raises:
            StorageError: One is missing, or has another size.
        """
        for name, exists in self._not_stored(shards):
            problem = "has another size now" if exists else "is missing now"
            raise StorageError(
                f"{name} was stored and {problem}, so no index is published",
                hint="check that no other writer writes this dataset, and write it again; mode='resume' or "
                "'append' continues after the stored shards",
                path=name,
            )

    def check_published(self, shards: Iterable[ShardInfo]) -> None:
        """Check by their sizes, before anything is appended to these shards of an index, that they are stored.

        Raises:
            StorageError: One is missing, or has another size.
        """
        for name, exists in self._not_stored(shards):
            problem = "has another size than the index says" if exists else "is missing"
            raise StorageError(
                f"{name} {problem}, so nothing is appended",
                hint="`lightning-streaming verify` finds all damaged files, and "
                "with --repair fetches them from another copy",
                path=name,
            )

    def _not_stored(self, shards: Iterable[ShardInfo]) -> Iterator[tuple[str, bool]]:
        """Yield the files of these shards that are not stored in their sizes, and whether they exist."""
        sizes = self.truth.sizes()
        for file in (file for shard in shards for file in shard.stored):
            if sizes.get(file.basename) != file.bytes:
                yield file.basename, file.basename in sizes

    def fill(self, shards: Iterable[ShardInfo], index: bytes | None) -> None:
        """Fetch those files of these shards, and of the index, that the directory of a pair does not have.

        An existing file stays if it has the recorded hash; size alone is not enough.

        Raises:
            ShardCorruptError: A shard has another size than its index says.
        """
        mirror = self._mirror
        if mirror is None:
            return
        sizes = Location(str(mirror.path)).sizes()
        for file, kinds in ((file, shard.hashes) for shard in shards for file in shard.stored):
            path = mirror.path / file.basename
            is_same = kinds and sizes.get(file.basename) == file.bytes and has_first_hash(path, file, kinds)
            if not is_same:
                data = (self.truth / file.basename).read()
                if len(data) != file.bytes:
                    raise ShardCorruptError(
                        f"{file.basename} must have {file.bytes} bytes, but has {len(data)}", path=file.basename
                    )
                if not path.is_file() or path.read_bytes() != data:  # readers of the copy keep their file
                    mirror.put(file.basename, data)
        if index is not None:
            mirror.put(INDEX_BASENAME, index)

    def published(self) -> tuple[DatasetIndex, bytes] | None:
        """Return the index and its text; None while there is none.

        Raises:
            IndexFormatError: It cannot be read.
        """
        text = (self.truth / INDEX_BASENAME).read_if_there()
        return None if text is None else (parse_index(text, INDEX_BASENAME), text)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock each existing directory against other writers.

        Raises:
            ConfigError: There is another writer.
        """
        with ExitStack() as held:
            for directory in self._directories():
                if directory.is_dir():
                    held.enter_context(exclusive_lock(directory))
            yield

    def put(self, name: str, *pieces: bytes | memoryview) -> None:
        """Store a file.

        Raises:
            StorageError: It could not be stored.
        """
        num_bytes = sum(map(len, pieces))
        with self._progress_lock:
            self._bar.total += num_bytes if self._bar.total is not None else 0
            self._bar.refresh()
        if self._is_remote:
            (self.truth / name).put(*pieces)
        if self._own is not None:
            self._own.put(name, *pieces)
        with self._progress_lock:
            self._bar.update(num_bytes)

    def make_folder(self, name: str) -> None:
        """Create a folder in each directory."""
        for directory in self._directories():
            with system_errors("create a directory"):
                (directory / name).mkdir(parents=True, exist_ok=True)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder from each directory."""
        for directory in self._directories():
            remove_empty_folder(directory / name)

    def undo(self) -> None:
        """Remove the files that were stored in the local directory, because the dataset will not be complete."""
        if self._own is not None:
            self._own.undo()

    def close(self) -> None:
        """Close the progress bar, once no more files are stored."""
        with self._progress_lock:
            self._bar.close()

    @property
    def _mirror(self) -> _OwnDirectory | None:
        """The directory of a pair, if it is written to as well."""
        return self._own if self._is_remote else None

    def _directories(self) -> list[Path]:
        """Return the directories of this machine that are written to, the truth first."""
        mirror = None if self._mirror is None else self._mirror.path
        return [path for path in (self.truth.path, mirror) if path is not None]


class _OwnDirectory:
    """A directory of this machine, and the files that were stored in it, so that they can be removed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._existed = path.exists()
        self._written: dict[str, int] = {}
        """Name to inode, recorded before the file has its name."""

    def put(self, name: str, *pieces: bytes | memoryview) -> None:
        with written_whole(self.path / name) as partial, partial.open("wb") as file:
            self._written[name] = os.fstat(file.fileno()).st_ino
            file.writelines(pieces)

    def undo(self) -> None:
        """Remove the stored files, and the directory, if it did not exist before and is empty now.

        A file with which another program replaced one of these stays.
        """
        for name, inode in sorted(self._written.items()):
            with system_errors("remove a file"):
                path = self.path / name
                if path.exists() and path.stat().st_ino == inode:
                    path.unlink(missing_ok=True)
        if not self._existed:
            remove_empty_folder(self.path)


def parse_out(out: str | Path | tuple[str, str]) -> tuple[Path | None, str | None]:
    """Return the local directory and the remote of ``out``; either may be None, but not both.

    Raises:
        ConfigError: It is not a directory, a URL, or a pair of a directory and another location.
    """
    if isinstance(out, str | Path) and str(out):
        directory = local_path(str(out))
        return directory, (str(out) if directory is None else None)
    if isinstance(out, tuple | list) and len(out) == 2 and all(map(str, out)):
        directory, remote = local_path(str(out[0])), str(out[1])
        second = local_path(remote)
        if directory is not None and (second is None or second.resolve() != directory.resolve()):
            return directory, remote
    shown = ", ".join(mask_url(str(part)) for part in (out if isinstance(out, tuple | list) else [out]))
    raise ConfigError(
        f"out must be a directory, a URL, or a pair (directory, another location), but got {short_repr(shown)}",
        option="out",
    )


# --- files of a directory ---


def is_shard_file(name: str) -> bool:
    """Return whether a writer gives this name to a file of a shard."""
    return _SHARD_FILE.fullmatch(name) is not None


def is_raw_form(name: str, shard_format: str) -> bool:
    """Return whether the raw file of a shard of this format would have this name."""
    return is_shard_file(name) and re.fullmatch(rf"shard\.\d+\.{shard_format}(\.meta)?", name) is not None


def record_name(number: int) -> str:
    """Return the path of the record of a stored shard."""
    return f"{WRITING}/{number:05}.json"


def record_number(name: str) -> int | None:
    """Return the shard whose record has this name in its folder; None if it is no record."""
    match = _RECORD.fullmatch(name)
    return int(match[1]) if match else None


def whole_name(name: str) -> str | None:
    """Return the final name of an unfinished file, as a killed writer leaves it; None if it is another file."""
    match = _PARTIAL.fullmatch(name)
    return match[1] if match else None


@system_errors("make room for a dataset")
def prepare_directory(directory: Path, *, exist_ok: bool) -> None:
    """Create a missing directory, or, with ``exist_ok``, remove the dataset in one.

    Only the index and the files that it names are removed; and, of an unfinished dataset, the files that its writer
    left. The index first, so that no partial dataset looks complete. If there is any other file, nothing is removed.

    Raises:
        ConfigError: The directory is a file, or holds files that may not be removed.
        IndexFormatError: The directory holds an index that cannot be read.
    """
    check_is_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = sorted(directory.iterdir())
    if paths and not exist_ok:
        is_unfinished = _is_marked(directory)
        raise ConfigError(
            f"{directory} must be empty, but holds {paths[0].name}",
            hint="a dataset there is not finished: mode='resume', or 'append', continues it, exist_ok=True starts over"
            if is_unfinished
            else "exist_ok=True replaces a dataset",
            option="out",
            path=str(directory),
        )
    unfinished = _names_of_unfinished(directory)
    named = dict.fromkeys([*_names_of_dataset(directory), *(unfinished or ()), CONVERSION_PLAN])
    folders = [] if unfinished is None else [WRITING]
    foreign = [path.name for path in paths if path.name not in folders and (path.name not in named or path.is_dir())]
    if foreign:
        raise ConfigError(
            f"{directory} holds {foreign[0]}, which no index names as part of a dataset",
            hint="remove it, or choose another directory",
            option="out",
            path=str(directory),
        )
    for name in named:  # in order, the index first
        (directory / name).unlink(missing_ok=True)
    if folders:
        (directory / WRITING).rmdir()


@system_errors("remove the files that a writer left")
def tidy_directory(directory: Path, named: Container[str], *, is_copy: bool) -> None:
    """Remove files that a killed writer left in a directory where another one continues.

    Args:
        directory: The directory, which may be missing.
        named: Files that stay.
        is_copy: Whether the directory is a copy of a dataset at another location; records in it are then those of
            another dataset.

    Raises:
        ConfigError: The directory is a file, has files named like those of shards that no writer left, or holds another
            dataset, possibly unfinished.
        IndexFormatError: The directory holds an index that cannot be read.
    """
    check_is_directory(directory)
    if not directory.is_dir():
        return
    strays = [path for path in sorted(directory.iterdir()) if is_shard_file(path.name) and path.name not in named]
    if strays and not _is_marked(directory):
        raise ConfigError(
            f"{directory} holds {strays[0].name}, which no index names and no writer left that can be continued",
            hint="remove it, or choose another directory",
            option="out",
            path=str(directory),
        )
    of_others = set(_names_of_dataset(directory))
    if is_copy and _is_marked(directory):  # and the files of shards that a writer recorded here
        numbers = {record_number(path.name) for path in (directory / WRITING).iterdir()} - {None}
        prefixes = tuple(f"shard.{number:05}." for number in numbers)
        of_others |= {path.name for path in directory.iterdir() if path.name.startswith(prefixes)}
    kept = [path.name for path in strays if path.name in of_others]
    if kept:
        raise ConfigError(
            f"{directory} holds another dataset, with {kept[0]}, which is not part of the one to continue",
            hint="continue it where it was written, or choose another directory",
            option="out",
            path=str(directory),
        )
    for path in strays:
        path.unlink()
    for folder in (directory, directory / WRITING):
        for name in {whole_name(path.name) for path in folder.iterdir()} if folder.is_dir() else ():
            if name is not None:
                remove_partials(folder / name)


@system_errors("read stored files")
def has_first_hash(path: Path, file: FileInfo, kinds: Sequence[str]) -> bool:
    """Return whether a file has the first hash that an index records for it; True if it records none."""
    return all(hash_file(kind, path) == file.hashes.get(kind) for kind in kinds[:1])


@system_errors("read a directory")
def check_is_directory(directory: Path) -> None:
    """Check that a path is a directory, or missing.

    Raises:
        ConfigError: It is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} must be a directory, but is a file", option="out", path=str(directory))


@system_errors("remove a directory")
def remove_empty_folder(folder: Path) -> None:
    """Remove a folder, if it is empty."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _is_marked(directory: Path) -> bool:
    """Return whether a writer that can be continued wrote to a directory."""
    return (directory / WRITING).is_dir()


def _names_of_dataset(directory: Path) -> list[str]:
    """Return the index, then the files directly in ``directory`` that it names; empty if there is no index."""
    path = directory / INDEX_BASENAME
    if not path.is_file():
        return []
    shards = parse_index(path.read_bytes(), str(path)).shards
    basenames = [file.basename for shard in shards for pair in shard.files for file in pair if file is not None]
    return [INDEX_BASENAME, *(name for name in basenames if "/" not in name)]


def _names_of_unfinished(directory: Path) -> list[str] | None:
    """Return the files of a writer that can be continued, its records first; None if no such writer wrote here."""
    if not _is_marked(directory):
        return None
    records = [path.name for path in sorted((directory / WRITING).iterdir())]
    if not all(map(_is_of_writer, records)):
        return None
    shards = [path.name for path in sorted(directory.iterdir()) if is_shard_file(whole_name(path.name) or path.name)]
    return [*(f"{WRITING}/{name}" for name in records), *shards]


def _is_of_writer(name: str) -> bool:
    """Return whether a writer gives this name to a file in its folder, possibly unfinished."""
    whole = whole_name(name) or name
    return whole == INDEX_BASENAME or is_shard_file(whole) or record_number(whole) is not None


@system_errors("remove the files that a writer left")
def remove_partial_part(directory: Path) -> None:
    """Remove an index, first, and shards, whole or partial, and no files that a writer of a part does not create.

    For the sole writer only.
    """
    written = [path.name for path in directory.iterdir() if _is_of_writer(path.name)]
    names = [name for name in written if record_number(whole_name(name) or name) is None]
    for name in sorted(names, key=lambda name: (not name.startswith(INDEX_BASENAME), name)):
        (directory / name).unlink()


def has_all_files(directory: Path, index: DatasetIndex) -> bool:
    """Return whether every stored file of an index exists in its size; after a crash of the machine it may not."""
    sizes = Location(str(directory)).sizes()
    return all(sizes.get(file.basename) == file.bytes for shard in index.shards for file in shard.stored)


@contextmanager
def waiting_lock(directory: Path | None) -> Iterator[None]:
    """Create a directory, and hold its lock, after waiting for other processes that hold it; None locks nothing.

    The lock is on the directory itself, so no file is left; the kernel releases it when its owner dies. Some network
    filesystems do not lock directories; there is no waiting and no error on those.

    A worker whose program was killed may live a moment longer: the next run waits for it.
    """
    if directory is None:
        yield
        return
    with system_errors("create a directory"):
        directory.mkdir(parents=True, exist_ok=True)
    with _opened(directory) as handle:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def exclusive_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of an existing directory.

    Raises:
        ConfigError: Another writer holds it, in this process or in another.
    """
    owner = os.getpid()
    with _opened(directory) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_busy = False
        except BlockingIOError:
            is_busy = True
        except OSError:  # a filesystem without locks
            is_busy = False
        # A writer that gave up may have removed the directory meanwhile, and another one created it again.
        if is_busy or not directory.exists() or not os.path.samestat(os.fstat(handle), directory.stat()):
            raise ConfigError(
                f"another writer is writing to {directory}",
                hint="wait until it ends, or close it if it is of this program",
                option="out",
                path=str(directory),
            )
        try:
            yield
        finally:
            if os.getpid() == owner:  # a child has the handle too, and would release its parent's lock
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    with system_errors("open a directory"):
        handle = os.open(directory, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
