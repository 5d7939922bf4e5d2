"""One JSON object a line, plain or in gzip. Plain files are cut between lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError, EncodingError, FormatError
from lightning_streaming.tools.sources.files import find_files, is_gzip, open_bytes, whole_files
from lightning_streaming.tools.sources.source import Found, Piece, Schema
from lightning_streaming.tools.sources.strict_json import RepeatedKeyError, parse_json
from lightning_streaming.tools.sources.values import converter
from lightning_streaming.writing.columns import infer_columns

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz")
"""Of files in a folder; a file that is named alone may be called anything."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Rows of one or more files of JSON lines; blank lines are passed over."""

    paths: tuple[str, ...]
    widest: ClassVar[str] = "json"

    @classmethod
    def open(cls, location: str) -> JsonLines:
        """Find the files of a location."""
        return cls(find_files(location, SUFFIXES))

    def pieces(self, most: int) -> Sequence[Piece]:
        """Plain files in runs of bytes; a line belongs to the run that its first byte is in."""
        return [run for whole in whole_files(self.paths) for run in _runs(whole, most)]

    def schema(self) -> Schema:
        """The columns of the first row, by the types of its values."""
        for path in self.paths:
            for number, row in self.rows(Piece(path, 0), ()):
                told_by = self.place(Piece(path, 0), number)
                return Schema({name: _found(name, value) for name, value in row.items()}, told_by)
        raise FormatError(f"there is no row in {self.paths[0]}" + " and the files after it" * (len(self.paths) > 1))

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

    def converter(self, encoding: str) -> Callable[[Any], Any]:
        """Values are those of JSON."""
        return converter(encoding)

    def _parse(self, line: bytes, piece: Piece, number: int) -> dict[str, Any]:
        hint = "; a file that is one JSON array must be written as one object a line" * line.startswith(b"[")
        try:
            row = parse_json(line.removeprefix(_BYTE_ORDER_MARK).decode())
        except (RepeatedKeyError, EncodingError) as error:
            raise FormatError(f"{self.place(piece, number)}: {error}") from error
        except (ValueError, RecursionError) as error:
            # The error counts lines too, but within this one.
            reason = f"{error.msg} at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            raise FormatError(f"{self.place(piece, number)} is not JSON: {reason}{hint}") from error
        if not isinstance(row, dict):
            raise FormatError(
                f"{self.place(piece, number)} must be a JSON object with the columns as keys, but is a "
                f"{type(row).__name__}{hint}"
            )
        return row


def _runs(whole: Piece, most: int) -> Iterator[Piece]:
    if is_gzip(whole.path) or whole.size <= most:
        yield whole
        return
    for start in range(0, whole.size, most):
        stop = min(start + most, whole.size)
        yield Piece(whole.path, stop - start, start, stop, of_lines=True)


def _lines(file: Any, piece: Piece) -> Iterator[bytes]:
    """The lines whose first byte is in [start, stop)."""
    position = piece.start
    if piece.start:
        # From one byte before: it ends a line exactly if a line begins at start.
        file.seek(piece.start - 1)
        position += len(file.readline()) - 1
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
