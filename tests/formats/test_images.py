from __future__ import annotations

import copy
import io
import os
import pickle
import struct
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from PIL.JpegImagePlugin import JpegImageFile
from PIL.MpoImagePlugin import MpoImageFile
from PIL.PngImagePlugin import PngImageFile

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.images import _BITS_OF_MODE, check_whole

SIZES = st.tuples(st.integers(1, 20), st.integers(1, 20))
PNG_MODES = ("1", "L", "LA", "RGB", "RGBA", "I;16")


@st.composite
def images(draw: st.DrawFn, modes: Any = tuple(_BITS_OF_MODE)) -> Image.Image:
    mode, (width, height) = draw(st.sampled_from(sorted(modes))), draw(SIZES)
    raw = draw(st.binary(min_size=16, max_size=16)) * (width * height)
    needed = (width * _BITS_OF_MODE[mode] + 7) // 8 * height
    return Image.frombytes(mode, (width, height), raw[:needed])


def there_and_back(name: str, value: Any) -> Any:
    """A value encoded, and decoded from a slice as a reader has it."""
    return encoding(name).decode(memoryview(encoding(name).encode(value)))


def same(one: Image.Image, other: Image.Image) -> bool:
    return (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes())


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pil_payload(width: int, height: int, mode: bytes, pixels: bytes) -> bytes:
    return struct.pack("<III", width, height, len(mode)) + mode + pixels


@given(images())
def test_pixels_of_every_mode_come_back_as_they_were(image: Image.Image) -> None:
    assert same(there_and_back("pil", image), image)


@given(images(PNG_MODES))
def test_png_loses_nothing(image: Image.Image) -> None:
    found = there_and_back("png", image)
    assert found.format == "PNG"
    assert same(found, image)


@given(images(("L", "RGB", "CMYK")))
def test_jpeg_keeps_mode_and_size(image: Image.Image) -> None:
    found = there_and_back("jpeg", image)
    assert (found.format, found.mode, found.size) == ("JPEG", image.mode, image.size)


@given(st.lists(images(("L", "RGB")), max_size=4))
def test_lists_of_any_length_come_back(value: list[Image.Image]) -> None:
    for name in ("list[pil]", "list[png]"):
        found = there_and_back(name, value)
        assert len(found) == len(value)
        assert all(map(same, found, value))
    assert [one.size for one in there_and_back("list[jpeg]", value)] == [one.size for one in value]
    files = [file_of(image, "JPEG") for image in value]
    for name in ("jpeg_array", "jpegarray"):
        found = there_and_back(name, [bytearray(file) if place else file for place, file in enumerate(files)])
        assert all(map(same, found, [Image.open(io.BytesIO(file)) for file in files]))


def test_an_unchanged_jpeg_file_is_stored_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(file_of(Image.effect_noise((64, 64), 50), "JPEG", quality=31) + b"trailer")
    with Image.open(path) as image:
        assert encoding("jpeg").encode(image) == path.read_bytes()
        assert encoding("png").encode(image) == file_of(image, "PNG")


def test_a_jpeg_file_that_is_gone_or_of_another_size_by_now_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(file_of(Image.new("RGB", (64, 64)), "JPEG"))
    with Image.open(path) as image:
        image.thumbnail((16, 16))
        assert there_and_back("jpeg", image).size == (16, 16)
    with Image.open(path) as image:
        image.load()
        path.write_bytes(b"no image any more")
        assert there_and_back("jpeg", image).size == (64, 64)
        path.unlink()
        assert there_and_back("jpeg", image).size == (64, 64)


def draw_a_pixel(image: Image.Image) -> None:
    """In place, as ImageDraw, paste and putpixel do it."""
    ImageDraw.Draw(image).point((3, 3), 255)
    assert image.size == (64, 64)


@pytest.mark.parametrize(
    "edit",
    [
        draw_a_pixel,
        lambda image: image.paste(255, (0, 0, 8, 8)),
        lambda image: image.putpixel((1, 2), 255),
        lambda image: (image.load(), image.paste(255, (60, 60, 64, 64))),
    ],
)
def test_an_image_that_was_edited_in_place_is_written_as_it_is_now(
    tmp_path: Path, edit: Callable[[Image.Image], object]
) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(file_of(Image.new("L", (64, 64)), "JPEG"))
    with Image.open(path) as image:
        edit(image)
        assert encoding("jpeg").encode(image) == file_of(image.copy(), "JPEG")
        assert there_and_back("jpeg", image).getextrema()[1] > 100


