"""Draw packing.png: what a model learns from packs, and from one document a row. Run: python -m docs.img.packing"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from examples.packed_documents import PackedByteTransformer, pad_documents, write_documents
from lightning_streaming import StreamingDataLoader, StreamingDataset

CAPACITY, ROWS, STEPS, SMOOTH = 256, 8, 80, 10


class Curve(NamedTuple):
    """A run, step by step."""

    tokens: list[int]
    """Tokens of documents that were seen."""
    losses: list[float]

    @property
    def padding(self) -> float:
        """Share of what was computed."""
        return 1 - self.tokens[-1] / (CAPACITY * ROWS * STEPS)


def trained(documents: Path, *, is_packed: bool) -> Curve:
    """Train for some steps of as many rows each."""
    packing = {"column": "tokens", "capacity": CAPACITY, "longer": "truncate"} if is_packed else None
    dataset = StreamingDataset(remote=str(documents), shuffle=True, packing=packing)
    collate_fn = None if is_packed else partial(pad_documents, capacity=CAPACITY)
    loader = StreamingDataLoader(dataset, batch_size=ROWS, collate_fn=collate_fn, drop_last=True)
    torch.manual_seed(1)
    model = PackedByteTransformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    curve, tokens = Curve([], []), 0
    for _, batch in zip(range(STEPS), chain.from_iterable(repeat(loader)), strict=False):
        of_all, follows = model.losses(batch)
        loss = of_all.sum() / follows.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        tokens += int((batch["document_ids"] >= 0).sum())
        curve.tokens.append(tokens)
        curve.losses.append(loss.item())
    return curve


def main() -> None:
    """Write the picture beside this file."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        write_documents(Path(directory, "data"), paragraphs=True)
        curves = {
            name: trained(Path(directory, "data"), is_packed=is_packed)
            for name, is_packed in (("packed", True), ("one document a row", False))
        }
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for name, curve in curves.items():
        losses = [sum(curve.losses[stop - SMOOTH : stop]) / SMOOTH for stop in range(SMOOTH, STEPS + 1)]
        label = f"{name}: {curve.padding:.1%} padding"
        axes[0].plot(range(SMOOTH, STEPS + 1), losses, label=label)
        axes[1].plot([tokens / 1000 for tokens in curve.tokens[SMOOTH - 1 :]], losses, label=label)
    axes[0].set(xlabel=f"steps, of {ROWS} rows of {CAPACITY} tokens", ylabel=f"loss, nats per token, mean of {SMOOTH}")
    axes[1].set(xlabel="thousand tokens of documents seen")
    axes[0].legend()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main()
