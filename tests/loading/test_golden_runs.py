"""Real runs of the reference's dataset and loader, repeated with ours: the same samples in the same batches.

Where ours differs on purpose, a test of its own says how and why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataLoader, World
from tests.golden import golden_path
from tests.helpers import State, ids, make_loader, write_shards

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes"),
]

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
    return {key: value for key, value in state.items() if key not in ("version", "fingerprint", "streams")}


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
