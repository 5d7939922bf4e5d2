"""Documents of groups within a budget that cannot be made: rows of padding, and none of them for a user's function."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import BadSamplesError
from lightning_streaming.logs import read_bad_samples
from tests.broken_data import replacing
from tests.helpers import raises
from tests.reading.test_packing import LENGTHS, write_documents

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents") / "a", LENGTHS)


def _same(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def _is_bad(document: Any) -> bool:
    return len(document) % 3 == 1 and len(document) < 40


def _failing(sample: dict[str, Any]) -> dict[str, Any]:
    if _is_bad(sample["tokens"]):
        raise ValueError("no document")
    return sample


def _all_fail(_: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no document at all")


def _sizes(documents: list[dict[str, Any]]) -> list[int]:
    return [len(one["tokens"]) for one in documents]


def _loader(root: Path, log: Path, *, workers: int = 0, loader: Any = None, **settings: Any) -> StreamingDataLoader:
    budget = {"column": "tokens", "tokens": 256, "buckets": 4, "window": 32, "pad": 7}
    dataset = StreamingDataset(
        remote=str(root),
        token_budget=budget,
        shuffle=True,
        num_canonical_nodes=2,
        bad_samples=replacing(log),
        **settings,
    )
    return StreamingDataLoader(dataset, num_workers=workers, **(loader or {}))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_document_is_a_row_of_padding(root: Path, tmp_path: Path, workers: int) -> None:
    whole = list(_loader(root, tmp_path / "none", transform=_same))
    with closing(_loader(root, tmp_path / "log", workers=workers, transform=_failing)) as loader:
        batches = list(loader)
    bad = 0
    for batch, planned in zip(batches, whole, strict=True):
        assert batch["input_ids"].shape == planned["input_ids"].shape
        for place, size in enumerate(planned["lengths"].tolist()):
            if _is_bad(range(size)):
                bad += 1
                assert batch["lengths"][place] == 0
                assert (batch["input_ids"][place] == 7).all()
            else:
                assert batch["lengths"][place] == size
                assert (batch["input_ids"][place] == planned["input_ids"][place]).all()
    assert loader.statistics().bad_samples == len(list(read_bad_samples(tmp_path / "log"))) == bad > 0


def test_a_function_of_the_users_gets_the_others(root: Path, tmp_path: Path) -> None:
    whole = list(_loader(root, tmp_path / "none", transform=_same, loader={"collate_fn": _sizes}))
    groups = list(_loader(root, tmp_path / "log", transform=_failing, loader={"collate_fn": _sizes}))
    assert groups == [[size for size in group if not _is_bad(range(size))] for group in whole]


def test_a_group_of_bad_documents_alone(root: Path, tmp_path: Path) -> None:
    for batch in _loader(root, tmp_path / "log", transform=_all_fail):
        assert (batch["input_ids"] == 7).all()
        assert not batch["lengths"].any()
    with raises(BadSamplesError, "documents of a group are bad"):
        list(_loader(root, tmp_path / "log2", transform=_all_fail, loader={"collate_fn": _sizes}))
