from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightning_streaming.tools.report.media import image_size, image_type

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("JPEG", {"exif": b"Exif\0\0" + b"\xff\xc0" * 200}),
    "progressive": ("JPEG", {"progressive": True}),
    "png": ("PNG", {}),
    "gif": ("GIF", {}),
    "webp": ("WEBP", {}),
    "webp without loss": ("WEBP", {"lossless": True}),
    "webp with more": ("WEBP", {"exif": b"Exif\0\0II"}),
}


def _file(kind: str, size: tuple[int, int]) -> bytes:
    drawn, (name, how) = io.BytesIO(), _KINDS[kind]
    Image.new("RGB", size, (200, 30, 90)).save(drawn, name, **how)
    return drawn.getvalue()


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("size", [(1, 1), (300, 7), (2049, 513)])
def test_the_size_of_a_picture_is_what_its_head_says(kind: str, size: tuple[int, int]) -> None:
    assert image_size(_file(kind, size)) == size


@given(kind=st.sampled_from(list(_KINDS)), stop=st.integers(0, 400), more=st.binary(max_size=40))
def test_a_damaged_head_says_some_size_or_none(kind: str, stop: int, more: bytes) -> None:
    data = _file(kind, (30, 20))[:stop] + more
    size = image_size(data)
    assert size is None or (image_type(data) is not None and len(size) == 2)


@pytest.mark.parametrize(("fill", "size"), [(1000, (30, 20)), (1 << 20, None)])
def test_the_head_of_a_jpeg_is_looked_for_in_its_first_mebibyte(fill: int, size: tuple[int, int] | None) -> None:
    data = _file("jpeg", (30, 20))
    assert image_size(data[:2] + b"\xff" * fill + data[2:]) == size
