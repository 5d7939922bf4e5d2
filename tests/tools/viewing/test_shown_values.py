from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from lightning_streaming.tools.report.media import audio_type, encode_png, image_type
from lightning_streaming.tools.viewing import shown_values
from lightning_streaming.tools.viewing.shown_values import (
    TEXT_PAGE,
    Node,
    brief_value,
    media_of,
    shown_value,
    spread_of,
)


@given(
    arrays.arrays(
        np.uint8,
        st.one_of(
            st.tuples(*[st.integers(1, 9)] * 2), st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
        ),
    )
)
def test_a_png_has_the_pixels_it_was_made_of(pixels: Any) -> None:
    with Image.open(io.BytesIO(encode_png(pixels))) as image:
        image.load()
        found = np.asarray(image)
    assert np.array_equal(found, pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


def _file(kind: str) -> bytes:
    drawn = io.BytesIO()
    Image.new("RGB", (4, 3), (9, 8, 7)).save(drawn, kind)
    return drawn.getvalue()


@pytest.mark.parametrize("kind", ["jpeg", "png", "gif", "webp"])
def test_files_of_pictures_that_browsers_show_are_given_as_they_are(kind: str) -> None:
    data = _file(kind)
    assert image_type(data) == f"image/{kind}"
    found = media_of(data, 0)
    assert found is not None
    assert (found.content_type, found.data) == (f"image/{kind}", data)
    assert shown_value(data).kind == brief_value(data).kind == "images"


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<?xml version='1.0'?><svg/>",
        b"<!doctype html><script>1</script>",
        b"%PDF-1.7",
        b"RIFF\0\0\0\0AVI LIST",
        b"PK\3\4",
        b"GIF",
        b"",
        b"\xff\xfb",
        b"\xff\xfb\x90\x00 no frame is so short",
        b"\xff\xfb\x90\x00" + bytes(413) + b"and what follows is none",
        bytes(np.full(600, -1025, "<i2").tobytes()),
    ],
)
def test_other_files_are_bytes(data: bytes) -> None:
    assert image_type(data) is None
    assert audio_type(data) is None
    assert media_of(data, 0) is None
    assert shown_value(data).kind == "bytes"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"RIFF\0\0\0\0WAVEfmt ", "audio/wav"),
        (b"fLaC\0", "audio/flac"),
        (b"OggS\0", "audio/ogg"),
        (b"ID3\4", "audio/mpeg"),
        (b"\xff\xfb\x90\x00" + bytes(413), "audio/mpeg"),
        (2 * (b"\xff\xf3\x80\x02" + bytes(204)), "audio/mpeg"),
    ],
)
def test_sounds_are_known_by_their_first_bytes(data: bytes, kind: str) -> None:
    found = media_of(data, 0)
    assert found is not None
    assert found.content_type == kind
    assert shown_value(data).kind == brief_value(data).kind == "audio"


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "I", "F", "YCbCr", "HSV", "LAB"]
)
def test_images_of_any_mode_become_png(mode: str) -> None:
    found = media_of(Image.new(mode, (5, 4)), 0)
    assert found is not None
    assert image_type(found.data) == found.content_type == "image/png"


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_images_of_many_levels_are_shown_from_the_least_to_the_most(mode: str) -> None:
    image = Image.new(mode, (3, 1))
    for place, level in enumerate((1000, 1500, 3000)):
        image.putpixel((place, 0), level)
    found = media_of(image, 0)
    assert found is not None
    with Image.open(io.BytesIO(found.data)) as drawn:
        assert np.asarray(drawn).tolist() == [[0, 63, 255]]
    for shown in (shown_value(image), brief_value(image)):
        assert shown.images[0].endswith("black 1000 to white 3000")


def test_images_of_what_is_no_level_are_shown() -> None:
    for values in ([[np.nan, np.inf, -np.inf, 1.0, 2.0]], [[np.nan]], [[3e38, -3e38]]):
        with np.errstate(all="raise"):
            assert media_of(Image.fromarray(np.array(values, np.float32)), 0) is not None


def test_lists_of_pictures_are_shown_picture_by_picture() -> None:
    images = [Image.new("L", (2, 3), level) for level in range(40)]
    shown = shown_value(images)
    assert shown.kind == "images"
    assert len(shown.images) == 24
    assert len(brief_value(images).images) == 3
    assert media_of(images, 23) is not None
    assert media_of(images, 24) is None
    assert media_of(images, -1) is None
    assert shown_value([*images[:2], "and a text"]).kind == "tree"


@pytest.mark.parametrize("shape", [(3, 20, 30), (20, 30, 3), (20, 30, 4), (1, 20, 30), (20, 30)])
def test_arrays_of_bytes_that_may_be_pixels_are_shown_as_a_picture_too(shape: tuple[int, ...]) -> None:
    found = media_of(np.zeros(shape, np.uint8), 0)
    assert found is not None
    with Image.open(io.BytesIO(found.data)) as image:
        assert image.size == (30, 20)


