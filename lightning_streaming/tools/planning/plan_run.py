"""Plan a run: work out what it reads and fetches from its configuration and indexes, and report it."""

from __future__ import annotations

import math
import time
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.eviction import check_limit, least_limit
from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.dataset import StreamingDataset
from lightning_streaming.reading.passes import passes_of
from lightning_streaming.sequence.packing.settings import BudgetSettings
from lightning_streaming.tools.console import BAD, FINE, PROGRAM, counted, print_error, print_json, print_note, progress
from lightning_streaming.tools.planning.fail_if import AtLeast, PlanCondition
from lightning_streaming.tools.planning.node import NodeReads, ShardBytes
from lightning_streaming.tools.planning.planned_reads import PlannedEpoch, Reads, RunEnd, RunReads, epochs_of, extent_of
from lightning_streaming.tools.planning.resources import (
    MOST_SAMPLES,
    FirstBatch,
    Link,
    Memory,
    NodeFetches,
    batches_ahead,
    bytes_of_dataset,
    first_batch,
    gathered_bytes,
    index_bytes,
    memory_of,
    streams_of_shards,
    tokens_of_samples,
)
from lightning_streaming.tools.planning.show_plan import check_page, print_report, write_page
from lightning_streaming.tools.runs.training_run import TracedRun, traced_run
from lightning_streaming.units import bytes_as_written, format_bytes, parse_bytes
from lightning_streaming.world import World

_MOST_TICKS = 400
"""Points of what is told over time."""


