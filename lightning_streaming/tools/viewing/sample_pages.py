"""Pages of samples: lists of a stream or a batch, one sample with its images and audio, and the search for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_streaming.errors import ConfigError, SampleIndexError, StreamingError
from lightning_streaming.formats.shard import unsafe_columns
from lightning_streaming.formats.shard_table import column_names
from lightning_streaming.storage.secrets import redact
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.stored.sample_reader import (
    FetchBudget,
    SampleReader,
    TooMuch,
    Unreadable,
    named_sample,
)
from lightning_streaming.tools.stored.stored_dataset import columns_of
from lightning_streaming.tools.viewing.pages import Frame, Request, Response, Viewed, error_text
from lightning_streaming.tools.viewing.shown_values import (
    TEXT_PAGE,
    ShownValue,
    brief_value,
    media_of,
    show_unpickled,
    shown_value,
)
from lightning_streaming.tools.viewing.viewed import ViewedStream

if TYPE_CHECKING:
    from lightning_streaming.tools.runs.trace_run import Read
    from lightning_streaming.tools.viewing.viewed_run import ViewedStep

_PER_PAGE, _PER_BATCH_PAGE = 12, 24
_SEARCHED = 100
"""Samples in which a page looks for a text."""
_KINDS = ("images", "text", "plain", "failed", "audio", "tree", "array", "bytes")
"""Order of values on the page of a sample."""
_MAX_LISTED_RANKS = 64
"""Largest number of ranks in a menu; of more, the number is typed."""
_MAX_NAMES = 400
"""Characters of names that an error lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a list shows of a sample."""

    number: int
    shard: int
    index: int
    unread: TooMuch | Unreadable | None = None
    """The reason why there are no values."""
    values: Sequence[tuple[int, str, ShownValue]] = ()
    """Number, name and value of each column; images first."""
    order: tuple[int, Any] = (3, 0)
    """Sort key: of the value of the column by which a list is sorted."""

    @property
    def can_force(self) -> bool:
        """Whether the user can request to read the sample."""
        return isinstance(self.unread, TooMuch)


def _cards(reader: SampleReader, numbers: Sequence[int], sort: str = "", match: str = "", **how: Any) -> list[Card]:
    """Return a card for each sample.

    Args:
        reader: Reader of the samples.
        numbers: Their numbers, ascending.
        sort: Name of the column for :attr:`Card.order`.
        match: Text that the values of a sample must contain, in any case; an unreadable sample stays in the list.
        how: Arguments of :meth:`SampleReader.read`.

    Raises:
        SampleIndexError: There is no such sample.
    """
    cards = []
    for number, sample in zip(numbers, reader.read(numbers, **how), strict=True):
        shard, index = reader.find(number)
        card = Card(number=number, shard=shard, index=index)
        if isinstance(sample, (TooMuch, Unreadable)):
            card = replace(card, unread=_without_secrets(sample))
        elif match and match.lower() not in "\n".join(map(_searched, sample.values())).lower():
            continue
        else:
            shown = _show_values(reader, shard, sample, lambda _, value: brief_value(value))
            columns = _columns_in(reader, shard, sample)
            values = [(at, printable_name(name), shown[name]) for at, name in columns if name in shown]
            order = next(
                (_order_of(value) for name, value in sample.items() if printable_name(name) == sort), card.order
            )
            card = replace(card, values=sorted(values, key=lambda value: value[2].kind != "images"), order=order)
        cards.append(card)
    return cards


def _searched(value: Any) -> str:
    """Return the text of a value in which a list is searched; of arrays, images and bytes there is none."""
    with suppress(Exception):  # of an object within it, or of a number with too many digits
        return str(value) if isinstance(value, (str, int, float, np.number, np.bool_, dict, list)) else ""
    return ""


def _order_of(value: Any) -> tuple[int, Any]:
    """Return the sort key of a value: numbers by value, texts by alphabet, others by length."""
    if isinstance(value, (int, float, np.number, np.bool_)):
        return (0, value) if value == value else (3, 0)
    if isinstance(value, str):
        return 1, value
    if isinstance(value, np.ndarray):
        return 2, value.size
    return (2, len(value)) if isinstance(value, (bytes, list, tuple, dict)) else (3, 0)


def _without_secrets(unread: TooMuch | Unreadable) -> TooMuch | Unreadable:
    return replace(unread, reason=redact(unread.reason, {}))


def _show_values(
    reader: SampleReader, shard: int, sample: Mapping[str, Any], show: Callable[[str, Any], ShownValue]
) -> dict[str, ShownValue]:
    """Return ``show(column, value)`` of each column, or the error of a value whose own code fails."""
    unpickled = unsafe_columns(reader.index.shards[shard])
    return {
        name: show_unpickled(partial(show, name), value) if name in unpickled else show(name, value)
        for name, value in sample.items()
    }


def _columns_in(reader: SampleReader, shard: int, sample: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return the columns of a sample with the numbers that addresses contain: those of its shard, then others."""
    named = column_names(reader.index.shards[shard])
    return list(enumerate([*named, *sorted(name for name in sample if name not in named)]))


