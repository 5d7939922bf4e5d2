"""How fast one process writes a dataset, beside MosaicML Streaming's and litdata's writers.

Run from the root of the repository, on a machine that does nothing else:

    python benchmarks/write_speed.py
    python benchmarks/write_speed.py --peers ~/peers/bin/python

``--peers`` is the Python of an environment that has mosaicml-streaming, litdata or both. Every measurement is a fresh
process that makes 512 random samples, and then writes them again and again, from making the writer to the published
index. Shards have 64 MiB, no compression and no hashes. Writers alternate, and medians are shown: samples and megabytes
a second by the clock, and microseconds of processor time a sample (user and system, of all threads), which depend less
on what else the machine does. Datasets are written under ``--directory``; in memory (/dev/shm) the disk has no part in
it. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

POOL = 512
"""Different samples of a case."""
SHARD_BYTES = 2**26
FLOATS = tuple(f"f{place}" for place in range(8))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of sample."""

    what: str
    samples: int
    columns: dict[str, str]
    make: Callable[[np.random.Generator], dict[str, Any]]


def _numbers(rng: np.random.Generator, kind: type) -> dict[str, Any]:
    integers = {"a": int(rng.integers(2**40)), "b": int(rng.integers(2**40))}
    return integers | {name: kind(value) for name, value in zip(FLOATS, rng.random(8), strict=True)}


_RECORD = {"a": "int", "b": "int"} | dict.fromkeys(FLOATS, "float32")
CASES = {
    "tokens": Case(
        what="2,049 tokens, `ndarray:uint16`",
        samples=40_000,
        columns={"tokens": "ndarray:uint16"},
        make=lambda rng: {"tokens": rng.integers(0, 50_000, 2049).astype(np.uint16)},
    ),
    "records": Case(
        what="2 `int` and 8 `float32`, Python's numbers",
        samples=200_000,
        columns=_RECORD,
        make=lambda rng: _numbers(rng, float),
    ),
    "numpy records": Case(
        what="the same, floats as `np.float32`",
        samples=200_000,
        columns=_RECORD,
        make=lambda rng: _numbers(rng, np.float32),
    ),
    "blobs": Case(
        what="110 kB, `bytes`",
        samples=3_000,
        columns={"blob": "bytes"},
        make=lambda rng: {"blob": rng.bytes(110_000)},
    ),
}


Write = Callable[[Path, Case, Iterable[dict[str, Any]]], None]


def write_mds(writer_class: Any, out: Path, case: Case, samples: Iterable[dict[str, Any]]) -> None:
    """Write with an MDSWriter, ours or the reference's."""
    with writer_class(out=str(out), columns=case.columns, size_limit=SHARD_BYTES) as writer:
        for sample in samples:
            writer.write(sample)


def write_litdata(writer_class: Any, out: Path, _case: Case, samples: Iterable[dict[str, Any]]) -> None:
    """Write with what litdata's ``optimize`` writes with in each of its workers; it chooses the format by itself."""
    out.mkdir()
    writer = writer_class(str(out), chunk_bytes=SHARD_BYTES)
    for index, sample in enumerate(samples):
        writer[index] = sample
    writer.done()
    writer.merge()


def find_writer(name: str) -> Write:
    """Import a writer, which is not part of the time."""
    if name == "ours":
        from lightning_streaming import MDSWriter

        return partial(write_mds, MDSWriter)
    if name == "MosaicML Streaming":
        from streaming import MDSWriter as ReferenceWriter

        return partial(write_mds, ReferenceWriter)
    from litdata.streaming.writer import BinaryWriter

    return partial(write_litdata, BinaryWriter)


def measure(writer: str, case: Case, directory: Path, out: Path) -> None:
    """In a process of its own: put the seconds of one dataset into a file, because a writer may print."""
    rng = np.random.default_rng(0)
    pool = [case.make(rng) for _ in range(POOL)]
    target = directory / "dataset"
    write = find_writer(writer)
    started, processor_started = time.perf_counter(), time.process_time()
    write(target, case, (pool[index % POOL] for index in range(case.samples)))
    seconds, processor = time.perf_counter() - started, time.process_time() - processor_started
    written = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    assert (target / "index.json").exists()
    out.write_text(json.dumps({"seconds": seconds, "processor": processor, "bytes": written}))


def measured(python: str, writer: str, name: str, directory: Path) -> dict[str, float] | None:
    """One measurement in a fresh process; None where that Python has no such writer."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="write-speed-") as scratch:
        out = Path(scratch) / "measured.json"
        command = [python, str(Path(__file__).resolve()), "--measure", writer, name, scratch, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
        if done.returncode and "ModuleNotFoundError" in done.stderr:
            return None
        if done.returncode:
            raise SystemExit(f"{writer} failed at {name}:\n{done.stderr}")
        found: dict[str, float] = json.loads(out.read_text())
        return found


def compare(options: argparse.Namespace) -> None:
    """Measure all cases, writers alternating, and print the table."""
    pythons = {"ours": sys.executable}
    if options.peers:
        pythons |= {"MosaicML Streaming": options.peers, "litdata": options.peers}
    print("| samples | " + " | ".join(f"{writer}, samples/s (MB/s, µs)" for writer in pythons) + " | times |")
    print("|---" * (2 + len(pythons)) + "|")
    for name in options.cases:
        runs: dict[str, list[dict[str, float]]] = {writer: [] for writer in pythons}
        for _ in range(options.runs):
            for writer, python in pythons.items():
                one = measured(python, writer, name, options.directory)
                runs[writer] += [one] if one else []
        print(row(CASES[name], runs), flush=True)


def row(case: Case, runs: dict[str, list[dict[str, float]]]) -> str:
    """A line of the table.

    Its last cell says how many times faster ours is than each other, by the clock and, in brackets, in processor
    time.
    """
    cells, medians = [], {}
    for writer, found in runs.items():
        if found:
            medians[writer] = {key: statistics.median(one[key] for one in found) / case.samples for key in found[0]}
            seconds, processor, size = medians[writer].values()
            cells.append(f"{1 / seconds:,.0f} ({size / seconds / 1e6:,.0f}, {processor * 1e6:,.1f})")
        else:
            cells.append("not there")
    ours = medians.pop("ours")
    times = [
        f"{other['seconds'] / ours['seconds']:.1f} ({other['processor'] / ours['processor']:.1f}) × {writer}"
        for writer, other in medians.items()
    ]
    return f"| {case.what} | " + " | ".join(cells) + f" | {', '.join(times) or '–'} |"


def main() -> None:
    """Compare; or, as the process that is started for it, measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with the other writers")
    parser.add_argument("--runs", type=int, default=5, help="measurements of each, of which the median is shown")
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="where datasets are written"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="kinds of samples")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        writer, name, directory, out = options.measure
        measure(writer, CASES[name], Path(directory), Path(out))
    elif options.peers and shutil.which(options.peers) is None:
        parser.error(f"--peers: there is no {options.peers}")
    else:
        compare(options)


if __name__ == "__main__":
    main()
