from __future__ import annotations

import sys
from typing import Any

import pytest

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.writing.settings import ShardSettings, parse_settings


def test_nothing_may_be_written_in_several_ways() -> None:
    nothing = ShardSettings(compression=None, hashes=(), size_limit=None)
    assert parse_settings(None, None, None) == nothing
    assert parse_settings("", [], 0) == nothing
    for no_limit in (None, 0, 0.0, "0", "0b", "0mb", " 0 "):
        assert parse_settings(None, (), no_limit) == nothing


@pytest.mark.parametrize(
    ("written", "size"), [("64mb", 2**26), (1000.9, 1000), ("1.5kb", 1536), (2**32 - 1, 2**32 - 1)]
)
def test_a_size_limit_is_bytes(written: Any, size: int) -> None:
    assert parse_settings(None, None, written).size_limit == size


@pytest.mark.parametrize(
    ("compression", "hashes", "size_limit", "words"),
    [
        ("lz4", None, None, "but got 'lz4'"),
        ("zstd:0", None, None, "levels 1 to 22"),
        (None, ["crc32"], None, "but got 'crc32'"),
        (None, ["sha1", "md5"], None, r"must be sorted .* but got \['sha1', 'md5'\]"),
        (None, ["md5", "md5"], None, "each be there once"),
        (None, "md5", None, r"write \['md5'\]"),
        (None, None, 2**32, "size_limit must be in"),
        (None, None, "4gb", "size_limit must be in"),
        (None, None, -1, "size_limit"),
        (None, None, "much", "size_limit"),
        (None, None, "", "size_limit"),
        (None, None, " ", "size_limit"),
        (None, None, True, "or None for no limit, but got True"),
        (None, None, False, "or None for no limit, but got False"),
        (None, None, [], "or None for no limit"),
        (None, None, b"64mb", "or None for no limit"),
        (None, None, 0.5, "at least 1 byte"),
        (None, None, "0.0001kb", "at least 1 byte"),
        (None, None, float("nan"), "size_limit"),
        (None, None, float("inf"), "size_limit"),
    ],
)
def test_settings_that_cannot_work_are_refused(compression: Any, hashes: Any, size_limit: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_settings(compression, hashes, size_limit)


@pytest.mark.parametrize(("package", "given"), [("zstandard", ("zstd", None, 0)), ("xxhash", (None, ["xxh64"], 0))])
def test_a_missing_package_is_named_at_once(package: str, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        parse_settings(*given)
