from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.storage.ranges import PART_BYTES, Part, cut, first_byte, range_header


@given(st.integers(0, 1 << 36), st.integers(1 << 20, 1 << 26))
def test_parts_follow_one_another_and_make_the_whole(size: int, part_bytes: int) -> None:
    parts = cut(size, part_bytes)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == size
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(part.at == part.start for part in parts)
    assert all(part.stop - part.start <= part_bytes * 1.5 for part in parts)


@given(st.integers(0, 1 << 30))
def test_no_range_is_empty(size: int) -> None:
    for part in cut(size):
        assert part.span is None or part.span[0] < part.span[1]


@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        (0, [0]),
        (1, [1]),
        (PART_BYTES * 3 // 2 - 1, [PART_BYTES * 3 // 2 - 1]),
        (PART_BYTES * 2, [PART_BYTES, PART_BYTES]),
        (64 << 20, [PART_BYTES] * 8),
        ((20 << 20) + 7, [107 << 16, 107 << 16, (106 << 16) + 7]),  # starts are multiples of 64 KiB
    ],
)
def test_parts_are_of_nearly_equal_length(size: int, lengths: list[int]) -> None:
    assert [part.stop - part.start for part in cut(size)] == lengths


@pytest.mark.parametrize(
    ("part", "span"),
    [
        (Part(0, 10, is_last=True, at=0), None),
        (Part(0, 10, is_last=True, at=4), (4, 11)),  # one more, to notice a longer object
        (Part(0, 10, is_last=False, at=0), (0, 10)),
        (Part(10, 20, is_last=False, at=13), (13, 20)),
        (Part(20, 30, is_last=True, at=20), (20, 31)),
    ],
)
def test_a_part_asks_for_what_has_not_arrived(part: Part, span: tuple[int, int] | None) -> None:
    assert part.span == span


def test_ranges_are_told_as_http_does() -> None:
    assert range_header((0, 10)) == "bytes=0-9"
    assert range_header((5, 6)) == "bytes=5-5"


@pytest.mark.parametrize(
    ("header", "byte"),
    [("bytes 5-9/10", 5), ("bytes 0-0/*", 0), ("bytes */10", None), ("items 5-9/10", None), ("", None), (None, None)],
)
def test_the_first_byte_of_an_answer_is_read(header: str | None, byte: int | None) -> None:
    assert first_byte(header) == byte
