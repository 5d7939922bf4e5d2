"""Packs: every token once, none over its capacity, and the same rows however they are planned and asked for."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, FormatError, SampleIndexError
from lightning_streaming.sequence.packing.fill import (
    ANY_NUMBER,
    compiled_fill,
    fill_windows,
    fill_windows_in_python,
    filled_by,
    grouped,
)
from lightning_streaming.sequence.packing.packs import Packs
from lightning_streaming.sequence.packing.plan import PackPlan, plan_packs
from lightning_streaming.sequence.packing.settings import AnyPackSettings, BudgetSettings, PackSettings
from tests.tiers import examples

Row = tuple[int, int, int]
"""Position of the document, token with which the row begins, tokens."""

some_lengths = st.lists(
    st.one_of(st.integers(0, 12), st.integers(0, 100), st.sampled_from([0, 8, 16, 64, 1000])), max_size=120
)
pack_settings = st.one_of(
    st.builds(PackSettings, capacity=st.integers(1, 90), method=st.just("concat")),
    st.builds(
        PackSettings,
        capacity=st.sampled_from([1, 5, 16, 63, 64, 65, 90]),
        window=st.integers(1, 50),
        longer=st.sampled_from(["split", "truncate", "drop"]),
    ),
)
all_settings = st.one_of(
    pack_settings,
    st.builds(
        BudgetSettings,
        tokens=st.integers(1, 300),
        buckets=st.integers(1, 5),
        window=st.integers(1, 50),
        longer=st.sampled_from(["truncate", "drop"]),
    ),
)


def id_of(position: int) -> int:
    return 7 * position + 1000


def ids_between(start: int, stop: int) -> NDArray[np.int64]:
    return 7 * np.arange(start, stop) + 1000


def by_ids(lengths: list[int] | NDArray[Any]) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    table = np.asarray(lengths, np.int64)
    return lambda ids: table[(ids - 1000) // 7]


def plan_of(lengths: list[int] | NDArray[Any], how: AnyPackSettings, seed: int = 1, epoch: int = 0, **said: Any) -> Any:
    return plan_packs(ids_between, len(lengths), by_ids(lengths), how, seed, epoch, **said)


def packs_of(lengths: list[int] | NDArray[Any], how: AnyPackSettings, **said: Any) -> Packs:
    return Packs(plan_of(lengths, how, **said), ids_between, by_ids(lengths))


def read(packs: Packs, asked: list[int] | None = None) -> list[list[Row]]:
    """The rows of each pack that is asked for, or of all."""
    numbers = np.arange(len(packs)) if asked is None else np.asarray(asked, np.int64)
    found = packs.rows(numbers)
    assert found.ids.tolist() == [id_of(position) for position in found.positions.tolist()]
    assert (np.diff(found.entries) >= 0).all()
    out: list[list[Row]] = [[] for _ in numbers]
    columns = (found.entries, found.positions, found.starts, found.lengths)
    for pack, *row in zip(*(column.tolist() for column in columns), strict=True):
        out[pack].append(tuple(row))
    return out


def kept_tokens(length: int, how: AnyPackSettings) -> int:
    """How many tokens of a document are in packs."""
    if how.longer == "split" or length <= how.capacity:
        return length
    return how.capacity if how.longer == "truncate" else 0


@given(lengths=some_lengths, how=all_settings)
@example(lengths=[5, 100, 3], how=PackSettings(capacity=16, longer="drop"))
@example(lengths=[5, 100, 3], how=BudgetSettings(tokens=16, longer="drop"))
def test_every_token_that_is_kept_is_in_one_pack(lengths: list[int], how: AnyPackSettings) -> None:
    packs = packs_of(lengths, how)
    pieces = defaultdict(list)
    are_ends = iter(packs.rows(np.arange(len(packs))).are_ends.tolist())
    for rows in read(packs):
        assert rows
        for position, start, length in rows:
            pieces[position].append((start, length, next(are_ends)))
    for position, length in enumerate(lengths):
        reached = 0
        for start, tokens, is_end in sorted(pieces[position]):
            assert start == reached
            assert tokens > 0
            reached += tokens
            assert is_end == (reached == length)
        assert reached == kept_tokens(length, how)
    assert packs.num_tokens == sum(kept_tokens(length, how) for length in lengths)


@given(lengths=some_lengths, how=all_settings)
def test_no_pack_is_over_its_capacity(lengths: list[int], how: AnyPackSettings) -> None:
    packs, room = packs_of(lengths, how), 0
    for rows in read(packs):
        sizes = [length for _, _, length in rows]
        padded = len(rows) * max(sizes) if isinstance(how, BudgetSettings) else sum(sizes)
        assert padded <= how.capacity
        room += padded if isinstance(how, BudgetSettings) else how.capacity
        assert [position for position, _, _ in rows] == sorted({position for position, _, _ in rows})
    assert packs.token_room == room == packs.rows(np.arange(len(packs))).rooms(how).sum()


@given(lengths=some_lengths, capacity=st.integers(1, 90))
def test_concat_cuts_one_stream_of_tokens(lengths: list[int], capacity: int) -> None:
    packs = packs_of(lengths, PackSettings(capacity=capacity, method="concat"))
    stream = [(position, token) for position, length in enumerate(lengths) for token in range(length)]
    found = [
        [(position, token) for position, start, length in rows for token in range(start, start + length)]
        for rows in read(packs)
    ]
    assert found == [stream[start : start + capacity] for start in range(0, len(stream), capacity)]


def plain_best_fit(lengths: list[int], how: PackSettings, first: int) -> list[list[Row]]:
    """One window, as the definition says it."""
    full: list[list[Row]] = []
    items: list[Row] = []
    for place, length in enumerate(lengths):
        start = 0
        if how.longer == "split" and length > how.capacity:
            start = length // how.capacity * how.capacity
            full += [[(first + place, token, how.capacity)] for token in range(0, start, how.capacity)]
        items.append((first + place, start, kept_tokens(length, how) - start))
    packs: list[list[Row]] = []
    rooms: list[int] = []
    came: list[int] = []  # when each pack came to have its room
    for turn, item in enumerate(sorted((one for one in items if one[2]), key=lambda one: (-one[2], one[0]))):
        enough = [pack for pack, room in enumerate(rooms) if room >= item[2]]
        if enough:
            chosen = min(enough, key=lambda pack: (rooms[pack], -came[pack]))
        else:
            chosen = len(packs)
            packs.append([])
            rooms.append(how.capacity)
            came.append(turn)
        packs[chosen].append(item)
        rooms[chosen] -= item[2]
        came[chosen] = turn
    return [*map(sorted, packs), *full]


@given(
    lengths=some_lengths,
    how=pack_settings.filter(lambda how: how.method == "best_fit"),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 5),
)
def test_best_fit_is_what_its_definition_says(lengths: list[int], how: PackSettings, seed: int, epoch: int) -> None:
    packs = packs_of(lengths, how, seed=seed, epoch=epoch)
    expected = [
        plain_best_fit(lengths[first : first + how.window], how, first) for first in range(0, len(lengths), how.window)
    ]
    found = read(packs)
    for window in expected:
        assert sorted(found[: len(window)]) == sorted(window)
        del found[: len(window)]
    assert not found


def plain_groups(lengths: list[int], tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for place, length in enumerate(lengths):
        sizes = [lengths[one] for one in groups[-1]] if groups else []
        if not sizes or max(*sizes, length) * (len(sizes) + 1) > tokens:
            groups.append([])
        groups[-1].append(place)
    return groups


@given(lengths=st.lists(st.integers(1, 40), max_size=400), tokens=st.integers(40, 5000))
@example(lengths=[1] * 1000, tokens=300)
@example(lengths=[5] + [1] * 300, tokens=600)
def test_a_group_takes_what_its_budget_allows(lengths: list[int], tokens: int) -> None:
    documents, begins = grouped(np.asarray(lengths, np.int64), 1 << 16, tokens, 1)
    assert documents.tolist() == list(range(len(lengths)))
    starts = [group[0] for group in plain_groups(lengths, tokens)]
    assert np.flatnonzero(begins).tolist() == starts


@given(lengths=some_lengths, window=st.integers(1, 50), buckets=st.integers(1, 6))
def test_groups_are_of_one_window_and_buckets_are_ranges_of_length(
    lengths: list[int], window: int, buckets: int
) -> None:
    # A budget this large makes one group of each bucket.
    documents, begins = grouped(np.asarray(lengths, np.int64), window, 10**9, buckets)
    assert sorted(documents.tolist()) == [place for place, length in enumerate(lengths) if length]
    groups: list[list[int]] = [[] for _ in range(begins.sum())]
    for group, document in zip(np.cumsum(begins) - 1, documents.tolist(), strict=True):
        groups[group].append(document)
    windows = [{document // window for document in group} for group in groups]
    assert all(len(one) == 1 for one in windows)
    for (one, of_one), (other, of_other) in pairwise(zip(windows, groups, strict=True)):
        assert of_one == sorted(of_one)
        if one == other:
            assert max(lengths[place] for place in of_one) < min(lengths[place] for place in of_other)
    assert max((windows.count(one) for one in windows), default=0) <= buckets


def web_lengths(count: int) -> NDArray[np.int64]:
    return np.exp(np.random.default_rng(0).normal(np.log(500), 1.1, count)).astype(np.int64) + 1


def test_best_fit_leaves_little_empty() -> None:
    how = PackSettings(capacity=8192)
    packs = packs_of(web_lengths(20 * how.window), how)
    assert packs.num_tokens > 0.99 * len(packs) * how.capacity


def test_buckets_pad_little() -> None:
    lengths = web_lengths(1 << 15)

    def padded(buckets: int) -> int:
        found = read(packs_of(lengths, BudgetSettings(tokens=1 << 16, buckets=buckets, longer="truncate")))
        return sum(len(rows) * max(length for _, _, length in rows) for rows in found)

    assert padded(12) < 1.35 * lengths.sum() < padded(1)


def not_asked(start: int, stop: int) -> NDArray[np.int64]:
    raise AssertionError(f"ids of positions {start} to {stop} were asked for together")


@given(lengths=some_lengths, how=all_settings, data=st.data())
def test_packs_are_the_same_whatever_is_asked_with_them(
    lengths: list[int], how: AnyPackSettings, data: st.DataObject
) -> None:
    packs = packs_of(lengths, how)
    every = read(packs)
    numbers = st.integers(0, len(packs) - 1) if len(packs) else st.nothing()
    asked = data.draw(st.lists(numbers, max_size=20) if len(packs) else st.just([]))
    assert read(packs, asked) == [every[pack] for pack in asked]
    assert read(packs_of(lengths, how), asked) == [every[pack] for pack in asked]
    at_random = Packs(packs.plan, not_asked, by_ids(lengths), ids_at=lambda positions: 7 * positions + 1000)
    assert read(at_random, asked) == [every[pack] for pack in asked]


@given(lengths=some_lengths, how=all_settings)
def test_first_and_last_positions_are_bounds_of_what_is_needed(lengths: list[int], how: AnyPackSettings) -> None:
    packs = packs_of(lengths, how)
    held = [[position for position, _, _ in rows] for rows in read(packs)]
    is_concat = isinstance(how, PackSettings) and how.method == "concat"
    for pack in range(len(packs)):
        first, last = packs.first_position(pack), packs.last_position(pack)
        assert all(first <= position for later in held[pack:] for position in later)
        assert all(position < last for earlier in held[: pack + 1] for position in earlier)
        if is_concat:
            assert (first, last) == (held[pack][0], held[pack][-1] + 1)
        else:
            assert first % how.window == 0
            assert last == min(first + how.window, len(lengths))
            assert first <= held[pack][0]
            assert held[pack][-1] < last
    assert packs.first_position(len(packs)) == len(lengths)


@given(lengths=some_lengths, how=all_settings, threads=st.integers(1, 3), at_once=st.integers(1, 300))
@example(lengths=[5, 30, 7], how=PackSettings(capacity=10, window=2), threads=1, at_once=2)
@settings(max_examples=examples(60))
def test_a_plan_is_the_same_however_it_is_made(
    lengths: list[int], how: AnyPackSettings, threads: int, at_once: int
) -> None:
    lengths = 5 * lengths  # more than a block of concat
    told: list[int] = []
    plan = plan_of(lengths, how, threads=threads, at_once=at_once, progress=told.append)
    assert_same_arrays(plan, plan_of(lengths, how))
    assert all(more > 0 for more in told)
    assert sum(told) == (len(lengths) if told else 0)


def assert_same_arrays(one: PackPlan, other: PackPlan) -> None:
    assert one.arrays().keys() == other.arrays().keys()
    for name, array in one.arrays().items():
        assert array.dtype == other.arrays()[name].dtype
        np.testing.assert_array_equal(array, other.arrays()[name], err_msg=name)


rooms_and_lengths = st.sampled_from([1, 40, 63, 64, 300, 5000, 300_000]).flatmap(
    lambda capacity: st.tuples(
        st.just(capacity),
        st.integers(1, 40).flatmap(
            lambda width: st.lists(
                st.lists(
                    st.one_of(st.integers(0, capacity), st.integers(0, min(capacity, 9))),
                    min_size=width,
                    max_size=width,
                ).map(lambda window: sorted(window, reverse=True)),
                min_size=1,
                max_size=6,
            )
        ),
    )
)


most_documents = st.sampled_from([1, 2, 3, 7, ANY_NUMBER])


@given(case=rooms_and_lengths, most=most_documents)
@settings(max_examples=examples(50))
def test_filling_by_lists_is_filling_by_bits(case: tuple[int, list[list[int]]], most: int) -> None:
    capacity, windows = case
    lengths = np.asarray(windows, np.int32)
    by_lists = fill_windows_in_python(lengths, capacity, most)
    assert_same_packs(lengths, by_lists, filled_by(fill_windows)(lengths, capacity, most))
    for packs, of_window in zip(by_lists, lengths, strict=True):
        packs = packs[of_window > 0]
        assert np.bincount(packs).max(initial=0) <= most
        assert np.bincount(packs, of_window[of_window > 0]).max(initial=0) <= capacity


def assert_same_packs(lengths: NDArray[np.int32], one: NDArray[np.uint16], other: NDArray[np.uint16]) -> None:
    np.testing.assert_array_equal(np.where(lengths > 0, one, 0), np.where(lengths > 0, other, 0))


@pytest.mark.nightly
def test_compiled_and_plain_packs_are_the_same() -> None:
    pytest.importorskip("numba")
    fill = compiled_fill()

    @given(case=rooms_and_lengths, most=most_documents)
    def check(case: tuple[int, list[list[int]]], most: int) -> None:
        lengths = np.asarray(case[1], np.int32)
        assert_same_packs(lengths, fill_windows_in_python(lengths, case[0], most), fill(lengths, case[0], most))

    check()
    # All places of the largest window, in as many packs.
    assert fill(np.full((1, 1 << 16), 100, np.int32), 100, ANY_NUMBER)[0].tolist() == list(range(1 << 16))
    how = PackSettings(capacity=1000, window=512)
    assert_same_arrays(
        plan_of(web_lengths(5000), how, compiled=True, at_once=2000), plan_of(web_lengths(5000), how, compiled=False)
    )


def test_the_order_of_packs_depends_on_seed_epoch_and_window() -> None:
    lengths = [5] * 80
    how = PackSettings(capacity=5, window=40)
    first = read(packs_of(lengths, how))
    assert sorted(first[:40]) == [[(position, 0, 5)] for position in range(40)]
    orders = {tuple(rows[0][0] for rows in read(packs_of(lengths, how, seed=seed))[:40]) for seed in range(20)}
    orders |= {tuple(rows[0][0] for rows in read(packs_of(lengths, how, epoch=epoch))[:40]) for epoch in range(1, 20)}
    orders.add(tuple(rows[0][0] - 40 for rows in first[40:]))
    assert len(orders) == 40


def test_long_documents_do_not_come_first() -> None:
    how = PackSettings(capacity=8192)
    found = packs_of(web_lengths(50 * how.window), how)
    counts = np.bincount(found.rows(np.arange(len(found))).entries)
    before = found.plan.arrays()["packs_before"]
    halves = [np.array_split(counts[start:stop], 2) for start, stop in pairwise(before)]
    first, second = (np.concatenate(half).mean() for half in zip(*halves, strict=True))
    assert first == pytest.approx(second, rel=0.05)


GOLDEN = {
    PackSettings(capacity=2048, method="concat"): "3340c18ce9427f2d",
    PackSettings(capacity=2048, window=256): "c6708091071cc301",
    PackSettings(capacity=1024, window=300, longer="truncate"): "b3c9e27edeb40bb8",
    BudgetSettings(tokens=8192, window=512, buckets=5, longer="drop"): "29278f9d02c17174",
}


@pytest.mark.parametrize(("how", "expected"), GOLDEN.items(), ids=lambda one: getattr(one, "method", "budget"))
def test_the_same_settings_mean_the_same_packs_in_every_release(how: AnyPackSettings, expected: str) -> None:
    lengths = np.arange(2000) ** 2 % 1009 * np.where(np.arange(2000) % 7, 1, 5)
    rows = Packs(plan_of(lengths, how, seed=9176, epoch=3), ids_between, by_ids(lengths))
    found = rows.rows(np.arange(len(rows)))
    data = b"".join(array.astype("<i8").tobytes() for array in (found.entries, found.positions, found.starts))
    assert hashlib.blake2b(data, digest_size=8).hexdigest() == expected


class Asked:
    """Notes which positions are asked for."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def ids_between(self, start: int, stop: int) -> NDArray[np.int64]:
        self.ranges.append((start, stop))
        return ids_between(start, stop)


