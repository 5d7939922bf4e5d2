"""Show a plan: tables on a terminal, and one self-contained HTML page with charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from errno import EISDIR
from itertools import pairwise
from pathlib import Path
from time import gmtime, strftime
from typing import Any

from lightning_streaming.files import appears_whole, partial_path
from lightning_streaming.tools.console import counted, print_table, printable_name
from lightning_streaming.tools.report.charts import (
    Axis,
    Bar,
    Curve,
    Mark,
    Markup,
    areas,
    bars,
    histogram,
    lines,
    short_number,
)
from lightning_streaming.tools.report.pages import fill, import_jinja
from lightning_streaming.tools.runs.describe import share_in_words
from lightning_streaming.units import format_bytes

_MOST_SERIES = 12
"""Series of a chart; of more streams the largest have one each, and the others one together."""
_OTHERS = "all others"
_MIXTURES = 40
"""Intervals for which the mixture is shown: in shorter ones it would be random."""
_STEP = Axis(label="step", low=None)

Table = tuple[list[str], list[list[str]]]
"""Heads and rows."""


def print_report(report: Mapping[str, Any]) -> None:
    """Print the facts and tables of a plan."""
    print_table(f"plan: {machines_of(report['run'])}", (), facts_of(report))
    streams, phases, caches = _tables(report)
    print_table(_title_of("streams", report), *streams, right=streams[0][1:], whole=streams[0][1:])
    if phases is not None:
        print_table(_title_of("phases", report), *phases, right=phases[0][2:], whole=phases[0][2:])
    if caches is not None:
        print_table("caches, empty at first", *caches, right=caches[0][1:], whole=caches[0])


def _title_of(title: str, report: Mapping[str, Any]) -> str:
    """Return the title of a table with the unit of configured weights, if it shows them."""
    has_weights = title == "phases" or (not report["schedule"] and report["streams"][0]["weight"] is not None)
    return f"{title}; weights count {report['run']['weights_in']}" if has_weights else title


def machines_of(run: Mapping[str, Any]) -> str:
    """Return nodes, ranks, workers and batch size in a line."""
    nodes, ranks = counted(run["nodes"], "node"), counted(run["ranks_per_node"], "rank")
    machines = f"{nodes} of {ranks}" if run["nodes"] > 1 else ranks
    batch = f"batches of {counted(run['batch_size'], run['unit'])}"
    return f"{machines}, {counted(run['workers'], 'worker')} each, {batch}"


def facts_of(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the main numbers of a plan, as names and texts."""
    run, first, memory, cache = report["run"], report["first_batch"], report["memory"], report["caches"][0]
    begins, tokens = run["begins"], [stream["tokens"] for stream in report["streams"]]
    samples = sum(stream["samples"] for stream in report["streams"])
    steps = f"step {run['first_step']:,} to {run['stop_step']:,}, {counted(run['epochs'], 'epoch')}"
    if begins["epoch"] or begins["sample_in_epoch"]:
        steps += f", from epoch {begins['epoch']}, {run['unit']} {begins['sample_in_epoch']:,}"
    reads = counted(samples, "document" if report["packs"] else "sample")
    facts = [("run", steps), ("reads", reads if None in tokens else f"{reads}, {counted(sum(tokens), 'token')}")]
    if cache["bytes"]:
        again = f", each shard {cache['refetched']:.2f} times" if cache["refetched"] > 1.005 else ""
        facts += [
            ("fetches", f"{format_bytes(cache['bytes'])} in all, {format_bytes(cache['bytes_of_node'])} a node{again}"),
            (
                "first batch",
                f"{first['seconds']:.1f} s at {_speed(first)}: {first['index_seconds']:.1f} s indexes "
                f"({format_bytes(first['index_bytes'])}), {first['order_seconds']:.1f} s order, "
                f"{first['shard_seconds']:.1f} s shards ({format_bytes(first['shard_bytes'])})",
            ),
        ]
    else:
        facts.append(("fetches", "nothing: the data is read in place"))
    if report["mixing"] is not None:
        above = ", and above it more even than that" if round(report["mixing"], 3) > 1 else ""
        facts.append(("mixing", f"{report['mixing']:.3f}, where 1 is as drawn at random{above}"))
    if report["packs"] is not None:
        facts.append(("fill", f"{report['packs']['fill']:.2%}"))
    parts = ", ".join(f"{format_bytes(size)} {part}" for part, size in memory.items() if size and part != "total")
    return [*facts, ("memory", f"{format_bytes(memory['total'])} a node: {parts}")]


