"""Every store of these tests holds the same small dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_streaming.storage import retries
from tests.faults.epochs import write_samples
from tests.servers import FaultyStore

STORES = {"http": "http_store", "s3": "s3_bucket", "gcs": "gcs_bucket"}


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset, on disk."""
    return write_samples(tmp_path_factory.mktemp("samples") / "data")


@pytest.fixture(scope="session")
def samples_without_hashes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset, with an index that knows sizes only."""
    return write_samples(tmp_path_factory.mktemp("samples") / "data", hashes=None)


@pytest.fixture(scope="session")
def zipped_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset, compressed."""
    return write_samples(tmp_path_factory.mktemp("samples") / "data", compression="zstd")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """How waits between attempts grow is tested elsewhere; here it only takes time."""
    monkeypatch.setattr(retries, "_FIRST_WAIT", 0.05)
    monkeypatch.setattr(retries, "_LONGEST_WAIT", 0.4)


@pytest.fixture
def empty_store(request: pytest.FixtureRequest) -> FaultyStore:
    """An empty store with faults of its own; the parameter is its kind."""
    found: FaultyStore = request.getfixturevalue(STORES[request.param])
    return found


@pytest.fixture
def store(empty_store: FaultyStore, samples: Path) -> FaultyStore:
    """The dataset, in the store that the parameter of ``empty_store`` names."""
    empty_store.put_all(samples)
    return empty_store


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A hang is a failure here, and no test needs long; forks of processes with threads are what we are about."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(40))
            item.add_marker(pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"))
