"""A plan for people: tables on a terminal, and one self-contained HTML page with charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from lightning_streaming.units import format_bytes


def print_report(report: Mapping[str, Any]) -> None:
    """Print tables."""
    print_table(f"plan: {machines_told(report['run'])}", (), facts_told(report))
    heads, rows = streams_told(report)
    print_table("streams", heads, rows, right=heads[1:], whole=heads[1:])
    if report["schedule"]:
        heads, rows = phases_told(report)
        print_table("phases", heads, rows, right=heads[2:], whole=heads[2:])
    if fetches_any(report):
        heads, rows = caches_told(report)
        print_table("caches, empty at first", heads, rows, right=heads[1:], whole=heads)


def fetches_any(report: Mapping[str, Any]) -> bool:
    """Whether anything is fetched, with any limit; if not, caches hold indexes at most."""
    return any(one["bytes"] for one in report["caches"])


def machines_told(run: Mapping[str, Any]) -> str:
    """Who reads, in a line."""
    nodes, ranks = counted(run["nodes"], "node"), counted(run["ranks_per_node"], "rank")
    machines = f"{nodes} of {ranks}" if run["nodes"] > 1 else ranks
    batch = f"batches of {counted(run['batch_size'], run['unit'])}"
    return f"{machines}, {counted(run['workers'], 'worker')} each, {batch}"


def facts_told(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What there is to know at a glance: names and values."""
    run, first, streams = report["run"], report["first_batch"], report["streams"]
    begins, samples = run["begins"], sum(one["samples"] for one in streams)
    tokens = [one["tokens"] for one in streams]
    reads = f"{counted(samples, 'document' if report['packs'] else 'sample')}"
    reads += "" if None in tokens else f", {counted(sum(tokens), 'token')}"
    where = f"step {run['first_step']:,} to {run['stop_step']:,}, {counted(run['epochs'], 'epoch')}"
    if begins["epoch"] or begins["sample_in_epoch"]:
        where += f", from epoch {begins['epoch']}, {run['unit']} {begins['sample_in_epoch']:,}"
    facts = [("run", where), ("reads", reads)]
    cache = report["caches"][0]
    if cache["bytes"]:
        again = f", each shard {cache['refetched']:.2f} times" if cache["refetched"] > 1.005 else ""
        facts.append(
            ("fetches", f"{format_bytes(cache['bytes'])} in all, {format_bytes(cache['bytes_of_node'])} a node{again}")
        )
        speed = f"{first['link_bytes_per_second'] * 8 / 1e9:.3g} Gbit/s"
        facts.append(
            (
                "first batch",
                f"{first['seconds']:.1f} s at {speed}: {first['index_seconds']:.1f} s indexes "
                f"({format_bytes(first['index_bytes'])}), {first['order_seconds']:.1f} s order, "
                f"{first['shard_seconds']:.1f} s shards ({format_bytes(first['shard_bytes'])})",
            )
        )
    else:
        facts.append(("fetches", "nothing: what is read lies here"))
    if report["mixing"] is not None:
        above = ", and above it more even than that" if round(report["mixing"], 3) > 1 else ""
        facts.append(("mixing", f"{report['mixing']:.3f}, where 1 is as drawn at random{above}"))
    if report["packs"] is not None:
        facts.append(("fill", f"{report['packs']['fill']:.2%}"))
    memory = report["memory"]
    parts = [
        f"{format_bytes(memory[name])} {name}" for name in ("order", "lengths", "index", "batches") if memory[name]
    ]
    facts.append(("memory", f"{format_bytes(memory['total'])} a node: {', '.join(parts)}"))
    return facts


