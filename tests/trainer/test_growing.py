"""Data that is appended to between a checkpoint and its resume, in real runs, compared sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, StreamingStateCallback
from lightning_streaming.world import World
from tests.forked_ranks import on_ranks
from tests.trainer.harness import Reader, Stopped, trainer_for

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:You're resuming from")


def write(root: Path, first: int, samples: int, mode: Any) -> None:
    with MDSWriter(out=str(root), columns={"id": "int"}, size_limit=230, mode=mode) as writer:
        for index in range(first, first + samples):
            writer.write({"id": index})


def model_of(root: Path, *, batch_size: int = 4, workers: int = 0, follow_appends: bool = False) -> Reader:
    def loader() -> StreamingDataLoader:
        dataset = StreamingDataset(remote=str(root), shuffle=True, shuffle_block_size=16, follow_appends=follow_appends)
        return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers)

    return Reader(loader)


def by_epoch(seen: list[Any]) -> dict[int, list[int]]:
    """The ids of each epoch in the order of training."""
    found: dict[int, list[int]] = {}
    for epoch, _, (_, ids) in seen:
        found.setdefault(epoch, []).extend(ids)
    return found


@pytest.mark.parametrize("follow_appends", [False, True])
def test_a_run_goes_on_with_the_shards_of_its_epoch(tmp_path: Path, follow_appends: bool) -> None:
    root = tmp_path / "data"
    write(root, 0, 30, "create")
    whole = model_of(root)
    trainer_for(tmp_path, StreamingStateCallback(), max_epochs=3).fit(whole)
    expected = by_epoch(whole.seen)

    def stop_in_the_twelfth_step(_name: str, model: Any) -> None:
        if model.trainer.global_step == 11:
            model.trainer.save_checkpoint(tmp_path / "stopped.ckpt")
            raise Stopped

    first = model_of(root)
    first.hook = stop_in_the_twelfth_step
    with pytest.raises(Stopped):
        trainer_for(tmp_path, StreamingStateCallback(), max_epochs=3).fit(first)
    write(root, 30, 15, "append")

    resumed = model_of(root, batch_size=3, workers=2, follow_appends=follow_appends)
    trainer = trainer_for(tmp_path, StreamingStateCallback(), max_epochs=3)
    trainer.fit(resumed, ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
    found = by_epoch(resumed.seen)
    assert (found[0], found[1]) == (expected[0], expected[1])
    assert sorted(found[2]) == list(range(45 if follow_appends else 30))
    assert (found[2] == expected[2]) is not follow_appends
    assert resumed.steps_per_epoch[2] == (15 if follow_appends else 10)


def test_a_run_reads_what_was_appended_while_it_trains(tmp_path: Path) -> None:
    """Epochs and their lengths are those of a run that began with the longer data, and so is one that goes on."""
    root = tmp_path / "data"
    write(root, 0, 30, "create")

    def append_in_the_third_step(_name: str, model: Any) -> None:
        if model.trainer.global_step == 2 and not model.trainer.current_epoch:
            write(root, 30, 15, "append")
        if model.trainer.global_step == 17:
            model.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    model = model_of(root, workers=2, follow_appends=True)
    model.hook = append_in_the_third_step
    trainer_for(tmp_path, StreamingStateCallback(), max_epochs=3).fit(model)
    found = by_epoch(model.seen)
    assert [sorted(found[epoch]) for epoch in range(3)] == [list(range(size)) for size in (30, 45, 45)]
    assert model.steps_per_epoch == {0: 8, 1: 12, 2: 12}

    whole = model_of(root)
    trainer_for(tmp_path, StreamingStateCallback(), max_epochs=3).fit(whole)
    assert {1: found[1], 2: found[2]} == {epoch: by_epoch(whole.seen)[epoch] for epoch in (1, 2)}

    resumed = model_of(root, batch_size=3, follow_appends=True)
    trainer = trainer_for(tmp_path, StreamingStateCallback(), max_epochs=3)
    trainer.fit(resumed, ckpt_path=tmp_path / "middle.ckpt", weights_only=True)
    assert by_epoch(resumed.seen) == found


@pytest.mark.parametrize("follow_appends", [False, True])
def test_loaders_that_are_made_anew_for_each_epoch_read_all_that_is_there(tmp_path: Path, follow_appends: bool) -> None:
    root = tmp_path / "data"
    write(root, 0, 30, "create")

    def append_in_the_third_step(_name: str, model: Any) -> None:
        if model.trainer.global_step == 2:
            write(root, 30, 15, "append")

    model = model_of(root, follow_appends=follow_appends)
    model.hook = append_in_the_third_step
    trainer_for(tmp_path, StreamingStateCallback(), reload_dataloaders_every_n_epochs=1).fit(model)
    whole = model_of(root)
    trainer_for(tmp_path, StreamingStateCallback()).fit(whole)
    found = by_epoch(model.seen)
    assert sorted(found[0]) == list(range(30))
    assert found[1] == by_epoch(whole.seen)[1]


def fit_and_append(root: Path, rank: int) -> tuple[dict[int, list[int]], dict[int, int]]:
    def append_in_the_third_step(_name: str, model: Any) -> None:
        if model.trainer.global_step == 2 and not rank:
            write(root, 30, 15, "append")

    model = model_of(root, follow_appends=True)
    model.hook = append_in_the_third_step
    trainer = trainer_for(
        root, StreamingStateCallback(), max_epochs=3, devices=2, strategy=DDPStrategy(find_unused_parameters=True)
    )
    trainer.fit(model)
    return by_epoch(model.seen), model.steps_per_epoch


def test_ranks_read_what_was_appended_together(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write(root, 0, 30, "create")
    ranks = on_ranks(lambda: fit_and_append(root, World.detect().rank), meeting=tmp_path / "ranks")
    for epoch, size in enumerate((30, 45, 45)):
        assert {one for seen, _ in ranks for one in seen[epoch]} == set(range(size))
    assert [steps for _, steps in ranks] == [{0: 4, 1: 6, 2: 6}] * 2
