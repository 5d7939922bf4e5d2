"""Share of a Lightning training step that waits for data, compared with other libraries, and samples lost by a kill.

Run from the root of the repository, on Linux, on a machine that does little else:

    python -m benchmarks.training_wait                                     # ours only
    python -m benchmarks.training_wait --peers .venv-peers/bin/python --hugging-face .venv-hugging-face/bin/python

``--peers`` is an environment of reading/peers.txt, ``--hugging-face`` one of hugging_face.txt. A ``Trainer`` with DDP
(gloo) on the CPU runs ``--ranks`` ranks of ``--workers`` workers, with batches of 8 per rank. ``training_step`` only
sleeps. Text is read from an S3 server on the loopback interface that waits ``--latency`` seconds before each answer,
and is tokenized in ``collate_fn`` to at most 512 tokens. Each run starts new processes with an empty cache.

- Hugging Face: ``load_dataset("parquet", streaming=True)``, ``shuffle`` with its buffer, ``split_dataset_by_node``, and
  a ``StatefulDataLoader`` with persistent workers, prefetch factor 2 and forkserver. The files divide by the ranks.
- ours, Parquet: the same files in place. ours, MDS and MosaicML: MDS shards. litData: its chunks. Each stores id and
  text in files of ``--shard-bytes``, and is shuffled. Other settings are defaults.
- Lightning saves the position: it calls ``state_dict`` of the peers' loaders (rank 0 writes, all ranks load);
  ours has its callback. After a kill, MosaicML first cleans its shared memory, as its documentation says.

Columns. Waiting: time from the end of a training step to the start of the next, minus the same time with one cached
batch, as a share of all time after the first step; mean of the ranks. First batch: from creating the dataset to the
first step. Memory: PSS of ranks and workers at the last step. Fetched: bytes that the server sent in an epoch, over
the bytes of the stored files, which are what the ranks need together. Lost and repeated: ids that an epoch did not
train on, and that it trained on again, without a stop / killed with SIGKILL after a checkpoint and resumed.
"failed" marks a run that raised an error or hung; its samples are counted up to there. Runs for the other columns are
tried three times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.training_wait_rank import BATCH_SIZE, BUCKET, CHECKPOINT_STEPS, SYSTEMS, Job, write_data

ROOT = Path(__file__).parents[1]
RANK = str(Path(__file__).with_name("training_wait_rank.py"))
LONGEST_SECONDS, MOST_STEPS = 600, 400
_ATTEMPTS = 3


class Bench:
    """The data, its server, and runs of the trainer."""

    def __init__(self, options: argparse.Namespace, root: Path, endpoint: str) -> None:
        self.options, self.root, self.endpoint = options, root, endpoint
        self.pythons = {"ours": sys.executable, "peers": options.peers, "hugging_face": options.hugging_face}
        self.epoch_steps = options.samples // (BATCH_SIZE * options.ranks)

    def job(self, system: str, cache: Path, name: str, **changes: Any) -> Job:
        """Return a run with the options of all runs."""
        options = self.options
        return Job(
            system=system,
            root=str(self.root),
            cache=str(cache),
            endpoint=self.endpoint,
            log=str(cache / name),
            ranks=options.ranks,
            workers=options.workers,
            shuffle_buffer=options.shuffle_buffer,
            **changes,
        )

    def run(self, job: Job) -> bool:
        """Run all ranks, kill them if the job says when, and return whether they ended as they should."""
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "S3_ENDPOINT_URL": self.endpoint,
            "HF_HOME": job.cache,
            "TOKENIZERS_PARALLELISM": "false",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RUN_ID": "none",
            "GROUP_RANK": "0",
            "NODE_RANK": "0",
            "WORLD_SIZE": str(job.ranks),
            "LOCAL_WORLD_SIZE": str(job.ranks),
        }
        command = [self.pythons[SYSTEMS[job.system][0]], "-W", "ignore", RANK, "train", json.dumps(asdict(job))]
        processes = []
        for rank in map(str, range(job.ranks)):
            with Path(f"{job.log}.{rank}.err").open("w") as errors:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=environment | {"RANK": rank, "LOCAL_RANK": rank},
                        start_new_session=True,
                    )
                )
        began = time.monotonic()
        try:
            if job.kill_at >= 0:
                return any(line == b"kill\n" for line in iter(processes[0].stdout.readline, b""))  # type: ignore[union-attr]
            deadline = began + LONGEST_SECONDS
            codes = [process.wait(max(1, deadline - time.monotonic())) for process in processes]
            return not any(codes)
        except subprocess.TimeoutExpired:
            return False
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            print(f"{job.system}, {Path(job.log).name}: {time.monotonic() - began:.1f} s", file=sys.stderr)

    def measure_waiting(self, system: str, sleep: float) -> dict[str, Any]:
        """Return the times between steps, the time to the first batch and the memory."""
        steps = min(self.epoch_steps, MOST_STEPS, max(30, round(self.options.seconds / sleep)))
        for attempt in range(1, _ATTEMPTS + 1):
            with TemporaryDirectory(dir=self.root) as cache:
                job = self.job(system, Path(cache), "wait", sleep=sleep, steps=steps)
                if self.run(job):
                    ranks = [json.loads(Path(f"{job.log}.{rank}.json").read_text()) for rank in range(job.ranks)]
                    break
                print(f"{system} failed, attempt {attempt}:\n{errors_of(job)}", file=sys.stderr)
        else:
            raise SystemExit(f"{system} failed {_ATTEMPTS} times")
        marks = np.array([rank["marks"] for rank in ranks])
        return {
            "gaps": float((marks[:, 1:, 0] - marks[:, :-1, 1]).mean()),
            "step": float((marks[:, -1, 1] - marks[:, 0, 1]).mean() / (steps - 1)),
            "first_batch": max(rank["first_batch"] for rank in ranks),
            "pss": sum(rank["pss"] for rank in ranks),
        }

    def measure_epochs(self, system: str) -> dict[str, Any]:
        """Return what an epoch fetched, and the samples lost and repeated, without a stop and with a kill."""
        stored = self.root / BUCKET / SYSTEMS[system][1]
        size = sum(path.stat().st_size for path in stored.iterdir() if path.name != "index.json")
        before = self.bytes_sent()
        with TemporaryDirectory(dir=self.root) as cache:
            whole = self.job(system, Path(cache), "whole")
            ended = self.run(whole)
            results: dict[str, Any] = {"fetched": (self.bytes_sent() - before) / size}
            results["whole"] = self.differences(step_ids(whole)) | {"failed": not ended}
        with TemporaryDirectory(dir=self.root) as cache:
            kill_at = self.epoch_steps // 4 // CHECKPOINT_STEPS * CHECKPOINT_STEPS + CHECKPOINT_STEPS // 2
            killed = self.job(system, Path(cache), "killed", checkpoints=True, kill_at=kill_at)
            resumed = self.job(system, Path(cache), "resumed", checkpoints=True, resume=True)
            ended = self.run(killed) and self.run(resumed)
            first, rest = step_ids(killed), step_ids(resumed)
            began = min((step for step, _ in rest), default=0)
            kept = [row for row in first if row[0] < began]
            results["killed"] = self.differences(kept + rest) | {"failed": not ended, "resumed_at": began}
            if not ended:
                print(f"{system} failed:\n{errors_of(resumed)}", file=sys.stderr)
        return results

    def differences(self, steps: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """Count the samples that steps lost and repeated, of one epoch."""
        counts = Counter(number for _, ids in steps for number in ids)
        return {"lost": self.options.samples - len(counts), "repeated": counts.total() - len(counts)}

    def bytes_sent(self) -> int:
        """Return the bytes of all answers of the server."""
        with urllib.request.urlopen(f"{self.endpoint}/__log", data=b"") as answer:
            return sum(entry.get("sent", 0) for entry in json.load(answer))


def free_port() -> int:
    """Return a port that was free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def errors_of(job: Job) -> str:
    """Return the end of what the ranks wrote to standard error."""
    return "\n".join(Path(f"{job.log}.{rank}.err").read_text()[-2000:] for rank in range(job.ranks))


