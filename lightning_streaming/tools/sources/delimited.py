"""CSV and TSV with a header row, plain or in gzip. Cells are text; numbers are parsed where nothing is lost."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError, EncodingError, FormatError
from lightning_streaming.formats.exact import parse_exact_float
from lightning_streaming.tools.sources.files import find_files, open_bytes, whole_files
from lightning_streaming.tools.sources.source import Found, Piece, Schema
from lightning_streaming.tools.sources.strict_json import parse_json
from lightning_streaming.tools.sources.values import converter

SUFFIXES = {",": (".csv", ".csv.gz"), "\t": (".tsv", ".tsv.gz")}
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
class Delimited:
    """Rows of one or more files with the same columns. Cells may be quoted, and then hold line breaks."""

    paths: tuple[str, ...]
    separator: str
    """What separates cells."""
    widest: ClassVar[str] = "str"

    @classmethod
    def open_csv(cls, location: str) -> Delimited:
        """Find the files of a location, with commas between cells."""
        return cls(find_files(location, SUFFIXES[","]), ",")

    @classmethod
    def open_tsv(cls, location: str) -> Delimited:
        """Find the files of a location, with tabs between cells."""
        return cls(find_files(location, SUFFIXES["\t"]), "\t")

    def with_separator(self, separator: str) -> Delimited:
        """The same files, with another character between cells.

        Raises:
            ConfigError: It is not one character, or one that means something else.
        """
        if len(separator) != 1 or separator in '"\r\n':
            raise ConfigError(
                f"--separator must be one character, and neither a quote nor a line break, but got {separator!r}; in a "
                "shell a tab is written $'\\t'"
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
                f"{self.paths[0]} begins with a row of one cell, {header[0]!r}; give {named} if {found!r} is what "
                f"separates its cells, or --separator '{self.separator}' if it is not"
            )

    def pieces(self, most: int) -> Sequence[Piece]:  # noqa: ARG002
        """Whole files: a line break may be inside a cell, so they cannot be cut."""
        return whole_files(self.paths)

    def schema(self) -> Schema:
        """The header, and the cells of the first row: an integer, a number with a point, or text."""
        for path in self.paths:
            for number, row in self.rows(Piece(path, 0), ()):
                columns = {name: Found(_told(cell), "text") for name, cell in row.items()}
                return Schema(columns, self.place(Piece(path, 0), number))
        raise FormatError(f"there is no row in {self.paths[0]}" + " and the files after it" * (len(self.paths) > 1))

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
                        'cell or nothing at all; write "" for an empty cell, or remove the line'
                    )
                if len(cells) != len(header):
                    raise FormatError(
                        f"{self.place(piece, reader.line_num)} has {len(cells)} cells, but the header has {len(header)}"
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
                raise FormatError(f"{path}, line {reader.line_num} cannot be parsed: {error}") from error
            except UnicodeDecodeError as error:
                raise FormatError(f"{path}, line {reader.line_num + 1} or later is not UTF-8: {error}") from error

    def place(self, piece: Piece, number: int) -> str:
        """The line in which the row ends, counted from 1."""
        return f"{piece.path}, line {number}"

    def converter(self, encoding: str) -> Callable[[Any], Any]:
        """Cells are parsed as the encoding calls for; ``json`` and ``ndarray`` from JSON in the cell."""
        convert = converter(encoding)
        family = encoding.partition(":")[0]
        if family == "str":
            return convert
        parse = next((parse for names, parse in _PARSERS if family.rstrip("0123456789") in names), None)
        if parse is None:
            raise ConfigError(f"a cell of text cannot become {encoding}; use str, numbers, json or ndarray")
        return partial(_parse_and_convert, parse, convert)


def _parse_and_convert(parse: Callable[[str], Any], convert: Callable[[Any], Any], cell: str) -> Any:
    return convert(parse(cell))


def _header(cells: list[str], path: str) -> list[str]:
    if not cells or len(set(cells)) != len(cells) or not all(cells):
        raise FormatError(f"{path} must begin with a row of different names, but begins with {cells}")
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


def _same(cell: str) -> str:
    return cell


_PARSERS: tuple[tuple[tuple[str, ...], Callable[[str], Any]], ...] = (
    (("int", "uint", "str_int"), _integer),
    (("float", "str_float"), _float),
    (("str_decimal",), _same),
    (("json", "ndarray"), _json),
)
"""Families of encodings, without their widths, and how their cells are parsed."""
