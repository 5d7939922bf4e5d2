"""Replicas that leave and join within an epoch, without a restart: for frameworks such as torchft.

    python examples/replicas.py

Simulates three replicas in one program. Replica 1 dies in the middle of an epoch and returns later in it. After each
change the others divide the rest of the epoch among those that are alive, with the workers that they have. Prints how
often each epoch has trained on each sample, by the weights. Takes 10 seconds on two cores; exits with 1 if a sample was
repeated or skipped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World

SAMPLES, BATCH_SIZE, EPOCHS = 240, 4, 2
DIES, RETURNS = 7, 15
"""Steps after which replica 1 dies and returns; with three replicas, 20 steps are an epoch."""


def write_samples(out: Path) -> None:
    """Write numbered samples as a dataset, unless it exists."""
    if (out / "index.json").exists():
        return
    with MDSWriter(out=out, columns={"id": "int"}, size_limit="1kb") as writer:
        for sample in range(SAMPLES):
            writer.write({"id": sample})


class Replica:
    """A trainer with its own weights and loader; usually one or several processes."""

    batches: Iterator[dict[str, torch.Tensor]]

    def __init__(self, data: Path) -> None:
        # One weight per sample, with a gradient of 1: the weights count how often each sample was trained on.
        self.weights = torch.nn.Parameter(torch.zeros(SAMPLES))
        self.optimizer = torch.optim.SGD([self.weights], lr=1.0)
        dataset = StreamingDataset(remote=str(data), shuffle=True, batch_size=BATCH_SIZE, world=World())
        self.loader = StreamingDataLoader(dataset, num_workers=1, persistent_workers=True, return_valid_mask=True)

    def join(self, world: World, state: dict[str, Any]) -> None:
        """Read this world's share from ``state`` on: no process starts, and no index is read again."""
        self.loader.dataset.world = world
        self.loader.load_state_dict(state)
        self.batches = iter(self.loader)

    def gradient(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the gradient of a batch, without samples that another replica reads too."""
        loss = self.weights[batch["id"][batch["valid"]]].sum()
        return torch.autograd.grad(loss, self.weights)[0]


def divide(replicas: list[Replica], state: dict[str, Any]) -> None:
    """Divide the rest of the epoch among the replicas that are alive."""
    for rank, replica in enumerate(replicas):
        replica.join(World(num_nodes=len(replicas), rank=rank), state)


def train(data: Path) -> list[torch.Tensor]:
    """Train, and return the weights after each epoch."""
    replicas = [Replica(data) for _ in range(3)]
    alive, step = list(replicas), 0
    after_epochs: list[torch.Tensor] = []
    divide(alive, replicas[0].loader.state_dict())
    while len(after_epochs) < EPOCHS:
        state = alive[0].loader.state_dict()  # before the step, the same on all replicas
        batches = [next(replica.batches, None) for replica in alive]
        if None in batches:
            after_epochs.append(-alive[0].weights.detach().clone())
            divide(alive, state)
            continue
        if step == DIES and len(alive) == 3:
            # Its gradient is lost: the step counts for no replica, and the others read these samples again.
            alive = [replicas[0], replicas[2]]
            divide(alive, state)
            print(f"Sample {state['sample_in_epoch']} of epoch {state['epoch']}: replica 1 dies.")
            continue
        gradients = [replica.gradient(batch) for replica, batch in zip(alive, batches, strict=True) if batch]
        for replica in alive:
            replica.weights.grad = sum(gradients, torch.zeros(SAMPLES))  # an all-reduce
            replica.optimizer.step()
        step += 1
        if step == RETURNS:
            # It has nothing left: weights and position come from another replica.
            state = alive[0].loader.state_dict()
            replicas[1] = Replica(data)
            replicas[1].weights.data.copy_(alive[0].weights.data)
            alive = list(replicas)
            divide(alive, state)
            print(f"Sample {state['sample_in_epoch']} of epoch {state['epoch']}: replica 1 returns.")
    return after_epochs


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/replicas"), help="default: %(default)s")
    out: Path = parser.parse_args().out
    write_samples(out / "data")
    is_exact = True
    for epoch, counts in enumerate(train(out / "data")):
        once = int((counts == epoch + 1).sum())
        is_exact &= once == SAMPLES
        print(f"Epoch {epoch}: {once} of {SAMPLES} samples were trained on exactly once.")
    sys.exit(0 if is_exact else 1)


if __name__ == "__main__":
    main()
