"""Exact resume without Lightning: a training loop that saves the loader's state beside the model's.

    python -m examples.plain_pytorch --stop-after 77     # stops in the middle of the first epoch
    python -m examples.plain_pytorch                     # goes on from there, in another process

When the second is done it trains once more without a break, and ends with 1 if samples or weights differ by a bit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset

SAMPLES, BATCH_SIZE, EPOCHS = 1000, 8, 2
"""1000 samples / 8 samples per batch = 125 batches per epoch."""


def write_samples(out: Path) -> None:
    """Write points of a line, with a little noise, as a dataset."""
    noise = 0.1 * torch.randn(SAMPLES, generator=torch.Generator().manual_seed(0))
    with MDSWriter(out=out, columns={"id": "int", "x": "float32", "y": "float32"}, size_limit="4kb") as writer:
        for sample in range(SAMPLES):
            x = sample / SAMPLES
            writer.write({"id": sample, "x": x, "y": 2 * x - 1 + float(noise[sample])})


def train(data: Path, checkpoint: Path, stop_after: int | None = None) -> None:
    """Train, from the checkpoint if there is one, and save one at the end.

    Args:
        data: Directory of the dataset.
        checkpoint: File to resume from, and to save to.
        stop_after: Batches after which to stop, as if time were up. None: go on to the end.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = StreamingDataset(remote=str(data), shuffle=True, batch_size=BATCH_SIZE)
    loader = StreamingDataLoader(dataset, num_workers=2)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    seen: list[int] = []

    if checkpoint.exists():
        saved = torch.load(checkpoint)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        seen = saved["seen"]

    def save() -> None:
        # All that the loader has handed out counts as read: save when the last batch it gave is in the weights.
        torch.save({**{name: part.state_dict() for name, part in parts.items()}, "seen": seen}, checkpoint)

    for _ in range(dataset.next_epoch, EPOCHS):
        for batch in loader:  # an epoch, or what is left of one
            prediction = model(batch["x"].float().unsqueeze(1)).squeeze(1)
            loss = (prediction - batch["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += batch["id"].tolist()
            if stop_after is not None and len(seen) >= stop_after * BATCH_SIZE:
                save()
                return
    save()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/plain"), help="default: %(default)s")
    parser.add_argument("--stop-after", type=int, metavar="BATCHES", help="stop, and save the place in the data")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if not (out / "data").exists():
        write_samples(out / "data")

    train(out / "data", out / "run.pt", arguments.stop_after)
    run = torch.load(out / "run.pt")
    print(f"{len(run['seen'])} samples seen; the place in the data:", run["loader"])
    if arguments.stop_after is not None:
        print("Run it again without --stop-after to go on.")
        return

    (out / "whole.pt").unlink(missing_ok=True)
    train(out / "data", out / "whole.pt")
    whole = torch.load(out / "whole.pt")
    same_samples = run["seen"] == whole["seen"]
    same_weights = all(torch.equal(run["model"][name], whole["model"][name]) for name in whole["model"])
    print(f"Without a break: same samples in the same order: {same_samples}; same weights: {same_weights}.")
    sys.exit(0 if same_samples and same_weights else 1)


if __name__ == "__main__":
    main()
