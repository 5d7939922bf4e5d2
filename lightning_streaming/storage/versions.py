"""Versions of stored files: the version that a listing reports, and the check that a response has that version.

A version is a text ``kind:value``, like ``etag:5d41402a``, of the strongest kind that the store reports. Each response
with bytes reports its version, so comparing the two takes no further request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from lightning_streaming.errors import IntegrityError
from lightning_streaming.files import change_time

_KINDS = ("generation", "blob", "etag", "size", "mtime", "modified")
"""The kinds of versions that responses report, the strongest first."""
MODIFIED_KEYS = ("LastModified", "last_modified", "Last-Modified", "updated", "timeModified", "modified")
"""Keys of the modification time in entries of fsspec's listings, except that of local files."""


class ReplacedError(IntegrityError):
    """An error for a stored file that was replaced since it was listed."""

    fix = (
        "start the run again, so that the data is indexed again; if there is an index.json with the data, write it "
        "again with: lightning-streaming index"
    )


@dataclass(frozen=True, slots=True)
class Pin:
    """The version of a file that bytes must come from."""

    size: int | None = None
    """Bytes of the file; None if unknown."""
    version: str = ""
    """Its version, as :func:`listed_version` returns it; "" if unknown."""
    first: dict[str, str] | None = field(default=None, compare=False, repr=False)
    """The versions of first responses, by file, which :meth:`check` records, to compare later ones with. None records
    none."""

    def check(self, shown: str, answered: Mapping[str, str], size: int | None = None) -> None:
        """Compare with the version of a response. Kinds that only one of them reports are not compared.

        Args:
            shown: The file's URL or path, for the error.
            answered: Values of the response's version, by kind.
            size: Bytes of the whole file, as the response reports them.

        Raises:
            ReplacedError: They differ.
        """
        _compare(self.version, shown, answered, "it was indexed: the index has")
        if self.first is not None:
            strongest = next((f"{kind}:{value}" for kind in _KINDS if (value := answered.get(kind))), "")
            if strongest:
                known = self.first.setdefault(shown, strongest)  # one step: several threads may read the file
                _compare(known, shown, answered, "it was first read: it had")
        if None not in (self.size, size) and size != self.size:
            raise ReplacedError(
                f"{shown} was replaced since it was indexed: the index has {self.size} bytes, but the file now has "
                f"{size}",
                path=shown,
            )

    def forget(self) -> None:
        """Forget the versions of first responses."""
        if self.first is not None:
            self.first.clear()


NO_PIN = Pin()


def _compare(version: str, shown: str, answered: Mapping[str, str], before: str) -> None:
    kind, _, value = version.partition(":")
    latest = answered.get(kind)
    if value and latest and latest != value and not (kind == "blob" and len(latest) != len(value)):
        raise ReplacedError(
            f"{shown} was replaced since {before} {kind} {value}, but the file now has {kind} {latest}", path=shown
        )


def listed_version(entry: Mapping[str, Any]) -> str:
    """Return the version of a file by its entry in a listing of fsspec; "" if the store reports none."""
    if entry.get("generation"):  # of Google Cloud Storage
        return f"generation:{entry['generation']}"
    if entry.get("blob_id"):  # of the hub: the SHA-256 of a large file, the git object id of a small one
        lfs = entry.get("lfs")
        large = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
        return f"blob:{large or entry['blob_id']}"
    if etag := entry.get("ETag") or entry.get("etag"):
        return f"etag:{bare_etag(str(etag))}"
    if isinstance(entry.get("mtime"), (int, float)):  # of a local file
        return f"mtime:{entry['mtime']!r}"
    modified = next((entry[key] for key in MODIFIED_KEYS if entry.get(key)), "")
    text = modified.isoformat() if isinstance(modified, datetime) else str(modified)
    return text and f"modified:{text}"


def answered_versions(headers: Mapping[str, str], redirects: tuple[Mapping[str, str], ...] = ()) -> dict[str, str]:
    """Return the versions that the headers of an HTTP response report, by kind.

    Args:
        headers: Headers of the response.
        redirects: Headers of the redirects before it. The hub reports the version of a large file in the first.
    """
    etag = bare_etag(headers.get("ETag", ""))
    linked = next((tag for sent in (*redirects, headers) if (tag := sent.get("X-Linked-Etag"))), None)
    versions = {
        "etag": etag,
        "blob": etag if linked is None else bare_etag(linked),
        "generation": headers.get("x-goog-generation", ""),
        "modified": headers.get("Last-Modified", ""),
    }
    return {kind: value for kind, value in versions.items() if value}


def version_of_open(stream: Any) -> dict[str, str]:
    """Return the versions of a file that a blocking filesystem has opened, by kind, without another request."""
    details = getattr(stream, "__dict__", {}).get("_details")
    if not isinstance(details, Mapping):
        try:
            return _local_version(os.fstat(stream.fileno()))
        except (AttributeError, OSError, TypeError):
            return {}
    kind, _, value = listed_version(details).partition(":")
    return {kind: value}


def check_local(pin: Pin, shown: str, status: os.stat_result) -> None:
    """Compare a local file that is read in place with the version that was indexed.

    Raises:
        IntegrityError: They differ.
    """
    try:
        pin.check(shown, _local_version(status), status.st_size)
    except ReplacedError as error:
        raise IntegrityError(str(error.args[0]), hint=error.fix, path=shown) from None


def _local_version(status: os.stat_result) -> dict[str, str]:
    """Return the versions of a local file. No inode: some filesystems in user space change it."""
    state = f"{status.st_size}, mtime {status.st_mtime_ns}, ctime {change_time(status)}"
    return {"mtime": repr(status.st_mtime), "size": state}


def bare_etag(etag: str) -> str:
    """Return an ETag without quotes and the mark of a weak one, which listings and responses write differently."""
    return etag.removeprefix("W/").strip('"')
