"""Directories that litData wrote, read as litData itself reads them; and damaged ones."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    IndexFormatError,
    SampleIndexError,
    ShardCorruptError,
    UnsupportedError,
)
from lightning_streaming.formats.algorithms import compress, decompress
from lightning_streaming.formats.index import parse_index
from lightning_streaming.formats.litdata.chunks import FramedChunk, LitDataChunk
from lightning_streaming.formats.litdata.directory import LitDataFormat
from lightning_streaming.formats.litdata.leaves import leaf_decoder
from lightning_streaming.formats.litdata.samples import plain_leaves, sample_decoder
from lightning_streaming.formats.shard import check_shard, open_shard, plain_kind, unsafe_columns
from lightning_streaming.formats.shard_format import ShardReader, other_shard
from lightning_streaming.formats.shard_table import FileInfo, ShardInfo, column_names
from tests.golden import golden_path
from tests.golden.litdata_values import describe
from tests.helpers import assert_error
from tests.tiers import examples

NEW, EARLY = "litdata_0_2_76", "litdata_0_2_17"
EXPECTED: dict[str, list[Any]] = json.loads(golden_path(NEW, "expected.json").read_bytes())
BLOCK = 5
READABLE = sorted(set(EXPECTED) - {"pickled"})


class Files:
    """A directory, as a format sees it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shown = str(directory)

    def shown_file(self, name: str) -> str:
        return f"{self.shown}/{name}"

    def sizes(self) -> Mapping[str, int]:
        paths = sorted(path for path in self.directory.rglob("*") if path.is_file())
        return {path.relative_to(self.directory).as_posix(): path.stat().st_size for path in paths}

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return (self.directory / name).read_bytes()[start:stop]

    def read_if_there(self, name: str) -> bytes | None:
        path = self.directory / name
        return path.read_bytes() if path.is_file() else None


def format_of(name: str) -> LitDataFormat:
    return LitDataFormat(BLOCK if name.startswith("tokens") else None)


def unpacked(info: ShardInfo, directory: Path, into: Path) -> Path:
    """Where the raw file of a chunk is."""
    if info.zip_data is None:
        return directory
    data = (directory / info.zip_data.basename).read_bytes()
    (into / info.raw_data.basename).write_bytes(decompress(info.compression or "", data, info.raw_data.bytes))
    return into


def readers(name: str, tmp_path: Path, columns: list[str] | None = None, release: str = NEW) -> list[ShardReader]:
    directory, this = golden_path(release, name), format_of(name)
    shards = list(this.describe(Files(directory), {}))
    return [this.open(info, unpacked(info, directory, tmp_path), columns) for info in shards]


def as_column(sample: Any) -> Any:
    """What we make of a sample that litData gave: one that is no dict is one column."""
    kind, held = sample[:2]
    return held if kind == "dict" else [[["str", "sample"], sample]]


@pytest.mark.parametrize("name", READABLE)
def test_samples_are_those_that_litdata_reads(name: str, tmp_path: Path) -> None:
    check_samples(readers(name, tmp_path), EXPECTED[name])


@pytest.mark.parametrize("name", ["mixed", "pair", "zipped", "tokens"])
def test_samples_of_an_early_release_are_those_that_it_reads(name: str, tmp_path: Path) -> None:
    """Whose sizes of chunks are without their tables, and whose tensors begin in another byte order."""
    expected = json.loads(golden_path(EARLY, "expected.json").read_bytes())
    check_samples(readers(name, tmp_path, release=EARLY), expected[name])


def check_samples(found: list[ShardReader], expected: list[Any]) -> None:
    samples = [reader[place] for reader in found for place in range(len(reader))]
    assert len(samples) == len(expected)
    for mine, theirs in zip(samples, expected, strict=True):
        assert sorted(describe(mine)[1]) == sorted(as_column(theirs))


