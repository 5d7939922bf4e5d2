from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.world import World
from tests.golden import golden_path

CASES: list[dict[str, Any]] = json.loads(golden_path("order_components.json").read_text())["replicate"]


def test_all_golden_replications_are_here() -> None:
    assert len(CASES) == 11


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_read_the_same_are_one_as_in_the_reference(case: dict[str, Any]) -> None:
    world = World(num_nodes=case["num_nodes"], ranks_per_node=case["ranks_per_node"])
    if "error" in case["out"]:
        with pytest.raises(ConfigError, match="replication"):
            world.replicated(case["replication"])
    else:
        replicated = world.replicated(case["replication"])
        assert (replicated.num_nodes, replicated.ranks_per_node) == (
            case["out"]["num_nodes"],
            case["out"]["ranks_per_node"],
        )


def test_consecutive_ranks_become_one() -> None:
    worlds = [World(num_nodes=2, ranks_per_node=4, rank=rank).replicated(2) for rank in range(8)]
    assert [world.rank for world in worlds] == [0, 0, 1, 1, 2, 2, 3, 3]


@given(nodes=st.integers(1, 8), ranks=st.integers(1, 8), replication=st.integers(1, 8))
def test_replication_divides_the_ranks(nodes: int, ranks: int, replication: int) -> None:
    world = World(num_nodes=nodes, ranks_per_node=ranks)
    if world.num_ranks % replication:
        with pytest.raises(ConfigError):
            world.replicated(replication)
    else:
        assert world.replicated(replication).num_ranks * replication == world.num_ranks


def test_no_replication_changes_nothing() -> None:
    world = World(num_nodes=2, ranks_per_node=3, rank=4)
    assert world.replicated(None) == world.replicated(1) == world


def test_a_rank_knows_its_node_and_its_place_there() -> None:
    world = World(num_nodes=2, ranks_per_node=3, rank=4)
    assert (world.num_ranks, world.node, world.rank_of_node) == (6, 1, 1)


@pytest.mark.parametrize(
    "said", [{"num_nodes": 0}, {"ranks_per_node": 0}, {"rank": 1}, {"rank": -1}, {"num_nodes": 2, "rank": 2}], ids=str
)
def test_a_world_that_cannot_be_is_refused(said: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        World(**said)


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, World()),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, World(num_nodes=2, ranks_per_node=4, rank=5)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, World(num_nodes=1, ranks_per_node=8, rank=5)),  # all on one node
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_WORLD_SIZE": ""}, World()),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": "0"}, World()),  # there is but one it can be
    ],
    ids=str,
)
def test_a_launcher_says_the_world(environ: dict[str, str], world: World) -> None:
    assert World.detect(environ) == world


def test_without_torch_distributed_the_environment_of_this_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert World.detect() == World(num_nodes=2, ranks_per_node=1, rank=1)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "one"}, "RANK must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}, "6 ranks do not divide"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank must be in"),
    ],
    ids=str,
)
def test_an_environment_that_contradicts_itself_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        World.detect(environ)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"WORLD_SIZE": "2"}, "(WORLD_SIZE=2)"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1"}, "(WORLD_SIZE=4, NODE_RANK=1, LOCAL_RANK=1)"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "(WORLD_SIZE=2)"),
        ({"LOCAL_RANK": "0"}, "(LOCAL_RANK=0)"),  # all that Lightning sets in ranks that it forks or spawns
    ],
    ids=str,
)
def test_one_of_several_ranks_that_does_not_know_which_is_not_rank_0(environ: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(found)):
        World.detect(environ)
