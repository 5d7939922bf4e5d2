"""Directories that litData optimised, as streams: in place, from a store, beside MDS, resumed."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lightning_streaming import Stream, StreamingDataLoader
from lightning_streaming.cache.config import CACHE_VARIABLE
from lightning_streaming.errors import ConfigError, IndexFormatError, ShardCorruptError
from lightning_streaming.formats.arrow.rows import ArrowRows
from tests.golden import golden_path
from tests.golden.litdata_values import describe
from tests.helpers import make_dataset, make_loader, write_shards
from tests.servers import S3Bucket

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SIZES = {"arrays": [4, 1], "mixed": [4, 4, 1], "mixed_chunk": [4, 4, 1], "mixed_batch": [4, 4, 1], "rows": [260, 10]}
"""Samples of each chunk."""


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A copy: nothing may be written into it."""
    shutil.copytree(golden_path("litdata_0_2_76"), tmp_path / "data")
    return tmp_path / "data"


def numbers(batches: Any) -> list[list[int]]:
    return [batch["number"].tolist() for batch in batches]


def expected(data: Path, name: str) -> list[list[int]]:
    """Rows of int32 that litData reads."""
    found = json.loads((data / "expected.json").read_bytes())[name]
    return [np.frombuffer(bytes.fromhex(sample[3]), "<i4").tolist() for sample in found]


def as_mds(root: Path, name: str) -> Path:
    """Ids in MDS shards as large as the chunks."""
    return write_shards(root, SIZES[name], {"number": "int"}, lambda number: {"number": number * 7**17})


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", ["mixed", "mixed_chunk", "mixed_batch", "rows"])
@pytest.mark.parametrize("workers", [0, 2])
def test_order_is_that_of_the_same_data_in_mds(name: str, workers: int, data: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in (data / name).iterdir())
    loader = make_loader(data / name, workers=workers, format="litdata", columns=["number"])
    found = numbers(loader)
    assert found == numbers(make_loader(as_mds(tmp_path / "mds", name), workers=workers))
    assert sorted(path.name for path in (data / name).iterdir()) == before


@pytest.mark.parametrize("name", ["arrays", "one_tensor", "pair", "tensors"])
def test_batches_are_those_of_torch(name: str, data: Path) -> None:
    dataset = make_dataset(data / name, format="litdata", shuffle=False, batch_size=1, num_canonical_nodes=1)
    samples = list(dataset)
    batches = list(make_loader(data / name, format="litdata", shuffle=False, batch_size=1, num_canonical_nodes=1))
    assert [describe(batch) for batch in batches] == [describe(default_collate([sample])) for sample in samples]
    if name == "pair":
        assert isinstance(samples[3]["sample"], tuple)
        first, second = batches[3]["sample"]
        assert first.tolist() == np.full((1, 2, 2), 3).tolist()
        assert second.tolist() == [3]


def test_data_on_a_store_is_read(data: Path, s3_bucket: S3Bucket, tmp_path: Path) -> None:
    for path in (data / "mixed_chunk").iterdir():
        s3_bucket.put(path.name, path.read_bytes())
    more: dict[str, Any] = {
        "storage": {"options": s3_bucket.options},
        "local": str(tmp_path / "cache"),
        "format": "litdata",
        "columns": ["number"],
    }
    loader = make_loader(s3_bucket.url, **more)
    assert numbers(loader) == numbers(make_loader(as_mds(tmp_path / "mds", "mixed")))


def test_tokens_are_blocks(data: Path) -> None:
    loader = make_loader(data / "tokens", format="litdata", block_length=5, shuffle=False, num_canonical_nodes=1)
    (first, *_) = batches = list(loader)
    assert first["sample"].dtype == torch.int32
    assert [len(batch["sample"]) for batch in batches] == [4, 4, 4, 3]
    assert first["sample"].tolist() == expected(data, "tokens")[:4]
    with pytest.raises(ConfigError, match="needs block_length, the tokens of a sample"):
        list(make_dataset(data / "tokens", format="litdata"))


def test_it_resumes_at_every_step(data: Path) -> None:
    def make() -> Any:
        return make_loader(data / "mixed", format="litdata", columns=["number"], batch_size=2)

    seen = [numbers([batch]) for batch in make()]
    for step in range(len(seen)):
        loader = make()
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        again = make()
        again.load_state_dict(state)
        assert [numbers([batch]) for batch in again] == seen[step:]


def test_it_mixes_with_mds(data: Path, tmp_path: Path) -> None:
    mds = as_mds(tmp_path / "mds", "mixed")
    streams = {
        "theirs": Stream(remote=str(data / "mixed"), format="litdata"),
        "ours": Stream(remote=str(mds)),
    }
    loader = make_loader(None, streams=streams, columns=["number"], shuffle=False)
    found = sorted(number for batch in numbers(loader) for number in batch)
    assert found == sorted(2 * [number * 7**17 for number in range(9)])


