from __future__ import annotations

import fcntl
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    IndexFormatError,
    ObjectNotFoundError,
    SampleIndexError,
    ShardCorruptError,
    StorageError,
    StreamingError,
)
from lightning_streaming.formats.index import FileInfo
from lightning_streaming.formats.mds import (
    MDSReader,
    check_lengths,
    check_shard_bytes,
    head_bytes,
    map_file,
    read_offsets,
    shard_bytes,
    table_bytes,
)
from tests.formats.small_shards import COLUMNS, SAMPLES, put_shard, shard_data, shard_info
from tests.helpers import assert_error, descriptors_under


def _table(count: int, offsets: list[int]) -> memoryview:
    return memoryview(np.asarray([count, *offsets], "<u4").tobytes() + b"what follows")


def test_offsets_are_read() -> None:
    assert read_offsets(_table(3, [20, 22, 22, 30]), 3, "x.mds").tolist() == [20, 22, 22, 30]
    assert read_offsets(_table(0, [9]), 0, "x.mds").tolist() == [9]
    assert table_bytes(3) == 20


@pytest.mark.parametrize(
    ("start", "samples", "said"),
    [
        (memoryview(b"1234567"), 0, "x.mds must have 8 bytes for its offsets alone, but has 7"),
        (_table(4, [0, 0]), 3, "must have 3 samples by its index, but states 4"),
        (_table(3, [20, 20, 20, 20])[:19], 3, "must have 20 bytes for its offsets alone, but has 19"),
    ],
)
def test_a_table_that_cannot_be_is_refused(start: memoryview, samples: int, said: str) -> None:
    with pytest.raises(ShardCorruptError, match=said):
        read_offsets(start, samples, "x.mds")


@pytest.mark.parametrize("third", [25, 21])
def test_a_sample_that_is_too_short_is_named(third: int) -> None:
    offsets = np.asarray([20, 24, third, 30])
    check_lengths(offsets[:2], 2, "x.mds")
    with assert_error(ShardCorruptError, path="x.mds", sample=1) as caught:
        check_lengths(offsets, 2, "x.mds")
    assert str(third - 24) in str(caught.value)


@pytest.mark.parametrize(("offsets", "length"), [([20], None), ([20, 24], 4), ([20, 24, 28], 4), ([20, 24, 27], None)])
def test_the_length_that_all_samples_have_is_told(offsets: list[int], length: int | None) -> None:
    assert check_lengths(np.asarray(offsets), 2, "x.mds") == length


DATA = shard_data(SAMPLES, COLUMNS)


def with_word(place: int, value: int) -> Callable[[bytes], bytes]:
    """Puts a uint32 at a byte of the file: the count at 0, then the offsets at 4, 8, 12 and 16."""
    return lambda data: data[:place] + struct.pack("<I", value) + data[place + 4 :]


def schema(**changes: Any) -> dict[str, Any]:
    return {"column_names": ("id", "text"), "column_encodings": ("int", "str"), "column_sizes": (8, None)} | changes


def test_samples_are_read_in_any_order(tmp_path: Path) -> None:
    reader = MDSReader(put_shard(tmp_path), tmp_path)
    assert len(reader) == 3
    assert [reader[index] for index in (2, 0, 1, 2)] == [SAMPLES[index] for index in (2, 0, 1, 2)]
    reader.close()


@pytest.mark.parametrize("index", [-1, 3, 10**12])
def test_a_sample_that_is_not_there_is_refused(index: int, tmp_path: Path) -> None:
    reader = MDSReader(put_shard(tmp_path), tmp_path)
    with assert_error(SampleIndexError, path="shard.mds", sample=index):
        reader[index]


def test_a_shard_without_samples_is_sound(tmp_path: Path) -> None:
    reader = MDSReader(put_shard(tmp_path, samples=[]), tmp_path)
    assert len(reader) == 0
    with pytest.raises(SampleIndexError):
        reader[0]


def test_samples_outlive_the_reader_and_the_file(tmp_path: Path) -> None:
    columns = {"array": "ndarray", "data": "bytes", "number": "float32"}
    sample = {"array": np.arange(1000), "data": b"data", "number": np.float32(1.5)}
    reader = MDSReader(put_shard(tmp_path, [sample], columns), tmp_path)
    found = reader[0]
    reader.close()
    (tmp_path / "shard.mds").unlink()
    assert found["array"].tolist() == list(range(1000))
    assert (found["data"], found["number"]) == (b"data", np.float32(1.5))


def test_a_closed_reader_keeps_no_file_open_and_reads_no_more(tmp_path: Path) -> None:
    reader = MDSReader(put_shard(tmp_path), tmp_path)
    assert descriptors_under(tmp_path) == 1
    reader.close()
    reader.close()
    assert descriptors_under(tmp_path) == 0
    with pytest.raises(ValueError, match="released"):
        reader[0]