@pytest.mark.parametrize(("release", "name"), [(NEW, "mixed_chunk"), (EARLY, "zipped")])
def test_chunks_that_litdata_has_unzipped_in_place_are_read(release: str, name: str, tmp_path: Path) -> None:
    """Its reader of a local directory unzips chunks there as it comes to them, and deletes the zipped ones."""
    root, this = tmp_path / "data", format_of(name)
    shutil.copytree(golden_path(release, name), root)
    before = list(this.describe(Files(root), {}))
    for info in before:  # one after another, until all are
        assert info.zip_data is not None
        unpacked(info, root, root)
        (root / info.zip_data.basename).unlink()
        after = list(this.describe(Files(root), {}))
        assert [one.raw_data for one in after] == [one.raw_data for one in before]
        found = [this.open(one, unpacked(one, root, tmp_path), None) for one in after]
        check_samples(found, json.loads(golden_path(release, "expected.json").read_bytes())[name])
        raw = root / info.raw_data.basename
        raw.write_bytes(raw.read_bytes()[:-1])
        with pytest.raises(ShardCorruptError, match=f"{raw.name} must have"):
            list(this.describe(Files(root), {}))
        unpacked(info, golden_path(release, name), root)


def test_columns_that_are_not_wanted_need_not_be_readable(tmp_path: Path) -> None:
    (reader,) = readers("pickled", tmp_path, ["array", "id"])
    assert [sorted(reader[place]) for place in range(2)] == [["array", "id"]] * 2
    with assert_error(ConfigError, option="allow_unsafe_types", path="chunk-0-0.bin") as caught:
        readers("pickled", tmp_path)
    assert "'odd'" in str(caught.value)
    nested = readers("nested", tmp_path, ["record"])[0][1]
    assert list(nested) == ["record"]
    assert nested["record"][0]["b"] == "two"


def test_leaves_are_unpickled_where_that_is_allowed(tmp_path: Path) -> None:
    directory = golden_path(NEW, "pickled")
    (info,) = LitDataFormat(None).describe(Files(directory), {})
    assert unsafe_columns(info) == ["odd"]
    with assert_error(ConfigError, option="allow_unsafe_types", path="chunk-0-0.bin") as caught:
        check_shard(info)
    assert "'odd'" in str(caught.value)
    check_shard(info, allow_unsafe_types=True)
    check_samples([open_shard(info, directory, allow_unsafe_types=True)], EXPECTED["pickled"])
    with assert_error(ConfigError, option="allow_unsafe_types", path="chunk-0-0.bin") as caught:
        open_shard(info, directory)
    assert "'odd'" in str(caught.value)


@pytest.mark.parametrize("name", ["rows", "records"])
def test_rows_of_arrow_can_be_narrowed(name: str, tmp_path: Path) -> None:
    column = {"rows": "number", "records": "turns"}[name]
    (first, *_) = readers(name, tmp_path, [column])
    whole = readers(name, tmp_path)[0]
    assert [first[place] for place in range(len(first))] == [
        {column: whole[place][column]} for place in range(len(whole))
    ]


def test_a_sample_is_nobody_elses(tmp_path: Path) -> None:
    reader = readers("records", tmp_path)[0]
    reader[1]["turns"].clear()
    assert reader[1]["turns"]
    reader = readers("arrays", tmp_path)[0]
    sample = reader[1]
    reader.close()
    sample["int64"] += 1


@pytest.mark.parametrize("name", ["arrays", "mixed", "mixed_batch", "one_tensor", "pair", "tensors", "tokens", "rows"])
def test_plain_rows_are_the_samples(name: str, tmp_path: Path) -> None:
    """Where a reader says that its samples are plain, their bytes as a table are what it decodes."""
    found = set()
    for reader in readers(name, tmp_path):
        assert isinstance(reader, LitDataChunk)
        plain = reader.plain_rows()
        found.add(plain is not None)
        if plain is not None:
            rows = np.empty(len(reader), plain.row)
            reader.copy_rows(np.arange(len(reader)), rows)
            table = plain.columns_of(rows)
            assert plain.are(rows)
            for place, sample in enumerate(map(reader.__getitem__, range(len(reader)))):
                for column, value in sample.items():
                    np.testing.assert_array_equal(np.asarray(value), table[column][place])
    assert (True in found) == (name not in ("mixed", "mixed_batch", "rows", "pair"))