def test_windows_are_asked_for_together_and_once() -> None:
    lengths, how, asked = [10] * 1000, PackSettings(capacity=10, window=100), Asked()
    packs = Packs(plan_of(lengths, how), asked.ids_between, by_ids(lengths))
    packs.rows(np.asarray([950, 10, 20, 170, 510]))
    assert asked.ranges == [(0, 200), (500, 600), (900, 1000)]
    packs.rows(np.asarray([190, 210, 30]))
    assert asked.ranges[3:] == [(200, 300)]


def test_the_last_windows_are_kept_only() -> None:
    lengths, asked = np.full(6 << 16, 10), Asked()
    how = BudgetSettings(tokens=10 << 16)  # one group of each window
    packs = Packs(plan_of(lengths, how), asked.ids_between, by_ids(lengths))
    for pack in (0, 1, 2, 3, 0, 4, 0, 1):
        packs.rows(np.asarray([pack]))
    assert [start >> 16 for start, _ in asked.ranges] == [0, 1, 2, 3, 4, 1]


def test_concat_asks_for_what_is_needed() -> None:
    lengths, asked = [10] * 10_000, Asked()
    packs = Packs(plan_of(lengths, PackSettings(capacity=100, method="concat")), asked.ids_between, by_ids(lengths))
    packs.rows(np.asarray([900, 3, 2, 26]))
    assert asked.ranges == [(0, 512), (8960, 9216)]


