"""How fast Parquet files are read, shuffled: by litData's ParquetLoader, by Hugging Face's streaming, and by us.

Run from the root of the repository, on a machine that does nothing else:

    python -m benchmarks.parquet_speed --peers ~/peers/bin/python

``--peers`` is the Python of an environment with litdata, polars and datasets. pyarrow writes the data; all read the
same files, warm and local. Every measurement is a fresh process that reads an epoch to warm up, or ten seconds of
one, and then for ``--seconds`` more, from asking for an iterator on. Systems alternate, and medians of ``--rounds``
are shown, in thousands of samples a second, with our share of the best of the others.

    tokens    lists of 2,048 tokens, int32: 1 GB in row groups of 2,048 rows
    lists     lists of 100 to 300 tokens, read without batches
    numbers   an int64, a float32 and a list of 16 float32
    text      an int64 and a text of 100 to 300 characters

Hugging Face's stream is shuffled by a buffer of 1,000, as its page advises; litData and we shuffle as each does it.
Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

COUNTS = {"tokens": 131_072, "lists": 200_000, "numbers": 1_000_000, "text": 200_000}
GROUPS = {"tokens": 2048, "lists": 10_000, "numbers": 50_000, "text": 10_000}
SYSTEMS = ("litdata", "datasets", "ours")
FILES = 8
_WARM_SECONDS = 10.0


def table(name: str, first: int, count: int, rng: np.random.Generator) -> Any:
    """Some rows."""
    import pyarrow as pa

    ids = np.arange(first, first + count)
    if name == "tokens":
        borders = np.arange(0, 2048 * count + 1, 2048, dtype=np.int32)
        values = rng.integers(0, 50_000, 2048 * count, np.int32)
        return pa.table({"tokens": pa.ListArray.from_arrays(borders, values)})
    if name == "lists":
        borders = np.append(0, rng.integers(100, 300, count).cumsum()).astype(np.int32)
        return pa.table({"tokens": pa.ListArray.from_arrays(borders, rng.integers(0, 50_000, borders[-1], np.int32))})
    if name == "numbers":
        borders = np.arange(0, 16 * count + 1, 16, dtype=np.int32)
        values = pa.ListArray.from_arrays(borders, rng.random(16 * count, np.float32))
        return pa.table({"id": ids, "share": rng.random(count, np.float32), "values": values})
    text = "the quick brown fox jumps over the lazy dog " * 7
    return pa.table({"id": ids, "text": [f"{number} {text[: rng.integers(100, 300)]}" for number in ids]})


def write(root: Path, name: str, count: int) -> None:
    """Have pyarrow write a dataset, and litData index it."""
    import pyarrow.parquet as pq
    from litdata import index_parquet_dataset

    place, rng = root / name, np.random.default_rng(7)
    for made in (place, root / f"{name}-index"):
        made.mkdir()
    for number in range(FILES):
        rows = table(name, number * (count // FILES), count // FILES, rng)
        pq.write_table(rows, place / f"{number:02}.parquet", row_group_size=GROUPS[name])
    index_parquet_dataset(str(place), cache_dir=str(root / f"{name}-index"), num_workers=1)


def read_litdata(root: Path, name: str, batch_size: int, workers: int) -> Callable[[], Iterable[Any]]:
    """Its own loader, kept over epochs."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.item_loader import ParquetLoader

    dataset = StreamingDataset(
        str(root / name),
        item_loader=ParquetLoader(),
        index_path=str(root / f"{name}-index"),
        shuffle=True,
        drop_last=False,
    )
    loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=_collate(name))
    return lambda: loader


def read_datasets(root: Path, name: str, batch_size: int, workers: int) -> Callable[[], Iterable[Any]]:
    """A plain loader over its stream."""
    from datasets import load_dataset
    from torch.utils.data import DataLoader

    files = sorted(map(str, (root / name).glob("*.parquet")))
    dataset = load_dataset("parquet", data_files=files, split="train", streaming=True)
    dataset = dataset.shuffle(seed=1, buffer_size=1000).with_format("torch")
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=_collate(name))
    return lambda: loader


