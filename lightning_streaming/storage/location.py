"""A file, or a directory of files, on this machine or on any store: how it is read, written, listed and removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from lightning_streaming.errors import ConfigError, DownloadError, IntegrityError, ObjectNotFoundError, StorageError
from lightning_streaming.files import appears_whole
from lightning_streaming.storage import urls
from lightning_streaming.storage.downloads import CONNECTIONS, Download, next_ticket
from lightning_streaming.storage.filesystems import account_of, call, endpoint_of, kind_of, open_filesystem, prepare
from lightning_streaming.storage.hub import refuse_to_write
from lightning_streaming.storage.retries import Attempts, Deadline, Series, is_more_missing, longest_series
from lightning_streaming.storage.secrets import StorageOptions, secrets_of
from lightning_streaming.storage.sinks import FileSink, MemorySink, Sink, disk_errors, system_errors
from lightning_streaming.storage.versions import NO_PIN, Pin, listed_version

_Result = TypeVar("_Result")

_ATTEMPTS = 5
_READ_SECONDS = 600.0
"""For one file, which may have 4 GiB."""
_LIST_SECONDS = 600.0
_STAT_SECONDS = 30.0
_REMOVE_SECONDS = 60.0
_LOOKS = 16
"""Files of which the sizes are asked at once, where a list does not tell them."""
_SLOWEST_UPLOAD = 32 << 10
_UPLOAD_SECONDS = 120.0
_UNKNOWN_BYTES = 64 << 20
_VERSION_KEYS = {
    *("etag", "lastmodified", "mtime", "updated", "generation", "md5hash", "contentmd5", "ino", "modified"),
    "blobid",  # of the hub, a digest of the object
    "timemodified",
}
"""Keys by which filesystems tell versions of an object apart, but for case, "-" and "_"."""


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """What a store says of an object without sending it."""

    size: int | None
    """Bytes; None if the store does not tell."""
    version: Mapping[str, str]
    """Whatever tells versions of the object apart, by the store's own names."""
    is_directory: bool = False
    """Whether there is a directory instead, or what the store shows as one."""


class ListedFile(NamedTuple):
    """What a listing tells of a file."""

    size: int
    """Bytes."""
    modified: float | None
    """When it was written, in seconds since the epoch by the store's clock; None if the store does not tell."""
    version: str = ""
    """Its version, see :func:`~lightning_streaming.storage.versions.listed_version`; "" if the store tells none."""
    inode: str = ""
    """Of a local file."""


def _listed(size: int, told: Mapping[str, Any]) -> ListedFile:
    return ListedFile(size, _modified(told), listed_version(told), str(told.get("ino", "")))


def _modified(told: Mapping[str, Any]) -> float | None:
    """When a file was written, by what its filesystem says of it."""
    for key in ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "timeModified", "modified"):
        found = told.get(key)
        if isinstance(found, (int, float)):
            return float(found)
        if isinstance(found, datetime):
            return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(found, str):
            with suppress(ValueError):
                return datetime.fromisoformat(found.replace("Z", "+00:00")).timestamp()
            with suppress(ValueError):
                return parsedate_to_datetime(found).timestamp()
    return None


