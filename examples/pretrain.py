"""Train a language model on five sources by shares of their tokens: a broad mixture, a ramp, and an anneal, in packs.

From the repository's root:

    python examples/pretrain.py                                       # writes demo_output/pretrain/*
    lightning-streaming inspect --config configs/pretrain.yaml        # tokens of each source, in each phase
    lightning-streaming fit --config configs/pretrain.yaml

The program takes 5 seconds on two cores, and prints the documents and tokens of each source. The training takes a
minute at most, and prints the shares of the tokens that it has read.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_streaming import MDSWriter

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other examples, from any directory
from examples.write_dataset import code_files, document_files

MOST_BYTES = 1024


def web() -> Iterator[bytes]:
    """Yield short texts: paragraphs of documents."""
    for path in document_files():
        yield from (part for part in path.read_bytes()[:MOST_BYTES].split(b"\n\n") if part)


def wiki() -> Iterator[bytes]:
    """Yield the beginnings of documents."""
    yield from (path.read_bytes()[:MOST_BYTES] for path in document_files())


def code() -> Iterator[bytes]:
    """Yield the beginnings of source files."""
    yield from (path.read_bytes()[:MOST_BYTES] for path in code_files())


def books() -> Iterator[bytes]:
    """Yield long texts: several documents together."""
    documents = wiki()
    while parts := list(islice(documents, 4)):
        yield b"\n".join(parts)


def sums() -> Iterator[bytes]:
    """Yield pages of additions."""
    for first in range(200):
        yield b"\n".join(b"%d + %d = %d" % (first, second, first + second) for second in range(30))


SOURCES: Mapping[str, tuple[Any, int]] = {
    "web": (web, 4000),
    "wiki": (wiki, 400),
    "code": (code, 400),
    "books": (books, 100),
    "math": (sums, 200),
}
"""The texts of each source, and the most documents of it."""


def write_source(texts: Iterable[bytes], out: Path) -> tuple[int, int]:
    """Write texts as documents of byte tokens; return the numbers of documents and tokens."""
    documents = tokens = 0
    with MDSWriter(out=out, columns={"tokens": "ndarray:uint8"}, size_limit="128kb", exist_ok=True) as writer:
        for text in texts:
            if text:
                writer.write({"tokens": np.frombuffer(text, np.uint8)})
                documents, tokens = documents + 1, tokens + len(text)
    return documents, tokens


def write_sources(root: Path) -> dict[str, tuple[int, int]]:
    """Write all sources; return the documents and tokens of each."""
    return {name: write_source(islice(texts(), most), root / name) for name, (texts, most) in SOURCES.items()}


class TokenShares(Callback):
    """Prints the share of each source in the tokens that were read, at the end of the training."""

    def __init__(self) -> None:
        self.tokens = Counter[str]()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the shares."""
        loader: Any = trainer.train_dataloader
        self.tokens = Counter(loader.statistics().tokens_per_stream)
        total = max(sum(self.tokens.values()), 1)
        print("read:", ", ".join(f"{name} {count / total:.1%}" for name, count in self.tokens.items()))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/pretrain"), help="default: %(default)s")
    arguments = parser.parse_args()
    for name, (documents, tokens) in write_sources(arguments.out).items():
        print(f"{arguments.out / name}: {documents:,} documents, {tokens:,} tokens")


if __name__ == "__main__":
    main()
