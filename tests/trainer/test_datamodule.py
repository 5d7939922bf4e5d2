from __future__ import annotations

import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_streaming import (
    Stream,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    StreamingStateCallback,
    World,
)
from lightning_streaming.errors import ConfigError
from lightning_streaming.reading.dataset import dataset_world
from tests.broken_data import replacing
from tests.helpers import assert_error
from tests.leftovers import restore_loader_classes
from tests.schedules import Phase, schedule
from tests.trainer.harness import VAL_SAMPLES, Recorder, Run, SaveThenStop, Stopped


def config(data: Path, name: str = "a", **settings: Any) -> StreamingConfig:
    return StreamingConfig(remote=str(data / name), **settings)


def quiet_trainer(tmp_path: Path, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 1,
        "default_root_dir": tmp_path,
    }
    return Trainer(**{**defaults, **settings})


class Evaluated(Recorder):
    """Also remembers what it was evaluated on."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: list[int] = []

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.evaluated += batch["id"].tolist()

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.evaluated += batch["id"].tolist()

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return batch["id"]


def test_datasets_are_made_for_the_stage_only(data: Path) -> None:
    module = StreamingDataModule(train=config(data), val=config(data, "val"), test=config(data, "b"))
    module.setup("validate")
    assert list(module.datasets) == ["val"]


def test_training_shuffles_and_evaluation_does_not_unless_told(data: Path) -> None:
    module = StreamingDataModule(train=config(data), val=config(data), batch_size=17)
    module.setup("fit")
    (train,), (val,) = list(module.train_dataloader()), list(module.val_dataloader())
    assert train["id"].tolist() != val["id"].tolist() == list(range(17))


def test_a_stage_has_its_own_batch_size(data: Path) -> None:
    module = StreamingDataModule(train=config(data), val=config(data), batch_size=4, eval_batch_size=8)
    module.setup("fit")
    assert (len(module.train_dataloader()), len(module.val_dataloader())) == (5, 3)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluation_sees_every_sample_from_the_start_each_time(stage: str, data: Path, tmp_path: Path) -> None:
    module = StreamingDataModule(val=config(data, "val"), test=config(data, "val"), batch_size=4)
    model, trainer = Evaluated(), quiet_trainer(tmp_path)
    for _ in range(2):
        getattr(trainer, stage)(model, datamodule=module, verbose=False)
    assert model.evaluated == 2 * list(range(2000, 2000 + VAL_SAMPLES))


def test_validation_draws_and_augments_the_same_each_time(data: Path) -> None:
    module = Augmenting(val=config(data, sampling_method="balanced", streams=None, epoch_size=9), batch_size=4)
    module.setup("validate")
    loader = module.val_dataloader()
    first, second = ([batch["id"].tolist() for batch in loader] for _ in range(2))
    assert first == second


def test_prediction_sees_every_sample_although_lightning_remakes_the_loader(data: Path, tmp_path: Path) -> None:
    module = StreamingDataModule(predict=config(data, "val"), batch_size=4, num_workers=2)
    batches = quiet_trainer(tmp_path).predict(Evaluated(), datamodule=module)
    assert batches is not None
    assert torch.cat([torch.as_tensor(batch) for batch in batches]).tolist() == list(range(2000, 2000 + VAL_SAMPLES))


def test_a_stage_without_data_is_named_by_lightning(data: Path, tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="test_dataloader"):
        quiet_trainer(tmp_path).test(Evaluated(), datamodule=StreamingDataModule(train=config(data)))


def test_no_validation_data_means_no_validation(data: Path, tmp_path: Path) -> None:
    model = Evaluated()
    with pytest.warns(UserWarning, match="no `val_dataloader`"):
        quiet_trainer(tmp_path).fit(model, datamodule=StreamingDataModule(train=config(data), batch_size=4))
    assert model.evaluated == []


def test_the_state_callback_is_added_first_and_once(data: Path, tmp_path: Path) -> None:
    module, trainer = StreamingDataModule(train=config(data), val=config(data, "val")), quiet_trainer(tmp_path)
    trainer.fit(Recorder(), datamodule=module)
    trainer.validate(Recorder(), datamodule=module, verbose=False)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's connector
    assert [type(one) for one in callbacks].count(StreamingStateCallback) == 1
    assert isinstance(callbacks[0], StreamingStateCallback)


def test_a_callback_of_the_user_is_kept(data: Path, tmp_path: Path) -> None:
    mine = StreamingStateCallback(on_mismatch="warn")
    trainer = quiet_trainer(tmp_path, callbacks=[mine])
    trainer.fit(Recorder(), datamodule=StreamingDataModule(train=config(data), val=config(data, "val")))
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    assert [one for one in callbacks if isinstance(one, StreamingStateCallback)] == [mine]


def test_checkpoints_load_with_weights_only(data: Path, tmp_path: Path) -> None:
    run, path = Run(data=data, directory=tmp_path), tmp_path / "saved.ckpt"
    run.fit(callbacks=[SaveThenStop("on_train_batch_end", 3, path)])
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["callbacks"]["lightning_streaming.StreamingStateCallback"]["loaders"]["train"]
    assert (state["epoch"], state["sample_in_epoch"], state["num_canonical_nodes"]) == (0, 12, 1)
    assert "StreamingDataModule" not in checkpoint


class Remembered(StreamingDataModule):
    """Saves its arguments in checkpoints."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters()


