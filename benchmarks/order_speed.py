"""Processor time and memory that one node needs for an epoch's sample ids, ours beside MosaicML Streaming's.

Run from the root of the repository, on a machine that does nothing else:

    python benchmarks/order_speed.py
    python benchmarks/order_speed.py --reference ~/streaming-0.13/bin/python

"The node" is the first one: its epoch is planned once, as its first process does, and then the ids of all its workers
are read, window by window, as the workers do. Each measurement is a fresh process, so that none profits from another;
with a reference they alternate. Processor time is user and system time together, memory is the largest resident set
above that after the imports, mapped files included. The ids of the first and the last worker are compared with the
reference's, and any difference is a failure. Prints Markdown tables and writes all numbers as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lightning_streaming.reading.plan import WorkerPartition

MIB = 1024**2
SEED = 9176
ORDERS = ("none", "naive", "py1s", "py2s", "py1br", "py1e", "blockwise")
"""Shuffles, and none of them."""
COMPARED = ("py1e", "py1br", "py1s", "none")
NOT_OF_THE_REFERENCE = frozenset({"blockwise"})


@dataclass(frozen=True, kw_only=True)
class Case:
    """One epoch and its readers."""

    order: str
    samples: int
    shard_samples: int
    nodes: int
    ranks: int
    """On each node."""
    workers: int
    """Of each rank."""
    batch_size: int

    @property
    def shards(self) -> NDArray[np.int64]:
        """Samples in each shard; the last one has what is left."""
        sizes = np.full(-(-self.samples // self.shard_samples), self.shard_samples, np.int64)
        sizes[-1] -= sizes.sum() - self.samples
        return sizes


# --- in a process of its own ---


class Meter:
    """Processor seconds and memory since it was made."""

    def __init__(self) -> None:
        # Makes the kernel forget the peak, which the imports may have reached.
        Path("/proc/self/clear_refs").write_text("5")
        self._memory = _resident("VmRSS")
        self._seconds = time.process_time()

    @property
    def seconds(self) -> float:
        """User and system time."""
        return time.process_time() - self._seconds

    @property
    def peak_mib(self) -> float:
        """The most memory at any time, above what there was."""
        return (_resident("VmHWM") - self._memory) / MIB


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure_ours(case: Case) -> dict[str, Any]:
    """Draw the epoch's order into the node's file, then read every worker's ids from it."""
    import lightning_streaming.reading.plan  # noqa: F401  before the meter starts

    with tempfile.TemporaryDirectory() as directory:
        os.environ["LIGHTNING_STREAMING_RUNTIME"] = directory
        meter = Meter()
        partition = our_partition(case)
        drawn = meter.seconds
        for rank, worker in product(range(case.ranks), range(case.workers)):
            for positions in replace(partition, rank_of_node=rank, worker=worker).windows():
                partition.sequence.ids(positions)
        seconds, peak_mib = meter.seconds, meter.peak_mib
        ends = [our_ids(partition), our_ids(replace(partition, rank_of_node=case.ranks - 1, worker=case.workers - 1))]
    return {"seconds": seconds, "drawing": drawn, "peak_mib": peak_mib, "digest": digest(ends)}


def measure_rate(case: Case) -> dict[str, Any]:
    """How many ids one worker gets in a second, after a first pass has brought the order into memory."""
    import lightning_streaming.reading.plan  # noqa: F401  as its users do

    with tempfile.TemporaryDirectory() as directory:
        os.environ["LIGHTNING_STREAMING_RUNTIME"] = directory
        partition, rates = our_partition(case), []
        for _ in range(4):
            began = time.perf_counter()
            ids = sum(len(partition.sequence.ids(positions)) for positions in partition.windows())
            rates.append(ids / (time.perf_counter() - began))
    return {"ids_per_second": max(rates[1:])}


