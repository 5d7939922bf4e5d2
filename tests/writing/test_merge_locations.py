from __future__ import annotations

from pathlib import Path

import pytest

from lightning_streaming.writing.locations import dataset_location, path_below


@pytest.mark.parametrize(
    ("given", "directory"),
    [
        ("a/b", "a/b"),
        ("a/b/", "a/b"),
        ("a/b/index.json", "a/b"),
        ("s3://x/a/index.json", "s3://x/a"),
        ("a/myindex.json", "a/myindex.json"),
        (Path("a/index.json"), "a"),
    ],
)
def test_a_dataset_is_named_by_its_directory_or_its_index(given: str | Path, directory: str) -> None:
    assert dataset_location(given) == directory


@pytest.mark.parametrize(
    ("location", "root", "path"),
    [
        ("s3://x/a/b/c", "s3://x/a", "b/c"),
        ("s3://x/a/b/", "s3://x/a/", "b"),
        ("s3://x/a", "s3://x", "a"),
        ("s3://x/ab", "s3://x/a", None),
        ("s3://x/a", "s3://x/a", None),
        ("s3://x/a/../b", "s3://x/a", None),
        ("s3://x/a//b", "s3://x/a", None),
        ("s3://x/a/b", "gs://x/a", None),
        ("s3://x/a/b", "x/a", None),
        ("/d/a/b", "s3://d/a", None),
        ("/d/a/./b/../c", "/d/a", "c"),
        ("file:///d/a/b", "/d/a", "b"),
        ("/d/ab", "/d/a", None),
        ("/d/a", "/", "d/a"),
        ("/d/a", "/d/a", None),
        ("d/a", ".", "d/a"),
    ],
)
def test_a_path_below(location: str, root: str, path: str | None) -> None:
    assert path_below(location, root) == path
