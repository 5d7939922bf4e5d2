from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lightning_streaming.errors import DiskFullError, StorageError
from lightning_streaming.storage.sinks import FileSink, Gate, MemorySink, write_error


def test_bytes_go_where_they_belong_in_whatever_order(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "x")
    sink.resize(6)
    sink.write(3, b"def")
    sink.write(0, memoryview(b"abc"))
    sink.close()
    assert (tmp_path / "x").read_bytes() == b"abcdef"


def test_a_file_that_is_there_keeps_its_inode_and_loses_what_is_too_much(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    before = path.stat().st_ino
    sink = FileSink(path)
    sink.resize(4)
    sink.close()
    assert (path.read_bytes(), path.stat().st_ino, sink.is_new) == (b"0123", before, False)
    assert FileSink(tmp_path / "y").is_new


def test_a_closed_sink_writes_to_no_file_not_even_to_one_that_has_its_number(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "x")
    sink.close()
    sink.close()
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)  # most likely has that number now
    with pytest.raises(StorageError, match="given up"):
        sink.write(0, b"late")
    with pytest.raises(StorageError, match="given up"):
        sink.resize(1)
    os.close(other)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_full_disk_is_told_with_what_to_do() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no disk that is always full")
    sink = FileSink(full)
    with pytest.raises(DiskFullError, match=r"no room left to write /dev/full: .*choose another directory$"):
        sink.write(0, b"x")
    sink.close()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EROFS, StorageError)]
)
def test_errors_of_the_disk_name_the_file(number: int, kind: type[StorageError]) -> None:
    error = write_error(Path("x/y"), OSError(number, "words"))
    assert type(error) is kind
    assert "x/y" in str(error)
    assert write_error(Path("z"), error) is error


def test_a_gate_lets_through_until_it_is_closed() -> None:
    memory = MemorySink()
    gate = Gate(memory)
    gate.write(0, b"abc")
    gate.write(1, b"x")
    gate.close()
    with pytest.raises(StorageError, match="given up"):
        gate.write(0, b"late")
    assert memory.data == b"axc"
    memory.resize(1)
    assert memory.data == b"a"
