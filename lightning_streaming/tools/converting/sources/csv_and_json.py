"""CSV, TSV and JSON lines, plain or in gzip, read so that nothing is lost unseen.

Cells of CSV are text, and numbers are parsed where nothing is lost. Parsers of JSON keep the last of several values of
one key, make infinity of a number that is too large, and drop digits that a float cannot hold; here these are errors.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError, EncodingError, FormatError
from lightning_streaming.formats.encodings import parse_exact_float
from lightning_streaming.tools.converting.sources import row_source
from lightning_streaming.tools.converting.sources.row_source import (
    Found,
    Piece,
    RowSource,
    Schema,
    find_files,
    open_bytes,
)
from lightning_streaming.writing.shards import infer_columns

DELIMITED_SUFFIXES = {",": (".csv", ".csv.gz"), "\t": (".tsv", ".tsv.gz")}
"""Of files in a folder, by what separates cells."""

_OTHER_SEPARATORS = ";\t|,"
"""What separates cells in files that are called CSV all the same."""

_LONGEST_INT64 = len(str(-(2**63)))

# With a leading zero it may be a code, like a postal code, whose zeros a number would lose.
_INTEGER = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)
_FRACTION = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+([eE][-+]?[0-9]+)?", re.ASCII)
_FLOAT = re.compile(
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?inf|nan", re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Delimited(RowSource):
    """Rows of one or more files with the same columns. Cells may be quoted, and then hold line breaks.

    Files are read whole: a line break may be inside a cell, so they cannot be cut.
    """

    separator: str
    """What separates cells."""
    widest: ClassVar[str] = "str"

    @classmethod
    def open_csv(cls, location: str) -> Delimited:
        """Find the files of a location, with commas between cells."""
        return cls(find_files(location, DELIMITED_SUFFIXES[","]), ",")

    @classmethod
    def open_tsv(cls, location: str) -> Delimited:
        """Find the files of a location, with tabs between cells."""
        return cls(find_files(location, DELIMITED_SUFFIXES["\t"]), "\t")

    def with_separator(self, separator: str) -> Delimited:
        """The same files, with another character between cells.

        Raises:
            ConfigError: It is not one character, or one that means something else.
        """
        if len(separator) != 1 or separator in '"\r\n':
            raise ConfigError(
                f"--separator must be one character, and neither a quote nor a line break, but got {separator!r}",
                hint="in a shell a tab is written $'\\t'",
                option="--separator",
            )
        return replace(self, separator=separator)

    def check_separator(self) -> None:
        """Refuse a header of one cell that seems to be several, cut by another character.

        Raises:
            FormatError: It is one.
        """
        with self._cells(self.paths[0]) as cells:
            header: list[str] = next(cells, [])
        found = next((one for one in _OTHER_SEPARATORS if len(header) == 1 and one in header[0]), None)
        if found is not None:
            named = {"\t": "--from tsv"}.get(found, f"--separator '{found}'")
            raise FormatError(
                f"{self.paths[0]} begins with a row of one cell, {header[0]!r}",
                hint=f"give {named} if {found!r} is what separates its cells, or --separator '{self.separator}' if it "
                "is not",
                option="--separator",
                path=self.paths[0],
            )

    def schema(self) -> Schema:
        """The header, and the cells of the first row: an integer, a number with a point, or text."""
        told_by, row = self.first_row()
        return Schema({name: Found(_told(cell), "text") for name, cell in row.items()}, told_by)

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """Numbers are those of the line in which a row ends, from 1."""
        with self._cells(piece.path) as reader:
            header = _header(next(reader, []), piece.path)
            for cells in reader:
                if not cells and len(header) > 1:  # an empty line
                    continue
                if not cells:
                    raise FormatError(
                        f"{self.place(piece, reader.line_num)} is blank, which in a file of one column may be an empty "
                        "cell or nothing at all",
                        hint='write "" for an empty cell, or remove the line',
                        path=piece.path,
                    )
                if len(cells) != len(header):
                    raise FormatError(
                        f"{self.place(piece, reader.line_num)} has {len(cells)} cells, but the header has "
                        f"{len(header)}",
                        path=piece.path,
                    )
                yield reader.line_num, dict(zip(header, cells, strict=True))

    @contextmanager
    def _cells(self, path: str) -> Iterator[Any]:
        """A reader of the cells of each row, whose errors name the line."""
        # The module's own limit is 128 KiB a cell, for all of the process; documents are longer.
        csv.field_size_limit(sys.maxsize)
        with open_bytes(path) as file:
            lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            reader = csv.reader(lines, delimiter=self.separator, strict=True)
            try:
                yield reader
            except csv.Error as error:
                raise FormatError(f"{path}, line {reader.line_num} cannot be parsed: {error}", path=path) from error
            except UnicodeDecodeError as error:
                raise FormatError(
                    f"{path}, line {reader.line_num + 1} or later is not UTF-8: {error}", path=path
                ) from error

    def place(self, piece: Piece, number: int) -> str:
        """The line in which the row ends, counted from 1."""
        return f"{piece.path}, line {number}"

    def parser(self, encoding: str) -> Callable[[str], Any] | None:
        """Cells are parsed as the encoding calls for; ``json`` and ``ndarray`` from JSON in the cell."""
        family = encoding.partition(":")[0].rstrip("0123456789")
        if family not in _PARSERS:
            raise ConfigError(
                f"a cell of text cannot become {encoding}", hint="use str, numbers, json or ndarray", option="--columns"
            )
        return _PARSERS[family]


def _header(cells: list[str], path: str) -> list[str]:
    if not cells or len(set(cells)) != len(cells) or not all(cells):
        raise FormatError(f"{path} must begin with a row of different names, but begins with {cells}", path=path)
    return cells


def _told(cell: str) -> str:
    if len(cell) <= _LONGEST_INT64 and _INTEGER.fullmatch(cell) and -(2**63) <= int(cell) < 2**63:
        return "int"
    return "float64" if _FRACTION.fullmatch(cell) and _is_exact(cell) else "str"


def _is_exact(cell: str) -> bool:
    try:
        parse_exact_float(cell)
    except EncodingError:
        return False
    return True


def _integer(cell: str) -> int:
    if not _INTEGER.fullmatch(cell.strip()):
        raise EncodingError(f"expected an integer without leading zeros, but got {cell[:60]!r}")
    try:
        return int(cell)
    except ValueError:  # Python reads no more than some thousands of digits
        raise EncodingError(f"expected an integer that Python can read, but got {len(cell)} digits") from None


def _float(cell: str) -> float:
    if not _FLOAT.fullmatch(cell.strip()):
        raise EncodingError(f"expected a number without leading zeros, but got {cell[:60]!r}")
    return parse_exact_float(cell.strip())


def _json(cell: str) -> Any:
    try:
        return parse_json(cell)
    except (ValueError, RecursionError) as error:
        raise EncodingError(f"expected JSON, but got {cell[:60]!r}: {error}") from None


_PARSERS: dict[str, Callable[[str], Any] | None] = {
    **dict.fromkeys(("int", "uint", "str_int"), _integer),
    **dict.fromkeys(("float", "str_float"), _float),
    **dict.fromkeys(("json", "ndarray"), _json),
    **dict.fromkeys(("str", "str_decimal")),
}
"""By families of encodings, without their widths: how their cells are parsed; None where they are taken as text."""


JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz")
"""Of files in a folder; a file that is named alone may be called anything."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JsonLines(RowSource):
    """Rows of one or more files of JSON lines; blank lines are passed over."""

    @classmethod
    def open(cls, location: str) -> JsonLines:
        """Find the files of a location."""
        return cls(find_files(location, JSON_SUFFIXES))

    def pieces(self, most: int) -> Sequence[Piece]:
        """Plain files in runs of bytes; a line belongs to the run that its first byte is in."""
        return [run for whole in row_source.whole_files(self.paths) for run in _runs(whole, most)]

    def schema(self) -> Schema:
        """The columns of the first row, by the types of its values."""
        told_by, row = self.first_row()
        return Schema({name: _found(name, value) for name, value in row.items()}, told_by)

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """Numbers count the lines of the piece from 0."""
        with open_bytes(piece.path) as file:
            for number, line in enumerate(_lines(file, piece)):
                if line.strip():
                    yield number, self._parse(line, piece, number)

    def place(self, piece: Piece, number: int) -> str:
        """The line counted from 1. What lies before the piece is read again for it, which only an error costs."""
        before = 0
        if piece.start:
            with Path(piece.path).open("rb") as file:
                while file.tell() < piece.start:
                    before += file.readline().endswith(b"\n")
        return f"{piece.path}, line {before + number + 1}"

    def _parse(self, line: bytes, piece: Piece, number: int) -> dict[str, Any]:
        hint = "a file that is one JSON array must be written as one object a line" if line.startswith(b"[") else None
        try:
            row = parse_json(line.removeprefix(_BYTE_ORDER_MARK).decode())
        except (_RepeatedKeyError, EncodingError) as error:
            raise FormatError(f"{self.place(piece, number)}: {error}", path=piece.path) from error
        except (ValueError, RecursionError) as error:
            # The error counts lines too, but within this one.
            reason: object = error
            if isinstance(error, json.JSONDecodeError):  # some of whose messages end in "at"
                reason = f"{error.msg.removesuffix(' at')} at column {error.pos + 1}"
            raise FormatError(
                f"{self.place(piece, number)} is not JSON: {reason}", hint=hint, path=piece.path
            ) from error
        if not isinstance(row, dict):
            raise FormatError(
                f"{self.place(piece, number)} must be a JSON object with the columns as keys, but is a "
                f"{type(row).__name__}",
                hint=hint,
                path=piece.path,
            )
        return row


