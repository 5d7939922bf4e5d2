"""Exact resume in a plain PyTorch loop: the checkpoint has the loader's state next to the model's.

    python examples/plain_pytorch.py --stop-after 77     # stops in the middle of the first epoch
    python examples/plain_pytorch.py                     # resumes from there, in another process

The second command then trains once more without a stop, and prints whether samples and weights are the same. Each takes
10 seconds on two cores; the second exits with 1 if a sample or a bit of the weights differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset

SAMPLES, BATCH_SIZE, EPOCHS = 1000, 8, 2  # 125 batches are an epoch


def write_samples(out: Path) -> None:
    """Write points of a line, with a little noise, as a dataset."""
    noise = 0.1 * torch.randn(SAMPLES, generator=torch.Generator().manual_seed(0))
    with MDSWriter(out=out, columns={"id": "int", "x": "float32", "y": "float32"}, size_limit="4kb") as writer:
        for sample in range(SAMPLES):
            x = sample / SAMPLES
            writer.write({"id": sample, "x": x, "y": 2 * x - 1 + float(noise[sample])})


def train(data: Path, checkpoint: Path, stop_after: int | None = None) -> None:
    """Train, from the checkpoint if it exists, and save one at the end.

    Args:
        data: Directory of the dataset.
        checkpoint: File to resume from, and to save to.
        stop_after: Batches after which to stop. None: train to the end.
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
        # Every batch that the loader has yielded counts as read: save once the weights include the last one.
        torch.save({**{name: part.state_dict() for name, part in parts.items()}, "seen": seen}, checkpoint)

    for _ in range(dataset.next_epoch, EPOCHS):
        for batch in loader:  # an epoch, or the rest of it after a resume
            loss = (model(batch["x"].unsqueeze(1)).squeeze(1) - batch["y"]).square().mean()
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
    parser.add_argument("--stop-after", type=int, metavar="BATCHES", help="stop early, and save a checkpoint")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if not (out / "data").exists():
        write_samples(out / "data")

    train(out / "data", out / "run.pt", arguments.stop_after)
    run = torch.load(out / "run.pt")
    position = {key: run["loader"][key] for key in ("epoch", "sample_in_epoch")}
    print(f"{len(run['seen'])} samples read; saved position: {position}")
    if arguments.stop_after is not None:
        print("Run it again without --stop-after to resume.")
        return

    (out / "whole.pt").unlink(missing_ok=True)
    train(out / "data", out / "whole.pt")
    whole = torch.load(out / "whole.pt")
    same_samples = run["seen"] == whole["seen"]
    same_weights = all(torch.equal(run["model"][name], whole["model"][name]) for name in whole["model"])
    print(f"Same as without a stop: samples and their order {same_samples}, weights {same_weights}.")
    sys.exit(0 if same_samples and same_weights else 1)


if __name__ == "__main__":
    main()
