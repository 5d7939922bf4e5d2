"""Exact resume without Lightning: a training loop that saves the loader's state with the model's.

    python -m examples.plain_pytorch --out demo_output/plain_pytorch

The loop runs in three new processes: one that stops in the middle of an epoch, one that goes on from its checkpoint,
and one that does all at once, for comparison. Ends with 1 if the samples or the weights differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset

SAMPLES, BATCH_SIZE, EPOCHS, STOP_AFTER = 1000, 8, 2, 77
"""1000 samples / 8 samples per batch = 125 batches per epoch: batch 77 is in the middle of the first."""


def write_samples(out: Path) -> None:
    """Write points of a line, with a little noise, as a dataset."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(SAMPLES, generator=generator)
    with MDSWriter(
        out=out, columns={"id": "int", "x": "float32", "y": "float32"}, size_limit="4kb", exist_ok=True
    ) as writer:
        for sample in range(SAMPLES):
            x = sample / SAMPLES
            writer.write({"id": sample, "x": x, "y": 2 * x - 1 + float(noise[sample])})


def train(data: Path, checkpoint: Path, stop_after: int | None) -> None:
    """Train, from the checkpoint if there is one, and save one at the end.

    Args:
        data: Directory of the dataset.
        checkpoint: File to resume from, and to save to.
        stop_after: Batches after which to stop, as if time were up. None: go on to the end.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Where `data` is a URL, shards come from there: everything else stays as it is.
    dataset = StreamingDataset(remote=str(data), shuffle=True, batch_size=BATCH_SIZE)
    loader = StreamingDataLoader(dataset, num_workers=2)
    seen: list[int] = []

    if checkpoint.exists():
        saved: dict[str, Any] = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        seen = saved["seen"]

    # A loop over the loader is one epoch, or what is left of one; the dataset knows which comes next.
    while dataset.next_epoch < EPOCHS:
        for batch in loader:
            prediction = model(batch["x"].float().unsqueeze(1)).squeeze(1)
            loss = (prediction - batch["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += batch["id"].tolist()
            if stop_after is not None and len(seen) == stop_after * BATCH_SIZE:
                break
        else:
            continue
        break

    # What the loader has handed out counts as read, so save it when the last batch handed out is in the weights.
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    torch.save({**state, "seen": seen}, checkpoint)


def train_in_new_process(data: Path, checkpoint: Path, stop_after: int | None = None) -> dict[str, Any]:
    """Call :func:`train` in a process that knows nothing but its arguments; gives the checkpoint it saved."""
    process = multiprocessing.get_context("spawn").Process(target=train, args=(data, checkpoint, stop_after))
    process.start()
    process.join()
    if process.exitcode != 0:
        sys.exit(f"the training process ended with {process.exitcode}")
    saved: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    return saved


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/plain_pytorch"), metavar="DIR")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write_samples(out / "data")
    for name in ("stopped.pt", "whole.pt"):
        (out / name).unlink(missing_ok=True)

    stopped = train_in_new_process(out / "data", out / "stopped.pt", STOP_AFTER)
    print(f"Stopped after {len(stopped['seen'])} samples; saved place: {stopped['loader']}")
    resumed = train_in_new_process(out / "data", out / "stopped.pt")
    whole = train_in_new_process(out / "data", out / "whole.pt")

    same_samples = resumed["seen"] == whole["seen"]
    same_weights = all(torch.equal(resumed["model"][name], whole["model"][name]) for name in whole["model"])
    print(f"Resumed: {len(resumed['seen'])} samples. Whole: {len(whole['seen'])} samples.")
    print(f"Same samples in the same order: {same_samples}. Same weights to the last bit: {same_weights}.")
    sys.exit(0 if same_samples and same_weights else 1)


if __name__ == "__main__":
    main()
