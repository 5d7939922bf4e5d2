"""The loader as torch's DataLoader, and as one that knows its place."""

from __future__ import annotations

import inspect
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from lightning_streaming import StreamingDataLoader, World
from lightning_streaming.errors import ConfigError, SampleError
from lightning_streaming.reading.position import position_of, run_of
from lightning_streaming.resume.state import Cursor
from tests.helpers import assert_error, ids, make_dataset, make_loader, raises, read_epochs, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


def _without(collate_into: Any) -> Any:
    return lambda samples: collate_into


def test_it_is_a_torch_data_loader_and_takes_its_arguments(root: Path) -> None:
    loader = make_loader(root, loader={"collate_fn": len})
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (4, 0, False)
    assert list(loader) == [4, 4, 4, 4, 4, 4, 4, 1]


def test_batches_are_what_default_collate_makes_of_the_samples(root: Path) -> None:
    dataset = make_dataset(root)
    first = next(iter(StreamingDataLoader(dataset)))
    samples = dataset[first["id"].tolist()]
    assert torch.equal(first["id"], default_collate(samples)["id"])


def test_the_batch_size_comes_from_dataset_or_loader(root: Path) -> None:
    assert len(StreamingDataLoader(make_dataset(root, batch_size=None), batch_size=8)) == 4
    assert len(StreamingDataLoader(make_dataset(root, batch_size=8))) == 4
    assert len(StreamingDataLoader(make_dataset(root, batch_size=8), batch_size=8)) == 4


@pytest.mark.parametrize(
    ("dataset_says", "arguments", "words"),
    [
        (None, {}, "pass batch_size="),
        (4, {"batch_size": 8}, "batch_size=4 and the loader with 8"),
        (4, {"shuffle": True}, "shuffle=True there"),
        (4, {"in_order": False}, "in order"),
        (4, {"drop_last": "false"}, "drop_last must be True or False, but got 'false'"),
        (4, {"fixed_epoch": "no"}, "fixed_epoch must be True or False"),
        (4, {"return_keys": "train"}, "return_keys must be True or False"),
        (4, {"return_valid_mask": ["val"]}, "return_valid_mask must be True or False"),
    ],
)
def test_what_cannot_work_is_refused(
    root: Path, dataset_says: int | None, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        StreamingDataLoader(make_dataset(root, batch_size=dataset_says), **arguments)


def test_shuffle_false_is_what_torch_wants_and_harmless(root: Path) -> None:
    assert len(StreamingDataLoader(make_dataset(root), shuffle=False)) == 8


@WORKERS
def test_a_state_loaded_between_iter_and_next_is_honoured(root: Path, workers: int) -> None:
    batches, states = read_epochs(make_loader(root), 1)
    loader = make_loader(root, workers=workers)
    iterator = iter(loader)
    loader.load_state_dict(states[5])
    assert ids(iterator) == batches[5:]


@WORKERS
def test_an_iterator_that_is_never_used_takes_nothing(root: Path, workers: int) -> None:
    loader = make_loader(root, workers=workers)
    before = loader.state_dict()
    iter(loader)
    unused = iter(loader)
    assert loader.state_dict() == before
    assert ids(loader) == ids(make_loader(root))
    assert ids(unused) == read_epochs(make_loader(root), 2)[0][8:]  # it begins when it is first asked


@WORKERS
def test_leaving_a_pass_early_begins_the_next_epoch(root: Path, workers: int) -> None:
    batches, states = read_epochs(make_loader(root), 2)
    loader = make_loader(root, workers=workers, loader={"persistent_workers": workers > 0})
    assert ids([next(iter(loader))]) == batches[:1]
    assert loader.state_dict() == states[1]
    assert ids(loader) == batches[8:]


@WORKERS
def test_of_two_iterators_the_later_one_counts_and_the_other_is_told(root: Path, workers: int) -> None:
    batches, _ = read_epochs(make_loader(root), 2)
    loader = make_loader(root, workers=workers, loader={"persistent_workers": workers > 0})
    first, second = iter(loader), iter(loader)
    assert ids([next(first), next(first), next(second)]) == [*batches[:2], batches[8]]
    with raises(ConfigError, "another pass over this loader has begun", "make a second loader"):
        next(first)
    assert ids(second) == batches[9:]


def test_a_finished_pass_stays_finished(root: Path) -> None:
    iterator = iter(make_loader(root))
    assert len(list(iterator)) == 8
    assert next(iterator, None) is None


@pytest.mark.rotate(3)
@WORKERS
@pytest.mark.parametrize("collated", [None, "text", 7, [], {}, ()])
def test_counting_does_not_look_into_batches(root: Path, workers: int, collated: Any) -> None:
    loader = make_loader(root, workers=workers, loader={"collate_fn": _without(collated)})
    places = [loader.state_dict()["sample_in_epoch"] for batch in loader if batch == collated]
    assert places == [4, 8, 12, 16, 20, 24, 28, 0]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 29, 30])
