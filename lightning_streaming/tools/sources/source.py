"""What every source answers, and how its input is cut into parts that can be converted alone."""

from __future__ import annotations

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
    of_lines: bool = False
    """Whether it is counted in bytes, and a line belongs to it if the line's first byte does."""


@dataclass(frozen=True, slots=True, repr=False)
class Part:
    """Pieces that one worker converts, one after the other."""

    number: int
    """Place among the parts, from 0."""
    pieces: tuple[Piece, ...]
    """In the order of the source."""
    content: str = ""
    """A digest of what is in the pieces, and of all else about them that rows tell of."""

    def __repr__(self) -> str:
        """Short; another one for any change of the content, wherever the files lie."""
        names = [PurePath(one.path).name for one in self.pieces]
        ends = " to ".join(dict.fromkeys((*names[:1], *names[-1:])))
        return f"<{self.content} {sum(one.size for one in self.pieces)} bytes of {ends}>"


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
