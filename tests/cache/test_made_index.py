"""Indexes of data that other libraries wrote: made once, kept up with the files, and believed where they were left."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import StreamingDataset
from lightning_streaming.cache.config import CACHE_VARIABLE, CacheConfig
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.made_index import made_index
from lightning_streaming.errors import ConfigError, FormatError, ObjectNotFoundError, StreamingError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, parse_index
from lightning_streaming.storage import Location
from tests.servers import S3Bucket


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
    return root


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
    more: dict[str, Any] = {"local": str(tmp_path / "cache"), "storage_options": s3_bucket.options}
    dataset = StreamingDataset(
        remote=s3_bucket.url, format="npy", shuffle=False, num_canonical_nodes=1, batch_size=1, download_retry=0, **more
    )
    assert values(dataset) == rows(0, 30).tolist()
    assert (tmp_path / "cache" / "more" / "c.npy").read_bytes() == (data / "more" / "c.npy").read_bytes()
    s3_bucket.put("d.npy", (data / "a.npy").read_bytes())
    assert [name for name, _ in told(read(s3_bucket.url, **more))] == ["a.npy", "b.npy", "d.npy", "more/c.npy"]


def test_files_that_were_looked_at_are_not_opened_again(data: Path) -> None:
    first = read(data)
    content = (data / "b.npy").read_bytes()
    (data / "b.npy").write_bytes(b"!" * len(content))  # of the same size, so nobody looks
    np.save(data / "d.npy", rows(40, 4))
    assert told(read(data)) == [("a.npy", 10), ("b.npy", 10), ("d.npy", 4), ("more/c.npy", 10)]
    (data / "b.npy").write_bytes(content + b"!")
    with pytest.raises(FormatError, match=r"b\.npy"):
        read(data)
    (data / "b.npy").write_bytes(content)
    (data / "d.npy").unlink()
    assert read(data) == first


def test_a_copy_of_a_process_goes_on_with_the_index_it_began_with(data: Path) -> None:
    cache = IndexCache(config(data))
    first = cache.read()
    np.save(data / "d.npy", rows(40, 4))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_samples, (cache,)) == first.num_samples == 30
    assert cache.anew().read().num_samples == 34


def _samples(cache: IndexCache) -> int:
    return cache.read().num_samples


def test_an_index_that_was_left_beside_the_data_is_believed_if_it_is_of_what_is_asked(data: Path) -> None:
    text = made_index(Location(str(data)), "npy")
    (data / INDEX_BASENAME).write_bytes(text)
    (data / "b.npy").unlink()
    assert told(read(data)) == told(parse_index(text, "")) == [("a.npy", 10), ("b.npy", 10), ("more/c.npy", 10)]
    np.save(data / "b.npy", rows(10))
    plain = StreamingDataset(
        remote=str(data), shuffle=False, num_canonical_nodes=1, batch_size=1
    )  # it is a dataset now
    assert values(plain) == rows(0, 30).tolist()
    (data / INDEX_BASENAME).write_text(json.dumps({"chunks": [], "config": {}}))  # another library's
    assert read(data) == parse_index(text, "")


def test_blocks_of_another_length_have_an_index_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "tokens"
    root.mkdir()
    np.save(root / "a.npy", np.arange(100, dtype=np.uint16))
    (root / INDEX_BASENAME).write_bytes(made_index(Location(str(root)), "npy", 10))
    for length in (10, 30):
        dataset = StreamingDataset(
            remote=str(root), format="npy", block_length=length, shuffle=False, num_canonical_nodes=1, batch_size=1
        )
        found = [sample.tolist() for value in dataset for sample in value.values()]
        assert found == [list(range(start, start + length)) for start in range(0, 100 - length + 1, length)]


def test_an_index_whose_making_was_interrupted_goes_on(data: Path, tmp_path: Path) -> None:
    journal, whole = tmp_path / "journal", made_index(Location(str(data)), "npy")
    content = (data / "more" / "c.npy").read_bytes()
    (data / "more" / "c.npy").write_bytes(content[:20])
    with pytest.raises(FormatError):
        made_index(Location(str(data)), "npy", journal=journal)
    (data / "more" / "c.npy").write_bytes(content)
    size = (data / "a.npy").stat().st_size
    (data / "a.npy").write_bytes(b"!" * size)  # it was noted: nobody looks again
    with journal.open("a") as file:
        file.write('{"cut sho')
    told = list[int]()
    assert made_index(Location(str(data)), "npy", journal=journal, progress=told.append) == whole
    assert sum(told) == 3
    assert not journal.exists()


def write_groups(path: Path, groups: int) -> None:
    """A Parquet file of so many row groups, each of two rows."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": list(range(2 * groups))}), path, row_group_size=2)


def test_of_files_of_several_shards_no_shard_is_lost_or_looked_at_again(tmp_path: Path) -> None:
    """The making of an index stops in the midst of a file that is not the last."""
    root, journal = tmp_path / "rows", tmp_path / "journal"
    root.mkdir()
    for name in "abc":
        write_groups(root / f"{name}.parquet", 3)
    known = parse_index(made_index(Location(str(root)), "parquet"), "")
    write_groups(root / "b.parquet", 5)
    whole = made_index(Location(str(root)), "parquet")

    def stop(_: int) -> None:
        if len(journal.read_text().splitlines()) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_index(Location(str(root)), "parquet", known=known, journal=journal, progress=stop)
    for name in "ac":  # of the same size, so nobody looks
        (root / f"{name}.parquet").write_bytes(b"!" * (root / f"{name}.parquet").stat().st_size)
    assert made_index(Location(str(root)), "parquet", known=known, journal=journal) == whole


def test_what_is_not_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("none")
    with pytest.raises((ConfigError, ObjectNotFoundError), match=r"\.npy") as caught:
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

    (tmp_path / INDEX_BASENAME).write_bytes(made_index(Location(str(tmp_path)), "npy"))
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
    assert len(parse_index(made_index(Location(str(data)), "npy"), "index").shards) == 3
    assert told(read(data / "**/*.npy", local=how["local"])) == [("a.npy", 10), ("b.npy", 10), ("more/c.npy", 10)]
