"""Batches that are composed: read, saved and gone on with through loaders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import Stream, StreamingDataLoader, World
from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.loading.cursor import Cursor
from tests.helpers import State, assert_resumes_at_every_step, ids, json_copy, make_loader, worlds, write_dataset

METHODS = ["stratified", "per_stream", "device_per_stream"]
STREAM_B = 1000
"""Ids of stream b begin here, those of stream a at 0."""


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    data = tmp_path_factory.mktemp("data")
    return write_dataset(data / "a", 67), write_dataset(data / "b", 41, first_id=STREAM_B)


def loaders(
    roots: tuple[Path, Path],
    method: str,
    num_nodes: int,
    ranks_per_node: int,
    batch_size: int,
    state: State | None = None,
    **settings: Any,
) -> list[StreamingDataLoader]:
    made = [
        make_loader(
            streams={"a": Stream(remote=str(roots[0])), "b": Stream(remote=str(roots[1]))},
            batching_method=method,
            batch_size=batch_size,
            world=world,
            **{"num_canonical_nodes": 4, **settings},
        )
        for world in worlds(num_nodes, ranks_per_node)
    ]
    for loader in made:
        if state is not None:
            loader.load_state_dict(json_copy(state))
    return made


def global_batches(ranks: Sequence[StreamingDataLoader]) -> list[list[list[int]]]:
    """The next epoch: for each step, each rank's ids."""
    return [ids(step) for step in zip(*ranks, strict=True)]


