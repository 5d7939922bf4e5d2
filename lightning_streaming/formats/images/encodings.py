"""The encodings of images, and image files: opened without decoding, told whole from cut off, found behind an image.

    pil            uint32 width, uint32 height, uint32 length of the mode, the mode as UTF-8, raw pixels
    jpeg, png      an image file
    jpeg_array     uint32 count, count times uint32 size, then that many JPEG files back to back
    list[...]      uint32 0, then the same, each a payload of what stands in the brackets

What a payload says of its dimensions is believed only as far as its bytes can hold that many pixels. The Pillow package
is imported when the first of these encodings is asked for.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsIndex

from lightning_streaming.errors import EncodingError, MissingDependencyError
from lightning_streaming.formats.values import brief, check_type

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from PIL.JpegImagePlugin import JpegImageFile


IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""What names of image files end in."""
PILLOW_ERRORS = (OSError, ValueError, SyntaxError, OverflowError, EOFError, struct.error)
"""What Pillow raises of damaged files, besides its own errors."""


def require_pillow() -> ModuleType:
    """The module ``PIL.Image``.

    Raises:
        MissingDependencyError: Pillow is not installed.
    """
    try:
        import PIL.Image
    except ImportError:
        raise MissingDependencyError(
            "columns of images need the Pillow package", hint="run: pip install 'lightning-streaming[images]'"
        ) from None
    return PIL.Image


def _join_parts(parts: Sequence[bytes | bytearray]) -> bytes:
    """Put parts into one payload.

    Raises:
        EncodingError: There are too many, or one is too large, for 32 bits.
    """
    try:
        head = struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts))
    except struct.error as error:
        raise EncodingError(f"expected parts whose number and sizes fit in 32 bits ({error})") from None
    return b"".join([head, *parts])


def _split_parts(data: memoryview) -> list[memoryview]:
    """The parts of a payload, as slices of it. What it says of their number and sizes is checked before any is made.

    Raises:
        EncodingError: The sizes do not add up to the payload.
    """
    count = int.from_bytes(data[:4], "little") if len(data) >= 4 else 0
    start = 4 + 4 * count
    if len(data) < start:
        raise EncodingError(f"expected {start} bytes for the sizes of {count} parts, but found {len(data)}")
    stops = [*accumulate(struct.unpack_from(f"<{count}I", data, 4), initial=start)]
    if stops[-1] != len(data):
        raise EncodingError(f"expected {stops[-1]} bytes by the sizes of the parts, but found {len(data)}")
    return [data[start:stop] for start, stop in pairwise(stops)]


BEGINNINGS = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n"}
"""The first bytes of each kind of file."""

PIXELS_PER_BYTE = {"JPEG": 512, "MPO": 512, "PNG": 8 * 1032}
"""Most pixels that a byte of each kind of file can describe. JPEG: a bit for each block of 64. PNG: a bit for each,
deflated to no less than one part in 1032. WebP: a file of a few bytes can be all of one colour, however large."""

_SCAN, _END = 0xDA, b"\xff\xd9"
"""JPEG: the marker before the pixels, and the bytes after them, which no pixels contain."""
_ALONE = (0x01, *range(0xD0, 0xD8))
"""JPEG: markers that no length follows."""

_WRITTEN_OVER = (
    "{} was written over after it was opened as an image, so the pixels are lost; decode images (image.load()) before "
    "their files are written again"
)


IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")
"""Kinds of image files that data of other libraries may hold."""


def open_image_file(data: bytes, formats: Sequence[str] = ("JPEG", "PNG")) -> Image:
    """Open an image file, reading no more than its head; pixels are decoded when they are first needed.

    Args:
        data: The file.
        formats: Which of ``IMAGE_FORMATS`` it may be of.

    Raises:
        EncodingError: It is of none, its head is damaged, or it promises more pixels than its bytes can hold or Pillow
            allows. Also raised later, of pixels that cannot be decoded.
        MissingDependencyError: Pillow is not installed.
    """
    pillow = require_pillow()
    try:
        image: ImageFile = pillow.open(io.BytesIO(data), formats=formats)
    except pillow.UnidentifiedImageError:
        raise EncodingError(_no_image(data, formats)) from None
    except (pillow.DecompressionBombError, *PILLOW_ERRORS) as error:
        raise EncodingError(f"expected an image file that PIL can open, but {error}") from error
    _check_can_hold(image, data)
    image.__class__ = _not_decoded(type(image))
    return image


