"""Shards and samples of several streams in one numbering.

Datasets under a cache limit, and what they say of single shards.

An epoch on a disk that holds a part of it, without any limit: a full disk is like a limit that was reached.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.eviction import FINISHED_BEFORE, least_limit
from lightning_streaming.cache.quota import WaitQueue, largest_shard_bytes
from lightning_streaming.dataset import open_shards
from lightning_streaming.dataset.open_shards import OpenShards, ShardsAhead, raw_bytes
from lightning_streaming.dataset.samples import SampleSource
from lightning_streaming.errors import ConfigError, DownloadError, SampleIndexError
from lightning_streaming.formats.index import INDEX_BASENAME, ShardInfo, parse_index
from lightning_streaming.formats.mds import map_file
from lightning_streaming.formats.shard import open_shard
from lightning_streaming.reading.dataset import dataset_world, run_state_of
from lightning_streaming.selection import catalog as catalog_module
from lightning_streaming.selection.catalog import Catalog, SamplePlace
from tests.cache.helpers import disk_of
from tests.formats.small_shards import put_dataset
from tests.helpers import ids, make_dataset, make_loader, write_dataset, write_shards
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


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
    monkeypatch.setattr(catalog_module, "_SHARDS_AT_ONCE", 2)
    catalog = _catalog(tmp_path, a=[1, 1, 1, 1, 1], b=[1, 1])
    names = {"shard.00004.mds", "shard.00001.mds", "another"}
    assert list(catalog.with_files(0, names)) == [(1, catalog.shards[1]), (4, catalog.shards[4])]
    assert list(catalog.with_files(1, names)) == [(6, catalog.shards[6])]
    assert list(catalog.with_files(1, set())) == []


@pytest.fixture
def infos(tmp_path: Path) -> list[ShardInfo]:
    return list(put_dataset(tmp_path, "csv", (2, 2, 2, 2)).shards)


def _open(opened: OpenShards, infos: list[ShardInfo], directory: Path, *shards: int) -> None:
    for shard in shards:
        opened.make_room(infos[shard])
        opened.add(shard, infos[shard], open_shard(infos[shard], directory))


def test_what_was_used_longest_ago_is_closed_for_more_bytes_or_files(
    infos: list[ShardInfo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    opened = OpenShards(closed.append)
    opened.most_bytes = 2 * max(map(raw_bytes, infos))
    _open(opened, infos, tmp_path, 0, 1)
    opened.readers.move_to_end(0)
    _open(opened, infos, tmp_path, 2)
    assert closed == [1]
    opened.most_bytes = None
    monkeypatch.setattr(open_shards, "_MOST_FILES", 4)  # of two shards
    _open(opened, infos, tmp_path, 3)
    assert (closed, list(opened.readers)) == ([1, 0], [2, 3])
    opened.close_all()
    assert closed == [1, 0, 2, 3]


def test_one_shard_may_always_be_open(infos: list[ShardInfo], tmp_path: Path) -> None:
    opened = OpenShards(lambda shard: None, most_bytes=1)
    _open(opened, infos, tmp_path, 0, 1)
    assert list(opened.readers) == [1]


def test_a_forked_child_lets_go_of_what_its_parent_has_open(infos: list[ShardInfo], tmp_path: Path) -> None:
    closed: list[int] = []
    opened = OpenShards(closed.append)
    _open(opened, infos, tmp_path, 0)
    child = multiprocessing.get_context("fork").Process(target=_forget_inherited, args=(opened, closed, tmp_path))
    child.start()
    child.join()
    assert child.exitcode == 0
    opened.forget_inherited()
    assert list(opened.readers) == [0]
    assert _mapped(tmp_path)


def _forget_inherited(opened: OpenShards, closed: list[int], directory: Path) -> None:
    opened.forget_inherited()
    assert not opened.readers
    assert not closed
    assert not _mapped(directory)


def test_a_worker_that_never_reads_holds_nothing_of_its_parent(infos: list[ShardInfo], tmp_path: Path) -> None:
    opened = OpenShards(lambda shard: None)
    _open(opened, infos, tmp_path, 0)
    worker = multiprocessing.get_context("fork").Process(target=_exit_with_mapped, args=(tmp_path,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert list(opened.readers) == [0]


def _exit_with_mapped(directory: Path) -> None:
    os._exit(_mapped(directory))


def _mapped(directory: Path) -> bool:
    return str(directory) in Path("/proc/self/maps").read_text()


def test_a_copy_has_nothing_open(infos: list[ShardInfo], tmp_path: Path) -> None:
    opened = OpenShards(print, most_bytes=10**6)
    _open(opened, infos, tmp_path, 0)
    copy = pickle.loads(pickle.dumps(opened))
    assert (len(copy.readers), copy.most_bytes) == (0, 10**6)


class TestShardsAhead:
    def test_what_was_fetched_first_is_the_oldest_to_spare(self) -> None:
        ahead = ShardsAhead()
        assert ahead.spare_since(10) is None
        ahead.begin(0, 10)
        first = ahead.spare_since(10)
        ahead.begin(1, 10)
        assert ahead.spare_since(10) == first
        ahead.end(0)
        later = ahead.spare_since(10)
        assert first is not None
        assert later is not None
        assert later > first
        ahead.clear()
        assert ahead.spare_since(10) is None

    def test_beyond_its_share_only_finished_shards_may_go(self) -> None:
        ahead = ShardsAhead()
        ahead.most_bytes = 15
        ahead.begin(0, 10)
        spare = pickle.loads(pickle.dumps(ahead)).spare_since(10)
        assert spare is None  # nothing was fetched in the copy's process
        since = ahead.spare_since(10)
        assert since is not None
        assert since < 978_307_200 * 10**9  # long before any use


def least_of(root: Path) -> int:
    text = (root / INDEX_BASENAME).read_bytes()
    return least_limit(len(text), largest_shard_bytes(parse_index(text, "").shards))


def here(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("shard.*"))


def test_a_limit_that_cannot_work_is_refused_with_the_one_that_would(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    least = least_of(root)
    with pytest.raises(ConfigError, match=rf"cache_limit is {least - 1}b; at least {least}b is needed"):
        len(make_dataset(root, local=str(tmp_path / "cache"), cache_limit=least - 1))
    assert len(make_dataset(root, local=str(tmp_path / "cache"), cache_limit=least)) == 29


@pytest.mark.rotate(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("keep_zip", [False, True])
def test_the_smallest_limit_gives_the_same_samples(
    tmp_path: Path, workers: int, compression: str | None, keep_zip: bool
) -> None:
    root = write_dataset(tmp_path / "data", 60, compression=compression)
    cache, limit = tmp_path / "cache", least_of(root) + (0 if workers < 2 else 2 * 240)
    settings: dict[str, Any] = {"local": str(cache), "workers": workers, "keep_zip": keep_zip}
    limited = make_loader(root, cache_limit=limit, **settings)
    expected = make_loader(root, workers=workers)
    for _ in range(2):
        assert ids(limited) == ids(expected)
        assert limited.dataset.cache_usage <= limit
    limited.close()


def test_what_a_run_without_a_limit_left_is_removed_when_a_pass_with_one_begins(tmp_path: Path) -> None:
    root, local = write_dataset(tmp_path / "data", 2000, size_limit=4000), str(tmp_path / "cache")
    without = make_dataset(root, local=local)
    for shard in range(without.num_shards):
        without.prepare_shard(shard)
    without.close()
    used = without.cache_usage
    limited = make_dataset(root, local=local, cache_limit=used // 2)
    assert limited.size == 2000
    assert limited.cache_usage == used  # a query removes nothing
    assert next(iter(limited))["id"] in range(2000)
    assert 0 < limited.cache_usage <= used // 2
    assert [limited[sample]["id"] for sample in (0, 1999)] == [0, 1999]


def test_what_the_main_process_has_read_is_not_in_the_way_of_its_workers(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", 60)
    cache, limit = tmp_path / "cache", least_of(root) + 2 * 240
    loader = make_loader(root, cache_limit=limit, local=str(cache), workers=2)
    assert [loader.dataset[index]["id"] for index in (0, 5, 59)] == [0, 5, 59]
    assert mapped(cache) == 0
    assert sorted(one for batch in ids(loader) for one in batch) == list(range(60))
    assert loader.dataset.cache_usage <= limit
    loader.close()


def test_shards_read_by_number_stay_open_until_a_pass_begins_if_there_is_room(tmp_path: Path) -> None:
    root, cache = write_dataset(tmp_path / "data"), tmp_path / "cache"
    dataset = make_dataset(root, local=str(cache), cache_limit=10**6)
    assert [dataset[index]["id"] for index in (0, 5, 1)] == [0, 5, 1]
    assert mapped(cache) == 2
    run_state_of(dataset).begin(dataset_world(dataset), 4)
    assert mapped(cache) == 0


def test_shards_may_be_closed_between_the_samples_of_a_pass(tmp_path: Path) -> None:
    root, cache = write_dataset(tmp_path / "data"), tmp_path / "cache"
    dataset = make_dataset(root, local=str(cache), cache_limit=least_of(root))
    found = []
    for sample in dataset:
        found.append(sample["id"])
        assert dataset[28 - len(found) // 2]["id"] == 28 - len(found) // 2
        dataset.evict_coldest_shard()
    assert found == [sample["id"] for sample in make_dataset(root)]


def test_a_pass_marks_what_it_needs_no_more(tmp_path: Path) -> None:
    root, cache = write_dataset(tmp_path / "data", 600), tmp_path / "cache"
    dataset = make_dataset(root, local=str(cache), cache_limit=10**6, shuffle=False)
    assert [dataset[index]["id"] for index in range(600)] == list(range(600))
    assert not any(path.stat().st_atime_ns < FINISHED_BEFORE for path in cache.glob("shard.*"))
    assert len(list(dataset)) == 600
    finished = [path.stat().st_atime_ns < FINISHED_BEFORE for path in sorted(cache.glob("shard.*"))]
    assert not any(finished[-2:])  # the last two batches end nothing
    # Of a shard this small, whoever fetches ahead may hold the lock for longer than it takes to read it.
    assert finished[:-3].count(True) >= 0.9 * len(finished)


def test_what_was_opened_or_let_go_counts_no_more_as_fetched_ahead(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    config = CacheConfig(name="0", remote=str(root), local=str(tmp_path / "cache"))
    source = SampleSource({"0": ShardCache(config)}, allow_unsafe_types=False, cache_limit=10**6)
    source.begin_pass(1)
    for shard in (0, 1):
        assert source.fetch_ahead(shard)
    assert source._ahead.spare_since(1) is not None
    source.open(0)
    assert source.fetch_ahead(0)
    source.release(1)
    assert source._ahead.spare_since(1) is None
    source.end_pass()


def mapped(directory: Path) -> int:
    """How many files of a directory this process has mapped."""
    return Path("/proc/self/maps").read_text().count(f"{directory}/shard")


def test_a_dataset_read_in_place_is_left_alone_whatever_the_limit(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    before = {path.name: path.stat().st_mtime_ns for path in root.iterdir()}
    dataset = make_dataset(root, cache_limit=1)
    assert len(list(dataset)) == 29
    assert not dataset.evict_shard(0)
    with pytest.raises(ConfigError, match="no shard can be removed"):
        dataset.evict_coldest_shard()
    assert {path.name: path.stat().st_mtime_ns for path in root.iterdir()} == before
    assert dataset.cache_usage == 0


def test_shards_are_fetched_and_evicted_by_number(tmp_path: Path) -> None:
    root, cache = write_dataset(tmp_path / "data"), tmp_path / "cache"
    dataset = make_dataset(root, local=str(cache))
    assert dataset.prepare_shard(2)
    assert dataset.prepare_shard(1, blocking=False)
    assert here(cache) == ["shard.00001.mds", "shard.00002.mds"]
    assert dataset.evict_shard(1)
    assert not dataset.evict_shard(1)
    assert dataset.get_item(3)["id"] == 3
    view = map_file(cache / "shard.00002.mds", (cache / "shard.00002.mds").stat().st_size)
    assert not dataset.evict_shard(2)
    assert dataset.evict_coldest_shard() == 0
    view.release()
    assert dataset.evict_coldest_shard() == 2
    assert here(cache) == []
    assert dataset.cache_usage == (cache / INDEX_BASENAME).stat().st_size


@pytest.mark.parametrize("kind", ["mds", "csv"])
def test_on_demand_reads_a_sample_by_its_bytes_alone(http_store: HttpStore, tmp_path: Path, kind: str) -> None:
    if kind == "mds":
        write_dataset(http_store.root)
    else:
        put_dataset(http_store.root, kind, (5, 5))
    cache = tmp_path / "cache"
    whole = StreamingDataset(remote=str(http_store.root))
    dataset = StreamingDataset(remote=http_store.url, local=str(cache), storage={"on_demand": True}, download_retry=0)
    assert [dataset[index] for index in (0, 7, 3, -1)] == [whole[index] for index in (0, 7, 3, -1)]
    assert here(cache) == []
    dataset.prepare_shard(0)
    http_store.fail(re.escape("shard.00000"), "status")
    assert dataset[4] == whole[4]  # of the shard that is here
    http_store.fail("shard.00001", "status")
    with pytest.raises(DownloadError, match=r"stream '0': .*shard\.00001"):
        dataset[9]


def test_on_demand_fetches_compressed_shards_whole(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, compression="zstd")
    dataset = StreamingDataset(remote=http_store.url, local=str(tmp_path / "cache"), storage={"on_demand": True})
    assert dataset[7]["id"] == 7
    assert here(tmp_path / "cache") == ["shard.00001.mds"]


def _read_epoch(root: Path, cache: Path, limit: int, seed: int, done: Any) -> None:
    dataset = make_dataset(root, local=str(cache), cache_limit=limit, shuffle_seed=seed)
    done.put(sorted(sample["id"] for sample in dataset) == list(range(40)))


@pytest.mark.nightly
def test_who_waited_in_vain_for_room_spares_all_others_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readers that rest with a shard open fill the limit; three others, each in an order of its own, go on."""
    monkeypatch.setattr("lightning_streaming.cache.quota._WAIT_SECONDS", 0.5)
    root, cache = write_dataset(tmp_path / "data", 40), tmp_path / "cache"
    limit, context = least_of(root), multiprocessing.get_context("fork")
    infos = parse_index((root / INDEX_BASENAME).read_bytes(), "").shards
    resting = ShardCache(CacheConfig(name="0", remote=str(root), local=str(cache)))
    resting.read_index()
    held = []
    for info in infos[:2]:
        with resting.hold(info) as directory:
            held.append(map_file(directory / info.raw_data.basename, info.raw_data.bytes))
    enter, waits, seen = WaitQueue.__enter__, context.Value("i", 0), [0]

    def counted(queue: WaitQueue) -> WaitQueue:
        with waits.get_lock():
            waits.value += 1
        return enter(queue)

    monkeypatch.setattr(WaitQueue, "__enter__", counted)
    for _ in range(3):  # as workers of one epoch after the other
        done = context.Queue()
        readers = [context.Process(target=_read_epoch, args=(root, cache, limit, seed, done)) for seed in range(3)]
        for reader in readers:
            reader.start()
        assert all(done.get(timeout=60) for _ in readers)
        for reader in readers:
            reader.join()
        seen.append(waits.value)
    assert seen[1] > 0, "somebody waited in vain"
    assert seen[2:] == [seen[1]] * 2


