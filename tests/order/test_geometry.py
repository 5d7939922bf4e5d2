"""For which machines an epoch's batches are made, and how other machines share them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.geometry import epoch_geometry, layout
from lightning_streaming.order.layout import IN_TURN, BatchGeometry, InBlocks, Layout, Regrouped
from lightning_streaming.order.plan import epoch_sequence
from lightning_streaming.order.settings import BATCHING_METHODS, OrderSettings
from tests.order.builders import make_settings, make_shape

IN_BLOCKS = ("device_per_stream", "stratified")
SHARED = ("per_stream", "random")


def geometry_of(nodes: int, ranks: int, batch_size: int) -> BatchGeometry:
    return BatchGeometry(num_nodes=nodes, ranks_per_node=ranks, batch_size=batch_size)


def settings_of(method: str, canonical: int = 4, partition: str = "relaxed") -> OrderSettings:
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
    assert layout(settings, current, geometry) == IN_TURN


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
        *[(method, geometry_of(2, 2, 3), geometry_of(2, 2, 3), InBlocks()) for method in IN_BLOCKS],
        *[(method, geometry_of(3, 2, 5), geometry_of(2, 2, 3), InBlocks()) for method in IN_BLOCKS],
        *[(method, geometry_of(2, 2, 3), geometry_of(4, 2, 3), IN_TURN) for method in SHARED],  # 4 canonical nodes fit
        *[(method, geometry_of(3, 2, 4), geometry_of(2, 2, 6), Regrouped(2)) for method in SHARED],
        *[(method, geometry_of(3, 2, 3), geometry_of(2, 2, 4), IN_TURN) for method in SHARED],  # 18 among 4 ranks
    ],
)
def test_how_machines_share_a_global_batch(
    method: str, current: BatchGeometry, made_for: BatchGeometry, expected: Layout
) -> None:
    assert layout(settings_of(method), current, made_for) == expected


geometries = st.builds(
    BatchGeometry, num_nodes=st.integers(1, 6), ranks_per_node=st.integers(1, 3), batch_size=st.integers(2, 5)
)


@given(
    method=st.sampled_from(BATCHING_METHODS),
    current=geometries,
    initial=st.sampled_from([1, 2, 3, 4, 6, 12]),
    made_for=geometries,
)
def test_relaxed_goes_on_with_any_machines(
    method: str, current: BatchGeometry, initial: int, made_for: BatchGeometry
) -> None:
    settings = settings_of(method, canonical=12)
    geometry = epoch_geometry(settings, current, initial)
    assert len(epoch_sequence(settings, make_shape([900], [1100]), geometry, 0)) > 0
    # Also in the middle of an epoch whose batches were made for others.
    for made in (geometry, made_for):
        chosen = layout(settings, current, made)
        ranks = [(node, rank) for node in range(current.num_nodes) for rank in range(current.ranks_per_node)]
        entries = [entry for node, rank in ranks for entry in chosen.entries(current, node, rank).tolist()]
        assert sorted(entries) == list(range(current.global_batch_size))
