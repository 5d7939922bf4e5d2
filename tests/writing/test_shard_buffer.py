from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.writing.shard_buffer import ShardBuffer

PARTS = st.lists(st.binary(max_size=3000) | st.integers(0, 2000).map(lambda n: np.arange(n, dtype="<u2")), max_size=3)


def held(buffer: ShardBuffer) -> list[bytes]:
    """Its samples, as whoever they are lent to sees them."""
    with buffer.samples() as samples:
        assert len(samples) == len(buffer)
        starts = [0, *samples.ends.tolist()]
        assert len(samples.data) == starts[-1] == buffer.num_bytes
        return [bytes(samples.data[start:stop]) for start, stop in pairwise(starts)]


@given(st.integers(0, 20_000), st.lists(PARTS | st.sampled_from(["pop", "clear"]), max_size=30))
def test_it_holds_what_was_added_whatever_it_held_before(room: int, steps: list[Any]) -> None:
    buffer = ShardBuffer(room)
    expected: list[bytes] = []
    for step in steps:
        if step == "clear":
            buffer.clear()
            expected = []
        elif step != "pop":
            expected.append(b"".join(step))
            assert buffer.append(step) == sum(map(len, expected))
        elif expected:
            assert buffer.pop() == expected.pop()
    assert held(buffer) == expected


def test_a_sample_of_which_a_part_fails_is_not_added() -> None:
    buffer = ShardBuffer(0)
    buffer.append([b"one"])
    with pytest.raises(TypeError):
        buffer.append([b"two", "no bytes"])  # type: ignore[list-item]
    with pytest.raises(BufferError):
        buffer.append([b"two", memoryview(b"strided")[::2]])
    buffer.append([b"three"])
    assert held(buffer) == [b"one", b"three"]


def test_it_grows_with_large_samples_and_keeps_what_it_holds() -> None:
    buffer = ShardBuffer(0)
    samples = [bytes([n]) * n * 1000 for n in range(1, 60)]
    assert [buffer.append([data]) for data in samples] == list(accumulate(map(len, samples)))
    assert held(buffer) == samples
    assert buffer.room < 4 * buffer.num_bytes


def test_memory_is_used_again() -> None:
    buffer = ShardBuffer(0)
    buffer.append([bytes(100_000)])
    room = buffer.room
    buffer.clear()
    assert (len(buffer), buffer.num_bytes, buffer.room) == (0, 0, room)
