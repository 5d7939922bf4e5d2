"""Rows to samples: the columns to write, their encodings, and conversion of values to these.

A value that does not fit is an error: nothing is cut, wrapped or parsed. Only a float may be rounded, to the width of
the chosen encoding, and never to infinity or zero.
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
from lightning_streaming.formats.images import BEGINNINGS, check_whole
from lightning_streaming.tools.console import is_image
from lightning_streaming.tools.converting.sources.row_source import InputPart, RowSource, Schema

Sample = dict[str, Any]
_Converter = Callable[[Any], Any]
_IMAGE_BEGINNINGS = {kind.lower(): beginning for kind, beginning in BEGINNINGS.items()}
"""The first bytes of an image file, by the encoding that stores it."""
_IMAGE_ENCODINGS = {"pil", *_IMAGE_BEGINNINGS}
_FLOAT64 = np.dtype("float64")
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """The columns of the dataset."""

    encodings: Mapping[str, str]
    """Encoding of each column, by name."""
    exact: bool
    """Whether a row with a further column is an error, because the user did not choose the columns."""
    command: str = ""
    """The typed command, without columns; hints show it with other ones."""

    def rerun(self, columns: Mapping[str, str | None]) -> str:
        """Return the command that converts with other columns; None for the encoding that follows from the data."""
        written = [f"{name}:{encoding}" if encoding else name for name, encoding in columns.items()]
        options = " ".join(f"--columns{'=' if text.startswith('-') else ' '}{shell_word(text)}" for text in written)
        return f"run: {self.command} {options}" if self.command else f"write {options}"


def parse_columns(options: Sequence[str], known: Container[str] = ()) -> dict[str, str | None]:
    """Parse columns of the command line: ``NAME:ENCODING``, or ``NAME`` for the encoding that follows from the data.

    Args:
        options: The values of the options.
        known: Columns of the source: their names may contain colons.

    Raises:
        ConfigError: A name is empty, or repeated.
    """
    columns: dict[str, str | None] = {}
    for option in options:
        words = option.split(":")
        prefixes = (":".join(words[:count]) for count in range(len(words), 0, -1))
        name = next((prefix for prefix in prefixes if prefix in known), words[0])
        encoding = option[len(name) + 1 :]
        if not name or name in columns:
            raise ConfigError(
                f"--columns must be NAME:ENCODING or NAME, for another column each time, but got {option!r}",
                option="--columns",
            )
        columns[name] = encoding or None
    return columns


def choose_columns(schema: Schema, requested: Mapping[str, str | None], command: str = "") -> ColumnPlan:
    """Return the columns to write with their encodings.

    Args:
        schema: The columns of the source.
        requested: The columns that the user requested; none for all.
        command: The typed command, without columns.

    Raises:
        ConfigError: The source has no such column, or no encoding follows for one.
    """
    plan = ColumnPlan({}, not requested, command)
    for name, encoding in requested.items():  # a name may contain commas, and so may a shape
        typed = encoding or "" if name in schema.columns else f"{name}:{encoding}" if encoding else name
        first, *others = re.split(r",(?![0-9])", typed)
        if others:
            several = [f"{name}:{first}" if name in schema.columns else first, *others]
            columns = parse_columns([text.strip() for text in several], schema.columns)
            raise ConfigError("--columns takes one column each time", hint=plan.rerun(columns), option="--columns")
    unknown = [name for name in requested if name not in schema.columns]
    if unknown:
        raise ConfigError(
            f"there is no column {unknown[0]!r}",
            hint=f"the columns of {schema.origin} are {', '.join(schema.columns)}",
            option="--columns",
        )
    wanted = {name: requested.get(name) or schema.columns[name].encoding for name in requested or schema.columns}
    undecided = [name for name, encoding in wanted.items() if encoding is None]
    if undecided:
        contents = ", ".join(f"{name!r}, which holds {schema.columns[name].description}" for name in undecided)
        likely = {
            name: "str" if schema.columns[name].description.startswith(("date", "time")) else "json"
            for name in undecided
        }
        suggested = {name: requested.get(name) or likely.get(name) for name in wanted}
        raise ConfigError(
            f"no encoding follows for the {'column' if len(undecided) == 1 else 'columns'} {contents} "
            f"({schema.origin})",
            hint=f"for example, {plan.rerun(suggested)}",
            option="--columns",
        )
    return ColumnPlan({name: encoding for name, encoding in wanted.items() if encoding}, not requested, command)


class SampleEncoder:
    """Converts rows to samples whose values are encoded.

    Encoding is done here and not in the writer, because here the position of a value that does not fit is known.
    """

    def __init__(self, source: RowSource, plan: ColumnPlan) -> None:
        """Prepare the columns.

        Raises:
            ConfigError: An encoding does not exist, or cannot hold values of this source.
        """
        self._plan = plan
        self._widest = source.widest
        self._columns = [
            (name, source.parser(encoding), _converter(encoding), find_encoding(encoding).encode)
            for name, encoding in plan.encodings.items()
        ]

    def encode(self, row: Mapping[str, Any]) -> Sample:
        """Return the sample of a row.

        Raises:
            EncodingError: A column is missing or unexpected, or a value does not fit.
        """
        sample: Sample = {}
        for name, parse, convert, encode in self._columns:
            if name not in row:
                present = ", ".join(map(repr, row)) or "no other"
                raise EncodingError(f"the column {name!r} is missing, and there is {present}")
            try:
                value = convert(row[name] if parse is None else parse(row[name]))
                sample[name] = value if isinstance(value, bytes) else encode(value)
            except EncodingError as error:
                raise self._with_hint(name, row[name], error) from error
        if self._plan.exact and len(row) != len(sample):
            extra = next(name for name in row if name not in sample)
            raise EncodingError(
                f"the column {extra!r} is not in the first row",
                hint=f"to leave it out, {self._plan.rerun(self._plan.encodings)}",
            )
        return sample

    def _with_hint(self, name: str, value: object, error: EncodingError) -> EncodingError:
        """Return the error with the column, and the command to run if the value is right."""
        encodings = self._plan.encodings
        is_fraction = isinstance(value, float) and encodings[name] == "int"
        wider = "float64" if is_fraction else "bytes" if isinstance(value, bytes) else self._widest
        others = {other: encoding for other, encoding in encodings.items() if other != name}
        hints = [] if error.hint is None else [error.hint]
        if encodings[name] in _IMAGE_ENCODINGS and not isinstance(value, bytes):  # no other encoding holds it
            hints += [f"to leave the column out, for example, {self._plan.rerun(others)}"] if others else []
        elif wider != encodings[name]:
            hints += [f"for another encoding, for example, {self._plan.rerun({**encodings, name: wider})}"]
        return EncodingError(
            f"the column {name!r} is {encodings[name]}: {error.args[0]}", hint="; ".join(hints) or None
        )


def encoded_rows(source: RowSource, plan: ColumnPlan, part: InputPart) -> Iterator[Sample]:
    """Yield the samples of a part.

    Raises:
        EncodingError: A row cannot be written; the message names file and position.
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


