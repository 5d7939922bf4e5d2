"""States with one thing wrong are refused in words, or mean what they say; nothing else is raised, nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import Stream, StreamingDataLoader
from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.loading.state import read_state
from tests.helpers import State, ids, make_dataset, make_loader, write_dataset
from tests.loading.mutated import mutations

Make = Callable[[], StreamingDataLoader]
OF_THE_REFERENCE = {
    "epoch": 1,
    "sample_in_epoch": 8,
    "shuffle_seed": 7,
    "num_canonical_nodes": 2,
    "initial_physical_nodes": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "random": {},
    "blockwise": {"shuffle_algo": "blockwise"},
    "per_stream": {"batching_method": "per_stream"},
    "stratified": {"batching_method": "stratified"},
    "device_per_stream": {"batching_method": "device_per_stream"},
    "skipped": {"skip": ["4-5", "12"]},
    "many streams": {"repeats": 32},
    "of the reference": {},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_dataset(root / "a")
    write_dataset(root / "b", 12, first_id=100)
    return root


def maker(root: Path, repeats: int = 0, **settings: Any) -> Make:
    streams = {name: Stream(remote=str(root / name)) for name in ("a", "b")}
    streams |= {f"b{number}": Stream(remote=str(root / "b")) for number in range(repeats)}
    return lambda: make_loader(streams=streams, **settings)


def saved(make: Make) -> State:
    batches = iter(loader := make())
    for _ in range(3):
        next(batches)
    return loader.state_dict()


def is_read(state: Any) -> bool:
    try:
        read_state(state)
    except StateError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_one_thing_wrong_is_refused_or_means_what_it_says(root: Path, kind: str) -> None:
    make = maker(root, **KINDS[kind])
    state: State = OF_THE_REFERENCE if kind == "of the reference" else saved(make)
    whole, outcomes = read_state(state), dict.fromkeys(("refused", "the same", "another place"), 0)
    for change, mutated in mutations(state):
        try:
            if read_state(mutated) == whole:
                outcomes["the same"] += 1
                continue
            loader = make()
            loader.load_state_dict(mutated)
            now = loader.state_dict()
            next(iter(loader))
        except StateError:
            outcomes["refused"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"{change}: {error!r}") from error
        outcomes["another place"] += 1
        assert [now[key] for key in ("shuffle_seed", "num_canonical_nodes")] == [
            mutated[key] for key in ("shuffle_seed", "num_canonical_nodes")
        ], change
        place, asked = ((one["epoch"], one["sample_in_epoch"]) for one in (now, mutated))
        assert place == asked or "skipped" in change or asked[0] == -1, change
    assert outcomes["refused"] > 4 * (outcomes["the same"] + outcomes["another place"])


@pytest.mark.parametrize("canonical", [32, 64])
@pytest.mark.parametrize("method", ["per_stream", "stratified", "device_per_stream"])
def test_a_state_of_batches_larger_than_the_samples_of_an_epoch_is_read(
    root: Path, method: str, canonical: int
) -> None:
    def make() -> StreamingDataLoader:
        return make_loader(root / "b", batch_size=13, batching_method=method, num_canonical_nodes=canonical)

    batches = iter(loader := make())
    next(batches)  # of 12 samples, which the canonical nodes repeat
    again = make()
    again.load_state_dict(loader.state_dict())
    assert [ids([batch]) for batch in again] == [ids([batch]) for batch in batches]


@pytest.mark.parametrize("kind", ["random", "stratified", "skipped", "many streams"])
def test_what_is_refused_when_it_is_loaded_changes_nothing(root: Path, kind: str) -> None:
    make = maker(root, **KINDS[kind])
    state, loader, dataset = saved(make), make(), make().dataset
    batches = iter(loader)
    next(batches)
    before, of_dataset = loader.state_dict(), dataset.state_dict()
    for _, mutated in mutations(state):
        if is_read(mutated):
            continue
        for one in (loader, dataset):
            with pytest.raises(StateError):
                one.load_state_dict(mutated)
    assert (loader.state_dict(), dataset.state_dict()) == (before, of_dataset)
    assert next(batches)  # the pass under way goes on
    assert loader.state_dict()["sample_in_epoch"] == 2 * before["sample_in_epoch"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epoch": -1}, "'epoch' of a saved position must be a whole number in"),
        ({"epoch": 2**31}, "'epoch'"),
        ({"num_canonical_nodes": 2**62}, "'num_canonical_nodes' of a saved position must be .* is 4611686018427387904"),
        ({"num_canonical_nodes": 10**9}, "'num_canonical_nodes'"),
        ({"initial_physical_nodes": 2**62}, "'initial_physical_nodes'"),
        ({"version": True}, "has version True"),
        (
            {"batch_geometry": {"num_nodes": 1, "ranks_per_node": 1}},
            "'batch_geometry' of a saved position needs 'batch",
        ),
        ({"batch_geometry": {"num_nodes": 9, "ranks_per_node": 9, "batch_size": 9}}, "batches of 729 samples, of an"),
        ({"skipped": {"five": [0, 0, 0, 4]}}, "a range of batches is written like '12-20', but one is 'five'"),
        ({"skipped": {"5": [0, 0, 4]}}, "'5' of 'skipped' of a saved position must be a list of 4 whole numbers"),
        ({"skipped": {"5": [0, 0, 9, 4]}}, "'5' of 'skipped'"),
        ({"skipped": {"5": [0, 8, 0, 4]}}, "'5' of 'skipped'"),
        ({"skipped": {"5": [0, 8, 0, 10**9]}}, "'5' at sample 1000000000 of an epoch of 41"),
        ({"fingerprint": {"order": {}}}, "'fingerprint' of a saved position needs 'streams'"),
        ({"fingerprint": {"order": [], "streams": {}}}, "'order' of 'fingerprint' of a saved position is a dict"),
        (
            {"streams": {"hashes": "", "width": 4, "digests": "?"}},
            "'digests' of 'streams' of a saved position must be B",
        ),
        ({"x" * 5000: 1, "epoch": "y" * 5000}, r"is 'y+\.\.\.y+'; the state was edited or damaged; go on from another"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_the_error_names_the_field_what_was_found_and_the_way_out(root: Path, change: State, words: str) -> None:
    make = maker(root)
    with pytest.raises(StateError, match=words) as caught:
        make().load_state_dict({**saved(make), **change})
    way_out = "resume with the release that wrote it" if "version" in change else "go on from another checkpoint"
    assert way_out in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("nodes", [2**16 + 1, 10**6])
def test_many_times_more_canonical_nodes_than_samples_are_refused_once_the_data_is_known(
    root: Path, nodes: int
) -> None:
    loader = make_loader(root / "a")
    loader.load_state_dict({**OF_THE_REFERENCE, "num_canonical_nodes": nodes})
    with pytest.raises(StateError, match=f"'num_canonical_nodes' of the saved position is {nodes}, and an epoch of 29"):
        next(iter(loader))
    with pytest.raises(ConfigError, match=f"num_canonical_nodes is {nodes}.*ask for fewer"):
        len(make_loader(root / "a", num_canonical_nodes=nodes))


def test_as_many_as_a_saved_state_may_have_may_be_asked_for(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_canonical_nodes must be a whole number in \[0, 1048576\]"):
        make_dataset(root / "a", num_canonical_nodes=2**20 + 1)


def test_a_state_without_what_helps_to_tell_changes_is_as_good(root: Path) -> None:
    make = maker(root)
    state = saved(make)
    rest = []
    for one in (state, {key: value for key, value in state.items() if key != "streams"}):
        loader = make()
        loader.load_state_dict(one)
        rest.append(ids(loader))
    assert rest[0] == rest[1]
