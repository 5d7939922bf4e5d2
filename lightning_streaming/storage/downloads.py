"""Fetches objects and parts of them from a store, with attempts, deadlines and errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

from lightning_streaming.errors import ConfigError, DownloadError, IntegrityError, StreamingError
from lightning_streaming.storage import blocking
from lightning_streaming.storage.attempts import Attempts, Deadline
from lightning_streaming.storage.bodies import RemoteObject
from lightning_streaming.storage.fetch import Fetch
from lightning_streaming.storage.filesystems import abandon, kind_of, open_filesystem, run_on_loop
from lightning_streaming.storage.lanes import CONNECTIONS, next_turn
from lightning_streaming.storage.progress import Progress, run_watched
from lightning_streaming.storage.retry import longest_series
from lightning_streaming.storage.secrets import secrets_of
from lightning_streaming.storage.sinks import FileSink, Gate, MemorySink, Sink, write_error
from lightning_streaming.storage.urls import mask_url

_UNKNOWN_BYTES = 64 << 20


def download(
    url: str,
    options: Mapping[str, Any],
    destination: Path,
    *,
    expected_bytes: int | None,
    retry: int,
    timeout: float,
    check: Callable[[Path], None] | None = None,
    connections: int = CONNECTIONS,
) -> None:
    """Fetch an object into a file.

    A file that exists is written to where it is: it keeps its inode and locks, and is neither replaced nor removed. One
    that does not is made, and removed if this raises. Large objects come in parts, several at once.

    Args:
        url: URL or local path of the object.
        options: Arguments of its filesystem.
        destination: File to write; in an existing directory, under a name that nobody reads yet.
        expected_bytes: Size the object must have; None if it is not known, and then it comes in one stream.
        retry: Attempts in total, at least 1, for each part, and for the object when it fails the check.
        timeout: Seconds in which something must arrive; an attempt in which something does takes as long as it must.
        check: Looks at what arrived and raises IntegrityError if it is not as promised; then all of it is fetched
            again.
        connections: Parts in flight at once, at least 1, counted over all downloads of this process; the download
            that began first goes first.

    Raises:
        ObjectNotFoundError: There is no such object or bucket.
        AccessDeniedError: No credentials, or not the right ones.
        ConfigError: The options were refused, or no filesystem serves the URL.
        MissingDependencyError: The package that serves the URL is not installed.
        IntegrityError: What arrives has another size than expected, or fails the check, time after time.
        DownloadError: Every attempt failed.
        DiskFullError: There is no room for it.
        StorageError: The store refused for another reason, or ``destination`` cannot be written.
    """
    if connections < 1:
        raise ConfigError(f"connections must be at least 1, but is {connections}")
    attempts = _attempts(url, options, retry, timeout, expected_bytes)
    turn = next_turn()
    with _opened(destination) as sink:
        for made in count(1):
            if expected_bytes is not None:
                sink.resize(expected_bytes)
            _Order(url, options, attempts, timeout, sink, turn, connections).fetch(expected_bytes)
            try:
                _run_check(check, destination)
            except IntegrityError as error:
                pause = attempts.pause_after(error, made)
            else:
                return
            Event().wait(pause)


def read_bytes(url: str, options: Mapping[str, Any], *, retry: int, timeout: float) -> bytes:
    """Fetch a small object into memory.

    Args:
        url: URL or local path of the object.
        options: Arguments of its filesystem.
        retry: Attempts in total, at least 1.
        timeout: Seconds in which something must arrive.

    Raises:
        StorageError: As for :func:`download`.
        ConfigError: As for :func:`download`.
        MissingDependencyError: As for :func:`download`.
    """
    sink = MemorySink()
    _Order(url, options, _attempts(url, options, retry, timeout, None), timeout, sink).fetch(None)
    return bytes(sink.data)


def read_range(url: str, options: Mapping[str, Any], start: int, stop: int, *, retry: int, timeout: float) -> bytes:
    """Fetch a few bytes of an object; it does not wait for downloads that are under way.

    From a store that ignores ranges the object is fetched up to their end, and thrown away.

    Args:
        url: URL or local path of the object.
        options: Arguments of its filesystem.
        start: The first byte.
        stop: The byte after the last.
        retry: Attempts in total, at least 1.
        timeout: Seconds in which something must arrive.

    Raises:
        IntegrityError: The object ends before ``stop``.
        StorageError: As for :func:`download`.
        ConfigError: As for :func:`download`.
        MissingDependencyError: As for :func:`download`.
    """
    if stop <= start:
        return b""
    sink = MemorySink()
    attempts = _attempts(url, options, retry, timeout, stop - start)
    _Order(url, options, attempts, timeout, sink).fetch_span(start, stop)
    return bytes(sink.data)


@dataclass(frozen=True, slots=True)
class _Order:
    """One object to fetch, whichever kind of filesystem it is on."""

    url: str
    options: Mapping[str, Any]
    attempts: Attempts
    timeout: float
    sink: Sink
    turn: int | None = None
    connections: int = CONNECTIONS

    def fetch(self, size: int | None) -> None:
        """Fetch all of it; None if its size is not known."""
        if size is None:
            self._run(Fetch.unknown, blocking.drain)
        else:
            self._run(partial(Fetch.whole, size=size), partial(blocking.receive, start=0, stop=size, is_last=True))

    def fetch_span(self, start: int, stop: int) -> None:
        """Fetch the bytes from ``start`` up to, not including, ``stop``."""
        read = partial(blocking.receive, start=start, stop=stop, is_last=False)
        self._run(partial(Fetch.span, start=start, stop=stop), read, origin=start)

    def _run(self, on_loop: Callable[[Fetch], Any], in_thread: Callable[..., None], origin: int = 0) -> None:
        filesystem, path = self.attempts.run(partial(open_filesystem, self.url, self.options))
        kind = kind_of(filesystem, self.url)
        if kind is None:
            self.attempts.run(partial(self._run_in_thread, in_thread))
            return
        fetch = Fetch(
            wanted=RemoteObject(filesystem, path, kind, mask_url(self.url)),
            sink=self.sink,
            attempts=self.attempts,
            timeout=self.timeout,
            origin=origin,
            turn=self.turn,
            connections=self.connections,
        )
        run_on_loop(filesystem, on_loop(fetch))

    def _run_in_thread(self, read: Callable[..., None]) -> None:
        filesystem, path = open_filesystem(self.url, self.options)
        deadline = self.attempts.deadline
        assert deadline is not None
        deadline.begin()
        gate, progress = Gate(self.sink), Progress()
        source = blocking.Source(filesystem, path, mask_url(self.url), progress)
        try:
            run_watched(partial(read, source, gate), progress, self.timeout, deadline.left())
        except TimeoutError:
            abandon(filesystem)
            raise
        finally:
            gate.close()


def _attempts(url: str, options: Mapping[str, Any], retry: int, timeout: float, size: int | None) -> Attempts:
    return Attempts(
        purpose=f"download {mask_url(url)}",
        options=options,
        retry=retry,
        failure=DownloadError,
        deadline=Deadline(longest_series(retry, timeout, _UNKNOWN_BYTES if size is None else size)),
        hidden=secrets_of(url),
    )


@contextmanager
def _opened(path: Path) -> Iterator[FileSink]:
    """Open a file to write to; remove it after an error if it was not there before."""
    sink = FileSink(path)
    try:
        yield sink
    except BaseException:
        if sink.is_new:
            path.unlink(missing_ok=True)
        raise
    finally:
        sink.close()


def _run_check(check: Callable[[Path], None] | None, path: Path) -> None:
    if check is None:
        return
    try:
        check(path)
    except StreamingError:
        raise
    except OSError as error:
        # It may write, for example what it decompresses.
        raise write_error(Path(error.filename or path), error) from error
