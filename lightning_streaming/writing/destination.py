"""Where a dataset's files go: a directory, a bucket, or both; all their names, and the lock that keeps others out.

index.json                        what makes the shards a dataset
shard.00012.mds.zstd              a shard
.writing/00012.json               says that shard 12 is stored, while there is no index that does
.writing/shard.00012.mds.zstd     of an earlier version: a shard that was to replace a published one of this name
.writing/index.json               of an earlier version: the index that was to follow it
parts.plan                        what the parts of a dataset are made of
convert.plan                      what a conversion was begun with
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lightning_streaming.errors import ConfigError, ShardCorruptError, StorageError
from lightning_streaming.escaping import short_repr
from lightning_streaming.files import PARTIAL_SUFFIX, remove_partials, system_errors
from lightning_streaming.formats.hashing import hash_file
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, parse_index
from lightning_streaming.formats.shard import raw_forms
from lightning_streaming.storage import Location, StorageOptions, local_path, mask_url
from lightning_streaming.storage.location import written_whole
from lightning_streaming.waits import bar
from lightning_streaming.writing.writer_options import WriterOptions

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


class Destination:
    """Takes whole files, from any thread.

    Nothing is removed that no writer wrote, but for a dataset that may be replaced.
    """

    def __init__(self, asked: WriterOptions) -> None:
        """Nothing is touched yet.

        Raises:
            ConfigError: ``out`` is no directory, URL or pair, or nothing serves its URL.
            MissingDependencyError: The package that serves the URL is not installed.
        """
        directory, remote = parse_out(asked.out)
        if directory is None and asked.keep_local:
            raise ConfigError(
                "keep_local=True needs a directory to keep files in",
                hint="write out=(directory, URL)",
                option="keep_local",
            )
        kept = directory if asked.keep_local or remote is None else None
        for path in (kept, local_path(remote or "")):
            if path is not None:
                check_is_directory(path)
        self.truth = Location(remote or str(directory), asked.storage_options or StorageOptions(), attempts=asked.retry)
        """Where the dataset is looked for."""
        if self.truth.path is None:
            self.truth.prepare_to_write()  # while this process has one thread
        self._is_remote = remote is not None
        self._own = None if kept is None else _OwnDirectory(kept)
        self._progress = _StoringProgress(shown=asked.progress_bar)

    def start_anew(self, *, exist_ok: bool) -> None:
        """Make room for a new dataset.

        Args:
            exist_ok: Whether a dataset that lies in the directory may be removed, and one under the URL written over.

        Raises:
            ConfigError: There is a dataset, be it unfinished, or the directory holds what may not be removed.
            StorageError: The store does not say whether there is a dataset under the URL.
        """
        if self._is_remote and not exist_ok:
            _refuse_published(self.truth)
        for directory in self._directories():
            prepare_directory(directory, exist_ok=exist_ok)
        if self._is_remote and exist_ok:
            _retract(self.truth)

    def check_raw_forms(self, shard_format: str) -> None:
        """Refuse a URL under which files lie that could be taken for raw forms of compressed shards to be.

        Directories are empty by now, or hold what their writer left.

        Raises:
            ConfigError: There are.
        """
        if self.truth.path is not None:
            return
        found = sorted(name for name in self.truth.sizes() if is_raw_form(name, shard_format))
        if found:
            raise ConfigError(
                f"{self.truth} holds {len(found)} uncompressed shards, like {found[0]}, which some readers "
                "would take for what the compressed ones hold",
                hint="choose another place, or write with mode='create' and "
                "exist_ok=True, which removes those that share a name",
                option="out",
                path=str(self.truth),
            )

    def remove_raw_forms(self, shards: Iterable[ShardInfo]) -> None:
        """Remove uncompressed shards under a URL that compressed ones were written over; directories have none."""
        there = self.truth.sizes() if self.truth.path is None else {}
        for raw in raw_forms(shards):
            if raw.basename in there:
                (self.truth / raw.basename).remove()

    def tidy(self, shards: Iterable[ShardInfo], *, is_finished: bool) -> None:
        """Remove what a killed writer left in directories, but for the files of these shards.

        Args:
            shards: What stays.
            is_finished: Whether nothing will be added, so that files of others are in nobody's way.

        Raises:
            ConfigError: A directory holds files named like those of shards that no writer left.
        """
        named = {file.basename for shard in shards for file in shard.stored}
        for directory in self._directories():
            if _is_marked(directory) or not is_finished:
                tidy_directory(directory, named, is_copy=directory != self.truth.path)

    def check_stored(self, shards: Iterable[ShardInfo]) -> None:
        """Make sure, before an index names these shards, that they are there, by their sizes.

        Raises:
            StorageError: One is not, or is of another size.
        """
        for name, is_there in self._wrong(shards):
            found = "has another size now" if is_there else "is not there any more"
            raise StorageError(
                f"{name} was stored and {found}, so no index is published",
                hint="check that no other writer is at work on this dataset, and write it again; mode='resume' or "
                "'append' continues what was written",
                path=name,
            )

    def check_published(self, shards: Iterable[ShardInfo]) -> None:
        """Make sure, before anything is added behind these shards of an index, that they are there, by their sizes.

        Raises:
            StorageError: One is not, or is of another size.
        """
        for name, is_there in self._wrong(shards):
            found = "is not of the size that the index says" if is_there else "is not there"
            raise StorageError(
                f"{name} {found}, so nothing is appended",
                hint="`lightning-streaming verify` finds all that is damaged, and "
                "with --repair fetches it from another copy",
                path=name,
            )

    def _wrong(self, shards: Iterable[ShardInfo]) -> Iterator[tuple[str, bool]]:
        """Files of these shards that are not stored in their sizes, and whether there is something of their name."""
        there = self.truth.sizes()
        for file in (file for shard in shards for file in shard.stored):
            if there.get(file.basename) != file.bytes:
                yield file.basename, file.basename in there

    def fill(self, shards: Iterable[ShardInfo], index: bytes | None) -> None:
        """Fetch what the directory of a pair does not have of these shards, and of the index.

        A file that is there stays if a recorded hash says that it is the same one; size alone does not tell.

        Raises:
            ShardCorruptError: A shard is not what its index promises.
        """
        mirror = self._mirror
        if mirror is None:
            return
        there = Location(str(mirror.path)).sizes()
        for file, kinds in ((file, shard.hashes) for shard in shards for file in shard.stored):
            path = mirror.path / file.basename
            is_same = kinds and there.get(file.basename) == file.bytes and has_first_hash(path, file, kinds)
            if not is_same:
                data = (self.truth / file.basename).read()
                if len(data) != file.bytes:
                    raise ShardCorruptError(
                        f"{file.basename} must have {file.bytes} bytes, but has {len(data)}", path=file.basename
                    )
                if not path.is_file() or path.read_bytes() != data:  # those who read the copy keep their file
                    mirror.put(file.basename, data)
        if index is not None:
            mirror.put(INDEX_BASENAME, index)

    def published(self) -> tuple[DatasetIndex, bytes] | None:
        """The index and its text; None while there is none.

        Raises:
            IndexFormatError: It cannot be read.
        """
        text = (self.truth / INDEX_BASENAME).read_if_there()
        return None if text is None else (parse_index(text, INDEX_BASENAME), text)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only writer in each directory that is there.

        Raises:
            ConfigError: There is another writer.
        """
        with ExitStack() as held:
            for directory in self._directories():
                if directory.is_dir():
                    held.enter_context(instead_of_others(directory))
            yield

    def put(self, name: str, *pieces: bytes | memoryview) -> None:
        """Store a file.

        Raises:
            StorageError: It could not be.
        """
        num_bytes = sum(map(len, pieces))
        self._progress.expect(num_bytes)
        if self._is_remote:
            (self.truth / name).put(*pieces)
        if self._own is not None:
            self._own.put(name, *pieces)
        self._progress.stored(num_bytes)

    def make_folder(self, name: str) -> None:
        """Make a folder in each directory."""
        for directory in self._directories():
            with system_errors("make a directory"):
                (directory / name).mkdir(parents=True, exist_ok=True)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder from each directory."""
        for directory in self._directories():
            remove_empty_folder(directory / name)

    def undo(self) -> None:
        """Remove from the local directory what was put there, because the dataset will not be whole."""
        if self._own is not None:
            self._own.undo()

    def close(self) -> None:
        """Nothing more is put."""
        self._progress.close()

    @property
    def _mirror(self) -> _OwnDirectory | None:
        """The directory of a pair, if it is filled too."""
        return self._own if self._is_remote else None

    def _directories(self) -> list[Path]:
        """Those of this machine that are written to, the truth first."""
        mirror = None if self._mirror is None else self._mirror.path
        return [path for path in (self.truth.path, mirror) if path is not None]


class _OwnDirectory:
    """A directory of this machine, and what was put there, so that it can be taken back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._was_there = path.exists()
        self._written: dict[str, int] = {}
        """Name to inode, known before the file has its name."""

    def put(self, name: str, *pieces: bytes | memoryview) -> None:
        with written_whole(self.path / name) as partial, partial.open("wb") as file:
            self._written[name] = os.fstat(file.fileno()).st_ino
            file.writelines(pieces)

    def undo(self) -> None:
        """Remove what was put, and the directory, if it was not there before and nothing else is in it.

        A file that another program put in place of one of these stays.
        """
        for name, inode in sorted(self._written.items()):
            with system_errors("remove a file"):
                path = self.path / name
                if path.exists() and path.stat().st_ino == inode:
                    path.unlink(missing_ok=True)
        if not self._was_there:
            remove_empty_folder(self.path)


