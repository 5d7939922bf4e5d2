"""Which kind of source a location is; opens it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.tools.sources import (
    delimited,
    huggingface,
    image_folder,
    json_lines,
    parquet,
    text_folder,
    webdataset,
)
from lightning_streaming.tools.sources.files import files_under, find_files, has_suffix
from lightning_streaming.tools.sources.source import Source


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of source."""

    open: Callable[[str], Source]
    """Finds the files of a location."""
    suffixes: tuple[str, ...]
    """How the names of such files end; none for a kind that is told in another way."""


_TEXT = "text"
KINDS = {
    "jsonl": Kind(json_lines.JsonLines.open, json_lines.SUFFIXES),
    "csv": Kind(delimited.Delimited.open_csv, delimited.SUFFIXES[","]),
    "tsv": Kind(delimited.Delimited.open_tsv, delimited.SUFFIXES["\t"]),
    "parquet": Kind(parquet.Parquet.open, parquet.SUFFIXES),
    "huggingface": Kind(huggingface.HuggingFace.open, ()),
    "webdataset": Kind(webdataset.WebDataset.open, webdataset.SUFFIXES),
    "images": Kind(image_folder.ImageFolder.open, image_folder.SUFFIXES),
    _TEXT: Kind(text_folder.TextFolder.open, text_folder.SUFFIXES),
}
"""By the name that ``--from`` takes."""


def open_source(location: str, kind: str | None = None) -> Source:
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
    elif (path / huggingface.STATE_BASENAME).is_file() or (path / huggingface.SPLITS_BASENAME).is_file():
        return "huggingface"
    else:
        kinds = {_kind_of_file(file) for file in files_under(path)}
        found = {_TEXT} if kinds == {_TEXT} else kinds - {"", _TEXT}
    if len(found) == 1 and "" not in found:
        return found.pop()
    fits = f"it has files of {' and '.join(sorted(found))}" if len(found) > 1 else "no file in it says so"
    if path.is_dir() and not files_under(path):
        raise ConfigError(f"there is no such source: the folder {location} has no files")
    if (path / INDEX_BASENAME).is_file():
        raise ConfigError(f"{location} is a dataset already; lightning-streaming copy or merge takes it")
    raise ConfigError(f"what {location} is cannot be told, because {fits}; say it with --from {'|'.join(KINDS)}")


def _kind_of_file(path: Path | str) -> str:
    return next((name for name, kind in KINDS.items() if has_suffix(path, kind.suffixes)), "")
