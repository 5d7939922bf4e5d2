"""A directory or a bucket: where whole files are put, found and removed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from lightning_streaming.errors import ObjectNotFoundError
from lightning_streaming.files import appears_whole
from lightning_streaming.storage import join_url, read_bytes
from lightning_streaming.storage.listing import file_sizes
from lightning_streaming.storage.transfer import remove, upload_bytes
from lightning_streaming.writing.system_errors import system_errors

_READ_SECONDS = 600.0
"""For one file, which may have 4 GiB."""


class Place(Protocol):
    """Names are relative to the place, with forward slashes. Whatever it does may raise StorageError."""

    def put(self, name: str, *pieces: bytes | memoryview) -> None:
        """Store a file, whole or not at all, in place of one of this name."""
        ...

    def get(self, name: str) -> bytes:
        """Read a file.

        Raises:
            ObjectNotFoundError: There is none.
        """
        ...

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Name to bytes, of the files directly in a folder, which need not exist."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def make_folder(self, name: str) -> None:
        """Make a folder, where a place has them."""
        ...

    def remove_folder(self, name: str) -> None:
        """Remove a folder, unless there is something in it."""
        ...


class Directory:
    """A directory of this machine."""

    def __init__(self, path: Path) -> None:
        """Nothing is touched yet."""
        self.path = path
        self._was_there = path.exists()
        self._written: dict[str, int] = {}

    def put(self, name: str, *pieces: bytes | memoryview) -> None:
        path = self.path / name
        with system_errors(f"write {path}", "make room there, or choose another place"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with appears_whole(path) as partial, partial.open("wb") as file:
                self._written[name] = os.fstat(file.fileno()).st_ino
                file.writelines(pieces)

    def get(self, name: str) -> bytes:
        with system_errors(f"read {self.path / name}"):
            try:
                return (self.path / name).read_bytes()
            except FileNotFoundError:
                raise ObjectNotFoundError(f"{self.path / name} is not there") from None

    @system_errors("list a directory")
    def sizes(self, folder: str = "") -> dict[str, int]:
        path = self.path / folder
        if not path.is_dir():
            return {}
        return {entry.name: entry.stat().st_size for entry in sorted(path.iterdir()) if entry.is_file()}

    @system_errors("remove a file")
    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    @system_errors("make a directory")
    def make_folder(self, name: str) -> None:
        (self.path / name).mkdir(parents=True, exist_ok=True)

    @system_errors("remove a directory")
    def remove_folder(self, name: str) -> None:
        path = self.path / name
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()

    def undo(self) -> None:
        """Remove what was put, and the directory, if it was not there before and nothing else is in it.

        A file that another program put in place of one of these stays.
        """
        for name, inode in sorted(self._written.items()):
            if self._inode(name) == inode:
                self.remove(name)
        if not self._was_there:
            self.remove_folder("")

    @system_errors("look at a file")
    def _inode(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_ino
        except FileNotFoundError:
            return None


class Bucket:
    """A URL."""

    def __init__(self, url: str, options: Mapping[str, Any], *, retry: int) -> None:
        """Nothing is asked yet.

        Args:
            url: URL of the directory.
            options: Arguments for its filesystem.
            retry: Attempts in total for each transfer.
        """
        self._url = url
        self._options = options
        self._retry = retry

    def put(self, name: str, *pieces: bytes | memoryview) -> None:
        # Joining one piece that is bytes copies nothing.
        upload_bytes(b"".join(pieces), join_url(self._url, name), self._options, retry=self._retry)

    def get(self, name: str) -> bytes:
        return read_bytes(join_url(self._url, name), self._options, retry=self._retry, timeout=_READ_SECONDS)

    def sizes(self, folder: str = "") -> dict[str, int]:
        return file_sizes(join_url(self._url, folder), self._options, retry=self._retry)

    def remove(self, name: str) -> None:
        remove(join_url(self._url, name), self._options, retry=self._retry)

    def make_folder(self, name: str) -> None:
        """Buckets have none."""

    def remove_folder(self, name: str) -> None:
        """Buckets have none."""
