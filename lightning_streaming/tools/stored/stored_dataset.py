"""Where a dataset is, as it was typed; how its files get from there, checked; what its index adds up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.config import other_format_at, way_to_an_index
from lightning_streaming.cache.sources import check_hash, find_size, unpack
from lightning_streaming.errors import ConfigError, FormatError, IndexFormatError, IntegrityError, ObjectNotFoundError
from lightning_streaming.files import join_under
from lightning_streaming.formats.hashing import hash_names
from lightning_streaming.formats.index import (
    INDEX_BASENAME,
    DatasetIndex,
    FileInfo,
    ShardInfo,
    parse_index,
)
from lightning_streaming.storage import Location, is_url, local_path, mask_url
from lightning_streaming.writing.destination import is_shard_file, whole_name

_ATTEMPTS, _TIMEOUT = 4, 600.0
"""Much, as tools also fetch shards that no training would."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredDataset:
    """A directory, or a URL with what its store needs; of a dataset, or of data of another format."""

    location: str = field(repr=False)
    """Path or URL of the dataset."""
    options: Mapping[str, Any] = field(repr=False)
    """Arguments of the store's filesystem; empty for a directory."""
    format: str | None = None
    """What lies there, if it has no index of ours: one of ``OTHER_FORMATS``."""
    block_length: int | None = None
    """Tokens of a sample, where the format has no other borders."""
    attempts: int = _ATTEMPTS
    """At each transfer from or to a store, in total."""
    timeout: float = _TIMEOUT
    """Seconds that each attempt is given, of a read without a byte arriving."""

    @property
    def directory(self) -> Path | None:
        """The directory; None on a store."""
        return local_path(self.location)

    @property
    def shown(self) -> str:
        """As it may be shown."""
        return mask_url(self.location)

    @property
    def at(self) -> Location:
        """Where it is; ``dataset.at / name`` is one of its files."""
        return Location(self.location, self.options, self.attempts if self.directory is None else 1, self.timeout)

    def path(self, basename: str) -> Path:
        """Where one of its files is, in a directory."""
        directory = self.directory
        assert directory is not None
        return join_under(directory, basename)

    def cache(self, local: Path | None = None) -> ShardCache:
        """What makes its shards present on this node, as for a run that reads it.

        Args:
            local: Where to keep what that takes, and what was found of the data; None for the place of every run.
        """
        config = CacheConfig(
            name=self.shown,
            remote=self.location,
            local=local,
            storage_options=self.options,
            download_retry=self.attempts - 1,
            format=self.format,
            block_length=self.block_length,
        )
        cache = ShardCache(replace(config, download_timeout=min(self.timeout, config.download_timeout)))
        cache.label = self.shown
        return cache

    def read_index_text(self) -> bytes:
        """The bytes of its index.

        Raises:
            ObjectNotFoundError: There is none; says which directories beneath have one.
            StorageError: The store does not give it.
        """
        if self.directory is None:
            return (self.at / INDEX_BASENAME).read()
        try:
            return (self.directory / INDEX_BASENAME).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise _no_index(self.directory) from None

    def read_index(self) -> DatasetIndex:
        """Its index.

        Raises:
            IndexFormatError: It cannot be used.
            ObjectNotFoundError: There is none.
            StorageError: The store does not give it.
        """
        if self.format is not None:
            return self.cache().read_index()
        return parse_index(self.read_index_text(), str(self.at / INDEX_BASENAME))

    def fetch(self, file: FileInfo, destination: Path, *, check: bool = False) -> None:
        """Bring a file to this machine, with the size that its index promises.

        Args:
            file: What the index says of it.
            destination: File to write; its directory is made.
            check: Whether it must have all the recorded hashes too.

        Raises:
            IntegrityError: Time after time another one arrives.
            StorageError: It could not be fetched.
        """
        destination.parent.mkdir(parents=True, exist_ok=True)
        at = self.at / file.basename
        at.download(destination, size=file.bytes, check=partial(check_hashes, file) if check else None)

    def check(self, file: FileInfo) -> None:
        """Compare a file, in a directory, with its size and all of its recorded hashes.

        Raises:
            IntegrityError: One differs, or there is no such file.
        """
        size = self.size_of(file.basename)
        if size is None:
            raise IntegrityError("the file is missing")
        if size != file.bytes:
            raise IntegrityError(f"must have {file.bytes:,} bytes, but has {size:,}")
        check_hashes(file, self.path(file.basename))

    def size_of(self, basename: str) -> int | None:
        """How many bytes one of its files has; None if there is no such file."""
        if self.directory is not None:
            return find_size(self.path(basename))
        return (self.at / basename).size()


