"""torch's DataLoader as the carrier of deliveries: it runs the workers, and never sees a sample."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lightning_streaming.loading.deliveries import Deliveries
from lightning_streaming.loading.delivery import Delivery
from lightning_streaming.loading.link import Link, start_worker
from lightning_streaming.loading.worker import signals_held_back

Measured = tuple[Any, NDArray[np.int64]]
"""A batch, and what it took to make, as :meth:`Meter.end_batches` says."""


def carried(loader: DataLoader[Any], deliveries: Deliveries, link: Link) -> Iterator[Delivery]:
    """torch's iterator over deliveries, run by all that a loader was told: its workers, pinning, timeout, ...

    Where workers live on from pass to pass, it stays the loader's own, and then goes on with what it was first given.
    """
    twin = object.__new__(type(loader))
    # Past torch's refusal of changes, and past what a subclass pickles of itself; but without what Lightning notes, so
    # that it notes no iterator.
    vars(twin).update((name, value) for name, value in vars(loader).items() if not name.startswith("__pl_"))
    vars(twin).update(
        dataset=deliveries,
        batch_size=None,
        batch_sampler=None,
        drop_last=False,
        collate_fn=_as_it_is,
        worker_init_fn=partial(start_worker, link, deliveries.dataset, loader.worker_init_fn),
    )
    if not loader.num_workers:
        return DataLoader.__iter__(twin)
    with signals_held_back((loader.multiprocessing_context or multiprocessing).get_start_method()):
        iterator = DataLoader.__iter__(twin)
    vars(loader)["_iterator"] = twin._iterator
    return iterator


def in_turn(deliveries: Iterator[Delivery], link: Link, num_workers: int) -> Iterator[Measured]:
    """The batches of all workers in order: the first of each, the second of each, and so on.

    Args:
        deliveries: Those of each worker in order, from whichever worker next.
        link: Has what is in them.
        num_workers: How many workers there are; 0 counts as one.
    """
    arrived = [deque[Iterator[Measured]]() for _ in range(max(1, num_workers))]
    for batches in cycle(arrived):
        measured = None
        while measured is None:
            while not batches:
                delivery = next(deliveries, None)
                if delivery is None:
                    return
                made = link.opened(delivery)
                arrived[made.worker].append(zip(made.batches, made.measures, strict=True))
            measured = next(batches[0], None)
            if measured is None:
                batches.popleft()
        yield measured


def _as_it_is(delivery: Delivery) -> Delivery:
    return delivery
