"""Packing documents: seconds and memory to plan an epoch's packs, how full they are, and what it takes to read some.

    python -m benchmarks.packing_plan
    python -m benchmarks.packing_plan --documents 100m --directory /dev/shm

Lengths are drawn from a log-normal distribution with a median of 500 tokens and a sigma of 1.1, which is assumed, not
fitted: it has a mean of about 915, and one document in 180 is longer than 8,192. They lie in a file that is mapped, and
documents are read in the order of their ids, so that only packing is measured, and not an order. Each way is planned in
a fresh process, into files:

    concat              documents cut every 8,192 tokens
    best fit            windows of 4,096 documents, packs of 8,192 tokens
    best fit, compiled  the same by numba, its import and compiling included
    budget              windows of 65,536 documents, groups of 65,536 padded tokens

CPU seconds are of all threads of the process; where other work shares the machine, they say more than seconds. Memory
is what was the process's own at most (anonymous pages), and all that was resident (VmHWM), mapped files included. Then
16 packs, each the 512th after the one before, are read at a time, as one rank of 512 reads them.

The second table is of --compared documents: how full packs of 8,192 tokens are by best fit, by first fit (the same
windows in the epoch's order, each document into the first pack with room; in this benchmark only), by concat, and with
one document in each row, truncated. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.sequence.packing.fill import has_compiler
from lightning_streaming.sequence.packing.packs import Packs
from lightning_streaming.sequence.packing.plan import PackPlan, plan_packs
from lightning_streaming.sequence.packing.settings import AnyPackSettings, BudgetSettings, PackSettings
from lightning_streaming.units import parse_count

MEDIAN, SIGMA = 500, 1.1
CAPACITY, WINDOW = 8192, 4096
_BEST_FIT = PackSettings(capacity=CAPACITY, window=WINDOW)
_CONCAT = PackSettings(capacity=CAPACITY, method="concat")
WAYS: dict[str, tuple[AnyPackSettings, bool]] = {
    "concat": (_CONCAT, False),
    "best fit": (_BEST_FIT, False),
    "best fit, compiled": (_BEST_FIT, True),
    "budget": (BudgetSettings(tokens=1 << 16, longer="truncate"), False),
}
_READ_AT_ONCE, _STRIDE, _READS = 16, 512, 50
_CHUNK = 1 << 20


def write_lengths(path: Path, documents: int) -> None:
    """Write tokens of documents, four bytes each."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, documents, _CHUNK):
            drawn = rng.lognormal(np.log(MEDIAN), SIGMA, min(_CHUNK, documents - start))
            file.write(np.maximum(drawn, 1).astype(np.uint32).tobytes())