def find_dataset(
    location: str, options: Mapping[str, Any], shard_format: str | None = None, block_length: int | None = None
) -> StoredDataset:
    """Understand what was typed: a directory or URL, or the index in it.

    Args:
        location: What was typed.
        options: Arguments of the store's filesystem.
        shard_format: What lies there, if it is to be read without an index of ours.
        block_length: Tokens of a sample of that.

    Raises:
        ConfigError: Nothing was typed, or what no file is called; or there is a block length of no format.
    """
    if block_length is not None and shard_format is None:
        raise ConfigError(
            "--block-length cuts tokens of another format into samples",
            hint="give --format with it",
            option="--block-length",
        )
    start, question_mark, query = location.partition("?") if is_url(location) else (location, "", "")
    start = "." if start == INDEX_BASENAME else start.removesuffix(f"/{INDEX_BASENAME}")
    if not start:
        raise ConfigError("a dataset must be named by a directory or a URL, but the name is empty", option="DATASET")
    if "\0" in start:
        raise ConfigError(
            f"a dataset must be named by a directory or a URL, but {start!r:.80} has a null character", option="DATASET"
        )
    directory = local_path(start)
    if directory is not None:
        return StoredDataset(location=str(directory), options={}, format=shard_format, block_length=block_length)
    url = start + question_mark + query
    return StoredDataset(location=url, options=options, format=shard_format, block_length=block_length)


def own_index(text: bytes) -> DatasetIndex | None:
    """What an ``index.json`` says; None if it is another library's."""
    try:
        return parse_index(text, INDEX_BASENAME)
    except FormatError:
        return None


def _no_index(directory: Path) -> ObjectNotFoundError:
    found = other_format_at(directory)
    read_as = None if found is None else f"files like {found[1]} are read with --format {found[0]}"
    if directory.is_file() and (directory.parent / INDEX_BASENAME).is_file():
        words, hint = "is one file of a dataset", f"give its directory, {directory.parent}"
    elif directory.is_file():
        words, hint = "is a file, not the directory of a dataset", "lightning-streaming convert makes one of it"
        hint = f"{hint}; {read_as}" if read_as else hint
    elif not directory.is_dir():
        words, hint = "is not a directory", "give the directory or the URL of a dataset"
    else:
        words = f"has no {INDEX_BASENAME}, so it is not a dataset"
        beneath = sorted(path.parent.name for path in directory.glob(f"*/{INDEX_BASENAME}"))
        hint = read_as or way_to_an_index(directory) or "lightning-streaming convert makes one of other files"
        hint = f"there are datasets in {', '.join(beneath[:5])} beneath it" if beneath else hint
    return ObjectNotFoundError(f"{directory} {words}", hint=hint, path=str(directory))


class Column(NamedTuple):
    """One column, as the index describes it."""

    name: str
    encoding: str
    bytes: int | None
    """Size of each value; None where it varies or the format does not say."""


