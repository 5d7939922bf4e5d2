"""Encodings that users write, held to what the built-in ones keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats.checks import brief, check_length


class EncodingClass(Protocol):
    """What a user writes: a class like this, made with no arguments."""

    @property
    def size(self) -> int | None:
        """Bytes of every payload, or None where they vary. A class attribute will do."""
        ...

    def encode(self, value: Any, /) -> bytes:
        """Turn a value into its payload."""
        ...

    def decode(self, data: bytes, /) -> Any:
        """Turn a payload, a copy of what the shard has, into a value."""
        ...


@dataclass(frozen=True, slots=True)
class UserEncoding:
    """An encoding of a user's class. Whatever the class raises becomes an EncodingError that names it.

    Raises:
        ConfigError: The class cannot be found again by its name, cannot be made, or lacks a part.
    """

    name: str
    """What columns call it."""
    kind: type[EncodingClass]
    """The user's class."""
    size: int | None = field(init=False)
    """Bytes of every payload, or None where they vary."""
    _made: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_importable(self.kind)
        try:
            made = self.kind()
        except TypeError as error:
            raise ConfigError(f"{self.kind.__qualname__} must be made with no arguments, but {error}") from error
        size = getattr(made, "size", "no such attribute")
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(
                f"{self.kind.__qualname__}.size must be the bytes of every payload, or None where they vary, but is "
                f"{size!r}"
            )
        for method in ("encode", "decode"):
            if not callable(getattr(made, method, None)):
                raise ConfigError(f"{self.kind.__qualname__} must have a method {method}")
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "_made", made)

    def encode(self, value: Any) -> bytes:
        try:
            data = self._made.encode(value)
        except Exception as error:  # a user's code may raise anything
            raise self._failed("encode", value, error) from error
        if not isinstance(data, bytes):
            raise EncodingError(f"{self.kind.__qualname__}.encode must return bytes, but returned {brief(data)}")
        return data

    def decode(self, data: bytes | memoryview) -> Any:
        if self.size is not None:
            check_length(data, self.size)
        try:
            return self._made.decode(bytes(data))
        except Exception as error:  # a user's code may raise anything
            raise self._failed("decode", data, error) from error

    def _failed(self, method: str, value: object, error: Exception) -> EncodingError:
        return EncodingError(
            f"{self.kind.__qualname__}.{method} raised {type(error).__name__}: {error} (for {brief(value)})"
        )


def _check_importable(kind: object) -> None:
    """Refuse what a worker process could not find by its module and name."""
    if not isinstance(kind, type):
        raise ConfigError(f"an encoding must be given as a class, but got {kind!r}")
    if "<locals>" in kind.__qualname__:
        raise ConfigError(
            f"{kind.__qualname__} must stand at the top of a module, so that worker processes can find it by its name"
        )