def _speed(first: Mapping[str, Any]) -> str:
    return f"{first['link_bytes_per_second'] * 8 / 1e9:.3g} Gbit/s"


def _tables(report: Mapping[str, Any]) -> tuple[Table, Table | None, Table | None]:
    """Return the tables of streams, phases and caches; None without a schedule, and if nothing is fetched."""

    def table(rows: Sequence[Mapping[str, str]]) -> Table:
        return list(rows[0]), [list(row.values()) for row in rows]

    items = "samples" if report["packs"] is None else "documents"

    def counts(stream: Mapping[str, Any], has_tokens: bool) -> dict[str, str]:
        share = f"of {items}" if has_tokens else "share"
        cells = {items: f"{stream['samples']:,}", share: f"{stream['sample_share']:.1%}"}
        tokens = "?" if stream["tokens"] is None else f"{stream['tokens']:,}"
        of_tokens = "?" if stream["token_share"] is None else f"{stream['token_share']:.1%}"
        return cells | {"tokens": tokens, "of tokens": of_tokens} if has_tokens else cells

    streams, rows, fetches = report["streams"], [], any(stream["bytes"] for stream in report["streams"])
    has_tokens = any(stream["tokens"] for stream in streams)
    has_weights = not report["schedule"] and any(stream["weight"] is not None for stream in streams)
    for stream in streams:
        repeat, is_exact = stream["first_repeat"], stream["is_exact"]
        rows.append(
            {
                "stream": printable_name(stream["stream"]),
                "available": f"{stream['selected']:,}",
                **({"weight": f"{stream.get('weight') or 0:.1%}"} if has_weights else {}),
                **counts(stream, has_tokens),
                "passes": f"{stream['passes']:.3f}",
                "most reads": f"{'' if is_exact else '≥ '}{stream['repeats']}",
                "first repeat": f"step {repeat['step']:,}" if repeat is not None else "-" if is_exact else "?",
                **({"fetched": format_bytes(stream["bytes"])} if fetches else {}),
            }
        )
    in_phases = [(phase["phase"], stream) for phase in report["schedule"] for stream in phase["streams"]]
    has_tokens = any(stream["tokens"] for _, stream in in_phases)
    phases = [
        {
            "phase": printable_name(phase),
            "stream": printable_name(stream["stream"]),
            "weight": share_in_words(*stream["weight"]),
            **counts(stream, has_tokens),
        }
        for phase, stream in in_phases
    ]
    caches = []
    for cache in report["caches"]:
        limit = "none" if cache["limit"] is None else format_bytes(cache["limit"])
        about = "" if cache["simulated"] == 1 else "≈ " if cache["was_full"] else "≥ "
        caches.append(
            {
                "cache_limit": f"{limit}{' (configured)' if cache['is_configured'] else ''}",
                "fetched in all": f"{about}{format_bytes(cache['bytes'])}",
                "by a node": f"{about}{format_bytes(cache['bytes_of_node'])}",
                "× needed": f"{about}{cache['refetched']:.2f}",
                "peak of a node": format_bytes(cache["peak"]),
                "exceeded": counted(cache["exceeded"], "time") if cache["exceeded"] else "-",
            }
        )
    return table(rows), table(phases) if phases else None, table(caches) if _fetches_any(report) else None


def _fetches_any(report: Mapping[str, Any]) -> bool:
    return any(cache["bytes"] for cache in report["caches"])


# The page


def check_page(path: Path) -> None:
    """Check that the page can be written, before the minutes that planning may take.

    Raises:
        OSError: It cannot be written; an earlier file is unchanged.
        MissingDependencyError: A package that renders pages is not installed.
    """
    import_jinja()
    if path.is_dir():
        raise IsADirectoryError(EISDIR, "a directory is there", str(path))
    partial = partial_path(path)
    partial.touch()
    partial.unlink()


