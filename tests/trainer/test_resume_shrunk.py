"""Data that has shrunk since the save, and on_change="warn": an epoch that is over is closed, and nothing mixes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, StreamingStateCallback
from lightning_streaming.errors import StateError
from tests.trainer.everywhere import Reader, SaveAtEveryStep, ordinary, trainer_for

BATCHES = 5
EPOCHS = 3


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
        directory, StreamingStateCallback(on_change="warn"), *callbacks, max_epochs=EPOCHS, **settings.pop("loop", {})
    )
    trainer.fit(model, **settings)
    assert trainer.current_epoch == EPOCHS
    return model


def steps(model: Reader) -> list[tuple[int, int, list[int]]]:
    return [(epoch, index, loaders[-1] if loaders[-1] else loaders) for epoch, index, loaders, *_ in model.seen]


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
        short.load_state_dict(state, on_change="warn")
        with caplog.at_level(logging.WARNING):
            assert short.state_dict()["epoch"] == 1
        passes.append(sum(len(batch["id"]) for batch in short))
        assert "has ended" in caplog.text or samples == 8
    assert passes == [8, 5]


def test_a_place_beyond_the_end_is_refused_with_the_way_out(tmp_path: Path) -> None:
    short = loader(write(tmp_path / "data", 5))
    state = {"epoch": 0, "sample_in_epoch": 8, "num_canonical_nodes": 1, "shuffle_seed": 9176}
    short.load_state_dict(state)
    with pytest.raises(StateError, match=r'on_change="warn" to begin the next epoch, or .* state set'):
        next(iter(short))
    short.load_state_dict(state, on_change="warn")
    assert short.state_dict()["epoch"] == 1
