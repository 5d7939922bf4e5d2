"""Request, response and common frame of the pages, and the pages about a whole dataset or run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_streaming.errors import SampleIndexError, StreamingError
from lightning_streaming.storage.secrets import redact
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.report.charts import Axis, histogram
from lightning_streaming.tools.report.pages import fill
from lightning_streaming.tools.stored.stored_dataset import stored_files
from lightning_streaming.tools.stored.summary import facts_of
from lightning_streaming.tools.viewing.viewed import ViewedStream
from lightning_streaming.units import format_bytes

if TYPE_CHECKING:
    from lightning_streaming.tools.viewing.viewed_run import ViewedRun

_NUMBER = re.compile(r"[0-9]{1,18}")
_SHARDS_PER_PAGE = 100
_MAX_STEPS, _DEFAULT_STEPS = 32, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewed:
    """The dataset, or the run and its streams, that the pages show."""

    shown: str
    """Its name, without secrets."""
    streams: Sequence[ViewedStream]
    run: ViewedRun | None = None
    """The run that reads the streams; None for a single dataset."""

    def stream_numbers(self, stage: str) -> dict[str, int]:
        """Return the numbers of a stage's streams, by name."""
        return {stream.name: number for number, stream in enumerate(self.streams) if stream.stage == stage}

    def close(self) -> None:
        """Release files, threads and temporary directories."""
        for stream in self.streams:
            stream.close()
        if self.run is not None:
            self.run.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """The response to a browser."""

    data: bytes
    content_type: str = "text/html"
    status: int = 200
    location: str | None = None
    """Target of a redirect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The request of a browser."""

    root: str
    """Prefix of all addresses."""
    path: str
    """Path after the prefix."""
    query: Mapping[str, str]

    def optional(self, name: str) -> int | None:
        """Return a whole number of the query; None if it is missing or no number."""
        text = self.query.get(name, "")
        return int(text) if _NUMBER.fullmatch(text) else None

    def number(self, name: str, default: int = 0) -> int:
        """Return a whole number of the query, or the default."""
        number = self.optional(name)
        return default if number is None else number

    @property
    def force(self) -> bool:
        """Whether the user requested to read data whose cost is high."""
        return self.query.get("force") == "1"

    def redirect(self, path: str) -> Response:
        """Return a redirect to another page."""
        return Response(data=b"", status=303, location=self.root + path)


class Frame:
    """Renders pages, all in the same frame.

    Args:
        viewed: The dataset or run that they show.
    """

    def __init__(self, viewed: Viewed) -> None:
        self.viewed = viewed

    def show(self, request: Request, template: str, title: str, *, status: int = 200, **values: Any) -> Response:
        """Return a page."""
        frame = {
            "root": request.root,
            "tool": "view",
            "title": f"{printable_name(title)} — {printable_name(self.viewed.shown)}",
            "heading": printable_name(title),
            "viewed": self.viewed,
            "stream": None,
            "tab": "",
            "searched": request.query.get("key", ""),
        }
        return Response(data=fill(template, {**frame, **values}).encode("utf-8", "replace"), status=status)

    def show_error(self, request: Request, error: Exception | str, status: int = 200, **values: Any) -> Response:
        """Return a page that shows an error."""
        values = {"title": "This could not be shown", "words": error_text(error), **values}
        return self.show(request, "view_problem.html", status=status, **values)

    def stream(self, number: int) -> ViewedStream:
        """Return the stream of a number.

        Raises:
            SampleIndexError: There is no such stream.
        """
        if number >= len(self.viewed.streams):
            raise SampleIndexError(
                f"there is no stream {number}", hint=f"there are {len(self.viewed.streams)}, numbered from 0"
            )
        return self.viewed.streams[number]


def error_text(error: Exception | str) -> str:
    """Return the message of an error, without secrets of stores."""
    return redact(str(error), {})


def overview(frame: Frame, request: Request, number: int) -> Response:
    """Show what the index says of a dataset."""
    stream = frame.stream(number)
    index, summary = stream.reader.index, stream.summary()
    bins, chart = summary["shard_sizes"], None
    if len(bins) > 1:
        chart = histogram(
            "Sizes of shards",
            "A histogram of the sizes of shards.",
            Axis(label="bytes, uncompressed", base=1024, show=lambda size: format_bytes(int(size)), low=None),
            Axis(label="shards"),
            [*(group["smallest"] for group in bins), bins[-1]["largest"]],
            [group["shards"] for group in bins],
        )
    return frame.show(
        request,
        "view_dataset.html",
        stream.title,
        tab="overview",
        stream=stream,
        number=number,
        facts=[fact for fact in facts_of(summary, index) if fact[0] not in ("samples", "shards", "stored size")],
        report=summary,
        columns=[{**column, "shown": printable_name(column["name"])} for column in summary["columns"]],
        chart=chart,
    )


