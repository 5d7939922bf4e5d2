"""Indexes are read as they are written, or refused in words that name what is wrong."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.cache.sources import check_hash
from lightning_streaming.errors import IndexFormatError, StreamingError
from lightning_streaming.formats.index import (
    FileInfo,
    ShardInfo,
    check_version,
    dump_index,
    dump_merged_index,
    parse_index,
    parse_shard,
    read_index,
)
from lightning_streaming.formats.shard import check_shard
from tests.helpers import assert_error
from tests.tiers import examples

NOWHERE = object()


def entry(**changes: Any) -> dict[str, Any]:
    """One shard of an index, as JSON; a change to NOWHERE takes the key away."""
    whole: dict[str, Any] = {
        "version": 2,
        "format": "mds",
        "samples": 3,
        "compression": None,
        "hashes": ["sha1"],
        "size_limit": 1000,
        "raw_data": {"basename": "shard.00000.mds", "bytes": 99, "hashes": {"sha1": "ab"}},
        "zip_data": None,
        "column_names": ["id", "text"],
        "column_encodings": ["int", "str"],
        "column_sizes": [8, None],
    }
    return {key: value for key, value in (whole | changes).items() if value is not NOWHERE}


def file(**changes: Any) -> dict[str, Any]:
    """One file of a shard, as JSON."""
    whole = {"basename": "shard.00000.mds.zstd", "bytes": 9, "hashes": {}} | changes
    return {key: value for key, value in whole.items() if value is not NOWHERE}


def index_text(*shards: Any) -> bytes:
    return json.dumps({"version": 2, "shards": shards}).encode()


def test_a_shard_is_read_as_it_is_written() -> None:
    (shard,) = parse_index(index_text(entry()), "index.json").shards
    assert shard.raw_data == FileInfo(basename="shard.00000.mds", bytes=99, hashes={"sha1": "ab"})
    assert shard.files == ((shard.raw_data, None),)
    assert (shard.format, shard.samples, shard.compression, shard.size_limit) == ("mds", 3, None, 1000)
    assert shard.hashes == ("sha1",)
    assert shard.schema == {
        "column_names": ("id", "text"),
        "column_encodings": ("int", "str"),
        "column_sizes": (8, None),
    }


def test_meta_files_come_before_data_files() -> None:
    split = entry(
        format="csv",
        newline="\n",
        compression="zstd",
        zip_data=file(),
        raw_meta=file(basename="m", bytes=20),
        zip_meta=file(),
    )
    (shard,) = parse_index(index_text(split), "index.json").shards
    assert shard.files == ((shard.raw_meta, shard.zip_meta), (shard.raw_data, shard.zip_data))


def test_samples_are_counted() -> None:
    index = parse_index(index_text(entry(), entry(samples=0), entry(samples=4)), "index.json")
    assert index.num_samples == 7
    assert index.samples_per_shard().tolist() == [3, 0, 4]
    assert index.samples_per_shard().dtype == np.int64


def test_an_index_without_shards_is_sound() -> None:
    index = parse_index(b'{"version": 2, "shards": []}', "index.json")
    assert index.num_samples == 0
    assert index.samples_per_shard().shape == (0,)
    assert dump_index(index.shards) == b'{"shards": [], "version": 2}'


def test_keys_that_are_not_known_are_ignored_and_those_that_may_be_null_may_be_missing() -> None:
    shard = entry(colour="red", raw_meta="?", compression=NOWHERE, size_limit=NOWHERE, zip_data=NOWHERE)
    text = json.dumps({"version": 2, "shards": [shard], "made_by": "someone"}).encode()
    (found,) = parse_index(text, "index.json").shards
    assert (found.compression, found.size_limit, found.zip_data, found.raw_meta) == (None, None, None, None)


@pytest.mark.parametrize(("written", "limit"), [("64mb", 2**26), (0, 0), ("100", 100), (None, None)])
def test_the_size_limit_may_be_a_text(written: Any, limit: int | None) -> None:
    assert parse_index(index_text(entry(size_limit=written)), "index.json").shards[0].size_limit == limit


def test_a_column_size_of_0_means_variable() -> None:
    assert parse_index(index_text(entry(column_sizes=[8, 0])), "i").shards[0].schema["column_sizes"] == (8, None)


def test_shards_of_one_schema_share_it_and_survive_a_pickle() -> None:
    index = parse_index(index_text(entry(), entry()), "index.json")
    assert index.shards[0].schema is index.shards[1].schema
    assert pickle.loads(pickle.dumps(index)) == index


@given(st.lists(st.tuples(st.integers(8, 2**32 - 1), st.sampled_from([None, "zstd", "gz:3"]), st.text(max_size=5))))
def test_what_is_dumped_is_parsed_back(cases: list[tuple[int, str | None, str]]) -> None:
    shards = tuple(
        ShardInfo(
            format="mds",
            samples=number // 4 - 2,
            compression=compression,
            hashes=("md5",),
            size_limit=None,
            raw_data=FileInfo(basename="part/é.mds", bytes=number, hashes={"md5": text}),
            zip_data=FileInfo(basename="a.mds.x", bytes=2**40, hashes={}) if compression else None,
            schema={"column_names": (text,), "column_encodings": ("str",), "column_sizes": (None,)},
        )
        for number, compression, text in cases
    )
    assert parse_index(dump_index(shards), "index.json").shards == shards


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"\xff\xfe\xfd", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[]", "must be a JSON object, but is []"),
        (b"{}", "'version' is missing"),
        (b'{"version": 1, "shards": []}', "only version 2 is supported, but version is 1"),
        (b'{"version": "2", "shards": []}', "version must be int, but is '2'"),
        (b'{"version": 2}', "'shards' is missing"),
        (b'{"version": 2, "shards": {}}', "shards must be list, but is {}"),
    ],
)
def test_a_file_that_is_no_index_is_refused_with_its_source(text: bytes, words: str) -> None:
    with pytest.raises(IndexFormatError) as caught:
        parse_index(text, "s3://bucket/index.json")
    assert words in str(caught.value)
    assert "s3://bucket/index.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 3}, "only version 2 is supported, but version is 3"),
        ({"version": NOWHERE}, "'version' is missing"),
        ({"format": NOWHERE}, "'format' is missing"),
        (
            {"format": "orc"},
            "format must be one of mds, json, csv, tsv, xsv, parquet, webdataset, npy, megatron, litdata, but is 'orc'",
        ),
        ({"samples": NOWHERE}, "'samples' is missing"),
        ({"samples": -1}, "samples must be in [0, 4294967295], but is -1"),
        ({"samples": 2**32}, "but is 4294967296"),
        ({"samples": True}, "samples must be int, but is True"),
        ({"samples": 3.0}, "samples must be int, but is 3.0"),
        ({"hashes": "sha1"}, "hashes must be list"),
        ({"hashes": [1]}, "hashes must be a list of str"),
        ({"size_limit": "many"}, "size_limit"),
        ({"size_limit": "9" * 400 + ".5kb"}, "size_limit"),
        ({"size_limit": [1]}, "size_limit must be str"),
        ({"compression": "lzma"}, "compression must be one of br, bz2, gz, snappy, zstd, but got 'lzma'"),
        ({"compression": "zstd:99", "zip_data": file()}, "levels 1 to 22"),
        ({"compression": "zstd"}, "requires a compressed file of shard.00000.mds"),
        ({"zip_data": file()}, "requires no compressed file of shard.00000.mds"),
        ({"raw_data": NOWHERE}, "'raw_data' is missing"),
        ({"raw_data": None}, "raw_data must be dict, but is None"),
        ({"raw_data": file(bytes=-1)}, "must not be negative, but is -1"),
        ({"samples": 24}, "99 bytes, too few for offsets of 24 samples"),
        ({"raw_data": file(bytes=2**32)}, "must be at most 4294967295 bytes"),
        ({"raw_data": file(bytes="9")}, "raw_data: bytes must be int, but is '9'"),
        ({"raw_data": file(hashes=None)}, "raw_data: hashes must be dict"),
        ({"raw_data": file(hashes={"sha1": 1})}, "raw_data: hashes must map str to str"),
        ({"raw_data": file(basename=NOWHERE)}, "raw_data: the key 'basename' is missing"),
        ({"raw_data": file(basename="")}, "must stay inside its dataset directory"),
        ({"raw_data": file(basename=".")}, "must stay inside its dataset directory"),
        ({"raw_data": file(basename="../shard.mds")}, "must stay inside its dataset directory"),
        ({"raw_data": file(basename="a/../../shard.mds")}, "must stay inside its dataset directory"),
        ({"raw_data": file(basename="\ud800.mds")}, "must stay inside its dataset directory"),
        ({"raw_data": file(basename="/etc/passwd")}, "must stay inside its dataset directory"),
        ({"raw_data": file(basename="é" * 128)}, "raw_data: a file name can have 255 bytes, and 1024 with its dir"),
        ({"raw_data": file(basename="part/" * 205)}, "raw_data: a file name can have 255 bytes"),
        ({"compression": "zstd", "zip_data": file(basename="../x")}, "zip_data: a file name in an index must stay"),
        ({"column_names": NOWHERE}, "'column_names' is missing"),
        ({"column_names": "id"}, "column_names must be list"),
        ({"column_encodings": [None, "str"]}, "column_encodings must be a list of str"),
        ({"column_sizes": [-8, None]}, "column_sizes must be a list of sizes and nulls"),
        ({"column_sizes": [8.0, None]}, "column_sizes must be a list of sizes and nulls"),
        ({"format": "json", "newline": "\n", "raw_meta": file()}, "'columns' is missing"),
        ({"format": "csv", "newline": "\n"}, "'raw_meta' is missing"),
        ({"format": "xsv", "newline": "\n", "raw_meta": file()}, "'separator' is missing"),
    ],
)
def test_a_shard_that_cannot_be_is_refused_with_its_number(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(IndexFormatError) as caught:
        parse_index(index_text(entry(), entry(**changes)), "index.json")
    assert words in str(caught.value)
    assert "index.json, shard 1: " in str(caught.value)


def test_a_shard_that_is_no_object_is_refused() -> None:
    with assert_error(IndexFormatError, path="index.json") as caught:
        parse_index(index_text([]), "index.json")
    assert "JSON object" in str(caught.value)


def test_a_merged_index_has_the_same_shards_after_its_version() -> None:
    for count in range(3):
        shards = parse_index(index_text(*[entry()] * count), "index.json").shards
        root = json.loads(dump_index(shards))
        expected = json.dumps({"version": root["version"], "shards": root["shards"]}).encode()
        assert dump_merged_index(shards) == expected
        assert parse_index(expected, "index.json").shards == shards


def test_a_file_larger_than_any_is_refused() -> None:
    shard = entry(compression="gz", zip_data=file(bytes=2**63))
    with assert_error(IndexFormatError, path="index.json") as caught:
        parse_index(index_text(entry(), shard), "index.json")
    assert "9223372036854775807" in str(caught.value)


TAKEN = [".usage", ".origin", ".queue", ".arriving/x.part", ".index-0a", ".new-x", ".writing/00000.json", ".mds"]
TAKEN += ["part/.usage", "part/.origin/shard.00000.mds", "./.usage", "index.json", "part/index.json"]


@pytest.mark.parametrize("basename", TAKEN)
@pytest.mark.parametrize("key", ["raw_data", "zip_data", "raw_meta", "zip_meta"])
@pytest.mark.parametrize("place", [0, 3])
def test_names_of_the_cache_s_own_files_are_refused(place: int, key: str, basename: str) -> None:
    """In the first shard, and in one that is read like those before it."""
    whole = {"format": "csv", "newline": "\n", "compression": "gz", "zip_data": file(), "zip_meta": file()}
    shards = json.loads(json.dumps([entry(**whole, raw_meta=file(bytes=99)) for _ in range(5)]))
    shards[place][key]["basename"] = basename
    with assert_error(IndexFormatError, path="index.json") as caught:
        parse_index(index_text(*shards), "index.json")
    assert f"shard {place}: {key}: " in str(caught.value)


LISTS = {
    "mds": ("column_names", "column_encodings", "column_sizes"),
    "csv": ("column_names", "column_encodings"),
    "tsv": ("column_names", "column_encodings"),
    "xsv": ("column_names", "column_encodings"),
}


@pytest.mark.parametrize("length", [0, 1, 3, 5000])
@pytest.mark.parametrize(("shard_format", "key"), [(one, key) for one, keys in LISTS.items() for key in keys])
@pytest.mark.parametrize("place", [0, 3])
def test_lists_of_columns_are_of_one_length(place: int, shard_format: str, key: str, length: int) -> None:
    split = {} if shard_format == "mds" else {"raw_meta": file(bytes=99), "newline": "\n", "separator": ";"}
    shards = [entry(format=shard_format, **split) for _ in range(5)]
    shards[place][key] = [8 if key == "column_sizes" else f"int{number}" for number in range(length)]
    with assert_error(IndexFormatError, path="index.json") as caught:
        parse_index(index_text(*shards), "index.json")
    assert re.search(rf"shard {place}: .*{key} has {length}", str(caught.value))


LONG = ["x" * 5000, "../" + "x" * 5000, ["y" * 5000], ["z"] * 5000, {"a" * 5000: 1}, 10**4000, -(10**4000), "9" * 5000]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a JSON text is."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(one for key, item in inner for one in _paths(item, (*path, key)))]


WHOLE = {
    "mds": entry(compression="zstd", zip_data=file()),
    "csv": entry(format="csv", newline="\n", raw_meta=file(bytes=99)),
    "json": entry(format="json", newline="\n", columns={"id": "int", "text": "str"}, raw_meta=file(bytes=99)),
}


@pytest.mark.parametrize("shard_format", WHOLE)
def test_no_error_quotes_a_long_field_whole(shard_format: str, tmp_path: Path) -> None:
    lengths: dict[Any, int] = {}
    for path in _paths({"version": 2, "shards": [WHOLE[shard_format]]}):
        for long in LONG:
            root = json.loads(json.dumps({"root": {"version": 2, "shards": [WHOLE[shard_format]]}}))
            inner: Any = root
            for key in ("root", *path)[:-1]:
                inner = inner[key]
            inner[("root", *path)[-1]] = long
            try:
                (shard,) = parse_index(json.dumps(root["root"]).encode(), "index.json").shards
                check_shard(shard)
                (tmp_path / "file").touch()
                for name in shard.raw_data.hashes:
                    check_hash(tmp_path / "file", "file", shard.raw_data, name)
            except StreamingError as error:
                lengths[path, str(long)[:10]] = len(str(error))
    assert len(lengths) > 100
    assert {where: length for where, length in lengths.items() if length > 700} == {}


# --- read piece by piece, which gives what it would be, read whole and shard by shard ---


def nth_entry(number: int, packed: bool = True, split: bool = False) -> dict[str, Any]:
    """One of many alike, as JSON."""
    digests = {"sha1": f"{number:040x}", "xxh64": f"{number * 7:016x}"}

    def file(name: str, size: int) -> dict[str, Any]:
        return {"basename": f"part-a/shard.{number:05}.{name}", "bytes": size, "hashes": digests}

    common = {
        "compression": "zstd:3" if packed else None,
        "hashes": ["sha1", "xxh64"],
        "raw_data": file("x", 5000 + number),
        "samples": 90 + number % 5,
        "size_limit": 67108864,
        "version": 2,
        "zip_data": file("x.zstd", 70 + number) if packed else None,
    }
    if not split:
        columns = {"column_encodings": ["int", "str"], "column_names": ["é", "text"], "column_sizes": [8, None]}
        return {**common, **columns, "format": "mds"}
    meta = {"raw_meta": file("meta", 900), "zip_meta": file("meta.zstd", 88) if packed else None}
    return {**common, **meta, "columns": {"a": "int"}, "format": "json", "newline": "\n"}


def in_pieces(data: bytes, count: int) -> Callable[[int], bytes]:
    """Reads no more than so many bytes at a time."""
    file = io.BytesIO(data)
    return lambda most: file.read(min(most, count))


def read_whole(data: bytes) -> list[ShardInfo] | str:
    """The shards by way of one JSON value, or what is wrong with them."""
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        return "i: an index must be JSON"
    shards: list[ShardInfo] = []
    where = "i"
    try:
        if type(root) is not dict:
            raise IndexFormatError("an index must be a JSON object")
        check_version(root)
        if type(root.get("shards")) is not list:
            return "i: shards" if "shards" in root else "i: the key 'shards'"
        for one in root["shards"]:
            where = f"i, shard {len(shards)}"
            shards.append(parse_shard(one, {}))
    except IndexFormatError as error:
        return f"{where}: {error}"
    return shards


def assert_same(data: bytes, count: int) -> None:
    """Both ways end the same, with the same words."""
    expected = read_whole(data)
    found = read_in_pieces(data, count)
    assert found.startswith(expected) if isinstance(found, str) and isinstance(expected, str) else found == expected


def read_in_pieces(data: bytes, count: int) -> Sequence[ShardInfo] | str:
    """The shards, or what is wrong with them."""
    try:
        return read_index(in_pieces(data, count), "i").shards
    except IndexFormatError as error:
        return str(error)


@pytest.mark.rotate(4)
@pytest.mark.parametrize("count", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("split", [False, True])
def test_the_size_of_pieces_does_not_matter(count: int, indent: int | None, split: bool) -> None:
    root = {"shards": [nth_entry(number, number < 9, split) for number in range(18)], "version": 2, "more": [1, {}]}
    for sort in (True, False):
        assert_same(json.dumps(root, indent=indent, sort_keys=sort).encode(), count)
    backwards = dict(reversed(root.items()))
    assert_same(json.dumps(backwards, ensure_ascii=False).encode(), count)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-le"])
def test_the_text_may_have_any_encoding_of_json(encoding: str) -> None:
    assert_same(json.dumps({"version": 2, "shards": [nth_entry(1)]}, ensure_ascii=False).encode(encoding), 3)


@pytest.mark.parametrize(
    "text",
    [
        '{"shards": [], "version": 2, "shards": [ENTRY, ENTRY]}',
        '{"shards": [ENTRY, 3], "version": 2, "shards": [ENTRY]}',
        '{"shards": [3], "version": 1}',
        '{"shards": [3], "version": 2',
        '{"shards": [3,], "version": 2}',
        '{"shards": [ENTRY,], "version": 2}',
        '{"shards": [ENTRY ENTRY], "version": 2}',
        '{"shards": [ENTRY], "version": 2} {}',
        '{"shards": [ENTRY], "version": 2,}',
        '{"shards": [ENTRY], version: 2}',
        '{"shards" [ENTRY], "version": 2}',
        '{"shards": ENTRY, "version": 2}',
        '{"shards": {}, "version": 2, "shards": [ENTRY]}',
        '{"version": 22, "version": 2, "shards": [ENTRY]}',
        '{"version": 2, "shards": []} \n',
        "[ENTRY]",
        "12",
        "",
        '{"shards": [' + "[" * 100_000,
        '{"version": ' + "2" * 5000 + "}",
    ],
)
@pytest.mark.parametrize("count", [1, 1 << 20])
def test_what_is_no_index_is_refused_in_the_same_words(text: str, count: int) -> None:
    assert_same(text.replace("ENTRY", json.dumps(nth_entry(0))).encode(), count if len(text) < 1000 else 1 << 20)


_ALIKE = json.dumps({"shards": [nth_entry(number) for number in range(10)], "version": 2}, sort_keys=True)
_SPLIT = json.dumps({"shards": [nth_entry(number, split=True) for number in range(10)], "version": 2})


def damage(text: str, generator: random.Random) -> bytes:
    """Change one place of a text that shards after it, and before, have too."""
    place = generator.randrange(len(text))
    length = generator.choice([0, 1, 1, 1, 2, 9])
    alphabet = [
        '"',
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "\\",
        "0",
        "9",
        "-",
        ".",
        "e",
        "/",
        "..",
        "é",
        " ",
        "\n",
        "\x00",
        "true",
    ]
    return f"{text[:place]}{generator.choice([*alphabet, ''])}{text[place + length :]}".encode()


@settings(max_examples=examples(300))
@given(st.integers(0, 2**40), st.sampled_from([_ALIKE, _SPLIT]), st.sampled_from([64, 1 << 20]))
def test_shards_alike_are_read_as_one_by_one_whatever_is_wrong_with_one(seed: int, text: str, count: int) -> None:
    assert_same(damage(text, random.Random(seed)), count)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"samples": 92', '"samples": 1300'),
        ('"samples": 92', '"samples": 92.0'),
        ('"samples": 92', '"samples": 92e0'),
        ('"samples": 92', '"samples": 093'),
        ('"samples": 92', '"samples": 99999999999999999999'),
        ('"samples": 92', '"samples": true'),
        ('"samples": 92', '"samples": 92, "samples": 94'),
        ('"bytes": 5007', '"bytes": 4294967296'),
        ('"bytes": 77', '"bytes": 9223372036854775808'),
        ('"bytes": 77', '"bytes": 123456789012345678'),
        ("part-a/shard.00007.x", "../shard.00007.x"),
        ("part-a/shard.00007.x", "/shard.00007.x"),
        ("part-a/shard.00007.x", "part-a//./shard.00007.x"),
        ("part-a/shard.00007.x", "part-a/" + "x" * 300),
        ("part-a/shard.00007.x", "é/shard.00007.x"),
        ("part-a/shard.00007.x", r"part-\u0061/shard"),
        ("part-a/shard.00007.x", ""),
        ('"sha1": "', r'"sha1": "\ud800'),
        ('"sha1": "', r'"sha\u0031": "'),
        ('"version": 2, "zip_data"', '"version": 3, "zip_data"'),
        ('"zip_data"', '"other": {"samples": 1}, "zip_data"'),
    ],
)
def test_a_shard_that_is_nearly_like_those_before_it_is_looked_at_closely(before: str, after: str) -> None:
    start = _ALIKE.index("shard.00007") - 400
    text = _ALIKE[:start] + _ALIKE[start:].replace(before, after, 1)
    assert text != _ALIKE
    assert_same(text.encode(), 1 << 20)


def test_a_key_that_is_written_twice_counts_as_in_json() -> None:
    """Also where one of the two is spelled with an escape."""
    for twice in (
        '"samples": 5, "samples": 90',
        r'"samples": 5, "sampl\u0065s": 90',
        r'"s\u0061mples": 90, "samples": 5',
    ):
        text = json.dumps({"shards": [nth_entry(0)] * 9, "version": 2}).replace('"samples": 90', twice)
        assert_same(text.encode(), 1 << 20)


def test_a_byte_that_is_no_text_is_told_wherever_it_is() -> None:
    data = _ALIKE.encode()
    with assert_error(IndexFormatError, path="i") as caught:
        parse_index(data[:-40] + b"\xff" + data[-40:], "i")
    assert "'utf-8'" in str(caught.value)


@pytest.mark.parametrize("number", [0, 8])  # the first is read as JSON, the last by what is known of those before
@pytest.mark.parametrize("is_split", [False, True])
def test_a_file_that_cannot_say_where_its_samples_are_is_refused_by_its_last_byte(number: int, is_split: bool) -> None:
    shards = [nth_entry(one, split=is_split) for one in range(9)]
    file = shards[number]["raw_meta" if is_split else "raw_data"]
    file["bytes"] = 4 * (shards[number]["samples"] + 2)
    text = json.dumps({"shards": shards, "version": 2})
    assert parse_index(text.encode(), "x").shards[number].samples == shards[number]["samples"]
    shorter = text.replace(f'"bytes": {file["bytes"]},', f'"bytes": {file["bytes"] - 1},')
    with assert_error(IndexFormatError, path="x") as caught:
        parse_index(shorter.encode(), "x")
    assert f"shard {number}: " in str(caught.value)
