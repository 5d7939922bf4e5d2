"""What a loader and its workers share, and how a worker takes hold of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import get_worker_info

from lightning_streaming.loading.batch_maker import BatchMaker
from lightning_streaming.loading.board import Board
from lightning_streaming.loading.cursor import Handover
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.parcels import Parcel, Sender
from lightning_streaming.loading.rng import rng_of_worker, seed_global_generators
from lightning_streaming.loading.slots import BatchSlots
from lightning_streaming.loading.worker import prepare_worker_process


@dataclass(frozen=True, slots=True)
class Link:
    """Shared memory of a loader and of the workers that it has started together, for as long as they live."""

    handover: Handover
    """Where the pass begins."""
    board: Board
    """What each batch took."""
    slots: BatchSlots | None
    """The batches themselves; None where torch is left to send them."""

    def sender(self) -> Sender | None:
        """For workers: puts batches where :meth:`received` finds them."""
        return None if self.slots is None else Sender(self.slots)

    def received(self, batch: Any) -> Any:
        """The batch as it was collated, from what torch hands out."""
        return batch.open(self.slots) if isinstance(batch, Parcel) and self.slots else batch


def start_worker(link: Link, maker: BatchMaker, users_init: Callable[[int], None] | None, worker: int) -> None:
    """What a worker process does first: its shield, its loader, its random generators, then what the user asked for."""
    prepare_worker_process()
    info = get_worker_info()
    assert info is not None, "torch calls this in workers"
    assert isinstance(info.dataset, StreamingDataset), "the loader's own"
    maker.meter.write_to(link.board, worker)
    info.dataset.follow(link.handover, maker)
    start = link.handover.assigned()
    seed_global_generators(rng_of_worker(start.shuffle_seed, *start.cursor, start.world.rank, worker))
    if users_init is not None:
        users_init(worker)
