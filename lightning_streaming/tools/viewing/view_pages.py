"""The pages of ``lightning-streaming view``: a path and what follows its question mark in, HTML or a file out.

Nothing here knows HTTP. What fails is told in the page, in the words of the error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_streaming.errors import SampleIndexError, StreamingError
from lightning_streaming.formats.shard_table import column_names
from lightning_streaming.storage.secrets import redact
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.drawing.charts import Axis, histogram
from lightning_streaming.tools.drawing.pages import fill, icon, style
from lightning_streaming.tools.stored.sample_reader import SampleReader, TooMuch, Unreadable
from lightning_streaming.tools.stored.stored_dataset import columns_of, stored_files
from lightning_streaming.tools.stored.summary import facts_of
from lightning_streaming.tools.viewing.search import found_sample
from lightning_streaming.tools.viewing.shown_values import TEXT_PAGE, brief_value, media_of, shown_value
from lightning_streaming.tools.viewing.viewed import Viewed, ViewedStream
from lightning_streaming.units import format_bytes

_ON_A_PAGE = 12
_SHARDS_ON_A_PAGE = 100
_KINDS = ("pictures", "text", "plain", "audio", "tree", "array", "bytes")
"""In which order the page of a sample shows its values."""
_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a browser is given."""

    data: bytes
    content_type: str = "text/html"
    status: int = 200
    location: str | None = None
    """Where to look instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a browser asks for."""

    root: str
    """What all addresses begin with."""
    path: str
    """After that."""
    query: Mapping[str, str]

    def number(self, name: str, default: int = 0) -> int:
        """A whole number that is asked with; the default where it is none."""
        text = self.query.get(name, "")
        return int(text) if _NUMBER.fullmatch(text) else default

    @property
    def is_asked(self) -> bool:
        """Whether to read what takes much."""
        return self.query.get("asked") == "1"


class Pages:
    """All pages of what is viewed.

    Args:
        viewed: What is looked at.
    """

    def __init__(self, viewed: Viewed) -> None:
        self.viewed = viewed

    def answer(self, request: Request) -> Answer | None:
        """What to show; None if there is no such page."""
        for pattern, page in _ROUTES:
            match = pattern.fullmatch(request.path)
            if match is None:
                continue
            try:
                return page(self, request, *map(int, match.groups()))
            except SampleIndexError as error:
                return self._failed(request, error, 404)
            except (StreamingError, OSError) as error:
                return self._failed(request, error, 200)  # the page itself is as it should be
        return None

    def show(self, request: Request, template: str, title: str, *, status: int = 200, **values: Any) -> Answer:
        """A page with its frame."""
        frame = {
            "root": request.root,
            "tool": "view",
            "title": f"{printable_name(title)} — {printable_name(self.viewed.shown)}",
            "heading": printable_name(title),
            "viewed": self.viewed,
            "stream": None,
            "here": "",
            "asked_for": request.query.get("key", ""),
        }
        return Answer(data=fill(template, {**frame, **values}).encode("utf-8", "replace"), status=status)

    def missing(self, request: Request) -> Answer:
        """What to show where there is no such page."""
        words, title = "Nothing has this address.", "There is no such page"
        return self.show(request, "view_problem.html", title, words=words, status=404)

    def _failed(self, request: Request, error: Exception, status: int) -> Answer:
        words = redact(str(error), {})
        return self.show(request, "view_problem.html", "This could not be shown", words=words, status=status)

    def stream(self, place: int) -> ViewedStream:
        """The stream of this number.

        Raises:
            SampleIndexError: There is none.
        """
        if place >= len(self.viewed.streams):
            raise SampleIndexError(f"there is no stream {place}; there are {len(self.viewed.streams)}, from 0 on")
        return self.viewed.streams[place]


def _style(_: Pages, __: Request) -> Answer:
    return Answer(data=style().encode(), content_type="text/css")


def _icon(_: Pages, __: Request) -> Answer:
    return Answer(data=icon(), content_type="image/svg+xml")


def _front(pages: Pages, request: Request) -> Answer:
    if pages.viewed.run is None:
        return _to(request, "s/0/")
    stages = []
    for stage in pages.viewed.run.configs:
        is_asked = request.is_asked and request.query.get("stage") == stage
        streams = [(place, one) for place, one in enumerate(pages.viewed.streams) if one.stage == stage]
        unread, report, problem = None, None, None
        try:
            unread = None if is_asked else pages.viewed.run.unread(stage)
            report = None if unread else pages.viewed.run.stage(stage)
        except StreamingError as error:
            problem = redact(str(error), {})
        packs = pages.viewed.run.packs(stage) if report else ()
        told = {"unread": unread, "report": report, "problem": problem, "packs": packs}
        stages.append({"name": stage, "streams": streams, **told})
    return pages.show(request, "view_run.html", "What the run reads", here="run", stages=stages)


