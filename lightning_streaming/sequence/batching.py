"""Batching methods: one class each, listed in :data:`BATCHING_CLASSES`.

A batching method defines the order in which an epoch's places are read, and so which samples share a batch. All but
``random`` compose batches for given nodes, ranks and batch size, a
:class:`~lightning_streaming.sequence.partition.BatchGeometry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.sequence.base import SampleSequence, check_entries, digest_of
from lightning_streaming.sequence.draw import EpochPart
from lightning_streaming.sequence.packing.settings import AnyPackSettings, BudgetSettings
from lightning_streaming.sequence.partition import BatchGeometry, CanonicalSequence, Partition, read_again


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowPieces:
    """The contents of packs, as arrays with an item for each row. A row is the part of a document in a pack."""

    entries: NDArray[np.int64]
    """The pack of each row, as an index into the requested entries; ascending."""
    positions: NDArray[np.int64]
    """The document's position in the epoch's order; ascending within a pack."""
    ids: NDArray[np.int64]
    """The document's sample id."""
    starts: NDArray[np.int64]
    """The token of the document at which the row begins."""
    lengths: NDArray[np.int64]
    """Tokens; at least 1."""
    are_ends: NDArray[np.bool_]
    """True where the document ends with the row."""

    def rooms(self, settings: AnyPackSettings) -> NDArray[np.int64]:
        """Return the tokens that each pack has room for, padding included, of shape (packs,).

        Args:
            settings: The settings of the packs.
        """
        firsts = np.flatnonzero(np.diff(self.entries, prepend=-1))
        if not isinstance(settings, BudgetSettings) or not firsts.size:
            return np.full(len(firsts), settings.capacity)
        longest: NDArray[np.int64] = np.maximum.reduceat(self.lengths, firsts)
        return longest * np.diff(firsts, append=len(self.entries))


class Rows(NamedTuple):
    """The samples of some entries of an epoch: one per entry, or the documents and parts of documents of packs."""

    positions: NDArray[np.int64]
    """The position of each sample in an epoch without packing."""
    ids: NDArray[np.int64]
    pieces: RowPieces | None = None
    """For packs: which requested pack each row is in, and which of its tokens it has."""

    def stops(self, num_entries: int) -> NDArray[np.int64]:
        """Return the number of rows up to the end of each entry."""
        if self.pieces is None:
            return np.arange(1, num_entries + 1)
        return np.searchsorted(self.pieces.entries, np.arange(num_entries), side="right")


class Batched(SampleSequence, ABC):
    """An epoch in the order in which it is read: its entries are the positions that saved states count."""

    @property
    def rows_per_entry(self) -> float:
        """Samples per entry, on average."""
        return 1.0

    def rows(self, entries: NDArray[np.int64]) -> Rows:
        """Return the samples of some entries, of shape (entries,)."""
        return Rows(entries, self.ids(entries))

    def part_stops(self) -> NDArray[np.int64]:
        """Return the position at which each part of the epoch ends: each mixture step, where there is a schedule."""
        return np.array([len(self)])

    def parts_begun(self, position: int) -> int:
        """Return how many parts have begun at a position."""
        stops = self.part_stops()
        return min(int(np.searchsorted(stops, position, side="left")) + bool(position), len(stops))

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Number of places of the order."""

    @abstractmethod
    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return places of the order in ``[0, num_samples)``, for positions in ``[0, len(self))`` of any shape.

        Raises:
            SampleIndexError: A position lies outside the epoch.
        """

    def ids_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample ids at positions ``[start, stop)``."""
        return self.ids(np.arange(start, stop))

    @property
    def read_once(self) -> int:
        """Position from which on only repeats are read, on any number of nodes."""
        return len(self)

    def most_counted(self, num_ranks: int) -> int:
        """Return the most samples that a reader of the whole epoch counts over all ranks, repeats included."""
        return len(self) + -len(self) % num_ranks

    def resume_position(self, consumed: int, num_ranks: int, prefix: str = "") -> int:
        """Return the position to resume at after ``consumed`` samples, counted over all ranks with repeats.

        Args:
            consumed: Samples as a saved state counts them, replication divided out.
            num_ranks: Ranks that read.
            prefix: Beginning of an error.

        Returns:
            A position in ``[0, len(self)]``: the end if all has been read; if only repeats remain, their beginning,
            which is a position on any number of nodes.

        Raises:
            StateError: More was consumed than any epoch of this size has.
        """
        most = self.most_counted(num_ranks)
        if not 0 <= consumed <= most:
            raise StateError(
                f"{prefix}{consumed} samples were consumed of an epoch that has {self.num_samples}, or {most} with "
                "repeats",
                hint="the state belongs to other data or another epoch size. Put these back, or resume with "
                'on_mismatch="warn" to begin the next epoch, or move the place with `lightning-streaming state set`',
            )
        return len(self) if consumed >= len(self) else min(consumed, self.read_once)

    def are_repeats(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each position repeats a place; False for -1, and for what composed batches repeat of a
        stream."""
        return np.zeros(positions.shape, np.bool_)

    def are_first_reads(
        self, partition: Partition, ts: NDArray[np.int64], node: int, rank_of_node: int
    ) -> NDArray[np.bool_]:
        """Return which reads of some batches are the first of their place in the epoch, over all ranks.

        Each place of the order has exactly one first read. In composed batches (every batching method but ``random``)
        what a stream repeats to fill its last batch counts as a first read.

        Args:
            partition: Division of the epoch.
            ts: Global batches, counted from the start of the partition.
            node: Node of the partition.
            rank_of_node: Rank on the node.

        Returns:
            Of shape (len(ts), batch_size), like ``partition.batches``; False where that is -1.
        """
        are_first = partition.are_first(ts, node, rank_of_node)
        return are_first & ~self.are_repeats(partition.batches(ts, node, rank_of_node))