def test_a_huge_picture_is_given_smaller() -> None:
    found = media_of(np.zeros((9000, 5), np.uint8), 0)
    assert found is not None
    with Image.open(io.BytesIO(found.data)) as image:
        assert image.size == (5, 3000)


@given(
    arrays.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.int8, np.int64, np.uint64, np.bool_, np.complex64]),
        arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
    )
)
def test_any_array_is_shown(array: Any) -> None:
    shown = shown_value(array)
    assert shown.kind == "array"
    assert dict(shown.facts)["dtype"] == str(array.dtype)
    assert brief_value(array).words


@pytest.mark.parametrize(
    "values",
    [
        [1e18, 1e18 + 200],
        [1.0, 1.79769313e308, 0.0],
        [8.98846567e307] * 2,
        [math.nan] * 9,
        [math.inf, -math.inf, 0],
        [1e308, -1e308, 0.0],
        [5.0] * 9,
        [1e-320, 0.0, 1.0],
    ],
)
def test_arrays_of_what_no_axis_has_are_shown(values: list[float]) -> None:
    with np.errstate(all="raise", under="ignore"):  # what is far too small counts as zero
        assert shown_value(np.array(values)).kind == "array"
        assert brief_value(np.array(values * 9)).kind == "plain"


def test_the_least_and_the_most_are_those_of_all_numbers_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_values, "_MAX_COUNTED", 100)
    monkeypatch.setattr(shown_values, "_CHUNK", 70)
    array = np.arange(1000) + 2**60
    array[500], array[501], array[777] = 0, -(2**62) - 1, 2**62 + 1
    shown = shown_value(array)
    words = dict(shown.facts)["min, mean, max"]
    assert words.startswith(f"{-(2**62) - 1:,}, ")
    assert words.endswith(f", {2**62 + 1:,}")
    assert "of one value in 10" in str(shown.charts[1])
    mean = shown_value(np.array([1e308, 1e308, -1e308, np.nan]))
    assert dict(mean.facts)["min, mean, max"] == "-1e+308, 3.33333e+307, 1e+308"
    assert dict(mean.facts)["not finite"] == "1 of 4"


@given(st.lists(arrays.arrays(np.int16, st.integers(0, 30)), max_size=5))
def test_a_spread_is_that_of_all_arrays_together(parts: list[Any]) -> None:
    found, together = spread_of(parts), np.concatenate([*parts, np.zeros(0, np.int16)])
    if not len(together):
        assert found is None
        return
    assert found is not None
    assert (found.min, found.max, found.finite) == (together.min(), together.max(), len(together))
    assert found.mean == pytest.approx(together.mean(), abs=1e-6)


def test_strange_arrays_are_shown() -> None:
    signals = np.frombuffer(b"\x01\xfc" * 9, np.float16)  # numbers that say that they are none
    masked = np.ma.array([1.0, 2.0] * 9, mask=[True, False] * 9)
    for array in (
        np.array(["a", "b"]),
        np.array([None, {}], object),
        np.array(["2020-01-01"], "datetime64[D]"),
        signals,
        masked,
    ):
        assert brief_value(array).words
        assert shown_value(array).kind == "array"


@given(st.text(max_size=50), st.integers(-5, 10**6))
def test_a_text_is_shown_from_a_page_of_it_on(text: str, start: int) -> None:
    long = text * 2000
    shown = shown_value(long, start)
    assert shown.text == long[shown.start : shown.start + TEXT_PAGE]
    assert shown.start % TEXT_PAGE == 0
    assert shown.start <= max(0, start)
    assert shown.text or not long


def _size(node: Node) -> int:
    return 1 + sum(map(_size, node.items))


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.one_of(st.lists(inner, max_size=60), st.dictionaries(st.text(max_size=3), inner, max_size=60)),
        max_leaves=200,
    )
)
def test_a_tree_has_room_for_every_value(value: Any) -> None:
    shown = shown_value({"tree": value} if not isinstance(value, (dict, list)) else value)
    assert shown.kind == "tree"
    assert shown.tree is not None
    assert _size(shown.tree) <= 1501


def test_a_large_tree_shows_something_of_each_of_its_first_branches() -> None:
    shown = shown_value([list(range(1000))] * 100).tree
    assert shown is not None
    assert shown.more == 50
    assert {len(node.items) for node in shown.items} == {29}
    assert _size(shown) <= 1501


def test_a_huge_number_is_shown() -> None:
    assert "huge" in shown_value(10**10_000).words
    assert "huge" in shown_value({"number": 10**10_000}).tree.items[0].words  # type: ignore[union-attr]
