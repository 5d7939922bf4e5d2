"""What was planned as plain values, for programs and conditions; and as tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.loading.passes import passes_of
from lightning_streaming.order.packing import BudgetSettings
from lightning_streaming.tools.console import counted, print_table, printable_name
from lightning_streaming.tools.planning.fetches import Fetches
from lightning_streaming.units import format_bytes

if TYPE_CHECKING:
    from lightning_streaming.tools.planning.plan_run import Planned

_MOST_TICKS = 400
"""Points of what is told over time."""


def report_of(planned: Planned) -> dict[str, Any]:
    """All that was worked out, as plain values."""
    streams = _streams(planned)
    caches = [_cache(planned, place) for place in range(len(planned.fetches[0]))]
    return {
        "run": _run(planned),
        "streams": streams,
        "phases": _phases(planned),
        "packs": _packs(planned),
        "caches": caches,
        "first_batch": _first_batch(planned),
        "mixing": _mixing(planned),
        "memory": {
            "order": planned.memory.order,
            "lengths": planned.memory.lengths,
            "index": planned.memory.index,
            "batches": planned.memory.batches,
            "total": planned.memory.total,
        },
        "over_time": _over_time(planned),
        "notes": [*planned.notes, *_notes(planned, caches)],
    }


def _run(planned: Planned) -> dict[str, Any]:
    run, reads = planned.run, planned.reads
    loader, machines = run.loader, run.order.epoch(run.begins).partition.geometry
    first, last = reads.epochs[0], reads.epochs[-1]
    each = int(last.steps[-1] - last.steps[0])
    return {
        "nodes": run.num_nodes,
        "ranks_per_node": run.ranks_per_node,
        "replication": run.replication,
        "workers": loader.num_workers,
        "batch_size": machines.batch_size,
        "unit": "sample" if run.packs is None else "group" if isinstance(run.packs, BudgetSettings) else "pack",
        "global_batch": machines.global_batch_size,
        "begins": {**run.begins._asdict(), "step": run.steps.first_step},
        "epochs": len(reads.epochs) + reads.epochs_repeated,
        "first_step": int(first.steps[0]),
        "steps": int(last.steps[-1]) + reads.epochs_repeated * each,
        "nodes_simulated": list(planned.nodes),
        "looked_at": min(one.part for one in reads.epochs) if not reads.epochs_repeated else 0.0,
    }


def _times(planned: Planned, of_epochs: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The sum over all epochs, those included that are taken to be like the last one."""
    total = np.sum(of_epochs, axis=0, dtype=np.int64) if len(of_epochs) else np.zeros(0, np.int64)
    repeated: NDArray[np.int64] = total + planned.reads.epochs_repeated * of_epochs[-1]
    return repeated


def _streams(planned: Planned) -> list[dict[str, Any]]:
    reads, dataset = planned.reads, planned.run.loader.dataset
    catalog = passes_of(dataset).catalog
    samples = _times(planned, [one.samples.sum(axis=0) for one in reads.epochs])
    tokens = _times(planned, [one.tokens.sum(axis=0) for one in reads.epochs])
    fetched = np.mean([_fetched(planned, of_node[0]) for of_node in planned.fetches], axis=0) * planned.run.num_nodes
    found = []
    for place, (name, stream) in enumerate(dataset.streams.items()):
        size, before = catalog.samples_per_stream[place], int(reads.samples_before[place])
        drawn = before + int(samples[place])
        repeat = reads.first_repeats.get(place)
        most = reads.most_reads.get(place)
        is_known = reads.is_tallied and not reads.epochs_repeated
        found.append(
            {
                "stream": name,
                "stored": stream.num_stored,
                "selected": stream.num_selected,
                "samples": int(samples[place]),
                "samples_before": before,
                "share": int(samples[place]) / max(1, int(samples.sum())),
                "tokens": int(tokens[place]) or None,
                "passes": drawn / size,
                "repeats": most if most is not None and is_known else math.ceil(drawn / size),
                "first_repeat": None if repeat is None else {"epoch": repeat[0], "step": repeat[1]},
                "bytes": int(fetched[place]),
                "is_exact": is_known,
            }
        )
    return found


def _fetched(planned: Planned, found: Fetches) -> NDArray[np.int64]:
    """What a node fetches of each stream; of shape (streams,)."""
    return _times(planned, [epoch.sum(axis=0) for epoch in found.epochs])


def _phases(planned: Planned) -> list[dict[str, Any]]:
    order, reads = planned.run.order.order, planned.reads
    if order.plan is None:
        return []
    names = passes_of(planned.run.loader.dataset).catalog.stream_names
    samples = _times(planned, [one.phase_samples for one in reads.epochs])
    tokens = _times(planned, [one.phase_tokens for one in reads.epochs])
    return [
        {
            "phase": phase.name,
            "streams": [
                {
                    "stream": name,
                    "samples": int(samples[number, place]),
                    "share": int(samples[number, place]) / max(1, int(samples[number].sum())),
                    "tokens": int(tokens[number, place]) or None,
                }
                for place, name in enumerate(names)
                if samples[number, place]
            ],
        }
        for number, phase in enumerate(order.plan.phases)
    ]


