"""Lightning's own callbacks, tuners, plugins and progress bars beside ours; and ours absent, or added twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    ProgressBar,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_streaming import PreemptionCheckpoint, StreamingDataLoader, StreamingDataset, StreamingStateCallback
from lightning_streaming.errors import ConfigError, StateError
from tests.helpers import raises
from tests.trainer.harness import (
    Reader,
    Recorder,
    Run,
    SaveAtEveryStep,
    SaveThenStop,
    Stopped,
    evaluating,
    ordinary,
    streaming,
    trainer_for,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    # Said of every first run that OnExceptionCheckpoint watches over.
    "ignore:`.fit.ckpt_path=None.` was called without a model",
    'ignore:.fit.ckpt_path="last". is set, but there is no last checkpoint',
)


def two(data: Path) -> Reader:
    return Reader(lambda: {"x": streaming(data, "a"), "y": streaming(data, "b")})


class Tunable(Reader):
    """What Lightning's tuners want: a batch size and a learning rate of the model's."""

    def __init__(self, data: Path) -> None:
        self.batch_size, self.lr = 2, 0.01
        super().__init__(lambda: streaming(data, batch_size=self.batch_size), lambda: evaluating(data))


@pytest.mark.rotate(2)
@pytest.mark.parametrize("step", [1, 4, 6])
def test_an_exception_saves_the_place_of_every_loader(step: int, data: Path, tmp_path: Path) -> None:
    def crash(_name: str, model: LightningModule) -> None:
        if model.trainer.global_step == step - 1:
            raise Stopped

    whole, crashed, resumed = two(data), two(data), two(data)
    trainer_for(tmp_path, StreamingStateCallback()).fit(whole)
    crashed.hook = crash
    saver = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(Stopped):
        trainer_for(tmp_path, StreamingStateCallback(), saver).fit(crashed)
    trainer_for(tmp_path, StreamingStateCallback()).fit(resumed, ckpt_path=saver.ckpt_path, weights_only=True)
    assert resumed.seen == whole.seen


def test_what_is_written_asynchronously_is_the_place_of_then(data: Path, tmp_path: Path) -> None:
    whole = two(data)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer_for(tmp_path, StreamingStateCallback(), saver, plugins=[AsyncCheckpointIO()]).fit(whole)
    for step in (2, 3, 5, 8):
        resumed = two(data)
        trainer_for(tmp_path, StreamingStateCallback()).fit(
            resumed, ckpt_path=tmp_path / f"step={step}.ckpt", weights_only=True
        )
        assert resumed.seen == whole.seen


def test_weights_alone_are_refused_by_lightning_in_words(data: Path, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_weights_only=True)
    trainer_for(tmp_path, StreamingStateCallback(), saver).fit(two(data))
    with pytest.raises(KeyError, match="contains only the model"):
        trainer_for(tmp_path, StreamingStateCallback()).fit(two(data), ckpt_path=saver.best_model_path)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("callback", [BatchSizeFinder(max_trials=2), LearningRateFinder(num_training_steps=4)])
@pytest.mark.filterwarnings("ignore:.*lr_find:", "ignore:The number of training batches")
def test_tuning_before_the_first_step_takes_no_samples(callback: Callback, data: Path, tmp_path: Path) -> None:
    model, whole = Tunable(data), Tunable(data)
    trainer_for(tmp_path, StreamingStateCallback(), callback).fit(model)
    whole.batch_size = model.batch_size
    trainer_for(tmp_path, StreamingStateCallback()).fit(whole)
    assert model.batch_size == (4 if isinstance(callback, BatchSizeFinder) else 2)
    assert model.seen == whole.seen


@pytest.mark.nightly
def test_tuning_the_data_module_takes_no_samples(data: Path, tmp_path: Path) -> None:
    run = Run(data=data, directory=tmp_path, batch_size=2)
    by_callback, by_tuner, whole = Recorder(), Recorder(), Recorder()
    datamodule = run.datamodule()
    trainer_for(tmp_path, BatchSizeFinder(max_trials=2)).fit(by_callback, datamodule=datamodule)
    assert datamodule.batch_size == 4
    trainer_for(tmp_path).fit(whole, datamodule=datamodule)

    trainer, again = trainer_for(tmp_path), run.datamodule()
    assert Tuner(trainer).scale_batch_size(by_tuner, datamodule=again, max_trials=2) == 4
    by_tuner.seen = []
    trainer.fit(by_tuner, datamodule=again)
    assert by_callback.seen == by_tuner.seen == whole.seen


@pytest.mark.rotate(1)
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")  # the finder asks before our setup
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_tuning_by_validation_still_evaluates_every_sample(mode: str, data: Path, tmp_path: Path) -> None:
    model, trainer = Tunable(data), trainer_for(tmp_path, StreamingStateCallback())
    Tuner(trainer).scale_batch_size(model, method="validate", mode=mode, max_trials=2)
    model.evaluated = []
    trainer.validate(model, verbose=False)
    assert model.evaluated == list(range(2000, 2006))


@pytest.mark.nightly
@pytest.mark.parametrize("callback", [BatchSizeFinder(max_trials=2), LearningRateFinder(num_training_steps=3)])
def test_tuning_in_a_run_that_resumes_is_refused(callback: Callback, data: Path, tmp_path: Path) -> None:
    # Lightning restores what it saved before the search, and with it forgets the checkpoint that fit was given.
    trainer_for(tmp_path, StreamingStateCallback(), SaveAtEveryStep(tmp_path), max_epochs=1).fit(Tunable(data))
    tuned = trainer_for(tmp_path, StreamingStateCallback(), callback)
    with pytest.raises(StateError, match="LearningRateFinder and BatchSizeFinder"):
        tuned.fit(Tunable(data), ckpt_path=tmp_path / "4.ckpt", weights_only=True)


@pytest.fixture
def saved_with(data: Path, tmp_path: Path) -> tuple[Reader, Path]:
    """A whole run with the callback, and its checkpoints after every step."""
    whole = Reader(lambda: streaming(data))
    trainer_for(tmp_path, StreamingStateCallback(), SaveAtEveryStep(tmp_path)).fit(whole)
    return whole, tmp_path


def test_a_resume_without_the_callback_is_told_of_by_lightning(saved_with: tuple[Reader, Path], data: Path) -> None:
    whole, directory = saved_with
    for step in (3, 5, 7):  # saved at the end of a step, Lightning's own carrying of loader states is right
        resumed = Reader(lambda: streaming(data))
        with pytest.warns(UserWarning, match="Please add the following callbacks: .*StreamingStateCallback"):
            trainer_for(directory).fit(resumed, ckpt_path=directory / f"{step}.ckpt", weights_only=True)
        assert resumed.seen == whole.seen


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_the_callback_may_come_with_the_resume(data: Path, tmp_path: Path) -> None:
    whole = Reader(lambda: streaming(data))
    trainer_for(tmp_path, SaveAtEveryStep(tmp_path)).fit(whole)
    for step in (3, 5, 7):
        resumed = Reader(lambda: streaming(data))
        trainer_for(tmp_path, StreamingStateCallback()).fit(
            resumed, ckpt_path=tmp_path / f"{step}.ckpt", weights_only=True
        )
        assert resumed.seen == whole.seen


def test_loaders_that_are_not_there_any_more_are_missed(saved_with: tuple[Reader, Path]) -> None:
    _, directory = saved_with
    with pytest.raises(StateError, match=r"\['train'\], but now there are \[\]"):
        trainer_for(directory, StreamingStateCallback()).fit(
            Reader(lambda: ordinary(5)), ckpt_path=directory / "3.ckpt", weights_only=True
        )


class Around(IterableDataset[Any]):
    """A user's dataset that reads one of ours."""

    def __init__(self, source: StreamingDataset) -> None:
        self.sources = [source]

    def __iter__(self) -> Iterator[Any]:
        yield from self.sources[0]


