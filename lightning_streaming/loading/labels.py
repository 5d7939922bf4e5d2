"""What a loader adds to its batches on request: the keys of their samples, and a mask of those that count.

Both are worked out in the process that consumes the batches, from the plan of the pass alone. Nothing comes from the
workers, so it is all the same what transform, collate and pinning make of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.cursor import PassStart
from lightning_streaming.loading.sample_key import Pass, SampleKeys
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.first_reads import are_first_reads
from lightning_streaming.order.plan import EpochPlan

_WINDOW_SAMPLES = 8192
"""Samples whose keys are worked out together: enough for numpy to be fast, few enough to start at once."""
VALID = "valid"
"""Name of the mask in a batch."""

Label = Callable[[Any, SampleKeys], Any]
"""Adds something to a batch whose keys these are."""


def keys_of_batches(start: PassStart, plan: EpochPlan, deal: Deal, catalog: Catalog) -> Iterator[SampleKeys]:
    """The keys of each batch that one rank reads in a pass, the last one maybe of fewer samples."""
    node, rank_of_node = start.world.node, start.world.rank_of_node
    of_pass = Pass(tuple(catalog.stream_names), start.cursor.epoch, start.shuffle_seed)
    first_shards = np.cumsum([0, *catalog.shards_per_stream[:-1]])
    num_batches = deal.num_batches()
    step = max(1, _WINDOW_SAMPLES // deal.batch_size)
    for first in range(0, num_batches, step):
        batches = np.arange(first, min(first + step, num_batches))
        positions = deal.batches(batches, node, rank_of_node)
        are_first = are_first_reads(plan.sequence, deal, batches, node, rank_of_node)
        read = positions >= 0  # only an epoch's last batch has gaps
        shards, indexes = catalog.places(plan.ids(positions[read]))
        streams = catalog.stream_of_shard[shards]
        rows = np.stack([positions[read], streams, shards - first_shards[streams], indexes], axis=1)
        first_reads = are_first[read]
        stops = np.cumsum(read.sum(axis=1)).tolist()
        for begin, stop in zip([0, *stops[:-1]], stops, strict=True):
            yield SampleKeys.make(of_pass, rows[begin:stop], first_reads[begin:stop])


def labelled(batch: Any, keys: SampleKeys, labels: Sequence[Label]) -> Any:
    """The batch with one label after another."""
    for label in labels:
        batch = label(batch, keys)
    return batch


def add_valid(batch: Any, keys: SampleKeys) -> Any:
    """The batch, a dict, with the mask ``valid`` of those samples that no rank has read before.

    Raises:
        ConfigError: It is no dict, or has such an entry already.
    """
    if not isinstance(batch, MutableMapping):
        raise ConfigError(
            f"with_valid adds an entry to batches that are dicts, but this one is a {type(batch).__name__}; use "
            "with_keys=True, which serves every kind of batch, and keys.valid"
        )
    if VALID in batch:
        raise ConfigError(
            f"with_valid adds an entry {VALID!r}, but the batch has one already; rename that column, or use "
            "with_keys=True and keys.valid"
        )
    batch = copy(batch)  # a collate function may hand out the same dict each time
    batch[VALID] = keys.valid
    return batch