def flat(steps: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return sorted(chain.from_iterable(chain.from_iterable(steps)))


@pytest.mark.parametrize("world", [(1, 2), (2, 2)])
def test_a_global_batch_holds_each_streams_share(roots: tuple[Path, Path], world: tuple[int, int]) -> None:
    steps = global_batches(loaders(roots, "stratified", *world, batch_size=4))
    from_b = [sum(sample >= STREAM_B for sample in chain(*step)) for step in steps]
    size = 4 * world[0] * world[1]
    assert set(from_b) == {round(size * 41 / 108)}
    assert len(from_b) == 67 // (size - from_b[0]) > 2


def test_a_global_batch_is_of_one_stream(roots: tuple[Path, Path]) -> None:
    steps = global_batches(loaders(roots, "per_stream", 2, 2, batch_size=2))
    assert sorted(len({sample >= STREAM_B for sample in chain(*step)}) for step in steps) == [1] * (67 // 8 + 41 // 8)
    assert len({step[0][0] >= STREAM_B for step in steps}) == 2


def test_a_batch_of_one_rank_is_of_one_stream(roots: tuple[Path, Path]) -> None:
    steps = global_batches(loaders(roots, "device_per_stream", 2, 2, batch_size=2))
    assert all(len({sample >= STREAM_B for sample in batch}) == 1 for step in steps for batch in step)
    assert any(len({sample >= STREAM_B for sample in chain(*step)}) == 2 for step in steps)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_is_exact_at_every_step(roots: tuple[Path, Path], method: str, workers: int) -> None:
    def make() -> StreamingDataLoader:
        return loaders(roots, method, 1, 1, batch_size=16, workers=workers)[0]

    assert_resumes_at_every_step(make)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("after", [(1, 1, 8), (4, 1, 2), (1, 3, 5), (2, 4, 1), (3, 1, 4)], ids=str)
def test_an_epoch_keeps_its_batches_in_another_world(
    roots: tuple[Path, Path], method: str, after: tuple[int, int, int]
) -> None:
    whole = global_batches(loaders(roots, method, 2, 2, batch_size=2))
    for cut in (1, len(whole) // 2, len(whole) - 1):
        before = loaders(roots, method, 2, 2, batch_size=2)
        iterators = [iter(loader) for loader in before]
        read = [ids(next(one) for one in iterators) for _ in range(cut)]
        states = [loader.state_dict() for loader in before]
        assert states == [states[0]] * 4
        ranks = loaders(roots, method, *after, state=states[0])
        rest = global_batches(ranks)
        assert set(flat(read)) | set(flat(rest)) == set(flat(whole))
        repeated = len(flat(read)) + len(flat(rest)) - len(flat(whole))
        assert 0 <= repeated < after[0] * after[1]  # so that all ranks have equally many, at the very end
        if after[0] * after[1] * after[2] == 8:
            assert [sorted(chain(*step)) for step in rest] == [sorted(chain(*step)) for step in whole[cut:]]
        after_epoch = ranks[0].state_dict()
        assert (after_epoch["epoch"], after_epoch["sample_in_epoch"]) == (1, 0)
        assert "batch_geometry" not in after_epoch


@pytest.mark.parametrize("method", METHODS)
def test_the_next_epoch_has_batches_of_the_new_world(
    roots: tuple[Path, Path], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = loaders(roots, method, 2, 2, batch_size=2)
    iterators = [iter(loader) for loader in before]
    for one in iterators:
        next(one)
    ranks = loaders(roots, method, 1, 2, batch_size=8, state=before[0].state_dict())
    with caplog.at_level("WARNING"):
        global_batches(ranks)
    assert "epoch 0 goes on with global batches of 8 samples, made for 2 nodes of 2 ranks" in caplog.text
    fresh = loaders(roots, method, 1, 2, batch_size=8)
    for loader in fresh:
        loader.dataset.next_epoch = 1
    assert global_batches(ranks) == global_batches(fresh)
    assert len(ranks[0]) == len(fresh[0])


@pytest.mark.parametrize("method", METHODS)
def test_a_state_within_an_epoch_says_what_batches_are_made_for(roots: tuple[Path, Path], method: str) -> None:
    (loader,) = loaders(roots, method, 1, 1, batch_size=8)
    assert "batch_geometry" not in loader.state_dict()
    next(iter(loader))
    state = loader.state_dict()
    assert state["batch_geometry"] == {"num_nodes": 1, "ranks_per_node": 1, "batch_size": 8}
    resumed, *_ = loaders(roots, method, 2, 2, batch_size=3, state=state)
    assert resumed.state_dict() == state


@pytest.mark.parametrize("wrong", [3, {}, {"num_nodes": 1, "ranks_per_node": 0, "batch_size": 1}], ids=str)
def test_a_geometry_that_is_none_is_refused(roots: tuple[Path, Path], wrong: Any) -> None:
    (loader,) = loaders(roots, "stratified", 1, 1, batch_size=8)
    with pytest.raises(StateError):
        loader.load_state_dict({**loader.state_dict(), "batch_geometry": wrong})


@pytest.mark.parametrize("method", METHODS)
def test_a_state_of_the_reference_goes_on_with_the_batches_at_hand(roots: tuple[Path, Path], method: str) -> None:
    whole = global_batches(loaders(roots, method, 1, 2, batch_size=4))
    state = {"epoch": 0, "sample_in_epoch": 16, "num_canonical_nodes": 4, "shuffle_seed": 9176}
    assert global_batches(loaders(roots, method, 1, 2, batch_size=4, state=state)) == whole[2:]


@pytest.mark.parametrize("method", METHODS)
def test_a_dataset_that_composes_batches_must_know_their_size(roots: tuple[Path, Path], method: str) -> None:
    loader = make_loader(str(roots[0]), batching_method=method, loader={"batch_size": 4}, batch_size=None)
    with pytest.raises(ConfigError, match="batch_size="):
        loader.dataset.state_dict()
    assert len(loader)
    assert loader.dataset.state_dict()["sample_in_epoch"] == 0


def test_a_stream_too_small_for_a_batch_is_refused(roots: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="too few for one global batch of 64"):
        len(loaders(roots, "per_stream", 1, 1, batch_size=64)[0])


def test_a_device_batch_needs_whole_canonical_nodes(roots: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="multiple of the 3 nodes"):
        len(
            make_loader(
                str(roots[0]), batching_method="device_per_stream", num_canonical_nodes=4, world=World(num_nodes=3)
            )
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_place_in_an_epoch_that_was_left_keeps_its_batches(roots: tuple[Path, Path], method: str) -> None:
    # A trainer that fetches ahead, or accumulates, may stand in an epoch that its loader has left.
    before, *_ = loaders(roots, method, 1, 1, batch_size=8)
    next(iter(before))
    (loader,) = loaders(roots, method, 1, 1, batch_size=5, state=before.state_dict())
    assert len(ids(loader)) > 1
    place = Cursor(0, 40)
    saved = loader.dataset.state_at(place)
    assert saved["batch_geometry"]["batch_size"] == 8
    next(iter(loader))
    assert loader.dataset.state_at(place) == saved
