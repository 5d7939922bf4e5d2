"""Exact resume with Accelerate: its own ``save_state`` and ``load_state`` include the position in the data.

    python examples/accelerate_loop.py
    torchrun --nproc_per_node 2 examples/accelerate_loop.py

Trains without a stop; then with a stop in mid-epoch and a resume in new objects. Prints a line per process: how many
samples it read before and after the resume, and whether samples and weights are the same as without a stop. Takes 15
seconds on two cores; exits with 1 if a sample or a bit of the weights differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from lightning_streaming import StreamingDataLoader, StreamingDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other examples, from any directory
from examples.line_run import BATCH_SIZE, EPOCHS, parse_arguments, write_samples


def train(data: Path, checkpoint: Path, stop_after: int | None = None, resume: bool = False) -> tuple[list[int], float]:
    """Train to the end or for ``stop_after`` steps; return the ids that this process has read, and the weight."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = StreamingDataset(remote=str(data), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=1)  # batch_size is that of each process
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(str(checkpoint))  # the loader's position too: no skip_first_batches

    seen: list[int] = []
    steps = 0
    for _ in range(dataset.next_epoch, EPOCHS):
        for batch in loader:  # an epoch, or the rest of it after a resume
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
    out, stop_after = parse_arguments(__doc__, "demo_output/accelerate", 10)
    data, checkpoint = out / "data", out / "checkpoint"
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        write_samples(data)

    whole, weight = train(data, checkpoint)
    before, _ = train(data, checkpoint, stop_after=stop_after)
    accelerator.wait_for_everyone()
    after, resumed_weight = train(data, checkpoint, resume=True)
    is_same = before + after == whole and resumed_weight == weight
    rank = f"process {accelerator.process_index} of {accelerator.num_processes}"
    print(f"{rank}: {len(before)} + {len(after)} samples read; same as without a stop: {is_same}.")
    accelerator.end_training()
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
