"""Who reads which entries of a global batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.order.layout import IN_TURN, BatchGeometry, InBlocks, Layout, Regrouped

geometries = st.builds(
    BatchGeometry, num_nodes=st.integers(1, 5), ranks_per_node=st.integers(1, 5), batch_size=st.integers(1, 5)
)


def divided(layout: Layout, geometry: BatchGeometry) -> NDArray[np.int64]:
    """Entries of shape (nodes, ranks, batch size)."""
    return np.asarray(
        [
            [layout.entries(geometry, node, rank) for rank in range(geometry.ranks_per_node)]
            for node in range(geometry.num_nodes)
        ]
    )


def geometry_of(nodes: int, ranks: int, batch_size: int) -> BatchGeometry:
    return BatchGeometry(num_nodes=nodes, ranks_per_node=ranks, batch_size=batch_size)


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[Regrouped, BatchGeometry]:
    """Nodes at the beginning, and machines whose global batch divides among them."""
    initial, nodes, ranks, factor = (draw(st.integers(1, 5)) for _ in range(4))
    return Regrouped(initial), geometry_of(nodes, ranks, initial * factor)


@pytest.mark.parametrize(
    ("layout", "geometry", "expected"),
    [
        (IN_TURN, geometry_of(2, 1, 3), [[[0, 2, 4]], [[1, 3, 5]]]),
        (IN_TURN, geometry_of(2, 2, 2), [[[0, 4], [2, 6]], [[1, 5], [3, 7]]]),  # nodes take turns faster than ranks
        (InBlocks(), geometry_of(2, 1, 3), [[[0, 1, 2]], [[3, 4, 5]]]),
        (InBlocks(), geometry_of(2, 2, 2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (Regrouped(2), geometry_of(3, 1, 2), [[[0, 2]], [[4, 1]], [[3, 5]]]),  # 2 nodes would read 0 2 4 and 1 3 5
    ],
    ids=str,
)
def test_a_small_global_batch(layout: Layout, geometry: BatchGeometry, expected: list[list[list[int]]]) -> None:
    assert divided(layout, geometry).tolist() == expected


@given(geometry=geometries, layout=st.sampled_from([IN_TURN, InBlocks()]))
def test_ranks_read_each_entry_once(geometry: BatchGeometry, layout: Layout) -> None:
    entries = divided(layout, geometry)
    assert entries.shape == (geometry.num_nodes, geometry.ranks_per_node, geometry.batch_size)
    assert sorted(entries.ravel()) == list(range(geometry.global_batch_size))


@given(case=regrouped())
def test_regrouped_are_the_batches_of_the_first_nodes_one_after_another_cut_anew(
    case: tuple[Regrouped, BatchGeometry],
) -> None:
    layout, geometry = case
    nodes, ranks = layout.initial_num_nodes, geometry.ranks_per_node
    at_first = divided(IN_TURN, geometry_of(nodes, ranks, geometry.global_batch_size // (nodes * ranks)))
    assert divided(layout, geometry).ravel().tolist() == at_first.ravel().tolist()


@given(geometry=geometries)
def test_regrouped_to_the_same_nodes_is_in_turn(geometry: BatchGeometry) -> None:
    layout = Regrouped(geometry.num_nodes)
    assert divided(layout, geometry).tolist() == divided(IN_TURN, geometry).tolist()


@given(geometry=geometries)
def test_in_turn_a_node_reads_its_own_canonical_nodes(geometry: BatchGeometry) -> None:
    for node, entries in enumerate(divided(IN_TURN, geometry)):
        assert set((entries % geometry.num_nodes).ravel().tolist()) == {node}


def test_a_geometry_knows_its_products() -> None:
    geometry = geometry_of(3, 4, 5)
    assert (geometry.num_ranks, geometry.global_batch_size) == (12, 60)
