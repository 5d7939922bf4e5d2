"""Parsed forms of large indexes in a cache directory, each under the hash of the index it was made of."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from lightning_streaming.cache.layout import PARSED_INDEX_PREFIX
from lightning_streaming.cache.locks import LocksUnsupportedError, try_lock
from lightning_streaming.cache.permissions import adopt_file
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.formats.index_form import (
    Identity,
    IndexForm,
    identity_of,
    note_identity,
    read_form,
    write_form,
)

_logger = logging.getLogger(__name__)
_DIGEST_DIGITS = 16


class IndexForms:
    """The parsed forms of one directory. A form that is mapped is locked, shared, so that nobody removes it.

    Args:
        directory: Where they are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

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

    def store(self, index: DatasetIndex, digest: str, identity: Identity, scratch: Path) -> IndexForm | None:
        """Write a form, and map it in place of what was in memory; None if that is not possible here.

        Args:
            index: What was read.
            digest: SHA-256 of the index file.
            identity: Of the index file.
            scratch: A file in the directory that nobody else writes.
        """
        try:
            with scratch.open("w+b") as file:
                write_form(file, index, digest, identity)
                adopt_file(file.fileno(), self._directory)
            os.replace(scratch, self._path(digest))
        except OSError as error:
            _logger.debug("no parsed index is kept in %s: %s", self._directory, error)
            scratch.unlink(missing_ok=True)
            return None
        return self.open(digest)

    def note(self, digest: str, identity: Identity) -> None:
        """Note that the same index is in another file now, or was touched."""
        with suppress(OSError), self._path(digest).open("r+b") as file:
            note_identity(file, identity)

    def sweep(self, keep: str) -> None:
        """Remove the forms that nobody uses, but for one.

        Args:
            keep: The digest of that one.
        """
        for path in self._paths():
            if path == self._path(keep):
                continue
            with suppress(OSError), path.open("rb") as file:
                if try_lock(file.fileno(), shared=False):
                    path.unlink()

    def _path(self, digest: str) -> Path:
        return self._directory / form_name(digest)

    def _paths(self) -> Iterator[Path]:
        length = len(PARSED_INDEX_PREFIX) + _DIGEST_DIGITS
        with suppress(OSError), os.scandir(self._directory) as found:
            for entry in found:
                if entry.name.startswith(PARSED_INDEX_PREFIX) and len(entry.name) == length:
                    yield self._directory / entry.name


def form_name(digest: str) -> str:
    """The name of the parsed form of the index with this SHA-256."""
    return f"{PARSED_INDEX_PREFIX}{digest[:_DIGEST_DIGITS]}"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | None]:
    """A form, open and locked; None if there is none. A map of it keeps the lock after it is closed."""
    try:
        file = path.open("rb")
    except OSError:
        yield None
        return
    with file:
        with suppress(LocksUnsupportedError):
            try_lock(file.fileno(), shared=True)
        yield file
