"""What was planned as tables for people, on a terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_streaming.tools.console import counted, print_table, printable_name
from lightning_streaming.units import format_bytes


def print_report(report: Mapping[str, Any]) -> None:
    """Print tables."""
    print_table(f"plan: {machines_told(report['run'])}", (), facts_told(report))
    heads, rows = streams_told(report)
    print_table("streams", heads, rows, right=heads[1:], whole=heads[1:])
    if report["phases"]:
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
    has_tokens = any(one["tokens"] for phase in report["phases"] for one in phase["streams"])
    heads = ["phase", "stream", "samples", "share", *(["tokens"] if has_tokens else [])]
    rows = []
    for phase in report["phases"]:
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
