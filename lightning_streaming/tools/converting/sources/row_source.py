"""What every kind of source answers, the files that a location names, and how these are cut into parts.

A part can be converted alone. A digest tells its content from any other, so that work goes on only with what it was
begun with.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, Any, ClassVar, NamedTuple, cast

from lightning_streaming.errors import ConfigError, FormatError
from lightning_streaming.tools.commands import usable_cpus
from lightning_streaming.tools.console import progress


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
class InputPart:
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


@dataclass(frozen=True, slots=True)
class RowSource(ABC):
    """Rows in a fixed order. It holds no open file and pickles, so that workers read with copies of it.

    The names of its class and its fields, but for those of where files are, are written down with a conversion.
    """

    paths: tuple[str, ...]
    widest: ClassVar[str] = "json"
    """The encoding that takes every value but bytes."""
    called: ClassVar[str] = "row"
    """What is counted in a file; empty where a file is one row."""

    @abstractmethod
    def schema(self) -> Schema:
        """Tell the columns.

        Raises:
            FormatError: The beginning of the input cannot be read.
        """

    @abstractmethod
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

    def pieces(self, most: int) -> Sequence[Piece]:  # noqa: ARG002
        """The whole input in order, in pieces of about ``most`` bytes where its files can be cut; here whole files."""
        return whole_files(self.paths)

    def content(self, piece: Piece) -> str | None:  # noqa: ARG002
        """A text that differs where what is in a piece does; None for a digest of the bytes of its file."""
        return None

    def place(self, piece: Piece, number: int) -> str:
        """Say where a row is, for example ``"data.parquet, row 7"``."""
        return f"{piece.path}, {self.called} {number}" if self.called else piece.path

    def parser(self, encoding: str) -> Callable[[Any], Any] | None:  # noqa: ARG002
        """How values are parsed that are to have this encoding; None where they are values already.

        Raises:
            ConfigError: No value of this source can have this encoding.
        """
        return None

    def first_row(self) -> tuple[str, Mapping[str, Any]]:
        """Where the first row is, and the row.

        Raises:
            FormatError: There is none.
        """
        for path in self.paths:
            piece = Piece(path, 0)
            for number, row in self.rows(piece, ()):
                return self.place(piece, number), row
        raise FormatError(
            f"there is no {self.called} in {self.paths[0]}" + " and the files after it" * (len(self.paths) > 1),
            path=self.paths[0],
        )


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


def files_under(folder: Path) -> list[Path]:
    """All files of a folder and its folders, by path; what begins with a dot is left out.

    Raises:
        ConfigError: A link in it leads back to a folder that it is in.
    """
    found = []
    for directory, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(directory, name) for name in folders):
            if path.is_symlink() and _leads_back(path, folder):
                raise ConfigError(
                    f"{path} leads back to {path.resolve()}, which it is in", hint="remove that link", path=str(path)
                )
        found += [Path(directory, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _leads_back(link: Path, folder: Path) -> bool:
    """Whether following a link would come to it again: it leads to a folder on the way to it, or above one."""
    on_the_way = [parent for parent in link.parents if parent == folder or folder in parent.parents]
    target = link.resolve()
    return any(parent.resolve().is_relative_to(target) for parent in on_the_way)


def find_files(location: str, suffixes: Sequence[str]) -> tuple[str, ...]:
    """The files of a location: itself, those of a folder whose names end so, or those that a pattern matches.

    Raises:
        ConfigError: There are none.
    """
    path = Path(location)
    if path.is_dir():
        found = [str(file) for file in files_under(path) if has_suffix(file, suffixes)]
        why = f"the folder {location} has no file that ends in {', '.join(suffixes)}"
    elif path.exists():
        return (location,)
    else:
        # Not Path.glob, which takes no absolute pattern.
        matches = glob.glob(location, recursive=True)  # noqa: PTH207
        found = sorted(match for match in matches if Path(match).is_file())
        why = f"no file matches {location}" if glob.has_magic(location) else f"{location} does not exist"
    if not found:
        raise ConfigError(
            why,
            hint="SOURCE is a file, a folder, a quoted pattern like 'raw/*.jsonl', or a file's URL",
            option="SOURCE",
        )
    return tuple(found)


def has_suffix(path: Path | str, suffixes: Sequence[str]) -> bool:
    """Whether a file's name ends in one of some texts, in either case."""
    return Path(path).name.lower().endswith(tuple(suffixes))


