"""The key of a sample: where it is stored and when it was read, enough to restore it.

A loader adds keys, or a mask of the samples that count, to its batches on request. Both are computed in the process
that consumes the batches, from the plan of the pass alone. Nothing comes from the workers, so transform, collate and
pinning make no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.resume.state import EpochStart
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.batching import Batched
from lightning_streaming.sequence.partition import Partition
from lightning_streaming.signatures import public

if TYPE_CHECKING:
    from torch import Tensor

_WINDOW_SAMPLES = 8192
"""Samples whose keys are worked out together: enough for numpy to be fast, few enough to start at once."""
_VALID = "valid"
"""Name of the mask in a batch."""
Row = tuple[int, int, int, int]
"""Position of a sample in the epoch, its shard over all streams, its index there; and events of the reader after it."""


class Replacement(NamedTuple):
    """A sample that was read as the replacement of a bad one."""

    position: int
    """Position in the epoch's global sequence."""
    shard: int
    """Shard of both samples, counted within its stream."""
    sample: int
    """Sample, counted within its shard."""


@public()
@dataclass(frozen=True, kw_only=True, slots=True)
class SampleKey:
    """Key of one sample as one epoch reads it: plain values that pickle, and become JSON with :meth:`as_dict`."""

    stream: str
    """Name of the stream."""
    shard: int
    """Number of the shard within its stream."""
    sample_index: int
    """Number of the sample within its shard."""
    epoch: int
    """Epoch that the sample is read in."""
    position: int
    """Position in the epoch's global sequence."""
    shuffle_seed: int
    """Seed of the order; with epoch and position it seeds the randomness of the sample."""

    def as_dict(self) -> dict[str, Any]:
        """Return the key as a dict; :meth:`from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SampleKey:
        """Create a key from a dict, for example one that was read from JSON.

        Raises:
            ConfigError: ``values`` are not the fields of a key.
        """
        wanted = {field.name: str if field.name == "stream" else int for field in fields(cls)}
        are_right = values.keys() == wanted.keys() and all(
            isinstance(values[name], kind) and not isinstance(values[name], bool) for name, kind in wanted.items()
        )
        if not are_right:
            raise ConfigError(f"the key of a sample has {', '.join(wanted)}, but got {dict(values)!r}")
        return cls(**values)


class Pass(NamedTuple):
    """The facts that all keys of a pass share."""

    stream_names: tuple[str, ...]
    epoch: int
    shuffle_seed: int


class KeyTable:
    """Keys as columns, which code that searches a batch for tensors does not see.

    Args:
        of_pass: What all keys have in common.
        rows: Position, stream by its place, shard, index and first token of each; of shape (samples, 5). The token is 0
            but for the rest of a document that was cut between packs. Not to be written to.
        are_first: Whether no earlier position of the pass holds the same sample; of shape (samples,).
        packs_are_first: The same of the packs, or groups, that the samples are parts of; of shape (packs,).
    """

    __slots__ = ("are_first", "of_pass", "packs_are_first", "rows")

    def __init__(
        self,
        of_pass: Pass,
        rows: NDArray[np.int64],
        are_first: NDArray[np.bool_],
        packs_are_first: NDArray[np.bool_] | None = None,
    ) -> None:
        self.of_pass = of_pass
        self.rows = rows
        self.are_first = are_first
        self.packs_are_first = packs_are_first

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@public("distributed")
@dataclass(eq=False, repr=False, slots=True)
class SampleKeys:
    """Keys of the samples of a batch, in the order in which they were collated: like a list of :class:`SampleKey`.

    They stay on the CPU, as an array of integers. Strategies, precision plugins and Lightning's search for the batch
    size traverse a batch by class of collection; to them this is a dataclass with nothing in it. So it is no
    ``collections.abc.Sequence``, though it has a length, indexes and slices, and can be iterated over.
    """

    _table: KeyTable

    @property
    def valid(self) -> Tensor:
        """Mask of samples that count: False for those read again to fill up a rank; bool of shape (samples,)."""
        from torch import from_numpy  # not for tools and logs, which know keys too

        return from_numpy(self._table.are_first.copy())

    @property
    def valid_packs(self) -> Tensor:
        """Mask like ``valid`` with an entry for each pack of a batch of packs; bool of shape (packs,)."""
        from torch import from_numpy

        packs = self._table.packs_are_first
        return self.valid if packs is None else from_numpy(packs.copy())

    @property
    def positions(self) -> Tensor:
        """Positions in the epoch's global sequence; int64 of shape (samples,)."""
        from torch import from_numpy

        return from_numpy(self._table.rows[:, 0].copy())

    def to(self, *_where: Any, **_how: Any) -> SampleKeys:
        """Return the keys themselves: they stay on the CPU when their batch moves to a device."""
        return self

    def pin_memory(self, *_device: Any) -> SampleKeys:
        """Return the keys themselves: they are not copied to a device."""
        return self

    def __len__(self) -> int:
        return len(self._table.rows)

    @overload
    def __getitem__(self, index: int) -> SampleKey: ...

    @overload
    def __getitem__(self, index: slice) -> SampleKeys: ...

    def __getitem__(self, index: int | slice) -> SampleKey | SampleKeys:
        table = self._table
        if isinstance(index, slice):
            return SampleKeys(KeyTable(table.of_pass, table.rows[index], table.are_first[index]))
        position, stream, shard, sample, _ = table.rows[index].tolist()
        names, epoch, seed = table.of_pass
        return SampleKey(
            stream=names[stream], shard=shard, sample_index=sample, epoch=epoch, position=position, shuffle_seed=seed
        )

    if TYPE_CHECKING:  # Python iterates by index; with this method they would be a collection to Lightning

        def __iter__(self) -> Iterator[SampleKey]: ...

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampleKeys):
            return NotImplemented
        mine, others = self._table, other._table
        return (
            mine.of_pass == others.of_pass
            and np.array_equal(mine.rows, others.rows)
            and np.array_equal(mine.are_first, others.are_first)
        )

    __hash__ = None  # type: ignore[assignment]  # equal by content

    def __repr__(self) -> str:
        return f"SampleKeys({[self[place] for place in range(len(self))]})"


