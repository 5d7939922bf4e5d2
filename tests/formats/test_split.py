from __future__ import annotations

import json
import re
import resource
import struct
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    IndexFormatError,
    ObjectNotFoundError,
    SampleIndexError,
    ShardCorruptError,
    StorageError,
)
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.formats.mds import encode_config
from lightning_streaming.formats.shard import check_shard, open_shard
from lightning_streaming.formats.split import SplitLayout, SplitReader, make_split_layout, meta_bytes, read_split_layout
from tests.formats.golden_datasets import SPLIT, expectations, unpack, value_of
from tests.formats.small_shards import (
    FORMATS,
    SPLIT_COLUMNS,
    damaged_bytes,
    layout_of,
    put_split_shard,
    sample_of,
    shard_files,
)
from tests.golden import golden_path
from tests.helpers import assert_error, descriptors_under
from tests.tiers import examples

EXPECTED = expectations()
QUICK = settings(max_examples=examples(150))
SEPARATED = pytest.mark.parametrize("split_format", FORMATS[1:])
EVERY = pytest.mark.parametrize("split_format", FORMATS)


class TestGolden:
    @pytest.mark.parametrize("name", SPLIT)
    def test_every_shard_is_made_byte_for_byte_as_the_original_does(self, name: str, tmp_path: Path) -> None:
        expected = EXPECTED[name]
        writer = expected["writer"]
        layout = make_split_layout(
            expected["format"], expected["columns"], writer.get("newline", "\n"), writer.get("separator")
        )
        samples = [{key: value_of(value) for key, value in one.items()} for one in expected["samples"]]
        for shard in unpack(golden_path("mds", name), tmp_path).shards:
            assert layout.schema == shard.schema
            given = {"compression": shard.compression, "hashes": shard.hashes, "size_limit": shard.size_limit}
            config = encode_config(layout.schema, layout.format, **given)  # type: ignore[arg-type]
            rows = [layout.encode(samples.pop(0)) for _ in range(shard.samples)]
            meta, data = shard_files(rows, layout, config)
            assert data == (tmp_path / shard.raw_data.basename).read_bytes()
            assert shard.raw_meta is not None
            assert meta == (tmp_path / shard.raw_meta.basename).read_bytes()
        assert not samples

    def test_rows_in_bytes(self) -> None:
        sample = {"id": -7, "text": 'né "x"', "score": 0.1, "more": "left out"}
        assert layout_of("json").encode(sample) == b'{"id": -7, "score": 0.1, "text": "n\\u00e9 \\"x\\""}\n'
        assert layout_of("csv").header == b"id,score,text\n"
        assert layout_of("csv").encode(sample) == b'-7,0.1,n\xc3\xa9 "x"\n'
        assert layout_of("tsv").encode(sample) == b'-7\t0.1\tn\xc3\xa9 "x"\n'
        assert layout_of("xsv", separator=" | ", newline="\r\n").encode(sample) == b'-7 | 0.1 | n\xc3\xa9 "x"\r\n'

    def test_a_meta_file_in_bytes(self) -> None:
        assert meta_bytes([3, 5, 260], b"{}") == bytes([2, 0, 0, 0, 3, 0, 0, 0, 5, 0, 0, 0, 4, 1, 0, 0]) + b"{}"
        assert meta_bytes([3], b"") == bytes([0, 0, 0, 0, 3, 0, 0, 0])


