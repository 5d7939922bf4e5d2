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
from lightning_streaming.tools.console import BAD, FINE, PROGRAM, counted, print_error, print_json, print_note, progress
from lightning_streaming.tools.planning.fail_if import values_of
from lightning_streaming.tools.planning.node import NodeReads, ShardBytes
from lightning_streaming.tools.planning.planned_reads import PlannedEpoch, RunReads, planned_epochs, with_end
from lightning_streaming.tools.planning.resources import (
    MOST_SAMPLES,
    FirstBatch,
    Link,
    NodeFetches,
    batches_ahead,
    bytes_of_shards,
    first_batch,
    index_bytes,
    memory_of,
    tokens_of_samples,
)
from lightning_streaming.tools.planning.show_plan import check_page, print_report, write_page
from lightning_streaming.tools.runs.training_run import TracedRun, traced_run
from lightning_streaming.units import bytes_as_written, format_bytes, parse_bytes
from lightning_streaming.world import World

_MOST_NODES = 4
"""Nodes that are simulated."""
_PARTS = (0.5, 0.25)
"""Parts of what a node reads: limits that are planned if none are requested."""
_MOST_TICKS = 400
"""Points of what is reported over time."""


def plan_run(args: Namespace) -> int:
    """Plan a run, and show the plan.

    Args:
        args: Arguments of ``plan``.

    Returns:
        The exit code, which says whether a condition holds.

    Raises:
        ConfigError: The configuration describes no run that can be planned, or a value of a condition is not known.
        StateError: The checkpoint has no saved position, or is of other data.
        StorageError: An index could not be fetched, or the page not be written.
    """
    changes = dict(args.set) | ({} if args.batch_size is None else {"batch_size": str(args.batch_size)})
    with warnings.catch_warnings():
        # It is not this machine that needs a core for each of the workers.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        run = traced_run(args, changes)
    try:
        for condition in args.fail_if:  # an unknown stream is an error before minutes of work
            if condition.stream is not None:
                condition.holds({(condition.name, name): 0 for name in run.catalog.stream_names})
        if args.html is not None:
            check_page(args.html)
        report = report_of(planned(run, args))
    finally:
        run.loader.close()
    values, errors, report["failed"] = values_of(report), list[ConfigError](), []
    for condition in args.fail_if:
        try:
            report["failed"] += [condition.text] if condition.holds(values) else []
        except ConfigError as error:  # noqa: PERF203  raised after all that is known is shown
            errors.append(error)
    if args.json:
        print_json(report)
    else:
        print_report(report)
        for note in report["notes"]:
            print_note("plan", note)
    for text in report["failed"]:
        print_error(f"{PROGRAM} plan", f"--fail-if: {text} holds")
    if args.html is not None:
        write_page(args.html, report, _planned_from(args))
        print_note("plan", f"wrote {args.html}")
    if errors:
        raise errors[0]
    return BAD if report["failed"] else FINE


