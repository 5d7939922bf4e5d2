"""The base class of sources, the files of a location, and how they are divided into parts.

A part can be converted alone. A digest identifies its content, so that a conversion resumes only with the same input.
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

_BLOCK_BYTES = 2**20
_LOCATION_FIELDS = ("paths", "root", "cache")
"""Fields of sources that locate files."""

_Span = tuple[str, int, int | None]
"""A file, and the range of bytes in it that is digested."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or a range of it."""

    path: str
    size: int
    """Approximate bytes, to create parts of similar size."""
    start: int = 0
    """Start, in the unit of the source: bytes, row groups, shards."""
    stop: int | None = None
    """End (exclusive); None for the end of the file."""
    of_lines: bool = False
    """Whether the range is in bytes, and contains the lines whose first byte is in it."""


@dataclass(frozen=True, slots=True, repr=False)
class InputPart:
    """Consecutive pieces that one worker converts."""

    number: int
    """Number of the part, from 0."""
    pieces: tuple[Piece, ...]
    content: str = ""
    """Digest of the pieces' content, and of what else rows contain, like names of files."""

    def __repr__(self) -> str:
        """Return a short text that differs for any change of the content, and not with the location of files."""
        names = [PurePath(piece.path).name for piece in self.pieces]
        ends = " to ".join(dict.fromkeys((*names[:1], *names[-1:])))
        return f"<{self.content} {sum(piece.size for piece in self.pieces)} bytes of {ends}>"


class SourceColumn(NamedTuple):
    """A column of a source."""

    encoding: str | None
    """The encoding that follows from the data; None if none does."""
    description: str
    """Description of its values."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a source."""

    columns: Mapping[str, SourceColumn]
    """Columns by name, in the order of the source."""
    origin: str
    """Description of the data that they were inferred from."""


