"""An epoch of phases: the same on any machines, cut anywhere, with every sample of a stream before any comes again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.sequence.draw import Shuffled, drawn_here
from lightning_streaming.sequence.partition import BatchGeometry, fits
from lightning_streaming.sequence.phased import Mixture, Phased
from lightning_streaming.sequence.settings import BATCHING_METHODS, SHUFFLE_ALGOS, ResolvedOrder
from tests.sequence.builders import geometry_of, ids_of, make_mixture, make_settings, phase, phase_lists
from tests.sequence.legs import ALONE, Leg, legs_on, read_epoch, sequence_of
from tests.tiers import examples

UNHURRIED = settings(deadline=None, max_examples=examples(25))
COMPOSED = [method for method in BATCHING_METHODS if method != "random"]
ORDERS = ["", *SHUFFLE_ALGOS]
epochs = st.integers(0, 2)
FITTING = st.sampled_from([1, 2, 3, 6, 12])
WEIGHTS = st.floats(1e-3, 10.0)


def settings_for(algo: str, **said: object) -> ResolvedOrder:
    """A shuffle in small blocks; none where there is no name."""
    return make_settings(**{"shuffle": bool(algo), "shuffle_algo": algo or "py1s", "shuffle_block_size": 20, **said})


@st.composite
def mixtures(draw: st.DrawFn, options: ResolvedOrder) -> Mixture:
    """Streams of a few shards, in one to four phases of which some are ramps."""
    shards = {
        name: draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
        for name in draw(st.permutations(["code", "math", "news", "web"]))
    }
    lengths = st.integers(options.num_canonical_nodes, options.num_canonical_nodes + 40)
    phases = draw(phase_lists(sorted(shards), lengths, WEIGHTS, most_phases=4, most_steps=4))
    return make_mixture(options, phases, shards, draw(st.sampled_from([16, 1 << 20])))


@pytest.mark.rotate(2)
@pytest.mark.parametrize("algo", ORDERS)
@UNHURRIED
@given(nodes=st.sampled_from([1, 6, 64]), method=st.sampled_from(BATCHING_METHODS), data=st.data())
def test_samples_of_a_stream_come_again_only_when_all_of_it_was_read(
    algo: str, nodes: int, method: str, data: st.DataObject
) -> None:
    # Large enough to give a block to each stream by its share.
    block = 20 if method == "random" else 10**6
    options = settings_for(algo, num_canonical_nodes=nodes, batching_method=method, shuffle_block_size=block)
    mixture = data.draw(mixtures(options))
    ids = {name: ids_of(mixture, name) for name in mixture.plan.streams}
    counts = np.zeros(max(of.stop for of in ids.values()), np.int64)
    drawn = dict.fromkeys(ids, 0)
    for epoch in (0, 1):
        for number in range(len(mixture.plan)):
            step = mixture.plan.step(number)
            shuffled = mixture.shuffled(epoch, number)
            read = shuffled.ids(np.arange(len(shuffled)))
            counts += np.bincount(read, minlength=len(counts))
            for stream, count in zip(step.streams.tolist(), step.counts.tolist(), strict=True):
                name = mixture.plan.streams[stream]
                drawn[name] += count
                of_stream = counts[ids[name].start : ids[name].stop]
                assert of_stream.sum() == drawn[name]
                assert of_stream.max() - of_stream.min() <= 1
    assert sum(drawn.values()) == 2 * mixture.plan.epoch_size == counts.sum()


@pytest.mark.rotate(2)
@pytest.mark.parametrize("algo", ORDERS)
@UNHURRIED
@given(legs=legs_on(FITTING, FITTING), epoch=epochs, data=st.data())
def test_an_epoch_cut_three_times_reads_what_one_that_was_not_does(
    algo: str, legs: list[Leg], epoch: int, data: st.DataObject
) -> None:
    options = settings_for(algo, num_canonical_nodes=6)
    mixture = data.draw(mixtures(options))
    whole = sequence_of(options, mixture, ALONE, epoch)
    expected = whole.ids_between(0, len(whole)).tolist()
    assert len(expected) == mixture.plan.epoch_size
    # Nothing is read twice at the end of a step, also on more nodes than canonical nodes.
    assert read_epoch(options, mixture, epoch, legs) == expected


@UNHURRIED
@given(legs=legs_on(st.sampled_from([1, 2, 3, 6]), st.integers(1, 7)), algo=st.sampled_from(ORDERS), data=st.data())
def test_relaxed_goes_on_with_nodes_that_canonical_nodes_do_not_fit(
    legs: list[Leg], algo: str, data: st.DataObject
) -> None:
    options = settings_for(algo, num_canonical_nodes=6)
    mixture = data.draw(mixtures(options))
    assert read_epoch(options, mixture, 1, legs) == read_epoch(options, mixture, 1, legs[:1])


@st.composite
def composed(draw: st.DrawFn, options: ResolvedOrder) -> tuple[Mixture, list[Leg]]:
    """Phases that fill a few batches of each stream; the machines of later legs may be any."""
    legs = draw(legs_on(st.sampled_from([1, 2, 4]), st.integers(1, 7)))
    shards = {name: draw(st.lists(st.integers(9, 20), min_size=2, max_size=4)) for name in ("a", "b", "c")}
    ramp = {"a": (0.6, 0.3), "b": (0.2, 0.3), "c": (0.2, 0.4)}
    phases = [
        phase("one", draw(st.integers(100, 130)), {"a": 0.5, "b": 0.5}),
        phase("two", draw(st.integers(400, 450)), ramp, steps=draw(st.integers(1, 2))),
        phase("three", draw(st.integers(500, 560)), {"c": 1.0}),
    ]
    machines = legs[0].machines
    begins = BatchGeometry(
        num_nodes=machines.num_nodes, ranks_per_node=min(machines.ranks_per_node, 2), batch_size=3 + machines.batch_size
    )
    return make_mixture(options, phases, shards), [
        Leg(machines=begins, workers=legs[0].workers, steps=legs[0].steps + 1),
        *legs[1:],
    ]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("method", COMPOSED)
@UNHURRIED
@given(algo=st.sampled_from(ORDERS), epoch=epochs, data=st.data())
def test_composed_batches_stay_those_of_the_machines_that_the_epoch_began_with(
    method: str, algo: str, epoch: int, data: st.DataObject
) -> None:
    options = settings_for(algo, num_canonical_nodes=4, batching_method=method)
    mixture, legs = data.draw(composed(options))
    try:
        whole = sequence_of(options, mixture, legs[0].machines, epoch)
        expected = whole.ids_between(0, len(whole)).tolist()
    except ConfigError:  # a stream that fills no batch of so many ranks
        assume(False)
    assert read_epoch(options, mixture, epoch, legs) == expected
    # Each phase begins with a separate batch.
    stops = whole.part_stops()[mixture.plan.last_steps]
    assert not (stops % legs[0].machines.global_batch_size).any()
    of = [ids_of(mixture, name) for name in ("a", "b", "c")]
    first, last = expected[: stops[0]], expected[stops[1] :]
    assert {one in of[0] or one in of[1] for one in first} == {True}
    assert {one in of[2] for one in last} == {True}


def test_composed_batches_are_of_the_mixture_of_their_phase() -> None:
    options = make_settings(num_canonical_nodes=1, batching_method="stratified")
    phases = [phase("one", 80, {"a": 3.0, "b": 1.0}), phase("two", 160, {"a": 1.0, "b": 3.0})]
    mixture = make_mixture(options, phases, {"a": [100], "b": [100]})
    whole = Phased(mixture, geometry_of(1, 1, 8), 0)
    from_a = (whole.ids_between(0, len(whole)) < 100).reshape(-1, 8).sum(axis=1)
    assert from_a.tolist() == [6] * 10 + [2] * 10


def test_a_stream_of_which_no_batch_can_be_composed_is_named_with_its_phase() -> None:
    options = make_settings(num_canonical_nodes=1, batching_method="stratified")
    phases = [phase("one", 80, {"a": 1.0}), phase("ramp", 880, {"a": (1.0, 0.99), "b": (0.0, 0.02)}, steps=8)]
    mixture = make_mixture(options, phases, {"a": [100], "b": [100]})
    with pytest.raises(ConfigError, match=r"phase 'ramp': stream 'b' has a share of 0.01, less.*raise its weight"):
        len(Phased(mixture, geometry_of(1, 1, 8), 0))
    few = make_mixture(replace(options, batching_method="per_stream"), phases, {"a": [100], "b": [100]})
    with pytest.raises(ConfigError, match=r"phase 'ramp': stream 'b' draws 1 samples, too few"):
        len(Phased(few, geometry_of(1, 1, 8), 0))


@pytest.mark.parametrize("method", BATCHING_METHODS)
def test_places_are_all_of_the_epoch_once(method: str) -> None:
    options = make_settings(num_canonical_nodes=1, batching_method=method)
    phases = [phase("one", 60, {"a": 3.0, "b": 1.0}), phase("two", 144, {"a": (1.0, 2.0), "b": (3.0, 2.0)}, steps=2)]
    whole = Phased(make_mixture(options, phases, {"a": [50], "b": [50]}), geometry_of(1, 1, 3), 0)
    places = whole.places(np.arange(len(whole)))
    assert len(set(places.tolist())) == len(whole)
    assert places.min() >= 0
    assert places.max() < whole.num_samples == 144
    assert (method == "random") == (len(whole) == 144)


def test_positions_may_be_requested_in_any_order_and_shape() -> None:
    whole = phased_of(three_phases())
    together = whole.ids_between(0, len(whole))
    positions = np.random.default_rng(0).integers(0, len(whole), (7, 11))
    assert whole.ids(positions).tolist() == together[positions].tolist()
    for outside in ([-1], [len(whole)]):
        with pytest.raises(SampleIndexError):
            whole.ids(np.asarray(outside))


def three_phases(shards: dict[str, list[int]] | None = None, **said: object) -> Mixture:
    phases = [
        phase("one", 40, {"a": 1.0, "b": 2.0}),
        phase("two", 120, {"b": (3.0, 1.0), "c": (1.0, 2.0)}, steps=4),
        phase("three", 160, {"c": 1.0, "d": 1.0}),
    ]
    options = make_settings(num_canonical_nodes=4, shuffle_block_size=20, **said)
    return make_mixture(options, phases, shards or {"a": [9, 8], "b": [20, 20], "c": [5, 6, 7], "d": [30]})


def phased_of(mixture: Mixture, epoch: int = 0) -> Phased:
    return Phased(mixture, geometry_of(1, 1, 4), epoch)


@pytest.mark.parametrize("algo", ORDERS)
def test_streams_that_come_or_go_change_only_the_ids_of_others(algo: str) -> None:
    said: dict[str, Any] = {"shuffle": bool(algo), "shuffle_algo": algo or "py1s"}
    here = {"a": [9, 8], "b": [20, 20], "c": [5, 6, 7], "d": [30]}
    mine, theirs = (
        three_phases(here, **said),
        three_phases({"z": [4], "d": [30], "c": [5, 6, 7], "b": [20, 20]}, **said),
    )
    begun = 40
    found = []
    for mixture in (mine, theirs):
        whole = phased_of(mixture)
        ids = whole.ids(np.arange(begun, len(whole))).tolist()
        spans = [(name, ids_of(mixture, name)) for name in ("b", "c", "d")]
        found.append([next((name, one - of.start) for name, of in spans if one in of) for one in ids])
    assert found[0] == found[1]


@pytest.mark.parametrize("method", BATCHING_METHODS)
def test_removed_streams_can_be_counted_and_not_read(method: str) -> None:
    options: dict[str, Any] = {"batching_method": method, "shuffle_algo": "py1s"}
    all_here = phased_of(three_phases(**options))
    removed = phased_of(three_phases({"b": [20, 20], "c": [5, 6, 7], "d": [30]}, **options))
    assert len(removed) == len(all_here)
    assert removed.part_stops().tolist() == all_here.part_stops().tolist()
    positions = np.arange(len(removed))
    assert removed.places(positions).tolist() == all_here.places(positions).tolist()
    begun = int(removed.part_stops()[three_phases(**options).plan.last_steps[0]])
    assert len(removed.ids(positions[begun:])) == len(removed) - begun
    with pytest.raises(ConfigError, match=r"phase 'one' reads stream 'a'.*add it again"):
        removed.ids(positions[: begun + 1])


def test_the_next_step_is_passed_on_and_each_is_drawn_once() -> None:
    drawn: list[int] = []
    following: list[int] = []

    def draw(order: Shuffled) -> np.ndarray:
        drawn.append(order.step)
        return drawn_here(order)

    mixture = three_phases()
    whole = Phased(mixture, geometry_of(1, 1, 4), 0, draw, lambda order: following.append(order.step))
    len(whole), whole.places(np.arange(len(whole)))
    assert (drawn, following) == ([], [])
    for first in range(0, len(whole), 8):
        whole.ids(np.arange(first, first + 8))
    assert drawn == list(range(len(mixture.plan)))
    assert following == drawn[1:]


def digests(mixture: Mixture, epochs: Sequence[int] = (0, 1)) -> list[str]:
    return [mixture.shuffled(epoch, step).digest for epoch in epochs for step in range(len(mixture.plan))]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("algo", SHUFFLE_ALGOS)
def test_a_tiny_stream_is_read_as_often_as_it_takes_pass_by_pass(algo: str) -> None:
    # More passes than 16 bits count.
    options = settings_for(algo, shuffle_block_size=4_096)
    mixture = make_mixture(options, [phase("p", 300_000, {"tiny": 1.0, "web": 1.0})], {"tiny": [1, 1], "web": [9_999]})
    epoch = Phased(mixture, geometry_of(1, 1, 1), 0)
    ids = epoch.ids(np.arange(len(epoch)))
    tiny, web = ids[ids < 2], ids[ids >= 2]
    assert (np.sort(tiny.reshape(-1, 2)) == [0, 1]).all()
    assert len(set(map(tuple, tiny.reshape(-1, 2).tolist()))) == 2
    assert all(len(np.unique(of)) == len(of) for of in np.split(web, range(9_999, len(web), 9_999)))


def test_each_step_has_a_digest_of_its_own() -> None:
    found = digests(three_phases())
    assert len(set(found)) == len(found)
    assert digests(three_phases()) == found
    shifted = three_phases({"z": [4], "a": [9, 8], "b": [20, 20], "c": [5, 6, 7], "d": [30]})
    assert not set(found) & set(digests(shifted))  # their ids are others
    assert phased_of(three_phases()).digest != phased_of(three_phases(), epoch=1).digest


def test_steps_of_one_mixture_are_shuffled_each_in_its_own_way() -> None:
    options = make_settings(num_canonical_nodes=1)
    mixture = make_mixture(options, [phase("one", 400, {"a": 1.0})], {"a": [100]}, longest_step=100)
    read = [tuple(mixture.shuffled(epoch, step).ids(np.arange(100))) for epoch in (0, 1) for step in range(4)]
    assert len(set(read)) == 8


def test_ids_beyond_four_bytes_are_distinct() -> None:
    options = make_settings(num_canonical_nodes=1, shuffle_algo="py1s")
    mixture = make_mixture(options, [phase("one", 20, {"a": 1.0})], {"large": [1 << 33], "a": [20]})
    assert sorted(mixture.shuffled(0, 0).ids(np.arange(20)).tolist()) == list(range(1 << 33, (1 << 33) + 20))


def test_unshuffled_steps_read_stream_after_stream_as_stored() -> None:
    options = make_settings(num_canonical_nodes=1, shuffle=False)
    phases = [phase("one", 6, {"a": 2.0, "b": 1.0}), phase("two", 12, {"a": 1.0, "b": 1.0})]
    whole = Phased(make_mixture(options, phases, {"b": [20], "a": [5]}), ALONE, 0)
    assert whole.ids_between(0, 12).tolist() == [20, 21, 22, 23, 0, 1, 24, 20, 21, 2, 3, 4]


@given(canonical=st.sampled_from([1, 2, 4, 6]), nodes=st.integers(1, 12), method=st.sampled_from(BATCHING_METHODS))
def test_nodes_that_do_not_fit_are_refused_as_without_phases(canonical: int, nodes: int, method: str) -> None:
    options = make_settings(num_canonical_nodes=canonical, batching_method=method, partition_algo="orig")
    mixture = make_mixture(options, [phase("one", 600, {"a": 1.0})], {"a": [100]})
    leg = Leg(machines=geometry_of(nodes, 1, 2), workers=1, steps=1)
    can = {"stratified": True, "device_per_stream": canonical % nodes == 0}.get(method, fits(canonical, nodes))
    if can:
        assert len(read_epoch(options, mixture, 0, [leg])) > 600 - 2 * nodes
    else:
        with pytest.raises(ConfigError, match="num_canonical_nodes"):
            read_epoch(options, mixture, 0, [leg])
