"""Where a dataset is, as it was typed; how its files get from there to this machine; what its index adds up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_streaming.cache.sources import find_size
from lightning_streaming.errors import ConfigError, ObjectNotFoundError
from lightning_streaming.files import join_under
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, parse_index
from lightning_streaming.storage import Location, is_url, local_path, mask_url

_ATTEMPTS = 4
"""Attempts at each transfer from or to a store, in total."""
_TIMEOUT = 600.0
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

    @property
    def at(self) -> Location:
        """Where it is; ``dataset.at / name`` is one of its files."""
        return Location(self.location, self.options, _ATTEMPTS if self.directory is None else 1, _TIMEOUT)

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
            return (self.at / INDEX_BASENAME).read()
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
        return parse_index(self.read_index_text(), str(self.at / INDEX_BASENAME))

    def fetch(self, file: FileInfo, destination: Path, check: Callable[[Path], None] | None = None) -> None:
        """Bring a file to this machine; its size is checked.

        Args:
            file: What the index says of it.
            destination: File to write; its directory is made.
            check: Looks at what arrived, and raises IntegrityError if it is not as promised.

        Raises:
            StorageError: As for :meth:`~lightning_streaming.storage.Location.download`.
        """
        destination.parent.mkdir(parents=True, exist_ok=True)
        (self.at / file.basename).download(destination, size=file.bytes, check=check)

    def size_of(self, basename: str) -> int | None:
        """How many bytes one of its files has; None if there is no such file."""
        if self.directory is not None:
            return find_size(self.path(basename))
        return (self.at / basename).size()


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


_MOST_BINS = 8
_HARDLY = 20


class Column(NamedTuple):
    """One column, as the index describes it."""

    name: str
    encoding: str
    bytes: int | None
    """Size of each value; None where it varies or the format does not say."""


class Bin(NamedTuple):
    """Shards of similar size."""

    smallest: int
    """Raw bytes; the bin holds shards from here ..."""
    largest: int
    """... to here; only the last bin holds those of just this size."""
    shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A dataset in numbers."""

    samples: int
    shards: int
    raw_bytes: int
    """Of all files, uncompressed."""
    stored_bytes: int
    """Of all files as they are stored."""
    formats: Mapping[str, int]
    """Format to the number of shards that have it; also of the next three."""
    compressions: Mapping[str | None, int]
    hashes: Mapping[tuple[str, ...], int]
    size_limits: Mapping[int | None, int]
    columns: Mapping[Column, int]
    """Each column to the number of shards that have it just so."""
    samples_per_shard: tuple[int, float, int] | None
    """Fewest, mean and most; None if there are no shards."""
    sizes: tuple[Bin, ...]
    """How large the shards are, uncompressed, from the smallest on."""


def summarize(index: DatasetIndex) -> Summary:
    """Add up an index."""
    raw_sizes = [sum(raw.bytes for raw, _ in shard.files) for shard in index.shards]
    counts = index.samples_per_shard()
    return Summary(
        samples=index.num_samples,
        shards=len(index.shards),
        raw_bytes=sum(raw_sizes),
        stored_bytes=sum((stored or raw).bytes for shard in index.shards for raw, stored in shard.files),
        formats=Counter(shard.format for shard in index.shards),
        compressions=Counter(shard.compression for shard in index.shards),
        hashes=Counter(shard.hashes for shard in index.shards),
        size_limits=Counter(shard.size_limit for shard in index.shards),
        columns=_count_columns(index.shards),
        samples_per_shard=(int(counts.min()), float(counts.mean()), int(counts.max())) if len(counts) else None,
        sizes=histogram(raw_sizes),
    )


def columns_of(schema: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns of a shard, from what the index says of it."""
    if "columns" in schema:
        return tuple(Column(name, encoding, None) for name, encoding in sorted(schema["columns"].items()))
    names, encodings = schema["column_names"], schema["column_encodings"]
    sizes = schema.get("column_sizes", (None,) * len(names))
    return tuple(map(Column, names, encodings, sizes))


def histogram(sizes: Sequence[int]) -> tuple[Bin, ...]:
    """Sort sizes into bins of one width: at most eight, and one where they hardly differ."""
    if not sizes:
        return ()
    smallest, largest = min(sizes), max(sizes)
    differ = (largest - smallest) * _HARDLY > largest
    num_bins = min(_MOST_BINS, len(set(sizes))) if differ else 1
    edges = [smallest + (largest - smallest) * number // num_bins for number in range(num_bins + 1)]
    counts, _ = np.histogram(sizes, edges if smallest < largest else [smallest, smallest + 1])
    return tuple(Bin(*ends, int(count)) for ends, count in zip(pairwise(edges), counts, strict=True))


def _count_columns(shards: Sequence[ShardInfo]) -> dict[Column, int]:
    # Shards of one writer share their schema, so a million of them are counted by a handful of objects.
    schemas: dict[int, Mapping[str, Any]] = {}  # holding them keeps their ids from being given to others
    counts: Counter[int] = Counter()
    for schema in (shard.schema for shard in shards):
        schemas.setdefault(id(schema), schema)
        counts[id(schema)] += 1
    columns: Counter[Column] = Counter()
    for key, schema in schemas.items():
        for column in columns_of(schema):
            columns[column] += counts[key]
    return dict(columns)
