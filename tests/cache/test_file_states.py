"""Files on their way: one writer each, whose death everybody sees.

Files found in a cache directory: ours and unchanged, or looked at closely.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache, file_states, records, shared_files
from lightning_streaming.cache.config import (
    MANIFEST_BASENAME,
    QUEUE_BASENAME,
    SELECTIONS_BASENAME,
    STAGING_BASENAME,
    USAGE_BASENAME,
)
from lightning_streaming.cache.file_states import StagingFile, claim, lock_if_dead, staging_path
from lightning_streaming.cache.quota import WaitQueue
from lightning_streaming.cache.records import (
    CacheEntry,
    CacheManifest,
    OwnTags,
    find_entry,
    make_tag,
    read_number,
    selection_files,
    verified_tag,
    write_manifest,
)
from lightning_streaming.cache.shared_files import pauses
from lightning_streaming.cache.sources import RemoteSource
from lightning_streaming.errors import DiskFullError, StorageError
from lightning_streaming.formats.index import FileInfo
from tests.cache.helpers import fetch_shard, open_to_all, raw_data, write_dataset
from tests.helpers import assert_error
from tests.servers import HttpStore

NAME = "shard.00000.mds"


def claimed(root: Path, name: str = NAME) -> StagingFile:
    part = claim(root, name)
    assert part is not None
    return part


def process_that_writes(root: Path) -> subprocess.Popen[bytes]:
    """A process that has claimed the shard and written half of it."""
    code = (
        "import sys, time; from pathlib import Path; from lightning_streaming.cache.file_states import claim\n"
        f"part = claim(Path({str(root)!r}), {NAME!r}); part.resize(10); part.path.write_bytes(b'half')\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    part = claimed(tmp_path)
    assert claim(tmp_path, NAME) is None
    claimed(tmp_path, "shard.00001.mds").close()
    part.close()
    claimed(tmp_path).close()


def test_a_published_file_is_whole_and_marked_and_its_part_is_gone(tmp_path: Path) -> None:
    part = claimed(tmp_path, "sub/x.mds")
    part.resize(4)
    assert part.path.read_bytes() == bytes(4)
    part.path.write_bytes(b"data")
    assert part.publish(10**18)
    assert not part.is_unpublished()
    part.keep_shared()
    part.close()
    final = tmp_path / "sub" / "x.mds"
    assert final.stat().st_atime > time.time() - 60, "it is used now"
    assert (final.read_bytes(), final.stat().st_mtime_ns) == (b"data", 10**18)
    assert list((tmp_path / ".arriving").iterdir()) == []


def test_a_killed_writer_is_seen_to_be_dead_and_a_living_one_not(tmp_path: Path) -> None:
    with process_that_writes(tmp_path) as process:
        path = staging_path(tmp_path, NAME)
        assert claim(tmp_path, NAME) is None
        assert lock_if_dead(path) is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        descriptor = lock_if_dead(path)
        assert descriptor is not None
        os.close(descriptor)
        # Whoever wants the shard next takes over what is left, which is counted already.
        part = claimed(tmp_path)
        assert (part.path, part.size) == (path, 4)
        part.close()


def test_who_waited_for_a_published_file_does_not_write_to_it(tmp_path: Path) -> None:
    part = claimed(tmp_path)
    late = os.open(part.path, os.O_RDWR)  # opened before, locked after the file was published
    part.publish(10**18)
    part.close()
    fcntl.flock(late, fcntl.LOCK_EX)
    again = claimed(tmp_path)
    assert again.path.stat().st_ino != (tmp_path / NAME).stat().st_ino
    again.close()
    os.close(late)


def before_the_first_lock(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen between opening a file and locking it, once."""
    try_lock = shared_files.try_lock

    def acting(descriptor: int, *, shared: bool) -> bool:
        monkeypatch.setattr(shared_files, "try_lock", try_lock)
        act()
        return try_lock(descriptor, shared=shared)

    monkeypatch.setattr(shared_files, "try_lock", acting)


