"""A transformer that is trained on packs of whole documents, and looks at nothing beyond the document it is in.

From the repository's root:

    python -m examples.packed_documents                          # writes demo_output/documents
    lightning-streaming fit --config configs/packed_documents.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from examples.byte_transformer import ByteTransformer
from examples.write_dataset import code_files, document_files
from lightning_streaming import MDSWriter

MOST_BYTES = 2048
"""Of a document, so that a tiny model has many."""


class PackedByteTransformer(ByteTransformer):
    """Next-byte prediction on packs: {"input_ids", "position_ids", "document_ids"}, each of shape (packs, capacity).

    Without the last two, batches are documents that stand alone, filled up with zeros; and "lengths" says how long they
    are.
    """

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits of shape (packs, capacity, 256); each token sees those before it in its own document."""
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
        """Cross-entropy of each byte that has one before it in its document, and whether it does.

        Returns:
            Of shape (packs, capacity - 1), in nats and of bool; elsewhere the loss is 0.
        """
        tokens, documents = batch["input_ids"].long(), batch["document_ids"]
        logits = self(tokens, batch["position_ids"], documents)
        follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        of_all = functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        return of_all * follows, follows

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        of_all, follows = self.losses(batch)
        return of_all.sum() / follows.sum()


def write_documents(out: Path, most: int = 2000) -> None:
    """Write texts that every machine has, each as one document."""
    with MDSWriter(out=out, columns={"tokens": "ndarray:uint8"}, size_limit="256kb", exist_ok=True) as writer:
        for number, path in enumerate(
            file for pair in zip(code_files(), document_files(), strict=False) for file in pair
        ):
            if number == most:
                break
            text = np.frombuffer(path.read_bytes()[:MOST_BYTES], np.uint8)
            if len(text):
                writer.write({"tokens": text})


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/documents"), help="default: %(default)s")
    parser.add_argument("--most", type=int, default=2000, help="most documents (default: %(default)s)")
    arguments = parser.parse_args()
    write_documents(arguments.out, arguments.most)
    print(f"{arguments.out} has the documents")


if __name__ == "__main__":
    main()
