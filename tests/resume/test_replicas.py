"""Worlds that change within an epoch, in one process: loaders get another world and a position, and read on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataLoader, World
from tests.helpers import State, make_loader, worlds, write_dataset

WORLDS = [worlds(3, 1), worlds(2, 1), worlds(5, 1), worlds(1, 1), worlds(2, 2), worlds(1, 3)]
"""One after another; all but the last for two steps."""


def divide(loaders: Sequence[StreamingDataLoader], of: Sequence[World], state: State) -> list[Any]:
    """Divide the rest of an epoch among loaders, and return their batches."""
    for loader, world in zip(loaders, of, strict=True):
        loader.dataset.world = world
        loader.load_state_dict(state)
    return [iter(loader) for loader in loaders]


def without_padding(batch: Any) -> list[int]:
    """Return the samples of a batch, without those that another rank reads too."""
    samples: list[int] = batch["id"][batch["valid"]].tolist()
    return samples


def step(batches: Sequence[Any]) -> Counter[int]:
    """Return the samples of a global batch."""
    return Counter(sample for batch in map(next, batches) for sample in without_padding(batch))


@pytest.mark.parametrize("streams", [1, 3])
def test_each_change_of_the_world_divides_the_rest_of_the_epoch(streams: int, tmp_path: Path) -> None:
    parts = [write_dataset(tmp_path / f"{number}", 160 // streams, first_id=1000 * number) for number in range(streams)]
    options: dict[str, Any] = {"streams": {root.name: {"remote": str(root)} for root in parts}}
    loaders = [make_loader(**options, world=WORLDS[0][0], loader={"return_valid_mask": True}) for _ in range(5)]
    state, counts = loaders[0].state_dict(), Counter[int]()
    samples = 160 // streams * streams
    for world in WORLDS:
        alive = loaders[: len(world)]
        batches = divide(alive, world, state)
        fresh = [make_loader(**options, world=rank, loader={"return_valid_mask": True}) for rank in world]
        for loader in fresh:
            loader.load_state_dict(state)
        whole = [list(map(without_padding, loader)) for loader in fresh]
        is_last = world is WORLDS[-1]
        for of_step in range(len(whole[0]) if is_last else 2):
            read = [without_padding(next(rest)) for rest in batches]
            assert read == [of_rank[of_step] for of_rank in whole], "as processes read that start with this state"
            counts.update(sample for samples in read for sample in samples)
        if is_last:
            assert [next(rest, None) for rest in batches] == [None] * len(batches)
        state = alive[0].state_dict()
        assert all(loader.state_dict() == state for loader in alive)
    assert state["epoch"] == 1
    assert len(counts) == samples
    assert set(counts.values()) == {1}


def with_process(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform: adds the process that runs it."""
    return {**sample, "pid": os.getpid()}


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_another_world_starts_no_worker_and_reads_no_index_again(tmp_path: Path) -> None:
    root = write_dataset(tmp_path, 100)
    options: dict[str, Any] = {"workers": 2, "loader": {"persistent_workers": True}, "transform": with_process}
    loader = make_loader(root, world=World(num_nodes=2, rank=1), **options)
    batches = iter(loader)
    processes = {*next(batches)["pid"].tolist(), *next(batches)["pid"].tolist()}
    assert len(processes) == 2
    (root / "index.json").unlink()

    (batches,) = divide([loader], [World()], loader.state_dict())
    rest = list(batches)
    assert {pid for batch in rest for pid in batch["pid"].tolist()} == processes
    assert sum(len(batch["id"]) for batch in rest) == 100 - 2 * 2 * 4
    loader.close()


def test_a_step_that_failed_is_read_again_from_the_state_before_it(tmp_path: Path) -> None:
    root = write_dataset(tmp_path, 32)
    first, second = (make_loader(root, world=rank, loader={"return_valid_mask": True}) for rank in worlds(2, 1))
    batches = [iter(first), iter(second)]
    counts = step(batches)
    state = first.state_dict()
    step(batches)  # in which the second rank dies: no rank uses it
    (rest,) = divide([first], [World()], state)
    for batch in rest:
        counts.update(batch["id"].tolist())
    assert counts == Counter(range(32))