def table_of(keys: SampleKeys) -> KeyTable:
    """Return the keys of a batch as columns."""
    return keys._table


def join_keys(parts: Sequence[SampleKeys]) -> SampleKeys:
    """Join the keys of several batches.

    Raises:
        ConfigError: There are none, or they are of different passes.
    """
    tables = [table_of(part) for part in parts]
    if len({table.of_pass for table in tables}) != 1:
        raise ConfigError(
            f"keys of one pass were wanted, but got those of {len({table.of_pass for table in tables})} epochs or "
            "datasets",
            hint="begin a new list for each",
            option="keys",
        )
    rows = np.concatenate([table.rows for table in tables])
    return SampleKeys(KeyTable(tables[0].of_pass, rows, np.concatenate([table.are_first for table in tables])))


def delivered_keys(keys: SampleKeys, replaced: Mapping[int, Replacement]) -> SampleKeys:
    """Return the keys of the samples that were read, with those of replacements.

    Args:
        keys: Those of the samples that were to be read.
        replaced: By position.
    """
    if not replaced:
        return keys
    table = table_of(keys)
    rows = table.rows.copy()
    for place, position in enumerate(rows[:, 0].tolist()):
        if position in replaced:
            rows[place, 2:4] = replaced[position][1:]
    return SampleKeys(KeyTable(table.of_pass, rows, table.are_first, table.packs_are_first))


@public()
class KeyedBatch(NamedTuple):
    """Batch of ``StreamingDataLoader(return_keys=True)``, with the keys of its samples."""

    batch: Any
    """Result of the collate function."""
    keys: SampleKeys
    """One key for each sample that the collate function was given."""


