from __future__ import annotations

from pathlib import Path

import pytest

from lightning_streaming.errors import ConfigError, IndexFormatError
from lightning_streaming.tools.place import find_place


@pytest.mark.parametrize(
    ("typed", "location"),
    [
        ("data", "data"),
        ("data/", "data"),
        ("data/index.json", "data"),
        ("index.json", "."),
        ("file:///data/index.json", "/data"),
        ("~/data", str(Path("~/data").expanduser())),
        ("s3://bucket/data/index.json", "s3://bucket/data"),
        ("https://host/data/index.json?sig=x", "https://host/data?sig=x"),
    ],
)
def test_a_dataset_is_named_by_its_place_or_its_index(typed: str, location: str) -> None:
    place = find_place(typed, {"secret": "opensesame"})
    assert place.location == location
    assert (place.options == {}) == (place.directory is not None)


def test_secrets_are_not_shown() -> None:
    place = find_place("https://me:opensesame@host/data?sig=opensesame", {"secret": "opensesame"})
    assert "opensesame" not in f"{place!r} {place.shown}"


def test_names_that_leave_the_dataset_are_refused() -> None:
    with pytest.raises(IndexFormatError):
        find_place("data", {}).path("../x")
    with pytest.raises(ConfigError):
        find_place("", {})
