from __future__ import annotations

import asyncio
import errno
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import DiskFullError, IntegrityError, StorageError
from lightning_streaming.files import disk_errors
from lightning_streaming.storage import Location, downloads, requests
from lightning_streaming.storage.downloads import FileSink, Gate, MemorySink, next_ticket, share_connections
from tests.helpers import assert_error
from tests.tiers import examples


@given(st.integers(0, 1 << 36), st.integers(1 << 20, 1 << 26))
def test_parts_follow_one_another_and_make_the_whole(size: int, part_bytes: int) -> None:
    parts = downloads._cut_chunks(size, part_bytes)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == size
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(part.at == part.start for part in parts)
    assert all(part.stop - part.start <= part_bytes * 1.5 for part in parts)


@given(st.integers(0, 1 << 30))
def test_no_range_is_empty(size: int) -> None:
    for part in downloads._cut_chunks(size):
        assert part.span is None or part.span[0] < part.span[1]


@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        (0, [0]),
        (1, [1]),
        (downloads._CHUNK_BYTES * 3 // 2 - 1, [downloads._CHUNK_BYTES * 3 // 2 - 1]),
        (downloads._CHUNK_BYTES * 2, [downloads._CHUNK_BYTES, downloads._CHUNK_BYTES]),
        (64 << 20, [downloads._CHUNK_BYTES] * 8),
        ((20 << 20) + 7, [107 << 16, 107 << 16, (106 << 16) + 7]),  # starts are multiples of 64 KiB
    ],
)
def test_parts_are_of_nearly_equal_length(size: int, lengths: list[int]) -> None:
    assert [part.stop - part.start for part in downloads._cut_chunks(size)] == lengths


@pytest.mark.parametrize(
    ("part", "span"),
    [
        (downloads._Chunk(0, 10, is_last=True, at=0), None),
        (downloads._Chunk(0, 10, is_last=True, at=4), (4, 11)),  # one more, to notice a longer object
        (downloads._Chunk(0, 10, is_last=False, at=0), (0, 10)),
        (downloads._Chunk(10, 20, is_last=False, at=13), (13, 20)),
        (downloads._Chunk(20, 30, is_last=True, at=20), (20, 31)),
    ],
)
def test_a_part_asks_for_what_has_not_arrived(part: downloads._Chunk, span: tuple[int, int] | None) -> None:
    assert part.span == span


def test_ranges_are_told_as_http_does() -> None:
    assert requests._range_headers((0, 10)) == {"Range": "bytes=0-9"}
    assert requests._range_headers((5, 6)) == {"Range": "bytes=5-5"}
    assert requests._range_headers(None) == {}


@pytest.mark.parametrize(
    ("header", "byte"),
    [("bytes 5-9/10", 5), ("bytes 0-0/*", 0), ("bytes */10", None), ("items 5-9/10", None), ("", None), (None, None)],
)
def test_the_first_byte_of_an_answer_is_read(header: str | None, byte: int | None) -> None:
    assert requests._first_byte(header) == byte


async def _hold(slots: downloads._ConnectionSlots, turn: int, most: int, order: list[int], peak: list[int]) -> None:
    async with slots.acquire(turn, most):
        order.append(turn)
        peak.append(slots.in_flight)
        await asyncio.sleep(0)


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 4))
def test_lanes_are_never_more_than_allowed_and_all_get_one(turns: list[int], most: int) -> None:
    async def run() -> None:
        slots, order, peak = downloads._ConnectionSlots(), list[int](), list[int]()
        await asyncio.gather(*[_hold(slots, turn, most, order, peak) for turn in turns])
        assert sorted(order) == sorted(turns)
        assert max(peak, default=0) <= most
        assert slots.in_flight == 0

    asyncio.run(run())


def test_the_download_that_began_first_goes_first() -> None:
    async def run() -> list[int]:
        slots, order = downloads._ConnectionSlots(), list[int]()
        async with slots.acquire(0, 1):
            waiting = [asyncio.ensure_future(_hold(slots, turn, 1, order, [])) for turn in (3, 1, 2, 1)]
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        return order

    assert asyncio.run(run()) == [1, 1, 2, 3]


@pytest.mark.parametrize("granted", [False, True])
def test_one_that_is_cancelled_leaves_its_lane_to_others(granted: bool) -> None:
    async def run() -> None:
        slots, order = downloads._ConnectionSlots(), list[int]()
        async with slots.acquire(0, 1):
            gone = asyncio.ensure_future(_hold(slots, 1, 1, order, []))
            stays = asyncio.ensure_future(_hold(slots, 2, 1, order, []))
            await asyncio.sleep(0)
            if not granted:
                gone.cancel()
        gone.cancel()  # with its slot granted just now, and not yet taken
        await asyncio.wait_for(stays, 10)
        assert (order, slots.in_flight) == ([2], 0)

    asyncio.run(run())


def test_turns_count_up() -> None:
    assert next_ticket() < next_ticket()


def test_a_forked_child_has_lanes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = downloads._slots_of_process()
    assert downloads._slots_of_process() is mine
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert downloads._slots_of_process() is not mine


@pytest.mark.parametrize(("processes", "most"), [(1, 16), (4, 16), (8, 8), (32, 2), (1000, 2)])
def test_the_processes_of_a_node_share_its_connections(
    monkeypatch: pytest.MonkeyPatch, processes: int, most: int
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -2)

    async def run() -> int:
        peak: list[int] = []
        await asyncio.gather(*[_hold(downloads._slots_of_process(), 0, 99, [], peak) for _ in range(20)])
        return max(peak)

    share_connections(processes)
    assert asyncio.run(run()) == most


def test_chunks_of_two_versions_of_an_object_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            version, self.server.version = self.server.version, b"b"  # type: ignore[attr-defined]
            start, stop = map(int, self.headers.get("Range", f"bytes=0-{size - 1}").removeprefix("bytes=").split("-"))
            stop = min(stop + 1, size)
            self.send_response(206)
            self.send_header("ETag", f'"{version.decode()}"')
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            self.wfile.write(version * (stop - start))

        def log_message(self, *_: object) -> None:
            pass

    size = 3 << 16
    monkeypatch.setattr(downloads._cut_chunks, "__defaults__", (1 << 16,))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.version = b"a"  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        place = Location(f"http://127.0.0.1:{server.server_port}/x", attempts=1, timeout=20)
        with assert_error(IntegrityError, path="/x", hint="start the run again"):
            place.download(tmp_path / "x", size=size)
        place.download(tmp_path / "x", size=size)
        server.shutdown()
    assert (tmp_path / "x").read_bytes() == b"b" * size


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
    with assert_error(StorageError, path="/x") as caught:
        sink.write(0, b"late")
    assert "given up" in str(caught.value)
    with assert_error(StorageError, path="/x") as caught:
        sink.resize(1)
    assert "given up" in str(caught.value)
    os.close(other)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_full_disk_is_told_with_what_to_do() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no disk that is always full")
    sink = FileSink(full)
    with assert_error(DiskFullError, path="full"):
        sink.write(0, b"x")
    sink.close()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EROFS, StorageError)]
)
def test_errors_of_the_disk_name_the_file(number: int, kind: type[StorageError]) -> None:
    with pytest.raises(StorageError, match="x/y") as caught, disk_errors(Path("x/y")):
        raise OSError(number, "words")
    assert type(caught.value) is kind
    with pytest.raises(kind) as again, disk_errors(Path("z")):
        raise caught.value
    assert again.value is caught.value


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
