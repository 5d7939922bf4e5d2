from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.order import run_ids
from lightning_streaming.order.run_ids import write_runs

runs = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 40)), max_size=20)


@given(runs=runs, chunk=st.integers(1, 60), dtype=st.sampled_from([np.uint32, np.int64]))
def test_runs_follow_each_other_whatever_is_written_at_once(
    runs: list[tuple[int, int]], chunk: int, dtype: type[np.integer]
) -> None:
    firsts, sizes = np.asarray(runs, np.int64).reshape(-1, 2).T
    out = np.empty(int(sizes.sum()), dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_ids, "_CHUNK", chunk)
        write_runs(firsts, sizes, out)
    assert out.tolist() == [first + step for first, size in runs for step in range(size)]


def test_four_bytes_hold_ids_up_to_their_end() -> None:
    out = np.empty(3, np.uint32)
    write_runs(np.asarray([2**32 - 2, 0]), np.asarray([2, 1]), out)
    assert out.tolist() == [2**32 - 2, 2**32 - 1, 0]
