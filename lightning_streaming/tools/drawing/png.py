"""Pixels as a PNG file, without an image library: for arrays that are shown as pictures."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""By the number of channels: grey, grey and opacity, RGB, RGB and opacity."""
_QUICK = 3
"""Of zlib's levels."""


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file.

    Args:
        pixels: Array of shape (height, width) or (height, width, channels) and dtype uint8, with 1 to 4 channels and
            at least one pixel.
    """
    height, width = pixels.shape[:2]
    colour = _COLOUR_TYPES[1 if pixels.ndim == 2 else pixels.shape[2]]
    rows = np.zeros((height, 1 + pixels[0].size), np.uint8)  # each begins with a byte that says: as it is
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), _QUICK)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
