"""The sample log and the watchdog of a run that packs: they name documents, one by one."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import World
from lightning_streaming.logs import read_sample_log
from tests.packed_data import packed_loader, packed_train, pieces, write_documents
from tests.reading.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
SLOW = 50
"""Document whose transform waits until the watchdog has told of it."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents"))


@pytest.mark.rotate(2)
@pytest.mark.parametrize("method", ["best_fit", "concat"])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_logged_is_what_was_read_by_each_worker(root: Path, tmp_path: Path, workers: int, method: str) -> None:
    train = packed_train(root, packing={"method": method}, debug={"sample_log": str(tmp_path)})
    loader = packed_loader(
        train, 3, world=World(ranks_per_node=2, rank=1), num_workers=workers, return_keys=True, drop_last=True
    )
    with closing(loader):
        batches = list(loader)
    step = max(workers, 1)
    for worker in range(step):
        lines = list(read_sample_log(tmp_path / f"rank1-worker{worker}.jsonl"))
        own = batches[worker::step]
        expected = [key for _, keys in own for key in keys]
        assert [line.key for line in lines][: len(expected)] == expected
        numbers = [piece.number for batch, _ in own for piece in pieces(batch)]
        restored = [int(loader.dataset.restore_sample(line.key)["tokens"][0]) // 250 for line in lines[: len(expected)]]
        assert restored == numbers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_document_is_told_of_with_its_key(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    def linger(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["tokens"][0] // 250 == SLOW:
            assert wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("*.stacks")), seconds=60)
        return sample

    train = packed_train(root, packing={"lengths": "size"})
    expected = [batch["input_ids"].tolist() for batch in packed_loader(train, 3)]
    watched = {"transform": linger, "debug": {"sample_log": tmp_path, "watchdog_seconds": 0.4}}
    loader = packed_loader(train, 3, num_workers=workers, dataset=watched)
    with closing(loader):
        assert [batch["input_ids"].tolist() for batch in loader] == expected
        (stacks,) = tmp_path.glob("*.stacks")
        first, _, rest = stacks.read_text().partition("\n")
        who, _, key = first.partition(": ")
        assert who.endswith("of rank 0 has been at one sample for 0.4 s")
        assert loader.dataset.restore_sample(json.loads(key))["tokens"][0] // 250 == SLOW
    assert "in linger" in rest
    assert first in capfd.readouterr().err
