"""Stopping after every batch and going on in a fresh loader, in every way to read.

How workers learn where a pass begins.

Going on with other nodes, ranks, workers and batch sizes: the sequence of samples goes on as if nothing changed.

Batches that are composed: read, saved and gone on with through loaders.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import Stream, StreamingDataLoader, World
from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.reading.dataset import state_at
from lightning_streaming.reading.position import position_of, run_of
from lightning_streaming.reading.transport import PassCounter
from lightning_streaming.reading.workers import SharedEpochStart
from lightning_streaming.resume.state import Cursor, EpochStart
from lightning_streaming.sequence.partition import BatchGeometry
from tests.helpers import (
    State,
    assert_resumes_at_every_step,
    ids,
    json_copy,
    make_dataset,
    make_loader,
    read_epochs,
    read_together,
    worlds,
    write_dataset,
)
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 samples, which batches of 4 divide and batches of 5 do not."""
    return write_dataset(tmp_path_factory.mktemp("data") / "a", 28)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "b", 9, first_id=100)


@pytest.mark.rotate(4)
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


@pytest.mark.rotate(1)
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


@pytest.mark.rotate(1)
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


START = EpochStart(
    cursor=Cursor(3, 2**40),
    world=World(num_nodes=4, ranks_per_node=8, rank=31),
    batch_size=7,
    geometry=BatchGeometry(num_nodes=2, ranks_per_node=16, batch_size=3),
    shuffle_seed=2**63 - 1,
    num_canonical_nodes=64,
    shuffle_block_size=2**20,
)


def _in_child(function: Any, *arguments: Any) -> Any:
    context = get_context("fork")
    answer = context.SimpleQueue()

    def call_and_answer() -> None:
        try:
            answer.put(function(*arguments))
        except ConfigError as error:
            answer.put(error)

    child = context.Process(target=call_and_answer)
    child.start()
    value = answer.get()
    child.join()
    return value


def test_a_pass_that_begins_later_begins_at_an_epoch() -> None:
    assert [Cursor(2, 9).passes_later(passes) for passes in (0, 1, 3)] == [(2, 9), (3, 0), (5, 0)]


def test_what_is_assigned_arrives_as_it_was() -> None:
    pass_start = SharedEpochStart()
    pass_start.assign(START)
    assert pass_start.assigned() == START


def test_a_child_sees_what_is_assigned_after_it_started() -> None:
    pass_start, context = SharedEpochStart(), get_context("fork")
    told, answer = context.Event(), context.SimpleQueue()

    def wait_and_answer() -> None:
        told.wait()
        answer.put(pass_start.assigned())

    child = context.Process(target=wait_and_answer)
    child.start()
    pass_start.assign(START)
    told.set()
    assert answer.get() == START
    child.join()


def test_each_worker_counts_its_own_passes() -> None:
    counter = PassCounter()
    counter.reset(Cursor(2, 12))
    begun = [_in_child(counter.count_pass, worker) for worker in (0, 1, 0, 0)]
    assert begun == [(2, 12), (2, 12), (3, 0), (4, 0)]
    assert counter.passes_counted() == 3
    counter.reset(Cursor(0, 0))
    assert counter.passes_counted() == 0


def test_a_worker_beyond_the_last_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="up to 1024 workers"):
        PassCounter().count_pass(1024)


def test_a_copy_counts_for_itself_and_still_across_processes() -> None:
    counter = PassCounter()
    counter.reset(Cursor(1, 5))
    copied = copy.deepcopy(counter)
    assert _in_child(copied.count_pass, 0) == (1, 5)
    assert (counter.passes_counted(), copied.passes_counted()) == (0, 1)


def test_a_worker_that_begins_late_does_not_count_for_what_came_after() -> None:
    counter, context = PassCounter(), get_context("fork")
    counter.reset(Cursor(0, 0))
    told, answer = context.Event(), context.SimpleQueue()

    def wait_and_count() -> None:
        told.wait(30)
        answer.put([counter.count_pass(0), counter.passes_counted()])
        answer.put([counter.count_pass(0), counter.passes_counted()])

    child = context.Process(target=wait_and_count)
    child.start()
    counter.reset(Cursor(3, 8))
    told.set()
    assert answer.get() == [(3, 8), 0]
    assert answer.get() == [(3, 8), 1]  # of a worker that lives on
    child.join()
    assert _in_child(counter.count_pass, 1) == (3, 8)


