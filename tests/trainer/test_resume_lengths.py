"""How many batches an epoch has depends on what is saved: Lightning is told before it works out what follows of that.

Canonical nodes decide how an epoch is padded, nodes and batch sizes how it is divided. So a resumed run asks for other
ones here, and its epochs, validations, last batches, optimizer steps and schedules have to be those of the saved run,
or where the machines changed, those that a plain loader reads from the same state.

Data that has shrunk since the save, and on_mismatch="warn": an epoch that is over is closed, and nothing mixes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, StreamingStateCallback
from lightning_streaming.errors import StateError
from lightning_streaming.resume.state import read_run
from lightning_streaming.sequence.settings import SHUFFLE_ALGOS
from lightning_streaming.world import World
from tests.tiers import examples, some
from tests.trainer.harness import Reader, SaveAtEveryStep, Stopped, evaluating, ordinary, trainer_for

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`", "ignore:You requested to overfit", "ignore:You're resuming from"
)

STATE_KEY = "lightning_streaming.StreamingStateCallback"
SAMPLES = 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name, samples in (("train", SAMPLES), ("more", 40), ("val", 2)):
        with MDSWriter(out=str(root / name), columns={"id": "int"}, size_limit=200) as writer:
            for index in range(samples):
                writer.write({"id": index})
    return root


class Asked(NamedTuple):
    """What a run asks for, as the first of its nodes, which have one rank each."""

    canonical: int | None = None
    nodes: int = 1
    batch_size: int = 2
    algo: str = "py1e"
    samples: str = "train"
    method: str = "random"

    def loader(self, data: Path) -> StreamingDataLoader:
        dataset = StreamingDataset(
            remote=str(data / self.samples),
            shuffle=True,
            shuffle_algo=self.algo,  # type: ignore[arg-type]  # one of the names
            shuffle_block_size=8,
            batching_method=self.method,  # type: ignore[arg-type]  # as well
            num_canonical_nodes=self.canonical,
            world=World(num_nodes=self.nodes, ranks_per_node=1, rank=0),
        )
        return StreamingDataLoader(dataset, batch_size=self.batch_size)


class Watcher(Reader):
    """Notes also what the trainer works out from lengths; epochs' schedule steps are in the checkpoint."""

    def __init__(self, loaders: Callable[[], Any], data: Path, schedule: bool = False) -> None:
        super().__init__(loaders, lambda: evaluating(data))
        self.is_scheduled = schedule
        self.last_batches: list[tuple[int, int]] = []
        self.estimated: int | float | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.is_last_batch:
            self.last_batches.append((self.trainer.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if self.is_scheduled:
            self.estimated = self.trainer.estimated_stepping_batches
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 100) for _ in range(2)]
        return [optimizer], [
            {"scheduler": scheduler, "interval": interval}
            for scheduler, interval in zip(schedules, ("step", "epoch"), strict=True)
        ]


