"""Files on their way: one writer each, whose death everybody sees."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_streaming.cache import arrival
from lightning_streaming.cache.arrival import Part, claim, lock_if_dead, part_path
from lightning_streaming.cache.locks import pauses
from lightning_streaming.cache.turns import Turn
from lightning_streaming.errors import DiskFullError, StorageError

NAME = "shard.00000.mds"


def claimed(root: Path, name: str = NAME) -> Part:
    part = claim(root, name)
    assert part is not None
    return part


def process_that_writes(root: Path) -> subprocess.Popen[bytes]:
    """A process that has claimed the shard and written half of it."""
    code = (
        "import sys, time; from pathlib import Path; from lightning_streaming.cache.arrival import claim\n"
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
    assert part.publish(tmp_path, "sub/x.mds", 10**18)
    assert not part.is_unpublished()
    part.keep_shared()
    part.close()
    final = tmp_path / "sub" / "x.mds"
    assert (final.read_bytes(), final.stat().st_mtime_ns) == (b"data", 10**18)
    assert list((tmp_path / ".arriving").iterdir()) == []


def test_a_killed_writer_is_seen_to_be_dead_and_a_living_one_not(tmp_path: Path) -> None:
    with process_that_writes(tmp_path) as process:
        path = part_path(tmp_path, NAME)
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
    part.publish(tmp_path, NAME, 10**18)
    part.close()
    fcntl.flock(late, fcntl.LOCK_EX)
    again = claimed(tmp_path)
    assert again.path.stat().st_ino != (tmp_path / NAME).stat().st_ino
    again.close()
    os.close(late)


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
        part.publish(root, "sub/x.mds", 10**18)
        part.close()
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o7777 for path in (root / "sub" / "x.mds", root / "sub", root / ".arriving")]
    assert modes == [0o644, 0o2775, 0o2775]


def test_a_directory_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gone was removed while it was in use"):
        claim(tmp_path / "gone", NAME)
    assert not (tmp_path / "gone").exists()


def test_without_locks_everybody_writes_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such filesystem can be mounted here, so the system call is made to fail as it does there."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("lightning_streaming.cache.locks.fcntl.flock", refuse)
    part = claimed(tmp_path)
    assert part.path != part_path(tmp_path, NAME)
    assert str(os.getpid()) in part.path.name
    assert lock_if_dead(part.path) is None
    part.publish(tmp_path, NAME, 10**18)
    part.keep_shared()
    part.close()
    assert (tmp_path / NAME).exists()


def test_the_machine_is_told_by_its_boot_or_else_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = part_path(tmp_path, NAME)
    monkeypatch.setattr(arrival, "_BOOT", tmp_path / "no such file")
    arrival._boot.cache_clear()
    try:
        assert part_path(tmp_path, NAME) != here
    finally:
        arrival._boot.cache_clear()


@pytest.mark.parametrize(
    ("host", "age", "dead"),
    [("this one", 1.0, True), ("this one", -1.0, False), ("another", 1.0, False)],
    ids=["written before it was started", "by another of its name", "by another"],
)
def test_what_was_left_before_a_reset_is_dead_at_once(tmp_path: Path, host: str, age: float, dead: bool) -> None:
    """``age``: seconds from the last write until this machine was started."""
    claimed(tmp_path).close()
    name = arrival._host() if host == "this one" else "01234567"
    left = tmp_path / ".arriving" / f"{name}-89abcdef-0-0123.part"
    left.write_bytes(b"half")
    os.utime(left, (arrival._started() - age,) * 2)
    descriptor = lock_if_dead(left)
    assert (descriptor is not None) == dead
    if descriptor is not None:
        os.close(descriptor)


def test_a_part_beats_while_its_writer_lives_and_not_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "_BEAT_SECONDS", 0.01)
    part = claimed(tmp_path)
    before = part.path.stat().st_mtime_ns
    with part.beating():
        for _ in pauses(10.0):
            if part.path.stat().st_mtime_ns > before:
                break
        else:
            pytest.fail("its time stands still")
    assert part.publish(tmp_path, NAME, 10**18)
    part.close()
    assert (tmp_path / NAME).stat().st_mtime_ns == 10**18


def test_a_directory_that_is_removed_before_a_file_is_published_is_told(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    part = claimed(root)
    shutil.rmtree(root)
    with pytest.raises(StorageError, match="cache was removed while it was in use"):
        part.publish(root, NAME, 10**18)
    part.close()
    with pytest.raises(StorageError, match="cache was removed while it was in use"):
        Turn(root)


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
    part.publish(tmp_path, NAME, 10**18)
    part.close()
    assert calls == ["sync", "replace"]


def test_a_disk_that_turns_out_full_when_it_is_synced_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", refuse)
    part = claimed(tmp_path)
    with pytest.raises(DiskFullError, match="no room left"):
        part.publish(tmp_path, NAME, 10**18)
    part.close()