def _packs(planned: Planned) -> dict[str, Any] | None:
    if planned.run.packs is None:
        return None
    epochs = planned.reads.epochs
    fill = np.sum([one.fill for one in epochs], axis=0)
    room = sum(one.room for one in epochs)
    return {
        "fill": sum(one.packed for one in epochs) / max(1, room),
        "histogram": fill.tolist(),
    }


def _cache(planned: Planned, place: int) -> dict[str, Any]:
    of_nodes = [of_node[place] for of_node in planned.fetches]
    nodes = planned.run.num_nodes
    fetched = float(np.mean([_fetched(planned, one).sum() for one in of_nodes]))
    needed = _needed(planned)
    return {
        "limit": of_nodes[0].limit,
        "is_configured": place == 0,
        "bytes": round(fetched * nodes),
        "bytes_of_node": round(fetched),
        "refetched": fetched / needed if needed else 1.0,
        "downloads_of_node": round(float(np.mean([one.downloads for one in of_nodes]))),
        "peak": max(one.peak for one in of_nodes),
        "exceeded": sum(one.exceeded for one in of_nodes),
        "simulated": min(one.part for one in of_nodes),
        "was_full": all(one.was_full for one in of_nodes),
    }


def _needed(planned: Planned) -> float:
    """Bytes of all shards that a node needs, each once."""
    least = [min(_fetched(planned, one).sum() for one in of_node) for of_node in planned.fetches]
    unlimited = [
        next((_fetched(planned, one).sum() for one in of_node if one.limit is None), least[place])
        for place, of_node in enumerate(planned.fetches)
    ]
    return float(np.mean(unlimited))


def _first_batch(planned: Planned) -> dict[str, Any]:
    first, link = planned.first, planned.link
    return {
        "seconds": first.seconds,
        "index_seconds": first.index,
        "order_seconds": first.order,
        "shard_seconds": first.shards,
        "index_bytes": first.index_bytes,
        "shard_bytes": first.shard_bytes,
        "ahead_bytes": first.ahead_bytes,
        "link_bytes_per_second": link.bytes_per_second,
        "latency": link.latency,
    }


def _mixing(planned: Planned) -> float | None:
    pairs = [pair for one in planned.reads.epochs for pair in one.mixing]
    uniform = sum(pair[1] for pair in pairs)
    if not pairs:
        return None
    return sum(pair[0] for pair in pairs) / uniform if uniform else 1.0


def _over_time(planned: Planned) -> dict[str, Any]:
    """What the charts show: at each step the samples of each stream until then, and what was fetched."""
    epochs, names = planned.reads.epochs, passes_of(planned.run.loader.dataset).catalog.stream_names
    steps = np.concatenate([epochs[0].steps[:1], *(one.steps[1:] for one in epochs)])
    samples = np.concatenate([one.samples for one in epochs])
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_TICKS)).astype(int))
    so_far = np.concatenate([np.zeros((1, len(names)), np.int64), np.cumsum(samples, axis=0)])
    caches = []
    for place, found in enumerate(planned.fetches[0]):
        of_nodes = [np.concatenate(of_node[place].epochs).sum(axis=1) for of_node in planned.fetches]
        fetched = np.concatenate([[0], np.cumsum(np.mean(of_nodes, axis=0))]) * planned.run.num_nodes
        used = np.max([np.concatenate(of_node[place].used) for of_node in planned.fetches], axis=0)
        caches.append(
            {
                "limit": found.limit,
                "fetched": np.rint(fetched[kept]).astype(np.int64).tolist(),
                "used": np.concatenate([[planned.fixed], used])[kept].tolist(),
            }
        )
    return {
        "steps": steps[kept].tolist(),
        "samples": {name: so_far[kept, place].tolist() for place, name in enumerate(names)},
        "phases": _phase_steps(planned),
        "caches": caches,
    }


