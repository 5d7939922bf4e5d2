"""Batches of packs and of groups under a token budget.

Documents that no code of the user sees are joined many at a time: one call joins the bytes of all documents of some
packs, so there is no step of Python for each. Texts that only the tokenizer changes are tokenized many at a time, too
(``tokenized.py``). Others are created one by one, and packed as they come.

The batch of a group is padded to its longest document:

documents     A A A A A   B B B   C C C C
input_ids     A A A A A | B B B 0 0 | C C C C 0
lengths       5 3 4
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise, repeat
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_streaming.dataset.bad_samples import MISSING
from lightning_streaming.dataset.collation import Collate, CollateError, collated
from lightning_streaming.dataset.options import check_batch_of_budget
from lightning_streaming.errors import BadSamplesError, ConfigError, FormatError, SampleError
from lightning_streaming.formats.columns import flat_column
from lightning_streaming.formats.shard_format import FlatColumn, ShardReader
from lightning_streaming.options.packing import Packing, PackingConfig, TokenBudget
from lightning_streaming.reading.assemble import GATHERED_BYTES, ReadSome, Scheduler, read_batches
from lightning_streaming.reading.packs.tokenized import COST, TokenizedJoin
from lightning_streaming.reading.packs.types import BarePack, ColumnTypes, alike_batches, converted, stored_types
from lightning_streaming.reading.packs.values import (
    PackBatch,
    PackSpans,
    StoredParts,
    as_shaped,
    batch_of,
    bytes_of,
    collate_packs,
    concatenated,
    cut,
    documents_of,
    expected,
    filled_pack,
    filling,
    joined_parts,
    missing_of,
    part_of,
    taken_of,
    typed_columns,
    values_of,
)
from lightning_streaming.reading.plan import Assembler, Batches, Window, WorkerPlan, by_shard, located
from lightning_streaming.sequence.batching import RowPieces
from lightning_streaming.tokenizing.documents import DocumentTokenizer

_Measures = TypeVar("_Measures")


def assembler_of(packing: Packing) -> Assembler:
    """Return the assembler of a dataset with these options of packing."""
    return GroupAssembler(packing) if isinstance(packing, TokenBudget) else PackAssembler(packing)


class _DocumentAssembler(Assembler):
    """Batches of packed documents.

    Args:
        packing: Options.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._settled = dict[str, np.dtype[Any]]()
        """Types of packed columns, by name, which all passes share."""

    def tokens(self, window: Window) -> NDArray[np.int64] | None:
        """Return the tokens in each batch of a window, and the room for them, of shape (batches, 2)."""
        assert window.pieces is not None, "packs are read"
        tokens = np.cumsum(window.pieces.lengths)
        rooms = np.cumsum(window.pieces.rooms(self._packing.settings()))
        last = window.stops - 1
        sums = (tokens[last], rooms[window.pieces.entries[last]])
        return np.stack([np.diff(counts, prepend=0) for counts in sums], axis=1)

    def items(self, plan: WorkerPlan, samples: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield packs or groups of documents that are created one by one."""
        types = self._types(plan)
        with closing(samples):
            if plan.factory.keeps_samples:
                types.check_stored()
            for window in located(plan.partition(), plan.source.catalog):
                assert window.pieces is not None, "packs are read"
                for rows, documents in documents_of(samples, window.pieces):
                    yield self._item(rows, documents, types)

    def batches(self, plan: WorkerPlan, *, drop_last: bool, separately: bool) -> Generator[Batches, None, None] | None:
        """Return batches of joined documents; None where documents must be created one by one.

        Raises:
            ConfigError: A column is stored in types of which no type holds all values.
            SampleError: A type does not hold a value, or a document has another length than expected.
            FormatError: A shard or a document of the next batch is damaged; names the stream and the shard.
            StorageError: A shard of the next batch could not be fetched.
        """
        is_joined = self._packing.is_flat and plan.source.may_be_joined()
        if not plan.reads_as_stored or (self._tokenizer(plan) is None and not is_joined):
            return None
        return read_batches(plan, partial(self._reader, plan), drop_last=drop_last, separately=separately)

    def checked(
        self, batches: Iterator[tuple[Any, _Measures]], types: MutableMapping[str, torch.dtype]
    ) -> Iterator[tuple[Any, _Measures]]:
        """Yield the batches of all workers; see :func:`alike_batches`."""
        return alike_batches(self._packing, types, batches)

    def _types(self, plan: WorkerPlan) -> ColumnTypes:
        packing, source = self._packing, plan.source  # not the plan, which the types may outlive
        return ColumnTypes(packing, lambda: stored_types(packing, source.catalog), self._settled)

    def _tokenizer(self, plan: WorkerPlan) -> DocumentTokenizer | None:
        """Return the tokenizer of documents whose tokens are all that is packed; None where each is created alone."""
        is_alone = plan.threads or self._packing.ends or not self._packing.is_flat
        tokenizer = None if is_alone else plan.source.only_tokenizes()
        packs_tokens_only = tokenizer is not None and {*self._packing.columns} <= {*tokenizer.results}
        return tokenizer if packs_tokens_only else None

    def _reader(self, plan: WorkerPlan, scheduler: Scheduler) -> ReadSome:
        types, tokenizer = self._types(plan), self._tokenizer(plan)
        if tokenizer is None:
            return partial(self._joined, _Join(plan, scheduler, self._packing, types), scheduler.batch_size)
        types.check_stored()
        join = TokenizedJoin(plan, scheduler, tokenizer, self._packing, types)
        return partial(self._tokenized, join, scheduler.batch_size)

    def _tokenized(
        self, join: TokenizedJoin, batch_size: int, window: Window, rows: slice, first: int, stop: int
    ) -> tuple[list[PackBatch], int]:
        """Read some batches of a window; only the first, one document after another, where one of them is bad."""
        if not join.has_known_bad(window, rows):
            try:
                batches, num_bytes = self._joined(join, batch_size, window, rows, first, stop)
            except (FormatError, SampleError):  # reading them one by one finds out which document it is
                pass
            else:
                return batches, COST * num_bytes
        assert window.pieces is not None, "packs are read"
        rows = slice(rows.start, int(window.stops[first]))
        samples, pieces = join.one_by_one(window, rows), part_of(window.pieces, rows, first * batch_size)
        items = [self._item(pieces, documents, join.types) for pieces, documents in documents_of(samples, pieces)]
        return [self.collate(default_collate, by_torch=False)(items)], GATHERED_BYTES

    @abstractmethod
    def _item(self, rows: RowPieces, documents: list[Any], types: ColumnTypes) -> Any:
        """Return the item of a batch that consists of these documents."""

    @abstractmethod
    def _joined(
        self, join: _Join | TokenizedJoin, batch_size: int, window: Window, rows: slice, first: int, stop: int
    ) -> tuple[list[PackBatch], int]:
        """Read some batches of a window; see :data:`ReadSome`."""


class PackAssembler(_DocumentAssembler):
    """Batches of packs of one capacity."""

    collates_packs: ClassVar[bool] = True
    _packing: PackingConfig

    def batches(self, plan: WorkerPlan, *, drop_last: bool, separately: bool) -> Generator[Batches, None, None] | None:  # noqa: ARG002
        """Return batches of joined documents, always some at a time: a list of them can be pinned."""
        return super().batches(plan, drop_last=drop_last, separately=False)

    def collate(self, collate: Collate, *, by_torch: bool) -> Collate:  # noqa: ARG002
        """Return a function that collates packs."""
        is_own = collate is default_collate
        return partial(collate_packs, self._packing) if is_own else partial(collated, collate)

    def _item(self, rows: RowPieces, documents: list[Any], types: ColumnTypes) -> PackBatch:
        packing, missing = self._packing, missing_of(documents)
        spans = PackSpans.of(rows, 1, packing.capacity, packing.multiple).without(missing)
        columns = {name: filled_pack(packing, name, documents, rows, types) for name in packing.columns}
        batch = {**batch_of(packing, columns, spans, types), **concatenated(packing, documents)}
        return BarePack(batch) if len(missing) == len(documents) else batch

    def _joined(
        self, join: _Join | TokenizedJoin, batch_size: int, window: Window, rows: slice, first: int, stop: int
    ) -> tuple[list[PackBatch], int]:
        assert window.pieces is not None, "packs are read"
        packing, first_pack = self._packing, first * batch_size
        num_packs = min(stop * batch_size, window.num_items) - first_pack
        spans = PackSpans.of(part_of(window.pieces, rows, first_pack), num_packs, packing.capacity, packing.multiple)
        columns = join.columns(packing.columns, window, rows, spans)
        batches = [
            batch_of(
                packing, {name: of[begin:end] for name, of in columns.items()}, spans.between(begin, end), join.types
            )
            for begin, end in pairwise([*range(0, num_packs, batch_size), num_packs])
        ]
        return batches, sum(of.nbytes for of in columns.values())


class Group(list[Any]):
    """The documents of a group; those that could not be created are missing.

    Args:
        documents: One for each row.
        rows: The part of each in the group.
        types: Types of the columns.
    """

    def __init__(self, documents: list[Any], rows: RowPieces, types: ColumnTypes) -> None:
        super().__init__(documents)
        self.rows, self.types = rows, types


class GroupAssembler(_DocumentAssembler):
    """Batches of groups under a token budget: each group is a batch."""

    _packing: TokenBudget

    def check_loader(self, batch_size: int, *, has_collate: bool) -> None:
        """Check that a batch is one group, and that the budget or the user says how documents are collated."""
        check_batch_of_budget(batch_size)
        if self._packing.column is None and not has_collate:
            raise ConfigError(
                "token_budget has no column=, so nothing says what of the documents to pad",
                hint="name it, or pass the loader a collate_fn= (in a data module, override collate)",
                option="token_budget.column",
            )

    def batches(self, plan: WorkerPlan, *, drop_last: bool, separately: bool) -> Generator[Batches, None, None] | None:  # noqa: ARG002
        """Return batches of joined documents one by one, as their shapes differ."""
        return super().batches(plan, drop_last=drop_last, separately=True)

    def collate(self, collate: Collate, *, by_torch: bool) -> Collate:  # noqa: ARG002
        """Return a function that collates the only group of a batch."""
        if collate is not default_collate:
            return lambda groups: _collated_group(collate, self._ended(groups[0]))
        return lambda groups: self._padded(groups[0])

    def _ended(self, group: Group) -> Sequence[Any]:
        """Return the documents of a group with the tokens that are inserted before and after them."""
        if not self._packing.ends:
            return group
        pack, batch, ended = self._packing, self._padded(group), list[Any](group)
        for place in {*range(len(group))} - {*missing_of(group)}:
            row = (place, slice(int(group.rows.lengths[place])))
            rows = {name: row if pack.shape_of(name)[0] < 0 else (..., *row) for name in pack.columns}
            ended[place] = {
                **group[place],
                **{name: batch[pack.name_of(name)][at].numpy() for name, at in rows.items()},
            }
        return ended

    def _item(self, rows: RowPieces, documents: list[Any], types: ColumnTypes) -> Group:
        budget, lengths = self._packing, StoredParts.of(self._packing, rows).lengths
        for place in {*np.flatnonzero(~rows.are_ends).tolist()} - {*missing_of(documents)}:
            document, length = documents[place], int(lengths[place])
            values = {
                name: as_shaped(values_of(budget, name, document)[:length], budget.shape_of(name), 1)
                for name in budget.columns
            }
            documents[place] = {**document, **values} if isinstance(document, Mapping) else values
        return Group(documents, rows, types)

    def _joined(
        self, join: _Join | TokenizedJoin, _batch_size: int, window: Window, rows: slice, first: int, _stop: int
    ) -> tuple[list[PackBatch], int]:
        assert window.pieces is not None, "groups are read"
        spans = _spans_of_group(part_of(window.pieces, rows, first))
        columns = join.columns(self._packing.columns, window, rows, spans)
        return [self._batch(columns, spans, join.types)], 0

    def _padded(self, group: Group) -> PackBatch:
        """Return the batch of a group of documents.

        Raises:
            SampleError: A document is not as expected, or a type does not hold a value of it.
        """
        missing = missing_of(group)
        spans = _spans_of_group(group.rows).without(missing)
        are_there = np.repeat(~np.isin(np.arange(len(group)), missing), spans.rows.lengths)
        columns = {}
        for name in self._packing.columns:
            values = np.concatenate(taken_of(self._packing, name, group, spans.rows, group.types))
            filled = filling(self._packing, name, spans.num_packs * spans.capacity, values.dtype, group.types)
            filled[~spans.are_padding().reshape(-1)] = values[are_there]
            columns[name] = filled.reshape(spans.num_packs, spans.capacity, *filled.shape[1:])
        batch = {**self._batch(columns, spans, group.types), **concatenated(self._packing, group)}
        return BarePack(batch) if len(missing) == len(group) else batch

    def _batch(self, columns: Mapping[str, NDArray[Any]], spans: PackSpans, types: ColumnTypes) -> PackBatch:
        """Return the batch of columns of shape (documents, longest), in memory that is not used otherwise."""
        are_there = spans.sources >= 0
        lengths = np.bincount(spans.packs[are_there], spans.lengths[are_there], spans.num_packs).astype(np.int64)
        return {**typed_columns(self._packing, columns, spans, types), "lengths": torch.from_numpy(lengths)}


def _spans_of_group(rows: RowPieces) -> PackSpans:
    """Return the spans of a group: each document is filled up like a pack that holds the longest."""
    apart = replace(rows, entries=np.arange(len(rows.entries)))
    return PackSpans.of(apart, len(rows.entries), int(rows.lengths.max()))


def _collated_group(collate: Collate, group: Sequence[Any]) -> Any:
    """Return the batch that a user's function makes of a group, without documents that could not be created.

    Raises:
        BadSamplesError: None could.
        CollateError: The function failed.
    """
    there = [place for place, document in enumerate(group) if document is not MISSING]
    if not there:
        raise BadSamplesError(
            f"all {len(group)} documents of a group are bad, so collate_fn has nothing to collate",
            hint="fix the data or the transform, or leave such documents out with `lightning-streaming select --not`",
        )
    try:
        return collated(collate, [group[place] for place in there])
    except CollateError as error:
        raise CollateError(str(error), [there[place] for place in error.places]) from error.__cause__


class _Join:
    """Joins the values of documents from their shards."""

    def __init__(self, plan: WorkerPlan, scheduler: Scheduler, packing: Packing, types: ColumnTypes) -> None:
        self._source, self._scheduler, self._pack, self.types = plan.source, scheduler, packing, types
        self.types.check_stored()
        self._mixed = set[str]()
        """Columns of which shards have values of several types: these are converted before they are joined."""
        self._columns: dict[tuple[int, str], tuple[ShardReader, FlatColumn]] = {}

    def columns(self, names: Sequence[str], window: Window, rows: slice, spans: PackSpans) -> dict[str, NDArray[Any]]:
        """Return the values of columns in some packs, each of shape (packs, capacity)."""
        return {name: self._packed(name, window, rows, spans) for name in names}

    def _packed(self, name: str, window: Window, rows: slice, spans: PackSpans) -> NDArray[Any]:
        """Return the values of a column in some packs, of shape (packs, capacity)."""
        shards, indexes = window.shards[rows], window.indexes[rows]
        stored = StoredParts.of(self._pack, spans.rows)
        begins, counts, are_ends = stored.starts, stored.lengths, spans.rows.are_ends
        parts, sources, places = list[memoryview](), np.empty(len(shards), np.int64), np.empty(len(shards), np.int64)
        groups, common = list(by_shard(shards)), None
        stay_open = all(int(shards[ours[0]]) in self._source.open_shards.readers for ours in groups)
        for ours in groups:
            shard = int(shards[ours[0]])
            column = self._column(shard, name)
            self._check(shard, name, column, indexes[ours], begins[ours] + counts[ours], are_ends[ours])
            size = column.dtype.itemsize
            starts, sizes = column.starts[indexes[ours]] + begins[ours] * size, counts[ours] * size
            if common is None:
                common = self.types.unseen(name) if name in self._mixed else column.dtype
            if column.dtype != common and name not in self._mixed:
                self._mixed.add(name)
                return self._packed(name, window, rows, spans)
            data = column.data
            if column.dtype != common or not stay_open:  # the next shard may replace this one
                data = memoryview(b"".join(map(cut, repeat(data), _bounds(starts, starts + sizes))))
                if column.dtype != common:
                    documents = indexes[ours], counts[ours]
                    data = self._as_type(shard, name, np.frombuffer(data, column.dtype), common, documents)
                starts = (np.cumsum(counts[ours]) - counts[ours]) * common.itemsize
            parts.append(data)
            sources[ours], places[ours] = len(parts) - 1, starts
        assert common is not None, "there is a document"
        # Documents in the order of packs, with the padding between them.
        longest = max(int(spans.lengths[spans.sources < 0].max(initial=0)), 1)
        parts.append(bytes_of(filling(self._pack, name, longest, common, self.types)))
        is_document = spans.sources >= 0
        of = np.where(is_document, sources[spans.sources], len(parts) - 1)
        starts, lengths = np.where(is_document, places[spans.sources], 0), spans.lengths
        if self._pack.ends:  # padding, which inserted tokens replace later, around the stored ones
            around = [np.where(is_document, are_inserted[spans.sources], 0) for are_inserted in stored[2:]]
            of, starts, lengths = (
                np.stack([before, here, after], axis=1).reshape(-1)
                for before, here, after in (
                    (np.full_like(of, len(parts) - 1), of, np.full_like(of, len(parts) - 1)),
                    (np.zeros_like(starts), starts, np.zeros_like(starts)),
                    (around[0], lengths - sum(around), around[1]),
                )
            )
        return joined_parts(parts, of, starts, lengths, common).reshape(spans.num_packs, spans.capacity)

    def _as_type(
        self,
        shard: int,
        name: str,
        values: NDArray[Any],
        dtype: np.dtype[Any],
        documents: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> memoryview:
        """Return the bytes of a shard's values in another type; ``documents`` has index and length of each."""
        indexes, counts = documents

        def sample_of(place: int) -> str:
            return f"{int(indexes[np.searchsorted(np.cumsum(counts), place, side='right')])} of shard {shard}"

        try:
            return bytes_of(converted(self._pack, name, values, dtype, sample_of))
        except SampleError as error:
            raise self._source.named(error, shard) from None

    def _column(self, shard: int, name: str) -> FlatColumn:
        reader = self._scheduler.reader(shard)
        known = self._columns.get((shard, name))
        if known is None or known[0] is not reader:
            try:
                column = flat_column(reader, self._source.catalog.shards[shard], name, self._pack.dtype_of(name))
                self.types.of(name, column.dtype)
            except (ConfigError, FormatError, SampleError) as error:
                raise self._source.named(error, shard) from error
            # Only while a shard is open: an epoch has many, and a document takes 16 bytes of each column.
            cached, readers = self._columns, self._source.open_shards.readers
            self._columns = {key: entry for key, entry in cached.items() if readers.get(key[0]) is entry[0]}
            known = self._columns[shard, name] = reader, column
        return known[1]

    def _check(
        self,
        shard: int,
        name: str,
        column: FlatColumn,
        indexes: NDArray[np.int64],
        stops: NDArray[np.int64],
        are_ends: NDArray[np.bool_],
    ) -> None:
        """Raise an error for documents that are shorter, or longer, than expected."""
        counts = column.counts[indexes]
        is_wrong = (counts < stops) | (are_ends & (counts > stops))
        if is_wrong.any():
            place = int(is_wrong.argmax())
            index, length = int(indexes[place]), expected(int(stops[place]), bool(are_ends[place]))
            raise self._source.named(
                SampleError(
                    f"sample {index} of shard {shard} has {int(column.counts[index])} values in column {name!r}, and "
                    f"was said to have {length}",
                    hint=f"give {self._pack.option}.lengths= the length of {self._pack.column!r}, and name along it "
                    "only columns that are as long",
                    option=f"{self._pack.option}.lengths",
                    sample=index,
                ),
                shard,
            )


def _bounds(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Iterator[slice]:
    return map(slice, starts.tolist(), stops.tolist())
