"""The files that a location names: one, those of a folder, or those that a pattern matches."""

from __future__ import annotations

import glob
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from lightning_streaming.errors import ConfigError, FormatError
from lightning_streaming.tools.sources.source import Piece


def files_under(folder: Path) -> list[Path]:
    """All files of a folder and its folders, by path; what begins with a dot is left out.

    Raises:
        ConfigError: A link in it leads back to a folder that it is in.
    """
    found = []
    for directory, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(directory, name) for name in folders):
            if path.is_symlink() and _leads_back(path, folder):
                raise ConfigError(f"{path} leads back to {path.resolve()}, which it is in; remove that link")
        found += [Path(directory, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _leads_back(link: Path, folder: Path) -> bool:
    """Whether following a link would come to it again: it leads to a folder on the way to it, or above one."""
    on_the_way = [parent for parent in link.parents if parent == folder or folder in parent.parents]
    target = link.resolve()
    return any(parent.resolve().is_relative_to(target) for parent in on_the_way)


def find_files(location: str, suffixes: Sequence[str]) -> tuple[str, ...]:
    """The files of a location: itself, those of a folder whose names end so, or those that a pattern matches.

    Raises:
        ConfigError: There are none.
    """
    path = Path(location)
    if path.is_dir():
        found = [str(file) for file in files_under(path) if has_suffix(file, suffixes)]
        looked_for = f"a file in the folder {location} that ends in {', '.join(suffixes)}"
    elif path.exists():
        found, looked_for = [location], location
    else:
        # Not Path.glob, which takes no absolute pattern.
        matches = glob.glob(location, recursive=True)  # noqa: PTH207
        found = sorted(match for match in matches if Path(match).is_file())
        looked_for = f"the file {location}"
    if not found:
        raise ConfigError(f"there is no such source: {looked_for}")
    return tuple(found)


def has_suffix(path: Path | str, suffixes: Sequence[str]) -> bool:
    """Whether a file's name ends in one of some texts, in either case."""
    return Path(path).name.lower().endswith(tuple(suffixes))


def whole_files(paths: Sequence[str]) -> list[Piece]:
    """Each file as one piece."""
    return [Piece(path, Path(path).stat().st_size) for path in paths]


def is_gzip(path: str) -> bool:
    """Whether a file is compressed, by its name."""
    return path.lower().endswith(".gz")


@contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """Open a file to read, decompressed if its name ends in ``.gz``.

    Raises:
        FormatError: What is read within the block is not gzip, or ends early.
    """
    try:
        with gzip.open(path, "rb") if is_gzip(path) else Path(path).open("rb") as file:
            yield cast("IO[bytes]", file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FormatError(f"{path} is not a whole gzip file: {error}") from error
