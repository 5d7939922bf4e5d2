"""What a user writes about phases: refused at once, by field and with the way out, where it cannot be read."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import MixturePhase, Stream
from lightning_streaming.errors import ConfigError, MissingArgumentError, UnknownArgumentError
from lightning_streaming.escaping import short_repr
from lightning_streaming.options.schedule import named_phases, resolved_phases
from lightning_streaming.sequence.phases import ResolvedPhase
from tests.helpers import assert_error, make_dataset, raises
from tests.resume.phased import NAMES, PHASES, phased_loader
from tests.schedules import Phase, schedule

ANY: Any = {"web": 1}


def phase(name: str = "one", mix: Any = ANY, **said: Any) -> Phase:
    return Phase(**{"name": name, "mix": mix, **said})


def resolved(phases: Sequence[Phase], epoch_size: int | None) -> tuple[ResolvedPhase, ...]:
    return resolved_phases(named_phases(schedule(phases)), epoch_size)


@pytest.mark.parametrize(
    "weight",
    [-1, float("nan"), float("inf"), "1", None, True, [1], [1, 2, 3], [1, -1], [1, "a"], {}, b"12", [[1, 2], 1],
     pytest.param(10**400, id="10**400"), [1, 10**400]],
)  # fmt: skip
def test_a_weight_is_a_number_or_two(weight: Any) -> None:
    with raises(ConfigError, "schedule.mix.web must be a weight above 0, or two for a ramp", short_repr(weight)):
        phase(mix={"web": weight, "code": 1})


@pytest.mark.parametrize("weight", [0, 0.0, [0, 0], (0.0, 0)])
def test_a_weight_of_0_is_no_weight(weight: Any) -> None:
    with raises(ConfigError, "schedule.mix.web", "leave 'web' out of the mix"):
        phase(mix={"web": weight, "code": 1})


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"mix": {}}, ["schedule.mix must map names of streams to weights"]),
        ({"mix": {"web": 1, 2: 1}}, ["schedule.mix must map names of streams to weights"]),
        ({"mix": ["web"]}, ["schedule.mix must map names of streams to weights"]),
        ({"mix": {"web": [1, 0]}}, ["schedule.mix has no weight above 0 at its end"]),
        ({"mix": {"web": [0, 1], "code": [0, 2]}}, ["schedule.mix has no weight above 0 at its beginning"]),
        ({"mix": {"web": 1e308, "code": 1e308}}, ["schedule.mix has weights that are too large", "scale them down"]),
        ({"end": [3]}, ["schedule.end must be samples", "[3]"]),
        ({"steps": 0}, ["schedule.steps", "at least 1"]),
        ({"steps": 1.5}, ["schedule.steps", "whole number"]),
        ({"steps": "8"}, ["schedule.steps", "whole number"]),
        ({"steps": None}, ["schedule.steps", "whole number", "None"]),
        ({"steps": True}, ["schedule.steps", "whole number"]),
        ({"end": True}, ["schedule.end must be samples", "True"]),
        ({"max_repeats": {"web": 10**400}}, ["schedule.max_repeats must be numbers above 0"]),
        ({"max_repeats": {"web": 0}}, ["schedule.max_repeats must be numbers above 0", "'web' has 0"]),
        ({"max_repeats": {"web": float("nan")}}, ["schedule.max_repeats must be numbers above 0"]),
        ({"max_repeats": {"web": "2"}}, ["schedule.max_repeats must be numbers above 0"]),
        ({"max_repeats": {"code": 2}}, ["schedule.max_repeats names 'code', which is not in its mix"]),
        ({"max_repeats": [2]}, ["schedule.max_repeats must map names of streams to numbers"]),
        ({"max_repeats": None}, ["schedule.max_repeats must map names of streams to numbers"]),
    ],
)
def test_what_no_phase_can_be(said: dict[str, Any], words: list[str]) -> None:
    with raises(ConfigError, *words):
        phase(**said)


BORDERS: list[tuple[Sequence[Any], int | None, list[str]]] = [
    ([80, 80, None], 160, ["schedule.1.end is 80", "phase '0' before it ends at 80", "must increase"]),
    ([90, "50%", None], 160, ["schedule.1.end is 80", "ends at 90", "must increase"]),
    ([None, 80, None], 160, ["schedule.0.end is missing", "like 800m"]),
    (["40 percent", 80, None], 160, ["schedule.0.end must be samples", 'a part of epoch_size, like "40%"']),
    (["2.5 Per cent", 80, None], 160, ["schedule.0.end must be samples", 'like "2.5%"']),
    ([80, None], None, ["schedule.1.end is missing; give it, or epoch_size,"]),
    (["50%", 160], None, ["schedule.0.end='50%' is a part of epoch_size, which is not given"]),
    (["101%", None], 160, ["schedule.0.end must be at most 100%"]),
    ([0, None], 160, ["schedule.0.end must be at least one sample"]),
    ([0.9, None], 160, ["schedule.0.end must be whole samples", '"90%"']),
    (["0%", None], 160, ["schedule.0.end must be at least one sample"]),
    ([-4, None], 160, ["schedule.0.end must be a finite number that is not negative"]),
    ([float("nan"), None], 160, ["schedule.0.end must be a finite number"]),
    (["soon", None], 160, ["schedule.0.end must be a number", "'soon'"]),
    (["-5%", None], 160, ["schedule.0.end must be a number", "'-5%'"]),
    (["%", None], 160, ["schedule.0.end must be a number"]),
    ([200, None], 160, ["schedule.0.end is 200, and epoch_size is 160", "raise epoch_size"]),
    (["100%", None], 160, ["schedule.0.end is 160, and epoch_size is 160", "end it earlier"]),
    ([80, 120], 160, ["schedule.1.end is 120, and epoch_size is 160", "give one of them"]),
    ([80, 200], 160, ["schedule.1.end is 200, and epoch_size is 160", "give one of them"]),
]


@pytest.mark.parametrize(("borders", "epoch_size", "words"), BORDERS)
def test_borders_rise_to_the_end_of_the_epoch(borders: Sequence[Any], epoch_size: int | None, words: list[str]) -> None:
    phases = [phase(str(number), end=end) for number, end in enumerate(borders)]
    with raises(ConfigError, *words):
        resolved(phases, epoch_size)


@pytest.mark.parametrize(
    ("borders", "epoch_size", "stops"),
    [
        (["50%", None], 160, [80, 160]),
        ([" 12.5 % ", "0.1k", "100%"], 160, [20, 100, 160]),
        ([1e2, "1m"], None, [100, 10**6]),
        (["99.99%", 10**12], 10**12, [999_900_000_000, 10**12]),
    ],
)
def test_borders_are_samples_or_parts_of_the_epoch(
    borders: Sequence[Any], epoch_size: int | None, stops: list[int]
) -> None:
    phases = [phase(str(number), end=end) for number, end in enumerate(borders)]
    assert [one.planned_stop for one in resolved(phases, epoch_size)] == stops


def test_numbers_of_numpy_are_taken() -> None:
    written = phase(mix={"web": np.float32(0.5), "code": [np.int64(1), 2]}, end=np.int64(80), steps=np.uint8(2))
    (found,) = resolved([written], None)
    assert found == resolved([phase(mix={"web": 0.5, "code": [1, 2]}, end=80, steps=2)], None)[0]
    assert {type(weight) for _, weight in found.begin + found.end} == {float}
    assert type(found.planned_stop) is type(found.steps) is int


def test_only_a_ramp_has_steps() -> None:
    level, ramp = resolved([phase(end=20, steps=5), phase("ramp", {"web": (1, 2), "code": 1}, steps=5)], 160)
    assert (level.steps, ramp.steps) == (1, 5)
    assert (level.begin, level.end) == ((("web", 1.0),), (("web", 1.0),))
    assert (ramp.begin, ramp.end) == ((("code", 1.0), ("web", 1.0)), (("code", 1.0), ("web", 2.0)))


def streams(root: Path, **said: Any) -> dict[str, Stream]:
    return {name: Stream(remote=str(root / name), **said) for name in ("web", "code")}


BOTH = {"web": 1, "code": 2}


@pytest.mark.parametrize("said", [{"proportion": 1}, {"repeat": 2}, {"choose": 20}])
def test_streams_of_phases_have_no_weights_of_their_own(root: Path, said: dict[str, Any]) -> None:
    with raises(ConfigError, "stream 'web' can have no proportion, repeat or choose", "leave these, or schedule, out"):
        make_dataset(streams=streams(root, **said), schedule=schedule([phase(mix=BOTH)]), epoch_size=160)


def test_phases_need_streams_by_name(root: Path) -> None:
    for asked in ({"remote": str(root / "web")}, {"streams": list(streams(root).values())}):
        with assert_error(ConfigError, option="streams"):
            make_dataset(**asked, schedule=schedule([phase(mix=BOTH)]), epoch_size=160)


@pytest.mark.parametrize("phases", ["one", ["one"], [], {}, 3, [MixturePhase(mix=BOTH)], MixturePhase(mix=BOTH)])
def test_a_schedule_maps_names_to_phases(root: Path, phases: Any) -> None:
    with assert_error(ConfigError, option="schedule"):
        make_dataset(streams=streams(root), schedule=phases, epoch_size=160)


def test_a_phase_may_be_written_as_a_mapping_of_its_fields(root: Path) -> None:
    first: dict[str, Any] = {"mix": {"web": [2, 1], "code": 1}, "end": 80, "steps": 3}
    written = {"one": first, "two": MixturePhase(mix=ANY)}
    as_objects = {"one": MixturePhase(**first), "two": MixturePhase(mix=ANY)}
    one, other = (make_dataset(streams=streams(root), schedule=each, epoch_size=160) for each in (written, as_objects))
    assert one.config() == other.config()
    assert [sample["id"] for sample in one] == [sample["id"] for sample in other]


@pytest.mark.parametrize(
    ("fields", "option", "error"),
    [
        ({}, "schedule.two.mix", MissingArgumentError),
        ({"end": 80}, "schedule.two.mix", MissingArgumentError),
        ({"mix": BOTH, 3: 4}, "schedule.two", ConfigError),
        ({"mix": BOTH, "step": 4}, "schedule.two.step", UnknownArgumentError),
        ({"mix": {"web": -1, "code": 1}}, "schedule.two.mix.web", ConfigError),
        ({"mix": BOTH, "end": "soon"}, "schedule.two.end", ConfigError),
        (BOTH, "schedule.two.web", UnknownArgumentError),
        (None, "schedule.two.mix", MissingArgumentError),
    ],
)
def test_a_mapping_that_is_no_phase_is_refused_by_field(
    root: Path, fields: dict[Any, Any], option: str, error: type[ConfigError]
) -> None:
    with assert_error(error, option=option):
        make_dataset(streams=streams(root), schedule={"one": {"mix": BOTH, "end": 80}, "two": fields}, epoch_size=160)


def test_a_stream_that_no_phase_reads_is_refused(root: Path) -> None:
    with raises(ConfigError, "stream 'code' is in the mix of no phase", "leave the stream out"):
        make_dataset(streams=streams(root), schedule=schedule([phase()]), epoch_size=160)
    with raises(
        ConfigError, "stream 'code' is in the mix of no phase", "schedule.one.mix names 'cod', which is no stream"
    ):
        make_dataset(streams=streams(root), schedule=schedule([phase(mix={"web": 1, "cod": 1})]), epoch_size=160)


def test_the_last_phase_reads_streams_of_the_dataset_alone(root: Path) -> None:
    phases = schedule([phase(end=40, mix={"gone": 1}), phase("two", mix={"web": 1, "cod": 1, "code": 1})])
    with assert_error(ConfigError, option="schedule.two.mix", stream="cod"):
        make_dataset(streams=streams(root), schedule=phases, epoch_size=160)


@pytest.mark.parametrize("epoch_size", [0, ""])
def test_an_epoch_of_all_samples_goes_with_no_phases(root: Path, epoch_size: Any) -> None:
    with raises(ConfigError, f"epoch_size={epoch_size!r} means all samples", "give the last phase an end"):
        make_dataset(streams=streams(root), schedule=schedule([phase(mix=BOTH)]), epoch_size=epoch_size)


LATE: dict[str, tuple[list[Phase], dict[str, Any], list[str]]] = {
    "a stream that is not there": (
        [phase(mix={"web": 1, "cod": 1}, end=40), phase("two", mix=BOTH)],
        {},
        ["schedule.one.mix reads stream 'cod'", "'web', 'code'", "add it to streams"],
    ),
    "too many repeats": (
        [phase(end=40, mix={"web": 1}), phase("two", mix={"code": [1, 2], "web": 1}, max_repeats={"code": 2})],
        {},
        ["by the end of phase 'two', stream 'code'", "of its 29 samples", "max_repeats allows 2;", "add data"],
    ),
    "a phase shorter than the canonical nodes": (
        [phase(mix=BOTH, end=62), phase("two", mix=BOTH, end=64), phase("three", mix=BOTH)],
        {"num_canonical_nodes": 64},
        ["schedule.two.end is 64", "each of the 64 canonical nodes", "set num_canonical_nodes lower"],
    ),
    "a last phase that rounding leaves nothing": (
        [phase(mix=BOTH, end=158), phase("two", mix=BOTH)],
        {"num_canonical_nodes": 64},
        ["schedule.two.end is 160", "the phase before it ends at 192"],
    ),
    "a share of less than one sample of a batch": (
        [phase(mix={"web": 1, "code": 0.01})],
        {"batching_method": "stratified", "shuffle_algo": "py1s"},
        ["phase 'one': stream 'code' has a share of 0.013", "batching_method='random'"],
    ),
    "less than one batch": (
        [phase(mix={"web": 1, "code": 0.01})],
        {"batching_method": "per_stream", "shuffle_algo": "py1s", "batch_size": 8},
        ["phase 'one': stream 'code' draws 2 samples", "lower the batch size"],
    ),
}


@pytest.mark.parametrize("case", LATE)
def test_what_only_the_data_tells_is_refused_before_a_worker_starts(root: Path, case: str) -> None:
    phases, asked, words = LATE[case]
    for question in (len, lambda loader: next(iter(loader)), lambda loader: loader.state_dict()):
        loader = phased_loader(root, phases, ("web", "code"), workers=2, **asked)
        with raises(ConfigError, *words):
            question(loader)


def test_errors_may_be_sent_to_other_processes(root: Path) -> None:
    found: list[ConfigError] = []
    for asked in ({"names": ("web",)}, {"epoch_size": 40}):
        with pytest.raises(ConfigError) as caught:
            len(phased_loader(root, **asked))
        found.append(caught.value)
    for error in found:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (ConfigError, str(error))


def test_a_dataset_tells_what_phases_were_asked_for(root: Path) -> None:
    told = phased_loader(root).dataset.config()["schedule"]
    assert list(told) == ["broad", "ramp", "anneal"]
    assert told["ramp"]["mix"]["web"] == [0.9, 0.5]
    assert phased_loader(root, None).dataset.config()["schedule"] is None


def test_phases_are_values() -> None:
    copied = pickle.loads(pickle.dumps(PHASES))
    assert copied == PHASES
    assert isinstance(PHASES[0].mix, Mapping)
    assert {name for one in PHASES for name in one.mix} == set(NAMES)
