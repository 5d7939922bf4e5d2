"""Parquet files, written by pyarrow: row groups are shards, whose wanted columns are unpacked into their room."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_streaming.cache.sources import FilePartUnpacker, StoredInPlace
from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    IndexFormatError,
    SampleIndexError,
    ShardCorruptError,
    UnsupportedError,
)
from lightning_streaming.formats.arrow.parquet import ParquetFormat
from lightning_streaming.formats.arrow.parquet_files import Footer
from lightning_streaming.formats.columns import column_lengths, encodings_of, flat_column, read_columns
from lightning_streaming.formats.index import dump_index, parse_index
from lightning_streaming.formats.shard import check_shard, may_be_flat, narrowed, open_shard, other_format, plain_kind
from lightning_streaming.formats.shard_format import RangedFile, ShardReader
from lightning_streaming.formats.shard_table import PART, ShardInfo, column_names
from tests.formats.stored import Folder, arrays_in, describe
from tests.helpers import assert_error

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROWS = 50
TABLE = pa.table(
    {
        "id": pa.array(np.arange(ROWS)),
        "text": [f"row {number}" for number in range(ROWS)],
        "tokens": pa.array([list(range(number % 7)) for number in range(ROWS)], pa.list_(pa.int32())),
        "lang": [("en", "de", None)[number % 3] for number in range(ROWS)],
    }
)


def write(root: Path, table: pa.Table = TABLE, name: str = "a.parquet", **how: Any) -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, root / name, **{"row_group_size": 20, **how})
    return root


def unpacked(
    info: ShardInfo, root: Path, columns: Sequence[str] | None = None, parts: FilePartUnpacker | None = None
) -> tuple[ShardInfo, Path]:
    """A shard's raw file, made beside the data as a cache would have it."""
    check_shard(info, columns=columns)
    wanted = narrowed(info, columns)
    raw = root / "cache" / wanted.raw_data.basename
    raw.parent.mkdir(parents=True, exist_ok=True)
    assert wanted.zip_data is not None
    stored = StoredInPlace(root / wanted.zip_data.basename, wanted.zip_data.bytes)
    (parts or FilePartUnpacker()).unpack(wanted, stored, raw)
    return wanted, root / "cache"


def opened(info: ShardInfo, root: Path, columns: Sequence[str] | None = None) -> ShardReader:
    wanted, cache = unpacked(info, root, columns)
    return open_shard(wanted, cache, columns=columns)


