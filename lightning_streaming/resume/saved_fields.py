"""Check the values of a saved state one by one: it comes from a file that may be damaged, edited or hostile."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lightning_streaming.errors import StateError
from lightning_streaming.escaping import short_repr

LARGEST = 2**62 - 1
"""The largest number that processes can send to each other, and that has room for what is added to it."""
DAMAGED = "the state was edited or damaged; resume from another checkpoint, or save it again"
"""The hint of every error about a value that no run has saved."""


class Fields:
    """A mapping of a saved state whose values are checked one by one.

    Args:
        value: The object where the mapping should be.
        of: Its name in messages, like "a saved position".

    Raises:
        StateError: It is no mapping.
    """

    def __init__(self, value: object, of: str) -> None:
        if not isinstance(value, Mapping):
            raise StateError(f"{of} is a dict, but got {type(value).__name__}", hint=DAMAGED)
        self.of = of
        self.values: Mapping[Any, Any] = value
        """All of them, unchecked."""

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __iter__(self) -> Iterator[str]:
        """Yield its keys.

        Raises:
            StateError: A key is no text.
        """
        for key in self.values:
            if not isinstance(key, str):
                raise StateError(f"the keys of {self.of} are texts, but one is {short_repr(key)}", hint=DAMAGED)
            yield key

    def get(self, key: str) -> Any:
        """Return the value of a key, unchecked.

        Raises:
            StateError: The key is missing.
        """
        if key not in self.values:
            keys = ", ".join(map(short_repr, list(self.values)[:12])) or "nothing"
            raise StateError(f"{self.of} needs {key!r}, but this one only has {keys}", hint=DAMAGED)
        return self.values[key]

    def is_none(self, key: str) -> bool:
        """Return whether the value is None; the key must be there."""
        return self.get(key) is None

    def has(self, key: str) -> bool:
        """Return whether there is a value other than None."""
        return self.values.get(key) is not None

    def whole_number(self, key: str, least: int = 0, most: int = LARGEST) -> int:
        """Return a whole number in ``[least, most]``."""
        value = self.get(key)
        if not _is_whole(value) or not least <= value <= most:
            raise self.wrong(key, f"a whole number in [{least}, {most}]")
        return int(value)

    def whole_numbers(self, key: str, count: int) -> tuple[int, ...]:
        """Return a list of ``count`` whole numbers, none negative."""
        value = self.get(key)
        if not isinstance(value, list | tuple) or len(value) != count or not all(map(_is_count, value)):
            raise self.wrong(key, f"a list of {count} whole numbers in [0, {LARGEST}]")
        return tuple(value)

    def pairs(self, key: str) -> tuple[tuple[int, int], ...]:
        """Return a list of pairs of whole numbers, none negative."""
        value = self.get(key)
        if not isinstance(value, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_count, pair)) for pair in value
        ):
            raise self.wrong(key, f"a list of pairs of whole numbers in [0, {LARGEST}]")
        return tuple((first, second) for first, second in value)

    def mappings(self, key: str) -> tuple[Mapping[str, Any], ...]:
        """Return a list of mappings whose keys are texts."""
        value = self.get(key)
        if not isinstance(value, list | tuple) or not all(
            isinstance(item, Mapping) and all(isinstance(name, str) for name in item) for item in value
        ):
            raise self.wrong(key, "a list of mappings")
        return tuple(value)

    def text(self, key: str) -> str:
        """Return a text."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def choice(self, key: str, choices: Collection[object]) -> Any:
        """Return one of a few plain values."""
        value = self.get(key)
        if not any(value is known or (type(value) is type(known) and value == known) for known in choices):
            raise self.wrong(key, f"one of {', '.join(map(repr, choices))}")
        return value

    def fields(self, key: str, of: str | None = None) -> Fields:
        """Return a mapping within it.

        Args:
            key: Its key.
            of: Its name in messages; None for its key and the name of this one.
        """
        return Fields(self.get(key), f"{key!r} of {self.of}" if of is None else of)

    def others(self, *known: str) -> dict[str, Any]:
        """Return the values under all other keys, unchecked."""
        return {key: self.values[key] for key in self if key not in known}

    def wrong(self, key: str, wanted: str) -> StateError:
        """Return the error to raise where a value cannot be what it is."""
        value = short_repr(self.values[key])
        return StateError(f"{key!r} of {self.of} must be {wanted}, but is {value}", hint=DAMAGED)

    def contradicts(self, words: str) -> StateError:
        """Return the error to raise where two values cannot both be right."""
        return StateError(f"{self.of} contradicts itself: {words}", hint=DAMAGED)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and 0 <= value <= LARGEST
