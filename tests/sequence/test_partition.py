"""Dealing: what ranks read together is the sequence, whatever the machines and wherever it was cut.

Who reads which entries of a global batch.

For which machines an epoch's batches are made, and how other machines share them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.partition import (
    INTERLEAVED,
    BatchGeometry,
    Contiguous,
    Gathered,
    Layout,
    Partition,
    Regrouped,
    epoch_geometry,
    rank_layout,
)
from lightning_streaming.sequence.settings import BATCHING_METHODS, ResolvedOrder
from lightning_streaming.sequence.skips import Skipped, SkippedPositions
from tests.sequence.builders import epoch_of, geometry_of, make_settings, make_shape, partition_of

Topology = tuple[int, int, int]
"""Nodes, ranks per node, batch size."""

topologies = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


def make_deal(length: int, start: int, topology: Topology) -> Partition:
    return partition_of(length, start, *topology)


@st.composite
def deals(draw: st.DrawFn) -> Partition:
    length = draw(st.integers(0, 120))
    return make_deal(length, draw(st.integers(0, length)), draw(topologies))


def global_batch(partition: Partition, t: int) -> list[int]:
    """What all ranks read in batch ``t``, in the order of dealing: nodes take turns fastest, then ranks."""
    batches = np.stack(
        [
            [partition.batches(np.asarray([t]), node, rank)[0] for node in range(partition.geometry.num_nodes)]
            for rank in range(partition.geometry.ranks_per_node)
        ]
    )  # (ranks, nodes, batch size)
    positions = batches.transpose(2, 0, 1).ravel()
    return list(positions[positions >= 0].tolist())


def all_read(partition: Partition, num_batches: int) -> list[int]:
    return [position for t in range(num_batches) for position in global_batch(partition, t)]


def reference_repeats(partition: Partition) -> list[int]:
    """The entries read twice, spelled out on the reference's table of one row per node; whole columns only."""
    table = np.arange(partition.remaining).reshape(-1, partition.geometry.num_nodes).T
    columns, ranks = table.shape[1], partition.geometry.ranks_per_node
    if columns % ranks == 0:
        return []
    more = ranks - columns % ranks
    if ranks + more - 1 <= columns:
        repeated = table[:, columns - ranks - more + 1 : columns - ranks + 1]
    else:
        repeated = np.tile(table, more // columns + 1)[:, :more]
    return list((partition.start + repeated.T.ravel()).tolist())


@st.composite
def laid_out_deals(draw: st.DrawFn) -> Partition:
    """Deals in every layout; where batches are regrouped, those of the first nodes divide a global batch."""
    initial, (nodes, ranks, batch_size) = draw(st.integers(1, 4)), draw(topologies)
    layouts: list[Layout] = [INTERLEAVED, Contiguous(), Regrouped(initial), Gathered(initial)]
    layout = draw(st.sampled_from(layouts))
    if isinstance(layout, Regrouped):
        batch_size *= initial
    return replace(draw(deals()), geometry=geometry_of(nodes, ranks, batch_size), layout=layout)


@given(columns=st.integers(0, 60), topology=topologies)
def test_the_entries_read_twice_are_those_of_the_reference(columns: int, topology: Topology) -> None:
    partition = make_deal(columns * topology[0], 0, topology)
    assert all_read(partition, partition.num_batches()) == [
        *range(len(partition.sequence)),
        *reference_repeats(partition),
    ]


@given(partition=deals())
def test_all_ranks_together_read_everything_left_in_order_and_less_than_a_round_twice(partition: Partition) -> None:
    read = all_read(partition, partition.num_batches())
    assert read[: partition.remaining] == list(range(partition.start, len(partition.sequence)))
    again = read[partition.remaining :]
    assert len(again) == -partition.remaining % partition.geometry.num_ranks
    assert all(0 <= position < len(partition.sequence) for position in again)


@given(length=st.integers(0, 120), topology=topologies)
def test_a_run_that_was_cut_anywhere_ends_like_a_whole_one(length: int, topology: Topology) -> None:
    whole = make_deal(length, 0, topology)
    batches = [global_batch(whole, t) for t in range(whole.num_batches())]
    for cut in range(len(batches)):
        rest = replace(whole, start=whole.position_after(cut))
        assert [global_batch(rest, t) for t in range(rest.num_batches())] == batches[cut:]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (10, [[0, 4, 8], [1, 5, 9], [2, 6, 5], [3, 7, 6]]),
        (2, [[0], [1], [0], [1]]),  # too few to reach back
    ],
)
def test_four_ranks_of_one_node(length: int, expected: list[list[int]]) -> None:
    partition = make_deal(length, 0, (1, 4, 3))
    assert [partition.batch(0, 0, rank).tolist() for rank in range(4)] == expected


