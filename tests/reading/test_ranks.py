"""Ranks as real processes: with torch.distributed, and started from a process that had made the dataset before.

Real runs of the reference's dataset and loader, repeated with ours: the same samples in the same batches.

Where ours differs on purpose, a test of its own says how and why.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_streaming import StreamingDataLoader, StreamingDataset, World
from lightning_streaming.distributed import restore_state_global, save_state_global
from lightning_streaming.errors import ConfigError, StateError, StreamingError
from tests.forked_ranks import on_ranks
from tests.golden import golden_path
from tests.helpers import State, ids, make_dataset, make_loader, write_dataset, write_shards

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes"),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", 29)


def _save_and_go_on(data: Path) -> dict[str, Any]:
    loader, again = make_loader(data, batch_size=2, workers=1), make_loader(data, batch_size=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = save_state_global(loader, dst_rank=1)
    restore_state_global(again, state, src_rank=1)
    given = save_state_global(again), save_state_global(again, dst_rank=1)  # nothing was read in between
    return {"state": state, "saved again": given, "left": ids(batches), "read": ids(again)}


def test_one_rank_keeps_the_state_and_gives_it_to_the_others(data: Path, tmp_path: Path) -> None:
    ranks = on_ranks(_save_and_go_on, data, meeting=tmp_path / "ranks")
    state = ranks[1]["state"]
    assert state["sample_in_epoch"] == 3 * 2 * 2
    assert ranks[0]["state"] is None
    assert [rank["saved again"] for rank in ranks] == [(state, None), (None, state)]
    for rank in ranks:
        assert rank["read"] == rank["left"]
    alone = make_loader(data, batch_size=2)
    restore_state_global(alone, state)
    assert {one for batch in ids(alone) for one in batch} == {
        one for rank in ranks for batch in rank["left"] for one in batch
    }


def _broken() -> StreamingDataLoader:
    """A loader whose state cannot be told."""
    return make_loader("http://127.0.0.1:1/nowhere", download_retry=0)


def _errors(data: Path) -> list[str]:
    loader = make_loader(data, batch_size=2)
    batches = iter(loader)
    state = loader.state_dict()
    rank = 1 if save_state_global(loader) is None else 0
    for _ in range(rank):
        next(batches)
    said = []
    for ask in (
        partial(save_state_global, loader),
        partial(save_state_global, loader, dst_rank=2),
        partial(restore_state_global, loader, None),
        partial(restore_state_global, loader, None, src_rank=0),
        partial(restore_state_global, loader, state, src_rank=0),
        partial(save_state_global, _broken() if rank else loader),
    ):
        with pytest.raises(StreamingError) as caught:
            ask()
        said.append(f"{caught.type.__name__}: {caught.value}")
    return said


def test_ranks_out_of_step_and_states_that_are_not_there_are_errors_on_all_ranks(data: Path, tmp_path: Path) -> None:
    first, second = on_ranks(_errors, data, meeting=tmp_path / "ranks")
    assert first == second
    assert first[0].startswith(
        "StateError: the ranks' loaders are at different positions: (epoch, sample) [(0, 0), (0, 4)]"
    )
    assert first[1] == "ConfigError: there is no rank 2, but 2 from 0 on"
    assert first[2] == first[3]
    assert first[2].startswith("StateError: there is no state to load")
    assert first[4].startswith("ConfigError: rank 0 sends the state, so ranks [1] must pass None")
    assert first[5].startswith("DownloadError: ")


def _save_unconnected(data: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        save_state_global(make_loader(data))
    return str(caught.value)


def test_ranks_that_are_not_connected_are_told_what_to_do(data: Path, tmp_path: Path) -> None:
    for said in on_ranks(_save_unconnected, data, meeting=tmp_path / "ranks", connected=False):
        assert "save and load loader.state_dict() on each rank" in said


def test_a_single_process_needs_nobody(data: Path) -> None:
    loader = make_loader(data)
    next(iter(loader))
    state = save_state_global(loader)
    assert state == loader.state_dict()
    restore_state_global(loader, state, src_rank=0)
    assert loader.state_dict() == state


@pytest.mark.parametrize("wrong", [[], {}, {"epoch": -1}, {"num_canonical_nodes": 10**9}], ids=str)
def test_what_is_no_state_is_refused_and_changes_nothing(tmp_path: Path, wrong: Any) -> None:
    loader = make_loader(write_dataset(tmp_path / "data"))
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(StateError):
        restore_state_global(loader, {**before, **wrong} if wrong else wrong)
    assert loader.state_dict() == before


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


GOLDEN = json.loads(golden_path("loader.json").read_text())
SCENARIOS = {scenario["id"]: scenario for scenario in GOLDEN["scenarios"]}
SAME_AS_THE_REFERENCE = (
    "single-w0",
    "single-w0-resume",
    "single-w2",
    "single-w2-resume",
    "single-w3",
    "single-w3-resume",
    "drop-last",
    "n2r2w2",
    "replication2",
)
OURS_ON_PURPOSE = (
    "resume-at-end",
    "load-stale-and-forward",
    "Q6-lost-canonical",
    "Q6-kept-after-state_dict",
    "elastic-4to2",
    "n2r1-default-py1s",
)

Step = Sequence[Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data") / "golden", GOLDEN["shards"])


def _loader(root: Path, name: str, rank: int = 0) -> StreamingDataLoader:
    scenario = SCENARIOS[name]
    ranks_per_node = scenario["local_world_size"]
    return make_loader(
        root,
        workers=scenario["num_workers"],
        drop_last=scenario.get("drop_last", False),
        world=World(num_nodes=scenario["world_size"] // ranks_per_node, ranks_per_node=ranks_per_node, rank=rank),
        **{"shuffle_block_size": None, **scenario["dataset"]},
    )


def _run(root: Path, name: str, rank: int = 0) -> list[Step]:
    """Do what the script of a scenario says, and note the results the way the golden file does."""
    loader, results = _loader(root, name, rank), list[Step]()
    for action, *argument in SCENARIOS[name]["script"]:
        if action == "load":
            loader.load_state_dict(argument[0])
            results.append(["load"])
        elif action == "state":
            results.append(["state", _without_ours(loader.state_dict())])
        else:
            batches = iter(loader)
            limit = argument[0]
            results.append(["epoch", ids(batches if limit is None else (next(batches) for _ in range(limit)))])
            if limit is not None:
                results.append(["state", _without_ours(loader.state_dict())])
    return results


def _without_ours(state: State) -> State:
    ours = ("version", "library_version", "fingerprint", "stream_list")
    return {key: value for key, value in state.items() if key not in ours}


def _in_our_words(step: Step) -> Step:
    """A golden result as we say it: there is no epoch -1, and the end of an epoch is the beginning of the next."""
    kind, value = step[0], step[-1]
    if kind == "state" and value["epoch"] == -1:
        return ["state", {**value, "epoch": 0}]
    if kind == "state" and value["sample_in_epoch"] >= sum(GOLDEN["shards"]):
        return ["state", {**value, "epoch": value["epoch"] + 1, "sample_in_epoch": 0}]
    return step


def _golden(name: str, rank: int = 0) -> list[Step]:
    return [_in_our_words(step) for step in SCENARIOS[name]["ranks"][rank]]


def test_every_scenario_is_looked_at() -> None:
    assert sorted(SCENARIOS) == sorted(SAME_AS_THE_REFERENCE + OURS_ON_PURPOSE)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", SAME_AS_THE_REFERENCE)
def test_batches_and_states_are_those_of_the_reference(root: Path, name: str) -> None:
    for rank in range(SCENARIOS[name]["world_size"]):
        assert _run(root, name, rank) == _golden(name, rank)


@pytest.mark.parametrize("name", SAME_AS_THE_REFERENCE)
def test_lengths_are_those_of_the_reference(root: Path, name: str) -> None:
    loader = _loader(root, name)
    assert (len(loader.dataset), len(loader)) == (SCENARIOS[name]["len_dataset"], SCENARIOS[name]["len_loader"])


def test_a_state_from_the_end_of_an_epoch_begins_the_next(root: Path) -> None:
    """The reference gives an empty epoch first, in which a trainer would take no step and might stop."""
    load, empty, whole = _golden("resume-at-end")
    assert empty == ["epoch", []]
    first, second, third = _run(root, "resume-at-end")
    assert [first, second] == [load, whole]
    assert len(third[1]) == 14


def test_an_earlier_state_rewinds(root: Path) -> None:
    """The reference ignores a state of the current or an earlier epoch, and goes on with the next epoch."""
    golden = _golden("load-stale-and-forward")
    ours = _run(root, "load-stale-and-forward")
    assert ours[:3] == golden[:3]
    rewound = SCENARIOS["load-stale-and-forward"]["script"][1][1]
    assert ours[3] == ["state", rewound]  # the state just loaded, and not where the abandoned pass stood
    beginning = _golden("single-w0")[1][1]
    assert ours[4] == ["epoch", beginning[2:4]]
    assert ours[5] == ["state", {**rewound, "sample_in_epoch": 16}]
    # Going forward is as in the reference, but for its state, which adds what the pass before had read.
    assert ours[7] == ["state", {**rewound, "epoch": 5}]
    assert ours[8:] == golden[8:]


@pytest.mark.parametrize("name", ["Q6-lost-canonical", "Q6-kept-after-state_dict"])
def test_canonical_nodes_stay_what_the_state_says(root: Path, name: str) -> None:
    """In the reference workers of the epoch after a resume forget them, unless somebody called state_dict meanwhile."""
    kept = _golden("Q6-kept-after-state_dict")
    assert [step for step in _run(root, name) if step[0] == "epoch"] == [step for step in kept if step[0] == "epoch"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_number_of_nodes_stays_in_the_state(root: Path, rank: int) -> None:
    """In the reference it is forgotten in the epoch after a resume, like the canonical nodes."""
    golden, ours = _golden("elastic-4to2", rank), _run(root, "elastic-4to2", rank)
    assert ours[:-1] == golden[:-1]
    assert golden[-1][1]["initial_physical_nodes"] == 1
    assert ours[-1] == ["state", {**golden[-1][1], "initial_physical_nodes": 2}]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_loader_says_how_many_batches_there_really_are(root: Path, rank: int) -> None:
    """128 canonical nodes read 53 samples as 128. The reference gives those 22 batches too, but promises 9."""
    name = "n2r1-default-py1s"
    assert _run(root, name, rank) == _golden(name, rank)
    assert SCENARIOS[name]["len_loader"] == 9
    assert len(_loader(root, name, rank)) == len(_golden(name, rank)[0][1]) == 22
