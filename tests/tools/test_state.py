"""``lightning-streaming state`` on checkpoints of real trainers, some of runs that skip batches; ``fit`` goes on."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset
from lightning_streaming.resume.state import CALLBACK_KEY, STATE_VERSION
from lightning_streaming.trainer.state_callback import StreamingStateCallback
from tests.helpers import write_dataset
from tests.tools.running import edit_state as edit
from tests.tools.running import run
from tests.tools.running import run as command
from tests.trainer.harness import (
    EPOCHS,
    Recorder,
    Run,
    SaveThenStop,
    Trigger,
    every_n_steps,
    exception_in_step,
    save_in,
    steps_limit,
    with_trainer,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    # Said of every first run that OnExceptionCheckpoint watches over.
    "ignore:`.fit.ckpt_path=None.` was called without a model",
    'ignore:.fit.ckpt_path="last". is set, but there is no last checkpoint',
)
SAMPLES = 29
STEPS = 8
SAVED_BY: dict[str, Trigger] = {
    "batch end": save_in("on_train_batch_end", 11, 0),
    "batch start": save_in("on_train_batch_start", 12, 0),
    "epoch start": save_in("on_train_epoch_start", 2, 0),
    "epoch end": save_in("on_train_epoch_end", 1, 0),
    "validation": save_in("on_validation_end", 1, 0),
    "train end": save_in("on_train_end", 1, 0),
    "last batch": every_n_steps(STEPS, STEPS),
    "exception": exception_in_step(12, 0),
    "max_steps": steps_limit(11, 0),
}
TARGETS = [(0, 0), (0, 8), (1, 12), (1, 13), (2, 28), (1, SAMPLES)]


@pytest.fixture(scope="module")
def saved_once(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After step 11: epoch 1, sample 12."""
    directory = tmp_path_factory.mktemp("saved")
    path = directory / "saved.ckpt"
    Run(data=data, directory=directory).fit(callbacks=[SaveThenStop("on_train_batch_end", 11, path)])
    return path


def refused(*args: object) -> str:
    done = command("state", *args)
    assert (done.code, done.out) == (2, "")
    return done.err


