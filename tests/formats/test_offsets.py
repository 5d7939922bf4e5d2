from __future__ import annotations

import numpy as np
import pytest

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.offsets import check_lengths, read_offsets, table_bytes


def _table(count: int, offsets: list[int]) -> memoryview:
    return memoryview(np.asarray([count, *offsets], "<u4").tobytes() + b"what follows")


def test_offsets_are_read() -> None:
    assert read_offsets(_table(3, [20, 22, 22, 30]), 3, "x.mds").tolist() == [20, 22, 22, 30]
    assert read_offsets(_table(0, [9]), 0, "x.mds").tolist() == [9]
    assert table_bytes(3) == 20


@pytest.mark.parametrize(
    ("start", "samples", "said"),
    [
        (memoryview(b"1234567"), 0, "x.mds must have 8 bytes for its offsets alone, but has 7"),
        (_table(4, [0, 0]), 3, "must have 3 samples by its index, but says it has 4"),
        (_table(3, [20, 20, 20, 20])[:19], 3, "must have 20 bytes for its offsets alone, but has 19"),
    ],
)
def test_a_table_that_cannot_be_is_refused(start: memoryview, samples: int, said: str) -> None:
    with pytest.raises(ShardCorruptError, match=said):
        read_offsets(start, samples, "x.mds")


@pytest.mark.parametrize("third", [25, 21])
def test_a_sample_that_is_too_short_is_named(third: int) -> None:
    offsets = np.asarray([20, 24, third, 30])
    check_lengths(offsets[:2], 2, "x.mds")
    with pytest.raises(ShardCorruptError, match=f"x.mds, sample 1: expected at least 2 .* say {third - 24}"):
        check_lengths(offsets, 2, "x.mds")


@pytest.mark.parametrize(("offsets", "length"), [([20], None), ([20, 24], 4), ([20, 24, 28], 4), ([20, 24, 27], None)])
def test_the_length_that_all_samples_have_is_told(offsets: list[int], length: int | None) -> None:
    assert check_lengths(np.asarray(offsets), 2, "x.mds") == length
