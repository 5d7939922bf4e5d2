"""How many samples of each stream come before a place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.cursor import PassStart
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.loading.state import SavedPosition
from lightning_streaming.loading.stream import Stream
from lightning_streaming.order.gaps import Gaps, gaps_in
from lightning_streaming.order.layout import BatchGeometry
from lightning_streaming.world import World

_AT_A_TIME = 1 << 20
_ORDER = (
    "shuffle",
    "shuffle_algo",
    "shuffle_block_size",
    "sampling_method",
    "sampling_granularity",
    "batching_method",
)
"""What a fingerprint tells of the order; a later release may tell more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSeen:
    """What was read of one stream, if every epoch was read with the settings that the state tells."""

    name: str
    samples: int
    drawn: int
    """Samples of it in each epoch."""
    before: int | None
    """Samples of it in the epochs that are finished; None where the run has skipped some, and maybe of others."""
    this_epoch: int | None
    """Samples of it in this epoch; None where only the data could tell."""

    @property
    def total(self) -> int | None:
        """In all epochs."""
        return None if self.this_epoch is None or self.before is None else self.before + self.this_epoch


def seen_by_fingerprint(position: SavedPosition) -> list[StreamSeen]:
    """What the state alone tells. Empty if it does not list its streams: it has none, or is too long for that."""
    streams: Mapping[str, Mapping[str, Any]] = (position.fingerprint or {}).get("streams", {})
    if any("samples drawn" not in stream for stream in streams.values()):
        return []
    epoch, sample = position.cursor
    skipped = position.skipped.values()
    alone = gaps_in(skipped, epoch).kept_before(sample) if len(streams) == 1 else None
    has_skipped = any(start < stop and start[0] < epoch for start, stop in skipped)
    return [
        StreamSeen(
            name=name,
            samples=stream["samples"],
            drawn=stream["samples drawn"],
            before=None if has_skipped else epoch * stream["samples drawn"],
            this_epoch=0 if sample == 0 else alone,
        )
        for name, stream in streams.items()
    ]


def this_epoch_by_data(position: SavedPosition, places: Mapping[str, str], options: Mapping[str, Any]) -> list[int]:
    """Count each stream's samples of this epoch by its order, from the indexes of the data.

    Args:
        position: A state that lists its streams.
        places: Directory or URL of every stream.
        options: Arguments of their store's filesystem.

    Raises:
        ConfigError: Not exactly the streams of the state are given.
        StateMismatchError: The data is not that of the state.
    """
    assert position.fingerprint is not None, "it lists its streams"
    listed: Mapping[str, Mapping[str, Any]] = position.fingerprint["streams"]
    if places.keys() != listed.keys():
        raise ConfigError(f"the state has the streams {', '.join(listed)}; give --data NAME=PLACE for each of them")
    with TemporaryDirectory() as cache:
        streams = {
            name: Stream(
                remote=places[name],
                local=str(Path(cache) / str(number)),
                choose=stream["samples drawn"],
                storage_options=options,
            )
            for number, (name, stream) in enumerate(listed.items())
        }
        dataset, start = _dataset(position, streams)
        starts = np.cumsum([0] + [stream["samples"] for stream in listed.values()])
        try:
            gaps = gaps_in(position.skipped.values(), position.cursor.epoch)
            return _count(dataset, start, gaps, starts)
        finally:
            dataset.close()


def _dataset(position: SavedPosition, streams: Mapping[str, Stream]) -> tuple[StreamingDataset, PassStart]:
    assert position.fingerprint is not None, "it lists its streams"
    # Without the epoch's size, which is the sum of what is drawn from each.
    order = {name: position.fingerprint["order"][name] for name in _ORDER}
    order = {name: value for name, value in order.items() if value is not None}
    geometry = position.geometry or BatchGeometry(
        num_nodes=position.initial_physical_nodes or 1, ranks_per_node=1, batch_size=1
    )
    world = World(num_nodes=geometry.num_nodes, ranks_per_node=geometry.ranks_per_node, rank=0)
    dataset = StreamingDataset(streams=streams, batch_size=geometry.batch_size, world=world, **order)
    dataset.load_state_dict(position.as_state())
    return dataset, passes_of(dataset).begin(dataset.current_world(), geometry.batch_size)


def _count(dataset: StreamingDataset, start: PassStart, gaps: Gaps, starts: NDArray[np.int64]) -> list[int]:
    plan, counts = passes_of(dataset).epochs.plan(start), np.zeros(len(starts) - 1, np.int64)
    read = gaps.kept_before(start.cursor.sample_in_epoch)
    for first in range(0, read, _AT_A_TIME):
        ids = plan.ids(gaps.positions(np.arange(first, min(first + _AT_A_TIME, read))))
        counts += np.histogram(ids, starts)[0]
    return [int(count) for count in counts]