def report_of(planned: Planned) -> dict[str, Any]:
    """All that was worked out, as plain values."""
    streams = _streams(planned)
    caches = [_cache(planned, place) for place in range(len(planned.fetches[0].found))]
    return {
        "run": _run(planned),
        "streams": streams,
        "schedule": _phases(planned),
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
    first, stop = int(reads.epochs[0].steps[0]), int(reads.epochs[-1].steps[-1]) + reads.rest.steps
    looked_at = sum(one.part * one.batches for one in reads.epochs)
    return {
        "nodes": run.num_nodes,
        "ranks_per_node": run.ranks_per_node,
        "replication": run.replication,
        "workers": loader.num_workers,
        "batch_size": machines.batch_size,
        "unit": "sample" if run.packs is None else "group" if isinstance(run.packs, BudgetSettings) else "pack",
        "global_batch": machines.global_batch_size,
        "begins": {**run.begins._asdict(), "step": run.steps.first_step},
        "epochs": len(reads.epochs) + reads.rest.epochs,
        "first_step": first,
        "stop_step": stop,
        "steps": stop - first,
        "nodes_simulated": list(planned.nodes),
        "looked_at": looked_at / (sum(one.batches for one in reads.epochs) + reads.rest.batches),
    }


def _times(planned: Planned, of_epochs: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The sum over all epochs, those included that are taken to be like the last one."""
    total: NDArray[np.int64] = np.sum(of_epochs, axis=0, dtype=np.int64)
    total += _rest(planned, of_epochs[-1])
    return total


def _rest(planned: Planned, of_last: NDArray[np.int64]) -> NDArray[np.int64]:
    """What epochs have that are taken to be like the last one, of what that has."""
    reads = planned.reads
    rest: NDArray[np.int64] = np.rint(of_last * (reads.rest.batches / reads.epochs[-1].batches)).astype(np.int64)
    return rest


def _streams(planned: Planned) -> list[dict[str, Any]]:
    reads, dataset = planned.reads, planned.run.loader.dataset
    catalog = passes_of(dataset).catalog
    samples = _times(planned, [one.samples.sum(axis=0) for one in reads.epochs])
    tokens = _times(planned, [one.tokens.sum(axis=0) for one in reads.epochs])
    fetched = np.mean([_fetched(planned, node, 0) for node in planned.fetches], axis=0) * planned.run.num_nodes
    found = []
    for place, (name, stream) in enumerate(dataset.streams.items()):
        size, before = catalog.samples_per_stream[place], int(reads.samples_before[place])
        drawn = before + int(samples[place])
        repeat = reads.first_repeats.get(place)
        most = reads.most_reads.get(place)
        is_whole = not reads.rest.batches and all(one.part == 1 for one in reads.epochs)
        is_known, least = reads.is_tallied and is_whole, math.ceil(drawn / size) if is_whole else drawn // size
        read = int(samples[place])
        found.append(
            {
                "stream": name,
                "stored": stream.num_stored,
                "selected": stream.num_selected,
                "samples": read,
                "samples_before": before,
                "share": read / max(1, int(samples.sum())),
                "tokens": _tokens(planned, place, read, int(tokens[place])),
                "passes": drawn / size,
                "repeats": most if most is not None and is_known else max(most or 0, least),
                "first_repeat": None if repeat is None else {"epoch": repeat[0], "step": repeat[1]},
                "bytes": round(float(fetched[place])),
                "is_exact": is_known,
            }
        )
    return found


def _tokens(planned: Planned, stream: int, samples: int, tokens: int) -> int | None:
    """Tokens of a stream's samples, if they are known."""
    is_known = planned.run.packs is not None or planned.tokens_of_sample[stream] or not samples
    return tokens if is_known else None


def _fetched(planned: Planned, node: NodeFetches, place: int) -> NDArray[np.int64]:
    """What a node fetches of each stream; of shape (streams,)."""
    found = node.found[place]
    total: NDArray[np.int64] = np.sum([epoch.sum(axis=0) for epoch in found.epochs], axis=0, dtype=np.int64)
    total += _fetched_later(planned, node, place)
    return total


def _fetched_later(planned: Planned, node: NodeFetches, place: int) -> NDArray[np.int64]:
    """What a node fetches in epochs that nobody looked at: where all is kept, only what it has not yet."""
    rest, found = _rest(planned, node.found[place].epochs[-1].sum(axis=0)), node.found[place]
    return np.minimum(rest, node.not_asked) if found.keeps_all else rest


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
                    "tokens": _tokens(planned, place, int(samples[number, place]), int(tokens[number, place])),
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
    of_nodes = [node.found[place] for node in planned.fetches]
    nodes, part = planned.run.num_nodes, min(one.part for one in of_nodes)
    fetched = float(np.mean([_fetched(planned, node, place).sum() for node in planned.fetches]))
    needed = float(np.mean([_needed(planned, node).sum() for node in planned.fetches]))
    looked_at = sum(one.batches for one in planned.reads.epochs)
    times = nodes / part * (1 + planned.reads.rest.batches / looked_at)
    exceeded = float(np.mean([one.exceeded for one in of_nodes])) * times
    return {
        "limit": of_nodes[0].limit,
        "is_configured": place == 0,
        "bytes": round(fetched * nodes),
        "bytes_of_node": round(fetched),
        # Less is fetched than what is asked for in the end where there is no room for what nobody comes to read.
        "refetched": max(1.0, fetched / needed) if needed else 1.0,
        "downloads_of_node": round(float(np.mean([_downloads(planned, node, place) for node in planned.fetches]))),
        "peak": max(one.peak for one in of_nodes),
        "exceeded": math.ceil(exceeded),
        "simulated": part,
        "was_full": all(one.was_full for one in of_nodes),
    }


def _needed(planned: Planned, node: NodeFetches) -> NDArray[np.int64]:
    """Bytes of all shards that a node needs, each once, of each stream; of shape (streams,)."""
    keeping = [place for place, found in enumerate(node.found) if found.keeps_all]
    more = _fetched_later(planned, node, keeping[0]) if keeping else np.zeros_like(node.needed)
    return node.needed + more


def _downloads(planned: Planned, node: NodeFetches, place: int) -> float:
    found = node.found[place]
    last = int(found.epochs[-1].sum())
    times = int(_fetched_later(planned, node, place).sum()) / last if last else 0.0
    return sum(found.downloads) + found.downloads[-1] * times


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
    """What the charts show: at each step the samples of each stream until then, and what was fetched.

    What nobody looked at is one stretch at the end.
    """
    reads, names = planned.reads, passes_of(planned.run.loader.dataset).catalog.stream_names
    epochs = reads.epochs
    steps = np.concatenate([epochs[0].steps[:1], *(one.steps[1:] for one in epochs)])
    samples = [one.samples for one in epochs]
    if reads.rest.batches:
        steps = np.append(steps, steps[-1] + reads.rest.steps)
        samples.append(_rest(planned, samples[-1].sum(axis=0))[None])
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_TICKS)).astype(int))
    so_far = np.concatenate([np.zeros((1, len(names)), np.int64), np.cumsum(np.concatenate(samples), axis=0)])
    caches = []
    for place, found in enumerate(planned.fetches[0].found):
        both = [_cache_over_time(planned, node, place) for node in planned.fetches]
        fetched = np.mean([one[0] for one in both], axis=0) * planned.run.num_nodes
        caches.append(
            {
                "limit": found.limit,
                "fetched": np.rint(fetched[kept]).astype(np.int64).tolist(),
                "used": np.max([one[1] for one in both], axis=0)[kept].tolist(),
            }
        )
    return {
        "steps": steps[kept].tolist(),
        "samples": {name: so_far[kept, place].tolist() for place, name in enumerate(names)},
        "schedule": _phase_steps(planned),
        "caches": caches,
    }