class _StoringProgress:
    """A bar of the bytes stored, of those that are ready to be; or nothing to be seen."""

    def __init__(self, *, shown: bool) -> None:
        self._lock = threading.Lock()
        self._bar = bar("stored", "B", 0, shown=shown, stays=True)

    def expect(self, size: int) -> None:
        """So many bytes are to be stored."""
        with self._lock:
            self._bar.total += size if self._bar.total is not None else 0
            self._bar.refresh()

    def stored(self, size: int) -> None:
        """So many bytes have been."""
        with self._lock:
            self._bar.update(size)

    def close(self) -> None:
        """No more comes; the bar stays on the screen."""
        with self._lock:
            self._bar.close()


def parse_out(out: str | Path | tuple[str, str]) -> tuple[Path | None, str | None]:
    """Tell the local directory and the remote of ``out``; either may be None, but not both.

    Raises:
        ConfigError: It is not a directory, a URL, or a pair of a directory and another place.
    """
    if isinstance(out, str | Path) and str(out):
        directory = local_path(str(out))
        return directory, (str(out) if directory is None else None)
    if isinstance(out, tuple | list) and len(out) == 2 and all(map(str, out)):
        directory, remote = local_path(str(out[0])), str(out[1])
        if directory is not None and not _same_place(directory, remote):
            return directory, remote
    shown = ", ".join(mask_url(str(part)) for part in (out if isinstance(out, tuple | list) else [out]))
    raise ConfigError(
        f"out must be a directory, a URL, or a pair (directory, another place), but got {short_repr(shown)}",
        option="out",
    )


