"""Fixtures of the tests that look into checkpoints."""

from __future__ import annotations

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