@dataclass(frozen=True, slots=True, repr=False)
class Location:
    """A URL or local path, with all that it takes to reach it. Nothing is asked before a method is called.

    Every method but those of local files makes several attempts, and raises, with secrets masked:

    * ObjectNotFoundError: There is no such object or bucket.
    * AccessDeniedError: No credentials, or not the right ones.
    * ConfigError: The options were refused, or no filesystem serves the URL.
    * MissingDependencyError: The package that serves the URL is not installed.
    * StorageError: Every attempt failed, or the store or the system refused for another reason.
    """

    url: str
    """URL or local path. It may hold secrets; ``str(location)`` does not."""
    options: Mapping[str, Any] = field(default_factory=StorageOptions, hash=False)
    """Arguments of its fsspec filesystem."""
    attempts: int = _ATTEMPTS
    """Attempts in total for each transfer, at least 1."""
    timeout: float | None = None
    """Seconds that an attempt is given; of a read, in which something must arrive. None for one that suits what is
    done; for an upload it grows with the size."""
    spent: bool = False
    """Whether all attempts but the last were made just now, for another caller that wanted the same."""

    def __str__(self) -> str:
        return urls.mask_url(self.url)

    def __repr__(self) -> str:
        return f"Location({urls.mask_url(self.url)!r})"

    def __truediv__(self, name: str) -> Location:
        return replace(self, url=urls.join_url(self.url, name))

    @property
    def path(self) -> Path | None:
        """Where it is on this machine; None on a store."""
        return urls.local_path(self.url)

    @property
    def key(self) -> str:
        """A text that differs where data may differ: for telling locations apart, never for showing.

        User and password are left out. The query stays in, because it may select the data; but over HTTP without what
        signs it, which is another one each time that it is renewed. The endpoint, the account and the region stay in,
        because ``s3://data`` is another bucket on another endpoint, and so does the revision of a repository.
        """
        if self.path is not None:
            return os.path.normpath(self.path.absolute())
        store = [endpoint_of(self.url, self.options), *account_of(self.url, self.options)]
        shown = urls.without_user(self.url)
        if urls.scheme_of(self.url) in urls.HTTP_SCHEMES:
            start, _, query = shown.partition("?")
            query = urls.without_signature(query.partition("#")[0])
            shown = f"{start.rstrip('/')}?{query}" if query else start
        return "\n".join([shown.rstrip("/"), *(str(part) for part in store if part)])

    def prepare(self) -> None:
        """Import the package that serves it, see :func:`~lightning_streaming.storage.filesystems.prepare`."""
        prepare(self.url)

    def prepare_to_write(self) -> None:
        """The same, for a place that is to be written to.

        Raises:
            UnsupportedError: The store can be read only.
        """
        refuse_to_write(self.url)
        prepare(self.url)

    def read(self) -> bytes:
        """The whole object; a small one."""
        path = self.path
        if path is None:
            sink = MemorySink()
            self._download(sink, None).whole(None)
            return bytes(sink.data)
        with system_errors(f"read {path}", path=path):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                raise ObjectNotFoundError(f"{path} does not exist", path=str(path)) from None

    def read_if_there(self) -> bytes | None:
        """Like :meth:`read`; None if there is no such object."""
        try:
            return self.read()
        except ObjectNotFoundError:
            return None

    def read_range(self, start: int, stop: int, pin: Pin = NO_PIN) -> bytes:
        """The bytes from ``start`` up to, not including, ``stop``; it does not wait for downloads that are under way.

        From a store that ignores ranges the object is fetched up to their end, and thrown away.

        Raises:
            IntegrityError: The object ends before ``stop``, or is not the version of ``pin``.
        """
        if stop <= start:
            return b""
        sink = MemorySink()
        self._download(sink, stop - start, pin=pin).spans([(start, stop)])
        return bytes(sink.data)

    def read_ranges(self, ranges: Sequence[tuple[int, int]], pin: Pin = NO_PIN) -> list[memoryview]:
        """The bytes of some ranges, as much as a whole object may be: in chunks like :meth:`download`, several at once.

        Args:
            ranges: Of each the first byte, and the one after the last; none is empty.
            pin: The version of the object that they must come from.

        Raises:
            IntegrityError: The object ends before the end of one, or is not the version of ``pin``.
        """
        sizes = [stop - start for start, stop in ranges]
        sink = MemorySink()
        sink.resize(sum(sizes))
        if ranges:
            self._download(sink, sum(sizes), ticket=next_ticket(), pin=pin).spans(ranges)
        whole, stops = memoryview(sink.data), list(accumulate(sizes))
        return [whole[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]

    def download(
        self,
        destination: Path,
        *,
        size: int | None = None,
        check: Callable[[Path], None] | None = None,
        connections: int = CONNECTIONS,
        pin: Pin = NO_PIN,
    ) -> str:
        """Fetch the object into a file.

        A file that exists is written to where it is: it keeps its inode and locks, and is neither replaced nor removed.
        One that does not is made, and removed if this raises. Large objects come in chunks, several at once, each with
        attempts of its own.

        Args:
            destination: File to write; in an existing directory, under a name that nobody reads yet.
            size: Bytes the object must have; None if that is not known, and then it comes in one stream.
            check: Looks at what arrived and raises IntegrityError if it is not as promised; then all of it is fetched
                again.
            connections: Chunks in flight at once, at least 1, counted over all downloads of this process; the download
                that began first goes first.
            pin: The version of the object that is wanted.

        Returns:
            The version that the store reported with it; "" if none, or if the pin has those of first answers.

        Raises:
            IntegrityError: What arrives has another size than expected, is not the version of ``pin``, or fails the
                check, time after time.
            DiskFullError: There is no room for it.
            StorageError: Also where ``destination`` cannot be written.
        """
        if connections < 1:
            raise ConfigError(f"connections must be at least 1, but is {connections}", option="connections")
        with FileSink(destination) as sink:
            download = self._download(sink, size, ticket=next_ticket(), connections=connections, pin=pin)
            series = Series(download.attempts)
            while True:
                if size is not None:
                    sink.resize(size)
                download.whole(size)
                try:
                    with disk_errors(destination):  # it may write, for example what it decompresses
                        if check is not None:
                            check(destination)
                except IntegrityError as error:
                    pause = series.pause_after(error)
                else:
                    return next(iter(download.seen.values()), "")
                Event().wait(pause)

    def stat(self) -> ObjectStat:
        """Size and version of the object, as they are now."""
        found = self._info()
        told = {key: str(value) for key, value in found.items() if value is not None}
        version = {key: told[key] for key in told if re.sub("[-_]", "", key.lower()) in _VERSION_KEYS}
        return ObjectStat(found.get("size"), version, found.get("type") == "directory")

    def _info(self) -> Mapping[str, Any]:
        """What the filesystem says of the object."""

        def look(filesystem: Any, path: str) -> Mapping[str, Any]:
            try:
                # The hub's filesystem lists the whole directory otherwise.
                how = {"expand_info": True} if urls.store_of(self.url) == "hf" else {}
                seconds = min(self._seconds(_STAT_SECONDS), _STAT_SECONDS)
                found: Mapping[str, Any] = call(filesystem, "info", path, timeout=seconds, **how)
            except FileNotFoundError as error:
                # Over HTTP every failure is one of these, and only its cause tells which.
                if kind_of(filesystem, self.url) == "http" and isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None
                raise
            return found

        return self._attempt("look at", look)

    def listed(self) -> ListedFile | None:
        """What a listing would tell of the object, as it is now; None if there is none."""
        try:
            found = self._info()
        except ObjectNotFoundError:
            return None
        is_file = found.get("type") != "directory" and found.get("size") is not None
        return _listed(found["size"], found) if is_file else None

    def size(self) -> int | None:
        """Bytes of the object, as it is now; None if there is none, or a directory."""
        try:
            found = self.stat()
        except ObjectNotFoundError:
            return None
        return None if found.is_directory else found.size

    def sizes(self) -> dict[str, int]:
        """Name to bytes of the files directly in this directory, which need not exist."""
        path = self.path
        if path is not None:
            with system_errors("list a directory"):
                files = sorted(path.iterdir()) if path.is_dir() else []
                return {file.name: file.stat().st_size for file in files if file.is_file()}

        found = self._entries()
        return {name: told["size"] for name, told in found.items()}

    def files(self) -> dict[str, ListedFile]:
        """Return the entries of the files directly in this directory of a store, which need not exist."""
        found = self._entries()
        return {name: _listed(told["size"], told) for name, told in found.items() if told.get("size") is not None}

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        """Return what the filesystem reports of the files directly in this directory."""

        def look(filesystem: Any, path: str) -> dict[str, Mapping[str, Any]]:
            try:
                found = call(filesystem, "ls", path, True, timeout=self._seconds(_LIST_SECONDS))
            except FileNotFoundError as error:
                if is_more_missing(error):
                    raise
                return {}
            return {entry["name"].rpartition("/")[2]: entry for entry in found if entry["type"] == "file"}

        return self._attempt("list", look)

    def walk(self) -> list[str]:
        """Sorted paths, with forward slashes and relative to this directory, of the files at any depth below it.

        It need not exist. Links to directories are not followed.
        """

        def look(filesystem: Any, path: str) -> list[str]:
            root = path.rstrip("/") + "/"
            found = self._find(filesystem, root, detail=False)
            return sorted(one[len(root) :] for one in found if one.startswith(root) and one != root)

        return self._attempt("list", look)

    def walk_sizes(self) -> dict[str, int]:
        """The same, with the bytes of each file; but for files and directories whose names begin with a dot.

        It need not exist.
        """
        return {name: found.size for name, found in self.walk_files().items()}

    def walk_files(self) -> dict[str, ListedFile]:
        """The same, with all that a listing tells of each.

        Raises:
            StorageError: Also where a file's size is not told.
        """

        def look(filesystem: Any, path: str) -> dict[str, Mapping[str, Any]]:
            root = path.rstrip("/") + "/"
            found = self._find(filesystem, root, detail=True)
            below = {one[len(root) :]: told for one, told in found.items() if one.startswith(root)}
            if kind_of(filesystem, self.url) == "http":  # whose listings are pages of links, some of which sort them
                below = {unquote(name): told for name, told in below.items() if "?" not in name}
            names = (name for name in sorted(below) if name and "/." not in f"/{name}")
            return {name: below[name] for name in names}

        found = self._attempt("list", look)
        sizes = {name: told.get("size") for name, told in found.items()}
        files = {name: None if size is None else _listed(size, found[name]) for name, size in sizes.items()}
        files |= self.listed_below([name for name, size in sizes.items() if size is None])
        listed = {name: one for name, one in files.items() if one is not None}
        if len(listed) < len(found):
            name = next(name for name in found if name not in listed)
            raise StorageError(
                f"{self / name} is listed, but its server does not tell its size",
                hint="name files of others",
                path=str(self / name),
            )
        return listed

    def listed_below(self, names: Sequence[str]) -> dict[str, ListedFile | None]:
        """Return :meth:`listed` of each of some files below this directory, several at once."""
        if not names:
            return {}
        with ThreadPoolExecutor(_LOOKS) as pool:
            return dict(zip(names, pool.map(lambda name: (self / name).listed(), names), strict=True))

    def put(self, *pieces: bytes | memoryview) -> None:
        """Store an object, whole or not at all, in place of one that is there."""
        path = self.path
        if path is not None:
            with written_whole(path) as partial, partial.open("wb") as file:
                file.writelines(pieces)
            return
        refuse_to_write(self.url)
        data = b"".join(pieces)  # one piece that is bytes is not copied

        def send(filesystem: Any, path: str) -> None:
            call(filesystem, "pipe_file", path, data, timeout=self._seconds(upload_seconds(len(data))))

        self._attempt(f"upload {len(data)} bytes to", send)

    def upload(self, file: Path) -> None:
        """Store a file of this machine, as :meth:`put` does."""
        path = self.path
        if path is not None:
            with written_whole(path) as partial:
                shutil.copyfile(file, partial)
            return
        refuse_to_write(self.url)
        seconds = self._seconds(upload_seconds(file.stat().st_size if file.exists() else 0))

        def send(filesystem: Any, path: str) -> None:
            call(filesystem, "put_file", str(file), path, timeout=seconds)

        self._attempt(f"upload {file} to", send)

    def remove(self) -> None:
        """Remove the object, if there is one."""
        path = self.path
        if path is not None:
            with system_errors("remove a file"):
                path.unlink(missing_ok=True)
            return
        refuse_to_write(self.url)

        def send(filesystem: Any, path: str) -> None:
            with suppress(FileNotFoundError):
                # Oracle's filesystem has no other.
                method = "rm" if urls.store_of(self.url) == "oci" else "rm_file"
                call(filesystem, method, path, timeout=self._seconds(_REMOVE_SECONDS))

        self._attempt("remove", send)

    def _find(self, filesystem: Any, root: str, *, detail: bool) -> Any:
        try:
            return call(filesystem, "find", root, timeout=self._seconds(_LIST_SECONDS), detail=detail)
        except FileNotFoundError as error:  # of the hub's filesystem before its 1.0
            if urls.store_of(self.url) != "hf" or is_more_missing(error):
                raise
            return {}

    def _seconds(self, usual: float) -> float:
        return usual if self.timeout is None else self.timeout

    def _attempt(self, verb: str, action: Callable[[Any, str], _Result]) -> _Result:
        """Call ``action`` with the filesystem and the path in it, as often as it takes.

        Nothing that was listed is remembered: s3fs would not even find an object to read it that was written since.
        """

        def attempt() -> _Result:
            filesystem, path = open_filesystem(self.url, self.options)
            filesystem.invalidate_cache()
            try:
                return action(filesystem, path)
            finally:
                filesystem.invalidate_cache()

        return self._attempts(verb, StorageError, timeout=self.timeout).run(attempt)

    def _attempts(
        self, verb: str, failure: type[StorageError], *, timeout: float | None = None, deadline: Deadline | None = None
    ) -> Attempts:
        return Attempts(
            purpose=f"{verb} {self}",
            shown=str(self),
            options=self.options,
            total=self.attempts,
            timeout=timeout,
            deadline=deadline,
            failure=failure,
            hidden=secrets_of(self.url),
            store=urls.store_of(self.url),
            spent=self.spent,
        )

    def _download(self, sink: Sink, size: int | None, **more: Any) -> Download:
        timeout = self._seconds(_READ_SECONDS)
        deadline = Deadline(longest_series(self.attempts, timeout, _UNKNOWN_BYTES if size is None else size))
        attempts = self._attempts("download", DownloadError, deadline=deadline)
        return Download(self.url, self.options, sink, attempts, deadline, timeout, **more)


def upload_seconds(size: int) -> float:
    """Seconds that an attempt to upload ``size`` bytes is given: two minutes, and the time it takes at 32 KiB/s."""
    return _UPLOAD_SECONDS + size / _SLOWEST_UPLOAD


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a path to write to; it becomes ``path``, whose directory is made, once the block ends well.

    Raises:
        StorageError: It cannot be written.
    """
    with system_errors(f"write {path}", "make room there, or choose another place", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with appears_whole(path) as partial:
            yield partial
