"""What a training step costs over our loader and callbacks, beside a plain DataLoader of tensors.

Run from the root of the repository, on a machine that does little else:

    python benchmarks/step_overhead.py

A model that does nothing is trained by a real ``Trainer`` on samples that are on this node already: a vector of 64
floats and a label, in batches of ``--batch-size``, shuffled. "plain" is a ``DataLoader`` over a ``TensorDataset`` of
the same samples; "ours" a ``StreamingDataLoader`` with ``StreamingStateCallback``; "monitored" the same with
``StreamingMonitor``. All have a ``CSVLogger`` and ``log_every_n_steps=50``. Clocked are the steps after the first ones
of a single epoch, so that neither starts nor ends of passes count. The three take turns, each round in another order,
all in one process; shown are medians of microseconds a step, and medians of the ratios within a round. Also shown is
what ``StreamingMonitor`` takes of a step by its own clock, the steps at which it logs included. Prints a Markdown
table.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_streaming import (
    MDSWriter,
    StreamingDataLoader,
    StreamingDataset,
    StreamingMonitor,
    StreamingStateCallback,
)

WIDTH, STEPS_BEFORE = 64, 100


class Nothing(LightningModule):
    """A model that does nothing with its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing."""

    def configure_optimizers(self) -> None:
        """None."""


class Clock(Callback):
    """Seconds of the steps after the first ones."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self.steps = 0

    def on_train_batch_end(self, *_args: Any) -> None:
        """Count a step."""
        self.ended = time.perf_counter()
        self.steps += 1
        if self.steps == STEPS_BEFORE:
            self.began = self.ended

    @property
    def microseconds(self) -> float:
        """Of one step."""
        return 1e6 * (self.ended - self.began) / (self.steps - STEPS_BEFORE)


class ClockedMonitor(StreamingMonitor):
    """A monitor that knows how long it takes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.steps = 0.0, 0

    def on_train_batch_end(self, *args: Any) -> None:
        """The monitor's own, clocked."""
        began = time.perf_counter()
        super().on_train_batch_end(*args)
        self.seconds += time.perf_counter() - began
        self.steps += 1


def write(root: Path, samples: int) -> TensorDataset:
    """Write the samples; gives the same ones as tensors."""
    rng = np.random.default_rng(0)
    values, labels = rng.random((samples, WIDTH), np.float32), rng.integers(0, 10, samples)
    columns = {"x": f"ndarray:float32:{WIDTH}", "y": "int"}
    with MDSWriter(out=str(root), columns=columns) as writer:
        for value, label in zip(values, labels, strict=True):
            writer.write({"x": value, "y": int(label)})
    return TensorDataset(torch.from_numpy(values), torch.from_numpy(labels))


def fit(loader: DataLoader[Any], callbacks: list[Callback], directory: Path) -> float:
    """Train an epoch; gives microseconds a step."""
    clock = Clock()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(directory),
        log_every_n_steps=50,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, clock],
    )
    trainer.fit(Nothing(), loader)
    return clock.microseconds


def plain(tensors: TensorDataset, batch_size: int, workers: int) -> DataLoader[Any]:
    """A DataLoader of tensors."""
    return DataLoader(tensors, batch_size=batch_size, shuffle=True, num_workers=workers)


def ours(data: Path, batch_size: int, workers: int) -> DataLoader[Any]:
    """Our loader of the same samples."""
    return StreamingDataLoader(StreamingDataset(remote=str(data), shuffle=True), batch_size, num_workers=workers)


def measure(root: Path, tensors: TensorDataset, batch_size: int, workers: int, rounds: int) -> str:
    """A row of the table."""
    data, monitors = root / "data", [ClockedMonitor() for _ in range(rounds)]
    found: dict[str, list[float]] = {"plain": [], "ours": [], "monitored": []}
    for number, monitor in enumerate(monitors):
        callbacks: dict[str, list[Callback]] = {
            "plain": [],
            "ours": [StreamingStateCallback()],
            "monitored": [StreamingStateCallback(), monitor],
        }
        names = [*found]
        for name in names[number % 3 :] + names[: number % 3]:
            loader = plain(tensors, batch_size, workers) if name == "plain" else ours(data, batch_size, workers)
            found[name].append(fit(loader, callbacks[name], root))
    middle = {name: statistics.median(values) for name, values in found.items()}
    ratio = {
        name: statistics.median(mine / its for mine, its in zip(found[name], found["plain"], strict=True))
        for name in ("ours", "monitored")
    }
    monitor_us = 1e6 * statistics.median(one.seconds / one.steps for one in monitors)
    return (
        f"| {workers} | {middle['plain']:.0f} | {middle['ours']:.0f} | {middle['monitored']:.0f} "
        f"| {ratio['ours']:.3f} | {ratio['monitored']:.3f} | {monitor_us:.1f} |"
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of each run")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print("| workers | plain, µs | ours, µs | monitored, µs | ours / plain | monitored / plain | monitor, µs |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        tensors = write(root / "data", given.steps * given.batch_size)
        for workers in given.workers:
            print(measure(root, tensors, given.batch_size, workers, given.rounds), flush=True)


if __name__ == "__main__":
    main()
