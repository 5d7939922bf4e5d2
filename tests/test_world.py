from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.world import World, readers_of_mesh
from tests.golden import golden_path
from tests.helpers import READERS_OF_3, SHAPES_OF_8, FakeMesh, assert_error, mesh_of, worlds

CASES: list[dict[str, Any]] = json.loads(golden_path("order_components.json").read_text())["replicate"]


def test_all_golden_replications_are_here() -> None:
    assert len(CASES) == 11


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_read_the_same_are_one_as_in_the_reference(case: dict[str, Any]) -> None:
    world = World(num_nodes=case["num_nodes"], ranks_per_node=case["ranks_per_node"])
    if "error" in case["out"]:
        with assert_error(ConfigError, option="replication"):
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


def test_ranks_that_are_one_are_one_in_everything_else() -> None:
    assert World(ranks_per_node=4, rank=3, is_reader=False).replicated(2) == World(
        ranks_per_node=2, rank=1, is_reader=False
    )


def coordinates(mesh: FakeMesh, readers: Sequence[str]) -> list[tuple[int, ...]]:
    """Of each rank, along the dimensions of readers."""
    assert mesh.mesh_dim_names is not None
    axes = [mesh.mesh_dim_names.index(name) for name in readers]
    places = [np.argwhere(mesh.mesh == rank)[0].tolist() for rank in range(mesh.mesh.size)]
    return [tuple(place[axis] for axis in axes) for place in places]


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("shape", SHAPES_OF_8, ids=str)
def test_ranks_of_a_mesh_that_differ_in_other_dimensions_only_are_one(
    shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    mesh = mesh_of(shape, order)
    for readers in (*READERS_OF_3, ("first", "second", "third")):
        found = readers_of_mesh(mesh, readers, 8).tolist()
        places = coordinates(mesh, readers)
        assert len({*found}) == len({*places}) == len({*zip(found, places, strict=True)})
        assert list(dict.fromkeys(found)) == list(range(len({*found})))  # by the lowest rank of each
    assert found == list(range(8))  # where all dimensions are readers


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES_OF_8, ids=str)
def test_nodes_of_a_mesh_are_machines_where_these_share_all_readers_or_none(
    shape: tuple[int, ...], ranks_per_node: int
) -> None:
    machines = [range(first, first + ranks_per_node) for first in range(0, 8, ranks_per_node)]
    for order, readers in product(permutations(range(3)), READERS_OF_3):
        mesh = mesh_of(shape, order)
        ranks = worlds(len(machines), ranks_per_node)
        found = [World.from_mesh(mesh, readers, ranks=rank) for rank in ranks]
        assert len({(world.num_nodes, world.ranks_per_node) for world in found}) == 1
        assert {world.rank for world in found} == {*range(found[0].num_ranks)}
        of_machines = [{coordinates(mesh, readers)[rank] for rank in machine} for machine in machines]
        alone = all(a == b or (not a & b and len(a) == len(b)) for a in of_machines for b in of_machines)
        if alone:
            assert found[0].ranks_per_node == len(of_machines[0])
            for machine, its in zip(machines, of_machines, strict=True):
                assert {found[rank].node for rank in machine} == {found[machine[0]].node}
                assert len({found[rank].rank_of_node for rank in machine}) == len(its)
        else:
            assert found[0].num_nodes == 1


@pytest.mark.parametrize(
    ("shape", "readers", "nodes", "ranks"),
    [
        ((8, 1, 1), ("first",), 2, 4),  # each rank reads
        ((2, 2, 2), ("first", "second"), 2, 2),  # tensor parallel within machines
        ((2, 2, 2), ("second", "third"), 1, 4),  # each machine reads all
        ((1, 2, 4), ("second",), 2, 1),  # a machine is a reader
        ((8, 1, 1), ("second",), 1, 1),
        ((2, 4, 1), ("first",), 2, 1),
    ],
)
def test_nodes_of_two_machines_of_four_ranks(
    shape: tuple[int, ...], readers: tuple[str, ...], nodes: int, ranks: int
) -> None:
    found = [World.from_mesh(mesh_of(shape), readers, ranks=one) for one in worlds(2, 4)]
    assert {(one.num_nodes, one.ranks_per_node) for one in found} == {(nodes, ranks)}


