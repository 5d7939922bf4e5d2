"""The order of the 0.2 line of MosaicML Streaming: a stretched seed, one stream, py2s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.batching import Batched
from lightning_streaming.sequence.partition import Partition, epoch_geometry
from lightning_streaming.sequence.settings import (
    BATCHING_METHODS,
    SHUFFLE_ALGOS,
    BatchingMethod,
    OrderSettings,
    ResolvedOrder,
    ShuffleAlgo,
)
from lightning_streaming.sequence.shuffles import SHUFFLES
from tests.sequence.builders import epoch_of, geometry_of, make_shape
from tests.sequence.reference import assert_is, load, stretched_seed, work_array


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ({"shuffle_algo": "py9"}, ", ".join(SHUFFLE_ALGOS)),
        ({"sampling_method": "loose"}, "balanced, fixed"),
        ({"partition_algo": "strict"}, "orig, relaxed"),
        ({"batching_method": "any"}, "device_per_stream, per_stream, random, stratified"),
    ],
    ids=str,
)
def test_an_unknown_name_is_refused_at_birth_with_the_names_there_are(said: dict[str, Any], known: str) -> None:
    with pytest.raises(ConfigError, match=f"must be one of {known}, but got"):
        OrderSettings(**said)


def test_the_shuffles_there_are_have_these_names() -> None:
    assert set(SHUFFLE_ALGOS) == {"blockwise", *SHUFFLES}


@pytest.mark.parametrize("algo", SHUFFLE_ALGOS)
@pytest.mark.parametrize("method", BATCHING_METHODS)
def test_every_known_name_goes_with_every_other(algo: ShuffleAlgo, method: BatchingMethod) -> None:
    settings = OrderSettings(shuffle=True, shuffle_algo=algo, batching_method=method)
    assert (settings.shuffle_algo, settings.batching_method) == (algo, method)


@pytest.mark.parametrize(
    "said",
    [{"shuffle_seed": -1}, {"shuffle_block_size": 0}, {"num_canonical_nodes": -1}, {"sampling_granularity": 0},
     {"shuffle_seed": None}, {"shuffle_block_size": 2.0}, {"num_canonical_nodes": True}],
    ids=str,
)  # fmt: skip
def test_a_number_that_cannot_work_is_refused_at_birth(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(said))):
        OrderSettings(**said)


@pytest.mark.parametrize(
    ("said", "canonical", "block"),
    [
        ({}, 2, 2_000_000),
        ({"shuffle_algo": "py1s"}, 128, 262_144),  # 64 a node, shuffled or not
        ({"num_canonical_nodes": 0}, 2, 2_000_000),  # 0 is None
        ({"num_canonical_nodes": 5}, 5, 800_000),
        ({"num_canonical_nodes": 5, "shuffle_block_size": 7}, 5, 7),
    ],
    ids=str,
)
def test_settling_fills_in_what_was_not_said(said: dict[str, Any], canonical: int, block: int) -> None:
    resolved = OrderSettings(**said).resolved(num_nodes=2)
    assert (resolved.num_canonical_nodes, resolved.shuffle_block_size) == (canonical, block)


def test_settling_again_on_other_nodes_changes_nothing() -> None:
    resolved = OrderSettings(shuffle=True).resolved(num_nodes=2)
    assert resolved.resolved(num_nodes=16) == resolved


def test_settings_that_are_settled_leave_nothing_open() -> None:
    with pytest.raises(TypeError, match="num_canonical_nodes"):
        ResolvedOrder(shuffle=True)  # type: ignore[call-arg]
    resolved = OrderSettings(shuffle=True).resolved(num_nodes=2)
    assert resolved.resolved_as(3, 5) == replace(resolved, num_canonical_nodes=3, shuffle_block_size=5)


GOLDEN = load("order_components.json")
CASES = GOLDEN["v02"]
SERVED = [case for case in CASES if "error" not in case["out"]]
UNEVEN_START = [case for case in CASES if case["out"].get("error") == "ValueError"]
"""That line cannot go on after a number of samples that the nodes do not divide. We can: our start is exact."""
REFUSED = [case for case in CASES if case["out"].get("error") == "AssertionError"]


def work_out(args: dict[str, Any]) -> tuple[Batched, Partition]:
    """The epoch in today's settings; that line had one canonical node per node, and read single samples by default."""
    nodes, ranks, batch_size = args["num_nodes"], args["ranks_per_node"], args["batch_size"] or 1
    settings = OrderSettings(
        shuffle=args["shuffle"],
        shuffle_algo="py2s",
        shuffle_seed=stretched_seed(args["shuffle_seed"]),
        num_canonical_nodes=args["num_canonical_nodes"] or nodes,
        partition_algo="orig",
    ).resolved(nodes)
    shape = make_shape(GOLDEN["v02_shard_sets"][args["shards"]])
    current = geometry_of(nodes, ranks, batch_size)
    plan = epoch_of(settings, shape, epoch_geometry(settings, current, None), args["epoch"])
    return plan, Partition(sequence=plan, start=args["drop_first"], geometry=current)


def case_id(case: dict[str, Any]) -> str:
    return str(list(case["args"].values()))


def test_no_golden_epoch_is_left_out() -> None:
    assert (len(SERVED), len(UNEVEN_START), len(REFUSED), len(CASES)) == (8, 1, 1, 10)


@pytest.mark.parametrize("case", SERVED, ids=case_id)
def test_the_seed_is_the_one_that_line_saved(case: dict[str, Any]) -> None:
    assert stretched_seed(case["args"]["shuffle_seed"]) == case["out"]["derived_seed"]


@pytest.mark.parametrize("case", SERVED, ids=case_id)
def test_every_worker_reads_what_that_line_read(case: dict[str, Any]) -> None:
    plan, partition = work_out(case["args"])
    work = work_array(plan, partition, case["args"]["workers_per_rank"])
    assert_is(work.reshape(*work.shape[:3], -1), case["out"])


@pytest.mark.parametrize("case", UNEVEN_START, ids=case_id)
def test_a_start_that_the_nodes_do_not_divide_is_served_where_that_line_failed(case: dict[str, Any]) -> None:
    plan, partition = work_out(case["args"])
    work = work_array(plan, partition, case["args"]["workers_per_rank"])
    assert partition.start % partition.geometry.num_nodes
    assert set(work[work >= 0]) == set(plan.ids_between(partition.start, len(plan)))
    assert len(np.unique((work >= 0).sum(axis=(2, 3, 4)))) == 1


@pytest.mark.parametrize("case", REFUSED, ids=case_id)
def test_nodes_that_canonical_nodes_do_not_fit_are_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="multiple or a divisor"):
        work_out(case["args"])
