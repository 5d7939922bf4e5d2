"""Contents of packs: the values of their documents one after another, padded, with the bounds of each document.

documents       A A A A A   B B B   C C      in packs of 8 tokens and, here, of 4
input_ids       A A A A A B B B | C C 0 0
position_ids    0 1 2 3 4 0 1 2 | 0 1 0 1
document_ids    0 0 0 0 0 1 1 1 | 0 0 -1 -1
cu_seqlens      0 5 8 10 12
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, islice, pairwise, repeat
from operator import getitem
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_streaming.dataset.bad_samples import MISSING
from lightning_streaming.errors import SampleError
from lightning_streaming.options.packing import IGNORED, MOST_BYTES, Packing, PackingConfig, fits
from lightning_streaming.reading.packs.types import BarePack, ColumnTypes, converted
from lightning_streaming.sequence.batching import RowPieces

_COUNT = np.dtype(np.int64)
cut = cast("Callable[[memoryview, slice], memoryview]", getitem)
"""Returns a part of some bytes, without a copy; it is a C function, so joining parts takes no Python step for each."""


def bytes_of(values: NDArray[Any]) -> memoryview:
    """Return the bytes of an array in one dimension."""
    return memoryview(values.data).cast("B")


class StoredParts(NamedTuple):
    """The stored tokens of rows, without those that are inserted before and after documents."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    are_begun: NDArray[np.bool_]
    """Whether a token is inserted before them."""
    are_ended: NDArray[np.bool_]
    """Whether a token is inserted after them."""

    @classmethod
    def of(cls, packing: Packing, rows: RowPieces) -> StoredParts:
        """Return the stored parts of rows."""
        has_bos, has_eos = packing.bos is not None, packing.eos is not None
        are_begun, are_ended = (rows.starts == 0) & has_bos, rows.are_ends & has_eos
        return cls(np.maximum(rows.starts - has_bos, 0), rows.lengths - are_begun - are_ended, are_begun, are_ended)


