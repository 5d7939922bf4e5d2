"""What one cache directory holds, added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_streaming.cache.index_lock import part_of_scratch
from lightning_streaming.cache.inspection import (
    CachedIndex,
    CacheFile,
    FileKind,
    find_index,
    list_cache,
)
from lightning_streaming.cache.origin import IndexCheck, read_origin
from lightning_streaming.formats.index import DatasetIndex

_SHOWN_DIGITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """Some files."""

    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """One cache directory."""

    directory: Path
    remote: str | None
    """Digest of the location that its files come from; None for one that is read in place."""
    index: str | None
    """Beginning of the SHA-256 of the index; None where there is none that can be read."""
    checked: float | None
    """When the remote was last asked for its index, in seconds since 1970."""
    shards: int | None
    """Shards that the index names."""
    shards_present: int | None
    """Those of them whose raw files are here."""
    ours: Amount
    not_ours: Amount
    arriving: Amount
    """Files on their way, those of dead writers apart."""
    indexes: Amount
    """The index and parsed forms of it."""
    leftovers: Amount
    """What dead writers left."""
    in_use: Amount
    """Whole files that a process has open."""
    last_used: float | None
    """When any shard was last used, in seconds since 1970."""

    @property
    def bytes(self) -> int:
        """All that is here."""
        parts = (self.ours, self.not_ours, self.arriving, self.indexes, self.leftovers)
        return sum(amount.bytes for amount in parts)

    def as_json(self) -> dict[str, Any]:
        """For programs; times as ISO 8601."""
        told = asdict(self) | {"directory": str(self.directory), "bytes": self.bytes}
        return told | {"checked": _iso(self.checked), "last_used": _iso(self.last_used)}


def survey(directory: Path, advance: Callable[[int], object]) -> Survey:
    """Look through a cache directory.

    Args:
        directory: One stream's.
        advance: Told the number of files looked at since it was last told.

    Raises:
        ConfigError: It is not a cache directory.
    """
    files = list_cache(directory, advance)
    index, origin = find_index(directory), read_origin(directory)
    whole = [file for file in files if file.kind in (FileKind.OURS, FileKind.FOREIGN)]
    dead = [file for file in files if is_leftover(file)]
    return Survey(
        directory=directory,
        remote=None if origin is None or origin.of_originals else origin.remote,
        index=None if index is None else index.digest[:_SHOWN_DIGITS],
        checked=_checked(origin.check if origin else None, index),
        shards=None if index is None else len(index.index.shards),
        shards_present=None
        if index is None
        else _count_present(index.index, {file.name: file.bytes for file in whole}),
        ours=_amount(file for file in files if file.kind is FileKind.OURS),
        not_ours=_amount(file for file in files if file.kind is FileKind.FOREIGN),
        arriving=_amount(file for file in files if file.kind is FileKind.ARRIVING and file.in_use),
        indexes=_amount(file for file in files if file.kind is FileKind.INDEX and not is_leftover(file)),
        leftovers=_amount(dead),
        in_use=_amount(file for file in whole if file.in_use),
        last_used=max((file.last_used for file in files if file.last_used is not None), default=None),
    )


def is_leftover(file: CacheFile) -> bool:
    """Whether a dead writer left a file."""
    is_unfinished = file.kind is FileKind.ARRIVING or (
        file.kind is FileKind.INDEX and part_of_scratch(file.name) is not None
    )
    return is_unfinished and not file.in_use


def _count_present(index: DatasetIndex, sizes: Mapping[str, int]) -> int:
    return sum(all(sizes.get(raw.basename) == raw.bytes for raw, _ in shard.files) for shard in index.shards)


def _amount(files: Iterable[CacheFile]) -> Amount:
    sizes = [file.bytes for file in files]
    return Amount(files=len(sizes), bytes=sum(sizes))


def _checked(check: IndexCheck | None, index: CachedIndex | None) -> float | None:
    return check.checked / 1e9 if check is not None and index is not None and check.digest == index.digest else None


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
