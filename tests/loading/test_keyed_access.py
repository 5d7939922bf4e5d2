"""One sample again: from its key, on any machine, as the epoch handed it out."""

from __future__ import annotations

import json
import pickle
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming import SampleKey, Stream, StreamingDataset, World
from lightning_streaming.errors import ConfigError, SampleIndexError
from tests.helpers import make_dataset, make_loader, write_dataset
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

KEY = SampleKey(stream="a", shard=1, index=2, epoch=3, position=4, shuffle_seed=5)


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
    algo=st.sampled_from(["naive", "py1s", "py2s", "py1br", "py1e", "blockwise"]),
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
        streams=streams, world=world, batch_size=batch_size, loader={"collate_fn": list, "with_keys": True},
        **order, **augmentation,
    )  # fmt: skip
    loader.dataset.next_epoch = epoch
    elsewhere = StreamingDataset(streams=streams, **augmentation)
    with closing(loader), closing(elsewhere):
        for samples, keys in loader:
            assert [elsewhere.restore_sample(key) for key in keys] == samples


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_what_workers_made_is_made_again_without(streams: dict[str, Stream], augmentation: dict[str, Any]) -> None:
    loader = make_loader(streams=streams, workers=2, loader={"collate_fn": list, "with_keys": True}, **augmentation)
    for samples, keys in loader:
        assert [loader.restore_sample(key) for key in keys] == samples


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
        with pytest.raises(ConfigError, match="the key of a sample has stream, shard, index"):
            asked(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stream": "c"}, "stream 'c' does not exist"),
        ({"shard": 4}, "shard 4 of stream 'a' is not one of its 4"),
        ({"shard": -1}, "shard -1 of stream 'a'"),
        ({"shard": 3, "index": 2}, "sample 2 of shard 3 of stream 'a' is not one of its 2"),
        ({"index": -1}, "sample -1 of shard 1"),
    ],
)
def test_a_key_of_other_data_is_refused(streams: dict[str, Stream], change: dict[str, Any], words: str) -> None:
    loader = make_loader(streams=streams)
    key = replace(KEY, **change)
    with pytest.raises(SampleIndexError, match=words):
        loader.restore_sample(key)
    assert not loader.can_restore_sample(key)
    assert loader.can_restore_sample(KEY)
    assert loader.can_restore_sample()


def test_on_demand_a_sample_comes_by_its_bytes_alone(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root)
    cache = tmp_path / "cache"
    dataset = make_dataset(http_store.url, local=str(cache), on_demand=True)
    assert dataset.restore_sample(replace(KEY, stream="0")) == {"id": 7}
    assert not list(cache.glob("*.mds"))
