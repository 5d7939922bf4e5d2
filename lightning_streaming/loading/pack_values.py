"""What packs are made of: the values of their documents one after another, filled up, and what tells them apart.

documents       A A A A A   B B B   C C      in packs of 8 tokens and, here, of 4
input_ids       A A A A A B B B | C C 0 0
position_ids    0 1 2 3 4 0 1 2 | 0 1 0 1
document_ids    0 0 0 0 0 1 1 1 | 0 0 -1 -1
cu_seqlens      0 5 8 10 12
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise, repeat
from operator import getitem
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_streaming.errors import SampleError
from lightning_streaming.loading.bad_samples import MISSING
from lightning_streaming.loading.pack_options import Pack
from lightning_streaming.order.packs import PackRows

_COUNT = np.dtype(np.int64)
cut = cast("Callable[[memoryview, slice], memoryview]", getitem)
"""A part of some bytes, without a copy; by what joins the parts no step of Python is taken for each."""


def bytes_of(values: NDArray[Any]) -> memoryview:
    """The bytes of an array in one dimension."""
    return memoryview(values.data).cast("B")


@dataclass(frozen=True, slots=True, eq=False)
class PackSpans:
    """Where the documents of some packs lie, one pack after another, each filled up to its capacity.

    Args:
        rows: What is in them.
        num_packs: How many.
        capacity: Tokens of each.
    """

    rows: PackRows
    num_packs: int
    capacity: int
    lengths: NDArray[np.int64]
    """Tokens of each span: those of documents, and those that fill packs up."""
    packs: NDArray[np.int64]
    """The pack of each span."""
    sources: NDArray[np.int64]
    """The row of each span, -1 for what fills a pack up."""

    @classmethod
    def of(cls, rows: PackRows, num_packs: int, capacity: int) -> PackSpans:
        """The spans of some packs."""
        room = capacity - np.bincount(rows.packs, rows.lengths, num_packs).astype(np.int64)
        short = np.flatnonzero(room)
        packs = np.concatenate([rows.packs, short])
        order = np.argsort(packs, kind="stable")
        return cls(
            rows,
            num_packs,
            capacity,
            lengths=np.concatenate([rows.lengths, room[short]])[order],
            packs=packs[order],
            sources=np.concatenate([np.arange(len(rows.packs)), np.full(len(short), -1)])[order],
        )

    def position_ids(self) -> NDArray[np.int64]:
        """Of each token, how many of its document's tokens come before it in the pack; of shape (packs, capacity)."""
        counted = bytes_of(np.arange(int(self.lengths.max(initial=0))))
        stops = map(slice, (self.lengths * _COUNT.itemsize).tolist())
        places = np.frombuffer(bytearray().join(map(cut, repeat(counted), stops)), _COUNT)
        return places.reshape(self.num_packs, self.capacity)

    def document_ids(self) -> NDArray[np.int32]:
        """Of each token, which of its pack's documents it is of; -1 for what fills it up; (packs, capacity)."""
        firsts = np.searchsorted(self.packs, np.arange(self.num_packs))
        numbers = np.where(self.sources < 0, -1, np.arange(len(self.packs)) - firsts[self.packs]).astype(np.int32)
        return np.repeat(numbers, self.lengths).reshape(self.num_packs, self.capacity)

    def cu_seqlens(self) -> NDArray[np.int32]:
        """Where each span ends, counted over all packs, from 0 on; of shape (spans + 1,)."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    def without(self, rows: Sequence[int]) -> PackSpans:
        """The same with some of the rows filled up, as if no document were there."""
        if not rows:
            return self
        return replace(self, sources=np.where(np.isin(self.sources, rows), -1, self.sources))

    def between(self, first: int, stop: int) -> PackSpans:
        """The same of some of the packs."""
        begin, end = np.searchsorted(self.packs, [first, stop])
        return PackSpans(
            self.rows,
            stop - first,
            self.capacity,
            self.lengths[begin:end],
            self.packs[begin:end] - first,
            self.sources[begin:end],
        )


PackBatch = dict[str, Any]
"""Tensors by name, and the number "max_seqlen"."""


def batch_of(pack: Pack, columns: Mapping[str, NDArray[Any]], spans: PackSpans) -> PackBatch:
    """A batch of packs.

    Args:
        pack: What is asked for.
        columns: Packed values by column, each of shape (packs, capacity), in memory that is not used otherwise.
        spans: Where documents lie in them.
    """
    made: PackBatch = {}
    for name, values in columns.items():
        typed = values.astype(values.dtype if pack.as_dtype is None else pack.as_dtype, copy=False)
        made["input_ids" if name == pack.column else name] = torch.from_numpy(typed)
    if "position_ids" not in pack.without:
        made["position_ids"] = torch.from_numpy(spans.position_ids())
    if "document_ids" not in pack.without:
        made["document_ids"] = torch.from_numpy(spans.document_ids())
    if "cu_seqlens" not in pack.without:
        made["cu_seqlens"] = torch.from_numpy(spans.cu_seqlens())
    if "max_seqlen" not in pack.without:
        made["max_seqlen"] = int(spans.lengths.max(initial=0))
    return made


class BarePack(dict[str, Any]):
    """A pack of which all documents are missing, so that nobody knows of which types their values would be."""


def collate_packs(packs: Sequence[PackBatch]) -> PackBatch:
    """Batches of packs as one: what stands beside the batch dimension is put together, and ends count on."""
    first, made = next((one for one in packs if not isinstance(one, BarePack)), packs[0]), PackBatch()
    for name in first:
        values = [one[name] for one in packs]
        if name == "max_seqlen":
            made[name] = max(values)
        elif name == "cu_seqlens":
            before = np.cumsum([0, *(int(one[-1]) for one in values)])[:-1].tolist()
            ends = [one[1:] + start for one, start in zip(values, before, strict=True)]
            made[name] = torch.cat([values[0][:1], *ends])
        else:
            made[name] = torch.cat([one.to(first[name].dtype) for one in values])
    return made


def part_of(rows: PackRows, some: slice, first_pack: int) -> PackRows:
    """Some of the rows, of packs that are counted from a first one."""
    columns = {one.name: getattr(rows, one.name)[some] for one in fields(PackRows)}
    return PackRows(**{**columns, "packs": columns["packs"] - first_pack})


def packs_of(samples: Iterator[Any], pieces: PackRows, pack: Pack) -> Generator[PackBatch, None, None]:
    """Packs of documents that were made one by one, each as a batch of its own.

    Args:
        samples: The documents, one for each row; more may follow.
        pieces: What is in the packs.
        pack: How documents are brought together.

    Raises:
        SampleError: A document is not as it was said to be.
    """
    num_packs = int(pieces.packs[-1]) + 1 if len(pieces.packs) else 0
    stops = np.searchsorted(pieces.packs, np.arange(num_packs), side="right").tolist()
    for number, (start, stop) in enumerate(pairwise([0, *stops])):
        rows = part_of(pieces, slice(start, stop), number)
        documents = list(islice(samples, stop - start))
        missing = [place for place, document in enumerate(documents) if document is MISSING]
        spans = PackSpans.of(rows, 1, pack.capacity).without(missing)
        made = batch_of(pack, {name: _filled(pack, name, documents, rows) for name in pack.columns}, spans)
        yield BarePack(made) if len(missing) == len(documents) else made


def _filled(pack: Pack, name: str, documents: Sequence[Any], rows: PackRows) -> NDArray[Any]:
    """The values of a column in one pack, of shape (1, capacity)."""
    taken: dict[int, NDArray[Any]] = {}
    for place, document in enumerate(documents):
        if document is MISSING:
            continue
        begin, stop = int(rows.starts[place]), int(rows.starts[place] + rows.lengths[place])
        values = _values(pack, name, document)
        if len(values) < stop:
            raise SampleError(
                f"a document has {len(values)} values in column {name!r}, and {stop} were to be packed (sample id "
                f"{int(rows.ids[place])}); give pack.lengths= what tells how long transform= makes {pack.column!r}"
            )
        taken[place] = values[begin:stop]
    dtype = np.result_type(*taken.values()) if taken else np.dtype(pack.dtype or np.int64)
    lengths = rows.lengths.tolist()
    parts = [
        taken[place] if place in taken else filling(pack, name, lengths[place], dtype)
        for place in range(len(documents))
    ]
    return np.concatenate([*parts, filling(pack, name, pack.capacity - sum(lengths), dtype)])[None]


def filling(pack: Pack, name: str, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """What so many values of a column are filled up with.

    Raises:
        SampleError: The column's type cannot hold it.
    """
    try:
        return np.full(count, pack.pad_of(name), dtype)
    except OverflowError as error:
        raise SampleError(
            f"pack.pad={pack.pad_of(name)!r} does not fit column {name!r}, stored as {dtype}; pad with another "
            "number, or make it a wider type in transform="
        ) from error


def _values(pack: Pack, name: str, document: Any) -> NDArray[Any]:
    if not isinstance(document, Mapping) or name not in document:
        kind = sorted(document) if isinstance(document, Mapping) else type(document).__name__
        raise SampleError(f"a document must have column {name!r}, which is packed, but there is {kind}")
    value = document[name]
    if isinstance(value, bytes) and pack.dtype is not None:
        return np.frombuffer(value, np.dtype(pack.dtype).newbyteorder("<"))
    values = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if values.ndim != 1 or values.dtype.kind not in "iufb":
        raise SampleError(
            f"column {name!r} of a document must be numbers in one dimension, but is {values.dtype} of shape "
            f"{values.shape}"
        )
    return values
