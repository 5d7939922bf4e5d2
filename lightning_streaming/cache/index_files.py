"""The files of an index in a cache directory: itself, its parsed form, and the lock under which both are made.

A large index is parsed once; the parsed form, under the hash of the index that it was made of, is mapped by every
process. One process of a node fetches and parses an index, while others wait for it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from lightning_streaming.cache import shared_files
from lightning_streaming.cache.config import PARSED_INDEX_PREFIX, STAGING_BASENAME
from lightning_streaming.cache.file_states import StagingFile, claim, is_written, staging_path, was_left
from lightning_streaming.cache.index_form import IndexForm, identity_of, note_identity, read_form, write_form
from lightning_streaming.cache.usage import staging_files
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import PARTIAL_SUFFIX, Identity, open_regular
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, parse_index, read_index

LARGE_INDEX_BYTES = 2**20
"""An index from this size on has a parsed form beside it; a smaller one is parsed whenever it is needed."""
_BLOCK_BYTES = 2**20
_DIGEST_DIGITS = 16
_SCRATCH_SUFFIX = ".scratch"

_logger = package_logger(__name__)


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """An index that was read from a file."""

    index: DatasetIndex
    digest: str
    """SHA-256 of its text."""
    text: bytes | None = None
    """The text itself where it is small; a large one is looked for in a parsed form."""
    is_new: bool = False
    """Whether a parsed form was made just now, so that there may be older ones."""


class IndexForms:
    """Reads indexes, and keeps the parsed forms of large ones in one directory.

    A form that is mapped is locked, shared, so that nobody removes it.

    Args:
        directory: Where they are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(
        self, path: Path, *, shown: str | None = None, scratch: Path | None = None, likely: str | None = None
    ) -> FoundIndex:
        """Read an index from a file, or from its parsed form if that is there.

        Args:
            path: The file.
            shown: What to call it in errors; None for its path.
            scratch: Where a parsed form may be written that is missing; None to keep none.
            likely: The digest that the file had when it was last read; None if that is not known.

        Raises:
            IndexFormatError: It cannot be used.
            FileNotFoundError: There is no such file.
        """
        shown = shown or str(path)
        with open(path, "rb", opener=open_regular) as file:
            identity = Identity.of(file.fileno())
            if identity.size < LARGE_INDEX_BYTES:
                text = file.read()
                return FoundIndex(parse_index(text, shown), hashlib.sha256(text).hexdigest(), text)
            form = self.find(identity, likely)
            if form is not None:
                return FoundIndex(form.index, form.digest)
            digest = _sha256(file)
            form = self.open(digest)
            if form is not None:
                self._note(digest, identity)
                return FoundIndex(form.index, digest)
            file.seek(0)
            index = read_index(file.read, shown)
            is_steady = Identity.of(file.fileno()) == identity  # nobody wrote to it meanwhile
        if scratch is not None and is_steady:
            form = self._store(index, digest, identity, scratch)
        return FoundIndex(index, digest) if form is None else FoundIndex(form.index, digest, is_new=True)

    def find(self, identity: Identity, likely: str | None) -> IndexForm | None:
        """The form of an index file that has not changed since it was made; None if there is none.

        Args:
            identity: Of the index file.
            likely: The digest it had last, which saves looking through a directory of many shards.
        """
        first = [] if likely is None else [self._path(likely)]
        for path in chain(first, self._paths()):
            with _opened(path) as file:
                if file is not None and identity_of(file) == identity:
                    return read_form(file)
        return None

    def open(self, digest: str) -> IndexForm | None:
        """The form of the index with this SHA-256; None if there is none."""
        with _opened(self._path(digest)) as file:
            form = None if file is None else read_form(file)
        return form if form is not None and form.digest == digest else None

    def _store(self, index: DatasetIndex, digest: str, identity: Identity, scratch: Path) -> IndexForm | None:
        """Write a form, and map it in place of what was in memory; None if that is not possible here.

        Args:
            index: What was read.
            digest: SHA-256 of the index file.
            identity: Of the index file.
            scratch: A file in the directory that nobody else writes.
        """
        try:
            with open(scratch, "w+b", opener=shared_files.open_no_link) as file:
                write_form(file, index, digest, identity)
                shared_files.adopt_file(file.fileno(), self._directory)
            os.replace(scratch, self._path(digest))
        except OSError as error:
            _logger.debug("no parsed index is kept in %s: %s", self._directory, error)
            scratch.unlink(missing_ok=True)
            return None
        return self.open(digest)

    def _note(self, digest: str, identity: Identity) -> None:
        """Note that the same index is in another file now, or was touched."""
        with suppress(OSError), open(self._path(digest), "r+b", opener=shared_files.open_no_link) as file:
            note_identity(file, identity)

    def sweep(self, keep: str) -> None:
        """Remove the forms that nobody uses, but for one.

        Args:
            keep: The digest of that one.
        """
        for path in self._paths():
            if path != self._path(keep):
                remove_unlocked(path)

    def _path(self, digest: str) -> Path:
        return self._directory / form_name(digest)

    def _paths(self) -> Iterator[Path]:
        length = len(PARSED_INDEX_PREFIX) + _DIGEST_DIGITS
        with suppress(OSError), os.scandir(self._directory) as found:
            for entry in found:
                if entry.name.startswith(PARSED_INDEX_PREFIX) and len(entry.name) == length:
                    yield self._directory / entry.name


