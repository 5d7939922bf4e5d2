"""Single objects on a store: parts of them, their sizes, their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_streaming.errors import DownloadError, IntegrityError, ObjectNotFoundError, UnsupportedError
from lightning_streaming.storage import mask_url
from lightning_streaming.storage.attempts import Attempts
from lightning_streaming.storage.filesystems import call, open_filesystem
from lightning_streaming.tools.place import RETRY, TIMEOUT


def read_ranges(url: str, options: Mapping[str, Any], ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Fetch parts of an object.

    Args:
        url: URL of the object.
        options: Arguments of its filesystem.
        ranges: The first byte of each part, and the one after its last.

    Returns:
        The parts.

    Raises:
        UnsupportedError: The store sends whole objects only.
        IntegrityError: The object ends before a part does.
        StorageError: It could not be fetched.
    """
    wanted = [(start, stop) for start, stop in ranges if stop > start]

    def attempt() -> list[bytes]:
        filesystem, path = open_filesystem(url, options)
        starts, stops = [start for start, _ in wanted], [stop for _, stop in wanted]
        parts = call(filesystem, "cat_ranges", [path] * len(wanted), starts, stops, timeout=TIMEOUT)
        for part in parts:
            if isinstance(part, BaseException):
                raise part
        return list(parts)

    parts = dict(zip(wanted, _attempts("read", url, options).run(attempt), strict=True))
    for (start, stop), part in parts.items():
        if len(part) > stop - start:
            raise UnsupportedError(f"{mask_url(url)} is on a store that sends whole objects only")
        if len(part) < stop - start:
            raise IntegrityError(f"{mask_url(url)} must have {stop} bytes at least, but ends at {start + len(part)}")
    return [parts.get(one, b"") for one in ranges]


def find_object_size(url: str, options: Mapping[str, Any]) -> int | None:
    """Bytes of an object, or of a file if ``url`` is a path; None if there is no such object.

    Raises:
        StorageError: The store does not say.
    """

    def attempt() -> int:
        filesystem, path = open_filesystem(url, options)
        return int(call(filesystem, "info", path, timeout=TIMEOUT)["size"])

    try:
        return _attempts("look at", url, options).run(attempt)
    except ObjectNotFoundError:
        return None


def remove_object(url: str, options: Mapping[str, Any]) -> None:
    """Remove an object, or a file if ``url`` is a path.

    Raises:
        ObjectNotFoundError: There is no such object; some stores do not tell.
        StorageError: The store refuses.
    """

    def attempt() -> None:
        filesystem, path = open_filesystem(url, options)
        call(filesystem, "rm_file", path, timeout=TIMEOUT)

    _attempts("remove", url, options).run(attempt)


def _attempts(verb: str, url: str, options: Mapping[str, Any]) -> Attempts:
    purpose = f"{verb} {mask_url(url)}"
    return Attempts(purpose=purpose, options=options, retry=RETRY, timeout=TIMEOUT, failure=DownloadError)
