from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming.errors import ConfigError, SampleIndexError, ShardCorruptError
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.lone_sample import FilePart, LoneSamples, table_part
from lightning_streaming.formats.shard import open_shard
from tests.formats.golden_datasets import SERVED, unpack
from tests.formats.small_shards import SAMPLES, put_shard, shard_info
from tests.golden import golden_path


def _bytes_of(directory: Path, part: FilePart) -> bytes:
    return (directory / part.file.basename).read_bytes()[part.start : part.stop]


def _shown(sample: dict[str, Any]) -> str:
    """Values and types; an image by its kind and size, without its place in memory."""
    return re.sub(" at 0x[0-9A-F]+", "", repr(sample))


def _lone_samples(directory: Path, info: ShardInfo) -> LoneSamples:
    return LoneSamples(info, _bytes_of(directory, table_part(info)), allow_unsafe_types=True)


@pytest.mark.parametrize("name", SERVED)
def test_every_sample_of_every_golden_dataset_is_read_from_its_own_bytes(name: str, tmp_path: Path) -> None:
    for info in unpack(golden_path("mds", name), tmp_path).shards:
        lone = _lone_samples(tmp_path, info)
        reader = open_shard(info, tmp_path, allow_unsafe_types=True)
        for index in range(info.samples):
            found = lone.decode(index, _bytes_of(tmp_path, lone.part(index)))
            assert _shown(found) == _shown(reader[index])
        reader.close()


def test_only_wanted_columns_are_decoded(tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    lone = LoneSamples(info, _bytes_of(tmp_path, table_part(info)), columns=["text"])
    assert lone.decode(2, _bytes_of(tmp_path, lone.part(2))) == {"text": SAMPLES[2]["text"]}


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    with pytest.raises(ConfigError, match="no column 'label'"):
        LoneSamples(info, _bytes_of(tmp_path, table_part(info)), columns=["label"])


@pytest.mark.parametrize("index", [-1, 3])
def test_a_sample_that_is_not_there_is_refused(index: int, tmp_path: Path) -> None:
    lone = _lone_samples(tmp_path, put_shard(tmp_path))
    with pytest.raises(SampleIndexError, match=f"has 3 samples, but sample {index} was asked for"):
        lone.part(index)


@pytest.mark.parametrize("place", [1, 4])
def test_offsets_outside_the_file_are_refused_before_anything_is_fetched(place: int, tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    table = np.frombuffer(_bytes_of(tmp_path, table_part(info)), "<u4").copy()
    table[place] = 0 if place == 1 else info.raw_data.bytes + 1
    with pytest.raises(ShardCorruptError, match="must hold its samples between bytes 20 and"):
        LoneSamples(info, table.tobytes())


def test_a_damaged_sample_is_named(tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    lone = _lone_samples(tmp_path, info)
    with pytest.raises(ShardCorruptError, match=r"shard\.mds, sample 2: expected \d+ bytes"):
        lone.decode(2, _bytes_of(tmp_path, lone.part(2)) + b"more")


def test_an_index_that_leaves_no_room_for_offsets_is_refused() -> None:
    with pytest.raises(ShardCorruptError, match="must have 20 bytes for its offsets alone"):
        table_part(shard_info(b"short"))