def step_ids(job: Job) -> list[tuple[int, list[int]]]:
    """Return the step number and the ids of each training step of all ranks."""
    logs = [Path(f"{job.log}.{rank}.steps") for rank in range(job.ranks)]
    rows = [list(map(int, line.split())) for log in logs if log.exists() for line in log.read_text().splitlines()]
    return [(step, ids) for step, *ids in rows]


def summarize(waits: dict[str, dict[float, list[dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """Return the medians over the rounds, and shares of waiting relative to the cached batch."""
    idle = {sleep: statistics.mean(run["gaps"] for run in runs) for sleep, runs in waits["cached batch"].items()}
    results: dict[str, dict[str, Any]] = {}
    for system, by_sleep in waits.items():
        every = [run for runs in by_sleep.values() for run in runs]
        results[system] = {key: statistics.median(run[key] for run in every) for key in ("first_batch", "pss")}
        results[system]["waiting"] = {
            sleep: statistics.median(max(0.0, run["gaps"] - idle[sleep]) / run["step"] for run in runs)
            for sleep, runs in by_sleep.items()
        }
    return results


def print_table(results: dict[str, dict[str, Any]], sleeps: list[float]) -> None:
    """Print the results as Markdown."""
    waits = [f"waiting at {sleep:g} s" for sleep in sleeps]
    print("| | " + " | ".join([*waits, "first batch", "memory", "fetched", "lost", "repeated"]) + " |")
    print("|---|" + "--:|" * (len(sleeps) + 5))
    for system, row in results.items():
        cells = [f"{row['waiting'][sleep]:.1%}" for sleep in sleeps]
        cells += [f"{row['first_batch']:.1f} s", f"{row['pss']:,.0f} MiB"]
        if "whole" in row:
            pair = [row["whole"], row["killed"]]
            failed = ["; failed" if epoch["failed"] else "" for epoch in pair]
            cells += [f"{row['fetched']:.2f}"]
            cells += [
                " / ".join(f"{epoch[key]:,}{end}" for epoch, end in zip(pair, failed, strict=True))
                for key in ("lost", "repeated")
            ]
        print(f"| {system} | " + " | ".join(cells) + " |")


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the share of waiting over the time of a step."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for system, row in results.items():
        axis.plot(row["waiting"].keys(), [100 * share for share in row["waiting"].values()], marker="o", label=system)
    axis.set(xscale="log", xlabel="computation per step, seconds", ylabel="waiting for data, % of a step")
    axis.grid(alpha=0.3)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python with MosaicML Streaming and litData")
    parser.add_argument("--hugging-face", help="Python with datasets and torchdata")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--files", type=int, default=16, help="of Parquet (default: %(default)s)")
    parser.add_argument("--shard-bytes", type=int, default=2**23, help="of MDS and litData (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="of each rank (default: %(default)s)")
    parser.add_argument("--shuffle-buffer", type=int, default=10_000, help="of Hugging Face (default: %(default)s)")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--sleeps", type=float, nargs="+", default=[0.3, 0.1, 0.03, 0.01], help="seconds per step")
    parser.add_argument("--seconds", type=float, default=15, help="of sleep in a run, within 30 to 400 steps")
    parser.add_argument("--rounds", type=int, default=3, help="runs of which the median is shown")
    parser.add_argument("--directory", help="where to write the data (default: a temporary directory)")
    parser.add_argument("--json", type=Path, default=Path("build/training_wait.json"))
    parser.add_argument("--plot", type=Path, default=Path("build/training_wait.png"))
    options = parser.parse_args()
    if options.samples % (options.ranks * BATCH_SIZE) or options.files % options.ranks:
        parser.error(f"--samples must divide by ranks x {BATCH_SIZE}, and --files by the ranks")
    return options


def main() -> None:
    """Write the data, measure each system, and print a table."""
    options = parse_arguments()
    from tests.servers import http_server

    environments = {"ours": True, "peers": options.peers, "hugging_face": options.hugging_face}
    systems = [
        name
        for name, (environment, *_) in SYSTEMS.items()
        if environments[environment] and (name in options.systems or name == "cached batch")
    ]
    with TemporaryDirectory(dir=options.directory) as directory:
        root = Path(directory)
        write_data(root, options.samples, options.files, options.shard_bytes)
        if options.peers:
            command = [options.peers, "-W", "ignore", RANK, "write-litdata", directory, str(options.shard_bytes)]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        with http_server(root, latency=options.latency) as endpoint:
            bench = Bench(options, root, endpoint)
            waits: dict[str, dict[float, list[dict[str, Any]]]] = {}
            for _ in range(options.rounds):
                for sleep in options.sleeps:
                    for system in systems:
                        runs = waits.setdefault(system, {}).setdefault(sleep, [])
                        runs.append(bench.measure_waiting(system, sleep))
            results = summarize(waits)
            for system in systems[1:]:
                results[system] |= bench.measure_epochs(system)
    print_table(results, options.sleeps)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"options": vars(options), "results": results}, indent=1, default=str))
    draw(results, options.plot)


if __name__ == "__main__":
    main()
