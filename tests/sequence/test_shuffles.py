"""Shuffles: the reference's permutations, each sample once, the same samples for a canonical node in every epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence import shuffles
from lightning_streaming.sequence.shuffles import (
    SHUFFLES,
    ShuffleTask,
    Spans,
    shuffle_into,
    spans_per_canonical_node,
    split_spans,
)
from tests.sequence.builders import shuffle_map
from tests.sequence.reference import assert_is, load

COMPONENTS = load("order_components.json")
CASES = COMPONENTS["shuffles"]


def shuffle_case(case: dict[str, Any]) -> NDArray[np.int64]:
    units = np.asarray(COMPONENTS["unit_sets"][case["units"]], np.int64)
    return shuffle_map(case["algo"], units, case["canonical"], case["seed"], case["epoch"], case["block"])


def name(case: dict[str, Any]) -> str:
    return f"{case['algo']}-{case['units']}-{case['canonical']}-{case['epoch']}"


def test_all_golden_shuffles_are_here() -> None:
    assert len(CASES) == 42
    assert {case["algo"] for case in CASES} <= set(SHUFFLES)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_shuffle_is_that_of_the_reference(case: dict[str, Any]) -> None:
    assert_is(shuffle_case(case), case["out"])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_shuffle_fills_four_byte_ids_as_it_fills_eight_byte_ids(case: dict[str, Any]) -> None:
    units = np.asarray(COMPONENTS["unit_sets"][case["units"]], np.int64)
    task = ShuffleTask(
        units=units,
        num_canonical_nodes=case["canonical"],
        seed=case["seed"],
        epoch=case["epoch"],
        block_size=case["block"],
    )
    out = np.empty(task.num_samples, np.uint32)
    shuffle_into(case["algo"], task, out)
    assert out.tolist() == shuffle_case(case).tolist()


@given(
    algo=st.sampled_from(sorted(SHUFFLES)),
    units=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    canonical=st.integers(1, 12),
    seed=st.integers(0, 2**60),
    epoch=st.integers(0, 9),
    block=st.integers(2, 100),
)
def test_a_shuffle_reads_every_sample_once(
    algo: str, units: list[int], canonical: int, seed: int, epoch: int, block: int
) -> None:
    canonical = min(canonical, sum(units))
    shuffled = shuffle_map(algo, np.asarray(units, np.int64), canonical, seed, epoch, block)
    assert sorted(shuffled.tolist()) == list(range(sum(units)))


@pytest.mark.parametrize("algo", sorted(set(SHUFFLES) - {"naive"}))
def test_a_canonical_node_reads_the_same_samples_in_every_epoch(algo: str) -> None:
    units = np.asarray([7, 5, 9, 4, 11, 3, 8, 6], np.int64)
    first, second = (np.split(shuffle_map(algo, units, 4, 1, epoch, 20), [13, 26, 39]) for epoch in (0, 1))
    for once, again in zip(first, second, strict=True):
        assert once.tolist() != again.tolist()
        assert sorted(once.tolist()) == sorted(again.tolist())


@pytest.mark.parametrize("algo", sorted(SHUFFLES))
def test_fewer_samples_than_canonical_nodes_are_shuffled_all_the_same(algo: str) -> None:
    assert sorted(shuffle_map(algo, np.asarray([2, 1], np.int64), 4, 0, 0, 10).tolist()) == [0, 1, 2]


@pytest.mark.parametrize("argument", ["num_canonical_nodes", "block_size", "seed", "epoch"])
def test_a_number_that_cannot_work_is_refused(argument: str) -> None:
    numbers = {"num_canonical_nodes": 1, "seed": 0, "epoch": 0, "block_size": 1, argument: -1}
    with pytest.raises(ConfigError, match="-1"):
        shuffle_map("py1s", np.asarray([1], np.int64), **numbers)


def walk_and_cut(sizes: list[int], num_parts: int) -> list[list[tuple[int, int]]]:
    """``cut`` spelled out: walk the spans, cutting the one that reaches across a part's end."""
    spans = [(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))]
    parts, done = [], 0
    for part in range(1, num_parts + 1):
        end, pieces = sum(sizes) * part // num_parts, []
        while spans and done + spans[0][1] - spans[0][0] <= end:
            pieces.append(spans.pop(0))
            done += pieces[-1][1] - pieces[-1][0]
        if spans and done < end:
            start, stop = spans[0]
            pieces.append((start, start + end - done))
            spans[0], done = (start + end - done, stop), end
        parts.append(pieces)
    return parts


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=15), num_parts=st.integers(1, 20))
@example(sizes=[4, 6], num_parts=2)
@example(sizes=[9], num_parts=4)
def test_cutting_at_once_equals_walking(sizes: list[int], num_parts: int) -> None:
    lengths = np.asarray(sizes, np.int64)
    parts = split_spans(Spans(np.cumsum(lengths) - lengths, lengths), num_parts)
    as_pairs = [list(zip(part.firsts.tolist(), (part.firsts + part.sizes).tolist(), strict=True)) for part in parts]
    assert as_pairs == walk_and_cut(sizes, num_parts)


