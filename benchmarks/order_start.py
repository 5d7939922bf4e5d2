"""How soon a worker knows its first sample ids, at the start of an epoch and far into it, and the memory this takes.

Run from the root of the repository, on a machine that does little else:

    python benchmarks/order_start.py

Seconds count from the sizes of the shards, in memory, to the first 1,000 ids of one worker: weights, drawing, planning,
dealing and reading. Memory is the most that was resident in that time above what was after the imports. Each
measurement is a fresh process, and each number the median of a few. Prints Markdown tables and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # numpy would load it at first use

from lightning_streaming.sequence.batching import Batched, batched
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.partition import BatchGeometry, Layout, Partition, epoch_geometry, rank_layout
from lightning_streaming.sequence.settings import (
    BATCHING_METHODS,
    SHUFFLE_ALGOS,
    BatchingMethod,
    OrderSettings,
    ShuffleAlgo,
)
from lightning_streaming.sequence.weights import DatasetShape, StreamWeight, resolve_weights

SEED = 9176
FIRST_IDS = 1000
NODES, RANKS, WORKERS = 2, 1, 4
"""Few enough that even the last tenth of the smallest epoch has the first ids for every worker; ranks are those of a
node, workers those of a rank."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One start of one worker."""

    name: str
    streams: int = 1
    shards: int
    """Of each stream."""
    shard_samples: int
    algo: ShuffleAlgo = "blockwise"
    batching: BatchingMethod = "random"
    epoch_share: float = 1.0
    """Samples drawn, as a share of those there are; streams of a mixture have different proportions."""
    canonical_nodes: int | None = None
    batch_size: int = 32
    place: float = 0.0
    """Where in the epoch the worker starts."""

    @property
    def machines(self) -> BatchGeometry:
        """What batches are made for."""
        return BatchGeometry(num_nodes=NODES, ranks_per_node=RANKS, batch_size=self.batch_size)


SIZES: tuple[dict[str, Any], ...] = (
    {"name": "10^5", "shards": 25, "shard_samples": 4_000},
    {"name": "10^8", "shards": 24_415, "shard_samples": 4_096},
    {"name": "10^10", "shards": 1_000_000, "shard_samples": 10_000},
    {"name": "10^10, drawn 2.5 times", "shards": 1_000_000, "shard_samples": 10_000, "epoch_share": 2.5},
    {"name": "10^10, 1,024 canonical nodes", "shards": 1_000_000, "shard_samples": 10_000, "canonical_nodes": 1024},
    {"name": "10^11", "shards": 1_000_000, "shard_samples": 100_000},
)
STREAMS: dict[str, Any] = {
    "name": "1,000 weighted streams",
    "streams": 1_000,
    "shards": 25,
    "shard_samples": 4_096,
    "batch_size": 4_096,
}
"""Batches in which every stream has a sample, as stratified needs."""


# --- in a process of its own ---


def measure(case: Case) -> dict[str, float]:
    """Seconds to the first ids, and the most memory meanwhile in MiB."""
    sizes = tuple(np.full(case.shards, case.shard_samples, np.int64) for _ in range(case.streams))
    # Makes the kernel forget the peak, which the imports may have reached.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mib("VmRSS")
    began = time.perf_counter()
    ids = first_ids(case, sizes)
    seconds = time.perf_counter() - began
    assert len(ids) == FIRST_IDS
    return {"seconds": seconds, "peak_mib": resident_mib("VmHWM") - before}


def first_ids(case: Case, sizes: tuple[Any, ...]) -> Any:
    """The ids that the first worker of the first rank reads first."""
    settings = OrderSettings(
        shuffle=True,
        shuffle_algo=case.algo,
        shuffle_seed=SEED,
        num_canonical_nodes=case.canonical_nodes,
        batching_method=case.batching,
    ).resolved(NODES)
    totals = [int(stream.sum()) for stream in sizes]
    proportions = [StreamWeight(proportion=1 + stream % 7) for stream in range(case.streams)]
    weights = resolve_weights(proportions, totals, int(sum(totals) * case.epoch_share), SEED)
    shape = DatasetShape(shard_sizes=sizes, weights=weights)

    geometry = epoch_geometry(settings, case.machines, None)
    plan = batched(Shuffled(settings, shape, 0), geometry)
    return plan.ids(first_positions(case, plan, rank_layout(settings, case.machines, geometry)))


def first_positions(case: Case, plan: Batched, divided: Layout) -> Any:
    """Batches of the first rank, as the first of its workers reads them."""
    machines = case.machines
    partition = Partition(
        sequence=plan,
        start=int(len(plan) * case.place) // machines.global_batch_size * machines.global_batch_size,
        geometry=machines,
        layout=divided,
    )
    batches = np.arange(-(-FIRST_IDS // machines.batch_size)) * WORKERS
    return partition.batches(batches, 0, 0).reshape(-1)[:FIRST_IDS]


def resident_mib(field: str) -> float:
    """Memory of this process; VmRSS for now, VmHWM for the most since the kernel was made to forget."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


# --- around it ---


def measured(case: Case, times: int) -> dict[str, float]:
    """The median of several fresh processes."""
    command = [sys.executable, str(Path(__file__)), "--measure", json.dumps(asdict(case))]
    runs = [json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(times)]
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def measure_sizes(algo: ShuffleAlgo, times: int) -> list[dict[str, Any]]:
    """Start and resume at every size."""
    rows = []
    for said in SIZES:
        start, resume = (measured(Case(**said, algo=algo, place=place), times) for place in (0.0, 0.9))
        rows.append({**asdict(Case(**said, algo=algo)), "start": start, "resume": resume})
    return rows


def measure_streams(algo: ShuffleAlgo, times: int) -> list[dict[str, Any]]:
    """Start of a mixture of many streams, with every batching method."""
    cases = [Case(**STREAMS, algo=algo, batching=method) for method in BATCHING_METHODS]
    return [{**asdict(case), "start": measured(case, times)} for case in cases]


def markdown_sizes(rows: list[dict[str, Any]]) -> str:
    """One line a size."""
    lines = [
        "| samples | shards | first 1,000 ids | at 90 % of the epoch | memory |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        memory = max(row["start"]["peak_mib"], row["resume"]["peak_mib"])
        lines.append(
            f"| {row['name']} | {row['shards']:,} | {row['start']['seconds']:.3f} s "
            f"| {row['resume']['seconds']:.3f} s | {memory:.0f} MiB |"
        )
    return "\n".join(lines)


def markdown_streams(rows: list[dict[str, Any]]) -> str:
    """One line a batching method."""
    lines = ["| 1,000 weighted streams | first 1,000 ids | memory |", "|---|---:|---:|"]
    lines += [
        f"| batching_method={row['batching']} | {row['start']['seconds']:.3f} s | {row['start']['peak_mib']:.0f} MiB |"
        for row in rows
    ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--algo", choices=SHUFFLE_ALGOS, default="blockwise", help="(default: %(default)s)")
    parser.add_argument("--times", type=int, default=3, help="processes for each number (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("build/order_start.json"), help="(default: %(default)s)")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure, print and write."""
    arguments = parse_arguments()
    if arguments.measure:
        print(json.dumps(measure(Case(**arguments.measure))))
        return 0
    sizes, streams = measure_sizes(arguments.algo, arguments.times), measure_streams(arguments.algo, arguments.times)
    print(markdown_sizes(sizes), markdown_streams(streams), sep="\n\n")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"sizes": sizes, "streams": streams}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