@pytest.mark.parametrize("how", GOLDEN, ids=lambda one: getattr(one, "method", "budget"))
def test_a_plan_that_was_kept_is_the_plan(how: AnyPackSettings) -> None:
    lengths = web_lengths(1000)
    plan = plan_of(lengths, how)
    arrays = plan.arrays()
    for array in arrays.values():
        array.flags.writeable = False
    kept = Packs(PackPlan.of_arrays(how, arrays), ids_between, by_ids(lengths))
    assert read(kept) == read(Packs(plan, ids_between, by_ids(lengths)))
    assert kept.plan.num_positions == 1000


@pytest.mark.parametrize("how", GOLDEN, ids=lambda one: getattr(one, "method", "budget"))
def test_arrays_of_another_plan_are_refused(how: AnyPackSettings) -> None:
    arrays = plan_of(web_lengths(1000), how).arrays()
    with pytest.raises(FormatError, match="has arrays"):
        PackPlan.of_arrays(how, {**arrays, "more": arrays["totals"]})
    with pytest.raises(FormatError, match="has arrays"):
        PackPlan.of_arrays(how, {name: array.astype(np.float64) for name, array in arrays.items()})
    for name in arrays:
        with pytest.raises(FormatError, match="do not fit each other"):
            PackPlan.of_arrays(how, {**arrays, name: np.append(arrays[name], arrays[name].dtype.type(0))})


