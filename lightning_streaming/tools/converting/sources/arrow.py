"""Parquet files, and Hugging Face datasets saved to disk, which are Arrow files with a file that lists them.

``save_to_disk`` writes what selecting, shuffling and mapping made of the data, so the files hold the rows as the
dataset gives them, and pyarrow alone reads them.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError, FormatError, MissingDependencyError, StreamingError
from lightning_streaming.tools.converting.sources.row_encoding import image_encoding
from lightning_streaming.tools.converting.sources.row_source import (
    Found,
    Piece,
    RowSource,
    Schema,
    find_files,
    put_together,
)

_BATCH_ROWS = 256
"""Rows decoded at a time; large enough to be fast, small enough for rows that are images."""
_TEXTS = ("string", "large_string", "string_view")
_BINARIES = ("binary", "large_binary", "fixed_size_binary", "binary_view")
_LISTS = ("list", "large_list", "fixed_size_list")
_ENCODINGS = {
    "str_decimal": ("decimal",),
    "str": _TEXTS,
    "bytes": _BINARIES,
    "json": ("boolean", "nested"),
}
"""What follows for types that are no numbers and no lists of them, by their names in ``pyarrow.types``."""


def _require_pyarrow() -> Any:
    """The pyarrow package.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise MissingDependencyError(
            "reading Parquet and Arrow files needs the pyarrow package",
            hint="run: pip install 'lightning-streaming[parquet]'",
        ) from None
    return pyarrow


@contextmanager
def _reading(path: str, what: str) -> Iterator[Any]:
    """A block that reads a file with pyarrow, which it gives.

    Raises:
        FormatError: The file cannot be read; the message names it and says ``what`` it should be.
        MissingDependencyError: pyarrow is not installed.
    """
    pa = _require_pyarrow()
    try:
        yield pa
    except StreamingError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, TypeError) as error:  # of values too
        raise FormatError(f"{path} cannot be read as {what}: {error}", path=path) from error


def _tell_schema(schema: Any, rows: Iterator[tuple[int, Mapping[str, Any]]], told_by: str) -> Schema:
    """The encodings that follow from the schema of a file; those of images, from the first of its rows too.

    Raises:
        FormatError: Two columns have one name.
    """
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise FormatError(f"{told_by} has several columns of the name {twice[0]!r}", hint="give each its own")
    _, first = next(rows, (0, {}))
    return Schema({field.name: _found(field.type, first.get(field.name)) for field in schema}, told_by)


