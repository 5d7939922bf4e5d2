from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig
from lightning_streaming.cache.layout import default_cache_directory
from lightning_streaming.errors import ConfigError


def config(**settings: Any) -> CacheConfig:
    return CacheConfig(name="code", **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "needs remote, local or both"),
        ({"remote": "", "local": ""}, "needs remote, local or both"),
        ({"local": "s3://key:secret@bucket/x"}, "must be a directory of this machine, but is s3://bucket/x"),
        ({"remote": "/x", "download_retry": -1}, "download_retry of stream 'code' .* must not be negative"),
        ({"remote": "/x", "download_timeout": 0}, "download_timeout of stream 'code' .* positive"),
        ({"remote": "/x", "download_timeout": float("nan")}, "download_timeout of stream 'code' .* positive"),
        ({"remote": "/x", "validate_hash": "crc"}, "validate_hash of stream 'code' .* xxh64.* but is 'crc'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**settings)


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
