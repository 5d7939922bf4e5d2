"""Exact resume with Lightning Fabric: its ``save`` and ``load`` include the position in the data.

    python examples/fabric_loop.py
    torchrun --nproc_per_node 2 examples/fabric_loop.py

Trains without a stop; then with a stop in mid-epoch and a resume in new objects. Prints a line per process: how many
samples it read before and after the resume, and whether samples and weights are the same as without a stop. Takes 15
seconds on two cores; exits with 1 if a sample or a bit of the weights differs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from lightning_streaming import StreamingDataLoader, StreamingDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other examples, from any directory
from examples.line_run import BATCH_SIZE, EPOCHS, parse_arguments, write_samples


def launched() -> Fabric:
    """Return Fabric on all processes that torchrun started, or on this one without it."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // devices
    strategy = "ddp" if devices * nodes > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy)
    fabric.launch()
    return fabric


def train(data: Path, checkpoint: Path, stop_after: int | None = None, resume: bool = False) -> tuple[list[int], float]:
    """Train to the end or for ``stop_after`` steps; return the ids that this process has read, and the weight."""
    fabric = launched()
    torch.manual_seed(0)
    line = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(line, torch.optim.SGD(line.parameters(), lr=0.1))
    dataset = StreamingDataset(remote=str(data), shuffle=True)
    streaming = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=1)  # batch_size is that of each process
    loader: Any = fabric.setup_dataloaders(streaming)  # puts batches on the device, and leaves the order alone
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if resume:
        fabric.load(checkpoint, state)

    seen: list[int] = []
    steps = 0
    for _ in range(dataset.next_epoch, EPOCHS):
        for batch in loader:  # an epoch, or the rest of it after a resume
            loss = (model(batch["x"].unsqueeze(1)).squeeze(1) - batch["y"]).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen += batch["id"].tolist()
            steps += 1
            if steps == stop_after:
                fabric.save(checkpoint, state)
                return seen, 0.0
    return seen, line.weight.item()


def main() -> None:
    """Run the command line."""
    out, stop_after = parse_arguments(__doc__, "demo_output/fabric", 20)
    data, checkpoint = out / "data", out / "checkpoint.pt"
    fabric = launched()
    with fabric.rank_zero_first():
        write_samples(data)

    whole, weight = train(data, checkpoint)
    before, _ = train(data, checkpoint, stop_after=stop_after)
    after, resumed_weight = train(data, checkpoint, resume=True)
    is_same = before + after == whole and resumed_weight == weight
    rank = f"process {fabric.global_rank} of {fabric.world_size}"
    print(f"{rank}: {len(before)} + {len(after)} samples read; same as without a stop: {is_same}.")
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
