"""Batches skipped in real runs of a trainer, from Python and from YAML."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_streaming.errors import ConfigError
from lightning_streaming.trainer.cli import main
from tests.trainer.harness import BATCH_SIZE, EPOCHS, Run, SaveThenStop, resume_twice, save_in, with_trainer
from tests.trainer.ranks import RankedRun

STEPS = 8  # an epoch is 29 samples: 8 batches of 4, of which the last has one sample
Seen = list[tuple[int, int]]


@pytest.fixture(scope="module")
def batches(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """What each batch of a run that skips nothing shows."""
    seen = Run(data=data, directory=tmp_path_factory.mktemp("whole")).fit()[0].seen
    epochs = [[sample for sample in seen if sample[0] == epoch] for epoch in range(EPOCHS)]
    return [epoch[at : at + BATCH_SIZE] for epoch in epochs for at in range(0, len(epoch), BATCH_SIZE)]


def without(batches: Sequence[Seen], *numbers: int) -> Seen:
    return [sample for number, batch in enumerate(batches) if number not in numbers for sample in batch]


def skipping(data: Path, directory: Path, skip: list[Any], **more: Any) -> Run:
    return Run(data=data, directory=directory, order={"skip": skip}, **more)


class EpochsSeen(Callback):
    """How long Lightning takes each epoch to be, and where it validates."""

    def __init__(self) -> None:
        self.expected: list[float] = []
        self.validated_after: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.expected.append(trainer.num_training_batches)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated_after.append(trainer.global_step)


def test_epochs_are_as_long_as_what_is_left_of_them(data: Path, batches: list[Seen], tmp_path: Path) -> None:
    epochs = EpochsSeen()
    run = skipping(data, tmp_path, ["2-3", 7, "9-10"], schedule_from_trainer=True)
    model, trainer = run.fit(callbacks=[epochs], val_check_interval=0.5)
    assert model.seen == without(batches, 2, 3, 7, 9, 10)
    assert model.steps_per_epoch == {0: 5, 1: 6, 2: 8}
    assert epochs.expected == [5, 6, 8]
    assert epochs.validated_after == [2, 4, 8, 11, 15, 19]
    assert trainer.global_step == 19
    assert trainer.estimated_stepping_batches == EPOCHS * STEPS


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("batch_size", [3, 7])
def test_another_batch_size_skips_the_same_samples(
    data: Path, batches: list[Seen], tmp_path: Path, batch_size: int
) -> None:
    run = skipping(data, tmp_path, ["4-5", "7-8", "17"])
    path = save_in("on_train_batch_end", 3, 0)(run, None, tmp_path / "saved.ckpt", 0)
    model, trainer = replace(run, batch_size=batch_size).fit(ckpt_path=path)
    assert model.seen == without(batches, 4, 5, 7, 8, 17)
    assert trainer.current_epoch == EPOCHS
    left = [29 - 8 - 1 - 12, 25, 25]
    steps = [-(-samples // batch_size) for samples in left]
    assert list(model.steps_per_epoch.values()) == [3 + steps[0], steps[1], steps[2]]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("limit", [4, 0.5])
def test_limited_epochs_are_counted_as_the_trainer_counts_them(
    data: Path, batches: list[Seen], tmp_path: Path, limit: int | float
) -> None:
    run = with_trainer(skipping(data, tmp_path, ["1-2", "6"], validate=False), limit_train_batches=limit)
    resumed, _ = resume_twice(run, save_in("on_train_batch_end", 3, 3))
    # Batch 6 is the third of the second epoch. Half of what is left of the epochs is 3, 3 and 4 batches.
    numbers = [0, 3, 4, 8, 9, 11, 16, 17, 18, 19] if limit == 0.5 else [0, 3, 4, 5, 8, 9, 11, 12, 16, 17, 18, 19]
    assert resumed.seen == [sample for number in numbers for sample in batches[number]]


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
def test_two_ranks_and_then_one_skip_the_same_samples(data: Path, batches: list[Seen], tmp_path: Path) -> None:
    skip = ["1", "4-5", "8-9"]
    run = skipping(data, tmp_path, skip, batch_size=2)
    path = tmp_path / "saved.ckpt"
    two = RankedRun(run=run, strategy=DDPStrategy, meeting=tmp_path / "ranks", count=2)
    before = two.fit(stop_at=("on_train_batch_end", 2, path))
    assert [rank.batches for rank in before] == [5, 5]
    one = replace(run, batch_size=3)
    (after,) = replace(two, run=one, count=1).fit(path)
    wanted = without(batches, 1, 4, 5, 8, 9)
    first = {sample for rank in before for sample in rank.of_epoch(0)}
    assert first == {sample for _, sample in wanted[:8]}
    assert [after.of_epoch(epoch) for epoch in range(EPOCHS)] == [
        [sample for of, sample in wanted[8:] if of == epoch] for epoch in range(EPOCHS)
    ]
    assert after.steps == {0: 2 + 3, 1: 7, 2: 10}


def test_a_range_given_later_is_counted_from_the_step_reached(
    data: Path, batches: list[Seen], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = skipping(data, tmp_path, ["1"])
    path = save_in("on_train_batch_end", 2, 0)(run, None, tmp_path / "saved.ckpt", 0)
    # After steps on batches 0 and 2, the next is number 3; of 2 samples each from here on.
    later = replace(run, batch_size=2, order={"skip": ["1", "2", "5-6"]})
    model, _ = later.fit(ckpt_path=path)
    rest = [sample for batch in batches[3:] for sample in batch]
    assert model.seen == [*batches[0], *batches[2], *rest[:4], *rest[8:]]
    assert "skip: batches 2 have been read already" in caplog.text
    later.fit(ckpt_path=path, callbacks=[SaveThenStop("on_train_batch_end", 1, tmp_path / "again.ckpt")])
    saved = torch.load(tmp_path / "again.ckpt", weights_only=True)["callbacks"]
    (loader,) = saved["lightning_streaming.StreamingStateCallback"]["loaders"].values()
    assert loader["skipped"] == {"1": [0, 4, 0, 8], "2": [0, 12, 0, 12], "5-6": [0, 16, 0, 20]}


def test_a_first_epoch_that_is_skipped_whole_has_not_been_read(
    data: Path, batches: list[Seen], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = skipping(data, tmp_path, [f"0-{STEPS - 1}"])
    model, _ = run.fit()  # the trainer counts epochs that are read
    read = [sample for _, sample in without(batches, *range(STEPS))]
    assert [sample for _, sample in model.seen][: len(read)] == read
    assert "read already" not in caplog.text
    path = save_in("on_train_batch_end", STEPS + 2, 0)(replace(run, order={}), None, tmp_path / "saved.ckpt", 0)
    run.fit(ckpt_path=path)
    assert "skip: batches 0-7 have been read already" in caplog.text


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_epoch_whose_rest_is_skipped_from_now_on_is_closed(
    accumulate: int, data: Path, batches: list[Seen], tmp_path: Path
) -> None:
    run = with_trainer(Run(data=data, directory=tmp_path), accumulate_grad_batches=accumulate)
    path = save_in("on_train_batch_end", 3, 0)(run, None, tmp_path / "saved.ckpt", 0)
    model, trainer = replace(run, order={"skip": ["3-7"]}).fit(ckpt_path=path)
    assert model.seen == without(batches, 3, 4, 5, 6, 7)
    assert trainer.current_epoch == EPOCHS


def test_validation_by_time(data: Path, batches: list[Seen], tmp_path: Path) -> None:
    model, _ = skipping(data, tmp_path, ["2-3"]).fit(val_check_interval="00:01:00:00")
    assert model.seen == without(batches, 2, 3)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_skips_nothing(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="skip counts batches over a run, but overfit_batches"):
        skipping(data, tmp_path, ["1"]).fit(overfit_batches=2)


def test_only_training_data_skips(data: Path, tmp_path: Path) -> None:
    module = skipping(data, tmp_path, ["1"]).datamodule()
    module.configs["val"] = module.configs["train"]
    module.setup("validate")
    with pytest.raises(ConfigError, match="skip is for training"):
        module.val_dataloader()


YAML = """
model:
  class_path: tests.trainer.harness.Recorder
data:
  init_args:
    batch_size: 4
    train:
      streams:
        a: {{remote: {data}/a}}
        b: {{remote: {data}/b}}
      shuffle_block_size: 16
      skip: ["2-3", 20]
trainer:
  accelerator: cpu
  max_epochs: 3
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {out}
"""


@pytest.fixture
def config(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-streaming"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's dealings, not ours
    path = tmp_path / "run.yaml"
    path.write_text(YAML.format(data=data, out=tmp_path))
    return str(path)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_yaml_says_what_to_skip(config: str, batches: list[Seen], tmp_path: Path) -> None:
    main(["fit", "--config", config])
    (saved,) = (tmp_path / "checkpoints").glob("*.ckpt")
    assert torch.load(saved, weights_only=True)["seen"] == without(batches, 2, 3, 20)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("skip", ['["9-3"]', '["1-4", "4-6"]', "7-8"])
def test_yaml_that_says_it_wrongly_is_refused_by_the_name_of_the_field(
    config: str, skip: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", config, f"--data.init_args.train.skip={skip}"])
    assert ended.value.code == 2
    assert "skip" in capsys.readouterr().err
