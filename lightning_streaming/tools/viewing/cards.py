"""A sample as a card in a list, of the samples of a stream or of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_streaming.formats.shard import unsafe_columns
from lightning_streaming.formats.shard_table import column_names
from lightning_streaming.storage.secrets import redact
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.stored.sample_reader import FetchedUnasked, SampleReader, TooMuch, Unreadable
from lightning_streaming.tools.viewing.shown_values import ShownValue, brief_value, foreign_value


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a list shows of a sample."""

    number: int
    shard: int
    index: int
    told: TooMuch | Unreadable | None = None
    """Why there are no values."""
    values: Sequence[tuple[int, str, ShownValue]] = ()
    """Of each column the number that pages call it by, its name, and the value; pictures first."""

    @property
    def may_be_asked(self) -> bool:
        """Whether the sample is read where that is asked for."""
        return isinstance(self.told, TooMuch)


def cards_of(
    reader: SampleReader, numbers: Sequence[int], *, is_asked: bool = False, fetched: FetchedUnasked | None = None
) -> list[Card]:
    """A card for each of some samples.

    Args:
        reader: Reads them.
        numbers: Which, in ascending order.
        is_asked: Whether to read them whatever that takes.
        fetched: As for :meth:`SampleReader.read`.

    Raises:
        SampleIndexError: There is no such sample.
    """
    found = reader.read(numbers, is_asked=is_asked, fetched=fetched)
    return [_card_of(reader, number, one) for number, one in zip(numbers, found, strict=True)]


def _card_of(reader: SampleReader, number: int, found: Any) -> Card:
    shard, index = reader.find(number)
    card = Card(number=number, shard=shard, index=index, told=left_out(found))
    if card.told is not None:
        return card
    shown = values_in(reader, shard, found, lambda _, value: brief_value(value))
    values = [(at, printable_name(name), shown[name]) for at, name in columns_in(reader, shard, found) if name in shown]
    return replace(card, values=sorted(values, key=lambda one: one[2].kind != "pictures"))


def values_in(
    reader: SampleReader, shard: int, found: Mapping[str, Any], show: Callable[[str, Any], ShownValue]
) -> dict[str, ShownValue]:
    """What ``show`` makes of each column of a sample, and its value; of one whose own code fails, that it does."""
    foreign = unsafe_columns(reader.index.shards[shard])
    return {
        name: foreign_value(partial(show, name), value) if name in foreign else show(name, value)
        for name, value in found.items()
    }


def left_out(found: Any) -> TooMuch | Unreadable | None:
    """Why a sample was not read, without secrets of stores; None where it was."""
    return replace(found, words=redact(found.words, {})) if isinstance(found, (TooMuch, Unreadable)) else None


def columns_in(reader: SampleReader, shard: int, found: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The columns of a sample, each with the number that pages call it by: those of its shard, then others."""
    named = column_names(reader.index.shards[shard])
    return list(enumerate([*named, *sorted(name for name in found if name not in named)]))
