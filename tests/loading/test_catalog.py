"""Shards and samples of several streams in one numbering."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.formats.index import parse_index
from lightning_streaming.loading import catalog as catalog_module
from lightning_streaming.loading.catalog import Catalog, SamplePlace
from tests.helpers import write_shards


def _catalog(tmp_path: Path, **sizes: list[int]) -> Catalog:
    roots = {name: write_shards(tmp_path / name, shards) for name, shards in sizes.items()}
    return Catalog({name: parse_index((root / "index.json").read_bytes(), name) for name, root in roots.items()})


def test_streams_are_numbered_one_after_another(tmp_path: Path) -> None:
    catalog = _catalog(tmp_path, a=[3, 1], b=[2])
    assert catalog.num_samples == 6
    places = [catalog.place(sample) for sample in range(6)]
    assert places == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (1, 2, 0), (1, 2, 1)]
    assert catalog.place(-1) == SamplePlace(stream=1, shard=2, sample=1)


def test_places_of_many_samples_are_those_of_each(tmp_path: Path) -> None:
    catalog = _catalog(tmp_path, a=[3, 1], b=[2, 5])
    shards, indexes = catalog.places(np.arange(11))
    assert list(zip(shards.tolist(), indexes.tolist(), strict=True)) == [catalog.place(i)[1:] for i in range(11)]


def test_empty_shards_are_stepped_over(tmp_path: Path) -> None:
    catalog = _catalog(tmp_path, a=[0, 2, 0, 0, 1], b=[0, 1])
    assert [catalog.place(sample).shard for sample in range(4)] == [1, 1, 4, 6]
    assert catalog.shard_of(np.arange(4)).tolist() == [1, 1, 4, 6]


@pytest.mark.parametrize("sample", [6, -7])
def test_a_sample_outside_is_refused(tmp_path: Path, sample: int) -> None:
    with pytest.raises(SampleIndexError, match=f"sample {sample} does not exist; the dataset has 6 samples"):
        _catalog(tmp_path, a=[3, 1], b=[2]).place(sample)


def test_shards_are_those_of_the_streams_one_after_another(tmp_path: Path) -> None:
    catalog = _catalog(tmp_path, a=[3, 1], b=[0, 2, 5])
    expected = [shard for index in catalog.indexes for shard in index.shards]
    assert list(catalog.shards) == expected
    assert len(catalog.shards) == 5
    assert [catalog.shards[place] for place in range(-5, 5)] == expected * 2
    assert catalog.shards[1:4] == tuple(expected[1:4])
    assert [shard.samples for shard in catalog.shards] == [3, 1, 0, 2, 5]
    for place in (5, -6):
        with pytest.raises(IndexError):
            catalog.shards[place]


def test_kinds_of_shards_are_told_by_an_example_of_each(tmp_path: Path) -> None:
    catalog = _catalog(tmp_path, a=[3, 1], b=[2, 5, 1])
    assert list(catalog.examples()) == [(0, catalog.shards[0]), (2, catalog.shards[2])]


def test_a_stream_without_samples_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stream 'b' has no samples"):
        _catalog(tmp_path, a=[1], b=[0])


def test_shards_are_found_by_the_names_of_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "_AT_ONCE", 2)
    catalog = _catalog(tmp_path, a=[1, 1, 1, 1, 1], b=[1, 1])
    names = {"shard.00004.mds", "shard.00001.mds", "another"}
    assert list(catalog.with_files(0, names)) == [(1, catalog.shards[1]), (4, catalog.shards[4])]
    assert list(catalog.with_files(1, names)) == [(6, catalog.shards[6])]
    assert list(catalog.with_files(1, set())) == []
