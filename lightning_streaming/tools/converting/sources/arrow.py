"""Parquet files, and Hugging Face datasets saved to disk, which are Arrow files with a file that lists them.

``save_to_disk`` writes the rows after selecting, shuffling and mapping, so the files hold the rows of the dataset, and
pyarrow alone reads them.
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
    Piece,
    RowSource,
    Schema,
    SourceColumn,
    find_files,
    group_pieces,
)

PARQUET_SUFFIXES = (".parquet", ".pq")
STATE_BASENAME = "state.json"
"""The file of a dataset's folder that lists its data files."""
SPLITS_BASENAME = "dataset_dict.json"
"""The file of a folder of datasets by split that lists these."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_BATCH_ROWS = 256
"""Rows decoded at a time; large enough to be fast, small enough for rows that are images."""
_TEXTS = ("string", "large_string", "string_view")
_BINARIES = ("binary", "large_binary", "fixed_size_binary", "binary_view")
_LISTS = ("list", "large_list", "fixed_size_list")
_ENCODINGS = {"str_decimal": ("decimal",), "str": _TEXTS, "bytes": _BINARIES, "json": ("boolean", "nested")}
"""Encodings of types that are neither numbers nor lists of them, by their names in ``pyarrow.types``."""


def _require_pyarrow() -> Any:
    """Return the pyarrow package.

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
    """Convert the errors of a block that reads a file with pyarrow, which it yields.

    Raises:
        FormatError: The file cannot be read; the message names it and ``what`` it should be.
        MissingDependencyError: pyarrow is not installed.
    """
    pa = _require_pyarrow()
    try:
        yield pa
    except StreamingError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, TypeError) as error:  # also of values
        raise FormatError(f"{path} cannot be read as {what}: {error}", path=path) from error


def _is(kind: Any, *names: str) -> bool:
    """Return whether a type is one of these of ``pyarrow.types``."""
    types = _require_pyarrow().types
    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _is_image(kind: Any) -> bool:
    """Return whether a type is that of images and audio in Hugging Face datasets: the file's bytes, or its path."""
    if not _is(kind, "struct") or {field.name for field in kind} != {"bytes", "path"}:
        return False
    return _is(kind.field("bytes").type, *_BINARIES) and _is(kind.field("path").type, *_TEXTS)


def _number_encoding(kind: Any) -> str | None:
    if _is(kind, "integer"):
        return str(kind)
    return f"float{kind.bit_width}" if _is(kind, "floating") else None


def _column_of(kind: Any, first: Any) -> SourceColumn:
    """Return a column from its type and its first value."""
    if isinstance(kind, _require_pyarrow().BaseExtensionType):
        return _column_of(kind.storage_type, first)
    if _is(kind, "dictionary"):
        return _column_of(kind.value_type, first)
    if _is_image(kind):
        return SourceColumn(image_encoding(first), "images")
    if _is(kind, *_LISTS) and (number := _number_encoding(kind.value_type)):
        has_size = _is(kind, "fixed_size_list") and kind.list_size
        return SourceColumn(f"ndarray:{number}" + (f":{kind.list_size}" if has_size else ""), str(kind))
    encoding = _number_encoding(kind) or next((name for name, kinds in _ENCODINGS.items() if _is(kind, *kinds)), None)
    return SourceColumn(encoding, str(kind))


def _values(column: Any) -> list[Any]:
    """Return the values of a column of a record batch; lists of numbers as arrays that share its memory."""
    if isinstance(column.type, _require_pyarrow().BaseExtensionType):
        return _values(column.storage)
    if _is(column.type, "dictionary"):
        return _values(column.dictionary_decode())
    if _is_image(column.type):
        images = column.to_pylist()
        try:
            return [
                value and (Path(value["path"] or "").read_bytes() if value["bytes"] is None else value["bytes"])
                for value in images
            ]
        except OSError as error:
            raise FormatError(f"a row names a file instead of holding its bytes: {error}") from error
    if _is(column.type, *_LISTS) and _number_encoding(column.type.value_type):
        # A null among the numbers would become NaN, and integers floats: as lists they are refused later.
        return [
            value if value is None else value.to_pylist() if value.null_count else value.to_numpy(zero_copy_only=False)
            for value in (scalar.values for scalar in column)
        ]
    values: list[Any] = column.to_pylist()
    return values


