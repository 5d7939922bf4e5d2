"""How fast packed batches are read, beside rows of fixed length, ``numpy.take``, grain's packing and litdata's blocks.

Run from the root of the repository, on a machine that does nothing else:

    python -m benchmarks.packing_speed
    python -m benchmarks.packing_speed --peers ~/peers/bin/python

Documents are of random tokens, their lengths from a log-normal distribution with a median of 500 tokens and a sigma of
1.1, stored as uint16. Each system reads the same documents, shuffled where it can, as batches of 8 rows of 8,192
tokens; warm, from ``--directory``. Every measurement is a fresh process that reads one epoch to warm up and then
``--epochs`` more, from asking for an iterator to the last batch. Systems alternate, and medians of ``--rounds`` are
shown, in millions of tokens a second.

    take              rows of a matrix in memory, by ``numpy.take``: what this machine can do
    fixed             our rows of 8,192 tokens, uint16
    concat, best_fit  our packs, as stored (uint16), with ``cu_seqlens`` and ``max_seqlen``
    all               our best_fit packs with all that a batch can have, tokens as int64
    take int64        a matrix of int64, beside ``all``
    grain             its first-fit packing, which makes tokens, segment ids and positions
    litdata           its TokensLoader: blocks of 8,192 tokens, no regard to documents

``--peers`` is the Python of an environment with grain, litdata or both. Prints a Markdown table.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CAPACITY, ROWS = 8192, 8
STORED = {"as_dtype": None, "without": ["position_ids", "document_ids"]}
OURS = {
    "fixed": None,
    "concat": {"method": "concat", **STORED},
    "best_fit": STORED,
    "all": {},
}
IN_MEMORY = {"take": np.uint16, "take int64": np.int64}
PEERS = ("grain", "litdata")
NAMES = (*IN_MEMORY, *OURS, *PEERS)

Batches = Iterable[int]
"""One epoch; of each batch, its tokens."""


def documents(count: int) -> Iterator[NDArray[np.uint16]]:
    """The same in every process."""
    rng = np.random.default_rng(7)
    lengths = np.maximum(rng.lognormal(np.log(500), 1.1, count).astype(np.int64), 1)
    return (rng.integers(0, 50_000, length, np.uint16) for length in lengths)


def flat(root: Path) -> NDArray[np.uint16]:
    """All tokens, one document after another."""
    tokens: NDArray[np.uint16] = np.load(root / "tokens.npy", mmap_mode="r")
    return tokens


def write(root: Path, count: int) -> None:
    """Store what ours and the matrices are read from."""
    from lightning_streaming import MDSWriter

    made = list(documents(count))
    tokens = np.concatenate(made)
    np.save(root / "tokens.npy", tokens)
    np.save(root / "ends.npy", np.cumsum([len(one) for one in made]))
    with MDSWriter(out=str(root / "documents"), columns={"tokens": "ndarray:uint16"}) as writer:
        for one in made:
            writer.write({"tokens": one})
    with MDSWriter(out=str(root / "fixed"), columns={"tokens": f"ndarray:uint16:{CAPACITY}"}) as writer:
        for row in tokens[: len(tokens) // CAPACITY * CAPACITY].reshape(-1, CAPACITY):
            writer.write({"tokens": row})


def read_ours(root: Path, name: str, workers: int) -> Callable[[], Batches]:
    """Our loader, kept over epochs."""
    from lightning_streaming import StreamingDataLoader, StreamingDataset

    pack = OURS[name]
    if pack is None:
        dataset = StreamingDataset(remote=str(root / "fixed"), shuffle=True)
    else:
        how = {"column": "tokens", "capacity": CAPACITY, **pack}
        dataset = StreamingDataset(remote=str(root / "documents"), shuffle=True, packing=how)
    loader = StreamingDataLoader(dataset, ROWS, num_workers=workers, persistent_workers=workers > 0)
    column = "tokens" if pack is None else "input_ids"
    return lambda: (batch[column].numel() for batch in loader)


def read_matrix(root: Path, name: str, _workers: int) -> Callable[[], Batches]:
    """Rows in random order, as one array a batch."""
    tokens = flat(root)
    matrix = tokens[: len(tokens) // CAPACITY * CAPACITY].reshape(-1, CAPACITY).astype(IN_MEMORY[name])
    rng = np.random.default_rng(0)

    def batches() -> Iterator[int]:
        order = rng.permutation(len(matrix))
        return (matrix.take(order[first : first + ROWS], axis=0).size for first in range(0, len(order), ROWS))

    return batches


class Documents:
    """What grain reads from: a document by its number."""

    def __init__(self, root: Path) -> None:
        self._tokens = flat(root)
        self._ends = np.load(root / "ends.npy")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> dict[str, Any]:
        start = int(self._ends[number - 1]) if number else 0
        # Longer ones are cut: its packing refuses them.
        return {"tokens": np.asarray(self._tokens[start : min(int(self._ends[number]), start + CAPACITY)])}


def read_grain(root: Path, _name: str, workers: int) -> Callable[[], Batches]:
    """First fit into as many bins as a batch of its own loaders usually has."""
    import grain  # type: ignore[import-not-found]  # in the environment of peers alone

    source = grain.MapDataset.source(Documents(root)).shuffle(seed=0)

    def batches() -> Iterator[int]:
        packed = grain.experimental.FirstFitPackIterDataset(
            source.to_iter_dataset(), length_struct={"tokens": CAPACITY}, num_packing_bins=64
        ).batch(ROWS)
        if workers:
            packed = packed.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        return (int(np.count_nonzero(batch["tokens_segment_ids"])) for batch in packed)

    return batches


def read_litdata(root: Path, _name: str, workers: int) -> Callable[[], Batches]:
    """Blocks of one long row of tokens."""
    import torch
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.writer import BinaryWriter

    loader = TokensLoader(block_size=CAPACITY)
    out = root / "litdata"
    if not out.exists():
        out.mkdir()
        writer = BinaryWriter(str(out), chunk_bytes="64MB", item_loader=loader)
        ends = np.load(root / "ends.npy").tolist()
        for number, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
            writer[number] = torch.from_numpy(flat(root)[start:stop].copy())
        writer.done()
        writer.merge()
    dataset = StreamingDataset(str(out), item_loader=TokensLoader(block_size=CAPACITY), shuffle=True, drop_last=False)
    batches = StreamingDataLoader(dataset, batch_size=ROWS, num_workers=workers)
    return lambda: (batch.numel() for batch in batches)


def measure(name: str, root: Path, workers: int, epochs: int) -> float:
    """Tokens a second."""
    read = {"grain": read_grain, "litdata": read_litdata}.get(name, read_matrix if name in IN_MEMORY else read_ours)
    epoch = read(root, name, workers)
    sum(epoch())
    began = time.perf_counter()
    tokens = sum(sum(epoch()) for _ in range(epochs))
    return tokens / (time.perf_counter() - began)


def measured(python: str, name: str, root: Path, workers: int, epochs: int) -> float | None:
    """In a fresh process; None where that Python has no such system."""
    out = root / "measured.json"
    options = ["--measure", name, str(root), str(workers), str(epochs), str(out)]
    done = subprocess.run(
        [python, "-m", "benchmarks.packing_speed", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LITDATA_DISABLE_VERSION_CHECK": "1"},
    )
    if done.returncode and "ModuleNotFoundError" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return float(json.loads(out.read_text()))


def compare(options: argparse.Namespace) -> None:
    """Measure all, alternating, and print the table."""
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="packing-speed-") as scratch:
        root = Path(scratch)
        write(root, options.documents)
        print(
            "| million tokens/s | " + " | ".join(f"`num_workers={workers}`" for workers in (0, 2)) + " |\n|---|--:|--:|"
        )
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.rounds):
            for name in options.systems:
                for workers in (0, 2) if name not in IN_MEMORY else (0,):
                    python = options.peers if name in PEERS else sys.executable
                    rate = python and measured(python, name, root, workers, options.epochs)
                    if rate:
                        found.setdefault((name, workers), []).append(rate / 1e6)
        for name in options.systems:
            cells = [found.get((name, workers)) for workers in (0, 2)]
            print(f"| {name} | " + " | ".join(f"{statistics.median(one):,.1f}" if one else "–" for one in cells) + " |")


def main() -> None:
    """Compare; or, as the process that is started for it, measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=60_000, help="about 900 tokens each")
    parser.add_argument("--epochs", type=int, default=3, help="read after the first, in one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each, of which the median is shown")
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--peers", help="Python of an environment with grain and litdata")
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
