"""Plan a run: work out what it reads and fetches from its configuration and indexes, and report it."""

from __future__ import annotations

import math
import time
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.eviction import check_limit, least_limit
from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.console import BAD, FINE, PROGRAM, counted, print_error, print_json, print_note, progress
from lightning_streaming.tools.planning.fail_if import values_of
from lightning_streaming.tools.planning.node import NodeReads
from lightning_streaming.tools.planning.planned_reads import PlannedEpoch, RunReads, planned_epochs, with_end
from lightning_streaming.tools.planning.resources import (
    MOST_SAMPLES,
    NodeFetches,
    batches_ahead,
    first_batch,
    memory_of,
    tokens_of_samples,
)
from lightning_streaming.tools.planning.show_plan import check_page, print_report, write_page
from lightning_streaming.tools.runs.describe import index_bytes
from lightning_streaming.tools.runs.training_run import TracedRun, traced_run
from lightning_streaming.units import bytes_as_written, format_bytes, parse_bytes
from lightning_streaming.world import World

_MOST_NODES = 4
"""Nodes that are simulated."""
_PARTS = (0.5, 0.25)
"""Parts of what a node reads: limits that are planned if none are requested."""
_MOST_TICKS = 400
"""Points of curves over time."""


def plan_run(args: Namespace) -> int:
    """Plan a run by the arguments of ``plan``, and show the plan.

    Returns:
        The exit code, which says whether a condition holds.

    Raises:
        ConfigError: The configuration describes no run that can be planned, or a value of a condition is not known.
        StateError: The checkpoint has no saved position, or is of other data.
        StorageError: An index could not be fetched, or the page not be written.
    """
    with warnings.catch_warnings():
        # It is not this machine that needs a core for each of the workers.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        run = traced_run(args)
    try:
        for condition in args.fail_if:  # an unknown stream is an error before minutes of work
            if condition.stream is not None:
                condition.holds({(condition.name, name): 0 for name in run.catalog.stream_names})
        if args.html is not None:
            check_page(args.html)
        report = RunPlan(run, args).report()
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
        write_page(args.html, report, planned_from(args))
        print_note("plan", f"wrote {args.html}")
    if errors:
        raise errors[0]
    return BAD if report["failed"] else FINE


def planned_from(args: Namespace) -> str:
    """Return the paths of configuration and checkpoint, and names of changed settings, whose values may be secrets."""
    changed = [name for name, _ in args.set]
    paths = ", ".join(args.config) + (f" with other {', '.join(changed)}" if changed else "")
    return paths if args.checkpoint is None else f"{paths}, from {args.checkpoint}"


