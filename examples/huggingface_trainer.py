"""Exact resume with the Trainer of transformers: at the same sample, and without reading the skipped part again.

    python examples/huggingface_trainer.py
    torchrun --nproc_per_node 2 examples/huggingface_trainer.py

Trains without a stop; then with a stop in mid-epoch and a resume in new objects. Prints a line per process: how many
samples it read before and after the resume, and whether samples and weights are the same as without a stop. Takes 15
seconds on two cores; exits with 1 if a sample or a bit of the weights differs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from lightning_streaming import StreamingDataLoader, StreamingDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other examples, from any directory
from examples.line_run import BATCH_SIZE, EPOCHS, parse_arguments, write_samples


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
    out, stop_after = parse_arguments(__doc__, "demo_output/huggingface", 20)
    setup = TrainingArguments(output_dir=str(out), use_cpu=True, report_to="none")
    with setup.main_process_first():
        write_samples(out / "data")

    whole, weight = train(out)
    before, _ = train(out, stop_after=stop_after)
    after, resumed_weight = train(out, resume=True)
    is_same = before + after == whole and resumed_weight == weight
    rank = f"process {setup.process_index}"
    print(f"{rank}: {len(before)} + {len(after)} samples read; same as without a stop: {is_same}.")
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
