"""Image and audio files that browsers show: their type, detected by the first bytes, image sizes, and PNG encoding."""

from __future__ import annotations

import struct
import zlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.formats.images import BEGINNINGS

_IMAGES = ((BEGINNINGS["JPEG"], "image/jpeg"), (BEGINNINGS["PNG"], "image/png"), (b"GIF8", "image/gif"))
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Second bytes of the markers of a frame; the others of this range are of tables and extensions."""
_MAX_JPEG_HEADER = 1 << 20
"""Bytes in which the header of a frame is searched."""
_AUDIO = ((b"fLaC", "audio/flac"), (b"OggS", "audio/ogg"), (b"ID3", "audio/mpeg"))
_MPEG_HEADERS = {0xFB: 1, 0xFA: 1, 0xF3: 2, 0xF2: 2}
"""MPEG version by the second byte of a frame of layer III audio."""
_MPEG_RATES = {
    1: ((32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320), (44100, 48000, 32000)),
    2: ((8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160), (22050, 24000, 16000)),
}
"""Kilobits and samples per second of each MPEG version."""
_PNG_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""PNG colour types by number of channels: grey, grey and alpha, RGB, RGB and alpha."""
_FAST_LEVEL = 3
"""Level of zlib."""


def image_type(data: bytes) -> str | None:
    """Return the content type of an image file that every browser shows and that runs no code; None for other data."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((content_type for begin, content_type in _IMAGES if data.startswith(begin)), None)


def image_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height of an image file in pixels, read from its header; None if it has none."""
    content_type = image_type(data)
    if content_type == "image/png" and data[12:16] == b"IHDR":
        return _pair(data, 16, 4, "big")
    if content_type == "image/gif":
        return _pair(data, 6, 2, "little")
    if content_type == "image/jpeg":
        data, at = data[:_MAX_JPEG_HEADER], 2
        while at + 4 <= len(data) and data[at] == 0xFF:  # segments precede the frame, each with its length
            if data[at + 1] == 0xFF:  # padding
                at += 1
            elif data[at + 1] in _JPEG_FRAMES:
                pair = _pair(data, at + 5, 2, "big")
                return pair and pair[::-1]
            else:
                at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
        return None
    if content_type != "image/webp" or len(data) < 30:
        return None
    if data[12:16] == b"VP8X":
        width, height = _pair(data, 24, 3, "little") or (0, 0)
        return width + 1, height + 1
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = _pair(data, 26, 2, "little") or (0, 0)
    return width & 0x3FFF, height & 0x3FFF


def _pair(data: bytes, start: int, size: int, order: Literal["big", "little"]) -> tuple[int, int] | None:
    """Return two consecutive integers of ``size`` bytes; None if the data ends before."""
    if len(data) < start + 2 * size:
        return None
    first, second = (int.from_bytes(data[at : at + size], order) for at in (start, start + size))
    return first, second


def audio_type(data: bytes) -> str | None:
    """Return the content type of an audio file; None for other data."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "audio/wav"
    if _starts_with_mpeg(data):
        return "audio/mpeg"
    return next((content_type for begin, content_type in _AUDIO if data.startswith(begin)), None)


def _starts_with_mpeg(data: bytes) -> bool:
    """Return whether an MPEG frame is followed by another or the end; its two marker bytes also start other data."""
    version = _MPEG_HEADERS.get(data[1]) if len(data) > 4 and data[0] == 0xFF else None
    if version is None:
        return False
    kilobits, rates = _MPEG_RATES[version]
    rate, padding = (data[2] >> 2) & 3, (data[2] >> 1) & 1
    if not 1 <= data[2] >> 4 <= len(kilobits) or rate >= len(rates):
        return False
    size = 144_000 // version * kilobits[(data[2] >> 4) - 1] // rates[rate] + padding
    return len(data) >= size and data[size : size + 2] in (b"", data[:2])


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels as a PNG file, without an image library.

    Args:
        pixels: Array of shape (height, width) or (height, width, channels) and dtype uint8, with 1 to 4 channels and
            at least one pixel.
    """
    height, width = pixels.shape[:2]
    colour = _PNG_COLOUR_TYPES[1 if pixels.ndim == 2 else pixels.shape[2]]
    rows = np.zeros((height, 1 + pixels[0].size), np.uint8)  # the first byte of a row, 0, says that it has no filter
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for name, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), _FAST_LEVEL)), (b"IEND", b"")):
        file += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return file
