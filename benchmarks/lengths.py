"""Lengths of documents: seconds and memory to count them once, and what looking lengths up by sample id costs.

    python -m benchmarks.lengths
    python -m benchmarks.lengths --documents 100m --directory /dev/shm

Counts, over shards on this machine of a million documents each, of 4 to 12 tokens:

    offsets     documents of tokens alone (ndarray:uint16): the offsets of each shard tell the lengths
    sizes       the same beside a number and a text: the sizes at the head of each document tell them
    column      lengths="num_tokens", that number

each in a fresh process, from making the cache to the kept file; then what it takes to map that file. Peak memory is
what was resident (VmHWM), pages of mapped shards included; its own is what is not of files. Documents are short so that
so many fit on a disk: of longer ones offsets cost as much, and the two others more, as there are more pages to touch.

Then the lengths of so many random sample ids are looked up, in pieces of a million: of one stream; of one of which half
of the samples are selected at random, also with what is selected gathered before, which is in the time; and of three.
Prints Markdown tables.
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

from benchmarks.selecting import own_mib, status_mib
from lightning_streaming import MDSWriter, Stream
from lightning_streaming.cache import ShardCache
from lightning_streaming.dataset.stream import StreamDefaults, cache_config_of
from lightning_streaming.formats.mds import head_bytes
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.selection.bitmap import Selection, bitmap_bytes
from lightning_streaming.selection.catalog import Catalog, CatalogLengths
from lightning_streaming.selection.document_lengths import StreamLengths, document_lengths
from lightning_streaming.units import parse_count

SHARD_DOCUMENTS = 1_000_000
SHORTEST, LONGEST = 4, 12
_TEXT = b"so"
ALONE = {"tokens": "ndarray:uint16"}
BESIDE = {"num_tokens": "uint32", "text": "str", "tokens": "ndarray:uint16"}
WAYS: dict[str, tuple[str, LengthsRequest]] = {
    "offsets": ("alone", LengthsRequest(column="tokens")),
    "sizes": ("beside", LengthsRequest(column="tokens")),
    "column": ("beside", LengthsRequest(lengths="num_tokens")),
}
_IDS_AT_ONCE = 1 << 20
_MIB = 2**20


def lengths_of(shard: int, documents: int) -> NDArray[np.int64]:
    """The lengths of one shard's documents."""
    return np.random.default_rng(shard).integers(SHORTEST, LONGEST + 1, documents)


def write_documents(root: Path, columns: dict[str, str], documents: int) -> None:
    """Write shards as the writer does, but a million documents at once."""
    with MDSWriter(out=str(root), columns=columns) as writer:
        writer.write({"num_tokens": np.uint32(1), "text": "", "tokens": np.zeros(1, np.uint16)})
    index = json.loads((root / "index.json").read_text())
    (entry,) = index["shards"]
    first = (root / entry["raw_data"]["basename"]).read_bytes()
    config = first[12 : int.from_bytes(first[4:8], "little")]  # between the offsets of one sample and the sample
    index["shards"] = []
    for number, begin in enumerate(range(0, documents, SHARD_DOCUMENTS)):
        lengths = lengths_of(number, min(SHARD_DOCUMENTS, documents - begin))
        ends, samples = _samples(lengths, is_alone=columns == ALONE)
        data = head_bytes(ends, config) + samples.tobytes()
        name = f"shard.{number:05}.mds"
        (root / name).write_bytes(data)
        file = {"basename": name, "bytes": len(data), "hashes": {}}
        index["shards"].append({**entry, "raw_data": file, "samples": len(lengths)})
    (root / "index.json").write_text(json.dumps(index))


