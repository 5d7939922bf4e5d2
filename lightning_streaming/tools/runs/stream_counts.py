"""Samples that an epoch has read of each stream, counted by its order; and where the files of streams are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import CacheConfig
from lightning_streaming.dataset.stream import Stream
from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.dataset import StreamingDataset, dataset_world
from lightning_streaming.reading.passes import drawn_sequence, passes_of
from lightning_streaming.resume.run import Run
from lightning_streaming.resume.state import Cursor, SavedPosition
from lightning_streaming.sequence.packing.packed import PackedEpoch
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.skips import Skipped, SkippedPositions, skipped_in_epoch
from lightning_streaming.tools.commands import read_run_files
from lightning_streaming.world import World

_ORDER = ("shuffle", "shuffle_algo", "shuffle_block_size", "sampling_method", "sampling_granularity", "batching_method")
"""What a fingerprint tells of the order; a later release may tell more."""
_AT_A_TIME = 1 << 20
_PACKS_AT_A_TIME = 1 << 14


def this_epoch_by_data(position: SavedPosition, places: Mapping[str, str], options: Mapping[str, Any]) -> list[int]:
    """Count each stream's samples of this epoch by its order, from the indexes of the data.

    Args:
        position: A state that lists its streams, of a run without phases and selections.
        places: Directory or URL of every stream.
        options: Arguments of their store's filesystem.

    Raises:
        ConfigError: Not exactly the streams of the state are given.
        StateMismatchError: The data is not that of the state.
    """
    assert position.fingerprint is not None, "it lists its streams"
    listed = position.fingerprint.streams
    if places.keys() != listed.keys():
        raise ConfigError(
            f"the state has the streams {', '.join(listed)}",
            hint="give --data NAME=PLACE for each of them",
            option="--data",
        )
    with TemporaryDirectory() as cache:
        streams = {
            name: Stream(
                remote=places[name],
                local=str(Path(cache) / str(number)),
                choose=stream.samples_drawn,
                storage={"options": options},
            )
            for number, (name, stream) in enumerate(listed.items())
        }
        dataset = _dataset(position, streams)
        starts = np.cumsum([0] + [stream.samples for stream in listed.values()])
        try:
            skipped = skipped_in_epoch(position.skipped.values(), position.cursor.epoch)
            run = passes_of(dataset).run.on(dataset_world(dataset))
            begins = run.normalise(position.cursor)
            return _count(Skipped(drawn_sequence(run.epoch(begins)), skipped), begins, starts)
        finally:
            dataset.close()


def this_epoch_by_config(position: SavedPosition, files: Sequence[str]) -> dict[str, int]:
    """Count each stream's samples of this epoch by its order, as the configuration of the run has it.

    Args:
        position: A state.
        files: Of the configuration; what a later one says overrides an earlier one.

    Returns:
        By stream; also of streams that are gone, as far as they were read by steps of phases that are finished.

    Raises:
        ConfigError: The configuration has no data to train on, or it cannot be read so.
        StateMismatchError: It is not that of the state's run.
    """
    data = read_run_files(files, {}).datamodule
    dataset = data.build_dataset("train", data.configs["train"])
    dataset.load_state_dict(position.as_state())
    world, batch_size = _machines(position)
    try:
        run = passes_of(dataset).run.on(world, batch_size)
        begins = run.normalise(position.cursor)
        return count_in_run(run, begins, skipped_in_epoch(position.skipped.values(), begins.epoch))
    finally:
        dataset.close()


def count_in_run(run: Run, cursor: Cursor, skipped: SkippedPositions) -> dict[str, int]:
    """Each stream's samples of an epoch that a run has read up to a place, which is settled, without those skipped."""
    names, plan = run.order.catalog.stream_names, run.order.plan
    counts, first = dict.fromkeys(names, 0), 0
    if run.order.packer is None and plan is not None and not run.order.is_composed and not skipped.runs:
        # Steps that were read to their end are known without their order, and without streams that are gone.
        step = int(np.searchsorted(plan.stops, cursor.sample_in_epoch, side="right"))
        counts |= dict(zip(plan.streams, plan.drawn[step].tolist(), strict=True))
        first = int(plan.stops[step - 1]) if step else 0
    starts = np.cumsum([0, *run.order.catalog.samples_per_stream])
    sequence = drawn_sequence(run.epoch(cursor))
    if isinstance(sequence, PackedEpoch):
        read = _documents_read(sequence, cursor, skipped, starts)
        return counts | dict(zip(names, read, strict=True))
    for name, count in zip(names, _count(Skipped(sequence, skipped), cursor, starts, first), strict=True):
        counts[name] += count
    return counts


def _documents_read(
    sequence: PackedEpoch, cursor: Cursor, skipped: SkippedPositions, starts: NDArray[np.int64]
) -> list[int]:
    """Of each stream the documents that begin in packs that were read: one whose parts are in several counts once."""
    counts = np.zeros(len(starts) - 1, np.int64)
    num_packs = skipped.kept_before(min(cursor.sample_in_epoch, len(sequence)))
    for first in range(0, num_packs, _PACKS_AT_A_TIME):
        packs = skipped.positions(np.arange(first, min(first + _PACKS_AT_A_TIME, num_packs)))
        rows = sequence.rows(packs)
        counts += np.histogram(rows.ids[rows.starts == 0], starts)[0]
    return [int(count) for count in counts]


def _dataset(position: SavedPosition, streams: Mapping[str, Stream]) -> StreamingDataset:
    assert position.fingerprint is not None, "it lists its streams"
    # Without the epoch's size, which is the sum of what is drawn from each.
    order = {name: getattr(position.fingerprint.order, name) for name in _ORDER}
    order = {name: value for name, value in order.items() if value is not None}
    world, batch_size = _machines(position)
    dataset = StreamingDataset(streams=streams, batch_size=batch_size, world=world, **order)
    dataset.load_state_dict(position.as_state())
    return dataset


def _machines(position: SavedPosition) -> tuple[World, int]:
    """Who may have read up to a position, and in batches of which size, as far as its order depends on that."""
    geometry = position.geometry or BatchGeometry(
        num_nodes=position.initial_physical_nodes or 1, ranks_per_node=1, batch_size=1
    )
    world = World(num_nodes=geometry.num_nodes, ranks_per_node=geometry.ranks_per_node, rank=0)
    return world, geometry.batch_size


def _count(sequence: Skipped, cursor: Cursor, starts: NDArray[np.int64], begin: int = 0) -> list[int]:
    read, counts = sequence.entries_before(cursor.sample_in_epoch), np.zeros(len(starts) - 1, np.int64)
    for first in range(begin, read, _AT_A_TIME):
        counts += np.histogram(sequence.ids(np.arange(first, min(first + _AT_A_TIME, read))), starts)[0]
    return [int(count) for count in counts]


def cache_configs(dataset: StreamingDataset) -> dict[str, CacheConfig]:
    """Where each stream's files are and go, by stream name."""
    return {name: stream.cache_config() for name, stream in dataset.streams.items()}


def is_in_place(cache: CacheConfig) -> bool:
    """Whether a stream's own directory is read, so that nothing has to be fetched."""
    return cache.source_directory() is not None
