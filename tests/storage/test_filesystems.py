from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec.asyn
import pytest

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.storage import prepare, read_bytes, upload
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


def _reads(url: str, options: dict[str, Any], expected: bytes) -> None:
    gc.collect()  # in a child: what it inherited and nobody holds goes now
    assert read_bytes(url, options, retry=1, timeout=10) == expected


def _exit_code_of_fork(*args: Any) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=_reads, args=args)
    child.start()
    child.join(timeout=15)
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