class TestRoundTrip:
    # Whatever the separator or the newline is made of is likely, also in pieces.
    texts = st.text(
        st.sampled_from("|,\t\r\n;abé😀\0\x85\u2028") | st.characters(exclude_categories=["Cs"]), max_size=8
    )
    samples = st.fixed_dictionaries({"id": st.integers(), "score": st.floats(), "text": texts, "note": texts})

    @EVERY
    @QUICK
    @given(samples, st.sampled_from(["\n", "\r\n", "||", "é"]), st.sampled_from([",", "||", "|a|", "\r", "\n", "😀"]))
    def test_a_row_is_refused_or_comes_back(
        self, split_format: str, sample: dict[str, Any], newline: str, separator: str
    ) -> None:
        columns = {"id": "int", "score": "float", "text": "str", "note": "str"}
        layout = layout_of(
            split_format, columns, newline=newline, **({"separator": separator} if split_format == "xsv" else {})
        )
        texts = [sample["note"], sample["text"]]
        if not layout.separator or not any(part in text for part in (newline, layout.separator) for text in texts):
            try:
                row = layout.encode(sample)
            except EncodingError:
                assert layout.separator  # made by a field and the separator beside it
                assert len(layout.separator) > 1
                return
            assert repr(layout.decode(row)) == repr(dict(sorted(sample.items())))  # so that a NaN equals itself
            assert layout.decode(row, ["note"]) == {"note": sample["note"]}
        else:
            with pytest.raises(EncodingError, match=r"column '(note|text)': text must not contain the newline"):
                layout.encode(sample)

    @EVERY
    def test_bools_and_subclasses_come_back_as_equal_values(self, split_format: str) -> None:
        layout = layout_of(split_format)
        sample = {"id": True, "score": np.float64(0.25), "text": np.str_("x")}
        assert layout.decode(layout.encode(sample)) == {"id": 1, "score": 0.25, "text": "x"}

    @SEPARATED
    def test_a_column_of_empty_texts_can_be_the_only_one(self, split_format: str) -> None:
        layout = layout_of(split_format, {"t": "str"})
        assert layout.encode({"t": ""}) == b"\n"
        assert layout.decode(b"\n") == {"t": ""}

    def test_text_that_makes_a_separator_with_the_one_beside_it_is_refused(self) -> None:
        layout = layout_of("xsv", {"a": "str", "b": "str"})
        with pytest.raises(EncodingError, match=r"column 'a'.*also where it meets one.*separator '\|\|'.*'x\|'"):
            layout.encode({"a": "x|", "b": "y"})
        assert layout.decode(layout.encode({"a": "x", "b": "|y"})) == {"a": "x", "b": "|y"}

    def test_json_rows_may_end_in_nothing(self) -> None:
        layout = layout_of("json", newline="")
        assert layout.decode(layout.encode(sample_of(3))) == sample_of(3)


class TestEncode:
    @EVERY
    @pytest.mark.parametrize(
        ("column", "value"),
        [
            ("id", "1"),
            ("id", 1.0),
            ("id", np.int64(1)),
            ("id", None),
            ("score", 1),
            ("score", Decimal(1)),
            ("text", b"bytes are not taken as they are"),
            ("text", None),
            ("text", "\ud800"),
            ("text", "\ud83d\ude00"),  # JSON would give back one character
        ],
    )
    def test_a_value_of_another_type_is_refused(self, split_format: str, column: str, value: Any) -> None:
        with pytest.raises(EncodingError, match=f"column '{column}': expected"):
            layout_of(split_format).encode(sample_of(1) | {column: value})

    @EVERY
    def test_a_missing_column_is_named(self, split_format: str) -> None:
        with pytest.raises(EncodingError, match="column 'score' is missing; the sample has 'id', 'text'"):
            layout_of(split_format).encode({"id": 1, "text": "x"})

    @EVERY
    def test_a_number_too_long_to_write_is_refused(self, split_format: str) -> None:
        with pytest.raises(EncodingError, match="number"):
            layout_of(split_format).encode(sample_of(1) | {"id": 10**5000})

    def test_files_that_32_bits_cannot_place_are_refused(self) -> None:
        assert meta_bytes([0, 2**32 - 1], b"")[-4:] == b"\xff" * 4
        with assert_error(ConfigError, option="size_limit"):
            meta_bytes([0, 2**32], b"")


