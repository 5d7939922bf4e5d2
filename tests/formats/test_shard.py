from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming.errors import ConfigError, MissingDependencyError, SampleIndexError, ShardCorruptError
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.formats.shard import FilePart, SingleSampleReader, check_shard, open_shard, table_part
from lightning_streaming.formats.shard_table import check_columns, check_selection, column_names
from tests.formats.golden_datasets import SERVED, expectations, read_index, unpack
from tests.formats.small_shards import SAMPLES, put_shard, shard_info
from tests.golden import golden_path
from tests.helpers import assert_error

UNSAFE = {"column_names": ("p",), "column_encodings": ("pkl",), "column_sizes": (None,)}
ZIP = FileInfo(basename="shard.mds.x", bytes=9, hashes={})


def test_an_mds_shard_is_opened(tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    check_shard(info)
    reader = open_shard(info, tmp_path)
    assert [reader[index] for index in range(len(reader))] == SAMPLES
    reader.close()


def test_pickles_are_refused_unless_they_were_allowed() -> None:
    with assert_error(ConfigError, option="allow_unsafe_types", path="shard.mds"):
        check_shard(shard_info(b"", schema=UNSAFE))
    check_shard(shard_info(b"", schema=UNSAFE), allow_unsafe_types=True)


def test_only_wanted_columns_are_read(tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    check_shard(info, columns=["text"])
    reader = open_shard(info, tmp_path, columns=["text"])
    assert [reader[index] for index in range(3)] == [{"text": sample["text"]} for sample in SAMPLES]
    reader.close()


@pytest.mark.parametrize("columns", [["label"], ["text", "label"]])
def test_a_column_that_is_not_there_is_refused_before_anything_is_read(tmp_path: Path, columns: list[str]) -> None:
    info = put_shard(tmp_path)
    with assert_error(ConfigError, option="columns", path="shard.mds") as caught:
        check_shard(info, columns=columns)
    assert "'text'" in str(caught.value)
    with assert_error(ConfigError, option="columns", path="shard.mds") as caught:
        open_shard(info, tmp_path / "nowhere", columns=columns)
    assert "'label'" in str(caught.value)


def test_a_missing_package_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDependencyError, match="zstd"):
        check_shard(shard_info(b"", compression="zstd", zip_data=ZIP))


@pytest.mark.parametrize("name", SERVED)
def test_names_are_those_of_the_columns_whatever_the_format(name: str) -> None:
    for shard in read_index(golden_path("mds", name)).shards:
        assert list(column_names(shard)) == sorted(expectations()[name]["columns"])


@pytest.mark.parametrize(("asked", "found"), [(None, None), (["b", "a", "b"], ("b", "a")), (("a",), ("a",))])
def test_each_column_is_asked_for_once(asked: Any, found: Any) -> None:
    assert check_selection(asked) == found


@pytest.mark.parametrize("asked", [[], (), "text", b"text", {"a"}, {"a": 1}, ["a", 1], [None], 3])
def test_what_is_no_list_of_names_is_refused(asked: Any) -> None:
    with assert_error(ConfigError, option="columns") as caught:
        check_selection(asked)
    assert "columns must" in str(caught.value)


def test_a_shard_without_a_column_says_what_it_has() -> None:
    check_columns(shard_info(b""), None)
    check_columns(shard_info(b""), ["text"])
    with assert_error(ConfigError, option="columns", path="shard.mds") as caught:
        check_columns(shard_info(b""), ["text", "é"])
    assert "'text'" in str(caught.value)


def _bytes_of(directory: Path, part: FilePart) -> bytes:
    return (directory / part.file.basename).read_bytes()[part.start : part.stop]


def _shown(sample: dict[str, Any]) -> str:
    """Values and types; an image by its kind and size, without its place in memory."""
    return re.sub(" at 0x[0-9A-F]+", "", repr(sample))


def _lone_samples(directory: Path, info: ShardInfo) -> SingleSampleReader:
    return SingleSampleReader(info, _bytes_of(directory, table_part(info)), allow_unsafe_types=True)


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
    lone = SingleSampleReader(info, _bytes_of(tmp_path, table_part(info)), columns=["text"])
    assert lone.decode(2, _bytes_of(tmp_path, lone.part(2))) == {"text": SAMPLES[2]["text"]}


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    with assert_error(ConfigError, option="columns", path="shard.mds") as caught:
        SingleSampleReader(info, _bytes_of(tmp_path, table_part(info)), columns=["label"])
    assert "'label'" in str(caught.value)


@pytest.mark.parametrize("index", [-1, 3])
def test_a_sample_that_is_not_there_is_refused(index: int, tmp_path: Path) -> None:
    lone = _lone_samples(tmp_path, put_shard(tmp_path))
    with assert_error(SampleIndexError, path="shard.mds", sample=index):
        lone.part(index)


@pytest.mark.parametrize("place", [1, 4])
def test_offsets_outside_the_file_are_refused_before_anything_is_fetched(place: int, tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    table = np.frombuffer(_bytes_of(tmp_path, table_part(info)), "<u4").copy()
    table[place] = 0 if place == 1 else info.raw_data.bytes + 1
    with assert_error(ShardCorruptError, path="shard.mds") as caught:
        SingleSampleReader(info, table.tobytes())
    assert "20" in str(caught.value)


def test_a_damaged_sample_is_named(tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    lone = _lone_samples(tmp_path, info)
    with assert_error(ShardCorruptError, path="shard.mds", sample=2) as caught:
        lone.decode(2, _bytes_of(tmp_path, lone.part(2)) + b"more")
    assert "sample" in str(caught.value)


def test_an_index_that_leaves_no_room_for_offsets_is_refused() -> None:
    with assert_error(ShardCorruptError, path="shard.mds") as caught:
        table_part(shard_info(b"short"))
    assert "20" in str(caught.value)
