"""Samples by id and shards by number, on a node that has to fetch them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_streaming import StreamingDataset
from lightning_streaming.errors import ConfigError, SampleIndexError
from tests.helpers import make_dataset, write_dataset
from tests.servers import HttpStore

SHARD_BYTES = 230


@pytest.fixture
def dataset(http_store: HttpStore, tmp_path: Path) -> StreamingDataset:
    """Six shards of five samples, on a server."""
    write_dataset(http_store.root)
    return make_dataset(http_store.url, local=str(tmp_path / "cache"))


def _shards_here(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "cache").glob("*.mds"))


def test_a_shard_is_prepared_used_and_evicted(dataset: StreamingDataset, tmp_path: Path) -> None:
    assert dataset.num_shards == 6
    before = dataset.cache_usage
    assert dataset.prepare_shard(2)
    assert _shards_here(tmp_path) == ["shard.00002.mds"]
    assert dataset.cache_usage == before + (tmp_path / "cache/shard.00002.mds").stat().st_size
    assert dataset.get_item(11) == dataset[11] == {"id": 11}
    assert dataset.evict_shard(2)
    assert not dataset.evict_shard(2)
    assert (dataset.cache_usage, _shards_here(tmp_path)) == (before, [])


def test_a_shard_that_another_process_reads_is_not_evicted(dataset: StreamingDataset, tmp_path: Path) -> None:
    reader = make_dataset(str(dataset.streams["0"].remote), local=str(tmp_path / "cache"))
    assert reader[11] == {"id": 11}
    assert not dataset.evict_shard(2)
    reader.close()
    assert dataset.evict_shard(2)


def test_the_coldest_shard_is_the_one_used_longest_ago(dataset: StreamingDataset, tmp_path: Path) -> None:
    for shard in (4, 1, 3):
        dataset.prepare_shard(shard)
    assert dataset[20] == {"id": 20}  # shard 4 again
    dataset.close()
    assert [dataset.evict_coldest_shard() for _ in range(3)] == [1, 3, 4]
    with pytest.raises(ConfigError, match="no shard can be removed"):
        dataset.evict_coldest_shard()


@pytest.mark.parametrize("shard", [-1, 6])
def test_a_shard_that_is_not_there_is_refused(dataset: StreamingDataset, shard: int) -> None:
    for act in (dataset.prepare_shard, dataset.evict_shard):
        with pytest.raises(SampleIndexError, match=f"shard {shard} does not exist; the dataset has 6 shards"):
            act(shard)


def test_on_demand_a_sample_is_read_without_its_shard(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root)
    dataset = make_dataset(http_store.url, local=str(tmp_path / "cache"), on_demand=True)
    assert [dataset[index]["id"] for index in (0, 28, 13, 12)] == [0, 28, 13, 12]
    assert _shards_here(tmp_path) == []
    dataset.prepare_shard(1)
    requests = len(http_store.requests())
    assert dataset[7] == {"id": 7}
    assert len(http_store.requests()) == requests


def test_on_demand_a_compressed_shard_is_fetched(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, compression="gz")
    dataset = make_dataset(http_store.url, local=str(tmp_path / "cache"), on_demand=True)
    assert dataset[13] == {"id": 13}
    assert _shards_here(tmp_path) == ["shard.00002.mds"]


def test_a_limit_holds_while_samples_are_read_at_random(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root)
    index = json.loads((http_store.root / "index.json").read_text())
    largest = max(shard["raw_data"]["bytes"] for shard in index["shards"])
    limit = (http_store.root / "index.json").stat().st_size + 2 * largest
    with pytest.raises(ConfigError, match=f"cache_limit .* {limit}"):
        _ = make_dataset(http_store.url, local=str(tmp_path / "cache"), cache_limit=limit - 1)[0]
    dataset = make_dataset(http_store.url, local=str(tmp_path / "cache"), cache_limit=limit)
    for sample in (0, 28, 13, 12, 7, 22, 3, 17):
        assert dataset[sample] == {"id": sample}
        assert dataset.cache_usage <= limit
        assert len(_shards_here(tmp_path)) <= 2