def test_len_is_exact_and_the_same_after_a_resume(root: Path, batch_size: int, drop_last: bool) -> None:
    loader = make_loader(root, batch_size=batch_size, drop_last=drop_last)
    length = len(loader)
    assert length == 29 // batch_size + (0 if drop_last or 29 % batch_size == 0 else 1)
    assert len(ids(loader)) == length
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "sample_in_epoch": 17})
    assert len(loader) == length


def test_len_is_exact_where_canonical_nodes_make_an_epoch_longer(root: Path) -> None:
    loader = make_loader(root, shuffle_algo="py1s")  # 64 canonical nodes, each of one sample
    assert len(loader) == len(ids(loader)) == 16


def test_batches_are_claimed_in_the_order_they_were_handed_out(root: Path) -> None:
    loader = make_loader(root)
    assert position_of(loader).claim() is None
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    assert position_of(loader).claim() == Cursor(0, 4)
    next(iterator)
    assert [position_of(loader).claim(), position_of(loader).claim(), position_of(loader).claim()] == [
        Cursor(0, 8),
        Cursor(0, 12),
        None,
    ]


def test_the_last_batch_ends_where_the_next_epoch_begins(root: Path) -> None:
    loader = make_loader(root)
    assert len(ids(loader)) == 8
    ends = [position_of(loader).claim() for _ in range(8)]
    assert ends[-2:] == [Cursor(0, 28), Cursor(1, 0)]
    assert position_of(loader).cursor() == Cursor(1, 0)