def _batch_rows(batch: Any, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a record batch.

    Args:
        batch: A pyarrow RecordBatch.
        names: The columns to give.
    """
    columns = [_values(batch.column(name)) for name in names]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _check_same_columns(found: Any, expected: Any, path: str, first: str) -> None:
    """Check that a file has the columns of the first one.

    Raises:
        FormatError: It has not; the message names them.
    """
    here, there = ({field.name: str(field.type) for field in schema} for schema in (found, expected))
    differ = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    if differ:
        name = differ[0]
        raise FormatError(
            f"the column {name!r} is {here.get(name, 'missing')} in {path}, but {there.get(name, 'missing')} in "
            f"{first}",
            path=path,
        )


def _found(kind: Any, first: Any) -> Found:
    pa = _require_pyarrow()
    if isinstance(kind, pa.BaseExtensionType):
        return _found(kind.storage_type, first)
    if _is(kind, "dictionary"):
        return _found(kind.value_type, first)
    if _is_image(kind):
        return Found(image_encoding(first), "images")
    if _is(kind, *_LISTS) and (number := _number_encoding(kind.value_type)):
        has_size = _is(kind, "fixed_size_list") and kind.list_size
        return Found(f"ndarray:{number}" + (f":{kind.list_size}" if has_size else ""), str(kind))
    encoding = _number_encoding(kind) or next((name for name, kinds in _ENCODINGS.items() if _is(kind, *kinds)), None)
    return Found(encoding, str(kind))


def _number_encoding(kind: Any) -> str | None:
    if _is(kind, "integer"):
        return str(kind)
    return f"float{kind.bit_width}" if _is(kind, "floating") else None


def _is(kind: Any, *names: str) -> bool:
    """Whether a type is one of those that ``pyarrow.types`` calls so."""
    types = _require_pyarrow().types
    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _is_image(kind: Any) -> bool:
    """Whether it is how Hugging Face datasets stores an image or a sound: the file's bytes, or its path."""
    if not _is(kind, "struct") or {field.name for field in kind} != {"bytes", "path"}:
        return False
    return _is(kind.field("bytes").type, *_BINARIES) and _is(kind.field("path").type, *_TEXTS)


def _values(column: Any) -> list[Any]:
    pa = _require_pyarrow()
    if isinstance(column.type, pa.BaseExtensionType):
        return _values(column.storage)
    if _is(column.type, "dictionary"):
        return _values(column.dictionary_decode())
    if _is_image(column.type):
        return [value and _file_bytes(value) for value in column.to_pylist()]
    if _is(column.type, *_LISTS) and _number_encoding(column.type.value_type):
        return _arrays(column)
    values: list[Any] = column.to_pylist()
    return values


def _arrays(column: Any) -> list[Any]:
    """Lists of numbers as numpy arrays, which share the memory of the batch."""
    values: list[Any] = [scalar.values for scalar in column]
    # A null among the numbers would become NaN, and integers floats: as lists they are refused later.
    return [
        value if value is None else value.to_pylist() if value.null_count else value.to_numpy(zero_copy_only=False)
        for value in values
    ]


def _file_bytes(value: Mapping[str, Any]) -> Any:
    if value["bytes"] is not None:
        return value["bytes"]
    try:
        return Path(value["path"] or "").read_bytes()
    except OSError as error:
        raise FormatError(f"a row names a file instead of holding its bytes: {error}") from error


PARQUET_SUFFIXES = (".parquet", ".pq")
STATE_BASENAME = "state.json"
"""In the folder of a dataset: lists its files."""
SPLITS_BASENAME = "dataset_dict.json"
"""In a folder of datasets by split: lists them."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True, slots=True)
class _ArrowRows(RowSource):
    """Rows of files with the same columns; each is counted within its file from 1."""

    @abstractmethod
    def _opened(self, path: str) -> AbstractContextManager[tuple[Any, Any]]:
        """A block that reads a file: the file, and its schema."""

    @abstractmethod
    def _batches(self, file: Any, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """The record batches of a piece, each with the number of rows before it in the file."""

    def schema(self) -> Schema:
        """The types of the first file."""
        path = self.paths[0]
        with self._opened(path) as (_, schema):
            pass
        return _tell_schema(schema, self.rows(Piece(path, 0), schema.names), path)

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Numbers count the rows of the file from 1."""
        with self._opened(self.paths[0]) as (_, expected), self._opened(piece.path) as (file, schema):
            _check_same_columns(schema, expected, piece.path, self.paths[0])
            for before, batch in self._batches(file, piece, names):
                yield from enumerate(_batch_rows(batch, names), before + 1)


@dataclass(frozen=True, slots=True)
class Parquet(_ArrowRows):
    """Rows of Parquet files, in pieces of whole row groups."""

    @classmethod
    def open(cls, location: str) -> Parquet:
        """Find the files of a location.

        Raises:
            ConfigError: There are none, or some columns are in the names of folders only.
            MissingDependencyError: pyarrow is not installed.
        """
        _require_pyarrow()
        paths = find_files(location, PARQUET_SUFFIXES)
        partitioned = [path for path in paths if "=" in Path(path).parent.name]
        if partitioned and Path(location).is_dir():
            raise ConfigError(
                f"{partitioned[0]} is in a folder that stands for a column, which would be lost",
                hint="convert each such folder alone, or write the files with the column in them",
                path=partitioned[0],
            )
        return cls(paths)

    def pieces(self, most: int) -> Sequence[Piece]:
        """Runs of row groups."""
        return [piece for path in self.paths for piece in self._runs(path, most)]

    def _runs(self, path: str, most: int) -> Iterator[Piece]:
        with self._opened(path) as (file, _):
            sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]
        groups = [Piece(path, size, group, group + 1) for group, size in enumerate(sizes)]
        for run in put_together(groups, most):
            yield Piece(path, sum(one.size for one in run), run[0].start, run[-1].stop)

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[Any, Any]]:
        with _reading(path, "Parquet"):
            from pyarrow import parquet

            # Pages have checksums where their writer gave them; a page without is taken as it is.
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                yield file, file.schema_arrow

    def _batches(self, file: Any, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
        groups = range(piece.start, file.metadata.num_row_groups if piece.stop is None else piece.stop)
        before = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=list(names)):
            yield before, batch
            before += batch.num_rows


