"""Small datasets for tests of the cache, which looks at files and never into them.

Indexes without shard files, small and large, and what a test wants to know of a cache of them.

Processes of other users, and directories that they may look into.

Disks so small that they are full.

Watching a cache directory from outside: how big it gets, and what comes and goes.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import random
import struct
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.config import (
    MANIFEST_BASENAME,
    PARSED_INDEX_PREFIX,
    STAGING_BASENAME,
    USAGE_BASENAME,
    CacheConfig,
)
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.errors import StreamingError
from lightning_streaming.formats.algorithms import compress, extension, hash_bytes
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, dump_index
from tests.servers import HttpStore

_SCHEMA = {"column_encodings": ("bytes",), "column_names": ("data",), "column_sizes": (None,)}


def write_dataset(
    directory: Path,
    *,
    shards: int = 2,
    compression: str | None = None,
    hashes: tuple[str, ...] = ("sha1",),
    seed: int = 0,
) -> DatasetIndex:
    """Write an index and its shard files; two datasets of different seeds differ in every file but in no raw size."""
    generator = random.Random(seed)
    index = DatasetIndex(
        tuple(
            _write_shard(directory, f"shard.{number:05}.mds", generator.randbytes(3000), compression, hashes)
            for number in range(shards)
        )
    )
    (directory / INDEX_BASENAME).write_bytes(dump_index(index.shards))
    return index


def raw_data(shard: int, *, seed: int = 0) -> bytes:
    """What the raw file of a shard of :func:`write_dataset` must hold."""
    generator = random.Random(seed)
    return [generator.randbytes(3000) for _ in range(shard + 1)][-1]


def fetch_shard(cache: ShardCache, shard: ShardInfo, room: CacheQuota | None = None) -> Path:
    """Have a shard on this node for now; gives where its raw files are."""
    with cache.hold(shard, room) as directory:
        return directory


def cached(directory: Path) -> dict[str, bytes]:
    """Name and contents of everything in a cache directory but what the cache keeps there for itself."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if not path.name.startswith(".")}


def parts(directory: Path) -> list[Path]:
    """Files on their way into a cache directory."""
    return sorted((directory / STAGING_BASENAME).glob("*"))


def _write_shard(
    directory: Path, basename: str, data: bytes, compression: str | None, hashes: tuple[str, ...]
) -> ShardInfo:
    stored_name = basename if compression is None else f"{basename}.{extension(compression)}"
    stored = data if compression is None else compress(compression, data)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / stored_name).write_bytes(stored)
    return ShardInfo(
        format="mds",
        samples=1,
        compression=compression,
        hashes=hashes,
        size_limit=None,
        raw_data=_describe(basename, data, hashes),
        zip_data=None if compression is None else _describe(stored_name, stored, hashes),
        schema=_SCHEMA,
    )


def _describe(basename: str, data: bytes, hashes: tuple[str, ...]) -> FileInfo:
    return FileInfo(basename=basename, bytes=len(data), hashes={name: hash_bytes(name, data) for name in hashes})


SMALL, LARGE = 3, 4000
"""Shards of an index that is parsed whenever it is needed, and of one whose parsed form is kept."""


def shard(number: int, seed: int = 0) -> ShardInfo:
    """A shard whose hash tells its number and seed."""
    file = FileInfo(basename=f"shard.{number:05}.mds", bytes=2000, hashes={"sha1": f"{number + 10**9 * seed:040}"})
    return ShardInfo(
        format="mds",
        samples=3,
        compression=None,
        hashes=("sha1",),
        size_limit=None,
        raw_data=file,
        zip_data=None,
        schema={"column_names": ("a",), "column_encodings": ("int",), "column_sizes": (8,)},
    )


def put(directory: Path, count: int, seed: int = 0) -> DatasetIndex:
    """Write an index of so many shards."""
    index = DatasetIndex([shard(number, seed) for number in range(count)])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX_BASENAME).write_bytes(dump_index(index.shards))
    return index


def forms(directory: Path) -> list[Path]:
    """The parsed forms in a directory."""
    return sorted(directory.glob(f"{PARSED_INDEX_PREFIX}*"))


def in_place(directory: Path) -> IndexCache:
    """Of a directory that is read where it is."""
    return IndexCache(CacheConfig(name="code", local=directory))


