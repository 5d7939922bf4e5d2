"""Documents that cannot be made: their places in packs are filled up, and no other document moves."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming.errors import SampleError
from lightning_streaming.logs import read_bad_samples
from tests.broken_data import replacing
from tests.helpers import raises
from tests.packed_data import packed_loader, packed_train, pieces, write_documents
from tests.tiers import some

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
BAD = 7
"""Every so many-th document fails."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents"))


def _same(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def _failing(sample: dict[str, Any]) -> dict[str, Any]:
    if len(sample["tokens"]) and sample["tokens"][0] // 250 % BAD == 0:
        raise ValueError("no document")
    return sample


@pytest.mark.rotate(2)
@pytest.mark.parametrize("method", ["best_fit", "concat"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("as_dtype", ["int64", None])
def test_a_place_is_filled_up_and_nothing_moves(
    root: Path, tmp_path: Path, method: str, workers: int, as_dtype: str | None
) -> None:
    train = packed_train(root, packing={"method": method, "pad": 16_000, "as_dtype": as_dtype})
    log = {"bad_samples": replacing(tmp_path / "log")}
    whole = list(packed_loader(train, 3, dataset={"transform": _same}, return_keys=True))
    loader = packed_loader(train, 3, num_workers=workers, dataset={"transform": _failing, **log}, return_keys=True)
    with closing(loader):
        batches = list(loader)
    filled = 0
    for (batch, keys), (then, planned) in zip(batches, whole, strict=True):
        assert keys == planned
        tokens = then["input_ids"].long()  # of small unsigned types torch divides none
        is_bad = (tokens // 250 % BAD == 0) & (then["document_ids"] >= 0)
        filled += int(is_bad.sum())
        assert (batch["input_ids"].long() == tokens.where(~is_bad, 16_000)).all()
        assert (batch["document_ids"] == then["document_ids"].where(~is_bad, -1)).all()
        assert (batch["position_ids"] == then["position_ids"]).all()
        assert (batch["cu_seqlens"] == then["cu_seqlens"]).all()
        assert batch["max_seqlen"] == then["max_seqlen"]
        assert batch["input_ids"].dtype == then["input_ids"].dtype
    found = list(read_bad_samples(tmp_path / "log"))
    assert filled > 0
    assert loader.statistics().bad_samples == len(found) > 0
    assert not [one for one in found if one.attempt]
    read = {piece.number for batch, _ in whole for piece in pieces(batch)}
    assert len({one.key.position for one in found}) == len({number for number in read if number % BAD == 0})


def test_packs_of_nothing_but_bad_documents(root: Path, tmp_path: Path) -> None:
    def fail_first(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("none at all")

    train = packed_train(root, packing={"pad": 3})
    dataset = {"transform": fail_first, "bad_samples": replacing(tmp_path)}
    for batch in packed_loader(train, 3, dataset=dataset):
        assert (batch["input_ids"] == 3).all()
        assert (batch["document_ids"] == -1).all()


def test_without_it_a_document_that_fails_is_an_error(root: Path) -> None:
    with raises(SampleError, "no document"):
        list(packed_loader(packed_train(root), 3, dataset={"transform": _failing}))


def test_it_resumes_by_the_log_at_every_step(root: Path, tmp_path: Path) -> None:
    train, log = packed_train(root), {"bad_samples": replacing(tmp_path / "log")}
    loader = packed_loader(train, 3, dataset={"transform": _failing, **log})
    states, batches = [loader.state_dict()], []
    for batch in loader:
        batches.append(batch["document_ids"].tolist())
        states.append(loader.state_dict())
    for place, state in some(list(enumerate(states[:-1])), 4):
        again = packed_loader(train, 3, dataset={"transform": _same, **log})
        again.load_state_dict(state)
        assert [batch["document_ids"].tolist() for batch in again] == batches[place:]
    assert np.any(np.concatenate(batches) < 0)
