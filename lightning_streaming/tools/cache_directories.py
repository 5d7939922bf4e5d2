"""The cache directories that a command is about, and what happens where one of several cannot be served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightning_streaming.cache.inspection import is_cache
from lightning_streaming.cache.layout import ORIGIN_BASENAME, USAGE_BASENAME, default_cache_directory
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.storage import mask_url

_Result = TypeVar("_Result")
_NOTES = {ORIGIN_BASENAME, USAGE_BASENAME}


class Failure(NamedTuple):
    """A directory that could not be served."""

    directory: Path
    error: Exception


def find_caches(given: str | None) -> list[Path]:
    """The cache directories at and under a directory, sorted.

    Args:
        given: The directory; None for the root of all default ones.

    Returns:
        One path for each; none only where nothing is given and nothing is cached.

    Raises:
        ConfigError: There is no cache directory.
    """
    root = default_root() if given is None else Path(given)
    found = sorted(_beneath(root))
    if given is not None and not found:
        why = (
            f"neither it nor a directory in it has an {ORIGIN_BASENAME} of ours" if root.is_dir() else "it is not there"
        )
        raise ConfigError(
            f"{mask_url(given)} is not a cache directory: {why}; give one that a stream names with local=, or none for "
            f"the default ones in {default_root()}"
        )
    return found


def default_root() -> Path:
    """Where the default directories of all datasets are."""
    return default_cache_directory("any").parent


def for_each(
    directories: Sequence[Path], action: Callable[[Path], _Result]
) -> tuple[list[tuple[Path, _Result]], list[Failure]]:
    """Do something for each directory; those where that fails, like another user's, do not keep others from it.

    Raises:
        StreamingError: It failed for all of them; this is the first error.
        OSError: The same.
    """
    done: list[tuple[Path, _Result]] = []
    failures: list[Failure] = []
    for directory in directories:
        try:
            done.append((directory, action(directory)))
        except (StreamingError, OSError) as error:  # noqa: PERF203  each has its own
            failures.append(Failure(directory, error))
    if failures and not done:
        raise failures[0].error
    return done, failures


def _beneath(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if not _NOTES.isdisjoint(files) and is_cache(Path(folder)):
            yield Path(folder)