def _samples(lengths: NDArray[np.int64], *, is_alone: bool) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Where samples of such lengths end, and their bytes; tokens are zeros."""
    if is_alone:  # size of the tokens
        heads = np.zeros(len(lengths), np.dtype([("size", "<u4"), ("ndim", "u1"), ("length", "u1")]))
    else:  # sizes of text and tokens; the number; the text
        fields = [("text", "<u4"), ("size", "<u4"), ("number", "<u4"), ("so", "S2"), ("ndim", "u1"), ("length", "u1")]
        heads = np.zeros(len(lengths), np.dtype(fields))
        heads["text"], heads["number"], heads["so"] = len(_TEXT), lengths, _TEXT
    heads["size"], heads["ndim"], heads["length"] = 2 + 2 * lengths, 1 << 2, lengths
    sizes = heads.itemsize + 2 * lengths
    ends = np.cumsum(sizes)
    samples = np.zeros(int(ends[-1]), np.uint8)
    samples[(ends - sizes)[:, None] + np.arange(heads.itemsize)] = heads.view(np.uint8).reshape(len(heads), -1)
    return ends, samples


# --- in a process of its own ---


def count(way: str, scratch: Path) -> dict[str, float]:
    """Count, and map what was kept; seconds, and the most memory in MiB."""
    own, ends = [own_mib()], threading.Event()

    def look() -> None:
        while not ends.wait(0.05):
            own.append(own_mib())

    watching = threading.Thread(target=look)
    watching.start()
    name, asked = WAYS[way]
    before, began, busy = status_mib("VmHWM"), time.perf_counter(), time.process_time()
    cache = ShardCache(cache_config_of(Stream(remote=str(scratch / name)), "documents", StreamDefaults()))
    index = cache.read_index()
    lengths = document_lengths(asked, index, cache)
    seconds, processor, peak = time.perf_counter() - began, time.process_time() - busy, status_mib("VmHWM")
    ends.set()
    watching.join()
    assert (lengths.values[:SHARD_DOCUMENTS] == lengths_of(0, min(len(lengths), SHARD_DOCUMENTS))).all()
    began = time.perf_counter()
    again = document_lengths(asked, index, cache)
    mapped = time.perf_counter() - began
    assert again.digest == lengths.digest
    assert lengths.cached_at is not None
    return {
        "documents": len(lengths),
        "tokens": lengths.num_tokens,
        "seconds": seconds,
        "cpu": processor,
        "before_mib": before,
        "peak_mib": peak,
        "own_peak_mib": max(own),
        "kept_mib": lengths.cached_at.stat().st_size / _MIB,
        "mapped_seconds": mapped,
    }


def look_up(scratch: Path) -> dict[str, float]:
    """Look up as many random ids as there are documents; seconds for each kind of dataset."""
    cache = ShardCache(cache_config_of(Stream(remote=str(scratch / "alone")), "documents", StreamDefaults()))
    index = cache.read_index()
    lengths = document_lengths(WAYS["offsets"][1], index, cache)
    assert lengths.cached_at is not None
    rng = np.random.default_rng(0)
    bits = np.zeros(bitmap_bytes(len(lengths)), np.uint8)
    bits[: len(lengths) // 8] = rng.integers(0, 256, len(lengths) // 8, np.uint8)
    half = {"a": Selection(bits, len(lengths))}
    three = dict.fromkeys("abc", index)
    found = {
        "one": _seconds(Catalog({"a": index}), {"a": lengths}, len(lengths)),
        "selected": _seconds(Catalog({"a": index}, half), {"a": lengths}, len(lengths)),
        "gathered": _seconds(Catalog({"a": index}, half), {"a": lengths}, len(lengths), gathers=True),
        "three": _seconds(Catalog(three), dict.fromkeys(three, lengths), len(lengths)),
    }
    return {**found, "ids": len(lengths)}


def _seconds(catalog: Catalog, streams: dict[str, StreamLengths], ids: int, *, gathers: bool = False) -> float:
    by_id, rng = CatalogLengths(catalog, streams), np.random.default_rng(1)
    began = time.perf_counter()
    if gathers:
        by_id.gather()
    seconds = time.perf_counter() - began
    for first in range(0, ids, _IDS_AT_ONCE):
        some = rng.integers(0, catalog.num_samples, min(_IDS_AT_ONCE, ids - first))
        began = time.perf_counter()
        by_id(some)
        seconds += time.perf_counter() - began
    return seconds


# --- around it ---


def measured(scratch: Path, what: str) -> Any:
    """One measurement in a fresh process, with an empty cache."""
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        environment = os.environ | {"LIGHTNING_STREAMING_CACHE": cache}
        command = [sys.executable, "-m", "benchmarks.lengths", "--measure", what, str(scratch)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout)


def tables(found: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = [
        "| counted by | documents | seconds | processor seconds | peak memory | its own | before | kept | mapped in |"
    ]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for way, one in found["counted"].items():
        lines.append(
            f"| {way} | {one['documents']:,} | {one['seconds']:.2f} | {one['cpu']:.2f} | {one['peak_mib']:.0f} MiB | "
            f"{one['own_peak_mib']:.0f} MiB | {one['before_mib']:.0f} MiB | {one['kept_mib']:.0f} MiB | "
            f"{one['mapped_seconds'] * 1e3:.0f} ms |"
        )
    looked = found["looked_up"]
    lines += [
        "",
        "| random ids | one stream | half of it selected | gathered before | three streams |",
        "|--:|--:|--:|--:|--:|",
    ]
    lines.append(
        f"| {looked['ids']:,} | {looked['one']:.2f} s | {looked['selected']:.2f} s | {looked['gathered']:.2f} s | "
        f"{looked['three']:.2f} s |"
    )
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--documents", default="1m", help="documents to count (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where the datasets are written")
    parser.add_argument("--json", type=Path, default=Path("build/lengths.json"), help="(default: %(default)s)")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, where = options.measure[0], Path(options.measure[1])
        print(json.dumps(look_up(where) if what == "look_up" else count(what, where)))
        return 0
    documents = parse_count(options.documents, "--documents")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        scratch = Path(directory)
        for name, columns in (("alone", ALONE), ("beside", BESIDE)):
            write_documents(scratch / name, columns, documents)
        result = {"counted": {way: measured(scratch, way) for way in WAYS}, "looked_up": measured(scratch, "look_up")}
    print(tables(result))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