@given(partition=laid_out_deals())
def test_all_ranks_together_read_each_global_batch_whatever_its_layout(partition: Partition) -> None:
    for t in range(partition.num_batches()):
        positions = global_batch(partition, t)
        new = range(partition.position_after(t), partition.position_after(t + 1))
        assert set(new) <= set(positions)
        is_full = len(new) == partition.geometry.global_batch_size
        assert len(positions) - len(new) == (0 if is_full else -partition.remaining % partition.geometry.num_ranks)


@given(partition=laid_out_deals())
def test_what_fills_no_global_batch_is_dealt_in_turn_whatever_the_layout(partition: Partition) -> None:
    ending = partition.num_batches() - 1
    if partition.remaining % partition.geometry.global_batch_size:
        assert global_batch(partition, ending) == global_batch(replace(partition, layout=INTERLEAVED), ending)


@given(partition=laid_out_deals())
def test_all_ranks_have_equally_many_batches_and_samples(partition: Partition) -> None:
    for node, rank in np.ndindex(partition.geometry.num_nodes, partition.geometry.ranks_per_node):
        sizes = [len(partition.batch(t, node, rank)) for t in range(partition.num_batches() + 1)]
        assert sum(sizes) == partition.samples_per_rank()
        assert sizes[partition.num_batches() :] == [0]
        assert all(sizes[: partition.num_batches()])
        assert sizes.count(partition.geometry.batch_size) == partition.num_batches(drop_last=True)


@given(partition=laid_out_deals(), data=st.data())
def test_several_batches_at_once_equal_one_by_one(partition: Partition, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, partition.geometry.num_nodes - 1))
    rank = data.draw(st.integers(0, partition.geometry.ranks_per_node - 1))
    ts = data.draw(st.lists(st.integers(0, partition.num_batches() + 2), max_size=5))
    together = partition.batches(np.asarray(ts, np.int64), node, rank)
    assert together.shape == (len(ts), partition.geometry.batch_size)
    for t, positions in zip(ts, together, strict=True):
        alone: NDArray[np.int64] = partition.batch(t, node, rank)
        assert positions.tolist() == alone.tolist() + [-1] * (partition.geometry.batch_size - len(alone))


@given(length=st.integers(1, 150), legs=st.lists(st.tuples(topologies, st.integers(0, 6)), min_size=4, max_size=4))
def test_three_cuts_on_changing_machines_repeat_and_skip_nothing(length: int, legs: list[tuple[Topology, int]]) -> None:
    start, read = 0, []
    for topology, steps in legs:
        partition = make_deal(length, start, topology)
        batches = [global_batch(partition, t) for t in range(min(steps, partition.num_batches()))]
        start = partition.position_after(len(batches))
        read += [position for batch in batches for position in batch][: start - partition.start]
    last = make_deal(length, start, (1, 1, 1))
    assert read + all_read(last, last.num_batches()) == list(range(length))


@given(length=st.integers(0, 150), topology=topologies, steps=st.integers(0, 10))
def test_a_cut_at_a_batch_leaves_the_batches_that_were_left(length: int, topology: Topology, steps: int) -> None:
    whole = make_deal(length, 0, topology)
    steps = min(steps, whole.num_batches(drop_last=True))
    rest = make_deal(length, whole.position_after(steps), topology)
    for drop_last in (False, True):
        assert rest.num_batches(drop_last) == whole.num_batches(drop_last) - steps
    for t in range(rest.full_batches):
        assert global_batch(rest, t) == global_batch(whole, steps + t)


def test_nothing_is_left_at_the_end() -> None:
    partition = make_deal(10, 10, (2, 2, 2))
    assert (partition.num_batches(), partition.num_batches(drop_last=True), partition.samples_per_rank()) == (0, 0, 0)
    assert partition.batch(0, 1, 1).tolist() == []
    assert partition.position_after(3) == 10


