"""Add columns to a dataset without rewriting it: write them as datasets, and join these when reading.

From the repository's root:

    python examples/write_dataset.py                             # writes demo_output/data/code
    python examples/joined_columns.py                            # writes code_weights and code_notes next to it
    lightning-streaming fit --config configs/joined_columns.yaml

DATA/code_weights has a weight per sample of DATA/code, in the same order; DATA/code_notes has a line count per id, in
another order. Takes 10 seconds on two cores, and prints the two directories.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn import functional

from lightning_streaming import MDSWriter, StreamingDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other examples, from any directory
from examples.byte_transformer import ByteTransformer


class WeightedByteTransformer(ByteTransformer):
    """Weights the loss of each sample; batches also have "weight" and "lines" of shape (batch,)."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the weighted cross-entropy in nats per byte."""
        tokens, weight = batch["tokens"].long(), batch["weight"]
        logits = self(tokens[:, :-1]).transpose(1, 2)
        losses = functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(dim=1)
        loss = (losses * weight).sum() / weight.sum()
        self.log("loss", loss, prog_bar=True)
        self.log("lines", batch["lines"].float().mean())
        return loss


def write_columns(data: Path) -> None:
    """Write both datasets, and replace existing ones.

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
        for position in np.random.default_rng(1).permutation(len(blocks)).tolist():
            number, tokens = blocks[position]
            writer.write({"id": number, "lines": np.int32((tokens == ord("\n")).sum())})
    print(f"{data}/code_weights and {data}/code_notes: {len(blocks)} samples each")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("demo_output/data"), metavar="DIR")
    write_columns(parser.parse_args().data)


if __name__ == "__main__":
    main()
