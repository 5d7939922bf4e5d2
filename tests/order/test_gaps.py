"""Positions without gaps, checked against lists with what is left out taken out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.order.gaps import NO_GAPS, Gaps, Stretch, epoch_not_left_out, gaps_in, merged

LENGTH, EPOCHS = 12, 4
places = st.tuples(st.integers(0, EPOCHS), st.integers(0, LENGTH))
stretches = st.lists(st.tuples(places, places), max_size=5)


def left_out(stretches: list[Stretch], epoch: int) -> set[int]:
    return {at for at in range(LENGTH) if any(start <= (epoch, at) < stop for start, stop in stretches)}


@given(stretches, st.integers(0, EPOCHS))
def test_what_is_kept_is_what_no_stretch_leaves_out(stretches: list[Stretch], epoch: int) -> None:
    gaps = gaps_in(stretches, epoch)
    kept = [at for at in range(LENGTH) if at not in left_out(stretches, epoch)]
    assert [gaps.kept_before(at) for at in range(LENGTH + 1)] == [sum(k < at for k in kept) for at in range(LENGTH + 1)]
    assert gaps.positions(np.arange(len(kept))).tolist() == kept
    assert [gaps.position_after(read) for read in range(len(kept) + 1)] == [0, *(at + 1 for at in kept)]


@given(stretches)
def test_merged_stretches_are_apart_and_cover_the_same(stretches: list[Stretch]) -> None:
    whole = merged(stretches)
    flat = [place for stretch in whole for place in stretch]
    assert flat == sorted(set(flat))
    for epoch in range(EPOCHS + 1):
        assert left_out(whole, epoch) == left_out(stretches, epoch)


@given(stretches, st.integers(0, EPOCHS))
def test_epochs_that_stretches_pass_over_whole_are_passed_over(stretches: list[Stretch], epoch: int) -> None:
    found = epoch_not_left_out(stretches, epoch)
    assert all(len(left_out(stretches, passed)) == LENGTH for passed in range(epoch, found))
    assert not any(start <= (found, 0) and (found + 1, 0) <= stop for start, stop in merged(stretches))


def test_without_gaps_positions_are_themselves() -> None:
    entries = np.arange(5)
    assert gaps_in([], 0) == NO_GAPS == Gaps(())
    assert NO_GAPS.positions(entries) is entries
    assert (NO_GAPS.kept_before(7), NO_GAPS.position_after(7)) == (7, 7)
