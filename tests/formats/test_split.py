from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, EncodingError, IndexFormatError, ShardCorruptError
from lightning_streaming.formats.shard import check_shard
from lightning_streaming.formats.split import (
    SplitLayout,
    make_split_layout,
    meta_bytes,
    read_split_layout,
    split_config,
)
from tests.formats.golden_datasets import SPLIT, expectations, unpack, value_of
from tests.formats.split_datasets import COLUMNS, FORMATS, layout_of, put_shard, sample_of, shard_files
from tests.golden import golden_path

EXPECTED = expectations()
QUICK = settings(max_examples=150)
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
            config = split_config(
                layout, compression=shard.compression, hashes=shard.hashes, size_limit=shard.size_limit
            )
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
            with pytest.raises(EncodingError, match=r"column '(note|text)': text must be free of the newline"):
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
        with pytest.raises(EncodingError, match=r"column 'a'.*separator '\|\|' also where it meets one.*'x\|'"):
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
        with pytest.raises(ConfigError, match="set size_limit"):
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
        others = [name for name in COLUMNS if name != column]
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
        assert read_split_layout(put_shard(tmp_path, layout, [])) == layout

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
        info = put_shard(tmp_path, layout, [])
        info.schema.update(change)  # type: ignore[attr-defined]
        with pytest.raises(IndexFormatError, match=f"the index entry of shard.00000.{split_format} cannot be read"):
            check_shard(info)

    def test_the_config_repeats_the_index(self) -> None:
        layout = layout_of("xsv")
        config = json.loads(split_config(layout, compression="zstd:7", hashes=("sha1",), size_limit=9))
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
