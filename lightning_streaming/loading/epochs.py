"""The order of a dataset's epochs: settings, weights, skipped batches, and what a saved position says about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from textwrap import indent
from typing import Literal, get_args

from lightning_streaming.errors import ConfigError, StateError, StateMismatchError
from lightning_streaming.loading.fingerprint import Fingerprint, in_words, refusal
from lightning_streaming.loading.order_files import OrderAhead, shared_order
from lightning_streaming.loading.sample_source import SampleSource
from lightning_streaming.loading.state import Cursor, PassStart, SavedPosition
from lightning_streaming.order.batchings import Batched, batched
from lightning_streaming.order.draw import Shuffled
from lightning_streaming.order.partition import BatchGeometry, Partition, epoch_geometry, rank_layout
from lightning_streaming.order.settings import OrderSettings, SettledOrder
from lightning_streaming.order.skips import (
    NOTHING_SKIPPED,
    BatchRange,
    EpochPartitions,
    EpochPosition,
    Skipped,
    SkippedPositions,
    SkippedRange,
    TrainProgress,
    first_epoch_not_skipped,
    locate_batch_ranges,
    parse_batch_ranges,
    skipped_in_epoch,
)
from lightning_streaming.order.weights import DatasetShape, ResolvedWeights, StreamWeight, resolve_weights
from lightning_streaming.world import World

_log = logging.getLogger(__name__)
OnChange = Literal["error", "warn"]
"""What to do about a saved position whose data or order settings have changed since: refuse it, or say so and go on."""
_ALWAYS_FINE = 2**16
"""Canonical nodes that an epoch may have however few its samples: this many take seconds at most."""


class Epochs:
    """Every epoch of a dataset, as an order of sample ids.

    Args:
        settings: What the user wrote.
        stream_weights: Each stream's weight, in stream order.
        epoch_size: Samples per epoch, if the user chose.
        source: Where the data's sizes are known from; looked at only when they are needed.
        batch_size: Samples per batch on each rank, if it is known before the first pass.
        skip: Global batches of the run to leave out.
    """

    def __init__(
        self,
        settings: OrderSettings,
        stream_weights: Sequence[StreamWeight],
        epoch_size: int | None,
        source: SampleSource,
        batch_size: int | None = None,
        skip: Sequence[int | str] = (),
    ) -> None:
        self.skipped = _SkippedBatches(skip)
        self.reader = ""
        """What messages call whoever reads these epochs, where there are several: like "train loader 'text'"."""
        self._asked = settings
        self._settings = settings
        self._stream_weights = list(stream_weights)
        self._epoch_size = epoch_size
        self._source = source
        self._batch_size = batch_size
        self._drop_last = False
        self._ahead = OrderAhead()
        self._geometries: dict[int, BatchGeometry] = {}
        self._latest_sequence: tuple[tuple[SettledOrder, BatchGeometry, int], Batched] | None = None
        self._weights: ResolvedWeights | None = None
        self._initial_nodes: int | None = None
        self._resumed_from_nodes: int | None = None
        self._unchecked: tuple[SavedPosition, OnChange] | None = None
        self._may_end_early = False
        self._fingerprinted: tuple[OrderSettings, Fingerprint] | None = None

    @property
    def settings(self) -> OrderSettings:
        """The settings as they are by now: as asked, as saved, or with defaults filled in since the first pass."""
        return self._settings

    @property
    def initial_nodes(self) -> int | None:
        """Nodes of the run's first start, once they are known."""
        return self._initial_nodes

    @property
    def weights(self) -> ResolvedWeights:
        """Each stream's share of an epoch, in stream order."""
        if self._weights is None:
            sizes = self._source.catalog.samples_per_stream
            seed = self._settings.shuffle_seed
            self._weights = resolve_weights(self._stream_weights, sizes, self._epoch_size, seed)
        return self._weights

    def are_of(self, other: Epochs) -> bool:
        """Whether the same order of the same data was asked for."""
        if self._asked_for() != other._asked_for():
            return False
        mine, theirs = (
            {name: index.data_digest for name, index in zip(one.stream_names, one.indexes, strict=True)}
            for one in (self._source.catalog, other._source.catalog)
        )
        return list(mine.items()) == list(theirs.items())

    def settle(self, world: World) -> SettledOrder:
        """The settings with every default filled in. Canonical nodes stay what the first world made them.

        Raises:
            StateMismatchError: A position was loaded that belongs to other data or another order.
        """
        if self._initial_nodes is None:
            self._initial_nodes = world.num_nodes
        self._settings = settings = self._settings.settled(self._initial_nodes)
        nodes = settings.num_canonical_nodes
        if nodes > _ALWAYS_FINE:
            is_asked = nodes == self._asked.num_canonical_nodes
            _check_canonical_nodes(nodes, self.weights.epoch_size, is_asked=is_asked, told=self._told())
        self._check_loaded()
        return settings

    def load(self, saved: SavedPosition, on_change: OnChange) -> None:
        """Take seed and canonical nodes from a saved position. Its fingerprint is checked when the data is known."""
        if on_change not in get_args(OnChange):
            raise ConfigError(f"on_change must be one of {', '.join(get_args(OnChange))}, but got {on_change!r}")
        asked = self._asked.num_canonical_nodes
        if asked not in (None, 0, saved.num_canonical_nodes):
            words = "%snum_canonical_nodes=%s gives way to the saved %d"
            _log.warning(words, self._told(), asked, saved.num_canonical_nodes)
        # From what was asked, not from what has been settled since: the block size follows the canonical nodes.
        self._use(replace(self._asked, shuffle_seed=saved.shuffle_seed, num_canonical_nodes=saved.num_canonical_nodes))
        self.skipped.load(saved.skipped)
        self._initial_nodes = self._resumed_from_nodes = saved.initial_physical_nodes
        self._geometries = {} if saved.geometry is None else {saved.cursor.epoch: saved.geometry}
        self._unchecked = saved, on_change
        self._may_end_early = on_change == "warn"

    def start(self, cursor: Cursor, world: World, batch_size: int, drop_last: bool = False) -> PassStart:
        """All that a process must know to begin a pass at ``cursor``, which makes it the pass under way."""
        self._batch_size, self._drop_last = batch_size, drop_last
        self.skipped.tell(cursor, self._skipped_ranges(world), self._told())
        cursor = self.normalise(cursor, world)
        start = self._start_at(cursor, world, batch_size)
        # Whoever consumes batches later than they are handed out may still stand in the epoch before.
        before = {epoch: geometry for epoch, geometry in self._geometries.items() if epoch == cursor.epoch - 1}
        self._geometries = {**before, cursor.epoch: start.geometry}
        composed = self._settings.batching_method != "random"
        if composed and start.geometry.global_batch_size != world.num_ranks * batch_size:
            _log.warning(
                "%sepoch %d goes on with global batches of %d samples, made for %d nodes of %d ranks; read in steps of "
                "%d, these are not whole until the next epoch",
                self._told(),
                cursor.epoch,
                start.geometry.global_batch_size,
                start.geometry.num_nodes,
                start.geometry.ranks_per_node,
                world.num_ranks * batch_size,
            )
        return start

    def plan(self, start: PassStart) -> Batched:
        """The sample ids of a pass by position, with the seed and canonical nodes that ``start`` carries."""
        settings = self._settings_of(start)
        self._use(settings)
        order = Shuffled(settings, self._shape, start.cursor.epoch, shared_order)
        return batched(order.drawn(), start.geometry)

    def prepare_next(self, start: PassStart) -> None:
        """Begin to make the order of the epoch after this pass, so that nobody waits for it then."""
        self._ahead.prepare(Shuffled(self._settings_of(start), self._shape, start.cursor.epoch + 1))

    def close(self) -> None:
        """Keep no order that was made ahead."""
        self._ahead.close()

    def partition(self, start: PassStart) -> Partition:
        """How the samples of a pass are divided among ranks and batches."""
        settings, current = self._settings_of(start), _geometry(start.world, start.batch_size)
        return Partition(
            sequence=Skipped(self._sequence(settings, start.geometry, start.cursor.epoch), start.skipped),
            start=start.cursor.sample_in_epoch,
            geometry=current,
            layout=rank_layout(settings, current, start.geometry),
        )

    def whole_epoch(self, world: World, batch_size: int, drop_last: bool = False) -> Partition:
        """How a whole epoch that begins now would be divided, with nothing skipped."""
        self._batch_size, self._drop_last = batch_size, drop_last
        return self._whole_epoch(Cursor(0, 0), world)

    def partition_from(self, cursor: Cursor, world: World, batch_size: int, drop_last: bool = False) -> Partition:
        """How the samples from ``cursor`` to the end of its epoch would be divided; none of them at the end."""
        self._batch_size, self._drop_last = batch_size, drop_last
        return self.partition(self._start_at(cursor, world, batch_size))

    def normalise(self, cursor: Cursor, world: World) -> Cursor:
        """The same place, the end of an epoch written as the beginning of the next.

        Raises:
            StateError: The place is beyond the epoch's end, and the data was not said to have changed.
        """
        sequence, skipped = self._sequence_at(cursor, world), self._skipped_in(cursor.epoch, world)
        if self._may_end_early and cursor.sample_in_epoch > sequence.most_counted(world.num_ranks):
            _log.warning(
                "epoch %d has ended: %d of its samples were read, and it has %d now",
                cursor.epoch,
                cursor.sample_in_epoch,
                sequence.num_samples,
            )
            return self.normalise(Cursor(cursor.epoch, len(sequence)), world)
        position = sequence.resume_position(cursor.sample_in_epoch, world.num_ranks, self._told())
        if skipped.kept_before(position) < skipped.kept_before(len(sequence)) and self._has_batches(
            cursor.epoch, world
        ):
            return Cursor(cursor.epoch, position)
        epoch = first_epoch_not_skipped(self._skipped_ranges(world).values(), cursor.epoch + 1)
        while not self._has_batches(epoch, world):
            epoch = first_epoch_not_skipped(self._skipped_ranges(world).values(), epoch + 1)
        return Cursor(epoch, 0)

    def later(self, cursor: Cursor, samples: int, world: World) -> Cursor:
        """Where a reader stands who has read on from ``cursor``, so many samples over all ranks.

        Samples that were read twice to keep the ranks even count for nothing. For example 8 ranks that begin at 1 of 53
        samples read 56, up to 57; no state of a whole pass counts so many.
        """
        length, skipped = len(self._sequence_at(cursor, world)), self._skipped_in(cursor.epoch, world)
        entries = skipped.kept_before(cursor.sample_in_epoch) + samples
        too_many = entries - skipped.kept_before(length)
        if samples == 0 or too_many >= 0:
            repeats = too_many if too_many >= world.num_ranks else 0
            return cursor if samples == 0 else Cursor(cursor.epoch, length + repeats)
        return Cursor(cursor.epoch, skipped.position_after(entries))

    def saved(self, cursor: Cursor, world: World) -> SavedPosition:
        """The position ``cursor`` with all that makes it mean the same again."""
        settings = self.settle(world)
        return SavedPosition(
            cursor=cursor,
            shuffle_seed=settings.shuffle_seed,
            num_canonical_nodes=settings.num_canonical_nodes,
            initial_physical_nodes=self._initial_nodes,
            geometry=self._geometry_to_save(cursor, world),
            fingerprint=self._fingerprint().saved,
            skipped={str(one): span for one, span in self._skipped_ranges(world).items()},
            streams=self._fingerprint().stream_list,
        )

    def _skipped_ranges(self, world: World) -> Mapping[BatchRange, SkippedRange]:
        """Where skipped batches are; as long as nobody knows how large a batch is, those placed by a saved position."""
        if not self.skipped or self._batch_size is None:
            return self.skipped.placed()
        settings = self.settle(world)
        key = settings, world.num_nodes, world.ranks_per_node, self._batch_size, self._drop_last
        return self.skipped.ranges(key, lambda place: self._epoch_partitions(place, world))

    def _epoch_partitions(self, place: EpochPosition, world: World) -> EpochPartitions:
        whole = self._whole_epoch(Cursor(*place), world), self._whole_epoch(Cursor(place[0] + 1, 0), world)
        return EpochPartitions(now=whole[0], later=whole[1], drop_last=self._drop_last)

    def _whole_epoch(self, cursor: Cursor, world: World) -> Partition:
        """How the epoch of ``cursor`` is divided from its first sample, with nothing skipped."""
        batch_size = self._known_batch_size()
        geometry = self._geometry_at(cursor, world, batch_size)
        return self.partition(self._start_with(Cursor(cursor.epoch, 0), world, batch_size, geometry, NOTHING_SKIPPED))

    def _skipped_in(self, epoch: int, world: World) -> SkippedPositions:
        return skipped_in_epoch(self._skipped_ranges(world).values(), epoch) if self.skipped else NOTHING_SKIPPED

    def _has_batches(self, epoch: int, world: World) -> bool:
        """Whether skipping has left at least one batch of an epoch."""
        skipped = self._skipped_in(epoch, world)
        if not skipped.runs:
            return True
        whole = self._whole_epoch(Cursor(epoch, 0), world)
        return replace(whole, sequence=Skipped(whole.sequence, skipped)).num_batches(self._drop_last) > 0

    def _geometry_to_save(self, cursor: Cursor, world: World) -> BatchGeometry | None:
        """None where any machines read the same sequence, or may begin the epoch with batches of their own."""
        if self._settings.batching_method == "random" or not cursor.sample_in_epoch:
            return None
        return self._geometry_at(cursor, world, self._known_batch_size())

    @property
    def _shape(self) -> DatasetShape:
        return DatasetShape(shard_sizes=self._source.catalog.shard_sizes_per_stream, weights=self.weights)

    def _start_at(self, cursor: Cursor, world: World, batch_size: int) -> PassStart:
        geometry = self._geometry_at(cursor, world, batch_size)
        return self._start_with(cursor, world, batch_size, geometry, self._skipped_in(cursor.epoch, world))

    def _start_with(
        self, cursor: Cursor, world: World, batch_size: int, geometry: BatchGeometry, skipped: SkippedPositions
    ) -> PassStart:
        settings = self.settle(world)
        return PassStart(
            cursor=cursor,
            world=world,
            batch_size=batch_size,
            geometry=geometry,
            shuffle_seed=settings.shuffle_seed,
            num_canonical_nodes=settings.num_canonical_nodes,
            shuffle_block_size=settings.shuffle_block_size,
            skipped=skipped,
        )

    def _geometry_at(self, cursor: Cursor, world: World, batch_size: int) -> BatchGeometry:
        """What the batches of an epoch are made for: once it has begun, that stays what it was."""
        if cursor.sample_in_epoch and cursor.epoch in self._geometries:
            return self._geometries[cursor.epoch]
        return epoch_geometry(self.settle(world), _geometry(world, batch_size), self._resumed_from_nodes)

    def _sequence_at(self, cursor: Cursor, world: World) -> Batched:
        settings = self.settle(world)
        return self._sequence(settings, self._geometry_at(cursor, world, self._known_batch_size()), cursor.epoch)

    def _sequence(self, settings: SettledOrder, geometry: BatchGeometry, epoch: int) -> Batched:
        """Kept for the next call: where training stands is asked for at every step."""
        asked = settings, geometry, epoch
        if self._latest_sequence is None or self._latest_sequence[0] != asked:
            self._latest_sequence = asked, batched(Shuffled(settings, self._shape, epoch), geometry)
        return self._latest_sequence[1]

    def _known_batch_size(self) -> int:
        if self._batch_size is not None:
            return self._batch_size
        if self._settings.batching_method == "random":
            return 1  # the sequence is the same for all
        raise ConfigError(
            f"batching_method={self._settings.batching_method!r} makes batches of a known size; pass batch_size= to "
            "the dataset, or iterate through a StreamingDataLoader that has one"
        )

    def _settings_of(self, start: PassStart) -> SettledOrder:
        seeded = replace(self._settings, shuffle_seed=start.shuffle_seed)
        return seeded.settled_as(start.num_canonical_nodes, start.shuffle_block_size)

    def _use(self, settings: OrderSettings) -> None:
        if settings.shuffle_seed != self._settings.shuffle_seed:
            # The seed also decides which streams get the samples that rounding left over.
            self._weights = None
            self._latest_sequence = None
        self._settings = settings

    def _asked_for(self) -> tuple[object, ...]:
        return self._asked, self._stream_weights, self._epoch_size

    def _fingerprint(self) -> Fingerprint:
        if self._fingerprinted is None or self._fingerprinted[0] != self._settings:
            self._fingerprinted = self._settings, Fingerprint(self._source.catalog, self._settings, self.weights)
        return self._fingerprinted[1]

    def _told(self) -> str:
        return f"{self.reader}: " if self.reader else ""

    def _check_loaded(self) -> None:
        if self._unchecked is None:
            return
        saved, on_change = self._unchecked
        found = self._fingerprint().differences(saved.fingerprint, saved.streams) if saved.fingerprint else []
        if found and on_change == "error":
            raise StateMismatchError(self._told() + refusal(found))
        if found:
            changed = indent(in_words(found), "  ")
            _log.warning("%sresuming although data or order have changed:\n%s", self._told(), changed)
        self._unchecked = None


