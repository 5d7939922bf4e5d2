"""Phases: seconds and memory to begin a run of many streams in many phases, and to go on in its middle.

    python -m benchmarks.phases
    python -m benchmarks.phases --samples 10b --streams 1000 --phases 20

Makes the indexes of so many streams in memory, with shards of a hundred thousand samples and no files, and phases of
which every second one is a ramp between random weights of half of the streams. Then measures, in a fresh process for
each shuffle algorithm, from settled data to the ids of the first 8,192 positions:

    start    a run from its beginning
    save     the state in the middle of the epoch
    resume   the run that goes on from there, in phases of which the last one has changed

Memory is what each took beyond the indexes, at most (VmHWM). Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lightning_streaming.formats.index import parse_index
from lightning_streaming.options.schedule import MixturePhase, resolved_phases
from lightning_streaming.resume.run import Machines, Run, new_run, resume
from lightning_streaming.resume.run_order import RunRequest
from lightning_streaming.resume.run_state import drawn_sequence
from lightning_streaming.resume.state import Cursor, read_state
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.sequence.weights import StreamWeight
from lightning_streaming.units import parse_count

ALGOS = ("blockwise", "py1e")
SHARD_SAMPLES = 100_000
_MACHINES = Machines(num_nodes=8, ranks_per_node=8, batch_size=16)
_FIRST = np.arange(8192)


def make_catalog(samples: int, streams: int) -> Catalog:
    """Indexes of streams of about the same size, of shards that are nowhere."""
    sizes = [samples // streams + (number < samples % streams) for number in range(streams)]
    return Catalog({f"stream{number:04}": _index(number, size) for number, size in enumerate(sizes)})


def _index(stream: int, samples: int) -> Any:
    shards = []
    for number in range(-(-samples // SHARD_SAMPLES)):
        file = {"basename": f"shard.{number:05}.mds", "bytes": 1 << 20, "hashes": {}}
        count = min(SHARD_SAMPLES, samples - number * SHARD_SAMPLES)
        shards.append({**_SHARD, "raw_data": file, "samples": count})
    return parse_index(json.dumps({"version": 2, "shards": shards}).encode(), f"stream{stream:04}")


_SHARD: dict[str, Any] = {
    "column_encodings": ["int"],
    "column_names": ["id"],
    "column_sizes": [8],
    "compression": None,
    "format": "mds",
    "hashes": [],
    "size_limit": 1 << 26,
    "version": 2,
    "zip_data": None,
}


def make_phases(catalog: Catalog, count: int, last: float = 1.0) -> dict[str, MixturePhase]:
    """Phases of random weights, which end one after another; ``last`` is a weight of the last one's."""
    rng, names = random.Random(0), catalog.stream_names
    phases: dict[str, MixturePhase] = {}
    for number in range(count):
        mixed = rng.sample(names, max(1, len(names) // 2)) if count - number > 1 else names
        mix: dict[str, Any] = {name: rng.uniform(0.1, 1) for name in mixed}
        if number % 2:
            mix = {name: [weight, rng.uniform(0.1, 1)] for name, weight in mix.items()}
        phases[f"phase{number}"] = MixturePhase(end=f"{100 * (number + 1) / count:.4f}%", mix=mix)
    _, before = phases.popitem()
    return {**phases, "last": MixturePhase(mix={**before.mix, mixed[0]: last})}


# --- in a process of its own ---


def measure(algo: str, samples: int, streams: int, phases: int) -> dict[str, Any]:
    """Seconds, and MiB beyond the indexes."""
    catalog = make_catalog(samples, streams)
    for index in catalog.indexes:
        _ = index.data_digest  # as an index that is kept has it
    order = OrderSettings(shuffle=True, shuffle_algo=algo, num_canonical_nodes=64)  # type: ignore[arg-type]

    def asked(last: float) -> RunRequest:
        return RunRequest(
            settings=order,
            weights=(StreamWeight(),) * streams,
            epoch_size=samples,
            phases=resolved_phases(make_phases(catalog, phases, last), samples),
        )

    before, found = _peak_mib(), {}
    _, found["start"] = _timed(lambda: _read(new_run(asked(1.0), catalog, _MACHINES), Cursor(0, 0)))
    middle = Cursor(0, samples // 2 // 64 * 64)
    run = new_run(asked(1.0), catalog, _MACHINES)
    state, found["save"] = _timed(lambda: json.loads(json.dumps(run.saved(middle).as_state())))
    _, found["resume"] = _timed(lambda: _read(resume(read_state(state), asked(2.0), catalog, _MACHINES).run, middle))
    plan = run.order.plan
    return {
        "algo": algo,
        "seconds": found,
        "mib": _peak_mib() - before,
        "steps": len(plan) if plan else 0,
        "state_kb": len(json.dumps(state)) / 1000,
    }


def _timed(act: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return act(), time.perf_counter() - began


def _read(run: Run, cursor: Cursor) -> None:
    epoch = run.epoch(run.normalise(cursor))
    drawn_sequence(epoch).ids(epoch.cursor.sample_in_epoch + _FIRST)


def _peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


# --- around it ---


def measured(algo: str, samples: int, streams: int, phases: int) -> Any:
    """One measurement in a fresh process, with an empty runtime directory."""
    with tempfile.TemporaryDirectory() as runtime:
        environment = os.environ | {"LIGHTNING_STREAMING_RUNTIME": runtime}
        words = [algo, *map(str, (samples, streams, phases))]
        command = [sys.executable, "-m", "benchmarks.phases", "--measure", *words]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout)


def table(found: list[dict[str, Any]]) -> str:
    """What was measured, as Markdown."""
    lines = ["| shuffle | steps | start | save | resume | memory | state |", "|---|--:|--:|--:|--:|--:|--:|"]
    for one in found:
        seconds = " | ".join(f"{one['seconds'][what]:.2f} s" for what in ("start", "save", "resume"))
        lines.append(
            f"| {one['algo']} | {one['steps']:,} | {seconds} | {one['mib']:.0f} MiB | {one['state_kb']:.0f} KB |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--samples", default="1b", help="of all streams, and of the epoch (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--phases", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("build/phases.json"), help="(default: %(default)s)")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        algo, *numbers = options.measure
        print(json.dumps(measure(algo, *map(int, numbers))))
        return 0
    samples = parse_count(options.samples, "--samples")
    found = [measured(algo, samples, options.streams, options.phases) for algo in ALGOS]
    print(table(found))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