def whole_files(paths: Sequence[str]) -> list[Piece]:
    """Each file as one piece."""
    return [Piece(path, Path(path).stat().st_size) for path in paths]


def is_gzip(path: str) -> bool:
    """Whether a file is compressed, by its name."""
    return path.lower().endswith(".gz")


@contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """Open a file to read, decompressed if its name ends in ``.gz``.

    Raises:
        FormatError: What is read within the block is not gzip, or ends early.
    """
    try:
        with gzip.open(path, "rb") if is_gzip(path) else Path(path).open("rb") as file:
            yield cast("IO[bytes]", file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FormatError(f"{path} is not a whole gzip file: {error}", path=path) from error


_BLOCK_BYTES = 2**20
_WHERE = ("paths", "root", "cache")
"""Fields of sources that say where files are, and how to get at them."""

_Span = tuple[str, int, int | None]
"""A file, and the bytes of it, that are digested as one."""


def digest_of(value: object) -> str:
    """A short text that differs where the repr of a value does."""
    return hashlib.sha256(repr(value).encode(errors="surrogatepass")).hexdigest()[:16]


def traits(source: RowSource) -> dict[str, Any]:
    """What decides on the rows of a source beside its files, by name: its kind, its separator, its classes."""
    known: Any = source
    others = {one.name: getattr(known, one.name) for one in fields(known) if one.name not in _WHERE}
    return {"kind": type(source).__name__, **others}


def digest_groups(source: RowSource, groups: Sequence[Sequence[Piece]]) -> list[str]:
    """A digest of each group of pieces: of every byte in them, and of names of files where rows tell them.

    The whole source is read for it, by threads; digesting is many times as fast as converting. Of a source that tells
    itself what is in its pieces, nothing is read.
    """
    told = [[source.content(piece) for piece in group] for group in groups]
    if None not in chain.from_iterable(told):
        return list(map(digest_of, told))
    root = getattr(source, "root", None)
    spans = {piece: _span(piece) for group in groups for piece in group}
    digests = _digest_spans(set(spans.values()))

    def tell(piece: Piece) -> tuple[object, ...]:
        where = () if piece.of_lines else (piece.start, piece.stop)
        name = () if root is None else (os.path.relpath(piece.path, root),)
        return digests[spans[piece]], *where, *name

    return [digest_of([tell(piece) for piece in group]) for group in groups]


def _digest_spans(spans: Iterable[_Span]) -> dict[_Span, str]:
    order = sorted(spans, key=repr)
    with ThreadPoolExecutor(usable_cpus()) as pool, progress(len(order), "look at the source", "files") as advance:
        found = {}
        for span, digest in zip(order, pool.map(_digest_span, order), strict=True):
            found[span] = digest
            advance(1)
        return found


def _span(piece: Piece) -> _Span:
    """The bytes of a piece; the whole file, where it is not counted in bytes."""
    if not piece.of_lines:
        return piece.path, 0, None
    with Path(piece.path).open("rb") as file:
        start = first_line(file, piece.start)
        return piece.path, start, None if piece.stop is None else max(start, first_line(file, piece.stop))


def first_line(file: IO[bytes], position: int) -> int:
    """Go to where the first line begins that begins at a position or after it, and say where that is."""
    if position:
        file.seek(position - 1)  # this byte ends a line exactly if a line begins at the position
        file.readline()
    return file.tell()


def _digest_span(span: _Span) -> str:
    path, start, stop = span
    digest = hashlib.sha256()
    left = sys.maxsize if stop is None else stop - start
    with Path(path).open("rb") as file:
        file.seek(start)
        while block := file.read(min(_BLOCK_BYTES, left)):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
