"""How fast NumPy and Megatron files are read where they lie, beside plain gathers from ``numpy.memmap`` and MDS.

    python -m benchmarks.row_files
    python -m benchmarks.row_files --samples 400k --directory /dev/shm

The same random samples in eight files of each kind, once each of

    rows      256 float32, a row of a .npy file
    blocks    2,049 tokens of uint16, cut out of long .npy arrays and out of .bin files

The gather takes batches of a full random order out of one mapped file, and makes a tensor of each: the least that a
loader has to do. Ours is a whole epoch of ``StreamingDataLoader`` without workers, shuffled, all files in the page
cache. Ways take turns, round by round; of each the median of its rounds counts. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_streaming.units import parse_count

FILES = 8
BATCH_SIZES = (32, 256)
GATHER = "numpy.memmap"


class Kind(NamedTuple):
    """What a sample is."""

    dtype: str
    length: int
    column: str
    samples_of: int
    """A sample of this kind for so many that are asked for: they are larger."""


KINDS = {"rows": Kind("float32", 256, "values", 1), "blocks": Kind("uint16", 2049, "tokens", 4)}


def write_files(root: Path, name: str, samples: int) -> dict[str, dict[str, Any]]:
    """Write samples in all formats.

    Returns:
        By what a format is called, the arguments of a dataset that reads it. The mapped file is ``root / "whole.npy"``.
    """
    kind = KINDS[name]
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**16, (samples, kind.length), np.uint16).astype(kind.dtype)
    np.save(root / "whole.npy", values)
    for format_name in ("npy", "megatron", "mds"):
        (root / format_name).mkdir()
    for number, part in enumerate(np.array_split(values, FILES)):
        np.save(root / "npy" / f"{number}.npy", part if name == "rows" else part.ravel())
        if name == "blocks":
            _write_megatron(root / "megatron" / str(number), part.ravel())
    columns, size_limit = {kind.column: f"ndarray:{kind.dtype}:{kind.length}"}, values.nbytes // FILES + 2**20
    with MDSWriter(out=str(root / "mds"), columns=columns, size_limit=size_limit) as writer:
        for value in values:
            writer.write({kind.column: value})
    if name == "rows":
        return {"npy": {"remote": str(root / "npy"), "format": "npy"}, "mds": {"remote": str(root / "mds")}}
    more = {"block_length": kind.length}
    return {
        "npy": {"remote": str(root / "npy"), "format": "npy", **more},
        "megatron": {"remote": str(root / "megatron"), "format": "megatron", **more},
        "mds": {"remote": str(root / "mds")},
    }


def _write_megatron(stem: Path, tokens: NDArray[Any]) -> None:
    """One document of all tokens, as blocks do not ask where documents end."""
    stem.with_suffix(".bin").write_bytes(tokens.tobytes())
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2)
    stem.with_suffix(".idx").write_bytes(head + struct.pack("<iqqq", len(tokens), 0, 0, 1))


def gathers(path: Path, batch_size: int, epoch: int) -> Iterator[torch.Tensor]:
    """Batches of a mapped file, in random order."""
    mapped = np.load(path, mmap_mode="r")
    order = np.random.default_rng(epoch).permutation(len(mapped))
    for start in range(0, len(order), batch_size):
        yield torch.from_numpy(np.asarray(mapped[order[start : start + batch_size]]))


def epoch_of(loader: StreamingDataLoader, _: int) -> Iterator[Any]:
    """The next epoch of a loader, which shuffles by itself."""
    return iter(loader)


def samples_a_second(batches: Iterator[Any], samples: int) -> float:
    """Read to the end."""
    began = time.perf_counter()
    for _ in batches:
        pass
    return samples / (time.perf_counter() - began)


def measure(root: Path, name: str, samples: int, rounds: int) -> dict[str, dict[str, float]]:
    """Samples a second by way and batch size."""
    written = write_files(root, name, samples)
    ways = dict[tuple[str, int], Callable[[int], Iterator[Any]]]()
    for batch_size in BATCH_SIZES:
        ways[GATHER, batch_size] = partial(gathers, root / "whole.npy", batch_size)
        for way, settings in written.items():
            loader = StreamingDataLoader(StreamingDataset(shuffle=True, **settings), batch_size=batch_size)
            ways[way, batch_size] = partial(epoch_of, loader)
    found: dict[tuple[str, int], list[float]] = {one: [] for one in ways}
    for epoch in range(rounds + 1):
        for one, begin in ways.items():
            speed = samples_a_second(begin(epoch), samples)
            found[one] += [speed] if epoch else []  # the first fills caches
    return {way: {str(size): median(found[way, size]) for size in BATCH_SIZES} for way, _ in ways}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=parse_count, default=400_000, help="rows; of blocks a quarter")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each way")
    parser.add_argument("--directory", help="where to write the data; some temporary one by default")
    parser.add_argument("--json", help="a file for the numbers")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for name, kind in KINDS.items():
            found[name] = measure(Path(directory) / name, name, options.samples // kind.samples_of, options.rounds)
    head = " | ".join(f"batches of {size} | of the gather" for size in BATCH_SIZES)
    print(f"| samples | read by | {head} |\n|---|---|{'---:|---:|' * len(BATCH_SIZES)}")
    for name, ways in found.items():
        for way, speeds in ways.items():
            told = (f"{speed:,.0f} a second | {speed / ways[GATHER][size]:.0%}" for size, speed in speeds.items())
            print(f"| {name} | {way} | {' | '.join(told)} |")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
