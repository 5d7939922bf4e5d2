"""Reads objects of filesystems that block, like sftp and the local one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_streaming.errors import IntegrityError
from lightning_streaming.storage.progress import Progress
from lightning_streaming.storage.sinks import Sink

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """An object on a filesystem that blocks."""

    filesystem: Any
    path: str
    """Where in it."""
    shown: str
    """Its URL as it may be shown."""
    progress: Progress
    """Marked when something arrives."""


def receive(source: Source, sink: Sink, *, start: int, stop: int, is_last: bool) -> None:
    """Read bytes of an object into a sink, from ``start`` up to, not including, ``stop``.

    Args:
        source: The object.
        sink: Where they go.
        start: The byte that comes first in the sink.
        stop: The byte after the last.
        is_last: Whether the object must end there.

    Raises:
        IntegrityError: The object ends before, or goes on though it should not.
    """
    at = start
    with source.filesystem.open(source.path, "rb") as stream:
        if is_last and hasattr(stream, "prefetch"):
            stream.prefetch()  # of paramiko, which otherwise asks for each 32 KiB only when the last have come
        if start:
            stream.seek(start)
        while at < stop:
            data = stream.read(min(_CHUNK_BYTES, stop - at))
            if not data:
                raise IntegrityError(
                    f"the index promises {stop} bytes of {source.shown}, but none arrived beyond the first {at}"
                )
            sink.write(at - start, data)
            at += len(data)
            source.progress.mark()
        if is_last and stream.read(1):
            raise IntegrityError(f"the index promises {stop} bytes of {source.shown}, but more arrived")


def drain(source: Source, sink: Sink) -> None:
    """Read a whole object of any size into a sink."""
    sink.resize(0)
    size = 0
    with source.filesystem.open(source.path, "rb") as stream:
        while data := stream.read(_CHUNK_BYTES):
            sink.write(size, data)
            size += len(data)
            source.progress.mark()