@dataclass(frozen=True, slots=True)
class HuggingFace(_ArrowRows):
    """The rows of one dataset, in pieces of whole files; ``datasets`` writes them with up to 500 MB each."""

    @classmethod
    def open(cls, location: str) -> HuggingFace:
        """Find the files of a dataset.

        Raises:
            ConfigError: The folder is not that of one dataset.
            FormatError: The file that lists the others is damaged, or one of the others is missing.
            MissingDependencyError: pyarrow is not installed.
        """
        _require_pyarrow()
        folder = Path(location)
        if (folder / SPLITS_BASENAME).is_file():
            splits = _load(folder / SPLITS_BASENAME, "splits")
            raise ConfigError(
                f"{location} holds the splits {', '.join(map(str, splits))}",
                hint=f"convert one at a time, for example {folder / str(splits[0])}",
                option="SOURCE",
                path=location,
            )
        if not (folder / STATE_BASENAME).is_file():
            raise ConfigError(
                f"{location} must be a folder written by save_to_disk, but has no {STATE_BASENAME}",
                option="SOURCE",
                path=location,
            )
        return cls(tuple(_data_files(folder)))

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[Any, Any]]:
        with _reading(path, "an Arrow stream") as pa, pa.memory_map(path) as file, pa.ipc.open_stream(file) as reader:
            yield reader, reader.schema

    def _batches(self, file: Any, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Any]]:  # noqa: ARG002
        before = 0
        for batch in file:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield before + start, batch.slice(start, _BATCH_ROWS)
            before += batch.num_rows
        _check_end(piece.path)


def _data_files(folder: Path) -> Iterator[str]:
    """The files that the folder's own list names, which must be there."""
    for file in _load(folder / STATE_BASENAME, "_data_files"):
        name = file.get("filename") if isinstance(file, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise FormatError(
                f"{folder / STATE_BASENAME} must list names of files, but lists {file!r:.100}",
                path=str(folder / STATE_BASENAME),
            )
        if not (folder / name).is_file():
            raise FormatError(
                f"{folder / STATE_BASENAME} lists {name}, which is not there",
                hint="put that file back, or save the dataset again",
                path=str(folder / STATE_BASENAME),
            )
        yield str(folder / name)


def _load(path: Path, key: str) -> list[Any]:
    try:
        found = json.loads(path.read_bytes())[key]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} must be a JSON object with {key}: {error}", path=str(path)) from error
    if not isinstance(found, list) or not found:
        raise FormatError(f"{path} lists nothing under {key}", path=str(path))
    return found


def _check_end(path: str) -> None:
    """Refuse a stream that was cut off between two batches, which pyarrow takes for its end."""
    with Path(path).open("rb") as file:
        file.seek(-min(len(_END_OF_STREAM), file.seek(0, os.SEEK_END)), os.SEEK_END)
        if file.read() != _END_OF_STREAM:
            raise FormatError(
                f"{path} was cut off: it has no mark of its end", hint="save the dataset again", path=path
            )