class LateLoading(SingleDeviceStrategy):
    """Loads a checkpoint after the optimizers are there, as FSDP, DeepSpeed and ModelParallelStrategy do."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


def told(model: Watcher, trainer: Trainer, after: int = 0) -> dict[str, Any]:
    """What a run did, as far as it came after so many optimizer steps."""
    return {
        "seen": model.seen,
        "steps": model.steps_per_epoch,
        "validated after": [step for step in model.validated_after if step > after],
        "last batches": model.last_batches,
        "batches of an epoch": trainer.num_training_batches,
        "schedules": [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.fit_loop.total_batch_idx,
    }


def single(asked: Asked, data: Path) -> Any:
    return asked.loader(data)


def in_dict(asked: Asked, data: Path) -> Any:
    return {"x": asked.loader(data), "y": asked._replace(samples="more").loader(data), "o": ordinary(3)}


def shortest(asked: Asked, data: Path) -> Any:
    return CombinedLoader(in_dict(asked, data), "min_size")


def rest(asked: Asked, data: Path) -> Any:
    return CombinedLoader({"x": asked.loader(data), "o": ordinary(3)}, "max_size")


def fetched_ahead(asked: Asked, data: Path) -> Any:
    return [asked.loader(data), ordinary(None)]


LOOPS: dict[str, tuple[dict[str, Any], Callable[[Asked, Path], Any]]] = {
    "single": ({}, single),
    "accumulating": ({"accumulate_grad_batches": 3}, single),
    "validating at a share": ({"val_check_interval": 0.5}, single),
    "validating at a number": ({"val_check_interval": 7}, single),
    "validating over epochs": ({"val_check_interval": 7, "check_val_every_n_epoch": None}, single),
    "validating by time": ({"val_check_interval": "00:01:00:00"}, single),
    "limited to a share": ({"limit_train_batches": 0.7}, single),
    "limited to a number": ({"limit_train_batches": 9}, single),
    "overfitting": ({"overfit_batches": 6}, single),
    "reloading": ({"reload_dataloaders_every_n_epochs": 1}, single),
    "max_steps": ({"max_epochs": -1, "max_steps": 25}, single),
    "loaded late": ({"strategy": LateLoading}, single),
    "several": ({}, in_dict),
    "several, reloading": ({"reload_dataloaders_every_n_epochs": 1}, in_dict),
    "several, shortest": ({}, shortest),
    "several, resting": ({}, rest),
    "several, loaded late": ({"strategy": LateLoading}, in_dict),
    "one batch ahead": ({"limit_train_batches": 10}, fetched_ahead),
}


@pytest.mark.rotate(4)
@pytest.mark.parametrize(("saved", "asked"), [(16, 4), (4, 16), (None, 7)])
@pytest.mark.parametrize("name", LOOPS)
def test_canonical_nodes_asked_for_change_nothing(
    name: str, saved: int | None, asked: int, data: Path, tmp_path: Path
) -> None:
    settings, loaders = LOOPS[name]
    is_late = "strategy" in settings
    if is_late:
        settings = {"strategy": LateLoading("cpu"), "accelerator": "auto"}

    def fit(canonical: int | None, *callbacks: Callback, **more: Any) -> tuple[Watcher, Trainer]:
        model = Watcher(lambda: loaders(Asked(canonical), data), data, schedule=True)
        wanted = {"num_sanity_val_steps": 0, **settings}
        trainer = trainer_for(tmp_path, StreamingStateCallback(), *callbacks, **wanted)
        trainer.fit(model, **more)
        return model, trainer

    saver = SaveAtEveryStep(tmp_path)
    whole, whole_trainer = fit(saved, saver)
    batches = len(saver.saved) // 2
    for number in some((2, batches, batches + 3), 2):  # in an epoch, at its end, in the next
        path = saver.saved[number - 1]
        resumed, trainer = fit(asked, ckpt_path=path, weights_only=True)
        step = torch.load(path, weights_only=True)["global_step"]
        before = len(whole.last_batches) - len(resumed.last_batches)
        resumed.last_batches = whole.last_batches[:before] + resumed.last_batches
        assert told(resumed, trainer, step) == told(whole, whole_trainer, step), path.name
        # Strategies that load late have asked by then; docs/resume.md says it.
        assert resumed.estimated == whole.estimated or is_late


class Resumed(NamedTuple):
    """A way to save, and another to go on."""

    then: Asked
    now: Asked
    stop_after: int
    accumulate: int = 1
    interval: int | float = 1.0


EPOCHS = 3


def stopped(case: Resumed, data: Path, path: Path) -> dict[str, Any]:
    """A checkpoint of a run that was stopped after a batch."""

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
            if trainer.fit_loop.total_batch_idx + 1 == case.stop_after:
                trainer.save_checkpoint(path, weights_only=False)
                raise Stopped

    trainer = trainer_for(
        path.parent, StreamingStateCallback(), Stop(), max_epochs=EPOCHS, accumulate_grad_batches=case.accumulate
    )
    with pytest.raises(Stopped):
        trainer.fit(Reader(lambda: case.then.loader(data)))
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def assert_goes_on_as_a_plain_loader_does(case: Resumed, data: Path, tmp_path: Path) -> None:
    checkpoint = stopped(case, data, tmp_path / "saved.ckpt")
    state = checkpoint["callbacks"][STATE_KEY]["loaders"]["train"]
    epoch, is_begun = state["epoch"], state["sample_in_epoch"] > 0
    loader = case.now.loader(data)
    loader.load_state_dict(state)
    passes = [[batch["id"].tolist() for batch in loader] for _ in range(EPOCHS - epoch + 1)]
    whole = len(passes[1])
    firsts = [whole - len(passes[0]) if is_begun else 0, *[0] * (len(passes) - 2)]
    if case.interval != 1.0 and case.interval > whole:
        return  # refused by Lightning

    settings = {"max_epochs": EPOCHS, "accumulate_grad_batches": case.accumulate, "num_sanity_val_steps": 0}
    model = Watcher(lambda: case.now.loader(data), data, schedule=True)
    trainer = trainer_for(tmp_path, StreamingStateCallback(), **settings, val_check_interval=case.interval)
    trainer.fit(model, ckpt_path=tmp_path / "saved.ckpt", weights_only=True)

    numbered = [
        (epoch + number, index, ids)
        for number, (first, batches) in enumerate(zip(firsts, passes, strict=False))
        for index, ids in enumerate(batches, start=first)
    ]
    seen = [(of, index, loaders[1]) for of, index, loaders in model.seen[len(checkpoint["seen"]) :]]
    assert seen == numbered
    steps, validated_after = checkpoint["global_step"], []
    every = case.interval if isinstance(case.interval, int) else max(1, int(whole * case.interval))
    for _, index, _ in numbered:
        steps += (index + 1) % case.accumulate == 0 or index + 1 == whole
        if (index + 1) % every == 0:
            validated_after.append(steps)
    assert trainer.global_step == steps
    assert model.validated_after == validated_after
    assert model.last_batches == [(of, whole - 1) for of in range(epoch, EPOCHS)]
    assert trainer.num_training_batches == whole
    assert model.estimated == -(-whole // case.accumulate) * EPOCHS


CASES = {
    "blockwise, 1 to 2 nodes": Resumed(
        Asked(algo="blockwise", samples="more"), Asked(algo="blockwise", samples="more", nodes=2), 3
    ),
    "blockwise, 2 to 1 nodes": Resumed(
        Asked(algo="blockwise", samples="more", nodes=2), Asked(algo="blockwise", samples="more"), 3
    ),
    "2 to 3 nodes that those asked for do not fit": Resumed(Asked(4, nodes=2), Asked(4, nodes=3), 3),
    "3 to 2 nodes that those asked for do not fit": Resumed(Asked(3, nodes=3), Asked(3, nodes=2), 5),
    "another batch size": Resumed(Asked(16), Asked(4, batch_size=3), 19, interval=0.25),
}


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", CASES)
def test_other_machines_have_epochs_of_their_own_length(name: str, data: Path, tmp_path: Path) -> None:
    assert_goes_on_as_a_plain_loader_does(CASES[name], data, tmp_path)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("canonical", [None, 16])
@pytest.mark.parametrize("method", ["stratified", "per_stream", "device_per_stream"])
def test_an_epoch_composed_elsewhere_keeps_its_length(
    method: str, canonical: int | None, data: Path, tmp_path: Path
) -> None:
    then = Asked(canonical, batch_size=1, algo="py1s", method=method)
    now = then._replace(nodes=3, batch_size=2)
    state = stopped(Resumed(then, now, 2), data, tmp_path / "saved.ckpt")["callbacks"][STATE_KEY]["loaders"]["train"]
    loader = now.loader(data)
    loader.load_state_dict(state)
    under_way, later = len(list(loader)), len(list(loader))
    first = -(-len(then.loader(data)) // 6) - under_way

    saver, model = SaveAtEveryStep(tmp_path), Watcher(lambda: now.loader(data), data)
    trainer = trainer_for(tmp_path, StreamingStateCallback(), saver, max_epochs=2)
    trainer.fit(model, ckpt_path=tmp_path / "saved.ckpt", weights_only=True)

    indexes = [(0, index) for index in range(first, first + under_way)] + [(1, index) for index in range(later)]
    assert [(of, index) for of, index, _ in model.seen[2:]] == indexes
    assert model.last_batches == [(0, first + under_way - 1), (1, later - 1)]
    for path in saver.saved:
        read_run(torch.load(path, weights_only=True)["callbacks"][STATE_KEY])


def asked(nodes: st.SearchStrategy[int]) -> st.SearchStrategy[Asked]:
    return st.builds(
        Asked,
        canonical=st.sampled_from([None, 1, 4, 6, 16]),
        nodes=nodes,
        batch_size=st.integers(1, 5),
        algo=st.just("py1e"),
        samples=st.just("train"),
        method=st.just("random"),
    )


@st.composite
def resumed(draw: st.DrawFn) -> Resumed:
    algo = draw(st.sampled_from([algo for algo in SHUFFLE_ALGOS if algo != "py1b"]))
    nodes = st.integers(1, 3)
    then, now = draw(asked(nodes)), draw(asked(nodes))
    assume(then.canonical is None or then.canonical % then.nodes == 0 or then.nodes % then.canonical == 0)
    return Resumed(
        then=then._replace(algo=algo),
        now=now._replace(algo=algo),
        stop_after=draw(st.integers(1, 5)),
        accumulate=draw(st.integers(1, 4)),
        interval=draw(st.sampled_from([1.0, 0.5, 0.3, 1, 3])),
    )


@given(case=resumed())
@hypothesis_settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_change_of_machines(case: Resumed, data: Path, tmp_path: Path) -> None:
    assert_goes_on_as_a_plain_loader_does(case, data, tmp_path)


BATCHES = 5


def write(root: Path, samples: int) -> Path:
    with MDSWriter(out=str(root), columns={"id": "int"}) as writer:
        for index in range(samples):
            writer.write({"id": index})
    return root


def loader(data: Path) -> StreamingDataLoader:
    return StreamingDataLoader(StreamingDataset(remote=str(data), shuffle=True), batch_size=4)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("long") / "data", 4 * BATCHES)


def fit(data: Path, directory: Path, *callbacks: Any, beside: bool = False, **settings: Any) -> Reader:
    model = Reader(lambda: {"x": loader(data), "o": ordinary(2)} if beside else loader(data))
    trainer = trainer_for(
        directory, StreamingStateCallback(on_mismatch="warn"), *callbacks, max_epochs=EPOCHS, **settings.pop("loop", {})
    )
    trainer.fit(model, **settings)
    assert trainer.current_epoch == EPOCHS
    return model


def steps(model: Reader) -> list[tuple[int, int, list[int]]]:
    return [(epoch, index, loaders[-1] if loaders[-1] else loaders) for epoch, index, loaders, *_ in model.seen]


@pytest.mark.rotate(2)
@pytest.mark.filterwarnings("ignore:You're resuming from", "ignore:You defined a `validation_step`")
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize(
    "loop", [{}, {"limit_train_batches": 0.9}, {"accumulate_grad_batches": 2}], ids=["plain", "limited", "accumulating"]
)
@pytest.mark.parametrize("saved_after", [2, BATCHES + 2], ids=["first epoch", "second epoch"])
@pytest.mark.parametrize("left", [8, 5], ids=["exactly to the place", "to less"])
def test_an_epoch_whose_data_has_been_read_is_closed(
    left: int, saved_after: int, loop: dict[str, Any], beside: bool, long: Path, tmp_path: Path
) -> None:
    if "limit_train_batches" in loop:
        saved_after -= saved_after // BATCHES  # 4 batches in an epoch
    short, saver = write(tmp_path / "data", left), SaveAtEveryStep(tmp_path)
    before = fit(long, tmp_path, saver, beside=beside, loop=loop)
    resumed = fit(short, tmp_path, beside=beside, loop=loop, ckpt_path=saver.saved[saved_after - 1])
    new = fit(short, tmp_path, beside=beside, loop=loop)
    epoch = steps(before)[saved_after - 1][0]
    begun = steps(before)[:saved_after]
    assert steps(resumed) == begun + [step for step in steps(new) if step[0] > epoch]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_an_epoch_of_which_data_is_left_goes_on(long: Path, tmp_path: Path) -> None:
    short, saver = write(tmp_path / "data", 11), SaveAtEveryStep(tmp_path)
    before = fit(long, tmp_path, saver)
    resumed = fit(short, tmp_path, ckpt_path=saver.saved[1])
    new = fit(short, tmp_path)
    assert steps(resumed) == steps(before)[:2] + steps(new)[2:]


def test_a_plain_loader_begins_the_next_epoch(long: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, passes = loader(long), []
    for _, _batch in zip(range(2), whole, strict=False):
        state = whole.state_dict()
    for samples in (8, 5):
        short = loader(write(tmp_path / str(samples), samples))
        short.load_state_dict(state, on_mismatch="warn")
        with caplog.at_level(logging.WARNING):
            assert short.state_dict()["epoch"] == 1
        passes.append(sum(len(batch["id"]) for batch in short))
        assert "has ended" in caplog.text or samples == 8
    assert passes == [8, 5]


def test_a_place_beyond_the_end_is_refused_with_the_way_out(tmp_path: Path) -> None:
    short = loader(write(tmp_path / "data", 5))
    state = {"epoch": 0, "sample_in_epoch": 8, "num_canonical_nodes": 1, "shuffle_seed": 9176}
    short.load_state_dict(state)
    with pytest.raises(StateError, match=r'on_mismatch="warn" to begin the next epoch, or .* state set'):
        next(iter(short))
    short.load_state_dict(state, on_mismatch="warn")
    assert short.state_dict()["epoch"] == 1
