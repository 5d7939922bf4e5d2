"""Faults that last: all before what cannot be read is right, then an error says what failed, and nothing is left."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import AccessDeniedError, DownloadError, IntegrityError, ObjectNotFoundError
from lightning_streaming.storage import retries
from tests.faults.epochs import PER_SHARD, SAMPLES, assert_right, assert_whole_epoch, fails_at_shard, loader_over
from tests.helpers import raises
from tests.servers import FaultyStore

FAULTS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "503": ({"fault": "status", "status": 503}, DownloadError),
    "429": ({"fault": "status", "status": 429, "retry_after": 0.1}, DownloadError),
    "401": ({"fault": "status", "status": 401}, AccessDeniedError),
    "403": ({"fault": "status", "status": 403}, AccessDeniedError),
    "404": ({"fault": "status", "status": 404}, ObjectNotFoundError),
    "reset": ({"fault": "reset"}, DownloadError),
    "reset_body": ({"fault": "reset_body"}, DownloadError),
    "truncate": ({"fault": "truncate"}, DownloadError),
    "short": ({"fault": "short"}, IntegrityError),
    "long": ({"fault": "long"}, IntegrityError),
    "corrupt": ({"fault": "corrupt", "at": -1}, IntegrityError),
    "hang": ({"fault": "hang"}, DownloadError),
    "stall": ({"fault": "stall"}, DownloadError),
}
FINAL = ("401", "403", "404")
STILL = ("hang", "stall")
STORES = pytest.mark.parametrize("empty_store", ["http", "s3", "gcs"], indirect=True)


SOME = ("401", "403", "404", "503", "corrupt", "hang", "long", "reset_body", "stall")
HTTP = [("http", fault) for fault in FAULTS]
OTHERS = [(store, fault) for store in ("s3", "gcs") for fault in SOME]


@pytest.mark.rotate(3)
@pytest.mark.parametrize(
    ("empty_store", "fault", "workers"),
    [(*case, workers) for case, workers in zip([*HTTP, *OTHERS], cycle([0, 2]), strict=False)],
    indirect=["empty_store"],
)
def test_a_shard_that_cannot_be_had_is_named(store: FaultyStore, tmp_path: Path, fault: str, workers: int) -> None:
    spoil, error = FAULTS[fault]
    store.fail("shard.00003", **spoil)
    # One try of a second, not two short ones: a machine that has other things to do must not fail sound shards.
    tries: dict[str, Any] = {"download_timeout": 1, "download_retry": 0} if fault in STILL else {"download_retry": 1}
    loader = loader_over(store, tmp_path, workers, **tries)
    with fails_at_shard(loader, 3, error, "stream '0'", store.url):
        assert not list(tmp_path.glob("shard.00003*"))
        if fault in FINAL:
            assert store.requests().count("shard.00003.mds") <= 2  # once ahead of the reader, once for it


@pytest.mark.rotate
@STORES
@pytest.mark.parametrize("extra", [-1, 1, 100_000])
def test_an_object_of_another_size_is_refused(
    empty_store: FaultyStore, samples_without_hashes: Path, tmp_path: Path, extra: int
) -> None:
    empty_store.put_all(samples_without_hashes)
    data = (samples_without_hashes / "shard.00002.mds").read_bytes()
    empty_store.put("shard.00002.mds", data[:extra] if extra < 0 else data + bytes(extra))
    with fails_at_shard(loader_over(empty_store, tmp_path, download_retry=0), 2, IntegrityError, f"{len(data)}"):
        assert not list(tmp_path.glob("shard.00002*"))


@STORES
def test_an_index_that_cannot_be_had_is_named(store: FaultyStore, tmp_path: Path) -> None:
    store.fail("index.json", "reset_body")
    with raises(DownloadError, "index.json", "stream '0'"):
        next(iter(loader_over(store, tmp_path, download_retry=1)))


@pytest.mark.parametrize("empty_store", ["http"], indirect=True)
def test_the_reader_and_the_threads_ahead_of_it_share_the_attempts(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_LONGEST_WAIT", 0.02)
    store.fail("shard.00003", "status", status=429, retry_after=0.001)
    with fails_at_shard(loader_over(store, tmp_path, download_retry=2), 3, DownloadError, "429"):
        ahead = retries._MAX_POSTPONED + 3
        assert store.requests().count("shard.00003.mds") == ahead + 1  # and once more for the reader, as it may be well


@pytest.mark.rotate(2)
@STORES
def test_after_a_failure_the_loader_goes_on_where_it_stood(store: FaultyStore, tmp_path: Path) -> None:
    store.fail("shard.00003", "status")
    loader = loader_over(store, tmp_path, 2, download_retry=0)
    with fails_at_shard(loader, 3, DownloadError):
        store.heal()
        loader.load_state_dict(loader.state_dict())
        assert_right(list(loader), list(range(3 * PER_SHARD, SAMPLES)))


@pytest.mark.parametrize("empty_store", ["http"], indirect=True)
def test_credentials_of_a_stream_are_sent(store: FaultyStore, tmp_path: Path) -> None:
    store.fail("", "auth", status=401, authorization="Bearer right")
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        with raises(AccessDeniedError, "index.json"):
            next(iter(loader_over(store, tmp_path / "none", storage={"options": {"headers": headers}})))
    asked = len(store.log())
    assert asked == 2
    options = {"headers": {"Authorization": "Bearer right"}}
    assert_whole_epoch(loader_over(store, tmp_path / "cache", 2, storage={"options": options}))
