"""How soon a dataset of very many shards starts, the first time on a node and after that, and the memory this takes.

Run from the root of the repository, on a machine that does little else:

    python -m benchmarks.index_start

A start is ``StreamingDataset(...)``, its ``size``, the first 1,000 ids of an epoch in the order "blockwise", and a
saved position. Only ``index.json`` is there; it has as many shards as are asked for, compressed and with two hashes, as
a writer makes it. It is read in place, and fetched from a server on this machine, which counts for the first start.
Memory is the most that was resident above what was after the imports; a mapped file counts as far as it was read.
"cpu" is processor time, which tells more on a machine that has other work. Each start is a fresh process. Prints a
Markdown table and writes JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from lightning_streaming import StreamingDataset
from lightning_streaming.reading.dataset import dataset_world, run_state_of
from lightning_streaming.resume.run_state import drawn_sequence
from lightning_streaming.resume.state import Cursor
from tests.servers import http_server

SHARDS = (10_000, 100_000, 1_000_000)
FIRST_BATCHES, BATCH_SIZE = 32, 32
_FILE = '{"basename": "shard.%05d.mds%s", "bytes": %d, "hashes": {"sha1": "%s", "xxh3_64": "%s"}}'
_SHARD = (
    '{"column_encodings": ["int", "str", "ndarray:uint16:1024", "jpeg"], "column_names": ["id", "text", "tokens", '
    '"image"], "column_sizes": [8, null, 2048, null], "compression": "zstd:3", "format": "mds", "hashes": ["sha1", '
    f'"xxh3_64"], "raw_data": {_FILE}, "samples": %d, "size_limit": 67108864, "version": 2, "zip_data": {_FILE}}}'
)


def put_index(directory: Path, shards: int) -> int:
    """Write an index as the writer of so many shards does; gives its bytes."""
    directory.mkdir()
    with (directory / "index.json").open("w") as file:
        file.write('{"shards": [')
        for number, text in enumerate(shard_texts(shards)):
            file.write(f", {text}" if number else text)
        file.write('], "version": 2}')
    return (directory / "index.json").stat().st_size


def shard_texts(shards: int) -> Iterator[str]:
    """The JSON of each shard."""
    for number in range(shards):
        digits = hashlib.sha512(str(number).encode()).hexdigest()
        raw = (number, "", 67_000_000 + number % 1000, digits[:40], digits[40:56])
        packed = (number, ".zstd", 30_000_000 + number % 991, digits[56:96], digits[96:112])
        yield _SHARD % (*raw, 1000 + number % 7, *packed)


# --- in a process of its own ---


def measure(remote: str) -> dict[str, float]:
    """Seconds of one start, and the most memory meanwhile in MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # makes the kernel forget the peak, which is that of the imports
    before = resident_mib("VmRSS")
    began, busy = time.perf_counter(), time.process_time()
    dataset = StreamingDataset(remote=remote, shuffle=True, shuffle_algo="blockwise", batch_size=BATCH_SIZE)
    assert dataset.size
    epoch = run_state_of(dataset).on(dataset_world(dataset)).epoch(Cursor(0, 0))
    positions = epoch.partition.batches(np.arange(FIRST_BATCHES), 0, 0)
    assert len(drawn_sequence(epoch).ids(positions.reshape(-1))) == FIRST_BATCHES * BATCH_SIZE
    dataset.state_dict(0)
    seconds, cpu = time.perf_counter() - began, time.process_time() - busy
    return {"seconds": seconds, "cpu": cpu, "peak_mib": resident_mib("VmHWM") - before}


def resident_mib(field: str) -> float:
    """Memory of this process; VmRSS for now, VmHWM for the most since the kernel was made to forget."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


# --- around it ---


def measured(remote: str, cache: Path) -> dict[str, float]:
    """One start in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.index_start", "--measure", remote]
    environment = os.environ | {"LIGHTNING_STREAMING_CACHE": str(cache)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure_all(shards: int, times: int, scratch: Path) -> list[dict[str, Any]]:
    """First and later starts of an index of so many shards, in place and over HTTP."""
    data = scratch / "data"
    size = put_index(data, shards)
    rows = []
    for way in ("in place", "over HTTP"):
        with nullcontext(str(data)) if way == "in place" else http_server(data) as location:
            cache = scratch / way
            first = measured(location, cache)
            later = [measured(location, cache) for _ in range(times)]
        kept = sum(path.stat().st_size for path in cache.rglob(".index-*"))
        median = {key: statistics.median(run[key] for run in later) for key in first}
        rows.append({"shards": shards, "way": way, "bytes": size, "kept": kept, "first": first, "later": median})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line for each size and way."""
    lines = [
        "| shards | index.json | read | first start | cpu | memory | later starts | cpu | memory | parsed form |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        starts = " | ".join(
            f"{start['seconds']:.2f} s | {start['cpu']:.2f} s | {start['peak_mib']:.0f} MiB"
            for start in (row["first"], row["later"])
        )
        about = f"{row['shards']:,} | {row['bytes'] / 2**20:.0f} MiB | {row['way']}"
        lines.append(f"| {about} | {starts} | {row['kept'] / 2**20:.0f} MiB |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shards", type=int, nargs="+", default=SHARDS, help="sizes (default: %(default)s)")
    parser.add_argument("--times", type=int, default=3, help="later starts, of which the median counts")
    parser.add_argument("--json", type=Path, default=Path("build/index_start.json"), help="(default: %(default)s)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure, print and write."""
    arguments = parse_arguments()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return 0
    rows = []
    for shards in arguments.shards:
        with tempfile.TemporaryDirectory() as scratch:
            rows += measure_all(shards, arguments.times, Path(scratch))
    print(markdown(rows))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
