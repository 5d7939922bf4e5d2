"""Shuffle algorithms: :data:`SHUFFLES` names them, one function each, and what they share stands below.

A shuffle takes a :class:`ShuffleTask` and fills an array with a permutation: entry ``k`` is what is read at position
``k`` of the canonical order. Canonical node ``c`` of ``C`` owns positions ``[n * c // C, n * (c + 1) // C)``. The array
is the caller's, so that it can be a mapped file; its dtype holds every place, and the result does not depend on it.

To add one, write its function here, add it to :data:`SHUFFLES`, and its name to ``ShuffleAlgo`` in ``settings.py``.
The algorithm ``blockwise`` is not among them: it fills no array (see ``blockwise.py``).

In the algorithms of the reference, which random numbers are drawn in which turn is part of the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.runs import write_runs
from lightning_streaming.sequence.settings import require_known


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShuffleTask:
    """Samples in runs, and how to shuffle them."""

    units: NDArray[np.int64]
    """Sizes of the runs to keep together."""
    num_canonical_nodes: int
    """Slices that are shuffled separately."""
    seed: int
    """The same for all epochs."""
    epoch: int
    """Counts from 0."""
    block_size: int
    """Samples to mix with each other, for algorithms that work in blocks; 0 where a stream's share of a block is none,
    which the other algorithms do not mind."""

    def __post_init__(self) -> None:
        if self.num_canonical_nodes < 1 or self.block_size < 0:
            raise ConfigError(
                f"shuffling needs at least one canonical node and a block size that is not negative, but got "
                f"{self.num_canonical_nodes} and {self.block_size}",
                option="shuffle_block_size",
            )
        if self.seed < 0 or self.epoch < 0:
            raise ConfigError(
                f"seed and epoch must not be negative, but got {self.seed} and {self.epoch}", option="shuffle_seed"
            )

    @property
    def num_samples(self) -> int:
        """Samples in all runs."""
        return int(self.units.sum())

    def run_generator(self) -> Generator:
        """A fresh generator that is the same in all epochs."""
        return default_rng(self.seed)

    def epoch_generator(self) -> Generator:
        """A fresh generator of this epoch."""
        return default_rng(self.seed + self.epoch)


def naive(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """One permutation of all samples; shards, blocks and canonical nodes play no part."""
    _unit_spans(task).write(out)
    shuffle_items(out, task.epoch_generator())


def py1s(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """Each canonical node reads its spans in random order, each span's samples in random order."""
    generator = task.epoch_generator()
    # All at once, since small streams have far more canonical nodes than spans.
    joined_spans(spans_per_canonical_node(task, generator)).write_shuffled(out, generator)