def test_a_jpeg_that_was_only_looked_at_is_stored_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(file_of(Image.effect_noise((64, 64), 50), "JPEG", quality=31))
    with Image.open(path) as image:
        image.load()
        image.getpixel((0, 0))
        assert encoding("jpeg").encode(image) == path.read_bytes()
    with Image.open(os.fsencode(path)) as image:
        pass
    assert encoding("jpeg").encode(image) == path.read_bytes()


def test_the_file_that_is_open_is_stored_and_not_another_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    opened, other = (file_of(Image.new("L", (64, 64), color), "JPEG") for color in (0, 255))
    path.write_bytes(opened)
    for look in (False, True):
        with Image.open(path) as image:
            if look:
                image.load()
            path.unlink()
            path.write_bytes(other)
            assert there_and_back("jpeg", image).getextrema() == (0, 0)
            path.write_bytes(opened)


@pytest.mark.parametrize("size", [(32, 32), (256, 256)], ids=["in_the_buffer", "beyond_it"])
def test_a_file_that_was_written_over_while_it_was_open_is_no_mix_of_both(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(file_of(Image.effect_noise(size, 50), "JPEG", quality=95))
    with Image.open(path) as image:
        path.write_bytes(file_of(Image.effect_noise(size, 50), "JPEG", quality=95))  # the same inode
        with pytest.raises(EncodingError, match="was overwritten after it was opened"):
            encoding("jpeg").encode(image)


def test_a_file_that_was_written_over_is_told_by_its_head_once_that_left_the_buffer(tmp_path: Path) -> None:
    path, heads = tmp_path / "a.jpg", []
    for name in ("first", "other"):
        exif = Image.Exif()
        exif[0x010E] = name + "." * 40_000
        heads.append(file_of(Image.effect_noise((64, 64), 50), "JPEG", exif=exif))
    path.write_bytes(heads[0])
    with Image.open(path) as image:
        assert encoding("jpeg").encode(image) == heads[0]
        path.write_bytes(heads[1])
        with pytest.raises(EncodingError, match="was overwritten after it was opened"):
            encoding("jpeg").encode(image)


def test_a_jpeg_file_that_cannot_be_read_any_more_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(file_of(Image.new("L", (8, 8)), "JPEG"))
    with Image.open(path) as image:
        image.load()

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")  # chmod keeps nothing from root

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert there_and_back("jpeg", image).size == (8, 8)


def test_a_large_image_is_not_warned_of_again_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(file_of(Image.new("L", (64, 64)), "JPEG"))
    with Image.open(path) as image:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64 - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert encoding("jpeg").encode(image) == path.read_bytes()


def test_a_later_picture_of_a_file_of_several_is_not_stored_as_the_first(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.new("L", (8, 8)).save(path, "MPO", save_all=True, append_images=[Image.new("L", (8, 8), 255)])
    with Image.open(path) as image:
        assert encoding("jpeg").encode(image) == path.read_bytes()
        image.seek(1)
        assert there_and_back("jpeg", image).getextrema() == (255, 255)


def test_a_jpeg_that_is_read_at_another_size_is_not_stored_as_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.new("RGB", (64, 64)).save(path)
    for draft, found in (((None, (16, 16)), ("RGB", (16, 16))), (("L", None), ("L", (64, 64)))):
        with Image.open(path) as image:
            image.draft(*draft)
            again = there_and_back("jpeg", image)
            assert (again.mode, again.size) == found


def test_a_jpeg_file_that_is_cut_off_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(file_of(Image.effect_noise((64, 64), 50), "JPEG")[:900])
    with Image.open(path) as image, pytest.raises(EncodingError, match="truncated"):
        encoding("jpeg").encode(image)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "MPO"])
