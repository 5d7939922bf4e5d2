"""Settings that work and do not suit: told of once, before the first batch, with what to do."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_streaming import StreamingDataset, World
from tests.helpers import make_dataset, make_loader, write_dataset
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

LOGGER = "lightning_streaming.loading.passes"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


UNSUITED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "canonical nodes": ({"num_canonical_nodes": 30}, ["29 samples, fewer than its 30 canonical", "of at most 29"]),
    "default nodes": ({"shuffle_algo": "py1s"}, ["fewer than its 64 canonical nodes", "num_canonical_nodes="]),
    "epoch": ({"epoch_size": 3, "num_canonical_nodes": 4}, ["an epoch has 3 samples", "of at most 3"]),
    "ranks": (
        {"epoch_size": 3, "world": World(ranks_per_node=4, rank=0)},
        ["3 samples, fewer than the 4 ranks", "larger epoch_size="],
    ),
    "block": ({"shuffle_block_size": 4}, ["shuffle_block_size=4 is below the 5 samples", "pass at least 5"]),
}
SUITED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "canonical nodes": {"num_canonical_nodes": 29},
    "ranks": {"epoch_size": 4, "world": World(ranks_per_node=4, rank=0)},
    "block": {"shuffle_block_size": 5},
    "no shuffle": {"shuffle": False, "shuffle_block_size": 4},
    "other shuffle": {"shuffle_algo": "py1br", "shuffle_block_size": 4},
    "nothing to fetch": {"predownload": 1},
    "another rank": {"epoch_size": 3, "world": World(ranks_per_node=4, rank=1)},
}


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize("name", UNSUITED)
@pytest.mark.parametrize("workers", [None, 0, 2], ids=["dataset", "loader", "workers"])
def test_what_does_not_suit_is_told_once(
    root: Path, caplog: pytest.LogCaptureFixture, name: str, workers: int | None
) -> None:
    settings, words = UNSUITED[name]
    if workers is None:
        dataset = make_dataset(root, **settings)
        for _ in range(2):
            assert list(dataset)
    else:
        with closing(make_loader(root, workers=workers, **settings)) as loader:
            for _ in range(2):
                assert list(loader)
    (told,) = _told(caplog)
    assert [word for word in ["streams 0: ", *words] if word not in told] == []
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("workers", [0, 1])
def test_so_it_is_to_who_reads_through_torchs_loader(
    root: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    handler = logging.StreamHandler()  # workers write to the stderr that they inherit
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        loader: DataLoader[Any] = DataLoader(
            make_dataset(root, shuffle_block_size=4), batch_size=4, num_workers=workers
        )
        for _ in range(2):
            assert len(list(loader)) == 8
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)
    assert capfd.readouterr().err.count("shuffle_block_size=4 is below") == 1


@pytest.mark.parametrize("name", SUITED)
def test_what_suits_is_not_talked_of(root: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    assert list(make_dataset(root, **SUITED[name]))
    assert _told(caplog) == []


@pytest.mark.parametrize(("predownload", "count"), [(3, 1), (4, 0), (None, 0)])
def test_fetching_less_ahead_than_a_batch_is_told_of(
    http_store: HttpStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, predownload: int | None, count: int
) -> None:
    write_dataset(http_store.root, 10)
    dataset = StreamingDataset(remote=http_store.url, local=str(tmp_path), batch_size=4, predownload=predownload)
    assert len(list(dataset)) == 10
    assert len(_told(caplog)) == count
    assert all("predownload=3 is below batch_size=4" in told and "at least 4" in told for told in _told(caplog))
