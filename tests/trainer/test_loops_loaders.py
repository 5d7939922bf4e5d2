"""Every arrangement of train loaders, resumed at every step: each streaming loader goes on at its own place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities import CombinedLoader

from lightning_streaming import StreamingDataLoader, StreamingStateCallback
from lightning_streaming.errors import ConfigError
from tests.trainer.everywhere import Reader, check_resume_at_every_step, evaluating, ordinary, streaming, trainer_for
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
