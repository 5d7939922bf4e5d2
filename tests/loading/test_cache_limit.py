"""Datasets under a cache limit, and what they say of single shards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataset
from lightning_streaming.cache.limits import largest_shard_bytes, least_limit
from lightning_streaming.errors import ConfigError, DownloadError
from lightning_streaming.formats.index import INDEX_BASENAME, parse_index
from lightning_streaming.formats.mapping import map_file
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
