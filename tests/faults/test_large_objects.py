"""Objects large enough to be fetched in parts, under faults that hit some of the parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import DownloadError, IntegrityError
from tests.faults.epochs import PER_SHARD, assert_whole_epoch, fails_at_shard, loader_over, write_samples
from tests.faults.test_passing import FAMILIES, FAULTS
from tests.servers import FaultyStore, fresh_store, http_server

SIZE = 5 << 20
SAMPLES = PER_SHARD
STORES = pytest.mark.parametrize("empty_store", ["http", "s3", "gcs"], indirect=True)


@pytest.fixture(scope="session")
def large_sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of 20 MiB."""
    return write_samples(tmp_path_factory.mktemp("large") / "data", samples=SAMPLES, size=SIZE)


def read(store: FaultyStore, cache: Path, **settings: Any) -> None:
    assert_whole_epoch(loader_over(store, cache, **settings), SAMPLES, SIZE)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("empty_store", ["http"], indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_faults_of_parts_heal(empty_store: FaultyStore, large_sample: Path, tmp_path: Path, family: str) -> None:
    empty_store.put_all(large_sample)
    for fault in FAMILIES[family]:
        empty_store.fail("shard", times=1, **FAULTS[fault])
    read(empty_store, tmp_path, download_timeout=0.7, download_retry=5)


@pytest.mark.rotate(2)
@STORES
def test_a_store_that_ignores_ranges_is_read(empty_store: FaultyStore, large_sample: Path, tmp_path: Path) -> None:
    empty_store.put_all(large_sample)
    empty_store.fail("shard", "ignore_range")
    read(empty_store, tmp_path, download_retry=1, download_timeout=10)


@pytest.mark.rotate(2)
@STORES
def test_a_store_that_ignores_ranges_at_times_is_read(
    empty_store: FaultyStore, large_sample: Path, tmp_path: Path
) -> None:
    empty_store.put_all(large_sample)
    empty_store.fail("shard", "ignore_range", times=1, skip=1)
    read(empty_store, tmp_path, download_retry=1, download_timeout=10)


@pytest.mark.rotate(2)
@STORES
def test_all_faults_at_once_heal(empty_store: FaultyStore, large_sample: Path, tmp_path: Path) -> None:
    empty_store.put_all(large_sample)
    for seed, fault in enumerate(FAULTS.values()):
        empty_store.fail("shard", times=1, share=0.25, seed=seed, **fault)
    read(empty_store, tmp_path, download_timeout=1, download_retry=len(FAULTS) + 1)


@pytest.mark.nightly
def test_a_slow_link_with_faults_is_read(large_sample: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    with http_server(served, latency=0.02, per_connection=10e6, total=40e6) as url:
        store = fresh_store(url, served)
        store.put_all(large_sample)
        for fault in ("status", "reset_body", "stall", "corrupt"):
            store.fail("shard", fault, times=1)
        read(store, tmp_path / "cache", download_timeout=0.7, download_retry=4)


@pytest.mark.rotate(2)
@STORES
@pytest.mark.parametrize("extra", [-1, 1])
def test_an_object_of_another_size_is_refused(
    empty_store: FaultyStore, large_sample: Path, tmp_path: Path, extra: int
) -> None:
    empty_store.put_all(large_sample)
    data = (large_sample / "shard.00000.mds").read_bytes()
    empty_store.put("shard.00000.mds", data[:-1] if extra < 0 else data + b"\0")
    with fails_at_shard(loader_over(empty_store, tmp_path, download_retry=0), 0, IntegrityError):
        assert not list(tmp_path.glob("shard*"))


@pytest.mark.rotate(1)
@pytest.mark.parametrize("empty_store", ["http"], indirect=True)
@pytest.mark.parametrize(("fault", "error"), [("corrupt", IntegrityError), ("stall", DownloadError)])
def test_a_part_that_cannot_be_had_fails_the_whole(
    empty_store: FaultyStore, large_sample: Path, tmp_path: Path, fault: str, error: type[Exception]
) -> None:
    empty_store.put_all(large_sample)
    empty_store.fail("shard", fault, skip=1)  # the first part is had
    loader = loader_over(empty_store, tmp_path, download_retry=1, download_timeout=0.5)
    with fails_at_shard(loader, 0, error):
        assert not list(tmp_path.glob("shard*"))
