"""Selections and indexes of ids: seconds and memory to make one, and what it costs to hold one of a very large dataset.

    python -m benchmarks.selecting
    python -m benchmarks.selecting --samples 100m --held 1b --directory /dev/shm

Evaluates, over shards on this machine of a million records each, an ``int`` and a ``float32``:

    where       "score >= 0.5", which DuckDB evaluates over one column
    function    the same as a Python function, if --function is given: it takes a minute for 10^8 samples
    split       [:98%], by the number of each sample, for which no shard is looked at
    split by    [:98%], by the column of whole numbers

each in a fresh process, from making the stream to the kept bits. Peak memory is what was resident (VmHWM), pages of
mapped shards included. Then the bits of a selection of half of --held samples, drawn at random, are mapped from a file
as each process of a run does: what that takes of memory, of its own and in all, and how long it takes to find the
stored places of 8,192 random numbers of selected samples.

Before that the index of the ids is made by which this dataset could be joined, in a fresh process as well; of its peak
memory, what is its own is told apart from the pages of files. Then 8,192 random ids are looked for at a time. Prints
Markdown tables.
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

from lightning_streaming import MDSWriter, Stream
from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.selection_files import map_bits
from lightning_streaming.dataset.stream import StreamDefaults, cache_config_of, selection_of
from lightning_streaming.formats.mds import head_bytes
from lightning_streaming.selection.bitmap import Selection, bitmap_bytes
from lightning_streaming.selection.evaluate import select_samples
from lightning_streaming.selection.id_index import index_ids
from lightning_streaming.units import parse_count

SHARD_SAMPLES = 1_000_000
_RECORD = np.dtype([("id", "<i8"), ("score", "<f4")])
"""A stored sample: columns are sorted by name."""
WAYS: dict[str, dict[str, Any]] = {
    "where": {"where": "score >= 0.5"},
    "function": {"where": lambda score: score >= 0.5},
    "fraction": {"fraction": ":98%"},
    "group by": {"fraction": ":98%", "group_by": "id"},
}
_FOUND_AT_ONCE = 8192
_FINDS = 50
_MIB = 2**20


def write_records(root: Path, samples: int) -> None:
    """Write shards as the writer does, but whole tables at once."""
    with MDSWriter(out=str(root), columns={"id": "int", "score": "float32"}) as writer:
        writer.write({"id": 0, "score": 0.0})
    index = json.loads((root / "index.json").read_text())
    (entry,) = index["shards"]
    first = (root / entry["raw_data"]["basename"]).read_bytes()
    config = first[12 : -_RECORD.itemsize]  # between the offsets of one sample and the sample
    rng, index["shards"] = np.random.default_rng(0), []
    for number, begin in enumerate(range(0, samples, SHARD_SAMPLES)):
        count = min(SHARD_SAMPLES, samples - begin)
        records = np.empty(count, _RECORD)
        records["id"], records["score"] = np.arange(begin, begin + count), rng.random(count, np.float32)
        data = head_bytes(_RECORD.itemsize * np.arange(1, count + 1), config) + records.tobytes()
        name = f"shard.{number:05}.mds"
        (root / name).write_bytes(data)
        file = {"basename": name, "bytes": len(data), "hashes": {}}
        index["shards"].append({**entry, "raw_data": file, "samples": count})
    (root / "index.json").write_text(json.dumps(index))


def write_bits(path: Path, samples: int) -> None:
    """Write the bits of a selection of about half of the samples."""
    random = np.random.default_rng(0).integers(0, 256, samples // 8, np.uint8)
    bits = np.zeros(bitmap_bytes(samples), np.uint8)
    bits[: len(random)] = random
    np.save(path, bits)


# --- in a process of its own ---


def evaluate(way: str, root: str) -> dict[str, float]:
    """Evaluate a selection; seconds, processor seconds, and the most memory in MiB, before it began and in all."""
    before, began, busy = status_mib("VmHWM"), time.perf_counter(), time.process_time()
    stream = Stream(remote=root, selection=WAYS[way])
    cache = ShardCache(cache_config_of(stream, "records", StreamDefaults()))
    selection = select_samples(selection_of(stream, StreamDefaults()), cache.read_index(), cache)
    seconds, processor = time.perf_counter() - began, time.process_time() - busy
    peak = status_mib("VmHWM")
    return {"selected": len(selection), "seconds": seconds, "cpu": processor, "before_mib": before, "peak_mib": peak}


def index(root: str, _: str) -> dict[str, float]:
    """Make an index of ids, and look for some; seconds, and the most memory in MiB."""
    own, ends = [own_mib()], threading.Event()

    def look() -> None:
        while not ends.wait(0.05):
            own.append(own_mib())

    watching = threading.Thread(target=look)
    watching.start()
    before, began, busy = status_mib("VmHWM"), time.perf_counter(), time.process_time()
    cache = ShardCache(cache_config_of(Stream(remote=root), "records", StreamDefaults()))
    ids = index_ids("id", cache.read_index(), cache)
    seconds, processor = time.perf_counter() - began, time.process_time() - busy
    peak = status_mib("VmHWM")
    ends.set()
    watching.join()
    rng, found = np.random.default_rng(0), []
    for _find in range(_FINDS):
        wanted = rng.integers(0, len(ids), _FOUND_AT_ONCE)
        began = time.perf_counter()
        places = ids.places(wanted)
        found.append(time.perf_counter() - began)
        assert (places == wanted).all()
    assert ids.cached_at is not None
    return {
        "seconds": seconds,
        "cpu": processor,
        "before_mib": before,
        "peak_mib": peak,
        "own_peak_mib": max(own),
        "kept_mib": ids.cached_at.stat().st_size / _MIB,
        "find_seconds": float(np.median(found)),
    }


def hold(path: str, samples: int) -> dict[str, float]:
    """Map a selection and find samples; memory in MiB that this added, of its own and in all."""
    own, resident = own_mib(), status_mib("VmRSS")
    began = time.perf_counter()
    bits = map_bits(Path(path))
    assert bits is not None
    selection = Selection(bits, samples)
    opened = time.perf_counter() - began
    rng, seconds = np.random.default_rng(0), []
    for _ in range(_FINDS):
        numbers = rng.integers(0, len(selection), _FOUND_AT_ONCE)
        began = time.perf_counter()
        stored = selection.stored(numbers)
        seconds.append(time.perf_counter() - began)
        assert selection.has(stored).all()
    return {
        "samples": samples,
        "open_seconds": opened,
        "own_mib": own_mib() - own,
        "in_all_mib": status_mib("VmRSS") - resident,
        "find_seconds": float(np.median(seconds)),
    }


def own_mib() -> float:
    """Memory of this process that is its own, in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def status_mib(field: str) -> float:
    """A size that the system tells of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


# --- around it ---


def measured(scratch: Path, *words: str) -> Any:
    """One measurement in a fresh process, with an empty cache."""
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        environment = os.environ | {"LIGHTNING_STREAMING_CACHE": cache}
        command = [sys.executable, "-m", "benchmarks.selecting", "--measure", *words]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout)


def tables(found: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    samples = found["samples"]
    lines = ["| selection | selected | seconds | processor seconds | samples/s | peak memory | before |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for way, one in found["evaluated"].items():
        lines.append(
            f"| {way} | {one['selected']:,.0f} of {samples:,} | {one['seconds']:.2f} | {one['cpu']:.2f} | "
            f"{samples / one['seconds'] / 1e6:,.1f} m | {one['peak_mib']:.0f} MiB | {one['before_mib']:.0f} MiB |"
        )
    ids = found["indexed"]
    lines += ["", "| ids | indexed in | processor seconds | peak memory | its own | kept | 8,192 ids found in |"]
    lines += ["|--:|--:|--:|--:|--:|--:|--:|"]
    lines.append(
        f"| {samples:,} | {ids['seconds']:.1f} s | {ids['cpu']:.1f} | {ids['peak_mib']:.0f} MiB | "
        f"{ids['own_peak_mib']:.0f} MiB | {ids['kept_mib']:.0f} MiB | {ids['find_seconds'] * 1e3:.2f} ms |"
    )
    held = found["held"]
    lines += ["", "| samples of a held selection | opened in | its own memory | in all | 8,192 places found in |"]
    lines += ["|--:|--:|--:|--:|--:|"]
    lines.append(
        f"| {held['samples']:,.0f} | {held['open_seconds']:.2f} s | {held['own_mib']:.0f} MiB | "
        f"{held['in_all_mib']:.0f} MiB | {held['find_seconds'] * 1e3:.2f} ms |"
    )
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--samples", default="1m", help="samples to evaluate (default: %(default)s)")
    parser.add_argument("--held", default="10m", help="samples of the selection that is mapped (default: %(default)s)")
    parser.add_argument("--function", action="store_true", help="also evaluate a Python function")
    parser.add_argument("--directory", type=Path, help="where the dataset is written")
    parser.add_argument("--json", type=Path, default=Path("build/selecting.json"), help="(default: %(default)s)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, where, how = options.measure
        measures: dict[str, Any] = {"evaluate": lambda: evaluate(how, where), "index": lambda: index(where, how)}
        print(json.dumps(measures.get(what, lambda: hold(where, int(how)))()))
        return 0
    samples, held = parse_count(options.samples, "--samples"), parse_count(options.held, "--held")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        scratch = Path(directory)
        write_records(scratch / "records", samples)
        ways = [way for way in WAYS if way != "function" or options.function]
        found = {way: measured(scratch, "evaluate", str(scratch / "records"), way) for way in ways}
        write_bits(scratch / "bits.npy", held)
        result = {
            "samples": samples,
            "evaluated": found,
            "indexed": measured(scratch, "index", str(scratch / "records"), "id"),
            "held": measured(scratch, "hold", str(scratch / "bits.npy"), str(held)),
        }
    print(tables(result))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
