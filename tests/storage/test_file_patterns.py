"""Patterns of files: which directory, and which files of it."""

from __future__ import annotations

import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.storage.file_patterns import matching, split_location
from tests.helpers import raises

NAMES = ["a.tar", "b.tar", "sub/a.tar", "sub/deep/a.tar", "x-00.tar", "x-1.tar", "[!].tar", "a.tar.d/b.tar"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("[!a].tar", ["b.tar"]),
        ("sub[!x]a.tar", []),  # what is no x is still no slash
        ("sub?a.tar", []),
        ("[!].tar", ["[!].tar"]),  # nothing that it is not
        ("x-[0-9].tar", ["x-1.tar"]),
        ("**/a.tar", ["a.tar", "sub/a.tar", "sub/deep/a.tar"]),
        ("{b,sub/a}.tar", ["b.tar", "sub/a.tar"]),
        ("x-{00..01}.tar", ["x-00.tar"]),
        ("a.tar", ["a.tar"]),
        ("a.tar.d", ["a.tar.d/b.tar"]),  # a directory
    ],
)
def test_a_pattern_is_of_some_names(pattern: str, names: list[str]) -> None:
    assert matching(pattern, NAMES) == names


@pytest.mark.parametrize("pattern", ["[z-a].tar", "{a,[9-0]}.tar"])
def test_brackets_that_cannot_be_are_told(pattern: str) -> None:
    with raises(ConfigError, "names no files, as it has brackets that cannot be: bad character range"):
        matching(pattern, NAMES)


@pytest.mark.parametrize(
    ("location", "directory", "pattern"),
    [
        ("http://[::1]:8000/data/a.tar", "http://[::1]:8000/data", "a.tar"),
        ("https://host/[ab]/x.tar?sig=[1]", "https://host?sig=[1]", "[ab]/x.tar"),
        ("https://host/a%20b/c%20%25.tar", "https://host/a%20b", "c %.tar"),
        ("s3://bucket/a%20b/c%20.tar", "s3://bucket/a%20b", "c%20.tar"),
        ("s3://bucket/d[12]/*.tar", "s3://bucket", "d[12]/*.tar"),
        ("*.tar", ".", "*.tar"),
        ("/*.tar", "/", "*.tar"),
        ("data/x.tar/", "data/x.tar/", None),
    ],
)
def test_a_location_is_a_directory_and_a_pattern(location: str, directory: str, pattern: str | None) -> None:
    assert split_location(location, (".tar",)) == (directory, pattern)
