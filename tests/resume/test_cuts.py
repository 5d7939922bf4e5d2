"""Phases that are cut where a checkpoint stands: nothing is lost, nothing comes again before its stream is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming import StreamingDataLoader, World
from lightning_streaming.errors import ConfigError, StateMismatchError
from lightning_streaming.sequence.phased import Cuts
from lightning_streaming.sequence.phases import MixtureSchedule
from lightning_streaming.sequence.settings import SHUFFLE_ALGOS
from tests.helpers import State, json_copy, raises
from tests.resume import phased
from tests.resume.phased import ANNEAL, BROAD, FIRST_ID, NAMES, SIZES, check_passes, phased_loader, read
from tests.schedules import Phase
from tests.tiers import examples

BORDERS = (40, 120, 160)
RAMP = replace(phased.RAMP, end=120)
PHASES = (BROAD, RAMP, replace(ANNEAL, end=160))
UNHURRIED = settings(
    deadline=None, max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
OTHERS = (*NAMES, "mid")


def stopped(root: Path, steps: int, **asked: Any) -> tuple[list[int], State]:
    """What a run reads in so many batches, and its state then."""
    return phased.stopped(root, steps, **{"phases": PHASES, "epoch_size": None, **asked})


def gone_on(root: Path, state: State, **asked: Any) -> StreamingDataLoader:
    """The loader that goes on from a state."""
    return phased.gone_on(root, state, **{"epoch_size": None, **asked})


def with_cut(phases: Sequence[Phase], place: int, *future: Phase) -> list[Phase]:
    """The phases that have begun at a place, the last of them cut there, and what follows."""
    number = next(number for number, border in enumerate(BORDERS) if place <= border)
    running = phases[number] if place == BORDERS[number] else replace(phases[number], ended_at=place)
    return [*phases[:number], running, *future]


def futures(place: int) -> list[Phase]:
    """All streams at first, and one that was not there before; then some of them."""
    mix = {"web": 3, "code": 1, "mid": 2}
    return [
        Phase(name="next", end=place + 61, mix=mix),
        Phase(name="last", end=place + 190, mix=dict.fromkeys(OTHERS, 1)),
    ]


def check_all_passes(ids: Sequence[int]) -> None:
    """Each pass over a stream reads all of it before the next begins."""
    for name, size in SIZES.items():
        check_passes(ids, FIRST_ID[name], [], then=size)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("algo", ["", *(name for name in SHUFFLE_ALGOS if name != "py1b")])
@UNHURRIED
@given(steps=st.integers(1, 39), nodes=st.sampled_from([1, 4]), later=st.integers(1, 50))
def test_a_cut_loses_nothing_and_repeats_nothing(root: Path, algo: str, steps: int, nodes: int, later: int) -> None:
    asked: dict[str, Any] = {"shuffle": bool(algo), "num_canonical_nodes": nodes, "shuffle_block_size": 40}
    if algo:
        asked["shuffle_algo"] = algo
    before, state = stopped(root, steps, **asked)
    asked |= {"phases": with_cut(PHASES, 4 * steps, *futures(4 * steps)), "names": OTHERS}
    after = read(gone_on(root, state, **asked))
    whole = read(phased_loader(root, **{**asked, "epoch_size": None}))
    assert before + after == whole
    check_all_passes(whole)
    within = min(later, -(-len(whole) // 4) - 1)  # the epoch's end is no place to go on from
    until, later_state = stopped(root, within, **asked)
    assert until + read(gone_on(root, later_state, **asked)) == whole


@UNHURRIED
@given(first=st.integers(1, 20), second=st.integers(1, 14), third=st.integers(1, 14))
def test_phases_may_be_cut_again_and_again(root: Path, first: int, second: int, third: int) -> None:
    found, state = stopped(root, first)
    phases = with_cut(PHASES, 4 * first, Phase(name="next", end=4 * first + 60, mix={"web": 2, "math": 1}))
    place = 4 * first
    for number, steps in enumerate((second, third)):
        loader = gone_on(root, state, phases=phases, names=NAMES[:3])
        found += read(loader, steps)
        state, place = loader.state_dict(), place + 4 * steps
        end = phases[-1].options().planned_stop("last", None)
        assert end is not None
        cut_here = replace(phases[-1], ended_at=place if place < end else None)
        mix = {"web": 1, "code": 2, "math": 1}
        phases = [*phases[:-1], cut_here, Phase(name=f"more {number}", end=place + 60, mix=mix)]
    found += read(gone_on(root, state, phases=phases, names=NAMES[:3]))
    assert found == read(phased_loader(root, phases=phases, names=NAMES[:3], epoch_size=None))
    check_all_passes(found)


@pytest.mark.parametrize("algo", ["py1e", "blockwise"])
def test_a_cut_is_the_same_on_other_machines(root: Path, algo: str) -> None:
    before, state = stopped(root, 17, shuffle_algo=algo)
    asked: dict[str, Any] = {"phases": with_cut(PHASES, 68, *futures(68)), "names": OTHERS}
    asked["shuffle_algo"] = algo
    whole = read(phased_loader(root, **{**asked, "epoch_size": None}))
    loaders = [
        gone_on(root, state, world=World(num_nodes=2, ranks_per_node=1, rank=rank), batch_size=3, **asked)
        for rank in range(2)
    ]
    batches = [[batch["id"].tolist() for batch in loader] for loader in loaders]
    place = len(before)
    for mine, other in zip(*batches, strict=True):
        if place + 6 <= len(whole):
            assert sorted(mine + other) == sorted(whole[place : place + 6])
        place += 6


def test_what_was_cut_stays_cut(root: Path) -> None:
    _, state = stopped(root, 20)
    phases, asked = with_cut(PHASES, 80, *futures(80)), {"names": OTHERS}
    loader = gone_on(root, state, phases=phases, **asked)
    read(loader, 5)
    state = loader.state_dict()
    for other in (60, 84):
        changed = [replace(one, ended_at=other) if one.ended_at else one for one in phases]
        with raises(StateMismatchError, f"saved 80, now {other}"):
            read(gone_on(root, state, phases=changed, **asked))
    uncut = [BROAD, RAMP, *(replace(one, end=200 + number) for number, one in enumerate(futures(80)))]
    with raises(StateMismatchError, "schedule.ramp.ended_at", "80     'absent'"):
        read(gone_on(root, state, phases=uncut, **asked))


@pytest.mark.parametrize("steps", [1, 11, 15, 19])
def test_a_cut_may_lie_ahead_of_the_checkpoint(root: Path, steps: int) -> None:
    before, state = stopped(root, steps)
    asked: dict[str, Any] = {"phases": with_cut(PHASES, 80, *futures(80)), "names": OTHERS}
    at_the_cut, saved_there = stopped(root, 20)
    assert before + read(gone_on(root, state, **asked)) == at_the_cut + read(gone_on(root, saved_there, **asked))


@pytest.mark.parametrize("place", [44, 76])
def test_a_phase_is_not_cut_where_it_was_read_on(root: Path, place: int) -> None:
    _, state = stopped(root, 20)
    words = f"schedule.ramp.ended_at={place} is before sample 80, the position of the checkpoint; end it there or later"
    with raises(StateMismatchError, f"schedule.ramp.ended_at: saved 'absent', now {place}", words, "state branch"):
        read(gone_on(root, state, phases=with_cut(PHASES, place, *futures(place)), names=OTHERS))


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        ([replace(BROAD, ended_at=48), ANNEAL], ["schedule.broad.ended_at is 48", "from 0 up to 40"]),
        ([BROAD, replace(RAMP, ended_at=40), ANNEAL], ["schedule.ramp.ended_at is 40", "from 40 up to 120"]),
        ([replace(BROAD, ended_at=20), replace(ANNEAL, end=20)], ["schedule.anneal.end is 20", "ends at 20"]),
    ],
)
def test_a_cut_lies_within_its_phase(root: Path, phases: list[Phase], words: list[str]) -> None:
    names = tuple(name for name in NAMES if any(name in phase.mix for phase in phases))
    epoch_size = None if phases[-1].end else 160
    with raises(ConfigError, *words):
        len(phased_loader(root, phases=phases, names=names, epoch_size=epoch_size))


@pytest.mark.parametrize("value", [0, -4, 2.5, "10", True])
def test_a_cut_is_a_number_of_samples(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.ended_at"):
        replace(BROAD, ended_at=value)


def test_an_epoch_does_not_end_early_at_a_cut(root: Path) -> None:
    with raises(ConfigError, "schedule.ramp.ended_at is 80", "no phase continues up to epoch_size=120"):
        phased_loader(root, phases=[BROAD, replace(RAMP, ended_at=80)], names=NAMES[:3], epoch_size=120)


def test_composed_batches_cannot_be_cut(root: Path) -> None:
    with raises(ConfigError, "batching_method='per_stream'", "none can be cut"):
        phases = [replace(BROAD, ended_at=20), replace(RAMP, end=100), ANNEAL]
        len(phased_loader(root, phases=phases, batching_method="per_stream"))


THEN_OTHERS = (replace(BROAD, ended_at=24), Phase(name="other", end=64, mix={"math": 1, "web": 1}))


@pytest.mark.parametrize(
    ("phases", "size"), [(THEN_OTHERS, 64), ((replace(BROAD, ended_at=20), RAMP, replace(ANNEAL, end=None)), 160)]
)
@pytest.mark.parametrize("is_size_told", [False, True])
def test_an_epoch_after_one_with_a_cut_is_refused_before_anything_is_read_of_it(
    root: Path, phases: Sequence[Phase], size: int, is_size_told: bool
) -> None:
    if phases[-1].end is None and not is_size_told:
        phases = [*phases[:-1], replace(phases[-1], end=size)]
    asked: dict[str, Any] = {"phases": phases, "epoch_size": size if is_size_told else None}
    asked["names"] = tuple(name for name in NAMES if any(name in phase.mix for phase in phases))
    loader = phased_loader(root, **asked)
    assert len(read(loader)) == size
    ended = json_copy(loader.state_dict())
    assert (ended["epoch"], ended["sample_in_epoch"]) == (1, 0)
    with raises(ConfigError, "epoch 1 would read phases again of which one was ended"):
        read(loader)
    again = gone_on(root, ended, **asked)
    assert len(again) == size // 4
    with raises(ConfigError, "epoch 1 would read phases again of which one was ended"):
        read(again)


def test_what_a_cut_leaves_is_worked_out_once_for_each_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    cut_last_step = Cuts.cut_last_step

    def counting(self: Cuts, plan: MixtureSchedule, read: int) -> NDArray[np.int64]:
        counted.append(read)
        return cut_last_step(self, plan, read)

    monkeypatch.setattr(Cuts, "cut_last_step", counting)
    loader = phased_loader(root, THEN_OTHERS, epoch_size=None, names=NAMES[:3])
    assert len(loader) == 16
    read(loader)
    loader.state_dict()
    assert counted == [24]
