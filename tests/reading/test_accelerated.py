"""Loaders and datasets in Accelerate's hands, on one process and on two: nothing is dealt out twice."""

from __future__ import annotations

import inspect
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_streaming import StreamingDataset, World
from lightning_streaming.errors import ConfigError
from tests.forked_ranks import on_ranks
from tests.helpers import make_dataset, make_loader, raises, write_dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS/MKL_NUM_THREADS unset:UserWarning"),
]

SAMPLES, EPOCHS = 29, 2
Options = dict[str, Any]
Read = list[tuple[int, list[int]]]

OPTIONS: list[Options] = [
    {},
    {"dispatch_batches": False},
    {"dispatch_batches": True},
    {"split_batches": True},
    {"even_batches": False, "use_seedable_sampler": True},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "ids", SAMPLES)


def accelerator(options: Options, **more: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options), **more)


def flat(reads: list[Read], epoch: int) -> list[int]:
    return [one for read in reads for of, batch in read if of == epoch for one in batch]


def _train(data: Path, options: Options, workers: int, folder: Path, stop_after: int | None, resume: bool) -> Read:
    """Read to the end, or until stopped and saved; from what was saved, if that is wished."""
    accelerate = accelerator(options)
    loader = accelerate.prepare(make_loader(data, batch_size=4, workers=workers))
    if resume:
        accelerate.load_state(str(folder))
    read: Read = []
    while (epoch := loader.dataset.next_epoch) < EPOCHS:
        for batch in loader:
            read.append((epoch, batch["id"].tolist()))
            if len(read) == stop_after:
                accelerate.save_state(str(folder), safe_serialization=False)
                accelerate.wait_for_everyone()  # all write the same file
                return read
    return read


def _whole_and_resumed(data: Path, directory: Path, stop_after: int) -> list[tuple[Options, int, Read, Read]]:
    """What is read in one go, and in two, with every way of Accelerate's to deal out batches."""
    made = []
    for number, options in enumerate(OPTIONS):
        workers = 2 if number < 2 else 0
        folder = directory / str(number)
        whole = _train(data, options, workers, folder, None, False)
        before = _train(data, options, workers, folder, stop_after, False)
        made.append((options, workers, whole, before + _train(data, options, workers, folder, None, True)))
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("stop_after", [3, 5], ids=["first epoch", "second epoch"])
def test_two_processes_read_each_sample_once_and_resume_exactly(data: Path, tmp_path: Path, stop_after: int) -> None:
    ranks = on_ranks(_whole_and_resumed, data, tmp_path, stop_after, meeting=tmp_path / "ranks")
    for of_first, of_second in zip(*ranks, strict=True):
        for options, workers, whole, resumed in (of_first, of_second):
            assert resumed == whole, (options, workers)
        for epoch in range(EPOCHS):
            counts = Counter(flat([of_first[2], of_second[2]], epoch))
            assert len(counts) == SAMPLES, of_first[0]
            assert counts.total() == SAMPLES + 1, "one is read twice, so that both have as many"


def _processes() -> int:
    return int(accelerator({}).num_processes)


def test_ranks_of_a_test_that_is_one_process_are_two(tmp_path: Path) -> None:
    assert _processes() == 1
    assert on_ranks(_processes, meeting=tmp_path / "ranks") == [2, 2]


def test_one_process_knows_its_place_and_resumes_exactly(data: Path, tmp_path: Path) -> None:
    loader = make_loader(data, batch_size=4)
    prepared = accelerator({}).prepare(loader)
    batches = iter(prepared)
    for _ in range(3):
        next(batches)
    assert (prepared.state_dict()["epoch"], prepared.state_dict()["sample_in_epoch"]) == (0, 12)
    for options, workers, whole, resumed in _whole_and_resumed(data, tmp_path, 3):
        assert resumed == whole, (options, workers)
        assert sorted(flat([whole], 0)) == sorted(flat([whole], 1)) == list(range(SAMPLES))


def test_an_accumulation_ends_with_the_epoch_and_batches_are_placed(data: Path) -> None:
    accelerate = accelerator({}, gradient_accumulation_steps=3)
    assert accelerate.gradient_accumulation_steps == 3
    model = torch.nn.Linear(1, 1)
    loader, model = accelerate.prepare(make_loader(data, batch_size=4), model)
    for _ in range(EPOCHS):
        synced, last = [], []
        for batch in loader:
            with accelerate.accumulate(model):
                synced.append(accelerate.sync_gradients)
                last.append(accelerate.gradient_state.end_of_dataloader)
            assert batch["id"].device == accelerate.device
        assert synced == [False, False, True, False, False, True, False, True]
        assert last == [False] * 7 + [True]
        assert not accelerate.gradient_state.in_dataloader
    for _ in loader:
        for _ in accelerate.prepare(make_loader(data, batch_size=8)):
            break
        assert accelerate.gradient_state.in_dataloader
    assert not accelerate.gradient_state.in_dataloader
    for _ in loader:
        break
    assert not accelerate.gradient_state.in_dataloader
    batches = iter(loader)
    next(batches)
    assert accelerate.gradient_state.in_dataloader
    batches.close()
    assert next(batches, None) is None
    assert not accelerate.gradient_state.in_dataloader


class Around(IterableDataset[Any]):
    """A user's dataset that reads one of ours."""

    def __init__(self, source: StreamingDataset) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


def _refused(data: Path) -> list[str]:
    """What is said to a dataset that Accelerate would deal out again."""
    said = []
    for options in OPTIONS:
        for workers in (0, 2):
            loader = accelerator(options).prepare(DataLoader(make_dataset(data), batch_size=4, num_workers=workers))
            with pytest.raises(ConfigError) as caught:
                next(iter(loader))
            said.append(str(caught.value))
    return said


