"""A Hugging Face dataset as ``save_to_disk`` leaves it: Arrow files, and a file that lists them.

Read with pyarrow alone. ``save_to_disk`` writes what selecting, shuffling and mapping made of the data, so the files
hold the rows as the dataset gives them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError, FormatError
from lightning_streaming.tools.sources.arrow import (
    BATCH_ROWS,
    batch_rows,
    check_same_columns,
    reading,
    require_pyarrow,
    tell_schema,
)
from lightning_streaming.tools.sources.files import whole_files
from lightning_streaming.tools.sources.source import Piece, Schema
from lightning_streaming.tools.sources.values import converter

STATE_BASENAME = "state.json"
"""In the folder of a dataset: lists its files."""
SPLITS_BASENAME = "dataset_dict.json"
"""In a folder of datasets by split: lists them."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """The rows of one dataset."""

    paths: tuple[str, ...]
    widest: ClassVar[str] = "json"

    @classmethod
    def open(cls, location: str) -> HuggingFace:
        """Find the files of a dataset.

        Raises:
            ConfigError: The folder is not that of one dataset.
            FormatError: The file that lists the others is damaged, or one of the others is missing.
            MissingDependencyError: pyarrow is not installed.
        """
        require_pyarrow()
        folder = Path(location)
        if (folder / SPLITS_BASENAME).is_file():
            splits = _load(folder / SPLITS_BASENAME, "splits")
            raise ConfigError(
                f"{location} holds the splits {', '.join(map(str, splits))}; convert one at a time, for example "
                f"{folder / str(splits[0])}"
            )
        if not (folder / STATE_BASENAME).is_file():
            raise ConfigError(f"{location} must be a folder written by save_to_disk, but has no {STATE_BASENAME}")
        return cls(tuple(_data_files(folder)))

    def pieces(self, most: int) -> Sequence[Piece]:  # noqa: ARG002
        """Whole files; ``datasets`` writes them with up to 500 MB each."""
        return whole_files(self.paths)

    def schema(self) -> Schema:
        """The types of the first file."""
        with _open(self.paths[0]) as reader:
            schema = reader.schema
        return tell_schema(schema, self.rows(Piece(self.paths[0], 0), schema.names), self.paths[0])

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Numbers count the rows of the file from 1."""
        with _open(self.paths[0]) as first, _open(piece.path) as reader:
            check_same_columns(reader.schema, first.schema, piece.path, self.paths[0])
            number = 0
            for batch in reader:
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    for row in batch_rows(batch.slice(start, BATCH_ROWS), names):
                        number += 1
                        yield number, row
        _check_end(piece.path)

    def place(self, piece: Piece, number: int) -> str:
        """The row of the file, counted from 1."""
        return f"{piece.path}, row {number}"

    def converter(self, encoding: str) -> Callable[[Any], Any]:
        """Values are those of Arrow in Python and numpy."""
        return converter(encoding)


def _data_files(folder: Path) -> Iterator[str]:
    """The files that the folder's own list names, which must be there."""
    for file in _load(folder / STATE_BASENAME, "_data_files"):
        name = file.get("filename") if isinstance(file, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise FormatError(f"{folder / STATE_BASENAME} must list names of files, but lists {file!r:.100}")
        if not (folder / name).is_file():
            raise FormatError(
                f"{folder / STATE_BASENAME} lists {name}, which is not there; put that file back, or save the dataset "
                "again"
            )
        yield str(folder / name)


def _load(path: Path, key: str) -> list[Any]:
    try:
        found = json.loads(path.read_bytes())[key]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} must be a JSON object with {key}: {error}") from error
    if not isinstance(found, list) or not found:
        raise FormatError(f"{path} lists nothing under {key}")
    return found


def _check_end(path: str) -> None:
    """Refuse a stream that was cut off between two batches, which pyarrow takes for its end."""
    with Path(path).open("rb") as file:
        file.seek(-min(len(_END_OF_STREAM), file.seek(0, os.SEEK_END)), os.SEEK_END)
        if file.read() != _END_OF_STREAM:
            raise FormatError(f"{path} was cut off: it has no mark of its end; save the dataset again")


@contextmanager
def _open(path: str) -> Iterator[Any]:
    with reading(path, "an Arrow stream") as pa, pa.memory_map(path) as file, pa.ipc.open_stream(file) as reader:
        yield reader
