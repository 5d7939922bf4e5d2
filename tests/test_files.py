"""Files that appear whole, locks that die with their owner, and paths that stay under their root."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_streaming.errors import IndexFormatError, LockTimeoutError
from lightning_streaming.files import Identity, appears_whole, hold_lock, join_under, partial_path, remove_partials
from tests.helpers import assert_error


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"before")
    with appears_whole(path) as partial:
        partial.write_bytes(b"after")
        assert path.read_bytes() == b"before"
        assert partial.parent == tmp_path
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_file_that_is_not_finished_does_not_appear(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), appears_whole(tmp_path / "shard") as partial:
        _write_half(partial, error)
    assert not list(tmp_path.iterdir())


def _write_half(path: Path, error: type[BaseException]) -> None:
    path.write_bytes(b"half")
    raise error


def test_a_partial_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("of the user")
    partial_path(tmp_path / "file").symlink_to(tmp_path / "outside")
    with appears_whole(tmp_path / "file") as partial:
        partial.write_text("new")
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "outside").read_text() == "of the user"


def test_writers_do_not_meet(tmp_path: Path) -> None:
    partials = {partial_path(tmp_path / "shard")}
    thread = threading.Thread(target=lambda: partials.add(partial_path(tmp_path / "shard")))
    thread.start()
    thread.join()
    assert len(partials) == 2
    assert all(str(os.getpid()) in partial.name and partial.suffix == ".part" for partial in partials)


def _leftover(path: Path, process: int, machine: str | None = None) -> Path:
    """What a writer with this process id would leave."""
    ours = partial_path(path).name
    name = ours.replace(f"-{os.getpid()}-", f"-{process}-").replace(
        socket.gethostname(), machine or socket.gethostname()
    )
    leftover = path.with_name(name)
    leftover.write_bytes(b"half")
    return leftover


def _dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_what_dead_writers_of_a_file_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path, dead = tmp_path / "shard[1]", _dead_process()
    removed = [_leftover(path, dead)]
    kept = [
        path,
        _leftover(tmp_path / "shard[2]", dead),
        _leftover(tmp_path / "shard1", dead),
        _leftover(path, os.getpid()),
        _leftover(path, os.getppid()),
        _leftover(path, 1),
        _leftover(path, dead, machine="another-machine"),
    ]
    path.write_bytes(b"whole")
    remove_partials(path)
    assert not any(one.exists() for one in removed)
    assert all(one.exists() for one in kept)


@contextmanager
def _zombie() -> Iterator[int]:
    """A process that was killed and that nobody has waited for, as under a container whose first process reaps none."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        yield process.pid
    finally:
        process.communicate()


def test_a_killed_writer_that_nobody_waited_for_is_dead(tmp_path: Path) -> None:
    with _zombie() as process:
        leftover = _leftover(tmp_path / "shard", process)
        remove_partials(tmp_path / "shard")
        assert not leftover.exists()


@pytest.mark.parametrize(
    ("name", "joined"),
    [("shard.mds", "shard.mds"), ("a/b.mds", "a/b.mds"), ("./a//b", "a/b"), ("..a", "..a"), ("a..b", "a..b")],
)
def test_names_inside_are_joined(tmp_path: Path, name: str, joined: str) -> None:
    assert join_under(tmp_path, name) == tmp_path / joined


@pytest.mark.parametrize(
    "name", ["", ".", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "a\\..\\x", "a\0b", "\ud800"]
)
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with assert_error(IndexFormatError, path=name):
        join_under(tmp_path, name)


HOLDER = """
import sys
from pathlib import Path
from lightning_streaming.files import hold_lock
with hold_lock(Path(sys.argv[1]), 5, "test"):
    print("held", flush=True)
    input()
"""


@contextmanager
def _held_elsewhere(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder
        holder.communicate(b"\n")


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_a_lock_held_by_another_process_names_it(tmp_path: Path, timeout: float) -> None:
    path = tmp_path / "deep" / "lock"
    with _held_elsewhere(path) as holder:
        with pytest.raises(LockTimeoutError) as caught, hold_lock(path, timeout, "fetch it"):
            pass
        for words in (f"process {holder.pid} on {socket.gethostname()}", "to fetch it", f"{timeout:g} s", str(path)):
            assert words in str(caught.value)
    with hold_lock(path, 0, "fetch it"):
        pass


def test_a_lock_dies_with_its_owner(tmp_path: Path) -> None:
    with _held_elsewhere(tmp_path / "lock") as holder:
        holder.kill()
        holder.wait()
        with hold_lock(tmp_path / "lock", 1, "go on"):
            pass


def test_a_lock_waits_for_its_turn_and_excludes_threads_too(tmp_path: Path) -> None:
    inside: list[int] = []

    def enter(number: int) -> None:
        for _ in range(20):
            with hold_lock(tmp_path / "lock", 10, "count"):
                inside.append(number)
                assert inside == [number]
                inside.pop()

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not inside


def test_a_lock_is_given_back_when_its_block_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), hold_lock(tmp_path / "lock", 0, "fail"):
        raise ValueError("inside")
    with hold_lock(tmp_path / "lock", 0, "try again"):
        pass


def test_the_identity_of_a_file_changes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.write_bytes(b"abc")
    before = Identity.of(path)
    with path.open("rb") as file:
        assert Identity.of(file.fileno()) == before
    os.utime(path, ns=(0, before.modified + 1))
    assert Identity.of(path) != before
