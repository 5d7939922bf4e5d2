"""Where a dataset's files go: a directory, a bucket, or both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError, ObjectNotFoundError, ShardCorruptError, StorageError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, ShardInfo, parse_index
from lightning_streaming.formats.raw_forms import raw_forms
from lightning_streaming.storage import local_path, mask_url
from lightning_streaming.storage.filesystems import prepare
from lightning_streaming.storage.options import StorageOptions
from lightning_streaming.writing.directories import (
    check_is_directory,
    has_first_hash,
    prepare_directory,
    stored_names,
    tidy_directory,
)
from lightning_streaming.writing.names import (
    CONVERSION_PLAN,
    PARTS_PLAN,
    WRITING,
    is_raw_form,
    is_shard_file,
    record_name,
    record_number,
)
from lightning_streaming.writing.place import Bucket, Directory, Place
from lightning_streaming.writing.progress import Progress
from lightning_streaming.writing.sole_writer import instead_of_others


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
        storage_options = StorageOptions(storage_options)
        directory, self._remote = parse_out(out)
        if directory is None and keep_local:
            raise ConfigError("keep_local=True needs a directory to keep files in; write out=(directory, URL)")
        own = None
        if directory is not None and (keep_local or self._remote is None):
            check_is_directory(directory)
            own = Directory(directory)
        self.truth: Place
        """Where the dataset is looked for."""
        if self._remote is not None:
            self.truth = _remote_place(self._remote, storage_options or {}, retry)
        else:
            assert own is not None
            self.truth = own
        self._own = own
        self._mirror = None if own is self.truth else own
        self._progress = Progress(shown=progress_bar)

    def start_anew(self, *, exist_ok: bool) -> None:
        """Make room for a new dataset.

        Args:
            exist_ok: Whether a dataset that lies in the directory may be removed, and one under the URL written over.

        Raises:
            ConfigError: There is a dataset, be it unfinished, or the directory holds what may not be removed.
            StorageError: The store does not say whether there is a dataset under the URL.
        """
        if self._remote is not None and not exist_ok:
            _refuse_published(self.truth, self._remote)
        for directory in self._directories():
            prepare_directory(directory.path, exist_ok=exist_ok)
        if self._remote is not None and exist_ok:
            _retract(self.truth)

    def check_raw_forms(self, shard_format: str) -> None:
        """Refuse a URL under which files lie that could be taken for raw forms of compressed shards to be.

        Directories are empty by now, or hold what their writer left.

        Raises:
            ConfigError: There are.
        """
        if isinstance(self.truth, Directory) or self._remote is None:
            return
        found = sorted(name for name in self.truth.sizes() if is_raw_form(name, shard_format))
        if found:
            raise ConfigError(
                f"{mask_url(self._remote)} holds {len(found)} uncompressed shards, like {found[0]}, which some readers "
                "would take for what the compressed ones hold; choose another place, or write with mode='create' and "
                "exist_ok=True, which removes those that share a name"
            )

    def remove_raw_forms(self, shards: Iterable[ShardInfo]) -> None:
        """Remove uncompressed shards under a URL that compressed ones were written over; directories have none."""
        there = {} if isinstance(self.truth, Directory) else self.truth.sizes()
        for raw in raw_forms(shards):
            if raw.basename in there:
                self.truth.remove(raw.basename)

    def tidy(self, shards: Iterable[ShardInfo]) -> None:
        """Remove what a killed writer left in directories, but for the files of these shards.

        Raises:
            ConfigError: A directory holds files named like those of shards that no writer left.
        """
        named = {name for shard in shards for name in stored_names(shard)}
        for directory in self._directories():
            tidy_directory(directory.path, named, is_copy=directory is not self.truth)

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
        if self._mirror is None:
            return
        there = self._mirror.sizes()
        files = [(compressed or raw, shard.hashes) for shard in shards for raw, compressed in shard.files]
        for file, kinds in files:
            path = self._mirror.path / file.basename
            is_same = kinds and there.get(file.basename) == file.bytes and has_first_hash(path, file, kinds)
            if not is_same:
                data = self.truth.get(file.basename)
                if len(data) != file.bytes:
                    raise ShardCorruptError(f"{file.basename} must have {file.bytes} bytes, but has {len(data)}")
                self._mirror.put(file.basename, data)
        if index is not None:
            self._mirror.put(INDEX_BASENAME, index)

    def published(self) -> tuple[DatasetIndex, bytes] | None:
        """The index and its text; None while there is none.

        Raises:
            IndexFormatError: It cannot be read.
        """
        try:
            text = self.truth.get(INDEX_BASENAME)
        except ObjectNotFoundError:
            return None
        return parse_index(text, INDEX_BASENAME), text

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only writer in each directory that is there.

        Raises:
            ConfigError: There is another writer.
        """
        with ExitStack() as held:
            for directory in self._directories():
                if directory.path.is_dir():
                    held.enter_context(instead_of_others(directory.path))
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
        self.truth.put(name, *pieces)
        self._progress.stored(num_bytes)

    def make_folder(self, name: str) -> None:
        """Make a folder in each directory."""
        for directory in self._directories():
            directory.make_folder(name)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder from each directory."""
        for directory in self._directories():
            directory.remove_folder(name)

    def undo(self) -> None:
        """Remove from the local directory what was put there, because the dataset will not be whole."""
        if self._own is not None:
            self._own.undo()

    def close(self) -> None:
        """Nothing more is put."""
        self._progress.close()

    def _directories(self) -> list[Directory]:
        return [place for place in (self.truth, self._mirror) if isinstance(place, Directory)]


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


def _remote_place(remote: str, options: Mapping[str, Any], retry: int) -> Place:
    path = local_path(remote)
    if path is None:
        prepare(remote)  # while this process has one thread
        return Bucket(remote, options, retry=retry)
    check_is_directory(path)
    return Directory(path)


def _refuse_published(place: Place, shown: str) -> None:
    # Its shards would be written over one by one while its index, or its records, still name them.
    for name, what, way_out in (
        (INDEX_BASENAME, "a dataset", ""),
        (record_name(0), "a dataset that is not finished", "mode='resume' to go on, "),
    ):
        try:
            place.get(name)
        except ObjectNotFoundError:
            continue
        raise ConfigError(
            f"{mask_url(shown)} holds {what}; choose another place, {way_out}or exist_ok=True to write over it"
        )


def _retract(place: Place) -> None:
    """Remove all that says there is a dataset. Its shards are written over."""
    place.remove(INDEX_BASENAME)
    place.remove(CONVERSION_PLAN)
    place.remove(PARTS_PLAN)
    for name in place.sizes(WRITING):
        if name == INDEX_BASENAME or is_shard_file(name) or record_number(name) is not None:
            place.remove(f"{WRITING}/{name}")
    place.remove_folder(WRITING)
