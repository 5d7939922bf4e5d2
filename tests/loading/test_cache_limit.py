"""Datasets under a cache limit, and what they say of single shards."""

from __future__ import annotations

import multiprocessing
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataset
from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.limits import largest_shard_bytes, least_limit
from lightning_streaming.cache.stamps import FINISHED_BEFORE
from lightning_streaming.errors import ConfigError, DownloadError
from lightning_streaming.formats.index import INDEX_BASENAME, parse_index
from lightning_streaming.formats.mapping import map_file
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.loading.source import SampleSource
from tests.formats.split_datasets import put_dataset
from tests.helpers import ids, make_dataset, make_loader, write_dataset
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def least_of(root: Path) -> int:
    text = (root / INDEX_BASENAME).read_bytes()
    return least_limit(len(text), largest_shard_bytes(parse_index(text, "").shards))


def here(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("shard.*"))


def test_a_limit_that_cannot_work_is_refused_with_the_one_that_would(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    least = least_of(root)
    with pytest.raises(ConfigError, match=rf"cache_limit .* which is {least} bytes, but is {least - 1}"):
        len(make_dataset(root, local=str(tmp_path / "cache"), cache_limit=least - 1))
    assert len(make_dataset(root, local=str(tmp_path / "cache"), cache_limit=least)) == 29


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("keep_zip", [False, True])
def test_the_smallest_limit_gives_the_same_samples(
    tmp_path: Path, workers: int, compression: str | None, keep_zip: bool
) -> None:
    root = write_dataset(tmp_path / "data", 60, compression=compression)
    cache, limit = tmp_path / "cache", least_of(root) + (0 if workers < 2 else 2 * 240)
    settings: dict[str, Any] = {"local": str(cache), "workers": workers, "keep_zip": keep_zip}
    limited = make_loader(root, cache_limit=limit, **settings)
    expected = make_loader(root, workers=workers)
    for _ in range(2):
        assert ids(limited) == ids(expected)
        assert limited.dataset.cache_usage <= limit
    limited.close()


def test_what_the_main_process_has_read_is_not_in_the_way_of_its_workers(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", 60)
    cache, limit = tmp_path / "cache", least_of(root) + 2 * 240
    loader = make_loader(root, cache_limit=limit, local=str(cache), workers=2)
    assert [loader.dataset[index]["id"] for index in (0, 5, 59)] == [0, 5, 59]
    assert mapped(cache) == 0
    assert sorted(one for batch in ids(loader) for one in batch) == list(range(60))
    assert loader.dataset.cache_usage <= limit
    loader.close()


def test_shards_read_by_number_stay_open_until_a_pass_begins_if_there_is_room(tmp_path: Path) -> None:
    root, cache = write_dataset(tmp_path / "data"), tmp_path / "cache"
    dataset = make_dataset(root, local=str(cache), cache_limit=10**6)
    assert [dataset[index]["id"] for index in (0, 5, 1)] == [0, 5, 1]
    assert mapped(cache) == 2
    passes_of(dataset).begin(dataset.current_world(), 4)
    assert mapped(cache) == 0


def test_shards_may_be_closed_between_the_samples_of_a_pass(tmp_path: Path) -> None:
    root, cache = write_dataset(tmp_path / "data"), tmp_path / "cache"
    dataset = make_dataset(root, local=str(cache), cache_limit=least_of(root))
    found = []
    for sample in dataset:
        found.append(sample["id"])
        assert dataset[28 - len(found) // 2]["id"] == 28 - len(found) // 2
        dataset.evict_coldest_shard()
    assert found == [sample["id"] for sample in make_dataset(root)]


def test_a_pass_marks_what_it_needs_no_more(tmp_path: Path) -> None:
    root, cache = write_dataset(tmp_path / "data", 60), tmp_path / "cache"
    dataset = make_dataset(root, local=str(cache), cache_limit=10**6, shuffle=False)
    assert len(list(dataset)) == 60
    finished = [path.stat().st_atime_ns < FINISHED_BEFORE for path in sorted(cache.glob("shard.*"))]
    assert finished == sorted(finished, reverse=True)  # in order of reading; and the last two batches end nothing
    assert finished.count(True) >= len(finished) - 3


def test_what_was_opened_or_let_go_counts_no_more_as_fetched_ahead(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    config = CacheConfig(name="0", remote=str(root), local=str(tmp_path / "cache"))
    source = SampleSource({"0": ShardCache(config)}, allow_unsafe_types=False, cache_limit=10**6)
    source.begin_pass(1)
    for shard in (0, 1):
        assert source.fetch_ahead(shard)
    assert source._ahead.spare_since(1) is not None
    source.open(0)
    assert source.fetch_ahead(0)
    source.let_go(1)
    assert source._ahead.spare_since(1) is None
    source.end_pass()


def mapped(directory: Path) -> int:
    """How many files of a directory this process has mapped."""
    return Path("/proc/self/maps").read_text().count(f"{directory}/shard")


def test_a_dataset_read_in_place_is_left_alone_whatever_the_limit(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    before = {path.name: path.stat().st_mtime_ns for path in root.iterdir()}
    dataset = make_dataset(root, cache_limit=1)
    assert len(list(dataset)) == 29
    assert not dataset.evict_shard(0)
    with pytest.raises(ConfigError, match="no shard can be removed"):
        dataset.evict_coldest_shard()
    assert {path.name: path.stat().st_mtime_ns for path in root.iterdir()} == before
    assert dataset.cache_usage == 0


def test_shards_are_fetched_and_evicted_by_number(tmp_path: Path) -> None:
    root, cache = write_dataset(tmp_path / "data"), tmp_path / "cache"
    dataset = make_dataset(root, local=str(cache))
    assert dataset.prepare_shard(2)
    assert dataset.prepare_shard(1, blocking=False)
    assert here(cache) == ["shard.00001.mds", "shard.00002.mds"]
    assert dataset.evict_shard(1)
    assert not dataset.evict_shard(1)
    assert dataset.get_item(3)["id"] == 3
    view = map_file(cache / "shard.00002.mds", (cache / "shard.00002.mds").stat().st_size)
    assert not dataset.evict_shard(2)
    assert dataset.evict_coldest_shard() == 0
    view.release()
    assert dataset.evict_coldest_shard() == 2
    assert here(cache) == []
    assert dataset.cache_usage == (cache / INDEX_BASENAME).stat().st_size


@pytest.mark.parametrize("kind", ["mds", "csv"])
def test_on_demand_reads_a_sample_by_its_bytes_alone(http_store: HttpStore, tmp_path: Path, kind: str) -> None:
    if kind == "mds":
        write_dataset(http_store.root)
    else:
        put_dataset(http_store.root, kind, (5, 5))
    cache = tmp_path / "cache"
    whole = StreamingDataset(remote=str(http_store.root))
    dataset = StreamingDataset(remote=http_store.url, local=str(cache), on_demand=True, download_retry=0)
    assert [dataset[index] for index in (0, 7, 3, -1)] == [whole[index] for index in (0, 7, 3, -1)]
    assert here(cache) == []
    dataset.prepare_shard(0)
    http_store.fail(re.escape("shard.00000"), "status")
    assert dataset[4] == whole[4]  # of the shard that is here
    http_store.fail("shard.00001", "status")
    with pytest.raises(DownloadError, match=r"stream '0': .*shard\.00001"):
        dataset[9]


def test_on_demand_fetches_compressed_shards_whole(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, compression="zstd")
    dataset = StreamingDataset(remote=http_store.url, local=str(tmp_path / "cache"), on_demand=True)
    assert dataset[7]["id"] == 7
    assert here(tmp_path / "cache") == ["shard.00001.mds"]


def _read_epoch(root: Path, cache: Path, limit: int, seed: int, done: Any) -> None:
    began = time.monotonic()
    dataset = make_dataset(root, local=str(cache), cache_limit=limit, shuffle_seed=seed)
    found = sorted(sample["id"] for sample in dataset)
    done.put((time.monotonic() - began, found == list(range(40))))


def test_who_waited_in_vain_for_room_spares_all_others_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readers that rest with a shard open fill the limit; three others, each in an order of its own, go on."""
    monkeypatch.setattr("lightning_streaming.cache.room._PATIENCE_SECONDS", 2.0)
    root, cache = write_dataset(tmp_path / "data", 40), tmp_path / "cache"
    limit, context = least_of(root), multiprocessing.get_context("fork")
    infos = parse_index((root / INDEX_BASENAME).read_bytes(), "").shards
    resting = ShardCache(CacheConfig(name="0", remote=str(root), local=str(cache)))
    resting.read_index()
    held = []
    for info in infos[:2]:
        with resting.hold(info) as directory:
            held.append(map_file(directory / info.raw_data.basename, info.raw_data.bytes))
    longest = []
    for _ in range(3):  # as workers of one epoch after the other
        done = context.Queue()
        readers = [context.Process(target=_read_epoch, args=(root, cache, limit, seed, done)) for seed in range(3)]
        for reader in readers:
            reader.start()
        times, right = zip(*[done.get(timeout=60) for _ in readers], strict=True)
        for reader in readers:
            reader.join()
        assert all(right)
        longest.append(max(times))
    assert longest[0] > 2.0
    assert max(longest[1:]) < 2.0
