"""Tokenizing as it is read: its rate next to that of the tokenizers package, and the file of the lengths.

    python -m benchmarks.tokenizing
    python -m benchmarks.tokenizing --documents 1m

Texts are words of this repository's documents, and the tokenizer is a byte-level BPE of 8,000 tokens that is trained on
them. Rates are megabytes of text per second of processor time, in one thread: of ``Tokenizer.encode_batch``, and for
conversations of ``apply_chat_template`` of transformers; and of an epoch of packs with ``packing.tokenize`` in this
process, from mapped shards to batches, whose lengths were counted before. The epoch's plan of packs is part of that;
"without the plan" leaves it out. The ways alternate, and the fastest of each is compared: the share of one is 1 where
packs take no more time than the package. Then lengths of short documents, of 8 words, are counted, with all cores.
Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_streaming.units import parse_count

_PARALLEL = "TOKENIZERS_PARALLELISM"
_REPEATS = 3
_TEMPLATE = """{% for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{% endfor %}"""
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


def write(out: Path, column: str, rows: list[Any]) -> StreamingDataset:
    """Write texts or conversations, and return a dataset that tokenizes and packs them."""
    with MDSWriter(out=str(out), columns={column: "str" if column == "text" else "json"}) as writer:
        for value in rows:
            writer.write({column: value})
    tokenize = {"tokenizer": str(out.parent), "text" if column == "text" else "chat": column}
    along = [] if column == "text" else ["loss_mask"]
    packing = {"capacity": 4096, "tokenize": tokenize, "along": along}
    return StreamingDataset(remote=str(out), local=f"{out}-cache", packing=packing)


def fastest(ways: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the fewest seconds of processor time of each of several functions, which are called in turn."""
    seconds = [list[float]() for _ in ways]
    for _ in range(_REPEATS):
        for of, way in zip(seconds, ways, strict=True):
            started = time.process_time()
            way()
            of.append(time.process_time() - started)
    return [min(of) for of in seconds]


def row(name: str, megabytes: float, alone: Callable[[], Any], dataset: StreamingDataset) -> str:
    """Return a row of the table of rates."""
    loader = StreamingDataLoader(dataset, batch_size=1)
    len(loader)  # counts the lengths

    def first() -> None:
        with closing(iter(loader)) as batches:
            next(batches)

    def epoch() -> None:
        for _ in loader:
            pass

    package, read, plan = fastest([alone, epoch, first])
    rates = f"{megabytes / package:.2f} | {megabytes / read:.2f}"
    return f"| {name} | {rates} | {package / read:.2f} | {package / (read - plan):.2f} |"


def conversations(words: list[str], drawn: random.Random, count: int) -> list[Any]:
    """Return conversations of two questions and two answers."""
    roles = ("user", "assistant") * 2
    return [[{"role": role, "content": " ".join(drawn.choices(words, k=30))} for role in roles] for _ in range(count)]


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
        print("| documents | package, MB/s | as read, MB/s | share | without the plan |\n|---|--:|--:|--:|--:|")
        for length, count in ((30, 40_000), (400, 3000), (4000, 300)):
            texts = [" ".join(drawn.choices(words, k=length)) for _ in range(count)]
            megabytes = sum(len(text.encode()) for text in texts) / 1e6
            alone = partial(tokenizer.encode_batch, texts, add_special_tokens=False)
            dataset = write(root / str(length), "text", texts)
            print(row(f"{length} words", megabytes, alone, dataset), flush=True)
        chats = conversations(words, drawn, 5000)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=_TEMPLATE)  # type: ignore[no-untyped-call]
        fast.save_pretrained(root)
        templated = partial(
            fast.apply_chat_template, chats, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        megabytes = sum(len(message["content"].encode()) for chat in chats for message in chat) / 1e6
        print(row("conversations", megabytes, templated, write(root / "chats", "messages", chats)), flush=True)
        os.environ[_PARALLEL] = "true"
        dataset = write(root / "short", "text", [" ".join(drawn.choices(words, k=8)) for _ in range(short)])
        started = time.perf_counter()
        len(StreamingDataLoader(dataset, batch_size=1))
        seconds = time.perf_counter() - started
        size = max(file.stat().st_size for file in (root / "short-cache").rglob("*.npy"))
        print("\n| short documents | seconds to count | bytes of the file |\n|---|---|---|")
        print(f"| {short} | {seconds:.1f} | {size} |")


if __name__ == "__main__":
    main()
