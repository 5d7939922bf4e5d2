"""An epoch's order as a file that all processes of a node map: created once, and ahead of time if possible."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.config import RUNTIME_VARIABLE, orders_directory
from lightning_streaming.errors import LockTimeoutError, StorageError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import appears_whole, hold_lock
from lightning_streaming.sequence.draw import Shuffled, drawn_here

_log = package_logger(__name__)
_SMALL_EPOCH = 1 << 16
"""Samples up to which each process makes its own copy: a quarter of a megabyte and some milliseconds."""
_LOCK_SECONDS = 3600.0
_SUFFIX = ".order"
_PLAN_SUFFIX = ".packs"
_Ids = NDArray[np.integer[Any]]


def shared_order(order: Shuffled) -> _Ids:
    """Draw an order, as :func:`lightning_streaming.sequence.draw.drawn_here` does, for all processes of this node.

    A large order is a file in this node's runtime directory, named by a digest of all it depends on. The process that
    takes the lock first creates the file; all map it read-only, so more workers take no more memory. A process holds a
    shared ``flock`` on the file while it maps it, and a process that creates an order removes files that no process
    holds and what killed processes left: so finished epochs and killed runs leave at most this epoch's file and the
    next one's, until the next run on this node.

    Raises:
        ConfigError: See :class:`~lightning_streaming.sequence.draw.Shuffled`.
        StorageError: There is no room for the file.
        LockTimeoutError: Another process takes more than an hour to make an order.
    """
    return _made(order, _LOCK_SECONDS) if is_shared(order) else drawn_here(order)


def order_ahead_of_use(order: Shuffled) -> _Ids | None:
    """Create the file of an order that will be needed, unless another process is creating an order now.

    Args:
        order: One that :func:`is_shared`.

    Returns:
        Its ids, whose file nobody removes as long as they are kept; None where somebody else is busy.

    Raises:
        ConfigError: See :class:`~lightning_streaming.sequence.draw.Shuffled`.
        StorageError: There is no room for the file.
    """
    try:
        return _made(order, 0)
    except LockTimeoutError:
        return None


def is_shared(order: Shuffled) -> bool:
    """Return whether an order is worth a file: it is large, and has to be drawn before it is read."""
    return len(order) > _SMALL_EPOCH and order.is_drawn


def _made(order: Shuffled, timeout: float) -> _Ids:
    """Map the file; create it if it is missing."""
    path = orders_directory() / (order.digest + _SUFFIX)
    mapped = _map_if_present(path, order)
    if mapped is not None:
        return mapped
    # One lock for all orders, so that its holder knows whatever is half written to be a dead maker's.
    with hold_lock(path.parent / "lock", timeout, f"make the order of epoch {order.epoch}"):
        mapped = _map_if_present(path, order)
        if mapped is not None:
            return mapped
        _remove_unused(path.parent, _SUFFIX)
        with appears_whole(path) as partial:
            drawn = _room(partial, order)
            order.draw_into(drawn)
        mapped = _map_if_present(path, order)
        # Whoever cleans temporary directories may have been quicker; what we drew stays as long as we map it.
        return drawn if mapped is None else mapped


def made_once(digest: str, made: Callable[[Path], None], what: str, is_whole: Callable[[mmap.mmap], bool]) -> mmap.mmap:
    """Map a file that one process of this node creates; it is removed like those of orders.

    It has a separate lock, as its process may have to create an order first.

    Args:
        digest: Names all that its content depends on.
        made: Makes it, at a path that is then renamed; may ask for orders, and for no other such file.
        what: What a lock that takes too long is held for, like "plan the packs of epoch 3".
        is_whole: Whether a file is as it was made, rather than cut short when the machine went down.

    Raises:
        StorageError: There is no room for the file.
        LockTimeoutError: Another process takes more than an hour.
    """
    path = orders_directory() / (digest + _PLAN_SUFFIX)
    mapped = _map_whole(path, is_whole)
    if mapped is not None:
        return mapped
    with hold_lock(path.parent / "packs-lock", _LOCK_SECONDS, what):
        mapped = _map_whole(path, is_whole)
        if mapped is not None:
            return mapped
        _remove_unused(path.parent, _PLAN_SUFFIX)
        with appears_whole(path) as partial:
            try:
                made(partial)
            except StreamingError:
                raise
            except OSError as error:
                raise StorageError(
                    f"cannot {what} in {partial}: {error.strerror}",
                    hint=f"make room there, or set {RUNTIME_VARIABLE} to a directory with more room on this node",
                    option=RUNTIME_VARIABLE,
                    path=str(partial),
                ) from error
        mapped = _map_whole(path, is_whole)
    if mapped is None:
        raise StorageError(
            f"{path} was removed while it was made",
            hint=f"set {RUNTIME_VARIABLE} to a directory of its own",
            path=str(path),
        )
    return mapped


def _map_whole(path: Path, is_whole: Callable[[mmap.mmap], bool]) -> mmap.mmap | None:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        found = os.fstat(file.fileno())
        if found.st_nlink == 0 or not found.st_size:
            return None
        held = mmap.mmap(file.fileno(), found.st_size, access=mmap.ACCESS_READ)
        return held if is_whole(held) else None


def _room(path: Path, order: Shuffled) -> _Ids:
    """Return a new file as an array to fill.

    Its blocks are reserved immediately: a full disk while writing to a map would kill the process.
    """
    num_bytes = len(order) * order.dtype.itemsize
    with path.open("w+b") as file:
        try:
            _reserve(file.fileno(), num_bytes)
        except OSError as error:
            raise StorageError(
                f"cannot reserve {num_bytes} bytes for the sample order in {path}: {error.strerror}",
                hint=f"make room there, or set {RUNTIME_VARIABLE} to a directory with more room on this node",
                option=RUNTIME_VARIABLE,
                path=str(path),
            ) from error
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), order.dtype)


def _reserve(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    zeros = bytes(1 << 20)  # macOS
    for start in range(0, num_bytes, len(zeros)):
        os.pwrite(descriptor, zeros[: num_bytes - start], start)


def _map_if_present(path: Path, order: Shuffled) -> _Ids | None:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        found = os.fstat(file.fileno())
        # Removed between our open and our lock, or cut short when the machine went down.
        if found.st_nlink == 0 or found.st_size != len(order) * order.dtype.itemsize:
            return None
        # The map keeps a duplicate of the descriptor, and with it the lock, until it is freed or the process dies.
        held = mmap.mmap(file.fileno(), found.st_size, access=mmap.ACCESS_READ)
        return np.frombuffer(held, order.dtype)


def _remove_unused(directory: Path, suffix: str) -> None:
    """Remove files that no process maps. Call it while holding the lock of these files."""
    for path in directory.glob(f"*{suffix}*"):
        # Whoever cleans temporary directories may be quicker.
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@dataclass(slots=True, eq=False)
class _Draw:
    """An order that is being drawn: only its thread writes to it, until that has ended."""

    digest: str
    process: int
    thread: threading.Thread | None = None
    ids: _Ids | None = None
    has_failed: bool = False

    @property
    def is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def is_valid(self) -> bool:
        """Return whether another try would end the same; False if another process was busy."""
        return self.ids is not None or self.has_failed


class OrderAhead:
    """Draws an epoch's order ahead of time, so that no process waits for it when the epoch begins.

    It only saves time: a reader of the epoch requests its order anyway, and creates it if it is missing. Use it from
    one thread. A copy sent to another process, or in a forked child, starts empty.
    """

    def __init__(self) -> None:
        self._draw: _Draw | None = None

    def __reduce__(self) -> tuple[type[OrderAhead], tuple[()]]:
        return OrderAhead, ()

    def prepare(self, order: Shuffled) -> None:
        """Start drawing an order, unless one is being drawn; and keep it, so that no process removes it before its use.

        Returns at once. Of what was made before, the file may be removed once nobody else uses it. Orders that have no
        file are left to their readers, and so is one that another process is making. A failure is logged, and left to
        the reader to meet.
        """
        if not is_shared(order):
            return
        draw = self._draw_here()
        if draw is not None and draw.is_running:
            return
        digest = order.digest
        if draw is not None and draw.digest == digest and draw.is_valid:
            return
        self._draw = draw = _Draw(digest=digest, process=os.getpid())
        draw.thread = threading.Thread(target=_make_ahead, args=(draw, order), name="order-ahead", daemon=True)
        draw.thread.start()

    def close(self) -> None:
        """Release the orders. A draw that runs ends with its thread, or with the process; nothing waits for it."""
        self._draw = None

    def _draw_here(self) -> _Draw | None:
        """Return the draw that was started in this process: a forked child has its record, but not its thread."""
        return self._draw if self._draw is not None and self._draw.process == os.getpid() else None


def _make_ahead(draw: _Draw, order: Shuffled) -> None:
    try:
        draw.ids = order_ahead_of_use(order)
    except Exception as error:  # noqa: BLE001  whoever reads the epoch meets it again
        draw.has_failed = True
        cause = f"{type(error).__name__}: {error}"
        words = "the order of epoch %d was not made ahead of time, which is tried again at its start: %s"
        _log.warning(words, order.epoch, cause)
