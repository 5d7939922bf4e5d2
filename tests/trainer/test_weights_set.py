"""Weights that a callback sets are read by killed and resumed runs as by whole ones, with and without the callback."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_streaming import StreamingDataLoader, StreamingStateCallback
from lightning_streaming.errors import ConfigError
from tests.forked_ranks import on_ranks
from tests.helpers import make_loader
from tests.phased_data import SIZES, counted_by_stream, write_streams
from tests.resume.test_token_mixtures import loader, read
from tests.resume.test_token_mixtures import root as documents  # noqa: F401  a fixture
from tests.resume.test_weights_set import row
from tests.resume.test_weights_set import run as read_setting
from tests.tiers import some
from tests.tools.running import run
from tests.trainer.harness import Diary, Recorder, Stopped, ordinary, trainer_for
from tests.trainer.phased_run import PhasedRun, flat

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
CALLS = {7: {"web": 1.0, "math": 2.0}, 18: {"code": 1.0}}


def train_of(root: Path, **more: Any) -> dict[str, Any]:
    """The data of a run, with mixture steps of 40 samples."""
    streams = {name: {"remote": str(root / name), "proportion": 1} for name in SIZES}
    return {"streams": streams, "mixing": {"longest_step": 40}, "epoch_size": 240, "num_canonical_nodes": 4, **more}


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_killed_run_resumes_with_the_weights_that_were_set(tmp_path: Path, devices: int) -> None:
    train = train_of(write_streams(tmp_path))
    whole = PhasedRun(directory=str(tmp_path / "whole"), train=train, batch_size=8, workers=2, weights=CALLS)
    whole.run_to_end()
    expected = flat(whole.read_by())
    assert counted_by_stream([sample for *_, sample in expected[80:160]]).keys() == {"web", "math"}
    assert counted_by_stream([sample for *_, sample in expected[160:]]).keys() == {"code"}
    first = PhasedRun(
        directory=str(tmp_path / "first"),
        train=train,
        batch_size=8 // devices,
        devices=devices,
        workers=1,
        weights=CALLS,
        pause_after=22,
    )
    first.run_and_kill()
    saved = first.newest_checkpoint()
    shown = run("state", "show", saved)
    assert "weights set" in shown.out
    assert "math 2.0, web 1.0" in shown.out
    # Without the callback, on other ranks, with another batch size.
    second = PhasedRun(
        directory=str(tmp_path / "second"), train=train, batch_size=5, devices=3 - devices, ckpt_path=str(saved)
    )
    second.run_to_end()
    assert flat(first.read_up_to(saved)) + flat(second.read_by()) == expected


def _set_other_weights(root: Path, rank_of: Any = None) -> None:
    loader = make_loader(**train_of(root))
    weights = {"web": 1.0, "code": 1.0 + dist.get_rank()}
    with pytest.raises(ConfigError) as caught:
        loader.set_weights(weights)
    assert caught.value.option == "weights"
    loader.set_weights({"web": 1.0})


def test_ranks_that_set_other_weights_are_an_error(tmp_path: Path) -> None:
    on_ranks(_set_other_weights, write_streams(tmp_path), meeting=tmp_path / "ranks", count=2)


def test_a_run_may_read_exactly_what_its_limits_allow(tmp_path: Path) -> None:
    root = write_streams(tmp_path)
    mixing = {"size_exponent": 1, "max_repeats": dict.fromkeys(SIZES, 1)}
    train = {"streams": {name: {"remote": str(root / name)} for name in SIZES}, "mixing": mixing}
    whole = PhasedRun(directory=str(tmp_path / "whole"), train={**train, "num_canonical_nodes": 1}, batch_size=8)
    whole.run_to_end()
    read = [sample for *_, sample in flat(whole.read_by())]
    assert len(set(read)) == len(read) == sum(SIZES.values())


class Setting(Recorder):
    """Sets weights after a step of the optimizer, and notes what each batch is of."""

    def __init__(self, reader: StreamingDataLoader, weights: dict[int, dict[str, float]]) -> None:
        super().__init__()
        self.train_dataloader = lambda: reader  # type: ignore[method-assign]
        self.val_dataloader = lambda: ordinary(2)  # type: ignore[method-assign]
        self.weights, self.stops_after = weights, -1

    def configure_optimizers(self) -> Any:
        self.diary.estimates.add(int(self.trainer.estimated_stepping_batches))
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.pending += [(self.trainer.current_epoch, sample) for sample in row(batch)]
        return self.layer.weight.square().sum()

    def on_train_batch_end(self, *_: Any) -> None:
        step = self.trainer.global_step
        if (weights := self.weights.get(step)) is not None:
            reader: Any = self.trainer.train_dataloader
            reader.set_weights(weights)
        if step == self.stops_after:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "stopped.ckpt")
            raise Stopped


@pytest.mark.rotate
@pytest.mark.parametrize("of", ["packs", "tokens"])
@pytest.mark.parametrize("stream", ["books", "web"])
@pytest.mark.filterwarnings("ignore:Total length of", "ignore:You're resuming from", "ignore:Detected call of")
def test_an_epoch_that_weights_make_longer_or_shorter_is_read_whole(
    documents: Path,  # noqa: F811
    tmp_path: Path,
    of: str,
    stream: str,
) -> None:
    how: dict[str, Any] = {"packed": True, "epoch_size": 160, "mixing": {"longest_step": 40}}
    if of == "tokens":
        mixing = {"weights_in": "tokens", "lengths": "size", "longest_step": 1500}
        how = {"packed": False, "epoch_size": 12_000, "mixing": mixing}
    weights = {stream: 1.0}

    def reader() -> StreamingDataLoader:
        return loader(documents, **how)

    plain = reader()
    planned = len(plain)
    expected, state = read_setting(plain, {40: weights})
    batches = -(-len(expected) // 4)
    assert (batches < planned) is ((stream == "web") is (of == "packs"))  # books are long documents
    of_second = read(plain)
    assert state["epoch"] == 1
    ids = [(0, sample) for sample in expected] + [(1, sample) for sample in of_second]
    steps = {0: batches, 1: -(-len(of_second) // 4)}

    def fitted(model: Setting, **more: Any) -> Setting:
        model.diary = diary
        trainer = trainer_for(tmp_path, StreamingStateCallback(), max_epochs=2, num_sanity_val_steps=0)
        trainer.fit(model, **more)
        assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs][1] == 2
        return model

    diary = Diary()
    model = fitted(Setting(reader(), {10: weights}))
    assert model.seen == ids
    assert model.steps_per_epoch == steps
    whole, diary = diary, Diary()
    assert whole.validations == {(0, batches), (1, sum(steps.values()))}
    assert {key[:2] for key in whole.batches if key[2]} == {(0, steps[0] - 1), (1, steps[1] - 1)}
    for stop in some([10, 11, batches - 1, batches, batches + 1], 2):
        diary = Diary()
        first = Setting(reader(), {10: weights})
        first.stops_after = stop
        with pytest.raises(Stopped):
            fitted(first)
        resumed = fitted(Setting(reader(), {}), ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
        assert resumed.seen == ids
        assert resumed.steps_per_epoch == steps
        assert diary == whole


class _Failing(Recorder):
    """Fails in its first step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise Stopped


def _trainer_of_failed_fit(root: Path, reader: StreamingDataLoader) -> weakref.ref[Any]:
    trainer = trainer_for(root, StreamingStateCallback(), max_epochs=1)
    with suppress(Stopped):
        trainer.fit(_Failing(), reader)
    return weakref.ref(trainer)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_loader_keeps_no_trainer_of_a_failed_fit(tmp_path: Path) -> None:
    root = write_streams(tmp_path)
    reader = make_loader(**train_of(root), batch_size=8)
    trainer = _trainer_of_failed_fit(tmp_path, reader)
    gc.collect()
    assert trainer() is None
    reader.set_weights({"web": 1.0})
