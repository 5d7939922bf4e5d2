"""Fabric with exact resume, on any number of processes: its ``save`` and ``load`` keep the place in the data.

    python -m examples.fabric_loop
    torchrun --nproc_per_node 2 -m examples.fabric_loop

Trains in one go; then again, but stops in the middle of an epoch; then goes on from there in new objects. Ends with 1
if samples or weights differ by a bit.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from examples.accelerate_loop import BATCH_SIZE, EPOCHS, write_samples
from lightning_streaming import StreamingDataLoader, StreamingDataset


def launched() -> Fabric:
    """Fabric on all processes that torchrun has started; on this one alone without it."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // devices
    strategy = "ddp" if devices * nodes > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy)
    fabric.launch()
    return fabric


def train(data: Path, checkpoint: Path, stop_after: int | None = None, resume: bool = False) -> tuple[list[int], float]:
    """Train to the end, or for so many steps; gives the samples that this process has seen, and the weight."""
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
        for batch in loader:  # an epoch, or what is left of one
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/fabric"), help="default: %(default)s")
    parser.add_argument("--stop-after", type=int, default=20, metavar="STEPS", help="default: %(default)s")
    arguments = parser.parse_args()
    data, checkpoint = arguments.out / "data", arguments.out / "checkpoint.pt"
    fabric = launched()
    with fabric.rank_zero_first():
        write_samples(data)

    whole, weight = train(data, checkpoint)
    before, _ = train(data, checkpoint, stop_after=arguments.stop_after)
    after, resumed_weight = train(data, checkpoint, resume=True)
    is_same = before + after == whole and resumed_weight == weight
    rank = f"process {fabric.global_rank} of {fabric.world_size}"
    print(f"{rank}: {len(before)} + {len(after)} samples seen; as without a break: {is_same}.")
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