def columns_of(schema: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns of a shard, from what the index says of it."""
    if "columns" in schema:
        return tuple(Column(name, encoding, None) for name, encoding in sorted(schema["columns"].items()))
    names, encodings = schema["column_names"], schema["column_encodings"]
    sizes = schema.get("column_sizes", (None,) * len(names))
    return tuple(map(Column, names, encodings, sizes))


def add_up(index: DatasetIndex) -> dict[str, int]:
    """What reports say of all shards: samples, shards, and bytes of their files, uncompressed and as stored."""
    files = [pair for shard in index.shards for pair in shard.files]
    return {
        "samples": index.num_samples,
        "shards": len(index.shards),
        "raw_bytes": sum(raw.bytes for raw, _ in files),
        "stored_bytes": sum({(stored or raw).basename: (stored or raw).bytes for raw, stored in files}.values()),
    }


def check_hashes(file: FileInfo, path: Path) -> None:
    """Compare a file with all of its recorded hashes.

    Raises:
        IntegrityError: One differs.
    """
    for name in sorted(file.hashes):
        check_hash(path, file.basename, file, name)


def unpack_into(directory: Path, path: Path, raw: FileInfo, compressed: FileInfo, shard: ShardInfo) -> Path:
    """Decompress a file of a shard, and say where it is now, under its raw name in a directory.

    Raises:
        IntegrityError: It is damaged.
    """
    assert shard.compression is not None
    destination = join_under(directory, raw.basename)
    destination.parent.mkdir(parents=True, exist_ok=True)
    unpack(path, compressed.basename, raw, shard.compression, destination)
    return destination


def raw_directory(place: StoredDataset, shard: ShardInfo, scratch: Path) -> Path:
    """Make the raw files of a shard present.

    Files of a directory are used where they are, raw or compressed; what is on a store is fetched. A raw file is not
    used where there is a compressed one: it may be of another dataset that was there.

    Args:
        place: Where the dataset is.
        shard: An entry of its index.
        scratch: An empty directory for what is fetched or decompressed.

    Returns:
        The directory that holds the raw files under their basenames.

    Raises:
        IntegrityError: A file is not what the index promises.
        StorageError: A file could not be fetched.
    """
    if place.directory is not None and _is_raw_there(place, shard):
        return place.directory
    for raw, compressed in shard.files:
        stored = compressed or raw
        path = join_under(scratch, stored.basename)
        if place.directory is not None and compressed is not None and place.path(stored.basename).exists():
            path = place.path(stored.basename)
        else:
            place.fetch(stored, path)
        if compressed is not None:
            unpack_into(scratch, path, raw, compressed, shard)
    return scratch


def _is_raw_there(place: StoredDataset, shard: ShardInfo) -> bool:
    if any(compressed is not None and place.path(compressed.basename).exists() for _, compressed in shard.files):
        return False
    return all(place.path(raw.basename).exists() for raw, _ in shard.files)


def stored_files(shard: ShardInfo) -> list[FileInfo]:
    """The files of a shard that a store has: compressed, or raw if there is no compression."""
    return [compressed or raw for raw, compressed in shard.files]


def check_hash_names(index: DatasetIndex, source: str) -> None:
    """Refuse an index whose hashes nobody can compute, once for all shards that are alike.

    Raises:
        IndexFormatError: Names it, a file and the hash.
    """
    for _, shard in index.shards.examples():
        named = {(name, file.basename) for pair in shard.files for file in pair if file for name in file.hashes}
        unknown = sorted(one for one in named if one[0] not in hash_names())
        if unknown:
            name, basename = unknown[0]
            raise IndexFormatError(
                f"{source} records of {basename} the hash {name!r:.60}, which there is not",
                hint=f"known are {', '.join(hash_names())}",
                path=source,
            )


DAMAGED = ".damaged"
"""What the name of a bad file that was set aside ends in; or in this and a number, where that is taken."""


def unnamed_files(names: Iterable[str], index: DatasetIndex) -> list[str]:
    """Those that look like a shard, also an unfinished or a damaged one, and are not named.

    Directories that have an index of their own are left out, and so are hidden ones: what is there is not for this
    index to name.

    Args:
        names: Files where the dataset is, relative to it.
        index: Its index.
    """
    found = {PurePosixPath(name) for name in names}
    named = {PurePosixPath(file.basename) for shard in index.shards for pair in shard.files for file in pair if file}
    others = {path.parent for path in found if path.name == INDEX_BASENAME} - {PurePosixPath()}
    stray = [path for path in found - named if _looks_like_shard(path.name) and not _is_elsewhere(path, others)]
    return sorted(map(str, stray))


def _looks_like_shard(name: str) -> bool:
    return is_shard_file(name) or whole_name(name) is not None or is_shard_file(name.partition(DAMAGED)[0])


def _is_elsewhere(path: PurePosixPath, others: set[PurePosixPath]) -> bool:
    return any(parent in others or parent.name.startswith(".") for parent in path.parents)
