"""How far the shares of streams in a batch of packs are from weights in tokens, by the size of the global batch.

    python -m benchmarks.batch_shares

Documents of three streams have exponential lengths with means of 500, 1,000 and 20,000 tokens, and weights of 50, 25
and 25 %. They are packed into 4,096 tokens, by best fit; longer ones are split. There is one canonical node. A
deviation is the largest of any stream, in percent of the tokens of the batch. Prints a Markdown table.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from lightning_streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset

MEANS = {"web": 500, "code": 1000, "books": 20_000}
WEIGHTS = {"web": 0.5, "code": 0.25, "books": 0.25}
TOKENS, EPOCH = 24_000_000, 20_000_000
SIZES = (4, 16, 64, 256)


def write(root: Path) -> None:
    """Write the streams; each token is the number of its stream, from 1."""
    rng = np.random.default_rng(0)
    for number, (name, mean) in enumerate(MEANS.items(), 1):
        with MDSWriter(out=str(root / name), columns={"tokens": "ndarray:uint8"}, size_limit="4mb") as writer:
            for _ in range(TOKENS // mean):
                writer.write({"tokens": np.full(1 + int(rng.exponential(mean)), number, np.uint8)})


def measure(root: Path, size: int) -> str:
    """Return the row of a batch size."""
    dataset = StreamingDataset(
        streams={name: Stream(remote=str(root / name), proportion=WEIGHTS[name]) for name in MEANS},
        mixing={"weights_in": "tokens"},
        packing={"column": "tokens", "capacity": 4096, "longer": "split"},
        shuffle=True,
        epoch_size=EPOCH,
        batch_size=size,
        num_canonical_nodes=1,
    )
    deviations, documents = [], []
    for batch in StreamingDataLoader(dataset, drop_last=True):
        counts = np.bincount(batch["input_ids"].numpy().ravel(), minlength=4)[1:]
        deviations.append(np.abs(counts / counts.sum() - list(WEIGHTS.values())).max() * 100)
        documents.append(sum(int(pack.max()) + 1 for pack in batch["document_ids"].numpy()))
    median, most = np.percentile(deviations, [50, 95])
    return f"| {size} | {np.mean(documents):,.0f} | {median:.1f} % | {most:.1f} % | {max(deviations):.1f} % |"


def main() -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory))
        print("| packs in a batch | documents, or parts | median deviation | 95th percentile | largest |")
        print("|---|---|---|---|---|")
        for size in SIZES:
            print(measure(Path(directory), size), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