def test_a_reader_is_closed_while_a_failed_sample_is_still_looked_at(tmp_path: Path) -> None:
    reader = MDSReader(put_shard(tmp_path, [{"id": 0, "text": b"\xff"}]), tmp_path)
    with assert_error(EncodingError, path="shard.mds", sample=0) as caught:
        reader[0]
    assert "'text'" in str(caught.value)
    reader.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "must have 84 bytes by its index, but has 0"),
        (lambda data: data[:-1], "but has"),
        (lambda data: data + b"\0", "but has"),
        (with_word(0, 4), "must have 3 samples by its index, but states 4"),
        (with_word(4, 19), "must hold its samples between bytes 20 and"),  # they would start inside the offsets
        (with_word(4, 2**32 - 1), "expected at least 12 bytes, but the offsets state"),
        (with_word(8, 2**32 - 1), "sample 1: expected at least 12 bytes, but the offsets state"),
        (with_word(12, 0), "sample 1: expected at least 12 bytes, but the offsets state"),  # offsets go backwards
        (
            with_word(8, len(DATA) - 27),
            "sample 1: expected at least 12 bytes, but the offsets state 11",
        ),  # too short a sample
        (with_word(16, 0), "and end at 0"),
        (with_word(16, 10**6), "and end at 1000000"),
    ],
)
def test_a_file_that_is_not_the_shard_of_its_index_is_refused(
    damage: Callable[[bytes], bytes], words: str, tmp_path: Path
) -> None:
    (tmp_path / "shard.mds").write_bytes(damage(DATA))
    with pytest.raises(ShardCorruptError) as caught:
        MDSReader(shard_info(DATA), tmp_path)
    assert words.replace("84", str(len(DATA))) in str(caught.value)
    assert str(tmp_path / "shard.mds") in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 8, 19])
def test_a_file_too_short_for_its_offsets_is_refused(size: int, tmp_path: Path) -> None:
    (tmp_path / "shard.mds").write_bytes(DATA[:size])
    with assert_error(ShardCorruptError, path="shard.mds") as caught:
        MDSReader(shard_info(DATA[:size]), tmp_path)
    assert "must have" in str(caught.value)


def test_a_column_that_reaches_beyond_its_sample_is_refused(tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    path = tmp_path / "shard.mds"
    first = len(DATA) - sum(12 + len(sample["text"].encode()) for sample in SAMPLES)
    path.write_bytes(with_word(first, 5)(path.read_bytes()))
    reader = MDSReader(info, tmp_path)
    assert reader[1] == SAMPLES[1]
    with assert_error(ShardCorruptError, path="shard.mds", sample=0) as caught:
        reader[0]
    assert "16" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (schema(column_sizes=(4, None)), IndexFormatError, "column_sizes has 4"),
        (schema(column_sizes=(8, 8)), IndexFormatError, "column_sizes"),
        (schema(column_sizes=(8,)), IndexFormatError, "column_sizes"),
        (schema(column_names=("id", "id")), IndexFormatError, "its own name"),
        (schema(column_names=("id",)), IndexFormatError, "its own name and an encoding"),
        (schema(column_names=(), column_encodings=(), column_sizes=()), IndexFormatError, "at least one column"),
        (schema(column_encodings=("int", "text")), IndexFormatError, "but got 'text'"),
        (schema(column_encodings=("int", "pkl")), ConfigError, "allow_unsafe_types"),
    ],
)
def test_columns_that_cannot_be_read_are_refused(
    changes: dict[str, Any], error: type[StreamingError], words: str, tmp_path: Path
) -> None:
    put_shard(tmp_path)
    with assert_error(error, path="shard.mds") as caught:
        MDSReader(shard_info(DATA, schema=changes), tmp_path)
    assert words in str(caught.value)
    assert type(caught.value) is error
    assert "shard.mds" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with assert_error(ObjectNotFoundError, path="shard.mds"):
        MDSReader(shard_info(DATA), tmp_path)


@pytest.mark.parametrize("basename", ["shard.mds/x", "folder"])
def test_a_file_that_cannot_be_opened_is_named(basename: str, tmp_path: Path) -> None:
    put_shard(tmp_path)
    (tmp_path / "folder").mkdir()
    info = shard_info(DATA, raw_data=FileInfo(basename=basename, bytes=len(DATA), hashes={}))
    with assert_error(StorageError, path=basename):
        MDSReader(info, tmp_path)


def test_a_shard_may_lie_in_a_folder_of_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    put_shard(tmp_path / "part")
    info = shard_info(DATA, raw_data=FileInfo(basename="part/shard.mds", bytes=len(DATA), hashes={}))
    assert MDSReader(info, tmp_path)[0] == SAMPLES[0]


def test_the_errors_of_a_worker_reach_the_training_process(tmp_path: Path) -> None:
    reader = MDSReader(put_shard(tmp_path, [{"id": 0, "text": b"\xff"}]), tmp_path)
    with pytest.raises(EncodingError) as caught:
        reader[0]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_shard_is_as_large_as_the_arithmetic_says() -> None:
    assert len(head_bytes([1, 1, 4], b"config")) + 4 == shard_bytes(3, 4, 6)
    assert len(head_bytes([], b"config")) == shard_bytes(0, 0, 6) == 14


def test_a_shard_of_4_gib_is_refused() -> None:
    check_shard_bytes(2**32 - 1)
    with assert_error(ConfigError, option="size_limit"):
        check_shard_bytes(2**32)


def test_a_file_that_is_removed_just_before_it_is_locked_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(b"1234")
    monkeypatch.setattr(fcntl, "flock", lambda *_: path.unlink())
    with assert_error(ObjectNotFoundError, path="shard.00000.mds"):
        map_file(path, 4)
