"""A run with phases goes on after their future has changed; what has begun stays what it was, or is refused by name."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from examples.every_nth import EveryNth
from lightning_streaming import World
from lightning_streaming.errors import ConfigError, StateError, StateMismatchError
from lightning_streaming.reading.dataset import run_state_of, state_at
from lightning_streaming.resume.state import Cursor
from lightning_streaming.sequence import PartContext, SampleSequence
from tests.dataset.mutated import mutations
from tests.helpers import State, assert_resumes_at_every_step, json_copy, raises
from tests.resume.phased import (
    ANNEAL,
    BROAD,
    FIRST_ID,
    NAMES,
    PHASES,
    RAMP,
    SIZES,
    gone_on,
    phased_loader,
    read,
    stopped,
    stream_of,
    write_streams,
)
from tests.schedules import Phase

COMPOSED: dict[str, Any] = {"batching_method": "per_stream", "shuffle_algo": "py1s"}


# --- as it was ---


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    "more", [{}, {"shuffle_algo": "blockwise"}, {"batch_size": 7, "workers": 2}, {"shuffle": False}]
)
def test_it_resumes_at_every_step_of_two_epochs(root: Path, more: dict[str, Any]) -> None:
    phases = [BROAD, RAMP, ANNEAL] if more else [replace(BROAD, end=20), replace(RAMP, end=48), ANNEAL]
    make = partial(phased_loader, root, phases, **{"epoch_size": 160 if more else 64, **more})
    assert_resumes_at_every_step(make)


def test_an_epoch_is_of_its_phases_one_after_another(root: Path, whole: list[int]) -> None:
    mixed = [Counter(map(stream_of, part)) for part in (whole[:40], whole[40:120], whole[120:])]
    assert mixed[0] == {"web": 36, "code": 4}
    assert mixed[1] == {"web": 56, "math": 24}
    assert mixed[2] == {"math": 13, "news": 27}
    loader = phased_loader(root)
    assert (len(loader), loader.dataset.epoch_size, len(loader.dataset)) == (40, 160, 160)


def test_streams_run_on_in_the_next_epoch(root: Path) -> None:
    loader = phased_loader(root)
    seen: Counter[int] = Counter()
    for _ in range(3):
        seen.update(read(loader))
        for name in NAMES:
            counts = [seen[one] for one in range(FIRST_ID[name], FIRST_ID[name] + SIZES[name])]
            assert max(counts) - min(counts) <= 1


def test_a_state_at_the_beginning_is_of_any_phases(root: Path) -> None:
    _, state = stopped(root, 0)
    assert (state["fingerprint"]["schedule"], state["fingerprint"]["streams"]) == ({}, {})
    other = [Phase(name="other", mix={"aaa": 1, "web": 2})]
    assert read(gone_on(root, state, phases=other, names=("aaa", "web"))) == read(
        phased_loader(root, other, ("aaa", "web"))
    )


# --- futures that are allowed ---

LATER = Phase(name="later", mix={"news": 1, "web": 1})
NEW = {name: Phase(name="new", mix={name: [0, 1], "math": [1, 0.5], "news": 1}, steps=3) for name in SIZES}
FUTURES: dict[str, tuple[Sequence[Phase], dict[str, Any]]] = {
    "other weights": ([BROAD, RAMP, replace(ANNEAL, mix={"math": 5, "news": 1})], {}),
    "a ramp": ([BROAD, RAMP, replace(ANNEAL, mix={"math": [5, 1], "news": 1})], {}),
    "another name": ([BROAD, RAMP, replace(ANNEAL, name="end")], {}),
    "fewer streams": ([BROAD, RAMP, replace(ANNEAL, mix={"web": 1})], {"names": ("web", "code", "math")}),
    "a stream that comes first": ([BROAD, RAMP, NEW["aaa"]], {"names": (*NAMES, "aaa")}),
    "a stream that comes between": ([BROAD, RAMP, NEW["mid"]], {"names": ("web", "mid", "code", "math", "news")}),
    "a stream that comes last": ([BROAD, RAMP, NEW["zzz"]], {"names": ("zzz", *NAMES)}),
    "another order of streams": (PHASES, {"names": NAMES[::-1]}),
    "a stream gone": (PHASES, {"names": ("math", "news", "web")}),
    "one gone and one new": ([BROAD, RAMP, NEW["aaa"]], {"names": ("aaa", "math", "news", "web")}),
    "a longer epoch": ([BROAD, replace(RAMP, end=120), ANNEAL], {"epoch_size": 240}),
    "a shorter epoch": ([BROAD, replace(RAMP, end=120), ANNEAL], {"epoch_size": 132}),
    "one more phase": ([BROAD, RAMP, replace(ANNEAL, end=140), LATER], {}),
    "another phase between": ([BROAD, RAMP, replace(LATER, end=130), ANNEAL], {}),
    "no phase any more": ([BROAD, replace(RAMP, end=None)], {"epoch_size": 120, "names": ("web", "code", "math")}),
    "limits": ([replace(one, max_repeats={next(iter(one.mix)): 9}) for one in PHASES], {}),
}


@pytest.mark.rotate(4)
@pytest.mark.parametrize("method", ["random", "per_stream"])
@pytest.mark.parametrize("future", FUTURES)
@pytest.mark.parametrize("steps", [11, 29])
def test_what_comes_later_may_change(
    root: Path, whole: list[int], future: str, steps: int, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    more = {} if method == "random" else COMPOSED
    phases, asked = FUTURES[future]
    before, state = stopped(root, steps, **more)
    with caplog.at_level(logging.WARNING):
        after = read(gone_on(root, state, **{"phases": phases, **asked, **more}))
    # As a run reads that had these phases from the beginning, with all streams at hand.
    asked_anew = {**asked, "names": tuple(SIZES) if "names" in asked else NAMES}
    fresh = _only_read(phases, asked_anew)
    assert before + after == read(phased_loader(root, **{"phases": phases, **fresh, **more}))
    assert not [one for one in caplog.messages if "have changed" in one]


def _only_read(phases: Sequence[Phase], asked: dict[str, Any]) -> dict[str, Any]:
    """The same with every stream that its phases read."""
    return {**asked, "names": tuple(sorted({name for phase in phases for name in phase.mix}))}


def test_new_phases_may_follow_each_other_resume_by_resume(root: Path) -> None:
    first, state = stopped(root, 5)
    second = gone_on(root, state, phases=[BROAD, replace(RAMP, end=80), replace(LATER, end=160)])
    middle = read(second, 14)
    third = [BROAD, replace(RAMP, end=80), replace(LATER, end=96), Phase(name="last", mix={"zzz": 1, "math": 1})]
    asked: dict[str, Any] = {"phases": third, "names": ("zzz", "math", "news", "web")}
    end = read(gone_on(root, second.state_dict(), **asked))
    assert first + middle + end == read(phased_loader(root, third, (*NAMES, "zzz")))


@pytest.mark.parametrize("method", ["random", "per_stream"])
def test_at_a_border_the_phase_that_has_ended_needs_its_streams_no_more(root: Path, method: str) -> None:
    more = {} if method == "random" else COMPOSED
    whole = read(phased_loader(root, **more))
    before, state = stopped(root, 10, **more)
    assert {stream_of(one) for one in before} == {"web", "code"}
    assert list(state["fingerprint"]["schedule"]) == ["broad"]
    assert before + read(gone_on(root, state, names=("web", "math", "news"), **more)) == whole


def test_a_stream_that_was_gone_may_come_back(root: Path, whole: list[int]) -> None:
    before, state = stopped(root, 12)
    without = gone_on(root, state, names=("web", "math", "news"))
    before += read(without, 3)
    after = read(gone_on(root, without.state_dict()))
    assert before + after == whole


def test_an_epoch_that_needs_a_stream_that_is_gone_says_so_before_it_begins(root: Path) -> None:
    _, state = stopped(root, 12)
    loader = gone_on(root, state, names=("web", "math", "news"), workers=1)
    assert len(read(loader)) == 160 - 48
    at_end = loader.state_dict()
    with raises(ConfigError, "schedule.broad.mix", "'code'", "add it to streams"):
        next(iter(loader))
    with raises(ConfigError, "schedule.broad.mix", "'code'", "add it to streams"):
        read(gone_on(root, at_end, names=("web", "math", "news")))
    whole = phased_loader(root)
    read(whole)
    assert read(gone_on(root, at_end)) == read(whole)


def test_ranks_that_are_kept_even_need_the_phase_before_a_very_short_one(root: Path) -> None:
    phases = [Phase(name="long", end=152, mix={"web": 1, "code": 1}), Phase(name="short", mix={"math": 1})]
    _, state = stopped(root, 38, phases=phases, names=("web", "code", "math"))
    few, many = (World(ranks_per_node=ranks, rank=ranks - 1) for ranks in (2, 16))
    asked: dict[str, Any] = {"phases": phases, "batch_size": 1}
    assert len(read(gone_on(root, state, **asked, names=("math",), world=few))) == 4
    # The last of 16 ranks read again what others read in the phase before.
    with raises(ConfigError, "schedule.long.mix", "add it to streams"):
        len(gone_on(root, state, **asked, names=("math",), world=many).state_dict())
    (again,) = read(gone_on(root, state, **asked, names=("web", "code", "math"), world=many))
    assert stream_of(again) in ("web", "code")


def test_data_that_was_not_read_yet_may_change(root: Path, tmp_path: Path) -> None:
    other = write_streams(tmp_path / "other", {**SIZES, "news": 30})
    before, state = stopped(root, 12)
    assert before + read(gone_on(other, state)) == read(phased_loader(other))
    _, later = stopped(root, 31)
    with raises(StateMismatchError, "streams.news.samples", "21", "30"):
        read(gone_on(other, later))


def test_where_the_epoch_ends_may_change_in_its_last_phase_only_with_the_phase(root: Path) -> None:
    _, state = stopped(root, 35)
    with raises(StateMismatchError, "schedule.anneal.end: saved 160, now 200"):
        read(gone_on(root, state, phases=[BROAD, replace(RAMP, end=120), ANNEAL], epoch_size=200))
    # One more phase instead.
    phases = [BROAD, replace(RAMP, end=120), replace(ANNEAL, end=160), LATER]
    asked: dict[str, Any] = {"phases": phases, "epoch_size": 200}
    before, _ = stopped(root, 35)
    assert before + read(gone_on(root, state, **asked)) == read(phased_loader(root, **asked))


# --- pasts that are refused ---

PASTS: dict[str, tuple[Sequence[Phase] | None, dict[str, Any], list[str]]] = {
    "end": ([replace(BROAD, end=44), RAMP, ANNEAL], {}, ["schedule.broad.end: saved 40, now 44"]),
    "until of the phase under way": ([BROAD, replace(RAMP, end=124), ANNEAL], {}, ["schedule.ramp.end: saved 120"]),
    "weights": (
        [replace(BROAD, mix={"web": 0.8, "code": 0.2}), RAMP, ANNEAL],
        {},
        ["schedule.broad.mix: saved 'code 0.1, web 0.9', now 'code 0.2, web 0.8'"],
    ),
    "a stream more": (
        [replace(BROAD, mix={"web": 0.9, "code": 0.1, "zzz": 0.1}), RAMP, ANNEAL],
        {"names": (*NAMES, "zzz")},
        ["schedule.broad.mix", "zzz 0.1"],
    ),
    "a ramp": (
        [BROAD, replace(RAMP, mix={"web": [0.9, 0.4], "math": [0.1, 0.5]}), ANNEAL],
        {},
        ["schedule.ramp.mix", "web 0.9 to 0.5", "web 0.9 to 0.4"],
    ),
    "steps": ([BROAD, replace(RAMP, steps=5), ANNEAL], {}, ["schedule.ramp.steps: saved 4, now 5"]),
    "a name": ([replace(BROAD, name="wide"), RAMP, ANNEAL], {}, ["schedule.broad", "'absent'", "schedule.wide"]),
    "a phase removed": (
        [replace(RAMP, end=120), ANNEAL],
        {"names": ("web", "math", "news")},
        ["schedule.broad: saved there, now 'absent'"],
    ),
    "a phase more": (
        [replace(BROAD, end=20, name="early"), BROAD, RAMP, ANNEAL],
        {},
        ["schedule.early: saved 'absent', now there"],
    ),
    "the order": ([replace(RAMP, end=40), replace(BROAD, end=120), ANNEAL], {}, ["schedule.broad.end"]),
    "no phases": (None, {}, ["schedule"]),
}


@pytest.mark.rotate(3)
@pytest.mark.parametrize("past", PASTS)
def test_what_has_begun_may_not_change(root: Path, past: str, caplog: pytest.LogCaptureFixture) -> None:
    phases, asked, words = PASTS[past]
    before, state = stopped(root, 12)
    with raises(StateMismatchError, *words, 'on_mismatch="warn"'):
        read(gone_on(root, state, **{"phases": phases, **asked}))
    with caplog.at_level(logging.WARNING):
        after = read(gone_on(root, state, "warn", **{"phases": phases, **asked}))
    assert len(after) == len(phased_loader(root, **{"phases": phases, **asked})) * 4 - len(before)
    (told,) = [one for one in caplog.messages if "have changed" in one]
    assert not [word for word in words if word not in told]


@pytest.mark.parametrize("changed", ["end", "mix", "steps"])
def test_whatever_differs_of_a_phase_the_way_out_is_told_with_the_file(root: Path, changed: str) -> None:
    other: dict[str, Any] = {"end": 124, "mix": {"web": [1, 0.5], "math": [0.1, 0.5]}, "steps": 5}
    loader = gone_on(root, stopped(root, 12)[1], phases=[BROAD, replace(RAMP, **{changed: other[changed]}), ANNEAL])
    with raises(StateMismatchError, f"schedule.ramp.{changed}", "`lightning-streaming state branch CHECKPOINT` prints"):
        len(loader)
    run_state_of(loader.dataset).set_labels(checkpoint="run/last.ckpt")
    with raises(StateMismatchError, "`lightning-streaming state branch run/last.ckpt` prints"):
        len(loader)


def test_a_border_written_in_percent_is_told_as_the_number_it_was(root: Path) -> None:
    phases = [replace(BROAD, end="25%"), RAMP, ANNEAL]
    _, state = stopped(root, 12, phases=phases)
    told = "schedule.broad.end is written as 25% of epoch_size, which is 200 now; to keep the saved end, write 40."
    with raises(StateMismatchError, "schedule.ramp.end is written as 75%", "write 120.", told):
        len(gone_on(root, state, phases=phases, epoch_size=200))
    as_numbers = [BROAD, replace(RAMP, end=120), ANNEAL]
    assert len(gone_on(root, state, phases=as_numbers, epoch_size=200)) == 50


def test_phases_may_not_be_added_to_a_run_without(root: Path) -> None:
    _, state = stopped(root, 12, phases=None)
    with raises(StateMismatchError, "schedule"):
        read(gone_on(root, state))
    assert len(read(gone_on(root, state, "warn"))) == 160 - 48


@pytest.mark.parametrize("steps", [1, 10, 11, 29])
def test_data_that_was_read_may_not_change(root: Path, tmp_path: Path, steps: int) -> None:
    other = write_streams(tmp_path / "other", {**SIZES, "web": 59})
    _, state = stopped(root, steps)
    with raises(StateMismatchError, "streams.web.samples", "60", "59"):
        read(gone_on(other, state))
    assert len(read(gone_on(other, state, "warn"))) == 160 - 4 * steps


def test_settings_of_the_order_may_not_change(root: Path) -> None:
    _, state = stopped(root, 12)
    with raises(StateMismatchError, "order.shuffle_algo: saved 'py1e', now 'py1s'"):
        read(gone_on(root, state, shuffle_algo="py1s"))


def test_in_a_second_epoch_all_phases_have_begun(root: Path) -> None:
    loader = phased_loader(root)
    read(loader)
    state = loader.state_dict()
    assert state["epoch"] == 1
    with raises(StateMismatchError, "schedule.anneal.mix"):
        read(gone_on(root, state, phases=[BROAD, RAMP, replace(ANNEAL, mix={"math": 2, "news": 1})]))


@dataclass(frozen=True)
class RecordedHalf(EveryNth):
    """Keep half of an epoch, and record each epoch that is computed."""

    epochs: ClassVar[list[int]] = []

    def over(self, parent: SampleSequence, context: PartContext) -> SampleSequence:
        self.epochs.append(context.epoch)
        return super().over(parent, context)


def test_a_state_of_a_second_epoch_computes_only_the_order_of_that_epoch(root: Path) -> None:
    loader = phased_loader(root, sequence=[RecordedHalf()])
    read(loader)
    resumed = gone_on(root, loader.state_dict(), sequence=[RecordedHalf()])
    RecordedHalf.epochs.clear()
    assert resumed.state_dict()["epoch"] == 1
    assert {*RecordedHalf.epochs} == {1}


def test_a_stream_that_is_needed_yet_may_not_go(root: Path) -> None:
    _, state = stopped(root, 12)
    with raises(ConfigError, "schedule.anneal.mix", "'math'"):
        gone_on(root, state, names=("web", "code", "news"))
    phases = [BROAD, RAMP, replace(ANNEAL, mix={"news": 1})]
    with raises(ConfigError, "schedule.ramp.mix", "'math'"):
        read(gone_on(root, state, phases=phases, names=("web", "code", "news")))


def test_repeats_that_are_over_are_no_reason_to_stop(root: Path) -> None:
    _, state = stopped(root, 12)
    limited = replace(BROAD, max_repeats={"code": 0.01})
    with raises(ConfigError, "by the end of phase 'broad'", "'code'", "max_repeats allows 0.01"):
        read(phased_loader(root, [limited, RAMP, ANNEAL]))
    assert len(read(gone_on(root, state, phases=[limited, RAMP, ANNEAL]))) == 160 - 48
    with raises(ConfigError, "by the end of phase 'anneal'", "'math'"):
        read(gone_on(root, state, phases=[limited, RAMP, replace(ANNEAL, max_repeats={"math": 2})]))


def test_state_at_names_the_phases_begun_there(root: Path) -> None:
    dataset = phased_loader(root).dataset
    begun = {
        at: list(state_at(dataset, Cursor(0, at))["fingerprint"]["schedule"]) for at in (0, 1, 40, 41, 120, 121, 159)
    }
    names = ["broad", "ramp", "anneal"]
    assert begun == {0: [], 1: names[:1], 40: names[:1], 41: names[:2], 120: names[:2], 121: names, 159: names}
    assert list(state_at(dataset, Cursor(1, 0))["fingerprint"]["schedule"]) == names


def states_of(make: Callable[[], Any], steps: int) -> list[State]:
    loader, found = make(), []
    for number, _ in enumerate(loader):
        found.append(json_copy(loader.state_dict()))
        if number == steps:
            break
    return found


def test_a_state_does_not_tell_of_what_comes_later(root: Path) -> None:
    futures = [PHASES, FUTURES["a stream that comes first"][0], FUTURES["other weights"][0]]
    names = [NAMES, (*NAMES, "aaa"), NAMES]
    found = [
        states_of(partial(phased_loader, root, phases, named), 28) for phases, named in zip(futures, names, strict=True)
    ]
    assert found[0] == found[1] == found[2]


def test_a_state_with_one_thing_wrong_is_refused_or_means_what_it_says(root: Path, whole: list[int]) -> None:
    before, state = stopped(root, 12)
    read_on = refused = 0
    for change, mutated in mutations(state):
        if "fingerprint.schedule" not in change and "fingerprint.streams" not in change:
            continue
        try:
            after = read(gone_on(root, mutated))
        except (StateError, StateMismatchError):
            refused += 1
            continue
        # A stream of which a state tells nothing was gone for a while; phases that it does not know, a moved place has.
        assert re.match(r"fingerprint\.(streams|schedule -> \{\}|schedule\.\w+ dropped)", change), change
        assert before + after == whole
        read_on += 1
    assert refused > 2 * read_on


@pytest.mark.parametrize("epoch_size", [100, 148])
def test_an_epoch_that_has_become_shorter_ends_early_if_asked_to(
    root: Path, epoch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    phases = [BROAD, replace(RAMP, end=epoch_size)]
    _, state = stopped(root, 38)
    asked: dict[str, Any] = {"phases": phases, "epoch_size": epoch_size, "names": ("web", "code", "math")}
    with raises(StateMismatchError, "schedule.ramp.end"):
        read(gone_on(root, state, **asked))
    loader = gone_on(root, state, "warn", **asked)
    with caplog.at_level(logging.WARNING):
        assert len(read(loader)) == epoch_size
    assert loader.state_dict()["epoch"] == 2
    assert [one for one in caplog.messages if "epoch 0 has ended" in one]


def test_what_an_epoch_that_has_ended_did_not_read_cannot_be_added(root: Path) -> None:
    # In the next epoch, streams go on where the one before left them.
    loader = phased_loader(root)
    read(loader)
    phases = [BROAD, replace(RAMP, end=120), replace(ANNEAL, end=160), LATER]
    with raises(StateMismatchError, "schedule.later: saved 'absent', now there"):
        read(gone_on(root, loader.state_dict(), phases=phases, epoch_size=200))
