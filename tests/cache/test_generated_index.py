"""Indexes of data that other libraries wrote: made once, kept up with the files, and believed where they were left."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from lightning_streaming import StreamingDataset
from lightning_streaming.cache import generated_index as generated_index_module
from lightning_streaming.cache.config import CACHE_VARIABLE, CacheConfig
from lightning_streaming.cache.generated_index import FilesAt, KnownIndex, generated_index
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    StreamingError,
)
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, parse_index
from lightning_streaming.storage import Location
from tests.helpers import assert_error
from tests.servers import HttpStore, S3Bucket

LONG_AGO = 1_000_000_000


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))


def rows(first: int, count: int = 10) -> np.ndarray:
    return np.arange(3 * first, 3 * (first + count)).reshape(count, 3)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Thirty rows in three files."""
    root = tmp_path / "data"
    (root / "more").mkdir(parents=True)
    for number, name in enumerate(("a.npy", "b.npy", "more/c.npy")):
        np.save(root / name, rows(10 * number))
        age(root / name)
    return root


def age(path: Path) -> None:
    """Make a file one that was written long before anybody looked at it."""
    os.utime(path, (LONG_AGO, LONG_AGO))


def config(root: Path | str, **more: object) -> CacheConfig:
    return CacheConfig(name="0", remote=str(root), format="npy", **more)  # type: ignore[arg-type]


def read(root: Path | str, **more: object) -> DatasetIndex:
    return IndexCache(config(root, **more)).read()


def values(dataset: StreamingDataset) -> list[list[int]]:
    return [sample["values"].tolist() for sample in dataset]


def told(index: DatasetIndex) -> list[tuple[str, int]]:
    return [(shard.raw_data.basename, shard.samples) for shard in index.shards]


def test_data_in_place_is_read_without_an_index_and_nothing_is_written_there(data: Path) -> None:
    before = sorted(data.rglob("*"))
    dataset = StreamingDataset(remote=str(data), format="npy", shuffle=False, num_canonical_nodes=1, batch_size=1)
    assert values(dataset) == rows(0, 30).tolist()
    assert told(read(data)) == [("a.npy", 10), ("b.npy", 10), ("more/c.npy", 10)]
    assert sorted(data.rglob("*")) == before