def _check_can_hold(image: ImageFile, data: bytes) -> None:
    width, height = image.size
    if width * height > PIXELS_PER_BYTE.get(image.format or "PNG", math.inf) * len(data):
        raise EncodingError(f"{len(data)} bytes of {image.format} cannot hold an image of {width} x {height}")


@lru_cache(maxsize=16)
def _not_decoded(plain: type[ImageFile]) -> type[ImageFile]:
    """What an open file is until its pixels are decoded; then it is an image of the class ``plain`` of Pillow."""

    class NotDecoded(plain):  # type: ignore[misc, valid-type]
        is_not_decoded = True

        def load(self) -> Any:
            """Decode the pixels.

            Raises:
                EncodingError: The file is damaged, or cut off.
            """
            try:
                pixels = super().load()
            except PILLOW_ERRORS as error:
                width, height = self.size
                raise EncodingError(
                    f"expected a whole {self.format} file of {width} x {height} pixels, but they cannot be decoded: "
                    f"{error}"
                ) from error
            self.__class__ = plain  # type: ignore[assignment]
            return pixels

        def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
            """Travel to another process decoded, as images do."""
            self.load()
            return self.__reduce_ex__(protocol)

    NotDecoded.__name__, NotDecoded.__module__ = plain.__name__, plain.__module__
    NotDecoded.__qualname__ = plain.__qualname__
    return NotDecoded


def check_whole(data: bytes) -> None:
    """Refuse a JPEG or PNG file that was cut off, and a PNG file whose checksums tell that it is damaged.

    Pixels are decoded only of a JPEG file that has no mark of its end, which not every whole one has.

    Raises:
        EncodingError: The file is cut off, damaged, or none.
    """
    if data.startswith(BEGINNINGS["PNG"]):
        _check_png(data)
    elif not _jpeg_has_end(data):
        open_image_file(data).load()


def load_whole(image: Image) -> None:
    """Decode the pixels of an image; of one that is still open to its file, look at the end of that too.

    Raises:
        EncodingError: The file is cut off or damaged.
    """
    file = getattr(image, "fp", None)
    if isinstance(file, io.BytesIO) and getattr(image, "format", None) == "PNG":
        check_whole(file.getvalue())
    image.load()


def stored_file(image: Image) -> bytes | None:
    """The file in memory that an image was opened from, if nothing but its head was read; else None."""
    file = getattr(image, "fp", None)
    is_open = getattr(image, "is_not_decoded", False) or getattr(image, "tile", None)  # of WebP there are no tiles
    return file.getvalue() if isinstance(file, io.BytesIO) and is_open else None


def _file_behind(image: Image) -> bytes | None:
    """The JPEG file that an image was opened from, if that has the very pixels of the image.

    Of an image that is not decoded yet nothing can have been changed, but for its size and mode (``draft``), and which
    picture of several it is. One that is decoded is compared, pixel by pixel: it may have been drawn on.

    Raises:
        EncodingError: The file was written over after it was opened, so that the pixels are lost.
    """
    from PIL.JpegImagePlugin import JpegImageFile

    name = getattr(image, "filename", None)
    if not isinstance(image, JpegImageFile) or not name:
        return None
    data = _bytes_of(image, os.fsdecode(name))
    if data is None or not _jpeg_has_end(data):
        return None
    try:
        found = _opened_again(data, image)
        _check_can_hold(found, data)
        is_the_same = _looks(found, image) == _looks(image, image)
    except (EncodingError, *PILLOW_ERRORS):
        return None
    if _is_open(image) and _head(found) != _head(image):
        raise EncodingError(_WRITTEN_OVER.format(os.fsdecode(name)))
    return data if is_the_same else None


