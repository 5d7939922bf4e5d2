"""Runs with phases whose data is appended to: a pass over a stream keeps its shards, the next one reads all."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_streaming import Stream, StreamingDataLoader
from lightning_streaming.errors import StateError, StateMismatchError
from lightning_streaming.reading.dataset import dataset_world, run_state_of
from tests.helpers import State, json_copy, make_loader, raises, read_together, worlds, write_shards
from tests.resume.phased import check_passes
from tests.schedules import Phase, schedule
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SIZES = {"a": [5, 5, 5, 5], "b": [4, 3, 4]}
FIRST_IDS = {"a": 0, "b": 1000}


def sample_of(first_id: int, number: int) -> dict[str, Any]:
    return {"id": first_id + number}


def roots_of(place: Path, more: dict[str, list[int]]) -> dict[str, Path]:
    """The streams, with more shards: written anew, so the shards before are the same."""
    number = len(list(place.iterdir()))
    return {
        name: write_shards(
            place / f"{number} {name}",
            [*sizes, *more.get(name, [])],
            make=partial(sample_of, FIRST_IDS[name]),
        )
        for name, sizes in SIZES.items()
    }


def loader(roots: dict[str, Path], **how: Any) -> StreamingDataLoader:
    phases = [
        Phase(name="early", mix={"a": 3.0, "b": 1.0}, end=40),
        Phase(name="late", mix={"a": (1.0, 2.0), "b": 1.0}, steps=3),
    ]
    how = {"schedule": schedule(phases), "epoch_size": 120, "batch_size": 4, "num_canonical_nodes": 2, **how}
    return make_loader(streams={name: Stream(remote=str(root)) for name, root in roots.items()}, **how)


def read(at: StreamingDataLoader, batches: int | None = None) -> tuple[list[int], State]:
    """The ids of the next batches of the pass, and the state after them."""
    seen, under_way = [], iter(at)
    for batch in under_way:
        seen += batch["id"].tolist()
        batches = None if batches is None else batches - 1
        if batches == 0:
            break
    state = json_copy(at.state_dict())
    at.close()
    return seen, state


def resumed(state: State, roots: dict[str, Path], **how: Any) -> StreamingDataLoader:
    at = loader(roots, **how)
    at.load_state_dict(state)
    return at


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grown")


MORE = {"a": [5, 2], "b": [6]}


@pytest.mark.rotate(6)
@pytest.mark.parametrize("batches", [1, 3, 10, 11, 17, 29])
@pytest.mark.parametrize("algo", ["blockwise", "py1e", "py1s"])
def test_streams_that_are_not_followed_stay_what_they_were(place: Path, batches: int, algo: str) -> None:
    roots = roots_of(place, {})
    whole = read(loader(roots, shuffle_algo=algo))[0]
    seen, state = read(loader(roots, shuffle_algo=algo), batches)
    assert seen + read(resumed(state, roots_of(place, MORE), shuffle_algo=algo))[0] == whole


def test_the_pass_after_the_one_under_way_reads_all(place: Path) -> None:
    # Of "a" 30 samples are drawn by the end of the first phase: a pass of 20, and half of the second.
    seen, state = read(loader(roots_of(place, {})), 10)
    longer = roots_of(place, MORE)
    at = resumed(state, longer, follow_appends=True)
    rest, after = read(at)
    streams = after["fingerprint"]["streams"]
    assert (streams["a"]["grown"], streams["a"]["shards"]) == ([[40, 4]], 6)
    assert (streams["b"]["grown"], streams["b"]["shards"]) == ([[11, 3]], 4)
    drawn = Counter(one // 1000 for one in seen + rest)
    assert drawn == {0: 30 + 47, 1: 10 + 33}
    check_passes(seen + rest, 0, [20, 20], then=27)
    check_passes(seen + rest, 1000, [11], then=17)
    # What comes after needs no more to be told than the state does, also in the next epoch.
    first = read(resumed(after, longer))[0]
    assert first == read(resumed(after, longer, follow_appends=True))[0]
    check_passes(seen + rest + first, 0, [20, 20], then=27)
    check_passes(seen + rest + first, 1000, [11], then=17)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("algo", ["blockwise", "py1s"])
@pytest.mark.parametrize("method", ["stratified", "per_stream", "device_per_stream"])
def test_a_step_under_way_stays_what_it_was_with_composed_batches(place: Path, method: str, algo: str) -> None:
    """What fills no batch at a border is left out, so positions are fewer than the samples that are drawn."""
    how: dict[str, Any] = {"batching_method": method, "shuffle_algo": algo, "epoch_size": 200}
    roots, longer = roots_of(place, {}), roots_of(place, MORE)
    whole = read(loader(roots, **how))[0]
    changed = []
    for batches in (2, 13, *range(32, 38)):
        _, state = read(loader(roots, **how), batches)
        ahead, _ = read(resumed(state, longer, follow_appends=True, **how), 1)
        if ahead != whole[4 * batches : 4 * batches + 4]:
            changed.append(batches)
    assert len(changed) <= 1  # the border among the last ones: only a step of which nothing was read may read more


@given(
    data=st.data(),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    algo=st.sampled_from(["blockwise", "py1e", "py1s", "naive"]),
    shuffle=st.booleans(),
)
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_number_of_appends_at_any_places(
    place: Path, data: st.DataObject, cuts: list[int], algo: str, shuffle: bool
) -> None:
    """Stopped and appended to again and again; each time as if nobody had stopped since the append before."""
    how: dict[str, Any] = {"shuffle_algo": algo, "shuffle": shuffle}
    more: dict[str, list[int]] = {"a": [], "b": []}
    roots, seen = roots_of(place, more), list[int]()
    state: State = json_copy(loader(roots, **how).state_dict())
    for batches in cuts:
        left = read(resumed(state, roots, **how))[0]
        now, state = read(resumed(state, roots, **how), batches)
        seen += now
        assert now == left[: len(now)]
        if len(seen) == 120:
            break
        for sizes in more.values():
            sizes += data.draw(st.lists(st.integers(1, 6), max_size=2), label="appended")
        roots, how["follow_appends"] = roots_of(place, more), data.draw(st.booleans(), label="follow_appends")
        ranks = [resumed(state, roots, **how, world=one, batch_size=2) for one in worlds(2, 1)]
        both = [one for batch, _ in read_together(ranks) for one in batch]
        assert Counter(both[:4]) == Counter(read(resumed(state, roots, **how), 1)[0])
        state = json_copy(resumed(state, roots, **how).state_dict())
    for name, first_id in FIRST_IDS.items():
        described = state["fingerprint"]["streams"].get(name, {})
        shards, start, sizes = [*SIZES[name], *more[name]], 0, list[int]()
        for stop, known in described.get("grown", []):
            size = sum(shards[:known])
            sizes += [size] * ((stop - start) // size)
            start = stop
        check_passes(seen, first_id, sizes, then=sum(shards[: described.get("shards")]))


@pytest.mark.parametrize("follow_appends", [False, True])
def test_nodes_that_do_not_divide_the_canonical_nodes_go_on_with_grown_data(place: Path, follow_appends: bool) -> None:
    how: dict[str, Any] = {"num_canonical_nodes": 4, "shuffle_algo": "blockwise"}
    roots, longer = roots_of(place, {}), roots_of(place, MORE)
    began = [loader(roots, **how, batch_size=2, world=one) for one in worlds(2, 1)]
    steps = read_together(began)
    state = json_copy([next(steps) for _ in range(5)][-1][1])
    elsewhere = [
        resumed(state, longer, **how, batch_size=2, world=one, follow_appends=follow_appends) for one in worlds(3, 1)
    ]
    same = [
        resumed(state, longer, **how, batch_size=3, world=one, follow_appends=follow_appends) for one in worlds(2, 1)
    ]
    left, expected = ([one for batch, _ in read_together(ranks) for one in batch] for ranks in (elsewhere, same))
    assert Counter(left[:96]) == Counter(expected[:96])


@pytest.mark.nightly
def test_workers_and_copies_are_told(place: Path) -> None:
    _, state = read(loader(roots_of(place, {})), 7)
    longer = roots_of(place, MORE)
    expected = read(resumed(state, longer, follow_appends=True))[0]
    for context in ("fork", "spawn"):
        options = {"multiprocessing_context": context, "persistent_workers": True}
        assert read(resumed(state, longer, follow_appends=True, workers=2, loader=options))[0] == expected


def test_selections_count_what_they_select(place: Path) -> None:
    how = {"selection": {"where": "id % 3 != 1"}}
    seen, state = read(loader(roots_of(place, {}), **how), 10)
    at = resumed(state, roots_of(place, MORE), **how, follow_appends=True)
    rest, after = read(at)
    assert after["fingerprint"]["streams"]["a"]["grown"] == [[39, 4]]
    mine = [one for one in seen + rest if one < 1000]
    assert Counter(mine[:39]) == dict.fromkeys([one for one in range(20) if one % 3 != 1], 3)
    assert Counter(mine[39 : 39 + 18]) == dict.fromkeys([one for one in range(27) if one % 3 != 1], 1)


def test_a_cut_phase_goes_on_with_what_it_left(place: Path) -> None:
    _, state = read(loader(roots_of(place, {})), 7)
    phases = [
        Phase(name="early", mix={"a": 3.0, "b": 1.0}, end=40, ended_at=28),
        Phase(name="then", mix={"a": 1.0, "b": 1.0}),
    ]
    seen, _ = read(loader(roots_of(place, {})), 7)
    rest, after = read(resumed(state, roots_of(place, MORE), schedule=schedule(phases), follow_appends=True))
    assert after["fingerprint"]["streams"]["a"]["grown"] == [[40, 4]]
    check_passes(seen + rest, 0, [20, 20], then=27)
    check_passes(seen + rest, 1000, [11], then=17)


@pytest.mark.parametrize("follow_appends", [False, True])
def test_a_stream_that_was_gone_and_grew_goes_on_where_it_stood(place: Path, follow_appends: bool) -> None:
    early = Phase(name="early", mix={"a": 1.0, "b": 1.0}, end=20)
    alone = Phase(name="alone", mix={"b": 1.0}, end=40)
    roots, longer = roots_of(place, {}), roots_of(place, MORE)
    all_phases: dict[str, Any] = {"schedule": schedule([early, alone, Phase(name="again", mix={"a": 1.0})])}
    first, state = read(loader(roots, **all_phases), 6)  # half of a pass over "a"
    without: dict[str, Any] = {"schedule": schedule([early, alone]), "epoch_size": 40}
    second, state = read(resumed(state, {"b": roots["b"]}, **without), 2)
    third, state = read(resumed(state, {"b": roots["b"]}, **without), 1)
    rest, after = read(resumed(state, longer, follow_appends=follow_appends, **all_phases))
    check_passes(first + second + third + rest, 0, [20], then=27 if follow_appends else 20)
    assert after["fingerprint"]["streams"]["a"].get("grown") == ([[20, 4]] if follow_appends else None)
    other = roots_of(place, {})
    other["a"] = write_shards(place / f"other {follow_appends}", [6, 6, 6])
    with raises(StateMismatchError, "streams.a.samples"):
        len(resumed(state, other, **all_phases))


def test_how_often_a_stream_is_read_counts_its_longer_passes(place: Path) -> None:
    _, state = read(loader(roots_of(place, {})), 10)
    at = resumed(state, roots_of(place, MORE), follow_appends=True)
    assert run_state_of(at.dataset).on(dataset_world(at.dataset)).order.weights.repeat == (2 + 37 / 27, 1 + 32 / 17)


@pytest.mark.parametrize("grown", [[[41, 4]], [[40, 6]], [[0, 4]], [[40, 4], [40, 5]], [], "x", [[40]], [[40, -1]]])
def test_an_edited_history_is_refused(place: Path, grown: object) -> None:
    _, state = read(loader(roots_of(place, {})), 10)
    longer = roots_of(place, MORE)
    _, state = read(resumed(state, longer, follow_appends=True), 1)
    state["fingerprint"]["streams"]["a"]["grown"] = grown
    with raises(StateError, "grown"):
        len(resumed(state, longer))
