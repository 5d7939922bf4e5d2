"""The Trainer of transformers with exact resume, on any number of processes, at the sample and at once.

    python -m examples.huggingface_trainer
    torchrun --nproc_per_node 2 -m examples.huggingface_trainer

Trains in one go; then again, but stops in the middle of an epoch; then goes on from there in new objects. Ends with 1
if samples or weights differ by a bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from examples.accelerate_loop import EPOCHS, write_samples
from lightning_streaming import StreamingDataLoader, StreamingDataset


class StreamingPlace(TrainerCallback, ExportableState):
    """Keeps the loader's place in the ``trainer_state.json`` of each checkpoint, and goes on from there."""

    loader: StreamingDataLoader | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint is to hold; it is the same on every process."""
        return {"args": {}, "attributes": {"place": self.loader and self.loader.state_dict()}}

    def on_train_begin(self, *event: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Put the loader at the place of the checkpoint that training goes on from."""
        self.loader = train_dataloader
        if event[1].global_step:
            train_dataloader.load_state_dict(event[1].stateful_callbacks["StreamingPlace"]["attributes"]["place"])


class StreamingTrainer(Trainer):
    """Trains from a StreamingDataLoader. Resume with ``ignore_data_skip=True``: the loader is at its place already."""

    train_dataset: Any

    def get_train_dataloader(self) -> Any:
        args = self.args
        loader = StreamingDataLoader(self.train_dataset, args.train_batch_size, num_workers=args.dataloader_num_workers)
        if len(loader) % args.gradient_accumulation_steps:
            raise ValueError("a resumed epoch would lose its last accumulation, as it is not whole: set epoch_size")
        return self.accelerator.prepare(loader)


class Line(torch.nn.Module):
    """Learns a line, and notes which samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), list[int]()

    def forward(self, id: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: A002
        self.seen += id.tolist()
        return {"loss": (self.layer(x.unsqueeze(1)).squeeze(1) - y).square().mean()}


def train(out: Path, stop_after: int | None = None, resume: bool = False) -> tuple[list[int], float]:
    """Train to the end, or for so many steps; gives the samples that this process has seen, and the weight."""
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(out / "run"), num_train_epochs=EPOCHS, max_steps=stop_after or -1, save_steps=stop_after or 1,
        save_strategy="steps" if stop_after else "no", per_device_train_batch_size=8, dataloader_num_workers=1,
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
    place = TrainingArguments(output_dir=str(out), use_cpu=True, report_to="none")
    with place.main_process_first():
        write_samples(out / "data")

    whole, weight = train(out)
    before, _ = train(out, stop_after=arguments.stop_after)
    after, resumed_weight = train(out, resume=True)
    is_same = before + after == whole and resumed_weight == weight
    print(f"{len(before)} + {len(after)} samples seen by process {place.process_index}; as without a break: {is_same}.")
    raise SystemExit(not is_same)


if __name__ == "__main__":
    main()