@dataclass(frozen=True, slots=True)
class _ArrowRows(RowSource):
    """Rows of files with the same columns; rows of a file are numbered from 1."""

    @abstractmethod
    def _open_file(self, path: str) -> AbstractContextManager[tuple[Any, Any]]:
        """Open a file; yields a reader and the schema."""

    @abstractmethod
    def _batches(self, file: Any, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the record batches of a piece, each with the number of rows before it in the file."""

    def schema(self) -> Schema:
        """Return the columns by the types of the first file; those of images by the first row too.

        Raises:
            FormatError: Two columns have one name.
        """
        path = self.paths[0]
        with self._open_file(path) as (_, schema):
            pass
        repeated = [name for name in schema.names if schema.names.count(name) > 1]
        if repeated:
            raise FormatError(f"{path} has several columns of the name {repeated[0]!r}", hint="give each its own")
        _, first = next(self.rows(Piece(path, 0), schema.names), (0, {}))
        return Schema({field.name: _column_of(field.type, first.get(field.name)) for field in schema}, path)

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield rows, numbered within the file from 1.

        Raises:
            FormatError: The file has other columns than the first one.
        """
        with self._open_file(self.paths[0]) as (_, expected), self._open_file(piece.path) as (file, schema):
            actual, first = ({field.name: str(field.type) for field in fields} for fields in (schema, expected))
            for name in {**first, **actual}:
                if actual.get(name) != first.get(name):
                    raise FormatError(
                        f"the column {name!r} is {actual.get(name, 'missing')} in {piece.path}, but "
                        f"{first.get(name, 'missing')} in {self.paths[0]}",
                        path=piece.path,
                    )
            for before, batch in self._batches(file, piece, names):
                columns = [_values(batch.column(name)) for name in names]
                rows = (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
                yield from enumerate(rows, before + 1)


@dataclass(frozen=True, slots=True)
class Parquet(_ArrowRows):
    """Rows of Parquet files, in pieces of whole row groups."""

    @classmethod
    def open(cls, location: str) -> Parquet:
        """Find the files of a location.

        Raises:
            ConfigError: There are none, or names of folders stand for columns.
            MissingDependencyError: pyarrow is not installed.
        """
        _require_pyarrow()
        paths = find_files(location, PARQUET_SUFFIXES)
        partitioned = next((path for path in paths if "=" in Path(path).parent.name), None)
        if partitioned is not None and Path(location).is_dir():
            raise ConfigError(
                f"{partitioned} is in a folder that stands for a column, which would be lost",
                hint="convert each such folder alone, or write the files with the column in them",
                path=partitioned,
            )
        return cls(paths)

    def pieces(self, max_bytes: int) -> Sequence[Piece]:
        """Return ranges of row groups."""
        pieces = []
        for path in self.paths:
            with self._open_file(path) as (file, _):
                sizes = [file.metadata.row_group(row).total_byte_size for row in range(file.metadata.num_row_groups)]
            row_groups = [Piece(path, size, number, number + 1) for number, size in enumerate(sizes)]
            pieces += [
                Piece(path, sum(row_group.size for row_group in group), group[0].start, group[-1].stop)
                for group in group_pieces(row_groups, max_bytes)
            ]
        return pieces

    @contextmanager
    def _open_file(self, path: str) -> Iterator[tuple[Any, Any]]:
        with _reading(path, "Parquet"):
            from pyarrow import parquet

            # Pages have checksums if their writer added them.
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
            FormatError: The file that lists the others is damaged, or a listed file is missing.
            MissingDependencyError: pyarrow is not installed.
        """
        _require_pyarrow()
        folder = Path(location)
        state = folder / STATE_BASENAME
        if (folder / SPLITS_BASENAME).is_file() or not state.is_file():
            why, hint = f"{location} must be a folder written by save_to_disk, but has no {STATE_BASENAME}", None
            if (folder / SPLITS_BASENAME).is_file():
                splits = _load_list(folder / SPLITS_BASENAME, "splits")
                why = f"{location} holds the splits {', '.join(map(str, splits))}"
                hint = f"convert one at a time, for example {folder / str(splits[0])}"
            raise ConfigError(why, hint=hint, option="SOURCE", path=location)
        paths = []
        for entry in _load_list(state, "_data_files"):
            name = entry.get("filename") if isinstance(entry, dict) else None
            if not isinstance(name, str) or Path(name).name != name:
                raise FormatError(f"{state} must list names of files, but lists {entry!r:.100}", path=str(state))
            if not (folder / name).is_file():
                raise FormatError(
                    f"{state} lists {name}, which is missing",
                    hint="restore that file, or save the dataset again",
                    path=str(state),
                )
            paths.append(str(folder / name))
        return cls(tuple(paths))

    @contextmanager
    def _open_file(self, path: str) -> Iterator[tuple[Any, Any]]:
        with _reading(path, "an Arrow stream") as pa, pa.memory_map(path) as file, pa.ipc.open_stream(file) as reader:
            yield reader, reader.schema

    def _batches(self, file: Any, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Any]]:  # noqa: ARG002
        before = 0
        for batch in file:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield before + start, batch.slice(start, _BATCH_ROWS)
            before += batch.num_rows
        # pyarrow takes a stream that was truncated between two batches for complete.
        with Path(piece.path).open("rb") as stream:
            stream.seek(-min(len(_END_OF_STREAM), stream.seek(0, os.SEEK_END)), os.SEEK_END)
            if stream.read() != _END_OF_STREAM:
                raise FormatError(
                    f"{piece.path} was cut off: it has no end marker", hint="save the dataset again", path=piece.path
                )


def _load_list(path: Path, key: str) -> list[Any]:
    try:
        items = json.loads(path.read_bytes())[key]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} must be a JSON object with {key}: {error}", path=str(path)) from error
    if not isinstance(items, list) or not items:
        raise FormatError(f"{path} lists nothing under {key}", path=str(path))
    return items
