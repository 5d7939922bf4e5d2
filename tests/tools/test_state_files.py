"""What files ``lightning-streaming state`` takes: sharded checkpoints, states alone, those of other programs."""

from __future__ import annotations

import datetime
import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy

from lightning_streaming import StreamingDataLoader, StreamingDataset
from lightning_streaming.reading.position import position_of
from lightning_streaming.resume.state import CALLBACK_KEY
from tests.forked_ranks import on_ranks
from tests.sequence.reference import stretched_seed
from tests.tools.running import edit_state as edit
from tests.tools.running import run, write_texts
from tests.tools.sharded_run import train
from tests.tools.test_state import SAMPLES, cursor, refused, shown
from tests.trainer.harness import Recorder, Run, SaveThenStop
from tests.trainer.ranks import RankedRun

OF_02 = {"epoch": 1, "sample_in_epoch": 12, "num_canonical_nodes": 1, "shuffle_seed": stretched_seed(9176)}
OF_07 = {"epoch": 1, "sample_in_epoch": 12, "num_canonical_nodes": 1, "shuffle_seed": 9176, "initial_physical_nodes": 1}


def without_callback(run: Run, call: int) -> Path:
    """A checkpoint of Lightning as a run with another dataset saves it."""
    path = run.directory / "run.ckpt"
    run.fit(callbacks=[SaveThenStop("on_train_batch_end", call, path)])
    checkpoint = torch.load(path)
    del checkpoint["callbacks"][CALLBACK_KEY]
    checkpoint["loops"]["fit_loop"]["state_dict"] = {}
    torch.save(checkpoint, path)
    return path


def composer(state: dict[str, Any]) -> dict[str, Any]:
    """What Composer saves beside the state, in kind."""
    return {
        "state": {
            "dataset_state": {"train": state, "eval": {"val": {**state, "epoch": 0, "sample_in_epoch": 0}}},
            "timestamp": {"Timestamp": {"epoch": 1, "total_wct": datetime.timedelta(seconds=5)}},
            "model": torch.nn.Linear(2, 2).state_dict(),
            "optimizers": {"SGD": torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]).state_dict()},
            "hook": partial(print, sep=""),
        },
        "rng": [{"python": random.getstate(), "numpy": np.arange(3), "torch": torch.get_rng_state()}],
    }


@pytest.mark.parametrize("state", [OF_02, OF_07], ids=["0.2", "0.7"])
def test_states_of_mosaicml_streaming_are_shown(tmp_path: Path, state: dict[str, Any]) -> None:
    (tmp_path / "alone.json").write_text(json.dumps(state))
    torch.save(state, tmp_path / "alone.pt")
    torch.save(composer(state), tmp_path / "composer.pt")
    names = []
    for file in ("alone.json", "alone.pt", "composer.pt"):
        told = shown(tmp_path / file)
        assert told["trainer"] is None
        names += list(told["loaders"])
        place = told["loaders"][names[-1] if file != "composer.pt" else "state.dataset_state.train"]
        assert {key: place[key] for key in state} == state
        assert (place["fingerprint"], place["epoch_size"], place["streams"]) == (None, None, [])
    assert names == ["state", "state", "state.dataset_state.train", "state.dataset_state.eval.val"]


def test_an_epoch_size_may_be_told_by_the_data(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(OF_07))
    write_texts(tmp_path / "data", samples=25)
    (place,) = shown(tmp_path / "state.json", "--data", tmp_path / "data")["loaders"].values()
    assert (place["epoch_size"], place["epoch_done"]) == (25, 0.48)


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "composer"])
def test_an_imported_state_is_where_fit_goes_on(a_run: Run, whole: Recorder, nested: bool, tmp_path: Path) -> None:
    checkpoint = without_callback(a_run, 11)
    torch.save(composer(OF_07) if nested else OF_07, tmp_path / "source.pt")
    told = edit("import", tmp_path / "source.pt", checkpoint)
    assert told["loaders"] == {"train": {"from": None, "to": {"epoch": 1, "sample_in_epoch": 12}}}
    assert told["trainer"] == {"epoch": 1, "batches": 3, "batches_in_epoch": 0, "global_step": 11}
    assert a_run.fit(ckpt_path=checkpoint)[0].seen_here == whole.seen[SAMPLES + 12 :]


