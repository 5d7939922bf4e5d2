"""Filesystems that block, and asynchronous ones that no code of ours knows."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from lightning_streaming.errors import DownloadError, IntegrityError, ObjectNotFoundError, StorageError
from lightning_streaming.storage import download, read_bytes, read_range
from lightning_streaming.storage.filesystems import call, open_filesystem
from lightning_streaming.storage.ranges import cut

DATA = random.Random(0).randbytes((17 << 20) + 3)


class _Stalling(BytesIO):
    """Gives half of its bytes, and the rest once it is let go."""

    def __init__(self, data: bytes, gate: threading.Event) -> None:
        super().__init__(data)
        self._gate = gate

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() >= len(self.getbuffer()) // 2:
            self._gate.wait()
        return super().read(size)


class _Prefetching(BytesIO):
    """A file like those of paramiko."""

    prefetched = 0

    def prefetch(self) -> None:
        type(self).prefetched += 1


class BlockingStore(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """One object; some of its readers stall."""

    protocol = "blocking"
    stalls = 0
    gate = threading.Event()
    made = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        type(self).made += 1

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if path != "x":
            raise FileNotFoundError(path)
        cls = type(self)
        cls.stalls -= 1
        return _Stalling(DATA, cls.gate) if cls.stalls >= 0 else _Prefetching(DATA)

    def find(self, path: str, **_: Any) -> list[str]:
        self.gate.wait()
        return []


class OtherStore(AsyncFileSystem):  # type: ignore[misc]
    """One object, which some stores of this kind send whole whatever is asked for."""

    protocol = "other"
    asked: list[tuple[int | None, int | None]] = []  # noqa: RUF012 - of the class, to be seen from outside
    ignores_ranges = False

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": len(DATA), "type": "file"}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.asked.append((start, end))
        return DATA if self.ignores_ranges else DATA[start:end]


@pytest.fixture(autouse=True)
def _stores() -> Iterator[None]:
    fsspec.register_implementation("blocking", BlockingStore, clobber=True)
    fsspec.register_implementation("other", OtherStore, clobber=True)
    BlockingStore.stalls, OtherStore.ignores_ranges = 0, False
    BlockingStore.gate.clear()
    OtherStore.asked.clear()
    yield
    BlockingStore.gate.set()


def fetch(url: str, target: Path, **settings: Any) -> bytes:
    download(
        url, settings.pop("options", {}), target, **{"expected_bytes": len(DATA), "retry": 2, "timeout": 5, **settings}
    )
    return target.read_bytes()


@pytest.mark.parametrize("kind", ["local", "memory", "blocking", "other"])
def test_whole_objects_and_parts_of_them_are_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "x").write_bytes(DATA)
    if kind == "memory":
        fsspec.filesystem("memory").pipe_file("/x", DATA)
    url = str(tmp_path / "x") if kind == "local" else f"{kind}://x"
    assert fetch(url, tmp_path / "y") == DATA
    assert fetch(url, tmp_path / "y", expected_bytes=None) == DATA
    assert read_bytes(url, {}, retry=1, timeout=5) == DATA
    assert read_range(url, {}, 1000, 2000, retry=1, timeout=5) == DATA[1000:2000]
    assert read_range(url, {}, 1000, 1000, retry=1, timeout=5) == b""
    for wrong in (len(DATA) - 1, len(DATA) + 1, 0):
        with pytest.raises(IntegrityError, match=r"x.* \(attempt 1 of 1\)"):
            fetch(url, tmp_path / "y", expected_bytes=wrong, retry=1)
    with pytest.raises(IntegrityError, match="promises"):
        read_range(url, {}, len(DATA) - 10, len(DATA) + 10, retry=1, timeout=5)


def test_a_read_that_stalls_is_left_behind_and_writes_nothing_later(tmp_path: Path) -> None:
    BlockingStore.stalls = 1
    made = BlockingStore.made
    assert fetch("blocking://x", tmp_path / "x", timeout=0.5, options={"for": "this test"}) == DATA
    assert BlockingStore.made == made + 2  # the stalled one is not used again
    (tmp_path / "x").write_bytes(b"mine now")
    BlockingStore.gate.set()
    for thread in threading.enumerate():
        if thread.name == "lightning-streaming-transfer":
            thread.join(10)
    assert (tmp_path / "x").read_bytes() == b"mine now"


def test_a_read_that_always_stalls_fails(tmp_path: Path) -> None:
    BlockingStore.stalls = 2
    with pytest.raises(
        DownloadError, match=r"2 attempts failed, the last with TimeoutError: nothing arrived for 0\.3 s"
    ):
        fetch("blocking://x", tmp_path / "x", timeout=0.3)
    assert not (tmp_path / "x").exists()


def test_any_call_that_stalls_is_left_behind() -> None:
    filesystem, _ = open_filesystem("blocking://x", {})
    with pytest.raises(TimeoutError, match="not done"):
        call(filesystem, "find", "", timeout=0.2)
    assert open_filesystem("blocking://x", {})[0] is not filesystem


def test_what_sftp_can_ask_for_ahead_is_asked_for_when_all_of_it_is_wanted(tmp_path: Path) -> None:
    before = _Prefetching.prefetched
    read_range("blocking://x", {}, 5, 9, retry=1, timeout=5)
    assert _Prefetching.prefetched == before
    fetch("blocking://x", tmp_path / "x")
    assert _Prefetching.prefetched == before + 1


def test_what_is_missing_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match="blocking://y"):
        fetch("blocking://y", tmp_path / "x", retry=9)


def test_an_unknown_asynchronous_filesystem_is_asked_for_parts(tmp_path: Path) -> None:
    fetch("other://x", tmp_path / "x")
    assert OtherStore.asked == [part.span for part in cut(len(DATA))]
    OtherStore.ignores_ranges = True
    assert fetch("other://x", tmp_path / "y") == DATA
    assert OtherStore.asked[-1] == (None, None)


def test_a_filesystem_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    fsspec.register_implementation("broken", _Broken, clobber=True)
    with pytest.raises(StorageError, match="could not download broken://x"):
        fetch("broken://x", tmp_path / "x", retry=1)


class _Broken(BlockingStore):
    protocol = "broken"

    def __init__(self, **options: Any) -> None:
        raise OSError("no route")