@pytest.mark.parametrize("name", ["rows", "rows_zstd"])
def test_rows_of_arrow_of_which_only_numbers_are_wanted_are_plain(name: str, tmp_path: Path) -> None:
    directory, columns, kinds = golden_path(NEW, name), ["number", "share"], set()
    shards = list(format_of(name).describe(Files(directory), {}))
    for info, reader in zip(shards, readers(name, tmp_path, columns), strict=True):
        assert isinstance(reader, LitDataChunk)
        kinds.add(plain_kind(info, columns))
        plain = reader.plain_rows()
        assert plain is not None
        places = np.random.default_rng(1).permutation(len(reader))
        rows = np.empty(len(reader), plain.row)
        reader.copy_rows(places, rows)
        expected = default_collate([reader[place] for place in places])
        for column, values in plain.columns_of(rows).items():
            assert torch.from_numpy(values).equal(expected[column])
            assert torch.from_numpy(values).dtype == expected[column].dtype
    assert len(kinds) == 1
    assert None not in kinds
    assert plain_kind(shards[0], ["number"]) not in kinds
    assert plain_kind(shards[0], ["number", "text"]) is not None


def test_samples_of_equal_bytes_are_plain_in_frames_too(tmp_path: Path) -> None:
    decoder = sample_decoder(leaf_spec("x"), ["int"], None)
    items = [struct.pack("<Iq", 8, number) for number in range(10)]
    (tmp_path / "chunk.bin").write_bytes(framed(items, 4))
    info = shard(tmp_path / "chunk.bin", 10, ["int"], leaf_spec("x"), zipped="batch")
    reader = FramedChunk(info, tmp_path, decoder, plain_leaves(leaf_spec("x"), ["int"], None))
    plain = reader.plain_rows()
    assert plain is not None
    rows = np.empty(4, plain.row)
    reader.copy_rows(np.array([9, 0, 5, 4]), rows)
    assert plain.columns_of(rows)["x"].tolist() == [9, 0, 5, 4]


# --- leaves ---


def leaf_spec(*columns: str) -> str:
    """The tree of a dict of leaves."""
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    root = {"type": "builtins.dict", "context": json.dumps(columns), "children_spec": [leaf] * len(columns)}
    return json.dumps([1, root])


def framed(items: list[bytes], per_frame: int) -> bytes:
    """A chunk of frames."""
    ends = np.cumsum([0, *map(len, items)]).astype("<u4")
    groups = [items[first : first + per_frame] for first in range(0, len(items), per_frame)]
    head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, len(items), per_frame, len(groups)) + ends.tobytes()
    table, frames, place = b"", b"", len(head) + 24 * len(groups)
    for number, group in enumerate(groups):
        frame = compress("zstd", b"".join(group))
        table += struct.pack("<IIQII", number * per_frame, len(group), place, len(frame), len(b"".join(group)))
        frames, place = frames + frame, place + len(frame)
    return head + table + frames


def shard(path: Path, samples: int, data_format: list[str], spec: str, zipped: str | None = None) -> ShardInfo:
    how = {"data_format": data_format, "data_spec": spec, "zipped": zipped, "arrow": False}
    raw = FileInfo(basename=path.name, bytes=path.stat().st_size, hashes={})
    return other_shard("litdata", samples, raw, {"x": "int"}, how)


def test_tensors_of_first_releases_have_a_little_endian_head() -> None:
    data = struct.pack("<4I", 17, 2, 1, 2) + np.array([3, 4], "<i8").tobytes()
    assert leaf_decoder("tensor")(memoryview(data)).tolist() == [[3, 4]]


def test_nested_values_of_earlier_releases_are_json() -> None:
    assert leaf_decoder("json")(memoryview(b'{"a": [1, null]}')) == {"a": [1, None]}