def _same_place(directory: Path, remote: str) -> bool:
    path = local_path(remote)
    return path is not None and path.resolve() == directory.resolve()


def _refuse_published(location: Location) -> None:
    # Its shards would be written over one by one while its index, or its records, still name them.
    for name, what, way_out in (
        (INDEX_BASENAME, "a dataset", ""),
        (record_name(0), "a dataset that is not finished", "mode='resume' to go on, "),
    ):
        if (location / name).read_if_there() is not None:
            raise ConfigError(
                f"{location} holds {what}",
                hint=f"choose another place, {way_out}or exist_ok=True to write over it",
                option="out",
                path=str(location),
            )


def _retract(location: Location) -> None:
    """Remove all that says there is a dataset. Its shards are written over."""
    for name in (INDEX_BASENAME, CONVERSION_PLAN, PARTS_PLAN):
        (location / name).remove()
    folder = location / WRITING
    for name in folder.sizes():
        if name == INDEX_BASENAME or is_shard_file(name) or record_number(name) is not None:
            (folder / name).remove()
    if folder.path is not None:
        remove_empty_folder(folder.path)


# --- files of a directory ---


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
        raise ConfigError(
            f"{directory} must be empty, but holds {found[0].name}",
            hint=f"{_way_out(directory)}",
            option="out",
            path=str(directory),
        )
    unfinished = _names_of_unfinished(directory)
    named = dict.fromkeys([*_names_of_dataset(directory), *(unfinished or ()), CONVERSION_PLAN])
    folders = [] if unfinished is None else [WRITING]
    foreign = [path.name for path in found if path.name not in folders and (path.name not in named or path.is_dir())]
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
            f"{directory} holds {strays[0].name}, which no index names and no writer left that can be continued",
            hint="remove it, or choose another directory",
            option="out",
            path=str(directory),
        )
    own = {*_names_of_dataset(directory), *(_recorded_shards(directory) if is_copy else ())}
    kept = [path.name for path in strays if path.name in own]
    if kept:
        raise ConfigError(
            f"{directory} holds a dataset of its own, with {kept[0]}, which is not part of the one to continue",
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
        raise ConfigError(f"{directory} must be a directory, but is a file", option="out", path=str(directory))


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


def has_all_files(directory: Path, index: DatasetIndex) -> bool:
    """Whether every stored file of an index is there in its size; after a crash of the machine it may not be."""
    there = Location(str(directory)).sizes()
    return all(there.get(file.basename) == file.bytes for shard in index.shards for file in shard.stored)


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
                f"another writer is at work in {directory}",
                hint="let it end, or close it if it is of this program",
                option="out",
                path=str(directory),
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
