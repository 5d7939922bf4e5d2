"""Cache directories that never held anything: a remote was misspelt, or is no more."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lightning_streaming.cache.index_lock import held_index
from lightning_streaming.cache.layout import ARRIVING_BASENAME, ORIGIN_BASENAME, QUEUE_BASENAME, USAGE_BASENAME
from lightning_streaming.cache.origin import read_origin
from lightning_streaming.errors import LockTimeoutError, StorageError

_NOTES = (ORIGIN_BASENAME, USAGE_BASENAME, QUEUE_BASENAME)


def holds_notes_only(directory: Path) -> bool:
    """Whether there is nothing but our notes in the cache directory of a remote, parts of files apart.

    Whoever reads a remote has its index there. A dataset that is read in place has none, so its directory may be in
    use however empty it is.
    """
    with suppress(OSError, StorageError):
        origin = read_origin(directory)
        found = {path.name for path in directory.iterdir()}
        return origin is not None and not origin.of_originals and found <= {*_NOTES, ARRIVING_BASENAME}
    return False


def remove_empty(directory: Path) -> bool:
    """Remove a directory that holds our notes only, unless somebody is about to fetch an index into it.

    Returns:
        Whether it is gone.
    """
    arriving = directory / ARRIVING_BASENAME
    with suppress(OSError, StorageError, LockTimeoutError):
        with held_index(directory, 0.0):
            if not holds_notes_only(directory) or len(list(arriving.iterdir())) > 1:
                return False
            for name in _NOTES:
                (directory / name).unlink(missing_ok=True)
        # Whoever comes now has a part there, or makes the directory anew.
        arriving.rmdir()
        directory.rmdir()
    return not directory.exists()