@pytest.mark.parametrize(
    ("serializer", "data", "words"),
    [
        ("int", b"1234567", "expected 8 bytes, but found 7"),
        ("str", b"\xff", "expected UTF-8 text"),
        ("no_header_numpy:3", b"1234567", "expected values of int64, but found 7 bytes"),
        ("no_header_tensor:18", b"1234567", "expected values of int64, but found 7 bytes"),
        ("numpy", b"1234567", "expected at least 8 bytes of an array"),
        ("numpy", struct.pack("<3I", 3, 1, 2) + b"12345678", "expected 2 values for the shape"),
        ("numpy", struct.pack("<2I", 14, 0), "expected a number below 14 for its dtype, but found 14"),
        ("numpy", struct.pack("<2I", 3, 2**32 - 1), "bytes for 4294967295 dimensions"),
        ("tensor", struct.pack(">2I", 2**31, 0), "expected a number below 21"),
        ("numpy", struct.pack("<5I", 3, 3, 2**32 - 1, 2**32 - 1, 0), "expected a possible shape"),
        ("jpeg", b"no image", "expected"),
        ("jpeg_array", struct.pack("<2I", 1, 9), "expected 17 bytes by the sizes"),
        ("json", b"\x05\xff\xff\xff\xff", "expected 4294967295 values"),
        ("json", b"\x06\x01\0\0\0\0\0\0\0\x01", "expected keys of 1 dicts"),
        ("json", b"\x0b\x0b", "expected a nested value of 1 bytes, but found 2"),
        ("json", b"\x1f", "expected the tag of a nested value, but found 31"),
        ("json", b"[" * 100_000, "nested too deeply"),
        ("json", b"\x05\x01\0\0\0\0\0\0\0" * 10_000, "nested too deeply"),
    ],
)
def test_leaves_that_are_none_are_refused(serializer: str, data: bytes, words: str) -> None:
    with pytest.raises(EncodingError, match=words):
        leaf_decoder(serializer)(memoryview(data))


@pytest.mark.parametrize(
    ("serializer", "error", "words"),
    [
        ("pickle", ConfigError, "any code"),
        ("graph:pickle", ConfigError, "any code"),
        ("video:mp4", UnsupportedError, "'video:mp4', which is not supported; list the other"),
        ("mine", UnsupportedError, "'mine', which is not supported"),
        ("no_header_numpy:14", IndexFormatError, "must end in a number below 14"),
        ("no_header_tensor:x", IndexFormatError, "must end in a number below 21"),
    ],
)
def test_serializers_that_are_not_read_are_refused(serializer: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        leaf_decoder(serializer)


# --- damage ---


@pytest.mark.parametrize(
    "name", ["mixed", "mixed_batch", "mixed_sample", "rows", "rows_zstd", "records", "nested", "tokens"]
)
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_chunks_give_samples_or_errors(name: str, data: st.DataObject, tmp_path: Path) -> None:
    directory, this = golden_path(NEW, name), format_of(name)
    info = next(iter(this.describe(Files(directory), {})))
    content = bytearray((directory / info.raw_data.basename).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(64, len(content) - 1)))
        content[place] = data.draw(st.integers(0, 255))
    (tmp_path / info.raw_data.basename).write_bytes(content)
    columns = [column for column in column_names(info) if data.draw(st.booleans())] or None
    with suppress(FormatError, UnsupportedError):
        reader = this.open(info, tmp_path, columns)
        for place in range(len(reader)):
            with suppress(FormatError, UnsupportedError):
                reader[place]
        with suppress(FormatError, UnsupportedError):
            plain = reader.plain_rows()  # type: ignore[attr-defined]
            if plain is not None:
                reader.copy_rows(np.arange(len(reader)), np.empty(len(reader), plain.row))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mixed", "mixed_batch", "rows", "tokens"])