def test_phases_among_hyperparameters_are_plain_values_and_make_the_same_data_again(data: Path, tmp_path: Path) -> None:
    streams = {name: Stream(remote=str(data / name)) for name in "ab"}
    phases = [Phase(name="one", end="50%", mix={"a": 1}), Phase(name="two", mix={"a": [1, 0], "b": [0, 1]}, steps=2)]
    config_of_phases = StreamingConfig(streams=streams, schedule=schedule(phases), epoch_size=24)
    module = Remembered(train=config_of_phases, val=config(data, "val"), batch_size=4)
    trainer = quiet_trainer(tmp_path)
    trainer.fit(Recorder(), datamodule=module)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["datamodule_hyper_parameters"]
    assert saved["train"]["schedule"]["two"]["mix"] == {"a": [1, 0], "b": [0, 1]}
    again = StreamingDataModule(**{name: saved[name] for name in ("train", "batch_size")})
    assert again.configs["train"] == module.configs["train"]


class Augmenting(StreamingDataModule):
    """Overrides the two hooks most people need."""

    def transform(self, sample: dict[str, Any], stage: str, rng: np.random.Generator) -> Any:
        return {"id": sample["id"], "noise": rng.random() if stage == "train" else 0.0}

    def collate(self, samples: list[Any]) -> Any:
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "noise": torch.tensor([sample["noise"] for sample in samples]),
        }


class WithoutRng(StreamingDataModule):
    """Has a transform that draws nothing."""

    def transform(self, sample: dict[str, Any], stage: str) -> Any:  # type: ignore[override]
        return {"id": sample["id"], "is_train": stage == "train"}


class WithKeywords(StreamingDataModule):
    """Takes whatever else a transform gets."""

    def transform(self, sample: dict[str, Any], **others: Any) -> Any:  # type: ignore[override]
        return {"id": sample["id"], "is_train": others["stage"] == "train" and others["rng"].random() < 1}


@pytest.mark.parametrize("kind", [WithoutRng, WithKeywords])
def test_a_transform_takes_a_generator_if_it_wants_one(kind: type[StreamingDataModule], data: Path) -> None:
    module = kind(train=config(data), val=config(data, "val"), batch_size=4)
    module.setup("fit")
    for loader, is_train in ((module.train_dataloader(), True), (module.val_dataloader(), False)):
        assert next(iter(loader))["is_train"].tolist() == [is_train] * 4