def py2s(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """As ``py1s``, but samples are shuffled before shards are cut.

    So a shard that reaches across two canonical nodes gives each of them samples from all over it.
    """
    run_generator, generator = task.run_generator(), task.epoch_generator()
    spans = _shuffled_spans(_unit_spans(task), run_generator)
    spans.write_shuffled(out, run_generator)

    # From here on spans are runs of what has just been written.
    written = Spans(np.cumsum(spans.sizes) - spans.sizes, spans.sizes)
    for part, ids_out in _with_outputs(split_spans(written, task.num_canonical_nodes), out):
        if not len(ids_out):
            continue
        first = int(part.firsts[0])
        part = _shuffled_spans(part, generator)
        places = np.empty(len(ids_out), ids_out.dtype)
        Spans(part.firsts - first, part.sizes).write(places)
        ids_out[:] = ids_out[places]
        _shuffle_runs(part.sizes, ids_out, generator)


def py1b(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """Each canonical node reads its spans in random order, and mixes each ``task.block_size`` samples of them.

    Raises:
        ConfigError: The block size is 0.
    """
    _block_bounds("py1b", task.block_size, least=1)
    generator = task.epoch_generator()
    for part, ids_out in _with_outputs(spans_per_canonical_node(task, generator), out):
        part.write(ids_out)
        for start in range(0, len(ids_out), task.block_size):
            shuffle_items(ids_out[start : start + task.block_size], generator)


def py1br(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """Each canonical node reads its spans in random order, and mixes about ``task.block_size`` samples of them.

    Raises:
        ConfigError: The block size is below 2.
    """
    shortest, longest = _block_bounds("py1br", task.block_size, least=2)
    generator = task.epoch_generator()
    parts = spans_per_canonical_node(task, generator)
    staggers = generator.integers(0, shortest, size=len(parts)).tolist()
    for (part, ids_out), stagger in zip(_with_outputs(parts, out), staggers, strict=True):
        part.write(ids_out)
        # Blocks lie ``stagger`` samples before where they would lie from the start on. As in the reference the second
        # begins before the first ends, and the last may end before the samples do. For example 20 samples in blocks of
        # 8 with a stagger of 3 are shuffled in [0, 5), [2, 10), [10, 18), and two stay in place.
        blocks, place, num_samples = list[tuple[int, int]](), 0, len(ids_out)
        while place < num_samples:
            length = int(generator.integers(shortest, longest))
            start, stop = max(place - stagger, 0), min(place + length - stagger, num_samples)
            blocks.append((start, stop))
            place += stop - start
        for start, stop in blocks:  # all lengths of a canonical node are drawn before the first shuffle
            shuffle_items(ids_out[start:stop], generator)


def py1e(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """Order each canonical node as ``py1s`` does, then move every sample by a random distance.

    Samples of a span move up to half of what a block of about ``task.block_size`` samples is longer than the span, but
    never out of the canonical node, and are read in the order of where they arrive; those that arrive at the same
    place, in the order that they had. The reference refuses fewer samples than canonical nodes.

    Raises:
        ConfigError: The block size is 0.
    """
    block = _block_bounds("py1e", task.block_size, least=1)
    generator = task.epoch_generator()
    for part, ids_out in _with_outputs(spans_per_canonical_node(task, generator), out):
        part.write_shuffled(ids_out, generator)
        windows = _arrivals_in_windows(part.sizes, block, generator)
        order_by_arrival(ids_out, windows, reach=min(block[1] / 2, len(ids_out)))


SHUFFLES: dict[str, Callable[[ShuffleTask, NDArray[np.integer[Any]]], None]] = {
    "naive": naive,
    "py1b": py1b,
    "py1br": py1br,
    "py1e": py1e,
    "py1s": py1s,
    "py2s": py2s,
}


def shuffle_into(algo: str, task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """Fill ``out`` with a permutation of ``arange(task.num_samples)``.

    Args:
        algo: A name in :data:`SHUFFLES`.
        task: What to shuffle.
        out: One dimension, ``task.num_samples`` long, of a dtype that holds that number.

    Raises:
        ConfigError: The algorithm is unknown, or cannot work with this task.
    """
    require_known("shuffle_algo", algo, SHUFFLES)
    SHUFFLES[algo](task, out)


def _block_bounds(algo: str, block_size: int, least: int) -> tuple[int, int]:
    """Return the range of block lengths that an algorithm draws: a quarter below and above ``block_size``.

    Args:
        algo: The algorithm, for the error.
        block_size: The user's block size, or the stream's share of it.
        least: The smallest block size that the algorithm can work with.

    Returns:
        The shortest length, and the first that is too long.

    Raises:
        ConfigError: The block is smaller than ``least``.
    """
    if block_size < least:
        raise ConfigError(
            f"shuffle_algo={algo!r} needs blocks of at least {least} samples, but got {block_size}",
            hint="raise shuffle_block_size (where streams have batches of their own, each gets its proportion of it) "
            "or use shuffle_algo='py1s'",
            option="shuffle_block_size",
        )
    return int(0.75 * block_size), int(1.25 * block_size)


_WINDOW = 1 << 18
"""Samples that drift together: few enough for the cache, enough for numpy to be fast."""


def _arrivals_in_windows(
    sizes: NDArray[np.int64], block: tuple[int, int], generator: np.random.Generator
) -> Iterator[NDArray[np.float64]]:
    """Yield where the samples of a canonical node arrive, window after window.

    Args:
        sizes: Sizes of its spans, in reading order.
        block: Range of lengths from which each span draws a block; its samples move by up to half of the difference.
        generator: Draws each span's block, followed by its samples' moves. Drawing these in pieces changes none of
            them.

    Yields:
        Arrivals, in ``[0, sizes.sum())``.
    """
    window, filled, start = np.empty(_WINDOW), 0, 0
    total, span_stop = int(sizes.sum()), 0
    for size in sizes.tolist():
        span_start, span_stop = span_stop, span_stop + size
        # How far samples move back (below 0) and ahead at most: never out of the canonical node.
        reach = max((int(generator.integers(*block)) - size) / 2, 0)
        earliest, latest = max(-reach, -span_start), min(reach, total - span_stop)
        while size:
            step = min(size, _WINDOW - filled)
            window[filled : filled + step] = generator.uniform(earliest, latest, step)
            filled, size = filled + step, size - step
            if filled == _WINDOW:
                yield window + np.arange(start, start + filled)
                filled, start = 0, start + filled
    if filled:
        yield window[:filled] + np.arange(start, start + filled)


_Piece = tuple[NDArray[np.float64], NDArray[np.integer[Any]]]
"""Arrivals and ids, of equal length."""

_SMALLEST_BUCKET = 1 << 14
"""Places that are sorted together: the sort stays within the processor's cache."""


def order_by_arrival(ids: NDArray[np.integer[Any]], windows: Iterable[NDArray[np.float64]], reach: float) -> None:
    """``ids[:] = ids[np.argsort(arrivals, kind="stable")]`` for arrivals that come in windows.

    Args:
        ids: To be put in order, in place.
        windows: Where each id arrives, in ``[0, len(ids))``, in consecutive pieces of equal length but for the last.
        reach: The largest distance between an arrival and the place of its id.
    """
    reach += 1  # for what rounding adds
    buckets: _Buckets | None = None
    read, written = 0, 0
    for arrivals in windows:
        if buckets is None:
            buckets = _Buckets(len(arrivals) + 2 * reach)
        buckets.add(arrivals, ids[read : read + len(arrivals)], max(read - reach, 0.0))
        read += len(arrivals)
        # What is written has been read before: no more can be final than has come.
        is_all = read == len(ids)
        for final in buckets.take_before(np.inf if is_all else read - reach):
            ids[written : written + len(final)] = final
            written += len(final)


class _Buckets:
    """Samples by the range of places in which they arrive, until no more can come.

    Args:
        widest: The largest difference between two arrivals that are added together.
    """

    def __init__(self, widest: float) -> None:
        width = max(_SMALLEST_BUCKET, widest / 250)  # so that a byte can number the buckets of one window
        self._width = 1 << (int(width) - 1).bit_length()  # a power of two, by which floats divide without rounding
        self._pieces: defaultdict[int, list[_Piece]] = defaultdict(list)
        self._next = 0

    def add(self, arrivals: NDArray[np.float64], ids: NDArray[np.integer[Any]], earliest: float) -> None:
        """Take samples that come after all those added before; none arrives before ``earliest``."""
        first = int(earliest / self._width)
        buckets = (arrivals * (1 / self._width) - first).astype(np.uint8)
        order = np.argsort(buckets, kind="stable")
        arrivals, ids = arrivals[order], ids[order]
        stop = 0
        for bucket, size in enumerate(np.bincount(buckets).tolist(), first):
            start, stop = stop, stop + size
            if size:
                self._pieces[bucket].append((arrivals[start:stop], ids[start:stop]))

    def take_before(self, place: float) -> Iterator[NDArray[np.integer[Any]]]:
        """Hand over, in order of arrival, the samples of all buckets that end before ``place``."""
        while self._pieces and (self._next + 1) * self._width <= place:
            pieces = self._pieces.pop(self._next, [])
            self._next += 1
            if pieces:
                arrivals, ids = (np.concatenate(column) for column in zip(*pieces, strict=True))
                # Numpy sorts 16-bit integers in linear time, and what is nearly sorted almost so. The width is a power
                # of two, so nothing is rounded.
                low = (self._next - 1) * self._width
                order = np.argsort(((arrivals - low) * (2.0**16 / self._width)).astype(np.uint16), kind="stable")
                yield ids[order[np.argsort(arrivals[order], kind="stable")]]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Runs ``[first, first + size)``, in reading order."""

    firsts: NDArray[np.int64]
    """First sample of each run."""
    sizes: NDArray[np.int64]
    """Length of each run."""

    @property
    def num_samples(self) -> int:
        """Samples in all runs."""
        return int(self.sizes.sum())

    def __getitem__(self, which: slice | NDArray[np.int64]) -> Spans:
        return Spans(self.firsts[which], self.sizes[which])

    def write(self, out: NDArray[np.integer[Any]]) -> None:
        """Fill ``out`` with the spans' samples, one span after another."""
        write_runs(self.firsts, self.sizes, out)

    def write_shuffled(self, out: NDArray[np.integer[Any]], generator: np.random.Generator) -> None:
        """Fill ``out`` with the spans' samples, one span after another, each shuffled within itself."""
        self.write(out)
        _shuffle_runs(self.sizes, out, generator)


def _shuffle_runs(sizes: NDArray[np.int64], items: NDArray[np.integer[Any]], generator: np.random.Generator) -> None:
    """Shuffle each of the runs that ``items`` consists of within itself, in place."""
    stop = 0
    for size in sizes.tolist():
        start, stop = stop, stop + size
        shuffle_items(items[start:stop], generator)


def _unit_spans(task: ShuffleTask) -> Spans:
    """The runs to shuffle, in the order of their ids."""
    return Spans(np.cumsum(task.units) - task.units, task.units)


def spans_per_canonical_node(task: ShuffleTask, generator: np.random.Generator) -> list[Spans]:
    """Give each canonical node its spans, in this epoch's order.

    Which spans a canonical node has is the same in all epochs, so that a node finds in its cache what it read before.

    Args:
        task: What to shuffle.
        generator: Generator of this epoch, which is used further.

    Returns:
        One per canonical node; empty where there are more of them than samples.
    """
    parts = split_spans(_shuffled_spans(_unit_spans(task), task.run_generator()), task.num_canonical_nodes)
    return [_shuffled_spans(part, generator) for part in parts]


def _shuffled_spans(spans: Spans, generator: np.random.Generator) -> Spans:
    """The same spans in random order."""
    if len(spans.sizes) < 2:  # takes no random number
        return spans
    return spans[generator.permutation(len(spans.sizes))]


def _with_outputs(
    parts: Iterable[Spans], out: NDArray[np.integer[Any]]
) -> Iterator[tuple[Spans, NDArray[np.integer[Any]]]]:
    """Each canonical node's spans with the slice of ``out`` that they fill."""
    stop = 0
    for part in parts:
        start, stop = stop, stop + part.num_samples
        yield part, out[start:stop]


def joined_spans(parts: Sequence[Spans]) -> Spans:
    """All parts' spans, one part after another."""
    return Spans(np.concatenate([part.firsts for part in parts]), np.concatenate([part.sizes for part in parts]))


def split_spans(spans: Spans, num_parts: int) -> list[Spans]:
    """Cut spans, as they follow each other, into parts of equal size.

    Part ``c`` ends after ``n * (c + 1) // num_parts`` samples; a span that reaches across is cut in two. For example
    spans of 4 and 6 samples in two parts give spans of 4 and 1, and one of 5.
    """
    stops = np.cumsum(spans.sizes)
    id_minus_position = spans.firsts - (stops - spans.sizes)
    borders = spans.num_samples * np.arange(1, num_parts + 1) // num_parts
    inside = borders[np.diff(borders, prepend=0) > 0]
    owners = np.searchsorted(stops, inside)
    across = stops[owners] != inside
    inside, owners = inside[across], owners[across]

    piece_stops = np.insert(stops, owners, inside)
    piece_owners = np.insert(np.arange(len(stops)), owners, owners)
    sizes = np.diff(piece_stops, prepend=0)
    pieces = Spans(piece_stops - sizes + id_minus_position[piece_owners], sizes)

    ends = np.searchsorted(piece_stops, borders, side="right").tolist()
    return [pieces[start:end] for start, end in zip([0, *ends], ends, strict=False)]


_SMALLEST_BUFFER = 256
_LARGEST_BUFFER = 1 << 20
"""Items between which a detour over 8-byte integers is faster. With fewer the calls cost more than they save; with more
the cache decides, which holds more of small ones."""


def shuffle_items(items: NDArray[np.integer[Any]], generator: np.random.Generator) -> None:
    """Shuffle like ``generator.shuffle(items)``, in one dimension, about a third faster for 4-byte ids.

    numpy is faster with 8-byte items, and uses the same random numbers for any item size.
    """
    if items.itemsize == 8 or not _SMALLEST_BUFFER <= len(items) <= _LARGEST_BUFFER:
        generator.shuffle(items)
        return
    buffer = items.astype(np.int64)
    generator.shuffle(buffer)
    items[:] = buffer
