"""A file, or a directory of files, on this machine or on any store: reading, writing, listing and removing it."""

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
from lightning_streaming.files import appears_whole, disk_errors, system_errors
from lightning_streaming.storage import urls
from lightning_streaming.storage.downloads import CONNECTIONS, Download, FileSink, MemorySink, Sink, next_ticket
from lightning_streaming.storage.filesystems import (
    account_of,
    call,
    check_writable,
    endpoint_of,
    kind_of,
    open_filesystem,
    prepare,
)
from lightning_streaming.storage.requests import MODIFIED_KEYS, NO_PIN, Pin, listed_version
from lightning_streaming.storage.retries import Attempts, Deadline, Series, is_more_missing, longest_series
from lightning_streaming.storage.secrets import StorageOptions, secrets_of

_Result = TypeVar("_Result")

_ATTEMPTS = 5
_READ_SECONDS = 600.0
"""Timeout for one file, which may have 4 GiB."""
_LIST_SECONDS = 600.0
_STAT_SECONDS = 30.0
_REMOVE_SECONDS = 60.0
_STAT_THREADS = 16
"""Concurrent requests for the sizes of files, where a listing does not report them."""
_SLOWEST_UPLOAD = 32 << 10
_UPLOAD_SECONDS = 120.0
_UNKNOWN_BYTES = 64 << 20
_VERSION_KEYS = {
    *("etag", "lastmodified", "mtime", "updated", "generation", "md5hash", "contentmd5", "ino", "modified"),
    "blobid",  # of the hub, a digest of the object
    "timemodified",
}
"""Keys of filesystems that differ between versions of an object; case, "-" and "_" are ignored."""


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """Metadata of an object."""

    size: int | None
    """Bytes; None if the store does not report it."""
    version: Mapping[str, str]
    """Values that differ between versions of the object, by the store's names."""
    is_directory: bool = False
    """Whether it is a directory, or what the store shows as one."""


class ListedFile(NamedTuple):
    """The entry of a file in a listing."""

    size: int
    """Bytes."""
    modified: float | None
    """Modification time in seconds since the epoch by the store's clock; None if the store does not report it."""
    version: str = ""
    """Its version, see :func:`~lightning_streaming.storage.requests.listed_version`; "" if the store reports none."""
    inode: str = ""
    """Inode of a local file."""

    @classmethod
    def of(cls, size: int, entry: Mapping[str, Any]) -> ListedFile:
        """Return the entry of a file from fsspec's dict of it."""
        return cls(size, _modified(entry), listed_version(entry), str(entry.get("ino", "")))


def _modified(entry: Mapping[str, Any]) -> float | None:
    for key in ("mtime", *MODIFIED_KEYS):
        value = entry.get(key)
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
            with suppress(ValueError):
                return parsedate_to_datetime(value).timestamp()
    return None