@pytest.mark.parametrize(
    ("length", "start", "topology"),
    [(5, 6, (1, 1, 1)), (5, -1, (1, 1, 1)), (5, 0, (0, 1, 1)), (5, 0, (1, 0, 1)), (5, 0, (1, 1, 0))],
)
def test_a_deal_that_cannot_be_is_refused(length: int, start: int, topology: Topology) -> None:
    with pytest.raises(ConfigError):
        make_deal(length, start, topology)


@pytest.mark.parametrize(("t", "node", "rank"), [(0, 2, 0), (0, 0, 3), (0, -1, 0), (-1, 0, 0)])
def test_a_batch_that_nobody_reads_is_refused(t: int, node: int, rank: int) -> None:
    with pytest.raises(ConfigError):
        make_deal(50, 0, (2, 3, 4)).batch(t, node, rank)


geometries = st.builds(
    BatchGeometry, num_nodes=st.integers(1, 5), ranks_per_node=st.integers(1, 5), batch_size=st.integers(1, 5)
)


def divided(layout: Layout, geometry: BatchGeometry, first: int = 0) -> NDArray[np.int64]:
    """Entries of shape (nodes, ranks, batch size), of the global batch that begins at a position."""
    entries = [
        layout.entries_of(geometry, node, rank, np.array([[first]]))
        if isinstance(layout, Gathered)
        else layout.entries(geometry, node, rank)
        for node, rank in np.ndindex(geometry.num_nodes, geometry.ranks_per_node)
    ]
    return np.asarray(entries).reshape(geometry.num_nodes, geometry.ranks_per_node, geometry.batch_size)


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[Regrouped, BatchGeometry]:
    """Nodes at the beginning, and machines whose global batch divides among them."""
    initial, nodes, ranks, factor = (draw(st.integers(1, 5)) for _ in range(4))
    return Regrouped(initial), geometry_of(nodes, ranks, initial * factor)


