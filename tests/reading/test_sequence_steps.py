"""Datasets whose epochs a step of the user changes: any world reads the same, resumes are exact."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from examples.every_nth import EveryNth
from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset, World
from lightning_streaming.errors import ConfigError, StateMismatchError
from lightning_streaming.resume.state import Cursor, read_state
from lightning_streaming.sequence.skips import NOTHING_SKIPPED
from lightning_streaming.tools.runs.describe import describe_run
from tests.helpers import (
    assert_error,
    assert_resumes_at_every_step,
    json_copy,
    make_dataset,
    make_loader,
    write_dataset,
)
from tests.packed_data import packed_loader, packed_train, write_documents

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
STEP: dict[str, Any] = {"sequence": [EveryNth(2)], "num_canonical_nodes": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps")
    for name, first in (("a", 0), ("b", 1000)):
        write_dataset(root / name, 61, first_id=first)
    return root


def streams(root: Path) -> dict[str, Stream]:
    return {name: Stream(remote=str(root / name)) for name in ("a", "b")}


SCHEDULE = {"one": {"end": 40, "mix": {"a": 3, "b": 1}}, "two": {"mix": {"a": [1, 0.5], "b": 1}, "steps": 2}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "by stream": {"batching_method": "per_stream"},
    "schedule": {"schedule": SCHEDULE, "epoch_size": 120},
    "schedule by stream": {"schedule": SCHEDULE, "epoch_size": 120, "batching_method": "stratified"},
    "skip": {"skip": ["3-4"]},
}


def read(root: Path, ranks: int, **options: Any) -> list[int]:
    """Read one epoch on some ranks, and return the ids by position."""
    loaders = [
        make_loader(None, streams=streams(root), world=World(rank=rank, num_nodes=ranks), **{**STEP, **options})
        for rank in range(ranks)
    ]
    batches = [[batch["id"].tolist() for batch in loader] for loader in loaders]
    return sorted(number for of_rank in batches for batch in of_rank for number in batch)


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_are_exact_at_every_step(root: Path, kind: str) -> None:
    make = partial(make_loader, None, streams=streams(root), **STEP, **KINDS[kind])
    assert_resumes_at_every_step(make)


def test_each_epoch_reads_another_half(root: Path) -> None:
    loader = make_loader(root / "a", **{**STEP, "num_canonical_nodes": 1})
    assert (len(loader), len(loader.dataset)) == (8, 30)
    epochs = [[number for batch in loader for number in batch["id"].tolist()] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [30, 30]
    assert len({*epochs[0]}) == len({*epochs[1]}) == 30
    assert {*epochs[0]} != {*epochs[1]}


@pytest.mark.parametrize("kind", ["plain", "schedule"])
def test_every_world_reads_the_same(root: Path, kind: str) -> None:
    alone, together = read(root, 1, **KINDS[kind]), read(root, 2, **KINDS[kind])
    assert alone == together
    assert len(alone) < 65


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_what_the_training_process_reads(root: Path, method: str) -> None:
    options: dict[str, Any] = {**STEP, **KINDS["schedule"], "streams": streams(root)}
    here = [batch["id"].tolist() for batch in make_loader(None, **options)]
    loader = make_loader(None, workers=2, loader={"multiprocessing_context": method}, **options)
    assert [batch["id"].tolist() for batch in loader] == here
    loader.close()


def documents_of(batches: Any) -> set[int]:
    return {int(token) // 250 for batch in batches for token in batch["input_ids"][batch["document_ids"] >= 0]}


def test_packs_are_made_of_what_a_step_leaves(tmp_path: Path) -> None:
    train = packed_train(write_documents(tmp_path), sequence=[EveryNth(2)])
    epochs = packed_loader(train, 2)
    first, second = documents_of(epochs), documents_of(epochs)
    assert (len(first), len(second)) == (64, 64)
    assert first != second
    assert_resumes_packed(train)


def assert_resumes_packed(train: dict[str, Any]) -> None:
    loader, read, states = packed_loader(train, 2), list[Any](), list[Any]()
    for batch in loader:
        states.append(json_copy(loader.state_dict()))
        read += batch["input_ids"].tolist()
    resumed = packed_loader(train, 3)
    resumed.load_state_dict(states[2])
    assert [row for batch in resumed for row in batch["input_ids"].tolist()] == read[6:]


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ([EveryNth(2)], [], "examples.every_nth.EveryNth"),
        ([], [EveryNth(2)], "examples.every_nth.EveryNth"),
        ([EveryNth(2)], [EveryNth(3)], "sequence.0.arguments.n: saved 2, now 3"),
        ([EveryNth(2)], [EveryNth(2), EveryNth(1)], "sequence.1"),
    ],
)
def test_a_position_of_other_steps_is_refused(root: Path, then: Any, now: Any, words: str) -> None:
    loader = make_loader(root / "a", sequence=then)
    next(iter(loader))
    state = json_copy(loader.state_dict())
    other = make_loader(root / "a", sequence=now)
    other.load_state_dict(state)
    with pytest.raises(StateMismatchError) as caught:
        next(iter(other))
    assert words in str(caught.value)


def test_a_position_of_another_version_is_refused(root: Path) -> None:
    class Newer(EveryNth):
        version = 2

    Newer.__module__, Newer.__qualname__ = EveryNth.__module__, EveryNth.__qualname__
    loader, other = make_loader(root / "a", sequence=[EveryNth(2)]), make_loader(root / "a", sequence=[Newer(2)])
    next(iter(loader))
    other.load_state_dict(json_copy(loader.state_dict()))
    with pytest.raises(StateMismatchError, match=r"sequence\.0\.version: saved 1, now 2"):
        next(iter(other))


def test_tools_count_what_a_step_leaves(root: Path) -> None:
    options: dict[str, Any] = {**STEP, **KINDS["schedule"], "streams": streams(root)}
    loader, read = make_loader(None, **options), list[int]()
    for batch in loader:
        read += batch["id"].tolist()
        if len(read) == 44:
            break
    described = describe_run(make_dataset(**options), position=read_state(loader.state_dict()))
    counts = described.read_before(described.run.normalise(Cursor(0, 44)), NOTHING_SKIPPED).samples
    assert counts == {"a": sum(number < 1000 for number in read), "b": sum(number >= 1000 for number in read)}


def test_a_phase_that_is_ended_and_steps_exclude_each_other(root: Path) -> None:
    ended = {"one": {"end": 40, "ended_at": 20, "mix": {"a": 1, "b": 1}}, "two": {"mix": {"b": 1}}}
    with assert_error(ConfigError, option="schedule.one.ended_at"):
        make_dataset(streams=streams(root), schedule=ended, epoch_size=80, sequence=[EveryNth(2)])


def test_a_configuration_says_which_steps_there_are(root: Path) -> None:
    dataset = make_dataset(root / "a", sequence=[EveryNth(2)])
    (step,) = dataset.config()["sequence"]
    assert step == {"class": "examples.every_nth.EveryNth", "version": 1, "arguments": {"n": 2}}
    assert list(StreamingDataLoader(StreamingDataset(remote=str(root / "a"), sequence=()), 4))
