"""The other examples, run as a user would."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import line_run
from examples.demo import ROOT
from examples.write_dataset import BLOCK
from lightning_streaming import StreamingDataset
from tests.forked_ranks import on_ranks


def run(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run an example in another process."""
    command = [sys.executable, str(ROOT / "examples" / f"{module}.py"), *args]
    return subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True, timeout=100, check=False)


def run_forked(module: str, *args: str, output: Path) -> int:
    """Run an example as a script in a fork of this process, where libraries are imported already; return its status."""
    program = multiprocessing.get_context("fork").Process(target=_run_script, args=(module, args, output))
    program.start()
    program.join(100)
    assert program.exitcode is not None
    return program.exitcode


def _run_script(module: str, args: Sequence[str], output: Path) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    path = ROOT / "examples" / f"{module}.py"
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        del sys.modules[name]  # a script has to find the other examples
    os.chdir(tempfile.gettempdir())
    sys.argv = [str(path), *args]
    sys.path = [str(path.parent), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.stdout.flush()


def run_here(module: str, *args: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an example in this process, which has imported everything already."""
    monkeypatch.setattr(sys, "argv", [module, *args])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    runpy.run_module(f"examples.{module}", run_name="__main__")


PROGRAMS = [
    "accelerate_loop",
    "compare_runs",
    "custom_datamodule",
    "demo",
    "elastic",
    "every_nth",
    "fabric_loop",
    "huggingface_trainer",
    "imagenet",
    "joined_columns",
    "linked_batch_size",
    "packed_documents",
    "plain_pytorch",
    "pretrain",
    "replicas",
    "sft",
    "write_dataset",
    "write_parquet",
]
NO_PROGRAMS = ["__init__", "byte_transformer", "line_run", "loss_log", "weights_by_loss"]


@pytest.mark.parametrize("module", PROGRAMS)
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_every_program_explains_itself_from_any_directory(module: str, tmp_path: Path) -> None:
    assert run_forked(module, "--help", output=tmp_path / "help") == 0
    assert (tmp_path / "help").read_text().startswith("usage:")


def test_every_example_is_in_the_table_with_its_time() -> None:
    table = (ROOT / "examples" / "README.md").read_text()
    files = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert files == {*PROGRAMS, *NO_PROGRAMS, "ray_train"}
    for name in files - {"__init__"}:
        assert f"[{name}.py]({name}.py)" in table
    for name in {*PROGRAMS, "ray_train"}:
        head = (ROOT / "examples" / f"{name}.py").read_text().split('"""')[1]
        assert f"python examples/{name}.py" in head
        assert "second" in head or "minute" in head, "how long it takes"


def test_write_dataset_cuts_a_folder_of_texts_into_blocks(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_bytes(b"b" * BLOCK)
    (tmp_path / "texts" / "a.txt").write_bytes(b"a" * (2 * BLOCK + 5))
    ended = run("write_dataset", "--texts", str(tmp_path / "texts"), "--out", str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"  {tmp_path / 'out'}: 3 samples of {BLOCK} bytes\n", "a pipe gets no carriage returns"
    dataset = StreamingDataset(remote=str(tmp_path / "out"))
    assert [(sample["id"], bytes(sample["tokens"])) for sample in dataset[:]] == [
        (0, b"a" * BLOCK),
        (1, b"a" * BLOCK),
        (2, b"b" * BLOCK),
    ]


def test_example_streams_have_no_id_in_common(example_data: Path) -> None:
    ids = [
        sample["id"]
        for name in ("code", "docs")
        for sample in StreamingDataset(remote=str(example_data / "data" / name))[:]
    ]
    assert len(ids) == len(set(ids)) == 8000


@pytest.mark.nightly
def test_plain_pytorch_resumes_exactly(tmp_path: Path) -> None:
    stopped = run("plain_pytorch", "--out", str(tmp_path / "out"), "--stop-after", "77")
    assert "'epoch': 0, 'sample_in_epoch': 616" in stopped.stdout, stopped.stderr
    ended = run("plain_pytorch", "--out", str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("2000 samples read")
    assert "samples and their order True, weights True." in ended.stdout


@pytest.mark.nightly
def test_elastic_counts_each_sample_once_an_epoch(tmp_path: Path) -> None:
    ended = run("elastic", "--out", str(tmp_path / "out"), "--pause", "0")
    assert ended.returncode == 0, ended.stderr
    epochs = [f"Epoch {epoch}: 240 of 240 samples exactly once" for epoch in range(4)]
    assert ended.stdout.splitlines() == ["1 ranks, from step 0", *epochs]


def test_replicas_die_and_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_here("replicas", "--out", str(tmp_path / "out"), monkeypatch=monkeypatch)
    assert capsys.readouterr().out.splitlines() == [
        "Sample 84 of epoch 0: replica 1 dies.",
        "Sample 148 of epoch 0: replica 1 returns.",
        "Epoch 0: 240 of 240 samples were trained on exactly once.",
        "Epoch 1: 240 of 240 samples were trained on exactly once.",
    ]
    assert ended.value.code == 0


@pytest.mark.parametrize(
    "module", ["plain_pytorch", "accelerate_loop", "fabric_loop", "huggingface_trainer", "ray_train"]
)
def test_a_program_for_another_trainer_is_short(module: str) -> None:
    assert len((ROOT / "examples" / f"{module}.py").read_text().splitlines()) <= 100


def _on_one_rank(train: Callable[..., tuple[list[int], float]], stop_after: int) -> list[Any]:
    return [train(), train(stop_after=stop_after)[0], train(resume=True)]


@pytest.mark.rotate(1)
@pytest.mark.parametrize("module", ["accelerate_loop", "fabric_loop", "huggingface_trainer"])
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS/MKL_NUM_THREADS unset:UserWarning")
def test_other_trainers_resume_exactly_on_two_processes(module: str, tmp_path: Path) -> None:
    program = importlib.import_module(f"examples.{module}")
    line_run.write_samples(tmp_path / "data")
    folders = (tmp_path,) if module == "huggingface_trainer" else (tmp_path / "data", tmp_path / "saved")
    ranks = on_ranks(_on_one_rank, partial(program.train, *folders), 11, meeting=tmp_path / "ranks")
    read: list[int] = []
    for (whole, weight), before, (after, resumed_weight) in ranks:
        assert before + after == whole
        assert weight == resumed_weight
        read += whole
    assert sorted(read) == sorted([*range(line_run.SAMPLES)] * line_run.EPOCHS)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import of package")
def test_custom_datamodule_learns_and_resumes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_here("custom_datamodule", "--out", str(tmp_path / "out"), "--steps", "60", monkeypatch=monkeypatch)
    assert "Resumed 'train' at epoch 1, sample 192 (step 30" in caplog.text
    assert float(capsys.readouterr().out.split()[-1]) > 0.5  # chance is 0.1


def test_custom_datamodule_augments_by_the_sample_alone() -> None:
    from examples.custom_datamodule import PIXELS, DigitsDataModule

    datamodule = DigitsDataModule()
    sample = {"image": np.arange(PIXELS * PIXELS, dtype=np.uint8).reshape(PIXELS, PIXELS), "digit": 3}
    first, again, other = (datamodule.transform(sample, "train", np.random.default_rng(seed))[0] for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
    assert datamodule.transform(sample, "val", np.random.default_rng(1))[0].numpy() * 255 == pytest.approx(
        sample["image"]
    )
