"""An epoch on a disk that holds a part of it, without any limit: a full disk is like a limit that was reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from tests.cache.disks import disk_of

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
SAMPLES = 240


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "disk", 200) as path:
        yield path


def data_of(index: int) -> bytes:
    return index.to_bytes(2, "big") * 1500


@pytest.mark.parametrize("shuffle", [True, False])
def test_workers_at_rest_leave_room_to_the_one_that_is_waited_for(
    disk: Path, tmp_path: Path, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of 20 kB, of which ten fit on the disk; shuffled, the two workers together have more of them begun."""
    monkeypatch.setattr("lightning_streaming.cache.room._PATIENCE_SECONDS", 5.0)
    with MDSWriter(out=str(tmp_path / "remote"), columns={"id": "int", "data": "bytes"}, size_limit=20_000) as writer:
        for index in range(SAMPLES):
            writer.write({"id": index, "data": data_of(index)})
    dataset = StreamingDataset(
        remote=str(tmp_path / "remote"),
        local=str(disk / "cache"),
        batch_size=4,
        shuffle=shuffle,
        shuffle_block_size=64,
        predownload=8,
    )
    loader = StreamingDataLoader(dataset, num_workers=2)
    read: dict[int, bytes] = {}
    for batch in loader:
        read.update(zip(batch["id"].tolist(), batch["data"], strict=True))
    loader.close()
    assert read == {index: data_of(index) for index in range(SAMPLES)}