def test_a_counter_that_is_reset_in_another_process_is_that_processs_own() -> None:
    counter = PassCounter()

    def reset_and_count() -> list[Cursor]:
        counter.reset(Cursor(4, 0))
        return [_in_child(counter.count_pass, 0), _in_child(counter.count_pass, 0)]

    assert _in_child(reset_and_count) == [(4, 0), (5, 0)]
    assert counter.passes_counted() == 0


class Launch(NamedTuple):
    """How a run is started."""

    num_nodes: int = 1
    ranks_per_node: int = 1
    batch_size: int = 2
    workers: int = 0

    def loaders(self, elastic_root: Path, state: State | None = None, **settings: Any) -> list[StreamingDataLoader]:
        start = {"batch_size": self.batch_size, "workers": self.workers, "num_canonical_nodes": 4, **settings}
        made = [
            make_loader(elastic_root, world=world, **start) for world in worlds(self.num_nodes, self.ranks_per_node)
        ]
        for loader in made:
            if state is not None:
                loader.load_state_dict(state)
        return made


@pytest.fixture(scope="module")
def elastic_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a", 30)


def _sequences(elastic_root: Path, epochs: int = 2) -> list[list[int]]:
    """The global sequence of each epoch: what one rank reads."""
    (loader,) = Launch().loaders(elastic_root)
    return [list(chain(*ids(loader))) for _ in range(epochs)]


BEFORE = [Launch(2, 2, 2), Launch(1, 3, 3), Launch(1, 1, 4, workers=2)]
AFTER = [Launch(), Launch(4, 1, 3), Launch(1, 3, 2), Launch(2, 1, 5, workers=2), Launch(2, 4, 1)]


@pytest.mark.rotate(3)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
def test_the_sequence_goes_on_in_another_world(elastic_root: Path, before: Launch, after: Launch) -> None:
    first, second = _sequences(elastic_root)
    read: list[int] = []
    for step, (samples, state) in enumerate(read_together(before.loaders(elastic_root))):
        read += samples
        if state["epoch"] == 1 or step % 2:  # every other place will do
            continue
        loaders = after.loaders(elastic_root, state)
        rest = list(chain.from_iterable(samples for samples, _ in read_together(loaders)))
        assert state["sample_in_epoch"] == len(read)
        assert (read + rest)[: len(first)] == first
        (next_samples, _), *_ = read_together(loaders)
        assert next_samples == second[: len(next_samples)]
    assert read[: len(first)] == first


def test_a_state_taken_among_repeats_goes_on_where_there_are_none(elastic_root: Path) -> None:
    # 30 samples for 4 nodes are 32 entries; from 3 on, steps of 4 come to 31, where one repeat is left.
    state = {**Launch().loaders(elastic_root, num_canonical_nodes=1)[0].state_dict(), "sample_in_epoch": 3}
    ranks = Launch(4, 1, 1).loaders(elastic_root, state, num_canonical_nodes=1)
    *_, (_, before_last), (_, last) = read_together(ranks)
    assert (before_last["epoch"], before_last["sample_in_epoch"]) == (0, 30)
    assert (last["epoch"], last["sample_in_epoch"]) == (1, 0)
    (alone,) = Launch().loaders(elastic_root, before_last, num_canonical_nodes=1)
    assert (alone.state_dict()["epoch"], alone.state_dict()["sample_in_epoch"]) == (1, 0)


def test_replicated_ranks_read_the_same_and_count_once(elastic_root: Path) -> None:
    first, _ = _sequences(elastic_root)
    ranks = Launch(1, 4, 3).loaders(elastic_root, replication=2)
    iterators = [iter(loader) for loader in ranks]
    step = ids(next(iterator) for iterator in iterators)
    assert step[0] == step[1] == first[0:6:2]
    assert step[2] == step[3] == first[1:6:2]
    state = ranks[3].state_dict()
    assert state["sample_in_epoch"] == 6
    (alone,) = Launch().loaders(elastic_root, state)
    assert list(chain(*ids(alone))) == first[6:]


