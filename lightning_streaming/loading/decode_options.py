"""What a user asks of columns of pictures: what becomes of them, and in how many threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.pictures import KINDS
from lightning_streaming.units import store_whole


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What becomes of columns of pictures.

    Args:
        decode: What columns of pictures give, by name, like ``{"image": "array"}``: "pil" images; the "bytes" of their
            files; an "array" of numpy, uint8 of shape (height, width, 3); a "tensor" of torch, uint8 of shape
            (3, height, width); or a "picture", a :class:`~lightning_streaming.Picture` that ``transform`` decodes.
            None: what their format gives. See docs/pictures.md.
        decode_threads: Threads of each process that reads, in which samples are decoded and ``transform`` is applied,
            up to a batch ahead. 0: none but the one that reads.
    """

    decode: Mapping[str, str] | None = None
    decode_threads: int = 0

    def __post_init__(self) -> None:
        store_whole(self, "decode_threads", 0)
        if self.decode is None:
            return
        if not isinstance(self.decode, Mapping) or not all(isinstance(name, str) for name in self.decode):
            raise ConfigError(
                f"decode must map names of columns to kinds, like {{'image': 'array'}}, but got {self.decode!r}"
            )
        for name, kind in self.decode.items():
            if kind not in KINDS:
                told = ", ".join(map(repr, KINDS))
                raise ConfigError(f"decode must make one of {told} of column {name!r}, but got {kind!r}")