@dataclass(frozen=True, slots=True)
class RowSource(ABC):
    """Rows in a fixed order. It holds no open file and pickles, so that each worker reads with a copy.

    The names of its class and of its fields, except those of locations, are recorded with a conversion.
    """

    paths: tuple[str, ...]
    widest: ClassVar[str] = "json"
    """The encoding that takes every value except bytes."""
    unit: ClassVar[str] = "row"
    """What is counted in a file; empty if a file is one row."""

    @abstractmethod
    def schema(self) -> Schema:
        """Return the columns.

        Raises:
            FormatError: The start of the input cannot be read.
        """

    @abstractmethod
    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Read a piece.

        Args:
            piece: One of :meth:`pieces`.
            names: The columns that are needed; a source may omit others.

        Yields:
            A number that :meth:`place` takes, and the values by column.

        Raises:
            FormatError: The file is damaged or not of this kind; the message names the position.
        """

    def pieces(self, max_bytes: int) -> Sequence[Piece]:  # noqa: ARG002
        """Return the input in order, in pieces of about ``max_bytes`` if files can be divided; here whole files."""
        return whole_files(self.paths)

    def content(self, piece: Piece) -> str | None:  # noqa: ARG002
        """Return a text that identifies the content of a piece; None for a digest of its bytes."""
        return None

    def place(self, piece: Piece, number: int) -> str:
        """Return the position of a row for messages, for example ``"data.parquet, row 7"``."""
        return f"{piece.path}, {self.unit} {number}" if self.unit else piece.path

    def parser(self, encoding: str) -> Callable[[Any], Any] | None:  # noqa: ARG002
        """Return the function that parses values for an encoding; None if no parsing is needed.

        Raises:
            ConfigError: No value of this source can have this encoding.
        """
        return None

    def first_row(self) -> tuple[str, Mapping[str, Any]]:
        """Return the position of the first row, and the row.

        Raises:
            FormatError: There is none.
        """
        for path in self.paths:
            piece = Piece(path, 0)
            for number, row in self.rows(piece, ()):
                return self.place(piece, number), row
        raise FormatError(
            f"there is no {self.unit} in {self.paths[0]}" + " and the files after it" * (len(self.paths) > 1),
            path=self.paths[0],
        )


def group_pieces(pieces: Iterable[Piece], min_bytes: int) -> Iterator[tuple[Piece, ...]]:
    """Yield groups of consecutive pieces, each with at least ``min_bytes``, but the last.

    For example the sizes 4, 4, 4, 9, 1 with ``min_bytes=8`` become (4, 4), (4, 9), (1).
    """
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += piece.size
        if size >= min_bytes:
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)


def files_under(folder: Path) -> list[Path]:
    """Return all files of a folder and its subfolders, sorted by path, without hidden ones.

    Raises:
        ConfigError: A link in it leads to a folder that contains it.
    """
    files = []
    for directory, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(directory, name) for name in folders):
            if path.is_symlink():
                parents = [parent for parent in path.parents if parent == folder or folder in parent.parents]
                target = path.resolve()
                if any(parent.resolve().is_relative_to(target) for parent in parents):
                    raise ConfigError(
                        f"{path} leads back to {target}, which contains it", hint="remove that link", path=str(path)
                    )
        files += [Path(directory, name) for name in names if not name.startswith(".")]
    return sorted(files)


def find_files(location: str, suffixes: Sequence[str]) -> tuple[str, ...]:
    """Return the files of a location: the file, those of a folder with a suffix, or those that match a pattern.

    Raises:
        ConfigError: There are none.
    """
    path = Path(location)
    if path.is_dir():
        files = [str(file) for file in files_under(path) if has_suffix(file, suffixes)]
        why = f"the folder {location} has no file that ends in {', '.join(suffixes)}"
    elif path.exists():
        return (location,)
    else:
        # Not Path.glob, which takes no absolute pattern.
        matches = glob.glob(location, recursive=True)  # noqa: PTH207
        files = sorted(match for match in matches if Path(match).is_file())
        why = f"no file matches {location}" if glob.has_magic(location) else f"{location} does not exist"
    if not files:
        raise ConfigError(
            why,
            hint="SOURCE is a file, a folder, a quoted pattern like 'raw/*.jsonl', or a file's URL",
            option="SOURCE",
        )
    return tuple(files)


def has_suffix(path: Path | str, suffixes: Sequence[str]) -> bool:
    """Return whether the name of a file ends in one of the suffixes, in either case."""
    return Path(path).name.lower().endswith(tuple(suffixes))


def whole_files(paths: Sequence[str]) -> list[Piece]:
    """Return each file as one piece."""
    return [Piece(path, Path(path).stat().st_size) for path in paths]


def is_gzip(path: str) -> bool:
    """Return whether a file is compressed, by its name."""
    return path.lower().endswith(".gz")


@contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """Open a file to read, decompressed if its name ends in ``.gz``.

    Raises:
        FormatError: Data that is read within the block is not gzip, or truncated.
    """
    try:
        with gzip.open(path, "rb") if is_gzip(path) else Path(path).open("rb") as file:
            yield cast("IO[bytes]", file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FormatError(f"{path} is not a whole gzip file: {error}", path=path) from error


def digest_of(value: object) -> str:
    """Return a short digest of the repr of a value."""
    return hashlib.sha256(repr(value).encode(errors="surrogatepass")).hexdigest()[:16]


def traits(source: RowSource) -> dict[str, Any]:
    """Return what determines the rows of a source except its files, by name: its kind, separator, classes."""
    known: Any = source
    others = {field.name: getattr(known, field.name) for field in fields(known) if field.name not in _LOCATION_FIELDS}
    return {"kind": type(source).__name__, **others}


def digest_groups(source: RowSource, groups: Sequence[Sequence[Piece]]) -> list[str]:
    """Return a digest of each group of pieces: of every byte, and of names of files if rows contain them.

    Threads read the whole source for it, which is many times as fast as converting, unless the source itself identifies
    the content of its pieces.
    """
    contents = [[source.content(piece) for piece in group] for group in groups]
    if None not in chain.from_iterable(contents):
        return list(map(digest_of, contents))
    root = getattr(source, "root", None)
    spans = {piece: _span(piece) for group in groups for piece in group}
    ordered = sorted(set(spans.values()), key=repr)
    with ThreadPoolExecutor(usable_cpus()) as pool, progress(len(ordered), "read the source", "files") as advance:
        digests = {}
        for span, digest in zip(ordered, pool.map(_digest_span, ordered), strict=True):
            digests[span] = digest
            advance(1)

    def identify(piece: Piece) -> tuple[object, ...]:
        where = () if piece.of_lines else (piece.start, piece.stop)
        name = () if root is None else (os.path.relpath(piece.path, root),)
        return digests[spans[piece]], *where, *name

    return [digest_of([identify(piece) for piece in group]) for group in groups]


def _span(piece: Piece) -> _Span:
    """Return the bytes of a piece; those of the whole file if its range is not in bytes."""
    if not piece.of_lines:
        return piece.path, 0, None
    with Path(piece.path).open("rb") as file:
        start = seek_line(file, piece.start)
        return piece.path, start, None if piece.stop is None else max(start, seek_line(file, piece.stop))


def seek_line(file: IO[bytes], position: int) -> int:
    """Seek to the first line that starts at a position or after it, and return where that is."""
    if position:
        file.seek(position - 1)  # this byte ends a line exactly if a line starts at the position
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