def _runs(whole: Piece, most: int) -> Iterator[Piece]:
    if row_source.is_gzip(whole.path) or whole.size <= most:
        yield whole
        return
    for start in range(0, whole.size, most):
        stop = min(start + most, whole.size)
        yield Piece(whole.path, stop - start, start, stop, of_lines=True)


def _lines(file: Any, piece: Piece) -> Iterator[bytes]:
    """The lines whose first byte is in [start, stop)."""
    position = row_source.first_line(file, piece.start)
    for line in file:
        if piece.stop is not None and position >= piece.stop:
            return
        yield line
        position += len(line)


def _found(name: str, value: object) -> Found:
    try:
        return Found(infer_columns({name: value})[name], type(value).__name__)
    except ConfigError:
        return Found(None, "null" if value is None else f"a {type(value).__name__}")


class _RepeatedKeyError(ValueError):
    """An object has a key twice."""


def parse_json(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        RepeatedKeyError: An object in it, at any depth, has a key twice.
        ValueError: It is not JSON.
        EncodingError: A number in it would lose digits; it is a ValueError too.
        RecursionError: It is too deep.
    """
    return json.loads(text, object_pairs_hook=_object, parse_float=parse_exact_float)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RepeatedKeyError(f"the key {twice!r} is there twice; keep one of them")
    return made
