"""The kinds of sources, and how the kind of a location is detected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.images import IMAGE_SUFFIXES
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.tools.converting.sources import arrow, csv_and_json, folders_and_tars
from lightning_streaming.tools.converting.sources.row_source import RowSource, files_under, find_files, has_suffix


class SourceKind(NamedTuple):
    """A kind of source."""

    open: Callable[[str], RowSource]
    """Finds the files of a location."""
    suffixes: tuple[str, ...]
    """Suffixes of the names of such files; none for a kind that is detected otherwise."""


_TEXT = "text"
KINDS = {
    "jsonl": SourceKind(csv_and_json.JsonLines.open, csv_and_json.JSON_SUFFIXES),
    "csv": SourceKind(csv_and_json.Delimited.open_csv, csv_and_json.DELIMITED_SUFFIXES[","]),
    "tsv": SourceKind(csv_and_json.Delimited.open_tsv, csv_and_json.DELIMITED_SUFFIXES["\t"]),
    "parquet": SourceKind(arrow.Parquet.open, arrow.PARQUET_SUFFIXES),
    "huggingface": SourceKind(arrow.HuggingFace.open, ()),
    "webdataset": SourceKind(folders_and_tars.WebDataset.open, folders_and_tars.TAR_SUFFIXES),
    "images": SourceKind(folders_and_tars.ImageFolder.open, IMAGE_SUFFIXES),
    _TEXT: SourceKind(folders_and_tars.TextFolder.open, folders_and_tars.TEXT_SUFFIXES),
}
"""Kinds by the name that ``--from`` takes."""


def open_source(location: str, kind: str | None = None) -> RowSource:
    """Open a source.

    Args:
        location: A file, a folder, or a pattern like ``data/*.jsonl``.
        kind: A name of :data:`KINDS`; None to detect it from the location.

    Raises:
        ConfigError: The location does not exist, has no data, or does not determine its kind.
        MissingDependencyError: The package that reads this kind is not installed.
    """
    if not Path(location).is_dir():
        find_files(location, ())  # raises if there is nothing, before the kind is detected
    return KINDS[kind or detect_kind(location)].open(location)


def detect_kind(location: str) -> str:
    """Return the kind of a source, from the names of its files.

    Files of text, and those of unknown suffixes, are ignored in a folder with other data. A folder is of kind text only
    if all its files are text.

    Raises:
        ConfigError: No kind, or more than one, fits.
    """
    path = Path(location)
    if not path.is_dir():
        kinds = {_kind_of_file(location) or ("jsonl" if has_suffix(location, (".json",)) else "")}
    elif (path / arrow.STATE_BASENAME).is_file() or (path / arrow.SPLITS_BASENAME).is_file():
        return "huggingface"
    else:
        all_kinds = {_kind_of_file(file) for file in files_under(path)}
        kinds = {_TEXT} if all_kinds == {_TEXT} else all_kinds - {"", _TEXT}
    if len(kinds) == 1 and "" not in kinds:
        return kinds.pop()
    fits = f"it has files of {' and '.join(sorted(kinds))}" if len(kinds) > 1 else "no file name determines it"
    why, hint, option = f"the kind of {location} is unknown, because {fits}", f"pass --from {'|'.join(KINDS)}", "--from"
    if path.is_dir() and not files_under(path):
        why, hint = f"the folder {location} has no files", "SOURCE is a folder with files to convert, or a file"
        option = "SOURCE"
    elif (path / INDEX_BASENAME).is_file():
        why, hint = f"{location} is a dataset already", "lightning-streaming copy or merge takes it"
        option = "SOURCE"
    raise ConfigError(why, hint=hint, option=option, path=location)


def _kind_of_file(path: Path | str) -> str:
    return next((name for name, kind in KINDS.items() if has_suffix(path, kind.suffixes)), "")
