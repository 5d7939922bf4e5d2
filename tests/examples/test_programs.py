"""The other examples, run as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.demo import ROOT
from examples.write_dataset import BLOCK
from lightning_streaming import StreamingDataset


def run(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"examples.{module}", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    "module", ["compare_runs", "custom_datamodule", "demo", "linked_batch_size", "plain_pytorch", "write_dataset"]
)
def test_every_program_explains_itself(module: str) -> None:
    ended = run(module, "--help")
    assert ended.returncode == 0, ended.stderr
    assert "usage:" in ended.stdout


def test_write_dataset_cuts_a_folder_of_texts_into_blocks(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_bytes(b"b" * BLOCK)
    (tmp_path / "texts" / "a.txt").write_bytes(b"a" * (2 * BLOCK + 5))
    ended = run("write_dataset", "--texts", str(tmp_path / "texts"), "--out", str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stderr
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


def test_plain_pytorch_resumes_exactly(tmp_path: Path) -> None:
    ended = run("plain_pytorch", "--out", str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Same samples in the same order: True. Same weights to the last bit: True." in ended.stdout
    assert "'sample_in_epoch': 616" in ended.stdout


def test_custom_datamodule_learns_and_resumes(tmp_path: Path) -> None:
    ended = run("custom_datamodule", "--out", str(tmp_path / "out"), "--steps", "60")
    assert ended.returncode == 0, ended.stderr
    assert "Resumed 'train' at epoch 1, sample 192 (step 30" in ended.stderr
    assert float(ended.stdout.split()[-1]) > 0.5  # chance is 0.1


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
