"""States of version 1 mean the same today: their keys are brought up to date, and digests are what they were.

tests/golden/state_1.json has digests of orders, and states of many streams, as the code of version 1 made them from
the data of the oracle. tests/oracle resumes from states of all its runs, test_earlier_release.py from checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import Stream, StreamingDataset
from lightning_streaming.errors import StateError, StateMismatchError
from lightning_streaming.reading.dataset import run_state_of
from lightning_streaming.resume.state import (
    STATE_VERSION,
    Cursor,
    SavedRun,
    SavedTrainer,
    SavedValidation,
    read_run,
    read_state,
)
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.settings import OrderSettings
from tests.golden import golden_path
from tests.helpers import State, assert_error, json_copy
from tests.oracle.cases import Geometry, arguments, cases, write_data
from tests.oracle.record import known

OLD = json.loads((golden_path() / "state_1.json").read_text())
STATES: dict[str, State] = {
    **{name: case["state"] for name, case in known().items()},
    **{f"{name} streams": state for name, state in OLD["states"].items()},
}
"""Of version 1."""
CASES = {case.name: case for case in cases()}
MACHINES = Geometry(nodes=1, ranks=2, batch=12)
NAMED = re.compile(r"(streams|schedule|join|skipped|loaders|samples_per_global_batch)")
"""Mappings whose keys are names of the user's."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_data(root)
    return root


