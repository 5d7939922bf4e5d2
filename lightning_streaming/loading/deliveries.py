"""A dataset as torch's DataLoader is to see it: what it iterates over are deliveries of whole batches."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice

import numpy as np
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from lightning_streaming.errors import ConfigError, SampleError, StreamingError
from lightning_streaming.loading.collating import Collate, CollateError, collated
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.delivery import Delivery
from lightning_streaming.loading.failure import Failure
from lightning_streaming.loading.link import Link
from lightning_streaming.loading.making import told_keys
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.loading.reading import WorkerPass
from lightning_streaming.loading.tables import Batches, read_tables


class Deliveries(IterableDataset[Delivery]):
    """What one worker, or the loader itself, makes of a pass.

    Where batches are torch's ``default_collate`` of plain samples, and nobody looks at these before, they are cut out
    of tables. That gives the same batches, several times sooner.

    Args:
        dataset: What to read.
        link: Tells which pass, and takes the batches.
        collate: Makes batches of samples.
        drop_last: Whether to leave out a last batch that is not full.
        one_by_one: Whether each batch must be a delivery of its own.
    """

    def __init__(
        self, dataset: StreamingDataset, link: Link, collate: Collate, *, drop_last: bool, one_by_one: bool
    ) -> None:
        self.dataset = dataset
        self._handover = link.handover
        self._sender = link.sender()
        self._collate = collate
        self._drop_last = drop_last
        self._one_by_one = one_by_one

    def __iter__(self) -> Iterator[Delivery]:
        info = get_worker_info()
        return self._deliver(0, 1) if info is None else self._with_failure(info.id, info.num_workers)

    def _with_failure(self, worker: int, num_workers: int) -> Generator[Delivery, None, None]:
        try:
            yield from self._deliver(worker, num_workers)
        except StreamingError as error:
            yield Delivery(worker, Failure(error, worker), np.zeros((1, 0), np.int64))

    def _deliver(self, worker: int, num_workers: int) -> Generator[Delivery, None, None]:
        if self._sender is not None:
            self._sender.begin_pass()
        start, passes = self._handover.assigned(), passes_of(self.dataset)
        of_pass = passes.of_worker(self.dataset._making, start, worker, num_workers, is_measured=True)
        made = self._cut_out(of_pass) if self._may_cut_out(of_pass) else self._collated(of_pass, start.batch_size)
        made_before = 0
        with closing(made):
            try:
                for batches in made:
                    measures = of_pass.meter.end_batches(len(batches))
                    sent = batches if self._sender is None else self._sender.send(batches)
                    yield Delivery(worker, sent, measures)
                    of_pass.meter.begin_batch()
                    made_before += len(batches)
            except CollateError as error:
                raise SampleError(f"{error}{self._told_keys(of_pass, made_before, error.places)}") from error.__cause__

    def _told_keys(self, of_pass: WorkerPass, batch: int, places: Sequence[int]) -> str:
        """How an error names samples of a batch. Whoever iterates in a way of their own may be at others."""
        if not places or not self._iterates_as_usual():
            return ""
        keys = of_pass.keys_of_batch(batch)
        return told_keys([keys[place] for place in places])

    def _may_cut_out(self, of_pass: WorkerPass) -> bool:
        """Whether samples may be plain, and nobody is to see them before they are collated."""
        return self._collate is default_collate and self._iterates_as_usual() and of_pass.may_be_tables()

    def _iterates_as_usual(self) -> bool:
        return type(self.dataset).__iter__ is StreamingDataset.__iter__

    def _cut_out(self, of_pass: WorkerPass) -> Generator[Batches, None, None]:
        with closing(read_tables(of_pass, drop_last=self._drop_last, one_by_one=self._one_by_one)) as tables:
            for table in tables:
                yield list(table) if self._one_by_one else table

    def _collated(self, of_pass: WorkerPass, batch_size: int) -> Generator[Batches, None, None]:
        passes = passes_of(self.dataset)
        passes.assign(of_pass)
        samples = iter(self.dataset)
        while batch := list(islice(samples, batch_size)):
            if passes.take_assigned() is not None:
                raise ConfigError(
                    f"{type(self.dataset).__name__}.__iter__ hands out samples without going through "
                    "super().__iter__(), so their order and their place are not known and could not be saved; take "
                    "samples from there, override __getitem__ instead, or use torch's DataLoader"
                )
            if self._drop_last and len(batch) < batch_size:
                return
            yield [collated(self._collate, batch)]
