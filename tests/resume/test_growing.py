"""Datasets that are appended to between a save and its resume: what a resumed epoch reads, and what later ones do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_streaming import Stream, StreamingDataLoader
from lightning_streaming.errors import ConfigError, StateMismatchError
from lightning_streaming.reading.position import position_of
from lightning_streaming.resume.state import Cursor
from lightning_streaming.sequence.settings import BATCHING_METHODS, SHUFFLE_ALGOS
from tests.helpers import State, ids, json_copy, make_loader, raises, read_together, worlds, write_dataset, write_shards
from tests.schedules import Phase, schedule
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture
def roots(tmp_path: Path) -> dict[str, Path]:
    """Two streams: ids from 0 and from 1000 on."""
    first = write_dataset(tmp_path / "a", 30)
    return {"a": first, "b": write_dataset(tmp_path / "b", 15, first_id=1000)}


def grow(roots: dict[str, Path]) -> None:
    """Append 3 and 2 shards."""
    write_dataset(roots["a"], 15, first_id=30, mode="append")
    write_dataset(roots["b"], 10, first_id=1015, mode="append")


def loader(roots: dict[str, Path], *, stream: Any = None, **how: Any) -> StreamingDataLoader:
    return make_loader(
        streams={name: Stream(remote=str(root), **(stream or {})) for name, root in roots.items()}, **how
    )


def flat(batches: list[list[int]]) -> list[int]:
    return [one for batch in batches for one in batch]


def read(at: StreamingDataLoader, epochs: int) -> list[list[int]]:
    """The ids of so many passes, each as a list."""
    return [flat(ids(at)) for _ in range(epochs)]


def stopped(at: StreamingDataLoader, batches: int) -> tuple[list[int], State]:
    """The ids of the first batches, and the state after them."""
    under_way: Iterator[Any] = iter(at)
    seen = flat([next(under_way)["id"].tolist() for _ in range(batches)])
    state = json_copy(at.state_dict())
    at.close()
    return seen, state


ORDERS: list[dict[str, Any]] = [
    {"shuffle": False},
    *({"shuffle_algo": algo, "num_canonical_nodes": 2} for algo in SHUFFLE_ALGOS if algo != "py1b"),
    *({"batching_method": method, "num_canonical_nodes": 2} for method in BATCHING_METHODS if method != "random"),
    {"stream": {"proportion": 1.0}},
    {"stream": {"proportion": 1.0}, "epoch_size": 30},
    {"stream": {"repeat": 1.5}},
    {"stream": {"choose": 13}},
]


@pytest.mark.rotate(7)
@pytest.mark.parametrize("follow_appends", [False, True])
@pytest.mark.parametrize("how", ORDERS, ids=str)
def test_an_epoch_under_way_keeps_its_shards(roots: dict[str, Path], how: dict[str, Any], follow_appends: bool) -> None:
    whole = read(loader(roots, **how), 3)
    seen, state = stopped(loader(roots, **how), 3)
    grow(roots)
    resumed = loader(roots, **how, follow_appends=follow_appends)
    resumed.load_state_dict(state)
    now = read(resumed, 3)
    assert seen + now[0] == whole[0]
    if not follow_appends:
        assert now == [whole[0][len(seen) :], *whole[1:]]
        return
    fresh = loader(roots, **how)  # nothing of an order depends on what was read before
    position_of(fresh).seek(Cursor(1, 0))
    assert now[1:] == read(fresh, 2)


@pytest.mark.parametrize("follow_appends", [False, True])
def test_a_state_describes_the_shards_of_its_own_epoch(roots: dict[str, Path], follow_appends: bool) -> None:
    _, state = stopped(loader(roots), 3)
    grow(roots)
    resumed = loader(roots, follow_appends=follow_appends)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert (len(resumed), resumed.dataset.epoch_size) == (12, 45)
    read(resumed, 1)
    assert resumed.dataset.epoch_size == 45
    after = resumed.state_dict()
    assert after["fingerprint"]["order"]["epoch_size"] == (70 if follow_appends else 45)
    assert after["fingerprint"]["streams"]["a"]["shards"] == (9 if follow_appends else 6)
    expected = read(resumed, 2)
    assert resumed.dataset.epoch_size == len(expected[0]) == (70 if follow_appends else 45)
    # Once more, with yet more data: without a history of the first time.
    grow(roots)
    again = loader(roots)
    again.load_state_dict(json_copy(after))
    assert read(again, 2) == expected


def test_an_epoch_that_has_not_begun_reads_all_where_streams_are_followed(roots: dict[str, Path]) -> None:
    state = json_copy(loader(roots).state_dict())
    grow(roots)
    for follow_appends, size in ((False, 45), (True, 70)):
        resumed = loader(roots, follow_appends=follow_appends)
        resumed.load_state_dict(state)
        assert [len(one) for one in read(resumed, 2)] == [size, size]


def test_each_stream_says_for_itself(roots: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    _, state = stopped(loader(roots), 2)
    grow(roots)
    caplog.clear()
    streams = {name: Stream(remote=str(root), follow_appends=name == "b") for name, root in roots.items()}
    resumed = make_loader(streams=streams)
    resumed.load_state_dict(state)
    first, second = read(resumed, 2)
    assert (len(first), len(second)) == (37, 55)
    assert [resumed.dataset.streams[name].follow_appends for name in "ab"] == [False, True]
    assert {one for one in second if one < 1000} == set(range(30))
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(told) == 1
    assert "stream 'a' has 3 more shards, of 15 samples, left out from now on" in told[0]
    assert "stream 'b' has 2 more shards, of 10 samples, left out before epoch 1" in told[0]


@pytest.mark.nightly
@pytest.mark.parametrize(("context", "persistent"), [("fork", False), ("spawn", True)])
def test_workers_are_told(roots: dict[str, Path], context: str, persistent: bool) -> None:
    seen, state = stopped(loader(roots), 3)
    whole = read(loader(roots), 1)
    grow(roots)
    here = loader(roots, follow_appends=True)
    here.load_state_dict(state)
    expected = read(here, 3)
    assert seen + expected[0] == whole[0]
    options = {"multiprocessing_context": context, "persistent_workers": persistent}
    elsewhere = loader(roots, follow_appends=True, workers=2, loader=options)
    elsewhere.load_state_dict(state)
    assert read(elsewhere, 3) == expected
    elsewhere.close()


def test_other_ranks_and_batch_sizes_go_on_alike(roots: dict[str, Path]) -> None:
    whole = read(loader(roots), 1)[0]
    seen, state = stopped(loader(roots), 5)
    grow(roots)
    loaders = [loader(roots, world=world, batch_size=5, follow_appends=True) for world in worlds(2, 2)]
    for one in loaders:
        one.load_state_dict(state)
    rest = [batch for batch, _ in read_together(loaders)]
    assert set(seen) | set(flat(rest)) == set(whole)


def test_keys_name_what_is_stored(roots: dict[str, Path]) -> None:
    _, state = stopped(loader(roots), 3)
    grow(roots)
    resumed = loader(roots, loader={"return_keys": True})
    resumed.load_state_dict(state)
    for batch, keys in resumed:
        assert [resumed.dataset.restore_sample(keys[place])["id"] for place in range(len(keys))] == batch["id"].tolist()


def test_skipped_batches_stay_where_they_are(roots: dict[str, Path]) -> None:
    skip = ["4-5", "14"]
    whole = read(loader(roots, skip=skip), 2)
    seen, state = stopped(loader(roots, skip=skip), 3)
    grow(roots)
    resumed = loader(roots, skip=skip)
    resumed.load_state_dict(state)
    first, second = read(resumed, 2)
    assert [seen + first, second] == whole


SELECTIONS: list[dict[str, Any]] = [{"selection": {"fraction": ":60%"}}, {"selection": {"where": "id % 3 != 1"}}]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("stream", SELECTIONS, ids=str)
@pytest.mark.parametrize("follow_appends", [False, True])
def test_selections_keep_what_was_selected(
    roots: dict[str, Path], stream: dict[str, Any], follow_appends: bool
) -> None:
    whole = read(loader(roots, stream=stream), 2)
    seen, state = stopped(loader(roots, stream=stream), 2)
    grow(roots)
    resumed = loader(roots, stream=stream, follow_appends=follow_appends)
    resumed.load_state_dict(state)
    first, second = read(resumed, 2)
    assert seen + first == whole[0]
    assert (second == whole[1]) is not follow_appends
    assert set(second) >= set(whole[1])


def test_another_selection_is_refused(roots: dict[str, Path]) -> None:
    _, state = stopped(loader(roots, stream={"selection": {"where": "id % 3 != 1"}}), 2)
    grow(roots)
    resumed = loader(roots, stream={"selection": {"where": "id % 3 != 2"}})
    resumed.load_state_dict(state)
    with raises(StateMismatchError, "streams.a.selection"):
        len(resumed)


def test_data_that_is_other_or_less_is_refused(roots: dict[str, Path], tmp_path: Path) -> None:
    before = {name: (root / "index.json").read_bytes() for name, root in roots.items()}
    grow(roots)
    _, state = stopped(loader(roots), 2)
    for name, index in before.items():
        (roots[name] / "index.json").write_bytes(index)
    shrunk = loader(roots)
    shrunk.load_state_dict(state)
    with raises(StateMismatchError, "streams.a.shards"):
        len(shrunk)
    other = loader({**roots, "a": write_shards(tmp_path / "c", [5] * 12)})
    other.load_state_dict(state)
    with raises(StateMismatchError, "streams.a.digest"):
        len(other)


@pytest.mark.parametrize("follow_appends", [False, True])
def test_an_append_is_taken_though_the_last_shard_was_not_full(tmp_path: Path, follow_appends: bool) -> None:
    root = write_dataset(tmp_path / "a", 28)
    whole = read(loader({"a": root}), 2)
    seen, state = stopped(loader({"a": root}), 2)
    write_dataset(root, 12, first_id=28, mode="append")
    write_dataset(root, 1, first_id=40, mode="append")
    resumed = loader({"a": root}, follow_appends=follow_appends)
    resumed.load_state_dict(state)
    first, second = read(resumed, 2)
    assert seen + first == whole[0]
    if follow_appends:
        assert sorted(second) == list(range(41))
    else:
        assert second == whole[1]


def joined_loader(
    root: Path, samples: int, *, per_shard: int = 3, phases: bool = False, **how: Any
) -> StreamingDataLoader:
    """Read a stream that has so many samples by now, with a dataset joined by position and one by id."""
    place = root / f"{samples} {per_shard}"
    if not place.exists():
        write_shards(place / "stream", [5] * (samples // 5))
        for columns, size in ((("id", "by_id"), 15), (("by_position",), per_shard)):
            sizes = [min(size, samples - at) for at in range(0, samples, size)]
            write_shards(place / columns[-1], sizes, dict.fromkeys(columns, "int"), partial(dict.fromkeys, columns))
    join = {
        "by_id": {"remote": str(place / "by_id"), "key": "id"},
        "by_position": {"remote": str(place / "by_position")},
    }
    stream = {"a": Stream(remote=str(place / "stream"), join=join, follow_appends=how.pop("follow_appends", None))}
    if phases:
        how |= {"schedule": schedule([Phase(name="one", mix={"a": 1})]), "epoch_size": 90}
    return make_loader(streams=stream, **how)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("phases", [False, True])
@pytest.mark.parametrize("follow_appends", [False, True])
def test_joined_datasets_grow_with_their_stream(tmp_path: Path, follow_appends: bool, phases: bool) -> None:
    """30 samples: shards of joined datasets end where the stream's do, so what is appended is new shards alone."""

    def loader(samples: int, **how: Any) -> StreamingDataLoader:
        return joined_loader(tmp_path, samples, phases=phases, follow_appends=follow_appends, **how)

    whole = read(loader(30), 1)[0]
    seen, state = stopped(loader(30), 3)
    for samples in (45, 60):  # resumed with the data longer than before, twice
        at = loader(samples)
        at.load_state_dict(state)
        under_way = iter(at)
        batch = next(under_way)
        assert batch["by_id"].tolist() == batch["by_position"].tolist() == batch["id"].tolist()
        seen += batch["id"].tolist()
        state = json_copy(at.state_dict())
        at.close()
    at = loader(60)
    at.load_state_dict(state)
    left, after = read(at, 2)
    if not phases:
        assert seen + left == whole
        assert sorted(after) == [*range(60 if follow_appends else 30)]
    else:
        assert (seen + left)[:30] == whole[:30]
        assert (max(seen + left + after) >= 30) == follow_appends
    other = loader(60, per_shard=4)
    other.load_state_dict(state)
    with raises(StateMismatchError, "streams.a.join.by_position.digest"):
        len(other)


