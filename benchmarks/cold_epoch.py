"""How fast an epoch goes whose shards must all be fetched first, beside the peers and plain downloads.

Run from the root of the repository, on a machine that does nothing else:

    python -m benchmarks.cold_epoch
    python -m benchmarks.cold_epoch --peers ~/peers/bin/python
    python -m benchmarks.cold_epoch --latency 0 --per-connection 0 --total 0      # no caps
    python -m benchmarks.cold_epoch --formats parquet npy webdataset

A server of objects on the loopback interface speaks as much S3 as a reader needs. It answers each request after
``--latency`` seconds, sends ``--per-connection`` bytes a second on each connection and ``--total`` on all together; 0
is no limit. ``--peers`` is the Python of an environment that has mosaicml-streaming, litdata or both. Every
measurement is a fresh process with an empty cache, which reads an epoch, shuffled unless ``--order`` says else, with
``--workers`` workers in batches of 32, all with default settings; systems alternate, and medians are shown, of those
epochs that a peer finishes. "get" only downloads the files, all at once, with fsspec. With ``--formats`` we read the
same samples as other formats, too, by an index that was made ahead: row groups of Parquet, four to a file, one
``.npy`` file, and tar files. Shown are seconds for the epoch, from making the dataset to the last batch; times the
link's limit; seconds to the first batch; and seconds of processor time (user and system, workers included) per GB.
Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SHARD_BYTES = 2**26
SAMPLE_BYTES = 2**16
BATCH_SIZE = 32
LONGEST_SECONDS = 90
TRIES = 3
"""Of each epoch: a peer's may fail, as its workers can read a file that is not whole yet, or hang."""
CAPS = {"latency": 0.05, "per_connection": 20e6, "total": 160e6}
"""Of the server, unless told otherwise: seconds before each answer, bytes a second of one connection and of all."""

BUCKET = "bucket"
NAME = "mds"
FORMATS = ("parquet", "npy", "webdataset")
PACKAGES = {
    "ours": ("lightning_streaming.reading.loader", "s3fs"),
    "MosaicML Streaming": ("streaming", "boto3"),
    "litdata": ("litdata", "boto3"),
    "get": ("s3fs",),
}
"""What is imported before the clock runs."""


def write_datasets(root: Path, shards: int, peers: str | None) -> int:
    """Write the same samples in both formats; gives the bytes of all of them."""
    from lightning_streaming import MDSWriter

    rng, samples = np.random.default_rng(0), shards * (SHARD_BYTES // SAMPLE_BYTES - 1)
    with MDSWriter(out=str(root / BUCKET / NAME), columns={"blob": "bytes"}, size_limit=SHARD_BYTES) as writer:
        for _ in range(samples):
            writer.write({"blob": rng.bytes(SAMPLE_BYTES)})
    if peers:
        command = [peers, str(Path(__file__).resolve()), "--write-litdata", str(root), str(shards)]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return samples * SAMPLE_BYTES


def write_litdata(root: Path, shards: int) -> None:
    """In a process of the peers: write litdata's format, with its own writer."""
    from litdata.streaming.writer import BinaryWriter

    rng = np.random.default_rng(0)
    (root / BUCKET / "lit").mkdir(parents=True)
    writer = BinaryWriter(str(root / BUCKET / "lit"), chunk_bytes=SHARD_BYTES)
    for index in range(shards * (SHARD_BYTES // SAMPLE_BYTES - 1)):
        # An array: litdata's workers hand over each bytes object as a file of its own, and run out of descriptors.
        writer[index] = {"blob": np.frombuffer(rng.bytes(SAMPLE_BYTES), np.uint8)}
    writer.done()
    writer.merge()


def write_formats(root: Path, shards: int, formats: list[str]) -> None:
    """Write the same samples in other formats, each with its index."""
    from lightning_streaming.cache.generated_index import generated_index
    from lightning_streaming.storage import Location

    rng, rows = np.random.default_rng(0), SHARD_BYTES // SAMPLE_BYTES - 1
    blobs = [rng.bytes(SAMPLE_BYTES) for _ in range(shards * rows)]
    for name in formats:
        place = root / BUCKET / name
        place.mkdir(parents=True)
        if name == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            for start in range(0, len(blobs), 4 * rows):
                table = pa.table({"blob": blobs[start : start + 4 * rows]})
                pq.write_table(table, place / f"{start:06}.parquet", row_group_size=rows, compression="none")
        elif name == "npy":
            np.save(place / "all.npy", np.frombuffer(b"".join(blobs), np.uint8).reshape(-1, SAMPLE_BYTES))
        else:
            for start in range(0, len(blobs), rows):
                with tarfile.open(place / f"{start:06}.tar", "w") as tar:
                    for number, blob in enumerate(blobs[start : start + rows], start):
                        member = tarfile.TarInfo(f"{number:06}.blob")
                        member.size = len(blob)
                        tar.addfile(member, io.BytesIO(blob))
        (place / "index.json").write_bytes(generated_index(Location(str(place)), name))


def shuffled() -> bool:
    """In a process that measures: whether the epoch is read shuffled."""
    return os.environ["COLD_EPOCH_ORDER"] == "shuffled"


def our_epoch(cache: Path, workers: int, endpoint: str) -> Iterable[Any]:
    """Batches of ours."""
    from lightning_streaming import StreamingDataLoader, StreamingDataset

    options = {"key": "key", "secret": "secret", "endpoint_url": endpoint}
    dataset = StreamingDataset(
        remote=f"s3://{BUCKET}/{NAME}", local=str(cache / NAME), storage={"options": options}, shuffle=shuffled()
    )
    return StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers)


def format_epoch(name: str, cache: Path, workers: int, endpoint: str) -> Iterable[Any]:
    """Batches of ours of data of another format."""
    from lightning_streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        remote=f"s3://{BUCKET}/{name}",
        local=str(cache / name),
        storage={"options": {"key": "key", "secret": "secret", "endpoint_url": endpoint}},
        shuffle=shuffled(),
        format=name,
        columns=["values" if name == "npy" else "blob"],
    )
    return StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers)