def test_who_opened_a_file_before_it_was_published_does_not_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = claimed(tmp_path)

    def publish() -> None:
        part.publish(10**18)
        part.close()

    before_the_first_lock(monkeypatch, publish)
    again = claimed(tmp_path)
    assert again.is_unpublished()
    assert again.path.stat().st_ino != (tmp_path / NAME).stat().st_ino
    again.close()


def test_what_was_published_meanwhile_says_nothing_of_the_next_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = claimed(tmp_path)
    writers: list[StagingFile] = []

    def publish_and_claim_again() -> None:
        part.publish(10**18)
        part.close()
        writers.append(claimed(tmp_path))

    before_the_first_lock(monkeypatch, publish_and_claim_again)
    assert lock_if_dead(part.path) is None
    assert writers[0].is_unpublished()
    writers[0].close()


def test_a_file_that_is_published_during_a_scan_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, list_complete = OwnTags(make_tag()), records.shard_files
    arriving, waiting = claimed(tmp_path), claimed(tmp_path, "shard.00001.mds")
    arriving.resize(1000)
    waiting.resize(200)

    def publish_then_list(root: Path) -> Iterator[CacheEntry]:
        assert arriving.publish(own.of_remote)
        return list_complete(root)

    monkeypatch.setattr(records, "shard_files", publish_then_list)
    scanned = records.scan(tmp_path, own)
    assert [file.size for file in scanned.files] == [1000]
    assert (scanned.staged_bytes, scanned.bytes) == (200, 1200)
    for part in (arriving, waiting):
        part.close()


