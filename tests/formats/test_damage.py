"""Whatever happens to the bytes of a dataset, reading it ends in samples or in one of our errors."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, given, settings

from lightning_streaming.errors import ConfigError, FormatError, MissingDependencyError, StorageError
from lightning_streaming.formats.compression import decompress
from lightning_streaming.formats.index import ShardInfo, parse_index
from lightning_streaming.formats.shard import check_shard, open_shard
from tests.formats.damage import damaged_bytes
from tests.formats.golden_datasets import read_index
from tests.golden import golden_path

TYPED = (FormatError, ConfigError, MissingDependencyError, StorageError)
QUICK = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RAW_SHARD = golden_path("mds", "scalars", "shard.00000.mds").read_bytes()
ZIP_SHARD = golden_path("mds", "ndarray", "shard.00000.mds.zstd").read_bytes()
ZIP_RAW_BYTES = read_index(golden_path("mds", "ndarray")).shards[0].raw_data.bytes
INDEX = golden_path("mds", "scalars", "index.json").read_bytes()


def read_all(directory: Path, index_text: bytes) -> None:
    for shard in parse_index(index_text, "index.json").shards:
        check_shard(shard)
        read_shard(shard, directory)


def read_shard(shard: ShardInfo, directory: Path) -> None:
    """Read what can be read of a shard, sample by sample."""
    reader = open_shard(shard, directory)
    for index in range(len(reader)):
        with suppress(FormatError):
            reader[index]
    reader.close()


@QUICK
@given(damaged_bytes(RAW_SHARD))
def test_damaged_shards(tmp_path: Path, data: bytes) -> None:
    # Of the right size, because any other is refused before the content is looked at.
    (tmp_path / "shard.00000.mds").write_bytes(data[: len(RAW_SHARD)].ljust(len(RAW_SHARD), b"\0"))
    with suppress(FormatError):
        read_shard(parse_index(INDEX, "index.json").shards[0], tmp_path)


@QUICK
@given(damaged_bytes(INDEX))
def test_damaged_indexes(index_text: bytes) -> None:
    with suppress(*TYPED):
        read_all(golden_path("mds", "scalars"), index_text)


@QUICK
@given(damaged_bytes(ZIP_SHARD))
def test_damaged_compressed_shards(data: bytes) -> None:
    with suppress(FormatError):
        assert len(decompress("zstd", data, ZIP_RAW_BYTES)) == ZIP_RAW_BYTES


def test_without_damage_all_of_it_is_read() -> None:
    """The tests above would pass, too, if nothing could ever be read."""
    read_all(golden_path("mds", "scalars"), INDEX)
    assert len(decompress("zstd", ZIP_SHARD, ZIP_RAW_BYTES)) == ZIP_RAW_BYTES