@dataclass(frozen=True, slots=True, eq=False)
class PackSpans:
    """The spans of documents and of padding in some packs, one pack after another.

    Args:
        rows: The documents' parts.
        num_packs: Number of packs.
        capacity: Tokens of each.
    """

    rows: RowPieces
    num_packs: int
    capacity: int
    lengths: NDArray[np.int64]
    """Tokens of each span."""
    packs: NDArray[np.int64]
    """The pack of each span."""
    sources: NDArray[np.int64]
    """The row of each span, -1 for padding."""
    are_begins: NDArray[np.bool_]
    """False for the padding of a document, which belongs to the span before it."""

    @classmethod
    def of(cls, rows: RowPieces, num_packs: int, capacity: int, multiple: int = 1) -> PackSpans:
        """Return the spans of some packs, in which each document takes a multiple of some tokens."""
        padding = -rows.lengths % multiple
        padded = np.flatnonzero(padding)
        room = capacity - np.bincount(rows.entries, rows.lengths + padding, num_packs).astype(np.int64)
        short = np.flatnonzero(room)
        packs = np.concatenate([rows.entries, rows.entries[padded], short])
        numbers = np.arange(len(rows.entries))
        # A document, its padding, the next document; the padding of a pack is last.
        order = np.lexsort((np.concatenate([numbers, padded, np.full(len(short), len(numbers))]), packs))
        return cls(
            rows,
            num_packs,
            capacity,
            lengths=np.concatenate([rows.lengths, padding[padded], room[short]])[order],
            packs=packs[order],
            sources=np.concatenate([numbers, np.full(len(padded) + len(short), -1)])[order],
            are_begins=np.repeat([True, False, True], [len(numbers), len(padded), len(short)])[order],
        )

    def position_ids(self, *, are_continued: bool = False) -> NDArray[np.int64]:
        """Return the position of each token in its document's part of the pack; of shape (packs, capacity).

        Args:
            are_continued: Whether positions count from the beginning of the document, and not of its part.
        """
        counted = bytes_of(np.arange(int(self.lengths.max(initial=0))))
        stops = map(slice, (self.lengths * _COUNT.itemsize).tolist())
        places = np.frombuffer(bytearray().join(map(cut, repeat(counted), stops)), _COUNT)
        if are_continued:
            places += np.repeat(np.where(self.sources < 0, 0, self.rows.starts[self.sources]), self.lengths)
        return places.reshape(self.num_packs, self.capacity)

    def document_ids(self) -> NDArray[np.int32]:
        """Return the number of each token's document in its pack; -1 for padding; of shape (packs, capacity)."""
        firsts = np.searchsorted(self.rows.entries, self.rows.entries)
        numbers = np.where(self.sources < 0, -1, self.sources - firsts[self.sources]).astype(np.int32)
        return np.repeat(numbers, self.lengths).reshape(self.num_packs, self.capacity)

    def cu_seqlens(self, per_pack: int | None = None, *, are_padded: bool = True) -> NDArray[np.int32]:
        """Return 0 and the end of each document, counted over all packs; the padding of a pack counts as one.

        Args:
            per_pack: Entries for each pack; the last end of a pack is repeated. None: as many as it has documents.
            are_padded: Whether the padding of a document counts.
        """
        begins = np.flatnonzero(self.are_begins)
        lengths = np.add.reduceat(self.lengths, begins) if are_padded else self.lengths[begins]
        ends = np.cumsum(lengths)
        if per_pack is not None:
            packs = self.packs[begins]
            firsts, stops = (np.searchsorted(packs, np.arange(self.num_packs), side) for side in ("left", "right"))
            filled = np.repeat(ends[stops - 1], per_pack).reshape(self.num_packs, per_pack)
            filled[packs, np.arange(len(packs)) - firsts[packs]] = ends
            ends = filled.reshape(-1)
        return np.concatenate([[0], ends]).astype(np.int32)

    def longest(self) -> int:
        """Return the tokens of the longest document, with its padding."""
        return int(np.add.reduceat(self.lengths, np.flatnonzero(self.are_begins)).max(initial=0))

    def without(self, rows: Sequence[int]) -> PackSpans:
        """Return the same with padding for some of the rows."""
        if not rows:
            return self
        return replace(self, sources=np.where(np.isin(self.sources, rows), -1, self.sources))

    def are_padding(self) -> NDArray[np.bool_]:
        """Return whether each token is padding; of shape (packs, capacity)."""
        return np.repeat(self.sources < 0, self.lengths).reshape(self.num_packs, self.capacity)

    def sample_of(self, token: int) -> int:
        """Return the sample id of a token's document; tokens are counted over all packs."""
        span = int(np.searchsorted(np.cumsum(self.lengths), token, side="right"))
        return int(self.rows.ids[self.sources[span]])

    def inserted(self, packing: Packing) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens that are inserted before, and after documents, counted over all packs."""
        parts, spans = StoredParts.of(packing, self.rows), np.flatnonzero(self.sources >= 0)
        stops, sources = np.cumsum(self.lengths)[spans], self.sources[spans]
        return (stops - self.lengths[spans])[parts.are_begun[sources]], stops[parts.are_ended[sources]] - 1

    def between(self, first: int, stop: int) -> PackSpans:
        """Return the spans of some of the packs."""
        begin, end = np.searchsorted(self.packs, [first, stop])
        return PackSpans(
            self.rows,
            stop - first,
            self.capacity,
            self.lengths[begin:end],
            self.packs[begin:end] - first,
            self.sources[begin:end],
            self.are_begins[begin:end],
        )


def joined_parts(
    parts: Sequence[memoryview],
    sources: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    """Return spans of values, one after another, in new memory.

    Args:
        parts: Bytes that have values.
        sources: The part of each span.
        starts: The byte in it where the span starts.
        lengths: Values of each span.
        dtype: Type of the values.
    """
    bounds = map(slice, starts.tolist(), (starts + lengths * dtype.itemsize).tolist())
    return np.frombuffer(bytearray().join(map(cut, map(parts.__getitem__, sources.tolist()), bounds)), dtype)


PackBatch = dict[str, Any]
"""Tensors by name, and the number "max_seqlen"."""


def batch_of(
    pack: PackingConfig, columns: Mapping[str, NDArray[Any]], spans: PackSpans, types: ColumnTypes
) -> PackBatch:
    """Return a batch of packs.

    Args:
        pack: Options.
        columns: Packed values by column, each of shape (packs, capacity), in memory that is not used otherwise.
        spans: The documents in them.
        types: Types of the values.

    Raises:
        SampleError: A type does not hold a value.
    """
    batch = typed_columns(pack, columns, spans, types)
    if pack.labels:
        batch["labels"] = _labels(pack, batch, spans)
        if pack.mask is not None and pack.mask not in pack.along:
            del batch[pack.mask]
    if "position_ids" not in pack.without:
        batch["position_ids"] = torch.from_numpy(spans.position_ids(are_continued=pack.continue_positions))
    if "document_ids" not in pack.without:
        batch["document_ids"] = torch.from_numpy(spans.document_ids())
    per_pack = None if pack.max_documents is None else pack.max_documents + 1
    is_hf, ends = pack.names == "huggingface", dict[str, NDArray[np.int32]]()
    if "cu_seqlens" not in pack.without:
        padded = spans.cu_seqlens(per_pack)
        if is_hf:
            ends = {"cu_seq_lens_q": padded, "cu_seq_lens_k": padded}
        elif pack.multiple == 1:
            ends = {"cu_seqlens": padded}
        else:
            ends = {"cu_seqlens": spans.cu_seqlens(per_pack, are_padded=False), "cu_seqlens_padded": padded}
    batch.update({name: torch.from_numpy(values) for name, values in ends.items()})
    if "max_seqlen" not in pack.without:
        longest = spans.longest() if per_pack is None else pack.capacity
        batch.update(dict.fromkeys(("max_length_q", "max_length_k") if is_hf else ("max_seqlen",), longest))
    return batch


def _labels(pack: PackingConfig, batch: PackBatch, spans: PackSpans) -> torch.Tensor:
    """Return the tokens of a batch where the loss counts them: not padding, and not the first of a document."""
    labels: torch.Tensor = batch[pack.name_of(pack.columns[0])].to(torch.int64, copy=True)
    is_ignored = spans.are_padding()
    is_ignored.reshape(-1)[(np.cumsum(spans.lengths) - spans.lengths)[spans.sources >= 0]] = True
    labels[torch.from_numpy(is_ignored)] = IGNORED
    if pack.mask is not None:
        labels[batch[pack.mask] == 0] = IGNORED
    return labels


def typed_columns(
    pack: Packing, columns: Mapping[str, NDArray[Any]], spans: PackSpans, types: ColumnTypes
) -> PackBatch:
    """Return the values of columns in the types of batches; see :func:`batch_of`."""
    batch: PackBatch = {}
    inserted = spans.inserted(pack)
    for name, values in columns.items():
        wanted = converted(pack, name, values, types.unseen(name), spans.sample_of)
        if not fits(pack.pad_of(name), values.dtype):  # so it was padded with zeros
            wanted[spans.are_padding()] = pack.pad_of(name)
        for option, tokens, value in zip(("bos", "eos"), inserted, pack.inserted(name), strict=True):
            if option in pack.ends:
                check_fits(pack, option, value, name, wanted.dtype)
                wanted.reshape(-1, *wanted.shape[2:])[tokens] = value
        batch[pack.name_of(name)] = torch.from_numpy(as_shaped(wanted, pack.shape_of(name), 2))
    return batch


def as_shaped(values: NDArray[Any], shape: Sequence[int], count: int) -> NDArray[Any]:
    """Return values, whose first axes are those of tokens, in the shape of a document's values.

    Args:
        values: Of shape (tokens, ...), or (packs, tokens, ...).
        shape: Shape of the values of a document, with -1 for its tokens.
        count: The number of axes of tokens.
    """
    if shape[0] < 0:
        return values
    return np.ascontiguousarray(np.moveaxis(values, range(count), range(-count, 0)))


def concatenated(packing: Packing, documents: Sequence[Any]) -> PackBatch:
    """Return the columns of whole documents, by name, one document after another; none of no values.

    Raises:
        SampleError: A document lacks a column, or has something else, or of another shape or type than others.
    """
    batch = PackBatch()
    for name in packing.concatenate:
        values = [column_of(packing, name, document) for document in documents if document is not MISSING]
        parts = [_tensor_of(packing, name, value) for value in values if value is not None]
        if parts := [part for part in parts if len(part)]:
            batch[name] = _joined(packing, name, parts)
    return batch


def _tensor_of(packing: Packing, name: str, value: Any) -> torch.Tensor:
    try:
        if isinstance(value, torch.Tensor):
            part = value
        else:  # torch warns of arrays that are read-only, and has no other byte order
            array = np.require(value, requirements="W")
            part = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
        len(part)
    except (TypeError, ValueError) as error:
        raise SampleError(
            f"column {name!r} of a document must be an array or None: {error}", option=f"{packing.option}.concatenate"
        ) from None
    return part


def _joined(packing: Packing, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    kinds = {(part.dtype, part.shape[1:]) for part in parts}
    if len(kinds) > 1:
        words = ", ".join(f"{part.dtype} of shape {tuple(part.shape)}" for part in parts[:3])
        raise SampleError(
            f"column {name!r} must have arrays of one type and, after the first dimension, one shape, but has {words}",
            hint="make them alike in transform=",
            option=f"{packing.option}.concatenate",
        )
    return torch.cat(list(parts))


def collate_packs(packing: PackingConfig, packs: Sequence[PackBatch]) -> PackBatch:
    """Return one batch of several: packs are concatenated, and the ends in ``cu_seqlens`` continue."""
    typed = [pack for pack in packs if not isinstance(pack, BarePack)]
    first, batch = (typed[0], PackBatch()) if typed else (packs[0], BarePack())
    for name in dict.fromkeys(chain(first, *typed)):
        values = [pack[name] for pack in packs if name in pack]
        if name in packing.concatenate:
            batch[name] = _joined(packing, name, values)
        elif name.startswith("max_") and name not in packing.columns:
            batch[name] = max(values)
        elif name.startswith("cu_seq") and name not in packing.columns:
            before = np.cumsum([0, *(int(ends[-1]) for ends in values)])[:-1].tolist()
            shifted = [ends[1:] + start for ends, start in zip(values, before, strict=True)]
            batch[name] = torch.cat([values[0][:1], *shifted])
        else:
            # Packs of nothing but missing documents may precede the first value, and be of another type.
            parts = zip(values, (isinstance(pack, BarePack) for pack in packs), strict=True)
            axis = 0 if packing.shape_of(name)[0] < 0 else -2
            batch[name] = torch.cat([part.to(first[name].dtype) if bare else part for part, bare in parts], axis)
    return batch


def part_of(rows: RowPieces, some: slice, first_pack: int) -> RowPieces:
    """Return some of the rows, with packs counted from ``first_pack``."""
    columns = {field.name: getattr(rows, field.name)[some] for field in fields(RowPieces)}
    return RowPieces(**{**columns, "entries": columns["entries"] - first_pack})


def documents_of(samples: Iterator[Any], pieces: RowPieces) -> Iterator[tuple[RowPieces, list[Any]]]:
    """Yield the rows of each pack, as of the only pack, and their documents; ``samples`` may have more."""
    num_packs = int(pieces.entries[-1]) + 1 if len(pieces.entries) else 0
    stops = np.searchsorted(pieces.entries, np.arange(num_packs), side="right").tolist()
    for number, (start, stop) in enumerate(pairwise([0, *stops])):
        yield part_of(pieces, slice(start, stop), number), list(islice(samples, stop - start))


def filled_pack(
    pack: PackingConfig, name: str, documents: Sequence[Any], rows: RowPieces, types: ColumnTypes
) -> NDArray[Any]:
    """Return the values of a column in one pack, of shape (1, capacity)."""
    taken = taken_of(pack, name, documents, rows, types)
    if pack.multiple > 1:
        paddings = [filling(pack, name, -len(values) % pack.multiple, values.dtype, types) for values in taken]
        taken = [part for pair in zip(taken, paddings, strict=True) for part in pair]
    whole = np.concatenate(taken)
    return np.concatenate([whole, filling(pack, name, pack.capacity - len(whole), whole.dtype, types)])[None]


def taken_of(
    pack: Packing, name: str, documents: Sequence[Any], rows: RowPieces, types: ColumnTypes
) -> list[NDArray[Any]]:
    """Return the parts of a column of documents that are packed.

    Returns:
        An array for each row, all of the column's type; of padding where a document is missing.

    Raises:
        SampleError: A document has another length than expected, or the column's type does not hold a value of it.
    """
    taken: dict[int, NDArray[Any]] = {}
    parts = StoredParts.of(pack, rows)
    for place, document in enumerate(documents):
        if document is MISSING:
            continue
        begin, stop = int(parts.starts[place]), int(parts.starts[place] + parts.lengths[place])
        values = values_of(pack, name, document)
        if len(values) < stop or (rows.are_ends[place] and len(values) > stop):
            raise SampleError(
                f"a document has {len(values)} values in column {name!r}, and was said to have "
                f"{expected(stop, bool(rows.are_ends[place]))} (sample id {int(rows.ids[place])})",
                hint=f"give {pack.option}.lengths= the length of {pack.column!r} after transform=",
                option=f"{pack.option}.lengths",
                sample=int(rows.ids[place]),
            )
        try:
            dtype = types.of(name, values.dtype)
        except SampleError as error:
            number = int(rows.ids[place])
            raise SampleError(f"{error} (sample id {number})", option=error.option, sample=number) from None
        part = converted(pack, name, values[begin:stop], dtype, lambda _, at=place: int(rows.ids[at]))  # type: ignore[misc]
        if pack.ends:
            around = (filling(pack, name, int(of[place]), dtype, types) for of in parts[2:])
            part = np.concatenate([next(around), part, next(around)])
        taken[place] = part
    dtype, lengths = types.unseen(name), rows.lengths.tolist()
    return [
        taken[place] if place in taken else filling(pack, name, lengths[place], dtype, types)
        for place in range(len(documents))
    ]


def missing_of(documents: Sequence[Any]) -> list[int]:
    """Return the numbers of the documents that could not be read."""
    return [place for place, document in enumerate(documents) if document is MISSING]


def expected(stop: int, is_end: bool) -> str:
    """Return how a message states the expected length of a document."""
    return str(stop) if is_end else f"at least {stop}"


def filling(pack: Packing, name: str, count: int, dtype: np.dtype[Any], types: ColumnTypes) -> NDArray[Any]:
    """Return padding for a column; zeros if only the type of a batch, and not ``dtype``, holds the padding value.

    Raises:
        SampleError: The column's type in a batch cannot hold it.
    """
    pad, wanted = pack.pad_of(name), types.unseen(name)
    check_fits(pack, "pad", pad, name, wanted)
    shape = (count, *(size for size in pack.shape_of(name) if size > 0))
    return np.full(shape, pad if fits(pad, dtype) else 0, dtype)


def check_fits(pack: Packing, option: str, value: Any, name: str, wanted: np.dtype[Any]) -> None:
    """Check that a column's type in a batch holds a value of the options.

    Raises:
        SampleError: It does not.
    """
    if not fits(value, wanted):
        raise SampleError(
            f"{pack.option}.{option}={value!r} does not fit column {name!r}, which is {wanted} in a batch",
            hint=f"set another number, or name a wider type with {pack.option}.as_dtype=",
            option=f"{pack.option}.{option}",
        )


def column_of(pack: Packing, name: str, document: Any) -> Any:
    """Return a column of a document.

    Raises:
        SampleError: The document lacks it.
    """
    if not isinstance(document, Mapping) or name not in document:
        kind = sorted(document) if isinstance(document, Mapping) else type(document).__name__
        raise SampleError(
            f"a document must have column {name!r}, named in {pack.option}=, but there is {kind}", option=pack.option
        )
    return document[name]


def values_of(pack: Packing, name: str, document: Any) -> NDArray[Any]:
    """Return the values of a column of a document; the first axis is that of tokens.

    Raises:
        SampleError: The document lacks the column, or it has no numbers of its shape.
    """
    value, shape = column_of(pack, name, document), pack.shape_of(name)
    expected_shape = "in one dimension" if len(shape) == 1 else f"of shape {shape} with -1 for tokens"
    of_bytes = pack.dtype_of(name)
    if isinstance(value, bytes) and of_bytes is not None and len(shape) == 1:
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
            f"column {name!r} of a document must be numbers {expected_shape}: {error}", option=pack.option
        ) from None
    tail = [size for wanted, size in zip(shape, values.shape, strict=False) if wanted > 0]
    is_shaped = values.ndim == len(shape) and tail == [size for size in shape if size > 0]
    if not is_shaped or values.dtype.kind not in "iufb" or values.dtype.itemsize > MOST_BYTES:
        raise SampleError(
            f"column {name!r} of a document must be numbers {expected_shape}, but is {values.dtype} of shape "
            f"{values.shape}",
            option=pack.option,
        )
    values = np.moveaxis(values, shape.index(-1), 0)
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