@settings(deadline=None, max_examples=examples(40))
@given(
    nodes=st.sampled_from([1, 2, 4]),
    ranks=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    start=st.integers(0, 31),
    drop_last=st.booleans(),
)
def test_all_ranks_get_as_many_batches_as_promised(
    elastic_root: Path, nodes: int, ranks: int, batch_size: int, start: int, drop_last: bool
) -> None:
    state = {**Launch().loaders(elastic_root)[0].state_dict(), "sample_in_epoch": start}
    loaders = Launch(nodes, ranks, batch_size).loaders(elastic_root, drop_last=drop_last)
    whole = {len(loader) for loader in loaders}
    assert {len(ids(loader)) for loader in loaders} == whole
    for loader in loaders:
        loader.load_state_dict(state)
    left = {run_of(loader).batches_left(position_of(loader).cursor()) for loader in loaders}
    assert {len(loader) for loader in loaders} == whole
    assert {len(ids(loader)) for loader in loaders} == left
    assert len(whole) == len(left) == 1


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


@pytest.mark.rotate(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_is_exact_at_every_step(roots: tuple[Path, Path], method: str, workers: int) -> None:
    def make() -> StreamingDataLoader:
        return loaders(roots, method, 1, 1, batch_size=16, workers=workers)[0]

    assert_resumes_at_every_step(make)


@pytest.mark.rotate(2)
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
    assert "epoch 0 continues with global batches of 8 samples, composed for 2 nodes of 2 ranks" in caplog.text
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


def test_a_geometry_that_makes_no_batches_of_the_order_is_refused(roots: tuple[Path, Path]) -> None:
    (loader,) = loaders(roots, "stratified", 1, 1, batch_size=8)
    next(iter(loader))
    state = loader.state_dict()
    state["batch_geometry"]["batch_size"] = 1
    loader.load_state_dict(state)
    with pytest.raises(StateError, match=r"'batch_geometry' .*less than one sample of a global batch of 1; the state"):
        next(iter(loader))


@pytest.mark.parametrize("method", METHODS)
def test_a_state_of_the_reference_goes_on_with_the_batches_at_hand(roots: tuple[Path, Path], method: str) -> None:
    whole = global_batches(loaders(roots, method, 1, 2, batch_size=4))
    state = {"epoch": 0, "sample_in_epoch": 16, "num_canonical_nodes": 4, "shuffle_seed": 9176}
    assert global_batches(loaders(roots, method, 1, 2, batch_size=4, state=state)) == whole[2:]


@pytest.mark.parametrize("method", METHODS)
def test_a_dataset_that_composes_batches_must_know_their_size(roots: tuple[Path, Path], method: str) -> None:
    dataset = make_dataset(str(roots[0]), batching_method=method, batch_size=None)
    with pytest.raises(ConfigError, match="batch_size="):
        dataset.state_dict()
    loader = StreamingDataLoader(dataset, batch_size=4)  # which the dataset hears of
    assert dataset.state_dict() == loader.state_dict()


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
    saved = state_at(loader.dataset, place)
    assert saved["batch_geometry"]["batch_size"] == 8
    next(iter(loader))
    assert state_at(loader.dataset, place) == saved


@pytest.mark.parametrize("method", METHODS)
def test_a_copy_goes_on_with_the_batches_of_its_original(roots: tuple[Path, Path], method: str) -> None:
    streams = {name: Stream(remote=str(root)) for name, root in zip("ab", roots, strict=True)}
    world = World(ranks_per_node=2)
    loader = StreamingDataLoader(make_dataset(streams=streams, batching_method=method, world=world, skip=["5"]))
    for _ in zip(range(2), loader, strict=False):
        pass
    position_of(loader).seek(position_of(loader).cursor())
    copies = [copy.deepcopy(loader.dataset), pickle.loads(pickle.dumps(loader.dataset))]
    for dataset in (loader.dataset, *copies):
        dataset.world = World()
    expected = loader.dataset.state_dict(), ids(StreamingDataLoader(loader.dataset))
    for dataset in copies:
        assert (dataset.state_dict(), ids(StreamingDataLoader(dataset))) == expected
