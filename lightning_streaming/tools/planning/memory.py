"""What a planned run needs besides shards: memory for order, lengths and batches; and how many tokens samples have."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.options.packing import PackingConfig
from lightning_streaming.reading.dataset import StreamingDataset
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.packs.types import ColumnTypes, stored_types
from lightning_streaming.reading.passes import passes_of
from lightning_streaming.sequence.packing.packed import rows_per_entry
from lightning_streaming.sequence.phased import Mixture
from lightning_streaming.tools.runs.traced_run import TracedRun

_TOKENS = re.compile(r"ndarray:u?int(?:8|16|32|64):(\d+)")
_NAMES = ("input_ids", "tokens", "token_ids")
"""Columns that are taken for the tokens of a sample, where there are several."""
_PREFETCH_FACTOR = 2
"""Batches that torch has each worker prepare unless told otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that a node takes, once for all of its processes but where it says otherwise."""

    order: int
    """Of the orders that are drawn, in files of the runtime directory that all processes map."""
    lengths: int
    """Of documents and of the plan of their packs, in mapped files."""
    index: int
    """Of what the indexes say of shards."""
    batches: int
    """Of batches that workers have ready, of all ranks."""

    @property
    def total(self) -> int:
        """Altogether."""
        return self.order + self.lengths + self.index + self.batches


def memory_of(run: TracedRun, num_epochs: int) -> Memory:
    """What a run needs on a node.

    Args:
        run: The run.
        num_epochs: That it reads.
    """
    loader, order = run.loader, run.order.order
    catalog = passes_of(loader.dataset).catalog
    sequence = run.order.epoch(run.begins).sequence
    first = order.first_draw(0)
    drawn = 0
    if first.is_drawn and order.mixture is None:
        drawn = len(first) * first.dtype.itemsize * min(2, max(1, num_epochs))  # the next is made while one is read
    elif first.is_drawn:
        assert order.mixture is not None, "looked at above"
        drawn = 2 * _longest_step(order.mixture) * first.dtype.itemsize
    lengths = 0
    if order.packer is not None:
        lengths = 4 * sum(index.num_samples for index in catalog.indexes) + 4 * len(sequence)
        lengths += round(2 * len(sequence) * rows_per_entry(sequence))
    ready = max(1, batches_ahead(loader))
    sample_bytes = float(np.average(catalog.mean_sample_bytes, weights=np.maximum(catalog.samples_per_shard, 1e-9)))
    samples = run.order.epoch(run.begins).partition.geometry.batch_size * rows_per_entry(sequence)
    tables = (index.shards for index in catalog.indexes)
    return Memory(
        order=drawn,
        lengths=lengths,
        index=sum(one.samples.nbytes + one.sizes.nbytes + one.text.nbytes + one.text_stops.nbytes for one in tables),
        batches=round(run.ranks_per_node * ready * samples * sample_bytes),
    )


def batches_ahead(loader: StreamingDataLoader) -> int:
    """Batches that the workers of a rank make before they are asked for."""
    return loader.num_workers * (loader.prefetch_factor or _PREFETCH_FACTOR)


def _longest_step(mixture: Mixture) -> int:
    return int(np.diff(mixture.plan.stops, prepend=0).max())


def gathered_bytes(run: TracedRun) -> int:
    """Bytes of a batch, where workers read as many batches at once as are quick to gather; 0 where one by one."""
    loader, dataset = run.loader, run.loader.dataset
    passes, packing = passes_of(dataset), passes_of(dataset).run.asked.pack
    if loader.collate_fn is not default_collate or not dataset._are_as_stored():
        return 0
    batch_size = run.order.epoch(run.begins).partition.geometry.batch_size
    if packing is None:
        return round(batch_size * float(np.mean(passes.catalog.mean_sample_bytes))) if passes.may_be_plain() else 0
    if not isinstance(packing, PackingConfig) or not passes.may_be_joined():
        return 0
    types = ColumnTypes(packing, lambda: stored_types(packing, passes.catalog))
    bytes_of_token = sum(types.unseen(name).itemsize for name in packing.columns)
    return batch_size * packing.capacity * bytes_of_token


def tokens_of_samples(dataset: StreamingDataset) -> NDArray[np.int64]:
    """Of each stream the tokens of a sample, where its index says that all have equally many; else 0."""
    catalog = passes_of(dataset).catalog
    found = np.zeros(len(catalog.stream_names), np.int64)
    told: dict[int, set[int]] = {}
    for shard, info in catalog.examples():
        told.setdefault(int(catalog.stream_of_shard[shard]), set()).add(_tokens_of(info))
    for stream, numbers in told.items():
        found[stream] = next(iter(numbers)) if len(numbers) == 1 else 0
    return found


def _tokens_of(info: ShardInfo) -> int:
    names, encodings = info.schema.get("column_names", ()), info.schema.get("column_encodings", ())
    columns = {
        name: int(match[1])
        for name, encoding in zip(names, encodings, strict=False)
        if (match := _TOKENS.fullmatch(str(encoding)))
    }
    if len(columns) == 1:
        return next(iter(columns.values()))
    return next((columns[name] for name in _NAMES if name in columns), 0)
