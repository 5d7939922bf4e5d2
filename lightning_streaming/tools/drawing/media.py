"""What browsers show and play, told by its first bytes."""

from __future__ import annotations

from typing import Literal

from lightning_streaming.formats.images.encodings import BEGINNINGS

_PICTURES = ((BEGINNINGS["JPEG"], "image/jpeg"), (BEGINNINGS["PNG"], "image/png"), (b"GIF8", "image/gif"))
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Second bytes of the markers of a frame; the others of this range are of tables and extensions."""
_MOST_HEAD = 1 << 20
"""Bytes among which the head of a frame is looked for."""
_SOUNDS = ((b"fLaC", "audio/flac"), (b"OggS", "audio/ogg"), (b"ID3", "audio/mpeg"))
_MPEG_HEADS = {0xFB: 1, 0xFA: 1, 0xF3: 2, 0xF2: 2}
"""Of MPEG audio of layer III: the second byte of a frame, and the version."""
_MPEG_RATES = {
    1: ((32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320), (44100, 48000, 32000)),
    2: ((8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160), (22050, 24000, 16000)),
}
"""Of each version the kilobits, and the samples, of a second."""


def picture_type(data: bytes) -> str | None:
    """The content type of an image file that every browser shows and that runs nothing; None of all else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for head, kind in _PICTURES if data.startswith(head)), None)


def picture_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of an image file, in pixels, as its head says them; None where it does not."""
    kind = picture_type(data)
    if kind == "image/png" and data[12:16] == b"IHDR":
        return _pair(data, 16, 4, "big")
    if kind == "image/gif":
        return _pair(data, 6, 2, "little")
    if kind == "image/jpeg":
        return _jpeg_size(data)
    return _webp_size(data) if kind == "image/webp" else None


def _pair(data: bytes, start: int, size: int, order: Literal["big", "little"]) -> tuple[int, int] | None:
    """Two numbers beside each other; None where there are not as many bytes."""
    if len(data) < start + 2 * size:
        return None
    first, second = (int.from_bytes(data[at : at + size], order) for at in (start, start + size))
    return first, second


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """As the frame's head says it, which stands after segments of other kinds, each with its length."""
    data, at = data[:_MOST_HEAD], 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        if data[at + 1] == 0xFF:  # it fills
            at += 1
        elif data[at + 1] in _JPEG_FRAMES:
            pair = _pair(data, at + 5, 2, "big")
            return pair and pair[::-1]
        else:
            at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
    return None


def _webp_size(data: bytes) -> tuple[int, int] | None:
    if len(data) < 30:
        return None
    if data[12:16] == b"VP8X":
        width, height = _pair(data, 24, 3, "little") or (0, 0)
        return width + 1, height + 1
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = _pair(data, 26, 2, "little") or (0, 0)
    return width & 0x3FFF, height & 0x3FFF


def sound_type(data: bytes) -> str | None:
    """The content type of a sound file; None of all else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "audio/wav"
    if _begins_with_mpeg(data):
        return "audio/mpeg"
    return next((kind for head, kind in _SOUNDS if data.startswith(head)), None)


def _begins_with_mpeg(data: bytes) -> bool:
    """Whether there is a frame, and after it the next or the end: two bytes alone begin many other values, too."""
    version = _MPEG_HEADS.get(data[1]) if len(data) > 4 and data[0] == 0xFF else None
    if version is None:
        return False
    kilobits, rates = _MPEG_RATES[version]
    rate, padding = (data[2] >> 2) & 3, (data[2] >> 1) & 1
    if not 1 <= data[2] >> 4 <= len(kilobits) or rate >= len(rates):
        return False
    size = 144_000 // version * kilobits[(data[2] >> 4) - 1] // rates[rate] + padding
    return len(data) >= size and data[size : size + 2] in (b"", data[:2])