def test_files_that_were_cut_are_refused(name: str, tmp_path: Path) -> None:
    directory, this = golden_path(NEW, name), format_of(name)
    info = next(iter(this.describe(Files(directory), {})))
    content = (directory / info.raw_data.basename).read_bytes()
    for size in (0, 3, 7, 30, len(content) - 1):
        (tmp_path / info.raw_data.basename).write_bytes(content[:size])
        with assert_error(ShardCorruptError, path=info.raw_data.basename) as caught:
            this.open(info, tmp_path, None)
        assert f"has {size}" in str(caught.value)
        short = replace(info, raw_data=replace(info.raw_data, bytes=size))
        with assert_error(ShardCorruptError, path=info.raw_data.basename):
            this.open(short, tmp_path, None)


def damaged(tmp_path: Path, name: str, place: int, new: bytes) -> tuple[ShardInfo, LitDataFormat]:
    """A golden dataset's first chunk with other bytes at a place."""
    directory, this = golden_path(NEW, name), format_of(name)
    info = next(iter(this.describe(Files(directory), {})))
    content = bytearray((directory / info.raw_data.basename).read_bytes())
    content[place : place + len(new)] = new
    (tmp_path / info.raw_data.basename).write_bytes(content)
    return info, this


@pytest.mark.parametrize(
    ("name", "place", "new", "words"),
    [
        ("mixed", 0, b"\x05", "must have 4 samples by its index, but states 5"),
        ("mixed", 4, b"\x19", "must hold its samples between bytes 24 and"),
        ("mixed", 8, b"\x09", "sample 0: expected at least 24 bytes, but the offsets state"),
        ("mixed_batch", 0, b"X", "must begin with"),
        ("mixed_batch", 8, b"\x02", "must begin with"),
        ("mixed_batch", 12, b"\x09", "must have 4 samples by its index, but states 9"),
        ("mixed_batch", 16, b"\0\0\0\0", "states 2 frames of 0 samples"),
        ("mixed_batch", 28, b"\xff", "expected at least 24 bytes|its frame must be"),
        ("mixed_batch", 52, b"\xff" * 8, "sample 0: its frame must be of samples 0 to 2"),
        ("rows", -1, b"x", "must end with"),
        ("rows", -12, b"\xff\xff\xff\xff", "must end with"),
        ("tokens", 0, b"\x01", "must hold its values between"),
    ],
)
def test_heads_that_contradict_the_index_are_refused(
    name: str, place: int, new: bytes, words: str, tmp_path: Path
) -> None:
    if place < 0:
        directory = golden_path(NEW, name)
        place += (directory / "chunk-0-0.bin").stat().st_size
    info, this = damaged(tmp_path, name, place, new)
    with assert_error(ShardCorruptError, path=info.raw_data.basename) as caught:
        this.open(info, tmp_path, None)
    assert re.search(words, str(caught.value))


def test_a_sample_that_is_damaged_is_named(tmp_path: Path) -> None:
    info, this = damaged(tmp_path, "mixed", 24, b"\xff")
    with assert_error(ShardCorruptError, path="chunk-0-0.bin", sample=0) as caught:
        this.open(info, tmp_path, None)[0]
    assert "sizes" in str(caught.value)
    with assert_error(SampleIndexError, path="chunk-0-0.bin", sample=4):
        this.open(info, tmp_path, None)[4]


# --- the index ---


