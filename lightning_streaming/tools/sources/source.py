"""What every source answers, and how its input is cut into parts that can be converted alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or a run of it."""

    path: str
    """Path of the file."""
    size: int
    """About how many bytes it holds, for making parts of like size."""
    start: int = 0
    """Where it begins, in what its source counts: bytes, row groups."""
    stop: int | None = None
    """Where it ends (exclusive); None for the end of the file."""


@dataclass(frozen=True, slots=True, repr=False)
class Part:
    """Pieces that one worker converts, one after the other."""

    number: int
    """Place among the parts, from 0."""
    pieces: tuple[Piece, ...]
    """In the order of the source."""
    made_into: str = ""
    """What becomes of the rows, in words; a dataset that was begun with other words is not gone on with."""

    def __repr__(self) -> str:
        """Short, and another one for any change of the files or of what becomes of them.

        Folders count no further than the one that a file is in: the same files may lie elsewhere when work goes on.
        """
        named = [("/".join(PurePath(one.path).parts[-2:]), one.size, one.start, one.stop) for one in self.pieces]
        digest = hashlib.sha256(repr((named, self.made_into)).encode()).hexdigest()[:16]
        ends = " to ".join(dict.fromkeys(name for name, *_ in (*named[:1], *named[-1:])))
        return f"<{ends}: {sum(size for _, size, *_ in named)} bytes, {digest}>"


class Found(NamedTuple):
    """What a source found out about a column."""

    encoding: str | None
    """The encoding that follows; None if none does."""
    what: str
    """What the column holds, for people."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a source."""

    columns: Mapping[str, Found]
    """By name, in the order of the source."""
    told_by: str
    """What they were told from, for people."""


class Source(Protocol):
    """Rows in a fixed order. It holds no open file and pickles, so that workers read with copies of it."""

    widest: ClassVar[str]
    """The encoding that takes every value but bytes."""

    def pieces(self, most: int) -> Sequence[Piece]:
        """The whole input in order, in pieces of about ``most`` bytes where its files can be cut."""
        ...

    def schema(self) -> Schema:
        """Tell the columns.

        Raises:
            FormatError: The beginning of the input cannot be read.
        """
        ...

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Read a piece.

        Args:
            piece: One of :meth:`pieces`.
            names: The columns that will be used; a source may leave out others.

        Yields:
            A number that :meth:`place` understands, and the values by column.

        Raises:
            FormatError: The file is damaged or not of this kind; the message names the place.
        """
        ...

    def place(self, piece: Piece, number: int) -> str:
        """Say where a row is, for example ``"data.jsonl, line 7"``."""
        ...

    def converter(self, encoding: str) -> Callable[[Any], Any]:
        """A function from this source's values to what an encoding takes; it raises EncodingError.

        Raises:
            ConfigError: No value of this source can have this encoding.
        """
        ...


def put_together(pieces: Iterable[Piece], most: int) -> Iterator[tuple[Piece, ...]]:
    """Put pieces together until they have ``most`` bytes.

    For example the sizes 4, 4, 4, 9, 1 with ``most=8`` become (4, 4), (4, 9), (1).

    Args:
        pieces: The input, in order.
        most: Bytes at which a part is full, at least 1.
    """
    pending: list[Piece] = []
    size = 0
    for piece in pieces:
        pending.append(piece)
        size += piece.size
        if size >= most:
            yield tuple(pending)
            pending, size = [], 0
    if pending:
        yield tuple(pending)
