from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, SampleIndexError, StateError, UnsupportedError
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.plan import EpochPlan
from lightning_streaming.order.sequence import CanonicalSequence, canonical_sequence
from tests.order.reference import assert_is, load, reference_start, work_array

CASES = load("order_components.json")["partitions"]


def is_redealt(args: dict[str, Any]) -> bool:
    canonical, nodes = args["canonical"], args["physical"]
    return args["algo"] == "relaxed" and bool(canonical % nodes and nodes % canonical)


SERVED = [case for case in CASES if not is_redealt(case["args"]) and "error" not in case["out"]]
REFUSED = [case for case in CASES if not is_redealt(case["args"]) and "error" in case["out"]]
LATER = [case for case in CASES if is_redealt(case["args"])]


def partition(args: dict[str, Any]) -> NDArray[np.int64]:
    sequence = canonical_sequence(
        args["algo"], args["samples"], args["canonical"], args["physical"], args["initial_physical"]
    )
    deal = Deal(
        length=len(sequence),
        start=reference_start(
            sequence.resume_position(args["drop_first"], args["physical"] * args["ranks_per_node"]), args["physical"]
        ),
        num_nodes=args["physical"],
        ranks_per_node=args["ranks_per_node"],
        batch_size=args["batch_size"],
    )
    return work_array(EpochPlan(sequence=sequence, order=None), deal, args["workers_per_rank"])


def test_no_golden_partition_is_left_out() -> None:
    assert (len(SERVED), len(REFUSED), len(LATER)) == (17, 3, 4)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: str(list(case["args"].values())))
def test_a_partition_is_that_of_the_reference(case: dict[str, Any]) -> None:
    assert_is(partition(case["args"]), case["out"])


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(list(case["args"].values())))
def test_a_partition_that_the_reference_refuses_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, StateError)) as caught:
        partition(case["args"])
    assert not isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize("case", LATER, ids=lambda case: str(list(case["args"].values())))
def test_dealing_anew_to_nodes_that_do_not_fit_is_not_served_yet(case: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="cannot go on"):
        partition(case["args"])


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
        rows.append(row + row[begin : begin + padding] if padding else row)
    return list(np.asarray(rows).T.ravel().tolist())


@st.composite
def sequences(draw: st.DrawFn) -> CanonicalSequence:
    nodes, factor = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    canonical, nodes = draw(st.sampled_from([(nodes * factor, nodes), (nodes, nodes * factor)]))
    try:
        return CanonicalSequence(num_samples=draw(st.integers(1, 150)), num_canonical_nodes=canonical, num_nodes=nodes)
    except ConfigError:
        assume(False)
        raise


@given(sequence=sequences())
def test_a_sequence_is_its_table_read_by_columns(sequence: CanonicalSequence) -> None:
    expected = whole_sequence(sequence.num_samples, sequence.num_canonical_nodes, sequence.num_nodes)
    assert sequence.canonical_positions(np.arange(len(sequence))).tolist() == expected


@given(sequence=sequences(), data=st.data())
def test_random_access_equals_the_whole(sequence: CanonicalSequence, data: st.DataObject) -> None:
    whole = sequence.canonical_positions(np.arange(len(sequence)))
    some = np.asarray(data.draw(st.lists(st.integers(0, len(sequence) - 1), max_size=9)), np.int64)
    assert sequence.canonical_positions(some).tolist() == whole[some].tolist()
    shaped = np.arange(len(sequence)).reshape(sequence.num_canonical_nodes, -1)
    assert (sequence.canonical_positions(shaped) == whole.reshape(shaped.shape)).all()


@given(sequence=sequences())
def test_a_sequence_reads_every_sample_and_divides_among_the_nodes(sequence: CanonicalSequence) -> None:
    assert set(sequence.canonical_positions(np.arange(len(sequence)))) == set(range(sequence.num_samples))
    assert len(sequence) % sequence.num_nodes == 0


@given(num_samples=st.integers(1, 10**15), nodes=st.integers(1, 64), data=st.data())
def test_huge_epochs_cost_no_more_than_small_ones(num_samples: int, nodes: int, data: st.DataObject) -> None:
    sequence = CanonicalSequence(num_samples=num_samples, num_canonical_nodes=nodes, num_nodes=nodes)
    position = data.draw(st.integers(0, len(sequence) - 1))
    step, piece = divmod(position, nodes)
    first, stop = piece * num_samples // nodes, (piece + 1) * num_samples // nodes
    if num_samples >= nodes:
        assert sequence.canonical_positions(np.asarray([position])).tolist() == [min(first + step, stop - 1)]


@pytest.mark.parametrize("position", [-1, 54])
def test_a_position_outside_the_sequence_is_refused(position: int) -> None:
    sequence = CanonicalSequence(num_samples=53, num_canonical_nodes=2, num_nodes=2)
    with pytest.raises(SampleIndexError, match=r"\[0, 54\)"):
        sequence.canonical_positions(np.asarray([0, position]))


@pytest.mark.parametrize(
    ("samples", "canonical", "nodes", "words"),
    [
        (10, 4, 3, "multiple or a divisor"),
        (10, 3, 4, "multiple or a divisor"),
        (9, 1, 8, "too few"),
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
    sequence = CanonicalSequence(num_samples=53, num_canonical_nodes=2, num_nodes=2)
    assert sequence.resume_position(consumed, num_ranks=4) == position


@pytest.mark.parametrize("consumed", [-1, 57])
def test_resuming_beyond_the_epoch_is_refused(consumed: int) -> None:
    sequence = CanonicalSequence(num_samples=53, num_canonical_nodes=2, num_nodes=2)
    with pytest.raises(StateError, match="53, or 56 with repeats"):
        sequence.resume_position(consumed, num_ranks=4)


def test_any_position_of_a_long_sequence_can_be_resumed_from() -> None:
    sequence = CanonicalSequence(num_samples=65, num_canonical_nodes=64, num_nodes=1)
    assert [sequence.resume_position(consumed, num_ranks=3) for consumed in (127, 128, 129)] == [127, 128, 128]
