"""What is read to keep ranks even is told apart from what is read for the first time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.order.batching import EpochSequence
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.first_reads import are_first_reads
from lightning_streaming.order.layout import BatchGeometry
from lightning_streaming.order.plan import epoch_sequence
from lightning_streaming.order.sequence import CanonicalSequence, fits
from tests.order.builders import make_settings, make_shape


class Epoch(NamedTuple):
    """An epoch's sequence and how it is dealt."""

    sequence: EpochSequence
    deal: Deal


@st.composite
def epochs(draw: st.DrawFn, largest_start: int = 0) -> Epoch:
    """Epochs on 1 to 6 nodes of 1 to 3 ranks, whatever the canonical nodes, often with fewer samples than those."""
    nodes = draw(st.integers(1, 6))
    sequence = CanonicalSequence(
        num_samples=draw(st.integers(1, 60)),
        num_canonical_nodes=draw(st.integers(1, 12).filter(lambda canonical: fits(canonical, nodes))),
        num_nodes=nodes,
    )
    deal = Deal(
        length=len(sequence),
        start=draw(st.integers(0, min(largest_start, len(sequence)))),
        num_nodes=nodes,
        ranks_per_node=draw(st.integers(1, 3)),
        batch_size=draw(st.integers(1, 5)),
    )
    return Epoch(sequence, deal)


def first_reads(epoch: Epoch) -> list[int]:
    """Positions of all first reads, over all ranks."""
    found: list[int] = []
    for node in range(epoch.deal.num_nodes):
        for rank in range(epoch.deal.ranks_per_node):
            ts = np.arange(epoch.deal.num_batches())
            are_first = are_first_reads(epoch.sequence, epoch.deal, ts, node, rank)
            found += epoch.deal.batches(ts, node, rank)[are_first].tolist()
    return found


def places(epoch: Epoch, positions: list[int]) -> NDArray[np.int64]:
    return epoch.sequence.places(np.asarray(positions, np.int64))


@given(epoch=epochs())
def test_each_place_of_an_epoch_has_one_first_read(epoch: Epoch) -> None:
    assert sorted(places(epoch, first_reads(epoch))) == list(range(epoch.sequence.num_samples))


@given(epoch=epochs(largest_start=60))
def test_what_was_read_before_a_resume_is_no_first_read_after_it(epoch: Epoch) -> None:
    before = set(places(epoch, list(range(epoch.deal.start))).tolist())
    after = places(epoch, first_reads(epoch)).tolist()
    assert sorted(after) == sorted(set(range(epoch.sequence.num_samples)) - before)


def test_an_epoch_that_divides_has_first_reads_only() -> None:
    deal = Deal(length=24, start=0, num_nodes=2, ranks_per_node=2, batch_size=3)
    sequence = CanonicalSequence(num_samples=24, num_canonical_nodes=2, num_nodes=2)
    assert all(are_first_reads(sequence, deal, np.arange(2), node, rank).all() for node in (0, 1) for rank in (0, 1))


def test_four_ranks_that_read_ten_samples() -> None:
    # As 0 1 2 3 | 4 5 6 7 | 8 9 5 6: the last two ranks read their last sample again.
    deal = Deal(length=10, start=0, num_nodes=1, ranks_per_node=4, batch_size=2)
    sequence = CanonicalSequence(num_samples=10, num_canonical_nodes=1, num_nodes=1)
    masks = [are_first_reads(sequence, deal, np.arange(2), 0, rank).tolist() for rank in range(4)]
    assert masks == [[[True, True], [True, False]]] * 2 + [[[True, True], [False, False]]] * 2


def test_what_ranks_read_again_of_composed_batches_is_told_too() -> None:
    settings = make_settings(batching_method="stratified", num_canonical_nodes=1)
    geometry = BatchGeometry(num_nodes=1, ranks_per_node=1, batch_size=4)
    sequence = epoch_sequence(settings, make_shape([9], [7]), geometry, epoch=0)
    deal = Deal(length=len(sequence), start=3, num_nodes=1, ranks_per_node=2, batch_size=4)
    positions = first_reads(Epoch(sequence, deal))
    assert sorted(positions) == list(range(3, len(sequence)))
    assert deal.samples_per_rank() * 2 > len(positions)
