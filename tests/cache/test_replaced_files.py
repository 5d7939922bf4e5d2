"""A file of another format that is replaced while a run reads its parts is never mixed with the one before."""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_streaming.cache import generated_index as generated_index_module
from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.generated_index import generated_index
from lightning_streaming.cache.shard_cache import ShardCache
from lightning_streaming.errors import IntegrityError, StorageError
from lightning_streaming.formats.index import ShardInfo, dump_index
from lightning_streaming.formats.shard import open_shard
from lightning_streaming.storage import Location
from tests.cache.helpers import fetch_shard, let_a_minute_pass, raw_data, write_dataset
from tests.helpers import assert_error

ROWS = 40
PER_PART = 10


def parquet(first: int, rows: int = ROWS) -> bytes:
    """Rows that count from ``first``, in row groups of :data:`PER_PART`."""
    file = io.BytesIO()
    table = pa.table({"values": pa.array(range(first, first + rows), pa.int64()), "pad": ["x" * 40] * rows})
    pq.write_table(table, file, row_group_size=PER_PART, compression="none", use_dictionary=False)
    return file.getvalue()


def npy(first: int, rows: int = ROWS) -> bytes:
    """The same as an array, which is read in parts of as many rows."""
    file = io.BytesIO()
    np.save(file, np.arange(first, first + rows))
    return file.getvalue()


FORMATS: dict[str, Callable[..., bytes]] = {"parquet": parquet, "npy": npy}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning_streaming.formats.npy.PART_BYTES", 8 * PER_PART)
    monkeypatch.setenv("LIGHTNING_STREAMING_CACHE", str(tmp_path / "caches"))


class Place:
    """Where a file lies: a store with a log, or a directory."""

    def __init__(self, kind: str, request: pytest.FixtureRequest, root: Path) -> None:
        self.store: Any = None
        root.mkdir()
        if kind in ("directory", "in place"):
            self.put: Callable[[str, bytes], object] = lambda name, data: (root / name).write_bytes(data)
            self.remote, self.options = str(root), {}
        else:
            self.store = request.getfixturevalue({"http": "http_store", "hub": "hub"}.get(kind, f"{kind}_bucket"))
            self.put, self.remote, self.options = self.store.put, self.store.url, self.store.options
        self._local = None if kind == "in place" else root.with_name("cache")
        self.is_listed = kind != "http"

    def cache(self, shard_format: str | None, name: str | None = None) -> ShardCache:
        """The cache of a run that starts now; ``name`` is the file that is read of a place that is not listed."""
        remote = self.remote if self.is_listed or name is None else f"{self.remote}/{name}"
        config = CacheConfig(
            name="0", remote=remote, local=self._local, storage_options=self.options, format=shard_format,
            download_retry=0,
        )  # fmt: skip
        return ShardCache(config)


def values(cache: ShardCache, shards: Iterator[ShardInfo] | list[ShardInfo]) -> list[int]:
    """The values of some shards, each of which is brought to this node."""
    found = list[int]()
    for shard in shards:
        with cache.hold(shard) as directory:
            reader = open_shard(shard, directory)
            found += [int(reader[row]["values"]) for row in range(len(reader))]
            reader.close()
    return found


PLACES = [
    ("http", "parquet", ROWS),
    ("http", "npy", ROWS + 30),
    ("s3", "parquet", ROWS + 30),
    ("s3", "npy", ROWS),
    ("gcs", "parquet", ROWS),
    ("hub", "parquet", ROWS),
    ("hub", "npy", ROWS),
    ("directory", "npy", ROWS),
    ("in place", "parquet", ROWS),
    ("in place", "npy", ROWS),
]


