"""Where a dataset's files go: a directory, a bucket, or both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_streaming.errors import ConfigError, ObjectNotFoundError
from lightning_streaming.files import appears_whole
from lightning_streaming.formats.index import INDEX_BASENAME, parse_index
from lightning_streaming.storage import join_url, local_path, mask_url, read_bytes, upload


class Destination:
    """Takes whole files, one after the other.

    Nothing is removed that it did not write, but for a dataset that it was allowed to replace.
    """

    def __init__(
        self,
        out: str | Path | tuple[str, str],
        *,
        keep_local: bool = False,
        exist_ok: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the local directory ready.

        Args:
            out: A directory; or a URL; or (directory, URL or second directory) for both.
            keep_local: Whether the directory of such a pair keeps its files after their upload.
            exist_ok: Whether a dataset that lies in the directory may be removed, and one under the URL written over.
            storage_options: Arguments for the filesystem of the URL.

        Raises:
            ConfigError: ``out`` is not one of these, nothing serves its URL, there is a dataset under it, or the
                directory holds what may not be removed.
            StorageError: The store does not say whether there is a dataset under the URL.
            MissingDependencyError: The package that serves the URL is not installed.
        """
        directory, self._remote = parse_out(out)
        self._options = dict(storage_options or {})
        if self._remote is not None and not exist_ok:
            _refuse_published(self._remote, self._options)
        self._keep_local = keep_local or self._remote is None
        self._written: set[Path] = set()
        self._temporary: TemporaryDirectory[str] | None = None
        if directory is None:
            if keep_local:
                raise ConfigError("keep_local=True needs a directory to keep files in; write out=(directory, URL)")
            self._temporary = TemporaryDirectory(prefix="lightning_streaming_")
            directory = Path(self._temporary.name)
        self._directory = directory
        self._found_directory = directory.exists()
        prepare_directory(directory, exist_ok=exist_ok)

    def put(self, basename: str, data: bytes) -> None:
        """Write a file, whole or not at all, and upload it.

        Raises:
            StorageError: The upload failed.
        """
        path = self._directory / basename
        with appears_whole(path) as partial:
            partial.write_bytes(data)
        self._written.add(path)
        if self._remote is not None:
            upload(path, join_url(self._remote, basename), self._options)
            if not self._keep_local:
                self._remove(path)

    def close(self) -> None:
        """Everything was put: remove the local directory if nothing is to be kept there."""
        if not self._keep_local:
            self._remove_directory()

    def abandon(self) -> None:
        """Remove from the local directory what was put there, because the dataset will not be whole."""
        for path in sorted(self._written):
            self._remove(path)
        if self._temporary or not self._found_directory:
            self._remove_directory()

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._written.discard(path)

    def _remove_directory(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
        elif not any(self._directory.iterdir()):
            self._directory.rmdir()


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


def _refuse_published(remote: str, options: Mapping[str, Any]) -> None:
    # Its shards would be written over one by one while its index still names them.
    try:
        read_bytes(join_url(remote, INDEX_BASENAME), options, retry=2, timeout=60.0)
    except ObjectNotFoundError:
        return
    raise ConfigError(f"{mask_url(remote)} holds a dataset; choose another place, or exist_ok=True to write over it")


def prepare_directory(directory: Path, *, exist_ok: bool) -> None:
    """Make an empty directory, out of a missing one or, with ``exist_ok``, out of one that holds a dataset.

    Only the files that the dataset's index names, and the index, are removed; the index first, so that no half
    dataset looks whole. If there is anything else, nothing is removed.

    Raises:
        ConfigError: The directory is a file, or holds something that may not be removed.
        IndexFormatError: The directory holds an index that cannot be read.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} must be a directory, but is a file")
    directory.mkdir(parents=True, exist_ok=True)
    found = sorted(directory.iterdir())
    if found and not exist_ok:
        raise ConfigError(f"{directory} must be empty, but holds {found[0].name}; exist_ok=True replaces a dataset")
    named = dict.fromkeys(_names_of_dataset(directory))
    foreign = [path.name for path in found if path.name not in named or not path.is_file()]
    if foreign:
        raise ConfigError(
            f"{directory} holds {foreign[0]}, which no index names as part of a dataset; remove it, or choose another "
            "directory"
        )
    for name in named:  # in order, the index first
        (directory / name).unlink(missing_ok=True)


def _names_of_dataset(directory: Path) -> list[str]:
    """The index, then the files directly in ``directory`` that it names; none if there is no index."""
    path = directory / INDEX_BASENAME
    if not path.is_file():
        return []
    pairs = [pair for shard in parse_index(path.read_bytes(), str(path)).shards for pair in shard.files]
    basenames = [file.basename for pair in pairs for file in pair if file is not None]
    return [INDEX_BASENAME, *(name for name in basenames if "/" not in name)]


def _same_place(directory: Path, remote: str) -> bool:
    path = local_path(remote)
    return path is not None and path.resolve() == directory.resolve()