def write_index(tmp_path: Path, change: Callable[[dict[str, Any]], object], name: str = "mixed") -> Files:
    shutil.copytree(golden_path(NEW, name), tmp_path, dirs_exist_ok=True)
    root = json.loads((tmp_path / "index.json").read_bytes())
    change(root)
    (tmp_path / "index.json").write_text(json.dumps(root))
    return Files(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda root: root.pop("chunks"), IndexFormatError, "must have chunks and config"),
        (lambda root: root["chunks"].append(1), IndexFormatError, "a chunk must be a JSON object, but is 1"),
        (lambda root: root["chunks"].append(root["chunks"][0]), IndexFormatError, "two chunks have the same filename"),
        (lambda root: root["chunks"][0].update(chunk_size=-1), IndexFormatError, "must not have negative numbers"),
        (lambda root: root["chunks"][0].update(chunk_bytes="9"), IndexFormatError, "chunk_bytes must be of type int"),
        (lambda root: root["chunks"][0].update(chunk_bytes=9), ShardCorruptError, "must have 9 bytes by index.json"),
        (lambda root: root["chunks"][0].update(filename="x.bin"), ShardCorruptError, "x.bin is missing"),
        (lambda root: root["config"].update(encryption={"a": 1}), UnsupportedError, "encrypted"),
        (lambda root: root["config"].update(item_loader="ParquetLoader"), UnsupportedError, "ParquetLoader"),
        (lambda root: root["config"].update(format="mds"), UnsupportedError, "'mds'"),
        (lambda root: root["config"].update(compression="lz4"), IndexFormatError, "zstd or null, but is 'lz4'"),
        (lambda root: root["config"].update(compression_level=4), IndexFormatError, "chunk, batch or sample"),
        (lambda root: root["config"].update(data_format=["int"]), IndexFormatError, "must name 6 serializers"),
        (lambda root: root["config"].update(data_spec="[1"), IndexFormatError, "litData's description of a sample"),
        (lambda root: root["config"].update(data_spec="[2, {}]"), ConfigError, "must have version 1, but has 2"),
        (lambda root: root["config"].update(data_spec="[" * 9**6), IndexFormatError, "nested too deeply"),
    ],
)
def test_indexes_that_cannot_be_are_refused(
    change: Callable[[dict[str, Any]], object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        list(LitDataFormat(None).describe(write_index(tmp_path, change), {}))


def test_a_zipped_chunk_that_says_another_size_is_refused(tmp_path: Path) -> None:
    files = write_index(tmp_path, lambda root: root["chunks"][0].update(chunk_bytes=9), "mixed_chunk")
    with assert_error(ShardCorruptError, path="chunk-0-0.zstd:4.bin") as caught:
        list(LitDataFormat(None).describe(files, {}))
    assert "index" in str(caught.value)


def test_trees_of_other_types_are_refused(tmp_path: Path) -> None:
    def change(root: dict[str, Any]) -> None:
        node = {"type": "collections.namedtuple", "context": "{}", "children_spec": []}
        root["config"].update(data_spec=json.dumps([1, node]))

    with pytest.raises(ConfigError, match=r"dicts, lists and tuples, but data_spec has 'collections\.namedtuple'"):
        list(LitDataFormat(None).describe(write_index(tmp_path, change), {}))


def test_tokens_need_a_block_length_and_others_must_not_have_one(tmp_path: Path) -> None:
    tokens, others = golden_path(NEW, "tokens"), golden_path(NEW, "mixed")
    with assert_error(ConfigError, option="block_length") as caught:
        list(LitDataFormat(None).describe(Files(tokens), {}))
    assert "sample" in str(caught.value)
    with assert_error(ConfigError, option="block_length") as caught:
        list(LitDataFormat(5).describe(Files(others), {}))
    assert "leave" in str(caught.value)
    with assert_error(ConfigError, path=tmp_path):
        list(LitDataFormat(None).describe(Files(tmp_path), {}))


def test_an_index_of_litdata_says_how_to_read_it() -> None:
    with assert_error(IndexFormatError, path="index.json") as caught:
        parse_index(golden_path(NEW, "mixed", "index.json").read_bytes(), "index.json")
    assert "litData" in str(caught.value)


def test_an_entry_that_is_not_of_this_format_is_refused(tmp_path: Path) -> None:
    raw = FileInfo(basename="a.bin", bytes=1, hashes={})
    for how in ({}, {"data_format": 1}, {"data_format": [], "data_spec": "", "zipped": "x", "arrow": False}):
        with assert_error(IndexFormatError, path="a.bin") as caught:
            LitDataFormat(None).open(other_shard("litdata", 1, raw, {"x": "int"}, how), tmp_path, None)
        assert "describe" in str(caught.value)
