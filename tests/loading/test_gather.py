"""Values of samples from all ranks: each once, in the order of the data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_streaming import SampleKeys, Stream, StreamingDataLoader, gather_in_order
from lightning_streaming.errors import ConfigError
from tests.helpers import make_loader, write_dataset

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from lightning_streaming import gather_in_order
from lightning_streaming.errors import ConfigError
from tests.helpers import make_loader

cases, meeting, rank = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
found = []
for case in cases:
    loader = make_loader(loader={"with_keys": True}, **case)
    read = [(batch["id"], keys) for batch, keys in loader]
    found.append(gather_in_order([ids for ids, _ in read], [keys for _, keys in read]).tolist())
try:
    gather_in_order(read[0][0][:1] if rank else read[0][0], read[0][1])  # only one rank is wrong
except ConfigError as error:
    found.append(str(error))
loader = make_loader(case["root"], shuffle_seed=rank, loader={"with_keys": True})
batch, keys = next(iter(loader))
try:
    gather_in_order(batch["id"], keys)
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
    ids, keys = _read(make_loader(root, loader={"with_keys": True}))
    assert gather_in_order(ids, keys).tolist() == list(range(29))
    assert gather_in_order(torch.cat(ids), SampleKeys.joined(keys)).tolist() == list(range(29))


def test_values_may_be_of_any_shape_and_kind(root: Path) -> None:
    ids, keys = _read(make_loader(root, loader={"with_keys": True}))
    weights = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    gathered = gather_in_order([one[:, None, None] * weights for one in ids], keys)
    assert (gathered.shape, gathered.dtype, gathered.requires_grad) == ((29, 3, 2), torch.bfloat16, False)


def test_streams_come_one_after_another_and_a_sample_read_twice_counts_twice(tmp_path: Path) -> None:
    streams = {
        "b": Stream(remote=str(write_dataset(tmp_path / "b", 7, first_id=100)), repeat=2),
        "a": Stream(remote=str(write_dataset(tmp_path / "a", 6))),
    }
    ids, keys = _read(make_loader(streams=streams, loader={"with_keys": True}))
    expected = [sample for sample in range(100, 107) for _ in range(2)]
    assert gather_in_order(ids, keys).tolist() == [*expected, *range(6)]


def test_a_value_for_the_whole_batch_is_refused(root: Path) -> None:
    ids, keys = _read(make_loader(root, loader={"with_keys": True}))
    losses = [one.float().mean() for one in ids]
    with pytest.raises(ConfigError, match=r'shapes \[\(\), \(\), \(\), \(\), ...\] .* reduction="none"'):
        gather_in_order(losses, keys)


def test_values_left_from_another_evaluation_are_noticed(root: Path) -> None:
    ids, keys = _read(make_loader(root, loader={"with_keys": True, "repeat_epoch": True}))
    with pytest.raises(ConfigError, match="several values belong to one sample"):
        gather_in_order(ids * 2, keys * 2)
    _, of_next_epoch = _read(make_loader(root, shuffle_seed=1, loader={"with_keys": True}))
    with pytest.raises(ConfigError, match="keys of one pass were wanted, but got those of 2"):
        gather_in_order(ids * 2, keys + of_next_epoch)


def test_there_must_be_something_to_gather() -> None:
    with pytest.raises(ConfigError, match="there are no values to gather"):
        gather_in_order([], [])
