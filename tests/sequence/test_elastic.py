"""A run goes on with other machines in the middle of an epoch: nothing is read twice, nothing left out.

Only where an epoch's samples do not divide evenly a few are read twice, and only at its very end: fewer than there are
canonical nodes to make slices even, and fewer than there are ranks to make these even.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.partition import BatchGeometry, fits
from lightning_streaming.sequence.settings import BATCHING_METHODS, SHUFFLE_ALGOS, OrderSettings, ResolvedOrder
from lightning_streaming.sequence.weights import DatasetShape, StreamWeight, resolve_weights
from lightning_streaming.world import World
from tests.sequence.builders import epoch_of, make_shape
from tests.sequence.legs import (
    ALONE,
    Leg,
    check_global_batches,
    check_ranks_are_even,
    legs_on,
    read_by_ranks,
    read_by_workers,
    read_epoch,
    stretches,
)
from tests.tiers import examples

UNHURRIED = settings(deadline=None)
COMPOSED = [method for method in BATCHING_METHODS if method != "random"]


def drawn_ids(asked: ResolvedOrder, shape: DatasetShape, epoch: int) -> list[int]:
    """What the epoch draws."""
    return list(Shuffled(asked, shape, epoch).ids(np.arange(shape.epoch_size)).tolist())


@st.composite
def mixtures(draw: st.DrawFn, shards: int = 4, largest: int = 30) -> DatasetShape:
    """One to three streams, some repeated, some drawn in part, all of some weight."""
    sizes = draw(st.lists(st.lists(st.integers(1, largest), min_size=1, max_size=shards), min_size=1, max_size=3))
    relative = draw(st.booleans())
    shares = [draw(st.floats(0.3, 2.5)) for _ in sizes]
    weights = [StreamWeight(proportion=share) if relative else StreamWeight(repeat=share) for share in shares]
    totals = [sum(stream) for stream in sizes]
    assume(relative or any(int(share * total) for share, total in zip(shares, totals, strict=True)))
    return DatasetShape(
        shard_sizes=tuple(np.asarray(stream) for stream in sizes),
        weights=resolve_weights(weights, totals, draw(st.integers(1, 150)) if relative else None, seed=0),
    )


CANONICAL = 6
FITTING = st.sampled_from([1, 2, 3, 6, 12])
WHOLE = st.sampled_from([1, 2, 3, 6])
ANY = st.integers(1, 7)
epochs = st.integers(0, 2)


def asked_for(algo: str, **said: object) -> ResolvedOrder:
    """A shuffle in small blocks; None of it where there is no name."""
    return OrderSettings(
        shuffle=bool(algo),
        shuffle_algo=algo or "py1s",  # type: ignore[arg-type]  # checked at birth, too
        shuffle_block_size=20,
        **{"num_canonical_nodes": CANONICAL, **said},  # type: ignore[arg-type]  # each is checked at birth
    ).resolved(1)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("algo", ["", *SHUFFLE_ALGOS])
@settings(UNHURRIED, max_examples=examples(40))
@given(shape=mixtures(), legs=legs_on(FITTING, FITTING), epoch=epochs, partition=st.sampled_from(["orig", "relaxed"]))
def test_an_epoch_cut_three_times_reads_what_one_that_was_not_does(
    algo: str, shape: DatasetShape, legs: list[Leg], epoch: int, partition: str
) -> None:
    asked = asked_for(algo, partition_algo=partition)
    assume(shape.epoch_size > CANONICAL)
    ids = read_epoch(asked, shape, epoch, legs)
    drawn = drawn_ids(asked, shape, epoch)
    whole = epoch_of(asked, shape, ALONE, epoch)
    expected = whole.ids_between(0, len(whole)).tolist()
    assert ids[: len(expected)] == expected
    assert not Counter(drawn) - Counter(expected)
    again = Counter(expected) - Counter(drawn)
    assert again.total() < CANONICAL
    assert again.keys() <= set(expected[-CANONICAL:])
    # More nodes than canonical nodes read some twice at the end.
    assert len(ids) - len(expected) < max(leg.machines.num_nodes for leg in legs)


@UNHURRIED
@given(shape=mixtures(), legs=legs_on(WHOLE, ANY), algo=st.sampled_from(["", "py1e", "py1s"]), epoch=epochs)
def test_relaxed_goes_on_with_nodes_that_canonical_nodes_do_not_fit(
    shape: DatasetShape, legs: list[Leg], algo: str, epoch: int
) -> None:
    asked = asked_for(algo)
    assume(shape.epoch_size >= CANONICAL)
    ids = read_epoch(asked, shape, epoch, legs)
    assert ids == read_epoch(asked, shape, epoch, legs[:1])


@UNHURRIED
@given(legs=legs_on(WHOLE, ANY))
def test_orig_goes_on_with_nodes_that_canonical_nodes_fit_only(legs: list[Leg]) -> None:
    asked, shape = asked_for("py1s", partition_algo="orig"), make_shape([400], [300])
    if all(fits(CANONICAL, leg.machines.num_nodes) for leg in legs):
        assert len(read_epoch(asked, shape, 0, legs)) >= shape.epoch_size
    else:
        with pytest.raises(ConfigError, match="multiple or a divisor"):
            read_epoch(asked, shape, 0, legs)


@UNHURRIED
@given(shape=mixtures(largest=2, shards=2), legs=legs_on(FITTING, FITTING))
def test_of_fewer_samples_than_canonical_nodes_none_is_left_out(shape: DatasetShape, legs: list[Leg]) -> None:
    asked = asked_for("py1s", num_canonical_nodes=12)
    assert set(read_epoch(asked, shape, 0, legs)) == set(drawn_ids(asked, shape, 0))


@st.composite
def composed_epochs(draw: st.DrawFn) -> tuple[DatasetShape, list[Leg]]:
    """Streams that fill a few batches of the machines that begin; the machines of later legs may be any."""
    legs = draw(legs_on(st.sampled_from([1, 2, 4]), ANY))
    begins = replace(legs[0].machines, ranks_per_node=min(legs[0].machines.ranks_per_node, 2), batch_size=4)
    streams = draw(st.lists(st.lists(st.integers(20, 40), min_size=3, max_size=4), min_size=1, max_size=3))
    weights = [StreamWeight(repeat=draw(st.floats(0.8, 1.5))) for _ in streams]
    shape = DatasetShape(
        shard_sizes=tuple(np.asarray(stream) for stream in streams),
        weights=resolve_weights(weights, [sum(stream) for stream in streams], None, seed=0),
    )
    assume(begins.batch_size * min(shape.weights.proportion) >= 1)  # or no sample of it would be in a batch
    return shape, [replace(legs[0], machines=begins), *legs[1:]]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("method", COMPOSED)
@pytest.mark.parametrize("partition", ["orig", "relaxed"])
@UNHURRIED
@given(case=composed_epochs(), algo=st.sampled_from(["", *SHUFFLE_ALGOS]), epoch=epochs)
def test_composed_batches_stay_those_of_the_machines_that_the_epoch_began_with(
    method: str, partition: str, case: tuple[DatasetShape, list[Leg]], algo: str, epoch: int
) -> None:
    shape, legs = case
    asked = asked_for(algo, num_canonical_nodes=4, batching_method=method, partition_algo=partition)
    began = next(leg for leg in legs if leg.steps or leg is legs[-1])
    assume(fits(4, began.machines.num_nodes) and began is legs[0])
    ids = read_epoch(asked, shape, epoch, legs)
    whole = epoch_of(asked, shape, legs[0].machines, epoch)
    assert ids == whole.ids_between(0, len(whole)).tolist()


@UNHURRIED
@given(case=composed_epochs(), method=st.sampled_from(COMPOSED))
def test_batches_cut_and_taken_up_by_the_same_machines_are_composed_as_ever(
    case: tuple[DatasetShape, list[Leg]], method: str
) -> None:
    shape, legs = case
    asked = asked_for("py1s", num_canonical_nodes=4, batching_method=method)
    cut = [replace(leg, machines=legs[0].machines) for leg in legs]
    parts = [read_by_ranks(stretch) for stretch in stretches(asked, shape, 0, cut)]
    whole = [read_by_ranks(stretch) for stretch in stretches(asked, shape, 0, cut[-1:])]
    assert np.concatenate(parts, axis=1).tolist() == whole[0].tolist()


@UNHURRIED
@given(
    nodes=st.sampled_from([1, 2, 4]),
    ranks=st.sampled_from([1, 2, 4]),
    replication=st.sampled_from([1, 2, 4, 8]),
    method=st.sampled_from(BATCHING_METHODS),
    steps=st.integers(0, 3),
)
def test_replicated_ranks_read_the_same_and_their_groups_everything(
    nodes: int, ranks: int, replication: int, method: str, steps: int
) -> None:
    assume(nodes * ranks % replication == 0)
    asked, shape = asked_for("py1s", num_canonical_nodes=4, batching_method=method), make_shape([150], [250])
    worlds = [
        World(num_nodes=nodes, ranks_per_node=ranks, rank=rank).replicated(replication) for rank in range(nodes * ranks)
    ]
    groups = BatchGeometry(num_nodes=worlds[0].num_nodes, ranks_per_node=worlds[0].ranks_per_node, batch_size=4)
    before = Leg(machines=replace(ALONE, batch_size=4), workers=1, steps=steps)
    *_, stretch = stretches(asked, shape, 0, [before, Leg(machines=groups, workers=2, steps=0)])
    read = [read_by_workers(stretch, world.node, world.rank_of_node) for world in worlds]
    for rank, positions in enumerate(read):
        assert positions.tolist() == read[rank // replication * replication].tolist()
    distinct = np.stack(read[::replication])
    assert len(distinct) == groups.num_ranks
    check_global_batches(stretch, distinct)
    check_ranks_are_even(stretch, distinct)
