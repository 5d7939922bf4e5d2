"""Images decoded to pixels: like Pillow, at smaller sizes too; and damaged files."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFile
import pytest
import simplejpeg
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming import EncodedImage
from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats.images import image_decoder, open_image_file
from tests.helpers import assert_error

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def _image(mode: str, width: int, height: int, seed: int = 0, spot: int = 7) -> PIL.Image.Image:
    """Spots of random colours, of about so many pixels, that run into each other."""
    rng = np.random.default_rng(seed)
    channels = {"L": 1, "CMYK": 4}.get(mode, 3)
    small = rng.integers(0, 256, (height // spot + 1, width // spot + 1, channels), np.uint8)
    return PIL.Image.fromarray(small.squeeze(-1) if channels == 1 else small).resize((width, height))


def jpeg(mode: str = "RGB", width: int = 50, height: int = 40, seed: int = 0, spot: int = 7, **how: Any) -> bytes:
    file = io.BytesIO()
    _image(mode, width, height, seed, spot).convert(mode).save(file, "JPEG", **how)
    return file.getvalue()


def by_pillow(data: bytes, factor: int = 1) -> Pixels:
    image = PIL.Image.open(io.BytesIO(data))
    if factor > 1:
        image.draft(None, (image.width // factor, image.height // factor))
    return np.asarray(image.convert("RGB"))


sides = st.integers(1, 90)
saved = st.fixed_dictionaries(
    {
        "quality": st.integers(1, 100),
        "subsampling": st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
        "progressive": st.booleans(),
        "optimize": st.booleans(),
        "restart_marker_blocks": st.integers(0, 3),
    }
)


@given(st.sampled_from(["RGB", "L", "CMYK"]), sides, sides, st.integers(0, 9), saved, st.integers(1, 90))
def test_pixels_are_those_of_pillow(
    mode: str, width: int, height: int, seed: int, how: dict[str, Any], least: int
) -> None:
    data = jpeg(mode, width, height, seed, **how)
    image = EncodedImage(data)
    assert image.size == (width, height)
    assert (image.decode() == by_pillow(data)).all()
    small = image.decode(min_size=least)
    fit = [one for one in (8, 4, 2) if min(width, height) >= max(one, 1 - -one * (least - 1))]
    factor = fit[0] if fit else 1
    assert small.shape == (-(-height // factor), -(-width // factor), 3)
    assert (small == by_pillow(data, factor)).all()
    assert small.flags.writeable
    assert small.flags.c_contiguous


@pytest.mark.parametrize("subsampling", ["440", "411", "Gray"])
def test_other_ways_to_store_colours_are_decoded_as_by_pillow(subsampling: str) -> None:
    for width, height in ((17, 23), (64, 48), (1, 9)):
        pixels = np.asarray(_image("RGB", width, height))
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), colorsubsampling=subsampling)
        assert (EncodedImage(data).decode() == by_pillow(data)).all()


def test_nothing_is_turned_as_exif_data_says() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    data = jpeg(width=30, height=20, exif=exif)
    assert PIL.Image.open(io.BytesIO(data)).getexif()[0x0112] == 6
    assert EncodedImage(data).decode().shape == (20, 30, 3)
    assert (EncodedImage(data).decode() == by_pillow(data)).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_other_files_are_decoded_by_pillow(mode: str, kind: str) -> None:
    file = io.BytesIO()
    how = {"transparency": b"\0\x80"} if (mode, kind) == ("P", "PNG") else {}
    image = _image("RGB", 40, 30).convert(mode)
    image.save(file, kind, **({"lossless": True} if kind == "WEBP" else how))
    encoded = EncodedImage(file.getvalue())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = by_pillow(encoded.file)
    assert (encoded.decode(min_size=4) == expected).all()
    assert encoded.size == (40, 30)
    assert encoded.decode().flags.writeable


def test_what_has_more_than_eight_bits_a_channel_is_refused() -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(np.arange(12, dtype=np.uint16).reshape(3, 4)).save(file, "PNG")
    with pytest.raises(EncodingError, match="8 bits per channel"):
        EncodedImage(file.getvalue()).decode()


@pytest.mark.parametrize("data", [b"", b"no image", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(EncodingError):
        EncodedImage(data).decode()
    with pytest.raises(EncodingError):
        EncodedImage(data).crop((0, 0, 1, 1), 2)


def test_a_small_file_that_promises_many_pixels_is_refused_before_memory_is_asked_for() -> None:
    data = bytearray(jpeg(width=16, height=16))
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(EncodingError):
        EncodedImage(bytes(data)).decode()


def test_damaged_files_are_decoded_as_by_pillow_or_refused() -> None:
    rng = np.random.default_rng(5)
    whole = [jpeg(seed=1), jpeg("L", seed=2), jpeg("CMYK", seed=3), jpeg(progressive=True, subsampling=0, seed=4)]
    refused = decoded = 0
    for number in range(2000):
        data = bytearray(whole[number % 4])
        for place in rng.integers(2, len(data), int(rng.integers(1, 6))):
            data[place] = rng.integers(0, 256)
        damaged = bytes(data[: rng.integers(2, len(data) + 1)]) if number % 3 == 0 else bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = EncodedImage(damaged).decode(min_size=(None, 20)[number % 2])
            except EncodingError:
                refused += 1
                with pytest.raises(EncodingError):
                    open_image_file(damaged).load()
                continue
            expected = np.asarray(open_image_file(damaged).convert("RGB"))
        decoded += 1
        assert number % 2 or (found == expected).all()
    assert min(refused, decoded) > 300


# --- crops ---


@given(st.data())
def test_a_crop_of_the_whole_size_differs_from_that_of_pillow_by_one_hardly_ever_by_two(data: st.DataObject) -> None:
    width, height = data.draw(st.integers(20, 90)), data.draw(st.integers(20, 90))
    left, upper = data.draw(st.integers(0, width - 10)), data.draw(st.integers(0, height - 10))
    box = left, upper, data.draw(st.integers(left + 5, width)), data.draw(st.integers(upper + 5, height))
    size = box[2] - box[0] - data.draw(st.integers(-20, 2)), box[3] - box[1] - data.draw(st.integers(-20, 2))
    image = EncodedImage(jpeg(width=width, height=height, subsampling=0))
    found = image.crop(box, size)
    expected = image.pil().crop(box).resize(size, PIL.Image.Resampling.BILINEAR)
    assert found.shape == (3, size[1], size[0])
    differences = np.abs(found.permute(1, 2, 0).numpy().astype(int) - np.asarray(expected))
    assert differences.max() <= 2  # one of the width, one of the height: both are rounded
    assert (differences > 1).sum() <= 3


@pytest.mark.parametrize("kind", ["RGB", "CMYK"])
def test_a_crop_of_a_smaller_size_shows_the_same_place(kind: str) -> None:
    image = EncodedImage(jpeg(kind, 640, 480, spot=80, quality=95))
    box = 104, 64, 560, 424  # an eighth of which is whole pixels
    expected = np.asarray(image.pil().convert("RGB").crop(box).resize((50, 40), PIL.Image.Resampling.BILINEAR))
    found = image.crop(box, (50, 40)).permute(1, 2, 0).numpy()
    assert np.abs(found.astype(int) - expected).mean() < 3
    assert (image.crop((3, 5, 43, 35), (40, 30)).permute(1, 2, 0).numpy() == image.decode()[5:35, 3:43]).all()


@pytest.mark.parametrize("box", [(0, 0, 0, 5), (5, 0, 3, 5), (-1, 0, 5, 5), (0, 0, 51, 5), (0, 0, 5, 41)])
def test_a_box_that_is_not_within_the_picture_is_refused(box: tuple[int, int, int, int]) -> None:
    with assert_error(ConfigError, option="box") as caught:
        EncodedImage(jpeg()).crop(box, 8)
    assert "40" in str(caught.value)


@pytest.mark.parametrize("box", [None, (0, 0, 5), "abcd", (0, 0, float("nan"), 5), (0.5, 0.5, 9.5, 9.5)])
def test_what_is_no_box_is_refused(box: Any) -> None:
    with assert_error(ConfigError, option="box") as caught:
        EncodedImage(jpeg()).crop(box, 8)
    assert "40" in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, (0, 5), (5,), (5, 5, 5), 2.5, "8", (7.0, 7.0)])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with assert_error(ConfigError, option="size"):
        EncodedImage(jpeg()).crop((0, 0, 9, 9), size)
    for data in (jpeg(), jpeg("CMYK")):
        with assert_error(ConfigError, option="min_size"):
            EncodedImage(data).decode(size)


def test_sizes_and_boxes_may_be_numbers_of_numpy_and_torch() -> None:
    five, box, image = np.int64(5), torch.tensor([0, 0, 5, 5]), EncodedImage(jpeg())
    boxes: list[Any] = [(0, 0, five, five), box, box.numpy()]
    sizes: list[Any] = [np.int64(3), torch.tensor([3, 3]), np.array([3, 3])]
    crops = [image.crop(a_box, size) for a_box, size in zip(boxes, sizes, strict=True)]
    assert all(torch.equal(one, image.crop((0, 0, 5, 5), 3)) for one in crops)


@pytest.mark.parametrize("file", ["text", None, 5, bytearray(b"x"), memoryview(b"x")])
def test_a_picture_is_made_of_bytes(file: Any) -> None:
    with assert_error(ConfigError, option="file"):
        EncodedImage(file)


def test_a_picture_travels_to_another_process_as_it_is() -> None:
    image = EncodedImage(jpeg())
    again = pickle.loads(pickle.dumps(image))
    assert again == image
    assert hash(again) == hash(image)
    assert again not in (EncodedImage(b""), image.file)
    assert str(len(image.file)) in repr(image)


# --- columns ---


def test_columns_become_what_is_asked_for() -> None:
    data = jpeg()
    opened, pixels = open_image_file(data), _image("RGB", 5, 4)
    for value in (data, opened):
        array = image_decoder({"x": "array"})({"x": value, "y": 1})
        assert array["y"] == 1
        assert (array["x"] == by_pillow(data)).all()
        tensor = image_decoder({"x": "tensor"})({"x": value})["x"]
        assert (tensor.permute(1, 2, 0).numpy() == by_pillow(data)).all()
        assert image_decoder({"x": "encoded"})({"x": value})["x"] == EncodedImage(data)
        assert image_decoder({"x": "bytes"})({"x": value})["x"] == data
        assert (np.asarray(image_decoder({"x": "pil"})({"x": value})["x"]) == by_pillow(data)).all()
    assert [one.shape for one in image_decoder({"x": "array"})({"x": [data, opened]})["x"]] == [(40, 50, 3)] * 2
    assert (image_decoder({"x": "array"})({"x": pixels})["x"] == np.asarray(pixels)).all()
    assert image_decoder({"x": "pil"})({"x": pixels})["x"] is pixels
    assert image_decoder({"x": "array", "z": "array"})({"x": None}) == {"x": None}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("more", [0, 2])
def test_an_image_that_is_open_is_its_file_until_it_is_decoded(kind: str, more: int) -> None:
    file, image = io.BytesIO(), _image("RGB", 9, 8)
    image.save(file, kind, **({"save_all": True, "append_images": [image] * more} if more and kind != "JPEG" else {}))
    opened = open_image_file(file.getvalue(), ("JPEG", "PNG", "WEBP"))
    assert image_decoder({"x": "bytes"})({"x": opened})["x"] == file.getvalue()
    assert image_decoder({"x": "encoded"})({"x": opened})["x"] == EncodedImage(file.getvalue())
    opened.load()
    with assert_error(ConfigError, option="decode.columns"):
        image_decoder({"x": "bytes"})({"x": opened})


def test_none_in_a_list_stays() -> None:
    found = image_decoder({"x": "array"})({"x": [None, jpeg()]})["x"]
    assert found[0] is None
    assert found[1].shape == (40, 50, 3)


@pytest.mark.parametrize("kind", ["array", "tensor", "encoded", "bytes", "pil"])
def test_a_column_without_pictures_is_refused(kind: str) -> None:
    with assert_error(ConfigError, option="decode.columns") as caught:
        image_decoder({"x": kind})({"x": 7})
    assert f"'x': '{kind}'" in str(caught.value)


@pytest.mark.parametrize("kind", ["encoded", "bytes"])
def test_pixels_are_no_file(kind: str) -> None:
    with assert_error(ConfigError, option="decode.columns"):
        image_decoder({"x": kind})({"x": _image("RGB", 5, 4)})


def test_damage_names_the_column() -> None:
    with pytest.raises(EncodingError, match="column 'x'"):
        image_decoder({"x": "array"})({"x": jpeg()[:300]})
