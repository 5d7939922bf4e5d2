"""Arrangements of train loaders, rhythms of validation, other batch sizes: each resumed at every step of a real run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset, StreamingStateCallback
from lightning_streaming.errors import ConfigError
from tests.tiers import some
from tests.trainer.harness import (
    BATCH_SIZE,
    VAL_SAMPLES,
    Endless,
    Reader,
    Recorder,
    Run,
    SaveAtEveryStep,
    check_resume_at_every_step,
    counters,
    evaluating,
    ordinary,
    streaming,
    trainer_for,
    with_trainer,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`",
    "ignore:You're resuming from a checkpoint",  # of ordinary loaders, which cannot
    "ignore:You requested to overfit",
)


# "a" has 5 batches and "b" 3.
ARRANGEMENTS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "one": (streaming, {}),
    "a dict": (lambda data: {"x": streaming(data, "a"), "y": streaming(data, "b")}, {}),
    "a list, an ordinary one first": (lambda data: [ordinary(2), streaming(data, "a"), streaming(data, "b")], {}),
    "nested": (lambda data: {"x": [streaming(data, "b"), {"z": streaming(data, "a")}], "y": ordinary(3)}, {}),
    "accumulating": (lambda data: (streaming(data, "a"), streaming(data, "b")), {"accumulate_grad_batches": 2}),
    "a share of the batches": (
        lambda data: [streaming(data, "a"), streaming(data, "b")],
        {"limit_train_batches": 0.7},
    ),
    "made anew every second epoch": (
        lambda data: [streaming(data, "b"), ordinary(2)],
        {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4},
    ),
    "overfitting": (lambda data: [streaming(data, "a"), streaming(data, "b")], {"overfit_batches": 4}),
    "overfitting to a share": (streaming, {"overfit_batches": 0.7}),
}
MODES = ("max_size_cycle", "max_size", "min_size")
BESIDE: dict[str, tuple[int | None, dict[str, Any]]] = {
    "short": (2, {}),
    "long": (7, {}),
    "endless": (None, {"limit_train_batches": 7}),
}


@pytest.mark.rotate(3)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_each_arrangement_resumes_at_every_step(name: str, data: Path, tmp_path: Path) -> None:
    arrangement, settings = ARRANGEMENTS[name]
    check_resume_at_every_step(lambda: Reader(lambda: arrangement(data)), tmp_path, **settings)


@pytest.mark.rotate(3)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("mode", MODES)
def test_resumes_at_every_step_combined(mode: Any, beside: str, data: Path, tmp_path: Path) -> None:
    batches, settings = BESIDE[beside]

    def combined() -> CombinedLoader:
        loaders = {"x": streaming(data, "a"), "y": streaming(data, "b"), "o": ordinary(batches)}
        return CombinedLoader(loaders, mode)

    whole = check_resume_at_every_step(lambda: Reader(combined), tmp_path, **settings)
    shortest = min(3, batches or 7)
    assert whole.steps_per_epoch[0] == {"min_size": shortest}.get(mode, max(5, batches or 7))


def test_what_lightning_fetches_ahead_beside_a_loader_of_no_length_is_read_once(data: Path, tmp_path: Path) -> None:
    def new() -> Reader:
        return Reader(lambda: {"x": streaming(data), "o": DataLoader(Endless(7))})

    whole, saver = new(), SaveAtEveryStep(tmp_path)
    trainer_for(tmp_path, StreamingStateCallback(), saver, max_epochs=1).fit(whole)
    loader = streaming(data)
    expected = [batch["id"].tolist() for _ in range(2) for batch in loader]
    assert [step[2][1] for step in whole.seen] == expected[:7]
    for path in some(saver.saved[:6], 3):  # the ordinary loader begins anew, and the epoch with it is longer
        resumed = new()
        trainer_for(tmp_path, StreamingStateCallback(), max_epochs=1).fit(resumed, ckpt_path=path, weights_only=True)
        assert resumed.seen[:7] == whole.seen


def fit(loaders: Callable[[], Any], directory: Path, validation: Callable[[], Any] | None = None) -> None:
    trainer_for(directory, StreamingStateCallback()).fit(Reader(loaders, validation))


def test_a_combined_loader_within_another_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'y' is a CombinedLoader within other train loaders.*pass one"):
        fit(lambda: {"x": streaming(data, "a"), "y": CombinedLoader([streaming(data, "b")], "min_size")}, tmp_path)


def test_one_loader_after_the_other_is_refused_by_lightning(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'does not support the `CombinedLoader\(mode="sequential"\)` mode'):
        fit(lambda: CombinedLoader([streaming(data, "a"), streaming(data, "b")], "sequential"), tmp_path)


def test_one_dataset_in_two_train_loaders_is_refused(data: Path, tmp_path: Path) -> None:
    one = streaming(data, "a")
    other = StreamingDataLoader(one.dataset, batch_size=4)
    with pytest.raises(ConfigError, match="train loader 'x' and the train loader 'y' read one dataset"):
        fit(lambda: {"x": one, "y": other}, tmp_path)


def test_one_dataset_for_training_and_validation_is_refused(data: Path, tmp_path: Path) -> None:
    one = streaming(data, "a")
    with pytest.raises(ConfigError, match="train loader 'train' and the validation loader '1' read one dataset"):
        fit(lambda: one, tmp_path, lambda: [evaluating(data), one])


CHANGING: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "data": lambda data, epoch: {"remote": str(data / "ab"[epoch % 2])},
    "shuffle": lambda data, epoch: {"remote": str(data / "a"), "shuffle": epoch > 0},
    "seed": lambda data, epoch: {"remote": str(data / "a"), "shuffle": True, "shuffle_seed": epoch},
    "canonical nodes": lambda data, epoch: {"remote": str(data / "a"), "num_canonical_nodes": 4 - epoch},
    "weights": lambda data, epoch: {
        "streams": {"a": Stream(remote=str(data / "a")), "b": Stream(remote=str(data / "b"), repeat=epoch / 2)}
    },
}


@pytest.mark.rotate(2)
@pytest.mark.parametrize("changing", CHANGING)
def test_epochs_of_other_data_or_another_order_are_read_as_they_are_asked_for(
    changing: str, data: Path, tmp_path: Path
) -> None:
    made: list[int] = []

    def of_epoch(epoch: int) -> StreamingDataLoader:
        return StreamingDataLoader(StreamingDataset(**CHANGING[changing](data, epoch)), batch_size=4)

    def next_loader() -> StreamingDataLoader:
        made.append(model.trainer.current_epoch)
        return of_epoch(made[-1])

    def read(epoch: int) -> list[Any]:
        loader = of_epoch(epoch)
        loader.dataset.next_epoch = epoch
        return [[epoch, number, ["id", batch["id"].tolist()]] for number, batch in enumerate(loader)]

    first, *others = (read(epoch) for epoch in range(3))
    whole = [*first, *others[0], *others[1]]
    settings: dict[str, Any] = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    steps = SaveAtEveryStep(tmp_path)
    model = Reader(next_loader)
    trainer_for(tmp_path, StreamingStateCallback(), steps, **settings).fit(model)
    assert made == [0, 1, 2]
    assert model.seen == whole
    model = Reader(next_loader)
    amid_the_second = steps.saved[len(first)]
    trainer = trainer_for(tmp_path, StreamingStateCallback(), **settings)
    trainer.fit(model, ckpt_path=amid_the_second, weights_only=False)
    assert model.seen == whole


VALIDATION_SET = list(range(2000, 2000 + VAL_SAMPLES))


# An epoch has 5 batches; the numbers are optimizer steps after which validation runs.
RHYTHMS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "every 2 batches": ({"val_check_interval": 2}, [2, 4, 7, 9]),
    "every share of an epoch": ({"val_check_interval": 0.4}, [2, 4, 7, 9]),
    "every epoch": ({"val_check_interval": 1.0}, [5, 10]),
    "every 3 batches over epochs": ({"val_check_interval": 3, "check_val_every_n_epoch": None}, [3, 6, 9]),
    "every 7 batches over epochs": ({"val_check_interval": 7, "check_val_every_n_epoch": None}, [7]),
    "every hour": ({"val_check_interval": "00:01:00:00"}, []),
    "every second epoch": ({"check_val_every_n_epoch": 2}, [10]),
    "limits": ({"limit_train_batches": 3, "val_check_interval": 2, "limit_val_batches": 1}, [2, 5]),
    "limits as shares": ({"limit_train_batches": 0.7, "limit_val_batches": 0.5}, [3, 6]),
    "while accumulating": ({"val_check_interval": 2, "accumulate_grad_batches": 3}, [0, 1, 2, 3]),
}


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", RHYTHMS)
def test_each_rhythm_of_validation_resumes_at_every_step(name: str, data: Path, tmp_path: Path) -> None:
    settings, validated_after = RHYTHMS[name]
    whole = check_resume_at_every_step(
        lambda: Reader(lambda: streaming(data), lambda: [evaluating(data), ordinary(2)]), tmp_path, **settings
    )
    assert whole.validated_after == validated_after


def test_several_validation_loaders_are_read_whole_after_a_sanity_check(data: Path, tmp_path: Path) -> None:
    model = Reader(
        lambda: streaming(data), lambda: {"x": evaluating(data), "o": ordinary(2), "y": evaluating(data, "b")}
    )
    trainer_for(tmp_path, StreamingStateCallback(), max_epochs=1, num_sanity_val_steps=1).fit(model)
    sanity_check, validation = model.evaluated[:9], model.evaluated[9:]
    assert sanity_check == [*VALIDATION_SET[:4], 90_000, *range(1000, 1004)]
    assert validation == [*VALIDATION_SET, 90_000, 90_001, *range(1000, 1012)]


def test_evaluation_around_training_leaves_the_order_alone(data: Path, tmp_path: Path) -> None:
    def new() -> Reader:
        return Reader(lambda: streaming(data), lambda: evaluating(data))

    whole, model, trainer = new(), new(), trainer_for(tmp_path, StreamingStateCallback(), max_epochs=1)
    trainer_for(tmp_path, StreamingStateCallback()).fit(whole)
    trainer.validate(model, verbose=False)
    trainer.fit(model)
    trainer.test(model, verbose=False)
    predicted = trainer.predict(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    assert model.seen == whole.seen
    assert predicted is not None
    assert torch.cat([torch.as_tensor(batch) for batch in predicted]).tolist() == VALIDATION_SET
    # validate, sanity check and fit, test, sanity check and fit, validate
    assert model.evaluated == 7 * VALIDATION_SET


def test_evaluating_a_checkpoint_does_not_begin_training_at_its_place(data: Path, tmp_path: Path) -> None:
    def new() -> Reader:
        return Reader(lambda: streaming(data), lambda: evaluating(data))

    whole, model, trainer = new(), new(), trainer_for(tmp_path, StreamingStateCallback())
    trainer_for(tmp_path, StreamingStateCallback(), SaveAtEveryStep(tmp_path)).fit(whole)
    for evaluate in (trainer.validate, trainer.test):
        evaluate(model, ckpt_path=tmp_path / "3.ckpt", weights_only=True, verbose=False)
    trainer.predict(model, ckpt_path=tmp_path / "3.ckpt", weights_only=True)
    model.seen = []
    trainer.fit(model)
    assert model.seen == whole.seen


def test_evaluating_a_checkpoint_without_a_place_says_nothing(data: Path, tmp_path: Path) -> None:
    trainer_for(tmp_path, SaveAtEveryStep(tmp_path)).fit(Reader(lambda: ordinary(2)))
    model, trainer = (
        Reader(lambda: ordinary(2), lambda: evaluating(data)),
        trainer_for(tmp_path, StreamingStateCallback()),
    )
    trainer.validate(model, ckpt_path=tmp_path / "1.ckpt", weights_only=True, verbose=False)
    assert model.evaluated == VALIDATION_SET


def test_overfitting_reads_the_same_samples_in_every_epoch(data: Path, tmp_path: Path) -> None:
    def of_epochs(**settings: Any) -> list[list[int]]:
        seen = Run(data=data, directory=tmp_path, validate=False).fit(max_epochs=3, **settings)[0].seen
        return [[sample for at, sample in seen if at == epoch] for epoch in range(3)]

    first, *others = of_epochs(overfit_batches=3)
    assert len(first) == 3 * BATCH_SIZE
    assert others == [first, first]
    assert of_epochs(limit_train_batches=3)[1] != first


def test_one_trainer_resumes_again_and_again(data: Path, tmp_path: Path) -> None:
    def new() -> Reader:
        return Reader(lambda: {"x": streaming(data), "y": streaming(data, "b")})

    whole, trainer = new(), trainer_for(tmp_path, StreamingStateCallback(), SaveAtEveryStep(tmp_path))
    trainer.fit(whole)
    for saved in (7, 2, 5):
        model = new()
        trainer.fit(model, ckpt_path=tmp_path / f"{saved}.ckpt", weights_only=True)
        assert model.seen == whole.seen


def of_epoch(model: Recorder, epoch: int) -> list[int]:
    return [sample for seen_in, sample in model.seen if seen_in == epoch]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("batch_size", [3, 8])
@pytest.mark.parametrize("method", ["random", "stratified", "per_stream", "device_per_stream"])
def test_another_batch_size_at_every_step(method: str, batch_size: int, data: Path, tmp_path: Path) -> None:
    run = Run(data=data, directory=tmp_path, validate=False, order={"batching_method": method})
    run = with_trainer(run, max_epochs=2)
    saver, other = SaveAtEveryStep(tmp_path), replace(run, batch_size=batch_size)
    whole, _ = run.fit(callbacks=[saver])
    whole_of_other, trainer_of_other = other.fit()
    steps = whole.steps_per_epoch[0]
    samples = len(of_epoch(whole, 0))
    for step, path in some(list(enumerate(saver.saved[:steps], start=1)), 4):
        resumed, trainer = other.fit(ckpt_path=path)
        assert of_epoch(resumed, 0) == of_epoch(whole, 0), path.name
        assert of_epoch(resumed, 1) == of_epoch(whole_of_other, 1), path.name
        left = max(0, samples - step * BATCH_SIZE)
        steps_of_other = whole_of_other.steps_per_epoch[1]
        assert resumed.steps_per_epoch == {0: step + ceil(left / batch_size), 1: steps_of_other}, path.name
        assert trainer.current_epoch == 2
        assert trainer.num_training_batches == trainer_of_other.num_training_batches


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # 12 of 29 samples are read in 3 steps: 17 are left, in 6 batches of 3.
        ({"accumulate_grad_batches": 2}, {0: 3 + 3, 1: 5}),
        # A number of batches is one of any batches.
        ({"limit_train_batches": 5}, {0: 3 + 2, 1: 5}),
        # 7 batches of 3 are 21 samples.
        ({"limit_train_batches": 0.7}, {0: 3 + 3, 1: 7}),
    ],
    ids=["accumulating", "limited", "limited to a share"],
)
def test_another_batch_size_within_limits(
    settings: dict[str, Any], steps: dict[int, int], data: Path, tmp_path: Path
) -> None:
    run = Run(data=data, directory=tmp_path, validate=False)
    saver = SaveAtEveryStep(tmp_path)
    run.fit(callbacks=[saver], max_epochs=1)
    resumed, _ = replace(run, batch_size=3).fit(ckpt_path=saver.saved[2], max_epochs=2, **settings)
    assert resumed.steps_per_epoch == steps


@pytest.mark.filterwarnings("ignore:When using .*accumulate_grad_batches")
def test_loggers_count_steps_once_with_scheduled_accumulation_and_another_batch_size(
    data: Path, tmp_path: Path
) -> None:
    run, saver = Run(data=data, directory=tmp_path, validate=False), SaveAtEveryStep(tmp_path)
    scheduler = GradientAccumulationScheduler({0: 2})
    run.fit(callbacks=[saver, scheduler], max_epochs=1)
    # After 3 batches of 4, of which the weights have seen 2: these are 1 batch of 8, in the middle of a step.
    _, trainer = replace(run, batch_size=8).fit(ckpt_path=saver.saved[2], callbacks=[scheduler], max_epochs=1)
    assert counters(trainer)["loggers' step"] == trainer.global_step


@pytest.mark.rotate(2)
@pytest.mark.parametrize("step", [1, 2, 4])
def test_another_batch_size_of_several_loaders(step: int, data: Path, tmp_path: Path) -> None:
    def fit(batch_size: int, *callbacks: Any, **settings: Any) -> Reader:
        model = Reader(lambda: {"x": streaming(data, "a", batch_size), "y": streaming(data, "b", batch_size)})
        trainer_for(tmp_path, StreamingStateCallback(), *callbacks, max_epochs=1).fit(model, **settings)
        return model

    whole = fit(4, SaveAtEveryStep(tmp_path))
    resumed = fit(3, ckpt_path=tmp_path / f"{step}.ckpt", weights_only=True)
    assert _ids(resumed, "x") == _ids(whole, "x")
    # The short loader is cycled, so it is read for as many steps as the long one: other batches, the same order.
    longer = fit(1)
    passes = len(_ids(whole, "y")), len(_ids(resumed, "y"))
    assert _ids(resumed, "y")[:12] == _ids(longer, "y")[:12]
    assert min(passes) > 12


def _ids(model: Reader, name: str) -> list[int]:
    return [one for _, _, *loaders in model.seen for loader, ids in loaders if loader == name for one in ids]


def test_what_changed_is_said(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, saver = Run(data=data, directory=tmp_path, validate=False), SaveAtEveryStep(tmp_path)
    run.fit(callbacks=[saver], max_epochs=1)
    with caplog.at_level(logging.INFO):
        replace(run, batch_size=5).fit(ckpt_path=saver.saved[2], max_epochs=1)
    assert "Resumed 'train' at epoch 0, sample 12 (step 3, " in caplog.text
    assert (
        "The global batch of 'train' was 4 samples and is 5 now: 4 batches are left of epoch 0, "
        "and a whole epoch has 6." in caplog.text
    )
    caplog.clear()
    run.fit(ckpt_path=saver.saved[2], max_epochs=1)
    assert "The global batch" not in caplog.text
