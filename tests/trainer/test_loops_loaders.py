"""Every arrangement of train loaders, resumed at every step: each streaming loader goes on at its own place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities import CombinedLoader

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset, StreamingStateCallback
from lightning_streaming.errors import ConfigError
from tests.trainer.everywhere import (
    Reader,
    SaveAtEveryStep,
    check_resume_at_every_step,
    evaluating,
    ordinary,
    streaming,
    trainer_for,
)
from tests.trainer.harness import write_data

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`",
    "ignore:You're resuming from a checkpoint",  # of ordinary loaders, which cannot
    "ignore:You requested to overfit",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


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


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_resumes_at_every_step(name: str, data: Path, tmp_path: Path) -> None:
    arrangement, settings = ARRANGEMENTS[name]
    check_resume_at_every_step(lambda: Reader(lambda: arrangement(data)), tmp_path, **settings)


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


def fit(loaders: Callable[[], Any], directory: Path, validation: Callable[[], Any] | None = None) -> None:
    trainer_for(directory, StreamingStateCallback()).fit(Reader(loaders, validation))


def test_a_combined_loader_within_another_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'y' is a CombinedLoader within other train loaders.*give Lightning one"):
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