def _opened_again(data: bytes, image: JpegImageFile) -> JpegImageFile:
    """As ``Image.open`` would, but for its warning of large images, which there was when the image was opened."""
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.MpoImagePlugin import MpoImageFile

    kind = MpoImageFile if isinstance(image, MpoImageFile) else JpegImageFile
    return kind(io.BytesIO(data))


def _looks(image: Image, like: ImageFile) -> tuple[object, ...]:
    """What tells an image from others: where its pixels are in its file; or those, if ``like`` is decoded."""
    if like.tile:
        return image.size, image.mode, getattr(image, "tile", None)
    return image.size, image.mode, image.tobytes()


def _head(image: JpegImageFile) -> tuple[object, ...]:
    """What was read when the file was opened; of one of several pictures, it depends on which was read last."""
    return () if image.format == "MPO" else (image.quantization, image.applist)


def _is_open(image: ImageFile) -> bool:
    """Whether the pixels are still to be read, and can be."""
    return bool(image.tile) and image.fp is not None and not image.fp.closed


def _bytes_of(image: ImageFile, name: str) -> bytes | None:
    """The file that is open, which may have another name by now; or else the one that has its name."""
    try:
        if not _is_open(image) or image.fp is None:
            return Path(name).read_bytes()
        position = image.fp.tell()
        image.fp.seek(0)
        seen = image.fp.read()  # begins as the file did when it was opened, as far as that is in the buffer
        image.fp.seek(position)
        found = _read_past_buffer(image.fp.fileno())
    except PILLOW_ERRORS:  # gone, or not to be read; and what is no file on disk has no number
        return None
    if seen != found:
        raise EncodingError(_WRITTEN_OVER.format(name))
    return found


def _read_past_buffer(descriptor: int) -> bytes:
    """A whole open file as it is now."""
    pieces, offset = list[bytes](), 0
    while piece := os.pread(descriptor, max(os.fstat(descriptor).st_size - offset, 1), offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _no_image(data: bytes, formats: Sequence[str]) -> str:
    for kind, beginning in BEGINNINGS.items():
        if data.startswith(beginning[: max(1, len(data))]):
            return f"expected a whole {kind} file, but the head of this one is damaged or cut off ({len(data)} bytes)"
    return f"expected a {' or '.join(formats)} file, but found {brief(data)}"


def _check_png(data: bytes) -> None:
    """Go from chunk to chunk: length, name, content, checksum of name and content. Pixels end before the end does."""
    position, name = len(BEGINNINGS["PNG"]), b""
    view = memoryview(data)
    while name != b"IEND":
        content = position + 8
        stop = content + int.from_bytes(data[position : position + 4], "big")
        if stop + 4 > len(data):
            raise EncodingError(
                f"expected a whole PNG file, but this one was cut off: of its {len(data)} bytes none mark the end"
            )
        name = data[position + 4 : content]
        if zlib.crc32(view[position + 4 : stop]) != int.from_bytes(data[stop : stop + 4], "big"):
            raise EncodingError(
                f"expected a whole PNG file, but this one is damaged: the checksum of its chunk {name!r} is another one"
            )
        position = stop + 4


def _jpeg_has_end(data: bytes) -> bool:
    """Whether the end of the pixels is marked; not every file that lacks it is cut off.

    Goes from segment to segment up to the pixels, so as not to meet the end of a small image within the head.
    """
    position = 2 if data.startswith(BEGINNINGS["JPEG"]) else len(data)
    while position + 4 <= len(data):
        if data[position] != 0xFF:
            return False
        marker = data[position + 1]
        if marker == _SCAN:
            return data.find(_END, position) >= 0
        if marker == 0xFF:  # a byte that fills up
            position += 1
        elif marker in _ALONE:
            position += 2
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return False


_PIL_HEAD = struct.Struct("<III")
_RESERVED = bytes(4)
_BITS_OF_MODE = {
    "1": 1,
    **dict.fromkeys(("L", "P"), 8),
    **dict.fromkeys(("LA", "La", "PA", "I;16", "I;16L", "I;16B", "I;16N"), 16),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 24),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 32),
}
"""Bits of a raw pixel; a row is filled up to whole bytes."""