def test_hooks_that_take_other_arguments_are_refused_when_the_module_is_built(data: Path) -> None:
    def build(**hooks: Any) -> StreamingDataModule:
        kind: Any = type("Mine", (StreamingDataModule,), hooks)
        built: StreamingDataModule = kind(train=config(data))
        return built

    no_stage = (
        r"Mine.transform must accept \(sample, stage=\.\.\.\), optionally with rng=\.\.\.; .*keyword argument 'stage'"
    )
    with pytest.raises(ConfigError, match=no_stage):
        build(transform=lambda self, sample: sample)
    with pytest.raises(ConfigError, match=r"missing a required argument: 'other'"):
        build(transform=lambda self, sample, stage, rng, other: sample)
    with pytest.raises(ConfigError, match=r"Mine.collate must accept \(samples\); .*: 'stage'"):
        build(collate=lambda self, samples, stage: samples)
    build(transform=lambda self, sample, stage, extra=1: sample, collate=staticmethod(list))


def drawn_noise(data: Path, **settings: Any) -> dict[int, float]:
    module = Augmenting(train=config(data), **settings)
    module.setup("fit")
    noise: dict[int, float] = {}
    for batch in module.train_dataloader():
        noise.update(zip(batch["id"].tolist(), batch["noise"].tolist(), strict=True))
    return noise


