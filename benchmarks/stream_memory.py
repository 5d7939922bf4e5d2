"""Memory of a loader with many workers, streams and shards, compared with other libraries' loaders.

Run from the root of the repository, on Linux:

    python -m benchmarks.stream_memory                          # 10^6 shards in 1,000 streams: needs 10^6 hard links
    python -m benchmarks.stream_memory --peers .venv-peers/bin/python

Each system mixes all streams evenly, shuffles them and reads local data, in a new process. After 5 batches of
each worker, the memory of the trainer process and its workers is added up: RSS counts shared pages in each process,
PSS divides them, USS leaves them out. "peak" is the sum of the largest RSS of each process. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

SAMPLES, BATCH_SIZE, BATCHES_PER_WORKER = 4, 32, 5
"""Samples per shard and per batch, and batches before the measurement."""
FIELDS = {"Rss": "rss", "Pss": "pss", "Private_Clean": "uss", "Private_Dirty": "uss"}


def write_mds(root: Path, shards: int) -> None:
    """Write one stream of MDS shards."""
    from lightning_streaming import MDSWriter

    with MDSWriter(out=str(root), columns={"x": "ndarray:int64:32"}, size_limit=1300) as writer:
        for number in range(shards * SAMPLES):
            writer.write({"x": np.full(32, number)})
    written = len(list(root.glob("shard.*")))
    assert written == shards, f"{written} shards"


def write_litdata(root: Path, shards: int) -> None:
    """Write one dataset of litData's chunks."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(root), chunk_size=SAMPLES)
    for number in range(shards * SAMPLES):
        writer[number] = {"x": np.full(32, number)}
    writer.done()
    writer.merge()


def link_streams(root: Path, streams: int) -> None:
    """Link the files of the first stream into all others: a copy would need a block for each."""
    files = [entry.name for entry in os.scandir(root / "0")]
    for stream in range(1, streams):
        (root / str(stream)).mkdir()
        for name in files:
            os.link(root / "0" / name, root / str(stream) / name)


# --- loaders, each in its own process ---


def ours(root: Path, streams: int, workers: int) -> Any:
    """Return our loader."""
    from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset

    mixed = {str(number): Stream(remote=str(root / str(number)), proportion=1) for number in range(streams)}
    dataset = StreamingDataset(streams=mixed, shuffle=True, batch_size=BATCH_SIZE)
    return StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers)


def mosaicml(root: Path, streams: int, workers: int) -> Any:
    """Return the loader of MosaicML Streaming."""
    from streaming import Stream, StreamingDataset
    from torch.utils.data import DataLoader

    mixed = [Stream(local=str(root / str(number)), proportion=1) for number in range(streams)]
    dataset = StreamingDataset(streams=mixed, shuffle=True, batch_size=BATCH_SIZE, num_canonical_nodes=1)
    return DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers)


def litdata(root: Path, streams: int, workers: int) -> Any:
    """Return the loader of litData."""
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    parts = [StreamingDataset(str(root / str(number)), shuffle=True) for number in range(streams)]
    dataset = CombinedStreamingDataset(parts, weights=[1 / streams] * streams, iterate_over_all=False)
    return StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers)


LOADERS: dict[str, Callable[[Path, int, int], Any]] = {"ours": ours, "mosaicml": mosaicml, "litdata": litdata}


def family(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(child for task in tasks for number in task.read_text().split() for child in family(int(number)))]


def memory() -> dict[str, float]:
    """Return the memory of this process and its workers in MiB."""
    sums = dict.fromkeys(("rss", "pss", "uss", "peak"), 0.0)
    pids = family(os.getpid())
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size = line.split()[:2]
            if (field := FIELDS.get(name.rstrip(":"))) is not None:
                sums[field] += int(size) / 1024
        status = Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1]
        sums["peak"] += int(status.split()[0]) / 1024
    return {"processes": len(pids), **sums}


def measure(system: str, root: Path, streams: int, workers: int) -> dict[str, float]:
    """Read batches, and return memory and the seconds until the first batch."""
    began = time.perf_counter()
    batches = iter(LOADERS[system](root, streams, workers))
    next(batches)
    first = time.perf_counter() - began
    for _ in range(BATCHES_PER_WORKER * workers - 1):
        next(batches)
    return {"first_batch": first, **memory()}


# --- around them ---


def run(python: str, *arguments: object) -> str:
    """Run this program with another Python, and return what it printed."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "reading" / "stubs")}
    command = [python, "-W", "ignore", __file__, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True).stdout


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=1000, help="of each stream (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--peers", help="Python of an environment with the peers")
    parser.add_argument("--directory", help="where to write the data (default: a temporary directory)")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=LOADERS, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Write the data, measure each system, and print a table."""
    options = parse_arguments()
    if options.write:
        (write_mds if options.write == "mds" else write_litdata)(options.root / "0", options.shards)
        return
    if options.measure:
        print(json.dumps(measure(options.measure, options.root, options.streams, options.workers)), flush=True)
        return
    systems = {"ours": ("mds", sys.executable)}
    if options.peers:
        systems |= {"mosaicml": ("mds", options.peers), "litdata": ("litdata", options.peers)}
    print("| system | processes | RSS | PSS | USS | peak | first batch |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    with TemporaryDirectory(dir=options.directory) as directory:
        for system, (form, python) in systems.items():
            root = Path(directory, form)
            if not root.exists():
                root.mkdir()
                run(python, "--write", form, "--root", root, "--shards", options.shards)
                link_streams(root, options.streams)
            sizes_and_time = json.loads(
                run(
                    python,
                    *("--measure", system, "--root", root),
                    *("--streams", options.streams, "--workers", options.workers),
                ).splitlines()[-1]
            )
            sizes = " | ".join(f"{sizes_and_time[name]:,.0f} MiB" for name in ("rss", "pss", "uss", "peak"))
            print(
                f"| {system} | {sizes_and_time['processes']} | {sizes} | {sizes_and_time['first_batch']:.1f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
