"""Rows to samples: which columns are written, in which encodings, and their values as these take them.

A value that does not fit is an error: nothing is cut, wrapped or parsed. Only a float may be rounded, to the width of
the encoding that was chosen for it, and never to infinity or zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError
from lightning_streaming.escaping import shell_word
from lightning_streaming.formats.encodings import check_float
from lightning_streaming.formats.encodings import encoding as find_encoding
from lightning_streaming.formats.images.encodings import BEGINNINGS, check_whole
from lightning_streaming.tools.console import is_image
from lightning_streaming.tools.converting.sources.row_source import InputPart, RowSource, Schema

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
                f"--columns must be NAME:ENCODING or NAME, for another column each time, but got {option!r}",
                option="--columns",
            )
        columns[name] = encoding or None
    return columns


def _as_options(columns: Mapping[str, str | None]) -> str:
    """Columns as a user would write them in a shell; None for the encoding that follows from the data."""
    written = [f"{name}:{encoding}" if encoding else name for name, encoding in columns.items()]
    return " ".join(f"--columns{'=' if one.startswith('-') else ' '}{shell_word(one)}" for one in written)


def _rerun(command: str, columns: Mapping[str, str | None]) -> str:
    """What to type to convert with these columns."""
    return f"run: {command} {_as_options(columns)}" if command else f"write {_as_options(columns)}"


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
            f"there is no column {unknown[0]!r}",
            hint=f"the columns of {schema.told_by} are {', '.join(schema.columns)}",
            option="--columns",
        )
    wanted = {name: asked.get(name) or schema.columns[name].encoding for name in asked or schema.columns}
    open_ones = [name for name, encoding in wanted.items() if encoding is None]
    if open_ones:
        held = ", ".join(f"{name!r}, which holds {schema.columns[name].what}" for name in open_ones)
        likely = {
            name: "str" if schema.columns[name].what.startswith(("date", "time")) else "json" for name in open_ones
        }
        named = {name: asked.get(name) or likely.get(name) for name in wanted}
        raise ConfigError(
            f"no encoding follows for the {'column' if len(open_ones) == 1 else 'columns'} {held} ({schema.told_by})",
            hint=f"for example, {_rerun(command, named)}",
            option="--columns",
        )
    return ColumnPlan({name: encoding for name, encoding in wanted.items() if encoding}, not asked, command)


def _check_one_at_a_time(schema: Schema, asked: Mapping[str, str | None], command: str) -> None:
    """Refuse several columns in one option; a column's own name may have commas, and a shape has them too."""
    for name, encoding in asked.items():
        inside = encoding or "" if name in schema.columns else f"{name}:{encoding}" if encoding else name
        first, *others = re.split(r",(?![0-9])", inside)
        if others:
            several = [f"{name}:{first}" if name in schema.columns else first, *others]
            told = _rerun(command, parse_columns([one.strip() for one in several], schema.columns))
            raise ConfigError("--columns takes one column each time", hint=told, option="--columns")


