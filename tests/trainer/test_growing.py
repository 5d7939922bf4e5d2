"""Data that is appended to between a checkpoint and its resume, in real runs, compared sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, StreamingStateCallback
from tests.trainer.harness import Reader, Stopped, trainer_for

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:You're resuming from")


def write(root: Path, first: int, samples: int, mode: Any) -> None:
    with MDSWriter(out=str(root), columns={"id": "int"}, size_limit=230, mode=mode) as writer:
        for index in range(first, first + samples):
            writer.write({"id": index})


def model_of(root: Path, *, batch_size: int = 4, workers: int = 0, follow: bool = False) -> Reader:
    def loader() -> StreamingDataLoader:
        dataset = StreamingDataset(remote=str(root), shuffle=True, shuffle_block_size=16, follow=follow)
        return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers)

    return Reader(loader)


def by_epoch(seen: list[Any]) -> dict[int, list[int]]:
    """The ids of each epoch in the order of training."""
    found: dict[int, list[int]] = {}
    for epoch, _, (_, ids) in seen:
        found.setdefault(epoch, []).extend(ids)
    return found


@pytest.mark.parametrize("follow", [False, True])
def test_a_run_goes_on_with_the_shards_of_its_epoch(tmp_path: Path, follow: bool) -> None:
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

    resumed = model_of(root, batch_size=3, workers=2, follow=follow)
    trainer = trainer_for(tmp_path, StreamingStateCallback(), max_epochs=3)
    trainer.fit(resumed, ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
    found = by_epoch(resumed.seen)
    assert (found[0], found[1]) == (expected[0], expected[1])
    assert sorted(found[2]) == list(range(45 if follow else 30))
    assert (found[2] == expected[2]) is not follow
    assert resumed.steps_per_epoch[2] == (15 if follow else 10)
