"""Whole epochs, from what a user writes to what each worker reads, against the reference's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lightning_streaming.errors import StateError, StreamingError
from lightning_streaming.sequence.batching import Batched
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.partition import BatchGeometry, Partition, epoch_geometry, rank_layout
from lightning_streaming.sequence.settings import OrderSettings, ResolvedOrder
from lightning_streaming.sequence.weights import DatasetShape, ResolvedWeights, StreamWeight, resolve_weights
from lightning_streaming.units import parse_count
from lightning_streaming.world import World
from tests.sequence.builders import epoch_of
from tests.sequence.reference import assert_is, load, reference_start, reference_work_array, work_array

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

    settings: ResolvedOrder
    weights: ResolvedWeights
    world: World
    plan: Batched
    partition: Partition


def parallel_world(config: dict[str, Any]) -> World:
    world = World(num_nodes=config["world"]["num_nodes"], ranks_per_node=config["world"]["ranks_per_node"])
    return world.replicated(config["replication"])


def work_out(config: dict[str, Any]) -> Epoch:
    world = parallel_world(config)
    settings = OrderSettings(**{name: config[name] for name in ORDER_SETTINGS}).resolved(world.num_nodes)
    said = [{name: value for name, value in stream.items() if name != "shards"} for stream in config["streams"]]
    sizes = tuple(np.asarray(stream["shards"], np.int64) for stream in config["streams"])
    weights = resolve_weights(
        [StreamWeight(**weight) for weight in said],
        [int(shards.sum()) for shards in sizes],
        None if config["epoch_size"] is None else parse_count(config["epoch_size"]),
        config["shuffle_seed"],
    )
    shape = DatasetShape(shard_sizes=sizes, weights=weights)
    current = BatchGeometry(
        num_nodes=world.num_nodes, ranks_per_node=world.ranks_per_node, batch_size=config["batch_size"]
    )
    geometry = epoch_geometry(settings, current, config["initial_physical_nodes"])
    plan = epoch_of(settings, shape, geometry, config["epoch"])
    assert isinstance(plan.inner, Shuffled)
    plan.inner.drawn()
    start = plan.resume_position(config["sample_in_epoch"], world.num_ranks)
    partition = Partition(
        sequence=plan,
        start=reference_start(settings, start, current, geometry),
        geometry=current,
        layout=rank_layout(settings, current, geometry),
    )
    return Epoch(settings=settings, weights=weights, world=world, plan=plan, partition=partition)


CASES = load("order.json")["cases"]
GOES_ON = ("E04-relaxed-bad-gbs", "I04-ncn-lt-n-tiny-error", "I06-py1e-empty-cn-error")
"""The reference cannot go on with a global batch that is no multiple of the ranks at the beginning, nor divide few
samples among many nodes or canonical nodes. We can."""
PAST_END = "G13-stratified-resume-past-end"
"""The reference makes an empty epoch of a position that no epoch of this data has. We refuse it."""
SERVED = [case for case in CASES if "error" not in case and case["id"] != PAST_END]
REFUSED = [case for case in CASES if "error" in case and case["id"] not in GOES_ON]


def test_no_case_is_left_out() -> None:
    assert (len(SERVED), len(REFUSED), len(CASES)) == (107, 9, 120)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case["id"])
def test_an_epoch_is_that_of_the_reference(case: dict[str, Any]) -> None:
    epoch, workers = work_out(case["config"]), case["config"]["world"]["workers_per_rank"]
    assert_is(reference_work_array(epoch.plan, epoch.partition, workers), case)
    work = work_array(epoch.plan, epoch.partition, workers)
    assert len(np.unique((work >= 0).sum(axis=(2, 3, 4)))) <= 1, "ranks have unequal numbers of samples"
    assert_settled_as_by_the_reference(epoch, case["derived"])


def assert_settled_as_by_the_reference(epoch: Epoch, derived: dict[str, Any]) -> None:
    """Compare defaults and weights."""
    assert epoch.settings.num_canonical_nodes == derived["num_canonical_nodes"]
    assert epoch.settings.shuffle_block_size == derived["shuffle_block_size"]
    assert epoch.weights.epoch_size == derived["epoch_size"]
    assert list(epoch.weights.choose) == derived["choose"]
    assert [share.hex() for share in epoch.weights.proportion] == derived["proportion"]
    assert [times.hex() for times in epoch.weights.repeat] == derived["repeat"]
    assert epoch.world.num_nodes == derived["parallel_world"]["num_nodes"]
    assert epoch.world.ranks_per_node == derived["parallel_world"]["ranks_per_node"]
    assert -(-epoch.weights.epoch_size // epoch.world.num_ranks) == derived["length"]


def test_only_endings_that_leave_ranks_uneven_are_not_those_of_the_reference() -> None:
    differ = set()
    for case in SERVED:
        epoch, workers = work_out(case["config"]), case["config"]["world"]["workers_per_rank"]
        ours = work_array(epoch.plan, epoch.partition, workers)
        theirs = reference_work_array(epoch.plan, epoch.partition, workers)
        batches = ours.shape[3]
        if not np.array_equal(ours, theirs[:, :, :, :batches]) or (theirs[:, :, :, batches:] >= 0).any():
            differ.add(case["id"])
            assert len(np.unique((theirs >= 0).sum(axis=(2, 3, 4)))) > 1
    assert differ == {"E02-relaxed-4to3-shuffle", "G07-device_per_stream-fixed"}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["id"])
def test_what_the_reference_refuses_is_refused(case: dict[str, Any]) -> None:
    assert case["error"] == "ValueError"
    with pytest.raises(StreamingError) as caught:
        work_out(case["config"])
    assert isinstance(caught.value, ValueError)


def test_a_position_past_every_end_is_refused() -> None:
    with pytest.raises(StateError, match="4000 samples were consumed"):
        work_out(next(case["config"] for case in CASES if case["id"] == PAST_END))


@pytest.mark.parametrize("case_id", GOES_ON)
def test_what_the_reference_cannot_divide_is_divided_evenly(case_id: str) -> None:
    config = next(case["config"] for case in CASES if case["id"] == case_id)
    epoch = work_out(config)
    work = work_array(epoch.plan, epoch.partition, config["world"]["workers_per_rank"])
    assert set(work[work >= 0]) == set(epoch.plan.ids_between(config["sample_in_epoch"], len(epoch.plan)))
    assert len(np.unique((work >= 0).sum(axis=(2, 3, 4)))) == 1
