"""What the command line says of runs that fail."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]

import lightning_streaming.trainer.cli  # noqa: F401  what a fork of this process need not import again
from lightning_streaming.errors import ObjectNotFoundError, SampleError
from tests.tools.forked import command_line, run_forked
from tests.tools.running import Outcome, flip_byte, run, write_texts

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty", "ignore:.*use of fork.*:DeprecationWarning"
)

MODELS = """
import os
import signal
import torch
from tests.trainer.test_cli import TinyModel
from lightning_streaming import StreamingDataModule

class Wide(TinyModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

class Validated(TinyModel):
    def validation_step(self, batch, batch_idx): ...

class NotAModel: ...

class Unmade(TinyModel):
    def __init__(self): raise RuntimeError("the user's trouble")

class Untrained(TinyModel):
    def training_step(self, batch, batch_idx): raise OSError("the user's trouble")

class Interrupted(TinyModel):  # in its third step
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)

class Untransformed(StreamingDataModule):
    def transform(self, sample, stage, rng): raise OSError("the user's trouble")

class Compiled(StreamingDataModule):
    def transform(self, sample, stage, rng):
        import pandas
        return pandas.Series([1]).map(lambda one: one / 0)
"""


@pytest.fixture(autouse=True)
def _run_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-streaming"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("failing_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for name in ("code", "docs", "val"):
        write_texts(tmp_path / name)
    Path("failing_models.py").write_text(MODELS)
    Path("failing_syntax.py").write_text("x = \n")
    Path("failing_import.py").write_text("import no_such_package\n")
    Path("failing_name.py").write_text("x = y\n")
    Path("junk.ckpt").write_text("junk\n")
    streams = {name: {"remote": name, "proportion": 0.5} for name in ("code", "docs")}
    settings = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "logger": False, "enable_progress_bar": False}
    content = {
        "seed_everything": 1,
        "model": {"class_path": "tests.trainer.test_cli.TinyModel"},
        "data": {"init_args": {"batch_size": 2, "train": {"streams": streams, "shuffle": False, "columns": ["id"]}}},
        "trainer": {**settings, "enable_model_summary": False, "default_root_dir": "out"},
    }
    Path("run.yaml").write_text(yaml.safe_dump(content))


VALIDATED = "--model=failing_models.Validated"


def told(*args: str, code: int = 2) -> str:
    """What a failing ``fit`` says last, in one line."""
    ended = run("fit", "--config", "run.yaml", *args)
    assert ended.code == code
    assert "Traceback" not in ended.err
    lines = [line for line in ended.err.splitlines() if "error: " in line]
    assert len(lines) == 1
    return lines[0].partition("error: ")[2]


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data.train.streams.code.remote=none"], ["stream 'code' of data.train", "there is no dataset at", "none"]),
        (["--data.train.streams.code.remote=none", "--data.num_workers=1"], ["stream 'code' of data.train"]),
        (["--data.train.streams.cod.remote=code"], ["proportion", "'code', 'docs' have one", "'cod' has none"]),
        (
            ["--data.train.streams.cod.proportion=1"],
            ["data.train.streams.cod: a stream needs remote=", "the streams are code, docs, cod"],
        ),
        (["--data.train.streams.docs.proportion=-1"], ["data.train.streams.docs: proportion must be", "-1"]),
        (["--data.train.streams=[1]"], ["data.train.streams must be a mapping", "a list"]),
        (["--data.val.shuffle=true"], ["data.val: the data of a stage needs streams=, remote= or local="]),
        (["--model=failing_models.Wid"], ["model.class_path", "failing_models has no Wid", "did you mean Wide?"]),
        (["--model=failing_nowhere.Model"], ["model.class_path", "cannot import failing_nowhere"]),
        (["--model=failing_models.NotAModel"], ["failing_models.NotAModel is not derived from LightningModule"]),
        (["--model=failing_import.X"], ["cannot import failing_import: No module named 'no_such_package'"]),
        (["--model=failing_syntax.X"], ["cannot import failing_syntax: invalid syntax (failing_syntax.py, line 1)"]),
        (["--data=failing_models.NotAModel"], ["data.class_path", "is not derived from LightningDataModule"]),
        (["--ckpt_path=nowhere.ckpt"], ["there is no checkpoint nowhere.ckpt"]),
        (["--ckpt_path=junk.ckpt"], ["the checkpoint junk.ckpt cannot be read"]),
        (
            ["--trainer.precision=bf17"],
            ["trainer.precision must be one of 64, 32, 16, 'transformer-engine'", "but got 'bf17'"],
        ),
        (["--config=junk.ckpt"], ["is not a configuration, which has model:, data: and trainer:"]),
    ],
)
def test_a_mistake_is_told_in_a_paragraph(args: list[str], words: list[str]) -> None:
    line = told(*args)
    for word in words:
        assert word in line


def test_missing_validation_data_is_called_by_its_stage() -> None:
    assert told(VALIDATED, "--data.val.remote=none").startswith("data.val: there is no dataset at")


@pytest.mark.nightly
def test_a_store_without_credentials_is_told_in_a_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    line = told(VALIDATED, "--data.val.remote=s3://bucket/x", "--data.val.download_retry=0")
    assert line.startswith("data.val: could not download s3://bucket/x/index.json: access denied (NoCredentialsError")
    assert "; check the credentials" in line


def test_damaged_data_has_a_code_of_its_own() -> None:
    flip_byte(Path("code", "shard.00000.mds"), 3)
    Path("code", "index.json").write_text("{")
    assert "index.json" in told(code=1)


@pytest.mark.nightly
def test_a_checkpoint_of_another_model_or_data_is_told_in_a_paragraph() -> None:
    assert run("fit", "--config", "run.yaml").code == 0
    (checkpoint,) = Path("out").rglob("*.ckpt")
    resumed = [f"--ckpt_path={checkpoint}", "--trainer.max_steps=4"]
    line = told(*resumed, "--model=failing_models.Wide")
    assert "is of another model" in line
    assert "size mismatch for layer.weight" in line
    assert "other data or another order" in told(*resumed, "--data.train.shuffle=true")


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (["--model=failing_models.Unmade"], RuntimeError),
        (["--model=failing_models.Untrained"], OSError),
        (["--model=failing_name.X"], NameError),
    ],
)
def test_what_the_code_of_the_user_raises_keeps_its_traceback(args: list[str], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"the user's trouble|name 'y' is not defined") as raised:
        run("fit", "--config", "run.yaml", *args)
    assert re.search(r"File \".*failing_\w+\.py\"", "".join(traceback.format_exception(raised.value)))


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["0", "1"])
def test_of_a_transform_that_fails_its_line_and_the_columns_are_told(workers: str) -> None:
    fit = ("fit", "--config", "run.yaml", "--data=failing_models.Untransformed", f"--data.num_workers={workers}")
    ended = run(*fit)
    assert (ended.code, ended.err.count("the user's trouble")) == (2, 2)
    error, line, columns, key, hint = ended.err[ended.err.index("lightning-streaming fit: error: ") :].splitlines()
    assert error.endswith("transform failed on sample 0 of shard 0 of stream 'code': OSError: the user's trouble")
    (number,) = [number for number, one in enumerate(MODELS.splitlines(), 1) if "rng): raise" in one]
    assert line.startswith(f"in transform of failing_models.py, line {number}: def transform(self, sample, stage, rng)")
    assert columns == "When it failed, the sample had id (int)"
    assert key.startswith('This sample alone, as it failed: dataset.restore_sample({"stream": "code"')
    assert hint == "--debug shows the whole traceback"
    with pytest.raises(SampleError, match="the user's trouble") as raised:
        run(*fit, "--debug")
    assert re.search(r"File \".*failing_\w+\.py\"", "".join(traceback.format_exception(raised.value)))


@pytest.mark.rotate(1)
@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_line_is_of_the_user_where_compiled_code_was_called(workers: str) -> None:
    ended = run("fit", "--config", "run.yaml", "--data=failing_models.Compiled", f"--data.num_workers={workers}")
    (line,) = [line for line in ended.err.splitlines() if line.startswith("in ")]
    (number,) = [number for number, one in enumerate(MODELS.splitlines(), 1) if "one / 0" in one]
    assert re.match(rf"in (<lambda>|transform) of failing_models\.py, line {number}: return pandas", line)


@pytest.mark.nightly
def test_debug_shows_the_whole() -> None:
    with pytest.raises(ObjectNotFoundError, match=r"data\.val: there is no dataset"):
        run("fit", "--config", "run.yaml", VALIDATED, "--data.val.remote=none", "--debug")


def test_a_resume_on_other_data_is_refused_with_the_arguments_that_go_on() -> None:
    fit = ("fit", "--config", "run.yaml", checkpoints("ModelCheckpoint", every_n_train_steps=1, save_last=True))
    assert run(*fit).code == 0
    changed = (*fit, "--data.train.shuffle=true", "--ckpt_path=saved/last.ckpt", "--trainer.max_steps=3")
    refused = run(*changed)
    assert refused.code == 2
    *_, way_out = refused.err.splitlines()
    way = "--trainer.callbacks+=lightning_streaming.StreamingStateCallback --trainer.callbacks.on_mismatch=warn"
    assert way_out == f"To resume nevertheless: {way}"
    assert run(*changed, *way.split()).code == 0


def test_streams_of_which_some_have_a_proportion_are_refused_by_stage() -> None:
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("proportion: 0.5", "repeat: 1", 1))
    assert "data.train: proportion must be given for all 2 streams or for none" in told()


def checkpoints(class_name: str, **settings: object) -> str:
    """An argument that adds a callback of Lightning which saves into ``saved``."""
    arguments = {"dirpath": "saved", **settings}
    callback = {"class_path": f"lightning.pytorch.callbacks.{class_name}", "init_args": arguments}
    return f"--trainer.callbacks+={json.dumps(callback)}"


Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def program() -> Iterator[str]:
    """Shell that defines our command line."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("failing_")]:
            patch.delitem(sys.modules, name)
        with command_line() as defined:
            yield defined


