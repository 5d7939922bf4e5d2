"""Time: what a store asks for, what it may take, and when it is given up. The server's log tells when what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import DownloadError
from tests.faults.epochs import PER_SHARD, assert_whole_epoch, fails_at_shard, loader_over, write_samples
from tests.servers import FaultyStore, Logged

STORES = pytest.mark.parametrize("empty_store", ["http", "s3", "gcs"], indirect=True)


def requests_for(store: FaultyStore, name: str) -> list[Logged]:
    return [entry for entry in store.log() if entry.name == name and entry.method == "GET"]


# Without being asked, nobody waits longer than 50 ms after a first failure here. gcsfs keeps headers to itself.
@pytest.mark.rotate(1)
@pytest.mark.parametrize("empty_store", ["http", "s3"], indirect=True)
@pytest.mark.parametrize("wait", [{"status": 429}, {"status": 503, "retry_date": True}])
def test_a_store_that_asks_for_time_is_given_it(store: FaultyStore, tmp_path: Path, wait: dict[str, Any]) -> None:
    store.fail("shard.00000", "status", times=1, retry_after=0.6, **wait)
    assert_whole_epoch(loader_over(store, tmp_path, download_retry=1))
    first, second = requests_for(store, "shard.00000.mds")
    assert second.begun - first.begun >= 0.5


@pytest.mark.nightly
@STORES
def test_a_slow_transfer_is_not_cut_though_it_takes_several_timeouts(empty_store: FaultyStore, tmp_path: Path) -> None:
    empty_store.put_all(write_samples(tmp_path / "data", samples=PER_SHARD, size=25_000))
    empty_store.fail("shard.00000", "slow", rate=30e3)  # 3.3 seconds in all, never long without a byte
    loader = loader_over(empty_store, tmp_path / "cache", 2, download_timeout=1.5, download_retry=0)
    assert_whole_epoch(loader, PER_SHARD, 25_000)
    (request,) = requests_for(empty_store, "shard.00000.mds")
    assert request.ended is not None
    assert request.ended - request.begun > 2 * 1.5


@pytest.mark.rotate(1)
@STORES
def test_a_transfer_that_stands_still_is_cut_and_tried_again(store: FaultyStore, tmp_path: Path) -> None:
    store.fail("shard.00000", "hang", times=1)
    store.fail("shard.00000", "stall", times=1)
    assert_whole_epoch(loader_over(store, tmp_path, 0, download_timeout=0.5, download_retry=6))
    assert len(requests_for(store, "shard.00000.mds")) >= 3  # more if a busy machine is slow as well


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("empty_store", "workers"), [("http", 2), ("s3", 0), ("gcs", 0)], indirect=["empty_store"])
def test_a_pass_given_up_in_a_stall_ends(store: FaultyStore, tmp_path: Path, workers: int) -> None:
    store.fail("shard.0000[1-5]", "stall")
    loader = loader_over(store, tmp_path, workers, download_timeout=60)
    iterator = iter(loader)
    assert [sample["id"] for sample in next(iterator)] == [0, 1, 2, 3]
    loader.close()  # the timeout of this test is shorter than that of the download


@pytest.mark.parametrize("empty_store", ["http"], indirect=True)
def test_the_error_of_a_stall_says_how_long_was_waited(store: FaultyStore, tmp_path: Path) -> None:
    store.fail("shard.00001", "stall")
    loader = loader_over(store, tmp_path, download_timeout=0.4, download_retry=1)
    with fails_at_shard(loader, 1, DownloadError, "2 attempts", "0.4 s", "download_timeout"):
        pass
