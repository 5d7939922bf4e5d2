"""Locations that name some files of a directory."""

from __future__ import annotations

import re

import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.storage.urls import is_plain_name, match_names, split_location
from tests.helpers import assert_error

SUFFIXES = (".parquet", ".tar")
NAMES = ["a.tar", "b.tar", "train-0.tar", "train-07.tar", "train-10.tar", "web/a.tar", "web/de/a.tar", "x[1].tar"]


@pytest.mark.parametrize(
    ("location", "directory", "pattern"),
    [
        ("s3://bucket/corpus", "s3://bucket/corpus", None),
        ("s3://bucket/corpus/train-*.parquet", "s3://bucket/corpus", "train-*.parquet"),
        ("s3://bucket/*.tar", "s3://bucket", "*.tar"),
        ("s3://bucket/one.parquet", "s3://bucket", "one.parquet"),
        ("s3://bucket/one.PARQUET", "s3://bucket", "one.PARQUET"),
        ("data/**/*.tar", "data", "**/*.tar"),
        ("data/{a,b}/x.tar", "data", "{a,b}/x.tar"),
        ("data/x[ab]?.tar", "data", "x[ab]?.tar"),
        ("one.tar", ".", "one.tar"),
        ("/one.tar", "/", "one.tar"),
        ("file:///data/*.tar", "file:///data", "*.tar"),
        ("https://host/data/rows.parquet?sig=x*y", "https://host/data?sig=x*y", "rows.parquet"),
        ("https://host/data?sig=x.tar", "https://host/data?sig=x.tar", None),
        ("hf://datasets/U/N@refs%2Fconvert%2Fparquet/d/*.tar", "hf://datasets/U/N@refs%2Fconvert%2Fparquet/d", "*.tar"),
        ("abfs://box@account.dfs.core.windows.net/*.tar", "abfs://box@account.dfs.core.windows.net", "*.tar"),
    ],
)
def test_a_location_is_a_directory_and_its_files(location: str, directory: str, pattern: str | None) -> None:
    assert split_location(location, SUFFIXES) == (directory, pattern)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a.tar", ["a.tar"]),
        ("*.tar", ["a.tar", "b.tar", "train-0.tar", "train-07.tar", "train-10.tar", "x[1].tar"]),
        ("**/a.tar", ["a.tar", "web/a.tar", "web/de/a.tar"]),
        ("web/**", ["web/a.tar", "web/de/a.tar"]),
        ("?.tar", ["a.tar", "b.tar"]),
        ("[a-b].tar", ["a.tar", "b.tar"]),
        ("[!b-z].tar", ["a.tar"]),
        ("web[!a]a.tar", []),  # no slash
        ("train-[0-9].tar", ["train-0.tar"]),
        ("train-{0,10}.tar", ["train-0.tar", "train-10.tar"]),
        ("train-{00..09}.tar", ["train-07.tar"]),
        ("{web/,}a.tar", ["a.tar", "web/a.tar"]),
        ("x[[]1].tar", ["x[1].tar"]),
        ("A.tar", []),
        ("web", ["web/a.tar", "web/de/a.tar"]),  # a directory
    ],
)
def test_a_pattern_names_files(pattern: str, found: list[str]) -> None:
    assert match_names(pattern, NAMES) == found


@pytest.mark.parametrize("pattern", ["{0..1000000}.tar", "{0..9999}{0..9999}.tar", "[z-a].tar", "[!9-0].tar"])
def test_what_names_no_files_is_refused(pattern: str) -> None:
    with assert_error(ConfigError, option="remote") as caught:
        match_names(pattern, NAMES)
    assert re.search(r"names|is no pattern", str(caught.value))


def test_a_name_without_wildcards_is_one_file() -> None:
    assert is_plain_name("web/a.tar")
    assert not any(map(is_plain_name, ["*.tar", "{a,b}.tar", "?.tar", "[ab].tar"]))


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
def test_odd_locations_are_split_too(location: str, directory: str, pattern: str | None) -> None:
    assert split_location(location, (".tar",)) == (directory, pattern)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("sub[!x]a.tar", []),  # what is no x is still no slash
        ("[!].tar", ["[!].tar"]),  # nothing that it is not
        ("**/a.tar", ["a.tar", "sub/a.tar", "sub/deep/a.tar"]),
        ("a.tar.d", ["a.tar.d/b.tar"]),  # a directory
    ],
)
def test_odd_patterns_are_of_some_names(pattern: str, expected: list[str]) -> None:
    names = ["a.tar", "b.tar", "sub/a.tar", "sub/deep/a.tar", "x-1.tar", "[!].tar", "a.tar.d/b.tar"]
    assert match_names(pattern, names) == expected