def test_pixels_that_cannot_be_decoded_are_an_encoding_error_when_they_are_needed(kind: str) -> None:
    noise = Image.effect_noise((64, 64), 50)
    whole = file_of(noise, kind, **({"save_all": True, "append_images": [noise]} if kind == "MPO" else {}))
    image = encoding("jpeg").decode(whole[: len(whole) // 3])
    assert image.size == (64, 64)
    for needs_pixels in (image.load, image.tobytes, lambda: np.asarray(image), lambda: image.resize((8, 8))):
        with pytest.raises(EncodingError, match=f"a whole {kind} file of 64 x 64 pixels, but they cannot be decoded"):
            needs_pixels()


@pytest.mark.parametrize(("kind", "plain"), [("PNG", PngImageFile), ("JPEG", JpegImageFile), ("MPO", MpoImageFile)])
def test_a_decoded_image_is_an_ordinary_one_and_travels_to_other_processes(kind: str, plain: type[Image.Image]) -> None:
    data = file_of(Image.effect_noise((64, 64), 50), kind)
    if kind == "MPO":
        data = file_of(Image.new("L", (64, 64)), kind, save_all=True, append_images=[Image.new("L", (64, 64))])
    image = encoding("png").decode(data)
    assert isinstance(image, plain)
    for travelled in (pickle.loads(pickle.dumps(image)), copy.deepcopy(encoding("png").decode(data))):
        assert type(travelled) is plain
        assert same(travelled, image)
    assert type(image) is plain
    assert image.format == kind


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_is_told_whole_from_cut_off_at_any_byte(kind: str) -> None:
    thumbnail = file_of(Image.new("L", (8, 8)), "JPEG")
    exif = Image.Exif()
    exif[0x010E] = thumbnail.decode("latin-1")
    whole = file_of(
        Image.effect_noise((32, 32), 50), kind, exif=exif, **({"progressive": True} if kind == "JPEG" else {})
    )
    check_whole(whole)
    check_whole(whole + b"trailer")
    # A JPEG file without its last bytes has all its pixels, and is whole to many programs.
    for length in [*range(0, len(whole) - 40, 7), *(range(len(whole) - 40, len(whole)) if kind == "PNG" else ())]:
        with pytest.raises(EncodingError):
            check_whole(whole[:length])


@pytest.mark.parametrize("place", [20, 30, 60, -14, -6, -2])
def test_a_png_file_whose_checksum_differs_is_damaged(place: int) -> None:
    whole = bytearray(file_of(Image.effect_noise((32, 32), 50), "PNG"))
    whole[place] ^= 1
    with pytest.raises(EncodingError, match="expected a whole PNG file, but this one "):
        check_whole(bytes(whole))


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n" + b"\xff" * 40])
def test_what_only_begins_like_a_png_file_is_none(data: bytes) -> None:
    with pytest.raises(EncodingError, match="expected a whole PNG file, but this one was cut off"):
        check_whole(data)


def test_a_whole_file_without_the_mark_of_its_end_is_whole() -> None:
    whole = file_of(Image.effect_noise((32, 32), 50), "JPEG")
    assert whole.endswith(b"\xff\xd9")
    check_whole(whole[:-2] + bytes(32))


def test_an_image_shares_no_memory_with_its_payload() -> None:
    image = Image.effect_noise((8, 8), 50)
    for name in ("pil", "png"):
        shard = bytearray(encoding(name).encode(image))
        found = encoding(name).decode(memoryview(shard))
        shard[:] = bytes(len(shard))
        assert same(found, image)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pil", b"x".decode(), "expected Image, but got str"),
        ("png", None, "expected Image, but got NoneType"),
        ("pil", Image.new("L", (0, 5)), "at least one pixel, but found 0 x 5"),
        ("jpeg", Image.new("RGBA", (2, 2)), "an image that JPEG can hold"),
        ("png", Image.new("CMYK", (2, 2)), "an image that PNG can hold"),
        ("jpeg_array", "text", "expected a sequence of JPEG files as bytes, but got 'text'"),
        ("jpeg_array", [Image.new("L", (1, 1))], "expected a sequence of JPEG files as bytes"),
        ("jpegarray", 3, "expected a sequence of JPEG files as bytes, but got 3"),
        ("list[pil]", Image.new("L", (1, 1)), "expected list, but got Image"),
        ("list[png]", ["x"], "expected Image, but got str"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_words(name: str, value: Any, words: str) -> None:
    with pytest.raises(EncodingError) as caught:
        encoding(name).encode(value)
    assert words in str(caught.value)


PNG = file_of(Image.new("L", (4, 4)), "PNG")
JPEG = file_of(Image.new("L", (4, 4)), "JPEG")


@pytest.mark.parametrize(
    ("name", "payload", "words"),
    [
        ("pil", b"", "at least 12 bytes"),
        ("pil", pil_payload(2, 2, b"L", b"123"), "expected 4 bytes of pixels"),
        ("pil", pil_payload(2, 2, b"L", b"12345"), "expected 4 bytes of pixels"),
        ("pil", pil_payload(2, 2, b"XYZ", b"1234"), "expected an image mode"),
        ("pil", pil_payload(2, 2, b"\xff", b"1234"), "expected an image mode"),
        ("pil", struct.pack("<III", 1, 1, 2**32 - 1), "expected an image mode"),
        ("pil", pil_payload(0, 2**32 - 1, b"L", b""), "at least one pixel"),
        ("pil", pil_payload(2**32 - 1, 2**32 - 1, b"RGB", b""), "expected 55340232195358851075 bytes"),
        ("png", b"", "expected a JPEG or PNG file"),
        ("png", PNG[:20], "that PIL can open, but Truncated File Read"),
        ("png", PNG[:6], "a whole PNG file, but the head of this one is damaged or cut off .6 bytes"),
        ("jpeg", b"GIF89a" + bytes(50), "expected a JPEG or PNG file"),
        ("jpeg", JPEG[:4], "a whole JPEG file, but the head of this one is damaged or cut off .4 bytes"),
        ("jpeg_array", b"", "expected 4 bytes"),
        ("jpeg_array", struct.pack("<I", 2**32 - 1), "for the sizes of 4294967295 parts"),
        ("jpeg_array", struct.pack("<II", 1, 5) + b"1234", "expected 13 bytes by the sizes of the parts"),
        ("jpeg_array", struct.pack("<II", 1, 4) + b"1234", "expected a JPEG or PNG file"),
        ("list[png]", b"", "at least 8 bytes"),
        ("list[png]", struct.pack("<II", 0, 1), "for the sizes of 1 parts"),
        ("list[pil]", struct.pack("<III", 0, 1, 0), "at least 12 bytes"),
        ("list[pil]", struct.pack("<II", 0, 0) + b"x", "by the sizes of the parts"),
    ],
)
def test_a_payload_that_is_none_is_refused(name: str, payload: bytes, words: str) -> None:
    with pytest.raises(EncodingError, match=words):
        encoding(name).decode(memoryview(payload))


def test_the_reserved_word_of_a_list_is_ignored() -> None:
    assert encoding("list[pil]").decode(b"\xff\xff\xff\xff\0\0\0\0") == []


def test_an_image_that_its_bytes_cannot_hold_is_refused() -> None:
    """Dimensions of 8000 x 8000 written over those of a small file, in both kinds of file."""
    at = JPEG.index(b"\xff\xc0")
    jpeg = JPEG[: at + 5] + struct.pack(">HH", 8000, 8000) + JPEG[at + 9 :]
    with pytest.raises(EncodingError, match="bytes of JPEG cannot hold an image of 8000 x 8000"):
        encoding("jpeg").decode(jpeg)
    big = Image.new("1", (8000, 8000))
    assert encoding("png").decode(file_of(big, "PNG")).size == (8000, 8000)  # an honest one
    with pytest.raises(EncodingError, match="bytes of PNG cannot hold an image of 8000 x 8000"):
        encoding("png").decode(file_of(big, "PNG")[:100])


def test_what_pillow_takes_for_a_bomb_is_refused_with_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8)
    with pytest.warns(Image.DecompressionBombWarning):  # of more than it allows, up to twice that
        encoding("png").decode(PNG)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7)
    with pytest.raises(EncodingError, match="decompression bomb"):
        encoding("png").decode(PNG)


def test_memory_follows_the_payload_and_not_what_it_says() -> None:
    payloads = [
        ("pil", pil_payload(2**31, 2**31, b"RGBA", b"")),
        ("list[pil]", struct.pack("<III", 0, 2**30, 1)),
        ("jpeg_array", struct.pack("<II", 1, 2**32 - 1)),
    ]
    tracemalloc.start()
    for name, payload in payloads:
        with pytest.raises(EncodingError):
            encoding(name).decode(payload)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