ARRANGEMENTS: dict[str, Callable[[StreamingDataset, Path], Any]] = {
    "alone": lambda dataset, _: DataLoader(dataset, batch_size=4),
    "with workers": lambda dataset, _: DataLoader(dataset, batch_size=4, num_workers=1),
    "beside ours": lambda dataset, data: {"b": streaming(data, "b"), "a": DataLoader(dataset, batch_size=4)},
    "within another dataset": lambda dataset, _: DataLoader(Around(dataset), batch_size=4),
    "combined": lambda dataset, _: CombinedLoader([DataLoader(dataset, batch_size=4)], "min_size"),
    "combined within others": lambda dataset, _: [CombinedLoader([DataLoader(dataset)], "min_size"), ordinary(3)],
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_dataset_in_a_loader_of_torch_is_refused(arrangement: str, data: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=str(data / "a"), batch_size=4)
    loaders = ARRANGEMENTS[arrangement](dataset, data)
    with raises(ConfigError, "torch DataLoader", "StreamingDataLoader"):
        trainer_for(tmp_path, StreamingStateCallback(), max_epochs=1).fit(Reader(lambda: loaders))


def test_a_loader_of_torch_may_pick_single_samples(data: Path, tmp_path: Path) -> None:
    picked = Subset(StreamingDataset(remote=str(data / "a")), [3, 1])
    model = Reader(lambda: DataLoader(picked, batch_size=2))
    with pytest.warns(UserWarning, match="finds no StreamingDataLoader"):
        trainer_for(tmp_path, StreamingStateCallback(), max_epochs=1).fit(model)


def test_two_callbacks_are_refused_by_lightning_in_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `StreamingStateCallback`"):
        trainer_for(tmp_path, StreamingStateCallback(), StreamingStateCallback())


def test_the_data_module_adds_none_beside_that_of_the_model(data: Path, tmp_path: Path) -> None:
    class BringsOne(Recorder):
        def configure_callbacks(self) -> list[Callback]:
            return [StreamingStateCallback()]

    run, trainer = Run(data=data, directory=tmp_path, validate=False), trainer_for(tmp_path, max_epochs=1)
    trainer.fit(BringsOne(), datamodule=run.datamodule())
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's connector
    assert [type(one) for one in found] == [StreamingStateCallback]


def test_the_same_command_goes_on_after_a_preemption(data: Path, tmp_path: Path) -> None:
    whole, first, again = (Reader(lambda: streaming(data)) for _ in range(3))
    trainer_for(tmp_path, StreamingStateCallback()).fit(whole)
    callback = PreemptionCheckpoint(tmp_path)
    trainer = trainer_for(tmp_path, StreamingStateCallback(), callback, max_epochs=1)
    trainer.fit(first)
    trainer.save_checkpoint(callback.ckpt_path)
    trainer_for(tmp_path, StreamingStateCallback(), PreemptionCheckpoint(tmp_path)).fit(again)
    assert again.seen == whole.seen


def test_a_loader_of_its_own_and_the_callback_are_all_a_model_needs(data: Path, tmp_path: Path) -> None:
    loader: StreamingDataLoader = streaming(data)
    whole, model = Reader(lambda: streaming(data)), Reader(lambda: loader)
    trainer_for(tmp_path, StreamingStateCallback(), max_epochs=4).fit(whole)
    trainer = trainer_for(tmp_path, StreamingStateCallback(), max_epochs=2)
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model)
    assert model.seen == whole.seen


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_without_any_callback_an_epochs_end_is_no_place_to_resume(data: Path, tmp_path: Path) -> None:
    # Lightning does not load loader states then; docs/resume.md says it.
    whole, saved, resumed = (Reader(lambda: streaming(data)) for _ in range(3))
    trainer_for(tmp_path).fit(whole)
    trainer = trainer_for(tmp_path, max_epochs=1)
    trainer.fit(saved)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    trainer_for(tmp_path).fit(resumed, ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    first, second = ([step[2:] for step in resumed.seen if step[0] == epoch] for epoch in (0, 1))
    assert first == second


class Watch(Callback):
    """Notes what the bar of training says: batches done, of how many, in which epoch."""

    def __init__(self) -> None:
        self.shown: list[tuple[float, float | None, str]] = []
        self.begun_at: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        bar = trainer.progress_bar_callback
        if isinstance(bar, TQDMProgressBar):
            shown = bar.train_progress_bar
            self.shown.append((shown.n, shown.total, shown.desc.rstrip(": ")))
            self.begun_at.append(shown.initial)
        else:
            assert isinstance(bar, RichProgressBar)
            task = bar.train_progress_bar
            self.shown.append((task.completed, task.total, task.description.removesuffix("/1 ")))


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_total_is_known_in_the_resumed_epoch(bar: Any, leave: bool, data: Path, tmp_path: Path) -> None:
    shown = _resumed_after("on_train_batch_end", 3, bar(leave=leave), data, tmp_path).shown
    done = [4, 5, 5, 1, 2, 3, 4, 5, 5]  # the last of each epoch is looked at twice
    assert shown == [(n, 5, "Epoch 0") for n in done[:3]] + [(n, 5, "Epoch 1") for n in done[3:]]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_an_epoch_that_only_had_to_be_closed_is_shown_as_done(bar: Any, data: Path, tmp_path: Path) -> None:
    shown = _resumed_after("on_validation_end", 1, bar(), data, tmp_path).shown
    assert shown[:2] == [(5, 5, "Epoch 0"), (1, 5, "Epoch 1")]


def test_the_speed_counts_this_run_only(data: Path, tmp_path: Path) -> None:
    watch = _resumed_after("on_train_batch_end", 3, TQDMProgressBar(), data, tmp_path)
    assert watch.begun_at == [3, 3, 3, 0, 0, 0, 0, 0, 0]


def _resumed_after(hook: str, call: int, bar: ProgressBar, data: Path, directory: Path) -> Watch:
    def new() -> Reader:
        return Reader(lambda: streaming(data), lambda: evaluating(data))

    saver, watch = SaveThenStop(hook, call, directory / "saved.ckpt"), Watch()
    with suppress(Stopped):
        trainer_for(directory, StreamingStateCallback(), saver).fit(new())
    trainer = trainer_for(directory, bar, StreamingStateCallback(), watch, enable_progress_bar=True)
    trainer.fit(new(), ckpt_path=saver.path)
    return watch