def _phase_steps(planned: Planned) -> list[dict[str, Any]]:
    """At which step each phase of the first epoch begins, where that is read."""
    run, order = planned.run, planned.run.order.order
    if order.plan is None or run.begins.epoch:
        return []
    read = run.order.epoch(run.begins)
    stops = order.phase_stops(read.composed, 0)
    each, accumulate = read.partition.geometry.global_batch_size, run.steps.of_epoch(0).accumulate
    begins = [0, *stops[:-1].tolist()]
    return [
        {"phase": phase.name, "step": run.steps.first_step + (begin - run.begins.sample_in_epoch) // each // accumulate}
        for phase, begin in zip(order.plan.phases, begins, strict=True)
        if begin >= run.begins.sample_in_epoch
    ]


def _notes(planned: Planned, caches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where numbers are not exact, and what stands out."""
    reads, notes = planned.reads, list[str]()
    part = min(one.part for one in reads.epochs)
    if part < 1:
        notes.append(f"{part:.1%} of the samples were looked at; counts are about so, repeats at least so")
    elif not reads.is_tallied:
        notes.append("there are too many samples to count each; repeats are at least so")
    if reads.epochs_repeated:
        looked, epochs = len(reads.epochs), len(reads.epochs) + reads.epochs_repeated
        notes.append(f"{looked} of {epochs} epochs were looked at; those after them are taken to be like the last one")
    for one in caches:
        if one["simulated"] < 1:
            limit = format_bytes(one["limit"])
            goes_on = "the rest is taken to go on like that"
            if not one["was_full"]:
                goes_on = "they do not fill it, so what is fetched again after that is not known"
            how = f"{one['simulated']:.1%} of the reads were simulated; {goes_on}"
            notes.append(f"with a limit of {limit}, {how}")
    if caches[0]["exceeded"]:
        limit, times = format_bytes(caches[0]["limit"]), counted(caches[0]["exceeded"], "time")
        notes.append(f"cache_limit={limit} would be exceeded {times}, as all that it holds is open")
    catalog = passes_of(planned.run.loader.dataset).catalog
    if catalog.joins is not None and catalog.joins.by_id:
        notes.append("what is joined by id is not counted: which shards that needs is known once the ids are read")
    if len(planned.nodes) < planned.run.num_nodes:
        told = ", ".join(map(str, planned.nodes))
        notes.append(f"of {planned.run.num_nodes} nodes, node {told} was simulated, and stands for all")
    return notes


def values_of(report: Mapping[str, Any]) -> dict[Any, float | None]:
    """What conditions may ask about, by name, and by name and stream."""
    streams, cache, run = report["streams"], report["caches"][0], report["run"]
    repeats = [math.inf if one["first_repeat"] is None else one["first_repeat"]["step"] for one in streams]
    tokens = [one["tokens"] for one in streams]
    is_tallied = all(one["is_exact"] for one in streams)
    values: dict[Any, float | None] = {
        "samples": sum(one["samples"] for one in streams),
        "tokens": None if None in tokens else sum(tokens),
        "share": 1.0,
        "passes": max(one["passes"] for one in streams),
        "repeats": max(one["repeats"] for one in streams),
        "first_repeat": min(repeats) if is_tallied else None,
        "bytes": cache["bytes"],
        "refetched": cache["refetched"] if cache["was_full"] else None,
        "cache_peak": cache["peak"],
        "cache_exceeded": cache["exceeded"],
        "first_batch_seconds": report["first_batch"]["seconds"],
        "first_batch_bytes": report["first_batch"]["index_bytes"] + report["first_batch"]["shard_bytes"],
        "mixing": report["mixing"],
        "fill": None if report["packs"] is None else report["packs"]["fill"],
        "memory": report["memory"]["total"],
        "steps": run["steps"] - run["first_step"],
        "epochs": run["epochs"],
    }
    for one, repeat in zip(streams, repeats, strict=True):
        for name in ("samples", "tokens", "share", "passes", "repeats", "bytes"):
            values[name, one["stream"]] = one[name]
        values["first_repeat", one["stream"]] = repeat if is_tallied else None
    return values


# --- for people ---


def print_report(report: Mapping[str, Any]) -> None:
    """Print tables."""
    print_table(f"plan: {machines_told(report['run'])}", (), facts_told(report))
    heads, rows = streams_told(report)
    print_table(
        "streams", heads, [[printable_name(row[0]), *row[1:]] for row in rows], right=heads[1:], whole=heads[1:]
    )
    if report["phases"]:
        heads, rows = phases_told(report)
        names = [[printable_name(cell) if cell else "" for cell in row[:2]] + row[2:] for row in rows]
        print_table("phases", heads, names, right=heads[2:], whole=heads[2:])
    if any(one["bytes"] or one["peak"] for one in report["caches"]):
        heads, rows = caches_told(report)
        print_table("caches, empty at first", heads, rows, right=heads[1:], whole=heads)


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
    where = f"step {run['first_step']:,} to {run['steps']:,}, {counted(run['epochs'], 'epoch')}"
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
    if report["mixing"] is not None:
        facts.append(("mixing", f"{report['mixing']:.3f} of 1, as drawn at random"))
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
        row = [one["stream"], f"{one['selected']:,}", f"{one['samples']:,}", f"{one['share']:.1%}"]
        row += [f"{one['tokens'] or 0:,}"] if has_tokens else []
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
            row = [phase["phase"] if not place else "", one["stream"], f"{one['samples']:,}", f"{one['share']:.1%}"]
            rows.append(row + ([f"{one['tokens'] or 0:,}"] if has_tokens else []))
    return heads, rows


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
