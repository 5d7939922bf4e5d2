"""Data that is appended to while it is read: epochs that have begun stay what they are, the next one reads all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import Stream, StreamingDataLoader
from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.position import check_same_data, position_of
from lightning_streaming.resume.state import Cursor
from lightning_streaming.world import World
from tests.forked_ranks import on_ranks
from tests.helpers import ids, json_copy, make_loader, raises, write_dataset
from tests.schedules import Phase, schedule

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", 30)


def loader(root: Path, *, follow_appends: bool = True, stream: Any = None, **how: Any) -> StreamingDataLoader:
    streams = {"web": Stream(remote=str(root), follow_appends=follow_appends, **(stream or {}))}
    return make_loader(streams=streams, **{"num_canonical_nodes": 2, **how})


def read(at: StreamingDataLoader) -> list[int]:
    return [one for batch in ids(at) for one in batch]


def epoch_of(root: Path, epoch: int, **how: Any) -> list[int]:
    """An epoch as who begins with it reads it."""
    fresh = loader(root, **how)
    position_of(fresh).seek(Cursor(epoch, 0))
    return read(fresh)


WAYS: list[dict[str, Any]] = [
    {},
    {"shuffle_algo": "py1e"},
    {"stream": {"selection": {"where": "id % 3 != 1"}}},
    {"stream": {"selection": {"fraction": ":60%"}}},
    {"workers": 2, "loader": {"persistent_workers": True, "multiprocessing_context": "fork"}},
    {"workers": 1, "loader": {"persistent_workers": True, "multiprocessing_context": "spawn"}},
]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_the_next_epoch_reads_what_was_appended(
    root: Path, how: dict[str, Any], cached: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more: dict[str, Any] = (
        {"remote": f"file://{root}", "local": str(tmp_path / "cache")} if cached else {"remote": str(root)}
    )
    at = make_loader(
        streams={"web": Stream(**more, follow_appends=True, **how.get("stream", {}))},
        **{"num_canonical_nodes": 2, **{name: value for name, value in how.items() if name != "stream"}},
    )
    expected = epoch_of(root, 0, **how)
    under_way = iter(at)
    begun = next(under_way)["id"].tolist()
    write_dataset(root, 12, first_id=30, mode="append")  # the last shard is not full
    begun += [one for batch in under_way for one in batch["id"].tolist()]
    assert begun == expected
    assert at.refresh()
    assert "stream 'web' has 3 more shards" in caplog.text
    assert read(at) == epoch_of(root, 1, **how)
    state = json_copy(at.state_dict())
    assert not at.refresh()
    write_dataset(root, 1, first_id=42, mode="append")
    assert at.refresh()
    expected = read(at)
    assert expected == epoch_of(root, 2, **how)
    at.close()
    resumed = loader(root, **how)
    resumed.load_state_dict(state)
    assert read(resumed) == expected


def test_streams_that_are_not_followed_are_not_asked_for(root: Path) -> None:
    at = loader(root, follow_appends=False)
    read(at)
    write_dataset(root, 15, first_id=30, mode="append")
    assert not at.refresh()
    assert len(read(at)) == 30


def test_an_epoch_under_way_is_left_alone(root: Path) -> None:
    at = loader(root)
    next(iter(at))
    with raises(ConfigError, "an epoch keeps the shards that it began with", "epoch 0, sample 4"):
        at.refresh()


def test_phases_read_it_in_the_next_pass(root: Path) -> None:
    how: dict[str, Any] = {
        "schedule": schedule([Phase(name="all", mix={"web": 1.0})]),
        "epoch_size": 40,
        "batch_size": 4,
    }
    at = loader(root, **how)
    seen = read(at)
    write_dataset(root, 15, first_id=30, mode="append")
    assert at.refresh()
    seen += read(at)
    assert sorted(seen[:30]) == sorted(seen[30:60]) == list(range(30))
    assert len({*seen[60:]}) == 20
    assert at.state_dict()["fingerprint"]["streams"]["web"]["grown"] == [[60, 6]]


def test_other_data_is_not_followed(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    at = loader(root)
    whole = read(at), epoch_of(root, 1)
    at = loader(root)
    assert read(at) == whole[0]
    other = write_dataset(tmp_path / "other", 50, size_limit=260)
    index = (root / "index.json").read_bytes()
    (root / "index.json").write_bytes((other / "index.json").read_bytes())
    assert not at.refresh()
    assert "not read in epoch 1: stream 'web' is other data by now" in caplog.text
    caplog.clear()
    (root / "index.json").unlink()
    assert not at.refresh()
    assert "not read in epoch 1: " in caplog.text
    assert "there is no dataset at" in caplog.text
    (root / "index.json").write_bytes(index)
    assert read(at) == whole[1]


def _follow(roots: list[Path]) -> list[Any]:
    """On a rank that reads a root of its own, which others append to while it reads."""
    world = World.detect()
    at = loader(roots[world.rank], batch_size=3)
    found: list[Any] = [read(at)]
    for number in range(2):
        if world.rank == 0:
            # What the other rank sees is longer only the second time.
            write_dataset(roots[number], 15, first_id=30, mode="append")
        found += [at.refresh(), read(at)]
    found.append(at.state_dict())
    return found


def test_ranks_read_more_when_all_of_them_see_it(root: Path, tmp_path: Path) -> None:
    roots = [root, write_dataset(tmp_path / "twin", 30)]
    first, second = on_ranks(_follow, roots, meeting=tmp_path / "ranks")
    assert [first[1], first[3]] == [second[1], second[3]] == [False, True]
    for epoch, size in ((0, 30), (2, 30), (4, 45)):
        assert {*first[epoch], *second[epoch]} == {*range(size)}
        assert len(first[epoch]) == len(second[epoch]) == -(-size // 2)
    assert first[5] == second[5]
    assert first[5]["fingerprint"]["streams"]["web"]["samples"] == 45


def _begin(roots: list[Path]) -> str:
    at = loader(roots[World.detect().rank])
    try:
        check_same_data(at)
    except ConfigError as error:
        return str(error)
    return "the same"


def test_ranks_that_see_other_data_do_not_begin(root: Path, tmp_path: Path) -> None:
    assert on_ranks(_begin, [root, root], meeting=tmp_path / "ranks") == ["the same", "the same"]
    longer = write_dataset(tmp_path / "longer", 35)
    first, second = on_ranks(_begin, [root, longer], meeting=tmp_path / "ranks")
    assert first == second
    assert "rank 0 sees 6 shards of 30 samples, and rank 1 7 of 35" in first


def _follow_unconnected(root: Path) -> str:
    at = loader(root)
    try:
        at.refresh()
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_cannot_ask_each_other_do_not_follow(root: Path, tmp_path: Path) -> None:
    for told in on_ranks(_follow_unconnected, root, meeting=tmp_path / "ranks", connected=False):
        assert "which takes torch.distributed" in told
