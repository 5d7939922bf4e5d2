"""Fixtures of the tests that look into checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trainer.harness import Recorder, Run, write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def a_run(data: Path, tmp_path: Path) -> Run:
    return Run(data=data, directory=tmp_path)


@pytest.fixture(scope="session")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Run(data=data, directory=tmp_path_factory.mktemp("whole")).fit()[0]


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A checkpoint to edit: a copy of the one that a module has saved."""
    return Path(shutil.copy(saved_once, tmp_path / "run.ckpt"))
