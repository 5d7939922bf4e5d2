"""Checkpoints whose streaming state has one thing wrong: ``fit`` refuses them in words, or they mean the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_streaming import StreamingStateCallback
from lightning_streaming.errors import StateError
from lightning_streaming.resume.state import CALLBACK_KEY, SavedRun, read_run
from tests.dataset.mutated import mutations
from tests.helpers import State
from tests.tools.running import run as command
from tests.trainer.harness import Run, SaveThenStop, Stopped
from tests.trainer.test_state_callback import SeesTwo, TwoStreams

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:You're resuming from a checkpoint",  # it means the ordinary loader
)
ORDERS: dict[str, dict[str, Any]] = {
    "one loader": {},
    "composed": {"batching_method": "stratified"},
    "skipped": {"skip": ["4-5", "12"]},
}
KINDS = [*ORDERS, "several loaders"]


def fit(kind: str, data: Path, directory: Path, ckpt_path: Path | None = None, *callbacks: Any) -> list[Any]:
    """Train one kind of run, and give what the weights have seen."""
    if kind in ORDERS:
        run = Run(data=data, directory=directory, order=ORDERS[kind])
        return run.fit(ckpt_path=ckpt_path, callbacks=list(callbacks), max_epochs=2)[0].seen
    model = SeesTwo()
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=directory,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[StreamingStateCallback(), *callbacks],
    )  # fmt: skip
    datamodule = TwoStreams(data, DataLoader(torch.arange(3), batch_size=1))  # type: ignore[arg-type]
    try:
        trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    except Stopped:
        return []
    return model.seen


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """How a run trains, and its checkpoint after 3 batches."""
    directory = tmp_path_factory.mktemp("saved")
    path = directory / "saved.ckpt"
    fit(request.param, data, directory, None, SaveThenStop("on_train_batch_end", 3, path))
    return request.param, path


def state_in(path: Path) -> State:
    state: State = torch.load(path, weights_only=True)["callbacks"][CALLBACK_KEY]
    return state


def write(path: Path, state: Any, target: Path) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"][CALLBACK_KEY] = state
    torch.save(checkpoint, target)
    return target


def read_or_refused(state: Any) -> SavedRun | None:
    try:
        return read_run(state)
    except StateError:
        return None


def test_the_state_of_a_run_with_one_thing_wrong_is_refused_or_another_sound_one(saved: tuple[str, Path]) -> None:
    state = state_in(saved[1])
    read = [(change, read_or_refused(mutated)) for change, mutated in mutations(state)]
    accepted = [(change, run) for change, run in read if run is not None]
    assert len(read) > 7 * len(accepted)
    for change, run in accepted:
        assert run.trainer is not None, change
        assert run.loaders, change
        assert run.trainer.batches <= run.trainer.batches_in_epoch or not run.trainer.batches_in_epoch, change


@pytest.mark.rotate(1)
def test_fit_refuses_what_is_wrong_beside_the_loaders_or_means_the_same(
    saved: tuple[str, Path], data: Path, tmp_path: Path
) -> None:
    kind, path = saved
    state = state_in(path)
    whole = fit(kind, data, tmp_path)
    beside = {key: value for key, value in state.items() if key not in ("loaders", "library_version")}
    loads = 0
    for change, mutated in mutations(beside):
        if not isinstance(mutated, dict) or not mutated:
            continue
        if read_or_refused({**mutated, "loaders": state["loaders"]}) is None:
            continue
        loads += 1
        edited = write(path, {**mutated, "loaders": state["loaders"]}, tmp_path / "edited.ckpt")
        try:
            seen = fit(kind, data, tmp_path, edited)
        except StateError:
            continue
        assert seen == whole, change
    assert 5 < loads < 30


WRONG: dict[str, tuple[Callable[[State], Any], str]] = {
    "no dict": (lambda state: [1], "the checkpoint's streaming state is a dict, but got list"),
    "epoch -1": (lambda state: state["trainer"].update(epoch=-1), "'epoch' of 'trainer' of the checkpoint's streaming"),
    "epoch ahead": (lambda state: state["trainer"].update(epoch=10**6), "had begun 1 epochs"),
    "batches": (lambda state: state["trainer"].update(batches=10**9), "'batches' is 1000000000 of an epoch of 8"),
    "batches of an epoch of any size": (
        lambda state: state["trainer"].update(batches=10**9, batches_in_epoch=0),
        "not saved together",
    ),
    "no epoch": (lambda state: state["trainer"].pop("epoch"), "needs 'epoch'"),
    "a number as text": (lambda state: state["trainer"].update(batches="3"), "'batches' of 'trainer'"),
    "no trainer": (lambda state: state.pop("trainer"), "needs 'trainer'"),
    "before the first batch": (lambda state: state.update(trainer=None), r"'trainer' is None, as .* but there are"),
    "no loaders": (lambda state: state.pop("loaders"), "needs 'loaders'"),
    "loaders in a list": (
        lambda state: state.update(loaders=[]),
        "'loaders' of the checkpoint's streaming state is",
    ),
    "a loader's epoch": (
        lambda state: state["loaders"]["train"].update(epoch=-1),
        "'epoch' of the saved position of",
    ),
    "a loader's nodes": (
        lambda state: state["loaders"]["train"].update(num_canonical_nodes=10**9),
        "'num_canonical_nodes' of the saved position of 'train'",
    ),
    "a global batch": (
        lambda state: state["samples_per_global_batch"].update(train=[]),
        "'train' of 'samples_per_global_batch'",
    ),
    "no version": (lambda state: state.pop("version"), "needs 'version'"),
}


@pytest.fixture(scope="module")
def one_loader(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    fit("one loader", data, directory, None, SaveThenStop("on_train_batch_end", 3, directory / "saved.ckpt"))
    return directory / "saved.ckpt"


@pytest.mark.rotate(8)
@pytest.mark.parametrize("wrong", WRONG)
def test_fit_and_the_tools_name_the_field(wrong: str, one_loader: Path, data: Path, tmp_path: Path) -> None:
    change, words = WRONG[wrong]
    state = state_in(one_loader)
    changed = change(state)
    edited = write(one_loader, changed if isinstance(changed, list) else state, tmp_path / "edited.ckpt")
    with pytest.raises(StateError, match=words):
        fit("one loader", data, tmp_path, edited)
    if "not saved together" in words or "had begun" in words:
        return  # the tools show it as it is
    before = edited.read_bytes()
    for asked in (("show", edited, "--json"), ("set", edited, "--epoch", 0, "--sample", 4)):
        done = command("state", *asked)
        assert done.code == 2
        assert "edited.ckpt: " in done.err
    assert edited.read_bytes() == before


def test_a_checkpoint_of_on_fit_start_of_a_run_that_resumed_is_refused_in_words(
    one_loader: Path, data: Path, tmp_path: Path
) -> None:
    early = tmp_path / "early.ckpt"
    fit("one loader", data, tmp_path, one_loader, SaveThenStop("on_fit_start", 1, early))
    with pytest.raises(StateError, match="saved in on_fit_start of a run that resumed, where Lightning has not"):
        fit("one loader", data, tmp_path, early)


def test_so_is_one_of_a_run_that_resumed_between_two_epochs(data: Path, tmp_path: Path) -> None:
    between, early = tmp_path / "between.ckpt", tmp_path / "early.ckpt"
    fit("one loader", data, tmp_path, None, SaveThenStop("on_train_epoch_start", 2, between))
    fit("one loader", data, tmp_path, between, SaveThenStop("on_fit_start", 1, early))
    with pytest.raises(StateError, match="saved in on_fit_start of a run that resumed"):
        fit("one loader", data, tmp_path, early)
