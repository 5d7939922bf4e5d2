"""Where a part lies, and where that is seen from the dataset it belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.storage import local_path
from lightning_streaming.writing.place import Bucket, Directory, Place

_RETRY = 5


def dataset_location(location: str | Path) -> str:
    """The directory of a dataset that is named by it, or by its index: ``s3://x/a`` of ``s3://x/a/index.json``."""
    stripped = str(location).rstrip("/")
    directory, slash, name = stripped.rpartition("/")
    return directory if slash and name == INDEX_BASENAME else stripped


def path_below(location: str, root: str) -> str | None:
    """The path from one directory down to another; None if it is not below.

    For example ``"b/c"`` for ``s3://x/a/b/c`` below ``s3://x/a``. A local path may also lie below by where links lead.
    """
    directory, root_directory = local_path(location), local_path(root)
    if (directory is None) != (root_directory is None):
        return None
    if directory is None or root_directory is None:
        return _rest(location.rstrip("/"), root.rstrip("/") + "/")
    written = _rest(_normal(directory), _normal(root_directory).rstrip("/") + "/")
    return written or _rest(str(directory.resolve()), str(root_directory.resolve()).rstrip("/") + "/")


def place_at(location: str, options: Mapping[str, Any]) -> Place:
    """The directory or bucket at a path or URL; nothing is touched yet."""
    directory = local_path(location)
    return Bucket(location, options, retry=_RETRY) if directory is None else Directory(directory)


def _normal(directory: Path) -> str:
    return os.path.normpath(directory.absolute())


def _rest(location: str, root: str) -> str | None:
    rest = location.removeprefix(root)
    is_below = location.startswith(root) and not {"", ".", ".."} & set(rest.split("/"))
    return rest if is_below else None