def _converter(encoding: str) -> _Converter:
    """Return the function that converts a value of JSON, Arrow or numpy to what an encoding takes.

    Integers become floats that hold them exactly, lists of numbers arrays, dates and times ``str`` (ISO 8601); JPEG and
    PNG files are stored unchanged as ``jpeg`` and ``png``. Other values must be of the encoding's own type.

    Raises:
        ConfigError: The encoding is unknown, or not supported for these values.
    """
    find_encoding(encoding)  # raises if it is unknown
    family, _, config = encoding.partition(":")
    if family == "ndarray":
        dtype = config.partition(":")[0]
        return partial(_array, dtype=np.dtype(dtype) if dtype else None)
    if encoding in _IMAGE_BEGINNINGS:
        return partial(_image_file, encoding=encoding)
    if encoding not in _CONVERTERS:
        raise ConfigError(
            f"convert does not write the encoding {encoding}",
            hint=f"choose one of {', '.join(sorted(_CONVERTERS))}, ndarray, {', '.join(_IMAGE_BEGINNINGS)}",
            option="--columns",
        )
    return _CONVERTERS[encoding]


def can_be_written(encoding: str) -> bool:
    """Return whether the encoding exists, and values of a source can have it."""
    try:
        _converter(encoding)
    except (ConfigError, MissingDependencyError):
        return False
    return True


