"""Accelerate with exact resume, on any number of processes: its own ``save_state`` keeps the place in the data.

    python -m examples.accelerate_loop
    torchrun --nproc_per_node 2 -m examples.accelerate_loop

Trains in one go; then again, but stops in the middle of an epoch; then goes on from there in new objects. Ends with 1
if samples or weights differ by a bit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset

SAMPLES, BATCH_SIZE, EPOCHS = 240, 8, 2


def write_samples(out: Path) -> None:
    """Write points of a line as a dataset, unless it is there."""
    if (out / "index.json").exists():
        return
    with MDSWriter(out=out, columns={"id": "int", "x": "float32", "y": "float32"}, size_limit="4kb") as writer:
        for sample in range(SAMPLES):
            x = sample / SAMPLES
            writer.write({"id": sample, "x": x, "y": 2 * x - 1})


def train(data: Path, checkpoint: Path, stop_after: int | None = None, resume: bool = False) -> tuple[list[int], float]:
    """Train to the end, or for so many steps; gives the samples that this process has seen, and the weight."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = StreamingDataset(remote=str(data), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=1)  # batch_size is that of each process
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(str(checkpoint))  # the loader's place too: no skip_first_batches

    seen: list[int] = []
    steps = 0
    for _ in range(dataset.next_epoch, EPOCHS):
        for batch in loader:  # an epoch, or what is left of one
            with accelerator.accumulate(model):
                loss = (model(batch["x"].unsqueeze(1)).squeeze(1) - batch["y"]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            seen += batch["id"].tolist()
            steps += accelerator.sync_gradients
            if accelerator.sync_gradients and steps == stop_after:  # no gradient is waiting for the next batch
                accelerator.save_state(str(checkpoint))
                return seen, 0.0
    return seen, accelerator.unwrap_model(model).weight.item()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/accelerate"), help="default: %(default)s")
    parser.add_argument("--stop-after", type=int, default=10, metavar="STEPS", help="default: %(default)s")
    arguments = parser.parse_args()
    data, checkpoint = arguments.out / "data", arguments.out / "checkpoint"
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        write_samples(data)

    whole, weight = train(data, checkpoint)
    before, _ = train(data, checkpoint, stop_after=arguments.stop_after)
    accelerator.wait_for_everyone()
    after, resumed_weight = train(data, checkpoint, resume=True)
    is_same = before + after == whole and resumed_weight == weight
    rank = f"process {accelerator.process_index} of {accelerator.num_processes}"
    print(f"{rank}: {len(before)} + {len(after)} samples seen; as without a break: {is_same}.")
    accelerator.end_training()
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