def test_data_on_a_store_is_fetched_into_the_cache(data: Path, s3_bucket: S3Bucket, tmp_path: Path) -> None:
    for path in data.rglob("*.npy"):
        s3_bucket.put(str(path.relative_to(data)), path.read_bytes())
    local = str(tmp_path / "cache")
    dataset = StreamingDataset(
        remote=s3_bucket.url,
        local=local,
        storage={"options": s3_bucket.options},
        format="npy",
        shuffle=False,
        num_canonical_nodes=1,
        batch_size=1,
        download_retry=0,
    )
    assert values(dataset) == rows(0, 30).tolist()
    assert (tmp_path / "cache" / "more" / "c.npy").read_bytes() == (data / "more" / "c.npy").read_bytes()
    s3_bucket.put("d.npy", (data / "a.npy").read_bytes())
    now = read(s3_bucket.url, local=local, storage_options=s3_bucket.options)
    assert [name for name, _ in told(now)] == ["a.npy", "b.npy", "d.npy", "more/c.npy"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are inspected from here on."""
    names, read_range = list[str](), FilesAt.read_range

    def noted(self: FilesAt, name: str, start: int, stop: int) -> bytes:
        names.append(name)
        return read_range(self, name, start, stop)

    monkeypatch.setattr(FilesAt, "read_range", noted)
    monkeypatch.setattr(generated_index_module, "_CLOCK_TICK", 0)  # files of tests are written just before
    return names


def test_files_that_were_looked_at_are_not_opened_again(data: Path, opened: list[str]) -> None:
    first = read(data)
    opened.clear()
    np.save(data / "d.npy", rows(40, 4))
    assert told(read(data)) == [("a.npy", 10), ("b.npy", 10), ("d.npy", 4), ("more/c.npy", 10)]
    assert set(opened) == {"d.npy"}
    content = (data / "b.npy").read_bytes()
    (data / "b.npy").write_bytes(content + b"!")
    with pytest.raises(FormatError, match=r"b\.npy"):
        read(data)
    (data / "b.npy").write_bytes(content)
    age(data / "b.npy")
    (data / "d.npy").unlink()
    assert read(data) == first


@pytest.mark.parametrize("afar", [False, True])
def test_a_file_that_was_written_again_is_looked_at_though_its_size_is_the_same(
    data: Path, afar: bool, s3_bucket: S3Bucket
) -> None:
    place: dict[str, Any] = {"root": data}
    if afar:
        for path in data.glob("*.npy"):
            s3_bucket.put(path.name, path.read_bytes())
        place = {"root": s3_bucket.url, "storage_options": s3_bucket.options}
    before = read(**place)
    for name in ("a.npy", "b.npy"):
        np.save(data / name, rows(0).astype(np.float64))
        if afar:
            s3_bucket.put(name, (data / name).read_bytes())
    if not afar:
        np.save(data / "more" / "c.npy", rows(0).astype(np.float64))
    after = read(**place)
    assert told(after) == told(before)
    assert {shard.schema["column_encodings"] for shard in before.shards} == {("ndarray:int64:3",)}
    assert {shard.schema["column_encodings"] for shard in after.shards} == {("ndarray:float64:3",)}


def test_a_file_replaced_by_an_older_one_of_the_same_size_is_inspected(data: Path, tmp_path: Path) -> None:
    assert {shard.schema["column_encodings"] for shard in read(data).shards} == {("ndarray:int64:3",)}
    for path in data.rglob("*.npy"):
        np.save(tmp_path / "new.npy", rows(0).astype(np.float64))
        age(tmp_path / "new.npy")
        (tmp_path / "new.npy").replace(path)
    assert {shard.schema["column_encodings"] for shard in read(data).shards} == {("ndarray:float64:3",)}


@pytest.mark.nightly
def test_a_copy_of_a_process_goes_on_with_the_index_it_began_with(data: Path) -> None:
    cache = IndexCache(config(data))
    first = cache.read()
    np.save(data / "d.npy", rows(40, 4))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_samples, (cache,)) == first.num_samples == 30
    assert cache.refreshed().read().num_samples == 34


def _samples(cache: IndexCache) -> int:
    return cache.read().num_samples


def test_an_index_that_was_left_beside_the_data_is_believed_if_it_is_of_what_is_asked(data: Path) -> None:
    text = generated_index(Location(str(data)), "npy")
    (data / INDEX_BASENAME).write_bytes(text)
    (data / "b.npy").unlink()
    assert told(read(data)) == told(parse_index(text, "")) == [("a.npy", 10), ("b.npy", 10), ("more/c.npy", 10)]
    np.save(data / "b.npy", rows(10))
    plain = StreamingDataset(
        remote=str(data), shuffle=False, num_canonical_nodes=1, batch_size=1
    )  # it is a dataset now
    assert values(plain) == rows(0, 30).tolist()
    (data / INDEX_BASENAME).write_text(json.dumps({"chunks": [], "config": {}}))  # another library's
    assert told(read(data)) == told(parse_index(text, ""))


def test_a_cache_of_row_groups_is_a_dataset_that_is_read_in_place(tmp_path: Path) -> None:
    root, local = tmp_path / "rows", str(tmp_path / "local")
    root.mkdir()
    parquet.write_table(pyarrow.table({"id": range(10), "text": ["x"] * 10}), root / "a.parquet", row_group_size=5)
    fetched = StreamingDataset(remote=str(root), local=local, format="parquet", columns=["id"])
    expected = [fetched[number] for number in range(10)]
    shutil.rmtree(root)
    kept = StreamingDataset(local=local, columns=["id"])
    assert [kept[number] for number in range(10)] == expected
    with assert_error(ObjectNotFoundError, path="a.parquet"):  # nor what has other columns
        StreamingDataset(local=local)[0]


def test_a_directory_may_be_called_like_a_file(data: Path, s3_bucket: S3Bucket) -> None:
    (data / "more").rename(data / "c.npy")  # as Spark calls what it writes
    assert told(read(data / "c.npy")) == [("c.npy/c.npy", 10)]
    (data / INDEX_BASENAME).write_bytes(generated_index(Location(str(data)), "npy"))
    assert told(read(data / "c.npy")) == [("c.npy/c.npy", 10)]
    for name in ("c.npy/c.npy", "c.npy/d.npy", "other.npy"):
        s3_bucket.put(name, (data / "a.npy").read_bytes())
    found = read(f"{s3_bucket.url}/c.npy", storage_options=s3_bucket.options)
    assert told(found) == [("c.npy/c.npy", 10), ("c.npy/d.npy", 10)]


def test_one_file_is_read_of_a_place_that_shows_nothing_else(data: Path, http_store: HttpStore) -> None:
    http_store.put("a.npy", (data / "a.npy").read_bytes())
    http_store.fail(INDEX_BASENAME, "status", status=403)  # as with a URL that is signed for one file
    assert told(read(f"{http_store.url}/a.npy?sig=x")) == [("a.npy", 10)]
    with pytest.raises(AccessDeniedError):
        read(f"{http_store.url}/?sig=x")


def test_blocks_of_another_length_have_an_index_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "tokens"
    root.mkdir()
    np.save(root / "a.npy", np.arange(100, dtype=np.uint16))
    (root / INDEX_BASENAME).write_bytes(generated_index(Location(str(root)), "npy", 10))
    for length in (10, 30):
        dataset = StreamingDataset(
            remote=str(root), format="npy", block_length=length, shuffle=False, num_canonical_nodes=1, batch_size=1
        )
        found = [sample.tolist() for value in dataset for sample in value.values()]
        assert found == [list(range(start, start + length)) for start in range(0, 100 - length + 1, length)]


@pytest.mark.nightly
def test_a_directory_for_some_files_is_not_taken_for_others(data: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    some = config(data / "a*.npy", local=local)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # what another process found just now is believed
        assert pool.apply(_samples, (IndexCache(some),)) == 10
    assert IndexCache(some).read().num_samples == 10
    for others in (data / "b*.npy", data):
        with assert_error(ConfigError, option="remote", path="local"):
            read(others, local=local)


def test_blocks_of_two_lengths_do_not_share_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "tokens"
    root.mkdir()
    np.save(root / "a.npy", np.arange(100, dtype=np.uint16))
    assert read(root, local=tmp_path / "local", block_length=10).num_samples == 10
    with assert_error(ConfigError, option="remote", path="local"):
        read(root, local=tmp_path / "local", block_length=30)


def test_an_index_whose_making_was_interrupted_goes_on(data: Path, tmp_path: Path, opened: list[str]) -> None:
    journal, whole = tmp_path / "journal", generated_index(Location(str(data)), "npy")
    content = (data / "more" / "c.npy").read_bytes()
    (data / "more" / "c.npy").write_bytes(content[:20])
    with pytest.raises(FormatError):
        generated_index(Location(str(data)), "npy", journal=journal)
    (data / "more" / "c.npy").write_bytes(content)
    opened.clear()
    with journal.open("a") as file:
        file.write('{"cut sho')
    told = list[int]()
    assert generated_index(Location(str(data)), "npy", journal=journal, progress=told.append) == whole
    assert sum(told) == 3
    assert "a.npy" not in opened
    assert not journal.exists()


def write_groups(path: Path, groups: int) -> None:
    """A Parquet file of so many row groups, each of two rows."""
    parquet.write_table(pyarrow.table({"a": list(range(2 * groups))}), path, row_group_size=2)


def test_of_files_of_several_shards_no_shard_is_lost_or_looked_at_again(tmp_path: Path, opened: list[str]) -> None:
    """The making of an index stops in the midst of a file that is not the last."""
    root, journal = tmp_path / "rows", tmp_path / "journal"
    root.mkdir()
    for name in "abc":
        write_groups(root / f"{name}.parquet", 3)
        age(root / f"{name}.parquet")
    known = KnownIndex(parse_index(generated_index(Location(str(root)), "parquet"), "").shards, time.time() + 99)
    write_groups(root / "b.parquet", 5)
    whole = generated_index(Location(str(root)), "parquet")

    def stop(_: int) -> None:
        if len(journal.read_text().splitlines()) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generated_index(Location(str(root)), "parquet", known=known, journal=journal, progress=stop)
    opened.clear()
    assert generated_index(Location(str(root)), "parquet", known=known, journal=journal) == whole
    assert set(opened) == {"b.parquet"}


def test_what_is_not_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("none")
    with assert_error(ConfigError, path="empty") as caught:
        read(tmp_path / "empty")
    assert str(tmp_path / "empty") in str(caught.value)
    with pytest.raises(StreamingError):
        read(tmp_path / "nowhere")


def test_a_directory_that_may_not_be_written_to_is_no_hindrance(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data.parent / "file").write_text("no directory can be made below this")
    monkeypatch.setenv(CACHE_VARIABLE, str(data.parent / "file" / "caches"))
    cache = IndexCache(config(data))
    assert cache.read().num_samples == 30


def test_a_directory_that_is_called_like_a_file_is_read(data: Path, s3_bucket: S3Bucket, tmp_path: Path) -> None:
    """As Spark calls them; no mark that it leaves is data."""
    whole = tmp_path / "whole.npy"
    data.rename(whole)
    (whole / "_SUCCESS").touch()
    for path in whole.rglob("*.npy"):
        s3_bucket.put(f"whole.npy/{path.relative_to(whole)}", path.read_bytes())
    store = {"storage_options": s3_bucket.options, "download_retry": 0}
    expected = [("whole.npy/a.npy", 10), ("whole.npy/b.npy", 10), ("whole.npy/more/c.npy", 10)]

    assert told(read(whole)) == expected
    assert told(read(f"{s3_bucket.url}/whole.npy", **store)) == expected

    (tmp_path / INDEX_BASENAME).write_bytes(generated_index(Location(str(tmp_path)), "npy"))
    np.save(tmp_path / "whole.npy-more.npy", rows(0))
    assert told(read(whole)) == expected


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and pages of links to those of a directory, which tell no sizes."""

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def listed(data: Path) -> Iterator[str]:
    """The URL of the same data on a server that lists it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(data))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_of_pages_of_links_is_listed(data: Path, listed: str) -> None:
    (data / "b.npy").rename(data / "b #1 %20é.npy")

    assert told(read(listed)) == [("a.npy", 10), ("b #1 %20é.npy", 10), ("more/c.npy", 10)]
    assert told(read(f"{listed}/*.npy")) == [("a.npy", 10), ("b #1 %20é.npy", 10)]
    assert told(read(f"{listed}/b%20%231%20%2520é.npy")) == [("b #1 %20é.npy", 10)]
    dataset = StreamingDataset(remote=listed, format="npy", shuffle=False, num_canonical_nodes=1, batch_size=1)
    assert values(dataset) == rows(0, 30).tolist()


def test_a_cache_directory_within_the_data_is_no_data(data: Path) -> None:
    how: dict[str, Any] = {"format": "npy", "local": str(data / "deep" / "cache")}
    for _ in range(3):
        dataset = StreamingDataset(remote=str(data), shuffle=False, num_canonical_nodes=1, batch_size=1, **how)
        assert values(dataset) == rows(0, 30).tolist()
    assert (data / "deep" / "cache" / "a.npy").exists()
    assert len(parse_index(generated_index(Location(str(data)), "npy"), "index").shards) == 3
    assert told(read(data / "**/*.npy")) == [("a.npy", 10), ("b.npy", 10), ("more/c.npy", 10)]