@pytest.mark.rotate(3)
@pytest.mark.parametrize(("kind", "shard_format", "rows"), PLACES)
def test_a_replaced_file_ends_the_run_and_the_next_reads_the_new_one_alone(
    kind: str, shard_format: str, rows: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place, make, name = Place(kind, request, tmp_path / "data"), FORMATS[shard_format], f"a.{shard_format}"
    place.put(name, make(0))
    place.put(f"b.{shard_format}", make(500))
    cache = place.cache(shard_format, name)
    shards = list(cache.read_index().shards)
    assert values(cache, shards[:1]) == list(range(PER_PART))
    kept = None
    if kind == "s3":
        kept = values(cache, shards[4:5])

    place.put(name, make(1000, rows))
    assert (len(make(0)) == len(make(1000, rows))) == (rows == ROWS)
    with assert_error(IntegrityError, path=name, hint="start the run again"):
        values(cache, shards[1:2])

    again = place.cache(shard_format, name)
    shards = [shard for shard in again.read_index().shards if shard.stored[0].basename == name]
    assert values(again, shards) == list(range(1000, 1000 + rows))
    if kept is not None:  # of the file that was not replaced, parts that are here stay
        asked = len(place.store.requests())
        assert values(again, list(again.read_index().shards)[len(shards) : len(shards) + 1]) == kept
        assert len(place.store.requests()) == asked
    place.store and place.store.heal()


def test_an_index_beside_the_data_is_pinned_to_the_files_of_its_store(s3_bucket: Any, tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir()
    (place / "a.parquet").write_bytes(parquet(0))
    s3_bucket.put("a.parquet", parquet(0))
    s3_bucket.put("index.json", generated_index(Location(str(place)), "parquet"))
    settings: dict[str, Any] = {"storage_options": s3_bucket.options, "format": "parquet", "download_retry": 0}
    config = CacheConfig(name="0", remote=s3_bucket.url, local=tmp_path / "cache", **settings)
    cache = ShardCache(config)
    shards = list(cache.read_index().shards)
    assert values(cache, shards[:2]) == list(range(2 * PER_PART))
    s3_bucket.put("a.parquet", parquet(1000))
    with assert_error(IntegrityError, path="a.parquet", hint="lightning-streaming index"):
        values(cache, shards[2:3])
    let_a_minute_pass(tmp_path / "cache")
    again = ShardCache(config)
    assert values(again, list(again.read_index().shards)) == list(range(1000, 1000 + ROWS))


@pytest.mark.parametrize("lost", ["a failed request", "growth"])
def test_lost_versions_leave_the_cache_as_it_is(
    http_store: Any, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(**files: bytes) -> None:
        for name, data in files.items():
            (tmp_path / "data" / f"{name}.npy").write_bytes(data)
            http_store.put(f"{name}.npy", data)
        http_store.put("index.json", generated_index(Location(str(tmp_path / "data")), "npy"))
        if (tmp_path / "cache").exists():
            let_a_minute_pass(tmp_path / "cache")

    def fail(*_: Any) -> None:
        raise StorageError("no answer")

    (tmp_path / "data").mkdir()
    settings: dict[str, Any] = {"local": tmp_path / "cache", "format": "npy", "download_retry": 0}
    config = CacheConfig(name="0", remote=http_store.url, **settings)
    publish(a=npy(0), b=npy(500))
    expected = values(first := ShardCache(config), list(first.read_index().shards))
    if lost == "growth":
        monkeypatch.setattr(generated_index_module, "_MAX_REQUESTS", 2)
        publish(c=npy(700))
    else:
        publish()
        monkeypatch.setattr(Location, "listed_below", fail)
    asked = len(http_store.requests())
    again = ShardCache(config)
    shards = list(again.read_index().shards)
    assert values(again, shards[: len(expected) // PER_PART]) == expected
    assert [name for name in http_store.requests()[asked:] if name.endswith(".npy")] == []
    versioned = {shard.stored[0].basename for shard in shards if shard.stored[0].version}
    assert versioned == {"a.npy", "b.npy"}
    monkeypatch.undo()
    publish(b=npy(1500))  # a replaced file is noticed all the same
    latest = ShardCache(config)
    shards = [one for one in latest.read_index().shards if one.stored[0].basename == "b.npy"]
    assert values(latest, shards) == list(range(1500, 1500 + ROWS))


@pytest.mark.parametrize("depth", [1, 20])
def test_the_directories_of_the_named_files_are_listed_alone(s3_bucket: Any, tmp_path: Path, depth: int) -> None:
    root = tmp_path / "data"
    names = [f"d{number}/{one}.npy" for number in (0, 1) for one in range(4)]
    if depth > 1:
        names = [f"deep/d{number:02}/x.npy" for number in range(depth)]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(npy(0))
        s3_bucket.put(name, npy(0))
    s3_bucket.put("other/y.npy", npy(0))
    s3_bucket.put("index.json", generated_index(Location(str(root)), "npy"))
    settings: dict[str, Any] = {"storage_options": s3_bucket.options, "format": "npy", "download_retry": 0}
    index = ShardCache(CacheConfig(name="0", remote=s3_bucket.url, local=tmp_path / "cache", **settings)).read_index()
    assert all(file.version for shard in index.shards for file in shard.stored)
    location = Location(s3_bucket.url, s3_bucket.options)
    assert generated_index_module._list_directories_of(location, names).keys() == set(names)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("shard_format", FORMATS)
@pytest.mark.parametrize("kind", ["http", "s3", "directory", "in place"])
def test_without_a_recorded_version_files_are_pinned_to_the_first_answer(
    kind: str, shard_format: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place, make, name = Place(kind, request, tmp_path / "data"), FORMATS[shard_format], f"a.{shard_format}"
    (indexed := tmp_path / "indexed").mkdir()
    (indexed / name).write_bytes(make(0))
    place.put(name, make(0))
    place.put("index.json", generated_index(Location(str(indexed)), shard_format))
    cache = place.cache(None)
    shards = list(cache.read_index().shards)
    assert not any(file.version for shard in shards for file in shard.stored)
    assert values(cache, shards[:2]) == list(range(2 * PER_PART))
    place.put(name, make(1000))
    with assert_error(IntegrityError, path=name, hint="start the run again"):
        values(cache, shards[2:3])
    assert values(place.cache(None), shards[3:4]) == list(range(1000 + 3 * PER_PART, 1000 + 4 * PER_PART))


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_what_is_kept_of_a_replaced_file_is_not_used(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Selections, lengths and indexes of ids are kept under the version of the data."""
    place = Place(kind, request, tmp_path / "data")

    def version() -> str:
        cache = place.cache("npy", "a.npy")
        return cache.data_version(cache.read_index())

    place.put("a.npy", npy(0))
    first = version()
    assert version() == first
    place.put("a.npy", npy(500))
    let_a_minute_pass(tmp_path / "cache")
    assert version() != first


def test_a_range_takes_no_further_request(s3_bucket: Any, tmp_path: Path) -> None:
    s3_bucket.put("a.parquet", parquet(0))
    settings: dict[str, Any] = {"storage_options": s3_bucket.options, "format": "parquet"}
    cache = ShardCache(CacheConfig(name="0", remote=s3_bucket.url, local=tmp_path / "cache", **settings))
    shards = list(cache.read_index().shards)
    values(cache, shards[:1])
    before = len(s3_bucket.log())
    values(cache, shards[1:3])
    assert [(one.method, one.name) for one in s3_bucket.log()[before:]] == 2 * [("GET", "a.parquet")]


def test_versions_hold_where_they_were_listed_alone(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "a.npy").write_bytes(npy(0))
    cache = ShardCache(CacheConfig(name="0", remote=str(root), local=tmp_path / "cache", format="npy"))
    index = cache.read_index()
    expected = values(cache, list(index.shards))
    assert all(file.version for shard in index.shards for file in shard.stored)
    assert b"mtime" not in dump_index(index.shards)
    for shard_format in (None, "npy"):  # a cache is a dataset of its own, with other files
        copy = ShardCache(CacheConfig(name="0", local=tmp_path / "cache", format=shard_format))
        assert values(copy, list(copy.read_index().shards)) == expected


def test_data_that_has_grown_is_not_the_same_where_a_file_was_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy(0))
    config = CacheConfig(name="0", remote=str(tmp_path), format="npy")
    before = ShardCache(config).read_index()
    (tmp_path / "b.npy").write_bytes(npy(500))
    grown = ShardCache(config).read_index()
    assert grown.begins_like(before)
    (tmp_path / "a.npy").write_bytes(npy(1000))
    replaced = ShardCache(config).read_index()
    assert replaced.data_digest == grown.data_digest
    assert not replaced.begins_like(before)


def replace_file(path: Path, data: bytes, how: str) -> None:
    """Replace a file: its bytes where they are, or the file itself by one of the same modification time."""
    before = path.stat()
    if how == "written over":
        with path.open("r+b") as file:
            file.write(data)
    else:
        (new := path.with_name("new")).write_bytes(data)
        os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
        new.replace(path)
        assert path.stat().st_mtime_ns == before.st_mtime_ns


REPLACED = pytest.mark.parametrize("how", ["written over", "renamed"])


@REPLACED
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_shard_in_place_that_is_replaced_ends_the_run_in_every_process(
    tmp_path: Path, compression: str | None, how: str
) -> None:
    root = tmp_path / "data"
    write_dataset(root, hashes=(), compression=compression)
    write_dataset(tmp_path / "other", hashes=(), seed=1, compression=compression)
    cache = ShardCache(CacheConfig(name="0", local=root))
    first, second = cache.read_index().shards
    worker = pickle.loads(pickle.dumps(cache))
    assert (fetch_shard(cache, first) / first.raw_data.basename).read_bytes() == raw_data(0)
    for shard in (first, second):
        name = shard.stored[0].basename
        replace_file(root / name, (tmp_path / "other" / name).read_bytes(), how)
        for process in (cache, worker):
            with assert_error(IntegrityError, path=root / name, stream="0", hint="start the run again"):
                fetch_shard(process, shard)
    again = ShardCache(CacheConfig(name="0", local=root))
    again.read_index()
    assert (fetch_shard(again, first) / first.raw_data.basename).read_bytes() == raw_data(0, seed=1)


@REPLACED
def test_a_shard_that_is_replaced_while_it_is_held_is_noticed_at_the_end(tmp_path: Path, how: str) -> None:
    write_dataset(tmp_path)
    cache = ShardCache(CacheConfig(name="0", local=tmp_path))
    (shard, _) = cache.read_index().shards
    with assert_error(IntegrityError, path=shard.raw_data.basename), cache.hold(shard):
        replace_file(tmp_path / shard.raw_data.basename, raw_data(0, seed=1), how)


def test_a_cache_that_is_read_in_place_may_be_in_use(tmp_path: Path) -> None:
    """Those who use it set the access times of its files."""
    write_dataset(tmp_path / "remote")
    owner = ShardCache(CacheConfig(name="0", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    (shard, _) = owner.read_index().shards
    fetch_shard(owner, shard)
    cache = ShardCache(CacheConfig(name="0", local=tmp_path / "cache"))
    cache.read_index()
    for _ in range(2):
        before = (tmp_path / "cache" / shard.raw_data.basename).stat().st_ctime_ns
        while (tmp_path / "cache" / shard.raw_data.basename).stat().st_ctime_ns == before:
            fetch_shard(owner, shard)
        fetch_shard(cache, shard)


@REPLACED
def test_row_groups_in_the_cache_are_not_mixed_with_those_of_another_file(tmp_path: Path, how: str) -> None:
    place = tmp_path / "data"
    place.mkdir()
    (place / "a.parquet").write_bytes(parquet(0))

    def cache() -> ShardCache:
        return ShardCache(CacheConfig(name="0", remote=str(place), format="parquet"))

    first = cache()
    assert values(first, list(first.read_index().shards)[:2]) == list(range(2 * PER_PART))
    replace_file(place / "a.parquet", parquet(1000), how)
    again = cache()
    assert values(again, list(again.read_index().shards)) == list(range(1000, 1000 + ROWS))


@pytest.mark.parametrize("kind", ["http", "s3", "gcs", "directory"])
def test_a_shard_without_hashes_that_is_fetched_again_is_of_the_same_version(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place = Place(kind, request, tmp_path / "data")
    write_dataset(tmp_path / "written", hashes=())
    for path in (tmp_path / "written").iterdir():
        place.put(path.name, path.read_bytes())
    cache = place.cache(None)
    first, second = cache.read_index().shards
    for _ in range(2):
        assert (fetch_shard(cache, first) / first.raw_data.basename).read_bytes() == raw_data(0)
        assert cache.evict(first)
    for shard in (first, second):
        place.put(shard.raw_data.basename, bytes(shard.raw_data.bytes))
    with assert_error(IntegrityError, path=first.raw_data.basename, hint="start the run again"):
        fetch_shard(cache, first)
    assert (fetch_shard(cache, second) / second.raw_data.basename).read_bytes() == bytes(second.raw_data.bytes)
    place.store and place.store.heal()


class WithoutVersions(SimpleHTTPRequestHandler):
    """Serves files without a word of their versions."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified":
            super().send_header(keyword, value)

    def log_message(self, *args: object) -> None:
        pass


def test_a_server_without_versions_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_dataset(tmp_path / "plain", hashes=())
    write_dataset(tmp_path / "hashed")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(WithoutVersions, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        for name, warnings in (("hashed", 0), ("plain", 1)):
            cache = ShardCache(CacheConfig(name="0", remote=f"http://{host}/{name}", local=tmp_path / f"{name}-cache"))
            for shard in cache.read_index().shards:
                fetch_shard(cache, shard)
            assert sum(f"{host} reports no versions" in record.getMessage() for record in caplog.records) == warnings
        server.shutdown()