@pytest.mark.parametrize("how", GOLDEN, ids=lambda one: getattr(one, "method", "budget"))
def test_an_epoch_without_documents_has_no_packs(how: AnyPackSettings) -> None:
    packs = packs_of([], how)
    assert (len(packs), packs.num_tokens, packs.first_position(0)) == (0, 0, 0)
    assert read(packs) == []
    assert len(packs_of([0] * 700, how)) == 0
    with pytest.raises(SampleIndexError, match="packs must be in"):
        packs.rows(np.asarray([0]))
    with pytest.raises(SampleIndexError, match="packs must be in"):
        packs.last_position(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PackSettings(capacity=0), r"capacity must be a whole number in \[1, 4194304\], but got 0"),
        (lambda: PackSettings(capacity=1 << 23), "capacity must be"),
        (lambda: PackSettings(capacity=True), "capacity must be"),
        (lambda: PackSettings(capacity=1, window=1 << 17), r"window must be a whole number in \[1, 65536\]"),
        (lambda: PackSettings(capacity=1, method="first_fit"), "method must be one of best_fit, concat"),  # type: ignore[arg-type]
        (lambda: PackSettings(capacity=1, longer="cut"), "longer must be one of drop, error, split, truncate"),  # type: ignore[arg-type]
        (lambda: PackSettings(capacity=1, method="concat", longer="drop"), "leave longer at 'split'"),
        (lambda: BudgetSettings(tokens=0), "tokens must be"),
        (lambda: BudgetSettings(tokens=1, buckets=0), "buckets must be"),
        (lambda: BudgetSettings(tokens=1, window=0), "window must be"),
        (lambda: BudgetSettings(tokens=1, longer="split"), "longer must be one of drop, error, truncate"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_document_that_is_too_long_is_named() -> None:
    lengths = [5] * 50
    lengths[37] = 11
    with pytest.raises(ConfigError, match=r"position 37 .* has 11 tokens, more than capacity=10 .*'split'"):
        plan_of(lengths, PackSettings(capacity=10, window=8, longer="error"), at_once=16)
    with pytest.raises(ConfigError, match=r"position 37 .* more than tokens=10 .* longer='truncate' or 'drop'"):
        plan_of(lengths, BudgetSettings(tokens=10, window=8), at_once=16)
    assert len(plan_of(lengths[:37], PackSettings(capacity=10, longer="error"))) == 19


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (np.ones(3), "whole numbers, but returned float64"),
        (np.ones(2, np.int32), r"3 documents .* lengths \(2,\)"),
        (np.asarray([4, -2, 1]), "sample 1007 has a length of -2"),
    ],
)
def test_lengths_that_cannot_be_are_refused(found: NDArray[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_packs(ids_between, 3, lambda ids: found, PackSettings(capacity=4), 0, 0)
