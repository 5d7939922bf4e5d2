"""Where a dataset is, as it was typed, and how its files get from there to this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError, ObjectNotFoundError
from lightning_streaming.files import join_under
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, parse_index
from lightning_streaming.storage import download, is_url, join_url, local_path, mask_url, read_bytes

RETRY = 4
"""Attempts to fetch a file, in total."""
TIMEOUT = 600.0
"""Seconds that each attempt may take: tools also fetch shards that no training would."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredDataset:
    """A directory, or a URL with what its store needs."""

    location: str = field(repr=False)
    """Path or URL of the dataset."""
    options: Mapping[str, Any] = field(repr=False)
    """Arguments of the store's filesystem; empty for a directory."""

    @property
    def directory(self) -> Path | None:
        """The directory; None on a store."""
        return local_path(self.location)

    @property
    def shown(self) -> str:
        """As it may be shown."""
        return mask_url(self.location)

    def url(self, basename: str) -> str:
        """Where one of its files is."""
        return join_url(self.location, basename)

    def path(self, basename: str) -> Path:
        """Where one of its files is, in a directory."""
        directory = self.directory
        assert directory is not None
        return join_under(directory, basename)

    def read_index_text(self) -> bytes:
        """The bytes of its index.

        Raises:
            ObjectNotFoundError: There is none; says which directories beneath have one.
            StorageError: The store does not give it.
        """
        if self.directory is None:
            return read_bytes(self.url(INDEX_BASENAME), self.options, retry=RETRY, timeout=TIMEOUT)
        try:
            return (self.directory / INDEX_BASENAME).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectNotFoundError(_no_index(self.directory)) from None

    def read_index(self) -> DatasetIndex:
        """Its index.

        Raises:
            IndexFormatError: It cannot be used.
            ObjectNotFoundError: There is none.
            StorageError: The store does not give it.
        """
        return parse_index(self.read_index_text(), mask_url(self.url(INDEX_BASENAME)))

    def fetch(self, file: FileInfo, destination: Path, check: Callable[[Path], None] | None = None) -> None:
        """Bring a file to this machine; its size is checked.

        Args:
            file: What the index says of it.
            destination: File to write; its directory is made.
            check: Looks at what arrived, and raises IntegrityError if it is not as promised.

        Raises:
            StorageError: As for :func:`~lightning_streaming.storage.download`.
        """
        destination.parent.mkdir(parents=True, exist_ok=True)
        download(
            self.url(file.basename),
            self.options,
            destination,
            expected_bytes=file.bytes,
            retry=RETRY if self.directory is None else 1,
            timeout=TIMEOUT,
            check=check,
        )


def find_dataset(location: str, options: Mapping[str, Any]) -> StoredDataset:
    """Understand what was typed: a directory or URL, or the index in it.

    Raises:
        ConfigError: Nothing was typed, or what no file is called.
    """
    start, question_mark, query = location.partition("?") if is_url(location) else (location, "", "")
    start = "." if start == INDEX_BASENAME else start.removesuffix(f"/{INDEX_BASENAME}")
    if not start:
        raise ConfigError("a dataset must be named by a directory or a URL, but the name is empty")
    if "\0" in start:
        raise ConfigError(f"a dataset must be named by a directory or a URL, but {start!r:.80} has a null character")
    directory = local_path(start)
    if directory is not None:
        return StoredDataset(location=str(directory), options={})
    return StoredDataset(location=start + question_mark + query, options=options)


def _no_index(directory: Path) -> str:
    if directory.is_file() and (directory.parent / INDEX_BASENAME).is_file():
        return f"{directory} is one file of a dataset; give its directory, {directory.parent}"
    if directory.is_file():
        return f"{directory} is a file, not the directory of a dataset; lightning-streaming convert makes one of it"
    if not directory.is_dir():
        return f"{directory} is not a directory; give the directory or the URL of a dataset"
    beneath = sorted(path.parent.name for path in directory.glob(f"*/{INDEX_BASENAME}"))
    hint = f"; there are datasets in {', '.join(beneath[:5])} beneath it" if beneath else ""
    return f"{directory} has no {INDEX_BASENAME}, so it is not a dataset{hint}"
