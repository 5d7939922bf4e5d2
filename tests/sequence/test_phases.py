"""What each step of each phase takes of each stream: whole counts, close to what the weights ask for."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence import phases as planning
from lightning_streaming.sequence.phases import LONGEST_STEP, MixtureSchedule, ResolvedPhase, planned
from tests.sequence.builders import phase, phase_lists

NODES = st.sampled_from([1, 2, 3, 8, 64])
_weights = st.floats(1e-9, 1e6)


PHASE_LISTS = st.integers(1, 30).flatmap(
    lambda count: phase_lists([f"s{number:02}" for number in range(count)], st.integers(64, 3000), _weights)
)
"""Of weights of any size."""


def exact_by_step(plan: MixtureSchedule) -> list[dict[str, Fraction]]:
    """What the weights ask for of each stream, from the beginning up to the end of each step, in no floats."""
    sizes = np.diff(plan.stops, prepend=0).tolist()
    steps_of = np.bincount(plan.phase_of_step).tolist()
    found, asked, step = [], dict.fromkeys(plan.streams, Fraction(0)), 0
    for one, steps in zip(plan.phases, steps_of, strict=True):
        begin, end = (
            {name: Fraction(weight) / sum(Fraction(other) for _, other in mix) for name, weight in mix}
            for mix in (one.begin, one.end)
        )
        for place in range(steps):
            part = Fraction(2 * place + 1, 2 * steps)
            for name in begin:
                asked[name] += sizes[step] * (begin[name] * (1 - part) + end[name] * part)
            found.append(dict(asked))
            step += 1
    return found


@given(phases=PHASE_LISTS, nodes=NODES, longest=st.sampled_from([64, 500, LONGEST_STEP]))
@settings(deadline=None)
def test_steps_are_whole_and_close_to_what_the_weights_ask_for(
    phases: list[ResolvedPhase], nodes: int, longest: int
) -> None:
    plan = planned(phases, nodes, longest)
    sizes = np.diff(plan.stops, prepend=0)
    assert (sizes > 0).all()
    assert not (plan.stops % nodes).any()
    assert (sizes < longest + nodes).all()
    assert plan.phase_stops.tolist() == [-(-one.planned_stop // nodes) * nodes for one in phases]
    counts = np.diff(plan.drawn, axis=0)
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == sizes).all()
    # Streams that come and go can add up what they are owed; see the test of the most that is owed.
    most = 1 + log(1 + len(plan))
    for drawn, asked in zip(plan.drawn[1:].tolist(), exact_by_step(plan), strict=True):
        for name, count in zip(plan.streams, drawn, strict=True):
            assert abs(count - asked[name]) < most
    for number, one in enumerate(phases):
        read = {plan.streams[stream] for step in _steps(plan, number) for stream in plan.step(step).streams}
        assert read <= {name for name, _ in one.begin}


def _steps(plan: MixtureSchedule, number: int) -> list[int]:
    return list(np.flatnonzero(plan.phase_of_step == number).tolist())


@given(phases=PHASE_LISTS, nodes=NODES, longest=st.sampled_from([64, LONGEST_STEP]), data=st.data())
@settings(deadline=None)
def test_what_phases_take_does_not_depend_on_those_after_them(
    phases: list[ResolvedPhase], nodes: int, longest: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, len(phases)))
    after = [phase("new", phases[kept - 1].planned_stop + 640, {"a": 1.0, "s00": 2.0, "s05x": (0.0, 1.0), "z": 3.0}, 7)]
    plan, other = planned(phases, nodes, longest), planned([*phases[:kept], *after], nodes, longest)
    steps = int(plan.last_steps[kept - 1]) + 1
    assert other.stops[:steps].tolist() == plan.stops[:steps].tolist()
    for step in range(steps):
        mine, theirs = plan.step(step), other.step(step)
        assert [plan.streams[one] for one in mine.streams] == [other.streams[one] for one in theirs.streams]
        assert (mine.phase, mine.counts.tolist(), mine.starts.tolist()) == (
            theirs.phase,
            theirs.counts.tolist(),
            theirs.starts.tolist(),
        )


@pytest.mark.parametrize("streams", [2, 8, 30])
def test_the_most_that_streams_are_owed_grows_with_the_logarithm_of_their_number(streams: int) -> None:
    # Each phase is of one sample, for those who got none so far: whoever is last waits for 1/n + ... + 1/2 of one.
    # No rule that does not know what comes does better: the phases could be written against it.
    left = [f"s{number:03}" for number in range(streams)]
    phases: list[ResolvedPhase] = []
    while len(left) > 1:
        phases.append(phase(f"p{len(phases)}", len(phases) + 1, dict.fromkeys(left, 1.0)))
        plan = planned(phases, 1)
        left = [name for name in left if name not in plan.drawn_by(len(phases) - 1)]
    owed = exact_by_step(plan)[-1][left[0]]
    assert owed == sum(Fraction(1, number) for number in range(2, streams + 1))


def test_a_ramp_is_read_in_steps_between_its_two_ends() -> None:
    plan = planned([phase("ramp", 400, {"a": (1.0, 0.0), "b": (0.0, 1.0)}, steps=4)], 4)
    assert plan.stops.tolist() == [100, 200, 300, 400]
    # 7/8, 5/8, 3/8 and 1/8 of 100 each; what rounding took from a step, the next one gives.
    assert plan.drawn[:, 0].tolist() == [0, 88, 150, 188, 200]
    assert plan.phase_of_step.tolist() == [0, 0, 0, 0]


def test_two_weights_that_are_equal_are_no_ramp_between_them() -> None:
    level = planned([phase("level", 100, {"a": (0.3, 0.3), "b": (0.7, 0.7)}, steps=3)], 1)
    assert level.drawn[-1].tolist() == [30, 70]
    assert planned([phase("level", 100, {"a": 0.3, "b": 0.7})], 1).drawn.tolist() == [[0, 0], [30, 70]]


def test_only_the_ratios_of_weights_count() -> None:
    small, large = (
        planned([phase("one", 1000, {"a": 3 * scale, "b": 5 * scale})], 1).drawn.tolist() for scale in (1e-300, 1e300)
    )
    assert small == large == [[0, 0], [375, 625]]


def test_borders_are_rounded_up_to_whole_canonical_nodes() -> None:
    plan = planned([phase("first", 65, {"a": 1.0}), phase("second", 129, {"b": 1.0})], 64)
    assert plan.phase_stops.tolist() == [128, 192]
    assert plan.epoch_size == 192


@pytest.mark.parametrize(("first", "second", "nodes"), [(65, 128, 64), (1, 3, 4)])
def test_a_phase_that_rounding_leaves_nothing_is_refused(first: int, second: int, nodes: int) -> None:
    phases = [phase("first", first, {"a": 1.0}), phase("short", second, {"a": 1.0})]
    with pytest.raises(ConfigError, match=f"schedule.short.end is {second}.*each of the {nodes} canonical nodes"):
        planned(phases, nodes)


def test_a_phase_has_no_more_steps_than_samples_for_canonical_nodes() -> None:
    plan = planned([phase("ramp", 24, {"a": (1.0, 0.0), "b": (0.0, 1.0)}, steps=1000)], 8)
    assert plan.stops.tolist() == [8, 16, 24]


def test_too_many_steps_are_refused() -> None:
    ramp = phase("ramp", 10**8, {"a": (1.0, 0.0), "b": (0.0, 1.0)}, steps=2**21)
    with pytest.raises(ConfigError, match=r"schedule.ramp.steps: 2097152 are needed"):
        planned([ramp], 1)


def test_long_phases_are_cut_so_that_a_step_can_be_drawn() -> None:
    plan = planned([phase("long", 10**10, {"a": 1.0, "b": 2.0})], 64)
    assert len(plan) == -(-(10**10) // LONGEST_STEP)
    assert np.diff(plan.stops, prepend=0).max() <= LONGEST_STEP + 64


def test_the_epoch_as_a_whole_weighs_streams_as_its_steps_do() -> None:
    plan = planned([phase("one", 60, {"a": 1.0, "b": 2.0}), phase("two", 100, {"b": 1.0})], 1)
    sizes = {"b": 40, "unread": 5, "a": 10}
    weights = plan.weights(["b", "unread", "a"], lambda name, samples: samples / sizes[name])
    assert weights.choose == (80, 0, 20)
    assert weights.repeat == (2.0, 0.0, 2.0)
    assert (sum(weights.proportion), weights.epoch_size) == (1.0, 100)


def test_steps_of_many_epochs_worth_of_data_are_still_counted() -> None:
    phases = [phase("one", 10**14, {"a": 1.0, "b": 3.0}), phase("two", 3 * 10**14, {"b": 1.0})]
    plan = planned(phases, 1, longest_step=3 * 10**14)
    assert plan.drawn[-1].tolist() == [25 * 10**12, 275 * 10**12]


def test_the_steps_of_all_phases_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MOST_STEPS", 100)
    ramp: dict[str, float | tuple[float, float]] = {"a": (1.0, 0.0), "b": (0.0, 1.0)}
    first = phase("one", 1000, ramp, steps=60)
    assert len(planned([first, phase("two", 2000, ramp, steps=40)], 1)) == 100
    with pytest.raises(ConfigError, match=r"schedule.two.steps: 41 are needed after 60 of earlier phases"):
        planned([first, phase("two", 2000, ramp, steps=41)], 1)


class _ReadsFirst:
    """Cuts a step that reads its streams one after another, so that the last ones get least of it."""

    def cut_last_step(self, plan: MixtureSchedule, read: int) -> NDArray[np.int64]:
        step = plan.step(len(plan) - 1)
        stops = np.minimum(np.cumsum(step.counts), read)
        counts = np.zeros(len(plan.streams), np.int64)
        counts[step.streams] = np.diff(stops, prepend=0)
        return counts


@pytest.mark.parametrize("read", [1, 10, 50, 77, 99])
def test_what_cuts_leave_unread_is_owed_to_its_streams(read: int) -> None:
    weights = {"a": 0.37, "b": 0.33, "c": 0.2, "d": 0.1}
    cut = [
        replace(phase(f"cut {start}", start + 103, weights), cut=start + read) for start in range(0, 10 * read, read)
    ]
    plan = planned([*cut, phase("rest", 2000, weights)], 1, cutter=_ReadsFirst())
    assert plan.drawn[-1].tolist() == [740, 660, 400, 200]
