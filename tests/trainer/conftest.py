"""Fixtures of the tests that train."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from tests.trainer.harness import write_data

_PORTS = count()


@pytest.fixture(autouse=True)
def _ranks_meet_at_a_port_of_their_own(monkeypatch: pytest.MonkeyPatch, worker_id: str) -> None:
    """Below those that the system gives to other tests' servers, which may else take one between choice and use."""
    process = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    monkeypatch.setenv("STANDALONE_PORT", str(20_000 + 1_000 * (process % 10) + next(_PORTS) % 1_000))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))