def _planned_from(args: Namespace) -> str:
    """Return the paths of configuration and checkpoint, and names of changed settings, whose values may be secrets."""
    changed = [name for name, _ in args.set]
    paths = ", ".join(args.config) + (f" with other {', '.join(changed)}" if changed else "")
    return paths if args.checkpoint is None else f"{paths}, from {args.checkpoint}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """What was worked out of a run."""

    run: TracedRun
    reads: RunReads
    nodes: Sequence[int]
    """Nodes that were simulated."""
    fetches: Sequence[NodeFetches]
    """Downloads of each of these nodes, for each limit; the configured one comes first."""
    first: FirstBatch
    link: Link
    fixed: int
    """Bytes of indexes and selections in a cache."""
    tokens_of_sample: NDArray[np.int64]
    """Tokens of a sample of each stream, if its samples have equally many and are not packed; else 0."""
    memory: Mapping[str, int]
    notes: Sequence[str]


def planned(run: TracedRun, args: Namespace) -> Planned:
    """Work a run out.

    Args:
        run: The run.
        args: ``epochs``, ``steps``, ``limit``, ``link`` and ``latency`` of ``plan``.

    Raises:
        ConfigError: A limit is too small, or there is nothing to read.
    """
    run, assumed = with_end(run, args.epochs, args.steps)
    whole = run.steps.rest(run.begins.epoch, run.steps.first_step)
    num_samples = whole.batches * run.order.epoch(run.begins).partition.geometry.global_batch_size
    is_little = num_samples <= MOST_SAMPLES
    spread = np.linspace(0, run.num_nodes - 1, min(run.num_nodes, _MOST_NODES) if is_little else 1)
    nodes = sorted({int(node) for node in spread})
    sizes, streams = bytes_of_shards(run.described)
    fixed, tokens = run.described.fixed_bytes(), tokens_of_samples(run.described)
    limits = _limits(run, sizes, fixed, nodes, args.limit)
    each = [NodeFetches(sizes, streams, limits, fixed, MOST_SAMPLES // len(nodes)) for _ in nodes]
    link = Link(bytes_per_second=args.link, latency=args.latency)
    reads, epochs, began = RunReads(run, tokens), planned_epochs(run), time.monotonic()
    begun = next(epochs, None)
    if begun is None:
        end = [f"epoch {run.steps.stop_epoch}"] if run.steps.stop_epoch is not None else []
        end += [f"step {run.steps.max_steps}"] if run.steps.max_steps is not None else []
        raise ConfigError(
            f"there is nothing to read: the run is at epoch {run.begins.epoch}, step {run.steps.first_step}, and ends "
            f"before {', '.join(end)}",
            hint="see --epochs and --steps",
            option="--steps",
        )
    begun.described.sequence.ids(np.asarray([begun.partition.start]))
    took, indexes = time.monotonic() - began, index_bytes(run.loader.dataset)
    firsts = (first_batch(_node_reads(run, begun, node), sizes, link, indexes, took) for node in nodes)
    first = max(firsts, key=lambda one: one.seconds)
    with progress(reads.entries_before() + num_samples, "plan", "sample") as advance:
        reads.count_before(advance)
        for epoch in chain([begun], epochs):
            reads.count(epoch, whole.epochs, advance)
            edges = epoch.edges(whole.epochs)
            for node, fetches in zip(nodes, each, strict=True):
                fetches.read(_node_reads(run, epoch, node), edges)
            if reads.is_enough():
                break
    reads.finish(epoch)
    return Planned(
        run=run,
        reads=reads,
        nodes=nodes,
        fetches=each,
        first=first,
        link=link,
        fixed=fixed,
        tokens_of_sample=tokens,
        memory=memory_of(run, whole.epochs),
        notes=[note for note in (run.assumed, assumed) if note],
    )


def _readers(run: TracedRun, node: int) -> list[World]:
    """Return the ranks of a machine among those that read different samples; all are of one node of these."""
    return [run.reader(rank) for rank in range(node * run.ranks_per_node, (node + 1) * run.ranks_per_node)]


def _node_reads(run: TracedRun, epoch: PlannedEpoch, node: int) -> NodeReads:
    loader, readers = run.loader, _readers(run, node)
    # Workers prepare batches that are not read if the trainer ends the epoch early.
    batches = min(epoch.partition.num_batches(run.order.machines.drop_last), epoch.batches + batches_ahead(loader))
    return NodeReads(
        catalog=run.catalog,
        sequence=epoch.described.sequence,
        partition=epoch.partition,
        node=readers[0].node,
        ranks=sorted({reader.rank_of_node for reader in readers}),
        num_workers=max(1, loader.num_workers),
        num_batches=batches,
        predownload=loader.dataset.predownload,
        batch_bytes=run.described.gathered_bytes(loader, epoch.partition.geometry.batch_size),
    )


def _limits(
    run: TracedRun, sizes: ShardBytes, fixed: int, nodes: Sequence[int], requested: Sequence[int | None]
) -> list[int | None]:
    """Return the limits to plan, that of the run first.

    Args:
        run: The run.
        sizes: Bytes of its shards.
        fixed: Bytes of indexes and selections in a cache.
        nodes: Nodes that are simulated.
        requested: Limits of ``--limit``.

    Raises:
        ConfigError: A requested limit is too small.
    """
    configured = run.loader.dataset.cache_limit
    limits = [None if configured is None else parse_bytes(configured)]
    if not sizes.kept.any():
        return limits
    largest = int(sizes.making.max())
    for limit in requested:
        check_limit(limit, fixed, largest, "--limit")
    if not requested:
        # Parts of what the ranks of a node read on average.
        readers = [len({reader.rank for reader in _readers(run, node)}) for node in nodes]
        node_bytes = int(sizes.kept.sum()) * float(np.mean(readers)) / (run.num_ranks // run.replication)
        rounded = (fixed + parse_bytes(bytes_as_written(int(part * node_bytes))) for part in _PARTS)
        requested = [None, *(limit for limit in rounded if limit >= least_limit(fixed, largest))]
    return list(dict.fromkeys([*limits, *requested]))


# The report


def report_of(planned: Planned) -> dict[str, Any]:
    """Return all that was worked out, as plain values."""
    run, reads, first, link = planned.run, planned.reads, planned.first, planned.link
    epochs, rest, geometry = reads.epochs, reads.rest, run.order.epoch(run.begins).partition.geometry
    first_step, stop_step = int(epochs[0].steps[0]), int(epochs[-1].steps[-1]) + rest.steps
    batches = sum(epoch.batches for epoch in epochs)
    caches = [_cache(planned, number) for number in range(len(planned.fetches[0].by_limit))]
    pairs = [pair for epoch in epochs for pair in epoch.mixing]
    mixed, random = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    return {
        "run": {
            "nodes": run.num_nodes,
            "ranks_per_node": run.ranks_per_node,
            "replication": run.replication,
            "workers": run.loader.num_workers,
            "batch_size": geometry.batch_size,
            "unit": run.described.unit,
            "global_batch": geometry.global_batch_size,
            "begins": {**run.begins._asdict(), "step": run.steps.first_step},
            "epochs": len(epochs) + rest.epochs,
            "first_step": first_step,
            "stop_step": stop_step,
            "steps": stop_step - first_step,
            "nodes_simulated": list(planned.nodes),
            "looked_at": sum(epoch.part * epoch.batches for epoch in epochs) / (batches + rest.batches),
        },
        "streams": _streams(planned),
        "schedule": _schedule(planned),
        "packs": None
        if run.packs is None
        else {
            "fill": sum(epoch.packed for epoch in epochs) / max(1, sum(epoch.room for epoch in epochs)),
            "histogram": np.sum([epoch.fill for epoch in epochs], axis=0).tolist(),
        },
        "caches": caches,
        "first_batch": {
            "seconds": first.seconds,
            "index_seconds": first.index,
            "order_seconds": first.order,
            "shard_seconds": first.shards,
            "index_bytes": first.index_bytes,
            "shard_bytes": first.shard_bytes,
            "ahead_bytes": first.ahead_bytes,
            "link_bytes_per_second": link.bytes_per_second,
            "latency": link.latency,
        },
        "mixing": None if not pairs else mixed / random if random else 1.0,
        "memory": dict(planned.memory),
        "over_time": _over_time(planned),
        "notes": [*planned.notes, *_notes(planned, caches)],
    }


def _of_rest(planned: Planned, of_last: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what the epochs have that were not counted, from what the last counted one has."""
    reads = planned.reads
    rest: NDArray[np.int64] = np.rint(of_last * (reads.rest.batches / reads.epochs[-1].batches)).astype(np.int64)
    return rest