def test_the_seed_that_release_02_saved_gives_its_order(a_run: Run, data: Path, tmp_path: Path) -> None:
    order = {"shuffle_algo": "py2s"}
    run = Run(data=data, directory=tmp_path, order=order, shuffle_seed=stretched_seed(9176))
    never_stopped = [one for one in run.fit()[0].seen if one >= (1, 0)]
    checkpoint = without_callback(run, 18)  # on 64 canonical nodes, some samples are read again: an epoch has 16 steps
    (tmp_path / "source.json").write_text(json.dumps(OF_02 | {"num_canonical_nodes": 64, "sample_in_epoch": 8}))
    edit("import", tmp_path / "source.json", checkpoint)
    now = Run(data=data, directory=tmp_path, order=order, shuffle_seed=stretched_seed(9176))
    assert now.fit(ckpt_path=checkpoint)[0].seen_here == never_stopped[8:]


@pytest.mark.parametrize("place", [(0, 20), (2, 0), (2, 5)], ids=str)
def test_a_state_from_elsewhere_than_the_checkpoint(
    a_run: Run, whole: Recorder, tmp_path: Path, place: tuple[int, int]
) -> None:
    checkpoint = without_callback(a_run, 8)  # the last batch of epoch 0
    epoch, sample = place
    (tmp_path / "source.json").write_text(json.dumps(OF_07 | {"epoch": epoch, "sample_in_epoch": sample}))
    edit("import", tmp_path / "source.json", checkpoint)
    resumed, trainer = a_run.fit(ckpt_path=checkpoint)
    assert resumed.seen_here == whole.seen[epoch * SAMPLES + sample :]
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == trainer.global_step


