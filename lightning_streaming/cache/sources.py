"""The two places raw files come from: a directory that is read in place, and a remote that files are fetched from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.marks import OwnTimes, mark_of_original, verified_mark
from lightning_streaming.cache.verify import check_hash, choose_hash, find_size, unpack
from lightning_streaming.errors import IntegrityError, ObjectNotFoundError, ShardCorruptError
from lightning_streaming.files import join_under
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.storage import download, join_url, mask_url, read_range


@dataclass(frozen=True, kw_only=True, slots=True)
class InPlaceSource:
    """A directory of this machine that is only ever read."""

    directory: Path
    """Where the dataset is."""
    config: CacheConfig
    """The stream it belongs to."""

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

    def unpack_raw(self, raw: FileInfo, compressed: FileInfo, algorithm: str, destination: Path) -> int:
        """Decompress a file into another directory.

        Returns:
            The mark of what was made: another one when the compressed file has changed.

        Raises:
            ObjectNotFoundError: The compressed file does not exist.
            ShardCorruptError: It is not what the index promises.
            DiskFullError: There is no room for the raw file.
        """
        path = join_under(self.directory, compressed.basename)
        if self._size_if_sound(compressed) is None:
            raise self._missing(path)
        found = path.stat()
        try:
            check_hash(path, str(path), compressed, choose_hash(compressed, self.config.validate_hash))
            unpack(path, str(path), raw, algorithm, destination)
        except IntegrityError as error:
            raise ShardCorruptError(f"{error}; it is read in place, so put it right there") from error
        return mark_of_original(found.st_mtime_ns, found.st_size)

    def marks_right(self, modified: int, own: OwnTimes, compressed: FileInfo | None) -> bool:
        """Whether a raw file of this time was decompressed from the compressed file as it is now.

        Without this, a dataset that is written again in the same place would be read in its old version wherever the
        sizes agree.
        """
        if compressed is None:
            return own.include(modified)
        try:
            found = join_under(self.directory, compressed.basename).stat()
        except FileNotFoundError:
            return own.include(modified)
        return modified == mark_of_original(found.st_mtime_ns, found.st_size)

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
            f"{path} does not exist; the dataset at {self.directory} is read in place, so put the file there, or, if "
            "this directory is to be filled from elsewhere, give that as remote and this as local"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSource:
    """A store or directory that files are fetched from, each checked when it arrives."""

    remote: str = field(repr=False)
    """URL or path of the dataset."""
    config: CacheConfig
    """The stream it belongs to."""

    def fetch(self, file: FileInfo, destination: Path, accept: Callable[[Path], None]) -> None:
        """Fetch a file into one that is there, and check it by size, by hash and by ``accept``.

        Raises:
            IntegrityError: What arrives is not what the index promises, time after time.
            DiskFullError: There is no room for it.
            StorageError: It could not be fetched.
            ConfigError: The hash to check by is not recorded.
        """
        name = self._hash_name(file)

        def check(path: Path) -> None:
            check_hash(path, self.shown(file), file, name)
            accept(path)

        download(
            join_url(self.remote, file.basename),
            self.config.storage_options,
            destination,
            expected_bytes=file.bytes,
            retry=self.config.attempts,
            timeout=self.config.download_timeout,
            check=check,
        )

    def read_bytes(self, file: FileInfo, start: int, stop: int) -> bytes:
        """Fetch some bytes of a file.

        Raises:
            StorageError: They could not be fetched.
        """
        config = self.config
        url = join_url(self.remote, file.basename)
        retry, timeout = config.attempts, config.download_timeout
        return read_range(url, config.storage_options, start, stop, retry=retry, timeout=timeout)

    def check(self, file: FileInfo, path: Path) -> None:
        """Compare a file that is here with its recorded hash, if there is one.

        Raises:
            IntegrityError: They differ.
            ConfigError: The hash to check by is not recorded.
        """
        check_hash(path, str(path), file, self._hash_name(file))

    def marks_right(self, modified: int, own: OwnTimes, compressed: FileInfo | None) -> bool:  # noqa: ARG002
        """Whether a file of this time was checked before, by the index that we read, and is unchanged."""
        return modified in (own.mark, self.verified_mark(own))

    def verified_mark(self, own: OwnTimes) -> int:
        """The time of a file that is right, but was put there by someone else."""
        assert own.mark is not None, "the directory of a remote has one"
        return verified_mark(own.mark)

    def shown(self, file: FileInfo) -> str:
        """What to call a file in an error."""
        return mask_url(join_url(self.remote, file.basename))

    def _hash_name(self, file: FileInfo) -> str | None:
        return choose_hash(file, self.config.validate_hash)
