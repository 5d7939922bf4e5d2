"""Versions of stored files: the version that a listing reports, and whether an answer comes from that version.

A version is a text ``kind:value``, like ``etag:5d41402a``, of the strongest kind that the store reports. Every answer
with bytes carries its own version, so comparing the two takes no further request.
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
"""The kinds of versions that answers report, the strongest first."""
_MODIFIED_KEYS = ("LastModified", "last_modified", "Last-Modified", "updated", "timeModified", "modified")


class ReplacedError(IntegrityError):
    """A stored file that was replaced since it was listed."""

    fix = (
        "start the run again, so that the data is indexed again; where an index lies beside the data, write that again "
        "with: lightning-streaming index"
    )


@dataclass(frozen=True, slots=True)
class Pin:
    """The version of a file that bytes must come from."""

    size: int | None = None
    """Bytes of the file; None if unknown."""
    version: str = ""
    """Its version, as :func:`listed_version` returns it; "" if unknown."""
    first: dict[str, str] | None = field(default=None, compare=False, repr=False)
    """The versions that first answers reported, by file, to which files are pinned as well; :meth:`check` adds to it.
    None pins them to nothing."""

    def check(self, shown: str, answered: Mapping[str, str], size: int | None = None) -> None:
        """Compare with what an answer reports. What either side does not report is not compared.

        Args:
            shown: The file's URL or path, for the error.
            answered: Values of the answer's version, by kind.
            size: Bytes of the whole file, as the answer reports them.

        Raises:
            ReplacedError: They differ.
        """
        _compare(self.version, shown, answered, "it was indexed: the index has")
        latest = "" if self.first is None else _strongest(answered)
        if self.first is not None and latest:
            known = self.first.setdefault(shown, latest)  # one step: several threads may read the file
            _compare(known, shown, answered, "it was first read: it had")
        if None not in (self.size, size) and size != self.size:
            raise ReplacedError(
                f"{shown} was replaced since it was indexed: the index has {self.size} bytes, but the file now has "
                f"{size}",
                path=shown,
            )

    def forget(self) -> None:
        """Forget the versions of first answers."""
        if self.first is not None:
            self.first.clear()


NO_PIN = Pin()


def _compare(version: str, shown: str, answered: Mapping[str, str], before: str) -> None:
    kind, _, value = version.partition(":")
    found = answered.get(kind)
    if value and found and found != value and not (kind == "blob" and len(found) != len(value)):
        raise ReplacedError(
            f"{shown} was replaced since {before} {kind} {value}, but the file now has {kind} {found}", path=shown
        )


def _strongest(answered: Mapping[str, str]) -> str:
    return next((f"{kind}:{value}" for kind in _KINDS if (value := answered.get(kind))), "")


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
    modified = next((entry[key] for key in _MODIFIED_KEYS if entry.get(key)), "")
    text = modified.isoformat() if isinstance(modified, datetime) else str(modified)
    return text and f"modified:{text}"


def answered_versions(headers: Mapping[str, str], redirects: tuple[Mapping[str, str], ...] = ()) -> dict[str, str]:
    """Return the versions that the headers of an HTTP answer report, by kind.

    Args:
        headers: Those of the answer.
        redirects: Those of the redirects before it. The hub reports the version of a large file in the first.
    """
    etag = bare_etag(headers.get("ETag", ""))
    linked = next((found for one in (*redirects, headers) if (found := one.get("X-Linked-Etag"))), None)
    versions = {
        "etag": etag,
        "blob": etag if linked is None else bare_etag(linked),
        "generation": headers.get("x-goog-generation", ""),
        "modified": headers.get("Last-Modified", ""),
    }
    return {kind: value for kind, value in versions.items() if value}


def version_of_open(stream: Any) -> dict[str, str]:
    """Return the versions of a file that a filesystem which blocks has opened, by kind; asks no store."""
    details = getattr(stream, "__dict__", {}).get("_details")
    if not isinstance(details, Mapping):
        try:
            return _local_version(os.fstat(stream.fileno()))
        except (AttributeError, OSError, TypeError):
            return {}
    kind, _, value = listed_version(details).partition(":")
    return {kind: value}


def check_local(pin: Pin, shown: str, found: os.stat_result) -> None:
    """Compare a local file that is read in place with the version that was indexed.

    Raises:
        IntegrityError: They differ.
    """
    try:
        pin.check(shown, _local_version(found), found.st_size)
    except ReplacedError as error:
        raise IntegrityError(str(error.args[0]), hint=error.fix, path=shown) from None


def _local_version(found: os.stat_result) -> dict[str, str]:
    """Return the versions of a local file. No inode: some filesystems in user space give a file another one."""
    state = f"{found.st_size}, mtime {found.st_mtime_ns}, ctime {change_time(found)}"
    return {"mtime": repr(found.st_mtime), "size": state}


def bare_etag(etag: str) -> str:
    """Return an ETag without its quotes and the mark of a weak one, which listings and answers write differently."""
    return etag.removeprefix("W/").strip('"')
