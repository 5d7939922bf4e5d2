"""Orders and pack plans of epochs as files that all processes of a node map.

shared_order   the order of an epoch: drawn once on a node, and ahead of time by OrderAhead
EpochPacker    the packs of an epoch: planned once on a node

A large order or plan is a file in this node's runtime directory, named by a digest of all it depends on. The process
that takes the lock first creates the file; all map it read-only, so more workers take no more memory. A process holds a
shared ``flock`` on the file while it maps it. A process that creates a file removes those that no process holds, and
those that killed processes left: so finished epochs and killed runs leave at most this epoch's file and the next one's,
until the next run on this node.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.config import RUNTIME_VARIABLE, orders_directory
from lightning_streaming.errors import ConfigError, LockTimeoutError, StorageError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import appears_whole, hold_lock
from lightning_streaming.options.packing import Packing
from lightning_streaming.resume.saved_fingerprint import SavedPacking
from lightning_streaming.selection.catalog import CatalogLengths
from lightning_streaming.sequence.base import digest_of
from lightning_streaming.sequence.draw import Shuffled, drawn_here
from lightning_streaming.sequence.packing.packs import PackedEpoch, PackedPart, plan_epoch
from lightning_streaming.sequence.packing.plan import PackPlan
from lightning_streaming.waits import progress

_log = package_logger(__name__)
_SMALL_EPOCH = 1 << 16
"""Samples up to which each process draws its own copy: a quarter of a megabyte and some milliseconds."""
_SMALL_PLAN = 1 << 16
"""Documents up to which each process plans for itself."""
_LOCK_SECONDS = 3600.0
_SLOW_SECONDS = 1.0
"""Seconds of planning that are logged."""
_ALIGNMENT, _WORD = 64, 8
_PACKS_VERSION = 2
"""Incremented when the same settings give other packs, or other bytes: releases may share a node."""
_Ids = NDArray[np.integer[Any]]


def shared_order(order: Shuffled, timeout: float = _LOCK_SECONDS) -> _Ids:
    """Draw an order, as :func:`lightning_streaming.sequence.draw.drawn_here` does, for all processes of this node.

    Args:
        order: The order.
        timeout: Seconds to wait for another process that draws an order.

    Raises:
        ConfigError: See :class:`~lightning_streaming.sequence.draw.Shuffled`.
        StorageError: There is no room for the file.
        LockTimeoutError: Another process needs longer.
    """
    if not has_file(order):
        return drawn_here(order)
    num_bytes = len(order) * order.dtype.itemsize

    def write(path: Path) -> None:
        with path.open("w+b") as file:
            # Blocks are reserved first: a full disk while writing to a map would kill the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            else:  # macOS
                zeros = bytes(1 << 20)
                for start in range(0, num_bytes, len(zeros)):
                    os.pwrite(file.fileno(), zeros[: num_bytes - start], start)
            order.draw_into(np.frombuffer(mmap.mmap(file.fileno(), num_bytes), order.dtype))

    path = orders_directory() / f"{order.digest}.order"
    what = f"write the {num_bytes} bytes of the order of epoch {order.epoch}"
    mapped = _mapped_once(path, "lock", timeout, what, write, lambda file: len(file) == num_bytes)
    return np.frombuffer(mapped, order.dtype)


def has_file(order: Shuffled) -> bool:
    """Return whether an order is shared by a file: it is large, and has to be drawn before it is read."""
    return len(order) > _SMALL_EPOCH and order.is_drawn


def _mapped_once(
    path: Path,
    lock: str,
    timeout: float,
    what: str,
    write: Callable[[Path], None],
    is_whole: Callable[[mmap.mmap], bool],
) -> mmap.mmap:
    """Map a file that one process of this node writes.

    Args:
        path: The file.
        lock: Name of the lock. Plans have another one than orders, as their process may have to draw an order first.
        timeout: Seconds to wait for the lock.
        what: The action in errors, like "plan the packs of epoch 3".
        write: Writes the file, at a path that is then renamed.
        is_whole: Returns whether a file is as it was written, rather than cut short when the machine went down.

    Raises:
        StorageError: There is no room for the file.
        LockTimeoutError: Another process holds the lock for longer.
    """
    mapped = _map_whole(path, is_whole)
    if mapped is not None:
        return mapped
    # One lock for all files of a suffix: its holder knows that a half-written file is of a process that died.
    with hold_lock(path.parent / lock, timeout, what):
        mapped = _map_whole(path, is_whole)
        if mapped is None:
            for other in path.parent.glob(f"*{path.suffix}*"):
                # A cleaner of temporary directories may have been faster.
                with suppress(FileNotFoundError, BlockingIOError), other.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    other.unlink()
            with appears_whole(path) as partial:
                try:
                    write(partial)
                except StreamingError:
                    raise
                except OSError as error:
                    raise StorageError(
                        f"cannot {what} in {partial}: {error.strerror}",
                        hint=f"free space there, or set {RUNTIME_VARIABLE} to a directory with more room on this node",
                        option=RUNTIME_VARIABLE,
                        path=str(partial),
                    ) from error
                mapped = _map_whole(partial, is_whole)
    assert mapped is not None, "as it was written whole"
    return mapped


def _map_whole(path: Path, is_whole: Callable[[mmap.mmap], bool]) -> mmap.mmap | None:
    """Map a file; return None if it is missing or cut short."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        status = os.fstat(file.fileno())
        if status.st_nlink == 0 or not status.st_size:  # removed between open and lock
            return None
        # The map keeps a duplicate of the descriptor, and with it the lock, until it is freed or the process dies.
        mapped = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ)
        return mapped if is_whole(mapped) else None


