"""Bytes that went wrong, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes, *, fewest: int = 1, most: int = 4, longest: int = 40) -> bytes:
    """``data`` with a few pieces overwritten, cut out or doubled: how many, and of at most how many bytes each."""
    for _ in range(draw(st.integers(fewest, most))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, longest)))
        piece = draw(st.sampled_from([b"", data[start:stop] * 2]) | st.binary(max_size=8))
        data = data[:start] + piece + data[stop:]
    return data
