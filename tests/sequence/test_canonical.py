from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, SampleIndexError, StateError
from lightning_streaming.sequence.partition import (
    BatchGeometry,
    CanonicalSequence,
    Partition,
    epoch_geometry,
    rank_layout,
)
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.sequence.weights import DatasetShape, StreamWeight, resolve_weights
from tests.sequence.builders import epoch_of, geometry_of, make_settings, make_shape
from tests.sequence.reference import assert_is, load, reference_start, reference_work_array, work_array

CASES = load("order_components.json")["partitions"]


GOES_ON = [
    case
    for case in CASES
    if "error" in case["out"] and (case["args"]["algo"] == "relaxed" or case["args"]["samples"] == 9)
]
"""The reference cannot divide few samples among many nodes, nor go on with any global batch. We can."""
SERVED = [case for case in CASES if "error" not in case["out"]]
REFUSED = [case for case in CASES if "error" in case["out"] and case not in GOES_ON]


def partition(args: dict[str, Any], *, as_reference: bool = True) -> NDArray[np.int64]:
    settings = OrderSettings(num_canonical_nodes=args["canonical"], partition_algo=args["algo"]).resolved(1)
    shape = DatasetShape(
        shard_sizes=(np.asarray([args["samples"]]),),
        weights=resolve_weights([StreamWeight()], [args["samples"]], None, 0),
    )
    current = BatchGeometry(
        num_nodes=args["physical"], ranks_per_node=args["ranks_per_node"], batch_size=args["batch_size"]
    )
    geometry = epoch_geometry(settings, current, args["initial_physical"])
    plan = epoch_of(settings, shape, geometry)
    consumed = plan.resume_position(args["drop_first"], current.num_ranks)
    partition = Partition(
        sequence=plan,
        start=reference_start(settings, consumed, current, geometry),
        geometry=current,
        layout=rank_layout(settings, current, geometry),
    )
    whole = reference_work_array if as_reference else work_array
    return whole(plan, partition, args["workers_per_rank"])


def test_no_golden_partition_is_left_out() -> None:
    assert (len(SERVED), len(REFUSED), len(GOES_ON)) == (20, 2, 2)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: str(list(case["args"].values())))
def test_a_partition_is_that_of_the_reference(case: dict[str, Any]) -> None:
    assert_is(partition(case["args"]), case["out"])


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(list(case["args"].values())))
def test_a_partition_that_the_reference_refuses_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, StateError)):
        partition(case["args"])


@pytest.mark.parametrize("case", GOES_ON, ids=lambda case: str(list(case["args"].values())))
def test_what_the_reference_cannot_divide_is_divided_evenly(case: dict[str, Any]) -> None:
    work = partition(case["args"], as_reference=False)
    dropped = case["args"]["drop_first"]
    assert len(set(work[work >= 0])) == case["args"]["samples"] - dropped
    assert len(np.unique((work >= 0).sum(axis=(2, 3, 4)))) == 1


