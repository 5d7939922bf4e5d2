"""The example of fine-tuning: its loss counts the tokens of the assistant, and falls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from examples.sft import END, NUM_TOKENS, ChatTransformer
from lightning_streaming import StreamingDataLoader, StreamingDataset, StreamingStateCallback
from lightning_streaming.tokenizing.tokenizer import load_tokenizer


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_labels_are_what_the_assistant_says_and_are_learnt(example_data: Path, tmp_path: Path) -> None:
    packing = {"column": "tokens", "capacity": 256, "labels": True, "loss_mask": "loss_mask"}
    dataset = StreamingDataset(remote=str(example_data / "sft" / "train"), shuffle=True, packing=packing)
    loader = StreamingDataLoader(dataset, batch_size=8)
    batch = next(iter(loader))
    labels = batch["labels"][batch["labels"] >= 0]
    text = bytes(_bytes_of(example_data).get(token, 10) for token in labels.tolist()).decode()
    assert all(line.startswith("It is ") and line.endswith(".") for line in text.splitlines())
    assert int(batch["input_ids"].max()) < NUM_TOKENS
    seed_everything(1)
    model = ChatTransformer(width=32, learning_rate=0.02)
    before = model._loss(batch)
    trainer = Trainer(
        callbacks=[StreamingStateCallback()],
        accelerator="cpu", max_steps=12, logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    assert torch.isfinite(before)
    assert model._loss(batch) < before / 2


def _bytes_of(example_data: Path) -> dict[int, int]:
    """Bytes by token; the token that ends a turn is none."""
    tokenizer = load_tokenizer(str(example_data / "sft" / "model"))
    known = {int(tokenizer.encode(chr(code))[0]): code for code in range(128)}
    known.pop(int(tokenizer.encode(END)[0]), None)
    return known