def our_partition(case: Case) -> WorkerPartition:
    """The epoch, planned as the loading room does, and the first worker's part of it."""
    from lightning_streaming.reading.plan import WorkerPartition
    from lightning_streaming.resume.order_files import shared_order
    from lightning_streaming.sequence.batching import batched
    from lightning_streaming.sequence.draw import Shuffled
    from lightning_streaming.sequence.partition import BatchGeometry, Partition, epoch_geometry, rank_layout
    from lightning_streaming.sequence.settings import OrderSettings
    from lightning_streaming.sequence.weights import DatasetShape, StreamWeight, resolve_weights

    shuffled: dict[str, Any] = {"shuffle": True, "shuffle_algo": case.order} if case.order != "none" else {}
    settings = OrderSettings(shuffle_seed=SEED, **shuffled).resolved(case.nodes)
    weights = resolve_weights([StreamWeight()], [case.samples], None, SEED)
    shape = DatasetShape(shard_sizes=(case.shards,), weights=weights)
    current = BatchGeometry(num_nodes=case.nodes, ranks_per_node=case.ranks, batch_size=case.batch_size)
    geometry = epoch_geometry(settings, current, None)
    plan = batched(Shuffled(settings, shape, 0, shared_order).drawn(), geometry)
    partition = Partition(sequence=plan, geometry=current, layout=rank_layout(settings, current, geometry))
    return WorkerPartition(sequence=plan, epoch_partition=partition, node=0, rank_of_node=0, num_workers=case.workers)


def our_ids(partition: WorkerPartition) -> NDArray[np.int64]:
    """All ids of one worker."""
    return np.concatenate([partition.sequence.ids(positions) for positions in partition.windows()])


def measure_reference(case: Case) -> dict[str, Any]:
    """Let the reference arrange the epoch's work, and cut out every worker's part."""
    from streaming.base.batching import generate_work
    from streaming.base.world import World

    meter = Meter()
    work = generate_work("random", reference_dataset(case), World(case.nodes, case.ranks, case.workers, 0), 0, 0)
    for rank, worker in product(range(case.ranks), range(case.workers)):
        ids = work[0, rank, worker].flatten()
    seconds, peak_mib = meter.seconds, meter.peak_mib
    ends = [work[0, 0, 0].flatten(), ids]
    return {"seconds": seconds, "peak_mib": peak_mib, "digest": digest([ids[ids >= 0] for ids in ends])}


