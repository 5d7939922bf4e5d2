from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.order import sampling
from lightning_streaming.order.names import SamplingMethod
from lightning_streaming.order.sampling import Resampled, per_shard_choice, resample
from lightning_streaming.order.settings import OrderSettings
from tests.order.reference import load

CASES = load("order_components.json")["sampling"]
shards = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def draw(
    sizes: list[int],
    choose: int,
    *,
    epoch: int = 0,
    granularity: int = 1,
    method: SamplingMethod = "balanced",
    seed: int = 9176,
) -> Resampled:
    settings = OrderSettings(sampling_method=method, sampling_granularity=granularity, shuffle_seed=seed)
    return resample([np.asarray(sizes, np.int64)], [choose], settings, epoch)


def picked_one_by_one(sizes: list[int], choose: int, granularity: int, seed: int) -> NDArray[np.int64]:
    """``per_shard_choice`` spelled out, a pick at a time."""
    shard_of_pick = [shard for shard, size in enumerate(sizes) for _ in range(-(-size // granularity))]
    size_of_pick = [granularity] * len(shard_of_pick)
    stop = 0
    for size in sizes:
        picks = -(-size // granularity)
        stop += picks
        size_of_pick[stop - 1] = size - (picks - 1) * granularity
    counts = [size * (choose // sum(sizes)) for size in sizes]
    rest = choose % sum(sizes)
    for pick in np.random.default_rng(seed).permutation(len(size_of_pick)).tolist():
        taken = min(rest, size_of_pick[pick])
        counts[shard_of_pick[pick]] += taken
        rest -= taken
    return np.asarray(counts)


def test_all_golden_choices_are_here() -> None:
    assert len(CASES) == 11


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shards_give_as_many_samples_as_in_the_reference(case: dict[str, Any]) -> None:
    seed = case["seed"] + case["epoch"] if case["use_epoch"] else case["seed"]
    counts = per_shard_choice(np.asarray(case["sizes"], np.int64), case["choose"], case["granularity"], seed)
    assert counts.tolist() == case["per_shard"]


@given(sizes=shards, choose=st.integers(0, 500), granularity=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_choosing_at_once_equals_picking_one_by_one(sizes: list[int], choose: int, granularity: int, seed: int) -> None:
    counts = per_shard_choice(np.asarray(sizes, np.int64), choose, granularity, seed)
    assert counts.tolist() == picked_one_by_one(sizes, choose, granularity, seed).tolist()


@given(sizes=shards, choose=st.integers(0, 200), granularity=st.integers(1, 40))
def test_picks_are_counted_the_same_however_many_at_once(sizes: list[int], choose: int, granularity: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_CHUNK", 3)
        counts = per_shard_choice(np.asarray(sizes, np.int64), choose, granularity, 7)
    assert counts.tolist() == picked_one_by_one(sizes, choose, granularity, 7).tolist()


def drawn_one_by_one(sizes: list[int], counts: list[int], seed: int) -> tuple[list[int], list[int]]:
    """The units and sample ids of an epoch spelled out, a shard at a time."""
    generator, units, sample_ids, first = np.random.default_rng(seed), [], [], 0
    for size, count in zip(sizes, counts, strict=True):
        repeats, rest = divmod(count, size) if size else (0, 0)
        units += [size] * repeats
        sample_ids += list(range(first, first + size)) * repeats
        if rest:
            units.append(rest)
            sample_ids += sorted((first + generator.choice(size, rest, replace=False)).tolist())
        first += size
    return units, sample_ids


@given(sizes=shards, choose=st.integers(1, 300), seed=st.integers(0, 2**40), dtype=st.sampled_from(["<u4", "<i8"]))
def test_drawing_at_once_equals_a_shard_at_a_time(sizes: list[int], choose: int, seed: int, dtype: str) -> None:
    lengths = np.asarray(sizes, np.int64)
    drawn = resample([lengths], [choose], OrderSettings(shuffle_seed=seed), epoch=0, dtype=np.dtype(dtype))
    counts = per_shard_choice(lengths, choose, 1, seed)
    units, sample_ids = drawn_one_by_one(sizes, counts.tolist(), seed)
    assert drawn.units.tolist() == units
    if drawn.sample_ids is None:
        assert sample_ids == list(range(sum(sizes)))
    else:
        assert drawn.sample_ids.dtype == np.dtype(dtype)
        assert drawn.sample_ids.tolist() == sample_ids


@given(sizes=shards)
def test_a_stream_drawn_once_is_the_identity(sizes: list[int]) -> None:
    drawn = draw(sizes, sum(sizes))
    assert drawn.sample_ids is None
    assert drawn.units.tolist() == [size for size in sizes if size]


def test_a_repeated_shard_is_several_units() -> None:
    drawn = draw([2, 3], 10)
    assert drawn.units.tolist() == [2, 2, 3, 3]
    assert drawn.sample_ids is not None
    assert drawn.sample_ids.tolist() == [0, 1, 0, 1, 2, 3, 4, 2, 3, 4]


@given(sizes=shards, choose=st.integers(1, 300), seed=st.integers(0, 2**40))
def test_each_sample_is_drawn_as_often_as_any_other_or_once_more(sizes: list[int], choose: int, seed: int) -> None:
    drawn = draw([size for size in sizes if size], choose, seed=seed)
    ids = np.arange(choose) if drawn.sample_ids is None else drawn.sample_ids
    times = np.bincount(ids, minlength=sum(sizes))
    assert drawn.units.sum() == len(ids) == choose
    assert times.min() == choose // sum(sizes)
    assert times.max() == -(-choose // sum(sizes))


@given(sizes=shards, choose=st.integers(1, 300))
def test_ids_rise_within_each_unit(sizes: list[int], choose: int) -> None:
    drawn = draw(sizes, choose)
    if drawn.sample_ids is not None:
        for unit in np.split(drawn.sample_ids, np.cumsum(drawn.units)[:-1]):
            assert (np.diff(unit) > 0).all()


def test_balanced_draws_anew_each_epoch_and_fixed_the_same() -> None:
    def drawn(method: SamplingMethod, epoch: int) -> list[int]:
        sample_ids = draw([50, 50], 30, method=method, epoch=epoch).sample_ids
        assert sample_ids is not None
        return list(sample_ids.tolist())

    assert drawn("balanced", 0) != drawn("balanced", 1)
    assert drawn("fixed", 0) == drawn("fixed", 1) == drawn("balanced", 0)


def test_streams_are_numbered_one_after_another() -> None:
    first, second = np.asarray([2, 1], np.int64), np.asarray([2], np.int64)
    drawn = resample([first, second], [3, 4], OrderSettings(), epoch=0)
    assert drawn.units.tolist() == [2, 1, 2, 2]
    assert drawn.sample_ids is not None
    assert drawn.sample_ids.tolist() == [0, 1, 2, 3, 4, 3, 4]
