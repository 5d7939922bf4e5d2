"""Training features of Lightning, each saved at several positions and resumed in the same and in another world.

Every sample has a separate weight in the model, which a training step that reads the sample changes by a known
amount: the weights at the end say how often each sample was trained on, and are compared with those of an
uninterrupted run, bit by bit. ``python -m tests.trainer.feature_table`` runs all cases and writes the table of
docs/lightning.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from lightning_streaming import Stream, StreamingConfig, StreamingDataModule
from lightning_streaming.trainer.lightning_internals import streaming_loaders
from tests.forked_ranks import on_ranks
from tests.helpers import write_dataset
from tests.trainer.harness import SaveThenStop, Stopped, trainer_for

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*use of fork.*:DeprecationWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:It is recommended to use .*sync_dist=True",
    "ignore:Swapping scheduler",
    "ignore:.*lr_scheduler.step",
    "ignore:You requested to overfit",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
)
SAMPLES = {"a": 22, "b": 10}
"""Of each stream: an epoch has 8 global batches."""
GLOBAL_BATCH = 4
EPOCHS = 3


class PerSample(LightningModule):
    """A model with a weight for each sample; the loss of a batch is their sum, so that each gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(sum(SAMPLES.values())))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        # DDP averages over the ranks.
        return self.table[batch["id"]].sum() * self.trainer.world_size

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.table[batch["id"]].mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class OneCycle(PerSample):
    """A schedule over as many steps as Lightning expects, so that each step changes weights by another amount."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class TwoOptimizers(PerSample):
    """Manual optimization: one optimizer steps each batch, the other every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.second = torch.nn.Parameter(torch.zeros(sum(SAMPLES.values())))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:  # type: ignore[override]
        often, seldom = cast("list[LightningOptimizer]", self.optimizers())
        often.zero_grad()
        seldom.zero_grad()
        self.manual_backward((self.table[batch["id"]] + self.second[batch["id"]]).sum() * self.trainer.world_size)
        often.step()
        if batch_idx % 2:
            seldom.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([table], lr=1.0) for table in (self.table, self.second)]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """How a run with a feature is set up."""

    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    plugins: Callable[[], list[Any]] = list
    model: type[PerSample] = PerSample
    is_compiled: bool = False
    drop_last: bool = False
    config: dict[str, Any] = field(default_factory=dict)


