"""What a loader and its workers share, and how a worker takes hold of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.utils.data import get_worker_info

from lightning_streaming.loading.cursor import Handover
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.delivery import Delivery
from lightning_streaming.loading.parcels import Parcel, Sender
from lightning_streaming.loading.rng import rng_of_worker, seed_global_generators
from lightning_streaming.loading.slots import BatchSlots
from lightning_streaming.loading.worker import prepare_worker_process


@dataclass(frozen=True, slots=True)
class Link:
    """Shared memory of a loader and of the workers that it has started together, for as long as they live."""

    handover: Handover
    """Where the pass begins."""
    slots: BatchSlots | None
    """The batches themselves; None where torch is left to send them."""

    def sender(self) -> Sender | None:
        """For workers: puts batches where :meth:`opened` finds them."""
        return None if self.slots is None else Sender(self.slots)

    def opened(self, delivery: Delivery) -> Delivery:
        """The delivery as its worker made it, from what torch hands out. To be called once for each."""
        parcel = delivery.batches
        if not isinstance(parcel, Parcel):
            return delivery
        assert self.slots is not None, "there the parcel is"
        return delivery._replace(batches=parcel.open(self.slots))


def start_worker(link: Link, dataset: StreamingDataset, users_init: Callable[[int], None] | None, worker: int) -> None:
    """What a worker process does first: its shield, its random generators, then what the user asked for."""
    prepare_worker_process()
    # torch knows the deliveries; a user's code that asks for the dataset, here or in a transform, means their own.
    object.__setattr__(get_worker_info(), "dataset", dataset)
    start = link.handover.assigned()
    seed_global_generators(rng_of_worker(start.shuffle_seed, *start.cursor, start.world.rank, worker))
    if users_init is not None:
        users_init(worker)
