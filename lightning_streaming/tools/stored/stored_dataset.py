"""A dataset at its location, as typed: its files, downloaded and checked, opened shards, and totals of its index."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.config import CACHE_VARIABLE, missing_index_hint, other_format_at
from lightning_streaming.cache.sources import check_hash, find_size, unpack
from lightning_streaming.errors import ConfigError, FormatError, IndexFormatError, IntegrityError, ObjectNotFoundError
from lightning_streaming.files import join_under
from lightning_streaming.formats.algorithms import hash_names
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, parse_index
from lightning_streaming.formats.shard import (
    FilePart,
    SingleSampleReader,
    has_single_samples,
    narrowed,
    open_shard,
    table_part,
)
from lightning_streaming.formats.shard_format import ShardReader
from lightning_streaming.formats.shard_table import OTHER_FORMATS, column_names
from lightning_streaming.storage import Location, is_url, local_path, mask_url
from lightning_streaming.writing.destination import is_shard_file, whole_name

_ATTEMPTS, _TIMEOUT = 4, 600.0
"""Generous limits, because tools also download shards that are too large for training."""
_MAX_LISTED = 5
DAMAGED = ".damaged"
"""Suffix of a bad file that was renamed; a number follows if the name is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredDataset:
    """A directory, or a URL with the options of its store, of a dataset or of data of another format."""

    location: str = field(repr=False)
    """Path or URL of the dataset."""
    options: Mapping[str, Any] = field(repr=False)
    """Arguments of the store's filesystem; empty for a directory."""
    format: str | None = None
    """Format of data without an index of ours: one of ``OTHER_FORMATS``."""
    block_length: int | None = None
    """Tokens of a sample, if the format does not define samples."""
    attempts: int = _ATTEMPTS
    """Maximum number of attempts for each transfer from or to a store."""
    timeout: float = _TIMEOUT
    """Seconds of an attempt, or of a read in which no byte arrives."""

    @property
    def directory(self) -> Path | None:
        """The directory; None on a store."""
        return local_path(self.location)

    @property
    def shown(self) -> str:
        """The location without secrets."""
        return mask_url(self.location)

    @property
    def at(self) -> Location:
        """The location; ``dataset.at / name`` is one of its files."""
        return Location(self.location, self.options, self.attempts if self.directory is None else 1, self.timeout)

    def path(self, basename: str) -> Path:
        """Return the path of a file in a directory."""
        directory = self.directory
        assert directory is not None
        return join_under(directory, basename)

    def cache(self, local: str | Path | None = None) -> ShardCache:
        """Return a cache that makes its shards present on this node, as a run does.

        Args:
            local: Cache directory; None for the default of runs.
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
        """Return the bytes of its index.

        Raises:
            ObjectNotFoundError: It has none; the hint names subdirectories that have one.
            StorageError: The store fails.
        """
        if self.directory is None:
            return (self.at / INDEX_BASENAME).read()
        try:
            return (self.directory / INDEX_BASENAME).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise _no_index(self.directory) from None

    def read_index(self) -> DatasetIndex:
        """Return its index.

        Raises:
            IndexFormatError: The index is invalid.
            ObjectNotFoundError: It has none.
            StorageError: The store fails.
        """
        if self.format is not None:
            return self.cache().read_index()
        return parse_index(self.read_index_text(), str(self.at / INDEX_BASENAME))

    def fetch(self, file: FileInfo, destination: Path, *, check: bool = False) -> None:
        """Copy a file to this machine, with the size that the index says.

        Args:
            file: Its entry in the index.
            destination: File to write; its directory is created.
            check: Whether to compare all recorded hashes too.

        Raises:
            IntegrityError: Every attempt returned another file.
            StorageError: The transfer failed.
        """
        destination.parent.mkdir(parents=True, exist_ok=True)
        at = self.at / file.basename
        at.download(destination, size=file.bytes, check=partial(check_hashes, file) if check else None)

    def check(self, file: FileInfo) -> None:
        """Compare a file in a directory with its size and its recorded hashes.

        Raises:
            IntegrityError: One differs, or the file is missing.
        """
        size = self.size_of(file.basename)
        if size is None:
            raise IntegrityError("the file is missing")
        if size != file.bytes:
            raise IntegrityError(f"must have {file.bytes:,} bytes, but has {size:,}")
        check_hashes(file, self.path(file.basename))

    def size_of(self, basename: str) -> int | None:
        """Return the bytes of a file; None if it is missing."""
        if self.directory is not None:
            return find_size(self.path(basename))
        return (self.at / basename).size()


def find_dataset(
    location: str, options: Mapping[str, Any], shard_format: str | None = None, block_length: int | None = None
) -> StoredDataset:
    """Return the dataset at a directory or URL, or at that of its index.

    Args:
        location: Argument of the command line.
        options: Arguments of the store's filesystem.
        shard_format: Format of data to read without an index of ours.
        block_length: Tokens of a sample of such data.

    Raises:
        ConfigError: The location is empty or no valid name, or a block length is given without a format.
    """
    if block_length is not None and shard_format is None:
        why = "--block-length cuts tokens of another format into samples"
        raise ConfigError(why, hint="give --format with it", option="--block-length")
    start, question_mark, query = location.partition("?") if is_url(location) else (location, "", "")
    start = "." if start == INDEX_BASENAME else start.removesuffix(f"/{INDEX_BASENAME}")
    if not start or "\0" in start:
        bad = f"{start!r:.80} has a null character" if start else "the name is empty"
        raise ConfigError(f"a dataset must be named by a directory or a URL, but {bad}", option="DATASET")
    directory, url = local_path(start), start + question_mark + query
    return StoredDataset(
        location=url if directory is None else str(directory),
        options=options if directory is None else {},
        format=shard_format,
        block_length=block_length,
    )


def own_index(text: bytes) -> DatasetIndex | None:
    """Parse an ``index.json``; return None if it is of another library."""
    try:
        return parse_index(text, INDEX_BASENAME)
    except FormatError:
        return None


def _no_index(directory: Path) -> ObjectNotFoundError:
    other = other_format_at(directory)
    read_as = None if other is None else f"files like {other[1]} are read with --format {other[0]}"
    if directory.is_file() and (directory.parent / INDEX_BASENAME).is_file():
        words, hint = "is one file of a dataset", f"give its directory, {directory.parent}"
    elif directory.is_file():
        words, hint = "is a file, not the directory of a dataset", "lightning-streaming convert creates one from it"
        hint = f"{hint}; {read_as}" if read_as else hint
    elif not directory.is_dir():
        words, hint = "is not a directory", "give the directory or the URL of a dataset"
    else:
        words = f"has no {INDEX_BASENAME}, so it is not a dataset"
        below = sorted(path.parent.name for path in directory.glob(f"*/{INDEX_BASENAME}"))
        hint = read_as or missing_index_hint(directory) or "lightning-streaming convert creates one from other files"
        hint = f"its subdirectories {', '.join(below[:_MAX_LISTED])} are datasets" if below else hint
    return ObjectNotFoundError(f"{directory} {words}", hint=hint, path=str(directory))


@contextmanager
def default_caches_in(directory: Path | str) -> Iterator[None]:
    """Set the parent of all default cache directories, by the environment variable."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE_VARIABLE]
        else:
            os.environ[CACHE_VARIABLE] = before


