"""Stopping after every batch and going on in a fresh loader, in every way to read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import Stream, World
from tests.helpers import assert_resumes_at_every_step, ids, json_copy, make_loader, read_epochs, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 samples, which batches of 4 divide and batches of 5 do not."""
    return write_dataset(tmp_path_factory.mktemp("data") / "a", 28)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "b", 9, first_id=100)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 28])
def test_resumes_with_any_batch_size(root: Path, batch_size: int, drop_last: bool) -> None:
    assert_resumes_at_every_step(partial(make_loader, root, batch_size=batch_size, drop_last=drop_last))


def test_resumes_where_a_batch_is_larger_than_the_epoch(root: Path) -> None:
    assert_resumes_at_every_step(partial(make_loader, root, batch_size=40))


@pytest.mark.parametrize("algo", ["py1e", "py1s", "naive"])
@pytest.mark.parametrize("canonical_nodes", [None, 3])
def test_resumes_with_any_shuffle(root: Path, algo: str, canonical_nodes: int | None) -> None:
    order: dict[str, Any] = {"shuffle_algo": algo, "num_canonical_nodes": canonical_nodes}
    assert_resumes_at_every_step(partial(make_loader, root, batch_size=5, **order))


def test_resumes_without_shuffle(root: Path) -> None:
    assert_resumes_at_every_step(partial(make_loader, root, shuffle=False, batch_size=5))


@pytest.mark.parametrize(
    ("weights", "settings"),
    [
        ([{"repeat": 0.5}, {"repeat": 1.5}], {}),
        ([{"repeat": 0.5}, {"repeat": 1.5}], {"sampling_method": "fixed", "sampling_granularity": 3}),
        ([{"choose": 3}, {"choose": 20}], {"shuffle": False}),
        ([{"proportion": 0.3}, {"proportion": 0.7}], {}),
        ([{"proportion": 0.3}, {"proportion": 0.7}], {"epoch_size": "0.1k", "batch_size": 8}),
        ([{}, {}], {"epoch_size": 30}),
    ],
)
def test_resumes_weighted_streams(
    root: Path, other: Path, weights: list[dict[str, Any]], settings: dict[str, Any]
) -> None:
    streams = [Stream(remote=str(path), **weight) for path, weight in zip((root, other), weights, strict=True)]
    assert_resumes_at_every_step(partial(make_loader, streams=streams, **settings))


@pytest.mark.parametrize(
    ("persistent", "drop_last", "batch_size"), [(False, False, 5), (True, True, 5), (True, False, 4)]
)
def test_resumes_with_workers(root: Path, persistent: bool, drop_last: bool, batch_size: int) -> None:
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "drop_last": drop_last,
        "loader": {"persistent_workers": persistent},
    }
    assert_resumes_at_every_step(partial(make_loader, root, workers=2, **settings))


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_resumes_with_another_number_of_workers(root: Path, before: int, after: int) -> None:
    assert_resumes_at_every_step(
        partial(make_loader, root, workers=before, batch_size=5),
        partial(make_loader, root, workers=after, batch_size=5),
    )


def test_a_pass_may_be_stopped_and_resumed_after_every_single_batch(root: Path) -> None:
    batches, states = read_epochs(make_loader(root), 2)
    state, again = states[0], []
    for _ in batches:
        loader = make_loader(root)
        loader.load_state_dict(json_copy(state))
        again += ids([next(iter(loader))])
        state = loader.state_dict()
    assert (again, state) == (batches, states[-1])


def test_another_batch_size_goes_on_with_the_next_sample(root: Path) -> None:
    batches, states = read_epochs(make_loader(root), 2)
    sequence = [one for batch in batches for one in batch]
    for state in states:
        loader = make_loader(root, batch_size=5)
        loader.load_state_dict(state)
        rest, _ = read_epochs(loader, 2)
        assert [one for batch in rest for one in batch] == sequence[state["epoch"] * 28 + state["sample_in_epoch"] :]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_in_use_is_put_back_by_its_own_state(root: Path, workers: int) -> None:
    loader = make_loader(root, workers=workers, loader={"persistent_workers": workers > 0})
    batches, states = read_epochs(loader, 2)
    for place in (3, 0, 9):
        loader.load_state_dict(states[place])
        assert read_epochs(loader, 2) == (batches[place:], states[place:])


def test_settings_settled_before_the_load_give_way_to_the_saved_ones(root: Path) -> None:
    # The block size follows from the canonical nodes, which follow from the nodes: here 2 before and 1 now.
    settings: dict[str, Any] = {"shuffle_block_size": None, "batch_size": 2}
    state = make_loader(root, world=World(num_nodes=2), **settings).state_dict()
    loader = make_loader(root, world=World(), **settings)
    assert len(loader) == 14  # settles what is asked for one node
    loader.load_state_dict(state)
    assert len(ids(loader)) == 14
