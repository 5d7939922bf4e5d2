"""The page of a batch: the samples that a step reads, as cards, by rank, and by pack where documents are packed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lightning_streaming.errors import StreamingError
from lightning_streaming.tools.stored.sample_reader import FetchedUnasked
from lightning_streaming.tools.viewing.cards import Card, cards_of
from lightning_streaming.tools.viewing.page import Answer, Frame, Request, in_words
from lightning_streaming.tools.viewing.viewed import ViewedStream

if TYPE_CHECKING:
    from lightning_streaming.tools.runs.trace_run import Read
    from lightning_streaming.tools.viewing.viewed_run import ViewedStep

_ON_A_PAGE = 24
_LISTED_RANKS = 64
"""Of more ranks one is typed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCard:
    """A sample of a batch."""

    read: Read
    stream: int | None
    """The stream that pages show it of."""
    card: Card | None
    problem: str | None = None
    """Why there is no card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPack:
    """One pack of a batch, or what of it is on the page; of plain samples, all of a batch."""

    position: int | None
    """The pack's, in the epoch; None of plain samples."""
    place: int
    documents: int
    """Of the whole pack."""
    tokens: int
    cards: Sequence[ReadCard]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownBatch:
    """What one rank reads in one batch, or what of it is on the page."""

    rank: int
    epoch: int
    number: int
    phase: str | None
    counts: Sequence[tuple[str, int]]
    """Samples of the whole batch, of each stream."""
    packs: Sequence[ShownPack]


def batches(frame: Frame, request: Request) -> Answer | None:
    """The samples of one step, of all ranks or of one."""
    run = frame.viewed.run
    if run is None:
        return None
    wanted, rank = request.optional("step"), request.optional("rank")
    told: dict[str, Any] = {"wanted": wanted, "rank": rank, "unread": None, "problem": None, "step": None}
    try:
        told["unread"] = None if request.is_asked else run.unread("train")
        if told["unread"] is None:
            told |= _of_step(frame, request, run.step(wanted, rank))
    except (StreamingError, OSError) as error:
        told["problem"] = in_words(error)
    title = f"The samples of step {told['step'].number:,}" if told["step"] else "The samples of a step"
    return frame.show(request, "view_batch.html", title, here="batches", **told)


def _of_step(frame: Frame, request: Request, step: ViewedStep) -> dict[str, Any]:
    first = min(request.number("from"), max(0, len(step.reads) - 1)) // _ON_A_PAGE * _ON_A_PAGE
    is_asked = request.query.get("asked") == "samples"
    cards = _cards(frame, step.reads[first : first + _ON_A_PAGE], is_asked=is_asked)
    return {
        "step": step,
        "rank": step.rank,
        "is_one_of_many": step.rank is not None and request.optional("rank") is None,
        "first": first,
        "page": _ON_A_PAGE,
        "ranks": range(step.run.num_ranks) if step.run.num_ranks <= _LISTED_RANKS else None,
        "batches": _batches(step, cards),
        "is_asked": is_asked,
        "may_be_asked": any(one.card is not None and one.card.may_be_asked for one in cards),
    }


def _cards(frame: Frame, reads: Sequence[Read], *, is_asked: bool) -> list[ReadCard]:
    """A card for each read; a stream whose data cannot be looked at fails alone."""
    places = {one.name: place for place, one in enumerate(frame.viewed.streams) if one.stage == "train"}
    cards, problems, fetched = dict[tuple[str, int, int], Card](), dict[str, str](), FetchedUnasked()
    for name in dict.fromkeys(read.key.stream for read in reads):
        if name not in places:
            problems[name] = "the configuration does not say where the data of this stream is"
            continue
        wanted = {(read.key.shard, read.key.sample_index) for read in reads if read.key.stream == name}
        try:
            found = _cards_of_stream(frame.viewed.streams[places[name]], wanted, is_asked=is_asked, fetched=fetched)
            cards |= {(name, *where): card for where, card in found.items()}
        except (StreamingError, OSError) as error:
            problems[name] = in_words(error)
    return [
        ReadCard(
            read=read,
            stream=places.get(read.key.stream),
            card=cards.get((read.key.stream, read.key.shard, read.key.sample_index)),
            problem=problems.get(read.key.stream),
        )
        for read in reads
    ]


def _cards_of_stream(
    stream: ViewedStream, wanted: Iterable[tuple[int, int]], **how: Any
) -> Mapping[tuple[int, int], Card]:
    """Cards by shard and index; what is beside each other is read together."""
    ordered = sorted(wanted)
    numbers = [stream.reader.first_of(shard) + index for shard, index in ordered]
    return dict(zip(ordered, cards_of(stream.reader, numbers, **how), strict=True))


def _batches(step: ViewedStep, cards: Sequence[ReadCard]) -> list[ShownBatch]:
    found = []
    for (number, rank), of_batch in groupby(cards, lambda one: (one.read.batch, one.read.rank)):
        shown = list(of_batch)
        reads = [read for read in step.reads if (read.batch, read.rank) == (number, rank)]
        counts = Counter(read.key.stream for read in reads)
        found.append(
            ShownBatch(
                rank=rank,
                epoch=reads[0].key.epoch,
                number=number,
                phase=reads[0].phase,
                counts=[(name, counts[name]) for name in step.streams if counts[name]],
                packs=_packs(reads, shown),
            )
        )
    return found


def _packs(reads: Sequence[Read], shown: Sequence[ReadCard]) -> list[ShownPack]:
    """What is shown of one batch, pack by pack."""
    found = []
    for position, of_pack in groupby(shown, lambda one: one.read.pack and one.read.pack.position):
        cards = list(of_pack)
        parts = [read.pack for read in reads if read.pack and read.pack.position == position]
        found.append(
            ShownPack(
                position=position,
                place=cards[0].read.place,
                documents=len(parts),
                tokens=sum(part.stop - part.start for part in parts),
                cards=cards,
            )
        )
    return found
