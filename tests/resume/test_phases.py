"""Mixtures that change within an epoch, in every way to read: machines, workers, batches, keys, skips, selections."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_streaming import Stream, StreamingDataLoader, World
from lightning_streaming.logs import read_sample_log
from lightning_streaming.reading.dataset import state_at
from lightning_streaming.reading.position import position_of
from lightning_streaming.resume.state import Cursor
from tests.helpers import State, json_copy, read_together, worlds
from tests.resume.phased import (
    FIRST_ID,
    NAMES,
    PHASES,
    SIZES,
    gone_on,
    phased_loader,
    read,
    stream_of,
)
from tests.schedules import Phase
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def read_by_all(
    root: Path, nodes: int, ranks: int, state: State | None = None, steps: int | None = None, **asked: Any
) -> tuple[list[int], State]:
    """The global batches of all ranks, as one list, and the state after them."""
    loaders = [phased_loader(root, world=world, **asked) for world in worlds(nodes, ranks)]
    for loader in loaders if state is not None else ():
        loader.load_state_dict(json_copy(state or {}))
    found: list[int] = []
    for number, (batch, _) in enumerate(read_together(loaders), 1):
        found += batch
        if number == steps:
            break
    return found, loaders[0].state_dict()


MACHINES = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 2), st.integers(1, 5))


@given(legs=st.lists(st.tuples(MACHINES, st.integers(1, 6)), max_size=3), last=MACHINES)
@settings(deadline=None, max_examples=examples(20))
def test_any_machines_read_the_same_global_sequence(
    root: Path, whole: list[int], legs: list[tuple[tuple[int, int, int], int]], last: tuple[int, int, int]
) -> None:
    found: list[int] = []
    state: State | None = None
    for (nodes, ranks, batch_size), steps in legs:
        part, state = read_by_all(root, nodes, ranks, state, steps, batch_size=batch_size)
        found += part
        if state["epoch"]:
            break
    else:
        found += read_by_all(root, last[0], last[1], state, batch_size=last[2])[0]
    assert found[:160] == whole
    # What is read again at the end keeps the ranks even.
    assert len(found) - 160 < 16


EVEN = [
    Phase(name="one", end=40, mix={"web": 3, "code": 1}),
    Phase(name="two", end=120, mix={"web": [3, 1], "math": [1, 3]}, steps=2),
    Phase(name="three", mix={"math": 1, "news": 1}),
]


def read_positions(loaders: list[StreamingDataLoader], steps: int | None = None) -> tuple[dict[int, int], State]:
    """What is read at each position of the sequence by all ranks, and the state after it."""
    found: dict[int, int] = {}
    after: State = {}
    for number, step in enumerate(zip(*loaders, strict=True), 1):
        after = loaders[0].state_dict()
        for batch, keys in step:
            found.update(zip(keys.positions.tolist(), batch["id"].tolist(), strict=True))
        if number == steps:
            break
    return found, after


@pytest.mark.rotate(2)
@pytest.mark.parametrize("method", ["stratified", "per_stream", "device_per_stream"])
def test_composed_batches_begin_anew_at_each_border_and_stay_what_they_are(root: Path, method: str) -> None:
    asked: dict[str, Any] = {"batching_method": method, "shuffle_algo": "py1s", "num_canonical_nodes": 2}
    asked |= {"phases": EVEN, "loader": {"return_keys": True}}

    def begun() -> list[StreamingDataLoader]:
        return [phased_loader(root, world=world, batch_size=4, **asked) for world in worlds(2, 1)]

    uncut, _ = read_positions(begun())
    in_order = [uncut[position] for position in range(len(uncut))]
    batches = [{stream_of(one) for one in in_order[first : first + 8]} for first in range(0, len(uncut), 8)]
    phases = [{"web", "code"}, {"web", "math"}, {"math", "news"}]
    of_phase = [[names <= phase for phase in phases] for names in batches]
    assert all(any(ones) for ones in of_phase)
    assert not [names for names in batches if len(names) > 1 and method == "per_stream"]
    assert not [names for names in batches if len(names) < 2 and method == "stratified"]
    for steps in (2, 6, len(batches) - 2):
        before, state = read_positions(begun(), steps)
        alone = gone_on(root, state, **asked, batch_size=3)
        after, _ = read_positions([alone])
        assert set(before) == set(range(8 * steps))
        assert before | after == uncut


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_other_start_methods_read_the_same(root: Path, whole: list[int], method: str) -> None:
    loader = phased_loader(root, workers=1, loader={"multiprocessing_context": method})
    before = read(loader, 12)
    state = loader.state_dict()
    assert before == whole[:48]
    assert before + read(gone_on(root, state, names=("web", "math", "news"), workers=2)) == whole


def test_plain_loaders_read_the_same(root: Path, whole: list[int]) -> None:
    dataset = phased_loader(root).dataset
    plain = DataLoader(dataset, batch_size=4, num_workers=2)
    assert [one for batch in plain for one in batch["id"].tolist()] == whole
    again = phased_loader(root).dataset
    assert [sample["id"] for sample in again] == whole


def test_a_dataset_counts_by_itself(root: Path, whole: list[int]) -> None:
    dataset = phased_loader(root).dataset
    samples = iter(dataset)
    before = [next(samples)["id"] for _ in range(43)]
    state = dataset.state_dict()
    assert (state["sample_in_epoch"], list(state["fingerprint"]["schedule"])) == (43, ["broad", "ramp"])
    assert state == dataset.state_dict(43) == state_at(dataset, Cursor(0, 43))
    onward = phased_loader(root).dataset
    onward.load_state_dict(json_copy(state))
    assert before + [sample["id"] for sample in onward] == whole


@pytest.mark.parametrize(("batch_size", "drop_last", "batches"), [(4, False, 40), (7, False, 23), (7, True, 22)])
def test_lengths_are_those_of_the_whole_epoch(root: Path, batch_size: int, drop_last: bool, batches: int) -> None:
    loader = phased_loader(root, batch_size=batch_size, drop_last=drop_last)
    assert (len(loader), position_of(loader).batches_of_epoch()) == (batches, batches)
    read(loader, 9)
    onward = gone_on(root, loader.state_dict(), batch_size=batch_size, drop_last=drop_last)
    assert position_of(onward).batches_of_epoch() == batches
    assert len(list(onward)) == batches - 9


@pytest.mark.rotate(2)
@pytest.mark.parametrize("skip", ["8-12", "0-10", "29-39", "9-31"])
def test_skipped_batches_may_lie_across_borders(root: Path, whole: list[int], skip: str) -> None:
    first, last = map(int, skip.split("-"))
    kept = whole[: 4 * first] + whole[4 * (last + 1) :]
    assert read(phased_loader(root, skip=[skip])) == kept
    loader = phased_loader(root, skip=[skip])
    before = read(loader, 4)
    state = loader.state_dict()
    # The samples stay those that were placed, also on other machines and with another future.
    after = read(gone_on(root, state, skip=[skip], batch_size=3, workers=1))
    assert before + after == kept


def test_keys_tell_where_each_sample_is_and_make_it_again(root: Path, whole: list[int]) -> None:
    loader = phased_loader(root, loader={"return_keys": True, "return_valid_mask": True})
    position = 0
    for batch, keys in loader:
        assert [FIRST_ID[key.stream] + 5 * key.shard + key.sample_index for key in keys] == batch["id"].tolist()
        assert keys.positions.tolist() == list(range(position, position + len(keys)))
        assert keys.valid is not None
        assert keys.valid.all()
        assert [loader.dataset.restore_sample(key)["id"] for key in keys] == batch["id"].tolist()
        position += len(keys)
    without = phased_loader(root, [PHASES[1], PHASES[2]], ("web", "math", "news"))
    assert without.dataset.restore_sample(keys[0]) == {"id": whole[156]}


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("nodes", "ranks", "batch_size"), [(1, 3, 5), (8, 1, 3), (2, 2, 7)])
def test_over_all_ranks_every_place_is_valid_once(root: Path, nodes: int, ranks: int, batch_size: int) -> None:
    valid: Counter[int] = Counter()
    for world in worlds(nodes, ranks):
        loader = phased_loader(
            root, world=world, batch_size=batch_size, loader={"return_keys": True, "return_valid_mask": True}
        )
        for _, keys in loader:
            valid.update(keys.positions[np.asarray(keys.valid)].tolist())
    assert valid == Counter(range(160))


def test_the_log_of_samples_tells_them_in_turn(root: Path, whole: list[int], tmp_path: Path) -> None:
    loader = phased_loader(root, debug={"sample_log": tmp_path})
    assert read(loader) == whole
    (path,) = tmp_path.iterdir()
    lines = list(read_sample_log(path))
    assert [line.key.position for line in lines] == list(range(160))
    assert [loader.dataset.restore_sample(line.key)["id"] for line in lines] == whole


def test_replicated_ranks_read_the_same(root: Path, whole: list[int]) -> None:
    world = [World(num_nodes=1, ranks_per_node=2, rank=rank) for rank in (0, 1)]
    assert [read(phased_loader(root, world=one, replication=2)) for one in world] == [whole, whole]


def test_selections_are_streams_like_others(root: Path) -> None:
    streams = {
        "web": Stream(remote=str(root / "web"), selection={"fraction": ":50%"}),
        "rest": Stream(remote=str(root / "web"), selection={"fraction": "50%:"}),
        "math": Stream(remote=str(root / "math"), selection={"where": "id % 2 == 0"}),
        "news": Stream(remote=str(root / "news"), selection={"indices": [0, 1, 2, 20]}),
    }
    mix: dict[str, Any] = {"web": 2, "math": [0, 1], "news": 1}
    phases = [Phase(name="one", end=80, mix=mix, steps=3), Phase(name="two", mix={"rest": 1, "math": 1})]
    ids = read(phased_loader(root, phases, streams=streams))
    first, second = ({one for one in part if stream_of(one) == "web"} for part in (ids[:80], ids[80:]))
    assert not first & second
    assert {one - FIRST_ID["web"] for one in first | second} == set(range(60))
    assert {one - FIRST_ID["math"] for one in ids if stream_of(one) == "math"} <= set(range(0, 13, 2))
    assert {one - FIRST_ID["news"] for one in ids if stream_of(one) == "news"} == {0, 1, 2, 20}
    for name in ("math", "news"):
        counts = Counter(one for one in ids if stream_of(one) == name)
        assert max(counts.values()) - min(counts.values()) <= 1
    loader = phased_loader(root, phases, streams=streams)
    before = read(loader, 7)
    state = loader.state_dict()
    assert before + read(gone_on(root, state, phases=phases, streams=streams)) == ids
    changed = {**streams, "rest": Stream(remote=str(root / "web"), selection={"fraction": "60%:"})}
    assert len(read(gone_on(root, state, phases=phases, streams=changed))) == 160 - 28


def test_nodes_settle_canonical_nodes_and_with_them_the_borders(root: Path) -> None:
    loaders = [phased_loader(root, world=world, num_canonical_nodes=None) for world in worlds(3, 1)]
    assert len({len(list(loader)) for loader in loaders}) == 1
    state = loaders[0].state_dict()
    stops = {name: one["end"] for name, one in state["fingerprint"]["schedule"].items()}
    nodes = state["num_canonical_nodes"]
    assert not [stop for stop in stops.values() if stop % nodes]


def test_many_steps_of_a_few_samples_are_read_as_one_sequence(root: Path) -> None:
    mix: dict[str, Any] = {"web": [1, 0], "math": [0, 1]}
    ramp = [Phase(name="ramp", mix=mix, steps=1000)]
    ids = read(phased_loader(root, ramp, ("web", "math"), num_canonical_nodes=1, batch_size=16))
    assert len(ids) == 160
    share = [sum(stream_of(one) == "math" for one in ids[first : first + 40]) for first in range(0, 160, 40)]
    assert share == [5, 15, 25, 35]
    assert ids == read_by_all(root, 1, 4, phases=ramp, names=("web", "math"), num_canonical_nodes=1, batch_size=5)[0]


def test_all_streams_are_read_as_the_epoch_says(root: Path) -> None:
    loader = phased_loader(root)
    read_of = Counter(map(stream_of, read(loader)))
    assert {name: stream.choose for name, stream in loader.dataset.streams.items()} == read_of
    assert loader.dataset.streams["math"].repeat == read_of["math"] / SIZES["math"]
    assert set(read_of) == set(NAMES)