@contextmanager
def temporary_caches() -> Iterator[None]:
    """Set the default cache directories to a temporary directory, which is removed in the end."""
    temporary = TemporaryDirectory(prefix="lightning_streaming_", ignore_cleanup_errors=True)
    with temporary as directory, default_caches_in(directory):
        yield


class Column(NamedTuple):
    """One column, as the index describes it."""

    name: str
    encoding: str
    bytes: int | None
    """Size of each value; None if it varies or is unknown."""


def columns_of(schema: Mapping[str, Any]) -> tuple[Column, ...]:
    """Return the columns of a shard, from its schema in the index."""
    if "columns" in schema:
        return tuple(Column(name, encoding, None) for name, encoding in sorted(schema["columns"].items()))
    names, encodings = schema["column_names"], schema["column_encodings"]
    sizes = schema.get("column_sizes", (None,) * len(names))
    return tuple(map(Column, names, encodings, sizes))


def add_up(index: DatasetIndex) -> dict[str, int]:
    """Return totals over all shards: samples, shards, and bytes of their files, uncompressed and as stored."""
    files = [pair for shard in index.shards for pair in shard.files]
    return {
        "samples": index.num_samples,
        "shards": len(index.shards),
        "raw_bytes": sum(raw.bytes for raw, _ in files),
        "stored_bytes": sum({(stored or raw).basename: (stored or raw).bytes for raw, stored in files}.values()),
    }


