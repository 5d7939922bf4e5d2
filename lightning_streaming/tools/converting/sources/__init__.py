"""Which kind of source a location is; opens it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.images.encodings import IMAGE_SUFFIXES
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.tools.converting.sources import arrow, csv_and_json, folders_and_tars
from lightning_streaming.tools.converting.sources.row_source import RowSource, files_under, find_files, has_suffix


class SourceKind(NamedTuple):
    """A kind of source."""

    open: Callable[[str], RowSource]
    """Finds the files of a location."""
    suffixes: tuple[str, ...]
    """How the names of such files end; none for a kind that is told in another way."""


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
"""By the name that ``--from`` takes."""


def open_source(location: str, kind: str | None = None) -> RowSource:
    """Open a source.

    Args:
        location: A file, a folder, or a pattern like ``data/*.jsonl``.
        kind: A name of :data:`KINDS`; None tells it from the location.

    Raises:
        ConfigError: The location does not exist, has no data, or does not tell its kind.
        MissingDependencyError: The package that reads this kind is not installed.
    """
    if not Path(location).is_dir():
        find_files(location, ())  # says so if there is nothing, whatever its name
    return KINDS[kind or tell_kind(location)].open(location)


def tell_kind(location: str) -> str:
    """Tell the kind of a source from the names of its files.

    Notes beside the data, files whose names mean nothing here or that are text, do not matter. Only a folder in which
    all files are text is taken for a folder of texts.

    Raises:
        ConfigError: None, or more than one, fits.
    """
    path = Path(location)
    if not path.is_dir():
        found = {_kind_of_file(location) or ("jsonl" if has_suffix(location, (".json",)) else "")}
    elif (path / arrow.STATE_BASENAME).is_file() or (path / arrow.SPLITS_BASENAME).is_file():
        return "huggingface"
    else:
        kinds = {_kind_of_file(file) for file in files_under(path)}
        found = {_TEXT} if kinds == {_TEXT} else kinds - {"", _TEXT}
    if len(found) == 1 and "" not in found:
        return found.pop()
    fits = f"it has files of {' and '.join(sorted(found))}" if len(found) > 1 else "no file in it says so"
    if path.is_dir() and not files_under(path):
        raise ConfigError(
            f"the folder {location} has no files",
            hint="SOURCE is one with files to convert, or a file",
            option="SOURCE",
            path=location,
        )
    if (path / INDEX_BASENAME).is_file():
        raise ConfigError(
            f"{location} is a dataset already",
            hint="lightning-streaming copy or merge takes it",
            option="SOURCE",
            path=location,
        )
    raise ConfigError(
        f"what {location} is cannot be told, because {fits}",
        hint=f"say it with --from {'|'.join(KINDS)}",
        option="--from",
        path=location,
    )


def _kind_of_file(path: Path | str) -> str:
    return next((name for name, kind in KINDS.items() if has_suffix(path, kind.suffixes)), "")
