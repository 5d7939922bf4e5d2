"""Filesystems that block, and asynchronous ones that no code of ours knows."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem, get_lock

from lightning_streaming.errors import (
    ConfigError,
    DownloadError,
    IntegrityError,
    MissingDependencyError,
    ObjectNotFoundError,
)
from lightning_streaming.storage import Location, downloads, prepare
from lightning_streaming.storage.filesystems import call, open_filesystem
from tests.helpers import assert_error
from tests.servers import HttpStore, S3Store

_NO_FORK_WARNING = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def test_a_missing_package_is_named_with_the_line_that_installs_it() -> None:
    with assert_error(MissingDependencyError, path="/x") as caught:
        prepare("dropbox://folder/x")
    assert "dropboxdrivefs" in str(caught.value)


_WITHOUT = """
import sys
from lightning_streaming.errors import MissingDependencyError
from lightning_streaming.storage import Location, prepare

sys.modules[sys.argv[1]] = None  # as if it were not installed
for act in (lambda: prepare(sys.argv[2]), Location(sys.argv[2]).read, Location(sys.argv[2]).stat):
    try:
        act()
    except MissingDependencyError as error:
        print(error)
"""


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("package", "url", "extra"),
    [
        ("huggingface_hub", "hf://datasets/user/name/x", "hub"),
        ("adlfs", "az://container/x", "azure"),
        ("adlfs", "abfs://container@account.dfs.core.windows.net/x", "azure"),
        ("adlfs", "abfss://container/x", "azure"),
        ("ocifs", "oci://bucket@namespace/x", "oci"),
    ],
)
def test_a_missing_package_of_an_extra_is_told_with_the_extra(package: str, url: str, extra: str) -> None:
    command = [sys.executable, "-c", _WITHOUT, package, url]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    line = f"{url} needs the {package} package; run: pip install 'lightning-streaming[{extra}]'"
    assert found.stdout.splitlines() == [line] * 3
    assert "Traceback" not in found.stderr


def test_an_unknown_scheme_is_refused() -> None:
    with assert_error(ConfigError, path="/x") as caught:
        prepare("bogus://bucket/x")
    assert "filesystem" in str(caught.value)


def test_a_chained_url_is_refused() -> None:
    with assert_error(ConfigError, path="/x") as caught:
        prepare("simplecache::s3://bucket/x")
    assert "chained" in str(caught.value)


def test_importing_the_room_imports_no_store() -> None:
    code = "import sys, lightning_streaming.cache, lightning_streaming.storage; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"fsspec", "s3fs", "gcsfs", "aiohttp"}.isdisjoint(loaded)


def test_gcsfs_is_kept_from_grpc_unless_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT")
    prepare("gs://bucket/x")
    assert os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] == "false"
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "true")
    prepare("gs://bucket/x")
    assert os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] == "true"


def _s3_config(**options: Any) -> dict[str, Any]:
    filesystem, _ = open_filesystem("s3://bucket/x", {"key": "k", "secret": "s", **options})
    config: dict[str, Any] = filesystem.config_kwargs
    return config


def test_s3_checksums_of_ranges_are_trusted_only_at_the_stores_own_endpoint() -> None:
    assert "response_checksum_validation" not in _s3_config()
    assert _s3_config(endpoint_url="http://here")["response_checksum_validation"] == "when_required"


def test_settings_of_the_user_win() -> None:
    mine = {"response_checksum_validation": "when_supported", "read_timeout": 7}
    config = _s3_config(endpoint_url="http://here", config_kwargs=mine)
    assert config["response_checksum_validation"] == "when_supported"
    assert config["read_timeout"] == 7


def test_s3_waits_no_longer_than_download_timeout_says_and_keeps_enough_connections() -> None:
    config = _s3_config()
    assert config["retries"]["total_max_attempts"] == 1
    assert config["read_timeout"] > 3600  # ours is the limit
    assert config["max_pool_connections"] >= 64


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x"])
def test_listings_are_not_kept_unless_the_user_wants_it(url: str) -> None:
    options: dict[str, Any] = {"anon": True} if url.startswith("s3") else {"token": "anon"}
    assert open_filesystem(url, options)[0].dircache.use_listings_cache is False
    assert open_filesystem(url, {**options, "use_listings_cache": True})[0].dircache.use_listings_cache is True


def test_options_take_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_SECRET", "hunter2")
    options = {"key": "k", "secret": "${STORE_SECRET}", "client_kwargs": {"region_name": "${STORE_SECRET}"}}
    filesystem, _ = open_filesystem("s3://bucket/x", options)
    assert filesystem.secret == "hunter2"
    assert filesystem.client_kwargs["region_name"] == "hunter2"
    assert options["secret"] == "${STORE_SECRET}"
    monkeypatch.setenv("STORE_SECRET", "hunter3")
    assert open_filesystem("s3://bucket/x", options)[0].secret == "hunter3"
    monkeypatch.delenv("STORE_SECRET")
    with assert_error(ConfigError, option="storage_options") as caught:
        Location("s3://bucket/x", options, attempts=9, timeout=5).read()
    assert "STORE_SECRET" in str(caught.value)


def test_other_options_reach_the_filesystem() -> None:
    s3, _ = open_filesystem("s3://bucket/x", {"profile": "mine", "requester_pays": True})
    assert s3.req_kw == {"RequestPayer": "requester"}
    assert s3.kwargs["profile"] == "mine"
    gcs, _ = open_filesystem("gs://bucket/x", {"token": "anon", "requester_pays": "payer"})
    assert gcs.requester_pays == "payer"


def _reads(url: str, options: dict[str, Any], expected: bytes) -> None:
    gc.collect()  # in a child: what it inherited and nobody holds goes now
    assert Location(url, options, attempts=1, timeout=10).read() == expected
    with TemporaryDirectory() as directory:
        path = Path(directory) / "x"
        Location(url, options, attempts=1, timeout=10).download(path, size=len(expected))
        assert path.read_bytes() == expected


def _exit_code_of_fork(*args: Any) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=_reads, args=args)
    child.start()
    child.join(timeout=60)
    if child.is_alive():
        child.kill()
        child.join()
        return None
    return child.exitcode


@pytest.mark.rotate(1)
@_NO_FORK_WARNING
@pytest.mark.parametrize("store", ["s3", "http"])
def test_parent_and_forked_child_read_side_by_side(
    s3: S3Store, http_store: HttpStore, tmp_path: Path, store: str
) -> None:
    url, options = (f"{s3.make_bucket()}/x", s3.options) if store == "s3" else (f"{http_store.url}/x", {})
    (tmp_path / "x").write_bytes(b"data")
    Location(url if store == "s3" else str(http_store.root / "x"), options).upload(tmp_path / "x")
    _reads(url, options, b"data")
    assert _exit_code_of_fork(url, options, b"data") == 0
    _reads(url, options, b"data")  # over a connection that the child inherited


@pytest.mark.nightly
@_NO_FORK_WARNING
def test_a_child_forked_while_its_parent_downloads_in_parts_does_so_too(http_store: HttpStore, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(20 << 20)
    http_store.put("x", data)
    http_store.put("y", b"small")
    url = f"{http_store.url}/x"
    _reads(f"{http_store.url}/y", {}, b"small")
    http_store.fail("x", "slow", times=2, rate=10 << 20)
    location, settings = Location(url, attempts=1, timeout=10), {"size": len(data), "connections": 2}
    parent = threading.Thread(target=location.download, args=(tmp_path / "x",), kwargs=settings)
    parent.start()
    while len(http_store.requests()) < 4:  # it holds all its slots by then
        assert parent.is_alive()
    assert _exit_code_of_fork(url, {}, data) == 0
    parent.join()
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_spawned_child_downloads_after_its_parent(http_store: HttpStore, method: str) -> None:
    http_store.put("x", b"data")
    _reads(f"{http_store.url}/x", {}, b"data")
    context: Any = multiprocessing.get_context(method)
    child = context.Process(target=_reads, args=(f"{http_store.url}/x", {}, b"data"))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0


@_NO_FORK_WARNING
def test_a_child_forked_while_a_thread_holds_the_lock_of_fsspec_reads(http_store: HttpStore) -> None:
    (http_store.root / "x").write_bytes(b"data")
    _reads(f"{http_store.url}/x", {}, b"data")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with get_lock():
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        assert _exit_code_of_fork(f"{http_store.url}/x", {}, b"data") == 0
    finally:
        done.set()
        holder.join()


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
    location = Location(
        url, settings.pop("options", {}), settings.pop("attempts", 2), timeout=settings.pop("timeout", 5)
    )
    location.download(target, **{"size": len(DATA), **settings})
    return target.read_bytes()


@pytest.mark.rotate(2)
@pytest.mark.parametrize("kind", ["local", "memory", "blocking", "other"])
def test_whole_objects_and_parts_of_them_are_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "x").write_bytes(DATA)
    if kind == "memory":
        fsspec.filesystem("memory").pipe_file("/x", DATA)
    url = str(tmp_path / "x") if kind == "local" else f"{kind}://x"
    assert fetch(url, tmp_path / "y") == DATA
    assert fetch(url, tmp_path / "y", size=None) == DATA
    assert Location(url, attempts=1, timeout=5).read() == DATA
    assert Location(url, attempts=1, timeout=5).read_range(1000, 2000) == DATA[1000:2000]
    assert Location(url, attempts=1, timeout=5).read_range(1000, 1000) == b""
    for wrong in (len(DATA) - 1, len(DATA) + 1, 0):
        with assert_error(IntegrityError, path="/x") as caught:
            fetch(url, tmp_path / "y", size=wrong, attempts=1)
        assert "attempt" in str(caught.value)
    with assert_error(IntegrityError, path="/x") as caught:
        Location(url, attempts=1, timeout=5).read_range(len(DATA) - 10, len(DATA) + 10)
    assert str(len(DATA)) in str(caught.value)


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
    Location("blocking://x", attempts=1, timeout=5).read_range(5, 9)
    assert _Prefetching.prefetched == before
    fetch("blocking://x", tmp_path / "x")
    assert _Prefetching.prefetched == before + 1


def test_what_is_missing_is_told_at_once(tmp_path: Path) -> None:
    with assert_error(ObjectNotFoundError, path="/y"):
        fetch("blocking://y", tmp_path / "x", attempts=9)


def test_an_unknown_asynchronous_filesystem_is_asked_for_parts(tmp_path: Path) -> None:
    fetch("other://x", tmp_path / "x")
    assert OtherStore.asked == [part.span for part in downloads._cut_chunks(len(DATA))]
    OtherStore.ignores_ranges = True
    assert fetch("other://x", tmp_path / "y") == DATA
    assert OtherStore.asked[-1] == (None, None)


def test_a_filesystem_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    fsspec.register_implementation("broken", _Broken, clobber=True)
    with assert_error(DownloadError, path="/x") as caught:
        fetch("broken://x", tmp_path / "x", attempts=1)
    assert "could not download broken://x" in str(caught.value)


class _Broken(BlockingStore):
    protocol = "broken"

    def __init__(self, **options: Any) -> None:
        raise OSError("no route")