def test_a_joined_dataset_may_grow_alone_where_it_is_joined_by_id(tmp_path: Path) -> None:
    stream = write_dataset(tmp_path / "stream", 20)

    def loader(samples: int) -> StreamingDataLoader:
        joined = tmp_path / f"joined {samples}"
        if not joined.exists():
            write_shards(
                joined, [5] * (samples // 5), {"id": "int", "x": "int"}, lambda number: {"id": number, "x": number}
            )
        return make_loader(stream, join={"more": {"remote": str(joined), "key": "id"}})

    whole = read(loader(20), 1)[0]
    seen, state = stopped(loader(20), 2)
    longer, shorter = loader(30), loader(20)
    longer.load_state_dict(state)
    rest, state = stopped(longer, 1)
    assert seen + rest == whole[: len(seen + rest)]
    shorter.load_state_dict(state)
    with raises(StateMismatchError, "streams.0.join.more.samples  30                  20"):
        len(shorter)


def test_a_run_goes_on_while_data_is_appended(roots: dict[str, Path]) -> None:
    whole = read(loader(roots), 2)
    running = loader(roots, workers=1)
    under_way = iter(running)
    seen = next(under_way)["id"].tolist()
    write_dataset(roots["a"], 3, first_id=30, mode="append")
    write_dataset(roots["b"], 1, first_id=1015, mode="append")
    assert [seen + flat([batch["id"].tolist() for batch in under_way]), *read(running, 1)] == whole
    running.close()


def test_a_last_shard_that_was_written_anew_is_refused(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "before" / "a", [5] * 5 + [3])
    _, state = stopped(loader({"a": root}), 2)
    resumed = loader({"a": write_shards(tmp_path / "filled up" / "a", [5] * 8)})
    resumed.load_state_dict(state)
    with raises(StateMismatchError, "streams.a.digest", "the shards before must stay unchanged"):
        len(resumed)


def test_of_many_streams_growth_cannot_be_told(roots: dict[str, Path]) -> None:
    many = {f"stream number {number}": roots["ab"[number % 2]] for number in range(60)}
    state = json_copy(loader(many).state_dict())
    grow(roots)
    resumed = loader(many)
    resumed.load_state_dict(state)
    with raises(StateMismatchError, "data must not be appended to any, nor to datasets joined with them"):
        len(resumed)


def test_a_cached_index_is_replaced_and_its_shards_stay(roots: dict[str, Path], tmp_path: Path) -> None:
    cached = {
        name: Stream(remote=f"file://{root}", local=str(tmp_path / "cache" / name)) for name, root in roots.items()
    }
    whole = read(make_loader(streams=cached), 1)[0]
    seen, state = stopped(make_loader(streams=cached), 3)
    files = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*.mds")}
    grow(roots)
    resumed = make_loader(streams=cached, follow_appends=True)
    resumed.load_state_dict(state)
    first = read(resumed, 1)[0]
    assert seen + first == whole
    assert files.items() <= {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*.mds")}.items()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grown")


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
    how=st.sampled_from(ORDERS),
    follow_appends=st.booleans(),
    cut=st.integers(0, 8),
)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_append_and_any_cut(
    place: Path, sizes: list[list[int]], data: st.DataObject, how: dict[str, Any], follow_appends: bool, cut: int
) -> None:
    more = [data.draw(st.lists(st.integers(1, 9), max_size=3), label="appended") for _ in sizes]
    number = len(list(place.iterdir()))
    roots = {f"s{at}": write_shards(place / f"{number} {at} short" / "x", one) for at, one in enumerate(sizes)}
    longer = {
        f"s{at}": write_shards(place / f"{number} {at} long" / "x", [*one, *then])
        for at, (one, then) in enumerate(zip(sizes, more, strict=True))
    }
    how = {**how, "batch_size": 2}
    try:
        whole = read(loader(roots, **how), 2)
    except ConfigError:  # too few samples for this order
        return
    if cut >= len(whole[0]) // 2:
        return
    seen, state = stopped(loader(roots, **how), cut)
    resumed = loader(longer, **how, follow_appends=follow_appends)
    resumed.load_state_dict(state)
    if cut or not follow_appends:
        assert seen + read(resumed, 1)[0] == whole[0]
    if not follow_appends:
        assert read(resumed, 1)[0] == whole[1]
