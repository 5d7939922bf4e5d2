"""Repositories of the Hugging Face hub, read from a stand-in that speaks its protocol."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    DownloadError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedError,
)
from lightning_streaming.storage import Location
from lightning_streaming.storage.filesystems import HubFile, parse_hub_url
from tests.helpers import assert_error
from tests.servers import HubDataset, change_link
from tests.servers.hub import LARGE, TOKEN

LARGE_DATA = bytes(range(256)) * (LARGE // 64)


def at(dataset: HubDataset, name: str, **options: object) -> Location:
    return Location(f"{dataset.url}/{name}", {**dataset.options, **options}, attempts=2, timeout=5)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://datasets/me/data", HubFile("dataset", "me/data", None, "")),
        ("hf://datasets/me/data/a/b@c", HubFile("dataset", "me/data", None, "a/b@c")),
        ("hf://datasets/me/data@v1.0/a", HubFile("dataset", "me/data", "v1.0", "a")),
        ("hf://datasets/me/data@feature%2Fx/a", HubFile("dataset", "me/data", "feature/x", "a")),
        ("hf://datasets/me/d@refs%2Fconvert%2Fparquet/a", HubFile("dataset", "me/d", "refs/convert/parquet", "a")),
        ("hf://datasets/me/d@refs/convert/parquet/a/b", HubFile("dataset", "me/d", "refs/convert/parquet", "a/b")),
        ("hf://datasets/me/data@refs/pr/12/a", HubFile("dataset", "me/data", "refs/pr/12", "a")),
        ("hf://me/model/a", HubFile("model", "me/model", None, "a")),
        ("hf://spaces/me/space@main/a", HubFile("space", "me/space", "main", "a")),
    ],
)
def test_a_url_names_repository_revision_and_path(url: str, expected: HubFile) -> None:
    assert parse_hub_url(url) == expected


@pytest.mark.parametrize("url", ["hf://", "hf://datasets", "hf://model", "hf://datasets/name", "hf://datasets//name/x"])
def test_a_url_without_a_repository_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="names no repository of the hub; write hf://datasets/USER/NAME"):
        Location(url, attempts=1).read()


def test_buckets_of_the_hub_are_refused() -> None:
    with assert_error(UnsupportedError, path="/x"):
        Location("hf://buckets/me/data/x", attempts=1).read()


REVISION = st.text("abcXYZ019._-", min_size=1)


@given(st.lists(REVISION, min_size=2, max_size=2, unique=True))
def test_another_revision_is_another_key(revisions: list[str]) -> None:
    one, other = (Location(f"hf://datasets/me/data@{revision}/a") for revision in revisions)
    assert len({one.key, other.key, Location("hf://datasets/me/data/a").key}) == 3
    assert one.key == Location(one.url, {"token": "hf_other"}).key
    assert str(one) == one.url  # the revision is no user


@pytest.mark.parametrize("url", ["hf://me/model@v1/a", "hf://me@v1/a"])
def test_a_revision_is_never_taken_for_a_user(url: str) -> None:
    assert str(Location(url)) == Location(url).key == url


def test_another_endpoint_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "hf://datasets/me/data"
    chosen = Location(url, {"endpoint": "https://hub.example"}).key
    assert chosen != Location(url).key
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    assert Location(url).key == chosen


@pytest.mark.parametrize("revision", ["refs%2Fconvert%2Fparquet", "refs/convert/parquet"])
def test_a_revision_is_read_and_listed(hub: HubDataset, revision: str) -> None:
    hub.put("a/x", b"main")
    hub.put("a/x", b"converted", "refs/convert/parquet")
    root = Location(hub.at(revision), hub.options)
    assert (root / "a/x").read() == b"converted"
    assert (root / "a/x").stat().size == 9
    assert {name: file.size for name, file in root.walk_files().items()} == {"a/x": 9}
    assert (root / "a").sizes() == {"x": 9}
    assert at(hub, "a/x").read() == b"main"


def test_a_directory_of_many_pages_is_listed(hub: HubDataset) -> None:
    names = {f"a/{number:03}" for number in range(130)}
    for name in names:
        hub.put(name, b"12")
    assert {name: file.size for name, file in at(hub, "").walk_files().items()} == dict.fromkeys(sorted(names), 2)
    assert at(hub, "").walk() == sorted(names)
    assert at(hub, "nothing").walk() == []


def test_a_large_file_comes_from_another_host_without_the_token(hub: HubDataset, tmp_path: Path) -> None:
    hub.put("a b.mds", LARGE_DATA)
    one = at(hub, "a b.mds", token=TOKEN)
    assert one.read() == LARGE_DATA  # the other host refuses a token, and a signature that was written anew
    assert one.read_range(100, 300) == LARGE_DATA[100:300]
    one.download(tmp_path / "x", size=len(LARGE_DATA))
    assert (tmp_path / "x").read_bytes() == LARGE_DATA
    assert {entry.status for entry in hub.log()} == {302}


def test_ranges_of_a_large_file_are_fetched_at_once(hub: HubDataset, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 20
    hub.put("x", data)
    change_link(hub.server, latency=0.2)
    try:
        location = Location(f"{hub.url}/x", hub.options, attempts=2, timeout=60)
        location.download(tmp_path / "x", size=len(data))
    finally:
        change_link(hub.server)
    assert (tmp_path / "x").read_bytes() == data
    log = sorted(hub.log(), key=lambda entry: entry.begun)
    assert len(log) == 3
    assert None not in [entry.range for entry in log]
    assert log[1].begun < min(entry.ended or 0 for entry in log)


def test_what_changes_in_a_file_changes_its_version(hub: HubDataset) -> None:
    versions = []
    for data in (b"12345", b"54321"):
        hub.put("x", data)
        versions.append(at(hub, "x").stat().version)
    assert versions[0]
    assert versions[0] != versions[1]


def test_data_for_everyone_needs_no_token(hub: HubDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("x", b"data")
    monkeypatch.setenv("HF_TOKEN", "hf_expiredAndUseless")
    with pytest.raises(AccessDeniedError):
        at(hub, "x").read()
    assert at(hub, "x", token=False).read() == b"data"
    monkeypatch.delenv("HF_TOKEN")
    assert at(hub, "x").read() == b"data"
    assert at(hub, "x").stat().size == 4


def test_private_data_takes_a_token_from_options_or_environment(
    private_hub: HubDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_hub.put("x", b"data")
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    assert at(private_hub, "x", token="${MY_TOKEN}").read() == b"data"
    assert at(private_hub, "", token=TOKEN).walk() == ["x"]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert at(private_hub, "x").read() == b"data"
    assert at(private_hub, "x").stat().size == 4


@pytest.mark.parametrize("options", [{}, {"token": "hf_wrongAndSecret"}, {"token": True}])
@pytest.mark.parametrize("ask", [Location.read, Location.stat, Location.walk, Location.sizes])
def test_private_data_without_the_right_token_says_what_to_do(
    private_hub: HubDataset, options: dict[str, object], ask: object
) -> None:
    private_hub.put("x", b"data")
    with assert_error(AccessDeniedError, path="/x") as caught:
        ask(replace(at(private_hub, "x", **options), attempts=3))  # type: ignore[operator]
    assert "hf_wrong" not in str(caught.value)
    assert "hf_wrong" not in repr(at(private_hub, "x", **options))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("{0}/missing", "the repository has no such file at this revision"),
        ("{0}@missing/x", "the repository has no such revision"),
        ("hf://datasets/user/missing/x", "the hub has no such repository, or the token may not read it"),
    ],
)
def test_what_is_not_there_is_told_apart(hub: HubDataset, url: str, words: str) -> None:
    hub.put("x", b"data")
    options = {**hub.options, "token": TOKEN}
    place = Location(url.format(hub.url), options, attempts=3)
    with pytest.raises(ObjectNotFoundError, match=words):
        place.read()
    assert place.read_if_there() is None
    with pytest.raises(ObjectNotFoundError):
        place.stat()


def test_options_that_the_hub_does_not_know_are_refused(hub: HubDataset) -> None:
    for ask in (Location.read, Location.stat):
        with assert_error(ConfigError, option="storage_options"):
            ask(at(hub, "x", anon=True))


def test_nothing_is_written_to_the_hub(hub: HubDataset, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"data")
    place = at(hub, "train/x")
    line = f"hf upload {hub.url.removeprefix('hf://datasets/')} DIRECTORY train/x --repo-type dataset"
    acts: list[Callable[[], object]] = [lambda: place.put(b"1"), lambda: place.upload(tmp_path / "x")]
    for act in (*acts, place.remove, place.prepare_to_write):
        with assert_error(UnsupportedError, option="out", path="/x", hint=line):
            act()


@pytest.mark.rotate(2)
@pytest.mark.parametrize("fault", ["status", "reset", "reset_body", "truncate", "short", "long"])
def test_what_passes_is_tried_again(hub: HubDataset, tmp_path: Path, fault: str) -> None:
    hub.put("x", b"data" * 100)
    hub.fail("x", fault, times=1)
    at(hub, "x").download(tmp_path / "x", size=400)
    assert (tmp_path / "x").read_bytes() == b"data" * 100
    assert len(hub.log()) == 2


def test_a_store_that_is_asked_too_often_is_given_the_time_it_says(hub: HubDataset) -> None:
    hub.put("x", b"data")
    hub.fail("x", "status", status=429, times=1, retry_after=0.7)
    begun = time.monotonic()
    assert at(hub, "x").read() == b"data"
    assert time.monotonic() - begun > 0.7


def test_each_attempt_to_read_is_one_request(hub: HubDataset) -> None:
    hub.put("x", b"data")
    hub.fail("x", "status", status=503)
    with assert_error(DownloadError, path="/x") as caught:
        at(hub, "x").read()
    assert "503" in str(caught.value)
    assert len(hub.log()) == 2


def test_a_listing_that_fails_once_is_tried_again(hub: HubDataset) -> None:
    hub.put("x", b"data")
    api = replace(hub, prefix=f"/api/datasets/{hub.url.removeprefix('hf://datasets/')}")
    api.fail("", "status", times=1, status=503)
    assert at(hub, "").walk() == ["x"]
    api.fail("", "status", status=500)
    with assert_error(StorageError, path="/x") as caught:
        at(hub, "x").stat()
    assert "attempts" in str(caught.value)
