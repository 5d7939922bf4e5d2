"""Exact resume with Ray Train: a worker fails in mid-epoch, and Ray restarts all workers from the last checkpoint.

    python examples/ray_train.py

Trains without a failure, then with one. Prints how many samples the workers read, and whether samples and weights are
the same. Takes a minute on two cores; exits with 1 if a sample or a bit of the weights differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train as ray_train
from ray.train.torch import TorchTrainer, prepare_model

from lightning_streaming import StreamingDataLoader, StreamingDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other examples, from any directory
from examples.line_run import BATCH_SIZE, EPOCHS, write_samples


def on_worker(config: dict[str, Any]) -> None:
    """Train on one worker, from scratch or from the last checkpoint that was reported."""
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = StreamingDataLoader(StreamingDataset(remote=config["data"], shuffle=True), batch_size=BATCH_SIZE)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    rank = ray_train.get_context().get_world_rank()
    seen: list[int] = []
    saved = ray_train.get_checkpoint()
    if saved is not None:
        state, seen = read(saved, rank)
        for name, part in parts.items():
            part.load_state_dict(state[name])

    for _ in range(loader.dataset.next_epoch, EPOCHS):
        for batch in loader:  # an epoch, or the rest of it after a resume
            loss = (model(batch["x"].unsqueeze(1)).squeeze(1) - batch["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += batch["id"].tolist()
            steps = len(seen) // BATCH_SIZE
            if steps == config["fail_after"] and saved is None and rank == 0:
                raise RuntimeError("this worker is lost")
            if steps % config["save_every"] == 0:
                report(rank, {name: part.state_dict() for name, part in parts.items()}, seen)


def read(checkpoint: ray_train.Checkpoint, rank: int) -> tuple[dict[str, Any], list[int]]:
    """Return the state in a checkpoint, and the ids that a worker had read."""
    with checkpoint.as_directory() as directory:
        return torch.load(Path(directory, "state.pt")), torch.load(Path(directory, f"seen{rank}.pt"))


def report(rank: int, state: dict[str, Any], seen: list[int]) -> None:
    """Report a checkpoint to Ray: one state for all workers, and the ids that this one read, for the comparison."""
    with tempfile.TemporaryDirectory() as directory:
        if rank == 0:
            torch.save(state, Path(directory, "state.pt"))
        torch.save(seen, Path(directory, f"seen{rank}.pt"))
        ray_train.report({}, checkpoint=ray_train.Checkpoint.from_directory(directory))


def train(out: Path, name: str, workers: int, fail_after: int | None = None) -> tuple[list[list[int]], torch.Tensor]:
    """Train to the end; return the ids that each worker has read, and the weight."""
    settings = {"data": str(out / "data"), "save_every": 5, "fail_after": fail_after}
    scaling, failures = ray_train.ScalingConfig(num_workers=workers), ray_train.FailureConfig(max_failures=1)
    run = ray_train.RunConfig(name=name, storage_path=str(out), failure_config=failures)
    trainer = TorchTrainer(on_worker, train_loop_config=settings, scaling_config=scaling, run_config=run)
    last: Any = trainer.fit().checkpoint  # of the last step
    ended = [read(last, rank) for rank in range(workers)]
    return [seen for _, seen in ended], next(iter(ended[0][0]["model"].values()))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    workers: int = parser.parse_args().workers
    ray.init(num_cpus=workers + 1, include_dashboard=False)
    with tempfile.TemporaryDirectory() as directory:  # a real run needs a directory that all nodes can reach
        out = Path(directory)
        write_samples(out / "data")
        whole, weight = train(out, "whole", workers)
        seen, weight_after = train(out, "failing", workers, fail_after=12)
    is_same = seen == whole and torch.equal(weight_after, weight)
    print(f"{sum(map(len, seen))} samples read by {len(seen)} workers; same as without a failure: {is_same}.")
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
