"""Batching methods: :data:`BATCHINGS` names them, one class each, and what they share stands below.

A batching method says in which order an epoch's places are read, and so which samples share a batch. All but
``random`` compose batches for given nodes, ranks and batch size, a
:class:`~lightning_streaming.order.partition.BatchGeometry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.draw import is_on_demand
from lightning_streaming.order.partition import BatchGeometry, read_again
from lightning_streaming.order.sequence import CanonicalSequence, check_positions
from lightning_streaming.order.settings import SettledOrder
from lightning_streaming.order.weights import DatasetShape


class EpochSequence(Protocol):
    """The place of an epoch's order that is read at each position."""

    @property
    def num_samples(self) -> int:
        """Places of the order."""

    def __len__(self) -> int:
        """Positions of the epoch."""

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of the order in ``[0, num_samples)``, for positions in ``[0, len(self))`` of any shape.

        Raises:
            SampleIndexError: A position lies outside the epoch.
        """

    @property
    def read_once(self) -> int:
        """Position from which on nothing is read that has not been read before, on any number of nodes."""

    def most_counted(self, num_ranks: int) -> int:
        """The most samples that a reader of the whole epoch counts, over all ranks, with those read twice."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochSpec:
    """All that a batching method is given."""

    settings: SettledOrder
    """How it is ordered."""
    shape: DatasetShape
    """The data."""
    geometry: BatchGeometry
    """What the epoch's global batches are made for."""
    epoch: int
    """Counts from 0."""

    @property
    def num_canonical_nodes(self) -> int:
        """Slices of the order."""
        return self.settings.num_canonical_nodes

    @property
    def batch_seed(self) -> int:
        """Decides which batch comes from which stream."""
        return self.settings.shuffle_seed + (self.epoch if self.settings.redraws_shards else 0)


Batching = Callable[[EpochSpec], EpochSequence]
"""A batching method."""


def random(facts: EpochSpec) -> EpochSequence:
    """All streams together, shuffled as one and read canonical node by canonical node in turn.

    Raises:
        ConfigError: The canonical nodes do not fit the nodes, or the samples are too few for them.
    """
    return CanonicalSequence(
        num_samples=facts.shape.epoch_size,
        num_canonical_nodes=facts.num_canonical_nodes,
        num_nodes=facts.geometry.num_nodes,
    )


class Composed(ABC):
    """Batches composed of streams that are shuffled each by itself; what fills none is left out.

    Args:
        facts: The epoch.
    """

    def __init__(self, facts: EpochSpec) -> None:
        self._facts = facts

    @property
    def num_samples(self) -> int:
        """Places of the order."""
        return self._facts.shape.epoch_size

    @property
    def read_once(self) -> int:
        """The whole epoch: its repeats are not at its end."""
        return len(self)

    @abstractmethod
    def __len__(self) -> int:
        """Positions of the epoch: whole global batches."""

    @abstractmethod
    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`~lightning_streaming.order.batchings.EpochSequence`."""

    def most_counted(self, num_ranks: int) -> int:
        """The most samples that a reader of the whole epoch counts."""
        return len(self) + -len(self) % num_ranks


class Stratified(Composed):
    """Each global batch holds every stream's share of it, stream by stream; the shortest stream ends the epoch.

    Args:
        facts: The epoch.

    Raises:
        ConfigError: A stream's share of a global batch is less than one sample, or it cannot fill it once.
    """

    def __init__(self, facts: EpochSpec) -> None:
        super().__init__(facts)
        self._row_size = facts.geometry.global_batch_size
        self._shares = shares_of_batch(np.asarray(facts.shape.weights.proportion), self._row_size)
        self._stops = np.cumsum(self._shares)
        self._streams = entries_per_stream(facts, num_nodes=1)
        rows: list[int] = [
            len(entries) // share for entries, share in zip(self._streams, self._shares.tolist(), strict=True)
        ]
        self._rows = min(rows)
        if not self._rows:
            stream = rows.index(0)
            raise ConfigError(
                f"stream {stream} draws {self._streams[stream].sequence.num_samples} samples, too few for its share of "
                f"{self._shares[stream]} in a global batch of {self._row_size}; draw more or lower the batch size"
            )

    def __len__(self) -> int:
        """Positions of the epoch: whole global batches."""
        return self._rows * self._row_size

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`~lightning_streaming.order.batchings.EpochSequence`."""
        check_positions(positions, len(self))
        rows = positions // self._row_size
        columns = positions - rows * self._row_size
        streams = np.searchsorted(self._stops, columns, side="right")
        shares = self._shares[streams]
        entries = rows * shares + columns - (self._stops[streams] - shares)
        return places_by_stream(streams, entries, lambda stream, ours: self._streams[stream].places(ours))


