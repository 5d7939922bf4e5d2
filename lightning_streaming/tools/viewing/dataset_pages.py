"""Pages of a dataset as a whole: what its index says, what its columns hold, its shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_streaming.storage.secrets import redact
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.drawing.charts import Axis, histogram
from lightning_streaming.tools.stored.stored_dataset import stored_files
from lightning_streaming.tools.stored.summary import facts_of
from lightning_streaming.tools.viewing.page import Answer, Frame, Request
from lightning_streaming.units import format_bytes

_SHARDS_ON_A_PAGE = 100


def overview(frame: Frame, request: Request, place: int) -> Answer:
    """What the index says of a dataset."""
    stream = frame.stream(place)
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
    return frame.show(
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


def columns(frame: Frame, request: Request, place: int) -> Answer:
    """What some samples hold, column by column."""
    stream = frame.stream(place)
    statistics = stream.statistics(is_asked=request.is_asked)
    columns = [{"shown": printable_name(one.name), "of": one} for one in statistics.columns]
    left_out = [replace(one, words=redact(one.words, {})) for one in statistics.left_out]
    return frame.show(
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


def shards(frame: Frame, request: Request, place: int) -> Answer:
    """A page of the list of shards."""
    stream = frame.stream(place)
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
    return frame.show(
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