def read_ours(root: Path, name: str, batch_size: int, workers: int) -> Callable[[], Iterable[Any]]:
    """Our loader, kept over epochs."""
    from lightning_streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(remote=str(root / name), format="parquet", shuffle=True, batch_size=batch_size)
    loader = StreamingDataLoader(dataset, batch_size, num_workers=workers, collate_fn=_collate(name))
    return lambda: loader


def _collate(name: str) -> Callable[[list[Any]], Any] | None:
    """What makes batches; lists of different lengths stay lists of samples."""
    return list if name == "lists" else None


READ = {"litdata": read_litdata, "datasets": read_datasets, "ours": read_ours}


def samples_of(batch: Any) -> int:
    """How many samples a batch holds."""
    if isinstance(batch, dict):
        return len(next(iter(batch.values())))
    return len(batch[0]) if isinstance(batch[0], (list, tuple)) else len(batch)


def measure(system: str, name: str, root: Path, batch_size: int, workers: int, seconds: float) -> float:
    """Samples a second."""
    epoch = READ[system](root, name, batch_size, workers)
    read_for(epoch, _WARM_SECONDS, 1)
    return read_for(epoch, seconds)


def read_for(epoch: Callable[[], Iterable[Any]], seconds: float, epochs: int | None = None) -> float:
    """Samples a second, of so many seconds of epochs, or so many epochs."""
    began, samples = time.perf_counter(), 0
    for _ in count() if epochs is None else range(epochs):
        for batch in epoch():
            samples += samples_of(batch)
            if time.perf_counter() - began > seconds:
                return samples / (time.perf_counter() - began)
    return samples / (time.perf_counter() - began)


def run(python: str, *options: object) -> str:
    """This script in a fresh process."""
    done = subprocess.run(
        [python, "-m", "benchmarks.parquet_speed", "--one", *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LITDATA_DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{options} failed:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def compare(options: argparse.Namespace) -> None:
    """Measure all, alternating, and print the table."""
    print(f"| thousand samples/s | workers | batch | {' | '.join(SYSTEMS)} | ours / best |")
    print("|---|--:|--:|" + "--:|" * (len(SYSTEMS) + 1))
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="parquet-speed-") as scratch:
        root = Path(scratch)
        os.environ["LIGHTNING_STREAMING_CACHE"] = str(root / "cache")
        os.environ["HF_HOME"] = str(root / "hf")
        for name in options.datasets:
            run(options.peers, "write", name, root, max(FILES, int(COUNTS[name] * options.scale)), 0, 0)
            for workers in options.workers:
                for size in options.batch_sizes:
                    found: dict[str, list[float]] = {}
                    for _ in range(options.rounds):
                        for system in SYSTEMS:
                            python = sys.executable if system == "ours" else options.peers
                            rate = json.loads(run(python, system, name, root, size, workers, options.seconds))
                            found.setdefault(system, []).append(rate / 1e3)
                    middle = {system: statistics.median(rates) for system, rates in found.items()}
                    best = max(rate for system, rate in middle.items() if system != "ours")
                    cells = " | ".join(f"{middle[system]:,.1f}" for system in SYSTEMS)
                    print(f"| {name} | {workers} | {size} | {cells} | {middle['ours'] / best:.1f} |", flush=True)


def main() -> None:
    """Compare; or, as the process that is started for it, write or measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with litdata, polars and datasets")
    parser.add_argument("--datasets", nargs="+", choices=COUNTS, default=list(COUNTS))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[32, 256])
    parser.add_argument("--scale", type=float, default=1, help="how many times the usual number of samples")
    parser.add_argument("--seconds", type=float, default=5, help="for which epochs are read after the first")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the median is shown")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the data is written")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, name, root, number, workers, seconds = options.one
        if what == "write":
            write(Path(root), name, int(number))
        found = 0.0 if what == "write" else measure(what, name, Path(root), int(number), int(workers), float(seconds))
        print(found)
    elif options.peers:
        compare(options)
    else:
        parser.error("--peers is needed: an environment with the others")


if __name__ == "__main__":
    main()