@pytest.mark.parametrize(
    ("readers", "machines"),
    [
        ([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], 3),
        ([[0, 1], [2, 4], [3, 5], [6, 7]], 2),  # as many readers on each machine, which the nodes would divide
    ],
)
def test_machines_that_share_some_readers_are_one_node(readers: list[list[int]], machines: int) -> None:
    mesh = FakeMesh(np.array(readers), ("dp_shard", "tp"))
    found = [World.from_mesh(mesh, ranks=one) for one in worlds(machines, mesh.mesh.size // machines)]
    assert [[found[rank].rank for rank in reader] for reader in readers] == [
        [number] * len(reader) for number, reader in enumerate(readers)
    ]
    assert {one.num_nodes for one in found} == {1}


@pytest.mark.parametrize("replication", [1, 2, 4, 8])
def test_consecutive_ranks_of_a_mesh_read_as_with_replication(replication: int) -> None:
    mesh = FakeMesh(np.arange(8).reshape(8 // replication, replication), ("dp_shard", "tp"))
    for rank in worlds(1, 8):
        assert World.from_mesh(mesh, ranks=rank) == rank.replicated(replication)


def test_a_mesh_is_asked_for_the_readers_it_has_and_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    mesh = FakeMesh(np.arange(8).reshape(2, 4), ("pp", "dp_shard"))
    assert World.from_mesh(mesh) == World(ranks_per_node=4, rank=1)
    assert World.from_mesh(mesh, "pp", is_reader=False) == World(num_nodes=2, rank=1, is_reader=False)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (FakeMesh(np.arange(4).reshape(2, 2), None), "no names for its dimensions"),
        (FakeMesh(np.arange(4).reshape(2, 2), ("dp", "tp")), "none of the dimensions of the device mesh.* 'dp', 'tp'"),
        (FakeMesh(np.arange(2), ("dp_shard",)), "each of the 4 ranks once, but has 2"),
        (FakeMesh(np.array([0, 1, 2, 2]), ("dp_shard",)), "each of the 4 ranks once"),
    ],
    ids=["no names", "other names", "a slice", "a rank twice"],
)
def test_a_mesh_that_cannot_tell_who_reads_is_refused(mesh: FakeMesh, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        World.from_mesh(mesh, ranks=World(ranks_per_node=4))


def test_a_rank_knows_its_node_and_its_place_there() -> None:
    world = World(num_nodes=2, ranks_per_node=3, rank=4)
    assert (world.num_ranks, world.node, world.rank_of_node) == (6, 1, 1)


@pytest.mark.parametrize(
    "said",
    [{"num_nodes": 0}, {"ranks_per_node": 0}, {"rank": 1}, {"rank": -1}, {"num_nodes": 2, "rank": 2}, {"is_reader": 0},
     {"num_nodes": 1.5}, {"ranks_per_node": True}],
    ids=str,
)  # fmt: skip
def test_a_world_that_cannot_be_is_refused(said: dict[str, Any]) -> None:
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
    with assert_error(ConfigError, option="world") as caught:
        World.detect(environ)
    assert found in str(caught.value)


def test_who_does_not_read_does_not_read_by_a_mesh_either() -> None:
    silent = World(ranks_per_node=8, rank=3, is_reader=False)
    assert not World.from_mesh(mesh_of((2, 2, 2)), ("first",), ranks=silent).is_reader


def test_a_dimension_that_is_misspelt_is_told() -> None:
    with assert_error(ConfigError, option="readers") as caught:
        World.from_mesh(
            FakeMesh(np.arange(4).reshape(2, 2), ("dp_replicate", "dp_shard")), ("dp_replicate", "dq_shard")
        )
    assert "'dq_shard'" in str(caught.value)