def whole_sequence(num_samples: int, canonical: int, nodes: int) -> list[int]:
    """The sequence spelled out: a table with a row per slice, read column after column."""
    slice_size = -(-num_samples // canonical)
    ratio = nodes // canonical if canonical < nodes else 0
    padding = -slice_size % ratio if ratio else 0
    if num_samples < canonical or (num_samples == canonical and canonical < nodes):
        table = np.resize(np.arange(num_samples), (canonical, slice_size + padding))
        return list(table.T.ravel().tolist())
    rows = []
    for c in range(canonical):
        row = list(range(c * num_samples // canonical, (c + 1) * num_samples // canonical))
        row += [row[-1]] * (slice_size - len(row))
        begin = slice_size - ratio - padding + 1
        again = row[begin : begin + padding] if begin >= 0 else list(np.resize(row, padding))
        rows.append(row + again if padding else row)
    return list(np.asarray(rows).T.ravel().tolist())


@st.composite
def sequences(draw: st.DrawFn) -> CanonicalSequence:
    nodes, factor = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    canonical, nodes = draw(st.sampled_from([(nodes * factor, nodes), (nodes, nodes * factor)]))
    return CanonicalSequence(num_samples=draw(st.integers(1, 150)), num_canonical_nodes=canonical, num_nodes=nodes)


@given(sequence=sequences())
@example(CanonicalSequence(num_samples=2, num_canonical_nodes=1, num_nodes=4))  # padding longer than the slice
def test_a_sequence_is_its_table_read_by_columns(sequence: CanonicalSequence) -> None:
    expected = whole_sequence(sequence.num_samples, sequence.num_canonical_nodes, sequence.num_nodes)
    assert sequence.places(np.arange(len(sequence))).tolist() == expected


@given(sequence=sequences(), data=st.data())
def test_random_access_equals_the_whole(sequence: CanonicalSequence, data: st.DataObject) -> None:
    whole = sequence.places(np.arange(len(sequence)))
    some = np.asarray(data.draw(st.lists(st.integers(0, len(sequence) - 1), max_size=9)), np.int64)
    assert sequence.places(some).tolist() == whole[some].tolist()
    shaped = np.arange(len(sequence)).reshape(sequence.num_canonical_nodes, -1)
    assert (sequence.places(shaped) == whole.reshape(shaped.shape)).all()


@given(sequence=sequences())
def test_a_sequence_reads_every_sample_and_divides_among_the_nodes(sequence: CanonicalSequence) -> None:
    assert set(sequence.places(np.arange(len(sequence)))) == set(range(sequence.num_samples))
    assert len(sequence) % sequence.num_nodes == 0


@given(num_samples=st.integers(1, 10**15), nodes=st.integers(1, 64), data=st.data())
def test_huge_epochs_cost_no_more_than_small_ones(num_samples: int, nodes: int, data: st.DataObject) -> None:
    sequence = CanonicalSequence(num_samples=num_samples, num_canonical_nodes=nodes, num_nodes=nodes)
    position = data.draw(st.integers(0, len(sequence) - 1))
    step, piece = divmod(position, nodes)
    first, stop = piece * num_samples // nodes, (piece + 1) * num_samples // nodes
    if num_samples >= nodes:
        assert sequence.places(np.asarray([position])).tolist() == [min(first + step, stop - 1)]


@pytest.mark.parametrize("position", [-1, 54])
def test_a_position_outside_the_sequence_is_refused(position: int) -> None:
    sequence = CanonicalSequence(num_samples=53, num_canonical_nodes=2, num_nodes=2)
    with pytest.raises(SampleIndexError, match=r"\[0, 54\)"):
        sequence.places(np.asarray([0, position]))


@pytest.mark.parametrize(
    ("samples", "canonical", "nodes", "words"),
    [
        (10, 4, 3, "multiple or a divisor"),
        (10, 3, 4, "multiple or a divisor"),
        (0, 1, 1, "needs samples"),
    ],
)
def test_a_sequence_that_cannot_be_is_refused(samples: int, canonical: int, nodes: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CanonicalSequence(num_samples=samples, num_canonical_nodes=canonical, num_nodes=nodes)


@pytest.mark.parametrize(
    ("consumed", "position"),
    [(0, 0), (13, 13), (54, 54), (56, 54)],  # 54 entries; 4 ranks read 56, two of them again
)
def test_resuming_goes_on_where_reading_stopped(consumed: int, position: int) -> None:
    epoch = epoch_of(make_settings(num_canonical_nodes=2), make_shape([53]), geometry_of(2, 2, 1))
    assert epoch.resume_position(consumed, num_ranks=4) == position


@pytest.mark.parametrize("consumed", [-1, 57])
def test_resuming_beyond_the_epoch_is_refused(consumed: int) -> None:
    epoch = epoch_of(make_settings(num_canonical_nodes=2), make_shape([53]), geometry_of(2, 2, 1))
    with pytest.raises(StateError, match="53, or 56 with repeats"):
        epoch.resume_position(consumed, num_ranks=4)


def test_any_position_of_a_long_sequence_can_be_resumed_from() -> None:
    epoch = epoch_of(make_settings(num_canonical_nodes=64), make_shape([65]), geometry_of(1, 3, 1))
    assert [epoch.resume_position(consumed, num_ranks=3) for consumed in (127, 128, 129)] == [127, 128, 128]
