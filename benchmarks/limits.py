"""How near the machine's limits we are: shares of memory's and of the link's rate, and processor seconds per GB.

Run from the root of the repository, on a machine that does nothing else:

    python -m benchmarks.limits
    python -m benchmarks.limits --only memory --directory /dev/shm

Two groups, each beside its limit, all in turn in fresh processes; medians of ``--rounds``:

    memory   rows of 4 KiB gathered from an array that is in memory, by ``numpy.take`` into new batches of 256 (the
             limit), and batches of the same rows as MDS from a filled cache; blobs of 64 KiB copied one by one into
             ``bytes`` (the limit), and the same as MDS, without workers and with two
    link     16 shards of 64 MiB on a server that speaks S3, first without caps, then with those of
             ``benchmarks.cold_epoch``: bytes received by bare sockets and written to files (the limit of processor
             time), our downloads into a cache, the same with SHA-1 looked at, whole cold epochs, and ``fs.get``

Processor seconds are user and system of the measured process and of its workers, the server not counted. Imports are
left out. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from benchmarks import cold_epoch

ROW_BYTES, ROWS_A_BATCH = 4096, 256
BLOB_BYTES, BLOBS_A_BATCH = 65_536, 32
CHUNK_BYTES = 8 << 20
CONNECTIONS = 16
DOWNLOADS = 4
"""Shards at a time, each in chunks."""
NO_CAPS = {"latency": 0.0, "per_connection": 0.0, "total": 0.0}


class Spent(NamedTuple):
    """What one measurement took."""

    seconds: float
    processor: float
    """Seconds of processor time."""
    size: int
    """Bytes that were read."""


class BlobShard(NamedTuple):
    """A shard of the dataset of blobs."""

    name: str
    size: int
    sha1: str


@dataclass(frozen=True)
class Place:
    """Where a measurement finds its data."""

    root: Path
    """Has the datasets, and is what the server serves."""
    scratch: Path
    """An empty directory of its own."""
    endpoint: str
    """URL of the server; "" where there is none."""

    def rows(self) -> Path:
        """The dataset of rows."""
        return self.root / "rows"

    def blobs(self) -> Path:
        """The dataset of blobs, which is also the server's."""
        return self.root / cold_epoch.BUCKET / cold_epoch.NAME

    def shards(self) -> list[BlobShard]:
        """The shards of blobs."""
        files = [one["raw_data"] for one in json.loads((self.blobs() / "index.json").read_bytes())["shards"]]
        return [BlobShard(file["basename"], file["bytes"], file["hashes"]["sha1"]) for file in files]


