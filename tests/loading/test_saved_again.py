"""A state put back and taken again without a batch between is the same state, whatever the workers are at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import Stream, StreamingDataLoader
from tests.helpers import State, ids, json_copy, make_loader, read_epochs, write_dataset
from tests.loading.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

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
        assert fresh.cursor() == loader.normalised(loader.cursor())
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
