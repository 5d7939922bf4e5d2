from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats import mds
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.writing import shards
from lightning_streaming.writing.shards import (
    ShardBuffer,
    ShardBuilder,
    ShardEncoder,
    make_mds_encoder,
    make_split_encoder,
    parse_settings,
)
from tests.helpers import assert_error

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
from lightning_streaming.writing.shards import ShardBuffer
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


FORMATS = ["mds", "csv", "json"]


def encoder_of(shard_format: str, size_limit: int | None = None, hashes: tuple[str, ...] = ()) -> ShardEncoder:
    settings = parse_settings(None, hashes, size_limit)
    if shard_format == "mds":
        return make_mds_encoder({"text": "str"}, settings)
    return make_split_encoder(shard_format, {"text": "str"}, settings, newline="\n")


def taken(whole: ShardBuilder, gathered: ShardBuffer) -> list[bytes]:
    """The samples of a shard, whose memory is used again."""
    with gathered.samples() as samples:
        found = [bytes(samples.data[start:stop]) for start, stop in pairwise([0, *samples.ends.tolist()])]
    whole.reuse(gathered)
    return found


def cut(whole: ShardBuilder, samples: list[bytes]) -> list[list[bytes]]:
    """The samples of each shard."""
    shards = [taken(whole, whole.cut(whole.following([data]))) for data in samples if not whole.add([data])]
    return [*shards, taken(whole, whole.last())] if whole.has_samples else shards


def make(encoder: ShardEncoder, number: int, samples: list[bytes]) -> tuple[ShardInfo, list[bytes]]:
    """A shard, and its files."""
    gathered = ShardBuffer(0)
    for data in samples:
        gathered.append([data])
    with gathered.samples() as encoded:
        made = encoder.make(number, encoded)
        return made.info, [b"".join(file.pieces) for file in made.files]


@given(st.sampled_from(FORMATS), st.integers(1, 400), st.lists(st.binary(min_size=1, max_size=300), max_size=30))
def test_shards_are_cut_as_the_original_cuts_them(shard_format: str, size_limit: int, samples: list[bytes]) -> None:
    encoder = encoder_of(shard_format, size_limit)
    fixed, each = encoder.raw_bytes(0, 0), encoder.raw_bytes(1, 0) - encoder.raw_bytes(0, 0)
    expected: list[list[bytes]] = [[]]
    size = fixed
    for data in samples:
        if size + len(data) + each > size_limit:
            expected.append([])
            size = fixed
        expected[-1].append(data)
        size += len(data) + each
    assert cut(ShardBuilder(encoder), samples) == (expected if samples else [])


@given(
    st.sampled_from(FORMATS), st.integers(1, 400), st.lists(st.binary(min_size=1, max_size=300), min_size=1), st.data()
)
def test_cutting_goes_on_anywhere(
    shard_format: str, size_limit: int, samples: list[bytes], data: st.DataObject
) -> None:
    encoder = encoder_of(shard_format, size_limit)
    whole = cut(ShardBuilder(encoder), samples)
    number = data.draw(st.integers(0, len(whole) - 1))
    rest = [sample for shard in whole[number:] for sample in shard]
    assert cut(ShardBuilder(encoder, number=number), rest) == whole[number:]


@pytest.mark.parametrize("shard_format", FORMATS)
def test_the_limit_of_32_bits_is_that_of_the_whole_file(shard_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_of(shard_format)
    data = b"".join(encoder.parts({"text": "x" * 50}))
    size = len(make(encoder, 0, [data] * 3)[1][-1])
    for module in (mds, shards):
        monkeypatch.setattr(module, "MAX_RAW_BYTES", size)
    limited = ShardBuilder(encoder)
    assert [limited.add([data]) for _ in range(3)] == [True] * 3
    with assert_error(ConfigError, option="size_limit"):
        limited.add([data])
    assert taken(limited, limited.last()) == [data] * 3


def test_memory_is_used_again_unless_a_huge_sample_took_it() -> None:
    whole = ShardBuilder(encoder_of("mds", 300))
    small = whole.cut(whole.following([bytes(10**6)]))
    huge = whole.cut(whole.following([b""]))
    assert huge.room >= 10**6
    whole.reuse(huge)
    whole.reuse(small)
    found = [whole.following([b""]) for _ in range(4)]
    assert any(buffer is small for buffer in found)
    assert all(buffer is not huge for buffer in found)


def test_a_sample_that_does_not_fit_changes_nothing() -> None:
    whole = ShardBuilder(encoder_of("mds", 300))
    assert whole.add([b"one"])
    for _ in range(2):
        assert not whole.add([bytes(10**6)])
    following = whole.following([bytes(10**6)])
    assert (whole.number, whole.last().num_bytes, following.num_bytes) == (0, 3, 10**6)
    assert taken(whole, whole.cut(following)) == [b"one"]
    assert whole.number == 1


def test_an_empty_cutter_takes_little_memory() -> None:
    whole = ShardBuilder(encoder_of("mds", 2**26))
    assert whole.add([b"one"])
    assert whole.last().room <= 2**16


@pytest.mark.parametrize("shard_format", FORMATS)
@given(texts=st.lists(st.text(st.characters(exclude_characters="\n,", exclude_categories=["Cs"])), max_size=20))
def test_a_shard_is_taken_apart_again(shard_format: str, texts: list[str]) -> None:
    encoder = encoder_of(shard_format, 1000, ("sha1",))
    samples = [b"".join(encoder.parts({"text": text})) for text in texts]
    info, contents = make(encoder, 3, samples)
    assert info.samples == len(samples)
    table, data = contents[0], contents[-1]
    assert int.from_bytes(table[:4], "little") == len(samples)
    offsets = np.frombuffer(table, "<u4", len(samples) + 1, 4).tolist()
    assert [data[start:stop] for start, stop in pairwise(offsets)] == samples
    assert offsets[-1] == len(data)