def reference_epoch(cache: Path, workers: int, _endpoint: str) -> Iterable[Any]:
    """Batches of MosaicML Streaming."""
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        remote=f"s3://{BUCKET}/{NAME}", local=str(cache / NAME), shuffle=shuffled(), batch_size=BATCH_SIZE
    )
    loader: Iterable[Any] = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers)
    return loader


def litdata_epoch(cache: Path, workers: int, endpoint: str) -> Iterable[Any]:
    """Batches of litdata."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it would talk to an endpoint by https only
    options = {"endpoint_url": endpoint, "aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    dataset = StreamingDataset(
        f"s3://{BUCKET}/lit",
        cache_dir=str(cache / NAME),
        shuffle=shuffled(),
        storage_options=options,
    )
    loader: Iterable[Any] = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers)
    return loader


def plain_get(cache: Path, _workers: int, endpoint: str) -> Iterable[Any]:
    """Only the downloads, as many at a time as fsspec wants."""
    import fsspec

    filesystem = fsspec.filesystem("s3", key="key", secret="secret", endpoint_url=endpoint)
    source = Path(os.environ["COLD_EPOCH_ROOT"]) / BUCKET / NAME
    files = sorted(path.name for path in source.iterdir())
    (cache / NAME).mkdir()
    filesystem.get([f"{BUCKET}/{NAME}/{file}" for file in files], [str(cache / NAME / file) for file in files])
    return [file for file in files if file != "index.json"]


SYSTEMS: dict[str, Callable[[Path, int, str], Iterable[Any]]] = {
    "ours": our_epoch,
    "MosaicML Streaming": reference_epoch,
    "litdata": litdata_epoch,
    "get": plain_get,
    **{f"ours, {name}": partial(format_epoch, name) for name in FORMATS},
}


def processor_seconds() -> float:
    """Of this process and of its workers that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(system: str, cache: Path, workers: int, endpoint: str, out: Path) -> None:
    """In a process of its own: read one epoch, and put what was measured into a file."""
    for package in PACKAGES[system.partition(",")[0]]:
        importlib.import_module(package)
    started, processor_started, first, count = time.perf_counter(), processor_seconds(), 0.0, 0
    batches = SYSTEMS[system](cache, workers, endpoint)
    for batch in batches:
        first = first or time.perf_counter() - started
        count += len(next(iter(batch.values()))) if isinstance(batch, dict) else 0
    seconds = time.perf_counter() - started
    del batches  # which ends the workers, whose time counts when they have ended
    processor = processor_seconds() - processor_started
    out.write_text(json.dumps({"seconds": seconds, "first": first, "processor": processor, "samples": count}))


