"""Validation in every rhythm, and evaluation before, between and after training: none of it moves the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_streaming import StreamingStateCallback
from tests.trainer.everywhere import (
    Reader,
    SaveAtEveryStep,
    check_resume_at_every_step,
    evaluating,
    ordinary,
    streaming,
    trainer_for,
)
from tests.trainer.harness import VAL_SAMPLES, write_data

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
VALIDATION_SET = list(range(2000, 2000 + VAL_SAMPLES))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


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


@pytest.mark.parametrize("name", RHYTHMS)
def test_resumes_at_every_step(name: str, data: Path, tmp_path: Path) -> None:
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


def test_one_trainer_resumes_again_and_again(data: Path, tmp_path: Path) -> None:
    def new() -> Reader:
        return Reader(lambda: {"x": streaming(data), "y": streaming(data, "b")})

    whole, trainer = new(), trainer_for(tmp_path, StreamingStateCallback(), SaveAtEveryStep(tmp_path))
    trainer.fit(whole)
    for saved in (7, 2, 5):
        model = new()
        trainer.fit(model, ckpt_path=tmp_path / f"{saved}.ckpt", weights_only=True)
        assert model.seen == whole.seen


@pytest.mark.parametrize("step", [2, 5])
def test_a_validation_that_was_due_after_the_save_is_left_out(step: int, data: Path, tmp_path: Path) -> None:
    # So it is with ordinary loaders; docs/resume.md says it.
    def fit(*callbacks: Callback, **settings: Any) -> Reader:
        model = Reader(lambda: streaming(data), lambda: evaluating(data))
        trainer = trainer_for(tmp_path, StreamingStateCallback(), *callbacks, val_check_interval=[1.0, 2][step == 2])
        trainer.fit(model, **settings)
        return model

    whole = fit(SaveAtEveryStep(tmp_path))
    resumed = fit(ckpt_path=tmp_path / f"{step}.ckpt", weights_only=True)
    assert whole.validated_after[0] == step
    assert resumed.validated_after == whole.validated_after[1:]