class BatchedDraw(Batched):
    """One drawn part of an epoch in the order in which it is read.

    Args:
        inner: The drawn samples, shuffled.
        geometry: Geometry of global batches; see :func:`~lightning_streaming.sequence.partition.epoch_geometry`.

    Raises:
        ConfigError: The data does not fill batches of this geometry.
    """

    def __init__(self, inner: EpochPart, geometry: BatchGeometry) -> None:
        self.inner = inner
        self.geometry = geometry

    @property
    def num_samples(self) -> int:
        """Number of places of the order."""
        return len(self.inner)

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids at positions in ``[0, len(self))``, of any shape.

        Raises:
            SampleIndexError: A position lies outside the epoch.
        """
        return self.inner.ids(self.places(positions))

    @property
    def digest(self) -> str:
        """See :class:`~lightning_streaming.sequence.base.SampleSequence`."""
        return digest_of(self.geometry.facts, self.inner.digest)

    def _row_streams(self, rows_per_stream: Sequence[int], num_nodes: int) -> list[_RowStreams]:
        """Put the rows of all streams in random order, separately on each node; rows of one stream keep their order.

        Args:
            rows_per_stream: Rows that each stream fills on a node.
            num_nodes: Number of nodes.
        """
        settings = self.inner.settings
        seed = settings.shuffle_seed + (self.inner.turn if settings.redraws_shards else 0)
        if self.inner.is_on_demand:
            return [ComputedRowStreams(rows_per_stream, (seed, node)) for node in range(num_nodes)]
        generator = np.random.default_rng(seed)  # one for all nodes
        return [draw_row_streams(rows_per_stream, generator) for _ in range(num_nodes)]


class Random(BatchedDraw):
    """Batches of all streams together, shuffled as one and interleaved over canonical nodes.

    Args:
        inner: The drawn samples, shuffled.
        geometry: Geometry of global batches. If canonical nodes fit the nodes, the sequence is the same but for repeats
            at its end.

    Raises:
        ConfigError: The canonical nodes do not fit the nodes, or the samples are too few for them.
    """

    def __init__(self, inner: EpochPart, geometry: BatchGeometry) -> None:
        super().__init__(inner, geometry)
        self._sequence = CanonicalSequence(
            num_samples=len(inner),
            num_canonical_nodes=inner.settings.num_canonical_nodes,
            num_nodes=geometry.num_nodes,
        )

    def __len__(self) -> int:
        """Return the positions of the epoch: slightly more than its samples if they do not divide evenly."""
        return len(self._sequence)

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`Batched`."""
        return self._sequence.places(positions)

    @property
    def read_once(self) -> int:
        """See :class:`Batched`."""
        return self._sequence.read_once

    def most_counted(self, num_ranks: int) -> int:
        """See :class:`Batched`."""
        return self._sequence.most_counted(num_ranks)

    def are_repeats(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See :class:`Batched`."""
        return self._sequence.are_repeats(positions)


class Stratified(BatchedDraw):
    """Global batches with a fixed share of every stream; the shortest stream ends the epoch.

    Args:
        inner: The samples that the epoch draws, each stream shuffled separately.
        geometry: The geometry that batches are composed for.

    Raises:
        ConfigError: A stream's share of a global batch is less than one sample, or it cannot fill it once.
    """

    def __init__(self, inner: EpochPart, geometry: BatchGeometry) -> None:
        super().__init__(inner, geometry)
        self._row_size = geometry.global_batch_size
        self._shares = shares_of_batch(np.asarray(inner.proportion), self._row_size, inner.stream_label)
        self._stops = np.cumsum(self._shares)
        self._streams = _Streams(inner, 1, geometry.ranks_per_node)
        self._rows = int((self._streams.lengths // self._shares).min())
        if not self._rows:
            stream = int((self._streams.lengths < self._shares).argmax())
            raise ConfigError(
                f"{self._streams.described(stream)}, too few for its share of {self._shares[stream]} in a global "
                f"batch of {self._row_size}",
                hint="draw more or lower the batch size",
                option="batching_method",
                stream=inner.name_of(stream),
            )

    def __len__(self) -> int:
        """Return the positions of the epoch: whole global batches."""
        return self._rows * self._row_size

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`Batched`."""
        check_entries(positions, len(self))
        rows = positions // self._row_size
        columns = positions - rows * self._row_size
        streams = np.searchsorted(self._stops, columns, side="right")
        shares = self._shares[streams]
        entries = rows * shares + columns - (self._stops[streams] - shares)
        return self._streams.places(streams, entries)


def shares_of_batch(
    proportions: NDArray[np.float64], batch_size: int, label: Callable[[int], str] = str
) -> NDArray[np.int64]:
    """Return the samples of each stream in a global batch, by largest remainders.

    Of equal remainders those of the last streams come first, as in the reference where it is defined.

    Args:
        proportions: Share of each stream; sums to 1.
        batch_size: Samples in a global batch.
        label: Returns the label of a stream in errors.

    Raises:
        ConfigError: A stream would get no sample.
    """
    shares = (proportions * batch_size).astype(np.int64)
    missing = batch_size - int(shares.sum())
    if missing:
        remainders = batch_size * proportions - shares
        shares[np.argsort(remainders, kind="stable")[::-1][:missing]] += 1
    if shares.min() < 1:
        stream = int(shares.argmin())
        raise ConfigError(
            f"stream {label(stream)} has a share of {proportions[stream]:.2g}, less than one sample of a global batch "
            f"of {batch_size}",
            hint="raise its weight or the batch size, or use batching_method='random'",
            option="batching_method",
        )
    return shares


class PerStream(BatchedDraw):
    """Global batches of one stream each, in random order; each stream fills as many whole ones as it can.

    Args:
        inner: The samples that the epoch draws, each stream shuffled separately.
        geometry: The geometry that batches are composed for.

    Raises:
        ConfigError: A stream fills no global batch.
    """

    def __init__(self, inner: EpochPart, geometry: BatchGeometry) -> None:
        super().__init__(inner, geometry)
        self._streams = _Streams(inner, geometry.num_nodes, geometry.ranks_per_node)
        self._row_size = geometry.global_batch_size
        self._rows_per_stream = self._streams.rows(self._row_size, f"global batch of {self._row_size}")

    def __len__(self) -> int:
        """Return the positions of the epoch: whole global batches."""
        return sum(self._rows_per_stream) * self._row_size

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`Batched`."""
        check_entries(positions, len(self))
        rows = positions // self._row_size
        streams, ordinals = self._origins.find(rows)
        entries = positions + (ordinals - rows) * self._row_size
        return self._streams.places(streams, entries)

    @cached_property
    def _origins(self) -> _RowStreams:
        (origins,) = self._row_streams(self._rows_per_stream, num_nodes=1)
        return origins


class DevicePerStream(BatchedDraw):
    """Rank batches of one stream each, in random order on each node; each stream fills as many whole ones as it can.

    The sequence takes one batch of each node in turn. A last round that does not give every rank a batch is left out;
    the reference gives it to some of the ranks.

    Args:
        inner: The samples that the epoch draws, each stream shuffled separately.
        geometry: The geometry that batches are composed for.

    Raises:
        ConfigError: A stream fills no batch on a node.
    """

    def __init__(self, inner: EpochPart, geometry: BatchGeometry) -> None:
        super().__init__(inner, geometry)
        self._row_size = geometry.batch_size
        self._num_nodes = geometry.num_nodes
        self._canonical = inner.settings.num_canonical_nodes
        self._slices_per_node = self._canonical // self._num_nodes
        self._streams = _Streams(inner, self._canonical, geometry.ranks_per_node)
        self.rows_per_stream = self._streams.rows(
            self._num_nodes * self._row_size, f"batch of {self._row_size} on each of {self._num_nodes} nodes"
        )
        """Batches of each stream on each node."""

    def __len__(self) -> int:
        """Return the positions of the epoch: whole global batches."""
        ranks_per_node = self.geometry.ranks_per_node
        return sum(self.rows_per_stream) // ranks_per_node * self.geometry.global_batch_size

    def most_counted(self, num_ranks: int) -> int:
        """Return the most samples that a reader of the epoch counts: the reference's last round may be partial."""
        del num_ranks
        return len(self) + self.geometry.global_batch_size

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`Batched`."""
        check_entries(positions, len(self))
        return self.places_of_rows(positions)

    def places_of_rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return places as :meth:`places` does, also for the batches of a last round that is left out."""
        rows = positions // self._row_size
        rounds = rows // self._num_nodes
        nodes = rows - rounds * self._num_nodes
        columns = positions - rows * self._row_size
        streams, ordinals = np.empty_like(rows), np.empty_like(rows)
        for node in np.unique(nodes).tolist():
            ours = nodes == node
            streams[ours], ordinals[ours] = self._origins[node].find(rounds[ours])
        entries = ordinals * self._row_size + columns
        # From entries of a node to entries of the whole stream: its slices in turn, one entry of each per rank.
        ranks = self.geometry.ranks_per_node
        turns, ranks_of_node = np.divmod(entries, ranks)
        steps, slices = np.divmod(turns, self._slices_per_node)
        slices += nodes * self._slices_per_node
        return self._streams.places(streams, (steps * ranks + ranks_of_node) * self._canonical + slices)

    @cached_property
    def _origins(self) -> list[_RowStreams]:
        """Streams of the rounds of each node."""
        return self._row_streams(self.rows_per_stream, self._num_nodes)


BATCHING_CLASSES: dict[str, Callable[[EpochPart, BatchGeometry], BatchedDraw]] = {
    "device_per_stream": DevicePerStream,
    "per_stream": PerStream,
    "random": Random,
    "stratified": Stratified,
}


def batched(inner: EpochPart, geometry: BatchGeometry) -> BatchedDraw:
    """Batch a part of an epoch by its settings; the time does not depend on its size. See :class:`Batched`."""
    return BATCHING_CLASSES[inner.settings.batching_method](inner, geometry)


class _Streams:
    """Entries of each stream in reading order, a few repeated at the end so that all ranks have the same number.

    Args:
        inner: The drawn samples, one stream after another.
        num_nodes: Nodes to divide each stream among.
        ranks_per_node: Ranks on each node.

    Raises:
        ConfigError: A stream draws no sample, or too few.
    """

    def __init__(self, inner: EpochPart, num_nodes: int, ranks_per_node: int) -> None:
        settings, self._choose = inner.settings, inner.choose
        self._stream_label, self._name_of = inner.stream_label, inner.name_of
        if not all(self._choose):
            raise ConfigError(
                f"stream {self._choose.index(0)} draws no sample, so batching_method={settings.batching_method!r} "
                "cannot fill a batch from it",
                hint="raise its weight or leave it out",
                option="batching_method",
                stream=inner.name_of(self._choose.index(0)),
            )
        self._sequences = [
            CanonicalSequence(
                num_samples=samples, num_canonical_nodes=settings.num_canonical_nodes, num_nodes=num_nodes
            )
            for samples in self._choose
        ]
        self._machines = BatchGeometry(num_nodes=num_nodes, ranks_per_node=ranks_per_node, batch_size=1)
        self._first_places = np.cumsum((0, *self._choose)).tolist()
        lengths = np.asarray([len(sequence) for sequence in self._sequences])
        self.lengths: NDArray[np.int64] = lengths + -lengths % self._machines.num_ranks
        """Entries of each stream, repeats included."""

    def described(self, stream: int) -> str:
        """Return the beginning of an error about a stream."""
        return f"stream {self._stream_label(stream)} draws {self._choose[stream]} samples"

    def rows(self, row_size: int, row: str) -> list[int]:
        """Count the rows that each stream fills.

        Args:
            row_size: Entries of a row.
            row: Name of a row in errors.

        Raises:
            ConfigError: A stream fills none.
        """
        rows: list[int] = (self.lengths // row_size).tolist()
        if not all(rows):
            raise ConfigError(
                f"{self.described(rows.index(0))}, too few for one {row}",
                hint="raise its weight, lower the batch size or leave it out",
                option="batching_method",
                stream=self._name_of(rows.index(0)),
            )
        return rows

    def places(self, streams: NDArray[np.integer[Any]], entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return places in the order of all streams, looked up stream by stream.

        Args:
            streams: Stream of each entry.
            entries: Entries in that stream, of the same shape.
        """
        by_stream = np.argsort(streams, axis=None, kind="stable")
        in_turn, ours = streams.ravel()[by_stream], entries.ravel()[by_stream]
        bounds = [0, *(np.flatnonzero(in_turn[1:] != in_turn[:-1]) + 1).tolist(), len(ours)]
        places = np.empty_like(ours)
        for first, stop in pairwise(bounds):
            if first < stop:
                stream = int(in_turn[first])
                sequence = self._sequences[stream]
                steps = read_again(ours[first:stop], len(sequence), self._machines)
                places[by_stream[first:stop]] = self._first_places[stream] + sequence.places(steps)
        return places.reshape(entries.shape)


_ROWS_TOGETHER = 1024
_ROWS_PER_STREAM = 4
"""Least rows that are ordered together, in all and per stream."""


@dataclass(frozen=True, slots=True, eq=False)
class _DrawnRowStreams:
    """Streams of all rows in memory, drawn as the reference does; in few bytes, as each process has a copy."""

    streams: NDArray[np.unsignedinteger[Any]]
    """Stream of each row."""
    ordinals: NDArray[np.unsignedinteger[Any]]
    """Number of the row among those of its stream."""

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """Return the stream of each row, and its number among the stream's rows; of the shape of ``rows``."""
        return self.streams[rows], self.ordinals[rows].astype(np.int64)


def draw_row_streams(rows_per_stream: Sequence[int], generator: np.random.Generator) -> _DrawnRowStreams:
    """Shuffle the rows.

    For example with 2 rows of stream 0 and 1 of stream 1: streams 0 1 0, ordinals 0 0 1.
    """
    # The shuffle does not depend on the shuffled values.
    streams = np.repeat(
        np.arange(len(rows_per_stream), dtype=np.min_scalar_type(len(rows_per_stream))), rows_per_stream
    )
    generator.shuffle(streams)
    ordinals = np.empty(len(streams), np.min_scalar_type(len(streams)))
    ordinals[np.argsort(streams, kind="stable")] = np.concatenate([np.arange(rows) for rows in rows_per_stream])
    return _DrawnRowStreams(streams, ordinals)


class ComputedRowStreams:
    """Streams of rows, computed a chunk at a time, for epochs of any size.

    Each chunk of about a thousand rows has every stream's share of them, and is shuffled separately.

    Args:
        rows_per_stream: Rows that each stream fills.
        seed: Seed of all chunks.
    """

    def __init__(self, rows_per_stream: Sequence[int], seed: tuple[int, ...]) -> None:
        self._rows_per_stream = np.asarray(rows_per_stream, np.int64)
        self._seed = seed
        self._total = sum(rows_per_stream)
        chunk = max(_ROWS_TOGETHER, _ROWS_PER_STREAM * len(rows_per_stream))
        self._num_chunks = -(-self._total // chunk)

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """Return the stream of each row, and its number among the stream's rows; of the shape of ``rows``."""
        # Rounding down each stream's share lets a chunk begin up to a row per stream early, less than a chunk.
        guessed = rows * self._num_chunks // self._total
        first, last = int(guessed.min(initial=0)), int(guessed.max(initial=0)) + 2
        starts = np.asarray([self._rows_before(chunk).sum() for chunk in range(first, last)])
        chunks = first - 1 + np.searchsorted(starts, rows, side="right")
        streams, ordinals = np.empty_like(rows), np.empty_like(rows)
        for chunk in np.unique(chunks).tolist():
            ours = chunks == chunk
            before, after = self._rows_before(chunk), self._rows_before(chunk + 1)
            generator = np.random.default_rng((*self._seed, chunk))
            here, ordinals_here = draw_row_streams((after - before).tolist(), generator).find(rows[ours] - before.sum())
            streams[ours], ordinals[ours] = here, before[here] + ordinals_here
        return streams, ordinals

    def _rows_before(self, chunk: int) -> NDArray[np.int64]:
        """Return the rows of each stream in the chunks before this one."""
        return self._rows_per_stream * chunk // self._num_chunks


_RowStreams = _DrawnRowStreams | ComputedRowStreams
"""The stream of each row."""
