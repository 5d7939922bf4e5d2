from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec.asyn
import pytest

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.storage import download, prepare, read_bytes, upload
from lightning_streaming.storage.filesystems import open_filesystem
from tests.servers import HttpStore, S3Store

_NO_FORK_WARNING = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def test_a_missing_package_is_named_with_the_line_that_installs_it() -> None:
    with pytest.raises(MissingDependencyError, match=r"az://container/x needs .* run: pip install adlfs"):
        prepare("az://container/x")


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="no filesystem serves bogus://"):
        prepare("bogus://bucket/x")


def test_a_chained_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chained URLs .* simplecache::s3://bucket/x"):
        prepare("simplecache::s3://bucket/x")


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
    with pytest.raises(ConfigError, match="STORE_SECRET"):
        read_bytes("s3://bucket/x", options, retry=9, timeout=5)


def test_other_options_reach_the_filesystem() -> None:
    s3, _ = open_filesystem("s3://bucket/x", {"profile": "mine", "requester_pays": True})
    assert s3.req_kw == {"RequestPayer": "requester"}
    assert s3.kwargs["profile"] == "mine"
    gcs, _ = open_filesystem("gs://bucket/x", {"token": "anon", "requester_pays": "payer"})
    assert gcs.requester_pays == "payer"


def _reads(url: str, options: dict[str, Any], expected: bytes) -> None:
    gc.collect()  # in a child: what it inherited and nobody holds goes now
    assert read_bytes(url, options, retry=1, timeout=10) == expected
    with TemporaryDirectory() as directory:
        path = Path(directory) / "x"
        download(url, options, path, expected_bytes=len(expected), retry=1, timeout=10)
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


@_NO_FORK_WARNING
@pytest.mark.parametrize("store", ["s3", "http"])
def test_parent_and_forked_child_read_side_by_side(
    s3: S3Store, http_store: HttpStore, tmp_path: Path, store: str
) -> None:
    url, options = (f"{s3.make_bucket()}/x", s3.options) if store == "s3" else (f"{http_store.url}/x", {})
    (tmp_path / "x").write_bytes(b"data")
    upload(tmp_path / "x", url if store == "s3" else str(http_store.root / "x"), options)
    _reads(url, options, b"data")
    assert _exit_code_of_fork(url, options, b"data") == 0
    _reads(url, options, b"data")  # over a connection that the child inherited


@_NO_FORK_WARNING
def test_a_child_forked_while_its_parent_downloads_in_parts_does_so_too(http_store: HttpStore, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(20 << 20)
    http_store.put("x", data)
    http_store.put("y", b"small")
    url = f"{http_store.url}/x"
    _reads(f"{http_store.url}/y", {}, b"small")
    http_store.fail("x", "slow", times=2, rate=10 << 20)
    settings = {"expected_bytes": len(data), "retry": 1, "timeout": 10, "connections": 2}
    parent = threading.Thread(target=download, args=(url, {}, tmp_path / "x"), kwargs=settings)
    parent.start()
    while len(http_store.requests()) < 4:  # it holds all its lanes by then
        assert parent.is_alive()
    assert _exit_code_of_fork(url, {}, data) == 0
    parent.join()
    assert (tmp_path / "x").read_bytes() == data


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
        with fsspec.asyn.get_lock():
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
