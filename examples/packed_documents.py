"""Train on documents of any length: packed into rows with a mask per document, or padded within a budget of tokens.

From the repository's root:

    python examples/packed_documents.py                          # writes demo_output/documents
    lightning-streaming fit --config configs/packed_documents.yaml
    lightning-streaming fit --config configs/token_budget.yaml

The program takes 5 seconds on two cores, and prints the directory. Each training takes a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lightning_streaming import MDSWriter

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other examples, from any directory
from examples.byte_transformer import ByteTransformer
from examples.write_dataset import code_files, document_files

MOST_BYTES = 2048
"""Longest document, so that the dataset has many."""


class PackedByteTransformer(ByteTransformer):
    """Next-byte prediction on packs: {"input_ids", "position_ids", "document_ids"}, each of shape (packs, capacity)."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return logits of shape (packs, capacity, 256); each token attends to earlier ones of its document."""
        if positions is None or documents is None:
            return super().forward(tokens)
        size = tokens.shape[1]
        is_before = torch.ones(size, size, dtype=torch.bool, device=tokens.device).tril()
        is_seen = is_before & (documents[:, :, None] == documents[:, None, :])
        hidden = self.embedding(tokens) + self.position[positions % len(self.position)]
        heads = self.layers.layers[0].self_attn.num_heads
        mask = torch.zeros(is_seen.shape, device=tokens.device).masked_fill(~is_seen, float("-inf"))
        logits: Tensor = self.head(self.layers(hidden, mask=mask.repeat_interleave(heads, 0)))
        return logits

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of each byte and whether it counts: the first byte of a document and padding do not.

        Returns:
            Two tensors of shape (packs, capacity - 1): float in nats, 0 where the byte does not count; and bool.
        """
        tokens, documents = batch["input_ids"].long(), batch["document_ids"]
        logits = self(tokens, batch["position_ids"], documents)
        follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        of_all = functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        return of_all * follows, follows

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the same for validation data."""
        self.log("val_loss", self._loss(batch), prog_bar=True, batch_size=len(batch["input_ids"]))

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        of_all, follows = self.losses(batch)
        return of_all.sum() / follows.sum()


class PaddedByteTransformer(PackedByteTransformer):
    """The same on documents padded to the longest: {"input_ids" of shape (documents, longest), "lengths"}."""

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the same, of shape (documents, longest - 1)."""
        tokens = batch["input_ids"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        documents = torch.where(positions < batch["lengths"][:, None], 0, -1)
        return super().losses({"input_ids": tokens, "position_ids": positions, "document_ids": documents})


def pad_documents(documents: list[dict[str, Any]], capacity: int = 512) -> dict[str, Tensor]:
    """Collate without packing, for comparison: one document per row, truncated or padded with zeros."""
    rows = torch.zeros(len(documents), capacity, dtype=torch.int64)
    document_ids = torch.full(rows.shape, -1, dtype=torch.int32)
    for number, document in enumerate(documents):
        tokens = torch.tensor(document["tokens"][:capacity])
        rows[number, : len(tokens)] = tokens
        document_ids[number, : len(tokens)] = 0
    position_ids = torch.arange(capacity).expand_as(rows)
    return {"input_ids": rows, "position_ids": position_ids, "document_ids": document_ids}


def texts(*, paragraphs: bool = False) -> Iterator[bytes]:
    """Yield code and prose of the Python installation in turn: files up to a limit, or their paragraphs."""
    for path in (file for pair in zip(code_files(), document_files(), strict=False) for file in pair):
        text = path.read_bytes()[:MOST_BYTES]
        for part in text.split(b"\n\n") if paragraphs else [text]:
            if part:
                yield part


def write_documents(out: Path, most: int = 2000, *, paragraphs: bool = False) -> None:
    """Write the first ``most`` of these texts, each as one document."""
    with MDSWriter(out=out, columns={"tokens": "ndarray:uint8"}, size_limit="256kb", exist_ok=True) as writer:
        for text in islice(texts(paragraphs=paragraphs), most):
            writer.write({"tokens": np.frombuffer(text, np.uint8)})


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/documents"), help="default: %(default)s")
    parser.add_argument("--most", type=int, default=2000, help="most documents (default: %(default)s)")
    parser.add_argument("--paragraphs", action="store_true", help="write each paragraph as a document, not each file")
    arguments = parser.parse_args()
    write_documents(arguments.out, arguments.most, paragraphs=arguments.paragraphs)
    print(f"{arguments.out}: documents written")


if __name__ == "__main__":
    main()
