"""What browsers show and play, told by its first bytes."""

from __future__ import annotations

from lightning_streaming.formats.images import BEGINNINGS

_PICTURES = ((BEGINNINGS["JPEG"], "image/jpeg"), (BEGINNINGS["PNG"], "image/png"), (b"GIF8", "image/gif"))
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