def _cache_over_time(planned: Planned, node: NodeFetches, place: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a node has fetched at each tick, and what its cache holds; arrays of shape (ticks + 1,)."""
    found = node.found[place]
    fetched = np.concatenate([[0], np.cumsum(np.concatenate(found.epochs).sum(axis=1))])
    used = np.concatenate([[planned.fixed], *found.used])
    if planned.reads.rest.batches:
        fetched = np.append(fetched, fetched[-1] + _fetched_later(planned, node, place).sum())
        used = np.append(used, used[-1])
    return fetched, used


def _phase_steps(planned: Planned) -> list[dict[str, Any]]:
    """At which step each phase of the first epoch begins, where that is read."""
    run, order = planned.run, planned.run.order.order
    if order.plan is None or run.begins.epoch:
        return []
    read, steps = run.order.epoch(run.begins), run.steps
    sequence, size = read.partition.sequence, read.partition.geometry.global_batch_size
    begins = [0, *order.phase_stops(read.composed, 0)[:-1].tolist()]
    batches = [(sequence.entries_before(begin) - read.partition.entries_before) // size for begin in begins]
    return [
        {"phase": phase.name, "step": steps.first_step + steps.of_epoch(0).step_of(batch)}
        for phase, begin, batch in zip(order.plan.phases, begins, batches, strict=True)
        if begin >= run.begins.sample_in_epoch and batch < planned.reads.epochs[0].batches
    ]


def _notes(planned: Planned, caches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where numbers are not exact, and what stands out."""
    reads, notes = planned.reads, list[str]()
    part = min(one.part for one in reads.epochs)
    if part < 1:
        notes.append(f"{part:.1%} of the samples were looked at; counts are about so, repeats at least so")
    elif not reads.is_tallied:
        notes.append("there are too many samples to count each; repeats are at least so")
    if reads.rest.batches:
        looked, epochs = len(reads.epochs), len(reads.epochs) + reads.rest.epochs
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


def values_of(report: Mapping[str, Any]) -> dict[Any, float | AtLeast | None]:
    """What conditions may ask about, by name, and by name and stream."""
    streams, cache, run = report["streams"], report["caches"][0], report["run"]
    tokens = [one["tokens"] for one in streams]
    fetched = _exactly if cache["was_full"] else AtLeast
    repeats = [_exactly(one["repeats"]) if one["is_exact"] else AtLeast(one["repeats"]) for one in streams]
    values: dict[Any, float | AtLeast | None] = {
        "samples": sum(one["samples"] for one in streams),
        "tokens": None if None in tokens else sum(tokens),
        "share": 1.0,
        "passes": max(one["passes"] for one in streams),
        "repeats": max(repeats, key=_number),
        "first_repeat": _earliest(streams),
        "bytes": fetched(cache["bytes"]),
        "refetched": fetched(cache["refetched"]),
        "cache_peak": cache["peak"],
        "cache_exceeded": fetched(cache["exceeded"]),
        "first_batch_seconds": report["first_batch"]["seconds"],
        "first_batch_bytes": report["first_batch"]["index_bytes"] + report["first_batch"]["shard_bytes"],
        "mixing": report["mixing"],
        "fill": None if report["packs"] is None else report["packs"]["fill"],
        "memory": report["memory"]["total"],
        "steps": run["steps"],
        "epochs": run["epochs"],
    }
    for one, most in zip(streams, repeats, strict=True):
        for name in ("samples", "tokens", "share", "passes"):
            values[name, one["stream"]] = one[name]
        values["repeats", one["stream"]], values["bytes", one["stream"]] = most, fetched(one["bytes"])
        values["first_repeat", one["stream"]] = _earliest([one])
    return values


def _exactly(number: float) -> float:
    return number


def _number(value: float | AtLeast) -> tuple[float, bool]:
    """What the largest of some is chosen by: of two that are as large, the one that may be larger."""
    return (value.number, True) if isinstance(value, AtLeast) else (value, False)


def _earliest(streams: Sequence[Mapping[str, Any]]) -> float | None:
    """The step of the first repeat in any of some streams; None where nobody looked far enough."""
    steps = [one["first_repeat"]["step"] for one in streams if one["first_repeat"] is not None]
    return min(steps, default=math.inf if all(one["is_exact"] for one in streams) else None)


_MOST_NODES = 4
"""Nodes that are simulated."""
_PARTS = (0.5, 0.25)
"""Of what a node reads: limits that are planned where none are asked for."""


def plan_run(args: Namespace) -> int:
    """Plan a run, and show it.

    Args:
        args: What ``plan`` was told.

    Returns:
        The exit code: whether a condition holds.

    Raises:
        ConfigError: The configuration describes no run that can be planned, or a condition asks for what is not there.
        StateError: The checkpoint has no place to begin at, or is of other data.
        StorageError: An index could not be fetched, or the page not be written.
    """
    changes = dict(args.set) | ({} if args.batch_size is None else {"batch_size": str(args.batch_size)})
    with warnings.catch_warnings():
        # It is not this machine that needs a core for each of the workers.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        run = traced_run(args, changes)
    try:
        for condition in args.fail_if:
            _check_stream(condition, run)
        if args.html is not None:
            check_page(args.html)
        report = report_of(planned(run, args))
    finally:
        run.loader.close()
    values = values_of(report)
    judged = [(condition, _holds(condition, values)) for condition in args.fail_if]
    report["failed"] = failed = [condition.text for condition, holds in judged if holds is True]
    _show(report, args)
    for text in failed:
        print_error(f"{PROGRAM} plan", f"--fail-if: {text} holds")
    if args.html is not None:
        write_page(args.html, report, _planned_from(args))
        print_note("plan", f"wrote {args.html}")
    for _, holds in judged:
        if isinstance(holds, ConfigError):
            raise holds
    return BAD if failed else FINE


def _planned_from(args: Namespace) -> str:
    """The configuration and the checkpoint; of settings that were changed the names, as values may be secrets."""
    changed = [name for name, _ in args.set]
    told = ", ".join(args.config) + (f" with other {', '.join(changed)}" if changed else "")
    return told if args.checkpoint is None else f"{told}, from {args.checkpoint}"


def _holds(condition: PlanCondition, values: Mapping[Any, Any]) -> bool | ConfigError:
    """Whether a condition holds, or why nobody knows, which is raised once all is shown that is known."""
    try:
        return condition.holds(values)
    except ConfigError as error:
        return error


def _show(report: Mapping[str, Any], args: Namespace) -> None:
    if args.json:
        print_json(report)
        return
    print_report(report)
    for note in report["notes"]:
        print_note("plan", note)


def _check_stream(condition: PlanCondition, run: TracedRun) -> None:
    """Refuse a condition on a stream that is not there, before minutes of work."""
    if condition.stream is not None:
        names = passes_of(run.loader.dataset).catalog.stream_names
        there: dict[Any, float | None] = {(condition.name, name): 0 for name in names}
        condition.holds(there)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """What was worked out of a run."""

    run: TracedRun
    reads: RunReads
    nodes: Sequence[int]
    """Those that were simulated."""
    fetches: Sequence[NodeFetches]
    """Of each of these nodes, for each limit; the configured one comes first."""
    first: FirstBatch
    link: Link
    fixed: int
    """Bytes of indexes, and of what else a cache holds besides shards."""
    tokens_of_sample: NDArray[np.int64]
    """Of each stream, where all have equally many and they are not packed; else 0."""
    memory: Memory
    notes: Sequence[str]


def planned(run: TracedRun, args: Namespace) -> Planned:
    """Work a run out.

    Args:
        run: The run.
        args: ``epochs``, ``steps``, ``limit``, ``link`` and ``latency``, as ``plan`` was told.

    Raises:
        ConfigError: A limit is too small to work.
    """
    dataset, extent = run.loader.dataset, extent_of(run, args.epochs, args.steps)
    sizes, streams = bytes_of_dataset(dataset), streams_of_shards(dataset)
    fixed, tokens = passes_of(dataset).fixed_bytes(), tokens_of_samples(dataset)
    nodes = _nodes(run, extent)
    share = float(np.mean([_share_of(run, node) for node in nodes]))
    limits = _limits(dataset, sizes, fixed, share, args.limit)
    each = [NodeFetches(sizes, streams, limits, fixed, MOST_SAMPLES // len(nodes)) for _ in nodes]
    link = Link(bytes_per_second=args.link, latency=args.latency)
    reads, epochs, began = Reads(run, tokens), epochs_of(run, extent), time.monotonic()
    begun = next(epochs, None)
    if begun is None:
        raise _nothing_left(run, extent)
    begun.sequence.ids(np.asarray([begun.partition.start]))
    took = time.monotonic() - began
    found = (first_batch(_node_reads(run, begun, node), sizes, link, index_bytes(dataset), took) for node in nodes)
    first = max(found, key=lambda one: one.seconds)
    num_epochs = extent.of_run(run).epochs
    with progress(reads.samples_before() + _num_samples(run, extent), "plan", "sample") as told:
        reads.look_back(told)
        for epoch in chain([begun], epochs):
            reads.look_at(epoch, num_epochs, told)
            edges = epoch.edges(num_epochs)
            for node, fetches in zip(nodes, each, strict=True):
                fetches.read(_node_reads(run, epoch, node), edges)
            if reads.is_enough():
                break
    return Planned(
        run=run, reads=reads.finish(run, extent, epoch), nodes=nodes, fetches=each, first=first,
        link=link, fixed=fixed, tokens_of_sample=tokens,
        memory=memory_of(run, num_epochs), notes=[note for note in (run.assumed, extent.assumed) if note],
    )  # fmt: skip


def _nothing_left(run: TracedRun, extent: RunEnd) -> ConfigError:
    where = f"epoch {run.begins.epoch}, step {run.steps.first_step}"
    ends = f"epoch {extent.stop_epoch}, step {extent.max_steps}".replace("epoch None, ", "").replace(", step None", "")
    return ConfigError(
        f"there is nothing to read: the run stands at {where}, and ends before {ends}",
        hint="see --epochs and --steps",
        option="--steps",
    )


def _num_samples(run: TracedRun, extent: RunEnd) -> int:
    """About how many samples, or packs, a run reads."""
    return extent.of_run(run).batches * run.order.epoch(run.begins).partition.geometry.global_batch_size


def _node_reads(run: TracedRun, epoch: PlannedEpoch, node: int) -> NodeReads:
    loader, readers = run.loader, _readers(run, node)
    return NodeReads(
        catalog=passes_of(loader.dataset).catalog,
        sequence=epoch.sequence,
        partition=epoch.partition,
        node=readers[0].node,
        ranks=sorted({reader.rank_of_node for reader in readers}),
        num_workers=max(1, loader.num_workers),
        num_batches=_batches_made(run, epoch),
        predownload=loader.dataset.predownload,
        batch_bytes=gathered_bytes(run),
    )


def _batches_made(run: TracedRun, epoch: PlannedEpoch) -> int:
    """Batches that a rank's workers make of an epoch: some that nobody reads, where the trainer ends it early."""
    whole = epoch.partition.num_batches(run.order.machines.drop_last)
    return min(whole, epoch.batches + batches_ahead(run.loader))


def _readers(run: TracedRun, node: int) -> list[World]:
    """The ranks of a machine among those that read different samples: all of one node of these."""
    return [run.reader(rank) for rank in range(node * run.ranks_per_node, (node + 1) * run.ranks_per_node)]


def _share_of(run: TracedRun, node: int) -> float:
    """The part of all samples that the ranks of a machine read."""
    return len({reader.rank for reader in _readers(run, node)}) / (run.num_ranks // run.replication)


def _nodes(run: TracedRun, extent: RunEnd) -> list[int]:
    """The machines that are simulated: some of them where there is little to read, else one."""
    nodes = run.num_nodes
    is_little = _num_samples(run, extent) <= MOST_SAMPLES
    spread = np.linspace(0, nodes - 1, min(nodes, _MOST_NODES) if is_little else 1)
    return sorted({int(node) for node in spread})


def _limits(
    dataset: StreamingDataset, sizes: ShardBytes, fixed: int, share: float, asked: Sequence[int | None]
) -> list[int | None]:
    """The limits to plan, that of the run first.

    Args:
        dataset: What is read.
        sizes: Bytes of its shards.
        fixed: Bytes that a cache holds besides.
        share: The part of them that a node reads.
        asked: Those that were asked for.

    Raises:
        ConfigError: One that was asked for is too small to work.
    """
    configured = dataset.cache_limit
    limits = [None if configured is None else parse_bytes(configured)]
    if not sizes.kept.any():
        return limits
    largest = int(sizes.making.max())
    for limit in asked:
        check_limit(limit, fixed, largest, "--limit")
    if not asked:
        node_bytes = int(sizes.kept.sum()) * share
        rounded = (fixed + parse_bytes(bytes_as_written(int(part * node_bytes))) for part in _PARTS)
        asked = [None, *(one for one in rounded if one >= least_limit(fixed, largest))]
    return list(dict.fromkeys([*limits, *asked]))
