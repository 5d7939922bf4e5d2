"""Takes one file from one place to another, checked on the way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_streaming.cache.verify import find_size
from lightning_streaming.errors import IntegrityError, ShardCorruptError
from lightning_streaming.files import appears_whole, remove_partials
from lightning_streaming.formats.compression import decompressed_pieces
from lightning_streaming.formats.index import DatasetIndex, FileInfo
from lightning_streaming.storage import upload
from lightning_streaming.storage.listing import object_size
from lightning_streaming.tools.examine import check_hashes, fetch_checked
from lightning_streaming.tools.stored_dataset import RETRY, TIMEOUT, StoredDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class Cargo:
    """One stored file, and how its content can be checked."""

    file: FileInfo
    """What the index says of it."""
    raw_bytes: int
    """Its size once it is decompressed."""
    compression: str | None
    """How it is compressed."""


def cargo_of(index: DatasetIndex) -> list[Cargo]:
    """The stored files of a dataset, each once."""
    cargo = {}
    for shard in index.shards:
        for raw, compressed in shard.files:
            file = compressed or raw
            cargo[file.basename] = Cargo(file=file, raw_bytes=raw.bytes, compression=shard.compression)
    return list(cargo.values())


def carry(cargo: Cargo, source: StoredDataset, out: StoredDataset, *, quick: bool) -> None:
    """Copy a file. It appears whole, and only if it is what the index promises.

    Args:
        cargo: The file.
        source: Where it is.
        out: Where it goes.
        quick: Whether a compressed file need not be decompressed to see that it holds what it should.

    Raises:
        IntegrityError: It is not what the index promises.
        ObjectNotFoundError: It is not there.
        StorageError: A store does not answer, or refuses.
    """
    if out.directory is not None:
        target = out.path(cargo.file.basename)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(target)
        with appears_whole(target) as partial:
            fetch_checked(source, cargo.file, partial)
            _check_content(cargo, partial, quick)
        return
    with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
        path = Path(scratch) / "file"
        if source.directory is not None:
            path = source.path(cargo.file.basename)
            _check_file(cargo.file, path)
        else:
            fetch_checked(source, cargo.file, path)
        _check_content(cargo, path, quick)
        url = out.url(cargo.file.basename)
        upload(path, url, out.options, retry=RETRY, timeout=TIMEOUT)
    found = object_size(url, out.options, retry=RETRY, timeout=TIMEOUT)
    if found != cargo.file.bytes:
        raise IntegrityError(f"{cargo.file.bytes} bytes of {cargo.file.basename} were sent, but the store has {found}")


def is_there(file: FileInfo, out: StoredDataset, *, trusted: bool) -> bool:
    """Whether the file at the destination is the one that the index promises.

    Args:
        file: What the index says of it.
        out: Where it may be.
        trusted: Whether only copies of this very dataset put files there. Then a file on a store is known by its size,
            and one of which the index records no hash by its size everywhere.

    Raises:
        StorageError: The store does not answer.
    """
    if out.directory is not None:
        return find_size(out.path(file.basename)) == file.bytes and _has_hashes(file, out.path(file.basename), trusted)
    if object_size(out.url(file.basename), out.options, retry=RETRY, timeout=TIMEOUT) != file.bytes:
        return False
    if trusted or not file.hashes:
        return trusted
    with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
        path = Path(scratch) / "file"
        out.fetch(file, path)
        return _has_hashes(file, path, trusted)


def _has_hashes(file: FileInfo, path: Path, trusted: bool) -> bool:
    if not file.hashes:
        return trusted
    try:
        check_hashes(path, file)
    except IntegrityError:
        return False
    return True


def _check_file(file: FileInfo, path: Path) -> None:
    size = find_size(path)
    if size != file.bytes:
        found = "it is missing" if size is None else f"it has {size:,}"
        raise IntegrityError(f"the index promises {file.bytes:,} bytes of {file.basename}, but {found}")
    check_hashes(path, file)


def _check_content(cargo: Cargo, path: Path, quick: bool) -> None:
    if quick or cargo.compression is None:
        return
    try:
        with path.open("rb") as file:
            for _ in decompressed_pieces(cargo.compression, file, cargo.raw_bytes):
                pass
    except ShardCorruptError as error:
        raise IntegrityError(f"{cargo.file.basename} cannot be decompressed: {error}") from error