@pytest.mark.parametrize(
    ("layout", "geometry", "expected"),
    [
        (INTERLEAVED, geometry_of(2, 1, 3), [[[0, 2, 4]], [[1, 3, 5]]]),
        (INTERLEAVED, geometry_of(2, 2, 2), [[[0, 4], [2, 6]], [[1, 5], [3, 7]]]),  # nodes take turns faster than ranks
        (Contiguous(), geometry_of(2, 1, 3), [[[0, 1, 2]], [[3, 4, 5]]]),
        (Contiguous(), geometry_of(2, 2, 2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (Regrouped(2), geometry_of(3, 1, 2), [[[0, 2]], [[4, 1]], [[3, 5]]]),  # 2 nodes would read 0 2 4 and 1 3 5
        (Gathered(2), geometry_of(3, 1, 2), [[[0, 2]], [[4, 1]], [[3, 5]]]),
        (Gathered(4), geometry_of(5, 1, 1), [[[0]], [[4]], [[1]], [[2]], [[3]]]),
        (Gathered(2), geometry_of(3, 2, 1), [[[0], [2]], [[4], [1]], [[3], [5]]]),  # ranks take a node's run in turn
    ],
    ids=str,
)
def test_a_small_global_batch(layout: Layout, geometry: BatchGeometry, expected: list[list[list[int]]]) -> None:
    assert divided(layout, geometry).tolist() == expected


@given(
    geometry=geometries,
    layout=st.sampled_from([INTERLEAVED, Contiguous(), *map(Gathered, range(1, 9))]),
    first=st.integers(0, 99),
)
def test_ranks_read_each_entry_once(geometry: BatchGeometry, layout: Layout, first: int) -> None:
    entries = divided(layout, geometry, first)
    assert entries.shape == (geometry.num_nodes, geometry.ranks_per_node, geometry.batch_size)
    assert sorted(entries.ravel()) == list(range(geometry.global_batch_size))


@given(case=regrouped())
def test_regrouped_are_the_batches_of_the_first_nodes_one_after_another_cut_anew(
    case: tuple[Regrouped, BatchGeometry],
) -> None:
    layout, geometry = case
    nodes, ranks = layout.initial_num_nodes, geometry.ranks_per_node
    at_first = divided(INTERLEAVED, geometry_of(nodes, ranks, geometry.global_batch_size // (nodes * ranks)))
    assert divided(layout, geometry).ravel().tolist() == at_first.ravel().tolist()


@given(geometry=geometries)
def test_regrouped_to_the_same_nodes_is_in_turn(geometry: BatchGeometry) -> None:
    layout = Regrouped(geometry.num_nodes)
    assert divided(layout, geometry).tolist() == divided(INTERLEAVED, geometry).tolist()


@example(geometry=geometry_of(1, 1, 2), shares=4, first=3)  # more shares than entries
@given(geometry=geometries, shares=st.integers(1, 8), first=st.integers(0, 99))
def test_gathered_are_the_shares_of_the_first_nodes_one_after_another_cut_anew(
    geometry: BatchGeometry, shares: int, first: int
) -> None:
    runs = divided(Gathered(shares), geometry, first).transpose(0, 2, 1).reshape(geometry.num_nodes, -1)
    positions = sorted(range(first, first + geometry.global_batch_size), key=lambda at: (at % shares, at))
    assert (first + runs).ravel().tolist() == positions


@given(shares=st.integers(1, 40), nodes=st.integers(1, 40), batch_size=st.integers(1, 40), start=st.integers(0, 500))
def test_gathered_a_node_reads_the_shares_of_few_of_the_first_nodes_from_batch_to_batch(
    shares: int, nodes: int, batch_size: int, start: int
) -> None:
    whole = make_deal(2 * start + 20 * nodes * batch_size, start, (nodes, 1, batch_size))
    partition = replace(whole, layout=Gathered(shares))
    size, longer = divmod(nodes * batch_size, shares)
    assume(size > 0)
    moved = -(-min(longer, shares - longer) // size)  # how far the borders move from batch to batch
    for node in range(nodes):
        positions = partition.batches(np.arange(partition.full_batches), node, 0)
        assert len(np.unique(positions % shares)) <= -(-shares // nodes) + 1 + moved


def test_gathered_after_skipped_positions_are_those_of_a_partition_that_starts_there() -> None:
    starting = replace(make_deal(60, 5, (3, 1, 2)), layout=Gathered(4))
    skipping = replace(starting, start=0, sequence=Skipped(starting.sequence, SkippedPositions(((0, 5),))))
    ts = np.arange(starting.full_batches)
    for node in range(3):
        assert skipping.batches(ts, node, 0).tolist() == starting.batches(ts, node, 0).tolist()


@given(geometry=geometries)
def test_in_turn_a_node_reads_its_own_canonical_nodes(geometry: BatchGeometry) -> None:
    for node, entries in enumerate(divided(INTERLEAVED, geometry)):
        assert set((entries % geometry.num_nodes).ravel().tolist()) == {node}


def test_a_geometry_knows_its_products() -> None:
    geometry = geometry_of(3, 4, 5)
    assert (geometry.num_ranks, geometry.global_batch_size) == (12, 60)


IN_BLOCKS = ("device_per_stream", "stratified")
SHARED = ("per_stream", "random")


def settings_of(method: str, canonical: int = 4, partition: str = "relaxed") -> ResolvedOrder:
    return make_settings(batching_method=method, num_canonical_nodes=canonical, partition_algo=partition)


@pytest.mark.parametrize("method", BATCHING_METHODS)
@pytest.mark.parametrize("partition", ["orig", "relaxed"])
@pytest.mark.parametrize("initial", [None, 4])
def test_machines_that_canonical_nodes_fit_make_their_own_batches(
    method: str, partition: str, initial: int | None
) -> None:
    for nodes in (1, 2, 4):
        current = geometry_of(nodes, 3, 5)
        assert epoch_geometry(settings_of(method, partition=partition), current, initial) == current


@pytest.mark.parametrize("method", ["random", "per_stream", "stratified"])
def test_more_nodes_than_canonical_nodes_fit_where_they_are_a_multiple(method: str) -> None:
    assert epoch_geometry(settings_of(method), geometry_of(8, 1, 2), None) == geometry_of(8, 1, 2)


def test_stratified_batches_are_made_for_any_nodes() -> None:
    current = geometry_of(3, 2, 5)
    assert epoch_geometry(settings_of("stratified", partition="orig"), current, None) == current


@pytest.mark.parametrize(
    ("method", "batch_size", "expected"),
    [
        ("random", 4, geometry_of(2, 2, 6)),  # 24 in a global batch, 6 for each of the 4 ranks at the beginning
        ("random", 3, geometry_of(2, 2, 4)),  # 18: not even, but any machines read the same sequence
        ("per_stream", 4, geometry_of(2, 2, 6)),
        ("per_stream", 3, geometry_of(1, 6, 3)),  # 18: not even, so as on one node
        ("device_per_stream", 4, geometry_of(1, 6, 4)),
    ],
)
def test_relaxed_goes_on_where_canonical_nodes_do_not_fit(
    method: str, batch_size: int, expected: BatchGeometry
) -> None:
    assert epoch_geometry(settings_of(method), geometry_of(3, 2, batch_size), 2) == expected


def test_a_global_batch_smaller_than_the_first_ranks_is_served() -> None:
    settings, current = settings_of("random", canonical=8), geometry_of(3, 1, 1)
    geometry = epoch_geometry(settings, current, 8)
    assert geometry == geometry_of(8, 1, 1)
    assert rank_layout(settings, current, geometry) == Gathered(8)


@pytest.mark.parametrize("method", ["random", "per_stream"])
@pytest.mark.parametrize(("partition", "initial"), [("orig", 2), ("orig", None), ("relaxed", None)])
def test_nodes_that_canonical_nodes_do_not_fit_are_refused_with_the_way_out(
    method: str, partition: str, initial: int | None
) -> None:
    with pytest.raises(
        ConfigError, match=r"num_canonical_nodes=4 must be a multiple or a divisor of the 3 nodes; set it to .* of 3"
    ):
        epoch_geometry(settings_of(method, partition=partition), geometry_of(3, 1, 2), initial)


def test_a_batch_per_device_and_stream_needs_whole_canonical_nodes_on_each_node() -> None:
    with pytest.raises(ConfigError, match=r"must be a multiple of the 8 nodes"):
        epoch_geometry(settings_of("device_per_stream"), geometry_of(8, 1, 2), None)


@pytest.mark.parametrize(
    ("method", "current", "made_for", "expected"),
    [
        *[(method, geometry_of(2, 2, 3), geometry_of(2, 2, 3), Contiguous()) for method in IN_BLOCKS],
        *[(method, geometry_of(3, 2, 5), geometry_of(2, 2, 3), Contiguous()) for method in IN_BLOCKS],
        *[
            (method, geometry_of(2, 2, 3), geometry_of(4, 2, 3), INTERLEAVED) for method in SHARED
        ],  # 4 canonical nodes fit
        *[(method, geometry_of(3, 2, 4), geometry_of(2, 2, 6), Regrouped(2)) for method in SHARED],
        *[(method, geometry_of(3, 2, 3), geometry_of(2, 2, 4), Gathered(2)) for method in SHARED],  # 18 among 4 ranks
        *[(method, geometry_of(3, 2, 3), geometry_of(8, 2, 4), Gathered(4)) for method in SHARED],
    ],
)
def test_how_machines_share_a_global_batch(
    method: str, current: BatchGeometry, made_for: BatchGeometry, expected: Layout
) -> None:
    assert rank_layout(settings_of(method), current, made_for) == expected


machines = st.builds(
    BatchGeometry, num_nodes=st.integers(1, 6), ranks_per_node=st.integers(1, 3), batch_size=st.integers(2, 5)
)


@given(
    method=st.sampled_from(BATCHING_METHODS),
    current=machines,
    initial=st.sampled_from([1, 2, 3, 4, 6, 12]),
    made_for=machines,
)
def test_relaxed_goes_on_with_any_machines(
    method: str, current: BatchGeometry, initial: int, made_for: BatchGeometry
) -> None:
    settings = settings_of(method, canonical=12)
    geometry = epoch_geometry(settings, current, initial)
    assert len(epoch_of(settings, make_shape([900], [1100]), geometry)) > 0
    # Also in the middle of an epoch whose batches were made for others.
    for made in (geometry, made_for):
        chosen = rank_layout(settings, current, made)
        assert sorted(divided(chosen, current).ravel()) == list(range(current.global_batch_size))


def test_a_global_batch_beyond_what_64_bits_can_count_is_refused() -> None:
    for nodes, ranks, batch in ((1, 1, 2**31), (1, 1, 10**20), (2**16, 2**10, 2**6)):
        with pytest.raises(ConfigError, match="a global batch has at most 2,147,483,647 samples"):
            BatchGeometry(num_nodes=nodes, ranks_per_node=ranks, batch_size=batch)
    assert BatchGeometry(num_nodes=1, ranks_per_node=1, batch_size=2**31 - 1).global_batch_size == 2**31 - 1