def _sum(planned: Planned, of_epochs: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the sum over all epochs, those included that were not counted."""
    total: NDArray[np.int64] = np.sum(of_epochs, axis=0, dtype=np.int64)
    return total + _of_rest(planned, of_epochs[-1])


def _streams(planned: Planned) -> list[dict[str, Any]]:
    run, reads = planned.run, planned.reads
    samples = _sum(planned, [epoch.samples.sum(axis=0) for epoch in reads.epochs]).tolist()
    tokens = _sum(planned, [epoch.tokens.sum(axis=0) for epoch in reads.epochs]).tolist()
    fetched = np.mean([_fetched(planned, node, 0) for node in planned.fetches], axis=0) * run.num_nodes
    is_whole = not reads.rest.batches and all(epoch.part == 1 for epoch in reads.epochs)
    is_exact, report = reads.is_tallied and is_whole, []
    for number, (name, stream) in enumerate(run.loader.dataset.streams.items()):
        size, before = run.catalog.samples_per_stream[number], int(reads.samples_before[number])
        drawn, most, repeat = before + samples[number], reads.most_reads.get(number), reads.first_repeats.get(number)
        least = math.ceil(drawn / size) if is_whole else drawn // size
        report.append(
            {
                "stream": name,
                "stored": stream.num_stored,
                "selected": stream.num_selected,
                "samples": samples[number],
                "samples_before": before,
                "share": samples[number] / max(1, sum(samples)),
                "tokens": _tokens(planned, number, samples[number], tokens[number]),
                "passes": drawn / size,
                "repeats": most if most is not None and is_exact else max(most or 0, least),
                "first_repeat": None if repeat is None else {"epoch": repeat[0], "step": repeat[1]},
                "bytes": round(float(fetched[number])),
                "is_exact": is_exact,
            }
        )
    return report


def _tokens(planned: Planned, stream: int, samples: int, tokens: int) -> int | None:
    """Return the tokens of a stream's samples, if they are known."""
    is_known = planned.run.packs is not None or planned.tokens_of_sample[stream] or not samples
    return tokens if is_known else None


def _schedule(planned: Planned) -> list[dict[str, Any]]:
    names, epochs = planned.run.catalog.stream_names, planned.reads.epochs
    samples = _sum(planned, [epoch.phase_samples for epoch in epochs]).tolist()
    tokens = _sum(planned, [epoch.phase_tokens for epoch in epochs]).tolist()
    return [
        {
            "phase": phase,
            "streams": [
                {
                    "stream": name,
                    "samples": count,
                    "share": count / max(1, sum(samples[number])),
                    "tokens": _tokens(planned, stream, count, tokens[number][stream]),
                }
                for stream, (name, count) in enumerate(zip(names, samples[number], strict=True))
                if count
            ],
        }
        for number, phase in enumerate(planned.run.described.phases)
    ]


def _fetched_later(planned: Planned, node: NodeFetches, number: int) -> NDArray[np.int64]:
    """Return what a node fetches in epochs that were not counted: if nothing is evicted, only what is not cached."""
    fetches = node.by_limit[number]
    rest = _of_rest(planned, fetches.epochs[-1].sum(axis=0))
    return np.minimum(rest, node.not_requested) if fetches.keeps_all else rest


def _fetched(planned: Planned, node: NodeFetches, number: int) -> NDArray[np.int64]:
    """Return what a node fetches of each stream under a limit; of shape (streams,)."""
    epochs = [epoch.sum(axis=0) for epoch in node.by_limit[number].epochs]
    return np.sum(epochs, axis=0, dtype=np.int64) + _fetched_later(planned, node, number)


def _cache(planned: Planned, number: int) -> dict[str, Any]:
    by_node = [node.by_limit[number] for node in planned.fetches]
    nodes, part, needed, downloads = planned.run.num_nodes, min(one.part for one in by_node), [], []
    for node, fetches in zip(planned.fetches, by_node, strict=True):
        keeping = [other for other, one in enumerate(node.by_limit) if one.keeps_all]
        later = _fetched_later(planned, node, keeping[0]).sum() if keeping else 0
        needed.append(node.needed.sum() + later)
        last = int(fetches.epochs[-1].sum())
        times = int(_fetched_later(planned, node, number).sum()) / last if last else 0.0
        downloads.append(sum(fetches.downloads) + fetches.downloads[-1] * times)
    fetched = float(np.mean([_fetched(planned, node, number).sum() for node in planned.fetches]))
    counted_batches = sum(epoch.batches for epoch in planned.reads.epochs)
    exceeded = float(np.mean([fetches.exceeded for fetches in by_node])) * nodes / part
    return {
        "limit": by_node[0].limit,
        "is_configured": number == 0,
        "bytes": round(fetched * nodes),
        "bytes_of_node": round(fetched),
        # Without room for it, some of what is prefetched and not read in the end is not fetched.
        "refetched": max(1.0, fetched / float(np.mean(needed))) if np.mean(needed) else 1.0,
        "downloads_of_node": round(float(np.mean(downloads))),
        "peak": max(fetches.peak for fetches in by_node),
        "exceeded": math.ceil(exceeded * (1 + planned.reads.rest.batches / counted_batches)),
        "simulated": part,
        "was_full": all(fetches.was_full for fetches in by_node),
    }


def _over_time(planned: Planned) -> dict[str, Any]:
    """Return what the charts show: at each step the samples of each stream until then, and the bytes fetched.

    What was not counted is one interval at the end.
    """
    run, reads = planned.run, planned.reads
    epochs, rest, names = reads.epochs, reads.rest, run.catalog.stream_names
    steps = np.concatenate([epochs[0].steps[:1], *(epoch.steps[1:] for epoch in epochs)])
    samples = [epoch.samples for epoch in epochs]
    if rest.batches:
        steps = np.append(steps, steps[-1] + rest.steps)
        samples.append(_of_rest(planned, samples[-1].sum(axis=0))[None])
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_TICKS)).astype(int))
    so_far = np.concatenate([np.zeros((1, len(names)), np.int64), np.cumsum(np.concatenate(samples), axis=0)])
    caches = []
    for number, fetches in enumerate(planned.fetches[0].by_limit):
        fetched, used = [], []
        for node in planned.fetches:  # at each tick what it has fetched, and what its cache holds
            of_node = node.by_limit[number]
            fetched.append(np.concatenate([[0], np.cumsum(np.concatenate(of_node.epochs).sum(axis=1))]))
            used.append(np.concatenate([[planned.fixed], *of_node.used]))
            if rest.batches:
                fetched[-1] = np.append(fetched[-1], fetched[-1][-1] + _fetched_later(planned, node, number).sum())
                used[-1] = np.append(used[-1], used[-1][-1])
        mean = np.mean(fetched, axis=0) * run.num_nodes
        caches.append(
            {
                "limit": fetches.limit,
                "fetched": np.rint(mean[shown]).astype(np.int64).tolist(),
                "used": np.max(used, axis=0)[shown].tolist(),
            }
        )
    return {
        "steps": steps[shown].tolist(),
        "samples": {name: so_far[shown, stream].tolist() for stream, name in enumerate(names)},
        "schedule": _phase_steps(planned),
        "caches": caches,
    }