def _geometry(world: World, batch_size: int) -> BatchGeometry:
    return BatchGeometry(num_nodes=world.num_nodes, ranks_per_node=world.ranks_per_node, batch_size=batch_size)


class _SkippedBatches:
    """Ranges of global batches, and where their samples are.

    A range is placed with the global batch of the run that was first asked to skip it. A saved position carries that
    place, so that a run with other ranks or batch sizes leaves out the same samples.

    Args:
        asked: What the user wrote, like ["12000-12100", "15000"].

    Raises:
        ConfigError: It is not written so, or ranges overlap.
    """

    def __init__(self, asked: Iterable[int | str] = ()) -> None:
        self._ranges = parse_batch_ranges(asked, "skip")
        self._known: dict[BatchRange, SkippedRange] = {}
        self._counted: TrainProgress | None = None
        self._latest: tuple[Hashable, dict[BatchRange, SkippedRange]] | None = None
        self._told = False

    def __len__(self) -> int:
        return len(self._ranges)

    def load(self, saved: Mapping[str, SkippedRange]) -> None:
        """Take what a saved position says of the ranges that are asked for; others are read again from here on."""
        self._known = {one: saved[str(one)] for one in self._ranges if str(one) in saved}
        self._counted, self._latest, self._told = None, None, False

    def count_from(self, counted: TrainProgress) -> None:
        """Count batches from here on, as a trainer does. What was placed for a trainer that has begun stays there."""
        if self._counted is not None and self._latest is not None and counted.steps:
            self._known = self._latest[1]
        self._counted, self._latest = counted, None

    def placed(self) -> Mapping[BatchRange, SkippedRange]:
        """The ranges whose places are known without asking how epochs are divided."""
        return self._known

    def ranges(
        self, key: Hashable, partitions: Callable[[EpochPosition], EpochPartitions]
    ) -> Mapping[BatchRange, SkippedRange]:
        """Where the samples of every range are.

        Args:
            key: Of all that ``partitions`` depends on: while it stays the same, so do the places.
            partitions: How the epoch of a place and those after it are divided. Asked only if a range is new.
        """
        new = [one for one in self._ranges if one not in self._known]
        if not new:
            return self._known
        if self._latest is None or self._latest[0] != key:
            counted = self._counted or TrainProgress()
            found = locate_batch_ranges(new, self._known, counted, partitions(counted.place))
            self._latest = key, {one: self._known.get(one) or found[one] for one in self._ranges}
        return self._latest[1]

    def tell(self, place: EpochPosition, ranges: Mapping[BatchRange, SkippedRange], told: str = "") -> None:
        """Say once which ranges were asked for too late: a run that goes on at ``place`` has read them.

        Args:
            place: Where the run goes on.
            ranges: Where the ranges are.
            told: What the message begins with.
        """
        late = [str(one) for one, (_, stop) in ranges.items() if one not in self._known and stop <= place]
        if late and not self._told:
            words = "%sskip: batches %s have been read already, so nothing is left out for them"
            _log.warning(words, told, ", ".join(late))
        self._told = True


def _check_canonical_nodes(nodes: int, epoch_size: int, *, is_asked: bool, told: str) -> None:
    """Refuse many more canonical nodes than samples.

    Args:
        nodes: Canonical nodes.
        epoch_size: Samples of an epoch.
        is_asked: Whether the user asked for them, rather than a saved position.
        told: What a message about the saved position begins with.

    Raises:
        ConfigError: There are too many, and they were asked for.
        StateError: There are too many, and a saved position has them.
    """
    most = max(_ALWAYS_FINE, epoch_size)
    if nodes <= most:
        return
    words = f"{nodes}, and an epoch of {epoch_size} samples has {most} at most"
    if is_asked:
        raise ConfigError(f"num_canonical_nodes is {words}; ask for fewer")
    raise StateError(
        f"{told}'num_canonical_nodes' of the saved position is {words}; it is of other data, or was edited: go on from "
        "another checkpoint"
    )