def test_augmentation_depends_on_the_sample_not_on_workers_or_batches(data: Path) -> None:
    noise = drawn_noise(data, batch_size=4)
    assert len(set(noise.values())) == 17
    assert drawn_noise(data, batch_size=3, num_workers=2) == noise


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`")
def test_overridden_hooks_reach_spawned_workers_without_the_trainer(data: Path, tmp_path: Path) -> None:
    module = Augmenting(
        train=config(data), val=config(data), batch_size=4, num_workers=1, multiprocessing_context="spawn"
    )
    trainer = quiet_trainer(tmp_path, limit_val_batches=0)
    trainer.fit(Recorder(), datamodule=module)
    assert trainer.global_step == 5


def test_a_copy_for_workers_leaves_trainer_and_datasets_behind(data: Path, tmp_path: Path) -> None:
    module = StreamingDataModule(train=config(data), batch_size=4)
    module.trainer = quiet_trainer(tmp_path)
    module.setup("fit")
    copy = module._for_workers()
    assert (copy.trainer, copy.datasets) == (None, {})
    assert (module.trainer is None, list(module.datasets)) == (False, ["train"])


def test_a_pickled_module_still_leaves_out_the_stages_without_data(data: Path, tmp_path: Path) -> None:
    module = pickle.loads(pickle.dumps(StreamingDataModule(train=config(data), batch_size=4)))
    with pytest.raises(MisconfigurationException, match="test_dataloader"):
        quiet_trainer(tmp_path).test(Evaluated(), datamodule=module)


def test_build_dataset_and_build_dataloader_may_be_overridden(data: Path) -> None:
    class Mine(StreamingDataModule):
        def build_dataset(self, stage: Any, config: StreamingConfig) -> StreamingDataset:
            return StreamingDataset(**config.dataset_arguments(shuffle_by_default=False), world=World())

        def build_dataloader(self, stage: Any, dataset: StreamingDataset) -> StreamingDataLoader:
            return StreamingDataLoader(dataset, batch_size=6)

    module = Mine(train=config(data))
    module.setup("fit")
    assert next(iter(module.train_dataloader()))["id"].tolist() == list(range(6))


def test_a_config_shows_no_secret() -> None:
    secret = StreamingConfig(
        streams={"a": Stream(remote="https://me:hunter2@host/a?sig=hunter2", storage={"options": {"key": "hunter2"}})},
        storage={"options": {"secret": "hunter2"}},
    )
    assert "hunter2" not in repr(secret)


def test_a_config_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="streams=, remote= or local="):
        StreamingConfig(shuffle=True)


def test_asking_for_a_loader_before_setup_says_so(data: Path) -> None:
    with pytest.raises(ConfigError, match="'train'"):
        StreamingDataModule(train=config(data)).train_dataloader()


def test_the_world_is_the_trainers(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    module = StreamingDataModule(train=config(data), batch_size=4)
    module.trainer = quiet_trainer(tmp_path)
    module.setup("fit")
    assert dataset_world(module.datasets["train"]) == World()


class HoldsItsLoader(Recorder):
    """A model that makes its own loader, as many do; there is no data module."""

    def __init__(self, data: Path) -> None:
        super().__init__()
        self.data = data

    def train_dataloader(self) -> StreamingDataLoader:
        return StreamingDataLoader(StreamingDataset(remote=str(self.data / "a"), shuffle=True), batch_size=4)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:Your `IterableDataset` has `__len__`")
@pytest.mark.parametrize("with_callback", [True, False], ids=["callback", "no callback"])
def test_a_model_with_its_own_loader_resumes(with_callback: bool, data: Path, tmp_path: Path) -> None:
    def trainer(*callbacks: Callback) -> Trainer:
        mine = [StreamingStateCallback()] if with_callback else []
        return quiet_trainer(tmp_path, max_epochs=2, callbacks=[*mine, *callbacks])

    def model() -> LightningModule:
        return HoldsItsLoader(data)

    whole, resumed = HoldsItsLoader(data), HoldsItsLoader(data)
    trainer().fit(whole)
    path = tmp_path / "saved.ckpt"
    with pytest.raises(Stopped):
        trainer(SaveThenStop("on_train_batch_end", 3, path)).fit(model())
    trainer().fit(resumed, ckpt_path=path)
    assert resumed.seen == whole.seen


class Tokenized(StreamingDataset):
    """A dataset of a user's own."""

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return {**super().__getitem__(index), "token": 1}


class Tokenizing(StreamingDataModule):
    """Builds it."""

    def build_dataset(self, stage: Any, config: StreamingConfig) -> StreamingDataset:
        return Tokenized(**config.dataset_arguments(shuffle_by_default=True))


class NeedsTokens(Recorder):
    """Cannot do without."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        assert batch["token"].tolist() == [1] * len(batch["id"])
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning", "ignore:You defined a `validation_step`")
@pytest.mark.filterwarnings(
    "ignore:Your `IterableDataset` has `__len__`", "ignore:The 'train_dataloader' does not have"
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_of_the_users_own_trains_and_resumes(workers: int, data: Path, tmp_path: Path) -> None:
    def module() -> Tokenizing:
        return Tokenizing(train=config(data), batch_size=4, num_workers=workers)

    whole, resumed, path = NeedsTokens(), NeedsTokens(), tmp_path / "saved.ckpt"
    quiet_trainer(tmp_path, max_epochs=2).fit(whole, module())
    saver = SaveThenStop("on_train_batch_end", 3, path)
    with pytest.raises(Stopped):
        quiet_trainer(tmp_path, max_epochs=2, callbacks=[saver]).fit(NeedsTokens(), module())
    quiet_trainer(tmp_path, max_epochs=2).fit(resumed, module(), ckpt_path=path)
    assert resumed.seen == whole.seen


def test_fit_without_training_data_says_what_to_pass(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no data for 'train'; pass train=StreamingConfig\(\.\.\.\)"):
        quiet_trainer(tmp_path).fit(Evaluated(), datamodule=StreamingDataModule(val=config(data, "val")))


@pytest.mark.parametrize("option", ["return_keys", "return_valid_mask"])
def test_stages_may_come_from_a_generator_and_are_no_other_values(data: Path, option: str) -> None:
    stages: Any = (stage for stage in ["train"])
    assert getattr(StreamingDataModule(config(data), batch_size=4, **{option: stages}), option) == ("train",)
    others: list[Any] = [True, 3, "train", ["fit"], [3], np.array([[1, 2]]), None]
    for wrong in others:
        with assert_error(ConfigError, option=option):
            StreamingDataModule(config(data), batch_size=4, **{option: wrong})


@pytest.mark.parametrize("option", ["persistent_workers", "pin_memory", "drop_last"])
def test_a_text_is_no_truth_value(data: Path, option: str) -> None:
    wrong: Any = "false"
    with assert_error(ConfigError, option=option):
        StreamingDataModule(config(data), batch_size=4, **{option: wrong})


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:Total length of")
@pytest.mark.parametrize("with_module", [True, False])
def test_fit_says_why_drop_last_leaves_no_batch(data: Path, tmp_path: Path, with_module: bool) -> None:
    words = "train loader 'train': drop_last=True leaves no batch at all: an epoch has 17 samples for the only rank"
    if with_module:
        given: dict[str, Any] = {"datamodule": StreamingDataModule(config(data), batch_size=18, drop_last=True)}
    else:
        dataset = StreamingDataset(remote=str(data / "a"), batch_size=18)
        given = {"train_dataloaders": StreamingDataLoader(dataset, drop_last=True)}
    callbacks = [] if with_module else [StreamingStateCallback()]
    with pytest.raises(ConfigError, match=words):
        quiet_trainer(tmp_path, callbacks=callbacks).fit(Recorder(), **given)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:Total length of")
def test_a_fit_that_is_to_train_nothing_is_no_error(data: Path, tmp_path: Path) -> None:
    module = StreamingDataModule(train=config(data), batch_size=18, drop_last=True)
    quiet_trainer(tmp_path, limit_train_batches=0).fit(Recorder(), datamodule=module)


def test_a_module_tells_its_stages_without_reading_anything(data: Path) -> None:
    module = StreamingDataModule(train=config(data), val=StreamingConfig(remote="https://me:hunter2@host/val"))
    settings = "batch_size=1, num_workers=0>"
    assert repr(module) == str(module) == f"<StreamingDataModule: train: not set up; val: not set up; {settings}"
    module.setup("fit")
    assert repr(module) == (
        f"<StreamingDataModule: train: <StreamingDataset: 0='{data / 'a'}'; index not read; at epoch 0, sample 0>; "
        f"val: <StreamingDataset: 0='https://host/val'; index not read; at epoch 0, sample 0>; {settings}"
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, but got 0"),
        ({"eval_batch_size": -4}, "eval_batch_size must be a whole number of at least 1"),
        ({"num_workers": -1}, "num_workers must be a whole number of at least 0"),
        ({"prefetch_factor": 0}, "prefetch_factor must be a whole number of at least 1"),
        ({"train": "data/code"}, r"must be a StreamingConfig, like StreamingConfig\(remote=...\), but is of type str"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StreamingDataModule(**wrong)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_loaders_after_one_that_failed_keep_nothing_of_what_they_read(data: Path, tmp_path: Path) -> None:
    class FailsToLoad(StreamingDataModule):
        def train_dataloader(self) -> StreamingDataLoader:
            raise OSError("no such mount")

    with pytest.raises(OSError, match="no such mount"):
        quiet_trainer(tmp_path, limit_val_batches=0).fit(
            Recorder(), datamodule=FailsToLoad(config(data), batch_size=17)
        )
    # Lightning has left torch's loaders as it changes them to be told of each value that is set on them.
    loader = StreamingDataLoader(StreamingDataset(remote=str(data / "a")), 17, num_workers=1, persistent_workers=True)
    noted = len(vars(loader).get("__pl_attrs_record", ()))
    for _ in range(2):
        list(loader)
    assert len(vars(loader).get("__pl_attrs_record", ())) == noted
    iterator = weakref.ref(loader._iterator)
    loader.close()
    assert iterator() is None
    restore_loader_classes()
    assert not hasattr(DataLoader.__setattr__, "__wrapped__")


def test_two_stages_do_not_share_a_log_of_bad_samples(data: Path, tmp_path: Path) -> None:
    train = config(data, bad_samples=replacing(tmp_path / "bad"))
    with assert_error(ConfigError, option="val.bad_samples.log"):
        StreamingDataModule(train=train, val=config(data, "b", bad_samples=replacing(tmp_path / "bad")))
    StreamingDataModule(train=train, val=config(data, "b", bad_samples=replacing(tmp_path / "bad_val")))


def test_a_limit_that_is_too_small_is_told_by_the_name_of_its_field(data: Path, tmp_path: Path) -> None:
    small = config(data, local=str(tmp_path / "cache"), cache_limit="1kb")
    module = StreamingDataModule(train=config(data), val=small)
    module.setup("fit")
    with pytest.raises(ConfigError, match=r"^data\.val\.cache_limit is 1kb; at least \d+b is needed"):
        len(module.val_dataloader())
