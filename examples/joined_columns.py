"""Columns that were worked out later, as datasets of their own beside the first: nothing of that is written again.

From the repository's root, after ``python -m examples.write_dataset --out demo_output/data``:

    python -m examples.joined_columns                            # writes the two below
    lightning-streaming fit --config configs/joined_columns.yaml

DATA/code_weights has a weight for each block of DATA/code, in the same order, and DATA/code_notes what else is known of
some, by id and in another order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn import functional

from examples.byte_transformer import ByteTransformer
from lightning_streaming import MDSWriter, StreamingDataset


class WeightedByteTransformer(ByteTransformer):
    """Learns more from blocks of a larger weight; batches have "weight" and "lines" of shape (batch,) too."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Weighted cross-entropy in nats per byte."""
        tokens, weight = batch["tokens"].long(), batch["weight"]
        logits = self(tokens[:, :-1]).transpose(1, 2)
        losses = functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(dim=1)
        loss = (losses * weight).sum() / weight.sum()
        self.log("loss", loss, prog_bar=True)
        self.log("lines", batch["lines"].float().mean())
        return loss


def write_columns(data: Path) -> None:
    """Write both datasets, in place of those that are there.

    Args:
        data: The directory with the dataset ``code``.
    """
    dataset = StreamingDataset(local=str(data / "code"))
    blocks = [(sample["id"], sample["tokens"]) for sample in dataset[:]]
    dataset.close()
    with MDSWriter(out=data / "code_weights", columns={"weight": "float32"}, hashes=["sha1"], exist_ok=True) as writer:
        for _, tokens in blocks:
            writer.write({"weight": np.float32(len(np.unique(tokens)) / len(tokens))})
    notes = {"id": "int", "lines": "int32"}
    with MDSWriter(out=data / "code_notes", columns=notes, hashes=["sha1"], exist_ok=True) as writer:
        for place in np.random.default_rng(1).permutation(len(blocks)).tolist():
            number, tokens = blocks[place]
            writer.write({"id": number, "lines": np.int32((tokens == ord("\n")).sum())})
    print(f"{data}/code_weights and {data}/code_notes: {len(blocks)} samples each")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("demo_output/data"), metavar="DIR")
    write_columns(parser.parse_args().data)


if __name__ == "__main__":
    main()
