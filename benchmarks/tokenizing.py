"""Tokenizing as it is read: its rate next to that of the tokenizers package, and the file of the lengths.

    python -m benchmarks.tokenizing
    python -m benchmarks.tokenizing --documents 1m

Texts are words of this repository's documents, and the tokenizer is a byte-level BPE of 8,000 tokens that is trained on
them. Rates are megabytes of text per second of processor time, in one thread: of ``Tokenizer.encode_batch``; and of an
epoch of packs with ``packing.tokenize`` in this process, from mapped shards to batches, whose lengths were counted
before. Then lengths of short documents, of 8 words, are counted, with all cores. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_streaming.units import parse_count

_PARALLEL = "TOKENIZERS_PARALLELISM"
_REPEATS = 3
ROOT = Path(__file__).resolve().parents[1]


def train(path: Path) -> tuple[Tokenizer, list[str]]:
    """Write a tokenizer, and return it with the words that it was trained on."""
    texts = [file.read_text() for file in sorted((ROOT / "docs").rglob("*.md"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[misc, assignment, unused-ignore]
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return tokenizer, " ".join(texts).split()


def write(out: Path, documents: list[str]) -> StreamingDataset:
    """Write documents, and return a dataset that tokenizes and packs them."""
    with MDSWriter(out=str(out), columns={"text": "str"}) as writer:
        for text in documents:
            writer.write({"text": text})
    tokenize = {"tokenizer": str(out.parent / "tokenizer.json")}
    return StreamingDataset(remote=str(out), local=f"{out}-cache", packing={"capacity": 4096, "tokenize": tokenize})


def best(of: Callable[[], Any]) -> float:
    """Return the fewest seconds of processor time of several calls."""
    seconds = []
    for _ in range(_REPEATS):
        started = time.process_time()
        of()
        seconds.append(time.process_time() - started)
    return min(seconds)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", default="100k", help="short documents (default: %(default)s)")
    short = int(parse_count(parser.parse_args().documents, "--documents"))
    drawn = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tokenizer, words = train(root / "tokenizer.json")
        os.environ[_PARALLEL] = "false"
        print("| words per document | encode_batch, MB/s | as read, MB/s | share |\n|---|---|---|---|")
        for length, count in ((30, 40_000), (400, 3000), (4000, 300)):
            documents = [" ".join(drawn.choices(words, k=length)) for _ in range(count)]
            megabytes = sum(len(text.encode()) for text in documents) / 1e6
            dataset = write(root / str(length), documents)
            loader = StreamingDataLoader(dataset, batch_size=1)
            len(loader)  # counts the lengths
            alone = best(lambda texts=documents: tokenizer.encode_batch(texts, add_special_tokens=False))  # type: ignore[misc]
            as_read = best(lambda batches=loader: sum(1 for _ in batches))  # type: ignore[misc]
            print(
                f"| {length} | {megabytes / alone:.2f} | {megabytes / as_read:.2f} | {alone / as_read:.2f} |",
                flush=True,
            )
        os.environ[_PARALLEL] = "true"
        dataset = write(root / "short", [" ".join(drawn.choices(words, k=8)) for _ in range(short)])
        started = time.perf_counter()
        len(StreamingDataLoader(dataset, batch_size=1))
        seconds = time.perf_counter() - started
        size = max(file.stat().st_size for file in (root / "short-cache").rglob("*.npy"))
        print("\n| short documents | seconds to count | bytes of the file |\n|---|---|---|")
        print(f"| {short} | {seconds:.1f} | {size} |")


if __name__ == "__main__":
    main()