def keys_of_rows(catalog: Catalog, start: EpochStart) -> Callable[[Row], SampleKey]:
    """Return a function that returns the key of a sample of this pass."""
    first_shards = [0, *accumulate(catalog.shards_per_stream)]

    def key(row: Row) -> SampleKey:
        position, shard, index, _ = row
        stream = int(catalog.stream_of_shard[shard])
        return SampleKey(
            stream=catalog.stream_names[stream],
            shard=shard - first_shards[stream],
            sample_index=index,
            epoch=start.cursor.epoch,
            position=position,
            shuffle_seed=start.shuffle_seed,
        )

    return key


def keys_of_batches(start: EpochStart, plan: Batched, partition: Partition, catalog: Catalog) -> Iterator[SampleKeys]:
    """Yield the keys of each batch that one rank reads in a pass; the last batch may have fewer samples."""
    node, rank_of_node = start.world.node, start.world.rank_of_node
    of_pass = _of_pass(start, catalog)
    first_shards = np.cumsum([0, *catalog.shards_per_stream[:-1]])
    num_batches = partition.num_batches()
    step = max(1, _WINDOW_SAMPLES // partition.geometry.batch_size)
    for first in range(0, num_batches, step):
        batches = np.arange(first, min(first + step, num_batches))
        positions = partition.batches(batches, node, rank_of_node)
        are_first = plan.are_first_reads(partition, batches, node, rank_of_node)
        read = positions >= 0  # only an epoch's last batch may be short of samples
        packed = plan.rows(positions[read])
        shards, indexes = catalog.places(packed.ids)
        streams = catalog.stream_of_shard[shards]
        tokens = np.zeros_like(indexes) if packed.pieces is None else packed.pieces.starts
        rows = np.stack([packed.positions, streams, shards - first_shards[streams], indexes, tokens], axis=1)
        first_reads, stops = are_first[read], np.cumsum(read.sum(axis=1))
        packs: list[NDArray[np.bool_] | None] = [None] * len(batches)
        if packed.pieces is not None:
            packs = [*np.split(first_reads, stops[:-1])]
            first_reads, stops = first_reads[packed.pieces.entries], packed.stops(int(stops[-1]))[stops - 1]
        for (begin, stop), of_batch in zip(pairwise([0, *stops.tolist()]), packs, strict=True):
            yield SampleKeys(KeyTable(of_pass, rows[begin:stop], first_reads[begin:stop], of_batch))


def no_keys(start: EpochStart, catalog: Catalog) -> SampleKeys:
    """Return the keys of each batch of a rank that reads no samples."""
    return SampleKeys(KeyTable(_of_pass(start, catalog), np.zeros((0, 5), np.int64), np.zeros(0, np.bool_)))


def _of_pass(start: EpochStart, catalog: Catalog) -> Pass:
    return Pass(tuple(catalog.stream_names), start.cursor.epoch, start.shuffle_seed)


def add_valid(batch: Any, keys: SampleKeys, *, of_packs: bool = False) -> Any:
    """Return the batch, a dict, with the mask ``valid`` of those samples that no rank has read before.

    Args:
        batch: It is not changed.
        keys: Those of its samples.
        of_packs: Whether a row of the batch is a pack, which has several samples; the mask then has an entry for each.

    Raises:
        ConfigError: It is no dict, or has such an entry already.
    """
    if not isinstance(batch, MutableMapping):
        raise ConfigError(
            f"return_valid_mask adds an entry to batches that are dicts, but this one is a {type(batch).__name__}",
            hint="use return_keys=True, which serves every kind of batch, and keys.valid",
            option="return_valid_mask",
        )
    if _VALID in batch:
        raise ConfigError(
            f"return_valid_mask adds an entry {_VALID!r}, but the batch has one already",
            hint="rename that column, or use return_keys=True and keys.valid",
            option="return_valid_mask",
        )
    batch = copy(batch)  # a collate function may return the same dict each time
    batch[_VALID] = keys.valid_packs if of_packs else keys.valid
    return batch
