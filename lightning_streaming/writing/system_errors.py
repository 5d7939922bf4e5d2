"""What the system refuses, in our own words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_streaming.errors import StorageError, StreamingError


@contextmanager
def system_errors(doing: str, way_out: str = "change that, or choose another place") -> Iterator[None]:
    """Raise StorageError where the block, or the function that this decorates, raises an OSError of the system.

    Args:
        doing: What could not be done, for example ``"list a directory"``; the system names the path.
        way_out: What can be done about it.
    """
    try:
        yield
    except StreamingError:  # some are an OSError too
        raise
    except OSError as error:
        raise StorageError(f"could not {doing}: {error}; {way_out}") from error
