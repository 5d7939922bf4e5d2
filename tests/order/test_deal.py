"""Dealing: what ranks read together is the sequence, whatever the machines and wherever it was cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.layout import IN_TURN, InBlocks, Layout, Regrouped

Topology = tuple[int, int, int]
"""Nodes, ranks per node, batch size."""

topologies = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


def make_deal(length: int, start: int, topology: Topology) -> Deal:
    nodes, ranks, batch_size = topology
    return Deal(length=length, start=start, num_nodes=nodes, ranks_per_node=ranks, batch_size=batch_size)


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    length = draw(st.integers(0, 120))
    return make_deal(length, draw(st.integers(0, length)), draw(topologies))


def global_batch(deal: Deal, t: int) -> list[int]:
    """What all ranks read in batch ``t``, in the order of dealing: nodes take turns fastest, then ranks."""
    batches = np.stack(
        [
            [deal.batches(np.asarray([t]), node, rank)[0] for node in range(deal.num_nodes)]
            for rank in range(deal.ranks_per_node)
        ]
    )  # (ranks, nodes, batch size)
    positions = batches.transpose(2, 0, 1).ravel()
    return list(positions[positions >= 0].tolist())


def all_read(deal: Deal, num_batches: int) -> list[int]:
    return [position for t in range(num_batches) for position in global_batch(deal, t)]


def reference_repeats(deal: Deal) -> list[int]:
    """The entries read twice, spelled out on the reference's table of one row per node; whole columns only."""
    table = np.arange(deal.remaining).reshape(-1, deal.num_nodes).T
    columns, ranks = table.shape[1], deal.ranks_per_node
    if columns % ranks == 0:
        return []
    more = ranks - columns % ranks
    if ranks + more - 1 <= columns:
        repeated = table[:, columns - ranks - more + 1 : columns - ranks + 1]
    else:
        repeated = np.tile(table, more // columns + 1)[:, :more]
    return list((deal.start + repeated.T.ravel()).tolist())


@st.composite
def laid_out_deals(draw: st.DrawFn) -> Deal:
    """Deals in every layout; where batches are regrouped, those of the first nodes divide a global batch."""
    initial, (nodes, ranks, batch_size) = draw(st.integers(1, 4)), draw(topologies)
    layouts: list[Layout] = [IN_TURN, InBlocks(), Regrouped(initial)]
    layout = draw(st.sampled_from(layouts))
    if isinstance(layout, Regrouped):
        batch_size *= initial
    return replace(draw(deals()), num_nodes=nodes, ranks_per_node=ranks, batch_size=batch_size, layout=layout)


@given(columns=st.integers(0, 60), topology=topologies)
def test_the_entries_read_twice_are_those_of_the_reference(columns: int, topology: Topology) -> None:
    deal = make_deal(columns * topology[0], 0, topology)
    assert all_read(deal, deal.num_batches()) == [*range(deal.length), *reference_repeats(deal)]


@given(deal=deals())
def test_all_ranks_together_read_everything_left_in_order_and_less_than_a_round_twice(deal: Deal) -> None:
    read = all_read(deal, deal.num_batches())
    assert read[: deal.remaining] == list(range(deal.start, deal.length))
    again = read[deal.remaining :]
    assert len(again) == -deal.remaining % deal.num_ranks
    assert all(0 <= position < deal.length for position in again)


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
    deal = make_deal(length, 0, (1, 4, 3))
    assert [deal.batch(0, 0, rank).tolist() for rank in range(4)] == expected


@given(deal=laid_out_deals())
def test_all_ranks_together_read_each_global_batch_whatever_its_layout(deal: Deal) -> None:
    for t in range(deal.num_batches()):
        positions = global_batch(deal, t)
        new = range(deal.position_after(t), deal.position_after(t + 1))
        assert set(new) <= set(positions)
        is_full = len(new) == deal.global_batch_size
        assert len(positions) - len(new) == (0 if is_full else -deal.remaining % deal.num_ranks)


@given(deal=laid_out_deals())
def test_what_fills_no_global_batch_is_dealt_in_turn_whatever_the_layout(deal: Deal) -> None:
    ending = deal.num_batches() - 1
    if deal.remaining % deal.global_batch_size:
        assert global_batch(deal, ending) == global_batch(replace(deal, layout=IN_TURN), ending)


@given(deal=laid_out_deals())
def test_all_ranks_have_equally_many_batches_and_samples(deal: Deal) -> None:
    for node in range(deal.num_nodes):
        for rank in range(deal.ranks_per_node):
            sizes = [len(deal.batch(t, node, rank)) for t in range(deal.num_batches() + 1)]
            assert sum(sizes) == deal.samples_per_rank()
            assert sizes[deal.num_batches() :] == [0]
            assert all(sizes[: deal.num_batches()])
            assert sizes.count(deal.batch_size) == deal.num_batches(drop_last=True)


@given(deal=laid_out_deals(), data=st.data())
def test_several_batches_at_once_equal_one_by_one(deal: Deal, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, deal.num_nodes - 1))
    rank = data.draw(st.integers(0, deal.ranks_per_node - 1))
    ts = data.draw(st.lists(st.integers(0, deal.num_batches() + 2), max_size=5))
    together = deal.batches(np.asarray(ts, np.int64), node, rank)
    assert together.shape == (len(ts), deal.batch_size)
    for t, positions in zip(ts, together, strict=True):
        alone: NDArray[np.int64] = deal.batch(t, node, rank)
        assert positions.tolist() == alone.tolist() + [-1] * (deal.batch_size - len(alone))


@given(length=st.integers(1, 150), legs=st.lists(st.tuples(topologies, st.integers(0, 6)), min_size=4, max_size=4))
def test_three_cuts_on_changing_machines_repeat_and_skip_nothing(length: int, legs: list[tuple[Topology, int]]) -> None:
    start, read = 0, []
    for topology, steps in legs:
        deal = make_deal(length, start, topology)
        batches = [global_batch(deal, t) for t in range(min(steps, deal.num_batches()))]
        start = deal.position_after(len(batches))
        read += [position for batch in batches for position in batch][: start - deal.start]
    last = make_deal(length, start, (1, 1, 1))
    assert read + all_read(last, last.num_batches()) == list(range(length))


@given(length=st.integers(0, 150), topology=topologies, steps=st.integers(0, 10))
def test_a_cut_at_a_batch_leaves_the_batches_that_were_left(length: int, topology: Topology, steps: int) -> None:
    whole = make_deal(length, 0, topology)
    steps = min(steps, whole.num_batches(drop_last=True))
    rest = make_deal(length, whole.position_after(steps), topology)
    for drop_last in (False, True):
        assert rest.num_batches(drop_last) == whole.num_batches(drop_last) - steps
    for t in range(rest.remaining // rest.global_batch_size):
        assert global_batch(rest, t) == global_batch(whole, steps + t)


def test_nothing_is_left_at_the_end() -> None:
    deal = make_deal(10, 10, (2, 2, 2))
    assert (deal.num_batches(), deal.num_batches(drop_last=True), deal.samples_per_rank()) == (0, 0, 0)
    assert deal.batch(0, 1, 1).tolist() == []
    assert deal.position_after(3) == 10


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