@pytest.fixture
def trained(program: str) -> Train:
    """Train five steps in a process of its own, which Ctrl-C may interrupt."""

    def train(*args: str) -> Outcome:
        return run_forked(program, "fit", "--config", "run.yaml", "--trainer.max_steps=5", *args, env=os.environ)

    return train


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    ("saves", "told"),
    [
        (checkpoints("OnExceptionCheckpoint"), "resume from step 2 with --ckpt_path saved/on_exception.ckpt"),
        (
            checkpoints("ModelCheckpoint", every_n_train_steps=1, save_last=True),
            "resume from step 2 with --ckpt_path {here}/saved/last.ckpt",
        ),
        (
            checkpoints("ModelCheckpoint", every_n_train_steps=5),
            "no checkpoint of it is on this machine; --trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint "
            "--trainer.callbacks.every_n_train_steps=100 saves them",
        ),
    ],
)
def test_ctrl_c_ends_training_with_130_and_a_hint_to_resume(trained: Train, saves: str, told: str) -> None:
    ended = trained("--model=failing_models.Interrupted", saves)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    (line,) = [line for line in ended.err.splitlines() if "interrupted" in line]
    assert line == f"lightning-streaming fit: interrupted in step 2; {told.format(here=Path.cwd())}"


@pytest.mark.nightly
def test_the_arguments_of_the_hint_save_checkpoints(trained: Train) -> None:
    interrupted = trained("--model=failing_models.Interrupted", checkpoints("ModelCheckpoint", every_n_train_steps=5))
    told = interrupted.err.partition("on this machine; ")[2].partition(" saves them")[0]
    ended = trained("--model=failing_models.Interrupted", *told.replace("steps=100", "steps=1").split())
    assert "interrupted in step 2; resume from step 2 with --ckpt_path " in ended.err


