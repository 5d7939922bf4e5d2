"""How fast directories that litData optimised are read: by litData itself, and by us, as they lie.

Run from the root of the repository, on a machine that does nothing else:

    python -m benchmarks.litdata_speed --peers ~/peers/bin/python

``--peers`` is the Python of an environment with litData, which writes the data and is measured. Both read the same
chunks, warm, shuffled, with ``num_workers=0``. Every measurement is a fresh process that reads one epoch to warm up
and then ``--epochs`` more, from asking for an iterator to the last batch. Systems alternate, and medians of
``--rounds`` are shown, in thousands of samples a second.

    rows      an int, a float and a text of 100 to 300 characters: rows of Arrow
    zipped    the same, zipped with zstd
    arrays    an int and an array of 256 float32: plain chunks
    framed    the same, zipped with zstd in frames of 256 samples
    tensors   a tuple of a tensor of 3 x 16 x 16 uint8 and an int
    files     an int, an array of 4 and 20 kB of bytes
    tokens    blocks of 1,024 tokens, uint16

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
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 1024
COUNTS = {
    "rows": 100_000,
    "zipped": 100_000,
    "arrays": 100_000,
    "framed": 100_000,
    "tensors": 100_000,
    "files": 10_000,
    "tokens": 20_000,
}
SYSTEMS = ("litdata", "ours")
BATCH_SIZES = (32, 256)


def sample(name: str, number: int, rng: np.random.Generator) -> Any:
    """One that litData is given."""
    import torch

    if name in ("rows", "zipped"):
        text = "the quick brown fox jumps over the lazy dog " * 7
        return {"id": number, "share": number / 7, "text": text[: int(rng.integers(100, 300))]}
    if name in ("arrays", "framed"):
        return {"id": number, "values": rng.random(256, np.float32).round(2)}
    if name == "tensors":
        return torch.from_numpy(rng.integers(0, 256, (3, 16, 16), np.uint8)), number
    if name == "files":
        return {"id": number, "place": np.arange(4), "file": rng.bytes(20_000)}
    return torch.from_numpy(rng.integers(0, 50_000, int(rng.integers(500, 1500)), np.uint16))


def write(root: Path, name: str, count: int) -> None:
    """Have litData write a dataset."""
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    how: dict[str, Any] = {"compression": "zstd"} if name in ("zipped", "framed") else {}
    how |= {"item_loader": TokensLoader(block_size=BLOCK)} if name == "tokens" else {}
    writer, rng = BinaryWriter(str(root / name), chunk_bytes="16MB", **how), np.random.default_rng(7)
    for number in range(count):
        writer[number] = sample(name, number, rng)
    writer.done()
    writer.merge()


def read_litdata(root: Path, name: str, batch_size: int) -> Callable[[], Iterable[Any]]:
    """Its own loader, kept over epochs."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    how = {"item_loader": TokensLoader(block_size=BLOCK)} if name == "tokens" else {}
    dataset = StreamingDataset(str(root / name), shuffle=True, drop_last=False, **how)
    loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=0)
    return lambda: loader


def read_ours(root: Path, name: str, batch_size: int) -> Callable[[], Iterable[Any]]:
    """Our loader, kept over epochs."""
    from lightning_streaming import StreamingDataLoader, StreamingDataset

    blocks = BLOCK if name == "tokens" else None
    dataset = StreamingDataset(remote=str(root / name), format="litdata", shuffle=True, block_length=blocks)
    loader = StreamingDataLoader(dataset, batch_size, num_workers=0)
    return lambda: loader


def samples_of(batch: Any) -> int:
    """How many samples a batch holds."""
    while isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return (
        samples_of(batch[0])
        if isinstance(batch, (tuple, list)) and not isinstance(batch[0], (str, bytes))
        else len(batch)
    )


def measure(system: str, name: str, root: Path, batch_size: int, epochs: int) -> float:
    """Samples a second."""
    epoch = (read_litdata if system == "litdata" else read_ours)(root, name, batch_size)
    sum(map(samples_of, epoch()))
    began = time.perf_counter()
    samples = sum(sum(map(samples_of, epoch())) for _ in range(epochs))
    return samples / (time.perf_counter() - began)


def run(python: str, *options: object) -> str:
    """This script in a fresh process."""
    done = subprocess.run(
        [python, "-m", "benchmarks.litdata_speed", "--one", *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LITDATA_DISABLE_VERSION_CHECK": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{options} failed:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def compare(options: argparse.Namespace) -> None:
    """Measure all, alternating, and print the table."""
    heads = [f"{system}, batch {size}" for size in BATCH_SIZES for system in SYSTEMS]
    print(f"| thousand samples/s | {' | '.join(heads)} |\n|---|{'--:|' * len(heads)}")
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="litdata-speed-") as scratch:
        root = Path(scratch)
        for name in options.datasets:
            run(options.peers, "write", name, root, max(1, int(COUNTS[name] * options.scale)), 0)
            found: dict[tuple[int, str], list[float]] = {}
            for _ in range(options.rounds):
                for size in BATCH_SIZES:
                    for system in SYSTEMS:
                        python = options.peers if system == "litdata" else sys.executable
                        rate = json.loads(run(python, system, name, root, size, options.epochs))
                        found.setdefault((size, system), []).append(rate / 1e3)
            cells = [f"{statistics.median(found[size, system]):,.1f}" for size in BATCH_SIZES for system in SYSTEMS]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Compare; or, as the process that is started for it, write or measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with litData")
    parser.add_argument("--datasets", nargs="+", choices=COUNTS, default=list(COUNTS))
    parser.add_argument("--scale", type=float, default=1, help="how many times the usual number of samples")
    parser.add_argument("--epochs", type=int, default=2, help="read after the first, in one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the median is shown")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the data is written")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, name, root, number, epochs = options.one
        if what == "write":
            write(Path(root), name, int(number))
        print(0 if what == "write" else measure(what, name, Path(root), int(number), int(epochs)))
    elif options.peers:
        compare(options)
    else:
        parser.error("--peers is needed: litData writes the data")


if __name__ == "__main__":
    main()