def stored_files(shard: ShardInfo) -> list[FileInfo]:
    """Return the files of a shard that a store has: compressed, or raw if there is no compression."""
    return [compressed or raw for raw, compressed in shard.files]


def check_hashes(file: FileInfo, path: Path) -> None:
    """Compare a file with all of its recorded hashes.

    Raises:
        IntegrityError: One differs.
    """
    for name in sorted(file.hashes):
        check_hash(path, file.basename, file, name)


def check_hash_names(index: DatasetIndex, source: str) -> None:
    """Check that all hashes of an index are supported, once for all shards of one kind.

    Raises:
        IndexFormatError: One is not.
    """
    for _, shard in index.shards.examples():
        named = {(name, file.basename) for pair in shard.files for file in pair if file for name in file.hashes}
        unknown = sorted(pair for pair in named if pair[0] not in hash_names())
        if unknown:
            name, basename = unknown[0]
            raise IndexFormatError(
                f"{source} has an unknown hash {name!r:.60} of {basename}",
                hint=f"supported: {', '.join(hash_names())}",
                path=source,
            )


def unpack_into(directory: Path, path: Path, raw: FileInfo, compressed: FileInfo, shard: ShardInfo) -> Path:
    """Decompress a file of a shard into a directory, and return its path there.

    Raises:
        IntegrityError: It is damaged.
    """
    assert shard.compression is not None
    destination = join_under(directory, raw.basename)
    destination.parent.mkdir(parents=True, exist_ok=True)
    unpack(path, compressed.basename, raw, shard.compression, destination)
    return destination


def raw_directory(dataset: StoredDataset, shard: ShardInfo, scratch: Path) -> Path:
    """Make the raw files of a shard present, and return their directory.

    Files of a directory are used in place, raw or compressed; those on a store are downloaded. A raw file is not used
    if there is a compressed one: it may be of another dataset that was in the directory.

    Args:
        dataset: Location of the dataset.
        shard: An entry of its index.
        scratch: An empty directory for downloaded and decompressed files.

    Raises:
        IntegrityError: A file differs from its entry in the index.
        StorageError: A file could not be downloaded.
    """
    directory = dataset.directory
    if directory is not None:
        stored = [compressed for _, compressed in shard.files if compressed is not None]
        has_stored = any(dataset.path(file.basename).exists() for file in stored)
        if not has_stored and all(dataset.path(raw.basename).exists() for raw, _ in shard.files):
            return directory
    for raw, compressed in shard.files:
        file = compressed or raw
        path = join_under(scratch, file.basename)
        if directory is not None and compressed is not None and dataset.path(file.basename).exists():
            path = dataset.path(file.basename)
        else:
            dataset.fetch(file, path)
        if compressed is not None:
            unpack_into(scratch, path, raw, compressed, shard)
    return scratch