def image_encoding(data: bytes | None) -> str:
    """Return ``jpeg`` or ``png`` by the first bytes of a file; ``bytes`` for other data."""
    for encoding, beginning in _IMAGE_BEGINNINGS.items():
        if data is not None and data.startswith(beginning):
            return encoding
    return "bytes"


def check_image_file(data: bytes) -> None:
    """Check that a JPEG or PNG file is complete.

    Raises:
        EncodingError: It is empty, truncated, or no JPEG or PNG file.
    """
    if not data:
        raise EncodingError("the file is empty", hint="remove it, or replace it by the image")
    check_whole(data)


def _expected(what: str, value: object) -> EncodingError:
    if value is None:
        return EncodingError(f"expected {what}, but there is no value")
    text = f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
    shown = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
    return EncodingError(f"expected {what}, but got {shown} ({type(value).__name__})")


def _integer(value: Any) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise _expected("an integer", value)


def _float(value: Any, dtype: np.dtype[Any] = _FLOAT64) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise _expected("a number", value)
    check_float(value, dtype)
    return float(value)


def _text(value: Any) -> Any:
    return value.isoformat() if isinstance(value, (date, time)) else _instance(value, str, "text")  # datetime is a date


def _instance(value: Any, kind: type, what: str) -> Any:
    if isinstance(value, kind):
        return value
    raise _expected(what, value)


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
    # Bytes would be stored unencoded, and would not be JSON.
    if isinstance(value, bytes):
        raise _expected("what JSON can represent", value)
    return value


def _image_file(value: Any, encoding: str) -> bytes:
    if not isinstance(value, bytes) or not value.startswith(_IMAGE_BEGINNINGS[encoding]):
        raise _expected(f"the bytes of a {encoding.upper()} file", value)
    check_whole(value)
    return value


def _pil_image(value: Any) -> Any:
    if is_image(value):
        return value
    raise _expected("an image that was opened", value)


def _array(value: Any, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise EncodingError(f"expected numbers in rows of one length: {error}") from None
    if array.dtype.kind not in "iuf":
        raise _expected("a list of numbers", value)
    if not isinstance(value, np.ndarray):
        _check_list(value, array.dtype)
    if dtype is None or dtype == array.dtype:
        return array
    if dtype.kind != "f" and array.size and array.dtype.kind == "f":
        raise EncodingError(f"expected {dtype} numbers, but got fractions ({array.dtype})")
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
    if array.size and _is_changed(converted, array):
        raise EncodingError(f"expected numbers that {dtype} can hold, but got {array.min()} to {array.max()}")
    return converted


def _check_list(value: Any, dtype: np.dtype[Any]) -> None:
    """Raise if numpy changed numbers of a list to make them of one type: bools, and integers among fractions."""
    if isinstance(value, (list, tuple)):
        types = set(map(type, value))
        if bool in types:
            raise _expected("a list of numbers", value)
        if types & {list, tuple} or (dtype.kind == "f" and types - {float}):
            for item in value:
                _check_list(item, dtype)
    elif isinstance(value, int):
        check_float(value, dtype)


def _is_changed(converted: NDArray[Any], array: NDArray[Any]) -> bool:
    """Return whether another dtype holds other numbers, beyond the rounding of fractions."""
    if converted.dtype.kind != "f":
        return not np.array_equal(converted, array)
    if array.dtype.kind == "f":
        overflows = np.isfinite(array) & ~np.isfinite(converted)
        return bool(overflows.any() or ((array != 0) & (converted == 0)).any())
    return not np.isfinite(converted).all() or converted.ravel().tolist() != array.ravel().tolist()


_CONVERTERS: dict[str, _Converter] = {
    "int": _integer,
    **{f"{kind}{width}": _integer for kind in ("int", "uint") for width in (8, 16, 32, 64)},
    **{f"float{width}": partial(_float, dtype=np.dtype(f"float{width}")) for width in (16, 32, 64)},
    "str": _text,
    "bytes": partial(_instance, kind=bytes, what="bytes"),
    "json": _json,
    "str_int": _integer,
    "str_float": _float,
    "str_decimal": _decimal,
    "pil": _pil_image,
}
