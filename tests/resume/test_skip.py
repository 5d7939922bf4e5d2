"""Skipped batches: their samples are left out of the sequence, and stay left out whatever machines go on."""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.reading.dataset import dataset_world, run_state_of
from lightning_streaming.reading.position import position_of
from lightning_streaming.reading.workers import SharedEpochStart
from lightning_streaming.resume.state import Cursor
from tests.helpers import State, ids, json_copy, make_dataset, make_loader, read_together, worlds, write_dataset
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
SAMPLES, EPOCHS = 30, 2
METHODS = ["random", "stratified", "per_stream", "device_per_stream"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a", SAMPLES)


@pytest.fixture(scope="module")
def even_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many samples as make all canonical nodes equal, so that no sequence reads one twice."""
    return write_dataset(tmp_path_factory.mktemp("data") / "even", 32)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    base = tmp_path_factory.mktemp("mixture")
    roots = {name: write_dataset(base / name, 20, first_id=1000 * n) for n, name in enumerate("ab")}
    return {name: Stream(remote=str(root)) for name, root in roots.items()}


def batches_of(loader: StreamingDataLoader, epochs: int = 3) -> list[list[list[int]]]:
    return [ids(loader) for _ in range(epochs)]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_follows_comes_at_once_and_epochs_end_where_they_did(root: Path, workers: int) -> None:
    whole = batches_of(make_loader(root))
    loader = make_loader(
        root, workers=workers, skip=["2-3", "7-9", 20, "23"], loader={"persistent_workers": workers > 0}
    )
    # Eight batches an epoch, of which the last has two samples: 7 is the last of one, 23 the last of all.
    numbered = list(chain.from_iterable(whole))
    kept = [batch for number, batch in enumerate(numbered) if number not in {2, 3, 7, 8, 9, 20, 23}]
    assert [[sorted(b) for b in epoch] for epoch in batches_of(loader)] == [
        [sorted(b) for b in epoch] for epoch in (kept[:5], kept[5:11], kept[11:])
    ]
    assert len(loader) == 8
    loader.close()


@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_that_are_skipped_whole_are_passed_over(root: Path, drop_last: bool) -> None:
    numbered = list(chain.from_iterable(batches_of(make_loader(root, drop_last=drop_last), 4)))
    per_epoch = 7 if drop_last else 8
    loader = make_loader(root, drop_last=drop_last, skip=[f"2-{3 * per_epoch}"])
    assert batches_of(loader, 2) == [numbered[:2], numbered[3 * per_epoch + 1 : 4 * per_epoch]]
    assert position_of(loader).cursor() == Cursor(4, 0)


def test_batches_are_counted_of_the_epoch_that_is_read_next(root: Path) -> None:
    loader = make_loader(root, skip=["8-15", "17"])  # all of the second epoch, and one batch of the third
    assert position_of(loader).batches_of_epoch() == len(ids(loader)) == 8
    assert position_of(loader).cursor() == Cursor(1, 0)
    assert position_of(loader).batches_of_epoch() == len(ids(loader)) == 7


@pytest.mark.parametrize("method", METHODS)
def test_mixtures_skip_whole_batches_by_every_method(mixture: dict[str, Stream], method: str) -> None:
    def loader(**more: Any) -> StreamingDataLoader:
        return make_loader(streams=mixture, batching_method=method, **more)

    whole = batches_of(loader())
    first, second = len(whole[0]), len(whole[0]) + len(whole[1])
    numbered = list(chain.from_iterable(whole))
    skipped = batches_of(loader(skip=["1-2", f"{first}-{first + 1}", str(second - 1)]))
    left_out = {1, 2, first, first + 1, second - 1}
    assert list(chain.from_iterable(skipped)) == [b for n, b in enumerate(numbered) if n not in left_out]


@pytest.mark.parametrize("method", METHODS)
def test_another_batch_size_skips_the_same_samples_of_a_mixture(mixture: dict[str, Stream], method: str) -> None:
    def loader(**more: Any) -> StreamingDataLoader:
        return make_loader(streams=mixture, batching_method=method, **more)

    first = loader(skip=["3-4"])
    read = [next(batch) for batch in [iter(first)] for _ in range(2)]
    resumed = loader(batch_size=3, skip=["3-4"])
    resumed.load_state_dict(first.state_dict())
    whole = ids(loader())
    assert list(chain(*ids(read), *ids(resumed))) == list(chain(*whole[:3], *whole[5:]))


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Machines that read some batches of a run."""

    num_nodes: int
    ranks_per_node: int
    batch_size: int
    steps: int

    def read(self, root: Path, state: State | None, skip: list[str]) -> tuple[list[tuple[int, int]], State]:
        """Read from a state on; gives the samples with their epochs, and where that came to."""
        loaders = [
            make_loader(root, world=world, batch_size=self.batch_size, num_canonical_nodes=4, skip=skip)
            for world in worlds(self.num_nodes, self.ranks_per_node)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        read: list[tuple[int, int]] = []
        state, steps = loaders[0].state_dict(), 0
        while (epoch := position_of(loaders[0]).normalised(position_of(loaders[0]).cursor()).epoch) < EPOCHS:
            for samples, after in read_together(loaders):
                read += [(epoch, sample) for sample in samples]
                state, steps = after, steps + 1
                if steps == self.steps:
                    return read, json_copy(after)
        return read, state


legs = st.builds(
    Leg,
    num_nodes=st.sampled_from([1, 2, 4]),
    ranks_per_node=st.integers(1, 2),
    batch_size=st.integers(1, 4),
    steps=st.integers(1, 6),
)


@settings(deadline=None, max_examples=examples(15))
@given(st.lists(legs, min_size=1, max_size=4), st.lists(st.integers(0, 20), min_size=2, max_size=6, unique=True))
def test_any_machines_leave_out_the_same_samples(even_root: Path, legs: list[Leg], edges: list[int]) -> None:
    edges.sort()
    skip = [f"{first}-{last}" for first, last in zip(edges[::2], edges[1::2], strict=False)]
    sequence = [
        [(epoch, sample) for sample in chain(*batches)]
        for epoch, batches in enumerate(batches_of(make_loader(even_root, num_canonical_nodes=4), EPOCHS))
    ]
    first = legs[0]
    size = first.num_nodes * first.ranks_per_node * first.batch_size
    by_number = [epoch[start : start + size] for epoch in sequence for start in range(0, len(epoch), size)]
    left_out = {
        place
        for number, batch in enumerate(by_number)
        for place in batch
        if any(int(low) <= number <= int(high) for low, high in (one.split("-") for one in skip))
    }
    read: list[tuple[int, int]] = []
    state: State | None = None
    for leg in [*legs, Leg(num_nodes=1, ranks_per_node=1, batch_size=5, steps=99)]:
        more, state = leg.read(even_root, state, skip)
        read += more
    unique = list(dict.fromkeys(read))
    assert sorted(unique) == sorted({place for epoch in sequence for place in epoch} - left_out)
    assert unique == [place for place in dict.fromkeys(chain(*sequence)) if place not in left_out]


def test_a_range_is_placed_by_the_run_that_was_first_given_it(root: Path) -> None:
    whole = list(chain(*ids(make_loader(root))))
    loader = make_loader(root, skip=["3-4"])
    next(iter(loader))
    state = json_copy(loader.state_dict())
    assert state["skipped"] == {"3-4": [0, 12, 0, 20]}
    assert state["sample_in_epoch"] == 4
    resumed = make_loader(root, batch_size=3, skip=["3-4", "8"])
    resumed.load_state_dict(state)
    # Batch 8 is counted in threes from the run's beginning: 0-2 are 9 samples, 3-4 are known, 5-7 are 9 more.
    rest = [sample for at, sample in enumerate(whole) if at >= 4 and not 12 <= at < 20]
    gone = [at for at in range(SAMPLES) if not 12 <= at < 20][18:21]
    assert list(chain(*ids(resumed))) == [s for s in rest if s not in {whole[at] for at in gone}]
    assert resumed.state_dict()["skipped"] == {"3-4": [0, 12, 0, 20], "8": [0, gone[0], 0, gone[-1] + 1]}


def test_a_range_that_is_no_longer_asked_for_is_read(root: Path) -> None:
    whole = list(chain(*ids(make_loader(root))))
    loader = make_loader(root, skip=["3-4"])
    batches = iter(loader)
    for _ in range(3):  # right up to the range
        next(batches)
    state = loader.state_dict()
    resumed = make_loader(root)
    resumed.load_state_dict(state)
    assert list(chain(*ids(resumed))) == whole[12:]
    assert "skipped" not in resumed.state_dict()


def test_asked_for_too_late_a_range_is_told_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(root)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    resumed = make_loader(root, skip=["1-2", "5"])
    resumed.load_state_dict(loader.state_dict())
    with caplog.at_level(logging.WARNING):
        rest = batches_of(resumed, 2)
    assert rest[0] == [batch for number, batch in enumerate(batches_of(make_loader(root))[0]) if number in {4, 6, 7}]
    assert caplog.messages == ["skip: batches 1-2 have been read already, so nothing is left out for them"]


def test_after_another_load_it_is_told_again(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {**make_loader(root).state_dict(), "sample_in_epoch": 16}
    loader = make_loader(root, skip=["1-2"])
    for _ in range(2):
        loader.load_state_dict(state)
        with caplog.at_level(logging.WARNING):
            batches_of(loader, 2)
    assert caplog.messages == ["skip: batches 1-2 have been read already, so nothing is left out for them"] * 2


def test_saving_what_was_restored_is_the_identity(root: Path) -> None:
    loader = make_loader(root, skip=["1", "6-9"])
    next(iter(loader))
    state = loader.state_dict()
    again = make_loader(root, skip=["6-9", "1"], batch_size=7)
    again.load_state_dict(state)
    assert again.state_dict() == state


@pytest.mark.parametrize(
    ("skip", "written"), [("7", [0, 28, 1, 0]), ("7-8", [0, 28, 1, 4]), ("15", [1, 28, 2, 0]), ("0-7", [0, 0, 1, 0])]
)
def test_ranges_up_to_the_end_of_an_epoch_are_saved_and_read(root: Path, skip: str, written: list[int]) -> None:
    state = json_copy(make_loader(root, skip=[skip]).state_dict())
    assert state["skipped"] == {skip: written}
    loader = make_loader(root, skip=[skip])
    loader.load_state_dict(state)
    assert loader.state_dict() == state


def test_samples_keep_their_positions_and_so_their_augmentation(root: Path) -> None:
    def augment(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {**sample, "noise": rng.normal()}

    whole = {
        int(one): (float(noise), key.position)
        for batch, keys in make_loader(root, transform=augment, loader={"return_keys": True})
        for one, noise, key in zip(batch["id"], batch["noise"], keys, strict=True)
    }
    for batch, keys in make_loader(root, transform=augment, loader={"return_keys": True}, skip=["1-3"]):
        for one, noise, key in zip(batch["id"], batch["noise"], keys, strict=True):
            assert whole[int(one)] == (float(noise), key.position)
            assert make_dataset(root, transform=augment).restore_sample(key)["id"] == int(one)


def test_samples_counted_by_the_reader_are_those_that_were_read(root: Path) -> None:
    dataset = make_dataset(root, skip=["1-2"])
    samples = iter(dataset)
    for _ in range(6):
        next(samples)
    assert dataset.state_dict()["sample_in_epoch"] == 14
    assert dataset.state_dict(4, from_beginning=True)["sample_in_epoch"] == 4
    assert dataset.state_dict(SAMPLES - 8)["epoch"] == 1


def test_workers_are_told_of_as_many_gaps_as_there_may_be(root: Path) -> None:
    dataset: StreamingDataset = make_dataset(root, skip=["0", "2", "4"])
    start = run_state_of(dataset).begin(dataset_world(dataset), 4)
    pass_start = SharedEpochStart(most_skipped_runs=3)
    pass_start.assign(start)
    assert pass_start.assigned() == start
    assert start.skipped.runs == ((0, 4), (8, 12), (16, 20))
    assert pickle.loads(pickle.dumps(start.skipped)) == start.skipped


def test_stages_that_are_read_again_and_again_skip_nothing(root: Path) -> None:
    with pytest.raises(ConfigError, match="skip is for training"):
        make_loader(root, skip=["1"], loader={"fixed_epoch": True})


@pytest.mark.parametrize("saved", [["3-4"], {"3-4": [0, 1, 2]}, {"3-4": "0120"}, {"3-4": [0, 1.5, 0, 2]}])
def test_a_state_with_other_places_is_refused(root: Path, saved: object) -> None:
    state = {**make_loader(root).state_dict(), "skipped": saved}
    with pytest.raises(StateError, match="skipped"):
        make_loader(root).load_state_dict(state)