def literal_py1e(task: ShuffleTask) -> list[int]:
    """The algorithm as it is defined: all positions of a canonical node at once, sorted stably."""
    generator, order = task.epoch_generator(), []
    for part in spans_per_canonical_node(task, generator):
        ids, arrivals, start = [], np.arange(part.num_samples, dtype=np.float64), 0
        for first, size in zip(part.firsts.tolist(), part.sizes.tolist(), strict=True):
            span = np.arange(first, first + size)
            generator.shuffle(span)
            ids += span.tolist()
        for size in part.sizes.tolist():
            block = int(generator.integers(int(0.75 * task.block_size), int(1.25 * task.block_size)))
            reach = max((block - size) / 2, 0)
            earliest, latest = max(-reach, -start), min(reach, len(arrivals) - start - size)
            arrivals[start : start + size] += generator.uniform(earliest, latest, size=size)
            start += size
        order += [ids[place] for place in np.argsort(arrivals, kind="stable").tolist()]
    return order


def literal_py1br(task: ShuffleTask) -> list[int]:
    """The algorithm as it is defined, on a list."""
    generator, order = task.epoch_generator(), np.empty(0, np.int64)
    shortest, longest = int(0.75 * task.block_size), int(1.25 * task.block_size)
    parts = spans_per_canonical_node(task, generator)
    staggers = generator.integers(0, shortest, size=len(parts)).tolist()
    for part, stagger in zip(parts, staggers, strict=True):
        start = place = len(order)
        runs = zip(part.firsts.tolist(), part.sizes.tolist(), strict=True)
        order = np.concatenate([order, *(np.arange(first, first + size) for first, size in runs)])
        ranges = []
        while place < len(order):
            length = int(generator.integers(shortest, longest))
            ranges.append((max(place - stagger, start), min(place + length - stagger, len(order))))
            place += ranges[-1][1] - ranges[-1][0]
        for first, stop in ranges:
            generator.shuffle(order[first:stop])
    return list(order.tolist())


LITERAL = {"py1e": literal_py1e, "py1br": literal_py1br}


@pytest.mark.parametrize("algo", sorted(LITERAL))
@given(
    units=st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    canonical=st.integers(1, 5),
    block=st.integers(2, 9000),
    seed=st.integers(0, 2**40),
    small=st.booleans(),
)
def test_a_shuffle_in_pieces_equals_the_whole(
    algo: str, units: list[int], canonical: int, block: int, seed: int, small: bool
) -> None:
    task = ShuffleTask(
        units=np.asarray(units, np.int64),
        num_canonical_nodes=min(canonical, sum(units)),
        seed=seed,
        epoch=1,
        block_size=block,
    )
    with pytest.MonkeyPatch.context() as patch:
        if small:  # so that a part has many windows and buckets
            patch.setattr(shuffles, "_WINDOW", 97)
            patch.setattr(shuffles, "_SMALLEST_BUCKET", 16)
            patch.setattr(shuffles, "_LARGEST_BUFFER", 100)
        out = np.empty(task.num_samples, np.uint32)
        shuffle_into(algo, task, out)
    assert out.tolist() == LITERAL[algo](task)


def test_a_large_epoch_of_many_windows_equals_the_whole() -> None:
    units = np.random.default_rng(0).integers(1, 9000, size=200)
    task = ShuffleTask(units=units, num_canonical_nodes=2, seed=3, epoch=4, block_size=100_000)
    out = np.empty(task.num_samples, np.uint32)
    shuffle_into("py1e", task, out)
    assert out.tolist() == literal_py1e(task)


def test_samples_that_arrive_at_the_same_place_keep_their_order() -> None:
    generator = np.random.default_rng(0)
    places = np.arange(5000)
    found = np.clip(places + np.round(generator.uniform(-40, 40, 5000)), 0, 4999)
    ids = generator.permutation(5000).astype(np.uint32)
    expected = ids[np.argsort(found, kind="stable")]
    shuffles.order_by_arrival(ids, iter(np.split(found, range(64, 5000, 64))), reach=40)
    assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize(("algo", "block"), [("py1e", 0), ("py1b", 0), ("py1br", 0), ("py1br", 1)])
def test_a_block_that_is_too_small_is_refused_by_those_who_need_one(algo: str, block: int) -> None:
    with pytest.raises(ConfigError, match=f"'{algo}' needs blocks"):
        shuffle_map(algo, np.asarray([5], np.int64), 1, 0, 0, block)


@pytest.mark.parametrize(("algo", "block"), [("naive", 0), ("py1s", 0), ("py2s", 0), ("py1e", 1), ("py1b", 1)])
def test_a_small_block_is_fine_with_the_others(algo: str, block: int) -> None:
    assert sorted(shuffle_map(algo, np.asarray([5, 3], np.int64), 2, 0, 0, block).tolist()) == list(range(8))


def test_py1b_mixes_each_block_and_nothing_else() -> None:
    units = np.full(10, 10, np.int64)
    spans = shuffle_map("py1b", units, 1, 5, 0, 1)  # blocks of one sample
    mixed = shuffle_map("py1b", units, 1, 5, 0, 25)
    assert spans.tolist() != mixed.tolist()
    for start in range(0, 100, 25):
        assert sorted(spans[start : start + 25]) == sorted(mixed[start : start + 25])


def test_an_algorithm_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=", ".join(sorted(SHUFFLES))):
        shuffle_map("py3x", np.asarray([5], np.int64), 1, 0, 0, 1)
