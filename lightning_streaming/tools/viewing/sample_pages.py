"""Pages of samples: a list, one with all its values, its pictures and sounds, and the way to the one that was typed."""

from __future__ import annotations

from typing import Any

from lightning_streaming.errors import StreamingError
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.stored.sample_reader import SampleReader, TooMuch, Unreadable
from lightning_streaming.tools.stored.stored_dataset import columns_of
from lightning_streaming.tools.viewing.cards import cards_of, columns_in, left_out, values_in
from lightning_streaming.tools.viewing.page import Answer, Frame, Request, in_words
from lightning_streaming.tools.viewing.search import found_sample
from lightning_streaming.tools.viewing.shown_values import TEXT_PAGE, media_of, shown_value
from lightning_streaming.tools.viewing.viewed import ViewedStream

_ON_A_PAGE = 12
_KINDS = ("pictures", "text", "plain", "failed", "audio", "tree", "array", "bytes")
"""In which order the page of a sample shows its values."""


def samples(frame: Frame, request: Request, place: int) -> Answer:
    """A page of the samples of a stream; of a run's, maybe those alone that it reads, or leaves out."""
    stream = frame.stream(place)
    reader, only = stream.reader, request.query.get("only", "")
    first, run = request.number("from"), frame.viewed.run
    only = only if run is not None and only in ("read", "left-out") else ""
    needs_selection = run is not None and only and stream.only and not request.is_asked
    unread = run.unread(stream.stage) if run is not None and needs_selection else None
    numbers, before, after = list[int](), None, None
    if unread is None:
        numbers, before, after = _page_of_numbers(frame, stream, first, only)
    return frame.show(
        request,
        "view_samples.html",
        "Samples",
        here="samples",
        stream=stream,
        place=place,
        cards=cards_of(reader, numbers),
        before=before,
        after=after,
        only=only,
        unread=unread,
        total=reader.index.num_samples,
        first=first,
    )


def _page_of_numbers(
    frame: Frame, stream: ViewedStream, first: int, only: str
) -> tuple[list[int], int | None, int | None]:
    """The samples of a page; where the page before it begins, and the next, if there are any."""
    total, run = stream.reader.index.num_samples, frame.viewed.run
    if run is None or not only:
        first = min(first, max(0, total - 1))
        numbers = list(range(first, min(first + _ON_A_PAGE, total)))
        after = first + _ON_A_PAGE
        return numbers, (max(0, first - _ON_A_PAGE) if first else None), (after if after < total else None)
    selection = run.selection(stream.stage, stream.name) if stream.only else None
    numbers, more = stream.filtered(selection, first, _ON_A_PAGE + 1, is_selected=only == "read"), None
    if len(numbers) > _ON_A_PAGE:
        more = numbers.pop()
    return numbers, (0 if first else None), more


def sample(frame: Frame, request: Request, place: int, number: int) -> Answer:
    """A sample with all its values, and where that was asked for, when the run reads it."""
    stream = frame.stream(place)
    reader = stream.reader
    shard, index = reader.find(number)
    found = reader.read([number], is_asked=request.is_asked)[0]
    told = left_out(found)
    return frame.show(
        request,
        "view_sample.html",
        f"Sample {number:,}",
        here="samples",
        stream=stream,
        place=place,
        number=number,
        shard=shard,
        index=index,
        file=reader.index.shards[shard].raw_data.basename,
        last=reader.index.num_samples - 1,
        told=told,
        may_be_asked=isinstance(told, TooMuch),
        values=_values(request, reader, shard, found) if told is None else (),
        text_page=TEXT_PAGE,
        is_asked=request.is_asked,
        may_be_read=frame.viewed.run is not None and stream.stage == "train",
        reads=_reads(frame, request, stream, shard, index),
    )


def _values(request: Request, reader: SampleReader, shard: int, found: Any) -> list[dict[str, Any]]:
    """All values of a sample; of a column that is shut, that there is one."""
    encodings = {one.name: one.encoding for one in columns_of(reader.index.shards[shard].schema)}
    named, shut = columns_in(reader, shard, found), reader.shut_columns(shard)
    turned = {name for at, name in named if request.number("column", -1) == at}
    shown = values_in(
        reader,
        shard,
        found,
        lambda name, value: shown_value(value, request.number("start") if name in turned else 0),
    )
    values = [
        {"at": at, "name": printable_name(name), "encoding": encodings.get(name, ""), "value": shown.get(name)}
        for at, name in named
        if name in found or name in shut
    ]
    return sorted(values, key=lambda one: _KINDS.index(one["value"].kind) if one["value"] else len(_KINDS))


def _reads(frame: Frame, request: Request, stream: ViewedStream, shard: int, index: int) -> Any:
    """When the run reads a sample, where that was asked for."""
    run = frame.viewed.run
    if run is None or request.query.get("when") != "1":
        return None
    told: dict[str, Any] = {"unread": None, "found": [], "before": [], "epoch": None, "problem": None}
    try:
        told["unread"] = None if request.is_asked else run.unread("train")
        if told["unread"] is None:
            told["found"] = run.reads(stream.name, shard, index)
            told["before"] = run.positions_before(stream.name, shard, index)
            told["epoch"] = run.traced().begins.epoch
    except StreamingError as error:
        told["problem"] = in_words(error)
    return told


def file(frame: Frame, request: Request, place: int, number: int, column: int, which: int) -> Answer | None:
    """A picture or a sound within a value; None where there is none."""
    reader = frame.stream(place).reader
    shard, _ = reader.find(number)
    found = reader.read([number], is_asked=request.is_asked)[0]
    if isinstance(found, (TooMuch, Unreadable)):
        return None
    value = next((found.get(name) for at, name in columns_in(reader, shard, found) if at == column), None)
    media = media_of(value, which)
    return None if media is None else Answer(data=media.data, content_type=media.content_type)


def find(frame: Frame, request: Request) -> Answer:
    """The way to the sample that was typed."""
    here = min(request.number("stream"), len(frame.viewed.streams) - 1)
    try:
        place, number = found_sample(frame.viewed, request.query.get("key", "").strip(), here)
    except StreamingError as error:
        return frame.failed(request, error, title="No such sample", stream=frame.viewed.streams[here], place=here)
    return request.to(f"s/{place}/sample/{number}")