def steps_from(epoch: int, sample: int) -> dict[int, int]:
    first = -(-(SAMPLES - sample) // 4)
    return {epoch: first} | dict.fromkeys(range(epoch + 1, EPOCHS), STEPS) if first else steps_from(epoch + 1, 0)


def test_names_are_those_of_the_callback() -> None:
    callback = StreamingStateCallback()
    assert (callback.state_key, callback.state_dict()["version"]) == (CALLBACK_KEY, STATE_VERSION)


@pytest.fixture(scope="module")
def saved_by(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Copy into a directory the checkpoint that a run has saved in some way; one run for each way."""
    saved: dict[str, Path] = {}

    def copy(by: str, directory: Path) -> Path:
        if by not in saved:
            run = Run(data=data, directory=tmp_path_factory.mktemp("saved_by"))
            saved[by] = SAVED_BY[by](run, None, run.directory / "run.ckpt", 0)
        return Path(shutil.copy(saved[by], directory / "run.ckpt"))

    return copy


@pytest.mark.rotate(3)
@pytest.mark.parametrize("by", SAVED_BY)
def test_what_is_set_is_the_place_alone_however_it_was_saved(
    saved_by: Callable[[str, Path], Path], by: str, tmp_path: Path
) -> None:
    for target in TARGETS:
        checkpoint = saved_by(by, tmp_path)
        before = torch.load(checkpoint)
        told = edit("set", checkpoint, "--epoch", target[0], "--sample", target[1])
        epoch, sample = (target[0] + 1, 0) if target[1] == SAMPLES else target
        step = before["global_step"]
        assert told["loaders"]["train"]["to"] == {"epoch": epoch, "sample_in_epoch": sample}, target
        assert told["trainer"] == {
            "epoch": epoch, "batches": sample // 4, "batches_in_epoch": STEPS, "global_step": step
        }, target  # fmt: skip
        assert cursor(checkpoint) == (epoch, sample), target
        after = torch.load(checkpoint)
        loop = after["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        assert set(batches["current"].values()) == {sample // 4}, target
        assert batches["is_last_batch"] is False
        assert batches["total"]["completed"] == step == after["global_step"], target
        begun = epoch + (sample > 0)
        in_epoch = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
        assert loop["epoch_progress"]["current"] == in_epoch, target
        assert (after["epoch"], after["seen"]) == (epoch, before["seen"]), target


@pytest.mark.rotate(3)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("by", SAVED_BY)
def test_fit_goes_on_where_it_was_set(
    a_run: Run, saved_by: Callable[[str, Path], Path], whole: Recorder, by: str, target: tuple[int, int]
) -> None:
    epoch, sample = target
    checkpoint = saved_by(by, a_run.directory)
    steps_before = torch.load(checkpoint)["global_step"]
    edit("set", checkpoint, "--epoch", epoch, "--sample", sample)
    resumed, trainer = a_run.fit(ckpt_path=checkpoint)
    assert resumed.seen_here == whole.seen[epoch * SAMPLES + sample :]
    trained = {e: n - torch.load(checkpoint)["steps_per_epoch"].get(e, 0) for e, n in resumed.steps_per_epoch.items()}
    assert {e: n for e, n in trained.items() if n} == steps_from(epoch, sample)
    assert trainer.global_step == steps_before + sum(steps_from(epoch, sample).values())
    assert trainer.current_epoch == EPOCHS
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == trainer.global_step
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == trainer.global_step


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("run_settings", "trainer_settings"),
    [
        ({}, {"accumulate_grad_batches": 2}),
        ({}, {"max_steps": 40, "max_epochs": -1}),
        ({}, {"val_check_interval": 3}),
        ({"workers": 2, "persistent": True}, {}),
        ({"schedule_from_trainer": True}, {}),
        ({"order": {"batching_method": "stratified"}, "batch_size": 2}, {}),
    ],
    ids=str,
)
def test_fit_goes_on_where_it_was_set_with_other_settings(
    a_run: Run, run_settings: dict[str, Any], trainer_settings: dict[str, Any]
) -> None:
    run = with_trainer(replace(a_run, **run_settings), **trainer_settings)
    never_stopped = run.fit()[0].seen
    in_epoch = sum(epoch == 0 for epoch, _ in never_stopped)
    checkpoint = SAVED_BY["batch end"](run, None, a_run.directory / "run.ckpt", 0)
    edit("set", checkpoint, "--epoch", 1, "--sample", 16)
    resumed = run.fit(ckpt_path=checkpoint)[0].seen_here
    # With max_steps the number of steps stays, not that of epochs.
    expected = never_stopped[in_epoch + 16 :]
    assert len(resumed) > in_epoch
    assert resumed[: len(expected)] == expected[: len(resumed)]


def test_a_limited_epoch_stays_limited(a_run: Run) -> None:
    run = with_trainer(a_run, limit_train_batches=5)
    never_stopped = run.fit()[0].seen
    checkpoint = save_in("on_train_batch_end", 7, 0)(run, None, a_run.directory / "run.ckpt", 0)
    words = refused("set", checkpoint, "--epoch", 1, "--sample", 20)
    assert "reads 5 batches of 4 samples in an epoch, so it does not come to sample 20" in words
    edit("set", checkpoint, "--epoch", 1, "--sample", 16)
    assert run.fit(ckpt_path=checkpoint)[0].seen_here == never_stopped[20 + 16 :]
    assert edit("skip", checkpoint, "--batches", 1)["loaders"]["train"]["to"] == {"epoch": 2, "sample_in_epoch": 0}
    assert run.fit(ckpt_path=checkpoint)[0].seen_here == never_stopped[40:]


def test_another_batch_size_goes_on_at_the_same_sample(a_run: Run, whole: Recorder, saved: Path) -> None:
    edit("set", saved, "--epoch", 0, "--sample", 7)
    assert replace(a_run, batch_size=3).fit(ckpt_path=saved)[0].seen_here == whole.seen[7:]


@pytest.mark.rotate(3)
@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (["--samples", 5], (1, 17)),
        (["--samples", 17], (2, 0)),
        (["--samples", 18], (2, 1)),
        (["--batches", 4], (1, 28)),
        (["--batches", 5], (2, 0)),
        (["--batches", 7], (2, 8)),
    ],
    ids=str,
)
def test_fit_goes_on_after_what_is_skipped(
    a_run: Run, whole: Recorder, saved: Path, amount: list[object], expected: tuple[int, int]
) -> None:
    told = edit("skip", saved, *amount)
    epoch, sample = expected
    assert told["loaders"]["train"] == {
        "from": {"epoch": 1, "sample_in_epoch": 12},
        "to": {"epoch": epoch, "sample_in_epoch": sample},
    }
    assert (told["trainer"]["epoch"], told["trainer"]["batches"]) == (epoch, sample // 4)
    assert a_run.fit(ckpt_path=saved)[0].seen_here == whole.seen[epoch * SAMPLES + sample :]


def test_a_batch_may_be_skipped_after_an_epoch_whose_end_was_not_closed(a_run: Run, whole: Recorder) -> None:
    checkpoint = SAVED_BY["last batch"](a_run, None, a_run.directory / "run.ckpt", 0)
    assert edit("skip", checkpoint, "--batches", 1)["loaders"]["train"]["from"] == {"epoch": 1, "sample_in_epoch": 0}
    assert a_run.fit(ckpt_path=checkpoint)[0].seen_here == whole.seen[SAMPLES + 4 :]


def test_moving_forth_and_back_saves_what_was_there(saved: Path, a_run: Run, whole: Recorder) -> None:
    edit("skip", saved, "--samples", 40)
    edit("set", saved, "--epoch", 1, "--sample", 12)
    assert a_run.fit(ckpt_path=saved)[0].seen_here == whole.seen[SAMPLES + 12 :]


def test_only_the_place_and_its_counters_change(saved: Path) -> None:
    before = torch.load(saved, weights_only=True)
    edit("skip", saved, "--batches", 1)
    after = torch.load(saved, weights_only=True)
    for checkpoint in (before, after):
        place = checkpoint["callbacks"][CALLBACK_KEY]
        del place["trainer"], place["loaders"]["train"]["sample_in_epoch"]
        del checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        del checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"], checkpoint["loops"]["fit_loop"]["state_dict"]
    weights = [checkpoint.pop("state_dict") for checkpoint in (before, after)]
    assert before == after
    assert [torch.equal(weights[0][name], weights[1][name]) for name in weights[0]] == [True, True]


def test_backups_are_never_written_over(saved: Path) -> None:
    contents = [saved.read_bytes()]
    for name in ("run.ckpt.bak", "run.ckpt.bak2", "run.ckpt.bak3"):
        assert edit("skip", saved, "--samples", 1)["backup"] == str(saved.with_name(name))
        contents.append(saved.read_bytes())
    found = [saved.with_name(name).read_bytes() for name in ("run.ckpt.bak", "run.ckpt.bak2", "run.ckpt.bak3")]
    assert found == contents[:3]
    assert len(set(contents)) == 4


def test_out_writes_a_new_file_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    assert edit("set", saved, "--epoch", 0, "--sample", 0, "--out", tmp_path / "new.ckpt")["backup"] is None
    assert saved.read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {"run.ckpt", "new.ckpt"}
    assert cursor(tmp_path / "new.ckpt") == (0, 0)
    assert "exists and is not overwritten" in refused(
        "set", saved, "--epoch", 0, "--sample", 0, "--out", tmp_path / "new.ckpt"
    )


def test_a_link_is_followed(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("run.ckpt")
    edit("set", tmp_path / "last.ckpt", "--epoch", 0, "--sample", 4)
    assert (tmp_path / "last.ckpt").is_symlink()
    assert cursor(saved) == (0, 4)
    assert cursor(tmp_path / "run.ckpt.bak") == (1, 12)


def test_a_backup_is_copied_where_there_are_no_hard_links(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    content = saved.read_bytes()
    edit("skip", saved, "--samples", 1)
    edit("skip", saved, "--samples", 1)
    assert saved.with_name("run.ckpt.bak").read_bytes() == content
    assert cursor(saved.with_name("run.ckpt.bak2")) == (1, 13)


def test_a_failed_write_leaves_the_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_value: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    content = saved.read_bytes()
    monkeypatch.setattr(torch, "save", fail)
    assert "no space left" in refused("skip", saved, "--samples", 1)
    assert saved.read_bytes() == content
    assert {path.name for path in saved.parent.iterdir()} == {"run.ckpt", "run.ckpt.bak"}


def cursor(path: Path) -> tuple[int, int]:
    (loader,) = shown(path)["loaders"].values()
    return loader["epoch"], loader["sample_in_epoch"]


def shown(path: Path, *args: object) -> Any:
    return edit("show", path, *args)


def test_show_tells_where_the_run_is(saved: Path) -> None:
    told = shown(saved)
    assert told["trainer"] == {"epoch": 1, "batches": 3, "batches_in_epoch": 8, "global_step": 11}
    train = told["loaders"]["train"]
    assert (train["epoch"], train["sample_in_epoch"], train["epoch_size"]) == (1, 12, SAMPLES)
    assert train["epoch_done"] == pytest.approx(12 / SAMPLES, abs=1e-5)
    assert (train["shuffle_seed"], train["num_canonical_nodes"], train["samples_per_global_batch"]) == (9176, 1, 4)
    read = [(stream["name"], stream["before"], stream["this_epoch"]) for stream in train["streams"]]
    assert read == [("a", 17, None), ("b", 12, None)]


def test_show_counts_each_stream_by_the_data(saved: Path, data: Path, whole: Recorder) -> None:
    of_epoch = [sample // 1000 for epoch, sample in whole.seen if epoch == 1][:12]
    told = shown(saved, "--data", f"b={data / 'b'}", "--data", f"a={data / 'a'}")
    read = [(stream["name"], stream["this_epoch"]) for stream in told["loaders"]["train"]["streams"]]
    assert read == [("a", of_epoch.count(0)), ("b", of_epoch.count(1))]


def test_show_refuses_other_data(saved: Path, data: Path) -> None:
    words = refused("show", saved, "--data", f"a={data / 'b'}", "--data", f"b={data / 'a'}", "--json")
    assert "streams.a.samples" in words
    assert "the streams a, b" in refused("show", saved, "--data", f"a={data / 'a'}", "--json")


def test_show_cannot_count_streams_of_which_some_samples_were_read(tmp_path: Path) -> None:
    for first, name in enumerate("ab"):
        write_dataset(tmp_path / name, 20, first_id=100 * first)
    streams = {
        "a": Stream(remote=str(tmp_path / "a"), selection={"where": "id < 9"}),
        "b": Stream(remote=str(tmp_path / "b")),
    }
    loader = StreamingDataLoader(StreamingDataset(streams=streams, shuffle=True), batch_size=4)
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    path = str(tmp_path / "state.pt")
    told_by = f"`lightning-streaming state show {path} --config run.yaml`"
    assert told_by in " ".join(command("state", "show", path).out.split())
    places = [arg for name in "ab" for arg in ("--data", f"{name}={tmp_path / name}")]
    words = refused("show", tmp_path / "state.pt", *places, "--json")
    assert "was saved with a selection of a, which it does not contain" in words
    assert told_by in words


def test_show_draws_tables(saved: Path) -> None:
    told = command("state", "show", saved)
    words = " ".join(told.out.split())
    for part in (
        "trainer at epoch 1, 3 of 8 batches done, global step 11",
        "sample in epoch 12 of 29, 41.4%",
        "global batch 4 samples",
        "shuffle algo py1e",
        "--data NAME=PLACE",
    ):
        assert part in words


class Touching:
    """Writes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_checkpoint_runs_no_code_unless_it_may(saved: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(saved)
    checkpoint["hyper_parameters"] = Touching(tmp_path / "ran")
    torch.save(checkpoint, saved)
    assert cursor(saved) == (1, 12)
    assert "pass --allow-unsafe-types" in refused("skip", saved, "--samples", 1)
    assert not (tmp_path / "ran").exists()
    edit("skip", saved, "--samples", 1, "--allow-unsafe-types")
    assert (tmp_path / "ran").exists()
    assert cursor(saved) == (1, 13)


def test_several_loaders_are_moved_by_name(saved: Path) -> None:
    checkpoint = torch.load(saved)
    place = checkpoint["callbacks"][CALLBACK_KEY]
    place["loaders"] = {name: dict(place["loaders"]["train"]) for name in ("text", "code")}
    place["samples_per_global_batch"] = {"text": 4, "code": 2}
    torch.save(checkpoint, saved)
    words = refused("skip", saved, "--samples", 1)
    assert "there are positions of 2 loaders; name one with --loader: text, code" in words
    told = edit("set", saved, "--epoch", 0, "--sample", 2, "--loader", "code")
    assert told["trainer"] == {"epoch": 1, "batches": 3, "batches_in_epoch": 8, "global_step": 11}
    told = edit("skip", saved, "--batches", 2)
    assert told["trainer"]["batches"] == 5
    assert [one["to"]["sample_in_epoch"] for one in told["loaders"].values()] == [20, 6]
    assert "beyond the end of an epoch" in refused("skip", saved, "--batches", 3)


def test_batches_of_an_unknown_size_are_not_guessed(saved: Path) -> None:
    checkpoint = torch.load(saved)
    del checkpoint["callbacks"][CALLBACK_KEY]["samples_per_global_batch"]
    torch.save(checkpoint, saved)
    assert "pass --samples" in refused("skip", saved, "--batches", 1)
    assert edit("skip", saved, "--samples", 4)["loaders"]["train"]["to"] == {"epoch": 1, "sample_in_epoch": 16}


def test_where_composed_batches_end_is_not_guessed(a_run: Run) -> None:
    run = replace(a_run, order={"batching_method": "per_stream"})
    checkpoint = SAVED_BY["batch end"](run, None, a_run.directory / "run.ckpt", 0)
    assert "use --batches" in refused("skip", checkpoint, "--samples", 20)
    assert shown(checkpoint)["loaders"]["train"]["batch_geometry"]["batch_size"] == 4


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["set", "--epoch", 0, "--sample", 30], "an epoch has 29 samples, so there is no sample 30"),
        (["set", "--epoch", 0, "--sample", 1, "--loader", "val"], "no position of 'val'; there is: train"),
        (["set", "--epoch", 0], "--sample"),
        (["skip"], "one of the arguments --samples --batches is required"),
        (["skip", "--samples", 0], "at least 1"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_nothing_written(saved: Path, args: list[object], words: str) -> None:
    content = saved.read_bytes()
    assert words in refused(args[0], saved, *args[1:])
    assert saved.read_bytes() == content
    assert [path.name for path in saved.parent.iterdir()] == ["run.ckpt"]


SKIP = ["1-2", "5", "11-12"]
"""Of 29 samples in batches of 4: 0-3, 12-19 and 24-28 are left of epoch 0, and 0-11 and 20-28 of epoch 1."""


class TestSkippedBatches:
    """Checkpoints of runs that skip batches."""

    @pytest.fixture(scope="class")
    @classmethod
    def a_run(cls, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
        return Run(data=data, directory=tmp_path_factory.mktemp("run"), order={"skip": SKIP})

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, a_run: Run) -> Recorder:
        return a_run.fit()[0]

    @pytest.fixture(scope="class")
    @classmethod
    def saved_once(cls, a_run: Run) -> Path:
        """After batches 0 and 3."""
        path = a_run.directory / "saved.ckpt"
        a_run.fit(callbacks=[SaveThenStop("on_train_batch_end", 2, path)])
        return path

    @pytest.mark.parametrize(
        ("args", "place"),
        [
            (["--batches", 1], (0, 20)),
            (["--batches", 2], (0, 28)),
            (["--samples", 6], (0, 26)),
            (["--samples", 9], (1, 0)),
            (["--samples", 9 + 12], (1, 12)),
            (["--samples", 9 + 13], (1, 21)),
            (["--samples", 9 + 21 + 29 + 3], (3, 3)),
        ],
    )
    def test_what_is_skipped_anyway_is_not_counted(
        self, saved: Path, args: list[object], place: tuple[int, int]
    ) -> None:
        moved = edit("skip", saved, *args)["loaders"]["train"]["to"]
        assert (moved["epoch"], moved["sample_in_epoch"]) == place

    def test_fit_goes_on_after_what_was_moved_over(self, a_run: Run, whole: Recorder, saved: Path) -> None:
        assert edit("skip", saved, "--batches", 2)["trainer"]["batches"] == 4
        model, trainer = a_run.fit(ckpt_path=saved)
        assert model.seen == [*whole.seen[:8], *whole.seen[16:]]
        assert trainer.current_epoch == 3

    def test_batches_that_lead_to_an_epoch_of_another_length_are_not_guessed(self, saved: Path) -> None:
        done = command("state", "skip", saved, "--batches", 3)
        assert done.code == 2
        assert "the run skips others (1-2, 5, 11-12)" in done.err

    def test_show_tells_what_is_skipped(self, saved: Path, data: Path, whole: Recorder) -> None:
        shown = edit("show", saved)["loaders"]["train"]
        assert [list(end.values()) for end in shown["skipped"]["1-2"]] == [[0, 4], [0, 12]]
        counted = edit("show", saved, *(arg for name in "ab" for arg in ("--data", f"{name}={data / name}")))
        streams = counted["loaders"]["train"]["streams"]
        seen = [sample for _, sample in whole.seen[:8]]
        assert [one["this_epoch"] for one in streams] == [sum(s < 1000 for s in seen), sum(s >= 1000 for s in seen)]
        table = command("state", "show", saved).out
        assert "skips 11-12" in table
        assert "epoch 1, samples 12 to 20" in table

    def test_of_finished_epochs_it_is_not_known_what_was_read_of_each_stream(self, saved: Path) -> None:
        edit("set", saved, "--epoch", 2, "--sample", 0)
        assert [one["before"] for one in edit("show", saved)["loaders"]["train"]["streams"]] == [None, None]

    def test_the_state_loads_with_plain_values_alone(self, saved: Path) -> None:
        state = torch.load(saved, weights_only=True)["callbacks"]["lightning_streaming.StreamingStateCallback"]
        assert state["loaders"]["train"]["skipped"] == {
            "1-2": [0, 4, 0, 12],
            "5": [0, 20, 0, 24],
            "11-12": [1, 12, 1, 20],
        }


STATE = {
    "version": 1,
    "epoch": 1,
    "sample_in_epoch": 12,
    "shuffle_seed": 9176,
    "num_canonical_nodes": 1,
    "initial_physical_nodes": 1,
    "fingerprint": None,
}


@pytest.fixture(params=["json", "torch"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / f"state.{request.param}"
    if request.param == "json":
        path.write_text(json.dumps(STATE))
    else:
        torch.save(STATE, path)
    return path


@contextmanager
def no_room() -> Iterator[None]:
    """Files of this process may have 16 bytes only, which fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


MOVES = [("set", "--epoch", 1, "--sample", 8), ("skip", "--samples", 4)]


@pytest.mark.parametrize("move", MOVES, ids=["set", "skip"])
def test_a_folder_that_does_not_exist_is_told(place: Path, move: tuple[object, ...]) -> None:
    verb, *words = move
    outcome = run("state", verb, place, *words, "--out", place.parent / "none" / "new")
    assert outcome.code == 2
    assert f"there is no directory {place.parent / 'none'}; create it" in outcome.err


@pytest.mark.parametrize("more", [(), ("--out", "new")], ids=["in_place", "new"])
@pytest.mark.parametrize("move", MOVES, ids=["set", "skip"])
def test_a_full_disk_is_told_and_changes_nothing(
    place: Path, move: tuple[object, ...], more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.parent)
    before = place.read_bytes()
    verb, *words = move
    with no_room():
        outcome = run("state", verb, place, *words, *more)
    assert outcome.code == 2
    assert "could not be written: " in outcome.err
    assert place.read_bytes() == before
    assert {path.name for path in place.parent.iterdir()} <= {place.name, f"{place.name}.bak"}
