"""How fast tar files of small samples are read as they lie, beside webdataset, and beside the same data as MDS.

Run from the root of the repository, on a machine that does nothing else:

    python -m benchmarks.tar_speed
    python -m benchmarks.tar_speed --peers ~/peers/bin/python

Samples are a member of JSON (about 150 bytes), one of text (about 500) and one of a number, as webdataset's own writer
puts them into ``--shards`` files (``--peers``, or this Python, must have webdataset). Each system reads all of them,
shuffled, warm, from ``--directory``, into lists of 256 samples, so that no time goes into making tensors. Every
measurement is a fresh process that reads one epoch to warm up and then ``--epochs`` more, from asking for an iterator
to the last batch; ours has its files still open then, as far as they fit. Systems alternate, and medians of
``--rounds`` are shown, in thousand samples a second.

    tar            ours, format="webdataset"
    mds            ours, of the same samples as MDS
    tar text       ours, columns=["txt"] alone
    webdataset     its WebDataset with a shuffle of shards and a buffer of 1,000 samples, decoded

Prints a Markdown table; and how long it takes to index all files, and to open one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

BATCH = 256
OURS = ("tar", "tar text", "mds")
PEERS = ("webdataset",)
NAMES = (*OURS, *PEERS)

Batches = Iterable[list[dict[str, Any]]]
"""One epoch."""


def samples(count: int, first: int) -> Iterator[dict[str, Any]]:
    """The same in every process."""
    made = random.Random(first)
    for number in range(first, first + count):
        words = [f"word{made.randrange(10_000)}" for _ in range(60)]
        about = {"url": f"https://host/{number}.html", "license": "cc-by", "score": made.random(), "words": words[:6]}
        yield {"__key__": f"{number:09}", "json": about, "txt": " ".join(words), "cls": made.randrange(1000)}


def write(root: Path, shards: int, count: int) -> None:
    """Store the same samples as tar files, by webdataset, and as MDS."""
    import webdataset

    from lightning_streaming import MDSWriter

    columns = {"__key__": "str", "json": "json", "txt": "str", "cls": "int"}
    (root / "tar").mkdir()
    with MDSWriter(out=str(root / "mds"), columns=columns) as ours:
        for shard in range(shards):
            with webdataset.TarWriter(str(root / "tar" / f"{shard:05}.tar")) as theirs:
                for one in samples(count, shard * count):
                    theirs.write(one)
                    ours.write(one)


def read_ours(root: Path, name: str, workers: int) -> Callable[[], Batches]:
    """Our loader, kept over epochs."""
    from lightning_streaming import StreamingDataLoader, StreamingDataset

    how: dict[str, Any] = {} if name == "mds" else {"format": "webdataset"}
    if name == "tar text":
        how["columns"] = ["txt"]
    dataset = StreamingDataset(remote=str(root / ("mds" if name == "mds" else "tar")), shuffle=True, **how)
    loader = StreamingDataLoader(dataset, BATCH, num_workers=workers, collate_fn=list, persistent_workers=workers > 0)
    return lambda: loader


def read_webdataset(root: Path, _name: str, workers: int) -> Callable[[], Batches]:
    """Its own loader; nothing is kept over epochs but its workers."""
    import webdataset

    paths = sorted(map(str, (root / "tar").glob("*.tar")))
    shards = {"shardshuffle": len(paths), "empty_check": False}
    dataset = webdataset.WebDataset(paths, **shards).shuffle(1000).decode().batched(BATCH, collation_fn=list)
    kept = {"persistent_workers": True} if workers else {}
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=workers, **kept)
    return lambda: loader


def measure(name: str, root: Path, workers: int, epochs: int) -> float:
    """Samples a second."""
    epoch = (read_webdataset if name in PEERS else read_ours)(root, name, workers)
    sum(map(len, epoch()))
    began = time.perf_counter()
    found = sum(sum(map(len, epoch())) for _ in range(epochs))
    return found / (time.perf_counter() - began)


def measured(python: str, name: str, root: Path, workers: int, epochs: int) -> float:
    """In a fresh process."""
    out = root / "measured.json"
    options = ["--measure", name, str(root), str(workers), str(epochs), str(out)]
    done = subprocess.run([python, "-m", "benchmarks.tar_speed", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return float(json.loads(out.read_text()))


def time_start(root: Path) -> None:
    """Say how long it takes to index all files, and to open one."""
    from lightning_streaming.cache.generated_index import FilesAt
    from lightning_streaming.formats.webdataset import WebDatasetFormat
    from lightning_streaming.storage import Location

    began = time.perf_counter()
    shards = list(WebDatasetFormat().describe(FilesAt(Location(str(root / "tar"))), {}))
    indexed = time.perf_counter() - began
    began = time.perf_counter()
    for one in shards:
        WebDatasetFormat().open(one, root / "tar", None).close()
    opened = (time.perf_counter() - began) / len(shards)
    number = sum(one.samples for one in shards)
    size = sum(one.raw_data.bytes for one in shards)
    print(
        f"\n{len(shards)} files, {number:,} samples, {size / 1e6:,.0f} MB: indexed in {indexed:.2f} s; "
        f"one is opened in {opened * 1e3:.1f} ms"
    )


def compare(options: argparse.Namespace) -> None:
    """Measure all, alternating, and print the table."""
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="tar-speed-") as scratch:
        root = Path(scratch)
        write(root, options.shards, options.samples)
        print(
            "| thousand samples/s | "
            + " | ".join(f"`num_workers={workers}`" for workers in (0, 2))
            + " |\n|---|--:|--:|"
        )
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.rounds):
            for name in options.systems:
                for workers in (0, 2):
                    python = options.peers if name in PEERS else sys.executable
                    rate = measured(python, name, root, workers, options.epochs)
                    found.setdefault((name, workers), []).append(rate / 1e3)
        for name in options.systems:
            cells = [statistics.median(found[name, workers]) for workers in (0, 2)]
            print(f"| {name} | " + " | ".join(f"{one:,.1f}" for one in cells) + " |")
        time_start(root)


def main() -> None:
    """Compare; or, as the process that is started for it, measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--samples", type=int, default=5_000, help="in each shard")
    parser.add_argument("--epochs", type=int, default=2, help="read after the first, in one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the median is shown")
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--peers", default=sys.executable, help="Python of an environment with webdataset")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the data is written")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, root, workers, epochs, out = options.measure
        Path(out).write_text(json.dumps(measure(name, Path(root), int(workers), int(epochs))))
    else:
        compare(options)


if __name__ == "__main__":
    main()
