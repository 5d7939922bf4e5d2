"""Keys and masks that a loader gives to its batches.

Values of samples from all ranks: each once, in the order of the data.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections import UserDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.utilities.data import extract_batch_size
from torch.distributed.utils import _apply_to_tensors

from lightning_streaming import KeyedBatch, Stream, StreamingDataLoader, World
from lightning_streaming.dataset.sample_key import Pass, join_keys, table_of
from lightning_streaming.distributed import SampleKeys, all_gather_samples
from lightning_streaming.errors import ConfigError
from tests.helpers import make_dataset, make_loader, raises, worlds, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


SAMPLES = {"a": 17, "b": 12}


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    """Two streams whose ids do not overlap, in shards of 5."""
    root = tmp_path_factory.mktemp("data")
    firsts = {"a": 0, "b": 1000}
    return {
        name: Stream(remote=str(write_dataset(root / name, samples, first_id=firsts[name])))
        for name, samples in SAMPLES.items()
    }


def _keyed(streams: dict[str, Stream], *, return_valid_mask: bool = False, **settings: Any) -> StreamingDataLoader:
    loader = {"return_keys": True, "return_valid_mask": return_valid_mask, **settings.pop("loader", {})}
    return make_loader(streams=streams, loader=loader, **settings)


def _ids_of(keys: SampleKeys) -> list[int]:
    return [{"a": 0, "b": 1000}[key.stream] + 5 * key.shard + key.sample_index for key in keys]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle_algo", ["py1e", "blockwise"])
@pytest.mark.parametrize("batching_method", ["random", "stratified", "per_stream", "device_per_stream"])
def test_keys_tell_where_each_sample_of_a_batch_is_stored(
    streams: dict[str, Stream], batching_method: str, shuffle_algo: str, workers: int
) -> None:
    order: dict[str, Any] = {"batching_method": batching_method, "shuffle_algo": shuffle_algo}
    loader = _keyed(streams, workers=workers, **order)
    for epoch in range(2):
        position = 0
        for batch, keys in loader:
            assert batch["id"].tolist() == _ids_of(keys)
            assert keys.positions.tolist() == list(range(position, position + len(keys)))
            assert {(key.epoch, key.shuffle_seed) for key in keys} == {(epoch, 9176)}
            position += len(keys)
        assert position > 20


def test_keys_go_on_after_a_resume(streams: dict[str, Stream]) -> None:
    loader = _keyed(streams)
    passes = iter(loader)
    for _ in range(3):
        next(passes)
    resumed = _keyed(streams, batch_size=3, workers=2)
    resumed.load_state_dict(loader.state_dict())
    assert [keys[0].position for _, keys in resumed] == [12, 15, 18, 21, 24, 27]


@pytest.mark.parametrize(
    "collate", [len, list, lambda samples: {"text": "no tensor"}, lambda samples: (torch.zeros(1), samples)]
)
def test_keys_do_not_depend_on_what_collate_makes(streams: dict[str, Stream], collate: Any) -> None:
    loader = _keyed(streams, shuffle=False, drop_last=True, loader={"collate_fn": collate})
    batches = list(loader)
    assert len(batches) == len(loader) == 7
    assert all(isinstance(batch, KeyedBatch) for batch in batches)
    assert [one for _, keys in batches for one in _ids_of(keys)] == [*range(17), *range(1000, 1011)]


def test_without_keys_a_batch_is_what_collate_made(streams: dict[str, Stream]) -> None:
    made = object()
    assert list(make_loader(streams=streams, loader={"collate_fn": lambda samples: made})) == [made] * 8


@pytest.mark.parametrize("samples", [1, 5, 29])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_over_all_ranks_every_sample_is_valid_once(samples: int, num_nodes: int, tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "a", samples)
    found: list[int] = []
    lengths = set()
    for world in worlds(num_nodes, 2):
        batches = list(make_loader(root, world=world, loader={"return_keys": True, "return_valid_mask": True}))
        lengths.add(len(batches))
        for batch, keys in batches:
            assert torch.equal(batch["valid"], keys.valid)
            assert batch["valid"].dtype == torch.bool
            found += batch["id"][batch["valid"]].tolist()
    assert sorted(found) == list(range(samples))
    assert len(lengths) == 1


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_mask_leaves_the_batch_of_collate_alone(streams: dict[str, Stream], kind: Any) -> None:
    made = kind(x=1)
    batches = list(make_loader(streams=streams, loader={"collate_fn": lambda samples: made, "return_valid_mask": True}))
    assert {type(batch) for batch in batches} == {kind}
    assert list(made) == ["x"]
    assert [len(batch["valid"]) for batch in batches] == [4] * 7 + [1]


def test_a_batch_that_is_no_dict_gets_no_mask(streams: dict[str, Stream]) -> None:
    loader = make_loader(streams=streams, loader={"collate_fn": list, "return_valid_mask": True})
    with raises(ConfigError, "batches that are dicts, but this one is a list", "return_keys=True", "keys.valid"):
        next(iter(loader))


def test_a_column_of_that_name_is_not_overwritten(streams: dict[str, Stream]) -> None:
    loader = make_loader(
        streams=streams, transform=lambda sample: {"valid": sample["id"]}, loader={"return_valid_mask": True}
    )
    with raises(ConfigError, "the batch has one already", "return_keys=True"):
        next(iter(loader))


def test_a_mask_is_refused_where_an_epoch_leaves_samples_out(streams: dict[str, Stream]) -> None:
    with raises(ConfigError, "return_valid_mask", "batching_method='per_stream'"):
        make_loader(streams=streams, batching_method="per_stream", loader={"return_valid_mask": True})


def test_keys_of_replicated_ranks_are_the_same(streams: dict[str, Stream]) -> None:
    first, second = (
        [keys for _, keys in _keyed(streams, world=World(ranks_per_node=2, rank=rank), replication=2)]
        for rank in (0, 1)
    )
    assert first == second


def test_keys_are_like_a_list(streams: dict[str, Stream]) -> None:
    _, keys = next(iter(_keyed(streams)))
    assert len(keys) == 4
    assert [*keys] == [keys[0], keys[1], keys[2], keys[-1]]
    assert [*keys[1:3]] == [keys[1], keys[2]]
    assert [*reversed(keys)] == [*keys][::-1]
    assert keys == keys[:]
    assert keys != keys[1:]
    assert keys != [*keys]
    assert keys[0] in keys
    assert repr(keys[:1]) == f"SampleKeys([{keys[0]!r}])"
    with pytest.raises(IndexError):
        keys[4]
    assert pickle.loads(pickle.dumps(keys)) == keys
    assert len(pickle.dumps(keys)) < 1000


def test_keys_of_several_batches_are_joined_if_they_are_of_one_pass(streams: dict[str, Stream]) -> None:
    loader = _keyed(streams)
    batches = [keys for _, keys in loader]
    assert [*join_keys(batches)] == [key for keys in batches for key in keys]
    other_epoch = next(iter(loader)).keys
    with pytest.raises(ConfigError, match="of 2 epochs"):
        join_keys([batches[0], other_epoch])


class TestOnTheWayToAModel:
    """What trainer, strategies and precision plugins do to a batch."""

    @pytest.fixture
    def batch(self, streams: dict[str, Stream]) -> KeyedBatch:
        found: KeyedBatch = next(iter(_keyed(streams, transform=lambda sample: {"x": torch.tensor(0.5)})))
        return found

    def test_it_is_moved_to_a_device_and_its_keys_stay(self, batch: KeyedBatch) -> None:
        moved = move_data_to_device(batch, torch.device("meta"))
        assert isinstance(moved, KeyedBatch)
        assert moved.batch["x"].device.type == "meta"
        assert moved.keys is batch.keys

    def test_it_is_converted_to_another_precision(self, batch: KeyedBatch) -> None:
        converted = DoublePrecision().convert_input(batch)
        assert converted.batch["x"].dtype == torch.float64
        assert converted.keys == batch.keys

    def test_it_goes_through_a_sharded_module(self, batch: KeyedBatch) -> None:
        converted: Any = _apply_to_tensors(lambda tensor: tensor.double(), batch)
        assert converted.batch["x"].dtype == torch.float64
        assert converted.keys == batch.keys

    def test_lightning_finds_its_size_and_has_no_doubt(self, batch: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert extract_batch_size(batch) == 4

    def test_its_keys_need_no_pinning(self, batch: KeyedBatch) -> None:
        assert batch.keys.pin_memory() is batch.keys


def test_a_pass_of_no_keys_cannot_be_joined() -> None:
    with pytest.raises(ConfigError, match="of 0 epochs"):
        join_keys([])


def test_what_keys_have_in_common_is_a_plain_value(streams: dict[str, Stream]) -> None:
    dataset = make_dataset(streams=streams, shuffle_seed=7)
    _, keys = next(iter(StreamingDataLoader(dataset, return_keys=True)))
    assert table_of(keys).of_pass == Pass(("a", "b"), 0, 7)


SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from lightning_streaming.distributed import all_gather_samples
from lightning_streaming.errors import ConfigError
from tests.helpers import make_loader

cases, meeting, rank = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
found = []
for case in cases:
    loader = make_loader(loader={"return_keys": True}, **case)
    read = [(batch["id"], keys) for batch, keys in loader]
    found.append(all_gather_samples([ids for ids, _ in read], [keys for _, keys in read]).tolist())
try:
    all_gather_samples(read[0][0][:1] if rank else read[0][0], read[0][1])  # only one rank is wrong
except ConfigError as error:
    found.append(str(error))
loader = make_loader(case["root"], shuffle_seed=rank, loader={"return_keys": True})
batch, keys = next(iter(loader))
try:
    all_gather_samples(batch["id"], keys)
except ConfigError as error:
    found.append(str(error))
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


def _read(loader: StreamingDataLoader) -> tuple[list[torch.Tensor], list[SampleKeys]]:
    batches = list(loader)
    return [batch["id"] for batch, _ in batches], [keys for _, keys in batches]


def _run_ranks(cases: Sequence[dict[str, Any]], meeting: Path) -> list[list[Any]]:
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, json.dumps(cases), str(meeting)]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    return [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]


@pytest.mark.nightly
def test_two_ranks_find_every_sample_once_in_the_order_of_the_data(tmp_path: Path) -> None:
    sizes = [1, 2, 5, 29]
    cases: list[dict[str, Any]] = [{"root": str(write_dataset(tmp_path / f"{size}", size))} for size in sizes]
    cases += [{**cases[-1], **settings} for settings in ({"workers": 2}, {"replication": 2}, {"shuffle": False})]
    first, second = _run_ranks(cases, tmp_path / "meeting")
    assert first == second
    assert first[:-2] == [list(range(size)) for size in [*sizes, 29, 29, 29]]
    assert "values must have one row for each key, but got shapes [(1,)] for [4] keys" in first[-2]
    assert "ranks brought values of different epochs or datasets" in first[-1]


def test_one_process_needs_no_other(root: Path) -> None:
    ids, keys = _read(make_loader(root, loader={"return_keys": True}))
    assert all_gather_samples(ids, keys).tolist() == list(range(29))
    assert all_gather_samples(torch.cat(ids), join_keys(keys)).tolist() == list(range(29))


def test_values_may_be_of_any_shape_and_kind(root: Path) -> None:
    ids, keys = _read(make_loader(root, loader={"return_keys": True}))
    weights = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    gathered = all_gather_samples([one[:, None, None] * weights for one in ids], keys)
    assert (gathered.shape, gathered.dtype, gathered.requires_grad) == ((29, 3, 2), torch.bfloat16, False)


def test_streams_come_one_after_another_and_a_sample_read_twice_counts_twice(tmp_path: Path) -> None:
    streams = {
        "b": Stream(remote=str(write_dataset(tmp_path / "b", 7, first_id=100)), repeat=2),
        "a": Stream(remote=str(write_dataset(tmp_path / "a", 6))),
    }
    ids, keys = _read(make_loader(streams=streams, loader={"return_keys": True}))
    expected = [sample for sample in range(100, 107) for _ in range(2)]
    assert all_gather_samples(ids, keys).tolist() == [*expected, *range(6)]


def test_a_value_for_the_whole_batch_is_refused(root: Path) -> None:
    ids, keys = _read(make_loader(root, loader={"return_keys": True}))
    losses = [one.float().mean() for one in ids]
    with pytest.raises(ConfigError, match=r'shapes \[\(\), \(\), \(\), \(\), ...\] .* reduction="none"'):
        all_gather_samples(losses, keys)


def test_values_left_from_another_evaluation_are_noticed(root: Path) -> None:
    ids, keys = _read(make_loader(root, loader={"return_keys": True, "fixed_epoch": True}))
    with pytest.raises(ConfigError, match="several values belong to one sample"):
        all_gather_samples(ids * 2, keys * 2)
    _, of_next_epoch = _read(make_loader(root, shuffle_seed=1, loader={"return_keys": True}))
    with pytest.raises(ConfigError, match="keys of one pass were wanted, but got those of 2"):
        all_gather_samples(ids * 2, keys + of_next_epoch)


def test_there_must_be_something_to_gather() -> None:
    with pytest.raises(ConfigError, match="there are no values to gather"):
        all_gather_samples([], [])