def test_an_imported_state_replaces_the_one_that_is_there(a_run: Run, whole: Recorder, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.ckpt"
    a_run.fit(callbacks=[SaveThenStop("on_train_batch_end", 3, checkpoint)])
    (tmp_path / "source.json").write_text(json.dumps(OF_07))
    told = edit("import", tmp_path / "source.json", checkpoint)
    assert told["loaders"]["train"]["from"] == {"epoch": 0, "sample_in_epoch": 12}
    assert a_run.fit(ckpt_path=checkpoint)[0].seen_here == whole.seen[SAMPLES + 12 :]


@pytest.mark.parametrize("name", ["state.pt", "state.json"])
def test_a_state_may_be_taken_out_alone(tmp_path: Path, data: Path, name: str) -> None:
    torch.save(composer(OF_07), tmp_path / "composer.pt")
    edit("import", tmp_path / "composer.pt", tmp_path / name)
    path = tmp_path / name
    state = json.loads(path.read_text()) if name.endswith("json") else torch.load(path, weights_only=True)
    loader = StreamingDataLoader(StreamingDataset(remote=str(data / "a"), batch_size=4), drop_last=True)
    loader.load_state_dict(state)
    assert sum(len(batch["id"]) for batch in loader) == 4  # 17 samples, 12 of them read


def test_which_state_to_import_is_asked_for(tmp_path: Path, a_run: Run) -> None:
    torch.save({"one": OF_07, "two": OF_02 | {"epoch": 0}}, tmp_path / "source.pt")
    words = refused("import", tmp_path / "source.pt", tmp_path / "state.json")
    assert "there are 2 states; pass --source, one of one, two" in words
    edit("import", tmp_path / "source.pt", tmp_path / "state.json", "--source", "two")
    assert cursor(tmp_path / "state.json") == (0, 12)
    assert "is no checkpoint of a Lightning release" in refused(
        "import", tmp_path / "source.pt", tmp_path / "state.json", "--source", "one"
    )
    assert "does not exist" in refused("import", tmp_path / "state.json", tmp_path / "run.ckpt")


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_a_state_alone_can_be_moved(data: Path, tmp_path: Path, suffix: str) -> None:
    def loader() -> StreamingDataLoader:
        return StreamingDataLoader(StreamingDataset(remote=str(data / "a"), batch_size=4, shuffle=True))

    def ids(of: StreamingDataLoader) -> list[int]:
        return [sample for batch in of for sample in batch["id"].tolist()]

    path = tmp_path / f"state{suffix}"
    begun, never_stopped = loader(), loader()
    next(iter(begun))
    state = begun.state_dict()
    path.write_text(json.dumps(state)) if suffix == ".json" else torch.save(state, path)
    assert "pass --samples" in refused("skip", path, "--batches", 1)
    edit("skip", path, "--samples", 3)
    moved = loader()
    moved.load_state_dict(json.loads(path.read_text()) if suffix == ".json" else torch.load(path))
    assert ids(moved) == ids(never_stopped)[7:]
    assert edit("skip", path, "--samples", 10)["loaders"]["state"]["to"] == {"epoch": 1, "sample_in_epoch": 0}
    assert shown(path)["loaders"]["state"]["streams"][0]["this_epoch"] == 0


def test_a_loader_that_fabric_saved_is_found_and_moved(data: Path, tmp_path: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(remote=str(data / "a"), batch_size=4))
    next(iter(loader))
    Fabric(accelerator="cpu").save(tmp_path / "fabric.ckpt", {"loader": loader, "model": torch.nn.Linear(1, 1)})
    assert list(shown(tmp_path / "fabric.ckpt")["loaders"]) == ["loader"]
    edit("set", tmp_path / "fabric.ckpt", "--epoch", 3, "--sample", 8)
    loader.load_state_dict(torch.load(tmp_path / "fabric.ckpt")["loader"])
    assert position_of(loader).cursor() == (3, 8)


@pytest.mark.filterwarnings(
    "ignore:.*use of fork.*:DeprecationWarning",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
)
def test_a_sharded_checkpoint_is_moved(data: Path, tmp_path: Path, whole: Recorder) -> None:
    def train_sharded() -> list[tuple[int, int]]:
        (seen,) = on_ranks(train, data, checkpoint, 11, meeting=tmp_path / "ranks", count=1)
        return list(map(tuple, seen))

    checkpoint = tmp_path / "sharded.ckpt"
    train_sharded()
    assert checkpoint.is_dir()
    assert cursor(checkpoint) == (1, 12)
    assert "is a directory; copy it" in refused("skip", checkpoint, "--samples", 1, "--out", tmp_path / "new")
    assert edit("skip", checkpoint, "--batches", 6)["backup"] == str(checkpoint / "meta.pt.bak")
    assert train_sharded() == whole.seen[2 * SAMPLES + 4 :]


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_batch_is_that_of_all_ranks(data: Path, tmp_path: Path, a_run: Run, whole: Recorder) -> None:
    checkpoint = tmp_path / "ranks.ckpt"
    run = Run(data=data, directory=tmp_path, batch_size=2)
    ranks = RankedRun(run=run, strategy=DDPStrategy, meeting=tmp_path / "ranks")
    ranks.fit(stop_at=("on_train_batch_end", 3, checkpoint))
    edit("skip", checkpoint, "--batches", 2)
    assert cursor(checkpoint) == (0, 20)
    assert a_run.fit(ckpt_path=checkpoint)[0].seen_here == whole.seen[20:]


def test_a_damaged_file_is_refused_in_words(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "run.ckpt", "w") as archive:
        archive.writestr("run/data.pkl", b"\x80\x02}q\x00")
    assert "is damaged" in refused("show", tmp_path / "run.ckpt", "--json")


def test_what_is_no_checkpoint_is_refused_in_words(tmp_path: Path, a_run: Run) -> None:
    (tmp_path / "text").write_text("text")
    (tmp_path / "bytes").write_bytes(b"\xff\x00")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "version.json").write_text(json.dumps(OF_07 | {"version": 9}))
    (tmp_path / "directory").mkdir()
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    (tmp_path / "cut").write_bytes((tmp_path / "weights.ckpt").read_bytes()[:-40])
    shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path / "directory")
    expected = {
        "nothing": "does not exist",
        "text": "neither a checkpoint, nor a file of torch.save, nor JSON",
        "bytes": "neither a checkpoint, nor a file of torch.save, nor JSON",
        "cut": "neither a checkpoint, nor a file of torch.save, nor JSON",
        "list.json": "contains no position in streaming data",
        "version.json": "has version 9",
        "directory": "a directory without meta.pt",
        "weights.ckpt": "contains no position in streaming data",
        "archive.zip": "torch.save did not write it",
    }
    for name, words in expected.items():
        assert words in refused("show", tmp_path / name, "--json")


