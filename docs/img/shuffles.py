"""Draw shuffles.png: which sample each shuffle reads at each step. Run: python docs/img/shuffles.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from lightning_streaming.order.sequence import CanonicalSequence
from lightning_streaming.order.shuffle import shuffle_map

SHARDS = np.full(24, 100)
CANONICAL_NODES = 2
PANELS = (
    ("shuffle=False", None, 1),
    ("py1s", "py1s", 1),
    ("py1e, blocks of 300", "py1e", 300),
    ("py1e, blocks of 900", "py1e", 900),
    ("naive", "naive", 1),
)


def main() -> None:
    """Write the picture beside this file."""
    samples = int(SHARDS.sum())
    positions = np.arange(samples)
    sequence = CanonicalSequence(num_samples=samples, num_canonical_nodes=CANONICAL_NODES, num_nodes=1)
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3), sharey=True, layout="constrained")
    for axis, (title, algo, block_size) in zip(axes, PANELS, strict=True):
        ids = sequence.places(positions)
        if algo is not None:
            ids = shuffle_map(algo, SHARDS, CANONICAL_NODES, seed=9176, epoch=0, block_size=block_size)[ids]
        for node, colour in enumerate(("tab:blue", "tab:orange")):
            own = positions % CANONICAL_NODES == node
            axis.scatter(positions[own], ids[own], s=1, linewidths=0, color=colour)
        axis.set(title=title, xlabel="position in the sequence", yticks=np.arange(0, samples + 1, 400))
        axis.margins(0.01)
    axes[0].set_ylabel("sample (24 shards of 100)")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
