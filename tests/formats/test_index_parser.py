"""An index read piece by piece is what it would be, read whole and shard by shard."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import IndexFormatError
from lightning_streaming.formats.index import ShardInfo, parse_index, read_index
from lightning_streaming.formats.index_parser import check_version, parse_shard


def entry(number: int, packed: bool = True, split: bool = False) -> dict[str, Any]:
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


@pytest.mark.parametrize("count", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("split", [False, True])
def test_the_size_of_pieces_does_not_matter(count: int, indent: int | None, split: bool) -> None:
    root = {"shards": [entry(number, number < 6, split) for number in range(12)], "version": 2, "more": [1, {}]}
    for sort in (True, False):
        assert_same(json.dumps(root, indent=indent, sort_keys=sort).encode(), count)
    backwards = dict(reversed(root.items()))
    assert_same(json.dumps(backwards, ensure_ascii=False).encode(), count)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-le"])
def test_the_text_may_have_any_encoding_of_json(encoding: str) -> None:
    assert_same(json.dumps({"version": 2, "shards": [entry(1)]}, ensure_ascii=False).encode(encoding), 3)


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
    assert_same(text.replace("ENTRY", json.dumps(entry(0))).encode(), count if len(text) < 1000 else 1 << 20)


_ALIKE = json.dumps({"shards": [entry(number) for number in range(6)], "version": 2}, sort_keys=True)
_SPLIT = json.dumps({"shards": [entry(number, split=True) for number in range(6)], "version": 2})


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


@settings(max_examples=300)
@given(st.integers(0, 2**40), st.sampled_from([_ALIKE, _SPLIT]), st.sampled_from([64, 1 << 20]))
def test_shards_alike_are_read_as_one_by_one_whatever_is_wrong_with_one(seed: int, text: str, count: int) -> None:
    assert_same(damage(text, random.Random(seed)), count)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"samples": 93', '"samples": 1300'),
        ('"samples": 93', '"samples": 93.0'),
        ('"samples": 93', '"samples": 93e0'),
        ('"samples": 93', '"samples": 093'),
        ('"samples": 93', '"samples": 99999999999999999999'),
        ('"samples": 93', '"samples": true'),
        ('"samples": 93', '"samples": 93, "samples": 94'),
        ('"bytes": 5003', '"bytes": 4294967296'),
        ('"bytes": 73', '"bytes": 9223372036854775808'),
        ('"bytes": 73', '"bytes": 123456789012345678'),
        ("part-a/shard.00003.x", "../shard.00003.x"),
        ("part-a/shard.00003.x", "/shard.00003.x"),
        ("part-a/shard.00003.x", "part-a//./shard.00003.x"),
        ("part-a/shard.00003.x", "part-a/" + "x" * 300),
        ("part-a/shard.00003.x", "é/shard.00003.x"),
        ("part-a/shard.00003.x", r"part-\u0061/shard"),
        ("part-a/shard.00003.x", ""),
        ('"sha1": "', r'"sha1": "\ud800'),
        ('"sha1": "', r'"sha\u0031": "'),
        ('"version": 2, "zip_data"', '"version": 3, "zip_data"'),
        ('"zip_data"', '"other": {"samples": 1}, "zip_data"'),
    ],
)
def test_a_shard_that_is_nearly_like_those_before_it_is_looked_at_closely(before: str, after: str) -> None:
    start = _ALIKE.index("shard.00003") - 400
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
        text = json.dumps({"shards": [entry(0)] * 5, "version": 2}).replace('"samples": 90', twice)
        assert_same(text.encode(), 1 << 20)


def test_a_byte_that_is_no_text_is_told_wherever_it_is() -> None:
    data = _ALIKE.encode()
    with pytest.raises(IndexFormatError, match="i: an index must be JSON, but 'utf-8' codec"):
        parse_index(data[:-40] + b"\xff" + data[-40:], "i")
