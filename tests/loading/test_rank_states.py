from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataLoader, restore_state_global, save_state_global
from lightning_streaming.errors import ConfigError, StateError, StreamingError
from tests.helpers import ids, make_loader, write_dataset
from tests.trainer.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", 29)


def _save_and_go_on(data: Path) -> dict[str, Any]:
    loader, again = make_loader(data, batch_size=2, workers=1), make_loader(data, batch_size=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = save_state_global(loader, dst_rank=1)
    restore_state_global(again, state, src_rank=1)
    given = save_state_global(again), save_state_global(again, dst_rank=1)  # nothing was read in between
    return {"state": state, "saved again": given, "left": ids(batches), "read": ids(again)}


def test_one_rank_keeps_the_state_and_gives_it_to_the_others(data: Path, tmp_path: Path) -> None:
    ranks = on_ranks(_save_and_go_on, data, meeting=tmp_path / "ranks")
    state = ranks[1]["state"]
    assert state["sample_in_epoch"] == 3 * 2 * 2
    assert ranks[0]["state"] is None
    assert [rank["saved again"] for rank in ranks] == [(state, None), (None, state)]
    for rank in ranks:
        assert rank["read"] == rank["left"]
    alone = make_loader(data, batch_size=2)
    restore_state_global(alone, state)
    assert {one for batch in ids(alone) for one in batch} == {
        one for rank in ranks for batch in rank["left"] for one in batch
    }


def _broken() -> StreamingDataLoader:
    """A loader whose state cannot be told."""
    return make_loader("http://127.0.0.1:1/nowhere", download_retry=0)


def _errors(data: Path) -> list[str]:
    loader = make_loader(data, batch_size=2)
    batches = iter(loader)
    state = loader.state_dict()
    rank = 1 if save_state_global(loader) is None else 0
    for _ in range(rank):
        next(batches)
    said = []
    for ask in (
        partial(save_state_global, loader),
        partial(save_state_global, loader, dst_rank=2),
        partial(restore_state_global, loader, None),
        partial(restore_state_global, loader, None, src_rank=0),
        partial(restore_state_global, loader, state, src_rank=0),
        partial(save_state_global, _broken() if rank else loader),
    ):
        with pytest.raises(StreamingError) as caught:
            ask()
        said.append(f"{caught.type.__name__}: {caught.value}")
    return said


def test_ranks_out_of_step_and_states_that_are_not_there_are_errors_on_all_ranks(data: Path, tmp_path: Path) -> None:
    first, second = on_ranks(_errors, data, meeting=tmp_path / "ranks")
    assert first == second
    assert first[0].startswith(
        "StateError: the ranks' loaders stand at different places: (epoch, sample) [(0, 0), (0, 4)]"
    )
    assert first[1] == "ConfigError: there is no rank 2, but 2 from 0 on"
    assert first[2] == first[3]
    assert first[2].startswith("StateError: there is no state to go on from")
    assert first[4].startswith("ConfigError: rank 0 sends the state, so ranks [1] must pass None")
    assert first[5].startswith("DownloadError: ")


def _save_unconnected(data: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        save_state_global(make_loader(data))
    return str(caught.value)


def test_ranks_that_are_not_connected_are_told_what_to_do(data: Path, tmp_path: Path) -> None:
    for said in on_ranks(_save_unconnected, data, meeting=tmp_path / "ranks", connected=False):
        assert "save and load loader.state_dict() on each rank" in said


def test_a_single_process_needs_nobody(data: Path) -> None:
    loader = make_loader(data)
    next(iter(loader))
    state = save_state_global(loader)
    assert state == loader.state_dict()
    restore_state_global(loader, state, src_rank=0)
    assert loader.state_dict() == state


@pytest.mark.parametrize("wrong", [[], {}, {"epoch": -1}, {"num_canonical_nodes": 10**9}], ids=str)
def test_what_is_no_state_is_refused_and_changes_nothing(tmp_path: Path, wrong: Any) -> None:
    loader = make_loader(write_dataset(tmp_path / "data"))
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(StateError):
        restore_state_global(loader, {**before, **wrong} if wrong else wrong)
    assert loader.state_dict() == before
