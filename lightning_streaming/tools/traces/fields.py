"""What the samples of a trace hold, as far as it is on this node, or wanted."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from lightning_streaming.cache import ShardCache
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.tools.render import render
from lightning_streaming.tools.traces.reads import Read


def fields_of(dataset: StreamingDataset, reads: Iterable[Read], *, fetch: bool) -> dict[int, dict[str, str]]:
    """The columns of samples, each value in a few words.

    Args:
        dataset: Reads single samples by their bytes alone, where it can.
        reads: Of which samples.
        fetch: Whether to read also those whose shard is not on this node.

    Returns:
        By sample id; samples that are not read are left out.

    Raises:
        FormatError: A sample is damaged.
        StorageError: It could not be fetched.
    """
    is_here = cache(lambda shard: _has(dataset, shard))
    shown: dict[int, dict[str, str]] = {}
    for read in reads:
        if read.sample in shown or not (fetch or is_here(passes_of(dataset).catalog.place(read.sample).shard)):
            continue
        values = StreamingDataset.get_item(dataset, read.sample)  # the columns, whatever a subclass makes of them
        shown[read.sample] = {column: render(value) for column, value in values.items()}
    return shown


def _has(dataset: StreamingDataset, shard: int) -> bool:
    """Whether a shard is on this node; nothing is fetched to find out."""
    stream = dataset.streams[int(passes_of(dataset).catalog.stream_of_shard[shard])]
    return ShardCache(stream.cache_config()).has(passes_of(dataset).catalog.shards[shard])