def _sha256(file: BinaryIO) -> str:
    hasher = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        hasher.update(block)
    return hasher.hexdigest()


def remove_unlocked(path: Path) -> bool:
    """Remove a parsed form unless somebody has it mapped; gives whether it was removed."""
    with suppress(OSError), open(path, "rb", opener=open_regular) as file:
        if shared_files.try_lock(file.fileno(), shared=False):
            path.unlink()
            return True
    return False


def form_name(digest: str) -> str:
    """The name of the parsed form of the index with this SHA-256."""
    return f"{PARSED_INDEX_PREFIX}{digest[:_DIGEST_DIGITS]}"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | None]:
    """A form, open and locked; None if there is none. A map of it keeps the lock after it is closed."""
    try:
        file = os.fdopen(open_regular(path, os.O_RDONLY), "rb")
    except OSError:
        yield None
        return
    with file:
        with suppress(shared_files.LocksUnsupportedError):
            shared_files.try_lock(file.fileno(), shared=True)
        yield file


@dataclass(frozen=True, slots=True)
class IndexLock:
    """What the holder of an index's lock may write to."""

    arriving: Path
    """A file for an index on its way."""
    scratch: Path
    """A file for anything else that is then renamed."""

    def clear(self) -> None:
        """Remove both."""
        self.arriving.unlink(missing_ok=True)
        self.scratch.unlink(missing_ok=True)


@contextmanager
def locked_index(directory: Path, stall_seconds: float) -> Iterator[IndexLock]:
    """Hold the lock of a directory's index. Files that an earlier holder left are gone by then.

    Args:
        directory: The cache directory, which is there.
        stall_seconds: How long to wait for a holder who shows no sign of life.

    Raises:
        LockTimeoutError: Another process holds it, and has shown no sign of life for too long.
        StorageError: The directory may not be written to.
    """
    staging = _claimed(directory, stall_seconds)
    name = f"{PARSED_INDEX_PREFIX}{staging.path.name}"
    lock = IndexLock(directory / name, directory / f"{name}{_SCRATCH_SUFFIX}")
    try:
        lock.clear()
        with staging.beating():  # also while its download waits for others of this process, or a large index is parsed
            yield lock
    finally:
        lock.clear()
        if staging.is_unpublished():
            staging.path.unlink(missing_ok=True)
        staging.close()


def _claimed(directory: Path, seconds: float) -> StagingFile:
    stall = shared_files.StallTimeout(seconds)
    for _ in shared_files.pauses():
        staging = claim(directory, INDEX_BASENAME)
        if staging is not None:
            return staging
        stall.check([staging_path(directory, INDEX_BASENAME)])
    raise AssertionError("there is no end to that")


def being_fetched(directory: Path) -> Path | None:
    """What another user, or machine, holds who is at the index of a directory just now; None if nobody is."""
    ending = staging_path(directory, INDEX_BASENAME).name.rpartition("-")[2]
    paths = (Path(entry.path) for entry in staging_files(directory) if entry.name.endswith(f"-{ending}"))
    return next(filter(is_written, paths), None)


def staging_name_of(name: str) -> str | None:
    """Whose lock says that a file is in use that an index is fetched into, or a parsed form is written to.

    Args:
        name: Of a file beside an index.

    Returns:
        The name of the staging file that is locked; None if it is not such a file.
    """
    staging = name.removeprefix(PARSED_INDEX_PREFIX).removesuffix(_SCRATCH_SUFFIX)
    return staging if staging.endswith(PARTIAL_SUFFIX) else None


def is_left_over(path: Path) -> bool:
    """Whether the writer of such a file died, as far as that can be told here; one of another machine after a day."""
    name = staging_name_of(path.name)
    if name is None:
        return False
    lock = path.parent / STAGING_BASENAME / name
    try:
        if lock.exists():
            return not is_written(lock)
        descriptor = shared_files.open_to_lock(path)
    except OSError:  # gone, or not ours to read
        return False
    try:
        return was_left(name, descriptor)
    finally:
        shared_files.unlock_and_close(descriptor)


def sweep_left_overs(directory: Path) -> None:
    """Remove what dead writers left of indexes: those of other users, and of the time before this machine started."""
    with suppress(OSError), os.scandir(directory) as found:
        for entry in found:
            if entry.name.startswith(PARSED_INDEX_PREFIX) and is_left_over(Path(entry.path)):
                with suppress(OSError):  # another user's
                    Path(entry.path).unlink()
