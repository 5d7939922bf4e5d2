"""Whole epochs, from what a user writes to what each worker reads, against the reference's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_streaming.errors import StreamingError, UnsupportedError
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.draw import draw_order
from lightning_streaming.order.plan import plan_epoch
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape
from lightning_streaming.order.weights import ResolvedWeights, StreamWeight, resolve_weights
from lightning_streaming.units import parse_count
from lightning_streaming.world import World
from tests.order.reference import assert_is, load, reference_start, work_array

ORDER_SETTINGS = (
    "shuffle",
    "shuffle_algo",
    "shuffle_seed",
    "shuffle_block_size",
    "num_canonical_nodes",
    "sampling_method",
    "sampling_granularity",
    "partition_algo",
    "batching_method",
)


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One golden case, worked out by us."""

    settings: OrderSettings
    weights: ResolvedWeights
    world: World
    work: NDArray[np.int64]


def parallel_world(config: dict[str, Any]) -> World:
    world = World(num_nodes=config["world"]["num_nodes"], ranks_per_node=config["world"]["ranks_per_node"])
    return world.replicated(config["replication"])


def work_out(config: dict[str, Any]) -> Epoch:
    world = parallel_world(config)
    settings = OrderSettings(**{name: config[name] for name in ORDER_SETTINGS}).settled(world.num_nodes)
    said = [{name: value for name, value in stream.items() if name != "shards"} for stream in config["streams"]]
    sizes = tuple(np.asarray(stream["shards"], np.int64) for stream in config["streams"])
    weights = resolve_weights(
        [StreamWeight(**weight) for weight in said],
        [int(shards.sum()) for shards in sizes],
        None if config["epoch_size"] is None else parse_count(config["epoch_size"]),
        config["shuffle_seed"],
    )
    shape = DatasetShape(shard_sizes=sizes, weights=weights)
    order = draw_order(settings, shape, config["epoch"])
    plan = plan_epoch(settings, shape, world.num_nodes, order, config["initial_physical_nodes"])
    start = plan.sequence.resume_position(config["sample_in_epoch"], world.num_ranks)
    deal = Deal(
        length=len(plan),
        start=reference_start(start, world.num_nodes),
        num_nodes=world.num_nodes,
        ranks_per_node=world.ranks_per_node,
        batch_size=config["batch_size"],
    )
    work = work_array(plan, deal, config["world"]["workers_per_rank"])
    return Epoch(settings=settings, weights=weights, world=world, work=work)


def is_redealt(config: dict[str, Any]) -> bool:
    """Whether 'relaxed' differs from 'orig': a run goes on where its canonical nodes do not fit the nodes."""
    began, canonical = config["initial_physical_nodes"], config["num_canonical_nodes"]
    if config["partition_algo"] != "relaxed" or began is None or canonical is None:
        return False
    nodes = config["world"]["num_nodes"]
    return bool(canonical % nodes and nodes % canonical)


def is_served(config: dict[str, Any]) -> bool:
    return (
        config["batching_method"] == "random"
        and config["shuffle_algo"] in ("naive", "py1s", "py1e")
        and not is_redealt(config)
    )


CASES = load("order.json")["cases"]
SERVED = [case for case in CASES if is_served(case["config"]) and "error" not in case]
REFUSED = [case for case in CASES if is_served(case["config"]) and "error" in case]
LATER = [case for case in CASES if not is_served(case["config"])]


def test_no_case_is_left_out() -> None:
    assert (len(SERVED), len(REFUSED), len(LATER)) == (70, 7, 43)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case["id"])
def test_every_worker_reads_what_the_reference_reads(case: dict[str, Any]) -> None:
    assert_is(work_out(case["config"]).work, case)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case["id"])
def test_defaults_and_weights_are_those_of_the_reference(case: dict[str, Any]) -> None:
    epoch, derived = work_out(case["config"]), case["derived"]
    assert epoch.settings.num_canonical_nodes == derived["num_canonical_nodes"]
    assert epoch.settings.shuffle_block_size == derived["shuffle_block_size"]
    assert epoch.weights.epoch_size == derived["epoch_size"]
    assert list(epoch.weights.choose) == derived["choose"]
    assert [share.hex() for share in epoch.weights.proportion] == derived["proportion"]
    assert [times.hex() for times in epoch.weights.repeat] == derived["repeat"]
    assert epoch.world.num_nodes == derived["parallel_world"]["num_nodes"]
    assert epoch.world.ranks_per_node == derived["parallel_world"]["ranks_per_node"]
    assert -(-epoch.weights.epoch_size // epoch.world.num_ranks) == derived["length"]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["id"])
def test_what_the_reference_refuses_is_refused(case: dict[str, Any]) -> None:
    assert case["error"] == "ValueError"
    with pytest.raises(StreamingError) as caught:
        work_out(case["config"])
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize("case", LATER, ids=lambda case: case["id"])
def test_what_is_not_served_yet_says_so(case: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="yet"):
        work_out(case["config"])
