"""Data that grows during a run: between two epochs the ranks agree how much of it they read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.reading.dataset import StreamingDataset, dataset_world
from lightning_streaming.reading.passes import source_of
from lightning_streaming.reading.position import position_of, run_of
from lightning_streaming.reading.ranks import can_ask_others, from_all
from lightning_streaming.sequence.base import digest_of

if TYPE_CHECKING:
    from lightning_streaming.reading.loader import StreamingDataLoader

_log = package_logger(__name__)


class _Head(NamedTuple):
    """The first shards of a stream."""

    num_shards: int
    digest: str


class _Look(NamedTuple):
    """The new shards that a rank sees of the streams that are followed."""

    heads: Mapping[str, _Head]
    """Of those that have more shards."""
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
            f"an epoch keeps the shards that it began with, and the loader stands at {cursor}",
            hint="call refresh() between two epochs",
        )
    if not can_ask_others():
        raise ConfigError(
            "ranks must agree how much they read of data that grows, which takes torch.distributed",
            hint="initialise it, or start the run again to read more",
        )
    newer = dict[str, IndexCache]()
    (offered, *_) = from_all(lambda rank: _look(dataset, followed, newer) if rank == 0 else _Look({}))
    seen = [offered]
    if offered.heads:
        seen = from_all(
            lambda rank: offered if rank == 0 else _look(dataset, list(offered.heads), newer, offered.heads)
        )
    for rank, one in enumerate(seen):
        if one.problem and not dataset_world(dataset).rank:
            prefix = f"rank {rank}: " if len(seen) > 1 else ""
            _log.warning("appended data is not read in epoch %d: %s%s", cursor.epoch, prefix, one.problem)
    if not offered.heads or any(one.heads != offered.heads for one in seen):
        return False
    from_all(lambda _: _read_more(loader, newer, {name: head.num_shards for name, head in offered.heads.items()}))
    return True


def check_same_data(loader: StreamingDataLoader, reader: str = "") -> None:
    """Check that all ranks see the same data, which may be appended to while they start.

    To be called on all ranks; without ``torch.distributed`` it checks nothing.

    Args:
        loader: This rank's loader.
        reader: What messages call it, where there are several.

    Raises:
        ConfigError: They do; on all ranks alike.
    """
    prefix = f"{reader}: " if reader else ""
    seen = from_all(lambda _: _SeenData.by(loader))
    others = [rank for rank, one in enumerate(seen) if one != seen[0]]
    if others:
        other = seen[others[0]]
        raise ConfigError(
            f"{prefix}rank 0 sees {seen[0].num_shards} shards of {seen[0].num_samples} samples, and rank {others[0]} "
            f"{other.num_shards} of {other.num_samples}, or others ({len(others)} of {len(seen)} ranks see other data "
            "than rank 0)",
            hint="start again while no process appends to the data, and give all ranks the same streams",
        )


class _SeenData(NamedTuple):
    """The data as one rank sees it."""

    num_shards: int
    num_samples: int
    digest: str

    @classmethod
    def by(cls, loader: StreamingDataLoader) -> _SeenData:
        state = loader.state_dict()
        catalog = source_of(loader.dataset).catalog
        return cls(len(catalog.shards), catalog.num_samples, digest_of(json.dumps(state["fingerprint"])))


def _look(
    dataset: StreamingDataset,
    streams: list[str],
    newer: dict[str, IndexCache],
    offered: Mapping[str, _Head] | None = None,
) -> _Look:
    """Find more shards of some streams; if ``offered`` is given, those that the first rank has seen.

    Args:
        dataset: Which has read them until now.
        streams: Their names.
        newer: Takes the indexes that were found.
        offered: What the first rank has seen.
    """
    heads, source = dict[str, _Head](), source_of(dataset)
    known = dict(zip(source.catalog.stream_names, source.catalog.indexes, strict=True))
    try:
        for name in streams:
            found = source.index_anew(name)
            index, before = found.read(), known[name]
            if not index.begins_like(before):
                return _Look({}, f"stream {name!r} is other data by now, not only longer")
            count = len(index.shards) if offered is None else offered[name].num_shards
            if len(index.shards) < count:
                return _Look(
                    {}, f"stream {name!r} has {len(index.shards)} shards there, and {count} for the first rank"
                )
            if count > len(before.shards):
                heads[name], newer[name] = _Head(count, index.head(count).data_digest), found
    except StreamingError as error:
        return _Look({}, str(error))
    return _Look(heads)


def _read_more(loader: StreamingDataLoader, newer: Mapping[str, IndexCache], num_shards: Mapping[str, int]) -> None:
    state = loader.state_dict()
    loader.close()
    source_of(loader.dataset).read_more(newer, num_shards)
    loader.load_state_dict(state)
    run_of(loader)  # what is wrong with the new shards is said now