@contextmanager
def open_cached(
    cache: ShardCache,
    shard: ShardInfo,
    columns: Sequence[str] | None = None,
    *,
    allow_unsafe_types: bool = False,
    as_files: Collection[str] = (),
) -> Iterator[ShardReader]:
    """Open a shard by its cache; what was downloaded or unpacked for it is removed again.

    Args:
        cache: Cache of the dataset.
        shard: An entry of its index.
        columns: Names of the columns to read; None for all.
        allow_unsafe_types: Whether values may be decoded that can run code of the author of the data.
        as_files: As for :func:`open_shard`.

    Raises:
        StreamingError: As for :meth:`ShardCache.hold` and :func:`open_shard`.
    """
    held = narrowed(shard, columns)
    was_present = cache.has(held)
    try:
        with cache.hold(held) as directory:
            reader = open_shard(
                held, directory, allow_unsafe_types=allow_unsafe_types, columns=columns, as_files=as_files
            )
            try:
                yield reader
            finally:
                reader.close()
    finally:
        if not was_present:
            cache.evict(held)


def single_samples(shard: ShardInfo, at: Location, **how: Any) -> SingleSampleReader:
    """Return a decoder of single samples; only the offsets of the shard are read.

    Args:
        shard: An uncompressed shard of a format that has single samples.
        at: Its directory.
        how: Arguments of :class:`SingleSampleReader`.

    Raises:
        StreamingError: The offsets cannot be read, or are not those of the shard.
    """
    file, start, stop = table_part(shard)
    return SingleSampleReader(shard, (at / file.basename).read_range(start, stop), **how)


def read_parts(data: Location, parts: Sequence[FilePart]) -> list[bytes]:
    """Read adjacent or near parts of a file, in ascending order, by one request."""
    start = parts[0].start
    read = data.read_range(start, parts[-1].stop)
    return [read[part.start - start : part.stop - start] for part in parts]


def samples_of(
    dataset: StoredDataset,
    cache: ShardCache,
    shard: ShardInfo,
    number: int,
    names: list[str],
    *,
    allow_unsafe_types: bool,
) -> Iterator[dict[str, Any]]:
    """Yield columns of the first samples of a shard; from a store no more is downloaded than these need."""
    # Unsafe columns are not decoded unless they are named.
    options: dict[str, Any] = {"allow_unsafe_types": True, "columns": names}
    if not names:  # nothing to decode or download
        yield from [{}] * number
    elif shard.format in OTHER_FORMATS:
        # Samples of these may lack columns, unless they are named.
        is_all = len(names) == len(column_names(shard))
        with open_cached(cache, shard, None if is_all else names, allow_unsafe_types=allow_unsafe_types) as reader:
            yield from map(reader.__getitem__, range(number))
    elif dataset.directory is None and has_single_samples(shard):
        samples = single_samples(shard, dataset.at, **options)
        parts = [samples.part(sample) for sample in range(number)]
        yield from map(samples.decode, range(number), read_parts(dataset.at / shard.raw_data.basename, parts))
    else:
        with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
            reader = open_shard(shard, raw_directory(dataset, shard, Path(scratch)), **options)
            try:
                yield from map(reader.__getitem__, range(number))
            finally:
                reader.close()


def unnamed_files(names: Iterable[str], index: DatasetIndex) -> list[str]:
    """Return the files that look like a shard, an unfinished or a damaged one, and are not in the index.

    Hidden directories and those with an index are left out: their files do not belong to this index.

    Args:
        names: Files of the dataset, relative to it.
        index: Its index.
    """
    paths = {PurePosixPath(name) for name in names}
    named = {PurePosixPath(file.basename) for shard in index.shards for pair in shard.files for file in pair if file}
    datasets = {path.parent for path in paths if path.name == INDEX_BASENAME} - {PurePosixPath()}

    def is_unnamed(path: PurePosixPath) -> bool:
        name = path.name
        if not (is_shard_file(name) or whole_name(name) is not None or is_shard_file(name.partition(DAMAGED)[0])):
            return False
        return not any(parent in datasets or parent.name.startswith(".") for parent in path.parents)

    return sorted(map(str, filter(is_unnamed, paths - named)))