def write(root: Path, shards: int) -> None:
    """Write both datasets."""
    from lightning_streaming import MDSWriter

    rng, size = np.random.default_rng(0), shards * cold_epoch.SHARD_BYTES
    with MDSWriter(out=str(root / "rows"), columns={"row": f"ndarray:uint16:{ROW_BYTES // 2}"}) as writer:
        for row in rng.integers(0, 2**16, (size // ROW_BYTES // 4, ROW_BYTES // 2), np.uint16):
            writer.write({"row": row})
    out = str(root / cold_epoch.BUCKET / cold_epoch.NAME)
    options: dict[str, Any] = {"size_limit": cold_epoch.SHARD_BYTES, "hashes": ["sha1"]}
    with MDSWriter(out=out, columns={"blob": "bytes"}, **options) as writer:
        for _ in range(shards * (cold_epoch.SHARD_BYTES // BLOB_BYTES - 1)):
            writer.write({"blob": rng.bytes(BLOB_BYTES)})


def take(place: Place) -> Iterator[int]:
    """Gather rows of an array by numpy, shuffled."""
    files = sorted(place.rows().glob("*.mds"))
    data = np.concatenate([np.fromfile(file, np.uint8) for file in files])
    rows = data[: len(data) // ROW_BYTES * ROW_BYTES].reshape(-1, ROW_BYTES)
    order = np.random.default_rng(0).permutation(len(rows))
    yield 0
    yield sum(rows.take(order[at : at + ROWS_A_BATCH], 0).nbytes for at in range(0, len(rows), ROWS_A_BATCH))


def copy(place: Place) -> Iterator[int]:
    """Copy blobs out of memory, shuffled, one by one."""
    data = memoryview(b"".join(file.read_bytes() for file in sorted(place.blobs().glob("*.mds"))))
    order = (np.random.default_rng(0).permutation(len(data) // BLOB_BYTES) * BLOB_BYTES).tolist()
    yield 0
    size = 0
    for at in range(0, len(order), BLOBS_A_BATCH):
        batch = [bytes(data[start : start + BLOB_BYTES]) for start in order[at : at + BLOBS_A_BATCH]]
        size += sum(map(len, batch))
    yield size


def read(local: Path, batch_size: int, workers: int) -> Iterator[int]:
    """Read a dataset that is here: one epoch before, and the one that is measured, its start included."""
    from lightning_streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=str(local), shuffle=True)
    with closing(StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers)) as loader:
        for _ in range(2):
            size = 0
            for batch in loader:
                values = next(iter(batch.values()))
                size += sum(map(len, values)) if isinstance(values, list) else values.nbytes
            yield size


def sockets(place: Place) -> Iterator[int]:
    """Receive shards by bare sockets, and write them to files: as little as a client can do."""
    address = urlsplit(place.endpoint)
    of_thread = threading.local()

    def fetch(target: int, name: str, start: int, stop: int) -> None:
        if not hasattr(of_thread, "socket"):
            of_thread.socket = socket.create_connection((address.hostname or "", address.port or 80))
            of_thread.buffer = memoryview(bytearray(1 << 20))
        request = f"GET /{cold_epoch.BUCKET}/{cold_epoch.NAME}/{name} HTTP/1.1\r\nHost: {address.hostname}\r\n"
        of_thread.socket.sendall(f"{request}Range: bytes={start}-{stop - 1}\r\n\r\n".encode())
        got = b""
        while b"\r\n\r\n" not in got:
            got += of_thread.socket.recv(4096)
        body = got.partition(b"\r\n\r\n")[2]
        start += os.pwrite(target, body, start)
        while start < stop:
            length = of_thread.socket.recv_into(of_thread.buffer[: stop - start])
            start += os.pwrite(target, of_thread.buffer[:length], start)

    shards = place.shards()
    yield 0
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        targets = {shard: os.open(place.scratch / shard.name, os.O_WRONLY | os.O_CREAT) for shard in shards}
        jobs = [
            pool.submit(fetch, targets[shard], shard.name, start, min(start + CHUNK_BYTES, shard.size))
            for shard in shards
            for start in range(0, shard.size, CHUNK_BYTES)
        ]
        for job in jobs:
            job.result()
    yield sum(shard.size for shard in shards)


def download(place: Place, *, hashed: bool) -> Iterator[int]:
    """Download shards as the cache does."""
    from lightning_streaming.formats.algorithms import hash_file
    from lightning_streaming.storage import Location

    options = {"key": "key", "secret": "secret", "endpoint_url": place.endpoint}
    source = Location(f"s3://{cold_epoch.BUCKET}/{cold_epoch.NAME}", options)
    shards = place.shards()
    (source / "index.json").read()
    yield 0

    def one(shard: BlobShard) -> None:
        (source / shard.name).download(place.scratch / shard.name, size=shard.size)
        if hashed and hash_file("sha1", place.scratch / shard.name) != shard.sha1:
            raise SystemExit(f"{shard.name} is not as its SHA-1 says")

    with ThreadPoolExecutor(DOWNLOADS) as pool:
        list(pool.map(one, shards))
    yield sum(shard.size for shard in shards)


def epoch(place: Place, workers: int) -> Iterator[int]:
    """A cold epoch of ours, all in."""
    os.environ["COLD_EPOCH_ORDER"] = "shuffled"
    yield 0
    yield sum(
        len(blob) for batch in cold_epoch.our_epoch(place.scratch, workers, place.endpoint) for blob in batch["blob"]
    )


def get(place: Place) -> Iterator[int]:
    """Download the files with fsspec alone."""
    os.environ["COLD_EPOCH_ROOT"] = str(place.root)
    yield 0
    cold_epoch.plain_get(place.scratch, 0, place.endpoint)
    yield sum(shard.size for shard in place.shards())


Measure = Callable[[Place], Iterator[int]]
"""Prepares, gives something, is measured from then on, and gives the bytes that it has read."""

MEMORY: dict[str, Measure] = {
    "rows of 4 KiB: `numpy.take`": take,
    "rows of 4 KiB: ours": lambda place: read(place.rows(), ROWS_A_BATCH, 0),
    "blobs of 64 KiB: copied one by one": copy,
    "blobs of 64 KiB: ours": lambda place: read(place.blobs(), BLOBS_A_BATCH, 0),
    "blobs of 64 KiB: ours, 2 workers": lambda place: read(place.blobs(), BLOBS_A_BATCH, 2),
}
LINK: dict[str, Measure] = {
    "bare sockets, written to files": sockets,
    "our downloads": lambda place: download(place, hashed=False),
    "our downloads, and SHA-1 of the files": lambda place: download(place, hashed=True),
    "`fs.get`": get,
    "our cold epoch": lambda place: epoch(place, 0),
    "our cold epoch, 2 workers": lambda place: epoch(place, 2),
}
IMPORTS = ("torch", "s3fs", "lightning_streaming.reading.loader", "lightning_streaming.formats.algorithms")


def measure(name: str, place: Place) -> Spent:
    """In a process of its own: what one measurement takes."""
    for module in IMPORTS:
        importlib.import_module(module)
    steps = {**MEMORY, **LINK}[name](place)
    next(steps)
    seconds, processor = time.perf_counter(), cold_epoch.processor_seconds()
    size = next(steps)
    return Spent(time.perf_counter() - seconds, cold_epoch.processor_seconds() - processor, size)


def measured(name: str, root: Path, endpoint: str) -> Spent:
    """One measurement in a fresh process, with an empty directory."""
    with tempfile.TemporaryDirectory(dir=root, prefix="limits-") as scratch:
        command = [sys.executable, "-m", "benchmarks.limits", "--measure", name, str(root), scratch, endpoint]
        environment = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-4000:]}")
        return Spent(*json.loads(done.stdout))


def rounds(names: list[str], root: Path, endpoint: str, number: int) -> dict[str, list[Spent]]:
    """All of some measurements, in turn."""
    found: dict[str, list[Spent]] = {name: [] for name in names}
    for turn, name in product(range(number), names):
        print(f"round {turn + 1} of {number}: {name}", file=sys.stderr, flush=True)
        found[name].append(measured(name, root, endpoint))
    return found


def show_memory(found: dict[str, list[Spent]]) -> None:
    """Print the table of what is read from memory."""
    print("| from memory | GB/s | of the limit | processor seconds per GB |\n|---|--:|--:|--:|")
    limit = 0.0
    for name, spent in found.items():
        rate = statistics.median(one.size / one.seconds for one in spent) / 1e9
        limit = limit if "ours" in name else rate
        shown = f"{rate / limit:.0%}" if "ours" in name else "the limit"
        print(f"| {name} | {rate:.2f} | {shown} | {processor(spent):.2f} |")


def show_link(found: dict[str, list[Spent]], total: float) -> None:
    """Print the table of what is fetched; ``total`` is the link's bytes a second, 0 for no cap."""
    capped = f"a link of {total / 1e6:.0f} MB/s" if total else "no caps"
    print(f"\n| through S3, {capped} | GB/s | of the link | processor seconds per GB |\n|---|--:|--:|--:|")
    for name, spent in found.items():
        rate = statistics.median(one.size / one.seconds for one in spent)
        share = f"{rate / total:.0%}" if total else "–"
        print(f"| {name} | {rate / 1e9:.2f} | {share} | {processor(spent):.2f} |")


def processor(spent: list[Spent]) -> float:
    """Processor seconds per GB, the median."""
    return statistics.median(one.processor / one.size for one in spent) * 1e9


def compare(options: argparse.Namespace) -> None:
    """Write the data, measure, and print the tables."""
    from tests.servers import http_server

    with tempfile.TemporaryDirectory(dir=options.directory, prefix="limits-") as folder:
        root = Path(folder)
        write(root, options.shards)
        if options.only != "link":
            show_memory(rounds(list(MEMORY), root, "", options.rounds))
        for caps in () if options.only == "memory" else (NO_CAPS, cold_epoch.CAPS):
            with http_server(root, **caps) as endpoint:
                show_link(rounds(list(LINK), root, endpoint, options.rounds), caps["total"])


def main() -> None:
    """Compare; or, as the process that is started for it, measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["memory", "link"], help="one group alone")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the median is shown")
    parser.add_argument("--shards", type=int, default=16, help="shards of 64 MiB")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where files are put")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, root, scratch, endpoint = options.measure
        print(json.dumps(measure(name, Place(Path(root), Path(scratch), endpoint))))
    else:
        compare(options)


if __name__ == "__main__":
    main()
