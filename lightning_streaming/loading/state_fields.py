"""The fields of a saved state, taken one by one: what is wrong with one is told by its name, what was found, a way out.

A state comes from a file that anybody may have written or damaged. So nothing is taken for granted here, and whoever
reads a state reads all of it before anything is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Mapping as AnyMapping
from reprlib import Repr
from typing import Any

from lightning_streaming.errors import StateError

LARGEST = 2**62 - 1
"""The largest number that processes can tell each other, and that has room for what is added to it."""
MOST_EPOCHS = 2**31 - 1
"""Far more than a run can have; beyond, a number was not written by one."""
MOST_NODES = 2**20
"""Far more nodes than there are machines in one place."""
_WAY_OUT = "the state was edited or damaged; go on from another checkpoint, or write it anew"


class Fields:
    """A dict of a saved state whose values are looked at one by one.

    Args:
        value: What was found where the dict is to be.
        of: What messages call it, like "a saved position".

    Raises:
        StateError: It is no dict.
    """

    def __init__(self, value: object, of: str) -> None:
        if not isinstance(value, AnyMapping):
            raise StateError(f"{of} is a dict, but got {type(value).__name__}; {_WAY_OUT}")
        self.of = of
        self._values: AnyMapping[Any, Any] = value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        """Its keys.

        Raises:
            StateError: One is no text.
        """
        for key in self._values:
            if not isinstance(key, str):
                raise StateError(f"the keys of {self.of} are texts, but one is {shown(key)}; {_WAY_OUT}")
            yield key

    def get(self, key: str) -> Any:
        """The value as it is.

        Raises:
            StateError: There is none.
        """
        if key not in self._values:
            keys = ", ".join(map(shown, list(self._values)[:12])) or "nothing"
            raise StateError(f"{self.of} needs {key!r}, but this one only has {keys}; {_WAY_OUT}")
        return self._values[key]

    def is_none(self, key: str) -> bool:
        """Whether the value is there and None."""
        return self.get(key) is None

    def whole_number(self, key: str, least: int = 0, most: int = LARGEST) -> int:
        """A whole number in ``[least, most]``."""
        value = self.get(key)
        if not _is_whole(value) or not least <= value <= most:
            raise self.wrong(key, f"a whole number in [{least}, {most}]")
        return int(value)

    def whole_numbers(self, key: str, count: int) -> tuple[int, ...]:
        """A list of so many whole numbers, none negative."""
        value = self.get(key)
        if (
            not isinstance(value, list | tuple)
            or len(value) != count
            or not all(_is_whole(one) and 0 <= one <= LARGEST for one in value)
        ):
            raise self.wrong(key, f"a list of {count} whole numbers in [0, {LARGEST}]")
        return tuple(value)

    def text(self, key: str) -> str:
        """A text."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def one_of(self, key: str, choices: Collection[object]) -> Any:
        """One of a few plain values."""
        value = self.get(key)
        if not any(value is one or (type(value) is type(one) and value == one) for one in choices):
            raise self.wrong(key, f"one of {', '.join(map(repr, choices))}")
        return value

    def fields(self, key: str, of: str | None = None) -> Fields:
        """A dict within it.

        Args:
            key: Its key.
            of: What messages call it; None for its key and what it lies in.
        """
        return Fields(self.get(key), f"{key!r} of {self.of}" if of is None else of)

    def wrong(self, key: str, wanted: str) -> StateError:
        """What to raise where a value is not what it has to be."""
        return StateError(f"{key!r} of {self.of} must be {wanted}, but is {shown(self._values[key])}; {_WAY_OUT}")

    def contradicts(self, words: str) -> StateError:
        """What to raise where two values cannot both be right."""
        return StateError(f"{self.of} contradicts itself: {words}; {_WAY_OUT}")


def shown(value: object) -> str:
    """A value as a message shows it: short, however large it is."""
    return _SHORT.repr(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