def collate_again(samples: list[Any]) -> Any:
    """Not torch's own function, so that each sample is made before."""
    return default_collate(samples)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("batch_size", [1, 4, 32, 300])
@pytest.mark.parametrize("more", [{}, {"columns": ["text", "number"]}, {"drop_last": True}], ids=str)
def test_batches_of_texts_and_numbers_are_those_of_torch(
    batch_size: int, more: dict[str, Any], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read column by column, never one by one."""
    more = {**more, "format": "litdata", "batch_size": batch_size}
    drop_last = more.pop("drop_last", False)
    one_by_one = StreamingDataLoader(make_dataset(data / "rows", **more), collate_fn=collate_again, drop_last=drop_last)
    expected = list(one_by_one)
    more["drop_last"] = drop_last
    assert [describe(batch) for batch in make_loader(data / "rows", workers=2, **more)] == list(map(describe, expected))

    def refuse(rows: ArrowRows, index: int) -> Any:
        raise AssertionError(f"sample {index} was asked for")

    monkeypatch.setattr(ArrowRows, "__getitem__", refuse)
    found = list(make_loader(data / "rows", **more))
    assert [describe(batch) for batch in found] == list(map(describe, expected))
    assert [list(batch) for batch in found] == [list(batch) for batch in expected]


def test_batches_of_texts_go_on_at_every_step(data: Path) -> None:
    def make() -> Any:
        return make_loader(data / "rows", format="litdata", batch_size=30)

    seen = list(map(describe, make()))
    for step in (0, 1, 4, len(seen) - 1):
        loader = make()
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        again = make()
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert list(map(describe, again)) == seen[step:]


def test_samples_that_cannot_be_taken_by_column_are_collated_as_ever(data: Path) -> None:
    """Of lists, and of texts of which some are missing."""
    options: dict[str, Any] = {"format": "litdata", "shuffle": False, "num_canonical_nodes": 1}
    batches = make_loader(data / "records", columns=["id", "maybe"], batch_size=2, **options)
    assert next(iter(batches))["maybe"] == ["x", None]
    (first, *_) = make_loader(data / "records", columns=["turns", "id"], batch_size=1, **options)
    assert first["id"].tolist() == [0]


def test_a_directory_of_litdata_says_which_format_it_is(data: Path) -> None:
    with pytest.raises(IndexFormatError, match='index of litData; read it with format="litdata"'):
        list(make_dataset(data / "mixed"))


def test_batches_of_numbers_are_those_of_torch(tmp_path: Path) -> None:
    """They are read as a table, never one by one."""
    items = [struct.pack("<3Iqd?", 8, 8, 1, number, number / 3, number % 2) for number in range(10)]
    ends = np.cumsum([4 + 4 * 11, *map(len, items)]).astype("<u4")
    (tmp_path / "chunk-0-0.bin").write_bytes(struct.pack("<I", 10) + ends.tobytes() + b"".join(items))
    leaf = {"type": None, "context": None, "children_spec": list[None]()}
    tree = {"type": "builtins.dict", "context": '["id", "share", "odd"]', "children_spec": [leaf] * 3}
    size = (tmp_path / "chunk-0-0.bin").stat().st_size
    chunk = {"filename": "chunk-0-0.bin", "chunk_size": 10, "chunk_bytes": size, "dim": None}
    config = {"data_format": ["int", "float", "bool"], "data_spec": json.dumps([1, tree]), "compression": None}
    (tmp_path / "index.json").write_text(json.dumps({"chunks": [chunk], "config": config}))
    options: dict[str, Any] = {"format": "litdata", "shuffle": False, "num_canonical_nodes": 1}
    samples = list(make_dataset(tmp_path, **options))
    assert samples[7] == {"id": 7, "share": 7 / 3, "odd": True}
    batches = list(make_loader(tmp_path, **options))
    groups = [samples[first : first + 4] for first in range(0, 10, 4)]
    assert [describe(batch) for batch in batches] == [describe(default_collate(group)) for group in groups]


def test_a_damaged_chunk_is_named_and_batches_before_it_come(data: Path) -> None:
    path = data / "rows" / "chunk-0-1.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    options: dict[str, Any] = {"format": "litdata", "shuffle": False, "num_canonical_nodes": 1, "batch_size": 30}
    batches = iter(make_loader(data / "rows", **options))
    assert [len(next(batches)["text"]) for _ in range(8)] == [30] * 8
    with pytest.raises(ShardCorruptError, match=r"chunk-0-1\.bin"):
        next(batches)
