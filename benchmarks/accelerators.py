"""How many simulated accelerators one and two cores keep busy, compared with other libraries.

Run from the root of the repository, on Linux, on a machine that does nothing else:

    python -m benchmarks.accelerators --directory /dev/shm
    python -m benchmarks.accelerators --directory /dev/shm --peers .venv-peers/bin/python
    python -m benchmarks.accelerators --workloads resnet50 --cores 2 --places local --systems ours plain

An accelerator is a loop in a process that takes a batch and sleeps for its computation time. Its utilization is
computation time / wall time. The table shows the largest number of accelerators whose mean utilization reaches the
bound of the workload. It is determined by doubling and bisection, with one trial of ``--seconds`` per number, in new
processes that are pinned to the cores; numbers next to the result may vary by one. Batch sizes, sample sizes,
computation times and bounds are those of DLIO's workloads; nothing else of that benchmark applies.

Every accelerator is a separate job: it reads all data, shuffled, with ``--workers`` persistent workers. Samples are
random bytes or float32 arrays of the workload's sizes. Each system loads and collates them into tensors. No sample is
decoded, not even the JPEG files of RetinaNet. Each system reads its own format: MDS for ours and MosaicML, litData's
chunks, and for "plain" a map-style ``Dataset`` that reads a sample from files with as many samples as the workload's.
litData has ``batch_decode=0``, as its default is many times slower for large shuffled samples; other settings are
defaults. Shards have 64 MiB.

"local" reads files that are in memory. "store" reads from an S3 server on the loopback interface with ``--latency``
seconds before each answer; each accelerator starts with an empty cache in ``--directory``. The server runs on all
cores. There is no "plain" for the store. The default ``--bytes`` last longer than a trial, so that accelerators read
what they did not read before; together with the caches, they can take 20 GB in ``--directory``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.accelerators_trial import LONGEST_SECONDS, SYSTEMS, WORKLOADS, Trial

ROOT = Path(__file__).parents[1]
TRIAL = str(Path(__file__).with_name("accelerators_trial.py"))
BUCKET = "bucket"


def largest(keeps: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to ``most`` that keeps up, if all smaller ones do; 0 for none."""
    low, high = 0, 1
    while high <= most and keeps(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def run(python: str, *arguments: str) -> str | None:
    """Run the program of trials with another Python, and return the last line that it printed; None where it failed."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    paths = {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "benchmarks" / "reading" / "stubs"]))}
    command = [python, "-W", "ignore", TRIAL, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | keys | paths, text=True, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            printed = ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return None if process.returncode else (printed.splitlines() or [""])[-1]


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with MosaicML Streaming and litData")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--places", nargs="+", choices=["local", "store"], default=["local", "store"])
    parser.add_argument("--bytes", type=float, default=2e9, help="of each dataset, at least two batches")
    parser.add_argument("--seconds", type=float, default=8, help="of each trial")
    parser.add_argument("--workers", type=int, default=1, help="of each accelerator (default: %(default)s)")
    parser.add_argument("--most", type=int, default=24, help="accelerators (default: %(default)s)")
    parser.add_argument("--latency", type=float, default=0.05, help="of the store, seconds before each answer")
    parser.add_argument("--directory", help="where to write data and caches (default: a temporary directory)")
    parser.add_argument("--json", type=Path, default=Path("build/accelerators.json"))
    return parser.parse_args()


def main() -> None:
    """Measure, and write all trials."""
    options = parse_arguments()
    trials = compare(options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"options": vars(options), "trials": trials}, indent=1, default=str))


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the data, search for each system, print each row when it is complete, and return all trials."""
    pythons = {"ours": sys.executable, "plain": sys.executable, "litData": options.peers, "MosaicML": options.peers}
    systems = [system for system in options.systems if pythons[system]]
    print(
        f"| workload | place | cores | utilization | {' | '.join(systems)} |\n|---|---|--:|--:|{'--:|' * len(systems)}"
    )
    trials: list[dict[str, Any]] = []
    for name in options.workloads:
        workload = WORKLOADS[name]
        batches = max(2, round(options.bytes / workload.sample_bytes / workload.batch_size))
        with ExitStack() as stack:
            root = Path(stack.enter_context(TemporaryDirectory(dir=options.directory)))
            for form in {SYSTEMS[system] for system in systems}:
                python = options.peers if form == "litdata" else sys.executable
                target = root / BUCKET / form
                if run(python, "write", form, str(target), name, str(batches * workload.batch_size)) is None:
                    raise SystemExit(f"could not write {form}")
            endpoint = ""
            if "store" in options.places:
                from tests.servers import http_server

                endpoint = stack.enter_context(http_server(root, latency=options.latency))
            for place in options.places:
                for cores in options.cores:
                    cells = []
                    for system in systems:
                        if system == "plain" and place == "store":
                            cells.append("–")
                            continue
                        bench = Search(options, pythons[system], root, endpoint, trials)
                        number = largest(partial(bench.keeps, system, name, place, cores), options.most)
                        cells.append(f"≥ {number}" if number == options.most else str(number))
                    print(
                        f"| {workload.title} | {place} | {cores} | {workload.bound:.0%} | {' | '.join(cells)} |",
                        flush=True,
                    )
    return trials


@dataclass(frozen=True)
class Search:
    """Trials of one system, on data in a directory and on a server."""

    options: argparse.Namespace
    python: str
    root: Path
    endpoint: str
    trials: list[dict[str, Any]]
    """All trials, with their utilization."""

    def keeps(self, system: str, workload: str, place: str, cores: int, accelerators: int) -> bool:
        """Return whether a number of accelerators reaches the utilization; a trial that fails does not."""
        form = SYSTEMS[system]
        with TemporaryDirectory(dir=self.root) as cache:
            trial = Trial(
                system=system,
                workload=workload,
                accelerators=accelerators,
                cores=cores,
                workers=self.options.workers,
                seconds=self.options.seconds,
                data=f"s3://{BUCKET}/{form}" if place == "store" else str(self.root / BUCKET / form),
                cache=cache,
                endpoint=self.endpoint,
            )
            os.environ["S3_ENDPOINT_URL"] = self.endpoint
            text = run(self.python, "trial", json.dumps(asdict(trial)))
        utilization = float(text) if text else None
        self.trials.append({**asdict(trial), "place": place, "utilization": utilization})
        print(f"{system}, {workload}, {place}, {cores} cores, {accelerators}: {utilization}", file=sys.stderr)
        return utilization is not None and utilization >= WORKLOADS[workload].bound


if __name__ == "__main__":
    main()