def read(infos: Sequence[ShardInfo], root: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    for info in infos:
        reader = opened(info, root, columns)
        rows += [reader[number] for number in range(len(reader))]
        reader.close()
    return rows


def plain(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as pyarrow gives them."""
    return [{name: one.tolist() if hasattr(one, "tolist") else one for name, one in row.items()} for row in rows]


def test_row_groups_are_shards_and_rows_samples(tmp_path: Path) -> None:
    write(tmp_path, TABLE[30:], "b.parquet")
    write(tmp_path, TABLE[:30], "a/x.parquet")
    infos = describe(tmp_path, "parquet")
    names = ["a/x.parquet.rows/000000", "a/x.parquet.rows/000001", "b.parquet.rows/000000"]
    assert [info.raw_data.basename for info in infos] == [f"{name}.arrow" for name in names]
    assert [info.samples for info in infos] == [20, 10, 20]
    assert all(info.compression == PART for info in infos)
    assert encodings_of(infos[0]) == {"id": "int64", "text": "str", "tokens": "ndarray:int32", "lang": "str"}
    rows = read(infos, tmp_path)
    assert plain(rows) == TABLE.to_pylist()
    assert type(rows[0]["id"]) is np.int64
    assert rows[6]["tokens"].dtype == np.int32


@pytest.mark.parametrize(
    "how",
    [
        {"compression": "zstd"},
        {"compression": "none", "use_dictionary": False},
        {"data_page_version": "2.0", "write_page_checksum": True},
        {"data_page_size": 64},
        {"write_page_index": True, "write_statistics": False},
    ],
    ids=str,
)
def test_however_it_was_written_the_rows_are_the_same(tmp_path: Path, how: dict[str, Any]) -> None:
    write(tmp_path, **how)
    assert plain(read(describe(tmp_path, "parquet"), tmp_path)) == TABLE.to_pylist()


def test_only_wanted_columns_are_read_and_take_room(tmp_path: Path) -> None:
    wide = TABLE.append_column("much", [[bytes([number]) * 90_000 for number in range(ROWS)]])
    write(tmp_path, wide, compression="none")
    info = describe(tmp_path, "parquet")[1]
    wanted = narrowed(info, ["text", "id"])
    assert column_names(wanted) == ("id", "text")
    assert wanted.raw_data.basename != info.raw_data.basename
    assert wanted.raw_data.bytes < 8000 < 20 * 90_000 < info.raw_data.bytes
    assert narrowed(wanted, ["id", "text"]) == wanted
    assert narrowed(info, list(column_names(info))) == info
    raw = tmp_path / "raw"
    assert wanted.zip_data is not None
    asked = FilePartUnpacker().unpack(wanted, StoredInPlace(tmp_path / "a.parquet", wanted.zip_data.bytes), raw)
    assert asked.num_bytes < 3000
    assert raw.stat().st_size == wanted.raw_data.bytes
    assert read([info], tmp_path, ["text", "id"])[3] == {"id": 23, "text": "row 23"}
    with assert_error(ConfigError, option="columns", path="a.parquet"):
        check_shard(info, columns=["x"])


def test_batches_of_numbers_are_copied_together(tmp_path: Path) -> None:
    tokens = [np.arange(4, dtype=np.int32) + number for number in range(ROWS)]
    write(tmp_path, pa.table({"tokens": tokens, "label": pa.array(range(ROWS), pa.uint8())}))
    infos = describe(tmp_path, "parquet")
    assert len({plain_kind(info, None) for info in infos}) == 1
    readers: list[Any] = [opened(info, tmp_path) for info in infos]
    rows = readers[0].plain_rows()
    assert rows is not None
    assert all(reader.plain_rows() is rows for reader in readers)
    table = np.empty(2, rows.row)
    readers[1].copy_rows(np.array([3, 0]), table)
    found = rows.columns_of(table)
    assert np.array_equal(found["tokens"], [tokens[23], tokens[20]])
    assert found["label"].tolist() == [23, 20]
    for reader in readers:
        reader.close()
    assert plain_kind(infos[0], ["label"]) is not None
    write(tmp_path, TABLE)
    assert plain_kind(describe(tmp_path, "parquet")[0], ["text", "id"]) is not None
    write(tmp_path, pa.table({"id": range(ROWS), "more": [{"x": number} for number in range(ROWS)]}))
    assert plain_kind(describe(tmp_path, "parquet")[0], None) is None


def test_lists_are_counted_and_found_for_packs(tmp_path: Path) -> None:
    info = describe(write(tmp_path), "parquet")[1]
    assert may_be_flat(info)
    _, cache = unpacked(info, tmp_path, ["tokens"])
    lengths = column_lengths(info, "tokens").read_local(cache)
    assert lengths.tolist() == [number % 7 for number in range(20, 40)]
    reader = opened(info, tmp_path, ["tokens"])
    assert arrays_in(flat_column(reader, info, "tokens")) == [list(range(number % 7)) for number in range(20, 40)]
    reader.close()


def test_columns_are_read_for_conditions(tmp_path: Path) -> None:
    info = describe(write(tmp_path), "parquet")[0]
    wanted, cache = unpacked(info, tmp_path, ["id", "lang"])
    columns = read_columns(wanted, cache, ["id", "lang"])
    assert isinstance(columns["id"], np.ndarray)
    assert columns["id"].tolist() == list(range(20))
    assert columns["lang"] == TABLE.column("lang").to_pylist()[:20]


def test_known_files_are_not_looked_at_again_unless_they_have_changed(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet", "c.parquet"):
        write(tmp_path, name=name)
    known = describe(tmp_path, "parquet")
    folder = Folder(tmp_path)
    write(tmp_path, TABLE[:45], "b.parquet")
    before = {info.raw_data.basename: info for info in known}
    found = list(other_format("parquet").describe(folder, before))
    assert [info.samples for info in found] == [20, 20, 10, 20, 20, 5, 20, 20, 10]
    assert folder.bytes_read == folder.sizes()["b.parquet"]


def test_a_file_without_rows_has_no_shards(tmp_path: Path) -> None:
    write(tmp_path, TABLE[:0], "a.parquet")
    write(tmp_path, TABLE[:3], "b.parquet")
    assert [info.samples for info in describe(tmp_path, "parquet")] == [3]


def test_a_footer_of_any_length_is_read(tmp_path: Path) -> None:
    table = pa.table({f"column {number:04} {'x' * 60}": [1, 2] for number in range(1500)})
    write(tmp_path, table)
    assert (tmp_path / "a.parquet").stat().st_size > 3 * (64 << 10)
    infos = describe(tmp_path, "parquet")
    assert len(column_names(infos[0])) == 1500
    name = table.column_names[777]
    assert read(infos, tmp_path, [name]) == [{name: 1}, {name: 2}]


# --- how much room rows take ---

_LEAVES = st.sampled_from(
    [pa.int8(), pa.int64(), pa.float32(), pa.bool_(), pa.string(), pa.large_string(), pa.binary(), pa.binary(3)]
)
_TYPES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 3)),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: pa.struct([(str(n), k) for n, k in enumerate(kinds)])
        ),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
    ),
    max_leaves=4,
)


def _value(kind: Any, draw: np.random.Generator, depth: int = 0) -> Any:
    if depth and draw.random() < 0.2:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _value(field.type, draw, depth + 1) for field in kind}
    if pa.types.is_map(kind):
        return [(f"k{number}", _value(kind.item_type, draw, depth + 1)) for number in range(draw.integers(3))]
    if pa.types.is_fixed_size_list(kind):
        return [_value(kind.value_type, draw, depth + 1) for _ in range(kind.list_size)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_value(kind.value_type, draw, depth + 1) for _ in range(draw.integers(5))]
    if pa.types.is_boolean(kind):
        return bool(draw.integers(2))
    if pa.types.is_floating(kind):
        return float(draw.integers(99))
    if pa.types.is_integer(kind):
        return int(draw.integers(99))
    if pa.types.is_fixed_size_binary(kind):
        return bytes(draw.integers(65, 70, 3).tolist())
    text = "ab" * int(draw.integers(40)) if draw.random() < 0.5 else f"{draw.integers(10**9)}"
    return text.encode() if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else text


@QUICK
@given(
    kinds=st.lists(_TYPES, min_size=1, max_size=4),
    rows=st.integers(1, 60),
    seed=st.integers(0, 99),
    has_dictionary=st.booleans(),
    version=st.sampled_from(["1.0", "2.0"]),
)
def test_rows_fit_the_room_that_the_footer_promises(
    tmp_path: Path, kinds: list[Any], rows: int, seed: int, has_dictionary: bool, version: str
) -> None:
    draw = np.random.default_rng(seed)
    table = pa.table(
        {str(n): pa.array([_value(kind, draw, 1) for _ in range(rows)], kind) for n, kind in enumerate(kinds)}
    )
    write(tmp_path, table, row_group_size=25, use_dictionary=has_dictionary, data_page_version=version)
    for info in describe(tmp_path, "parquet"):
        wanted, cache = unpacked(info, tmp_path)
        raw = cache / wanted.raw_data.basename
        assert raw.stat().st_size == wanted.raw_data.bytes
        with pa.memory_map(str(raw)) as data:
            batches = list(pa.ipc.open_stream(data))
        group = int(wanted.raw_data.basename[-12:-6])
        expected = table.slice(25 * group, 25).to_pylist()
        assert [row for batch in batches for row in batch.to_pylist()] == expected
        raw.unlink()


def test_text_that_repeats_keeps_its_dictionary(tmp_path: Path) -> None:
    write(tmp_path, pa.table({"text": ["much text" * 1000] * 5000}), row_group_size=5000)
    (info,) = describe(tmp_path, "parquet")
    assert info.raw_data.bytes < 100_000
    assert {row["text"] for row in read([info], tmp_path)} == {"much text" * 1000}


@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_take_more_than_told_are_compressed(tmp_path: Path, nested: bool) -> None:
    text = [f"{'the same beginning' * 50} {number}" for number in range(2000)]
    table = pa.table({"text": [[one] for one in text] if nested else text})
    name = "text.list.element" if nested else "text"
    write(tmp_path, table, use_dictionary=False, column_encoding={name: "DELTA_BYTE_ARRAY"}, row_group_size=2000)
    (info,) = describe(tmp_path, "parquet")
    assert info.raw_data.bytes < sum(map(len, text)) / 2
    assert [row["text"] for row in read([info], tmp_path)] == table.column("text").to_pylist()


def test_an_unpacked_file_is_written_where_it_is(tmp_path: Path) -> None:
    info = describe(write(tmp_path), "parquet")[0]
    raw = tmp_path / "raw"
    raw.write_bytes(b"x" * info.raw_data.bytes)
    inode = raw.stat().st_ino
    assert info.zip_data is not None
    FilePartUnpacker().unpack(info, StoredInPlace(tmp_path / "a.parquet", info.zip_data.bytes), raw)
    assert (raw.stat().st_ino, raw.stat().st_size) == (inode, info.raw_data.bytes)


# --- what is wrong ---


def test_columns_that_are_not_read_matter_only_where_they_are_wanted(tmp_path: Path) -> None:
    info = describe(write(tmp_path), "parquet")[0]
    schema = {**info.schema, "column_encodings": ("int64", "str", "not read: odd<x>", "str")}
    odd = replace(info, schema=schema)
    check_shard(odd, columns=["id"])
    for columns in (None, ["tokens"]):
        with assert_error(UnsupportedError, option="columns", path="a.parquet") as caught:
            check_shard(odd, columns=columns)
        assert "'tokens' has the unsupported type odd<x>" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"PAR1", "does not end like a Parquet file"),
        (b"PAR1" + b"x" * 50 + b"\xff\xff\xff\x7fPAR1", "fewer than its footer's"),
        (b"PAR1" + b"x" * 50 + b"\x20\0\0\0PAR1", "the footer of"),
        (b"PAR1" + b"x" * 50 + b"\x20\0\0\0PARE", "encrypted"),
        (b"CSV, 1, 2, 3 and more", "does not end like a Parquet file"),
    ],
)
def test_what_is_no_parquet_file_is_told(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises((FormatError, UnsupportedError)) as told:
        describe(tmp_path, "parquet")
    assert "a.parquet" in str(told.value)
    assert words in str(told.value)


def test_a_place_without_parquet_files_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with assert_error(ConfigError, path=tmp_path) as caught:
        describe(tmp_path, "parquet")
    assert "like a.txt" in str(caught.value)
    with assert_error(ConfigError, path=tmp_path / "none") as caught:
        describe(tmp_path / "none", "parquet")
    assert "check the path" in str(caught.value)


def test_what_writers_keep_for_themselves_is_left_out(tmp_path: Path) -> None:
    for name in ("_temporary/0/part.parquet", "x/_delta_log/1.checkpoint.parquet"):
        write(tmp_path, name=name)
    with assert_error(ConfigError, path=tmp_path) as caught:
        describe(tmp_path, "parquet")
    assert "begin with _" in str(caught.value)
    for name in ("_day=1/a.parquet", "_b.parquet"):
        write(tmp_path, name=name, row_group_size=ROWS)
    found = [info.zip_data for info in describe(tmp_path, "parquet")]
    assert [file and file.basename for file in found] == ["_b.parquet", "_day=1/a.parquet"]


def test_types_must_agree_over_files(tmp_path: Path) -> None:
    write(tmp_path, pa.table({"x": [1], "y": pa.nulls(1)}), "a.parquet")
    write(tmp_path, pa.table({"x": [1], "y": ["text"]}), "b.parquet")
    assert [encodings_of(info)["y"] for info in describe(tmp_path, "parquet")] == ["null", "str"]
    write(tmp_path, pa.table({"x": ["1"], "y": ["text"]}), "c.parquet")
    with assert_error(FormatError, path="c.parquet") as caught:
        describe(tmp_path, "parquet")
    assert [word for word in ("'x'", "str", "a.parquet", "int64") if word not in str(caught.value)] == []


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    write(tmp_path, pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"]))
    with assert_error(UnsupportedError, path="a.parquet") as caught:
        describe(tmp_path, "parquet")
    assert "one name" in str(caught.value)


def test_a_file_that_has_changed_is_told_or_read_rightly(tmp_path: Path) -> None:
    infos = describe(write(tmp_path), "parquet")
    parts = FilePartUnpacker()
    unpacked(infos[0], tmp_path, parts=parts)
    write(tmp_path, pa.table({"other": ["x" * 50] * 5}))
    with assert_error(ShardCorruptError, path="a.parquet") as caught:
        unpacked(infos[1], tmp_path, parts=parts)
    assert "must have" in str(caught.value)
    other = describe(tmp_path, "parquet")
    mixed = replace(infos[1], zip_data=other[0].zip_data)
    with assert_error(ShardCorruptError, path="a.parquet") as caught:
        unpacked(mixed, tmp_path, parts=parts)
    assert "row group 1 differs" in str(caught.value)


def test_what_is_known_of_a_file_is_not_used_for_another_version_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, footers = describe(write(tmp_path), "parquet")[0], list[str]()
    assert info.zip_data is not None
    stored, parts = StoredInPlace(tmp_path / "a.parquet", info.zip_data.bytes), FilePartUnpacker()
    look = ParquetFormat.read_metadata

    def noted(self: ParquetFormat, stored: RangedFile) -> Footer:
        footers.append(stored.shown)
        return look(self, stored)

    monkeypatch.setattr(ParquetFormat, "read_metadata", noted)
    for version, read_before in (("a", 1), ("a", 1), ("b", 2), ("a", 2)):
        parts.unpack(info, stored, tmp_path / "raw", version=version)
        assert len(footers) == read_before


def test_a_value_that_cannot_be_read_is_told_with_its_row_group(tmp_path: Path) -> None:
    write(tmp_path, pa.table({"tokens": [[1], [2, None]]}), row_group_size=1)
    reader = opened(describe(tmp_path, "parquet")[1], tmp_path)
    with assert_error(EncodingError, path="a.parquet", sample=0) as caught:
        reader[0]
    assert "'tokens'" in str(caught.value)
    reader.close()


def test_damage_is_told_with_the_row_group(tmp_path: Path) -> None:
    infos = describe(write(tmp_path, compression="none", write_page_checksum=True), "parquet")
    path = tmp_path / "a.parquet"
    data = bytearray(path.read_bytes())
    place = data.index(b"row 25")
    data[place : place + 6] = b"row 99"
    path.write_bytes(data)
    with assert_error(ShardCorruptError, path="a.parquet") as caught:
        unpacked(infos[1], tmp_path)
    assert "row group 1" in str(caught.value)
    assert len(read([infos[0], infos[2]], tmp_path)) == 30


def test_an_unpacked_file_that_is_damaged_is_told(tmp_path: Path) -> None:
    wanted, cache = unpacked(describe(write(tmp_path), "parquet")[0], tmp_path)
    raw = cache / wanted.raw_data.basename
    whole = raw.read_bytes()
    raw.write_bytes(b"\0" * len(whole))
    with assert_error(ShardCorruptError, path="000000.arrow"):
        open_shard(wanted, cache)
    raw.write_bytes(whole[:-1])
    with assert_error(ShardCorruptError, path="000000.arrow") as caught:
        open_shard(wanted, cache)
    assert "must have" in str(caught.value)


def test_an_index_that_does_not_tell_what_columns_take_is_told(tmp_path: Path) -> None:
    info = describe(write(tmp_path), "parquet")[0]
    for told in (None, "", "1,2", "1,2,3,x", "1,2,3,-4"):
        with assert_error(IndexFormatError, path="000000.arrow"):
            check_shard(replace(info, column_bytes=told))


def test_other_numbers_are_no_samples(tmp_path: Path) -> None:
    reader = opened(describe(write(tmp_path), "parquet")[0], tmp_path)
    for number in (-1, 20):
        with pytest.raises(SampleIndexError):
            reader[number]
    reader.close()


def test_an_index_of_many_row_groups_is_read_back(tmp_path: Path) -> None:
    infos = describe(write(tmp_path, row_group_size=1), "parquet")
    assert len(infos) == ROWS
    assert list(parse_index(dump_index(infos), "index.json").shards) == infos
    assert len({info.raw_data.basename for info in infos}) == ROWS


CODED = pa.dictionary(pa.int32(), pa.string())
LONG = [Random(number).randbytes(1000).hex() for number in range(40)]


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        (CODED, lambda one: one),
        (pa.list_(CODED), lambda one: [one, one]),
        (pa.struct({"of": CODED}), lambda one: {"of": one}),
    ],
)
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_columns_of_categories_have_room_for_their_values(
    tmp_path: Path, kind: pa.DataType, wrap: Any, use_dictionary: bool
) -> None:
    table = pa.table({"kind": pa.array([wrap(one) for one in LONG], kind)})

    write(tmp_path, table, use_dictionary=use_dictionary)

    assert read(describe(tmp_path, "parquet"), tmp_path) == table.to_pylist()


def test_a_field_may_be_called_a_view(tmp_path: Path) -> None:
    """Only types are text for which it is looked whether they keep a dictionary."""
    rows = [{"page": {"page_views": f"{number}"}, "seen": [f"{number}"]} for number in range(5)]
    kinds = {"page": pa.struct({"page_views": pa.string()}), "seen": pa.list_(pa.string_view())}

    write(tmp_path, pa.Table.from_pylist(rows, pa.schema(list(kinds.items()))))

    assert read(describe(tmp_path, "parquet"), tmp_path) == rows


class Sparing(io.FileIO):
    """A file that takes and gives few bytes at a time, as the system does with more than 2 GiB."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:100])

    def read(self, size: int | None = -1) -> bytes:
        return super().read(100 if size is None or size < 0 else min(size, 100)) or b""

    def readinto(self, buffer: Any) -> int | None:
        return super().readinto(memoryview(buffer)[:100])


class SparingPath(type(Path())):  # type: ignore[misc]  # which path there is differs by system
    """A path of such a file."""

    def open(self, mode: str = "r", buffering: int = -1) -> Any:
        raw = Sparing(self, mode)
        return raw if buffering == 0 else io.BufferedReader(raw)


def test_more_than_the_system_reads_or_writes_at_once_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = describe(write(tmp_path, TABLE, row_group_size=ROWS), "parquet")
    stored = StoredInPlace(SparingPath(tmp_path / "a.parquet"), (tmp_path / "a.parquet").stat().st_size)
    monkeypatch.setattr(os, "fdopen", lambda descriptor, mode, **_: Sparing(descriptor, mode))

    FilePartUnpacker().unpack(infos[0], stored, made := tmp_path / infos[0].raw_data.basename.replace("/", "-"))

    rows = pa.ipc.open_stream(made.read_bytes()).read_all()
    assert rows.cast(TABLE.schema).equals(TABLE)


def test_other_columns_are_another_file_whatever_their_names(tmp_path: Path) -> None:
    numbers = pa.array(range(5))
    info = describe(write(tmp_path, pa.table({"a": numbers, "b": numbers, "a\nb": numbers})), "parquet")[0]

    names = {narrowed(info, one).raw_data.basename for one in (["a"], ["a", "b"], ["a\nb"])}

    assert len(names) == 3


def test_what_writers_keep_beside_the_data_is_no_data(tmp_path: Path) -> None:
    names = ("a.parquet", "_b.parquet", "_temporary/0/a.parquet", "x/_delta_log/0010.checkpoint.parquet", "x/c.parquet")
    for name in names:
        write(tmp_path, TABLE, name, row_group_size=ROWS)

    stored = [info.zip_data.basename for info in describe(tmp_path, "parquet") if info.zip_data is not None]

    assert stored == ["_b.parquet", "a.parquet", "x/c.parquet"]
