"""What packs are made of: the values of their documents one after another, filled up, and what tells them apart.

documents       A A A A A   B B B   C C      in packs of 8 tokens and, here, of 4
input_ids       A A A A A B B B | C C 0 0
position_ids    0 1 2 3 4 0 1 2 | 0 1 0 1
document_ids    0 0 0 0 0 1 1 1 | 0 0 -1 -1
cu_seqlens      0 5 8 10 12
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise, repeat
from operator import getitem
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_streaming.dataset.bad_samples import MISSING
from lightning_streaming.errors import SampleError
from lightning_streaming.options.packing import MOST_BYTES, Packing, PackingConfig, fits
from lightning_streaming.reading.packs.types import BarePack, ColumnTypes, converted
from lightning_streaming.sequence.batching import PackRows

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

    def are_padding(self) -> NDArray[np.bool_]:
        """Of each token whether it fills a pack up; (packs, capacity)."""
        return np.repeat(self.sources < 0, self.lengths).reshape(self.num_packs, self.capacity)

    def sample_of(self, token: int) -> int:
        """Return the sample id of the document that a token is of, counted over all packs."""
        span = int(np.searchsorted(np.cumsum(self.lengths), token, side="right"))
        return int(self.rows.ids[self.sources[span]])

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


def batch_of(
    pack: PackingConfig, columns: Mapping[str, NDArray[Any]], spans: PackSpans, types: ColumnTypes
) -> PackBatch:
    """A batch of packs.

    Args:
        pack: What is asked for.
        columns: Packed values by column, each of shape (packs, capacity), in memory that is not used otherwise.
        spans: Where documents lie in them.
        types: What the values become.

    Raises:
        SampleError: A type does not hold a value.
    """
    made = typed_columns(pack, columns, spans, types)
    if "position_ids" not in pack.without:
        made["position_ids"] = torch.from_numpy(spans.position_ids())
    if "document_ids" not in pack.without:
        made["document_ids"] = torch.from_numpy(spans.document_ids())
    if "cu_seqlens" not in pack.without:
        made["cu_seqlens"] = torch.from_numpy(spans.cu_seqlens())
    if "max_seqlen" not in pack.without:
        made["max_seqlen"] = int(spans.lengths.max(initial=0))
    return made


def typed_columns(
    pack: Packing, columns: Mapping[str, NDArray[Any]], spans: PackSpans, types: ColumnTypes
) -> PackBatch:
    """Values as they are wanted; see :func:`batch_of`."""
    made: PackBatch = {}
    for name, values in columns.items():
        wanted = converted(pack, name, values, types.unseen(name), spans.sample_of)
        if not fits(pack.pad_of(name), values.dtype):  # so something else was filled in
            wanted[spans.are_padding()] = pack.pad_of(name)
        made[pack.name_of(name)] = torch.from_numpy(wanted)
    return made


def collate_packs(packs: Sequence[PackBatch]) -> PackBatch:
    """Batches of packs as one: what stands beside the batch dimension is put together, and ends count on."""
    there = [one for one in packs if not isinstance(one, BarePack)]
    first, made = (there[0], PackBatch()) if there else (packs[0], BarePack())
    for name in first:
        # All are of one type, but for packs that were filled up before there was a document.
        values = [one[name] for one in packs]
        if name == "max_seqlen":
            made[name] = max(values)
        elif name == "cu_seqlens":
            before = np.cumsum([0, *(int(one[-1]) for one in values)])[:-1].tolist()
            ends = [one[1:] + start for one, start in zip(values, before, strict=True)]
            made[name] = torch.cat([values[0][:1], *ends])
        else:
            # Packs of nothing but missing documents may be older than the first value, and of another type.
            are_bare = [isinstance(one, BarePack) for one in packs]
            made[name] = torch.cat(
                [one.to(first[name].dtype) if bare else one for one, bare in zip(values, are_bare, strict=True)]
            )
    return made


def part_of(rows: PackRows, some: slice, first_pack: int) -> PackRows:
    """Some of the rows, of packs that are counted from a first one."""
    columns = {one.name: getattr(rows, one.name)[some] for one in fields(PackRows)}
    return PackRows(**{**columns, "packs": columns["packs"] - first_pack})


def documents_of(samples: Iterator[Any], pieces: PackRows) -> Iterator[tuple[PackRows, list[Any]]]:
    """Of each pack its rows, as of the only pack, and their documents; see :func:`packs_of`."""
    num_packs = int(pieces.packs[-1]) + 1 if len(pieces.packs) else 0
    stops = np.searchsorted(pieces.packs, np.arange(num_packs), side="right").tolist()
    for number, (start, stop) in enumerate(pairwise([0, *stops])):
        yield part_of(pieces, slice(start, stop), number), list(islice(samples, stop - start))


def filled_pack(
    pack: PackingConfig, name: str, documents: Sequence[Any], rows: PackRows, types: ColumnTypes
) -> NDArray[Any]:
    """The values of a column in one pack, of shape (1, capacity)."""
    whole = np.concatenate(taken_of(pack, name, documents, rows, types))
    return np.concatenate([whole, filling(pack, name, pack.capacity - len(whole), whole.dtype, types)])[None]


def taken_of(
    pack: Packing, name: str, documents: Sequence[Any], rows: PackRows, types: ColumnTypes
) -> list[NDArray[Any]]:
    """What rows take of a column of their documents.

    Returns:
        Of each row an array, all of the column's type; where a document is missing, of what fills it up.

    Raises:
        SampleError: A document is not as it was said to be, or the column's type does not hold a value of it.
    """
    taken: dict[int, NDArray[Any]] = {}
    for place, document in enumerate(documents):
        if document is MISSING:
            continue
        begin, stop = int(rows.starts[place]), int(rows.starts[place] + rows.lengths[place])
        values = values_of(pack, name, document)
        if len(values) < stop or (rows.are_ends[place] and len(values) > stop):
            raise SampleError(
                f"a document has {len(values)} values in column {name!r}, and was said to have "
                f"{expected(stop, bool(rows.are_ends[place]))} (sample id {int(rows.ids[place])})",
                hint=f"give {pack.option}.lengths= what tells how long transform= makes {pack.column!r}",
                option=f"{pack.option}.lengths",
                sample=int(rows.ids[place]),
            )
        try:
            dtype = types.of(name, values.dtype)
        except SampleError as error:
            number = int(rows.ids[place])
            raise SampleError(f"{error} (sample id {number})", option=error.option, sample=number) from None
        taken[place] = converted(pack, name, values[begin:stop], dtype, lambda _, at=place: int(rows.ids[at]))  # type: ignore[misc]
    dtype, lengths = types.unseen(name), rows.lengths.tolist()
    return [
        taken[place] if place in taken else filling(pack, name, lengths[place], dtype, types)
        for place in range(len(documents))
    ]


def missing_of(documents: Sequence[Any]) -> list[int]:
    """Which of the documents could not be made."""
    return [place for place, document in enumerate(documents) if document is MISSING]


def expected(stop: int, is_end: bool) -> str:
    """How many values a document was said to have, as a message says it."""
    return str(stop) if is_end else f"at least {stop}"


def filling(pack: Packing, name: str, count: int, dtype: np.dtype[Any], types: ColumnTypes) -> NDArray[Any]:
    """What so many values of a column are filled up with: where the wanted type alone holds that, zeros until then.

    Raises:
        SampleError: The column's type in a batch cannot hold it.
    """
    pad, wanted = pack.pad_of(name), types.unseen(name)
    if not fits(pad, wanted):
        raise SampleError(
            f"{pack.option}.pad={pad!r} does not fit column {name!r}, which is {dtype} and is to be {wanted}",
            hint=f"pad with another number, or name a wider type with {pack.option}.as_dtype=",
            option=f"{pack.option}.pad",
        )
    return np.full(count, pad if fits(pad, dtype) else 0, dtype)


def values_of(pack: Packing, name: str, document: Any) -> NDArray[Any]:
    """The values of a column of a document, in one dimension.

    Raises:
        SampleError: It has none, or they are no such values.
    """
    if not isinstance(document, Mapping) or name not in document:
        kind = sorted(document) if isinstance(document, Mapping) else type(document).__name__
        raise SampleError(
            f"a document must have column {name!r}, named in {pack.option}=, but there is {kind}", option=pack.option
        )
    value = document[name]
    of_bytes = pack.dtype_of(name)
    if isinstance(value, bytes) and of_bytes is not None:
        dtype = np.dtype(of_bytes).newbyteorder("<")
        if len(value) % dtype.itemsize:
            raise SampleError(
                f"column {name!r} of a document has {len(value)} bytes, not whole {of_bytes} values", option=pack.option
            )
        return np.frombuffer(value, dtype)
    try:
        values = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a type that numpy lacks, a gradient, a ragged list
        raise SampleError(
            f"column {name!r} of a document must be numbers in one dimension: {error}", option=pack.option
        ) from None
    if values.ndim != 1 or values.dtype.kind not in "iufb" or values.dtype.itemsize > MOST_BYTES:
        raise SampleError(
            f"column {name!r} of a document must be numbers in one dimension, but is {values.dtype} of shape "
            f"{values.shape}",
            option=pack.option,
        )
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