FEATURES: dict[str, Feature] = {
    "no feature": Feature(),
    "torch.compile": Feature(is_compiled=True),
    "EMAWeightAveraging": Feature(callbacks=lambda: [EMAWeightAveraging(decay=0.5)]),
    "StochasticWeightAveraging": Feature(callbacks=lambda: [StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1)]),
    "GradientAccumulationScheduler": Feature(callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]),
    "accumulate_grad_batches": Feature(trainer={"accumulate_grad_batches": 4}),
    "AsyncCheckpointIO": Feature(plugins=lambda: [AsyncCheckpointIO()]),
    "manual optimization, two optimizers": Feature(model=TwoOptimizers),
    "OneCycleLR with estimated_stepping_batches": Feature(model=OneCycle),
    "bf16-mixed": Feature(plugins=lambda: [MixedPrecision("bf16-mixed", "cpu")]),
    "bf16-true": Feature(trainer={"precision": "bf16-true"}),
    "64-true": Feature(trainer={"precision": "64-true"}),
    "gradient_clip_val": Feature(trainer={"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
    "reload_dataloaders_every_n_epochs": Feature(trainer={"reload_dataloaders_every_n_epochs": 2}),
    "limit_train_batches": Feature(trainer={"limit_train_batches": 6}),
    "overfit_batches": Feature(trainer={"overfit_batches": 5}),
    "val_check_interval": Feature(trainer={"val_check_interval": 3}),
    "check_val_every_n_epoch": Feature(trainer={"check_val_every_n_epoch": 2}),
    "drop_last": Feature(config={"epoch_size": 30}, drop_last=True),
}


class Position(NamedTuple):
    """The hook, and its call in a run, in which a checkpoint is saved before the run stops."""

    hook: str
    call: int


POSITIONS = {
    "mid-epoch": Position("on_train_batch_end", 11),
    "last batch": Position("on_train_batch_end", 8),
    "epoch end": Position("on_train_epoch_end", 2),
    "validation": Position("on_validation_end", 1),
    "exception": Position("training_step", 13),
}


class World(NamedTuple):
    """Ranks before and after the checkpoint, and workers after it."""

    before: int
    after: int
    workers: int = 0


WORLDS = {"same": World(1, 1), "2 workers": World(1, 1, 2), "1 to 2 ranks": World(1, 2), "2 to 1 ranks": World(2, 1)}


class RaiseInStep(Callback):
    """Raises at the end of the n-th training step, before the optimizer steps."""

    def __init__(self, call: int) -> None:
        self.calls_left = call

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.calls_left -= 1
        if not self.calls_left:
            raise Stopped


def train(name: str, data: Path, checkpoint: Path, stop: Position | None, workers: int) -> dict[str, list[float]]:
    """Train from the checkpoint, if there is one, to the end or to where it is saved; return the weights."""
    feature = FEATURES[name]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    callbacks = feature.callbacks()
    if stop is not None and stop.hook == "training_step":
        callbacks += [
            RaiseInStep(stop.call),
            ModelCheckpoint(checkpoint.parent, filename=checkpoint.stem, save_on_exception=True, save_top_k=0),
        ]
    elif stop is not None:
        callbacks.append(SaveThenStop(*stop, checkpoint))
    module = StreamingDataModule(
        train=StreamingConfig(
            streams={stream: Stream(remote=str(data / stream)) for stream in SAMPLES},
            shuffle=True,
            shuffle_block_size=16,
            **feature.config,
        ),
        val=StreamingConfig(remote=str(data / "a")),
        batch_size=GLOBAL_BATCH // ranks,
        num_workers=workers,
        drop_last=feature.drop_last,
    )
    trainer = trainer_for(
        checkpoint.parent,
        *callbacks,
        max_epochs=EPOCHS,
        devices=ranks,
        strategy=DDPStrategy() if ranks > 1 else "auto",
        num_sanity_val_steps=0,
        plugins=feature.plugins(),
        **feature.trainer,
    )
    model = feature.model()
    fitted: Any = torch.compile(model, backend="aot_eager") if feature.is_compiled else model
    try:
        with suppress(Stopped):
            trainer.fit(fitted, datamodule=module, ckpt_path=checkpoint if checkpoint.exists() else None)
    finally:
        for loader in streaming_loaders(trainer).values():
            loader.close()
    return {key: weights.double().tolist() for key, weights in model.state_dict().items()}


@pytest.fixture(scope="module")
def per_sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, first_id = tmp_path_factory.mktemp("per_sample"), 0
    for stream, samples in SAMPLES.items():
        write_dataset(root / stream, samples, first_id=first_id, size_limit=120)
        first_id += samples
    return root


@pytest.fixture(scope="module")
def whole_runs() -> dict[str, Any]:
    """Weights of uninterrupted runs, by feature."""
    return {}


@pytest.mark.rotate(18)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(
    "feature",  # to compile takes longer than five cases of the others
    [pytest.param(name, marks=pytest.mark.nightly if FEATURES[name].is_compiled else ()) for name in FEATURES],
)
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    feature: str, position: str, world: str, per_sample: Path, whole_runs: dict[str, Any], tmp_path: Path
) -> None:
    before, after, workers = WORLDS[world]

    def on(ranks: int, *args: Any) -> Any:
        if ranks == 1:
            return train(feature, *args)
        weights, *others = on_ranks(train, feature, *args, meeting=tmp_path / "ranks", count=ranks)
        assert all(other == weights for other in others)
        return weights

    if feature not in whole_runs:
        whole_runs[feature] = on(1, per_sample, tmp_path / "none.ckpt", None, 0)
    checkpoint = tmp_path / "saved.ckpt"
    on(before, per_sample, checkpoint, POSITIONS[position], 0)
    assert checkpoint.exists()
    assert on(after, per_sample, checkpoint, None, workers) == whole_runs[feature]


def test_a_compiled_model_resumes(per_sample: Path, tmp_path: Path) -> None:
    """Keeps a case by day, without ranks: those of the test above compile in each process."""
    checkpoint = tmp_path / "saved.ckpt"
    train("torch.compile", per_sample, checkpoint, POSITIONS["mid-epoch"], 0)
    assert checkpoint.exists()
    resumed = train("torch.compile", per_sample, checkpoint, None, 0)
    assert resumed == train("torch.compile", per_sample, tmp_path / "none.ckpt", None, 0)


@pytest.mark.parametrize("drop_last", [False, True])
def test_barebones_trains_on_every_sample_once_an_epoch(drop_last: bool, per_sample: Path, tmp_path: Path) -> None:
    model = PerSample()
    module = StreamingDataModule(
        train=StreamingConfig(remote=str(per_sample / "a"), shuffle=True), batch_size=4, drop_last=drop_last
    )
    Trainer(barebones=True, accelerator="cpu", max_epochs=2, default_root_dir=tmp_path).fit(model, datamodule=module)
    read = -model.table.detach()
    assert read.sum() == 2 * (20 if drop_last else 22)
    assert drop_last or read[:22].tolist() == [2] * 22
    assert read[22:].tolist() == [0] * 10


def test_a_second_fit_continues_where_the_first_one_ended(per_sample: Path, tmp_path: Path) -> None:
    model = PerSample()
    module = StreamingDataModule(train=StreamingConfig(remote=str(per_sample / "a"), shuffle=True), batch_size=4)
    trainer = trainer_for(tmp_path, max_steps=4)
    trainer.fit(model, datamodule=module)
    assert sorted(model.table.tolist())[:16] == [-1] * 16
    trainer.fit_loop.epoch_loop.max_steps = 6  # an epoch
    trainer.fit(model, datamodule=module)
    assert model.table[:22].tolist() == [-1] * 22
