"""Drawing an epoch's order: what is drawn, where to, and the name of it."""

from __future__ import annotations

import string
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence import draw as draw_module
from lightning_streaming.sequence.draw import Resampled, Shuffled, drawn_here, per_shard_choice, resample
from lightning_streaming.sequence.settings import OrderSettings, ResolvedOrder, SamplingMethod
from lightning_streaming.sequence.shuffles import SHUFFLES
from lightning_streaming.sequence.weights import DatasetShape, ResolvedWeights
from tests.sequence.builders import make_settings, make_shape
from tests.sequence.reference import load

shards = st.lists(st.integers(1, 20), min_size=1, max_size=6)


def drawn(settings: ResolvedOrder, shape: DatasetShape, epoch: int = 0) -> list[int]:
    order = drawn_here(Shuffled(settings, shape, epoch))
    assert order.dtype == np.uint32
    return list(order.tolist())


def never(order: Shuffled) -> NDArray[np.integer]:
    raise AssertionError(f"epoch {order.epoch} is drawn")


def test_an_order_that_is_the_identity_is_not_written_out() -> None:
    settings, shape = make_settings(shuffle=False), make_shape([7, 5, 9])
    assert Shuffled(settings, shape, 0, never).ids(np.arange(21)).tolist() == list(range(21))
    assert Shuffled(make_settings(), shape, 0).is_drawn
    assert Shuffled(settings, make_shape([7, 5, 9], repeat=2), 0).is_drawn


def test_nothing_is_drawn_before_ids_are_asked_for_and_then_once() -> None:
    calls = []

    def draw(order: Shuffled) -> NDArray[np.integer]:
        calls.append(order)
        return drawn_here(order)

    order = Shuffled(make_settings(), make_shape([20, 30]), 0, draw)
    assert (len(order), len(order.digest), calls) == (50, 32, [])
    assert order.ids(np.arange(50)).tolist() == drawn(order.settings, order.shape)
    assert order.drawn().ids(np.asarray([7])).shape == (1,)
    assert calls == [order]


def test_resampling_alone_makes_an_order() -> None:
    assert drawn(make_settings(shuffle=False), make_shape([2, 1], repeat=2)) == [0, 1, 0, 1, 2, 2]


@pytest.mark.parametrize("algo", sorted(SHUFFLES))
def test_shuffling_keeps_what_was_drawn_and_changes_with_the_epoch(algo: str) -> None:
    settings, shape = make_settings(shuffle_algo=algo, sampling_method="fixed"), make_shape([20, 30], [40], repeat=1.5)
    first, second = drawn(settings, shape, 0), drawn(settings, shape, 1)
    assert sorted(first) == sorted(second) == sorted(drawn(replace(settings, shuffle=False), shape))
    assert first != second
    assert first == drawn(settings, shape, 0)


@given(streams=st.lists(shards, min_size=2, max_size=4), repeat=st.sampled_from([None, 0.4, 1, 2.5]))
@pytest.mark.parametrize("shuffle", [False, True])
def test_streams_that_do_not_share_batches_are_drawn_one_after_another_each_by_itself(
    shuffle: bool, streams: list[list[int]], repeat: float | None
) -> None:
    shape = make_shape([9], *streams, repeat=repeat)
    settings = make_settings(batching_method="stratified", shuffle=shuffle, num_canonical_nodes=1, shuffle_algo="py1s")
    expected: list[int] = []
    first = 0
    for sizes, choose in zip(shape.shard_sizes, shape.weights.choose, strict=True):
        alone = ResolvedWeights(proportion=(1.0,), repeat=(1.0,), choose=(choose,), epoch_size=choose)
        order = np.empty(choose, np.int64)
        by_itself = DatasetShape(shard_sizes=(sizes,), weights=alone)
        Shuffled(replace(settings, batching_method="random"), by_itself, 0).draw_into(order)
        expected += (first + order).tolist()
        first += int(sizes.sum())
    out = np.empty(shape.epoch_size, np.int64)
    Shuffled(settings, shape, 0).draw_into(out)
    assert out.tolist() == expected


@pytest.mark.parametrize("algo", sorted(SHUFFLES))
@given(sizes=shards, repeat=st.sampled_from([None, 0.7, 2.5]))
def test_an_order_is_the_same_whatever_holds_it(algo: str, sizes: list[int], repeat: float | None) -> None:
    settings, shape = make_settings(shuffle_algo=algo, num_canonical_nodes=1), make_shape([5], sizes, repeat=repeat)
    wide = np.empty(shape.epoch_size, np.int64)
    Shuffled(settings, shape, 3).draw_into(wide)
    assert drawn(settings, shape, 3) == wide.tolist()


def test_repeated_samples_are_looked_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, shape = make_settings(), make_shape([20, 30], repeat=2.5)
    whole = drawn(settings, shape)
    monkeypatch.setattr(draw_module, "_CHUNK", 7)
    assert drawn(settings, shape) == whole


@pytest.mark.parametrize(
    ("samples", "repeat", "dtype"),
    [(2**32, None, np.uint32), (2**32 + 1, None, np.int64), (2**31, 2, np.uint32), (2**31 + 1, 2, np.int64)],
)
def test_ids_take_four_bytes_wherever_they_and_their_places_fit(
    samples: int, repeat: float | None, dtype: type[np.integer]
) -> None:
    assert Shuffled(make_settings(), make_shape([samples], repeat=repeat), 0).dtype == dtype


