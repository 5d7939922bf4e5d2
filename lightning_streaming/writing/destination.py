"""Where a dataset's files go: a directory, a bucket, or both."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from lightning_streaming.errors import ConfigError, ShardCorruptError, StorageError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, ShardInfo, parse_index
from lightning_streaming.formats.shard import raw_forms
from lightning_streaming.storage import Location, StorageOptions, local_path, mask_url
from lightning_streaming.storage.location import written_whole
from lightning_streaming.storage.sinks import system_errors
from lightning_streaming.writing.directories import (
    CONVERSION_PLAN,
    PARTS_PLAN,
    WRITING,
    check_is_directory,
    has_first_hash,
    instead_of_others,
    is_raw_form,
    is_shard_file,
    prepare_directory,
    record_name,
    record_number,
    remove_empty_folder,
    stored_names,
    tidy_directory,
)


class Destination:
    """Takes whole files, from any thread.

    Nothing is removed that no writer wrote, but for a dataset that may be replaced.
    """

    def __init__(
        self,
        out: str | Path | tuple[str, str],
        *,
        keep_local: bool = False,
        retry: int = 5,
        progress_bar: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is touched yet.

        Args:
            out: A directory; or a URL; or (directory, URL or second directory) for both.
            keep_local: Whether the directory of such a pair is filled too; if not, it is not used.
            retry: Attempts in total for each transfer.
            progress_bar: Whether to show how many bytes are stored.
            storage_options: Arguments for the filesystem of the URL.

        Raises:
            ConfigError: ``out`` is not one of these, nothing serves its URL, or ``storage_options`` is no mapping.
            MissingDependencyError: The package that serves the URL is not installed.
        """
        options = StorageOptions(storage_options)
        directory, remote = parse_out(out)
        if directory is None and keep_local:
            raise ConfigError("keep_local=True needs a directory to keep files in; write out=(directory, URL)")
        kept = directory if keep_local or remote is None else None
        for path in (kept, local_path(remote or "")):
            if path is not None:
                check_is_directory(path)
        self.truth = Location(remote or str(directory), options, attempts=retry)
        """Where the dataset is looked for."""
        if self.truth.path is None:
            self.truth.prepare()  # while this process has one thread
        self._is_remote = remote is not None
        self._own = None if kept is None else _OwnDirectory(kept)
        self._progress = _StoringProgress(shown=progress_bar)

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
                "would take for what the compressed ones hold; choose another place, or write with mode='create' and "
                "exist_ok=True, which removes those that share a name"
            )

    def remove_raw_forms(self, shards: Iterable[ShardInfo]) -> None:
        """Remove uncompressed shards under a URL that compressed ones were written over; directories have none."""
        there = self.truth.sizes() if self.truth.path is None else {}
        for raw in raw_forms(shards):
            if raw.basename in there:
                (self.truth / raw.basename).remove()

    def tidy(self, shards: Iterable[ShardInfo]) -> None:
        """Remove what a killed writer left in directories, but for the files of these shards.

        Raises:
            ConfigError: A directory holds files named like those of shards that no writer left.
        """
        named = {name for shard in shards for name in stored_names(shard)}
        for directory in self._directories():
            tidy_directory(directory, named, is_copy=directory != self.truth.path)

    def check_stored(self, shards: Iterable[ShardInfo]) -> None:
        """Make sure, before an index names these shards, that they are there, by their sizes.

        Raises:
            StorageError: One is not, or is of another size.
        """
        there = self.truth.sizes()
        files = [compressed or raw for shard in shards for raw, compressed in shard.files]
        wrong = [file.basename for file in files if there.get(file.basename) != file.bytes]
        if wrong:
            found = "has another size now" if wrong[0] in there else "is not there any more"
            raise StorageError(
                f"{wrong[0]} was stored and {found}, so no index is published; is another writer at work on this "
                "dataset? Write it again, alone; what mode='resume' wrote is gone on with"
            )

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
        files = [(compressed or raw, shard.hashes) for shard in shards for raw, compressed in shard.files]
        for file, kinds in files:
            path = mirror.path / file.basename
            is_same = kinds and there.get(file.basename) == file.bytes and has_first_hash(path, file, kinds)
            if not is_same:
                data = (self.truth / file.basename).read()
                if len(data) != file.bytes:
                    raise ShardCorruptError(f"{file.basename} must have {file.bytes} bytes, but has {len(data)}")
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
        self.put_aside(name, *pieces)
        if self._mirror is not None:
            self._mirror.put(name, *pieces)

    def put_aside(self, name: str, *pieces: bytes | memoryview) -> None:
        """Store a file that is not part of the dataset.

        Raises:
            StorageError: It could not be.
        """
        num_bytes = sum(map(len, pieces))
        self._progress.expect(num_bytes)
        if self._is_remote or self._own is None:
            (self.truth / name).put(*pieces)
        else:
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


class _StoringBar(tqdm):  # type: ignore[misc]
    monitor_interval = 0  # no thread that outlives the writer


class _StoringProgress:
    """A bar of the bytes stored, of those that are ready to be; or nothing to be seen."""

    def __init__(self, *, shown: bool) -> None:
        self._lock = threading.Lock()
        self._bar = _StoringBar(total=0, unit="B", unit_scale=True, unit_divisor=1024, disable=not shown, desc="stored")

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
    raise ConfigError(f"out must be a directory, a URL, or a pair (directory, another place), but got {shown!r}")


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
                f"{location} holds {what}; choose another place, {way_out}or exist_ok=True to write over it"
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
