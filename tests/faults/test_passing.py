"""Faults that pass: an epoch is what it would be without them."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.faults.epochs import PER_SHARD, SHARDS, assert_whole_epoch, loader_over, write_samples
from tests.servers import FaultyStore

Fault = dict[str, Any]

FAULTS: dict[str, Fault] = {
    "503": {"fault": "status", "status": 503},
    "500": {"fault": "status", "status": 500},
    "429": {"fault": "status", "status": 429},
    "reset": {"fault": "reset"},
    "reset_body": {"fault": "reset_body"},
    "truncate": {"fault": "truncate"},
    "empty": {"fault": "truncate", "at": 0},
    "short": {"fault": "short"},
    "long": {"fault": "long"},
    "corrupt": {"fault": "corrupt", "anywhere": True},
    "hang": {"fault": "hang"},
    "stall": {"fault": "stall"},
}
HARMLESS: dict[str, Fault] = {
    "ignore_range": {"fault": "ignore_range"},
    "slow": {"fault": "slow", "rate": 100e3},
}


def _timeout(*faults: str) -> float:
    """Short where the fault is that nothing arrives; else long, for machines that have other things to do."""
    return 0.5 if {"hang", "stall"} & set(faults) else 5


def _every_shard_fails_once(store: FaultyStore, fault: Fault) -> None:
    store.fail("shard", times=1, each=True, **fault)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("empty_store", ["http"], indirect=True)
@pytest.mark.parametrize(("fault", "workers"), list(zip(FAULTS, cycle([0, 2]), strict=False)))
def test_an_epoch_is_right_if_each_shard_fails_once(
    store: FaultyStore, tmp_path: Path, fault: str, workers: int
) -> None:
    _every_shard_fails_once(store, FAULTS[fault])
    assert_whole_epoch(loader_over(store, tmp_path, workers, download_timeout=_timeout(fault)))
    asked = Counter(entry.name for entry in store.log() if entry.name.startswith("shard"))
    assert set(asked.values()) == {2}


FAMILIES = {
    "refused": ["503", "500", "429"],
    "cut": ["reset", "reset_body", "truncate", "empty"],
    "wrong": ["short", "long", "corrupt"],
    "still": ["hang", "stall"],
}


def _every_shard_fails_once_in_turn(store: FaultyStore, faults: list[str]) -> None:
    for shard, fault in zip(range(SHARDS), cycle(faults), strict=False):
        store.fail(f"shard.{shard:05}", times=1, **FAULTS[fault])


@pytest.mark.rotate(2)
@pytest.mark.parametrize("empty_store", ["s3", "gcs"], indirect=True)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_epoch_through_other_stores_is_right_if_each_shard_fails_once(
    store: FaultyStore, tmp_path: Path, family: str, workers: int
) -> None:
    _every_shard_fails_once_in_turn(store, FAMILIES[family])
    assert_whole_epoch(loader_over(store, tmp_path, workers, download_timeout=_timeout(*FAMILIES[family])))
    assert len({entry.name for entry in store.log() if entry.fault}) == SHARDS


@pytest.mark.rotate(2)
@pytest.mark.parametrize("empty_store", ["http", "s3", "gcs"], indirect=True)
@pytest.mark.parametrize("fault", HARMLESS)
def test_an_epoch_is_right_if_a_store_is_slow_or_ignores_ranges(store: FaultyStore, tmp_path: Path, fault: str) -> None:
    store.fail("", **HARMLESS[fault])
    assert_whole_epoch(loader_over(store, tmp_path, 2, download_retry=0))


@pytest.mark.parametrize("empty_store", ["http", "s3", "gcs"], indirect=True)
def test_what_a_cut_left_out_is_fetched_rightly_from_a_store_that_ignores_ranges(
    empty_store: FaultyStore, tmp_path: Path
) -> None:
    size = 500_000  # so that much of it arrives before the cut
    empty_store.put_all(write_samples(tmp_path / "data", samples=PER_SHARD, size=size))
    _every_shard_fails_once(empty_store, FAULTS["truncate"])
    empty_store.fail("", "ignore_range")
    assert_whole_epoch(loader_over(empty_store, tmp_path / "cache", download_retry=1), PER_SHARD, size)
    assert empty_store.requests().count("shard.00000.mds") == 2


@pytest.mark.rotate(2)
@pytest.mark.parametrize("empty_store", ["http", "s3", "gcs"], indirect=True)
def test_an_index_that_fails_once_is_read(store: FaultyStore, tmp_path: Path) -> None:
    store.fail("index.json", "truncate", times=1)
    store.fail("index.json", "status", times=1)
    assert_whole_epoch(loader_over(store, tmp_path))


@pytest.mark.rotate(2)
@pytest.mark.parametrize("empty_store", ["http", "s3", "gcs"], indirect=True)
def test_without_hashes_a_wrong_size_is_still_noticed(
    empty_store: FaultyStore, samples_without_hashes: Path, tmp_path: Path
) -> None:
    empty_store.put_all(samples_without_hashes)
    _every_shard_fails_once_in_turn(empty_store, ["short", "long", "truncate", "empty"])
    assert_whole_epoch(loader_over(empty_store, tmp_path))


@pytest.mark.rotate(2)
@pytest.mark.parametrize("empty_store", ["http"], indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_shards_heal_too(
    empty_store: FaultyStore, zipped_samples: Path, tmp_path: Path, family: str
) -> None:
    empty_store.put_all(zipped_samples)
    _every_shard_fails_once_in_turn(empty_store, FAMILIES[family])
    assert_whole_epoch(loader_over(empty_store, tmp_path, download_timeout=_timeout(*FAMILIES[family])))


@pytest.mark.rotate(1)
@pytest.mark.parametrize("empty_store", ["http", "s3", "gcs"], indirect=True)
@pytest.mark.parametrize("workers", [0, 2])
def test_two_epochs_are_right_under_all_faults_at_once(store: FaultyStore, tmp_path: Path, workers: int) -> None:
    _every_shard_fails_once_in_turn(store, list(FAULTS)[:SHARDS])
    _every_shard_fails_once_in_turn(store, list(FAULTS)[SHARDS:])
    store.fail("index", "truncate", times=1)
    for fault in HARMLESS.values():
        store.fail("", times=1, each=True, **fault)
    loader = loader_over(store, tmp_path, workers, download_timeout=0.5, download_retry=6)
    assert_whole_epoch(loader)
    assert_whole_epoch(loader)  # from the cache
    assert {entry.fault for entry in store.log()} >= {fault["fault"] for fault in FAULTS.values()}


@pytest.mark.parametrize("empty_store", ["http"], indirect=True)
def test_an_epoch_is_right_whatever_chance_brings(store: FaultyStore, tmp_path: Path) -> None:
    for seed, fault in enumerate((FAULTS | HARMLESS).values()):
        store.fail("", times=1, share=0.1, each=True, seed=seed, **fault)
    assert_whole_epoch(loader_over(store, tmp_path, 2, download_timeout=0.5, download_retry=len(FAULTS)))
    assert {entry.fault for entry in store.log()} > {None}
