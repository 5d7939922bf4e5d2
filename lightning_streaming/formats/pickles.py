"""The encoding of any Python value. Reading it runs code that whoever wrote the data chose."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.checks import brief

_PROTOCOL = 4
"""The default of Python 3.8 to 3.13, so the bytes do not depend on which of them writes."""


@dataclass(frozen=True, slots=True)
class PickleEncoding:
    """Whatever pickle can write."""

    size: None = None

    def encode(self, value: Any) -> bytes:
        try:
            return pickle.dumps(value, _PROTOCOL)
        except Exception as error:  # a value's own __reduce__ may raise anything
            raise EncodingError(
                f"expected a value that pickle can write, but got {type(value).__name__} ({_named(error)})"
            ) from error

    def decode(self, data: bytes | memoryview) -> Any:
        try:
            return pickle.loads(bytes(data))  # noqa: S301  # allowed by the reader: see encodings.is_unsafe
        except Exception as error:  # damaged pickles, and the code in sound ones, raise anything
            raise EncodingError(f"expected a pickle, but found {brief(data)} ({_named(error)})") from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