class RunPlan:
    """What a run reads, and what its nodes fetch with caches of several limits.

    Args:
        run: The run.
        args: ``epochs``, ``steps``, ``limit``, ``link`` and ``latency`` of ``plan``.

    Raises:
        ConfigError: A limit is too small, or there is nothing to read.
    """

    def __init__(self, run: TracedRun, args: Namespace) -> None:
        run, assumed = with_end(run, args.epochs, args.steps)
        self._run, self._notes = run, [note for note in (run.assumed, assumed) if note]
        self._geometry = run.order.epoch(run.begins).partition.geometry
        whole = run.steps.rest(run.begins.epoch, run.steps.first_step)
        num_samples = whole.batches * self._geometry.global_batch_size
        most_nodes = min(run.num_nodes, _MOST_NODES) if num_samples <= MOST_SAMPLES else 1
        self._nodes = sorted({int(node) for node in np.linspace(0, run.num_nodes - 1, most_nodes)})
        """Nodes that are simulated."""
        self._fixed, self._tokens_of_sample = run.described.fixed_bytes(), tokens_of_samples(run.described)
        limits = self._limits(args.limit)
        self._fetches = [
            NodeFetches(*run.described.shard_bytes, limits, self._fixed, MOST_SAMPLES // len(self._nodes))
            for _ in self._nodes
        ]
        """Downloads of each of these nodes, for each limit; the configured one comes first."""
        self._reads, epochs, began = RunReads(run, self._tokens_of_sample), planned_epochs(run), time.monotonic()
        begun = next(epochs, None)
        if begun is None:
            end = [f"epoch {run.steps.stop_epoch}"] if run.steps.stop_epoch is not None else []
            end += [f"step {run.steps.max_steps}"] if run.steps.max_steps is not None else []
            raise ConfigError(
                f"there is nothing to read: the run is at epoch {run.begins.epoch}, step {run.steps.first_step}, and "
                f"ends before {', '.join(end)}",
                hint="see --epochs and --steps",
                option="--steps",
            )
        begun.described.sequence.ids(np.asarray([begun.partition.start]))
        seconds, indexes = time.monotonic() - began, index_bytes(run.loader.dataset)
        firsts = [
            first_batch(
                self._node_reads(begun, node), run.described.shard_bytes[0], args.link, args.latency, indexes, seconds
            )
            for node in self._nodes
        ]
        self._first = max(firsts, key=lambda first: first["seconds"])
        with progress(self._reads.entries_before() + num_samples, "plan", "sample") as advance:
            self._reads.count_before(advance)
            for epoch in chain([begun], epochs):
                edges = epoch.edges(whole.epochs)
                self._reads.count(epoch, edges, advance)
                for node, fetches in zip(self._nodes, self._fetches, strict=True):
                    fetches.read(self._node_reads(epoch, node), edges)
                if self._reads.is_enough():
                    break
        self._reads.finish(epoch)
        self._memory = memory_of(run, whole.epochs)

    def _readers(self, node: int) -> list[World]:
        """Return the ranks of a machine among those that read different samples; all are of one node of these."""
        ranks = self._run.ranks_per_node
        return [self._run.reader(rank) for rank in range(node * ranks, (node + 1) * ranks)]

    def _node_reads(self, epoch: PlannedEpoch, node: int) -> NodeReads:
        run, readers = self._run, self._readers(node)
        return NodeReads(
            catalog=run.catalog,
            sequence=epoch.described.sequence,
            partition=epoch.partition,
            node=readers[0].node,
            ranks=sorted({reader.rank_of_node for reader in readers}),
            num_workers=max(1, run.loader.num_workers),
            # Workers prepare batches that are not read if the trainer ends the epoch early.
            num_batches=min(
                epoch.partition.num_batches(run.order.machines.drop_last), epoch.batches + batches_ahead(run.loader)
            ),
            predownload=run.loader.dataset.predownload,
            batch_bytes=run.described.gathered_bytes(run.loader, epoch.partition.geometry.batch_size),
        )

    def _limits(self, requested: Sequence[int | None]) -> list[int | None]:
        """Return the limits to plan, that of the run first; ``requested`` are those of ``--limit``."""
        run, (sizes, _), fixed = self._run, self._run.described.shard_bytes, self._fixed
        configured = run.loader.dataset.cache_limit
        limits = [None if configured is None else parse_bytes(configured)]
        if not sizes.kept.any():
            return limits
        largest = int(sizes.making.max())
        for limit in requested:
            check_limit(limit, fixed, largest, "--limit")
        if not requested:
            # Parts of what the ranks of a node read on average.
            readers = [len({reader.rank for reader in self._readers(node)}) for node in self._nodes]
            node_bytes = int(sizes.kept.sum()) * float(np.mean(readers)) / (run.num_ranks // run.replication)
            rounded = (fixed + parse_bytes(bytes_as_written(int(part * node_bytes))) for part in _PARTS)
            requested = [None, *(limit for limit in rounded if limit >= least_limit(fixed, largest))]
        return list(dict.fromkeys([*limits, *requested]))

    # Of very long runs not all is counted: what follows is like the last epoch that was.

    def _later(self, of_last: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what the epochs have that were not counted, from what the last counted one has."""
        share = self._reads.rest.batches / self._reads.epochs[-1].batches
        later: NDArray[np.int64] = np.rint(of_last * share).astype(np.int64)
        return later

    def _sum(self, of_epochs: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the sum over all epochs, those included that were not counted."""
        total: NDArray[np.int64] = np.sum(of_epochs, axis=0, dtype=np.int64)
        return total + self._later(of_epochs[-1])

    def _fetched_later(self, node: NodeFetches, number: int) -> NDArray[np.int64]:
        """Return what a node fetches in epochs that were not counted: if nothing is evicted, what is not cached."""
        fetches = node.by_limit[number]
        later = self._later(fetches.epochs[-1].sum(axis=0))
        return np.minimum(later, node.not_requested) if fetches.keeps_all else later

    def _fetched(self, number: int) -> NDArray[np.int64]:
        """Return what each simulated node fetches of each stream under a limit, of shape (nodes, streams)."""
        counted_bytes = [sum(epoch.sum(axis=0) for epoch in node.by_limit[number].epochs) for node in self._fetches]
        return np.array(counted_bytes) + [self._fetched_later(node, number) for node in self._fetches]

    # The report

    def report(self) -> dict[str, Any]:
        """Return all that was worked out, as plain values."""
        run, reads, geometry = self._run, self._reads, self._geometry
        epochs, rest = reads.epochs, reads.rest
        first_step, stop_step = int(epochs[0].steps[0]), int(epochs[-1].steps[-1]) + rest.steps
        batches = sum(epoch.batches for epoch in epochs)
        caches = [self._cache(number) for number in range(len(self._fetches[0].by_limit))]
        pairs = [pair for epoch in epochs for pair in epoch.mixing]
        mixed, random = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        packs = {
            "fill": sum(epoch.packed for epoch in epochs) / max(1, sum(epoch.room for epoch in epochs)),
            "histogram": np.sum([epoch.fill for epoch in epochs], axis=0).tolist(),
        }
        return {
            "run": {
                "nodes": run.num_nodes,
                "ranks_per_node": run.ranks_per_node,
                "replication": run.replication,
                "workers": run.loader.num_workers,
                "batch_size": geometry.batch_size,
                "unit": run.described.unit,
                "weights_in": run.described.weights_in,
                "global_batch": geometry.global_batch_size,
                "begins": {**run.begins._asdict(), "step": run.steps.first_step},
                "epochs": len(epochs) + rest.epochs,
                "first_step": first_step,
                "stop_step": stop_step,
                "steps": stop_step - first_step,
                "nodes_simulated": self._nodes,
                "looked_at": sum(epoch.part * epoch.batches for epoch in epochs) / (batches + rest.batches),
            },
            "streams": self._streams(),
            "schedule": self._schedule(),
            "packs": None if run.packs is None else packs,
            "caches": caches,
            "first_batch": self._first,
            "mixing": None if not pairs else mixed / random if random else 1.0,
            "memory": self._memory,
            "over_time": self._over_time(),
            "notes": [*self._notes, *self._notes_on(caches)],
        }

    def _tokens(self, stream: int, samples: int, tokens: int) -> int | None:
        """Return the tokens of a stream's samples, if they are known."""
        is_known = self._run.catalog.lengths is not None or self._tokens_of_sample[stream]
        return tokens if is_known or not samples else None

    def _streams(self) -> list[dict[str, Any]]:
        run, reads, report = self._run, self._reads, []
        samples = self._sum([epoch.samples.sum(axis=0) for epoch in reads.epochs]).tolist()
        tokens = self._sum([epoch.tokens.sum(axis=0) for epoch in reads.epochs]).tolist()
        fetched = self._fetched(0).mean(axis=0) * run.num_nodes
        is_whole = not reads.rest.batches and all(epoch.part == 1 for epoch in reads.epochs)
        is_exact = reads.is_tallied and is_whole
        for number, (name, stream) in enumerate(run.loader.dataset.streams.items()):
            size, before = run.catalog.samples_per_stream[number], int(reads.samples_before[number])
            most, repeat = reads.most_reads.get(number), reads.first_repeats.get(number)
            drawn = before + samples[number]
            least = math.ceil(drawn / size) if is_whole else drawn // size
            report.append(
                {
                    "stream": name,
                    "stored": stream.num_stored,
                    "selected": stream.num_selected,
                    "samples": samples[number],
                    "samples_before": before,
                    "tokens": self._tokens(number, samples[number], tokens[number]),
                    "weight": run.described.configured_of_epoch.get(name),
                    "passes": drawn / size,
                    "repeats": most if most is not None and is_exact else max(most or 0, least),
                    "first_repeat": None if repeat is None else {"epoch": repeat[0], "step": repeat[1]},
                    "bytes": round(float(fetched[number])),
                    "is_exact": is_exact,
                }
            )
        return self._with_shares(report)

    def _with_shares(self, streams: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return streams with their shares of samples and of tokens, and in what weights count."""
        samples, tokens = sum(stream["samples"] for stream in streams), [stream["tokens"] for stream in streams]
        in_tokens, shares = self._run.described.weights_in == "tokens", []
        all_tokens = None if None in tokens or not any(tokens) else sum(tokens)
        for stream in streams:
            of_samples = stream["samples"] / max(1, samples)
            of_tokens = None if all_tokens is None else stream["tokens"] / all_tokens
            share = of_tokens if in_tokens else of_samples
            shares.append({**stream, "share": share, "sample_share": of_samples, "token_share": of_tokens})
        return shares

    def _schedule(self) -> list[dict[str, Any]]:
        samples = self._sum([epoch.phase_samples for epoch in self._reads.epochs]).tolist()
        tokens = self._sum([epoch.phase_tokens for epoch in self._reads.epochs]).tolist()
        configured = self._run.described.configured
        return [
            {
                "phase": phase,
                "streams": self._with_shares(
                    [
                        {
                            "stream": name,
                            "samples": count,
                            "tokens": self._tokens(stream, count, tokens[number][stream]),
                            "weight": list(configured[number].get(name, (0.0, 0.0))),
                        }
                        for stream, (name, count) in enumerate(
                            zip(self._run.catalog.stream_names, samples[number], strict=True)
                        )
                        if count
                    ]
                ),
            }
            for number, phase in enumerate(self._run.described.phases)
        ]

    def _cache(self, number: int) -> dict[str, Any]:
        by_node, needed, downloads = [node.by_limit[number] for node in self._fetches], [], []
        part = min(fetches.part for fetches in by_node)
        for node, fetches in zip(self._fetches, by_node, strict=True):
            keeping = next((other for other, of_limit in enumerate(node.by_limit) if of_limit.keeps_all), None)
            later = 0 if keeping is None else self._fetched_later(node, keeping).sum()
            needed.append(node.needed.sum() + later)
            last = int(fetches.epochs[-1].sum())
            times = int(self._fetched_later(node, number).sum()) / last if last else 0.0
            downloads.append(sum(fetches.downloads) + fetches.downloads[-1] * times)
        fetched = float(self._fetched(number).sum(axis=1).mean())
        counted_batches = sum(epoch.batches for epoch in self._reads.epochs)
        exceeded = float(np.mean([fetches.exceeded for fetches in by_node])) * self._run.num_nodes / part
        return {
            "limit": by_node[0].limit,
            "is_configured": number == 0,
            "bytes": round(fetched * self._run.num_nodes),
            "bytes_of_node": round(fetched),
            # Without room for them, some shards that are requested ahead and not read in the end are not fetched.
            "refetched": max(1.0, fetched / float(np.mean(needed))) if np.mean(needed) else 1.0,
            "downloads_of_node": round(float(np.mean(downloads))),
            "peak": max(fetches.peak for fetches in by_node),
            "exceeded": math.ceil(exceeded * (1 + self._reads.rest.batches / counted_batches)),
            "simulated": part,
            "was_full": all(fetches.was_full for fetches in by_node),
        }

    def _over_time(self) -> dict[str, Any]:
        """Return what the charts show: at each step the samples of each stream until then, and the bytes fetched.

        What was not counted is one interval at the end.
        """
        run, epochs, rest, names = self._run, self._reads.epochs, self._reads.rest, self._run.catalog.stream_names
        steps = np.concatenate([epochs[0].steps[:1], *(epoch.steps[1:] for epoch in epochs)])
        steps = np.append(steps, steps[-1] + rest.steps) if rest.batches else steps
        shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_TICKS)).astype(int))
        samples, tokens = (
            self._so_far(counts)[shown]
            for counts in ([epoch.samples for epoch in epochs], [epoch.tokens for epoch in epochs])
        )
        caches = []
        for number, fetches in enumerate(self._fetches[0].by_limit):
            fetched, used = [], []
            for node in self._fetches:  # at each tick what it has fetched, and what its cache holds
                of_node = node.by_limit[number]
                fetched.append(np.concatenate([[0], np.cumsum(np.concatenate(of_node.epochs).sum(axis=1))]))
                used.append(np.concatenate([[self._fixed], *of_node.used]))
                if rest.batches:
                    fetched[-1] = np.append(fetched[-1], fetched[-1][-1] + self._fetched_later(node, number).sum())
                    used[-1] = np.append(used[-1], used[-1][-1])
            mean = np.rint(np.mean(fetched, axis=0)[shown] * run.num_nodes).astype(np.int64)
            caches.append(
                {"limit": fetches.limit, "fetched": mean.tolist(), "used": np.max(used, axis=0)[shown].tolist()}
            )
        schedule = []
        if not run.begins.epoch:  # the step at which each phase of the first epoch begins, as far as that is read
            epoch = run.described.epoch(run.begins)
            partition = epoch.partition
            for phase, begin in zip(run.described.phases, [0, *epoch.phase_stops.tolist()], strict=False):
                entries = partition.sequence.entries_before(begin) - partition.entries_before
                batch = entries // partition.geometry.global_batch_size
                if begin >= run.begins.sample_in_epoch and batch < epochs[0].batches:
                    step = run.steps.first_step + run.steps.of_epoch(0).step_of(batch)
                    schedule.append({"phase": phase, "step": step})
        return {
            "steps": steps[shown].tolist(),
            "samples": {name: samples[:, stream].tolist() for stream, name in enumerate(names)},
            "tokens": {name: tokens[:, stream].tolist() for stream, name in enumerate(names)},
            "schedule": schedule,
            "caches": caches,
        }

    def _so_far(self, of_epochs: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return counts up to each tick, from counts between ticks."""
        counts = [*of_epochs, *([self._later(of_epochs[-1].sum(axis=0))[None]] if self._reads.rest.batches else [])]
        return np.cumsum(np.concatenate([np.zeros_like(counts[0][:1]), *counts]), axis=0)

    def _notes_on(self, caches: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return sentences on numbers that are not exact, and on what is remarkable."""
        run, reads, notes = self._run, self._reads, list[str]()
        part = min(epoch.part for epoch in reads.epochs)
        if part < 1:
            notes.append(f"{part:.1%} of the samples were counted; counts are about so, repeats at least so")
        elif not reads.is_tallied:
            notes.append("there are too many samples to count each; repeats are at least so")
        if reads.rest.batches:
            number, epochs = len(reads.epochs), len(reads.epochs) + reads.rest.epochs
            notes.append(f"{number} of {epochs} epochs were counted; those after are taken to be like the last one")
        for cache in caches:
            if cache["simulated"] < 1:
                rest = "the rest is taken to be like them"
                if not cache["was_full"]:
                    rest = "they do not fill it, so what is fetched again after that is not known"
                of = f"with a limit of {format_bytes(cache['limit'])}"
                notes.append(f"{of}, {cache['simulated']:.1%} of the reads were simulated; {rest}")
        if caches[0]["exceeded"]:
            limit, times = format_bytes(caches[0]["limit"]), counted(caches[0]["exceeded"], "time")
            notes.append(f"cache_limit={limit} would be exceeded {times}, as all shards in the cache are open")
        if run.catalog.joins is not None and run.catalog.joins.by_id:
            notes.append("what is joined by id is not counted: the shards are known once the ids are read")
        if len(self._nodes) < run.num_nodes:
            nodes = ", ".join(map(str, self._nodes))
            notes.append(f"of {run.num_nodes} nodes, node {nodes} was simulated, and stands for all")
        return notes
