"""Packs of texts or conversations that are tokenized as they are read: all documents of some packs together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from lightning_streaming.dataset.sample_key import Row
from lightning_streaming.errors import SampleError, StreamingError
from lightning_streaming.formats.shard_format import ColumnReader, ShardReader
from lightning_streaming.options.packing import Packing
from lightning_streaming.reading.assemble import Scheduler
from lightning_streaming.reading.packs.documents import KEPT_BYTES
from lightning_streaming.reading.packs.types import ColumnTypes
from lightning_streaming.reading.packs.values import PackSpans, bytes_of, expected, filling, joined_parts
from lightning_streaming.reading.plan import Window, WorkerPlan, by_shard
from lightning_streaming.tokenizing.documents import TOKENS, DocumentTokenizer
from lightning_streaming.tokenizing.tokenizer import tokenize_in_one_thread

COST = 16
"""How many times its bytes a batch counts where several are tokenized together, so that the first of them comes soon:
tokenizing takes much longer than copying."""
_Place = tuple[int, int]
_Document = Mapping[str, NDArray[Any]]


class TokenizedJoin:
    """Tokenizes the documents of some packs together, and joins their tokens.

    A document that is cut between packs is kept for its other pieces.

    Args:
        plan: The worker's plan.
        scheduler: The pass.
        tokenizer: Tokenizes rows.
        packing: Options.
        types: Types of the columns in batches.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        scheduler: Scheduler,
        tokenizer: DocumentTokenizer,
        packing: Packing,
        types: ColumnTypes,
    ) -> None:
        self.types = types
        self._plan, self._scheduler, self._tokenizer, self._packing = plan, scheduler, tokenizer, packing
        self._kept, self._kept_bytes = OrderedDict[_Place, _Document](), 0
        if get_worker_info() is not None:
            tokenize_in_one_thread()

    def has_known_bad(self, window: Window, rows: slice) -> bool:
        """Return whether some of the documents were bad in an earlier run, so are replaced without being read."""
        bad = self._plan.bad
        return bad is not None and bad.are_known(window.positions[rows])

    def columns(self, names: Sequence[str], window: Window, rows: slice, spans: PackSpans) -> dict[str, NDArray[Any]]:
        """Return the values of columns in some packs, each of shape (packs, capacity).

        Raises:
            FormatError: A document is damaged, or cannot be tokenized; :meth:`one_by_one` finds out which.
            SampleError: A document has another length than expected, or a type does not hold a value.
            StorageError: A shard could not be fetched.
        """
        of = list(zip(window.shards[rows].tolist(), window.indexes[rows].tolist(), strict=True))
        are_cut = (spans.rows.starts > 0) | ~spans.rows.are_ends
        numbers = dict.fromkeys(of)
        kept = {place: self._kept[place] for place in numbers if place in self._kept}
        texts = [place for place in numbers if place not in kept]
        values = {name: [document[name] for document in kept.values()] for name in names}
        counts = [len(document[TOKENS]) for document in kept.values()]
        if texts:
            tokenized = self._tokenizer.joined(self._read(texts))
            counts += tokenized.counts.tolist()
            for name in names:
                values[name].append(tokenized.columns[name])
        order = {place: number for number, place in enumerate([*kept, *texts])}
        documents = np.array([order[place] for place in of])
        lengths = np.array(counts, np.int64)
        stops = spans.rows.starts + spans.rows.lengths
        is_wrong = (lengths[documents] < stops) | (spans.rows.are_ends & (lengths[documents] > stops))
        if is_wrong.any():
            raise SampleError(f"a document is not of {expected(int(stops[is_wrong.argmax()]), True)} tokens")
        firsts = np.cumsum(lengths) - lengths
        joined = {name: np.concatenate(parts) for name, parts in values.items()}
        if are_cut.any():
            cut = {of[row]: int(documents[row]) for row in np.flatnonzero(are_cut).tolist()}
            for place, number in cut.items():
                part = slice(int(firsts[number]), int(firsts[number] + lengths[number]))
                self._keep(place, kept.get(place) or {name: column[part].copy() for name, column in joined.items()})
        starts = firsts[documents] + spans.rows.starts
        return {name: self._packed(name, values, starts, spans) for name, values in joined.items()}

    def _packed(self, name: str, values: NDArray[Any], starts: NDArray[np.int64], spans: PackSpans) -> NDArray[Any]:
        self.types.of(name, values.dtype)
        longest = int(spans.lengths[spans.sources < 0].max(initial=0))
        padding = filling(self._packing, name, longest, values.dtype, self.types)
        is_document = spans.sources >= 0
        begins = np.where(is_document, starts[spans.sources] * values.itemsize, 0)
        parts = [bytes_of(padding), bytes_of(values)]
        packed = joined_parts(parts, is_document.astype(np.int64), begins, spans.lengths, values.dtype)
        return packed.reshape(spans.num_packs, spans.capacity)

    def one_by_one(self, window: Window, rows: slice) -> Iterator[Any]:
        """Yield documents that are read one by one, and bad ones replaced.

        Raises:
            StreamingError: A document is bad; names it.
        """
        decoded, bad = self._scheduler.decoded, self._plan.bad
        columns = (values[rows].tolist() for values in (window.positions, window.shards, window.indexes))
        for position, shard, index in zip(*columns, strict=True):
            row: Row = (position, shard, index, 0)
            try:
                if bad is not None:
                    bad.refuse_known(position, shard, index)
                yield decoded(row)
            except StreamingError as error:
                yield self._plan.replacement(row, error, decoded)

    def _read(self, places: Sequence[_Place]) -> list[Mapping[str, Any]]:
        """Return stored rows, each shard's while it is open."""
        rows: list[Any] = [None] * len(places)
        shards, indexes = np.array(places).T
        for ours in by_shard(shards):
            reader = self._scheduler.reader(int(shards[ours[0]]))
            for number, row in zip(ours.tolist(), _rows(reader, indexes[ours]), strict=True):
                rows[number] = row
        return rows

    def _keep(self, place: _Place, document: _Document) -> None:
        if place in self._kept:
            self._kept.move_to_end(place)
            return
        self._kept[place] = document
        self._kept_bytes += _bytes_of(document)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= _bytes_of(self._kept.popitem(last=False)[1])


def _rows(reader: ShardReader, indexes: NDArray[np.int64]) -> Iterator[Mapping[str, Any]]:
    taken = reader.take(indexes) if isinstance(reader, ColumnReader) else None
    if taken is None:
        return map(reader.__getitem__, indexes.tolist())
    return (dict(zip(taken, row, strict=True)) for row in zip(*taken.values(), strict=True))


def _bytes_of(document: _Document) -> int:
    return sum(column.nbytes for column in document.values())