@dataclass(slots=True, eq=False)
class _Draw:
    """An order that is being drawn: only its thread writes to it, until that has ended."""

    digest: str
    process: int
    thread: threading.Thread | None = None
    ids: _Ids | None = None
    has_failed: bool = False

    def run(self, order: Shuffled) -> None:
        """Draw the order, unless another process is drawing one now."""
        try:
            self.ids = shared_order(order, timeout=0)
        except LockTimeoutError:
            return
        except Exception as error:  # noqa: BLE001  the reader of the epoch meets it again
            self.has_failed = True
            cause = f"{type(error).__name__}: {error}"
            words = "the order of epoch %d could not be drawn ahead of time, which is tried again at its start: %s"
            _log.warning(words, order.epoch, cause)


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

        Returns at once, and releases the order that was drawn before. Orders that have no file are left to their
        readers, and so is an order that another process is drawing. A failure is logged, and raised again in the
        reader.
        """
        if not has_file(order):
            return
        draw = self._draw
        if draw is not None and draw.process == os.getpid():  # a forked child has the record, but not the thread
            is_running = draw.thread is not None and draw.thread.is_alive()
            if is_running or (draw.digest == order.digest and (draw.ids is not None or draw.has_failed)):
                return
        self._draw = draw = _Draw(digest=order.digest, process=os.getpid())
        draw.thread = threading.Thread(target=draw.run, args=(order,), name="order-ahead", daemon=True)
        draw.thread.start()

    def close(self) -> None:
        """Release the orders. A draw that runs ends with its thread, or with the process; nothing waits for it."""
        self._draw = None


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPacker:
    """Plans the packs of epochs."""

    pack: Packing
    lengths: CatalogLengths

    def saved(self) -> SavedPacking:
        """Return the facts that a saved position depends on; a digest of the lengths is saved with each stream."""
        return SavedPacking.of(self.pack.facts, self.pack.request().in_words())

    def epoch(self, parts: Sequence[PackedPart]) -> PackedEpoch:
        """Return the packs of an epoch; plan them if no process of this node has.

        Args:
            parts: The epoch's documents.

        Raises:
            ConfigError: A document is longer than a pack, and ``longer="error"``; or there is nothing to pack.
            StorageError: There is no room for the plan.
        """
        settings, number = self.pack.settings(), parts[0].order.epoch
        documents = sum(len(part.order) for part in parts)
        if documents <= _SMALL_PLAN:
            plans = self._planned(parts, documents)
        else:
            orders = [part.order.digest for part in parts]
            digest = digest_of("packs", _PACKS_VERSION, list(settings.facts), orders, list(self.lengths.digests))
            mapped = _mapped_once(
                orders_directory() / f"{digest}.packs",
                "packs-lock",
                _LOCK_SECONDS,
                f"plan the packs of epoch {number}",
                lambda path: _write_plans(path, self._planned(parts, documents)),
                lambda file: int.from_bytes(file[:_WORD], "little") == len(file),
            )
            size, begin = int.from_bytes(mapped[_WORD : 2 * _WORD], "little"), 2 * _WORD
            first = -(-(begin + size) // _ALIGNMENT) * _ALIGNMENT
            plans = [
                [
                    PackPlan.of_arrays(
                        settings.in_units,
                        {
                            name: np.frombuffer(mapped, dtype, length, first + start)
                            for name, (dtype, length, start) in arrays.items()
                        },
                    )
                    for arrays in of_part
                ]
                for of_part in json.loads(mapped[begin : begin + size])
            ]
        epoch = PackedEpoch(parts, plans, self.lengths, settings.multiple)
        if not len(epoch):  # a search for the next epoch with batches would never end
            raise ConfigError(
                f"epoch {number} has no pack: none of its {documents} documents has a token that is kept",
                hint=f"check {self.pack.option}.lengths and {self.pack.option}.longer, and what is selected",
                option=f"{self.pack.option}.lengths",
            )
        return epoch

    def _planned(self, parts: Sequence[PackedPart], documents: int) -> list[list[PackPlan]]:
        """Plan the packs of an epoch's parts, with a progress bar if there are many documents."""
        started, settings = perf_counter(), self.pack.settings()
        self.lengths.gather()
        try:
            if documents <= _SMALL_PLAN:
                plans = list(plan_epoch(parts, self.lengths, settings))
            else:
                what = f"planning the packs of epoch {parts[0].order.epoch}"
                with self.lengths.shown.here(), progress(documents, "documents", what) as report:
                    plans = list(plan_epoch(parts, self.lengths, settings, progress=report))
        finally:
            self.lengths.release()
        seconds = perf_counter() - started
        if seconds > _SLOW_SECONDS:
            _log.info("packs of %d documents were planned in %.1f s", documents, seconds)
        return plans


def _write_plans(path: Path, plans: list[list[PackPlan]]) -> None:
    """Write a file of plans: the lengths of the file and of a header, the header in JSON, and arrays."""
    header, stop = list[list[dict[str, tuple[str, int, int]]]](), 0
    for of_part in plans:
        header.append([])
        for plan in of_part:
            arrays = {}
            for name, array in plan.arrays().items():
                arrays[name] = (array.dtype.str, len(array), stop)
                stop += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
            header[-1].append(arrays)
    head = json.dumps(header).encode()
    first = -(-(2 * _WORD + len(head)) // _ALIGNMENT) * _ALIGNMENT
    with path.open("wb") as file:
        file.write((first + stop).to_bytes(_WORD, "little") + len(head).to_bytes(_WORD, "little") + head)
        for of_part, of_header in zip(plans, header, strict=True):
            for plan, arrays in zip(of_part, of_header, strict=True):
                for name, array in plan.arrays().items():
                    file.seek(first + arrays[name][2])
                    file.write(np.ascontiguousarray(array).data)
        file.truncate(first + stop)
