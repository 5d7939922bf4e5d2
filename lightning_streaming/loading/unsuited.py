"""Settings that work and do not suit the data or the machines: what to tell about them, before the first pass."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.cursor import PassStart
from lightning_streaming.order.settings import OrderSettings


def unsuited(
    settings: OrderSettings, start: PassStart, catalog: Catalog, epoch_size: int, predownload: int | None
) -> Iterator[str]:
    """A sentence for each setting that does not suit, and what to do about it.

    Args:
        settings: With every default filled in.
        start: The pass that is about to begin.
        catalog: What there is to read.
        epoch_size: Samples drawn per epoch.
        predownload: Samples ahead of each worker for which shards are fetched; None where nobody has chosen, or there
            is nothing to fetch.
    """
    if epoch_size < start.num_canonical_nodes:
        yield (
            f"an epoch has {epoch_size} samples, fewer than its {start.num_canonical_nodes} canonical nodes, so that "
            f"some are read more than once to give each node as many; pass num_canonical_nodes= of at most {epoch_size}"
        )
    ranks = start.world.num_ranks
    if epoch_size < ranks:
        yield (
            f"an epoch has {epoch_size} samples, fewer than the {ranks} ranks that read it, so that some are read on "
            f"several ranks at once; use at most {epoch_size} ranks, or a larger epoch_size="
        )
    largest = int(catalog.samples_per_shard.max())
    if settings.shuffle and settings.shuffle_algo == "py1e" and start.shuffle_block_size < largest:
        yield (
            f"shuffle_block_size={start.shuffle_block_size} is below the {largest} samples of the largest shard, whose "
            f"samples 'py1e' then mixes with few others; pass at least {largest}"
        )
    if predownload is not None and predownload < start.batch_size:
        yield (
            f"predownload={predownload} is below batch_size={start.batch_size}, so that each batch waits for shards "
            f"that could have been fetched ahead; pass at least {start.batch_size}, or leave it out for 8 batches"
        )