@pytest.mark.parametrize("batching", ["random", "stratified"])
def test_an_order_on_demand_has_every_sample_drawn(batching: str) -> None:
    settings = make_settings(shuffle_algo="blockwise", batching_method=batching, num_canonical_nodes=2)
    shape = make_shape([20, 30], [40], repeat=2)
    order = Shuffled(settings, shape, 0, never)
    assert len(order) == 180
    ids = np.sort(order.ids(np.arange(180)))
    assert ids.tolist() == np.repeat(np.arange(90), 2).tolist()


def test_only_a_blockwise_shuffle_is_on_demand() -> None:
    said: tuple[dict[str, Any], ...] = ({}, {"shuffle": False}, {"shuffle_algo": "py1e"})
    orders = [Shuffled(make_settings(**{"shuffle_algo": "blockwise", **one}), make_shape([5]), 0) for one in said]
    assert [order.is_on_demand for order in orders] == [True, False, False]


def test_an_epoch_before_the_first_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        Shuffled(make_settings(shuffle=False), make_shape([5]), -1)


def test_a_digest_is_32_hexadecimal_digits_and_the_same_each_time() -> None:
    digest = Shuffled(make_settings(), make_shape([5, 2]), 0).digest
    assert digest == Shuffled(make_settings(), make_shape([5, 2]), 0).digest
    assert len(digest) == 32
    assert set(digest) <= set(string.hexdigits)


def test_a_digest_changes_with_all_that_an_order_depends_on() -> None:
    settings, shape = make_settings(), make_shape([5, 2], [3])
    changed = [
        Shuffled(settings, shape, 1).digest,
        Shuffled(settings, make_shape([2, 5], [3]), 0).digest,
        Shuffled(settings, make_shape([5], [2, 3]), 0).digest,
        Shuffled(settings, make_shape([5, 2], [3], epoch_size=11), 0).digest,
        # As many samples of each stream, of another share: blocks and batches of their own follow the share.
        Shuffled(settings, replace(shape, weights=replace(shape.weights, proportion=(0.69, 0.31))), 0).digest,
        Shuffled(replace(settings, shuffle=False), shape, 0).digest,
        Shuffled(replace(settings, shuffle_algo="py1s"), shape, 0).digest,
        Shuffled(replace(settings, shuffle_seed=1), shape, 0).digest,
        Shuffled(replace(settings, shuffle_block_size=99), shape, 0).digest,
        Shuffled(replace(settings, num_canonical_nodes=2), shape, 0).digest,
        Shuffled(replace(settings, sampling_method="fixed"), shape, 0).digest,
        Shuffled(replace(settings, sampling_granularity=2), shape, 0).digest,
    ]
    assert len({Shuffled(settings, shape, 0).digest, *changed}) == 1 + len(changed)


def test_generators_come_with_the_first_import_rather_than_at_the_first_draw() -> None:
    """numpy imports them when they are first used, which each forked worker would then do for itself."""
    program = "import sys, lightning_streaming.sequence.draw; assert 'numpy.random' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


CASES = load("order_components.json")["sampling"]
shards_maybe_empty = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def resampled(
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


@given(sizes=shards_maybe_empty, choose=st.integers(0, 500), granularity=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_choosing_at_once_equals_picking_one_by_one(sizes: list[int], choose: int, granularity: int, seed: int) -> None:
    counts = per_shard_choice(np.asarray(sizes, np.int64), choose, granularity, seed)
    assert counts.tolist() == picked_one_by_one(sizes, choose, granularity, seed).tolist()


@given(sizes=shards_maybe_empty, choose=st.integers(0, 200), granularity=st.integers(1, 40))
def test_picks_are_counted_the_same_however_many_at_once(sizes: list[int], choose: int, granularity: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_module, "_PICKS_CHUNK", 3)
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


@given(
    sizes=shards_maybe_empty,
    choose=st.integers(1, 300),
    seed=st.integers(0, 2**40),
    dtype=st.sampled_from(["<u4", "<i8"]),
)
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


@given(sizes=shards_maybe_empty)
def test_a_stream_drawn_once_is_the_identity(sizes: list[int]) -> None:
    drawn = resampled(sizes, sum(sizes))
    assert drawn.sample_ids is None
    assert drawn.units.tolist() == [size for size in sizes if size]


def test_a_repeated_shard_is_several_units() -> None:
    drawn = resampled([2, 3], 10)
    assert drawn.units.tolist() == [2, 2, 3, 3]
    assert drawn.sample_ids is not None
    assert drawn.sample_ids.tolist() == [0, 1, 0, 1, 2, 3, 4, 2, 3, 4]


@given(sizes=shards_maybe_empty, choose=st.integers(1, 300), seed=st.integers(0, 2**40))
def test_each_sample_is_drawn_as_often_as_any_other_or_once_more(sizes: list[int], choose: int, seed: int) -> None:
    drawn = resampled([size for size in sizes if size], choose, seed=seed)
    ids = np.arange(choose) if drawn.sample_ids is None else drawn.sample_ids
    times = np.bincount(ids, minlength=sum(sizes))
    assert drawn.units.sum() == len(ids) == choose
    assert times.min() == choose // sum(sizes)
    assert times.max() == -(-choose // sum(sizes))


@given(sizes=shards_maybe_empty, choose=st.integers(1, 300))
def test_ids_rise_within_each_unit(sizes: list[int], choose: int) -> None:
    drawn = resampled(sizes, choose)
    if drawn.sample_ids is not None:
        for unit in np.split(drawn.sample_ids, np.cumsum(drawn.units)[:-1]):
            assert (np.diff(unit) > 0).all()


def test_balanced_draws_anew_each_epoch_and_fixed_the_same() -> None:
    def drawn(method: SamplingMethod, epoch: int) -> list[int]:
        sample_ids = resampled([50, 50], 30, method=method, epoch=epoch).sample_ids
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