class SampleEncoder:
    """Rows to samples whose values are payloads already.

    Encoding happens here rather than in the writer because here a value that does not fit has a place to name.
    """

    def __init__(self, source: RowSource, plan: ColumnPlan) -> None:
        """Compile the columns.

        Raises:
            ConfigError: An encoding does not exist, or cannot hold what this source gives.
        """
        self._plan = plan
        self._widest = source.widest
        self._columns = [
            (name, _parsed(_converter(encoding), source.parser(encoding)), find_encoding(encoding).encode)
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
                there = ", ".join(map(repr, row)) or "no other"
                raise EncodingError(f"the column {name!r} is missing, and there is {there}")
            try:
                value = convert(row[name])
                sample[name] = value if isinstance(value, bytes) else encode(value)
            except EncodingError as error:
                raise self._explained(name, row[name], error) from error
        if self._plan.exact and len(row) != len(sample):
            extra = next(name for name in row if name not in sample)
            raise EncodingError(
                f"the column {extra!r} is not in the first row",
                hint=f"to leave it out, {_rerun(self._plan.command, self._plan.encodings)}",
            )
        return sample

    def _explained(self, name: str, value: object, error: EncodingError) -> EncodingError:
        """Return the error with the column, and with what to type if the value is right."""
        encodings, command = self._plan.encodings, self._plan.command
        is_fraction = isinstance(value, float) and encodings[name] == "int"
        wider = "float64" if is_fraction else "bytes" if isinstance(value, bytes) else self._widest
        others = {one: encoding for one, encoding in encodings.items() if one != name}
        hints = [] if error.hint is None else [error.hint]
        if encodings[name] in _PICTURES and not isinstance(value, bytes):  # nothing else would hold it
            hints += [f"to leave the column out, for example, {_rerun(command, others)}"] if others else []
        elif wider != encodings[name]:
            hints += [f"for another encoding, for example, {_rerun(command, {**encodings, name: wider})}"]
        return EncodingError(
            f"the column {name!r} is {encodings[name]}: {error.args[0]}", hint="; ".join(hints) or None
        )


def encoded_rows(source: RowSource, plan: ColumnPlan, part: InputPart) -> Iterator[Sample]:
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
                raise error.with_context(source.place(piece, number), path=piece.path) from error
            yield sample


def _parsed(convert: _Converter, parse: _Converter | None) -> _Converter:
    return convert if parse is None else lambda value: convert(parse(value))


_IMAGE_BEGINNINGS = {kind.lower(): beginning for kind, beginning in BEGINNINGS.items()}
"""The first bytes of an image file, by the encoding that stores it."""
_PICTURES = {"pil", *_IMAGE_BEGINNINGS}

_FLOAT64 = np.dtype("float64")

_Converter = Callable[[Any], Any]


def _converter(encoding: str) -> _Converter:
    """A function from a value, as JSON, Arrow or numpy give it, to what an encoding takes.

    Integers go into floats that hold them exactly, lists of numbers into arrays, dates and times into ``str`` (ISO
    8601), files of JPEG and PNG as they are into ``jpeg`` and ``png``. Other values must be of the encoding's own type.

    Raises:
        ConfigError: There is no such encoding, or none of these values can have it.
    """
    find_encoding(encoding)  # raises for what does not exist
    family, _, config = encoding.partition(":")
    if family == "ndarray":
        dtype = config.partition(":")[0]
        return partial(_array, dtype=np.dtype(dtype) if dtype else None)
    if encoding in _IMAGE_BEGINNINGS:
        return partial(_image, encoding=encoding)
    if encoding not in _CONVERTERS:
        raise ConfigError(
            f"convert does not write the encoding {encoding}",
            hint=f"choose one of {', '.join(sorted(_CONVERTERS))}, ndarray, {', '.join(_IMAGE_BEGINNINGS)}",
            option="--columns",
        )
    return _CONVERTERS[encoding]


def image_encoding(data: bytes | None) -> str:
    """``jpeg`` or ``png`` by the first bytes of a file; ``bytes`` for anything else."""
    for encoding, beginning in _IMAGE_BEGINNINGS.items():
        if data is not None and data.startswith(beginning):
            return encoding
    return "bytes"


def check_image_file(data: bytes) -> None:
    """Refuse an empty file, and a JPEG or PNG file that was cut off.

    Raises:
        EncodingError: It is one of these, or no JPEG or PNG file.
    """
    if not data:
        raise EncodingError("the file is empty", hint="take it away, or put the image there")
    check_whole(data)


def _integer(value: Any) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise _expected("an integer", value)


def _float(value: Any, dtype: np.dtype[Any] = _FLOAT64) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise _expected("a number", value)
    check_float(value, dtype)
    return float(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (date, time)):  # datetime is a date
        return value.isoformat()
    raise _expected("text", value)


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    raise _expected("bytes", value)


def _decimal(value: Any) -> Decimal:
    if isinstance(value, (Decimal, int)) and not isinstance(value, bool):
        return Decimal(value)
    if isinstance(value, str):
        try:
            return Decimal(value)
        except InvalidOperation:
            pass
    raise _expected("a decimal number", value)


def _json(value: Any) -> Any:
    # Bytes are stored as they are, whatever the encoding, and would not be JSON.
    if isinstance(value, bytes):
        raise _expected("what JSON can say", value)
    return value


def _array(value: Any, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise EncodingError(f"expected numbers in rows of one length: {error}") from None
    if found.dtype.kind not in "iuf":
        raise _expected("a list of numbers", value)
    if not isinstance(value, np.ndarray):
        _check_list(value, found.dtype)
    if dtype is None or dtype == found.dtype:
        return found
    if dtype.kind != "f" and found.size and found.dtype.kind == "f":
        raise EncodingError(f"expected {dtype} numbers, but got fractions ({found.dtype})")
    with np.errstate(all="ignore"):
        made = found.astype(dtype)
    if found.size and _is_changed(made, found):
        raise EncodingError(f"expected numbers that {dtype} can hold, but got {found.min()} to {found.max()}")
    return made


def _check_list(value: Any, dtype: np.dtype[Any]) -> None:
    """Refuse what numpy changed to make numbers of one kind of a list: bools, and integers among fractions."""
    if isinstance(value, (list, tuple)):
        kinds = set(map(type, value))
        if bool in kinds:
            raise _expected("a list of numbers", value)
        if kinds & {list, tuple} or (dtype.kind == "f" and kinds - {float}):
            for one in value:
                _check_list(one, dtype)
    elif isinstance(value, int):
        check_float(value, dtype)


def _is_changed(made: NDArray[Any], found: NDArray[Any]) -> bool:
    """Whether another dtype holds other numbers, beyond the rounding of fractions."""
    if made.dtype.kind != "f":
        return not np.array_equal(made, found)
    if found.dtype.kind == "f":
        return bool((np.isfinite(found) & ~np.isfinite(made)).any() or ((found != 0) & (made == 0)).any())
    return not np.isfinite(made).all() or made.ravel().tolist() != found.ravel().tolist()


def _image(value: Any, encoding: str) -> bytes:
    if not isinstance(value, bytes) or not value.startswith(_IMAGE_BEGINNINGS[encoding]):
        raise _expected(f"the bytes of a {encoding.upper()} file", value)
    check_whole(value)
    return value


def _picture(value: Any) -> Any:
    if is_image(value):
        return value
    raise _expected("an image that was opened", value)


def can_be_written(encoding: str) -> bool:
    """Whether there is such an encoding, and values of a source can have it."""
    try:
        _converter(encoding)
    except (ConfigError, MissingDependencyError):
        return False
    return True


def _expected(what: str, value: object) -> EncodingError:
    if value is None:
        return EncodingError(f"expected {what}, but there is no value")
    text = f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return EncodingError(f"expected {what}, but got {shown} ({type(value).__name__})")


_CONVERTERS: dict[str, _Converter] = {
    "int": _integer,
    **{f"{kind}{width}": _integer for kind in ("int", "uint") for width in (8, 16, 32, 64)},
    **{f"float{width}": partial(_float, dtype=np.dtype(f"float{width}")) for width in (16, 32, 64)},
    "str": _text,
    "bytes": _bytes,
    "json": _json,
    "str_int": _integer,
    "str_float": _float,
    "str_decimal": _decimal,
    "pil": _picture,
}
