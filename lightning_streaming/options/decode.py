"""Options for columns of images: their decoded type, and the threads that decode them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.images import KINDS
from lightning_streaming.options.groups import OptionGroup, store_plain
from lightning_streaming.replaced_names import suggests_names
from lightning_streaming.units import check_whole, is_one_of


@suggests_names
@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig(OptionGroup):
    """Decoding of columns of images.

    Args:
        columns: Type of image columns in samples, by name, like ``{"image": "array"}``: "pil" images; the "bytes" of
            their files; an "array" of numpy, uint8 of shape (height, width, 3); a "tensor" of torch, uint8 of shape
            (3, height, width); or "encoded", an :class:`~lightning_streaming.EncodedImage` that ``transform`` decodes.
            None: the type of their format. See docs/images.md.
        threads: Threads of each reading process that decode samples and apply ``transform``, up to a batch ahead.
            0: the reading thread only.

    Raises:
        ConfigError: A field has a value that cannot work.
    """

    option: ClassVar[str] = "decode"
    example: ClassVar[str] = "{columns: {image: array}}"

    columns: Mapping[str, str] | None = None
    threads: int = 0

    def __post_init__(self) -> None:
        store_plain(self)
        object.__setattr__(self, "threads", check_whole("decode.threads", self.threads, 0))
        if self.columns is None:
            return
        if not isinstance(self.columns, Mapping) or not all(isinstance(name, str) for name in self.columns):
            raise ConfigError(
                "decode.columns must map names of columns to kinds, like {'image': 'array'}, but got "
                f"{short_repr(self.columns)}",
                option="decode.columns",
            )
        for name, kind in self.columns.items():
            if not is_one_of(kind, KINDS):
                known = ", ".join(map(repr, KINDS))
                raise ConfigError(
                    f"decode.columns must make one of {known} of column {name!r}, but got {short_repr(kind)}",
                    option=f"decode.columns.{name}",
                )