def _overview(pages: Pages, request: Request, place: int) -> Answer:
    stream = pages.stream(place)
    index = stream.reader.index
    report = stream.summary()
    bins = report["shard_sizes"]
    chart = None
    if len(bins) > 1:
        edges = [*(one["smallest"] for one in bins), bins[-1]["largest"]]
        axes = Axis(label="bytes, uncompressed", base=1024, show=lambda size: format_bytes(int(size)), low=None)
        chart = histogram(
            "Sizes of shards",
            "A histogram of the sizes of shards.",
            axes,
            Axis(label="shards"),
            edges,
            [one["shards"] for one in bins],
        )
    return pages.show(
        request,
        "view_dataset.html",
        stream.title,
        here="overview",
        stream=stream,
        place=place,
        facts=[one for one in facts_of(report, index) if one[0] not in ("samples", "shards", "stored size")],
        report=report,
        columns=[{**one, "shown": printable_name(one["name"])} for one in report["columns"]],
        chart=chart,
    )


def _samples(pages: Pages, request: Request, place: int) -> Answer:
    stream = pages.stream(place)
    reader, only = stream.reader, request.query.get("only", "")
    first, run = request.number("from"), pages.viewed.run
    only = only if run is not None and only in ("read", "left-out") else ""
    needs_selection = run is not None and only and stream.only and not request.is_asked
    unread = run.unread(stream.stage) if run is not None and needs_selection else None
    numbers, before, after = list[int](), None, None
    if unread is None:
        numbers, before, after = _page_of_numbers(pages, stream, first, only)
    cards = [_card(reader, number, found) for number, found in zip(numbers, reader.read(numbers), strict=True)]
    return pages.show(
        request,
        "view_samples.html",
        "Samples",
        here="samples",
        stream=stream,
        place=place,
        cards=cards,
        before=before,
        after=after,
        only=only,
        unread=unread,
        total=reader.index.num_samples,
        first=first,
    )


def _page_of_numbers(
    pages: Pages, stream: ViewedStream, first: int, only: str
) -> tuple[list[int], int | None, int | None]:
    """The samples of a page; where the page before it begins, and the next, if there are any."""
    total, run = stream.reader.index.num_samples, pages.viewed.run
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


def _card(reader: SampleReader, number: int, found: Any) -> dict[str, Any]:
    """What a list shows of a sample."""
    shard, index = reader.find(number)
    card: dict[str, Any] = {"number": number, "shard": shard, "index": index, "told": None, "values": []}
    if isinstance(found, (TooMuch, Unreadable)):
        return {**card, "told": _told(found)}
    values = [(at, name, brief_value(found[name])) for at, name in _columns(reader, shard, found) if name in found]
    values.sort(key=lambda one: one[2].kind != "pictures")
    return {**card, "values": [(at, printable_name(name), value) for at, name, value in values]}


