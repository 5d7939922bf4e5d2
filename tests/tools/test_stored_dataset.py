from __future__ import annotations

from pathlib import Path

import pytest

from lightning_streaming.errors import ConfigError, IndexFormatError, ObjectNotFoundError
from lightning_streaming.tools.stored_dataset import find_dataset
from tests.tools.running import run, write_texts


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
    place = find_dataset(typed, {"secret": "opensesame"})
    assert place.location == location
    assert (place.options == {}) == (place.directory is not None)


def test_secrets_are_not_shown() -> None:
    place = find_dataset("https://me:opensesame@host/data?sig=opensesame", {"secret": "opensesame"})
    assert "opensesame" not in f"{place!r} {place.shown}"


def test_a_file_that_is_no_dataset_is_told_from_one_that_is_in_one(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(ObjectNotFoundError, match=r"is a file, .*lightning-streaming convert makes one of it"):
        find_dataset(str(tmp_path / "rows.jsonl"), {}).read_index()
    write_texts(tmp_path / "data")
    with pytest.raises(ObjectNotFoundError, match=r"is one file of a dataset; give its directory, .*/data$"):
        find_dataset(str(tmp_path / "data" / "shard.00000.mds"), {}).read_index()


def test_names_that_leave_the_dataset_are_refused() -> None:
    with pytest.raises(IndexFormatError):
        find_dataset("data", {}).path("../x")
    with pytest.raises(ConfigError):
        find_dataset("", {})


@pytest.mark.parametrize("tool", ["inspect", "verify"])
def test_a_name_that_no_file_has_is_refused(tool: str) -> None:
    outcome = run(tool, "a\0b")
    assert outcome.code == 2
    assert "has a null character" in outcome.err
