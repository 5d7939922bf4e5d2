"""Where a source was said to be, and where it can be read: of a URL, a copy on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.storage import download, local_path, mask_url

_DOWNLOAD_SECONDS = 24 * 3600.0
"""For one attempt at a source that is a URL; it may be any size."""


class Location(NamedTuple):
    """Where a source is."""

    path: str
    """On this machine."""
    name: str
    """What it is called to people."""

    def shown_in(self, words: str) -> str:
        """Words that name the source as people know it."""
        return words.replace(self.path, self.name)


@contextmanager
def local_source(location: str, options: Mapping[str, Any]) -> Iterator[Location]:
    """The source on this machine; of a URL a copy, which is removed again, and which no error names.

    Args:
        location: Path, pattern, or the URL of one file.
        options: Arguments of the filesystem of the URL.

    Raises:
        ConfigError: The URL names no file.
        StorageError: It could not be fetched.
    """
    here = local_path(location)
    if here is not None:
        yield Location(str(here), str(here))
        return
    name = PurePosixPath(urlsplit(location).path).name
    if not name:
        raise ConfigError(f"a SOURCE that is a URL must be one file, but got {mask_url(location)}")
    with TemporaryDirectory(prefix="lightning_streaming_") as folder:
        copy = Location(str(Path(folder, "source", name)), mask_url(location))
        Path(copy.path).parent.mkdir()
        download(location, options, Path(copy.path), expected_bytes=None, retry=5, timeout=_DOWNLOAD_SECONDS)
        try:
            yield copy
        except StreamingError as error:
            raise type(error)(copy.shown_in(str(error))) from error
