"""Documents in one pack do not see each other, and a model learns from packs as from documents that stand alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from examples.packed_documents import PackedByteTransformer, pad_documents, write_documents
from lightning_streaming import StreamingDataLoader, StreamingDataset, StreamingStateCallback

CAPACITY = 384
PACK = {"column": "tokens", "capacity": CAPACITY, "window": 32}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More would only wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of different lengths, of which several fit into a pack."""
    root = tmp_path_factory.mktemp("documents") / "data"
    write_documents(root, most=300, paragraphs=True)
    return root


def loader(documents: Path, *, is_packed: bool = True, fixed_epoch: bool = False) -> StreamingDataLoader:
    dataset = StreamingDataset(remote=str(documents), shuffle=True, packing=PACK if is_packed else None)
    collate_fn = None if is_packed else partial(pad_documents, capacity=CAPACITY)
    return StreamingDataLoader(dataset, batch_size=4, collate_fn=collate_fn, fixed_epoch=fixed_epoch)


@pytest.fixture(scope="module")
def batch(documents: Path) -> dict[str, Tensor]:
    """Packs, of which one has three documents or more."""
    found: dict[str, Tensor] = next(one for one in loader(documents) if one["document_ids"].max() >= 2)
    return found


@pytest.fixture
def model() -> PackedByteTransformer:
    torch.manual_seed(1)
    return PackedByteTransformer(width=16, heads=2)


def each_document(batch: dict[str, Tensor]) -> list[tuple[int, Tensor]]:
    """Of each document its pack, and which of the pack's tokens are its own, of shape (capacity,)."""
    return [
        (pack, ids == number) for pack, ids in enumerate(batch["document_ids"]) for number in range(int(ids.max()) + 1)
    ]


def loss_of(losses: Tensor, pack: int, is_own: Tensor) -> Tensor:
    """A document's loss, of the losses of a batch."""
    return losses[pack][is_own[1:]].sum()


def test_no_gradient_flows_between_documents(batch: dict[str, Tensor], model: PackedByteTransformer) -> None:
    found = list[Tensor]()
    model.embedding.register_forward_hook(lambda _module, _given, made: found.append(made))
    losses, _ = model.losses(batch)
    (embedded,) = found
    for pack, is_own in each_document(batch):
        (gradient,) = torch.autograd.grad(loss_of(losses, pack, is_own), embedded, retain_graph=True)
        of_tokens = gradient.abs().sum(dim=2)
        own = of_tokens[pack][is_own]
        assert (own[:-1] > 0).all(), "each token but the last is what a loss depends on"
        assert torch.count_nonzero(of_tokens) == len(own) - 1, "the rest of the batch has none, to the last bit"


def test_a_documents_loss_does_not_depend_on_its_neighbours(
    batch: dict[str, Tensor], model: PackedByteTransformer
) -> None:
    with torch.no_grad():
        losses, _ = model.losses(batch)
        for pack, is_own in each_document(batch):
            others = torch.randint_like(batch["input_ids"], 256)
            others[pack] = torch.where(is_own, batch["input_ids"][pack], others[pack])
            changed, _ = model.losses({**batch, "input_ids": others})
            assert torch.equal(changed[pack][is_own[1:]], losses[pack][is_own[1:]])


def test_a_document_has_the_loss_that_it_has_alone(batch: dict[str, Tensor], model: PackedByteTransformer) -> None:
    with torch.no_grad():
        losses, follows = model.losses(batch)
        for pack, is_own in each_document(batch):
            document = {"tokens": batch["input_ids"][pack][is_own].numpy()}
            alone, _ = model.losses(pad_documents([document], CAPACITY))
            expected = alone[0][: int(is_own.sum()) - 1]
            torch.testing.assert_close(losses[pack][is_own[1:] & follows[pack]], expected, rtol=1e-5, atol=1e-6)
            assert alone.count_nonzero() == len(expected)


class Losses(Callback):
    """Remembers the loss of each step."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.all.append(float(trainer.callback_metrics["loss"]))


@pytest.mark.rotate(1)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "one a row"])
def test_training_lowers_the_loss(
    is_packed: bool, documents: Path, model: PackedByteTransformer, tmp_path: Path
) -> None:
    losses = Losses()
    trainer = Trainer(
        max_steps=20,
        val_check_interval=10,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        callbacks=[losses, StreamingStateCallback()],
    )
    validated_on = loader(documents, is_packed=is_packed, fixed_epoch=True)
    trainer.fit(model, loader(documents, is_packed=is_packed), validated_on)
    assert trainer.global_step == len(losses.all) == 20
    assert sum(losses.all[-5:]) / 5 < losses.all[0] - 1
    assert float(trainer.callback_metrics["val_loss"]) < losses.all[0] - 1
