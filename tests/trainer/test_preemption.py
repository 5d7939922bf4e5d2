"""Real signals to real processes: the run is saved where it stands, ends, and goes on as if nothing had been."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO

from lightning_streaming.errors import ConfigError
from lightning_streaming.trainer.lightning_internals import save_whole
from lightning_streaming.trainer.preemption import PreemptionCheckpoint
from tests.forked_ranks import on_ranks
from tests.reading.processes import wait_until
from tests.trainer.harness import EPOCHS, Run, Trigger, resume_twice, with_trainer
from tests.trainer.preemption_run import main

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*use of fork.*:DeprecationWarning",
    "ignore:It is recommended to use .*sync_dist=True",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    # Said of every first run that looks for a checkpoint by itself.
    "ignore:`.fit.ckpt_path=None.` was called without a model",
    'ignore:.fit.ckpt_path="last". is set, but there is no last checkpoint',
)


class Signals(Callback):
    """Sends this process signals, at the n-th call of a hook in this run."""

    def __init__(self, hook: str, call: int, *signals: signal.Signals) -> None:
        self.calls_left = call
        self.signals = signals
        setattr(self, hook, self._on_hook)

    def _on_hook(self, *_: Any, **__: Any) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            for one in self.signals:
                os.kill(os.getpid(), one)


def signal_in(hook: str, first: int, second: int, *signals: signal.Signals) -> Trigger:
    """Be preempted at the ``first`` call of a hook in the first run, at the ``second`` in the resumed one."""

    def trigger(run: Run, ckpt_path: Path | None, target: Path, attempt: int) -> Path:
        sends = Signals(hook, (first, second)[attempt], *(signals or (signal.SIGTERM,)))
        again = Signals("on_save_checkpoint", 1, signal.SIGTERM, signal.SIGUSR1)
        saver = PreemptionCheckpoint(target.parent / target.stem)
        _, trainer = run.fit(ckpt_path=ckpt_path, callbacks=[saver, sends, again])
        assert trainer.interrupted
        return Path(saver.ckpt_path)

    return trigger


PLACES: dict[str, tuple[Trigger, dict[str, Any]]] = {
    "a step": (signal_in("on_train_batch_start", 4, 3), {}),
    "the last step of an epoch": (signal_in("on_train_batch_start", 8, 8), {}),
    "SIGUSR1 and SIGTERM": (signal_in("on_train_batch_start", 4, 3, signal.SIGUSR1, signal.SIGTERM), {}),
    "before the first step": (signal_in("on_train_start", 1, 1), {}),
    "the sanity check": (signal_in("on_validation_batch_start", 1, 2), {"num_sanity_val_steps": 2}),
    "validation in mid-epoch": (signal_in("on_validation_batch_start", 3, 1), {"val_check_interval": 2}),
    "validation at the epoch's end": (signal_in("on_validation_batch_start", 1, 2), {}),
    "the end of validation": (signal_in("on_validation_epoch_end", 1, 1), {}),
    "the end of an epoch": (signal_in("on_train_epoch_end", 1, 1), {}),
    "the start of an epoch": (signal_in("on_train_epoch_start", 2, 1), {}),
    "a half-done accumulation": (signal_in("on_train_batch_start", 6, 5), {"accumulate_grad_batches": 4}),
    "max_steps": (signal_in("on_train_batch_start", 9, 4), {"max_steps": 24}),
}


class Validations(Callback):
    """Counts whole validations by the step they come after."""

    def __init__(self) -> None:
        self.after: list[int] = []
        self.batches = 0

    def on_validation_start(self, *_: Any) -> None:
        self.batches = 0

    def on_validation_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert trainer.sanity_checking or self.batches == trainer.num_val_batches[0]
        if not trainer.sanity_checking:
            self.after.append(trainer.global_step)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", PLACES)
def test_a_run_preempted_twice_shows_the_weights_the_same(name: str, data: Path, tmp_path: Path) -> None:
    trigger, settings = PLACES[name]
    run = with_trainer(Run(data=data, directory=tmp_path), **settings)
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    whole, whole_trainer = run.fit()
    resumed, trainer = resume_twice(run, trigger)
    assert resumed.seen == whole.seen
    assert resumed.steps_per_epoch == whole.steps_per_epoch
    assert (trainer.global_step, trainer.current_epoch) == (whole_trainer.global_step, whole_trainer.current_epoch)
    assert {one: signal.getsignal(one) for one in handlers} == handlers


@pytest.mark.parametrize("interval", [2, 8])
def test_a_validation_that_was_cut_short_is_done_again(interval: int, data: Path, tmp_path: Path) -> None:
    run = with_trainer(Run(data=data, directory=tmp_path), val_check_interval=interval)
    whole, first, second = Validations(), Validations(), Validations()
    run.fit(callbacks=[whole])
    saver = PreemptionCheckpoint(tmp_path)
    # A validation has two batches.
    model, _ = run.fit(callbacks=[saver, first, Signals("on_validation_batch_start", 3, signal.SIGTERM)])
    resumed, _ = run.fit(callbacks=[second], ckpt_path=Path(saver.ckpt_path))
    assert (len(first.after), model.seen_here + resumed.seen_here) == (1, resumed.seen)
    assert first.after + second.after == whole.after


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_last_is_the_newest_of_all_checkpoints(data: Path, tmp_path: Path) -> None:
    run = Run(data=data, directory=tmp_path)

    def callbacks() -> list[Callback]:
        return [
            PreemptionCheckpoint(tmp_path),
            ModelCheckpoint(tmp_path, every_n_train_steps=3, save_last=True),
        ]

    run.fit(callbacks=[*callbacks(), Signals("on_train_batch_start", 3, signal.SIGUSR1)])
    assert (tmp_path / "last.ckpt").exists()  # of the same step: others come first
    model, trainer = run.fit(callbacks=callbacks())  # looks for it unasked
    assert trainer.ckpt_path == str(tmp_path / "preempted.ckpt")
    assert len(model.seen_here) == len(model.seen) - 12
    _, trainer = run.fit(callbacks=callbacks())
    assert trainer.ckpt_path == str(tmp_path / "last.ckpt")


class InAFolder(CheckpointIO):
    """Writes checkpoints as sharded strategies do, and can fail half way."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).mkdir()
        (Path(path) / "half").touch()
        if self.fails:
            raise OSError("no space left on device")
        torch.save(checkpoint, Path(path) / "meta.pt")

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(Path(path) / "meta.pt", weights_only=True)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        raise AssertionError("nobody asked for it")