def _columns(reader: SampleReader, shard: int, found: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The columns of a sample, each with the number that pages call it by: those of its shard, then others."""
    named = column_names(reader.index.shards[shard])
    return list(enumerate([*named, *sorted(name for name in found if name not in named)]))


def _told(found: TooMuch | Unreadable) -> dict[str, Any]:
    return {"words": redact(found.words, {}), "may_ask": isinstance(found, TooMuch)}


def _sample(pages: Pages, request: Request, place: int, number: int) -> Answer:
    stream = pages.stream(place)
    reader = stream.reader
    shard, index = reader.find(number)
    found, info = reader.read([number], is_asked=request.is_asked)[0], reader.index.shards[shard]
    values, told = list[dict[str, Any]](), None
    if isinstance(found, (TooMuch, Unreadable)):
        told = _told(found)
    else:
        encodings = {one.name: one.encoding for one in columns_of(info.schema)}
        shut = reader.shut_columns(shard)
        for at, name in _columns(reader, shard, found):
            if name not in found and name not in shut:
                continue
            start = request.number("start") if request.number("column", -1) == at else 0
            value = shown_value(found[name], start) if name in found else None
            shown = printable_name(name)
            values.append({"at": at, "name": shown, "encoding": encodings.get(name, ""), "value": value})
        values.sort(key=lambda one: _KINDS.index(one["value"].kind) if one["value"] else len(_KINDS))
    return pages.show(
        request,
        "view_sample.html",
        f"Sample {number:,}",
        here="samples",
        stream=stream,
        place=place,
        number=number,
        shard=shard,
        index=index,
        file=info.raw_data.basename,
        last=reader.index.num_samples - 1,
        told=told,
        values=values,
        text_page=TEXT_PAGE,
        is_asked=request.is_asked,
        may_be_read=pages.viewed.run is not None and stream.stage == "train",
        reads=_reads(pages, request, stream, shard, index),
    )


def _reads(pages: Pages, request: Request, stream: ViewedStream, shard: int, index: int) -> Any:
    """When the run reads a sample, where that was asked for."""
    run = pages.viewed.run
    if run is None or request.query.get("when") != "1":
        return None
    unread, found, problem = None, list[Any](), None
    try:
        unread = None if request.is_asked else run.unread("train")
        found = [] if unread else run.reads(stream.name, shard, index)
    except StreamingError as error:
        problem = redact(str(error), {})
    return {"unread": unread, "found": found, "problem": problem}


def _file(pages: Pages, request: Request, place: int, number: int, column: int, which: int) -> Answer | None:
    reader = pages.stream(place).reader
    shard, _ = reader.find(number)
    found = reader.read([number], is_asked=request.is_asked)[0]
    if isinstance(found, (TooMuch, Unreadable)):
        return None
    value = next((found.get(name) for at, name in _columns(reader, shard, found) if at == column), None)
    media = media_of(value, which)
    return None if media is None else Answer(data=media.data, content_type=media.content_type)


def _column_page(pages: Pages, request: Request, place: int) -> Answer:
    stream = pages.stream(place)
    statistics = stream.statistics(is_asked=request.is_asked)
    columns = [{"shown": printable_name(one.name), "of": one} for one in statistics.columns]
    left_out = [replace(one, words=redact(one.words, {})) for one in statistics.left_out]
    return pages.show(
        request,
        "view_columns.html",
        "Columns",
        here="columns",
        stream=stream,
        place=place,
        statistics=statistics,
        columns=columns,
        left_out=left_out,
    )


def _shards(pages: Pages, request: Request, place: int) -> Answer:
    stream = pages.stream(place)
    shards = stream.reader.index.shards
    first = min(request.number("from"), max(0, len(shards) - 1)) // _SHARDS_ON_A_PAGE * _SHARDS_ON_A_PAGE
    rows = list[dict[str, Any]]()
    for shard in range(first, min(first + _SHARDS_ON_A_PAGE, len(shards))):
        info = shards[shard]
        rows.append(
            {
                "shard": shard,
                "name": printable_name(info.raw_data.basename),
                "samples": info.samples,
                "first": stream.reader.first_of(shard),
                "raw": sum(raw.bytes for raw, _ in info.files),
                "stored": sum(file.bytes for file in stored_files(info)),
                "compression": info.compression,
            }
        )
    return pages.show(
        request,
        "view_shards.html",
        "Shards",
        here="shards",
        stream=stream,
        place=place,
        rows=rows,
        first=first,
        page=_SHARDS_ON_A_PAGE,
        total=len(shards),
        largest=max((row["raw"] for row in rows), default=1) or 1,
    )


def _find(pages: Pages, request: Request) -> Answer:
    """Go to the sample that was typed."""
    here = min(request.number("stream"), len(pages.viewed.streams) - 1)
    try:
        place, number = found_sample(pages.viewed, request.query.get("key", "").strip(), here)
    except StreamingError as error:
        words = redact(str(error), {})
        return pages.show(request, "view_problem.html", "No such sample", words=words, **_of_stream(pages, here))
    return _to(request, f"s/{place}/sample/{number}")


def _of_stream(pages: Pages, place: int) -> dict[str, Any]:
    return {"stream": pages.viewed.streams[place], "place": place}


def _order(pages: Pages, request: Request) -> Answer | None:
    run = pages.viewed.run
    if run is None:
        return None
    title, unread = "What is read next", None if request.is_asked else run.unread("train")
    if unread is not None:
        kept = {name: request.number(name, -1) for name in ("step", "steps", "rank")}
        again = "".join(f"&{name}={number}" for name, number in kept.items() if number >= 0)
        return pages.show(request, "view_order.html", title, here="order", unread=unread, again=again, order=None)
    step = request.number("step", -1)
    asked = (None if step < 0 else step, min(max(1, request.number("steps", 4)), 32))
    rank = request.number("rank", -1)
    order = run.next_steps(*asked, None if rank < 0 else rank)
    places = {one.name: place for place, one in enumerate(pages.viewed.streams) if one.stage == "train"}
    return pages.show(request, "view_order.html", title, here="order", unread=None, order=order, places=places)


def _checkpoint(pages: Pages, request: Request) -> Answer | None:
    run = pages.viewed.run
    if run is None or run.places is None:
        return None
    trainer = run.places.trainer
    loaders = [
        {"name": name, "of": loader, "seen": run.seen(name), "share": _done(loader)}
        for name, loader in run.places.loaders.items()
    ]
    told: dict[str, Any] = {
        "loaders": loaders,
        "trainer": trainer,
        "step": run.places.global_step,
        "file": run.checkpoint,
    }
    return pages.show(request, "view_checkpoint.html", "Where the checkpoint stands", here="checkpoint", **told)


def _done(loader: Any) -> float | None:
    size = loader.epoch_size
    return min(1.0, loader.position.cursor.sample_in_epoch / size) if size else None


def _to(request: Request, path: str) -> Answer:
    return Answer(data=b"", status=303, location=request.root + path)


_Page = Callable[..., Answer | None]
_PATHS: Mapping[str, _Page] = {
    "": _front,
    r"style\.css": _style,
    r"icon\.svg": _icon,
    "s/#/": _overview,
    "s/#/samples": _samples,
    "s/#/sample/#": _sample,
    "s/#/file/#/#/#": _file,
    "s/#/columns": _column_page,
    "s/#/shards": _shards,
    "find": _find,
    "order": _order,
    "checkpoint": _checkpoint,
}
_ROUTES = [(re.compile(path.replace("#", r"([0-9]{1,18})")), page) for path, page in _PATHS.items()]