def test_a_checkpoint_without_a_place_says_why(a_run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    a_run.fit(callbacks=[SaveThenStop("on_fit_start", 1, path)])
    assert "saved before the first batch" in refused("show", path, "--json")
    checkpoint = torch.load(path)
    checkpoint["callbacks"][CALLBACK_KEY]["version"] = 99
    torch.save(checkpoint, path)
    assert "has version 99" in refused("show", path, "--json")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--epoch", 2**31, "--sample", 0], "so there is no epoch 2147483648"),
        (["--epoch", 10**30, "--sample", 0], "so there is no epoch 1000000000000000000000000000000"),
        (["--epoch", 2**31 - 1, "--sample", SAMPLES], "so there is no epoch 2147483647"),
        (["--epoch", 0, "--sample", SAMPLES + 1], "an epoch has 29 samples, so there is no sample 30"),
    ],
    ids=str,
)
def test_set_refuses_a_place_that_no_run_has_and_writes_nothing(
    tmp_path: Path, a_run: Run, asked: list[object], words: str
) -> None:
    checkpoint = tmp_path / "run.ckpt"
    a_run.fit(callbacks=[SaveThenStop("on_train_batch_end", 3, checkpoint)])
    before = checkpoint.read_bytes()
    assert words in refused("set", checkpoint, *asked)
    assert checkpoint.read_bytes() == before
    assert list(tmp_path.glob("*.bak*")) == []


@pytest.mark.parametrize("asked", [["--epoch", 10**30, "--sample", 0], ["--epoch", 0, "--sample", 10**30]], ids=str)
def test_so_it_does_of_a_state_that_does_not_tell_the_size_of_an_epoch(tmp_path: Path, asked: list[object]) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps(OF_07))
    assert f"so there is no {'epoch ' if asked[1] else ''}{10**30}" in refused("set", path, *asked)
    assert json.loads(path.read_text()) == OF_07
    assert "'epoch' of" in refused("import", write(tmp_path / "s.json", epoch=10**30), tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()


def write(path: Path, **changes: int) -> Path:
    path.write_text(json.dumps(OF_07 | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sample_in_epoch": 10**9}, "an epoch of 'train' has 29 samples in the checkpoint"),
        ({"sample_in_epoch": 34}, "the state to import is at sample 34 of epoch 1"),
        ({"epoch": 2**31}, "'epoch' of"),
        ({"epoch": -2}, "'epoch' of"),
        ({"num_canonical_nodes": 2**62}, "'num_canonical_nodes' of"),
        ({"num_canonical_nodes": 0}, "'num_canonical_nodes' of"),
    ],
    ids=str,
)
def test_import_refuses_a_place_that_the_checkpoint_cannot_have_and_writes_nothing(
    tmp_path: Path, a_run: Run, changes: dict[str, int], words: str
) -> None:
    checkpoint = tmp_path / "run.ckpt"
    a_run.fit(callbacks=[SaveThenStop("on_train_batch_end", 3, checkpoint)])
    before = checkpoint.read_bytes()
    assert words in refused("import", write(tmp_path / "source.json", **changes), checkpoint)
    assert checkpoint.read_bytes() == before
    assert list(tmp_path.glob("*.bak*")) == []


def test_import_refuses_a_place_beyond_a_limited_epoch(tmp_path: Path, a_run: Run) -> None:
    checkpoint = tmp_path / "run.ckpt"
    a_run.fit(callbacks=[SaveThenStop("on_train_batch_end", 3, checkpoint)], limit_train_batches=5)
    words = refused("import", write(tmp_path / "source.json", sample_in_epoch=20), checkpoint)
    assert "reads 5 batches of 4 samples in an epoch, so it does not come to sample 20" in words
    assert edit("import", write(tmp_path / "source.json", sample_in_epoch=16), checkpoint)["trainer"]["batches"] == 4


@pytest.mark.parametrize("sample", [SAMPLES, SAMPLES + 3])
def test_an_imported_epoch_that_is_over_is_the_next_one(
    tmp_path: Path, a_run: Run, whole: Recorder, sample: int
) -> None:
    checkpoint = tmp_path / "run.ckpt"
    a_run.fit(callbacks=[SaveThenStop("on_train_batch_end", 3, checkpoint)])
    told = edit("import", write(tmp_path / "source.json", sample_in_epoch=sample), checkpoint)
    assert told["loaders"]["train"]["to"] == {"epoch": 2, "sample_in_epoch": 0}
    assert a_run.fit(ckpt_path=checkpoint)[0].seen_here == whole.seen[2 * SAMPLES :]


def test_json_that_is_too_deep_is_no_state(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("[" * 100_000)
    told = run("state", "show", tmp_path / "state.json")
    assert (told.code, told.out) == (2, "")
    assert told.err.endswith("state.json is neither a checkpoint, nor a file of torch.save, nor JSON\n")