def write_page(path: Path, report: Mapping[str, Any], planned_from: str) -> None:
    """Write the page.

    Args:
        path: The file.
        report: The report, as ``--json`` prints it.
        planned_from: What the run was planned from, like ``"run.yaml"``, for later readers of the page.

    Raises:
        OSError: It cannot be written; an earlier file is unchanged.
    """
    source, day = printable_name(planned_from), strftime("%Y-%m-%d %H:%M UTC", gmtime())
    # On a page as on a terminal, some characters in names would reverse a line.
    over = report["over_time"]
    report = {
        **report,
        "streams": [{**stream, "stream": printable_name(stream["stream"])} for stream in report["streams"]],
        "over_time": {
            **over,
            **{of: {printable_name(name): counts for name, counts in over[of].items()} for of in ("samples", "tokens")},
            "schedule": [{**phase, "phase": printable_name(phase["phase"])} for phase in over["schedule"]],
        },
    }
    streams, phases, caches = _tables(report)
    text = fill(
        "plan.html",
        {
            "title": f"Plan of {source}",
            "tool": "plan",
            "subject": f"{source}, planned on {day}: {machines_of(report['run'])}",
            "figures": _figures(report),
            "facts": facts_of(report),
            "failed": report["failed"],
            "notes": report["notes"],
            "streams": streams,
            "phases": phases,
            "caches": caches,
            "charts": list(_charts(report)),
            "made_by": f"Generated by lightning-streaming plan on {day}, from {source} and the indexes of its data.",
        },
        single_file=True,
    )
    with appears_whole(path) as staged:
        staged.write_text(text, encoding="utf-8")


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of the page: names, texts and explanations."""
    run, cache, streams = report["run"], report["caches"][0], report["streams"]
    tokens = [stream["tokens"] for stream in streams]
    figures = [("samples", short_number(sum(stream["samples"] for stream in streams)), "read in the run by all ranks")]
    figures += [] if None in tokens else [("tokens", short_number(sum(tokens)), "in these samples")]
    figures.append(("steps", short_number(run["steps"]), "optimizer steps until the run ends"))
    most = max(streams, key=lambda stream: stream["passes"])
    figures.append((f"passes over {most['stream']}", f"{most['passes']:.3g}", "the stream that is repeated most"))
    if cache["bytes"]:
        figures.append(("downloaded", format_bytes(cache["bytes"]), "from the store by all nodes"))
        figures.append(("largest cache", format_bytes(cache["peak"]), "disk space that each node needs"))
        figures.append(("first batch", f"{report['first_batch']['seconds']:.1f} s", "wait before the training starts"))
    if report["packs"] is not None:
        figures.append(("fill of packs", f"{report['packs']['fill']:.1%}", "tokens; the rest is padding"))
    if report["mixing"] is not None:
        figures.append(("mixing", f"{report['mixing']:.2f}", "of batches; 1 is as well as a random draw"))
    return figures


def _charts(report: Mapping[str, Any]) -> Iterator[Markup]:
    """Yield the charts of a plan."""
    over, caches = report["over_time"], report["caches"]
    steps, marks = over["steps"], [Mark(at=phase["step"], name=phase["phase"]) for phase in over["schedule"]]
    marks = [mark for mark in marks if mark.at > steps[0]]
    if len(steps) > 1:
        yield _mixture_chart(report, marks)
        yield _passes_chart(report, marks)
    if len(steps) > 1 and _fetches_any(report):
        for title, words, total, label, over_time in (
            ("Bytes fetched, by cache_limit", "In the end", "bytes", "fetched by all nodes", "fetched"),
            ("Bytes in a node's cache", "At most", "peak", "in a node's cache", "used"),
        ):
            series = [Curve(name=_limit(cache), x=steps, y=cache[over_time]) for cache in over["caches"]]
            totals = "; ".join(f"{_limit(cache)}: {format_bytes(cache[total])}" for cache in caches)
            axis = Axis(label=label, show=format_bytes, base=1024)
            yield lines(title, f"{words}, with {totals}.", _STEP, axis, series, marks)
    if _fetches_any(report):
        of_caches = [
            Bar(
                name=f"{_limit(cache)}{', as configured' if cache['is_configured'] else ''}",
                value=cache["bytes"],
                label=f"{'' if cache['was_full'] else '≥ '}{format_bytes(cache['bytes'])}, × {cache['refetched']:.2f}",
                colour=number,
            )
            for number, cache in enumerate(caches)
        ]
        yield bars("Fetched in all, and × what is needed", _words(of_caches), Axis(label="bytes"), of_caches)
        first = report["first_batch"]
        waits = (
            (f"indexes{_size(first['index_bytes'])}", first["index_seconds"]),
            ("computing the order", first["order_seconds"]),
            (f"shards{_size(first['shard_bytes'])}", first["shard_seconds"]),
        )
        of_waits = [
            Bar(name=name, value=seconds, label=f"{seconds:.2f} s", colour=number)
            for number, (name, seconds) in enumerate(waits)
        ]
        title = f"Before the first batch: {first['seconds']:.2f} s at {_speed(first)}"
        yield bars(title, _words(of_waits), Axis(label="s"), of_waits)
    if report["packs"] is not None:
        counts, fill_of = report["packs"]["histogram"], report["packs"]["fill"]
        edges = [number / len(counts) for number in range(len(counts) + 1)]
        axis, packs = Axis(label="how full", show=_percent, base=10, high=1), Axis(label="packs")
        yield histogram("How full packs are", f"Packs are {fill_of:.2%} full on average.", axis, packs, edges, counts)


def _mixture_chart(report: Mapping[str, Any], marks: Sequence[Mark]) -> Markup:
    """Return a chart of the share of each stream over the steps."""
    over = report["over_time"]
    ticks = sorted({round(at * (len(over["steps"]) - 1) / _MIXTURES) for at in range(_MIXTURES + 1)})
    unit = report["run"]["weights_in"]
    of_unit = over["tokens" if unit == "tokens" else "samples"]
    samples = {name: [counts[tick] for tick in ticks] for name, counts in of_unit.items()}
    if len(samples) > _MOST_SERIES:
        largest = sorted(samples, key=lambda name: -samples[name][-1])[: _MOST_SERIES - 1]
        others = [sum(at) for at in zip(*(of for name, of in samples.items() if name not in largest), strict=True)]
        samples = {**{name: of for name, of in samples.items() if name in largest}, _OTHERS: others}
    counts = {name: [after - before for before, after in pairwise(of)] for name, of in samples.items()}
    sums = [max(1, sum(at)) for at in zip(*counts.values(), strict=True)]
    # Each interval has one share: two points of equal height.
    xs = [over["steps"][tick] for pair in pairwise(ticks) for tick in pair]
    series = [
        Curve(name=name, x=xs, y=[part for count, total in zip(of, sums, strict=True) for part in [count / total] * 2])
        for name, of in counts.items()
    ]
    words = "; ".join(f"{stream['stream']} {stream['share']:.1%}" for stream in report["streams"][:_MOST_SERIES])
    share = Axis(label=f"share of {unit}", show=_percent, base=10, high=1)
    return areas("The mixture, step by step", f"Over the whole run: {words}.", _STEP, share, series, marks)


def _passes_chart(report: Mapping[str, Any], marks: Sequence[Mark]) -> Markup:
    """Return a chart of the passes over each stream until each step."""
    over, streams = report["over_time"], report["streams"]
    most = sorted(streams, key=lambda stream: -stream["passes"])[:_MOST_SERIES]
    series = []
    for stream in streams:
        if stream in most:
            size, before = max(1, stream["selected"]), stream["samples_before"]
            passes = [(before + count) / size for count in over["samples"][stream["stream"]]]
            series.append(Curve(name=stream["stream"], x=over["steps"], y=passes))
    words = "; ".join(f"{stream['stream']} {stream['passes']:.3g} times" for stream in most)
    once = [Mark(at=1, name="all read once", is_level=True)] if any(stream["passes"] > 1 for stream in most) else []
    axis, title = Axis(label="passes"), "How often each stream has been read"
    return lines(title, f"In the end: {words}.", _STEP, axis, series, [*marks, *once])


def _words(of: Sequence[Bar]) -> str:
    return "; ".join(f"{bar.name}: {bar.label}" for bar in of)


def _size(size: int) -> str:
    return f", {format_bytes(size)}" if size else ""


def _limit(cache: Mapping[str, Any]) -> str:
    return "no limit" if cache["limit"] is None else format_bytes(cache["limit"])


_percent = "{:.0%}".format
