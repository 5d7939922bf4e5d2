"""A run planned: what it reads and fetches, worked out from its configuration and the indexes of its data."""

from __future__ import annotations

import time
import warnings
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.quota import check_limit, least_limit
from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.tools.console import BAD, FINE, PROGRAM, print_error, print_json, print_note, progress
from lightning_streaming.tools.planning.fail_if import PlanCondition
from lightning_streaming.tools.planning.fetches import (
    MOST_SAMPLES,
    Fetches,
    FirstBatch,
    Link,
    NodeFetches,
    bytes_of_dataset,
    first_batch,
    index_bytes,
    streams_of_shards,
)
from lightning_streaming.tools.planning.memory import Memory, gathered_bytes, memory_of, tokens_of_samples
from lightning_streaming.tools.planning.node_reads import NodeReads, ShardBytes
from lightning_streaming.tools.planning.plan_page import write_page
from lightning_streaming.tools.planning.planned_reads import (
    PlannedEpoch,
    Reads,
    RunEnd,
    RunReads,
    epochs_of,
    extent_of,
    progress_total,
)
from lightning_streaming.tools.planning.report import print_report, report_of, values_of
from lightning_streaming.tools.runs.traced_run import TracedRun, traced_run
from lightning_streaming.units import bytes_as_written, parse_bytes

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
        report = report_of(planned(run, args))
    finally:
        run.loader.close()
    values = values_of(report)
    failed = [condition.text for condition in args.fail_if if condition.holds(values)]
    report["failed"] = failed
    if args.html is not None:
        write_page(args.html, report)
    if args.json:
        print_json(report)
    else:
        print_report(report)
        for note in report["notes"]:
            print_note("plan", note)
    for text in failed:
        print_error(f"{PROGRAM} plan", f"--fail-if: {text} holds")
    return BAD if failed else FINE


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
    extent: RunEnd
    reads: RunReads
    nodes: Sequence[int]
    """Those that were simulated."""
    fetches: Sequence[Sequence[Fetches]]
    """Of each of these nodes, for each limit; the configured one comes first."""
    first: FirstBatch
    link: Link
    sizes: ShardBytes
    streams: NDArray[np.int64]
    """The stream of each shard."""
    fixed: int
    """Bytes of indexes, and of what else a cache holds besides shards."""
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
    fixed = passes_of(dataset).fixed_bytes()
    limits = _limits(dataset, run, sizes, fixed, args.limit)
    reads = Reads(run, tokens_of_samples(dataset))
    reads.look_back()
    nodes = _nodes(run, extent)
    each = [NodeFetches(sizes, streams, limits, fixed, MOST_SAMPLES // len(nodes)) for _ in nodes]
    link = Link(bytes_per_second=args.link, latency=args.latency)
    first, num_epochs = None, extent.num_epochs(run)
    with progress(progress_total(run, extent), "plan", "sample") as told:
        began = time.monotonic()
        for epoch in epochs_of(run, extent):
            if first is None:
                of_nodes = [_node_reads(run, epoch, node) for node in nodes]
                epoch.sequence.ids(np.asarray([epoch.partition.start]))
                took = time.monotonic() - began
                found = (first_batch(one, sizes, link, index_bytes(dataset), took) for one in of_nodes)
                first = max(found, key=lambda one: one.seconds)
            reads.look_at(epoch, num_epochs, told)
            edges = epoch.edges(num_epochs)
            for node, fetches in zip(nodes, each, strict=True):
                fetches.read(_node_reads(run, epoch, node), edges)
            if reads.is_enough() and not epoch.is_last:
                reads.found.epochs_repeated = max(0, num_epochs - len(reads.found.epochs))
                break
    if first is None:
        raise _nothing_left(run, extent)
    return Planned(
        run=run, extent=extent, reads=reads.finish(), nodes=nodes, fetches=[one.found for one in each], first=first,
        link=link, sizes=sizes, streams=streams, fixed=fixed, memory=memory_of(run, extent),
        notes=[note for note in (run.assumed, extent.assumed) if note],
    )  # fmt: skip


def _nothing_left(run: TracedRun, extent: RunEnd) -> ConfigError:
    where = f"epoch {run.begins.epoch}, step {run.steps.first_step}"
    ends = f"max_epochs={extent.max_epochs}, max_steps={extent.max_steps}"
    return ConfigError(
        f"there is nothing to read: the run stands at {where}, and ends at {ends}; see --epochs and --steps"
    )


def _node_reads(run: TracedRun, epoch: PlannedEpoch, node: int) -> NodeReads:
    loader = run.loader
    return NodeReads(
        catalog=passes_of(loader.dataset).catalog,
        sequence=epoch.sequence,
        partition=epoch.partition,
        node=node,
        num_workers=max(1, loader.num_workers),
        num_batches=epoch.batches,
        predownload=loader.dataset.predownload,
        batch_bytes=gathered_bytes(run),
    )


def _nodes(run: TracedRun, extent: RunEnd) -> list[int]:
    """The nodes that are simulated: all of a few, where there is little to read, else one."""
    nodes = run.num_nodes
    is_little = progress_total(run, extent) <= MOST_SAMPLES
    spread = np.linspace(0, nodes - 1, min(nodes, _MOST_NODES) if is_little else 1)
    return sorted({int(node) for node in spread})


def _limits(
    dataset: StreamingDataset, run: TracedRun, sizes: ShardBytes, fixed: int, asked: Sequence[int | None]
) -> list[int | None]:
    """The limits to plan, that of the run first.

    Raises:
        ConfigError: One that was asked for is too small to work.
    """
    configured = dataset.cache_limit
    limits = [None if configured is None else parse_bytes(configured)]
    if not sizes.kept.any():
        return limits
    largest = int(sizes.making.max())
    for limit in asked:
        check_limit(limit, fixed, largest)
    if not asked:
        share = int(sizes.kept.sum()) / run.num_nodes
        rounded = (fixed + parse_bytes(bytes_as_written(int(part * share))) for part in _PARTS)
        asked = [None, *(one for one in rounded if one >= least_limit(fixed, largest))]
    return list(dict.fromkeys([*limits, *asked]))
