from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
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


@given(st.integers(0, 200_000), st.lists(PARTS | st.sampled_from(["clear"]), max_size=30))
def test_it_holds_what_was_added_whatever_it_held_before(expected_bytes: int, steps: list[Any]) -> None:
    buffer = ShardBuffer(expected_bytes)
    expected: list[bytes] = []
    for step in steps:
        if step == "clear":
            buffer.clear()
            expected = []
        else:
            expected.append(b"".join(step))
            assert buffer.append(step)
            assert buffer.num_bytes == sum(map(len, expected))
    assert held(buffer) == expected


@given(st.lists(st.binary(max_size=60_000), max_size=8), st.integers(0, 200_000), st.integers(0, 20_000))
def test_what_passes_the_limit_is_not_added(samples: list[bytes], most: int, each: int) -> None:
    buffer = ShardBuffer(most)
    expected: list[bytes] = []
    for data in samples:
        fits = sum(map(len, expected)) + len(data) + each * (len(expected) + 1) <= most
        assert buffer.append([data[:7], data[7:]], most, each) == fits
        expected += [data] if fits else []
    assert held(buffer) == expected


def test_a_large_sample_that_passes_the_limit_is_not_copied() -> None:
    buffer = ShardBuffer(100_000)
    buffer.append([b"one"])
    room = buffer.room
    assert not buffer.append([bytes(10**7)], 100_000)
    assert buffer.room == room


@given(st.lists(st.binary(max_size=30_000), max_size=6), st.binary(max_size=30_000))
def test_a_head_is_put_before_all_samples(samples: list[bytes], head: bytes) -> None:
    buffer = ShardBuffer()
    for data in samples:
        buffer.append([data])
    with buffer.samples() as lent:
        assert bytes(lent.behind(head)) == head + b"".join(samples)
    buffer.clear()
    buffer.append([b"again"])
    assert held(buffer) == [b"again"]


_LITTLE_MEMORY = """
import resource
from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.shard_buffer import ShardBuffer
buffer = ShardBuffer(2**30)
data = bytes(20 * 2**20)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 32 * 2**20, used + 32 * 2**20))
assert buffer.append([data])
assert buffer.append([data[: 5 * 2**20]])  # the double of 20 MiB is refused
try:
    buffer.append([data])
except ConfigError as error:
    print(len(buffer), error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system limits addresses like this")
def test_less_memory_is_taken_where_more_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", _LITTLE_MEMORY], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("2 the system refuses 471")
    assert "choose a smaller size_limit" in done.stdout


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
    assert all(buffer.append([data]) for data in samples)
    assert held(buffer) == samples
    assert buffer.room < 4 * buffer.num_bytes


def test_memory_is_used_again() -> None:
    buffer = ShardBuffer(0)
    buffer.append([bytes(100_000)])
    room = buffer.room
    buffer.clear()
    assert (len(buffer), buffer.num_bytes, buffer.room) == (0, 0, room)
