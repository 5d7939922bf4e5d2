"""Tar files of WebDataset as streams: the same samples in the same order as of MDS shards of the same sizes."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import Stream, StreamingDataset
from lightning_streaming.errors import ConfigError, EncodingError, IntegrityError, ShardCorruptError
from lightning_streaming.storage import Location
from tests.formats.tar_data import text_samples, write_members, write_samples
from tests.helpers import assert_error, assert_resumes_at_every_step, make_dataset, make_loader, raises, write_shards
from tests.servers import S3Store

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SIZES = (7, 1, 12, 5, 9)
SAMPLES = text_samples(sum(SIZES))
COLUMNS = {"__key__": "str", "cls": "int", "json": "json", "txt": "str"}


def write_tars(root: Path, ending: str = ".tar") -> Path:
    first = 0
    for number, size in enumerate(SIZES):
        write_samples(root / f"{number:05}{ending}", SAMPLES[first : first + size])
        first += size
    return root


@pytest.fixture
def mds(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "mds", SIZES, COLUMNS, lambda number: SAMPLES[number])


def read(**settings: Any) -> list[list[Any]]:
    """Two epochs."""
    loader = make_loader(loader={"collate_fn": list}, **settings)
    return [batch for _ in range(2) for batch in loader]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_samples_and_order_are_those_of_mds(tmp_path: Path, mds: Path, workers: int, ending: str) -> None:
    tars = write_tars(tmp_path / "tars", ending)
    found = read(root=str(tars), format="webdataset", workers=workers)
    assert found == read(root=str(mds), workers=workers)
    assert sorted(one["__key__"] for batch in found for one in batch) == sorted(2 * [one["__key__"] for one in SAMPLES])


@pytest.mark.rotate(1)
@pytest.mark.parametrize("ending", [".tar", ".tgz"])
def test_files_of_a_store_are_read_through_the_cache(s3: S3Store, tmp_path: Path, mds: Path, ending: str) -> None:
    bucket = s3.make_bucket()
    for path in write_tars(tmp_path / "tars", ending).iterdir():
        Location(f"{bucket}/deep/{path.name}", s3.options).upload(path)
    settings: dict[str, Any] = {"root": bucket, "storage": {"options": s3.options}, "local": str(tmp_path / "cache")}
    for _ in range(2):
        assert read(**settings, format="webdataset") == read(root=str(mds))
    assert (tmp_path / "cache" / "deep" / "00000.tar").is_file()


def test_a_run_resumes_at_every_step(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars")
    make = partial(make_loader, tars, format="webdataset", transform=lambda one: {"id": int(one["__key__"][-6:])})
    assert_resumes_at_every_step(make)


def test_streams_of_both_formats_are_mixed(tmp_path: Path, mds: Path) -> None:
    streams = {
        "tars": Stream(remote=str(write_tars(tmp_path / "tars")), format="webdataset", proportion=0.5),
        "mds": Stream(remote=str(mds), proportion=0.5),
    }
    found = [one["__key__"] for one in make_dataset(streams=streams, epoch_size=40)]
    assert len(found) == 40
    assert set(found) <= {one["__key__"] for one in SAMPLES}


def test_samples_can_be_selected_by_what_is_in_them(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars")
    dataset = StreamingDataset(
        remote=str(tars), format="webdataset", selection={"where": "cls = 3"}, columns=["__key__"]
    )
    found = [dataset[number] for number in range(dataset.size)]
    assert found == [{"__key__": one["__key__"]} for one in SAMPLES if one["cls"] == 3]


def test_arrays_of_several_dimensions_are_no_documents(tmp_path: Path) -> None:
    write_samples(tmp_path / "00.tar", [{"__key__": str(rows), "npy": np.zeros((3, 4)[:rows])} for rows in (1, 2)])
    pack = {"column": "npy", "capacity": 8}
    with raises(ConfigError, "stream '0'", "00.tar, sample 1, column 'npy' is an array of shape (3, 4)", "lengths="):
        next(iter(make_dataset(tmp_path, format="webdataset", packing=pack)))


def test_what_cannot_be_read_is_told_with_the_stream(tmp_path: Path) -> None:
    write_members(tmp_path / "00.tar", [("0.txt", b"x"), ("0.json", b"{"), ("0.pkl", b"")])
    with raises(ConfigError, "stream '0'", "00.tar has a column 'pkl', which can run any code"):
        StreamingDataset(remote=str(tmp_path), format="webdataset")[0]
    with raises(EncodingError, "stream '0'", "00.tar, sample 0, member '0.json': expected JSON"):
        StreamingDataset(remote=str(tmp_path), format="webdataset", columns=["json"])[0]
    assert StreamingDataset(remote=str(tmp_path), format="webdataset", columns=["txt"])[0] == {"txt": "x"}
    with raises(ConfigError, "block_length", "already has samples"):
        StreamingDataset(remote=str(tmp_path), format="webdataset", block_length=3)[0]


@pytest.mark.rotate(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_pickles_are_read_where_that_is_allowed(tmp_path: Path, workers: int) -> None:
    tars = write_tars(tmp_path / "tars")
    write_samples(tars / "last.tar", [{"__key__": "last", "txt": "x", "pyd": {"a": (1,)}}])
    settings: dict[str, Any] = {"format": "webdataset", "workers": workers, "loader": {"collate_fn": list}}
    with raises(ConfigError, "last.tar has a column 'pyd'", "allow_unsafe_types=True"):
        next(iter(make_loader(tars, **settings)))  # whichever file is first
    found = [one for batch in make_loader(tars, allow_unsafe_types=True, **settings) for one in batch]
    assert [one["pyd"] for one in found if "pyd" in one] == [{"a": (1,)}]
    texts = [one for batch in make_loader(tars, columns=["txt"], **settings) for one in batch]
    assert len(texts) == len(found)


def test_a_file_that_changes_under_its_size_is_told(tmp_path: Path) -> None:
    write_members(tmp_path / "00.tar", [("0.txt", b"x"), ("1.txt", b"y")])
    settings: dict[str, Any] = {"remote": str(tmp_path), "format": "webdataset"}
    assert StreamingDataset(**settings)[1]["txt"] == "y"
    begun = StreamingDataset(**settings)
    assert begun.size == 2
    write_members(tmp_path / "00.tar", [("0.txt", b"x"), ("0.cls", b"1")])
    with raises(IntegrityError, "00.tar was replaced since it was indexed"):
        begun[0]


def test_a_wrong_count_of_somebody_else_is_told(tmp_path: Path) -> None:
    write_samples(tmp_path / "00.tar", text_samples(30))
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": {"00.tar": 31}}))
    with raises(ShardCorruptError, "00.tar must have 31 samples by its index, but has 30", "create the index again"):
        StreamingDataset(remote=str(tmp_path), format="webdataset")[0]


def test_a_compressed_file_that_is_written_over_later_is_refused(tmp_path: Path) -> None:
    write_tars(tmp_path, ".tar.gz")
    settings: dict[str, Any] = {"remote": str(tmp_path), "format": "webdataset"}
    dataset = StreamingDataset(**settings)
    assert dataset.size == sum(SIZES)
    path = tmp_path / "00000.tar.gz"
    data = path.read_bytes()
    path.write_bytes(gzip.compress(bytes(99)).ljust(len(data), b"x")[: len(data)])
    with assert_error(IntegrityError, path=path, hint="start the run again"):
        dataset[0]
