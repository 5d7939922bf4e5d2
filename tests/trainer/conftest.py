"""Fixtures of the tests that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.harness import write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))
