"""Samples by id and shards by number, on a node that has to fetch them.

One sample again: from its key, on any machine, as the epoch handed it out.

A directory as a map-style dataset.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from lightning_streaming import LocalDataset, SampleKey, Stream, StreamingDataset, World
from lightning_streaming.errors import ConfigError, ObjectNotFoundError, SampleIndexError
from lightning_streaming.sequence.settings import SHUFFLE_ALGOS
from tests.helpers import assert_error, ids, make_dataset, make_loader, write_dataset
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

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


def test_the_coldest_row_group_of_some_columns_is_found(tmp_path: Path) -> None:
    rows = pa.table({"id": range(6), "text": list("abcdef")})
    parquet.write_table(rows, tmp_path / "a.parquet", row_group_size=2)
    how: dict[str, Any] = {"local": str(tmp_path / "cache"), "format": "parquet", "columns": ["id"]}
    dataset = StreamingDataset(remote=str(tmp_path / "a.parquet"), **how)
    assert [dataset[sample]["id"] for sample in (4, 0)] == [4, 0]
    dataset.close()
    assert [dataset.evict_coldest_shard() for _ in range(2)] == [2, 0]


@pytest.mark.parametrize("shard", [-1, 6])
def test_a_shard_that_is_not_there_is_refused(dataset: StreamingDataset, shard: int) -> None:
    for act in (dataset.prepare_shard, dataset.evict_shard):
        with pytest.raises(SampleIndexError, match=f"shard {shard} does not exist; the dataset has 6 shards"):
            act(shard)


def test_on_demand_a_sample_is_read_without_its_shard(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root)
    dataset = make_dataset(http_store.url, local=str(tmp_path / "cache"), storage={"on_demand": True})
    assert [dataset[index]["id"] for index in (0, 28, 13, 12)] == [0, 28, 13, 12]
    assert _shards_here(tmp_path) == []
    dataset.prepare_shard(1)
    requests = len(http_store.requests())
    assert dataset[7] == {"id": 7}
    assert len(http_store.requests()) == requests


def test_on_demand_a_compressed_shard_is_fetched(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, compression="gz")
    dataset = make_dataset(http_store.url, local=str(tmp_path / "cache"), storage={"on_demand": True})
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


KEY = SampleKey(stream="a", shard=1, sample_index=2, epoch=3, position=4, shuffle_seed=5)


def _draw(sample: dict[str, Any], rng: np.random.Generator) -> tuple[int, float]:
    return sample["id"], float(rng.random())


def _draw_globally(sample: dict[str, Any]) -> tuple[int, float]:
    return sample["id"], random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002 the point


AUGMENTATIONS: list[dict[str, Any]] = [{}, {"transform": _draw}, {"transform": _draw_globally, "seed_global_rng": True}]


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    """Two streams, the first of which an epoch goes through twice."""
    root = tmp_path_factory.mktemp("data")
    return {
        "a": Stream(remote=str(write_dataset(root / "a", 17)), repeat=2),
        "b": Stream(remote=str(write_dataset(root / "b", 12, first_id=1000))),
    }


@given(
    augmentation=st.sampled_from(AUGMENTATIONS),
    algo=st.sampled_from([algo for algo in SHUFFLE_ALGOS if algo != "py1b"]),
    batching=st.sampled_from(["random", "stratified", "device_per_stream"]),
    world=st.sampled_from(
        [World(ranks_per_node=3), World(ranks_per_node=2, rank=1), World(num_nodes=2, ranks_per_node=2, rank=2)]
    ),
    batch_size=st.integers(2, 3),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 10),
)
def test_every_sample_of_an_epoch_is_made_again_by_a_dataset_that_knows_nothing_of_it(
    streams: dict[str, Stream],
    augmentation: dict[str, Any],
    algo: str,
    batching: str,
    world: World,
    batch_size: int,
    epoch: int,
    seed: int,
) -> None:
    order: dict[str, Any] = {"shuffle_algo": algo, "batching_method": batching, "shuffle_seed": seed}
    loader = make_loader(
        streams=streams, world=world, batch_size=batch_size, loader={"collate_fn": list, "return_keys": True},
        **order, **augmentation,
    )  # fmt: skip
    loader.dataset.next_epoch = epoch
    elsewhere = StreamingDataset(streams=streams, **augmentation)
    with closing(loader), closing(elsewhere):
        for samples, keys in loader:
            assert [elsewhere.restore_sample(key) for key in keys] == samples


@pytest.mark.rotate(2)
@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_what_workers_made_is_made_again_without(streams: dict[str, Stream], augmentation: dict[str, Any]) -> None:
    loader = make_loader(streams=streams, workers=2, loader={"collate_fn": list, "return_keys": True}, **augmentation)
    for samples, keys in loader:
        assert [loader.dataset.restore_sample(key) for key in keys] == samples


def test_random_states_of_the_process_are_left_alone(streams: dict[str, Stream]) -> None:
    dataset = make_dataset(streams=streams, transform=_draw_globally, seed_global_rng=True)

    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002 the point

    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    undisturbed = [*draws(), *draws()]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    disturbed = draws()
    dataset.restore_sample(KEY)
    assert [*disturbed, *draws()] == undisturbed


def test_a_key_goes_through_json_and_pickle(streams: dict[str, Stream]) -> None:
    assert SampleKey.from_dict(json.loads(json.dumps(KEY.as_dict()))) == KEY
    assert pickle.loads(pickle.dumps(KEY)) == KEY
    dataset = make_dataset(streams=streams)
    assert dataset.restore_sample(KEY.as_dict()) == dataset.restore_sample(KEY) == {"id": 7}


@pytest.mark.parametrize("values", [{}, {"stream": "a"}, {**KEY.as_dict(), "shard": "1"}, {**KEY.as_dict(), "rank": 0}])
def test_what_is_no_key_is_refused(streams: dict[str, Stream], values: dict[str, Any]) -> None:
    dataset = make_dataset(streams=streams)
    for asked in (dataset.restore_sample, dataset.can_restore_sample):
        with pytest.raises(ConfigError, match="the key of a sample has stream, shard, sample_index"):
            asked(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stream": "c"}, "stream 'c' does not exist"),
        ({"shard": 4}, "shard 4 of stream 'a' is not one of its 4"),
        ({"shard": -1}, "shard -1 of stream 'a'"),
        ({"shard": 3, "sample_index": 2}, "sample 2 of shard 3 of stream 'a' is not one of its 2"),
        ({"sample_index": -1}, "sample -1 of shard 1"),
    ],
)
def test_a_key_of_other_data_is_refused(streams: dict[str, Stream], change: dict[str, Any], words: str) -> None:
    loader = make_loader(streams=streams)
    key = replace(KEY, **change)
    with pytest.raises(SampleIndexError, match=words):
        loader.dataset.restore_sample(key)
    assert not loader.dataset.can_restore_sample(key)
    assert loader.dataset.can_restore_sample(KEY)
    assert loader.dataset.can_restore_sample()


def test_on_demand_a_sample_comes_by_its_bytes_alone(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root)
    cache = tmp_path / "cache"
    dataset = make_dataset(http_store.url, local=str(cache), storage={"on_demand": True})
    assert dataset.restore_sample(replace(KEY, stream="0")) == {"id": 7}
    assert not list(cache.glob("*.mds"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_dataset(root / "train", 29)
    write_dataset(root / "packed", 29, compression="gz")
    return root


@pytest.fixture(params=["train", "packed"])
def local(root: Path, request: pytest.FixtureRequest) -> Iterator[LocalDataset]:
    made = LocalDataset(str(root), request.param)
    yield made
    made.close()


def test_it_has_samples_by_index(local: LocalDataset) -> None:
    assert (
        len(local),
        local.size,
        local.num_samples,
        len(local.shards),
    ) == (29, 29, 29, 6)
    assert [sample["id"] for sample in local[:]] == list(range(29))
    assert local[-1] == local.get_item(28) == local[np.int64(28)] == {"id": 28}
    assert [sample["id"] for sample in local[[3, 1]]] == [3, 1]
    with pytest.raises(SampleIndexError):
        local[29]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torch_samples_from_it(local: LocalDataset, workers: int) -> None:
    assert not isinstance(local, IterableDataset)
    batches = ids(DataLoader(local, batch_size=8, num_workers=workers))
    assert [len(batch) for batch in batches] == [8, 8, 8, 5]
    assert [one for batch in batches for one in batch] == list(range(29))
    sampler = WeightedRandomSampler([0.0] * 28 + [1.0], 4)
    assert ids(DataLoader(local, batch_size=4, sampler=sampler, num_workers=workers)) == [[28] * 4]


class Doubled(LocalDataset):
    def get_item(self, sample_id: int, retry: int = 1) -> dict[str, Any]:
        return {"id": 2 * super().get_item(sample_id, retry)["id"]}


def test_a_subclass_says_what_a_sample_is(root: Path) -> None:
    local = Doubled(root / "train")
    assert [sample["id"] for sample in local[5:8]] == [10, 12, 14]
    assert ids(DataLoader(local, batch_size=29)) == [list(range(0, 58, 2))]


def test_making_one_looks_at_nothing(tmp_path: Path) -> None:
    local = LocalDataset(tmp_path / "nothing")
    with pytest.raises(ObjectNotFoundError):
        len(local)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [("local", 3), ("local", None), ("local", ""), ("local", np.array(["a", "b"])), ("allow_unsafe_types", "false")],
)
def test_a_local_dataset_refuses_other_values(option: str, value: Any) -> None:
    with assert_error(ConfigError, option=option):
        LocalDataset(**{"local": "x", option: value})
