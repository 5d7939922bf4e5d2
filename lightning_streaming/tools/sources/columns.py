"""Which columns are written, in which encodings; and rows to samples."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats.encodings import encoding as find_encoding
from lightning_streaming.tools.sources.source import Found, Part, Schema, Source

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """The columns of the dataset."""

    encodings: Mapping[str, str]
    """Encoding by name of the column."""
    exact: bool
    """Whether a row that has another column beside them is an error, because nobody said to leave it out."""
    command: str = ""
    """The command that was given, without columns; a way out is told as this command with other ones."""


def parse_columns(options: Sequence[str], known: Container[str] = ()) -> dict[str, str | None]:
    """Columns as a user writes them: ``NAME:ENCODING``, or ``NAME`` for the encoding that follows from the data.

    Args:
        options: What was written.
        known: Columns that there are: names of these may hold colons.

    Raises:
        ConfigError: A name is empty, or there twice.
    """
    columns: dict[str, str | None] = {}
    for option in options:
        words = option.split(":")
        names = [":".join(words[:count]) for count in range(len(words), 0, -1)]
        name = next((one for one in names if one in known), words[0])
        encoding = option[len(name) + 1 :]
        if not name or name in columns:
            raise ConfigError(
                f"--columns must be NAME:ENCODING or NAME, for another column each time, but got {option!r}"
            )
        columns[name] = encoding or None
    return columns


def as_options(columns: Mapping[str, str | None]) -> str:
    """Columns as a user would write them in a shell; None for the encoding that follows from the data."""
    written = [f"{name}:{encoding}" if encoding else name for name, encoding in columns.items()]
    return " ".join(f"--columns{'=' if one.startswith('-') else ' '}{shlex.quote(one)}" for one in written)


def rerun(command: str, columns: Mapping[str, str | None]) -> str:
    """What to type to convert with these columns."""
    return f"run: {command} {as_options(columns)}" if command else f"write {as_options(columns)}"


def choose_columns(schema: Schema, asked: Mapping[str, str | None], command: str = "") -> ColumnPlan:
    """Decide on the encodings.

    Args:
        schema: What the source found out.
        asked: The columns that the user wants; none for all there are.
        command: What was typed, without columns.

    Raises:
        ConfigError: The source has no such column, or no encoding follows for one.
    """
    _check_one_at_a_time(schema, asked, command)
    unknown = [name for name in asked if name not in schema.columns]
    if unknown:
        raise ConfigError(
            f"there is no column {unknown[0]!r}; {schema.told_by} has the columns {', '.join(schema.columns)}"
        )
    wanted = {name: asked.get(name) or schema.columns[name].encoding for name in asked or schema.columns}
    open_ones = [name for name, encoding in wanted.items() if encoding is None]
    if open_ones:
        held = ", ".join(f"{name!r}, which holds {schema.columns[name].what}" for name in open_ones)
        named = {name: asked.get(name) or (None if wanted[name] else _likely(schema.columns[name])) for name in wanted}
        raise ConfigError(
            f"no encoding follows for the {'column' if len(open_ones) == 1 else 'columns'} {held} ({schema.told_by}); "
            f"for example, {rerun(command, named)}"
        )
    return ColumnPlan({name: encoding for name, encoding in wanted.items() if encoding}, not asked, command)


def _likely(found: Found) -> str:
    """The encoding to try for a column that none follows for."""
    return "str" if found.what.startswith(("date", "time")) else "json"


def _check_one_at_a_time(schema: Schema, asked: Mapping[str, str | None], command: str) -> None:
    """Refuse several columns in one option; a column's own name may have commas, and a shape has them too."""
    for name, encoding in asked.items():
        inside = encoding or "" if name in schema.columns else f"{name}:{encoding}" if encoding else name
        first, *others = re.split(r",(?![0-9])", inside)
        if others:
            several = [f"{name}:{first}" if name in schema.columns else first, *others]
            told = rerun(command, parse_columns([one.strip() for one in several], schema.columns))
            raise ConfigError(f"--columns takes one column each time; {told}")


class SampleEncoder:
    """Rows to samples whose values are payloads already.

    Encoding happens here rather than in the writer because here a value that does not fit has a place to name.
    """

    def __init__(self, source: Source, plan: ColumnPlan) -> None:
        """Compile the columns.

        Raises:
            ConfigError: An encoding does not exist, or cannot hold what this source gives.
        """
        self._plan = plan
        self._widest = source.widest
        self._columns = [
            (name, source.converter(encoding), find_encoding(encoding).encode)
            for name, encoding in plan.encodings.items()
        ]

    def encode(self, row: Mapping[str, Any]) -> Sample:
        """Turn a row into a sample.

        Raises:
            EncodingError: A column is missing, there is one too many, or a value does not fit.
        """
        sample: Sample = {}
        for name, convert, encode in self._columns:
            if name not in row:
                raise EncodingError(f"the column {name!r} is missing, and there is {_list(row)}")
            try:
                value = convert(row[name])
                sample[name] = value if isinstance(value, bytes) else encode(value)
            except EncodingError as error:
                raise EncodingError(self._explain(name, row[name], error)) from error
        if self._plan.exact and len(row) != len(sample):
            extra = next(name for name in row if name not in sample)
            raise EncodingError(
                f"the column {extra!r} is not in the first row; to leave it out, "
                f"{rerun(self._plan.command, self._plan.encodings)}"
            )
        return sample

    def _explain(self, name: str, value: object, error: EncodingError) -> str:
        """The error, and what to type if the value is right."""
        encodings = self._plan.encodings
        is_fraction = isinstance(value, float) and encodings[name] == "int"
        wider = "float64" if is_fraction else "bytes" if isinstance(value, bytes) else self._widest
        text = f"the column {name!r} is {encodings[name]}: {error}"
        if wider == encodings[name]:
            return text
        return f"{text}; for another encoding, for example, {rerun(self._plan.command, {**encodings, name: wider})}"


def encoded_rows(source: Source, plan: ColumnPlan, part: Part) -> Iterator[Sample]:
    """The samples of a part.

    Raises:
        EncodingError: A row cannot be written; the message names file and place.
        FormatError: A file is damaged or not of the source's kind.
    """
    encode = SampleEncoder(source, plan).encode
    names = list(plan.encodings)
    for piece in part.pieces:
        for number, row in source.rows(piece, names):
            try:
                sample = encode(row)
            except EncodingError as error:
                raise EncodingError(f"{source.place(piece, number)}: {error}") from error
            yield sample


def _list(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "no other"
