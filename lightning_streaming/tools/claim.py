"""Whose the destination of a copy is: nobody's, this copy's from an earlier attempt, or another dataset's.

While a copy is under way a small file beside where the index will be says which dataset is being copied. It is there
before the first file that the copy writes, and is removed after the index is published. So an interrupted copy knows
its own files again, without reading them back from a store. Where a copy writes over files of others, the claim says
so: until all are written over, what has the right size may still be theirs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_streaming.errors import ObjectNotFoundError
from lightning_streaming.files import appears_whole
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.storage import location_key, read_bytes, upload
from lightning_streaming.storage.transfer import remove
from lightning_streaming.tools.stored_dataset import RETRY, TIMEOUT, StoredDataset
from lightning_streaming.writing.place import Directory

CLAIM_BASENAME = f"{INDEX_BASENAME}.copying"
"""The file that says so."""
OVER_OTHERS = b" over others"
"""What a claim ends in while files of others may be among ours."""


def claim_of(source: StoredDataset, index_text: bytes) -> bytes:
    """What the claim of a copy says: a digest of where the dataset is and what its index holds."""
    key = location_key(source.location, source.options)
    return hashlib.sha256(key.encode() + b"\n" + index_text).hexdigest().encode()


def find_small(place: StoredDataset, basename: str) -> bytes | None:
    """The content of a small file; None if there is no such file.

    Raises:
        StorageError: The store does not answer.
    """
    try:
        if place.directory is not None:  # what a disk refuses is no matter of a network
            return Directory(place.directory).get(basename)
        return read_bytes(place.url(basename), place.options, retry=RETRY, timeout=TIMEOUT)
    except ObjectNotFoundError:
        return None


def put_small(place: StoredDataset, basename: str, data: bytes) -> None:
    """Write a small file, whole or not at all.

    Raises:
        StorageError: It could not be written.
    """
    if place.directory is not None:
        path = place.path(basename)
        path.parent.mkdir(parents=True, exist_ok=True)
        with appears_whole(path) as partial:
            partial.write_bytes(data)
        return
    with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
        path = Path(scratch) / "file"
        path.write_bytes(data)
        upload(path, place.url(basename), place.options, retry=RETRY, timeout=TIMEOUT)


def remove_small(place: StoredDataset, basename: str) -> None:
    """Remove a file that :func:`put_small` wrote, or an index that is to be replaced.

    Raises:
        StorageError: The store refuses.
    """
    if place.directory is not None:
        place.path(basename).unlink(missing_ok=True)
    else:
        remove(place.url(basename), place.options, retry=RETRY)