class Documents:
    """Documents in the order of their ids."""

    def __init__(self, lengths: NDArray[Any]) -> None:
        self._lengths = lengths

    def ids_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Sample ids at positions."""
        return np.arange(start, stop)

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """Tokens of samples."""
        return self._lengths[ids]

    def planned(self, settings: AnyPackSettings, **said: Any) -> PackPlan:
        """A plan of all."""
        return plan_packs(self.ids_between, len(self._lengths), self.lengths, settings, 0, 0, **said)


class FileArrays:
    """Arrays of a plan, in files of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kinds: dict[str, np.dtype[Any]] = {}

    def append(self, name: str, array: NDArray[Any]) -> None:
        """Append to a file."""
        self._kinds[name] = array.dtype
        with (self._directory / name).open("ab") as file:
            file.write(np.ascontiguousarray(array).data)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Map the files."""
        return {name: _mapped(self._directory / name, kind) for name, kind in self._kinds.items()}


def _mapped(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(path, kind, "r") if path.stat().st_size else np.empty(0, kind)


# --- in a process of its own ---


def measure(way: str, path: str, threads: int) -> dict[str, float]:
    """Plan and read; seconds, and the most memory in MiB, own and in all."""
    settings, compiled = WAYS[way]
    documents = Documents(np.memmap(path, np.uint32, "r"))
    own, ends = [_status_mib("RssAnon")], threading.Event()

    def look() -> None:
        while not ends.wait(0.02):
            own.append(_status_mib("RssAnon"))

    watching = threading.Thread(target=look)
    watching.start()
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as out:
        began, busy = time.perf_counter(), time.process_time()
        plan = documents.planned(settings, into=FileArrays(Path(out)), compiled=compiled, threads=threads)
        seconds, cpu = time.perf_counter() - began, time.process_time() - busy
        peak = _status_mib("VmHWM")
        ends.set()
        watching.join()
        return {
            "seconds": seconds,
            "cpu": cpu,
            "own_peak_mib": max(own),
            "peak_mib": peak,
            "plan_mib": sum(array.nbytes for array in plan.arrays().values()) / 2**20,
            "packs": len(plan),
            "read_seconds": _read_seconds(plan, documents),
        }


def _read_seconds(plan: PackPlan, documents: Documents) -> float:
    packs, found = Packs(plan, documents.ids_between, documents.lengths), []
    rng = np.random.default_rng(0)
    for first in rng.integers(0, len(packs), _READS):
        asked = (first + _STRIDE * np.arange(_READ_AT_ONCE)) % len(packs)
        began = time.perf_counter()
        packs.rows(asked)
        found.append(time.perf_counter() - began)
    return float(np.median(found))


def _status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


# --- how full ---


def compare(lengths: NDArray[np.int64]) -> dict[str, dict[str, float]]:
    """Packs, how full they are, and the shares of documents that are cut and of tokens that are lost."""
    documents, tokens = Documents(lengths), int(lengths.sum())
    found: dict[str, dict[str, float]] = {}
    for name, settings in (("best fit", _BEST_FIT), ("concat", _CONCAT)):
        plan = documents.planned(settings)
        rows = Packs(plan, documents.ids_between, documents.lengths).rows(np.arange(len(plan)))
        cut = np.count_nonzero(np.bincount(rows.positions) > 1)
        found[name] = _compared(len(plan), plan.num_tokens, cut, lengths)
    is_longer = lengths > CAPACITY
    found["first fit"] = _compared(first_fit(lengths), tokens, np.count_nonzero(is_longer), lengths)
    kept = int(np.minimum(lengths, CAPACITY).sum())
    found["one a row"] = _compared(len(lengths), kept, np.count_nonzero(is_longer), lengths)
    return found


def _compared(packs: int, held: int, cut: Any, lengths: NDArray[np.int64]) -> dict[str, float]:
    lost = 1 - held / int(lengths.sum())
    return {"packs": packs, "fill": held / (packs * CAPACITY), "cut": int(cut) / len(lengths), "lost": lost}


def first_fit(lengths: NDArray[np.int64]) -> int:
    """Packs by first fit, of whole windows in the epoch's order; long documents are split as by best fit."""
    full = int((np.where(lengths > CAPACITY, lengths, 0) // CAPACITY).sum())
    rest = np.where(lengths > CAPACITY, lengths % CAPACITY, lengths)
    padded = np.zeros(-(-len(rest) // WINDOW) * WINDOW, np.int64)
    padded[: len(rest)] = rest
    in_turn = np.ascontiguousarray(padded.reshape(-1, WINDOW).T)
    windows = np.arange(in_turn.shape[1])
    rooms, begun = np.full((len(windows), WINDOW), CAPACITY, np.int16), 1
    for wanted in in_turn:
        chosen = (rooms[:, :begun] >= wanted[:, None]).argmax(axis=1)
        rooms[windows, chosen] -= wanted.astype(np.int16)
        begun = min(max(begun, int(chosen.max()) + 2), WINDOW)
    return full + int(np.count_nonzero(rooms < CAPACITY))


# --- around it ---


def measured(way: str, path: Path, threads: int) -> Any:
    """One measurement in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.packing_plan", "--measure", way, str(path), str(threads)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def tables(result: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = [
        f"{result['documents']:,} documents, {result['threads']} threads, load average {result['load']:.1f}:",
        "",
        "| way | seconds | CPU seconds | own memory | in all | plan | 16 packs |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for way, one in result["planned"].items():
        memory = " | ".join(f"{one[what]:.0f} MiB" for what in ("own_peak_mib", "peak_mib", "plan_mib"))
        read = f"{1000 * one['read_seconds']:.2f} ms"
        lines.append(f"| {way} | {one['seconds']:.1f} | {one['cpu']:.1f} | {memory} | {read} |")
    lines += ["", "| packs | how full | documents cut | tokens lost |", "|---|--:|--:|--:|"]
    for name, one in result["compared"].items():
        lines.append(f"| {name} | {one['fill']:.2%} | {one['cut']:.2%} | {one['lost']:.2%} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--documents", default="10m", help="(default: %(default)s)")
    parser.add_argument("--compared", default="1m", help="documents of the second table (default: %(default)s)")
    parser.add_argument("--ways", nargs="*", choices=WAYS, help="what is measured (default: all that can be)")
    parser.add_argument("--threads", type=int, default=2, help="that plan windows (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where files lie (default: a temporary directory)")
    parser.add_argument("--json", type=Path, default=Path("build/packing_plan.json"), help="(default: %(default)s)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        way, path, threads = options.measure
        print(json.dumps(measure(way, path, int(threads))))
        return 0
    documents, compared = (parse_count(getattr(options, one), f"--{one}") for one in ("documents", "compared"))
    ways = [way for way in options.ways or WAYS if not WAYS[way][1] or has_compiler()]
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        path = Path(scratch) / "lengths"
        write_lengths(path, max(documents, compared))
        lengths = np.fromfile(path, np.uint32, compared).astype(np.int64)
        os.truncate(path, 4 * documents)
        load = os.getloadavg()[0]
        planned = {way: measured(way, path, options.threads) for way in ways}
    result = {"documents": documents, "threads": options.threads, "load": load, "planned": planned}
    result["compared"] = compare(lengths)
    print(tables(result))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
