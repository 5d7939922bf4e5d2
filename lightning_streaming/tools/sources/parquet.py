"""Parquet, one file or many, read by row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.sources.arrow import (
    BATCH_ROWS,
    batch_rows,
    check_same_columns,
    reading,
    require_pyarrow,
    tell_schema,
)
from lightning_streaming.tools.sources.files import find_files
from lightning_streaming.tools.sources.source import Piece, Schema
from lightning_streaming.tools.sources.values import converter

SUFFIXES = (".parquet", ".pq")


@dataclass(frozen=True, slots=True)
class Parquet:
    """Rows of files with the same columns."""

    paths: tuple[str, ...]
    widest: ClassVar[str] = "json"

    @classmethod
    def open(cls, location: str) -> Parquet:
        """Find the files of a location.

        Raises:
            ConfigError: There are none, or some columns are in the names of folders only.
            MissingDependencyError: pyarrow is not installed.
        """
        require_pyarrow()
        paths = find_files(location, SUFFIXES)
        partitioned = [path for path in paths if "=" in Path(path).parent.name]
        if partitioned and Path(location).is_dir():
            raise ConfigError(
                f"{partitioned[0]} is in a folder that stands for a column, which would be lost; convert each such "
                "folder alone, or write the files with the column in them"
            )
        return cls(paths)

    def pieces(self, most: int) -> Sequence[Piece]:
        """Runs of row groups."""
        return [piece for path in self.paths for piece in _runs(path, most)]

    def schema(self) -> Schema:
        """The types of the first file."""
        with _open(self.paths[0]) as file:
            schema = file.schema_arrow
        return tell_schema(schema, self.rows(Piece(self.paths[0], 0), schema.names), self.paths[0])

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Numbers count the rows of the file from 1."""
        with _open(self.paths[0]) as first, _open(piece.path) as file:
            check_same_columns(file.schema_arrow, first.schema_arrow, piece.path, self.paths[0])
            metadata = file.metadata
            groups = range(piece.start, metadata.num_row_groups if piece.stop is None else piece.stop)
            number = sum(metadata.row_group(group).num_rows for group in range(piece.start))
            for batch in file.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=list(names)):
                for row in batch_rows(batch, names):
                    number += 1
                    yield number, row

    def place(self, piece: Piece, number: int) -> str:
        """The row of the file, counted from 1."""
        return f"{piece.path}, row {number}"

    def converter(self, encoding: str) -> Callable[[Any], Any]:
        """Values are those of Arrow in Python and numpy."""
        return converter(encoding)


@contextmanager
def _open(path: str) -> Iterator[Any]:
    with reading(path, "Parquet"):
        from pyarrow import parquet

        # Pages have checksums where their writer gave them; a page without is taken as it is.
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file


def _runs(path: str, most: int) -> Iterator[Piece]:
    with _open(path) as file:
        sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]
    start = size = 0
    for group, group_size in enumerate(sizes, 1):
        size += group_size
        if size >= most or group == len(sizes):
            yield Piece(path, size, start, group)
            start, size = group, 0