def test_a_save_that_fails_leaves_the_checkpoint_before_it(data: Path, tmp_path: Path) -> None:
    run = Run(data=data, directory=tmp_path)

    def preempt(batch: int, saver: CheckpointIO) -> None:
        callbacks = [PreemptionCheckpoint(tmp_path), Signals("on_train_batch_start", batch, signal.SIGTERM)]
        run.fit(callbacks=callbacks, plugins=[saver])

    path = tmp_path / "preempted.ckpt"
    preempt(2, InAFolder())
    preempt(4, InAFolder())  # goes on by itself
    assert InAFolder().load_checkpoint(path)["global_step"] == 6
    with pytest.raises(OSError, match="no space left"):
        preempt(1, InAFolder(fails=True))
    assert InAFolder().load_checkpoint(path)["global_step"] == 6
    preempt(2, InAFolder())
    assert InAFolder().load_checkpoint(path)["global_step"] == 8
    assert [one.name for one in tmp_path.iterdir()] == ["preempted.ckpt"]


def test_a_file_takes_the_place_of_a_checkpoint_in_a_directory(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "preempted.ckpt"
    path.mkdir()
    (path / "shard").touch()
    _, trainer = Run(data=data, directory=tmp_path).fit(max_epochs=1)
    save_whole(trainer, str(path))
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert torch.load(path, weights_only=True)["epoch"] == 1


def test_an_asynchronous_save_is_waited_for(data: Path, tmp_path: Path) -> None:
    run = Run(data=data, directory=tmp_path)
    sends = Signals("on_train_batch_start", 2, signal.SIGTERM)
    run.fit(callbacks=[PreemptionCheckpoint(tmp_path), sends], plugins=[AsyncCheckpointIO()])
    assert torch.load(tmp_path / "preempted.ckpt", weights_only=True)["global_step"] == 2


def test_a_signal_after_the_last_step_goes_to_who_handled_it_before(data: Path, tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _frame: received.append(signum))
    try:
        run = with_trainer(Run(data=data, directory=tmp_path), max_epochs=1)
        saver = PreemptionCheckpoint(tmp_path)
        run.fit(callbacks=[saver, Signals("on_train_end", 1, signal.SIGUSR1)])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]
    assert not Path(saver.ckpt_path).exists()


