from __future__ import annotations

import resource
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    ObjectNotFoundError,
    SampleIndexError,
    ShardCorruptError,
    StorageError,
)
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.formats.shard import open_shard
from lightning_streaming.formats.split_reader import SplitReader
from tests.formats.damage import damaged_bytes
from tests.formats.split_datasets import FORMATS, layout_of, put_shard, sample_of
from tests.helpers import descriptors_under

EVERY = pytest.mark.parametrize("split_format", FORMATS)
SAMPLES = [sample_of(index) for index in range(4)]


def paths_of(info: ShardInfo, directory: Path) -> tuple[Path, Path]:
    """The meta file and the data file."""
    assert info.raw_meta is not None
    return directory / info.raw_meta.basename, directory / info.raw_data.basename


def describe_anew(info: ShardInfo, directory: Path, **changes: Any) -> ShardInfo:
    """What an index says that was made for the files as they are now."""
    meta, data = (
        FileInfo(basename=path.name, bytes=path.stat().st_size, hashes={}) for path in paths_of(info, directory)
    )
    return replace(info, raw_meta=meta, raw_data=data, **changes)


def offsets_of(info: ShardInfo, directory: Path) -> list[int]:
    data = paths_of(info, directory)[0].read_bytes()
    return list(struct.unpack_from(f"<{info.samples + 1}I", data, 4))


def set_offsets(info: ShardInfo, directory: Path, offsets: list[int]) -> None:
    path = paths_of(info, directory)[0]
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{len(offsets)}I", data, 4, *offsets)
    path.write_bytes(data)


def read_all(info: ShardInfo, directory: Path, **settings: Any) -> list[dict[str, Any]]:
    reader = SplitReader(info, directory, **settings)
    try:
        return [reader[index] for index in range(len(reader))]
    finally:
        reader.close()


class TestReading:
    @EVERY
    def test_samples_come_back_in_any_order_and_outlive_the_reader(self, split_format: str, tmp_path: Path) -> None:
        reader = open_shard(put_shard(tmp_path, layout_of(split_format), SAMPLES), tmp_path)
        assert len(reader) == len(SAMPLES)
        found = [reader[index] for index in (3, 0, 2, 1, 0)]
        reader.close()
        assert found == [SAMPLES[index] for index in (3, 0, 2, 1, 0)]

    @EVERY
    def test_a_shard_of_no_samples_is_read(self, split_format: str, tmp_path: Path) -> None:
        info = put_shard(tmp_path, layout_of(split_format), [])
        assert (info.raw_data.bytes == 0) == (split_format == "json")
        reader = SplitReader(info, tmp_path)
        assert len(reader) == 0
        with pytest.raises(SampleIndexError):
            reader[0]
        reader.close()

    @EVERY
    @pytest.mark.parametrize("index", [-1, 4, 2**40])
    def test_an_index_outside_is_refused(self, split_format: str, tmp_path: Path, index: int) -> None:
        reader = SplitReader(put_shard(tmp_path, layout_of(split_format), SAMPLES), tmp_path)
        with pytest.raises(SampleIndexError, match=f"4 samples, but sample {index} was asked for"):
            reader[index]
        reader.close()

    @EVERY
    def test_only_columns_that_are_asked_for_are_read(self, split_format: str, tmp_path: Path) -> None:
        info = put_shard(tmp_path, layout_of(split_format), SAMPLES)
        found = read_all(info, tmp_path, columns=["text", "id"])
        assert found == [{"id": sample["id"], "text": sample["text"]} for sample in SAMPLES]
        with pytest.raises(ConfigError, match="has no column 'weight'; it has 'id', 'score', 'text'"):
            SplitReader(info, tmp_path, columns=["id", "weight"])

    @EVERY
    def test_two_descriptors_are_held_until_it_is_closed(self, split_format: str, tmp_path: Path) -> None:
        info = put_shard(tmp_path, layout_of(split_format), SAMPLES)
        reader = SplitReader(info, tmp_path)
        assert descriptors_under(tmp_path) == 2
        reader.close()
        assert descriptors_under(tmp_path) == 0