@dataclass(frozen=True, slots=True)
class PilEncoding:
    """The pixels of a PIL image as they are. A palette and what else is known of the image are lost."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        image = _check_image(value)
        mode = image.mode.encode()
        _raw_bytes(image.mode, *image.size)
        try:
            pixels = image.tobytes()
        except PILLOW_ERRORS as error:  # of a file that was opened lazily, and is damaged
            raise EncodingError(f"expected an image that PIL can load, but got {brief(value)} ({error})") from error
        return b"".join([_PIL_HEAD.pack(*image.size, len(mode)), mode, pixels])

    def decode(self, data: bytes | memoryview) -> Image:
        if len(data) < _PIL_HEAD.size:
            raise EncodingError(f"expected at least {_PIL_HEAD.size} bytes of an image, but found {len(data)}")
        width, height, mode_bytes = _PIL_HEAD.unpack_from(data)
        start = _PIL_HEAD.size + mode_bytes
        mode = str(data[_PIL_HEAD.size : start], "utf-8", "replace") if mode_bytes <= 8 else "(too long)"
        expected = _raw_bytes(mode, width, height)
        if len(data) - start != expected:
            raise EncodingError(
                f"expected {expected} bytes of pixels for an image of {width} x {height} in mode {mode}, but found "
                f"{len(data) - start}"
            )
        image: Image = require_pillow().frombytes(mode, (width, height), bytes(data[start:]))
        return image


@dataclass(frozen=True, slots=True)
class ImageFileEncoding:
    """A PIL image as a file. It is opened without decoding its pixels; PIL does that when they are first needed, and
    raises EncodingError then if they are damaged.
    """

    format: str
    """``"JPEG"`` or ``"PNG"``: what is written. Either may be read."""
    size: None = None

    def encode(self, value: Any) -> bytes:
        image = _check_image(value)
        unchanged = _file_behind(image) if self.format == "JPEG" else None
        if unchanged is not None:
            return unchanged
        file = io.BytesIO()
        try:
            image.save(file, self.format)
        except PILLOW_ERRORS as error:
            raise EncodingError(
                f"expected an image that {self.format} can hold, but got {brief(value)} ({error})"
            ) from error
        return file.getvalue()

    def decode(self, data: bytes | memoryview) -> Image:
        return open_image_file(bytes(data))


@dataclass(frozen=True, slots=True)
class JpegArrayEncoding:
    """A sequence of JPEG files, each as bytes; read as a list of PIL images."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        files = list(value) if isinstance(value, Iterable) else [value]
        if isinstance(value, str) or not all(isinstance(file, (bytes, bytearray)) for file in files):
            raise EncodingError(f"expected a sequence of JPEG files as bytes, but got {brief(value)}")
        return _join_parts(files)

    def decode(self, data: bytes | memoryview) -> list[Image]:
        return [open_image_file(bytes(part)) for part in _split_parts(memoryview(data))]


@dataclass(frozen=True, slots=True)
class ImageListEncoding:
    """A list of PIL images, each by the same encoding; may be empty."""

    element: PilEncoding | ImageFileEncoding
    size: None = None

    def encode(self, value: Any) -> bytes:
        check_type(value, list)
        return _RESERVED + _join_parts([self.element.encode(image) for image in value])

    def decode(self, data: bytes | memoryview) -> list[Image]:
        if len(data) < len(_RESERVED):
            raise EncodingError(f"expected at least 8 bytes of a list of images, but found {len(data)}")
        return [self.element.decode(part) for part in _split_parts(memoryview(data)[len(_RESERVED) :])]


def _check_image(value: Any) -> Image:
    check_type(value, require_pillow().Image)
    image: Image = value
    return image


def _raw_bytes(mode: str, width: int, height: int) -> int:
    """Bytes of the pixels of an image.

    Raises:
        EncodingError: No image can be like this.
    """
    bits = _BITS_OF_MODE.get(mode)
    if bits is None:
        raise EncodingError(f"expected an image mode, one of {', '.join(_BITS_OF_MODE)}, but found {brief(mode)}")
    if not width or not height:  # PIL sets aside memory for each row, even of no pixels
        raise EncodingError(f"expected an image of at least one pixel, but found {width} x {height}")
    return (width * bits + 7) // 8 * height