def _phase_steps(planned: Planned) -> list[dict[str, Any]]:
    """Return the step at which each phase of the first epoch begins, as far as that is read."""
    run, phases, report = planned.run, planned.run.described.phases, list[dict[str, Any]]()
    if run.begins.epoch:
        return report
    epoch, steps = run.described.epoch(run.begins), run.steps.of_epoch(0)
    partition, size = epoch.partition, epoch.partition.geometry.global_batch_size
    for phase, begin in zip(phases, [0, *epoch.phase_stops.tolist()], strict=False):
        batch = (partition.sequence.entries_before(begin) - partition.entries_before) // size
        if begin >= run.begins.sample_in_epoch and batch < planned.reads.epochs[0].batches:
            report.append({"phase": phase, "step": run.steps.first_step + steps.step_of(batch)})
    return report


def _notes(planned: Planned, caches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences on numbers that are not exact, and on what is remarkable."""
    run, reads, notes = planned.run, planned.reads, list[str]()
    part = min(epoch.part for epoch in reads.epochs)
    if part < 1:
        notes.append(f"{part:.1%} of the samples were counted; counts are about so, repeats at least so")
    elif not reads.is_tallied:
        notes.append("there are too many samples to count each; repeats are at least so")
    if reads.rest.batches:
        number, epochs = len(reads.epochs), len(reads.epochs) + reads.rest.epochs
        notes.append(f"{number} of {epochs} epochs were counted; those after them are taken to be like the last one")
    for cache in caches:
        if cache["simulated"] < 1:
            limit = format_bytes(cache["limit"])
            rest = "the rest is taken to be like them"
            if not cache["was_full"]:
                rest = "they do not fill it, so what is fetched again after that is not known"
            notes.append(f"with a limit of {limit}, {cache['simulated']:.1%} of the reads were simulated; {rest}")
    if caches[0]["exceeded"]:
        limit, times = format_bytes(caches[0]["limit"]), counted(caches[0]["exceeded"], "time")
        notes.append(f"cache_limit={limit} would be exceeded {times}, as all shards in the cache are open")
    if run.catalog.joins is not None and run.catalog.joins.by_id:
        notes.append("what is joined by id is not counted: the shards are known once the ids are read")
    if len(planned.nodes) < run.num_nodes:
        nodes = ", ".join(map(str, planned.nodes))
        notes.append(f"of {run.num_nodes} nodes, node {nodes} was simulated, and stands for all")
    return notes