class TestDecode:
    @SEPARATED
    @pytest.mark.parametrize(
        ("row", "words"),
        [
            ("1;0.5;x", "ends in"),
            ("", "ends in"),
            ("1;0.5\n", "expected 3 fields, but found 2"),
            ("1;0.5;x;\n", "expected 3 fields, but found 4"),
            ("1;0.5;x\ny\n", "expected one row"),
        ],
    )
    def test_what_is_not_one_row_is_refused(self, split_format: str, row: str, words: str) -> None:
        layout = layout_of(split_format)
        with pytest.raises(ShardCorruptError, match=words):
            layout.decode(row.replace(";", layout.separator or "").encode())

    @SEPARATED
    @pytest.mark.parametrize(
        ("row", "column"),
        [
            (b"one;0.5;x\n", "id"),
            (b"1.5;0.5;x\n", "id"),
            (b";0.5;x\n", "id"),
            (b"1" * 5000 + b";0.5;x\n", "id"),
            (b"1;half;x\n", "score"),
            (b"1;0.5;\xff\n", "text"),
        ],
    )
    def test_a_field_that_does_not_fit_its_column_is_refused(self, split_format: str, row: bytes, column: str) -> None:
        layout = layout_of(split_format)
        assert layout.separator
        row = row.replace(b";", layout.separator.encode())
        with pytest.raises(EncodingError, match=f"column '{column}': expected"):
            layout.decode(row)
        others = [name for name in SPLIT_COLUMNS if name != column]
        assert list(layout.decode(row, others)) == others  # what is not asked for is not looked at

    @pytest.mark.parametrize(
        ("row", "words"),
        [
            (b'{"id": 1, "score": 0.5}\n', "column 'text' is missing"),
            (b'{"id": "1", "score": 0.5, "text": ""}\n', "column 'id': expected int"),
            (b'{"id": 1, "score": 1, "text": ""}\n', "column 'score': expected float"),
            (b'{"id": 1, "score": 0.5, "text": ["x"]}\n', "column 'text': expected str"),
            (b'{"id": 1, "score": 0.5, "text": "\xff"}\n', "expected JSON"),
            (b'{"id": ' + b"1" * 5000 + b', "score": 0.5, "text": ""}\n', "expected JSON"),
            (b"[" * 200_000 + b"\n", "expected JSON"),
            (b'{"a":' * 200_000 + b"\n", "expected JSON"),
            (b"[1]\n", "expected a JSON object"),
            (b"{}{}\n", "expected JSON"),
            (b"\n", "expected JSON"),
        ],
    )
    def test_json_that_does_not_fit_the_columns_is_refused(self, row: bytes, words: str) -> None:
        with pytest.raises(EncodingError, match=words):
            layout_of("json").decode(row)

    def test_a_json_row_without_its_newline_is_refused(self) -> None:
        with pytest.raises(ShardCorruptError, match="ends in"):
            layout_of("json").decode(b'{"id": 1, "score": 0.5, "text": ""}')

    def test_json_keys_that_are_no_columns_are_left_out(self) -> None:
        row = b'{"text": "x", "more": [1], "score": NaN, "id": 1}\n'
        assert list(layout_of("json").decode(row)) == ["id", "score", "text"]
        assert layout_of("json").decode(row, {"text"}) == {"text": "x"}

    @EVERY
    def test_a_view_of_the_file_does_for_a_row(self, split_format: str) -> None:
        layout = layout_of(split_format)
        assert layout.decode(memoryview(layout.encode(sample_of(1)))) == sample_of(1)