def kept_for(directory: Path) -> Path:
    """Where the parsed form of an index that is read in place is kept."""
    return CacheConfig(name="code", local=directory).cache_directory()


def over_http(store: HttpStore, tmp_path: Path, **settings: Any) -> IndexCache:
    """Of a remote, kept in the directory "cache"."""
    return IndexCache(CacheConfig(name="code", remote=store.url, local=tmp_path / "cache", **settings))


def let_a_minute_pass(directory: Path) -> None:
    """Make it as if the remote had been asked a while ago."""
    let_time_pass(directory, 61)


def let_time_pass(directory: Path, seconds: int) -> None:
    """Make it as if the remote had been asked so long ago."""
    path = directory / MANIFEST_BASENAME
    *lines, last = path.read_text().rstrip().splitlines()  # what was longer once is padded
    check = json.loads(last)
    check["checked"] -= seconds * 10**9
    path.write_text("\n".join([*lines, json.dumps(check)]))


def open_to_all(directory: Path) -> None:
    """Let every user come as far as ``directory``; pytest keeps its own for one user."""
    shared = Path(tempfile.gettempdir())
    for parent in directory.parents:
        if parent == shared or shared not in parent.parents:
            break
        parent.chmod(0o755)


def as_nobody(look: Callable[[], Any]) -> Any:
    """What a function gives, or the words of the error it raises, in a process of a user without rights."""
    return as_user(65534, look)


def as_user(user: int, look: Callable[[], Any]) -> Any:
    """What a function gives, or the words of the error it raises, in a process of another user, alone in a group."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        try:
            sender.send(look())
        except StreamingError as error:
            sender.send(str(error))

    child = context.Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == 0
    return receiver.recv()


@contextmanager
def disk_of(path: Path, kib: int) -> Iterator[Path]:
    """A new directory on a disk of so many KiB of its own, in pages of 4 KiB; skips the test where that may not be."""
    path.mkdir()
    command: list[str | Path] = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", path]
    mount = subprocess.run(command, capture_output=True, check=False)
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


_IN_MOVED_TO, _IN_DELETE = 0x80, 0x200
_EVENT = struct.Struct("iIII")
_SECONDS = 0.05


class Watcher:
    """In a thread, for the length of a block: measures a directory every 50 ms, and counts what appears and vanishes.

    Sizes change only while somebody holds the ledger, so holding it is a look at one moment.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.largest = 0
        """Most bytes there were: the index, whole files and parts."""
        self.looks = 0
        """How often it was measured."""
        self.appeared: Counter[str] = Counter()
        """How often each file came in, by name."""
        self.removed: Counter[str] = Counter()
        """How often each file was removed, by name."""
        self._ended = threading.Event()
        self._events = ctypes.CDLL(None, use_errno=True).inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._events >= 0

    def __enter__(self) -> Watcher:
        watch = ctypes.CDLL(None).inotify_add_watch(self._events, bytes(self.root), _IN_MOVED_TO | _IN_DELETE)
        assert watch >= 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._read_events()
        os.close(self._events)

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS):
            self.largest = max(self.largest, measured(self.root))
            self.looks += 1
            self._read_events()

    def _read_events(self) -> None:
        while True:
            try:
                data = os.read(self._events, 2**16)
            except BlockingIOError:
                return
            place = 0
            while place < len(data):
                _, mask, _, length = _EVENT.unpack_from(data, place)
                name = data[place + _EVENT.size : place + _EVENT.size + length].rstrip(b"\0").decode()
                (self.appeared if mask & _IN_MOVED_TO else self.removed)[name] += 1
                place += _EVENT.size + length


def measured(root: Path) -> int:
    """Bytes of a cache directory at one moment: the index, whole files and parts; not what says how full it is."""
    with (root / USAGE_BASENAME).open("ab") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        sizes: dict[int, int] = {}
        for folder in (root / STAGING_BASENAME, root):  # a part that is published meanwhile keeps its number
            for path in list(folder.iterdir()) if folder.exists() else []:
                with suppress(FileNotFoundError):
                    found = path.stat()
                    if path.is_file() and (path.name[0] != "." or path.name.startswith(PARSED_INDEX_PREFIX)):
                        sizes[found.st_ino] = found.st_size
        # Not just closed: children forked meanwhile have copies of the file.
        fcntl.flock(ledger, fcntl.LOCK_UN)
    return sum(sizes.values())