@pytest.mark.parametrize("at_once", [1, 3, 7, 8])
def test_ends_are_the_same_however_many_are_worked_out_together(
    root: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("lightning_streaming.reading.loader._AT_ONCE", at_once)
    loader = make_loader(root)
    assert len(ids(loader)) == 8
    assert [position_of(loader).claim() for _ in range(8)] == [
        *(Cursor(0, 4 * batch) for batch in range(1, 8)),
        Cursor(1, 0),
    ]


def test_batches_may_be_claimed_when_the_next_pass_has_begun(root: Path) -> None:
    loader = make_loader(root)
    next(iter(loader))
    next(iter(loader))
    assert [position_of(loader).claim(), position_of(loader).claim(), position_of(loader).claim()] == [
        Cursor(0, 4),
        Cursor(1, 4),
        None,
    ]


@pytest.mark.parametrize("move", ["load_state_dict", "seek", "close"])
def test_moving_a_loader_ends_its_pass_and_forgets_unclaimed_batches(root: Path, move: str) -> None:
    loader = make_loader(root)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    moves: dict[str, Callable[[], None]] = {
        "load_state_dict": lambda: loader.load_state_dict(state),
        "seek": lambda: position_of(loader).seek(Cursor(1, 0)),
        "close": loader.close,
    }
    moves[move]()
    assert (position_of(loader).claim(), next(iterator, None)) == (None, None)


@WORKERS
def test_a_loader_for_evaluation_repeats_its_epoch(root: Path, workers: int) -> None:
    loader = make_loader(root, workers=workers, loader={"fixed_epoch": True, "persistent_workers": workers > 0})
    assert ids([next(iter(loader))]) == ids(make_loader(root))[:1]
    assert ids(loader) == ids(loader) == ids(make_loader(root))


def test_seek_moves_the_next_pass(root: Path) -> None:
    batches, _ = read_epochs(make_loader(root), 2)
    loader = make_loader(root)
    next(iter(loader))
    position_of(loader).seek(Cursor(1, 8))
    assert (position_of(loader).cursor(), position_of(loader).claim()) == (Cursor(1, 8), None)
    assert ids(loader) == batches[10:]


def test_the_end_of_an_epoch_is_the_beginning_of_the_next(root: Path) -> None:
    loader = make_loader(root, world=World(ranks_per_node=4))  # which read 32, three of them twice
    assert [position_of(loader).normalised(Cursor(2, place)) for place in (28, 29, 32)] == [
        Cursor(2, 28),
        Cursor(3, 0),
        Cursor(3, 0),
    ]


def test_batches_left_and_global_batches_are_counted_over_ranks(root: Path) -> None:
    loader = make_loader(root, world=World(ranks_per_node=2))
    assert position_of(loader).samples_per_global_batch == 8
    assert [run_of(loader).batches_left(Cursor(0, place)) for place in (0, 8, 20, 28)] == [4, 3, 2, 1]


@WORKERS
def test_two_loaders_over_one_dataset_do_not_disturb_each_other(root: Path, workers: int) -> None:
    batches, _ = read_epochs(make_loader(root), 2)
    dataset = make_dataset(root)
    first, second = (
        StreamingDataLoader(dataset, num_workers=workers, persistent_workers=workers > 0) for _ in range(2)
    )
    pairs = list(zip(first, second, strict=True))
    assert ids(pair[0] for pair in pairs) == batches[:8]
    assert ids(pair[1] for pair in pairs) == batches[8:]


def test_a_worker_that_is_late_reads_the_pass_of_its_own_loader(root: Path) -> None:
    batches, _ = read_epochs(make_loader(root), 2)
    dataset = make_dataset(root)
    first = StreamingDataLoader(dataset, num_workers=2, worker_init_fn=lambda worker: time.sleep(0.3 * worker))
    iterator = iter(first)
    read = ids([next(iterator)])
    assert ids(StreamingDataLoader(dataset, num_workers=2)) == batches[8:]  # begun while a worker of the first sleeps
    assert read + ids(iterator) == batches[:8]


@pytest.mark.rotate(1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_may_be_started_in_any_way(root: Path, method: str) -> None:
    batches, states = read_epochs(make_loader(root), 3)
    arguments = {"multiprocessing_context": method, "persistent_workers": True, "worker_init_fn": _check_worker}
    loader = make_loader(root, workers=1, loader=arguments)
    loader.load_state_dict(states[3])
    read = ids(loader) + ids(loader)
    loader.load_state_dict(states[20])
    assert (read, ids(loader)) == (batches[3:16], batches[20:])


def _check_worker(worker: int) -> None:
    assert worker == 0


def test_the_users_worker_init_fn_runs_too_and_stays_the_users(root: Path) -> None:
    def change_ids(worker: int) -> None:
        info: Any = get_worker_info()
        info.dataset.transform = lambda sample: {"id": -1 - worker}

    loader = make_loader(root, workers=2, loader={"worker_init_fn": change_ids})
    assert {one for batch in ids(loader) for one in batch} == {-1, -2}
    assert loader.worker_init_fn is change_ids


def test_persistent_workers_outlive_the_thread_that_started_them(root: Path) -> None:
    batches, _ = read_epochs(make_loader(root), 2)
    loader = make_loader(root, workers=2, loader={"persistent_workers": True})
    read: list[list[int]] = []
    thread = threading.Thread(target=lambda: read.extend(ids(loader)))
    thread.start()
    thread.join()
    assert read + ids(loader) == batches


@WORKERS
def test_a_collate_function_that_stops_the_iteration_is_found_out(root: Path, workers: int) -> None:
    loader = make_loader(root, workers=workers, loader={"collate_fn": lambda samples: next(iter([]))})
    with raises(SampleError, "failed on a batch: StopIteration"):
        ids(loader)


@WORKERS
def test_a_closed_loader_gives_up_its_pass_and_can_begin_another(root: Path, workers: int) -> None:
    loader = make_loader(root, workers=workers)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert next(iterator, None) is None
    assert len(ids(loader)) == 8


class _NotPickled(StreamingDataLoader):
    """A loader of a user's, which cannot be pickled whole."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["generator"]
        return state


@WORKERS
def test_what_a_subclass_pickles_of_itself_is_its_own_affair(root: Path, workers: int) -> None:
    loader = _NotPickled(make_dataset(root), batch_size=4, num_workers=workers)
    assert len(ids(loader)) == 8
    loader.close()


@WORKERS
def test_a_loader_that_was_read_can_be_pickled(root: Path, workers: int) -> None:
    loader = make_loader(root, workers=workers)
    assert len(ids(loader)) == 8
    assert len(ids(pickle.loads(pickle.dumps(loader)))) == 8
    loader.close()


@WORKERS
def test_a_look_at_the_data_by_others_leaves_the_place_of_a_loader(root: Path, workers: int) -> None:
    loader = make_loader(root, batch_size=4, workers=workers)
    under_way = iter(loader)
    for _ in range(3):
        next(under_way)
    place = loader.state_dict()
    other = StreamingDataLoader(loader.dataset, batch_size=4)
    next(iter(other))
    assert loader.state_dict() == place
    next(iter(loader.dataset))
    assert loader.state_dict() == place
    loader.close()


def test_a_dataset_knows_where_its_loader_is_until_it_is_moved(root: Path) -> None:
    loader = make_loader(root, batch_size=4)
    under_way = iter(loader)
    for _ in range(3):
        next(under_way)
    saved = loader.dataset.state_dict()
    assert saved == loader.state_dict()
    loader.dataset.load_state_dict({**saved, "sample_in_epoch": 4})
    next(under_way)
    assert loader.dataset.state_dict()["sample_in_epoch"] == 4


def test_a_dataset_knows_the_later_of_two_passes_that_began_alike(root: Path) -> None:
    dataset = make_dataset(root)
    first, second = (iter(StreamingDataLoader(dataset)) for _ in range(2))
    begins = dataset.state_dict()
    next(first)
    dataset.load_state_dict(begins)
    next(second)
    next(first)
    assert dataset.state_dict()["sample_in_epoch"] == 4


def test_a_dataset_forgets_its_loader_when_workers_of_another_begin(root: Path) -> None:
    dataset = make_dataset(root)
    next(iter(StreamingDataLoader(dataset)))
    assert dataset.state_dict()["sample_in_epoch"] == 4
    next(iter(DataLoader(dataset, batch_size=4, num_workers=1)))
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["sample_in_epoch"]) == (1, 0)


@pytest.mark.parametrize("option", ["sampler", "batch_sampler"])
def test_samplers_are_refused(root: Path, option: str) -> None:
    arguments: Any = {option: [0, 1]}
    with assert_error(ConfigError, option=option):
        StreamingDataLoader(make_dataset(root), **arguments)


def test_a_loader_takes_each_argument_of_the_loader_of_torch(root: Path) -> None:
    own = inspect.signature(StreamingDataLoader).parameters
    assert own.keys() >= inspect.signature(DataLoader).parameters.keys()
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
    generator = torch.Generator()
    loader = StreamingDataLoader(
        make_dataset(root, batch_size=None),
        4,
        num_workers=2,
        drop_last=True,
        prefetch_factor=3,
        persistent_workers=True,
        multiprocessing_context="spawn",
        timeout=5,
        worker_init_fn=print,
        generator=generator,
    )
    passed = (loader.num_workers, loader.drop_last, loader.prefetch_factor, loader.timeout)
    assert passed == (2, True, 3, 5)
    assert (loader.persistent_workers, loader.worker_init_fn, loader.generator) == (True, print, generator)
    assert loader.multiprocessing_context.get_start_method() == "spawn"
