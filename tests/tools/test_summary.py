from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.tools.summary import Bin, Column, histogram, summarize
from tests.formats.golden_datasets import read_index
from tests.golden import golden_path
from tests.tools.running import write_texts


def test_of_a_compressed_dataset_both_sizes_are_told() -> None:
    directory = golden_path("mds", "comp-zstd")
    summary = summarize(read_index(directory))
    stored = sum(path.stat().st_size for path in directory.iterdir() if path.name != "index.json")
    assert summary.stored_bytes == stored < summary.raw_bytes
    assert summary.compressions == {"zstd": summary.shards}


def test_meta_files_count_too() -> None:
    directory = golden_path("mds", "csv")
    summary = summarize(read_index(directory))
    assert summary.raw_bytes == summary.stored_bytes
    assert summary.raw_bytes == sum(path.stat().st_size for path in directory.iterdir() if path.name != "index.json")
    assert list(summary.columns) == [Column("f", "float", None), Column("n", "int", None), Column("name", "str", None)]


def test_columns_that_only_some_shards_have_are_counted(tmp_path: Path) -> None:
    one = write_texts(tmp_path / "one")
    other = write_texts(tmp_path / "other", columns={"id": "int"})
    summary = summarize(DatasetIndex(one.shards + other.shards))
    here, there = len(one.shards), len(other.shards)
    assert summary.columns == {Column("id", "int", 8): here + there, Column("text", "str", None): here}


def test_no_shards_are_a_dataset_too() -> None:
    summary = summarize(DatasetIndex(()))
    assert (summary.samples, summary.sizes, summary.samples_per_shard, summary.columns) == (0, (), None, {})


@pytest.mark.parametrize(
    ("sizes", "bins"),
    [
        ([], ()),
        ([7], (Bin(7, 7, 1),)),
        ([0, 0], (Bin(0, 0, 2),)),
        ([100, 100, 99, 97], (Bin(97, 100, 4),)),  # hardly differ
        ([0, 10, 4], (Bin(0, 3, 1), Bin(3, 6, 1), Bin(6, 10, 1))),
        ([100, 100, 100, 20], (Bin(20, 60, 1), Bin(60, 100, 3))),
    ],
)
def test_sizes_are_sorted_into_bins(sizes: list[int], bins: tuple[Bin, ...]) -> None:
    assert histogram(sizes) == bins


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2**33), min_size=1, max_size=50))
def test_every_shard_is_in_one_bin(sizes: list[int]) -> None:
    bins = histogram(sizes)
    assert sum(one.shards for one in bins) == len(sizes)
    assert (bins[0].smallest, bins[-1].largest) == (min(sizes), max(sizes))
    assert len(bins) <= 8
    assert all(before.largest == after.smallest for before, after in pairwise(bins))
