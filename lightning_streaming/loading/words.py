"""Datasets and loaders in a line, for whoever prints one: nothing is read for it, and nothing secret is in it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.loading.stream import Stream
from lightning_streaming.order.deal import Deal
from lightning_streaming.storage import mask_url

if TYPE_CHECKING:
    from lightning_streaming.loading.dataloader import StreamingDataLoader

_MOST_STREAMS = 4
"""Streams that are shown one by one."""


def words_of_dataset(streams: Mapping[str, Stream], catalog: Catalog | None, place: Cursor) -> str:
    """A dataset as its ``repr`` shows it.

    Args:
        streams: By name.
        catalog: Of the data; None as long as no index has been read.
        place: Where the next sample is.
    """
    shown = [f"{name}={_where(stream)!r}" for name, stream in islice(streams.items(), _MOST_STREAMS)]
    more = len(streams) - len(shown)
    if more:
        shown.append(f"and {more} more streams")
    size = "index not read" if catalog is None else f"{catalog.num_samples} samples"
    return f"<StreamingDataset: {', '.join(shown)}; {size}; at {_place(place)}>"


def words_of_loader(loader: StreamingDataLoader) -> str:
    """A loader as its ``repr`` shows it."""
    settings = f"batch_size={loader.batch_size}, num_workers={loader.num_workers}"
    return f"<StreamingDataLoader: {settings}; at {_place(loader.cursor())}; of {loader.dataset!r}>"


def words_if_empty(epoch: Deal, drop_last: bool) -> str | None:
    """Why an epoch has no batch; None if it has some.

    Args:
        epoch: How a whole one is dealt.
        drop_last: Whether a last batch that is not full is left out.
    """
    if epoch.num_batches(drop_last) or not drop_last:
        return None
    samples = epoch.samples_per_rank()
    ranks = "the only rank" if epoch.num_ranks == 1 else f"each of {epoch.num_ranks} ranks"
    return (
        f"drop_last=True leaves no batch at all: an epoch has {samples} samples for {ranks}, and a batch has "
        f"{epoch.batch_size}; pass drop_last=False, a batch_size of {samples} at most, or more data"
    )


def _where(stream: Stream) -> str:
    place = stream.local if stream.remote is None else stream.remote
    return mask_url(str(place))


def _place(place: Cursor) -> str:
    return f"epoch {place.epoch}, sample {place.sample_in_epoch}"
