"""Exact resume with the Trainer of transformers: at the same sample, and without reading the skipped part again.

    python examples/huggingface_trainer.py
    torchrun --nproc_per_node 2 examples/huggingface_trainer.py

Trains without a stop; then with a stop in mid-epoch and a resume in new objects. Prints a line per process: how many
samples it read before and after the resume, and whether samples and weights are the same as without a stop. Takes 15
seconds on two cores; exits with 1 if a sample or a bit of the weights differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset

SAMPLES, BATCH_SIZE, EPOCHS = 240, 8, 2


def write_samples(out: Path) -> None:
    """Write points of a line as a dataset, unless it exists."""
    if (out / "index.json").exists():
        return
    with MDSWriter(out=out, columns={"id": "int", "x": "float32", "y": "float32"}, size_limit="4kb") as writer:
        for sample in range(SAMPLES):
            x = sample / SAMPLES
            writer.write({"id": sample, "x": x, "y": 2 * x - 1})


class StreamingPlace(TrainerCallback, ExportableState):
    """Saves the loader's position in the ``trainer_state.json`` of each checkpoint, and resumes from it."""

    loader: StreamingDataLoader | None = None

    def state(self) -> dict[str, Any]:
        """Return the state to save; it is the same on every process."""
        return {"args": {}, "attributes": {"place": self.loader and self.loader.state_dict()}}

    def on_train_begin(self, *event: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Set the loader to the position of the checkpoint that training resumes from."""
        self.loader = train_dataloader
        if event[1].global_step:
            train_dataloader.load_state_dict(event[1].stateful_callbacks["StreamingPlace"]["attributes"]["place"])


class StreamingTrainer(Trainer):
    """Trains from a StreamingDataLoader. Resume with ``ignore_data_skip=True``: the loader has its position already."""

    train_dataset: Any

    def get_train_dataloader(self) -> Any:
        args = self.args
        loader = StreamingDataLoader(self.train_dataset, args.train_batch_size, num_workers=args.dataloader_num_workers)
        if len(loader) % args.gradient_accumulation_steps:
            raise ValueError("the last accumulation of an epoch is incomplete, a resume would lose it: set epoch_size")
        return self.accelerator.prepare(loader)


class Line(torch.nn.Module):
    """Learns a line, and keeps the ids of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), list[int]()

    def forward(self, id: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: A002
        self.seen += id.tolist()
        return {"loss": (self.layer(x.unsqueeze(1)).squeeze(1) - y).square().mean()}


def train(out: Path, stop_after: int | None = None, resume: bool = False) -> tuple[list[int], float]:
    """Train to the end or for ``stop_after`` steps; return the ids that this process has read, and the weight."""
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(out / "run"), num_train_epochs=EPOCHS, max_steps=stop_after or -1, save_steps=stop_after or 1,
        save_strategy="steps" if stop_after else "no", per_device_train_batch_size=BATCH_SIZE, dataloader_num_workers=1,
        ignore_data_skip=True, lr_scheduler_type="constant", use_cpu=True, report_to="none", disable_tqdm=True,
        learning_rate=0.01,
    )  # fmt: skip
    model, dataset = Line(), StreamingDataset(remote=str(out / "data"), shuffle=True)
    trainer = StreamingTrainer(model=model, args=args, train_dataset=dataset, callbacks=[StreamingPlace()])
    trainer.train(resume_from_checkpoint=resume)
    return model.seen, model.layer.weight.item()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/huggingface"), help="default: %(default)s")
    parser.add_argument("--stop-after", type=int, default=20, metavar="STEPS", help="default: %(default)s")
    arguments = parser.parse_args()
    out: Path = arguments.out
    setup = TrainingArguments(output_dir=str(out), use_cpu=True, report_to="none")
    with setup.main_process_first():
        write_samples(out / "data")

    whole, weight = train(out)
    before, _ = train(out, stop_after=arguments.stop_after)
    after, resumed_weight = train(out, resume=True)
    is_same = before + after == whole and resumed_weight == weight
    rank = f"process {setup.process_index}"
    print(f"{rank}: {len(before)} + {len(after)} samples read; same as without a stop: {is_same}.")
    raise SystemExit(not is_same)


if __name__ == "__main__":
    main()
