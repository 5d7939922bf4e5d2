"""Going on with other nodes, ranks, workers and batch sizes: the sequence of samples goes on as if nothing changed."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import StreamingDataLoader
from tests.helpers import State, ids, make_loader, read_together, worlds, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Launch(NamedTuple):
    """How a run is started."""

    num_nodes: int = 1
    ranks_per_node: int = 1
    batch_size: int = 2
    workers: int = 0

    def loaders(self, root: Path, state: State | None = None, **settings: Any) -> list[StreamingDataLoader]:
        start = {"batch_size": self.batch_size, "workers": self.workers, "num_canonical_nodes": 4, **settings}
        made = [make_loader(root, world=world, **start) for world in worlds(self.num_nodes, self.ranks_per_node)]
        for loader in made:
            if state is not None:
                loader.load_state_dict(state)
        return made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a", 30)


def _sequences(root: Path, epochs: int = 2) -> list[list[int]]:
    """The global sequence of each epoch: what one rank reads."""
    (loader,) = Launch().loaders(root)
    return [list(chain(*ids(loader))) for _ in range(epochs)]


BEFORE = [Launch(2, 2, 2), Launch(1, 3, 3), Launch(1, 1, 4, workers=2)]
AFTER = [Launch(), Launch(4, 1, 3), Launch(1, 3, 2), Launch(2, 1, 5, workers=2), Launch(2, 4, 1)]


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
def test_the_sequence_goes_on_in_another_world(root: Path, before: Launch, after: Launch) -> None:
    first, second = _sequences(root)
    read: list[int] = []
    for step, (samples, state) in enumerate(read_together(before.loaders(root))):
        read += samples
        if state["epoch"] == 1 or step % 2:  # every other place will do
            continue
        loaders = after.loaders(root, state)
        rest = list(chain.from_iterable(samples for samples, _ in read_together(loaders)))
        assert state["sample_in_epoch"] == len(read)
        assert (read + rest)[: len(first)] == first
        (next_samples, _), *_ = read_together(loaders)
        assert next_samples == second[: len(next_samples)]
    assert read[: len(first)] == first


def test_a_state_taken_among_repeats_goes_on_where_there_are_none(root: Path) -> None:
    # 30 samples for 4 nodes are 32 entries; from 3 on, steps of 4 come to 31, where one repeat is left.
    state = {**Launch().loaders(root, num_canonical_nodes=1)[0].state_dict(), "sample_in_epoch": 3}
    ranks = Launch(4, 1, 1).loaders(root, state, num_canonical_nodes=1)
    *_, (_, before_last), (_, last) = read_together(ranks)
    assert (before_last["epoch"], before_last["sample_in_epoch"]) == (0, 30)
    assert (last["epoch"], last["sample_in_epoch"]) == (1, 0)
    (alone,) = Launch().loaders(root, before_last, num_canonical_nodes=1)
    assert (alone.state_dict()["epoch"], alone.state_dict()["sample_in_epoch"]) == (1, 0)


def test_replicated_ranks_read_the_same_and_count_once(root: Path) -> None:
    first, _ = _sequences(root)
    ranks = Launch(1, 4, 3).loaders(root, replication=2)
    iterators = [iter(loader) for loader in ranks]
    step = ids(next(iterator) for iterator in iterators)
    assert step[0] == step[1] == first[0:6:2]
    assert step[2] == step[3] == first[1:6:2]
    state = ranks[3].state_dict()
    assert state["sample_in_epoch"] == 6
    (alone,) = Launch().loaders(root, state)
    assert list(chain(*ids(alone))) == first[6:]


@settings(deadline=None, max_examples=40)
@given(
    nodes=st.sampled_from([1, 2, 4]),
    ranks=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    start=st.integers(0, 31),
    drop_last=st.booleans(),
)
def test_all_ranks_get_as_many_batches_as_promised(
    root: Path, nodes: int, ranks: int, batch_size: int, start: int, drop_last: bool
) -> None:
    state = {**Launch().loaders(root)[0].state_dict(), "sample_in_epoch": start}
    loaders = Launch(nodes, ranks, batch_size).loaders(root, drop_last=drop_last)
    whole = {len(loader) for loader in loaders}
    assert {len(ids(loader)) for loader in loaders} == whole
    for loader in loaders:
        loader.load_state_dict(state)
    left = {loader.batches_left(loader.cursor()) for loader in loaders}
    assert {len(loader) for loader in loaders} == whole
    assert {len(ids(loader)) for loader in loaders} == left
    assert len(whole) == len(left) == 1