ANEW = "This run starts from scratch, and a checkpoint of step {} exists: --ckpt_path {} resumes from there. Once "


@pytest.mark.nightly
def test_a_run_next_to_checkpoints_logs_how_to_resume_them(trained: Train) -> None:
    saves = checkpoints("ModelCheckpoint", every_n_train_steps=2, save_last=True)
    first = trained(saves, "--trainer.max_steps=2")
    assert "starts from scratch" not in first.err
    told = ANEW.format(2, Path("saved/last.ckpt").absolute())
    torch.save({"global_step": 7}, Path("saved", "newer.ckpt"))
    Path("saved", "newest.ckpt").write_text("junk")
    again = trained(saves)
    assert told in again.err
    assert "Resumed" not in again.err
    went_on = trained(saves, *re.findall("--ckpt_path [^ ]+", told)[0].split())
    assert "Resumed 'train' at epoch 0, sample 4 (step 2, " in went_on.err
    assert "starts from scratch" not in went_on.err


@pytest.mark.nightly
def test_it_does_not_where_slurm_has_put_a_job_back(trained: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = checkpoints("ModelCheckpoint", every_n_train_steps=2, save_last=True)
    assert trained(saves, "--trainer.max_steps=2").code == 0
    Path("out").mkdir(exist_ok=True)
    Path("saved", "last.ckpt").rename(Path("out", "hpc_ckpt_1.ckpt"))
    for name, value in {"NTASKS": "1", "JOB_NAME": "job", "JOB_ID": "1", "NODEID": "0", "PROCID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_LOCALID", "0")
    went_on = trained(saves)
    assert "Resumed 'train' at epoch 0, sample 4 (step 2, " in went_on.err
    assert "starts from scratch" not in went_on.err


@pytest.mark.nightly
def test_so_it_does_where_no_directory_was_named(trained: Train) -> None:
    assert trained("--trainer.max_steps=2").code == 0
    (saved,) = Path("out", "checkpoints").glob("*.ckpt")
    assert ANEW.format(2, saved) in trained("--trainer.max_steps=2").err


def test_what_is_saved_on_ctrl_c_goes_on(trained: Train) -> None:
    saves = checkpoints("OnExceptionCheckpoint")
    assert trained("--model=failing_models.Interrupted", saves).code == 130
    resumed = trained(saves, "--ckpt_path=saved/on_exception.ckpt")
    assert resumed.code == 0
    assert "Resumed 'train' at epoch 0, sample 4 (step 2, saved/on_exception.ckpt)." in resumed.err