def keys_of(state: Any, are_names: bool = False) -> Iterator[str]:
    """Yield the keys of a state that are not names of the user's."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if not are_names:
                yield key
            yield from keys_of(value, not are_names and NAMED.fullmatch(key) is not None)


def test_the_states_are_of_version_1_and_of_every_kind() -> None:
    assert {state["version"] for state in STATES.values()} == {1}
    keys = {key for state in STATES.values() for key in keys_of(state["fingerprint"])}
    assert {"phases", "joins", "samples drawn", "pack", "place", "selection", "lengths"} <= keys
    assert any("named digests" in state["streams"] for state in STATES.values())


def test_keys_of_a_state_are_in_snake_case_and_say_the_same() -> None:
    for name, old in STATES.items():
        before = json_copy(old)
        position = read_state(old)
        new = json_copy(position.as_state())
        assert (old, new["version"]) == (before, STATE_VERSION), name
        assert not [key for key in keys_of(new) if not re.fullmatch(r"[a-z][a-z0-9_]*", key)], name
        assert read_state(new) == position, name
        assert {key: new[key] for key in old if key in ("epoch", "sample_in_epoch", "batch_geometry", "skipped")} == {
            key: old[key] for key in old if key in ("epoch", "sample_in_epoch", "batch_geometry", "skipped")
        }


def test_each_key_of_version_1_has_its_new_name() -> None:
    old = STATES["join and where-py1e"]
    new, books = read_state(old).as_state(), old["fingerprint"]["streams"]["books"]
    assert new["fingerprint"]["streams"]["books"] == {
        "index": books["place"],
        "samples": books["samples"],
        "shards": books["shards"],
        "samples_drawn": books["samples drawn"],
        "digest": books["digest"],
        "selection": books["selection"],
        "join": {"caption": {**{key: books["joins"]["caption"][key] for key in ("samples", "digest")}, "key": "id"}},
    }
    fingerprint = read_state(STATES["pack-py1e-0-schedule"]).as_state()["fingerprint"]
    settings = {"method": "best_fit", "capacity": 64, "window": 32, "longer": "split"}
    assert fingerprint["packing"] == {**settings, "lengths": "column='tokens'"}
    phase = STATES["pack-py1e-0-schedule"]["fingerprint"]["phases"]["broad"]
    assert fingerprint["schedule"]["broad"] == {"end": phase["until"], "mix": phase["mix"], "steps": phase["steps"]}
    fingerprint = read_state(STATES["budget-py1e-5-plain"]).as_state()["fingerprint"]
    assert fingerprint["token_budget"].keys() == {"tokens", "buckets", "window", "longer", "lengths"}
    assert read_state(STATES["400 streams"]).as_state()["fingerprint"]["all_streams"]["count"] == 400
    assert "named_digests" in read_state(STATES["400 streams"]).as_state()["stream_list"]
    ended = STATES["ended phase-py1e"]["fingerprint"]["phases"]
    new = read_state(STATES["ended phase-py1e"]).as_state()["fingerprint"]["schedule"]
    assert [phase.get("ended_at") for phase in new.values()] == [phase.get("cut") for phase in ended.values()]


@pytest.mark.parametrize("name", OLD["orders"])
def test_the_digest_of_an_order_is_what_it_was(name: str, data: Path) -> None:
    case, world = CASES[name], MACHINES.worlds()[0]
    batch = 1 if case.budget else MACHINES.batch
    dataset = StreamingDataset(**arguments(case, data), batch_size=batch, world=world)
    run = run_state_of(dataset).on(world, batch)
    assert run.epoch(Cursor(1, 0)).sequence.digest == OLD["orders"][name]


def test_digests_of_orders_cover_every_setting() -> None:
    for kind in (OrderSettings, BatchGeometry):
        assert is_dataclass(kind)
    assert OrderSettings().resolved(1).facts.keys() == {field.name for field in fields(OrderSettings)}
    facts = BatchGeometry(num_nodes=2, ranks_per_node=3, batch_size=4).facts
    assert facts == {"num_nodes": 2, "ranks_per_node": 3, "batch_size": 4}


def dataset_of(kind: str, data: Path, first: str | None = None) -> StreamingDataset:
    """The dataset that a state of many streams is of; with ``first``, its first stream has other data."""
    count, packed = int(kind.split()[0]), kind.endswith("packed")
    streams = {}
    for number in range(count):
        options: dict[str, Any] = {"repeat": 1.0 if number % 3 else 1.5}
        if not packed and number % 2:
            options["selection"] = {"where": "size > 12"}
        if not packed and count < 100 and number % 3:
            options["join"] = {"caption": {"remote": str(data / "captions"), "key": "id"}}
        name = first if first and not number else ("books", "code", "web")[number % 3]
        called = f"stream{number}" if count < 100 else hashlib.sha1(str(number).encode()).hexdigest()
        streams[called] = Stream(remote=str(data / name), **options)
    pack: Any = {"column": "tokens", "capacity": 64} if packed else None
    return StreamingDataset(streams=streams, shuffle=True, batch_size=4, num_canonical_nodes=4, packing=pack)


@pytest.mark.parametrize("kind", OLD["states"])
def test_digests_of_many_streams_are_what_they_were(kind: str, data: Path) -> None:
    dataset = dataset_of(kind, data)
    dataset.load_state_dict(OLD["states"][kind])
    assert read_state(dataset.state_dict()) == read_state(OLD["states"][kind])


def test_a_state_of_version_1_reports_which_of_many_streams_has_changed(data: Path) -> None:
    dataset = dataset_of("40", data, first="code")
    dataset.load_state_dict(OLD["states"]["40"])
    with pytest.raises(StateMismatchError, match=r"streams\.stream0\.digest"):
        dataset.state_dict()


RUN = SavedRun(
    trainer=SavedTrainer(epoch=2, batches=7, batches_in_epoch=8),
    loaders={"train": read_state(STATES["join-py1e"])},
    samples_per_global_batch={"train": 4},
    validation=SavedValidation(is_due=True, done_after=6),
)


def test_a_run_is_read_as_it_was_written() -> None:
    state = RUN.as_state()
    assert read_run(json_copy(state)) == RUN
    assert read_run({**state, "version": 1, "loaders": {"train": STATES["join-py1e"]}}) == RUN
    assert read_run(SavedRun().as_state()) == SavedRun()


@pytest.mark.parametrize(
    ("release", "hint"),
    [
        ("1.4.0", "install lightning-streaming 1.4.0 or a newer release"),
        ("1.4; rm -rf", "resume with the release that wrote it, or a newer one"),
        (3, "resume with the release that wrote it, or a newer one"),
    ],
)
def test_a_state_of_a_newer_version_names_the_release_to_install(release: object, hint: str) -> None:
    newer = {"version": STATE_VERSION + 1, "library_version": release}
    with assert_error(StateError, hint=hint):
        read_state({**STATES["join-py1e"], **newer})
    with assert_error(StateError, hint=hint):
        read_run({**RUN.as_state(), **newer})


def test_a_newer_state_without_a_release_says_so() -> None:
    with assert_error(StateError, hint="resume with the release that wrote it"):
        read_state({**STATES["join-py1e"], "version": STATE_VERSION + 1})


@pytest.mark.parametrize("part", ["order", "streams", "schedule", "packing"])
def test_what_a_later_release_has_added_is_a_difference(part: str, data: Path) -> None:
    case, world = CASES["pack-py1e-0-schedule"], MACHINES.worlds()[0]
    dataset = StreamingDataset(**arguments(case, data), batch_size=4, world=world)
    state = json_copy(read_state(STATES["pack-py1e-0-schedule"]).as_state())
    described = state["fingerprint"][part]
    (described["web"] if part == "streams" else described["broad"] if part == "schedule" else described)["later"] = 1
    assert read_state(json_copy(read_state(state).as_state())) == read_state(state)
    dataset.load_state_dict(state)
    with pytest.raises(StateMismatchError, match=rf"{part}\.(\w+\.)?later"):
        dataset.state_dict()


@pytest.mark.parametrize("method", [3, None, np.arange(3), [], {}], ids=repr)
def test_a_packing_of_version_1_without_a_method_in_text_reads_as_another(method: Any) -> None:
    packed = next(state for state in STATES.values() if "pack" in state["fingerprint"]["order"])
    state = json_copy(packed)
    state["fingerprint"]["order"]["pack"]["method"][0] = method
    fingerprint = read_state(state).fingerprint
    assert fingerprint is not None
    assert fingerprint.packing is not None
    assert "capacity" not in fingerprint.packing.settings
