"""What a shard and an index cost a node: requests, bytes and processor time, measured with a server on this machine."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.index_start import put_index
from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from tests.servers import http_server

_SAMPLE_BYTES = 2**16
_SHARDS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Measured; processor seconds are those of all threads, user and system."""

    shard_requests: float
    """GET requests for a shard."""
    shard_seconds_per_gb: float
    """Processor seconds to fetch 10^9 bytes of shards, to check and to read them."""
    index_bytes: int
    index_requests: int
    """GET and HEAD requests for an index that is not here."""
    index_seconds: float
    """Until an index that is not here is fetched, checked and parsed; with a link that takes no time."""
    kept_bytes: int
    """The index in the cache, and its parsed form."""
    later_requests: int
    """Requests for an index that is here, and was last asked for longer ago than others need not ask again."""


def measure_costs(scratch: Path, shards: int, shard_bytes: int) -> Costs:
    """Fetch a few shards of that size, and an index of that many.

    Args:
        scratch: Where files are put.
        shards: In the index, compressed and with two hashes each.
        shard_bytes: Of each shard that is fetched.
    """
    bucket = scratch / "bucket"
    _write_shards(bucket / "shards", shard_bytes)
    put_index(bucket / "index", shards)
    with http_server(scratch) as url:
        requests, seconds = _read_shards(url, scratch)
        first = _open_index(url, scratch)
        _age(scratch / "cache-index" / ".origin")
        later = _open_index(url, scratch)
    kept = sum(path.stat().st_size for path in (scratch / "cache-index").iterdir() if "index" in path.name)
    return Costs(
        shard_requests=requests,
        shard_seconds_per_gb=seconds,
        index_bytes=(bucket / "index" / "index.json").stat().st_size,
        index_requests=first[0],
        index_seconds=first[1],
        kept_bytes=kept,
        later_requests=later[0],
    )


def _write_shards(out: Path, shard_bytes: int) -> None:
    rng, columns = np.random.default_rng(0), {"blob": "bytes"}
    with MDSWriter(out=str(out), columns=columns, hashes=["xxh3_64"], size_limit=shard_bytes) as writer:
        for _ in range(_SHARDS * (shard_bytes // _SAMPLE_BYTES - 1)):
            writer.write({"blob": rng.bytes(_SAMPLE_BYTES)})


def _dataset(url: str, scratch: Path, name: str) -> StreamingDataset:
    options = {"key": "key", "secret": "secret", "endpoint_url": url}
    local = scratch / f"cache-{name}"
    return StreamingDataset(remote=f"s3://bucket/{name}", local=str(local), storage={"options": options}, batch_size=32)


def _read_shards(url: str, scratch: Path) -> tuple[float, float]:
    began = time.process_time()
    for _ in StreamingDataLoader(_dataset(url, scratch, "shards")):
        pass
    seconds = time.process_time() - began
    files = [path.stat().st_size for path in (scratch / "bucket" / "shards").glob("*.mds")]
    return _count(url, "/shards/.*mds$") / len(files), seconds / sum(files) * 1e9


def _open_index(url: str, scratch: Path) -> tuple[int, float]:
    before = _count(url, "/index/index.json$")
    began = time.perf_counter()
    assert _dataset(url, scratch, "index").size
    return _count(url, "/index/index.json$") - before, time.perf_counter() - began


def _age(manifest: Path) -> None:
    """Let a note of when the store was last asked say that it was long ago."""
    text = manifest.read_text()
    aged = re.sub(r'("checked": )\d+', r"\g<1>1", text)
    assert aged != text, "there is such a note"
    found = manifest.stat()
    manifest.write_text(aged)
    os.utime(manifest, ns=(found.st_atime_ns, found.st_mtime_ns))


def _count(url: str, pattern: str) -> int:
    asked = urllib.request.Request(f"{url}/__log", data=pattern.encode(), method="POST")
    with urllib.request.urlopen(asked) as answer:
        return len(json.loads(answer.read()))