class TestLayout:
    @EVERY
    def test_columns_are_sorted(self, split_format: str) -> None:
        layout = layout_of(split_format, {"b": "int", "é": "str", "a": "float", "B": "str"})
        assert layout.names == ("B", "a", "b", "é")
        assert layout.encoding_names == ("str", "float", "int", "str")

    @EVERY
    def test_the_index_gives_the_same_layout_again(self, split_format: str, tmp_path: Path) -> None:
        layout = layout_of(split_format)
        assert read_split_layout(put_split_shard(tmp_path, layout, [])) == layout

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("parquet", {"a": "int"}), "format must be one of json, csv, tsv, xsv"),
            (("json", {}), "at least one column"),
            (("json", {"a": "json"}), "must be str, int, float, but column 'a' is 'json'"),
            (("csv", {"a": "int64"}), "must be str, int, float"),
            (("csv", {"a,b": "int"}), r"cannot be a header: column 'a,b'"),
            (("tsv", {"a\n": "int"}), "cannot be a header"),
            (("xsv", {"a|": "int", "b": "int"}, "\n", "||"), "cannot be a header"),
            (("csv", {"\ud800": "int"}), "name must be text that UTF-8 can hold"),
            (("json", {1: "int"}), "name must be text"),
            (("xsv", {"a": "int"}), "xsv needs a separator, but got None"),
            (("xsv", {"a": "int"}, "\n", ""), "separator must be text that UTF-8 can hold, and not empty"),
            (("csv", {"a": "int"}, "\n", ","), "csv takes no separator"),
            (("json", {"a": "int"}, "\n", ","), "json takes no separator"),
            (("csv", {"a": "int"}, ""), "newline must be text that UTF-8 can hold, and not empty"),
            (("json", {"a": "int"}, b"\n"), "newline must be text"),
        ],
    )
    def test_a_layout_that_cannot_be_is_refused(self, arguments: tuple[Any, ...], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            make_split_layout(*arguments)

    @pytest.mark.parametrize(
        ("split_format", "change"),
        [
            ("json", {"columns": {}}),
            ("json", {"columns": {"a": "jpeg"}}),
            ("json", {"newline": "\ud800"}),
            ("csv", {"newline": ""}),
            ("csv", {"column_names": ("id", "id", "text")}),
            ("csv", {"column_names": ("id", "text")}),
            ("tsv", {"column_names": ("id", "score", "te\txt")}),
            ("xsv", {"separator": ""}),
        ],
    )
    def test_an_index_that_describes_none_is_refused_before_anything_is_fetched(
        self, tmp_path: Path, split_format: str, change: dict[str, Any]
    ) -> None:
        layout = layout_of(split_format)
        info = put_split_shard(tmp_path, layout, [])
        info.schema.update(change)  # type: ignore[attr-defined]
        with assert_error(IndexFormatError, path=info.raw_data.basename):
            check_shard(info)

    def test_the_config_repeats_the_index(self) -> None:
        layout = layout_of("xsv")
        config = json.loads(
            encode_config(layout.schema, layout.format, compression="zstd:7", hashes=("sha1",), size_limit=9)
        )
        assert config == {
            "column_encodings": ["int", "float", "str"],
            "column_names": ["id", "score", "text"],
            "compression": "zstd:7",
            "format": "xsv",
            "hashes": ["sha1"],
            "newline": "\n",
            "separator": "||",
            "size_limit": 9,
            "version": 2,
        }
        assert isinstance(layout, SplitLayout)


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
        reader = open_shard(put_split_shard(tmp_path, layout_of(split_format), SAMPLES), tmp_path)
        assert len(reader) == len(SAMPLES)
        found = [reader[index] for index in (3, 0, 2, 1, 0)]
        reader.close()
        assert found == [SAMPLES[index] for index in (3, 0, 2, 1, 0)]

    @EVERY
    def test_a_shard_of_no_samples_is_read(self, split_format: str, tmp_path: Path) -> None:
        info = put_split_shard(tmp_path, layout_of(split_format), [])
        assert (info.raw_data.bytes == 0) == (split_format == "json")
        reader = SplitReader(info, tmp_path)
        assert len(reader) == 0
        with pytest.raises(SampleIndexError):
            reader[0]
        reader.close()

    @EVERY
    @pytest.mark.parametrize("index", [-1, 4, 2**40])
    def test_an_index_outside_is_refused(self, split_format: str, tmp_path: Path, index: int) -> None:
        reader = SplitReader(put_split_shard(tmp_path, layout_of(split_format), SAMPLES), tmp_path)
        with assert_error(SampleIndexError, sample=index):
            reader[index]
        reader.close()

    @EVERY
    def test_only_columns_that_are_asked_for_are_read(self, split_format: str, tmp_path: Path) -> None:
        info = put_split_shard(tmp_path, layout_of(split_format), SAMPLES)
        found = read_all(info, tmp_path, columns=["text", "id"])
        assert found == [{"id": sample["id"], "text": sample["text"]} for sample in SAMPLES]
        with assert_error(ConfigError, option="columns", path=info.raw_data.basename) as caught:
            SplitReader(info, tmp_path, columns=["id", "weight"])
        assert "'text'" in str(caught.value)

    @EVERY
    def test_two_descriptors_are_held_until_it_is_closed(self, split_format: str, tmp_path: Path) -> None:
        info = put_split_shard(tmp_path, layout_of(split_format), SAMPLES)
        reader = SplitReader(info, tmp_path)
        assert descriptors_under(tmp_path) == 2
        reader.close()
        assert descriptors_under(tmp_path) == 0


class TestDamage:
    @EVERY
    @pytest.mark.parametrize("which", [0, 1])
    def test_a_file_that_is_not_there_is_told(self, split_format: str, tmp_path: Path, which: int) -> None:
        info = put_split_shard(tmp_path, layout_of(split_format), SAMPLES)
        path = paths_of(info, tmp_path)[which]
        path.unlink()
        with assert_error(ObjectNotFoundError, path=path):
            SplitReader(info, tmp_path)
        path.mkdir()
        with assert_error(StorageError, path=path):
            SplitReader(info, tmp_path)

    @EVERY
    @pytest.mark.parametrize("which", [0, 1])
    @pytest.mark.parametrize("change", [-1, 1, -(10**9)])
    def test_a_file_of_another_size_is_refused(
        self, split_format: str, tmp_path: Path, which: int, change: int
    ) -> None:
        info = put_split_shard(tmp_path, layout_of(split_format), SAMPLES)
        path = paths_of(info, tmp_path)[which]
        data = path.read_bytes() + b"\n"
        path.write_bytes(data[: max(0, len(data) - 1 + change)])
        with assert_error(ShardCorruptError, path=path) as caught:
            SplitReader(info, tmp_path)
        assert "bytes by its index" in str(caught.value)

    @EVERY
    @pytest.mark.parametrize("samples", [0, 3, 5])
    def test_another_number_of_samples_is_refused(self, split_format: str, tmp_path: Path, samples: int) -> None:
        info = put_split_shard(tmp_path, layout_of(split_format), SAMPLES)
        with pytest.raises(ShardCorruptError, match=rf"must have {samples} samples by its index, but states 4"):
            SplitReader(replace(info, samples=samples), tmp_path)

    @EVERY
    def test_a_count_is_no_reason_to_allocate(self, split_format: str, tmp_path: Path) -> None:
        info = put_split_shard(tmp_path, layout_of(split_format), SAMPLES)
        path = paths_of(info, tmp_path)[0]
        path.write_bytes(b"\xff" * 4 + path.read_bytes()[4:])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with assert_error(ShardCorruptError, path=path) as caught:
            SplitReader(replace(info, samples=2**32 - 1), tmp_path)
        assert "alone" in str(caught.value)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB; the offsets would be 16 GiB

    @EVERY
    @pytest.mark.parametrize("length", [0, 1, 4, 7])
    def test_a_meta_file_too_short_to_be_one_is_refused(self, split_format: str, tmp_path: Path, length: int) -> None:
        info = put_split_shard(tmp_path, layout_of(split_format), [])
        path = paths_of(info, tmp_path)[0]
        path.write_bytes(path.read_bytes()[:length])
        with assert_error(ShardCorruptError, path=path) as caught:
            SplitReader(describe_anew(info, tmp_path), tmp_path)
        assert re.search(f"must have 8 bytes for its offsets alone, but has {length}", str(caught.value))

    @EVERY
    def test_offsets_that_leave_the_file_or_go_back_are_refused(self, split_format: str, tmp_path: Path) -> None:
        info = put_split_shard(tmp_path, layout_of(split_format), SAMPLES)
        sound = offsets_of(info, tmp_path)
        for place in range(5):
            for offset in (0, 1, sound[0] - 1, sound[-1] + 1, 2**32 - 1):
                broken = [*sound]
                broken[place] = offset % 2**32
                if broken == sound or (place not in (0, 4) and broken == sorted(broken)):
                    continue
                set_offsets(info, tmp_path, broken)
                with pytest.raises(ShardCorruptError, match=r"must hold its samples|the offsets state"):
                    SplitReader(info, tmp_path)

    @EVERY
    @pytest.mark.parametrize("place", [1, 2, 3])
    @pytest.mark.parametrize("shift", [-2, -1, 1, 2])
    def test_offsets_that_are_not_between_rows_are_refused(
        self, split_format: str, tmp_path: Path, place: int, shift: int
    ) -> None:
        """In a column of text alone nothing but its newlines tells one part of a row from another."""
        layout = layout_of(split_format, {"text": "str"})
        info = put_split_shard(tmp_path, layout, [{"text": "one two"}] * 4)
        offsets = offsets_of(info, tmp_path)
        offsets[place] += shift
        set_offsets(info, tmp_path, offsets)
        reader = SplitReader(info, tmp_path)
        for index in (place - 1, place):
            with assert_error(ShardCorruptError, path=info.raw_data.basename, sample=index) as caught:
                reader[index]
            assert "sample" in str(caught.value)
        others = [index for index in range(4) if index not in (place - 1, place)]
        assert [reader[index] for index in others] == [{"text": "one two"}] * 2
        reader.close()

    @EVERY
    def test_rows_that_are_taken_for_one_are_refused(self, split_format: str, tmp_path: Path) -> None:
        layout = layout_of(split_format, {"text": "str"})
        info = put_split_shard(tmp_path, layout, [{"text": "x"}] * 3)
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
        info = put_split_shard(tmp_path, layout_of(split_format), SAMPLES)
        path = paths_of(info, tmp_path)[1]
        path.write_bytes(path.read_bytes().replace(b"score", b"spore"))
        with assert_error(ShardCorruptError, path=path) as caught:
            SplitReader(info, tmp_path)
        assert "b'id" in str(caught.value)

    @EVERY
    def test_one_bad_row_leaves_the_others(self, split_format: str, tmp_path: Path) -> None:
        info = put_split_shard(tmp_path, layout_of(split_format), SAMPLES)
        path = paths_of(info, tmp_path)[1]
        path.write_bytes(path.read_bytes().replace(b"0.5", b"0.\xff"))
        reader = SplitReader(info, tmp_path)
        with assert_error(EncodingError, path=path, sample=2) as caught:
            reader[2]
        assert "sample" in str(caught.value)
        assert [reader[index] for index in (0, 1, 3)] == [SAMPLES[index] for index in (0, 1, 3)]
        reader.close()


@pytest.mark.rotate(2)
@EVERY
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_ends_in_samples_or_in_a_typed_error(split_format: str, tmp_path: Path, data: st.DataObject) -> None:
    info = put_split_shard(tmp_path, layout_of(split_format), SAMPLES)
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