@pytest.mark.parametrize(("sent", "asked"), [(signal.SIGUSR1, "requeue 77_3\n"), (signal.SIGTERM, None)])
def test_slurm_is_asked_to_requeue_after_the_save(
    sent: signal.Signals, asked: str | None, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\ntest -f {tmp_path}/preempted.ckpt && echo "$@" > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(scontrol.parent), prepend=os.pathsep)
    for name, value in {"JOB_ID": "79", "ARRAY_JOB_ID": "77", "ARRAY_TASK_ID": "3", "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("NTASKS", "PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", str(int(name == "NTASKS")))
    callbacks = [PreemptionCheckpoint(tmp_path), Signals("on_train_batch_start", 2, sent)]
    run = Run(data=data, directory=tmp_path)
    model, _ = run.fit(callbacks=callbacks, plugins=[SLURMEnvironment()])
    assert len(model.seen) == 8
    assert not list(tmp_path.glob("hpc_ckpt*"))
    told = tmp_path / "asked"
    assert (told.read_text() if told.exists() else None) == asked


@pytest.mark.parametrize(
    "settings",
    [
        {"signals": ()},
        {"signals": (signal.SIGTERM, signal.SIGSEGV)},
        {"signals": "SIGTERM"},
        {"signals": ["SIGTERM"]},
        {"signals": signal.SIGTERM},
        {"signals": [10**6]},
        {"every_n_steps": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PreemptionCheckpoint("somewhere", **settings)


def _train_two_ranks(send: Callable[[list[int]], None], **settings: Any) -> tuple[list[dict[str, Any]], int]:
    """Run :mod:`tests.trainer.preemption_run`, signal its ranks when all wait in a step; reports and exit status."""
    report = Path(settings["report"])
    command = [sys.executable, "-m", "tests.trainer.preemption_run", json.dumps({**settings, "devices": 2})]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], start_new_session=True, stdout=pipe, stderr=pipe
    ) as process:
        _when_they_wait(send, report, 2, lambda: process.poll() is None)
        _, said = process.communicate(timeout=60)
    assert b"Traceback" not in said, said.decode()
    return [json.loads((report / f"rank{rank}.json").read_text()) for rank in range(2)], process.returncode


def _train_one_process(send: Callable[[list[int]], None], **settings: Any) -> tuple[dict[str, Any], int | None]:
    """The same of one process, which leads a group of its own."""
    report = Path(settings["report"])
    process = multiprocessing.get_context("fork").Process(target=_lead_a_group, args=({**settings, "devices": 1},))
    process.start()
    _when_they_wait(send, report, 1, process.is_alive)
    process.join(60)
    return json.loads((report / "rank0.json").read_text()), process.exitcode


def _lead_a_group(settings: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    main(settings)


def _when_they_wait(send: Callable[[list[int]], None], report: Path, ranks: int, is_alive: Callable[[], bool]) -> None:
    report.mkdir(exist_ok=True)
    pids = [report / f"pid{rank}" for rank in range(ranks)]
    assert wait_until(lambda: all(map(Path.exists, pids)) or not is_alive(), seconds=60)
    send([int(pid.read_text()) for pid in pids])
    (report / "go").touch()


def _to_the_group(pids: list[int]) -> None:
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        os.killpg(pids[0], signum)


def _fit_until_the_last_rank_is_told(run: Run, checkpoints: Path, call: int) -> dict[str, Any]:
    is_last = os.environ["RANK"] == "1"
    told = [Signals("on_train_batch_start", call, signal.SIGUSR1)] if is_last else []
    callbacks = [PreemptionCheckpoint(checkpoints), *told]
    model, trainer = run.fit(ckpt_path="last", callbacks=callbacks, devices=2, strategy="ddp")
    return {"seen": model.seen_here, "step": trainer.global_step}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_two_ranks_and_their_workers_stop_together_whoever_is_told(data: Path, tmp_path: Path) -> None:
    whole, _ = Run(data=data, directory=tmp_path, batch_size=1).fit()
    first, status = _train_two_ranks(
        _to_the_group, report=str(tmp_path / "1"), pause_at=3, workers=1, ckpt_path=None, data=str(data),
        checkpoints=str(tmp_path),
    )  # fmt: skip
    assert status == 128 + signal.SIGUSR1
    run = Run(data=data, directory=tmp_path, batch_size=2)
    second = on_ranks(_fit_until_the_last_rank_is_told, run, tmp_path, 7, meeting=tmp_path / "ranks")
    assert [rank["step"] for rank in first + second] == [3, 3, 10, 10]
    model, trainer = Run(data=data, directory=tmp_path, batch_size=4).fit(ckpt_path=tmp_path / "preempted.ckpt")
    reports = [*first, *second, {"seen": model.seen_here}]
    assert trainer.current_epoch == EPOCHS
    for epoch in range(EPOCHS):
        seen = Counter(sample for rank in reports for of_epoch, sample in rank["seen"] if of_epoch == epoch)
        expected = Counter(sample for of_epoch, sample in whole.seen if of_epoch == epoch)
        # On two ranks one sample of 29 is read twice, so that both have 15.
        assert (seen - expected).total() == (1 if epoch == 0 else 0)
        assert not expected - seen


def test_one_process_and_its_workers_stop_when_their_group_is_told(data: Path, tmp_path: Path) -> None:
    report, status = _train_one_process(
        _to_the_group, data=str(data), checkpoints=str(tmp_path), report=str(tmp_path / "run"), pause_at=4,
        workers=2, ckpt_path=None,
    )  # fmt: skip
    model, _ = Run(data=data, directory=tmp_path, batch_size=2).fit(ckpt_path=tmp_path / "preempted.ckpt")
    whole, _ = Run(data=data, directory=tmp_path, batch_size=2).fit()
    assert (status, report["step"]) == (128 + signal.SIGUSR1, 4)
    assert report["seen"] + [list(one) for one in model.seen_here] == [list(one) for one in whole.seen]
