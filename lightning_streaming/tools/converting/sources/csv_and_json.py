"""CSV, TSV and JSON lines, plain or in gzip, read without silent losses.

Cells of CSV are text, and numbers are parsed if nothing is lost. JSON parsers keep the last of several values of one
key, make infinity of a number that is too large, and drop digits that a float cannot hold; here these are errors.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError, EncodingError, FormatError
from lightning_streaming.formats.encodings import parse_exact_float
from lightning_streaming.tools.converting.sources import row_source
from lightning_streaming.tools.converting.sources.row_source import (
    Piece,
    RowSource,
    Schema,
    SourceColumn,
    find_files,
    open_bytes,
)
from lightning_streaming.writing.shards import infer_columns

DELIMITED_SUFFIXES = {",": (".csv", ".csv.gz"), "\t": (".tsv", ".tsv.gz")}
"""Suffixes of files in a folder, by separator."""
JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz")
"""Suffixes of files in a folder; a file that is named itself may have any."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_SEPARATORS = ";\t|,"
"""Separators of files that are called CSV too."""
_MAX_INT64_LENGTH = len(str(-(2**63)))
# With a leading zero it may be a code, like a postal code, whose zeros a number would lose.
_INTEGER = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)
_FRACTION = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+([eE][-+]?[0-9]+)?", re.ASCII)
_FLOAT = re.compile(
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?inf|nan", re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Delimited(RowSource):
    """Rows of one or more files with the same columns. Cells may be quoted, and then contain line breaks.

    Files are read whole: a line break may be inside a cell, so they cannot be divided.
    """

    separator: str
    """Character between cells."""
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
        """Return the same files with another separator.

        Raises:
            ConfigError: It is not one character, or one with another meaning.
        """
        if len(separator) != 1 or separator in '"\r\n':
            raise ConfigError(
                f"--separator must be one character, and neither a quote nor a line break, but got {separator!r}",
                hint="in a shell a tab is written $'\\t'",
                option="--separator",
            )
        return replace(self, separator=separator)

    def check_separator(self) -> None:
        """Check that a header of one cell does not consist of several, with another separator.

        Raises:
            FormatError: It seems so.
        """
        with self._cells(self.paths[0]) as cells:
            header: list[str] = next(cells, [])
        other = next((char for char in _OTHER_SEPARATORS if len(header) == 1 and char in header[0]), None)
        if other is not None:
            option = {"\t": "--from tsv"}.get(other, f"--separator '{other}'")
            raise FormatError(
                f"{self.paths[0]} begins with a row of one cell, {header[0]!r}",
                hint=f"give {option} if {other!r} separates its cells, else --separator '{self.separator}'",
                option="--separator",
                path=self.paths[0],
            )

    def schema(self) -> Schema:
        """Return the columns of the header; the cells of the first row are integers, numbers with a point, or text."""
        origin, row = self.first_row()
        return Schema({name: SourceColumn(_cell_encoding(cell), "text") for name, cell in row.items()}, origin)

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """Yield rows with the number of their last line, from 1."""
        with self._cells(piece.path) as reader:
            header: list[str] = next(reader, [])
            if not header or len(set(header)) != len(header) or not all(header):
                raise FormatError(
                    f"{piece.path} must begin with a row of different names, but begins with {header}", path=piece.path
                )
            for cells in reader:
                if not cells and len(header) > 1:  # an empty line
                    continue
                if len(cells) != len(header):
                    why, hint = f"has {len(cells)} cells, but the header has {len(header)}", None
                    if not cells:
                        why = "is blank, which in a file of one column may be an empty cell or nothing at all"
                        hint = 'write "" for an empty cell, or remove the line'
                    raise FormatError(f"{self.place(piece, reader.line_num)} {why}", hint=hint, path=piece.path)
                yield reader.line_num, dict(zip(header, cells, strict=True))

    @contextmanager
    def _cells(self, path: str) -> Iterator[Any]:
        """Open a reader of the cells of each row, whose errors name the line."""
        # The module's own limit for the whole process is 128 KiB per cell; documents are longer.
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
        """Return the last line of a row, from 1."""
        return f"{piece.path}, line {number}"

    def parser(self, encoding: str) -> Callable[[str], Any] | None:
        """Return the parser of cells for an encoding; ``json`` and ``ndarray`` are parsed from JSON in the cell."""
        family = encoding.partition(":")[0].rstrip("0123456789")
        if family not in _PARSERS:
            raise ConfigError(
                f"a cell of text cannot become {encoding}", hint="use str, numbers, json or ndarray", option="--columns"
            )
        return _PARSERS[family]


def _cell_encoding(cell: str) -> str:
    if len(cell) <= _MAX_INT64_LENGTH and _INTEGER.fullmatch(cell) and -(2**63) <= int(cell) < 2**63:
        return "int"
    if not _FRACTION.fullmatch(cell):
        return "str"
    try:
        parse_exact_float(cell)
    except EncodingError:
        return "str"
    return "float64"


def _integer(cell: str) -> int:
    if not _INTEGER.fullmatch(cell.strip()):
        raise EncodingError(f"expected an integer without leading zeros, but got {cell[:60]!r}")
    try:
        return int(cell)
    except ValueError:  # Python parses some thousand digits at most
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
"""Parsers of cells by family of encodings, without widths; None for text."""


@dataclass(frozen=True, slots=True)
class JsonLines(RowSource):
    """Rows of one or more files of JSON lines; blank lines are skipped."""

    @classmethod
    def open(cls, location: str) -> JsonLines:
        """Find the files of a location."""
        return cls(find_files(location, JSON_SUFFIXES))

    def pieces(self, max_bytes: int) -> Sequence[Piece]:
        """Return plain files in ranges of bytes; a line belongs to the range of its first byte."""
        pieces = []
        for whole in row_source.whole_files(self.paths):
            if row_source.is_gzip(whole.path) or whole.size <= max_bytes:
                pieces.append(whole)
                continue
            for start in range(0, whole.size, max_bytes):
                stop = min(start + max_bytes, whole.size)
                pieces.append(Piece(whole.path, stop - start, start, stop, of_lines=True))
        return pieces

    def schema(self) -> Schema:
        """Return the columns of the first row, by the types of its values."""
        origin, row = self.first_row()
        return Schema({name: _json_column(name, value) for name, value in row.items()}, origin)

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # noqa: ARG002
        """Yield rows with the number of their line in the piece, from 0."""
        with open_bytes(piece.path) as file:
            position = row_source.seek_line(file, piece.start)
            for number, line in enumerate(file):
                if piece.stop is not None and position >= piece.stop:
                    return
                if line.strip():
                    yield number, self._parse(line, piece, number)
                position += len(line)

    def place(self, piece: Piece, number: int) -> str:
        """Return the line of a row, from 1. The file is read up to the piece for it, only in case of an error."""
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
        except (ValueError, RecursionError) as error:
            why = f" is not JSON: {error}"
            if isinstance(error, _RepeatedKeyError | EncodingError):
                why, hint = f": {error}", None
            elif isinstance(error, json.JSONDecodeError):  # it counts lines within this one; some messages end in "at"
                why = f" is not JSON: {error.msg.removesuffix(' at')} at column {error.pos + 1}"
            raise FormatError(f"{self.place(piece, number)}{why}", hint=hint, path=piece.path) from error
        if not isinstance(row, dict):
            why = f"must be a JSON object with the columns as keys, but is a {type(row).__name__}"
            raise FormatError(f"{self.place(piece, number)} {why}", hint=hint, path=piece.path)
        return row


def _json_column(name: str, value: object) -> SourceColumn:
    try:
        return SourceColumn(infer_columns({name: value})[name], type(value).__name__)
    except ConfigError:
        return SourceColumn(None, "null" if value is None else f"a {type(value).__name__}")


class _RepeatedKeyError(ValueError):
    """An object has a key twice."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        RepeatedKeyError: An object in it, at any depth, has a key twice.
        ValueError: It is not JSON.
        EncodingError: A number in it would lose digits; it is a ValueError too.
        RecursionError: It is too deep.
    """
    return json.loads(text, object_pairs_hook=_object, parse_float=parse_exact_float)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _RepeatedKeyError(f"the key {repeated!r} is there twice; keep one of them")
    return result