def streams_told(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of streams."""
    streams = report["streams"]
    has_tokens, fetches = any(one["tokens"] for one in streams), any(one["bytes"] for one in streams)
    heads = ["stream", "there", "samples", "share", *(["tokens"] if has_tokens else []), "passes", "most reads"]
    heads += ["first repeat", *(["fetched"] if fetches else [])]
    rows = []
    for one in streams:
        repeat, told = one["first_repeat"], "" if one["is_exact"] else "≥ "
        row = [printable_name(one["stream"]), f"{one['selected']:,}", f"{one['samples']:,}", f"{one['share']:.1%}"]
        row += [_tokens(one)] if has_tokens else []
        row += [f"{one['passes']:.3f}", f"{told}{one['repeats']}"]
        row += ["-" if repeat is None and one["is_exact"] else "?" if repeat is None else f"step {repeat['step']:,}"]
        row += [format_bytes(one["bytes"])] if fetches else []
        rows.append(row)
    return heads, rows


def phases_told(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of phases."""
    has_tokens = any(one["tokens"] for phase in report["schedule"] for one in phase["streams"])
    heads = ["phase", "stream", "samples", "share", *(["tokens"] if has_tokens else [])]
    rows = []
    for phase in report["schedule"]:
        for place, one in enumerate(phase["streams"]):
            names = [printable_name(phase["phase"]) if not place else "", printable_name(one["stream"])]
            row = [*names, f"{one['samples']:,}", f"{one['share']:.1%}"]
            rows.append(row + ([_tokens(one)] if has_tokens else []))
    return heads, rows


def _tokens(one: Mapping[str, Any]) -> str:
    return "?" if one["tokens"] is None else f"{one['tokens']:,}"


def caches_told(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of caches."""
    heads = ["cache_limit", "fetched in all", "by a node", "× needed", "peak of a node", "exceeded"]
    rows = []
    for one in report["caches"]:
        limit = "none" if one["limit"] is None else format_bytes(one["limit"])
        told = "" if one["simulated"] == 1 else "≈ " if one["was_full"] else "≥ "
        rows.append(
            [
                f"{limit}{' (configured)' if one['is_configured'] else ''}",
                f"{told}{format_bytes(one['bytes'])}",
                f"{told}{format_bytes(one['bytes_of_node'])}",
                f"{told}{one['refetched']:.2f}",
                format_bytes(one["peak"]),
                counted(one["exceeded"], "time") if one["exceeded"] else "-",
            ]
        )
    return heads, rows


_MOST_SERIES = 12
"""Streams that a chart tells apart; of more the largest, and the others together."""
_OTHERS = "all others"
_MIXTURES = 40
"""Stretches of which the mixture is shown: in shorter ones it would be that of chance."""
_STEP = Axis(label="step", low=None)


def check_page(path: Path) -> None:
    """Find out whether the page can be written, before the minutes that it takes to know what is on it.

    Raises:
        OSError: It cannot; what is there stays as it is.
        MissingDependencyError: What makes pages is not installed.
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
        report: What ``--json`` prints.
        planned_from: What the run was planned from, for whoever finds the page later: ``"run.yaml"``.

    Raises:
        OSError: It cannot be written; what was there before is as it was.
    """
    with appears_whole(path) as staged:
        staged.write_text(page_of(report, planned_from), encoding="utf-8")


def page_of(report: Mapping[str, Any], planned_from: str) -> str:
    """The page, as HTML."""
    planned_from, day = printable_name(planned_from), strftime("%Y-%m-%d %H:%M UTC", gmtime())
    report = _with_printable_names(report)
    return fill(
        "plan.html",
        {
            "title": f"Plan of {planned_from}",
            "tool": "plan",
            "subject": f"{planned_from}, planned on {day}: {machines_told(report['run'])}",
            "figures": _figures(report),
            "facts": facts_told(report),
            "failed": report["failed"],
            "notes": report["notes"],
            "streams": streams_told(report),
            "phases": phases_told(report) if report["schedule"] else None,
            "caches": caches_told(report) if fetches_any(report) else None,
            "charts": list(_charts(report)),
            "made_by": f"Made by lightning-streaming plan on {day}, from {planned_from} and the indexes of its data.",
        },
        single_file=True,
    )


def _with_printable_names(report: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with names as a terminal shows them: what turns a line around would do so on a page, too."""
    over = report["over_time"]
    return {
        **report,
        "streams": [{**one, "stream": printable_name(one["stream"])} for one in report["streams"]],
        "over_time": {
            **over,
            "samples": {printable_name(name): counts for name, counts in over["samples"].items()},
            "schedule": [{**one, "phase": printable_name(one["phase"])} for one in over["schedule"]],
        },
    }


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    run, cache, streams = report["run"], report["caches"][0], report["streams"]
    tokens = [one["tokens"] for one in streams]
    figures = [("samples", short_number(sum(one["samples"] for one in streams)))]
    figures += [] if None in tokens else [("tokens", short_number(sum(tokens)))]
    figures.append(("steps", short_number(run["steps"])))
    most = max(streams, key=lambda one: one["passes"])
    figures.append((f"passes over {most['stream']}", f"{most['passes']:.3g}"))
    if cache["bytes"]:
        figures.append(("fetched", format_bytes(cache["bytes"])))
        figures.append(("cache at most", format_bytes(cache["peak"])))
        figures.append(("first batch", f"{report['first_batch']['seconds']:.1f} s"))
    if report["packs"] is not None:
        figures.append(("packs are full", f"{report['packs']['fill']:.1%}"))
    if report["mixing"] is not None:
        figures.append(("mixing", f"{report['mixing']:.2f}"))
    return figures


def _charts(report: Mapping[str, Any]) -> list[Markup]:
    over, charts = report["over_time"], list[Markup]()
    begins = over["steps"][0]
    marks = [Mark(at=one["step"], name=one["phase"]) for one in over["schedule"] if one["step"] > begins]
    if len(over["steps"]) > 1:
        charts += [_shares(report, marks), _passes(report, marks)]
    if fetches_any(report):
        if len(over["steps"]) > 1:
            charts += [_fetched(report, marks), _used(report, marks)]
        charts += [_peaks(report), _waits(report)]
    if report["packs"] is not None:
        edges = [place / len(report["packs"]["histogram"]) for place in range(len(report["packs"]["histogram"]) + 1)]
        full = f"Packs are {report['packs']['fill']:.2%} full on average."
        axis = Axis(label="how full", show=_percent, base=10, high=1)
        packs = Axis(label="packs")
        charts.append(histogram("How full packs are", full, axis, packs, edges, report["packs"]["histogram"]))
    return charts


def _shares(report: Mapping[str, Any], marks: Sequence[Mark]) -> Markup:
    """What part of the samples is of each stream, from step to step."""
    over = report["over_time"]
    kept = sorted({round(at * (len(over["steps"]) - 1) / _MIXTURES) for at in range(_MIXTURES + 1)})
    steps = [over["steps"][place] for place in kept]
    samples = {name: [of[place] for place in kept] for name, of in over["samples"].items()}
    counts = {name: [after - before for before, after in _pairs(told)] for name, told in _largest(samples)}
    sums = [max(1, sum(at)) for at in zip(*counts.values(), strict=True)]
    # Each stretch from one point to the next has one share: two points of equal height.
    xs = [step for pair in _pairs(steps) for step in pair]
    series = [
        Curve(name=name, x=xs, y=[part for one, total in zip(of, sums, strict=True) for part in [one / total] * 2])
        for name, of in counts.items()
    ]
    told = "; ".join(f"{one['stream']} {one['share']:.1%}" for one in report["streams"][:_MOST_SERIES])
    share = Axis(label="share of samples", show=_percent, base=10, high=1)
    return areas("The mixture, step by step", f"Over the whole run: {told}.", _STEP, share, series, marks)


def _passes(report: Mapping[str, Any], marks: Sequence[Mark]) -> Markup:
    over, by_name = report["over_time"], {one["stream"]: one for one in report["streams"]}
    most = sorted(by_name.values(), key=lambda one: -one["passes"])[:_MOST_SERIES]
    series = []
    for one in [one for one in report["streams"] if one in most]:
        size, before = max(1, one["selected"]), one["samples_before"]
        passes = [(before + count) / size for count in over["samples"][one["stream"]]]
        series.append(Curve(name=one["stream"], x=over["steps"], y=passes))
    told = "; ".join(f"{one['stream']} {one['passes']:.3g} times" for one in most)
    once = [Mark(at=1, name="all read once", is_level=True)] if any(one["passes"] > 1 for one in most) else []
    axis = Axis(label="passes")
    return lines("How often each stream has been read", f"In the end: {told}.", _STEP, axis, series, [*marks, *once])


def _fetched(report: Mapping[str, Any], marks: Sequence[Mark]) -> Markup:
    over = report["over_time"]
    series = [Curve(name=_limit(one), x=over["steps"], y=one["fetched"]) for one in over["caches"]]
    told = "; ".join(f"{_limit(one)}: {format_bytes(one['bytes'])}" for one in report["caches"])
    axis = Axis(label="fetched by all nodes", show=format_bytes, base=1024)
    return lines("Bytes fetched, by cache_limit", f"In the end, with {told}.", _STEP, axis, series, marks)


def _used(report: Mapping[str, Any], marks: Sequence[Mark]) -> Markup:
    over = report["over_time"]
    series = [Curve(name=_limit(one), x=over["steps"], y=one["used"]) for one in over["caches"]]
    told = "; ".join(f"{_limit(one)}: {format_bytes(one['peak'])}" for one in report["caches"])
    axis = Axis(label="in a node's cache", show=format_bytes, base=1024)
    return lines("What a node's cache holds", f"At most, with {told}.", _STEP, axis, series, marks)


def _peaks(report: Mapping[str, Any]) -> Markup:
    of = [
        Bar(
            name=f"{_limit(one)}{', as configured' if one['is_configured'] else ''}",
            value=one["bytes"],
            label=f"{'' if one['was_full'] else '≥ '}{format_bytes(one['bytes'])}, × {one['refetched']:.2f}",
            colour=place,
        )
        for place, one in enumerate(report["caches"])
    ]
    told = "; ".join(f"{bar.name}: {bar.label}" for bar in of)
    return bars("Fetched in all, and × what is needed", told, Axis(label="bytes"), of)


def _waits(report: Mapping[str, Any]) -> Markup:
    first = report["first_batch"]
    parts = [
        ("indexes", first["index_seconds"], first["index_bytes"]),
        ("making the order", first["order_seconds"], 0),
        ("shards", first["shard_seconds"], first["shard_bytes"]),
    ]
    of = [
        Bar(
            name=f"{name}{f', {format_bytes(size)}' if size else ''}",
            value=seconds,
            label=f"{seconds:.2f} s",
            colour=place,
        )
        for place, (name, seconds, size) in enumerate(parts)
    ]
    told = f"{first['seconds']:.2f} s at {first['link_bytes_per_second'] * 8 / 1e9:.3g} Gbit/s"
    return bars(
        f"Before the first batch: {told}", "; ".join(f"{bar.name}: {bar.label}" for bar in of), Axis(label="s"), of
    )


def _largest(samples: Mapping[str, Sequence[int]]) -> list[tuple[str, Sequence[int]]]:
    """The streams of which most is read, in their order; and what is read of the others together."""
    if len(samples) <= _MOST_SERIES:
        return list(samples.items())
    kept = sorted(samples, key=lambda name: -samples[name][-1])[: _MOST_SERIES - 1]
    others = [of for name, of in samples.items() if name not in kept]
    together = [sum(at) for at in zip(*others, strict=True)]
    return [*((name, of) for name, of in samples.items() if name in kept), (_OTHERS, together)]


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(numbers))


def _limit(one: Mapping[str, Any]) -> str:
    return "no limit" if one["limit"] is None else format_bytes(one["limit"])


def _percent(part: float) -> str:
    return f"{part:.0%}"
