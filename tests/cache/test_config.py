"""The configuration of a cache: which files are read where, names of default directories, and secrets."""

from __future__ import annotations

import os
import pickle
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig
from lightning_streaming.cache.config import default_cache_directory, orders_directory, runtime_directory
from lightning_streaming.errors import ConfigError
from tests.helpers import assert_error


def config(**settings: Any) -> CacheConfig:
    return CacheConfig(name="code", **settings)


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({}, "remote"),
        ({"remote": "", "local": ""}, "remote"),
        ({"local": "s3://key:secret@bucket/x"}, "local"),
        ({"remote": "/x", "download_retry": -1}, "download_retry"),
        ({"remote": "/x", "download_retry": 2.5}, "download_retry"),
        ({"remote": "/x", "download_timeout": 0}, "download_timeout"),
        ({"remote": "/x", "download_timeout": float("nan")}, "download_timeout"),
        ({"remote": "/x", "download_timeout": None}, "download_timeout"),
        ({"remote": "/x", "validate_hash": "crc"}, "validate_hash"),
        ({"remote": "/x\ud800"}, "remote"),
        ({"remote": "/x", "local": "/y\0"}, "local"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], option: str) -> None:
    with assert_error(ConfigError, stream="code", option=option) as caught:
        config(**settings)
    assert "secret" not in str(caught.value)


def test_a_star_in_a_query_is_no_wildcard() -> None:
    assert config(remote="https://host/data?name=a*b").pattern is None


def test_secrets_are_not_shown() -> None:
    shown = repr(config(remote="https://me:secret@host/x?sig=secret", storage_options={"token": "secret"}))
    assert "secret" not in shown
    assert "https://host/x" in shown


def test_it_pickles() -> None:
    one = config(remote="s3://b/x", storage_options={"anon": True})
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("remote", "local", "source", "cache"),
    [
        (None, "/data", "/data", None),
        ("/data", None, "/data", None),
        ("file:///data", None, "/data", None),
        ("/data", "/data/", "/data", None),
        ("/data/../data", Path("/data"), "/data", None),
        ("/data", "/cache", None, "/cache"),
        ("s3://b/x", "/cache", None, "/cache"),
        ("s3://b/x", None, None, None),
    ],
)
def test_where_files_are_read_and_written(
    remote: str | None, local: str | Path | None, source: str | None, cache: str | None
) -> None:
    found = config(remote=remote, local=local)
    assert found.source_directory() == (Path(source) if source else None)
    assert found.cache_directory() == (Path(cache) if cache else default_cache_directory(source or remote or ""))


def _permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LIGHTNING_STREAMING_RUNTIME")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("remote", "readable"),
    [
        ("s3://bucket/corpus/code/", "code"),
        ("s3://bucket", "bucket"),
        ("https://user:secret@host/a b?sig=secret", "a-b"),
        ("https://user:secret@host", "host"),
        ("/data/train", "train"),
        ("/", "dataset"),
        ("s3://bucket/" + "x" * 300, "x" * 40),
    ],
)
def test_a_cache_directory_is_named_after_its_dataset(remote: str, readable: str) -> None:
    assert re.fullmatch(re.escape(readable) + "-[0-9a-f]{16}", default_cache_directory(remote).name)


def test_datasets_of_one_name_have_their_own_directories() -> None:
    places = [
        default_cache_directory("s3://one/train"),
        default_cache_directory("s3://other/train"),
        default_cache_directory("s3://one/train", {"endpoint_url": "http://here"}),
        default_cache_directory("/one/train"),
    ]
    assert len(set(places)) == 4


def test_credentials_do_not_move_the_cache() -> None:
    mine = default_cache_directory("https://me:secret@host/x", {"token": "mine"})
    assert mine == default_cache_directory("https://host/x", {"token": "yours"})


def test_the_root_is_found_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAMING_CACHE", "/fast/cache")
    assert default_cache_directory("s3://b/x").parent == Path("/fast/cache")
    monkeypatch.delenv("LIGHTNING_STREAMING_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_directory("s3://b/x").parent == Path("/xdg/lightning_streaming")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_directory("s3://b/x").parent == Path.home() / ".cache/lightning_streaming"


def test_the_runtime_directory_is_for_one_user(temporary_directory: Path) -> None:
    path = runtime_directory()
    assert path == temporary_directory / f"lightning_streaming-{os.getuid()}"
    assert _permissions(path) == 0o700
    assert runtime_directory() == path


def test_a_runtime_directory_that_others_may_write_to_is_refused(temporary_directory: Path) -> None:
    runtime_directory().chmod(0o777)
    with assert_error(ConfigError, option="LIGHTNING_STREAMING_RUNTIME"):
        runtime_directory()


def test_a_runtime_directory_that_is_a_link_is_refused(temporary_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (temporary_directory / f"lightning_streaming-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with assert_error(ConfigError, option="LIGHTNING_STREAMING_RUNTIME") as caught:
        runtime_directory()
    assert "user" in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_runtime_directory_of_another_user_is_refused(temporary_directory: Path) -> None:
    os.chown(runtime_directory(), 12345, 12345)
    with assert_error(ConfigError, option="LIGHTNING_STREAMING_RUNTIME") as caught:
        runtime_directory()
    assert "12345" in str(caught.value)


def test_the_runtime_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAMING_RUNTIME", str(tmp_path / "a" / "b"))
    assert runtime_directory() == tmp_path / "a" / "b"
    assert orders_directory() == tmp_path / "a" / "b" / "orders"
    assert orders_directory().is_dir()
