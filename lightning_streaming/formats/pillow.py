"""The Pillow package, which only columns of images need."""

from __future__ import annotations

import struct
from types import ModuleType

from lightning_streaming.errors import MissingDependencyError

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
            "columns of images need the Pillow package; run: pip install 'lightning-streaming[images]'"
        ) from None
    return PIL.Image