@dataclass(frozen=True, slots=True, repr=False)
class Location:
    """A URL or local path, with the options to access it. There is no request before a method is called.

    Every method makes several attempts, except on local files, and raises, with secrets masked:

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
    """Seconds per attempt; of a read, without progress. None for the default of the method, which for an upload grows
    with the size."""
    spent: bool = False
    """Whether all attempts but the last were made just now, for another caller with the same request."""

    def __str__(self) -> str:
        return urls.mask_url(self.url)

    def __repr__(self) -> str:
        return f"Location({urls.mask_url(self.url)!r})"

    def __truediv__(self, name: str) -> Location:
        return replace(self, url=urls.join_url(self.url, name))

    @property
    def path(self) -> Path | None:
        """Its path on this machine; None on a store."""
        return urls.local_path(self.url)

    @property
    def key(self) -> str:
        """A text that differs where data may differ: to compare locations, never to show.

        User and password are excluded. The query is included, because it may select the data; but over HTTP without its
        signature, which changes each time that it is renewed. Endpoint, account and region are included, because
        ``s3://data`` is another bucket on another endpoint, and so is the revision of a repository.
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
        """Like :meth:`prepare`, for a location to write to.

        Raises:
            UnsupportedError: The store can be read only.
        """
        check_writable(self.url)
        prepare(self.url)

    def read(self) -> bytes:
        """Read a whole object; for small ones."""
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
        """Like :meth:`read`; return None if there is no such object."""
        try:
            return self.read()
        except ObjectNotFoundError:
            return None

    def read_range(self, start: int, stop: int, pin: Pin = NO_PIN) -> bytes:
        """Read the bytes from ``start`` up to, not including, ``stop``, without waiting for downloads in progress.

        From a store that ignores ranges the object is fetched up to ``stop``, and the rest discarded.

        Raises:
            IntegrityError: The object ends before ``stop``, or is not the version of ``pin``.
        """
        if stop <= start:
            return b""
        sink = MemorySink()
        self._download(sink, stop - start, pin=pin).spans([(start, stop)])
        return bytes(sink.data)

    def read_ranges(self, ranges: Sequence[tuple[int, int]], pin: Pin = NO_PIN) -> list[memoryview]:
        """Read some ranges, also large ones: in chunks like :meth:`download`, several at once.

        Args:
            ranges: First byte of each, and the one after its last; none is empty.
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

        An existing file is written in place: it keeps its inode and locks, and is neither replaced nor removed.
        Otherwise the file is created, and removed if this raises. Large objects are fetched in chunks, several at once,
        with separate attempts.

        Args:
            destination: File to write; in an existing directory, under a name that no process reads yet.
            size: Bytes the object must have; None if unknown, and then it is fetched in one stream.
            check: Function that raises IntegrityError if the file is not as expected; then all of it is fetched again.
            connections: Chunks in flight, at least 1, counted over all downloads of this process; the download that
                began first has priority.
            pin: The version that the object must have.

        Returns:
            The version that the store reported with it; "" if none, or if the pin has those of first responses.

        Raises:
            IntegrityError: In each attempt the object has another size than expected, is not the version of ``pin``, or
                fails the check.
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
        """Return size and version of the object, as they are now."""
        info = self._info()
        texts = {key: str(value) for key, value in info.items() if value is not None}
        version = {key: text for key, text in texts.items() if re.sub("[-_]", "", key.lower()) in _VERSION_KEYS}
        return ObjectStat(info.get("size"), version, info.get("type") == "directory")

    def _info(self) -> Mapping[str, Any]:
        """Return fsspec's dict of the object."""

        def info(filesystem: Any, path: str) -> Mapping[str, Any]:
            try:
                # The hub's filesystem lists the whole directory otherwise.
                options = {"expand_info": True} if urls.store_of(self.url) == "hf" else {}
                seconds = min(self._seconds(_STAT_SECONDS), _STAT_SECONDS)
                entry: Mapping[str, Any] = call(filesystem, "info", path, timeout=seconds, **options)
            except FileNotFoundError as error:
                # Over HTTP every failure is one of these, and only the cause is specific.
                if kind_of(filesystem, self.url) == "http" and isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None
                raise
            return entry

        return self._attempt("read the metadata of", info)

    def listed(self) -> ListedFile | None:
        """Return the entry of the object in a listing, as it is now; None if there is none."""
        try:
            info = self._info()
        except ObjectNotFoundError:
            return None
        is_file = info.get("type") != "directory" and info.get("size") is not None
        return ListedFile.of(info["size"], info) if is_file else None

    def size(self) -> int | None:
        """Return the bytes of the object, as it is now; None if there is none, or a directory."""
        try:
            stat = self.stat()
        except ObjectNotFoundError:
            return None
        return None if stat.is_directory else stat.size

    def sizes(self) -> dict[str, int]:
        """Return name to bytes of the files directly in this directory, which may be missing."""
        path = self.path
        if path is not None:
            with system_errors("list a directory"):
                files = sorted(path.iterdir()) if path.is_dir() else []
                return {file.name: file.stat().st_size for file in files if file.is_file()}
        return {name: entry["size"] for name, entry in self._entries().items()}

    def files(self) -> dict[str, ListedFile]:
        """Return the entries of the files directly in this directory of a store, which may be missing."""
        entries = self._entries().items()
        return {name: ListedFile.of(entry["size"], entry) for name, entry in entries if entry.get("size") is not None}

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        """Return fsspec's dicts of the files directly in this directory."""

        def ls(filesystem: Any, path: str) -> dict[str, Mapping[str, Any]]:
            try:
                entries = call(filesystem, "ls", path, True, timeout=self._seconds(_LIST_SECONDS))
            except FileNotFoundError as error:
                if is_more_missing(error):
                    raise
                return {}
            return {entry["name"].rpartition("/")[2]: entry for entry in entries if entry["type"] == "file"}

        return self._attempt("list", ls)

    def walk(self) -> list[str]:
        """Return sorted paths, with forward slashes and relative to this directory, of all files below it.

        The directory may be missing. Links to directories are not followed.
        """

        def find(filesystem: Any, path: str) -> list[str]:
            root = path.rstrip("/") + "/"
            paths = self._find(filesystem, root, detail=False)
            return sorted(path[len(root) :] for path in paths if path.startswith(root) and path != root)

        return self._attempt("list", find)

    def walk_files(self) -> dict[str, ListedFile]:
        """Return the files of :meth:`walk` with their entries, except files and directories that begin with a dot.

        Raises:
            StorageError: Also where the size of a file is not reported.
        """

        def find(filesystem: Any, path: str) -> dict[str, Mapping[str, Any]]:
            root = path.rstrip("/") + "/"
            entries = self._find(filesystem, root, detail=True)
            below = {path[len(root) :]: entry for path, entry in entries.items() if path.startswith(root)}
            if kind_of(filesystem, self.url) == "http":  # whose listings are pages of links, some of which sort them
                below = {unquote(name): entry for name, entry in below.items() if "?" not in name}
            names = (name for name in sorted(below) if name and "/." not in f"/{name}")
            return {name: below[name] for name in names}

        entries = self._attempt("list", find)
        files: dict[str, ListedFile | None] = {
            name: None if entry.get("size") is None else ListedFile.of(entry["size"], entry)
            for name, entry in entries.items()
        }
        files |= self.listed_below([name for name, file in files.items() if file is None])
        for name, file in files.items():
            if file is None:
                raise StorageError(
                    f"{self / name} is listed, but its server does not report its size",
                    hint="name other files",
                    path=str(self / name),
                )
        return {name: file for name, file in files.items() if file is not None}

    def listed_below(self, names: Sequence[str]) -> dict[str, ListedFile | None]:
        """Return :meth:`listed` for each of some files below this directory, several at once."""
        if not names:
            return {}
        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            return dict(zip(names, pool.map(lambda name: (self / name).listed(), names), strict=True))

    def put(self, *pieces: bytes | memoryview) -> None:
        """Store an object, whole or not at all; replace an existing one."""
        path = self.path
        if path is not None:
            with written_whole(path) as partial, partial.open("wb") as file:
                file.writelines(pieces)
            return
        check_writable(self.url)
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
        check_writable(self.url)
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
        check_writable(self.url)

        def remove(filesystem: Any, path: str) -> None:
            with suppress(FileNotFoundError):
                # Oracle's filesystem has no other.
                method = "rm" if urls.store_of(self.url) == "oci" else "rm_file"
                call(filesystem, method, path, timeout=self._seconds(_REMOVE_SECONDS))

        self._attempt("remove", remove)

    def _find(self, filesystem: Any, root: str, *, detail: bool) -> Any:
        try:
            return call(filesystem, "find", root, timeout=self._seconds(_LIST_SECONDS), detail=detail)
        except FileNotFoundError as error:  # of the hub's filesystem before its 1.0
            if urls.store_of(self.url) != "hf" or is_more_missing(error):
                raise
            return {}

    def _seconds(self, default: float) -> float:
        return default if self.timeout is None else self.timeout

    def _attempt(self, verb: str, action: Callable[[Any, str], _Result]) -> _Result:
        """Call ``action`` with the filesystem and the path in it, until an attempt succeeds.

        Caches of listings are cleared: s3fs would not even find an object that was written since.
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
    """Return the seconds per attempt to upload ``size`` bytes: two minutes, and the time it takes at 32 KiB/s."""
    return _UPLOAD_SECONDS + size / _SLOWEST_UPLOAD


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it is renamed to ``path``, whose directory is created, once the block succeeds.

    Raises:
        StorageError: It cannot be written.
    """
    with system_errors(f"write {path}", "free space there, or choose another location", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with appears_whole(path) as partial:
            yield partial
