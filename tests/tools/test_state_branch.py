"""``lightning-streaming state branch``: how to end the phase that a checkpoint stands in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming import MixturePhase
from lightning_streaming.errors import StateMismatchError
from lightning_streaming.resume.fingerprint import format_mix
from lightning_streaming.resume.saved_fingerprint import SavedPhase
from lightning_streaming.tools.state import phase_line, read_mix
from tests.helpers import make_loader, raises, write_dataset
from tests.resume.phased import ANNEAL, BROAD, RAMP, gone_on, phased_loader, read, stopped, write_streams
from tests.schedules import Phase
from tests.tools.running import run

PHASES = (BROAD, replace(RAMP, end=120), replace(ANNEAL, end=160))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_streams(tmp_path_factory.mktemp("streams"))


def saved(directory: Path, root: Path, steps: int, phases: Sequence[Phase] = PHASES) -> tuple[Path, dict[str, Any]]:
    """A file with the state after so many batches, and the state."""
    _, state = stopped(root, steps, phases=phases, epoch_size=None)
    path = directory / "state.json"
    path.write_text(json.dumps(state))
    return path, dict(state)


def test_what_it_says_is_what_the_run_goes_on_with(root: Path, tmp_path: Path) -> None:
    path, state = saved(tmp_path, root, 20)
    told = run("state", "branch", path)
    assert "sample 80 of phase 'ramp'" in told.out
    begun = yaml.safe_load(told.out.partition("schedule:")[2])
    assert begun.pop("NAME") == {"end": "...", "mix": "..."}
    assert list(begun.items()) == [
        ("broad", {"end": 40, "mix": BROAD.mix}),
        ("ramp", {"end": 120, "ended_at": 80, "steps": 4, "mix": RAMP.mix}),
    ]
    assert "Borders in % become numbers" in told.out
    place = run("state", "branch", path, "--json").json
    assert (place["ended_at"], place["phases"]) == (80, ["broad", "ramp"])
    phases = [
        *(Phase(name=name, **fields) for name, fields in begun.items()),
        Phase(name="next", end=130, mix={"news": 1, "web": 1}),
    ]
    assert len(read(gone_on(root, state, phases=phases, epoch_size=None))) == 132 - 80  # in whole canonical nodes


def test_weights_with_sizes_keep_the_mix_of_the_configuration(root: Path, tmp_path: Path) -> None:
    mixing = {"size_exponent": 0.5}
    phases = (replace(BROAD, end=60), replace(ANNEAL, end=160))
    _, state = stopped(root, 10, phases=phases, epoch_size=None, mixing=mixing)
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    shown = run("state", "branch", path)
    assert "With `mixing.size_exponent`, keep each `mix` of the configuration" in shown.out
    begun = yaml.safe_load(shown.out.partition("schedule:")[2])
    assert begun["broad"]["ended_at"] == 40
    as_printed = Phase(name="broad", **begun["broad"])
    later = Phase(name="next", end=130, mix={"web": 1, "math": 1, "news": 1})
    with raises(StateMismatchError):
        read(gone_on(root, state, phases=[as_printed, later], epoch_size=None, mixing=mixing))
    as_configured = replace(as_printed, mix=BROAD.mix)
    rest = read(gone_on(root, state, phases=[as_configured, later], epoch_size=None, mixing=mixing))
    assert len(rest) == 132 - 40


def test_a_phase_in_tokens_cannot_be_cut(root: Path, tmp_path: Path) -> None:
    phases = (replace(BROAD, end=200_000), replace(ANNEAL, end=400_000))
    mixing = {"weights_in": "tokens", "lengths": "id"}
    _, state = stopped(root, 2, phases=phases, epoch_size=None, mixing=mixing)
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    shown = run("state", "branch", path)
    assert (shown.code, shown.out) == (2, "")
    assert "count tokens" in shown.err


@pytest.mark.parametrize(("steps", "phases"), [(0, []), (10, ["broad"]), (30, ["broad", "ramp"])])
def test_nothing_is_cut_where_a_phase_begins(root: Path, tmp_path: Path, steps: int, phases: list[str]) -> None:
    path, _ = saved(tmp_path, root, steps)
    assert "where a phase begins" in run("state", "branch", path).out
    place = run("state", "branch", path, "--json").json
    assert (place["ended_at"], place["phases"], place["sample"]) == (None, phases, 4 * steps)


def test_a_mix_of_too_many_streams_is_left_open() -> None:
    mix = {f"stream {number}": 1 + number / 7 for number in range(30)}
    told = format_mix(MixturePhase(mix=mix).resolved("wide", 10))
    assert read_mix(told, mix) is None
    line = phase_line("wide", SavedPhase(end=10, mix=told, steps=1), mix)
    assert line == "wide: {end: 10, mix: ...}  # as it was: of too many streams"


# A ramp to where it begins is told as one weight, which takes one step.
RAMPS = st.tuples(st.floats(0, 9), st.floats(1e-9, 9)).filter(lambda ends: ends[0] != ends[1]).map(list)


@given(
    st.dictionaries(
        st.text("ab 01,", min_size=1, max_size=5).filter(lambda name: ", " not in name),
        st.one_of(st.floats(1e-9, 1e9), RAMPS),
        min_size=1,
        max_size=3,
    )
)
def test_a_mix_is_read_as_it_was_written_or_not_at_all(mix: dict[str, Any]) -> None:
    settled = MixturePhase(mix=mix | {"a": 1}).resolved("any", 10)
    read = read_mix(format_mix(settled), mix | {"a": 1})
    assert read is None or MixturePhase(mix=read).resolved("any", 10) == settled


def test_a_run_without_phases_has_nothing_to_cut(tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path / "data", 20))
    read(loader, 2)
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    told = run("state", "branch", tmp_path / "state.json")
    assert (told.code, "has no phases" in told.err) == (2, True)


def test_an_epoch_that_has_ended_has_nothing_to_cut(root: Path, tmp_path: Path) -> None:
    loader = phased_loader(root, phases=PHASES, epoch_size=None)
    read(loader)
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    assert "is in epoch 1" in run("state", "branch", tmp_path / "state.json").err


def test_a_place_that_was_moved_is_not_cut(root: Path, tmp_path: Path) -> None:
    path, _ = saved(tmp_path, root, 20)
    run("state", "set", path, "--epoch", 0, "--sample", 12)
    assert "was moved to sample 12" in run("state", "branch", path).err