def shares_of_batch(proportions: NDArray[np.float64], batch_size: int) -> NDArray[np.int64]:
    """Samples of each stream in a global batch: its proportion rounded down, and one more for the largest remainders.

    Of equal remainders those of the last streams come first, as in the reference where it is defined.

    Args:
        proportions: Share of each stream; sums to 1.
        batch_size: Samples in a global batch.

    Raises:
        ConfigError: A stream would get none.
    """
    shares = (proportions * batch_size).astype(np.int64)
    missing = batch_size - int(shares.sum())
    if missing:
        remainders = batch_size * proportions - shares
        shares[np.argsort(remainders, kind="stable")[::-1][:missing]] += 1
    if shares.min() < 1:
        stream = int(shares.argmin())
        raise ConfigError(
            f"stream {stream} has a share of {proportions[stream]:.2g}, less than one sample of a global batch of "
            f"{batch_size}; raise its weight or the batch size, or use batching_method='random'"
        )
    return shares


class PerStream(Composed):
    """Each stream fills as many whole global batches as it can; their order is random.

    Args:
        facts: The epoch.

    Raises:
        ConfigError: A stream fills no global batch.
    """

    def __init__(self, facts: EpochSpec) -> None:
        super().__init__(facts)
        self._streams = entries_per_stream(facts, facts.geometry.num_nodes)
        self._row_size = facts.geometry.global_batch_size
        self._rows_per_stream = [len(stream) // self._row_size for stream in self._streams]
        if not all(self._rows_per_stream):
            stream = self._rows_per_stream.index(0)
            raise ConfigError(
                f"stream {stream} draws {self._streams[stream].sequence.num_samples} samples, too few for one global "
                f"batch of {self._row_size}; raise its weight, lower the batch size or leave it out"
            )

    def __len__(self) -> int:
        """Positions of the epoch: whole global batches."""
        return sum(self._rows_per_stream) * self._row_size

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`~lightning_streaming.order.batchings.EpochSequence`."""
        check_positions(positions, len(self))
        rows = positions // self._row_size
        streams, ordinals = self._origins.find(rows)
        entries = positions + (ordinals - rows) * self._row_size
        return places_by_stream(streams, entries, lambda stream, ours: self._streams[stream].places(ours))

    @cached_property
    def _origins(self) -> RowStreams:
        (origins,) = row_streams(self._facts, self._rows_per_stream, num_nodes=1)
        return origins


class DevicePerStream(Composed):
    """Each node fills as many whole batches from each stream as it can; their order is random, node by node.

    The sequence takes one batch of each node in turn. A last round that does not give every rank a batch is left out;
    the reference gives it to some of the ranks.

    Args:
        facts: The epoch.

    Raises:
        ConfigError: A stream fills no batch on a node.
    """

    def __init__(self, facts: EpochSpec) -> None:
        super().__init__(facts)
        self._row_size = facts.geometry.batch_size
        self._num_nodes = facts.geometry.num_nodes
        self._slices_per_node = facts.num_canonical_nodes // self._num_nodes
        self._streams = entries_per_stream(facts, facts.num_canonical_nodes)
        self.rows_per_stream = [len(stream) // self._num_nodes // self._row_size for stream in self._streams]
        """Batches of each stream on each node."""
        if not all(self.rows_per_stream):
            stream = self.rows_per_stream.index(0)
            raise ConfigError(
                f"stream {stream} draws {self._streams[stream].sequence.num_samples} samples, too few for one batch of "
                f"{self._row_size} on each of {self._num_nodes} nodes; raise its weight, lower the batch size or "
                "leave it out"
            )

    def __len__(self) -> int:
        """Positions of the epoch: whole global batches."""
        ranks_per_node = self._facts.geometry.ranks_per_node
        return sum(self.rows_per_stream) // ranks_per_node * self._facts.geometry.global_batch_size

    def most_counted(self, num_ranks: int) -> int:
        """The most samples that a reader of the whole epoch counts: the reference's last round may be partial."""
        del num_ranks
        return len(self) + self._facts.geometry.global_batch_size

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`~lightning_streaming.order.batchings.EpochSequence`."""
        check_positions(positions, len(self))
        return self.places_of_rows(positions)

    def places_of_rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Like :meth:`places`, also for the batches of a last round that is left out."""
        rows = positions // self._row_size
        rounds = rows // self._num_nodes
        nodes = rows - rounds * self._num_nodes
        columns = positions - rows * self._row_size
        streams, ordinals = np.empty_like(rows), np.empty_like(rows)
        for node in np.unique(nodes).tolist():
            ours = nodes == node
            streams[ours], ordinals[ours] = self._origins[node].find(rounds[ours])
        entries = ordinals * self._row_size + columns
        return places_by_stream(streams, self._entries_of_stream(nodes, entries), self._places_of_stream)

    def _entries_of_stream(self, nodes: NDArray[np.int64], entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entries of a node as entries of the whole stream: its slices in turn, as many of each as it has ranks."""
        ranks = self._facts.geometry.ranks_per_node
        turns, ranks_of_node = np.divmod(entries, ranks)
        steps, slices = np.divmod(turns, self._slices_per_node)
        slices += nodes * self._slices_per_node
        return (steps * ranks + ranks_of_node) * self._facts.num_canonical_nodes + slices

    def _places_of_stream(self, stream: int, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._streams[stream].places(entries)

    @cached_property
    def _origins(self) -> list[RowStreams]:
        """Of the rounds of each node."""
        return row_streams(self._facts, self.rows_per_stream, self._num_nodes)


BATCHINGS: dict[str, Batching] = {
    "device_per_stream": DevicePerStream,
    "per_stream": PerStream,
    "random": random,
    "stratified": Stratified,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamEntries:
    """One stream's entries in reading order, a few repeated at the end so that all ranks have equally many."""

    sequence: CanonicalSequence
    """The stream's own sequence."""
    first_place: int
    """Where the stream begins in the order of all streams."""
    num_ranks: int
    """Ranks to be even for."""

    def __len__(self) -> int:
        """Entries, with the repeated ones."""
        return -(-len(self.sequence) // self.num_ranks) * self.num_ranks

    def places(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the order of all streams, for entries in ``[0, len(self))``."""
        steps = read_again(entries, len(self.sequence), self.sequence.num_nodes, self.num_ranks)
        return self.first_place + self.sequence.places(steps)


def entries_per_stream(facts: EpochSpec, num_nodes: int) -> list[StreamEntries]:
    """Each stream's entries.

    Args:
        facts: The epoch.
        num_nodes: Nodes to divide each stream among.

    Raises:
        ConfigError: A stream draws no sample, or too few.
    """
    entries, first_place = [], 0
    for stream, samples in enumerate(facts.shape.weights.choose):
        if not samples:
            raise ConfigError(
                f"stream {stream} draws no sample, so batching_method={facts.settings.batching_method!r} cannot fill "
                "a batch from it; raise its weight or leave it out"
            )
        sequence = CanonicalSequence(
            num_samples=samples, num_canonical_nodes=facts.num_canonical_nodes, num_nodes=num_nodes
        )
        num_ranks = num_nodes * facts.geometry.ranks_per_node
        entries.append(StreamEntries(sequence=sequence, first_place=first_place, num_ranks=num_ranks))
        first_place += samples
    return entries


def places_by_stream(
    streams: NDArray[np.integer[Any]],
    entries: NDArray[np.int64],
    places_of: Callable[[int, NDArray[np.int64]], NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Look up entries of several streams at once, stream by stream.

    Args:
        streams: Stream of each entry.
        entries: Entries in that stream, of the same shape.
        places_of: Gives the places of one stream's entries.
    """
    by_stream = np.argsort(streams, axis=None, kind="stable")
    in_turn, ours = streams.ravel()[by_stream], entries.ravel()[by_stream]
    bounds = [0, *(np.flatnonzero(in_turn[1:] != in_turn[:-1]) + 1).tolist(), len(ours)]
    places = np.empty_like(ours)
    for first, stop in pairwise(bounds):
        if first < stop:
            places[by_stream[first:stop]] = places_of(int(in_turn[first]), ours[first:stop])
    return places.reshape(entries.shape)


_ROWS_TOGETHER = 1024
_ROWS_PER_STREAM = 4
"""Rows that are put in order together, at least; and at least so many for each stream."""


class RowStreams(Protocol):
    """The stream of each row."""

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """The stream of each row, and how many rows that stream has filled before it; of the shape of ``rows``."""


def row_streams(facts: EpochSpec, rows_per_stream: Sequence[int], num_nodes: int) -> list[RowStreams]:
    """Put the rows of all streams in random order, on each node by itself; each stream's rows keep theirs.

    Args:
        facts: The epoch.
        rows_per_stream: Rows that each stream fills on a node.
        num_nodes: Nodes.
    """
    if is_on_demand(facts.settings):
        return [ComputedRowStreams(rows_per_stream, (facts.batch_seed, node)) for node in range(num_nodes)]
    generator = np.random.default_rng(facts.batch_seed)  # one for all nodes
    return [draw_row_streams(rows_per_stream, generator) for _ in range(num_nodes)]


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRowStreams:
    """All rows at hand, as the reference draws them; in few bytes, as every process has its own."""

    streams: NDArray[np.unsignedinteger[Any]]
    """Stream of each row."""
    ordinals: NDArray[np.unsignedinteger[Any]]
    """Counts the rows of that stream from 0."""

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """See :class:`RowOrigins`."""
        return self.streams[rows], self.ordinals[rows].astype(np.int64)


def draw_row_streams(rows_per_stream: Sequence[int], generator: np.random.Generator) -> DrawnRowStreams:
    """Shuffle the rows.

    For example with 2 rows of stream 0 and 1 of stream 1: streams 0 1 0, ordinals 0 0 1.
    """
    # What is shuffled does not change how.
    streams = np.repeat(
        np.arange(len(rows_per_stream), dtype=np.min_scalar_type(len(rows_per_stream))), rows_per_stream
    )
    generator.shuffle(streams)
    ordinals = np.empty(len(streams), np.min_scalar_type(len(streams)))
    ordinals[np.argsort(streams, kind="stable")] = np.concatenate([np.arange(rows) for rows in rows_per_stream])
    return DrawnRowStreams(streams, ordinals)


class ComputedRowStreams:
    """Rows worked out a chunk at a time, for epochs of any size.

    Each chunk of about a thousand rows has every stream's share of them, and is shuffled by itself.

    Args:
        rows_per_stream: Rows that each stream fills.
        seed: Of all chunks.
    """

    def __init__(self, rows_per_stream: Sequence[int], seed: tuple[int, ...]) -> None:
        self._rows_per_stream = np.asarray(rows_per_stream, np.int64)
        self._seed = seed
        self._total = sum(rows_per_stream)
        chunk = max(_ROWS_TOGETHER, _ROWS_PER_STREAM * len(rows_per_stream))
        self._num_chunks = -(-self._total // chunk)

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """See :class:`RowOrigins`."""
        chunks = self._chunk_of(rows)
        streams, ordinals = np.empty_like(rows), np.empty_like(rows)
        for chunk in np.unique(chunks).tolist():
            ours = chunks == chunk
            before, after = self._rows_before(chunk), self._rows_before(chunk + 1)
            generator = np.random.default_rng((*self._seed, chunk))
            here, ordinals_here = draw_row_streams((after - before).tolist(), generator).find(rows[ours] - before.sum())
            streams[ours], ordinals[ours] = here, before[here] + ordinals_here
        return streams, ordinals

    def _rows_before(self, chunk: int) -> NDArray[np.int64]:
        """Rows of each stream in the chunks before this one."""
        return self._rows_per_stream * chunk // self._num_chunks

    def _chunk_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        # Rounding down each stream's share lets a chunk begin up to a row per stream early, less than a chunk.
        guessed = rows * self._num_chunks // self._total
        first, last = int(guessed.min(initial=0)), int(guessed.max(initial=0)) + 2
        starts = np.asarray([self._rows_before(chunk).sum() for chunk in range(first, last)])
        return first - 1 + np.searchsorted(starts, rows, side="right")
