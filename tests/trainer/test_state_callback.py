from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_streaming import StreamingDataLoader, StreamingDataset, StreamingStateCallback
from lightning_streaming.errors import ConfigError, StateError, StateMismatchError
from tests.trainer.harness import Recorder, Run, SaveThenStop, Stopped, with_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`", "ignore:Be aware that when using `ckpt_path`, callbacks"
)
STATE_KEY = "lightning_streaming.StreamingStateCallback"


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Run:
    return Run(data=data, directory=tmp_path)


@pytest.fixture
def saved(run: Run) -> Path:
    """A checkpoint after 3 of the first epoch's 8 batches of 4."""
    path = run.directory / "saved.ckpt"
    run.fit(callbacks=[SaveThenStop("on_train_batch_end", 3, path)])
    return path


def edited(path: Path, **state: Any) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"][STATE_KEY].update(state)
    torch.save(checkpoint, path)
    return path


def test_resume_with_another_batch_size_goes_on_at_the_sample(run: Run, saved: Path) -> None:
    whole, _ = run.fit()
    resumed, trainer = replace(run, batch_size=3).fit(ckpt_path=saved)
    assert resumed.seen == whole.seen
    # 17 samples are left of the first epoch: 6 batches of 3; the next epochs have 10.
    assert resumed.steps_per_epoch == {0: 3 + 6, 1: 10, 2: 10}
    assert trainer.num_training_batches == 10


def test_resume_with_a_smaller_limit_closes_the_epoch(run: Run, saved: Path) -> None:
    resumed, _ = with_trainer(run, limit_train_batches=2).fit(ckpt_path=saved)
    assert resumed.steps_per_epoch == {0: 3, 1: 2, 2: 2}


def test_resume_with_accumulation_added_goes_on_at_the_sample(run: Run, saved: Path) -> None:
    whole, _ = run.fit()
    resumed, _ = with_trainer(run, accumulate_grad_batches=2).fit(ckpt_path=saved)
    assert resumed.seen == whole.seen


def test_changed_data_is_refused_in_words(run: Run, saved: Path) -> None:
    with pytest.raises(StateMismatchError, match=r"order\.shuffle +True +False"):
        replace(run, shuffle=False).fit(ckpt_path=saved)


def test_changed_data_may_be_accepted(run: Run, saved: Path) -> None:
    resumed, _ = replace(run, shuffle=False).fit(
        ckpt_path=saved, callbacks=[StreamingStateCallback(on_mismatch="warn")]
    )
    assert len(resumed.seen) == 3 * 29


def test_unknown_on_change_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_mismatch"):
        StreamingStateCallback(on_mismatch="ignore")  # type: ignore[arg-type]  # the point of the test


def test_state_of_a_newer_version_is_refused(run: Run, saved: Path) -> None:
    with pytest.raises(StateError, match="version 99"):
        run.fit(ckpt_path=edited(saved, version=99))


def test_state_that_the_trainer_contradicts_is_refused(run: Run, saved: Path) -> None:
    counted = {"epoch": 0, "batches": 6, "batches_in_epoch": 8}
    with pytest.raises(StateError, match="not saved together"):
        run.fit(ckpt_path=edited(saved, trainer=counted))


def test_state_of_other_loaders_is_refused(run: Run, saved: Path) -> None:
    loaders = torch.load(saved, weights_only=True)["callbacks"][STATE_KEY]["loaders"]
    with pytest.raises(StateError, match=r"\['other'\].*\['train'\]"):
        run.fit(ckpt_path=edited(saved, loaders={"other": loaders["train"]}))


def test_a_checkpoint_without_a_place_begins_its_epoch_again(run: Run, saved: Path) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    del checkpoint["callbacks"][STATE_KEY]
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = []
    torch.save(checkpoint, saved)
    with pytest.warns(UserWarning, match="no place in the streaming data"):
        resumed, _ = run.fit(ckpt_path=saved)
    assert resumed.steps_per_epoch == {0: 3 + 8, 1: 8, 2: 8}


def test_fitting_again_with_more_epochs_goes_on(run: Run) -> None:
    whole, _ = run.fit()
    model, trainer = run.fit(max_epochs=2)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=trainer.datamodule)  # type: ignore[attr-defined]  # set by Lightning
    assert model.seen == whole.seen


def test_fitting_again_after_max_steps_finishes_the_epoch(run: Run) -> None:
    whole, _ = run.fit()
    model, trainer = run.fit(max_steps=5)
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit(model, datamodule=trainer.datamodule)  # type: ignore[attr-defined]
    assert model.seen == whole.seen


def test_one_callback_may_serve_one_trainer_after_another(run: Run) -> None:
    callback = StreamingStateCallback()
    first, _ = run.fit(callbacks=[callback])
    second, _ = run.fit(callbacks=[callback])
    assert second.seen == first.seen


def test_saving_again_before_training_goes_on_keeps_the_place(run: Run, saved: Path) -> None:
    again = run.directory / "again.ckpt"
    run.fit(ckpt_path=saved, callbacks=[SaveThenStop("on_fit_start", 1, again)])
    before, after = (torch.load(path, weights_only=True)["callbacks"][STATE_KEY] for path in (saved, again))
    assert after == before


def test_a_callback_that_saves_may_stand_before_ours(run: Run) -> None:
    whole, _ = run.fit()
    path = run.directory / "saved.ckpt"
    run.fit(callbacks=[SaveThenStop("on_train_batch_end", 3, path), StreamingStateCallback()])
    resumed, _ = run.fit(ckpt_path=path)
    assert resumed.seen == whole.seen


def test_fitting_again_after_a_resume_keeps_the_saved_seed(run: Run, saved: Path) -> None:
    whole, _ = run.fit()
    other_seed = replace(run, shuffle_seed=5)
    model, trainer = other_seed.fit(ckpt_path=saved, max_epochs=2)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=trainer.datamodule)  # type: ignore[attr-defined]
    assert model.seen == whole.seen


def test_the_learning_rate_finder_takes_no_samples_from_training(run: Run, tmp_path: Path) -> None:
    whole, _ = run.fit()
    model = Recorder()
    model.lr = 0.01  # type: ignore[assignment]  # what the finder looks for
    trainer = Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    datamodule = run.datamodule()
    Tuner(trainer).lr_find(model, datamodule=datamodule, num_training=4, update_attr=False)
    model.seen = []
    trainer.fit(model, datamodule=datamodule)
    assert model.seen == whole.seen


def test_a_position_of_mosaicml_streaming_is_taken_over(run: Run) -> None:
    whole, _ = run.fit()
    model, datamodule = Recorder(), run.datamodule()
    trainer = Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=run.directory,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    setup = datamodule.setup

    def setup_and_load(stage: str) -> None:
        setup(stage)
        state = {"epoch": 0, "sample_in_epoch": 12, "num_canonical_nodes": 1, "shuffle_seed": 9176}
        datamodule.datasets["train"].load_state_dict(state)

    datamodule.setup = setup_and_load  # type: ignore[method-assign]
    trainer.fit(model, datamodule=datamodule)
    assert model.seen == whole.seen[12:]
    assert model.steps_per_epoch == {0: 5, 1: 8, 2: 8}


@pytest.mark.rotate(3)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")  # it means the loader without a length
@pytest.mark.parametrize("save_after", [2, 3, 4, 5, 7])
def test_a_short_loader_that_is_cycled_resumes_at_its_place(save_after: int, data: Path, tmp_path: Path) -> None:
    # The loader without a length makes Lightning begin the short loader's next pass one step ahead.
    def fit(model: Recorder, ckpt_path: Path | None = None, *callbacks: Any) -> Recorder:
        trainer = Trainer(
            max_epochs=1, limit_train_batches=10, accelerator="cpu", logger=False, enable_checkpointing=False,
            default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[StreamingStateCallback(), *callbacks],
        )  # fmt: skip
        dataset = StreamingDataset(remote=str(data / "b"), shuffle=True)
        loaders = {"short": StreamingDataLoader(dataset, batch_size=4), "long": DataLoader(NoLength(), batch_size=1)}
        trainer.fit(model, CombinedLoader(loaders, "max_size_cycle"), ckpt_path=ckpt_path)
        return model

    whole = fit(SeesShort())
    path = tmp_path / "saved.ckpt"
    with pytest.raises(Stopped):
        fit(SeesShort(), None, SaveThenStop("on_train_batch_end", save_after, path))
    assert fit(SeesShort(), path).seen == whole.seen


class SeesShort(Recorder):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["short"], batch_idx)


class NoLength(IterableDataset[torch.Tensor]):
    """Makes Lightning fetch one batch ahead of the step, from every loader."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(1000)


class TwoStreams(LightningDataModule):
    """Two streaming loaders of unlike length in a dict, beside an ordinary one."""

    def __init__(self, data: Path, beside: Any) -> None:
        super().__init__()
        self.data, self.beside = data, beside

    def train_dataloader(self) -> dict[str, Any]:
        loaders: dict[str, Any] = {
            name: StreamingDataLoader(
                StreamingDataset(remote=str(self.data / name), shuffle=True, shuffle_block_size=16), batch_size=4
            )
            for name in ("a", "b")
        }
        return {**loaders, "beside": self.beside}


class SeesTwo(Recorder):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.pending += [(self.trainer.current_epoch, one) for name in ("a", "b") for one in batch[name]["id"].tolist()]
        return self.loss(batch["a"])


@pytest.mark.rotate(2)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")  # it means the ordinary loader
@pytest.mark.parametrize("ahead", [False, True], ids=["lengths known", "one batch ahead"])
@pytest.mark.parametrize("save_after", [2, 4, 5, 7])
def test_several_loaders_resume_each_at_its_place(ahead: bool, save_after: int, data: Path, tmp_path: Path) -> None:
    def fit(model: SeesTwo, ckpt_path: Path | None = None, *callbacks: Any) -> SeesTwo:
        beside: Any = NoLength() if ahead else torch.arange(3)
        trainer = Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[StreamingStateCallback(), *callbacks],
            limit_train_batches=5 if ahead else None,
        )  # fmt: skip
        trainer.fit(model, datamodule=TwoStreams(data, DataLoader(beside, batch_size=1)), ckpt_path=ckpt_path)
        return model

    whole = fit(SeesTwo())
    path = tmp_path / "saved.ckpt"
    with pytest.raises(Stopped):
        fit(SeesTwo(), None, SaveThenStop("on_train_batch_end", save_after, path))
    resumed = fit(SeesTwo(), path)
    assert resumed.seen == whole.seen
    assert resumed.steps_per_epoch == whole.steps_per_epoch == {0: 5, 1: 5, 2: 5}


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sample_in_epoch": 10**9}, "train loader 'b': 1000000000 samples were consumed of an epoch that has 12"),
        ({"sample_in_epoch": -1}, "'sample_in_epoch' of the saved position of 'b'"),
        ({"fingerprint": ("samples", 13)}, "train loader 'b': the saved position belongs to other data"),
    ],
    ids=str,
)
def test_of_several_loaders_the_one_that_is_wrong_is_named(
    change: dict[str, Any], words: str, data: Path, tmp_path: Path
) -> None:
    def fit(ckpt_path: Path | None, *callbacks: Any) -> None:
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[StreamingStateCallback(), *callbacks],
        )  # fmt: skip
        beside: Any = DataLoader(torch.arange(3), batch_size=1)  # type: ignore[arg-type]
        trainer.fit(SeesTwo(), datamodule=TwoStreams(data, beside), ckpt_path=ckpt_path)

    path = tmp_path / "saved.ckpt"
    with pytest.raises(Stopped):
        fit(None, SaveThenStop("on_train_batch_end", 2, path))
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["callbacks"][STATE_KEY]["loaders"]["b"]
    if "fingerprint" in change:
        key, value = change["fingerprint"]
        state["fingerprint"]["streams"]["0"][key] = value
    else:
        state.update(change)
    torch.save(checkpoint, path)
    with pytest.raises(StateError, match=words):
        fit(path)