def reference_dataset(case: Case) -> SimpleNamespace:
    """What the reference looks at when it arranges an epoch; a real one would need real files."""
    from streaming.base.dataset import StreamingDataset

    canonical = case.nodes * (64 if case.order in {"py1s", "py2s"} else 1)
    dataset = SimpleNamespace(
        shuffle=case.order != "none",
        shuffle_algo=case.order,
        shuffle_seed=SEED,
        shuffle_block_size=max(4_000_000 // canonical, 1 << 18),
        num_canonical_nodes=canonical,
        partition_algo="relaxed",
        sampling_method="balanced",
        sampling_granularity=1,
        epoch_seed_change=case.order != "none",
        initial_physical_nodes=None,
        batch_size=case.batch_size,
        epoch_size=case.samples,
        streams=[SimpleNamespace(choose=case.samples)],
        num_streams=1,
        shards_per_stream=np.asarray([len(case.shards)]),
        shard_offset_per_stream=np.asarray([0]),
        samples_per_shard=case.shards,
        sample_offset_per_shard=np.cumsum(case.shards) - case.shards,
    )
    dataset.resample_streams = partial(StreamingDataset.resample_streams, dataset)
    return dataset


def digest(workers: list[NDArray[np.int64]]) -> str:
    """Names some workers' ids."""
    return hashlib.sha256(np.concatenate(workers).astype("<i8").tobytes()).hexdigest()[:16]


MEASURES = {"ours": measure_ours, "rate": measure_rate, "reference": measure_reference}


# --- around it ---


def in_a_fresh_process(python: str, what: str, case: Case, path: str | None) -> dict[str, Any]:
    """Measure in a new process of this or of another Python."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = path if path is not None else str(Path(__file__).parent.parent)
    command = [python, __file__, "--measure", what, "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measured_epochs(asked: argparse.Namespace, case: Case) -> Iterator[dict[str, Any]]:
    """Ours and the reference's numbers, by turns, the best of all repeats for each."""
    for order in asked.orders:
        ours, reference = [], []
        for _ in range(asked.repeats):
            this = replace(case, order=order)
            ours.append(in_a_fresh_process(sys.executable, "ours", this, None))
            if asked.reference and order not in NOT_OF_THE_REFERENCE:
                reference.append(in_a_fresh_process(asked.reference, "reference", this, asked.reference_path))
        yield {"order": order, "ours": least(ours), "reference": least(reference) if reference else None}


def least(measurements: list[dict[str, Any]]) -> dict[str, Any]:
    """Of repeated measurements, each number's least: what else the machine did can only add."""
    return {name: min(measured[name] for measured in measurements) for name in measurements[0]}


def epoch_row(row: dict[str, Any]) -> str:
    """One line of the first table."""
    ours, reference = row["ours"], row["reference"]
    cells = [row["order"], f"{ours['drawing']:.1f}", f"{ours['seconds']:.1f}", f"{ours['peak_mib']:.0f}"]
    if reference is None:
        cells += ["", "", "", ""]
    else:
        cells += [f"{reference['seconds']:.1f}", f"{reference['peak_mib']:.0f}"]
        cells += [f"{ours[name] / reference[name]:.2f}" for name in ("seconds", "peak_mib")]
    return f"| {' | '.join(cells)} |"


def arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_argument_group("the data")
    data.add_argument("--samples", type=lambda text: int(float(text)), default=10**8, help="(default: 1e8)")
    data.add_argument("--shard-samples", type=int, default=4096, help="in a shard (default: %(default)s)")
    machines = parser.add_argument_group("the machines")
    machines.add_argument("--nodes", type=int, default=2, help="(default: %(default)s)")
    machines.add_argument("--ranks", type=int, default=8, help="on each node (default: %(default)s)")
    machines.add_argument("--workers", type=int, default=8, help="of each rank (default: %(default)s)")
    machines.add_argument("--batch-size", type=int, default=32, help="samples of a rank (default: %(default)s)")
    parser.add_argument("--orders", nargs="*", choices=ORDERS, default=COMPARED, help="(default: %(default)s)")
    parser.add_argument("--rates", nargs="*", choices=ORDERS, default=ORDERS, help="to read fast (default: all)")
    parser.add_argument("--repeats", type=int, default=1, help="the least counts (default: %(default)s)")
    parser.add_argument("--reference", metavar="PYTHON", help="interpreter that has MosaicML Streaming 0.13")
    parser.add_argument("--reference-path", metavar="PATH", default="", help="PYTHONPATH for it, if it needs one")
    parser.add_argument("--json", type=Path, default=Path("build/order_speed.json"), help="(default: %(default)s)")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure, print and write; fails where an order is not the reference's."""
    asked = arguments()
    if asked.measure:
        print(json.dumps(MEASURES[asked.measure](Case(**asked.case))))
        return 0
    machines = {name: getattr(asked, name) for name in ("nodes", "ranks", "workers", "batch_size")}
    case = Case(order="none", samples=asked.samples, shard_samples=asked.shard_samples, **machines)

    epochs, rates = [], []
    if asked.orders:
        print("| order | drawing, CPU s | ours, CPU s | ours, MiB | reference, CPU s | reference, MiB | CPU | memory |")
        print("|---|---|---|---|---|---|---|---|")
    for row in measured_epochs(asked, case):
        print(epoch_row(row), flush=True)
        epochs.append(row)
    if asked.rates:
        print("\n| order | million ids a second of one worker |\n|---|---|")
    for order in asked.rates:
        rate = in_a_fresh_process(sys.executable, "rate", replace(case, order=order), None)["ids_per_second"]
        print(f"| {order} | {rate / 1e6:.1f} |", flush=True)
        rates.append({"order": order, "ids_per_second": rate})

    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps({"case": asdict(case), "epochs": epochs, "rates": rates}, indent=2) + "\n")
    differing = [
        row["order"] for row in epochs if row["reference"] and row["reference"]["digest"] != row["ours"]["digest"]
    ]
    if differing:
        print(f"not the order of the reference: {', '.join(differing)}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