def samples(frame: Frame, request: Request, stream_number: int) -> Response:
    """Show a page of the samples of a stream: all, or those that a run reads or does not read, and contain a text."""
    stream, run = frame.stream(stream_number), frame.viewed.run
    sort, match = request.query.get("sort", ""), request.query.get("match", "").strip()
    is_down, limit = request.query.get("down") == "1", _SEARCHED if match else _PER_PAGE
    first, only = request.number("from"), request.query.get("only", "")
    only = only if run is not None and only in ("read", "left-out") else ""
    total = stream.reader.index.num_samples
    if request.query.get("from") == "random":
        page = int(np.random.default_rng().integers(max(1, -(-total // _PER_PAGE))))
        return request.redirect(f"s/{stream_number}/samples?from={page * _PER_PAGE}")
    numbers, previous, following, too_much = list[int](), None, None, None
    if run is None or not only:
        first = min(first, max(0, total - 1))
        numbers = list(range(first, min(first + limit, total)))
        previous = max(0, first - limit) if first else None
        following = first + limit if first + limit < total else None
    else:
        too_much = run.too_much(stream.stage) if stream.selection and not request.force else None
        if too_much is None:
            selection = run.selection(stream.stage, stream.name) if stream.selection else None
            numbers = stream.filtered(selection, first, limit + 1, is_selected=only == "read")
            following = numbers.pop() if len(numbers) > limit else None
            previous = 0 if first else None
    cards = _cards(stream.reader, numbers, sort, match)
    if sort:
        cards.sort(key=lambda card: card.order, reverse=is_down)
    return frame.show(
        request,
        "view_samples.html",
        "Samples",
        tab="samples",
        stream=stream,
        number=stream_number,
        cards=cards,
        numbers=numbers,
        columns=list(dict.fromkeys(name for card in cards for _, name, _ in card.values)),
        sort=sort,
        is_down=is_down,
        match=match,
        previous=previous,
        following=following,
        only=only,
        too_much=too_much,
        total=total,
        first=request.number("from"),
    )


def sample(frame: Frame, request: Request, stream_number: int, sample_number: int) -> Response:
    """Show a sample with all its values and, if requested, when the run reads it."""
    stream = frame.stream(stream_number)
    reader = stream.reader
    shard, index = reader.find(sample_number)
    read = reader.read([sample_number], force=request.force)[0]
    unread, values, wants_prepared = None, list[dict[str, Any]](), _wants_prepared(frame, request)
    if isinstance(read, (TooMuch, Unreadable)):
        unread = _without_secrets(read)
    else:
        encodings = {column.name: column.encoding for column in columns_of(reader.index.shards[shard].schema)}
        columns, disallowed = _columns_in(reader, shard, read), reader.disallowed_columns(shard)
        paged = {name for at, name in columns if request.number("column", -1) == at}
        shown = _show_values(
            reader,
            shard,
            read,
            lambda name, value: shown_value(value, request.number("start") if name in paged else 0),
        )
        values = [
            {"at": at, "name": printable_name(name), "encoding": encodings.get(name, ""), "value": shown.get(name)}
            for at, name in columns
            if name in read or name in disallowed
        ]
        values.sort(key=lambda value: _KINDS.index(value["value"].kind) if value["value"] else len(_KINDS))
    return frame.show(
        request,
        "view_sample.html",
        f"Sample {sample_number:,}",
        tab="samples",
        stream=stream,
        number=stream_number,
        sample=sample_number,
        shard=shard,
        index=index,
        file=reader.index.shards[shard].raw_data.basename,
        last=reader.index.num_samples - 1,
        unread=unread,
        can_force=isinstance(unread, TooMuch),
        values=values,
        text_page=TEXT_PAGE,
        is_forced=request.force,
        is_of_run=frame.viewed.run is not None and stream.stage == "train",
        reads=_reads(frame, request, stream, shard, index),
        can_prepare=frame.viewed.run is not None,
        wants_prepared=wants_prepared,
        prepared=_prepared_values(frame, request, stream, shard, index) if wants_prepared and not unread else None,
    )


def _wants_prepared(frame: Frame, request: Request) -> bool:
    return frame.viewed.run is not None and request.query.get("prepared") == "1"


def _too_much(frame: Frame, request: Request, stage: str) -> TooMuch | None:
    """Return what must be read to know the samples of a stage, unless it was requested."""
    run = frame.viewed.run
    return None if run is None or request.force else run.too_much(stage)


def _prepared(frame: Frame, stream: ViewedStream, shard: int, index: int) -> list[tuple[str, Any]]:
    """Return names and values of a sample after decode and transform."""
    run = frame.viewed.run
    assert run is not None, "only a run prepares samples"
    sample = run.prepared(stream.stage, stream.name, shard, index)
    items = (
        sample.items() if isinstance(sample, Mapping) else enumerate(sample if isinstance(sample, tuple) else [sample])
    )
    return [(str(name), value.numpy(force=True) if hasattr(value, "numpy") else value) for name, value in items]


def _prepared_values(frame: Frame, request: Request, stream: ViewedStream, shard: int, index: int) -> Any:
    """Return what a page shows of a sample after decode and transform, the reason why not, or the error of the code."""
    too_much, shown = None, list[tuple[str, ShownValue]]()
    try:
        too_much = _too_much(frame, request, stream.stage)
        values = [] if too_much else _prepared(frame, stream, shard, index)
        shown = [(printable_name(name), show_unpickled(shown_value, value)) for name, value in values]
    except Exception as error:  # noqa: BLE001  a transform may raise anything; the page shows it
        words = error_text(error) if isinstance(error, StreamingError) else f"{type(error).__name__}: {error}"
        shown = [("transform", ShownValue(kind="failed", words=redact(words, {})))]
    items = [{"at": at, "name": name, "encoding": "", "value": value} for at, (name, value) in enumerate(shown)]
    return {"too_much": too_much, "items": items}


def _reads(frame: Frame, request: Request, stream: ViewedStream, shard: int, index: int) -> Any:
    """Return when the run reads a sample; None if that was not requested."""
    run = frame.viewed.run
    if run is None or request.query.get("when") != "1":
        return None
    values: dict[str, Any] = {"too_much": None, "reads": [], "before": [], "epoch": None, "problem": None}
    try:
        values["too_much"] = None if request.force else run.too_much("train")
        if values["too_much"] is None:
            values["reads"] = run.reads(stream.name, shard, index)
            values["before"] = run.positions_before(stream.name, shard, index)
            values["epoch"] = run.traced().begins.epoch
    except StreamingError as error:
        values["problem"] = error_text(error)
    return values


def file(
    frame: Frame, request: Request, stream_number: int, sample_number: int, column: int, media_number: int
) -> Response | None:
    """Return an image or audio file within a value; None if there is none."""
    stream = frame.stream(stream_number)
    reader = stream.reader
    shard, index = reader.find(sample_number)
    read = reader.read([sample_number], force=request.force)[0]
    if isinstance(read, (TooMuch, Unreadable)):
        return None
    if _wants_prepared(frame, request):
        if _too_much(frame, request, stream.stage) is not None:
            return None
        values = dict(enumerate(_prepared(frame, stream, shard, index)))
        media = media_of(values[column][1], media_number) if column in values else None
        return None if media is None else Response(data=media.data, content_type=media.content_type)
    value = next((read.get(name) for at, name in _columns_in(reader, shard, read) if at == column), None)
    media = media_of(value, media_number)
    return None if media is None else Response(data=media.data, content_type=media.content_type)


def find(frame: Frame, request: Request) -> Response:
    """Redirect to the sample that the user typed."""
    viewed = frame.viewed
    current = min(request.number("stream"), len(viewed.streams) - 1)
    try:
        number, sample = _find(viewed, request.query.get("key", "").strip(), current)
    except StreamingError as error:
        return frame.show_error(request, error, title="No such sample", stream=viewed.streams[current], number=current)
    return request.redirect(f"s/{number}/sample/{sample}")


def _find(viewed: Viewed, text: str, current: int) -> tuple[int, int]:
    """Return the numbers of the stream and the sample that a text names; ``current`` if it names no stream.

    Raises:
        ConfigError: The text names no sample.
        SampleIndexError: There is no such sample or stream.
    """
    named = named_sample(text)
    if named is None:
        raise ConfigError(
            f"{text[:80]!r} names no sample",
            hint="type its number, SHARD:INDEX, either of them after a stream's name and a colon, or a key as JSON",
        )
    number = current
    if named.stream is not None:
        names = list(map(_names_of, viewed.streams))
        numbers = [at for at, names_of_stream in enumerate(names) if named.stream in names_of_stream]
        of_stage = [at for at in numbers if viewed.streams[at].stage == viewed.streams[current].stage]
        if not numbers:
            listed = ", ".join(dict.fromkeys(printable_name(names_of_stream[-1]) for names_of_stream in names))
            raise SampleIndexError(
                f"there is no stream {named.stream[:80]!r}",
                hint=f"there {'is' if len(names) == 1 else 'are'} {listed[:_MAX_NAMES]}, or leave the name out",
                stream=named.stream[:80],
            )
        number = (of_stage or numbers)[0]
    reader = viewed.streams[number].reader
    if named.shard is None:
        reader.find(named.index)
        return number, named.index
    first = reader.first_of(named.shard)
    size = reader.index.shards[named.shard].samples
    if not 0 <= named.index < size:
        raise SampleIndexError(
            f"there is no sample {named.index:,} in shard {named.shard:,}, which has {size:,}, numbered from 0",
            sample=named.index,
        )
    return number, first + named.index


def _names_of(stream: ViewedStream) -> list[str]:
    """Return the names of a stream: that of keys and, if the configuration has none, that of its directory."""
    directory = stream.dataset.shown.rstrip("/").rpartition("/")[2]
    return [stream.name] if stream.name == stream.label else [stream.name or "0", directory]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCard:
    """A sample of a batch."""

    read: Read
    stream: int | None
    """Number of its stream on pages."""
    card: Card | None
    problem: str | None = None
    """The reason why there is no card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPack:
    """One pack of a batch, or its part on the page; without packing, all samples of a batch."""

    position: int | None
    """Position of the pack in the epoch; None without packing."""
    place: int
    documents: int
    """Number of documents of the whole pack."""
    tokens: int
    cards: Sequence[ReadCard]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownBatch:
    """What a rank reads in a batch, or its part on the page."""

    rank: int
    epoch: int
    number: int
    phase: str | None
    counts: Sequence[tuple[str, int]]
    """Samples of each stream in the whole batch."""
    packs: Sequence[ShownPack]


def batches(frame: Frame, request: Request) -> Response | None:
    """Show the samples of one step, of all ranks or of one."""
    run = frame.viewed.run
    if run is None:
        return None
    wanted, rank = request.optional("step"), request.optional("rank")
    values: dict[str, Any] = {"wanted": wanted, "rank": rank, "too_much": None, "problem": None, "step": None}
    title = "The samples of a step"
    try:
        values["too_much"] = None if request.force else run.too_much("train")
        if values["too_much"] is None:
            values |= _step_values(frame, request, run.step(wanted, rank))
            title = f"The samples of step {values['step'].number:,}"
    except (StreamingError, OSError) as error:
        values["problem"] = error_text(error)
    return frame.show(request, "view_batch.html", title, tab="batches", **values)


def _step_values(frame: Frame, request: Request, step: ViewedStep) -> dict[str, Any]:
    """Return the variables of the page of a step."""
    first = min(request.number("from"), max(0, len(step.reads) - 1)) // _PER_BATCH_PAGE * _PER_BATCH_PAGE
    is_forced = request.query.get("force") == "samples"
    cards = _read_cards(frame, step.reads[first : first + _PER_BATCH_PAGE], force=is_forced)
    shown = []
    for (number, rank), group in groupby(cards, lambda card: (card.read.batch, card.read.rank)):
        reads = [read for read in step.reads if (read.batch, read.rank) == (number, rank)]
        counts = Counter(read.key.stream for read in reads)
        shown.append(
            ShownBatch(
                rank=rank,
                epoch=reads[0].key.epoch,
                number=number,
                phase=reads[0].phase,
                counts=[(name, counts[name]) for name in step.streams if counts[name]],
                packs=_packs(reads, list(group)),
            )
        )
    return {
        "step": step,
        "rank": step.rank,
        "is_one_of_many": step.rank is not None and request.optional("rank") is None,
        "first": first,
        "page": _PER_BATCH_PAGE,
        "ranks": range(step.run.num_ranks) if step.run.num_ranks <= _MAX_LISTED_RANKS else None,
        "batches": shown,
        "is_forced": is_forced,
        "can_force": any(card.card is not None and card.card.can_force for card in cards),
    }


def _read_cards(frame: Frame, reads: Sequence[Read], *, force: bool) -> list[ReadCard]:
    """Return a card for each read; a stream whose data cannot be read leaves the others."""
    numbers = frame.viewed.stream_numbers("train")
    cards, problems, budget = dict[tuple[str, int, int], Card](), dict[str, str](), FetchBudget()
    for name in dict.fromkeys(read.key.stream for read in reads):
        if name not in numbers:
            problems[name] = "the configuration has no stream of this name"
            continue
        wanted = sorted({(read.key.shard, read.key.sample_index) for read in reads if read.key.stream == name})
        try:
            reader = frame.viewed.streams[numbers[name]].reader
            of_stream = _cards(
                reader, [reader.first_of(shard) + index for shard, index in wanted], force=force, budget=budget
            )
            cards |= {(name, *sample): card for sample, card in zip(wanted, of_stream, strict=True)}
        except (StreamingError, OSError) as error:
            problems[name] = error_text(error)
    return [
        ReadCard(
            read=read,
            stream=numbers.get(read.key.stream),
            card=cards.get((read.key.stream, read.key.shard, read.key.sample_index)),
            problem=problems.get(read.key.stream),
        )
        for read in reads
    ]


def _packs(reads: Sequence[Read], cards: Sequence[ReadCard]) -> list[ShownPack]:
    """Return the packs that are on the page, of one batch."""
    packs = []
    for position, group in groupby(cards, lambda card: card.read.pack and card.read.pack.position):
        of_pack = list(group)
        parts = [read.pack for read in reads if read.pack and read.pack.position == position]
        packs.append(
            ShownPack(
                position=position,
                place=of_pack[0].read.place,
                documents=len(parts),
                tokens=sum(part.stop - part.start for part in parts),
                cards=of_pack,
            )
        )
    return packs
