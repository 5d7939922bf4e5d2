"""An epoch's order, made once per node and mapped by every process that reads it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.layout import orders_directory
from lightning_streaming.files import appears_whole, hold_lock
from lightning_streaming.order.draw import Order, draw_order, is_identity, order_digest
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape

_SMALL_EPOCH = 1 << 16
"""Samples up to which each process makes its own copy: half a megabyte and some milliseconds."""
_LOCK_SECONDS = 3600.0
_SUFFIX = ".order"


def shared_order(settings: OrderSettings, shape: DatasetShape, epoch: int) -> Order | None:
    """The order of one epoch, as :func:`lightning_streaming.order.draw.draw_order` makes it.

    A large one lies in a file of this node's runtime directory, named by a digest of all it depends on. Whoever takes
    the lock first makes the file; everyone maps it read-only, so more workers take no more memory. A process holds a
    shared ``flock`` on the file for as long as it maps it, and whoever makes an order removes those that nobody holds
    and what killed makers left: so finished epochs and killed runs leave at most one file, until the next run on this
    node.
    """
    if shape.epoch_size <= _SMALL_EPOCH or is_identity(settings, shape):
        return draw_order(settings, shape, epoch)
    directory = orders_directory()
    path = directory / (order_digest(settings, shape, epoch) + _SUFFIX)
    mapped = _map_if_present(path, shape.epoch_size)
    if mapped is not None:
        return mapped
    # One lock for all orders, so that its holder knows whatever is half written to be a dead maker's.
    with hold_lock(directory / "lock", _LOCK_SECONDS, f"make the order of epoch {epoch}"):
        mapped = _map_if_present(path, shape.epoch_size)
        if mapped is None:
            _remove_unused(directory)
            order = draw_order(settings, shape, epoch)
            assert order is not None, "only the identity needs none"
            with appears_whole(path) as partial:
                np.asarray(order).tofile(partial)
            mapped = _map_if_present(path, shape.epoch_size)
            if mapped is None:  # whoever cleans temporary directories was quicker
                return order
    return mapped


def _map_if_present(path: Path, samples: int) -> NDArray[np.int64] | None:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        found = os.fstat(file.fileno())
        # Removed between our open and our lock, or cut short when the machine went down.
        if found.st_nlink == 0 or found.st_size != samples * np.dtype(np.int64).itemsize:
            return None
        # The map keeps a duplicate of the descriptor, and with it the lock, until it is freed or the process dies.
        return np.memmap(file, dtype=np.int64, mode="r")


def _remove_unused(directory: Path) -> None:
    """Remove what no process maps. Must be called while holding the lock of the directory."""
    for path in directory.glob(f"*{_SUFFIX}*"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            path.unlink()
