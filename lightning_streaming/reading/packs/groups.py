"""Groups of a budget of tokens: the samples of each, and the batch that they make, padded to the longest.

documents     A A A A A   B B B   C C C C
input_ids     A A A A A | B B B 0 0 | C C C C 0
lengths       5 3 4
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_streaming.options.token_budget import TokenBudget
from lightning_streaming.reading.packs.types import BarePack, ColumnTypes
from lightning_streaming.reading.packs.values import (
    PackBatch,
    PackSpans,
    documents_of,
    filling,
    missing_of,
    taken_of,
    typed_columns,
    values_of,
)
from lightning_streaming.sequence.batching import PackRows


class Group(list[Any]):
    """The samples of a group; those that could not be made are missing.

    Args:
        samples: One for each row.
        rows: What of them is in the group.
        types: Of the columns.
    """

    def __init__(self, samples: list[Any], rows: PackRows, types: ColumnTypes) -> None:
        super().__init__(samples)
        self.rows, self.types = rows, types


def groups_of(
    samples: Iterator[Any], pieces: PackRows, budget: TokenBudget, types: ColumnTypes
) -> Generator[Group, None, None]:
    """Groups of documents that were made one by one.

    Args:
        samples: The documents, one for each row; more may follow.
        pieces: What is in the groups.
        budget: How documents are brought together.
        types: Of the columns.

    Raises:
        SampleError: A document that is to be cut does not have the columns to cut.
    """
    for rows, documents in documents_of(samples, pieces):
        for place in {*np.flatnonzero(~rows.are_ends).tolist()} - {*missing_of(documents)}:
            documents[place] = _shortened(budget, documents[place], int(rows.lengths[place]))
        yield Group(documents, rows, types)


def _shortened(budget: TokenBudget, document: Any, length: int) -> Any:
    """A document with its first tokens alone."""
    values = {name: values_of(budget, name, document)[:length] for name in budget.columns}
    return {**document, **values} if isinstance(document, Mapping) else values


def spans_of(rows: PackRows) -> PackSpans:
    """Where the documents of one group lie in it: each is filled up like a pack that holds the longest."""
    apart = replace(rows, packs=np.arange(len(rows.packs)))
    return PackSpans.of(apart, len(rows.packs), int(rows.lengths.max()))


def padded(budget: TokenBudget, group: Group) -> PackBatch:
    """The batch of a group of documents.

    Raises:
        SampleError: A document is not as it was said to be, or a type does not hold a value of it.
    """
    missing = missing_of(group)
    spans = spans_of(group.rows).without(missing)
    columns = {name: _filled(budget, name, group, spans) for name in budget.columns}
    made = batch_of_group(budget, columns, spans, group.types)
    return BarePack(made) if len(missing) == len(group) else made


def batch_of_group(
    budget: TokenBudget, columns: Mapping[str, NDArray[Any]], spans: PackSpans, types: ColumnTypes
) -> PackBatch:
    """The batch of a group.

    Args:
        budget: What is asked for.
        columns: Values by column, each of shape (documents, longest), in memory that is not used otherwise.
        spans: Where documents lie in them.
        types: What the values become.
    """
    are_there = spans.sources >= 0
    lengths = np.bincount(spans.packs[are_there], spans.lengths[are_there], spans.num_packs).astype(np.int64)
    return {**typed_columns(budget, columns, spans, types), "lengths": torch.from_numpy(lengths)}


def _filled(budget: TokenBudget, name: str, group: Group, spans: PackSpans) -> NDArray[Any]:
    values = np.concatenate(taken_of(budget, name, group, spans.rows, group.types))
    filled = filling(budget, name, spans.num_packs * spans.capacity, values.dtype, group.types)
    are_there = np.repeat(~np.isin(np.arange(len(group)), missing_of(group)), spans.rows.lengths)
    filled[~spans.are_padding().reshape(-1)] = values[are_there]
    return filled.reshape(spans.num_packs, spans.capacity)
