"""The position of a loader in its run, and appended data: between two epochs ranks agree how much of it they read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.reading.dataset import StreamingDataset, dataset_world, run_state_of, source_of
from lightning_streaming.reading.ranks import can_ask_others, from_all
from lightning_streaming.resume.run import Run
from lightning_streaming.resume.state import Cursor
from lightning_streaming.sequence.base import digest_of

if TYPE_CHECKING:
    from lightning_streaming.reading.loader import StreamingDataLoader

_log = package_logger(__name__)


def run_of(loader: StreamingDataLoader) -> Run:
    """Return the run as a loader reads it: what its batches, their ends and a saved position mean."""
    return run_state_of(loader.dataset).on(dataset_world(loader.dataset), loader._samples_per_batch, loader.drop_last)


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Position of a loader, for a trainer that fetches batches ahead of the steps that use them."""

    loader: StreamingDataLoader

    def cursor(self) -> Cursor:
        """Return where the next batch to be yielded begins."""
        end = self.loader._progress.end
        return run_state_of(self.loader.dataset).next_cursor() if end is None else end

    def claim(self) -> Cursor | None:
        """Return where the oldest batch ends that was yielded and not claimed yet; None if there is none.

        A trainer that consumes batches later than they are yielded claims each when it is done with it, and so knows
        the position that is safe to save.
        """
        unclaimed = self.loader._progress.unclaimed
        return unclaimed.popleft() if unclaimed else None

    def seek(self, cursor: Cursor) -> None:
        """Let the next pass begin at ``cursor``; a pass under way ends."""
        self.loader._forget_pass()
        run_state_of(self.loader.dataset).seek(cursor)

    def normalised(self, cursor: Cursor) -> Cursor:
        """Return the same position, with the end of an epoch written as the beginning of the next."""
        return run_state_of(self.loader.dataset).normalise(run_of(self.loader), cursor)

    def batches_of_epoch(self) -> int:
        """Count the batches, on each rank, of the whole epoch of the next batch, without those that are skipped."""
        run = run_of(self.loader)
        return run.batches_in_epoch(run.normalise(self.cursor()))

    @property
    def samples_per_global_batch(self) -> int:
        """Samples of one batch over all ranks that read different ones."""
        return self.loader._samples_per_batch * dataset_world(self.loader.dataset).num_ranks


def position_of(loader: StreamingDataLoader) -> LoaderPosition:
    """Return the position of a loader."""
    return LoaderPosition(loader)


class _Head(NamedTuple):
    """The first shards of a stream."""

    num_shards: int
    digest: str


class _NewShards(NamedTuple):
    """The new shards that a rank sees of streams with ``follow_appends``."""

    heads: Mapping[str, _Head]
    """The streams that have more shards, up to the last that is read."""
    problem: str = ""
    """Why it sees none."""


def read_appended(loader: StreamingDataLoader) -> bool:
    """Read appended data from the next epoch on, as :meth:`StreamingDataLoader.refresh` documents."""
    dataset = loader.dataset
    followed = [name for name, stream in dataset.streams.items() if stream.follow_appends and not stream.joined]
    if not followed:
        return False
    position = position_of(loader)
    cursor = position.normalised(position.cursor())
    if cursor.sample_in_epoch:
        raise ConfigError(
            f"an epoch keeps the shards that it began with, and the loader is at {cursor}",
            hint="call refresh() between two epochs",
        )
    if not can_ask_others():
        raise ConfigError(
            "ranks must agree how much they read of data that grows, which takes torch.distributed",
            hint="initialise it, or start the run again to read more",
        )
    newer = dict[str, IndexCache]()
    (offered, *_) = from_all(lambda rank: _new_shards(dataset, followed, newer) if rank == 0 else _NewShards({}))
    seen = [offered]
    if offered.heads:
        seen = from_all(
            lambda rank: offered if rank == 0 else _new_shards(dataset, list(offered.heads), newer, offered.heads)
        )
    for rank, shards in enumerate(seen):
        if shards.problem and not dataset_world(dataset).rank:
            prefix = f"rank {rank}: " if len(seen) > 1 else ""
            _log.warning("appended data is not read in epoch %d: %s%s", cursor.epoch, prefix, shards.problem)
    if not offered.heads or any(shards.heads != offered.heads for shards in seen):
        return False

    def read_more() -> None:
        state = loader._state()
        loader.close()
        source_of(dataset).read_more(newer, {name: head.num_shards for name, head in offered.heads.items()})
        loader.load_state_dict(state)
        run_of(loader)  # raises errors of the new shards now

    from_all(lambda _: read_more())
    return True


def _new_shards(
    dataset: StreamingDataset,
    streams: list[str],
    newer: dict[str, IndexCache],
    offered: Mapping[str, _Head] | None = None,
) -> _NewShards:
    """Return the new shards of some streams; if ``offered`` is not None, up to those that the first rank sees.

    Args:
        dataset: The dataset, which has read them until now.
        streams: Their names.
        newer: Receives their indexes.
        offered: The new shards that the first rank sees.
    """
    heads, source = dict[str, _Head](), source_of(dataset)
    known = dict(zip(source.catalog.stream_names, source.catalog.indexes, strict=True))
    try:
        for name in streams:
            cache = source.catalogs.caches[name].latest_index()
            index, before = cache.read(), known[name]
            if not index.begins_like(before):
                return _NewShards({}, f"stream {name!r} is other data by now, not only longer")
            count = len(index.shards) if offered is None else offered[name].num_shards
            if len(index.shards) < count:
                return _NewShards(
                    {}, f"stream {name!r} has {len(index.shards)} shards there, and {count} for the first rank"
                )
            if count > len(before.shards):
                heads[name], newer[name] = _Head(count, index.head(count).data_digest), cache
    except StreamingError as error:
        return _NewShards({}, str(error))
    return _NewShards(heads)


class _SeenData(NamedTuple):
    """The data as one rank sees it."""

    num_shards: int
    num_samples: int
    digest: str

    @classmethod
    def by(cls, loader: StreamingDataLoader) -> _SeenData:
        """Return the data as the rank of this loader sees it."""
        state = loader._state()
        catalog = source_of(loader.dataset).catalog
        return cls(len(catalog.shards), catalog.num_samples, digest_of(json.dumps(state["fingerprint"])))


def check_same_data(loader: StreamingDataLoader, reader: str = "") -> None:
    """Check that all ranks see the same data, which may be appended to while they start.

    To be called on all ranks; without ``torch.distributed`` it checks nothing.

    Args:
        loader: This rank's loader.
        reader: Name of the loader in messages, where there are several.

    Raises:
        ConfigError: They do not; on all ranks alike.
    """
    prefix = f"{reader}: " if reader else ""
    seen = from_all(lambda _: _SeenData.by(loader))
    others = [rank for rank, data in enumerate(seen) if data != seen[0]]
    if others:
        other = seen[others[0]]
        raise ConfigError(
            f"{prefix}rank 0 sees {seen[0].num_shards} shards of {seen[0].num_samples} samples, and rank {others[0]} "
            f"{other.num_shards} of {other.num_samples}, or others ({len(others)} of {len(seen)} ranks see other data "
            "than rank 0)",
            hint="start again while no process appends to the data, and give all ranks the same streams",
        )
