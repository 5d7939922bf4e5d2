"""Draw shuffles.png: which sample each shuffle reads at each step. Run: python docs/img/shuffles.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from lightning_streaming.sequence.batching import batched
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.sequence.weights import DatasetShape, StreamWeight, resolve_weights

SHARDS = np.full(24, 100)
CANONICAL_NODES = 2
PANELS = (
    ("shuffle=False", None, 1),
    ("py1s", "py1s", 1),
    ("py1e, blocks of 300", "py1e", 300),
    ("py1e, blocks of 900", "py1e", 900),
    ("naive", "naive", 1),
    ("blockwise, blocks of 300", "blockwise", 300),
    ("blockwise, blocks of 900", "blockwise", 900),
    ("py1br, blocks of 300", "py1br", 300),
    ("py1b, blocks of 300", "py1b", 300),
    ("py2s", "py2s", 1),
)


def main() -> None:
    """Write the picture beside this file."""
    samples = int(SHARDS.sum())
    positions = np.arange(samples)
    machines = BatchGeometry(num_nodes=1, ranks_per_node=1, batch_size=1)
    weights = resolve_weights([StreamWeight()], sizes=[samples], epoch_size=None, seed=9176)
    shape = DatasetShape(shard_sizes=(SHARDS,), weights=weights)
    figure, axes = plt.subplots(
        2, -(-len(PANELS) // 2), figsize=(13, 6), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (title, algo, block_size) in zip(axes.flat, PANELS, strict=False):
        settings = OrderSettings(
            shuffle=algo is not None,
            shuffle_algo=algo or "naive",
            num_canonical_nodes=CANONICAL_NODES,
            shuffle_block_size=block_size,
        )
        ids = batched(Shuffled(settings.resolved(CANONICAL_NODES), shape, epoch=0), machines).ids(positions)
        for node, colour in enumerate(("tab:blue", "tab:orange")):
            own = positions % CANONICAL_NODES == node
            axis.scatter(positions[own], ids[own], s=1, linewidths=0, color=colour)
        axis.set(title=title, yticks=np.arange(0, samples + 1, 400))
        axis.margins(0.01)
    figure.supxlabel("position in the sequence")
    figure.supylabel("sample (24 shards of 100)")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
