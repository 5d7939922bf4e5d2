from __future__ import annotations

from pathlib import Path

import pytest

from lightning_streaming.cache.limits import check_limit, largest_shard_bytes, least_limit, reader_share
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import DatasetIndex
from tests.cache.datasets import write_dataset
from tests.formats.split_datasets import put_dataset


def test_the_largest_shard_counts_with_all_its_files(tmp_path: Path) -> None:
    for index in (
        write_dataset(tmp_path / "mds", shards=3, compression="zstd"),
        put_dataset(tmp_path / "csv", "csv", (4, 9, 2), compression="zstd"),
    ):
        sizes = [sum(file.bytes for pair in shard.files for file in pair if file) for shard in index.shards]
        assert largest_shard_bytes(index.shards) == max(sizes)
    assert largest_shard_bytes(DatasetIndex(()).shards) == 0


def test_a_limit_that_cannot_work_is_refused_with_the_one_that_would() -> None:
    least = least_limit(100, 1000)
    assert least == 2100
    check_limit(None, 100, 1000)
    check_limit(least, 100, 1000)
    with pytest.raises(ConfigError, match=r"cache_limit .* which is 2100 bytes, but is 2099"):
        check_limit(least - 1, 100, 1000)


def test_readers_share_half_of_the_room() -> None:
    assert reader_share(1000, 5) == 100
