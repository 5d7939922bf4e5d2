"""A trace as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_streaming.tools.render import name
from lightning_streaming.tools.tables import print_table
from lightning_streaming.tools.traces.reads import Read
from lightning_streaming.tools.traces.run import TracedRun

_COLUMNS_SHOWN = 3
_WHEN = ("step", "epoch")
_WHERE = ("batch", "rank", "place", "position")


def as_json(run: TracedRun, reads: Sequence[Read], shown: Mapping[int, Mapping[str, str]]) -> dict[str, Any]:
    """The run as it was understood, and every read; the keys are those that ``restore_sample`` takes."""
    return {
        "run": {
            "nodes": run.num_nodes,
            "ranks_per_node": run.ranks_per_node,
            "replication": run.replication,
            "batch_size": run.loader.samples_per_global_batch * run.replication // run.num_ranks,
            "begins": {
                "epoch": run.begins.epoch,
                "sample_in_epoch": run.begins.sample_in_epoch,
                "global_step": run.steps.first_step,
            },
        },
        "reads": [
            {
                "step": read.step,
                "epoch": read.key.epoch,
                "batch": read.batch,
                "ranks": list(range(read.rank, read.rank + run.replication)),
                "place": read.place,
                "sample": read.sample,
                "key": read.key.as_dict(),
                "fields": shown.get(read.sample),
            }
            for read in reads
        ],
    }


def print_step(title: str, run: TracedRun, reads: Sequence[Read], shown: Mapping[int, Mapping[str, str]]) -> None:
    """Print one line for each read of one step; of its fields the first few."""
    rows = [[*_where(run, read), _fields(shown.get(read.sample, {}))] for read in reads]
    _print(title, [*_WHERE, "sample", "fields"], rows, bool(shown))


def print_reads(title: str, run: TracedRun, reads: Sequence[Read], shown: Mapping[int, Mapping[str, str]]) -> None:
    """Print one line for each read of some step; of its fields the first few."""
    rows = [
        [f"{read.step:,}", str(read.key.epoch), *_where(run, read), _fields(shown.get(read.sample, {}))]
        for read in reads
    ]
    _print(title, [*_WHEN, *_WHERE, "sample", "fields"], rows, bool(shown))


def _print(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], with_fields: bool) -> None:
    kept = heads if with_fields else heads[:-1]
    print_table(title, kept, [row[: len(kept)] for row in rows], right=(*_WHEN, *_WHERE))


def _where(run: TracedRun, read: Read) -> Sequence[str]:
    key, last = read.key, read.rank + run.replication - 1
    ranks = str(read.rank) if read.rank == last else f"{read.rank}-{last}"
    sample = f"{name(key.stream)}:{key.shard}:{key.index}"
    return str(read.batch), ranks, str(read.place), f"{key.position:,}", sample


def _fields(values: Mapping[str, str]) -> str:
    few = [f"{name(column)}: {value}" for column, value in list(values.items())[:_COLUMNS_SHOWN]]
    return ", ".join(few) + (", …" if len(values) > _COLUMNS_SHOWN else "") or "-"
