"""Ranks as real processes: with torch.distributed, and started from a process that had made the dataset before."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_streaming import StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import ConfigError
from tests.golden import golden_path
from tests.helpers import ids, make_dataset, write_dataset, write_shards

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SCRIPT = """
import json, sys
import torch.distributed as dist
from tests.helpers import ids, make_loader

root, meeting, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
loader = make_loader(root, workers=2, batch_size=3, shuffle_algo="py1s")  # made before anybody knows the world
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
iterator = iter(loader)
batches = ids(iterator)
states = [None, None]
dist.all_gather_object(states, loader.state_dict())
print(json.dumps({"batches": batches, "length": len(loader), "states": states}))
dist.destroy_process_group()
"""


def test_ranks_find_their_place_through_torch_distributed(tmp_path: Path) -> None:
    golden = json.loads(golden_path("loader.json").read_text())
    (scenario,) = (one for one in golden["scenarios"] if one["id"] == "n2r1-default-py1s")
    root = write_shards(tmp_path / "data", golden["shards"])
    # No RANK and no WORLD_SIZE: Lightning sets neither in every process.
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(root), str(tmp_path / "meeting")]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    said = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert [["epoch", one["batches"]] for one in said] == [steps[0] for steps in scenario["ranks"]]
    assert [one["length"] for one in said] == [22, 22]
    assert said[0]["states"][0] == said[0]["states"][1] == said[1]["states"][0]


def _read_as_rank(rank: int, dataset: StreamingDataset, kind: Any, answers: Any, start: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    loader = kind(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    read: list[Any] = []
    start.wait()
    try:
        read += [ids(loader), ids(loader)]
    except ConfigError as error:
        read.append(str(error))
    finally:
        answers.put((rank, read))


def _read_in_forked_ranks(dataset: StreamingDataset, kind: Any) -> list[Any]:
    context = multiprocessing.get_context("fork")
    answers, start = context.SimpleQueue(), context.Barrier(2)
    ranks = [context.Process(target=_read_as_rank, args=(rank, dataset, kind, answers, start)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    read = dict(answers.get() for _ in ranks)
    for rank in ranks:
        rank.join()
    return [read[0], read[1]]


@pytest.fixture
def dataset(tmp_path: Path) -> StreamingDataset:
    return make_dataset(write_dataset(tmp_path / "data", 32))


def test_ranks_forked_with_one_dataset_read_each_its_own_share(dataset: StreamingDataset) -> None:
    ranks = _read_in_forked_ranks(dataset, StreamingDataLoader)
    for epoch in (0, 1):
        samples = [one for rank in ranks for batch in rank[epoch] for one in batch]
        assert sorted(samples) == list(range(32))
    assert ranks[0][0] != ranks[0][1]


def test_plain_loaders_in_such_ranks_are_refused_instead_of_counting_each_others_passes(
    dataset: StreamingDataset,
) -> None:
    for (said,) in _read_in_forked_ranks(dataset, DataLoader):
        assert "make it in the process that reads it, or use StreamingDataLoader" in said
