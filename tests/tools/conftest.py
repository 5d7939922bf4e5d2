"""Fixtures of the tests that look into checkpoints, and of those that tune runs."""

from __future__ import annotations

import shutil
import sys
import tempfile
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


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to run in, one for temporary files, and a cache that nobody should find a use for."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["lightning-streaming"])
    monkeypatch.setenv("LIGHTNING_STREAMING_CACHE", str(tmp_path / "caches"))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setenv("COLUMNS", "200")
    return directory
