"""The saved position: what it holds, what is accepted, and what is refused in words."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_streaming import Stream, StreamingDataLoader, World
from lightning_streaming.errors import ConfigError, StateError, StateMismatchError
from tests.helpers import State, ids, json_copy, make_dataset, make_loader, read_epochs, write_dataset, write_shards

FIVE = {"epoch": 1, "sample_in_epoch": 8, "shuffle_seed": 7, "num_canonical_nodes": 2, "initial_physical_nodes": 2}
FOUR = {key: value for key, value in FIVE.items() if key != "initial_physical_nodes"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


@pytest.fixture
def state(root: Path) -> State:
    loader = make_loader(root)
    next(iter(loader))
    return loader.state_dict()


def test_a_state_is_the_documented_keys(state: State) -> None:
    fingerprint, streams = state.pop("fingerprint"), state.pop("streams")
    assert state == {
        "version": 1,
        "epoch": 0,
        "sample_in_epoch": 4,
        "shuffle_seed": 9176,
        "num_canonical_nodes": 1,
        "initial_physical_nodes": 1,
    }
    assert fingerprint.keys() == {"order", "streams"}
    assert streams.keys() == {"hashes", "digests", "width"}


def test_a_state_before_the_first_batch_is_the_beginning_of_epoch_0(root: Path) -> None:
    state = make_loader(root).state_dict()
    assert (state["epoch"], state["sample_in_epoch"]) == (0, 0)


def test_a_state_survives_json_and_torch_save(state: State) -> None:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state == json_copy(state)


@pytest.mark.parametrize(
    ("streams", "name"), [(1, "x" * 2000), (16, "s" * 100), (16, "s"), (1000, "s"), (1000, "s" * 60)]
)
def test_a_state_stays_small_and_still_knows_its_data(root: Path, streams: int, name: str) -> None:
    def loader(last: int) -> StreamingDataLoader:
        weights = [1] * (streams - 1) + [last]
        named = {f"{name}{i}": Stream(remote=str(root), choose=weight) for i, weight in enumerate(weights)}
        return make_loader(streams=named)

    state = loader(1).state_dict()
    assert len(json.dumps(state)) < 4096
    changed = loader(2)
    changed.load_state_dict(state)
    with pytest.raises(StateMismatchError):
        len(changed)


@pytest.mark.parametrize("ranks", [(1, 1), (1, 4), (2, 2)])
def test_a_state_is_the_same_on_every_rank(root: Path, ranks: tuple[int, int]) -> None:
    states = []
    for rank in range(ranks[0] * ranks[1]):
        loader = make_loader(root, world=World(num_nodes=ranks[0], ranks_per_node=ranks[1], rank=rank), batch_size=2)
        next(iter(loader))
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    assert states[0]["sample_in_epoch"] == 2 * len(states)


@pytest.mark.parametrize("foreign", [FIVE, FOUR])
def test_the_keys_of_the_reference_are_enough(root: Path, foreign: State) -> None:
    loader, dataset = make_loader(root), make_dataset(root)
    loader.load_state_dict(foreign)
    dataset.load_state_dict(foreign)
    saved = loader.state_dict()
    assert dataset.state_dict() == saved
    assert {**saved, **FOUR} == saved
    assert ids(loader) == read_epochs(make_loader(root, shuffle_seed=7, num_canonical_nodes=2), 2)[0][10:]


def test_the_references_epoch_minus_1_is_the_beginning(root: Path) -> None:
    loader = make_loader(root)
    loader.load_state_dict({**FOUR, "epoch": -1, "sample_in_epoch": 0, "shuffle_seed": 9176, "num_canonical_nodes": 1})
    assert ids(loader) == ids(make_loader(root))


def test_a_saved_seed_and_canonical_nodes_win_and_stay(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(root, shuffle_seed=1, num_canonical_nodes=4)
    with caplog.at_level(logging.WARNING):
        loader.load_state_dict(FIVE)
    assert "num_canonical_nodes=4 gives way to the saved 2" in caplog.text
    expected, _ = read_epochs(make_loader(root, shuffle_seed=7, num_canonical_nodes=2), 4)
    assert [batch for _ in range(3) for batch in ids(loader)] == expected[10:]


def test_defaults_give_way_without_a_word(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(root)
    assert len(loader) == 8  # settles one canonical node
    with caplog.at_level(logging.WARNING):
        loader.load_state_dict(FIVE)
        len(loader)
    assert not caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2 and this release reads version 1"),
        ({"version": "1"}, "version '1'"),
        ({"version": None}, "version None"),
        ({"epoch": -2}, "'epoch'"),
        ({"epoch": 1.0}, "'epoch'"),
        ({"epoch": True}, "'epoch'"),
        ({"epoch": 2**63}, "'epoch'"),
        ({"sample_in_epoch": -1}, "'sample_in_epoch'"),
        ({"sample_in_epoch": "8"}, "'sample_in_epoch'"),
        ({"shuffle_seed": None}, "'shuffle_seed'"),
        ({"num_canonical_nodes": 0}, "'num_canonical_nodes'"),
        ({"initial_physical_nodes": 0}, "'initial_physical_nodes'"),
        ({"fingerprint": [1]}, "'fingerprint' of a saved position is a dict, but got list"),
    ],
)
def test_what_is_no_state_is_refused_when_it_is_loaded(root: Path, state: State, change: State, words: str) -> None:
    loader = make_loader(root)
    with pytest.raises(StateError, match=words):
        loader.load_state_dict({**state, **change})
    assert ids(loader) == ids(make_loader(root))


@pytest.mark.parametrize("missing", list(FOUR))
def test_a_missing_key_is_named(root: Path, missing: str) -> None:
    with pytest.raises(StateError, match=f"needs '{missing}'"):
        make_loader(root).load_state_dict({key: value for key, value in FIVE.items() if key != missing})


@pytest.mark.parametrize("value", [None, [], "state", 3])
def test_a_state_is_a_dict(root: Path, value: Any) -> None:
    with pytest.raises(StateError, match=f"is a dict, but got {type(value).__name__}"):
        make_loader(root).load_state_dict(value)


def test_a_place_beyond_the_epoch_belongs_to_other_data(root: Path, state: State) -> None:
    loader = make_loader(root)
    loader.load_state_dict({**state, "sample_in_epoch": 31})
    with pytest.raises(StateError, match="31 samples were consumed of an epoch that has 29"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shuffle": False}, r"order\.shuffle +True +False"),
        ({"shuffle_algo": "naive"}, "order.shuffle_algo: saved 'py1e', now 'naive'"),
        ({"shuffle_block_size": 8}, "order.shuffle_block_size: saved 16, now 8"),
        ({"epoch_size": 20}, r"order\.epoch_size +29 +20"),
        ({"sampling_method": "fixed"}, "order.sampling_method: saved 'balanced', now 'fixed'"),
        ({"sampling_granularity": 2}, "order.sampling_granularity: saved 1, now 2"),
    ],
)
def test_a_changed_setting_is_named(root: Path, state: State, settings: dict[str, Any], words: str) -> None:
    loader = make_loader(root, **settings)
    loader.load_state_dict(state)
    looks: list[Callable[[StreamingDataLoader], object]] = [len, ids, StreamingDataLoader.state_dict]
    for look in looks:
        with pytest.raises(StateMismatchError, match=words):
            look(loader)


def test_all_changes_are_named_at_once_with_the_way_out(root: Path, tmp_path: Path, state: State) -> None:
    loader = make_loader(write_dataset(tmp_path / "b", 30), shuffle_algo="naive")
    loader.load_state_dict(state)
    with pytest.raises(StateMismatchError) as caught:
        len(loader)
    for row in ("order.epoch_size 29 30", "order.shuffle_algo 'py1e' 'naive'", "streams.0.samples 29 30"):
        assert row in " ".join(str(caught.value).split())
    assert 'on_change="warn"' in str(caught.value)


def test_shards_cut_elsewhere_are_other_data(root: Path, tmp_path: Path, state: State) -> None:
    loader = make_loader(write_shards(tmp_path / "b", [10, 10, 9]))
    loader.load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"streams\.0\.shards +6 +3"):
        len(loader)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"b": 1, "a": 1}, r"streams\.a\.place +0 +1"),
        ({"a": 1}, r"streams\.b +29 samples +'absent'"),
        ({"a": 1, "c": 1}, r"streams\.c +'absent' +29 samples"),
        ({"a": 1, "b": 0.5}, r"streams\.b\.samples drawn +29 +14"),
    ],
)
def test_changed_streams_are_named(root: Path, now: dict[str, float], words: str) -> None:
    def loader(repeats: dict[str, float]) -> StreamingDataLoader:
        return make_loader(streams={name: Stream(remote=str(root), repeat=times) for name, times in repeats.items()})

    changed = loader(now)
    changed.load_state_dict(loader({"a": 1, "b": 1}).state_dict())
    with pytest.raises(StateMismatchError, match=words):
        len(changed)


@pytest.mark.parametrize(
    "harmless",
    [
        {"predownload": 1},
        {"batch_size": 7},
        {"partition_algo": "orig"},
        {"transform": len},
        {"shuffle_seed": 3},
        {"num_canonical_nodes": 5},
    ],
)
def test_what_does_not_change_the_place_may_change(root: Path, state: State, harmless: dict[str, Any]) -> None:
    loader = make_loader(root, loader={"collate_fn": len}, **harmless)
    loader.load_state_dict(state)
    assert sum(loader) == 25


def test_data_that_moved_is_the_same_data(root: Path, tmp_path: Path, state: State) -> None:
    moved = make_loader(write_dataset(tmp_path / "elsewhere"))
    moved.load_state_dict(state)
    assert len(ids(moved)) == 7


def test_on_change_warn_goes_on_from_the_same_position(
    root: Path, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(root, shuffle_algo="naive")
    loader.load_state_dict(state, on_change="warn")
    with caplog.at_level(logging.WARNING):
        assert ids(loader) == ids(make_loader(root, shuffle_algo="naive"))[1:]
    assert caplog.text.count("order.shuffle_algo: saved 'py1e', now 'naive'") == 1


@pytest.mark.parametrize("on_change", ["Warn", "ignore", None])
def test_another_on_change_is_refused(root: Path, state: State, on_change: Any) -> None:
    with pytest.raises(ConfigError, match="on_change must be one of error, warn"):
        make_loader(root).load_state_dict(state, on_change)


def test_a_refused_state_can_be_replaced(root: Path, state: State) -> None:
    loader = make_loader(root, shuffle_algo="naive")
    loader.load_state_dict(state)
    with pytest.raises(StateMismatchError):
        len(loader)
    loader.load_state_dict(FIVE)
    assert len(ids(loader)) == 6
