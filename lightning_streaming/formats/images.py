"""The encodings of images. The Pillow package is imported when the first one is asked for.

    pil            uint32 width, uint32 height, uint32 length of the mode, the mode as UTF-8, raw pixels
    jpeg, png      an image file
    jpeg_array     parts (parts.py), each a JPEG file
    list[...]      uint32 0, then parts, each a payload of what stands in the brackets

What a payload says of its dimensions is believed only as far as its bytes can hold that many pixels.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.checks import brief, check_type
from lightning_streaming.formats.image_files import file_behind, open_image_file
from lightning_streaming.formats.parts import join_parts, split_parts
from lightning_streaming.formats.pillow import PILLOW_ERRORS, require_pillow

if TYPE_CHECKING:
    from PIL.Image import Image

_HEAD = struct.Struct("<III")
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
        return b"".join([_HEAD.pack(*image.size, len(mode)), mode, pixels])

    def decode(self, data: bytes | memoryview) -> Image:
        if len(data) < _HEAD.size:
            raise EncodingError(f"expected at least {_HEAD.size} bytes of an image, but found {len(data)}")
        width, height, mode_bytes = _HEAD.unpack_from(data)
        start = _HEAD.size + mode_bytes
        mode = str(data[_HEAD.size : start], "utf-8", "replace") if mode_bytes <= 8 else "(too long)"
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
        unchanged = file_behind(image) if self.format == "JPEG" else None
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
        return join_parts(files)

    def decode(self, data: bytes | memoryview) -> list[Image]:
        return [open_image_file(bytes(part)) for part in split_parts(memoryview(data))]


@dataclass(frozen=True, slots=True)
class ImageListEncoding:
    """A list of PIL images, each by the same encoding; may be empty."""

    element: PilEncoding | ImageFileEncoding
    size: None = None

    def encode(self, value: Any) -> bytes:
        check_type(value, list)
        return _RESERVED + join_parts([self.element.encode(image) for image in value])

    def decode(self, data: bytes | memoryview) -> list[Image]:
        if len(data) < len(_RESERVED):
            raise EncodingError(f"expected at least 8 bytes of a list of images, but found {len(data)}")
        return [self.element.decode(part) for part in split_parts(memoryview(data)[len(_RESERVED) :])]


def _check_image(value: Any) -> Image:
    kind: type[Image] = require_pillow().Image
    check_type(value, kind)
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
