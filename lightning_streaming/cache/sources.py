"""The two places raw files come from: a directory that is read in place, and a remote that files are fetched from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.verify import check_hash, choose_hash, find_size, unpack
from lightning_streaming.errors import IntegrityError, ObjectNotFoundError, ShardCorruptError
from lightning_streaming.files import join_under, partial_path, remove_partials
from lightning_streaming.formats.compression import check_algorithm
from lightning_streaming.formats.index import INDEX_BASENAME, FileInfo, ShardInfo
from lightning_streaming.storage import download, join_url, mask_url, read_bytes

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class InPlaceSource:
    """A directory of this machine that is only ever read."""

    directory: Path
    """Where the dataset is."""
    config: CacheConfig
    """The stream it belongs to."""

    def read_index(self) -> bytes:
        """The text of the index.

        Raises:
            ObjectNotFoundError: There is none.
        """
        path = self.directory / INDEX_BASENAME
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise self._missing(path) from None

    def holds_raw(self, shard: ShardInfo) -> bool:
        """Whether a shard's raw files can be used where they are; False if they must be decompressed first.

        Raises:
            ObjectNotFoundError: A raw file does not exist, and no compressed one is recorded.
            ShardCorruptError: A raw file has the wrong size.
        """
        sizes = [self._size_if_sound(raw) for raw, _ in shard.files]
        if None in sizes and shard.compression is None:
            raw = shard.files[sizes.index(None)][0]
            raise self._missing(join_under(self.directory, raw.basename))
        return None not in sizes

    def check_raw(self, shard: ShardInfo) -> None:
        """Check raw files by hash if the user asked for one; there is no download at which it would be checked.

        Raises:
            ConfigError: The hash is not recorded.
            ShardCorruptError: A file has another.
        """
        if not self.config.validate_hash:
            return
        for raw, _ in shard.files:
            path = join_under(self.directory, raw.basename)
            try:
                check_hash(path, str(path), raw, choose_hash(raw, self.config.validate_hash))
            except IntegrityError as error:
                raise ShardCorruptError(f"{error}; it is read in place, so put it right there") from error

    def write_raw(self, raw: FileInfo, compressed: FileInfo | None, algorithm: str | None, destination: Path) -> None:
        """Decompress a file into another directory.

        Raises:
            ObjectNotFoundError: The compressed file does not exist.
            ShardCorruptError: It is not what the index promises.
        """
        assert compressed is not None  # otherwise holds_raw had either found the raw file or raised
        assert algorithm is not None
        path = join_under(self.directory, compressed.basename)
        if self._size_if_sound(compressed) is None:
            raise self._missing(path)
        modified = path.stat().st_mtime_ns
        try:
            check_hash(path, str(path), compressed, choose_hash(compressed, self.config.validate_hash))
            unpack(path, str(path), raw, algorithm, destination)
        except IntegrityError as error:
            raise ShardCorruptError(f"{error}; it is read in place, so put it right there") from error
        os.utime(destination, ns=(modified, modified))

    def is_current(self, path: Path, compressed: FileInfo | None) -> bool:
        """Whether ``path`` was decompressed from the compressed file as it is now.

        The raw file has the time of the compressed one. Without this, a dataset that is written again in the same place
        would be read in its old version wherever the sizes agree.
        """
        if compressed is None:
            return True
        source = join_under(self.directory, compressed.basename)
        return not source.exists() or source.stat().st_mtime_ns == path.stat().st_mtime_ns

    def _size_if_sound(self, file: FileInfo) -> int | None:
        path = join_under(self.directory, file.basename)
        size = find_size(path)
        if size not in (None, file.bytes):
            raise ShardCorruptError(
                f"the index promises {file.bytes} bytes of {path}, but it has {size}; "
                "it is read in place, so put it right there"
            )
        return size

    def _missing(self, path: Path) -> ObjectNotFoundError:
        return ObjectNotFoundError(
            f"{path} does not exist, and no remote was given to fetch it from; "
            f"{self.directory} is read in place, so correct the path or give a remote and a local directory"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSource:
    """A store or directory that files are fetched from, each checked when it arrives."""

    remote: str = field(repr=False)
    """URL or path of the dataset."""
    directory: Path
    """The cache directory, where compressed files are kept if the user wants that."""
    config: CacheConfig
    """The stream it belongs to."""

    def read_index(self) -> bytes:
        """The text of the index.

        Raises:
            StorageError: It could not be fetched.
        """
        config = self.config
        url = join_url(self.remote, INDEX_BASENAME)
        return read_bytes(url, config.storage_options, retry=config.download_retry, timeout=config.download_timeout)

    def write_raw(self, raw: FileInfo, compressed: FileInfo | None, algorithm: str | None, destination: Path) -> None:
        """Fetch a file, decompressing it if it is stored compressed.

        Must be called while holding the lock of its shard.

        Raises:
            IntegrityError: What arrives is not what the index promises, time after time.
            StorageError: It could not be fetched.
            ConfigError: The hash to check by is not recorded.
        """
        if compressed is None or algorithm is None:
            self._download(raw, destination, self._hash_check(raw))
            return
        check_algorithm(algorithm)
        check = self._hash_check(compressed)

        def accept(path: Path) -> None:
            check(path)
            unpack(path, self._shown(compressed), raw, algorithm, destination)

        kept = join_under(self.directory, compressed.basename)
        if not _is_accepted(kept, compressed, accept):
            self._download_compressed(compressed, kept, accept)

    def _download_compressed(self, file: FileInfo, kept: Path, accept: Callable[[Path], None]) -> None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(kept)
        arriving = partial_path(kept)
        try:
            self._download(file, arriving, accept)
            if self.config.keep_zip:
                os.replace(arriving, kept)
        finally:
            arriving.unlink(missing_ok=True)

    def _download(self, file: FileInfo, destination: Path, check: Callable[[Path], None]) -> None:
        download(
            join_url(self.remote, file.basename),
            self.config.storage_options,
            destination,
            expected_bytes=file.bytes,
            retry=self.config.download_retry,
            timeout=self.config.download_timeout,
            check=check,
        )

    def _hash_check(self, file: FileInfo) -> Callable[[Path], None]:
        name = choose_hash(file, self.config.validate_hash)
        return lambda path: check_hash(path, self._shown(file), file, name)

    def _shown(self, file: FileInfo) -> str:
        return mask_url(join_url(self.remote, file.basename))


def _is_accepted(path: Path, file: FileInfo, accept: Callable[[Path], None]) -> bool:
    """Whether the compressed file that an earlier run kept is there and sound; a damaged one is removed."""
    if find_size(path) == file.bytes:
        try:
            accept(path)
        except IntegrityError:
            _logger.warning("%s is damaged; it is removed and fetched again", path)
        else:
            return True
    path.unlink(missing_ok=True)
    return False
