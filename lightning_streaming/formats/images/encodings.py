"""Encodings of images, and image files: opened without decoding, checked for truncation, recovered from an image.

    pil            uint32 width, uint32 height, uint32 length of the mode, the mode as UTF-8, raw pixels
    jpeg, png      an image file
    jpeg_array     uint32 count, count times uint32 size, then that many JPEG files back to back
    list[...]      uint32 0, then the same, with a payload of the encoding in brackets for each

Dimensions that a payload states are checked against the number of pixels that its bytes can hold. The Pillow package is
imported on first use of these encodings.
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
"""Suffixes of image files."""
PILLOW_ERRORS = (OSError, ValueError, SyntaxError, OverflowError, EOFError, struct.error)
"""Errors of Pillow for damaged files, except its own classes."""


def require_pillow() -> ModuleType:
    """Return the module ``PIL.Image``.

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
    """Join parts to one payload.

    Raises:
        EncodingError: There are too many, or one is too large, for 32 bits.
    """
    try:
        head = struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts))
    except struct.error as error:
        raise EncodingError(f"expected parts whose number and sizes fit in 32 bits ({error})") from None
    return b"".join([head, *parts])


def _split_parts(data: memoryview) -> list[memoryview]:
    """Return the parts of a payload, as slices of it. Their number and sizes are checked first.

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
"""First bytes of each kind of file."""

PIXELS_PER_BYTE = {"JPEG": 512, "MPO": 512, "PNG": 8 * 1032}
"""Most pixels that a byte of each kind of file can describe. JPEG: a bit for each block of 64. PNG: a bit for each,
deflated at most 1032-fold. WebP: a file of a few bytes can have one colour and any size."""

_SCAN, _END = 0xDA, b"\xff\xd9"
"""JPEG: the marker before the pixels, and the bytes after them, which no pixels contain."""
_ALONE = (0x01, *range(0xD0, 0xD8))
"""JPEG: markers without a length."""

_OVERWRITTEN = (
    "{} was overwritten after it was opened as an image, so the pixels are lost; decode images (image.load()) before "
    "overwriting their files"
)


IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")
"""Kinds of image files in data of other libraries."""


def open_image_file(data: bytes, formats: Sequence[str] = ("JPEG", "PNG")) -> Image:
    """Open an image file by reading only its head; pixels are decoded on first access.

    Args:
        data: The file.
        formats: The allowed ones of ``IMAGE_FORMATS``.

    Raises:
        EncodingError: It has another format, its head is damaged, or it states more pixels than its bytes can hold or
            Pillow allows. Also raised later, for pixels that cannot be decoded.
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
    """Return the class of an open file until its pixels are decoded; then it has the class ``plain`` of Pillow."""

    class NotDecoded(plain):  # type: ignore[misc, valid-type]
        is_not_decoded = True

        def load(self) -> Any:
            """Decode the pixels.

            Raises:
                EncodingError: The file is damaged, or truncated.
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
            """Pickle decoded, like other images."""
            self.load()
            return self.__reduce_ex__(protocol)

    NotDecoded.__name__, NotDecoded.__module__ = plain.__name__, plain.__module__
    NotDecoded.__qualname__ = plain.__qualname__
    return NotDecoded


def check_whole(data: bytes) -> None:
    """Raise EncodingError if a JPEG or PNG file is truncated, or a PNG file has wrong checksums.

    Pixels are decoded only for a JPEG file without an end marker, which some complete files lack.

    Raises:
        EncodingError: The file is truncated, damaged, or of another kind.
    """
    if data.startswith(BEGINNINGS["PNG"]):
        _check_png(data)
    elif not _jpeg_has_end(data):
        open_image_file(data).load()


def load_whole(image: Image) -> None:
    """Decode the pixels of an image; check the end of its file if that is still open.

    Raises:
        EncodingError: The file is truncated or damaged.
    """
    file = getattr(image, "fp", None)
    if isinstance(file, io.BytesIO) and getattr(image, "format", None) == "PNG":
        check_whole(file.getvalue())
    image.load()


def stored_file(image: Image) -> bytes | None:
    """Return the file in memory that an image was opened from, if only its head was read; else None."""
    file = getattr(image, "fp", None)
    is_open = getattr(image, "is_not_decoded", False) or getattr(image, "tile", None)  # WebP has no tiles
    return file.getvalue() if isinstance(file, io.BytesIO) and is_open else None


def _file_behind(image: Image) -> bytes | None:
    """Return the JPEG file that an image was opened from, if it has exactly the pixels of the image.

    An image that is not decoded yet can only have changed its size and mode (``draft``), and the selected one of
    several images. A decoded image is compared pixel by pixel: it may have been edited.

    Raises:
        EncodingError: The file was overwritten after it was opened, so that the pixels are lost.
    """
    from PIL.JpegImagePlugin import JpegImageFile

    name = getattr(image, "filename", None)
    if not isinstance(image, JpegImageFile) or not name:
        return None
    data = _bytes_of(image, os.fsdecode(name))
    if data is None or not _jpeg_has_end(data):
        return None
    try:
        reopened = _reopened(data, image)
        _check_can_hold(reopened, data)
        is_same = _identity(reopened, image) == _identity(image, image)
    except (EncodingError, *PILLOW_ERRORS):
        return None
    if _is_open(image) and _head(reopened) != _head(image):
        raise EncodingError(_OVERWRITTEN.format(os.fsdecode(name)))
    return data if is_same else None


def _reopened(data: bytes, image: JpegImageFile) -> JpegImageFile:
    """Open an image like ``Image.open``, without another warning of large images."""
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.MpoImagePlugin import MpoImageFile

    kind = MpoImageFile if isinstance(image, MpoImageFile) else JpegImageFile
    return kind(io.BytesIO(data))


def _identity(image: Image, like: ImageFile) -> tuple[object, ...]:
    """Return what identifies an image: positions of pixels in its file; or the pixels, if ``like`` is decoded."""
    if like.tile:
        return image.size, image.mode, getattr(image, "tile", None)
    return image.size, image.mode, image.tobytes()


def _head(image: JpegImageFile) -> tuple[object, ...]:
    """Return the head that was read on opening; () for several images, where it depends on the last one read."""
    return () if image.format == "MPO" else (image.quantization, image.applist)


def _is_open(image: ImageFile) -> bool:
    """Return whether the pixels are not read yet, and can be."""
    return bool(image.tile) and image.fp is not None and not image.fp.closed


def _bytes_of(image: ImageFile, name: str) -> bytes | None:
    """Return the open file, which may have been renamed; or else the file of its name."""
    try:
        if not _is_open(image) or image.fp is None:
            return Path(name).read_bytes()
        position = image.fp.tell()
        image.fp.seek(0)
        buffered = image.fp.read()  # begins like the file when it was opened, as far as that is in the buffer
        image.fp.seek(position)
        current = _read_past_buffer(image.fp.fileno())
    except PILLOW_ERRORS:  # removed, not readable, or not a file on disk
        return None
    if buffered != current:
        raise EncodingError(_OVERWRITTEN.format(name))
    return current


def _read_past_buffer(descriptor: int) -> bytes:
    """Read a whole open file in its current state."""
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
    """Check all chunks: length, name, content, checksum of name and content."""
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
                f"expected a whole PNG file, but this one is damaged: the checksum of its chunk {name!r} differs"
            )
        position = stop + 4


def _jpeg_has_end(data: bytes) -> bool:
    """Return whether the end of the pixels is marked; some complete files lack the mark.

    Skips the segments before the pixels, to ignore the end of a thumbnail within the head.
    """
    position = 2 if data.startswith(BEGINNINGS["JPEG"]) else len(data)
    while position + 4 <= len(data):
        if data[position] != 0xFF:
            return False
        marker = data[position + 1]
        if marker == _SCAN:
            return data.find(_END, position) >= 0
        if marker == 0xFF:  # a fill byte
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
"""Bits of a raw pixel; a row is padded to whole bytes."""


@dataclass(frozen=True, slots=True)
class PilEncoding:
    """The raw pixels of a PIL image. A palette and other metadata of the image are lost."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        image = _check_image(value)
        mode = image.mode.encode()
        _raw_bytes(image.mode, *image.size)
        try:
            pixels = image.tobytes()
        except PILLOW_ERRORS as error:  # a damaged file that was opened lazily
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
    """A PIL image as a file. It is opened without decoding its pixels, which PIL does on first access; damaged pixels
    raise EncodingError then.
    """

    format: str
    """``"JPEG"`` or ``"PNG"``: the format to write. Both may be read."""
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
    """A list of PIL images of one encoding; may be empty."""

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
    """Return the bytes of the pixels of an image.

    Raises:
        EncodingError: No image has this mode or size.
    """
    bits = _BITS_OF_MODE.get(mode)
    if bits is None:
        raise EncodingError(f"expected an image mode, one of {', '.join(_BITS_OF_MODE)}, but found {brief(mode)}")
    if not width or not height:  # PIL allocates memory for each row, even without pixels
        raise EncodingError(f"expected an image of at least one pixel, but found {width} x {height}")
    return (width * bits + 7) // 8 * height
