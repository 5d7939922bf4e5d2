"""A run planned: what it reads and fetches, worked out from its configuration and the indexes of its data."""

from __future__ import annotations

import time
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.quota import check_limit, least_limit
from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.dataset import StreamingDataset
from lightning_streaming.reading.passes import passes_of
from lightning_streaming.tools.console import BAD, FINE, PROGRAM, print_error, print_json, print_note, progress
from lightning_streaming.tools.planning.epochs import PlannedEpoch, RunEnd, epochs_of, extent_of
from lightning_streaming.tools.planning.fail_if import PlanCondition
from lightning_streaming.tools.planning.fetches import (
    MOST_SAMPLES,
    FirstBatch,
    Link,
    NodeFetches,
    bytes_of_dataset,
    first_batch,
    index_bytes,
    streams_of_shards,
)
from lightning_streaming.tools.planning.memory import (
    Memory,
    batches_ahead,
    gathered_bytes,
    memory_of,
    tokens_of_samples,
)
from lightning_streaming.tools.planning.node_reads import NodeReads, ShardBytes
from lightning_streaming.tools.planning.plan_page import check_page, write_page
from lightning_streaming.tools.planning.planned_reads import Reads, RunReads
from lightning_streaming.tools.planning.report import report_of, values_of
from lightning_streaming.tools.planning.tables import print_report
from lightning_streaming.tools.runs.traced_run import TracedRun, traced_run
from lightning_streaming.units import bytes_as_written, parse_bytes
from lightning_streaming.world import World

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
