"""Shards kept as arrays are the shards that were put in."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.formats.index import DatasetIndex, FileInfo, ShardInfo
from lightning_streaming.formats.shard_table import ShardTable
from tests.formats.golden_datasets import read_index
from tests.golden import golden_path
from tests.tiers import examples

_texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="./\\\0"), max_size=6)
_hashes = st.dictionaries(st.sampled_from(["md5", "sha1", 'odd "%s"', "é"]), st.text(max_size=5), max_size=3)


@st.composite
def _files(draw: st.DrawFn, suffix: str) -> FileInfo:
    name = f"{draw(_texts)}x{suffix}"
    version = draw(st.sampled_from(["", "etag:1", "etag:é"]))
    return FileInfo(basename=name, bytes=draw(st.integers(0, 2**32 - 1)), hashes=draw(_hashes), version=version)


@st.composite
def _shards(draw: st.DrawFn) -> ShardInfo:
    is_packed, has_meta = draw(st.booleans()), draw(st.booleans())
    return ShardInfo(
        format="csv" if has_meta else "mds",
        samples=draw(st.integers(0, 2**32 - 1)),
        compression="zstd" if is_packed else None,
        hashes=("md5",),
        size_limit=draw(st.sampled_from([None, 1, 10**30])),
        raw_data=draw(_files("")),
        zip_data=draw(_files(".z")) if is_packed else None,
        raw_meta=draw(_files(".m")) if has_meta else None,
        zip_meta=draw(_files(".m.z")) if has_meta and is_packed else None,
        schema={"column_names": draw(st.sampled_from([("a",), ("a", "é")]))},
    )


def shard(number: int, **changes: Any) -> ShardInfo:
    """A shard without hashes."""
    file = FileInfo(basename=f"shard.{number}.mds", bytes=9, hashes={})
    fields: dict[str, Any] = {
        "format": "mds",
        "samples": 3,
        "compression": None,
        "hashes": (),
        "size_limit": None,
    } | changes
    return ShardInfo(**fields, raw_data=file, zip_data=None, schema={"column_names": ("a",)})


@settings(max_examples=examples(60))
@given(st.lists(_shards(), max_size=7))
def test_every_shard_comes_back(shards: list[ShardInfo]) -> None:
    table = DatasetIndex(shards).shards
    assert list(table) == shards
    assert [table[place] for place in range(-len(shards), len(shards))] == shards * 2
    assert table[1:] == tuple(shards[1:])
    assert table[::-2] == tuple(shards[::-2])
    assert table == shards
    assert tuple(shards) == table
    assert table == DatasetIndex(shards).shards
    assert pickle.loads(pickle.dumps(table)) == shards


@settings(max_examples=examples(60))
@given(st.lists(_shards(), max_size=7))
def test_the_digest_is_that_of_the_json_of_a_table(shards: list[ShardInfo]) -> None:
    rows = [
        (one.raw_data.basename, one.samples, one.raw_data.bytes, sorted(one.raw_data.hashes.items())) for one in shards
    ]
    expected = hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()
    assert DatasetIndex(shards).data_digest == expected


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("all-hashes", "989185dbdfd57082"),
        ("comp-zstd", "1556ddb928160e66"),
        ("json-gz", "df284a153b38a5a7"),
        ("merged", "2428befc46f06b69"),
        ("no-samples", "71857576257465c7"),
    ],
)
def test_the_digest_of_a_dataset_never_changes(name: str, digest: str) -> None:
    """It is in saved positions."""
    assert read_index(golden_path("mds", name)).data_digest == digest


@pytest.mark.parametrize("place", [3, -4])
def test_a_shard_outside_is_an_index_error(place: int) -> None:
    with pytest.raises(IndexError):
        DatasetIndex([shard(0)] * 3).shards[place]


@pytest.mark.parametrize("other", [[], [shard(0)], [shard(0), shard(2)], [shard(0), shard(1), shard(2)]])
def test_other_shards_are_not_equal(other: Sequence[ShardInfo]) -> None:
    table = DatasetIndex([shard(0), shard(1)]).shards
    assert table != other
    assert table != DatasetIndex(other).shards
    assert table != "shards"


def test_equal_shards_are_equal_though_their_arrays_are_not() -> None:
    """A kind is told by more than equality, for example by the order of its hashes."""
    file = FileInfo(basename="a", bytes=9, hashes={"md5": "1", "sha1": "2"})
    turned = FileInfo(basename="a", bytes=9, hashes={"sha1": "2", "md5": "1"})
    one, other = (
        ShardInfo(
            format="mds",
            samples=0,
            compression=None,
            hashes=(),
            size_limit=None,
            raw_data=raw,
            zip_data=None,
            schema={},
        )
        for raw in (file, turned)
    )
    assert DatasetIndex([one]).shards == DatasetIndex([other]).shards


def test_kinds_are_told_by_their_first_shards() -> None:
    table = DatasetIndex([shard(0), shard(1), shard(2, size_limit=7), shard(3)]).shards
    assert table.examples() == [(0, shard(0)), (2, shard(2, size_limit=7))]
    assert DatasetIndex([]).shards.examples() == []


def test_a_table_starts_like_another_as_far_as_they_are_the_same() -> None:
    table = DatasetIndex([shard(0), shard(1)]).shards
    longer = DatasetIndex([shard(0), shard(1), shard(2, size_limit=7)]).shards
    assert table.starts_like(longer, 2)
    assert longer.starts_like(table, 2)
    assert not longer.starts_like(table, 3)
    for change in ({"samples": 4}, {"size_limit": 7}):
        assert not table.starts_like(DatasetIndex([shard(0), shard(1, **change)]).shards, 2)
    assert not table.starts_like(DatasetIndex([shard(0), shard(2)]).shards, 2)


def test_samples_are_an_array_as_it_is() -> None:
    index = DatasetIndex([shard(0), shard(1, samples=5)])
    assert index.samples_per_shard() is index.samples_per_shard()
    np.testing.assert_array_equal(index.samples_per_shard(), [3, 5])
    assert index.num_samples == 8


def _versioned(*versions: str) -> DatasetIndex:
    return DatasetIndex(
        [
            replace(shard(number), raw_data=replace(shard(number).raw_data, version=version))
            for number, version in enumerate(versions)
        ]
    )


def test_other_versions_of_files_are_another_beginning() -> None:
    before = _versioned("etag:1", "etag:2")
    assert _versioned("etag:1", "etag:2", "etag:3").begins_like(before)
    assert not _versioned("etag:1", "etag:3", "etag:3").begins_like(before)
    assert _versioned("", "etag:2", "etag:3").begins_like(before)
    assert not _versioned("", "etag:3").begins_like(before)


def test_files_of_the_same_versions_are_compared_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = _versioned("etag:1", "etag:2"), _versioned("etag:1", "etag:2", "etag:3")

    def refuse(_: ShardTable) -> Iterator[ShardInfo]:
        raise AssertionError

    monkeypatch.setattr(ShardTable, "__iter__", refuse)
    assert now.begins_like(before)
