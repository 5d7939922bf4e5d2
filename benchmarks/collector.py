"""What Python's garbage collector costs a worker, in time and in memory that it no longer shares with the trainer.

A process that holds many objects forks one worker after another. Each reads the same dataset of strings and JSON, whose
values are objects, in batches of 32:

    frozen      as workers do: the objects there are at the start are spared, the collector runs when Python thinks fit
    not frozen  the same without sparing them
    off         frozen, and the collector never runs
    every 10    frozen, and it runs after every tenth batch only
    every 10, not frozen    the same without sparing them

    python benchmarks/collector.py --objects 1m --samples 50k --times 3
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
import time
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

from lightning_streaming import MDSWriter, StreamingDataset
from lightning_streaming.units import parse_count

BATCH = 32
WAYS = ("frozen", "not frozen", "off", "every 10", "every 10, not frozen")


def write_dataset(root: Path, samples: int) -> str:
    """Write samples that decode to objects; gives where."""
    with MDSWriter(out=str(root), columns={"text": "str", "meta": "json"}) as writer:
        for index in range(samples):
            writer.write({"text": "x" * 300, "meta": {"tags": ["a", str(index)], "parts": {"n": [1, 2, index]}}})
    return str(root)


def read(remote: str, way: str, report: Connection) -> None:
    """Read all samples in this process; report seconds of processor time, and MiB of memory of its own."""
    if "not frozen" not in way:
        gc.freeze()
    if way not in ("frozen", "not frozen"):
        gc.disable()
    samples = iter(StreamingDataset(remote=remote, batch_size=BATCH))
    began, batches = time.process_time(), 0
    while list(islice(samples, BATCH)):
        batches += 1
        if "every 10" in way and batches % 10 == 0:
            gc.collect()
    report.send((time.process_time() - began, own_mib()))


def own_mib() -> float:
    """Memory that this process has written to, and shares with nobody."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


def measure(remote: str, way: str) -> tuple[float, float]:
    """What one worker reports."""
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=read, args=(remote, way, there))
    worker.start()
    found: tuple[float, float] = here.recv()
    worker.join()
    return found


def main() -> None:
    """Measure each way in turn, several times, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", default="1m", help="objects the trainer holds (default: %(default)s)")
    parser.add_argument("--samples", default="50k", help="samples to read (default: %(default)s)")
    parser.add_argument("--times", type=int, default=3, help="workers for each way; the fastest counts")
    arguments = parser.parse_args()
    held = [[index] for index in range(parse_count(arguments.objects, "--objects"))]
    samples = parse_count(arguments.samples, "--samples")
    with tempfile.TemporaryDirectory() as directory:
        remote = write_dataset(Path(directory) / "data", samples)
        rounds = [{way: measure(remote, way) for way in WAYS} for _ in range(arguments.times)]
    print(f"the trainer holds {len(held)} objects\n\n| collector | µs a sample | MiB of its own |\n|---|---|---|")
    for way in WAYS:
        seconds = min(found[way][0] for found in rounds)
        mib = min(found[way][1] for found in rounds)
        print(f"| {way} | {seconds / samples * 1e6:.2f} | {mib:.0f} |")


if __name__ == "__main__":
    main()