def measured(python: str, system: str, workers: int, endpoint: str, root: Path, order: str) -> dict[str, float] | None:
    """One measurement in a fresh process; None where that Python has no such package, or the epoch failed."""
    with tempfile.TemporaryDirectory(dir=root, prefix="cold-") as scratch:
        out = Path(scratch) / "measured.json"
        command = [
            python,
            str(Path(__file__).resolve()),
            "--measure",
            system,
            scratch,
            str(workers),
            endpoint,
            str(out),
        ]
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "S3_ENDPOINT_URL": endpoint,
            "COLD_EPOCH_ROOT": str(root),
            "COLD_EPOCH_ORDER": order,
        }
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, check=False, timeout=LONGEST_SECONDS
            )
        except subprocess.TimeoutExpired:
            print(f"{system} did not finish in {LONGEST_SECONDS} s", file=sys.stderr)
            return None
        if done.returncode and "ModuleNotFoundError" in done.stderr:
            return None
        if done.returncode and system.startswith(("ours", "get")):
            raise SystemExit(f"{system} failed:\n{done.stderr[-4000:]}")
        if done.returncode:
            print(f"{system} failed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return None
        found: dict[str, float] = json.loads(out.read_text())
        return found


def compare(options: argparse.Namespace) -> None:
    """Measure all systems, alternating, and print the table."""
    from tests.servers import http_server

    pythons = {"ours": sys.executable}
    if options.peers:
        pythons |= {"MosaicML Streaming": options.peers, "litdata": options.peers}
    pythons["get"] = sys.executable
    pythons |= dict.fromkeys((f"ours, {name}" for name in options.formats), sys.executable)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="cold-epoch-") as scratch:
        root = Path(scratch)
        size = write_datasets(root, options.shards, options.peers)
        write_formats(root, options.shards, options.formats)
        caps = {"latency": options.latency, "per_connection": options.per_connection, "total": options.total}
        with http_server(root, **caps) as endpoint:
            runs: dict[str, list[dict[str, float]]] = {system: [] for system in pythons}
            for _ in range(options.runs):
                for system, python in pythons.items():
                    tries = (
                        measured(python, system, options.workers, endpoint, root, options.order) for _ in range(TRIES)
                    )
                    runs[system] += [next(filter(None, tries), {})]
    limit = size / options.total if options.total else None
    show(runs, size, limit)


def show(runs: dict[str, list[dict[str, float]]], size: int, limit: float | None) -> None:
    """Print the table."""
    print(f"{size / 1e9:.2f} GB" + (f"; the link alone needs {limit:.1f} s" if limit else ""))
    print("| system | epoch, s | × the link | first batch, s | processor s per GB | ours is faster by |")
    print("|---|---|---|---|---|---|")
    ours = statistics.median(one["seconds"] for one in runs["ours"])
    for system, all_runs in runs.items():
        found = [one for one in all_runs if one]
        if not found:
            print(f"| {system} | not there, or no epoch finished | | | | |")
            continue
        seconds, first, processor = (
            statistics.median(one[key] for one in found) for key in ("seconds", "first", "processor")
        )
        times = f"{seconds / limit:.2f}" if limit else "–"
        first_cell = "–" if system == "get" else f"{first:.2f}"
        cells = f"{seconds:.1f} | {times} | {first_cell} | {processor / size * 1e9:.1f} | {seconds / ours:.2f} ×"
        print(f"| {system} | {cells} |")


def main() -> None:
    """Compare; or, as the process that is started for it, measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with the other systems")
    parser.add_argument("--runs", type=int, default=3, help="epochs of each system, of which the median is shown")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=[], help="other formats that we read, too")
    parser.add_argument("--shards", type=int, default=24, help="shards of 64 MiB")
    parser.add_argument("--workers", type=int, default=2, help="workers of each loader")
    parser.add_argument("--order", choices=["shuffled", "stored"], default="shuffled", help="in which order to read")
    parser.add_argument("--latency", type=float, default=CAPS["latency"], help="seconds before each answer")
    parser.add_argument("--per-connection", type=float, default=CAPS["per_connection"], help="bytes a second of one")
    parser.add_argument("--total", type=float, default=CAPS["total"], help="of all connections")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where files are put")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--write-litdata", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        system, cache, workers, endpoint, out = options.measure
        measure(system, Path(cache), int(workers), endpoint, Path(out))
    elif options.write_litdata:
        root, shards = options.write_litdata
        write_litdata(Path(root), int(shards))
    elif options.peers and shutil.which(options.peers) is None:
        parser.error(f"--peers: there is no {options.peers}")
    else:
        compare(options)


if __name__ == "__main__":
    main()
