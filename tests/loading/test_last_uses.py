from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.loading import last_uses
from lightning_streaming.loading.last_uses import LastUses
from tests.loading.processes import wait_until


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), max_size=6))
def test_each_shard_has_one_last_use_after_which_it_is_not_named(windows: list[list[int]]) -> None:
    arrays = [np.asarray(window, np.int64) for window in windows]
    order = [shard for window in windows for shard in window]
    uses = LastUses(lambda: iter(arrays), len(order), 6)
    found, first = [], 0
    for array in arrays:
        found += uses.among(array, first).tolist()
        first += len(array)
    assert found == [shard not in order[place + 1 :] for place, shard in enumerate(order)]


def test_a_long_plan_is_looked_through_beside_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_uses, "_FEW_SAMPLES", 1)
    uses = LastUses(lambda: iter([np.asarray([1, 0, 1])]), 3, 2)
    assert wait_until(lambda: uses.among(np.asarray([0]), 1).tolist() == [True])
    uses.close()


def test_a_plan_that_is_too_long_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Iterator[NDArray[np.int64]]:
        raise AssertionError

    monkeypatch.setattr(last_uses, "_MOST_SAMPLES", 2)
    monkeypatch.setattr(last_uses, "_FEW_SAMPLES", 1)
    assert LastUses(never, 3, 2).among(np.asarray([0]), 2).tolist() == [False]
