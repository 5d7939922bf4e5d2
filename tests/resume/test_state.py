"""The saved position: what it holds, what is accepted, and what is refused in words.

States with one thing wrong are refused in words, or mean what they say; nothing else is raised, nothing hangs.

A state put back and taken again without a batch between is the same state, whatever the workers are at.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_streaming import Stream, StreamingDataLoader, World, __version__
from lightning_streaming.errors import ConfigError, StateError, StateMismatchError
from lightning_streaming.reading.position import position_of
from lightning_streaming.resume.state import STATE_VERSION, SavedTrainer, SavedValidation, read_run, read_state
from tests.dataset.mutated import mutations
from tests.helpers import State, ids, json_copy, make_dataset, make_loader, read_epochs, write_dataset, write_shards
from tests.reading.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

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
    fingerprint, streams = state.pop("fingerprint"), state.pop("stream_list")
    assert state == {
        "version": 2,
        "library_version": __version__,
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


@pytest.mark.rotate(1)
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
        ({"version": 3}, "version 3, and this release reads versions up to 2"),
        ({"version": 0}, "version 0, and versions are whole numbers"),
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
    assert 'on_mismatch="warn"' in str(caught.value)


def test_shards_cut_elsewhere_are_other_data(root: Path, tmp_path: Path, state: State) -> None:
    loader = make_loader(write_shards(tmp_path / "b", [10, 10, 9]))
    loader.load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"streams\.0\.shards +6 +3"):
        len(loader)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"b": 1, "a": 1}, r"streams\.a\.index +0 +1"),
        ({"a": 1}, r"streams\.b +29 samples +'absent'"),
        ({"a": 1, "c": 1}, r"streams\.c +'absent' +29 samples"),
        ({"a": 1, "b": 0.5}, r"streams\.b\.samples_drawn +29 +14"),
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
    loader.load_state_dict(state, on_mismatch="warn")
    with caplog.at_level(logging.WARNING):
        assert ids(loader) == ids(make_loader(root, shuffle_algo="naive"))[1:]
    assert caplog.text.count("order.shuffle_algo: saved 'py1e', now 'naive'") == 1


@pytest.mark.parametrize("on_mismatch", ["Warn", "ignore", None])
def test_another_on_change_is_refused(root: Path, state: State, on_mismatch: Any) -> None:
    with pytest.raises(ConfigError, match="on_mismatch must be one of error, warn"):
        make_loader(root).load_state_dict(state, on_mismatch)


def test_a_refused_state_can_be_replaced(root: Path, state: State) -> None:
    loader = make_loader(root, shuffle_algo="naive")
    loader.load_state_dict(state)
    with pytest.raises(StateMismatchError):
        len(loader)
    loader.load_state_dict(FIVE)
    assert len(ids(loader)) == 6


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
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    write_dataset(data / "a")
    write_dataset(data / "b", 12, first_id=100)
    return data


def maker(data: Path, repeats: int = 0, **settings: Any) -> Make:
    streams = {name: Stream(remote=str(data / name)) for name in ("a", "b")}
    streams |= {f"b{number}": Stream(remote=str(data / "b")) for number in range(repeats)}
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


@pytest.mark.rotate(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_one_thing_wrong_is_refused_or_means_what_it_says(data: Path, kind: str) -> None:
    make = maker(data, **KINDS[kind])
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
    data: Path, method: str, canonical: int
) -> None:
    def make() -> StreamingDataLoader:
        return make_loader(data / "b", batch_size=13, batching_method=method, num_canonical_nodes=canonical)

    batches = iter(loader := make())
    next(batches)  # of 12 samples, which the canonical nodes repeat
    again = make()
    again.load_state_dict(loader.state_dict())
    assert [ids([batch]) for batch in again] == [ids([batch]) for batch in batches]


@pytest.mark.parametrize("kind", ["random", "stratified", "skipped", "many streams"])
def test_what_is_refused_when_it_is_loaded_changes_nothing(data: Path, kind: str) -> None:
    make = maker(data, **KINDS[kind])
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
        (
            {"batch_geometry": {"num_nodes": 2**20, "ranks_per_node": 2**20, "batch_size": 1}},
            "'ranks_per_node' of 'batch_geometry' of a saved position",
        ),
        ({"skipped": {"five": [0, 0, 0, 4]}}, "a range of batches is written like '12-20', but got 'five'"),
        ({"skipped": {"5": [0, 0, 4]}}, "'5' of 'skipped' of a saved position must be a list of 4 whole numbers"),
        ({"skipped": {"5": [0, 0, 9, 4]}}, "'5' of 'skipped'"),
        ({"skipped": {"5": [0, 8, 0, 4]}}, "'5' of 'skipped'"),
        ({"skipped": {"5": [0, 8, 0, 10**9]}}, "'5' at sample 1000000000 of an epoch of 41"),
        ({"skipped": {"5": [0, 10**9, 1, 0]}}, "'5' at sample 1000000000 of an epoch of 41"),
        ({"fingerprint": {"order": {}}}, "'fingerprint' of a saved position needs 'streams'"),
        ({"fingerprint": {"order": [], "streams": {}}}, "'order' of 'fingerprint' of a saved position is a dict"),
        (
            {"stream_list": {"hashes": "", "width": 4, "digests": "?"}},
            "'digests' of 'stream_list' of a saved position must be B",
        ),
        (
            {"x" * 5000: 1, "epoch": "y" * 5000},
            r"is 'y+\.\.\.y+'; the state was edited or damaged; resume from another",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_the_error_names_the_field_what_was_found_and_the_way_out(data: Path, change: State, words: str) -> None:
    make = maker(data)
    with pytest.raises(StateError, match=words) as caught:
        make().load_state_dict({**saved(make), **change})
    assert "resume from another checkpoint" in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("batches", "in_epoch"), [(0, 0), (7, 0), (7, 8), (8, 8)])
def test_a_trainer_may_stand_anywhere_in_its_epoch_and_at_its_end(data: Path, batches: int, in_epoch: int) -> None:
    run = read_run(run_state(data, batches, in_epoch))
    assert run.trainer == SavedTrainer(epoch=2, batches=batches, batches_in_epoch=in_epoch)


def test_a_trainer_beyond_the_end_of_its_epoch_is_refused(data: Path) -> None:
    with pytest.raises(StateError, match="'batches' is 9 of an epoch of 8"):
        read_run(run_state(data, 9, 8))


def test_a_validation_that_was_due_is_read_and_checked(data: Path) -> None:
    state = run_state(data, 7, 8)
    assert read_run(state).validation == SavedValidation()
    assert read_run({**state, "validation": {"is_due": True, "done_after": 6}}).validation.is_due
    for wrong, of in (({"is_due": 1, "done_after": 0}, "'is_due' of"), ({"is_due": True, "done_after": -1}, "'done_")):
        with pytest.raises(StateError, match=of):
            read_run({**state, "validation": wrong})


def run_state(data: Path, batches: int, in_epoch: int) -> State:
    """What the callback saves of one train loader."""
    trainer = {"epoch": 2, "batches": batches, "batches_in_epoch": in_epoch}
    return {"version": STATE_VERSION, "trainer": trainer, "loaders": {"train": saved(maker(data))}}


@pytest.mark.parametrize("nodes", [2**16 + 1, 10**6])
def test_many_times_more_canonical_nodes_than_samples_are_refused_once_the_data_is_known(
    data: Path, nodes: int
) -> None:
    loader = make_loader(data / "a")
    loader.load_state_dict({**OF_THE_REFERENCE, "num_canonical_nodes": nodes})
    with pytest.raises(StateError, match=f"'num_canonical_nodes' of the saved position is {nodes}, and an epoch of 29"):
        next(iter(loader))
    with pytest.raises(ConfigError, match=f"num_canonical_nodes is {nodes}.*set it lower"):
        len(make_loader(data / "a", num_canonical_nodes=nodes))


def test_as_many_as_a_saved_state_may_have_may_be_asked_for(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_canonical_nodes must be a whole number in \[0, 1048576\]"):
        make_dataset(data / "a", num_canonical_nodes=2**20 + 1)


def test_a_state_without_what_helps_to_tell_changes_is_as_good(data: Path) -> None:
    make = maker(data)
    state = saved(make)
    rest = []
    for one in (state, {key: value for key, value in state.items() if key != "stream_list"}):
        loader = make()
        loader.load_state_dict(one)
        rest.append(ids(loader))
    assert rest[0] == rest[1]


WAYS = pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
PLACES = pytest.mark.parametrize("batches", [0, 3, 8, 11], ids=["unread", "mid-epoch", "epoch's end", "next epoch"])


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    """Two streams, of which an epoch holds 32 samples."""
    root = tmp_path_factory.mktemp("data")
    return {
        "a": Stream(remote=str(write_dataset(root / "a", 17)), repeat=1.5),
        "b": Stream(remote=str(write_dataset(root / "b", 12, first_id=100)), repeat=0.6),
    }


@contextmanager
def _loader(streams: dict[str, Stream], workers: int, persistent: bool, **more: Any) -> Iterator[StreamingDataLoader]:
    options = {"persistent_workers": persistent}
    with closing(make_loader(streams=streams, workers=workers, loader=options, **more)) as loader:
        yield loader


def _read(loader: StreamingDataLoader, batches: int) -> None:
    iterator = iter(loader)
    for _ in range(batches):
        if next(iterator, None) is None:
            iterator = iter(loader)
            next(iterator)


@pytest.mark.rotate(3)
@WAYS
@PLACES
def test_saved_restored_and_saved_is_the_same(
    streams: dict[str, Stream], workers: int, persistent: bool, batches: int
) -> None:
    with _loader(streams, workers, persistent) as loader:
        _read(loader, batches)
        state = loader.state_dict()
        loader.load_state_dict(json_copy(state))  # into the loader itself, its workers running
        assert loader.state_dict() == state
        unused = iter(loader)
        assert loader.state_dict() == state
    assert (state["epoch"], state["sample_in_epoch"]) == divmod(4 * batches, 32)
    with _loader(streams, workers, persistent) as fresh:
        for _ in range(2):
            fresh.load_state_dict(json_copy(state))
            assert fresh.state_dict() == state
        assert position_of(fresh).cursor() == position_of(loader).normalised(position_of(loader).cursor())
    del unused


@pytest.mark.parametrize("prefetch_factor", [1, 4])
def test_batches_that_workers_have_ready_do_not_count(
    streams: dict[str, Stream], tmp_path: Path, prefetch_factor: int
) -> None:
    def note(sample: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / str(sample["id"])).touch()
        return sample

    options = {"prefetch_factor": prefetch_factor, "persistent_workers": True}
    loader = make_loader(streams=streams, workers=2, transform=note, loader=options, sampling_method="fixed")
    expected, states = read_epochs(make_loader(streams=streams, sampling_method="fixed"), 1)
    with closing(loader):
        batches = iter(loader)
        assert ids([next(batches)]) == expected[:1]
        ahead = {one for batch in expected[: 2 * prefetch_factor + 1] for one in batch}
        assert wait_until(lambda: len(list(tmp_path.iterdir())) >= len(ahead))
        assert loader.state_dict() == states[1]
        loader.load_state_dict(loader.state_dict())
        assert ids(loader) == expected[1:]


def _sequence(loader: StreamingDataLoader) -> tuple[list[int], list[State]]:
    batches, states = read_epochs(loader, 2)
    return [one for batch in batches for one in batch], states


@pytest.mark.rotate(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("micro_batch", [2, 3, 8, 12, 40], ids="batch {}".format)
def test_another_micro_batch_goes_on_with_the_next_sample(
    streams: dict[str, Stream], micro_batch: int, workers: int
) -> None:
    whole, states = _sequence(make_loader(streams=streams))
    assert len(whole) == 64
    for state in (states[3], states[8], states[13]):
        given = json_copy(state)
        before = deepcopy(given)
        for _ in range(2):  # a state may be used more than once
            loader = make_loader(streams=streams, batch_size=micro_batch, workers=workers)
            loader.load_state_dict(given)
            assert loader.state_dict() == given == before
            rest, passed = _sequence(loader)
            assert rest == whole[state["epoch"] * 32 + state["sample_in_epoch"] :]
            assert (passed[-1]["epoch"], passed[-1]["sample_in_epoch"]) == (2, 0)