def test_a_dataset_dealt_out_twice_is_refused_on_all_ranks(data: Path, tmp_path: Path) -> None:
    for said in on_ranks(_refused, data, meeting=tmp_path / "ranks"):
        assert len(said) == 2 * len(OPTIONS)
        for words in said:
            assert "dealt out twice" in words
            assert "StreamingDataLoader" in words
            assert "world=World()" in words


def _refused_within(data: Path, workers: int) -> str:
    around = Around(make_dataset(data))
    loader = accelerator({"dispatch_batches": False}).prepare(DataLoader(around, batch_size=4, num_workers=workers))
    with pytest.raises(ConfigError) as caught:
        next(iter(loader))
    return str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_within_another_is_refused_too(data: Path, tmp_path: Path, workers: int) -> None:
    for words in on_ranks(_refused_within, data, workers, meeting=tmp_path / "ranks"):
        assert "dealt out twice" in words


def _dealt_out(data: Path) -> list[tuple[Options, int, list[list[int]], list[int]]]:
    """What each rank has of a dataset that gives all; and of its second epoch what is left after two batches."""
    made = []
    for options in OPTIONS:
        for workers in (0, 2):
            dataset = make_dataset(data, batch_size=8, world=World())
            batch_size = 8 if options.get("split_batches") else 4
            if options.get("dispatch_batches", True) and not options.get("split_batches"):
                dataset = make_dataset(data, batch_size=4, world=World())
            loader = accelerator(options).prepare(DataLoader(dataset, batch_size=batch_size, num_workers=workers))
            epochs = [[one for batch in loader for one in batch["id"].tolist()] for _ in range(EPOCHS)]
            skipping = skip_first_batches(loader, 2)
            skipping.set_epoch(1)
            made.append((options, workers, epochs, [one for batch in skipping for one in batch["id"].tolist()]))
    return made


@pytest.mark.nightly
def test_a_dataset_of_one_reader_is_dealt_out_by_accelerate(data: Path, tmp_path: Path) -> None:
    ranks = on_ranks(_dealt_out, data, meeting=tmp_path / "ranks")
    for of_first, of_second in zip(*ranks, strict=True):
        for epoch in range(EPOCHS):
            assert {*of_first[2][epoch], *of_second[2][epoch]} == set(range(SAMPLES)), of_first[:2]
        for options, workers, epochs, left in (of_first, of_second):
            assert left == epochs[1][8:], (options, workers)


def test_skipping_past_a_loader_is_refused(data: Path) -> None:
    for workers, context in ((0, None), (1, "fork"), (1, "spawn")):
        options = {"multiprocessing_context": context} if context else {}
        loader = accelerator({}).prepare(make_loader(data, workers=workers, loader=options))
        with raises(ConfigError, "skip_first_batches", "load_state"):
            next(iter(skip_first_batches(loader, 2)))


def test_a_state_and_accelerates_own_count_do_not_mix(data: Path) -> None:
    dataset = make_dataset(data)
    state = make_loader(data).state_dict() | {"epoch": 1, "sample_in_epoch": 12}
    dataset.load_state_dict(state)
    loader = accelerator({}).prepare(DataLoader(dataset, batch_size=4))
    with raises(ConfigError, "epoch 1, sample 12", "set_epoch(0)", "StreamingDataLoader"):
        next(iter(loader))
    with raises(ConfigError, "set_epoch(0)"):
        dataset.set_epoch(0)
    dataset.next_epoch = 0
    batches = iter(loader)
    next(batches)
    with raises(ConfigError, "reads this dataset", "StreamingDataLoader"):
        dataset.state_dict()
    around = Around(make_dataset(data))
    around.source.next_epoch = 1
    with raises(ConfigError, "epoch 0 from its beginning", "set_epoch()"):
        next(iter(accelerator({}).prepare(DataLoader(around, batch_size=4))))


def test_single_samples_of_a_dataset_may_be_dealt_out(data: Path) -> None:
    dataset = make_dataset(data, world=World(ranks_per_node=2))
    picked = accelerator({}).prepare(DataLoader(Subset(dataset, range(8)), batch_size=4))
    read = []
    for batch in picked:
        read += batch["id"].tolist()
        assert pickle.loads(pickle.dumps(dataset))[3] == {"id": 3}, "as it goes to workers that are spawned"
    assert read == list(range(8))


def test_workers_that_would_make_more_batches_than_the_length_are_refused(data: Path) -> None:
    loader = accelerator({}).prepare(DataLoader(make_dataset(data, batch_size=2), batch_size=4, num_workers=2))
    with raises(ConfigError, "batches of 2 among 2 workers", "batch_size=4"):
        next(iter(loader))
    loader = accelerator({}).prepare(DataLoader(make_dataset(data, batch_size=8), batch_size=4, num_workers=2))
    assert len(list(loader)) == len(loader) == 8


def test_a_loader_that_accelerate_was_not_given_is_none_of_its_business(data: Path) -> None:
    assert PartialState(cpu=True).num_processes == 1
    for _ in make_loader(data):
        assert not GradientState().in_dataloader


def test_looking_at_a_loader_does_not_give_it_to_accelerate(data: Path) -> None:
    looked_at, given = make_loader(data), make_loader(data)
    dict(inspect.getmembers(looked_at))
    accelerate = accelerator({})
    assert accelerate.prepare(given) is given
    for loader, is_told in ((looked_at, False), (given, True)):
        for _ in loader:
            assert accelerate.gradient_state.in_dataloader is is_told
