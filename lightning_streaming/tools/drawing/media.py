"""What browsers show and play, told by its first bytes."""

from __future__ import annotations

_PICTURES = ((b"\xff\xd8\xff", "image/jpeg"), (b"\x89PNG\r\n\x1a\n", "image/png"), (b"GIF8", "image/gif"))
_SOUNDS = ((b"fLaC", "audio/flac"), (b"OggS", "audio/ogg"), (b"ID3", "audio/mpeg"))
_MPEG_FRAMES = (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"\xff\xfa")


def picture_type(data: bytes) -> str | None:
    """The content type of an image file that every browser shows and that runs nothing; None of all else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for head, kind in _PICTURES if data.startswith(head)), None)


def sound_type(data: bytes) -> str | None:
    """The content type of a sound file; None of all else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "audio/wav"
    if data[:2] in _MPEG_FRAMES:
        return "audio/mpeg"
    return next((kind for head, kind in _SOUNDS if data.startswith(head)), None)