class TestDamage:
    @EVERY
    @pytest.mark.parametrize("which", [0, 1])
    def test_a_file_that_is_not_there_is_told(self, split_format: str, tmp_path: Path, which: int) -> None:
        info = put_shard(tmp_path, layout_of(split_format), SAMPLES)
        path = paths_of(info, tmp_path)[which]
        path.unlink()
        with pytest.raises(ObjectNotFoundError, match=f"{path} is named by an index"):
            SplitReader(info, tmp_path)
        path.mkdir()
        with pytest.raises(StorageError, match=f"{path} cannot be opened"):
            SplitReader(info, tmp_path)

    @EVERY
    @pytest.mark.parametrize("which", [0, 1])
    @pytest.mark.parametrize("change", [-1, 1, -(10**9)])
    def test_a_file_of_another_size_is_refused(
        self, split_format: str, tmp_path: Path, which: int, change: int
    ) -> None:
        info = put_shard(tmp_path, layout_of(split_format), SAMPLES)
        path = paths_of(info, tmp_path)[which]
        data = path.read_bytes() + b"\n"
        path.write_bytes(data[: max(0, len(data) - 1 + change)])
        with pytest.raises(ShardCorruptError, match=rf"{path} must have \d+ bytes by its index"):
            SplitReader(info, tmp_path)

    @EVERY
    @pytest.mark.parametrize("samples", [0, 3, 5])
    def test_another_number_of_samples_is_refused(self, split_format: str, tmp_path: Path, samples: int) -> None:
        info = put_shard(tmp_path, layout_of(split_format), SAMPLES)
        with pytest.raises(ShardCorruptError, match=rf"must have {samples} samples by its index, but says it has 4"):
            SplitReader(replace(info, samples=samples), tmp_path)

    @EVERY
    def test_a_count_is_no_reason_to_allocate(self, split_format: str, tmp_path: Path) -> None:
        info = put_shard(tmp_path, layout_of(split_format), SAMPLES)
        path = paths_of(info, tmp_path)[0]
        path.write_bytes(b"\xff" * 4 + path.read_bytes()[4:])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ShardCorruptError, match="for its offsets alone"):
            SplitReader(replace(info, samples=2**32 - 1), tmp_path)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB; the offsets would be 16 GiB

    @EVERY
    @pytest.mark.parametrize("length", [0, 1, 4, 7])
    def test_a_meta_file_too_short_to_be_one_is_refused(self, split_format: str, tmp_path: Path, length: int) -> None:
        info = put_shard(tmp_path, layout_of(split_format), [])
        path = paths_of(info, tmp_path)[0]
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(ShardCorruptError, match=f"must have 8 bytes for its offsets alone, but has {length}"):
            SplitReader(describe_anew(info, tmp_path), tmp_path)

    @EVERY
    def test_offsets_that_leave_the_file_or_go_back_are_refused(self, split_format: str, tmp_path: Path) -> None:
        info = put_shard(tmp_path, layout_of(split_format), SAMPLES)
        sound = offsets_of(info, tmp_path)
        for place in range(5):
            for offset in (0, 1, sound[0] - 1, sound[-1] + 1, 2**32 - 1):
                broken = [*sound]
                broken[place] = offset % 2**32
                if broken == sound or (place not in (0, 4) and broken == sorted(broken)):
                    continue
                set_offsets(info, tmp_path, broken)
                with pytest.raises(ShardCorruptError, match=r"must place its rows|the offsets say"):
                    SplitReader(info, tmp_path)

    @EVERY
    @pytest.mark.parametrize("place", [1, 2, 3])
    @pytest.mark.parametrize("shift", [-2, -1, 1, 2])
    def test_offsets_that_are_not_between_rows_are_refused(
        self, split_format: str, tmp_path: Path, place: int, shift: int
    ) -> None:
        """In a column of text alone nothing but its newlines tells one part of a row from another."""
        layout = layout_of(split_format, {"text": "str"})
        info = put_shard(tmp_path, layout, [{"text": "one two"}] * 4)
        offsets = offsets_of(info, tmp_path)
        offsets[place] += shift
        set_offsets(info, tmp_path, offsets)
        reader = SplitReader(info, tmp_path)
        for index in (place - 1, place):
            with pytest.raises(FormatError, match=f"sample {index}: expected"):
                reader[index]
        others = [index for index in range(4) if index not in (place - 1, place)]
        assert [reader[index] for index in others] == [{"text": "one two"}] * 2
        reader.close()

    @EVERY
    def test_rows_that_are_taken_for_one_are_refused(self, split_format: str, tmp_path: Path) -> None:
        layout = layout_of(split_format, {"text": "str"})
        info = put_shard(tmp_path, layout, [{"text": "x"}] * 3)
        first, second, third, last = offsets_of(info, tmp_path)
        path = paths_of(info, tmp_path)[0]
        meta = path.read_bytes()
        path.write_bytes(struct.pack("<4I", 2, first, third, last) + meta[20:])
        reader = SplitReader(describe_anew(info, tmp_path, samples=2), tmp_path)
        with pytest.raises(FormatError, match=r"sample 0: expected (one row|JSON)"):
            reader[0]
        assert reader[1] == {"text": "x"}
        reader.close()
        assert second < third

    @pytest.mark.parametrize("split_format", FORMATS[1:])
    def test_the_data_of_other_columns_is_refused(self, split_format: str, tmp_path: Path) -> None:
        info = put_shard(tmp_path, layout_of(split_format), SAMPLES)
        path = paths_of(info, tmp_path)[1]
        path.write_bytes(path.read_bytes().replace(b"score", b"spore"))
        with pytest.raises(ShardCorruptError, match=r"must start with b'id.*score.*, its columns, but starts with"):
            SplitReader(info, tmp_path)

    @EVERY
    def test_one_bad_row_leaves_the_others(self, split_format: str, tmp_path: Path) -> None:
        info = put_shard(tmp_path, layout_of(split_format), SAMPLES)
        path = paths_of(info, tmp_path)[1]
        path.write_bytes(path.read_bytes().replace(b"0.5", b"0.\xff"))
        reader = SplitReader(info, tmp_path)
        with pytest.raises(EncodingError, match=f"{path}, sample 2: "):
            reader[2]
        assert [reader[index] for index in (0, 1, 3)] == [SAMPLES[index] for index in (0, 1, 3)]
        reader.close()


@EVERY
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_ends_in_samples_or_in_a_typed_error(split_format: str, tmp_path: Path, data: st.DataObject) -> None:
    info = put_shard(tmp_path, layout_of(split_format), SAMPLES)
    for path in paths_of(info, tmp_path):
        path.write_bytes(data.draw(damaged_bytes(path.read_bytes(), fewest=0, most=3, longest=20)))
    # Described anew, because files of other sizes are refused before their content is looked at.
    info = describe_anew(info, tmp_path, samples=data.draw(st.sampled_from([4, 4, 4, 0, 3, 5, 2**32 - 1])))
    with suppress(FormatError):
        reader = SplitReader(info, tmp_path)
        for index in range(len(reader)):
            with suppress(FormatError):
                assert reader[index].keys() == {"id", "score", "text"}
        reader.close()
