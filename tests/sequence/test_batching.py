"""Which samples share a batch, for every batching method."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, SampleIndexError, StateError
from lightning_streaming.sequence.batching import Batched, ComputedRowStreams, draw_row_streams, shares_of_batch
from lightning_streaming.sequence.partition import BatchGeometry, Partition, rank_layout
from lightning_streaming.sequence.settings import BATCHING_METHODS, ResolvedOrder
from lightning_streaming.sequence.weights import DatasetShape, StreamWeight, resolve_weights
from tests.sequence.builders import epoch_of, make_settings, make_shape

CANONICAL = 4
COMPOSED = [method for method in BATCHING_METHODS if method != "random"]


def settings_of(method: str, canonical: int = CANONICAL) -> ResolvedOrder:
    return make_settings(batching_method=method, num_canonical_nodes=canonical)


def whole(sequence: Batched) -> NDArray[np.int64]:
    return sequence.places(np.arange(len(sequence)))


def streams_of(places: NDArray[np.int64], shape: DatasetShape) -> NDArray[np.int64]:
    """The stream of each place; streams lie one after another."""
    return np.searchsorted(np.cumsum(shape.weights.choose), places, side="right")


def rank_batches(sequence: Batched, settings: ResolvedOrder, geometry: BatchGeometry) -> NDArray[np.int64]:
    """Places of shape (ranks, batches, batch size) that ranks read in an epoch of full batches."""
    partition = Partition(sequence=sequence, geometry=geometry, layout=rank_layout(settings, geometry, geometry))
    ts = np.arange(partition.num_batches())
    ranks = [(node, rank) for node in range(geometry.num_nodes) for rank in range(geometry.ranks_per_node)]
    return sequence.places(np.stack([partition.batches(ts, node, rank) for node, rank in ranks]))


geometries = st.builds(
    BatchGeometry,
    num_nodes=st.sampled_from([1, 2, 4]),
    ranks_per_node=st.integers(1, 3),
    batch_size=st.integers(4, 6),
)
epochs = st.integers(0, 3)


@st.composite
def mixtures(draw: st.DrawFn) -> DatasetShape:
    """One to three streams, each of which fills a global batch of up to 72 a few times over."""
    streams = draw(st.lists(st.lists(st.integers(30, 60), min_size=4, max_size=6), min_size=1, max_size=3))
    weights = [StreamWeight(proportion=draw(st.floats(0.5, 1))) for _ in streams]
    sizes = [sum(stream) for stream in streams]
    epoch_size = draw(st.integers(500, 900))
    return DatasetShape(
        shard_sizes=tuple(np.asarray(stream) for stream in streams),
        weights=resolve_weights(weights, sizes, epoch_size, seed=0),
    )


@given(shape=mixtures(), geometry=geometries, epoch=epochs)
def test_stratified_gives_each_global_batch_every_streams_exact_share(
    shape: DatasetShape, geometry: BatchGeometry, epoch: int
) -> None:
    sequence = epoch_of(settings_of("stratified"), shape, geometry, epoch)
    size = geometry.global_batch_size
    rows = streams_of(whole(sequence), shape).reshape(-1, size)
    counts = [np.bincount(row, minlength=len(shape.shard_sizes)).tolist() for row in rows]
    assert counts == [counts[0]] * len(counts)
    assert all(
        abs(share - proportion * size) < 1
        for share, proportion in zip(counts[0], shape.weights.proportion, strict=True)
    )


@given(shape=mixtures(), geometry=geometries, epoch=epochs)
def test_per_stream_fills_each_global_batch_from_one_stream_and_with_all_it_can(
    shape: DatasetShape, geometry: BatchGeometry, epoch: int
) -> None:
    settings, size = settings_of("per_stream"), geometry.global_batch_size
    sequence = epoch_of(settings, shape, geometry, epoch)
    streams = streams_of(rank_batches(sequence, settings, geometry), shape)  # (ranks, batches, batch size)
    assert (streams == streams[:1, :, :1]).all()
    batches = np.bincount(streams[0, :, 0]).tolist()
    assert all(batch >= choose // size for batch, choose in zip(batches, shape.weights.choose, strict=True))


@given(shape=mixtures(), geometry=geometries, epoch=epochs)
def test_device_per_stream_fills_each_ranks_batch_from_one_stream(
    shape: DatasetShape, geometry: BatchGeometry, epoch: int
) -> None:
    settings = settings_of("device_per_stream")
    sequence = epoch_of(settings, shape, geometry, epoch)
    streams = streams_of(rank_batches(sequence, settings, geometry), shape)
    assert (streams == streams[:, :, :1]).all()
    batches = np.bincount(streams[:, :, 0].ravel(), minlength=len(shape.shard_sizes))
    full_batches = sum(choose // geometry.batch_size for choose in shape.weights.choose)
    # Each node may fall short of a batch of each stream, and a round of all ranks may be left out at the end.
    assert batches.sum() > full_batches - geometry.num_nodes * len(shape.shard_sizes) - geometry.num_ranks


@given(shape=mixtures(), method=st.sampled_from(COMPOSED), geometry=geometries, epoch=epochs)
def test_a_composed_epoch_is_whole_global_batches(
    shape: DatasetShape, method: str, geometry: BatchGeometry, epoch: int
) -> None:
    sequence = epoch_of(settings_of(method), shape, geometry, epoch)
    assert len(sequence) > 0
    assert len(sequence) % geometry.global_batch_size == 0
    assert sequence.num_samples == shape.epoch_size


@given(shape=mixtures(), method=st.sampled_from(BATCHING_METHODS), geometry=geometries, epoch=epochs)
def test_what_is_drawn_is_read_once_but_for_a_few_at_the_end_of_each_stream(
    shape: DatasetShape, method: str, geometry: BatchGeometry, epoch: int
) -> None:
    places = whole(epoch_of(settings_of(method), shape, geometry, epoch))
    assert places.min() >= 0
    assert places.max() < shape.epoch_size
    again = Counter(places.tolist())
    read_twice = [place for place, times in again.items() for _ in range(times - 1)]
    per_stream = np.bincount(streams_of(np.asarray(read_twice, np.int64), shape), minlength=len(shape.shard_sizes))
    # Slices of one sample less repeat their last, and all ranks of all canonical nodes are made even.
    assert (per_stream < 2 * CANONICAL * geometry.ranks_per_node).all()


@given(shape=mixtures(), method=st.sampled_from(BATCHING_METHODS), geometry=geometries, data=st.data())
def test_random_access_equals_the_whole(
    shape: DatasetShape, method: str, geometry: BatchGeometry, data: st.DataObject
) -> None:
    places = whole(epoch_of(settings_of(method), shape, geometry, 1))
    again = epoch_of(settings_of(method), shape, geometry, 1)
    some = np.asarray(data.draw(st.lists(st.integers(0, len(again) - 1), max_size=9)), np.int64)
    assert again.places(some).tolist() == places[some].tolist()
    shaped = np.arange(len(again) // 2 * 2).reshape(2, -1)[:, ::-1]
    assert again.places(shaped).tolist() == places[shaped].tolist()


@pytest.mark.parametrize("method", BATCHING_METHODS)
def test_a_position_outside_the_epoch_is_refused(method: str) -> None:
    geometry = BatchGeometry(num_nodes=2, ranks_per_node=1, batch_size=5)
    sequence = epoch_of(settings_of(method), make_shape([60], [60]), geometry, 0)
    for position in (-1, len(sequence)):
        with pytest.raises(SampleIndexError, match=rf"in \[0, {len(sequence)}\)"):
            sequence.places(np.asarray([0, position]))


@pytest.mark.parametrize("method", ["per_stream", "device_per_stream"])
def test_a_streams_batches_keep_its_order_and_mix_with_those_of_others(method: str) -> None:
    geometry = BatchGeometry(num_nodes=1, ranks_per_node=1, batch_size=4)
    settings, shape = settings_of(method, canonical=1), make_shape([80], [40])
    sequence = epoch_of(settings, shape, geometry, 0)
    places = whole(sequence)
    assert [place for place in places.tolist() if place < 80] == list(range(80))
    assert [place for place in places.tolist() if place >= 80] == list(range(80, 120))
    streams = streams_of(places, shape)[::4]
    assert (np.diff(streams) != 0).sum() > 2
    other = streams_of(whole(epoch_of(settings, shape, geometry, 1)), shape)[::4]
    assert streams.tolist() != other.tolist()


@pytest.mark.parametrize("said", [{"shuffle": False}, {"sampling_method": "fixed"}], ids=str)
@pytest.mark.parametrize("method", ["per_stream", "device_per_stream"])
def test_without_redrawing_each_epoch_has_the_same_batches_in_the_same_order(
    method: str, said: dict[str, bool | str]
) -> None:
    geometry = BatchGeometry(num_nodes=1, ranks_per_node=2, batch_size=4)
    settings = make_settings(batching_method=method, **said)
    first, second = (epoch_of(settings, make_shape([80], [90]), geometry, epoch) for epoch in (0, 5))
    assert whole(first).tolist() == whole(second).tolist()


@pytest.mark.parametrize(
    ("method", "streams", "geometry", "words"),
    [
        ("per_stream", ([90], [4]), (1, 2, 4), "stream 1 draws 4 samples, too few for one global batch of 8; raise"),
        ("device_per_stream", ([90], [4]), (2, 1, 4), "stream 1 draws 4 samples, too few for one batch of 4 on each"),
        ("stratified", ([90], [7]), (1, 1, 4), "stream 1 has a share of 0.072, less than one sample of a global batch"),
        ("stratified", ([20], [10]), (2, 4, 9), "stream 0 draws 20 samples, too few for its share of 48"),
    ],
    ids=str,
)
def test_a_stream_that_fills_no_batch_is_refused_with_the_way_out(
    method: str, streams: tuple[list[int], ...], geometry: tuple[int, int, int], words: str
) -> None:
    nodes, ranks, batch_size = geometry
    made_for = BatchGeometry(num_nodes=nodes, ranks_per_node=ranks, batch_size=batch_size)
    with pytest.raises(ConfigError, match=words):
        epoch_of(settings_of(method), make_shape(*streams), made_for, 0)


@pytest.mark.parametrize("method", COMPOSED)
def test_a_stream_of_which_nothing_is_drawn_is_refused(method: str) -> None:
    sizes = (np.asarray([90]), np.asarray([90]))
    weights = resolve_weights([StreamWeight(), StreamWeight(repeat=0)], [90, 90], None, 0)
    geometry = BatchGeometry(num_nodes=1, ranks_per_node=1, batch_size=4)
    with pytest.raises(ConfigError, match=r"stream 1 (draws no sample|has a share of 0)"):
        epoch_of(settings_of(method), DatasetShape(shard_sizes=sizes, weights=weights), geometry, 0)


@given(
    samples=st.integers(1, 20),
    canonical=st.sampled_from([1, 2, 3, 8, 16]),
    factor=st.integers(1, 8),
    ranks=st.integers(1, 4),
    batch_size=st.integers(1, 4),
)
def test_few_samples_over_many_nodes_are_all_read_and_by_all_ranks_equally(
    samples: int, canonical: int, factor: int, ranks: int, batch_size: int
) -> None:
    geometry = BatchGeometry(num_nodes=canonical * factor, ranks_per_node=ranks, batch_size=batch_size)
    sequence = epoch_of(settings_of("random", canonical), make_shape([samples]), geometry, 0)
    partition = Partition(sequence=sequence, geometry=geometry)
    places: set[int] = set()
    for node in range(geometry.num_nodes):
        for rank in range(ranks):
            positions = partition.batches(np.arange(partition.num_batches()), node, rank)
            assert (positions >= 0).sum() == partition.samples_per_rank()
            places.update(sequence.places(positions[positions >= 0]).tolist())
    assert places == set(range(samples))


@pytest.mark.parametrize("algo", ["py1s", "blockwise"])
def test_each_node_reads_the_streams_in_an_order_of_its_own(algo: str) -> None:
    settings = make_settings(batching_method="device_per_stream", shuffle_algo=algo, num_canonical_nodes=CANONICAL)
    shape = make_shape([300], [300])
    sequence = epoch_of(settings, shape, BatchGeometry(num_nodes=2, ranks_per_node=1, batch_size=4))
    first, second = streams_of(whole(sequence), shape).reshape(-1, 2, 4)[:, :, 0].T.tolist()
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_partial_last_round_of_the_reference_may_have_been_read() -> None:
    geometry = BatchGeometry(num_nodes=2, ranks_per_node=2, batch_size=4)
    sequence = epoch_of(settings_of("device_per_stream"), make_shape([200], [300]), geometry)
    end = len(sequence)
    assert [sequence.resume_position(consumed, 4) for consumed in (end - 1, end + 8, end + 16)] == [end - 1, end, end]
    with pytest.raises(StateError, match=f"{end + 17} samples were consumed of an epoch that has 500"):
        sequence.resume_position(end + 17, 4)


def test_origins_keep_each_streams_rows_in_order() -> None:
    origins = draw_row_streams([3, 0, 2], np.random.default_rng(0))
    assert sorted(origins.streams.tolist()) == [0, 0, 0, 2, 2]
    assert origins.ordinals[origins.streams == 0].tolist() == [0, 1, 2]
    assert origins.ordinals[origins.streams == 2].tolist() == [0, 1]


@given(rows=st.lists(st.integers(0, 3000), min_size=1, max_size=40).filter(any), data=st.data())
def test_origins_that_are_worked_out_keep_each_streams_rows_in_order(rows: list[int], data: st.DataObject) -> None:
    origins = ComputedRowStreams(rows, seed=(1, 2))
    streams, ordinals = origins.find(np.arange(sum(rows)))
    for stream, count in enumerate(rows):
        assert ordinals[streams == stream].tolist() == list(range(count))
    some = np.asarray(data.draw(st.lists(st.integers(0, sum(rows) - 1), max_size=9)), np.int64)
    assert [found.tolist() for found in origins.find(some)] == [streams[some].tolist(), ordinals[some].tolist()]


def test_origins_that_are_worked_out_mix_the_streams_all_along() -> None:
    streams, _ = ComputedRowStreams([30_000, 10_000], seed=(0,)).find(np.arange(40_000))
    shares = (streams == 1).reshape(40, 1000).mean(axis=1)
    assert abs(shares - 0.25).max() < 0.06
    assert 0.3 < (streams[1:] != streams[:-1]).mean() < 0.45  # 0.375 where each is drawn for itself


@pytest.mark.parametrize(
    ("proportions", "batch_size", "shares"),
    [
        ([1.0], 7, [7]),
        ([0.6, 0.4], 10, [6, 4]),
        ([0.55, 0.45], 10, [5, 5]),  # 5.5 and 4.5 leave equal remainders: the last stream gets the sample
        ([0.25] * 4, 6, [1, 1, 2, 2]),
        ([0.7, 0.2, 0.1], 5, [3, 1, 1]),  # 3.5, 1 and 0.5
    ],
)
def test_shares_fill_a_global_batch(proportions: list[float], batch_size: int, shares: list[int]) -> None:
    assert shares_of_batch(np.asarray(proportions), batch_size).tolist() == shares
