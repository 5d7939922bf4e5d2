"""Processes and memory of a fit with a validation, with and without ``pause_workers``.

``python -m benchmarks.worker_memory``, with ``--persistent`` for workers that stay from epoch to epoch.

Resident memory (RSS) counts shared pages in every process, PSS divides them, USS leaves them out; all from Linux's
``smaps_rollup``, summed over the trainer and its workers.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_streaming import MDSWriter, StreamingConfig, StreamingDataModule

FIELDS = {"Rss": "RSS", "Pss": "PSS", "Private_Clean": "USS", "Private_Dirty": "USS"}


def family(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(child for task in tasks for number in task.read_text().split() for child in family(int(number)))]


def memory() -> dict[str, int]:
    """Return the number of processes, and their memory in MB."""
    pids, sums = family(os.getpid()), {"RSS": 0, "PSS": 0, "USS": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size = line.split()[:2]
            if (field := FIELDS.get(name.rstrip(":"))) is not None:
                sums[field] += int(size)
    return {"processes": len(pids)} | {name: kilobytes // 1024 for name, kilobytes in sums.items()}


class Model(LightningModule):
    """A model that measures in the last steps of training and of validation, and the first wait after a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.measured: dict[str, dict[str, int]] = {}
        self.validated_at: float | None = None
        self.waits: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.validated_at is not None:
            self.waits.append(perf_counter() - self.validated_at)
            self.validated_at = None
        if batch_idx % 20 == 18:
            self.measured["train"] = memory()
        return self.layer(batch["x"][:, :1].float()).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, *_: Any) -> None:
        self.measured["validation"] = memory()

    def on_validation_end(self) -> None:
        self.validated_at = perf_counter()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def write(root: Path, samples: int) -> str:
    """Write rows of 64 KiB."""
    with MDSWriter(out=str(root), columns={"x": "ndarray:uint8:65536"}) as writer:
        for number in range(samples):
            writer.write({"x": np.full(65536, number % 251, np.uint8)})
    return str(root)


def main() -> None:
    """Train once with each setting, and print a line for each stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4, help="of each loader")
    parser.add_argument("--persistent", action="store_true", help="keep workers from epoch to epoch")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        train, val = write(Path(directory, "train"), 2560), write(Path(directory, "val"), 512)
        for pauses in (False, True):
            model = Model()
            data = StreamingDataModule(
                train=StreamingConfig(remote=train, shuffle=True),
                val=StreamingConfig(remote=val),
                batch_size=16,
                num_workers=options.workers,
                persistent_workers=options.persistent,
                pause_workers=pauses,
            )
            settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 1}
            quiet: dict[str, Any] = {
                "enable_progress_bar": False,
                "enable_checkpointing": False,
                "enable_model_summary": False,
            }
            Trainer(**settings, **quiet, val_check_interval=20, num_sanity_val_steps=0).fit(model, datamodule=data)
            for stage, measured in model.measured.items():
                print(f"pause_workers={pauses} {stage}: " + ", ".join(f"{name} {n}" for name, n in measured.items()))
            waits = sorted(model.waits)
            print(f"pause_workers={pauses} first step after a validation: median {waits[len(waits) // 2]:.3f} s")


if __name__ == "__main__":
    main()