class SameInode:
    """An entry of a directory on a filesystem where all files have one inode number, as some in user space are."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self._entry, self.name, self.path = entry, entry.name, entry.path
        self.is_dir, self.is_file = entry.is_dir, entry.is_file

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        status = self._entry.stat(follow_symlinks=follow_symlinks)
        times = {name: getattr(status, name) for name in ("st_atime_ns", "st_mtime_ns", "st_ctime_ns")}
        return os.stat_result((status[0], 1, *status[2:]), times)


@pytest.mark.parametrize("publishes", [False, True])
def test_files_are_counted_where_all_have_one_inode_number(
    publishes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, list_complete, list_directory = OwnTags(make_tag()), records.shard_files, os.scandir
    parts = [claimed(tmp_path, f"shard.0000{number}.mds") for number in range(4)]
    for number, part in enumerate(parts):
        part.resize(10**number)
    for part in parts[:2]:
        assert part.publish(own.of_remote)

    @contextmanager
    def list_with_same_inode(path: str | Path) -> Iterator[list[SameInode]]:
        with list_directory(path) as entries:
            yield [SameInode(entry) for entry in entries]

    def maybe_publish_then_list(root: Path) -> Iterator[CacheEntry]:
        assert not publishes or parts[2].publish(own.of_remote)
        return list_complete(root)

    monkeypatch.setattr(os, "scandir", list_with_same_inode)
    monkeypatch.setattr(records, "shard_files", maybe_publish_then_list)
    scanned = records.scan(tmp_path, own)
    monkeypatch.undo()
    assert len(scanned.files) == (3 if publishes else 2)
    assert scanned.staged_bytes == (1000 if publishes else 1100)
    assert scanned.bytes == 1111
    for part in parts:
        part.close()


def test_a_part_of_another_machine_is_dead_after_a_day_without_a_byte(tmp_path: Path) -> None:
    claimed(tmp_path).close()
    other = tmp_path / ".arriving" / "01234567-89abcdef-0-0123.part"
    other.write_bytes(b"half")
    assert lock_if_dead(other) is None
    os.utime(other, (time.time() - 90_000,) * 2)
    descriptor = lock_if_dead(other)
    assert descriptor is not None
    os.close(descriptor)


def test_what_we_make_may_be_read_by_who_may_read_the_directory(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o2775)
    before = os.umask(0o077)
    try:
        part = claimed(root, "sub/x.mds")
        part.publish(10**18)
        part.close()
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o7777 for path in (root / "sub" / "x.mds", root / "sub", root / ".arriving")]
    assert modes == [0o644, 0o2775, 0o2775]


@pytest.mark.parametrize("target", ["a file", "nothing"])
def test_nothing_is_written_through_a_link(tmp_path: Path, target: str) -> None:
    write_dataset(tmp_path / "remote")
    outside = tmp_path / "outside"
    if target == "a file":
        outside.write_bytes(b"of the user" * 10)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    first, second = cache.read_index().shards
    fetch_shard(cache, first)
    root = tmp_path / "cache"
    staging = staging_path(root, second.raw_data.basename)
    for path in (root / USAGE_BASENAME, root / QUEUE_BASENAME, staging):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(outside)
        with pytest.raises(StorageError, match=f"{path} is a symbolic link.*remove it"):
            WaitQueue(root) if path.name == QUEUE_BASENAME else fetch_shard(cache, second)
        path.unlink()
    assert outside.exists() == (target == "a file")
    assert target == "nothing" or outside.read_bytes() == b"of the user" * 10


@pytest.mark.parametrize(("folder", "name"), [(STAGING_BASENAME, "a.part"), (SELECTIONS_BASENAME, "0" * 32 + ".npy")])
def test_no_file_of_a_folder_that_is_a_link_is_removed(tmp_path: Path, folder: str, name: str) -> None:
    write_dataset(tmp_path / "remote")
    outside, root = tmp_path / "outside" / name, tmp_path / "cache"
    outside.parent.mkdir()
    outside.write_bytes(b"of the user")
    os.utime(outside, (0, 0))
    root.mkdir()
    (root / folder).symlink_to(outside.parent)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=root))
    with assert_error(StorageError, path=root / folder, hint="remove the link"):
        cache.directory.prepare()
        list(selection_files(root))
    assert outside.read_bytes() == b"of the user"


def test_a_manifest_that_is_a_link_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside, manifest = tmp_path / "outside", CacheManifest(remote="x", tag=make_tag(), check=None)
    outside.write_bytes(b"of the user" * 10)
    (tmp_path / MANIFEST_BASENAME).symlink_to(outside)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "another user's file in a directory with the sticky bit")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="symbolic links"):
        write_manifest(tmp_path, manifest, tmp_path / "scratch")
    assert outside.read_bytes() == b"of the user" * 10


@pytest.mark.parametrize("name", [MANIFEST_BASENAME, USAGE_BASENAME, QUEUE_BASENAME])
@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK])
def test_a_special_file_of_the_caches_own_name_is_refused(tmp_path: Path, name: str, kind: int) -> None:
    write_dataset(tmp_path / "remote")
    root = tmp_path / "cache"
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=root))
    (shard, _) = cache.read_index().shards
    (root / name).unlink(missing_ok=True)
    os.mknod(root / name, kind | 0o600)
    with assert_error(StorageError, path=root / name, hint="remove it"):
        WaitQueue(root) if name == QUEUE_BASENAME else fetch_shard(ShardCache(cache._config), shard)
    assert read_number(root / name) is None


def test_a_pipe_under_the_name_of_a_shard_is_replaced(tmp_path: Path) -> None:
    write_dataset(tmp_path / "remote")
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    (shard, _) = cache.read_index().shards
    os.mkfifo(tmp_path / "cache" / shard.raw_data.basename)
    assert (fetch_shard(cache, shard) / shard.raw_data.basename).read_bytes() == raw_data(0)


def test_a_directory_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with assert_error(StorageError, path="gone") as caught:
        claim(tmp_path / "gone", NAME)
    assert "removed" in str(caught.value)
    assert not (tmp_path / "gone").exists()


def test_without_locks_everybody_writes_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such filesystem can be mounted here, so the system call is made to fail as it does there."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("lightning_streaming.cache.shared_files.fcntl.flock", refuse)
    part = claimed(tmp_path)
    assert part.path != staging_path(tmp_path, NAME)
    assert str(os.getpid()) in part.path.name
    assert lock_if_dead(part.path) is None
    part.publish(10**18)
    part.keep_shared()
    part.close()
    assert (tmp_path / NAME).exists()


def test_the_machine_is_told_by_its_boot_or_else_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = staging_path(tmp_path, NAME)
    monkeypatch.setattr(file_states, "_BOOT", tmp_path / "no such file")
    file_states._boot.cache_clear()
    try:
        assert staging_path(tmp_path, NAME) != here
    finally:
        file_states._boot.cache_clear()


@pytest.mark.parametrize(
    ("host", "age", "dead"),
    [("this one", 1.0, True), ("this one", -1.0, False), ("another", 1.0, False)],
    ids=["written before it was started", "by another of its name", "by another"],
)
def test_what_was_left_before_a_reset_is_dead_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, age: float, dead: bool
) -> None:
    """``age``: seconds from the last write until this machine was started."""
    started = time.time() - 60  # after a day it is dead for its age
    monkeypatch.setattr(file_states, "_boot_time", lambda: started)
    claimed(tmp_path).close()
    name = file_states._host() if host == "this one" else "01234567"
    left = tmp_path / ".arriving" / f"{name}-89abcdef-0-0123.part"
    left.write_bytes(b"half")
    os.utime(left, (started - age,) * 2)
    descriptor = lock_if_dead(left)
    assert (descriptor is not None) == dead
    if descriptor is not None:
        os.close(descriptor)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the kernel does not tell when it was started")
def test_the_start_of_this_machine_is_known() -> None:
    told = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    assert abs(file_states._boot_time() - int(told.split()[1])) < 5


def test_a_part_beats_while_its_writer_lives_and_not_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_states, "_BEAT_SECONDS", 0.01)
    part = claimed(tmp_path)
    before = part.path.stat().st_mtime_ns
    with part.beating():
        for _ in pauses(10.0):
            if part.path.stat().st_mtime_ns > before:
                break
        else:
            pytest.fail("its time stands still")
    assert part.publish(10**18)
    part.close()
    assert (tmp_path / NAME).stat().st_mtime_ns == 10**18


def test_a_directory_that_is_removed_before_a_file_is_published_is_told(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    part = claimed(root)
    shutil.rmtree(root)
    with assert_error(StorageError, path="cache") as caught:
        part.publish(10**18)
    assert "removed" in str(caught.value)
    part.close()
    with assert_error(StorageError, path="cache") as caught:
        WaitQueue(root)
    assert "removed" in str(caught.value)


def test_a_file_is_on_disk_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cutting the power here, so the order of the system calls has to do."""
    calls: list[str] = []
    sync, replace = os.fdatasync, os.replace

    def record_sync(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == 4
        calls.append("sync")
        sync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fdatasync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    part = claimed(tmp_path)
    part.resize(4)
    part.publish(10**18)
    part.close()
    assert calls == ["sync", "replace"]


def test_a_disk_that_turns_out_full_when_it_is_synced_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", refuse)
    part = claimed(tmp_path)
    with assert_error(DiskFullError, path=tmp_path):
        part.publish(10**18)
    part.close()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed where they were found."""
    names: list[str] = []
    check = RemoteSource.check

    def noting(self: RemoteSource, file: FileInfo, path: Path) -> bool:
        names.append(file.basename)
        return check(self, file, path)

    monkeypatch.setattr(RemoteSource, "check", noting)
    return names


def cache_of(store: HttpStore, tmp_path: Path, **settings: Any) -> ShardCache:
    return ShardCache(CacheConfig(name="code", remote=store.url, local=tmp_path / "cache", **settings))


def ensure(store: HttpStore, tmp_path: Path) -> Path:
    cache = cache_of(store, tmp_path)
    shard = cache.read_index().shards[0]
    directory = fetch_shard(cache, shard)
    assert directory is not None
    return directory / shard.raw_data.basename


def downloads(store: HttpStore) -> int:
    return store.requests().count("shard.00000.mds")


def test_what_we_fetched_is_not_hashed_again(http_store: HttpStore, tmp_path: Path, hashed: list[str]) -> None:
    write_dataset(http_store.root, shards=1)
    assert ensure(http_store, tmp_path) == ensure(http_store, tmp_path)
    assert (hashed, downloads(http_store)) == ([], 1)


def test_what_somebody_put_there_is_hashed_once_and_used(
    http_store: HttpStore, tmp_path: Path, hashed: list[str]
) -> None:
    write_dataset(http_store.root, shards=1)
    path = tmp_path / "cache" / "shard.00000.mds"
    path.parent.mkdir()
    path.write_bytes(raw_data(0))
    inode = path.stat().st_ino
    for _ in range(3):
        assert ensure(http_store, tmp_path) == path
    assert (hashed, downloads(http_store)) == (["shard.00000.mds"], 0)
    assert path.stat().st_ino == inode
    own = cache_of(http_store, tmp_path).directory.own
    assert own.tag is not None
    assert path.stat().st_mtime_ns == verified_tag(own.tag)


@pytest.mark.parametrize("found", [bytes(3000), b"short", raw_data(0) + b"long", b""])
def test_what_is_wrong_is_replaced(http_store: HttpStore, tmp_path: Path, found: bytes) -> None:
    write_dataset(http_store.root, shards=1)
    path = tmp_path / "cache" / "shard.00000.mds"
    path.parent.mkdir()
    path.write_bytes(found)
    assert ensure(http_store, tmp_path).read_bytes() == raw_data(0)
    assert downloads(http_store) == 1


def test_what_is_evicted_between_opening_and_locking_it_is_not_here(
    http_store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(http_store.root, shards=1)
    ensure(http_store, tmp_path)
    cache = cache_of(http_store, tmp_path)
    shard = cache.read_index().shards[0]
    assert cache.has(shard)
    before_the_first_lock(monkeypatch, lambda: cache.evict(shard))
    assert not cache.has(shard)


@pytest.mark.parametrize("data", [b"mine", bytes(3000)], ids=["other size", "same size"])
def test_what_was_changed_since_it_was_looked_at_is_not_evicted(
    data: bytes, http_store: HttpStore, tmp_path: Path
) -> None:
    write_dataset(http_store.root, shards=1)
    path = ensure(http_store, tmp_path)
    seen = find_entry(path)
    assert seen is not None
    path.write_bytes(data)
    directory = cache_of(http_store, tmp_path).directory
    with directory.locked() as count:
        assert count is not None
        assert not directory.remove_unused(count, [seen], "asked for")
        assert count.used == 3000
    assert path.read_bytes() == data


def test_a_tag_says_nothing_of_a_file_of_another_size(http_store: HttpStore, tmp_path: Path) -> None:
    """As a disk that loses its last writes may leave it."""
    write_dataset(http_store.root, shards=1)
    path = ensure(http_store, tmp_path)
    tag = path.stat().st_mtime_ns
    os.truncate(path, 1000)
    os.utime(path, ns=(tag, tag))
    assert ensure(http_store, tmp_path).read_bytes() == raw_data(0)
    assert downloads(http_store) == 2


def test_what_was_changed_after_it_was_checked_is_replaced(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, shards=1)
    path = ensure(http_store, tmp_path)
    with path.open("r+b") as file:
        file.write(b"damage")
    assert ensure(http_store, tmp_path).read_bytes() == raw_data(0)
    assert downloads(http_store) == 2


@pytest.mark.parametrize("compression", [None, "gz"])
@pytest.mark.parametrize("has_old_index", [False, True])
def test_without_a_hash_files_of_an_earlier_dataset_are_not_taken_for_ours(
    has_old_index: bool, compression: str | None, http_store: HttpStore, tmp_path: Path
) -> None:
    """All sizes are alike; only the bytes differ."""
    write_dataset(http_store.root, shards=2, hashes=(), compression=compression)
    write_dataset(tmp_path / "cache", shards=3, hashes=(), seed=1)
    if not has_old_index:
        (tmp_path / "cache" / "index.json").unlink()
    for _ in range(2):
        assert ensure(http_store, tmp_path).read_bytes() == raw_data(0)
    stored = "shard.00000.mds" + (".gz" if compression else "")
    assert http_store.requests().count(stored) == 1, "what was fetched is known again"


@pytest.mark.rotate
@pytest.mark.parametrize("hashes", [(), ("sha1",)])
@pytest.mark.parametrize("seeds", [(0, 1), (1, 0)])
@pytest.mark.parametrize("compressions", [(None, None), (None, "gz"), ("gz", None), ("gz", "gz")])
def test_a_remote_that_gets_new_data_of_the_same_sizes_is_read_anew(
    compressions: tuple[str | None, str | None],
    seeds: tuple[int, int],
    hashes: tuple[str, ...],
    http_store: HttpStore,
    tmp_path: Path,
) -> None:
    """But where neither index nor sizes say that anything has changed."""
    for number, (compression, seed) in enumerate(zip(compressions, seeds, strict=True)):
        for path in http_store.root.iterdir():
            path.unlink()
        write_dataset(http_store.root, shards=2 - number, hashes=hashes, compression=compression, seed=seed)
        cache = cache_of(http_store, tmp_path)
        with cache.hold(cache.read_index().shards[0]) as directory:
            assert (directory / "shard.00000.mds").read_bytes() == raw_data(0, seed=seed)


@pytest.mark.parametrize("compression", [None, "gz"])
def test_without_a_hash_what_came_with_the_same_index_is_used(
    compression: str | None, http_store: HttpStore, tmp_path: Path
) -> None:
    """As where the dataset was copied to the directory before; but a raw form may be anybody's."""
    write_dataset(http_store.root, shards=2, hashes=(), compression=compression)
    write_dataset(tmp_path / "cache", shards=2, hashes=(), compression=compression)
    if compression:
        (tmp_path / "cache" / "shard.00000.mds").write_bytes(raw_data(0, seed=1))
    for _ in range(2):
        assert ensure(http_store, tmp_path).read_bytes() == raw_data(0)
    assert [name for name in http_store.requests() if name.startswith("shard.")] == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_two_users_share_a_directory(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, shards=4)
    shared = tmp_path / "cache"
    shared.mkdir()
    os.chown(shared, -1, 4242)
    shared.chmod(0o2775)
    open_to_all(shared)
    for user, shards in [(4001, [0, 1]), (4002, [1, 2]), (4001, [0, 2, 3])]:
        child = multiprocessing.get_context("fork").Process(target=_as_user, args=(user, http_store, tmp_path, shards))
        child.start()
        child.join()
        assert child.exitcode == 0
    assert http_store.requests().count("shard.00001.mds") == 1
    names = {path.name: path.stat() for path in shared.iterdir()}
    assert [names[f"shard.0000{number}.mds"].st_uid for number in (2, 3)] == [4002, 4001]
    assert {found.st_gid for found in names.values()} == {4242}


def _as_user(user: int, store: HttpStore, tmp_path: Path, shards: list[int]) -> None:
    """Read shards and evict one, in a process of another user of the group."""
    os.setgroups([4242])
    os.setgid(user)
    os.setuid(user)
    os.umask(0o077)
    os.environ["LIGHTNING_STREAMING_RUNTIME"] = f"/tmp/lightning-streaming-{user}-{os.getpid()}"
    cache = cache_of(store, tmp_path)
    index = cache.read_index()
    assert None not in [fetch_shard(cache, index.shards[shard]) for shard in shards]
    for shard in shards:
        assert (tmp_path / "cache" / f"shard.{shard:05}.mds").read_bytes() == raw_data(shard)
    assert cache.evict(index.shards[shards[0]])
