"""Files on their way: one writer each, whose death everybody sees."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_streaming.cache import arrival
from lightning_streaming.cache.arrival import Part, claim, lock_if_dead, part_path
from lightning_streaming.errors import StorageError

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
    part.publish(tmp_path, "sub/x.mds", 10**18)
    assert not part.is_unpublished()
    assert part.keep_shared()
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
    other = tmp_path / ".arriving" / "0123456789ab-0-0123.part"
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
    assert part.keep_shared()
    part.close()
    assert (tmp_path / NAME).exists()


def test_the_machine_is_told_by_its_boot_or_else_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = part_path(tmp_path, NAME)
    monkeypatch.setattr(arrival, "_BOOT", tmp_path / "no such file")
    arrival._machine.cache_clear()
    try:
        assert part_path(tmp_path, NAME) != here
    finally:
        arrival._machine.cache_clear()