SAMPLES = 240


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "disk", 200) as path:
        yield path


def data_of(index: int) -> bytes:
    return index.to_bytes(2, "big") * 1500


@pytest.mark.rotate(1)
@pytest.mark.parametrize("shuffle", [True, False])
def test_workers_at_rest_leave_room_to_the_one_that_is_waited_for(
    disk: Path, tmp_path: Path, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of 20 kB, of which ten fit on the disk; shuffled, the two workers together have more of them begun."""
    monkeypatch.setattr("lightning_streaming.cache.quota._WAIT_SECONDS", 5.0)
    with MDSWriter(out=str(tmp_path / "remote"), columns={"id": "int", "data": "bytes"}, size_limit=20_000) as writer:
        for index in range(SAMPLES):
            writer.write({"id": index, "data": data_of(index)})
    dataset = StreamingDataset(
        remote=str(tmp_path / "remote"),
        local=str(disk / "cache"),
        batch_size=4,
        shuffle=shuffle,
        shuffle_block_size=64,
        predownload=8,
    )
    loader = StreamingDataLoader(dataset, num_workers=2)
    read: dict[int, bytes] = {}
    for batch in loader:
        read.update(zip(batch["id"].tolist(), batch["data"], strict=True))
    loader.close()
    assert read == {index: data_of(index) for index in range(SAMPLES)}