def columns(frame: Frame, request: Request, number: int) -> Response:
    """Show statistics of each column, from some samples."""
    stream = frame.stream(number)
    statistics = stream.statistics(force=request.force)
    return frame.show(
        request,
        "view_columns.html",
        "Columns",
        tab="columns",
        stream=stream,
        number=number,
        statistics=statistics,
        columns=[{"shown": printable_name(column.name), "of": column} for column in statistics.columns],
        skipped=[replace(skipped, reason=redact(skipped.reason, {})) for skipped in statistics.skipped],
    )


def shards(frame: Frame, request: Request, number: int) -> Response:
    """Show a page of the list of shards."""
    stream = frame.stream(number)
    infos = stream.reader.index.shards
    first = min(request.number("from"), max(0, len(infos) - 1)) // _SHARDS_PER_PAGE * _SHARDS_PER_PAGE
    rows = list[dict[str, Any]]()
    for shard in range(first, min(first + _SHARDS_PER_PAGE, len(infos))):
        info = infos[shard]
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
    return frame.show(
        request,
        "view_shards.html",
        "Shards",
        tab="shards",
        stream=stream,
        number=number,
        rows=rows,
        first=first,
        page=_SHARDS_PER_PAGE,
        total=len(infos),
        largest=max((row["raw"] for row in rows), default=1) or 1,
    )


def front(frame: Frame, request: Request) -> Response:
    """Show what a run reads, stage by stage; redirect to the overview of a single dataset."""
    run = frame.viewed.run
    if run is None:
        return request.redirect("s/0/")
    stages = []
    for stage in run.configs:
        is_forced = request.force and request.query.get("stage") == stage
        streams = [(number, stream) for number, stream in enumerate(frame.viewed.streams) if stream.stage == stage]
        too_much, report, problem = None, None, None
        try:
            too_much = None if is_forced else run.too_much(stage)
            report = None if too_much else run.stage(stage)
        except StreamingError as error:
            problem = error_text(error)
        packs = run.packs(stage) if report else ()
        values = {"too_much": too_much, "report": report, "problem": problem, "packs": packs}
        stages.append({"name": stage, "streams": streams, **values})
    return frame.show(request, "view_run.html", "What the run reads", tab="run", stages=stages)


def order(frame: Frame, request: Request) -> Response | None:
    """Show what the next steps read, each sample as a square."""
    run = frame.viewed.run
    if run is None:
        return None
    query = {name: request.optional(name) for name in ("step", "steps", "rank")}
    values: dict[str, Any] = {"title": "Upcoming steps", "tab": "order"}
    too_much = None if request.force else run.too_much("train")
    if too_much is not None:
        again = "".join(f"&{name}={number}" for name, number in query.items() if number is not None)
        return frame.show(request, "view_order.html", **values, too_much=too_much, again=again, order=None)
    steps = min(max(1, request.number("steps", _DEFAULT_STEPS)), _MAX_STEPS)
    order = run.next_steps(query["step"], steps, query["rank"])
    numbers = frame.viewed.stream_numbers("train")
    return frame.show(request, "view_order.html", **values, too_much=None, order=order, numbers=numbers)


def checkpoint(frame: Frame, request: Request) -> Response | None:
    """Show the position of the checkpoint, and how much of each stream was read."""
    run = frame.viewed.run
    if run is None or run.places is None:
        return None
    loaders = []
    for name, loader in run.places.loaders.items():
        size = loader.epoch_size
        share = min(1.0, loader.position.cursor.sample_in_epoch / size) if size else None
        loaders.append({"name": name, "of": loader, "seen": run.seen(name), "share": share})
    return frame.show(
        request,
        "view_checkpoint.html",
        "Position of the checkpoint",
        tab="checkpoint",
        loaders=loaders,
        trainer=run.places.trainer,
        step=run.places.global_step,
        file=run.checkpoint,
    )
