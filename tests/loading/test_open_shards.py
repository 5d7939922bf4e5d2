from __future__ import annotations

import multiprocessing
import os
import pickle
from pathlib import Path

import pytest

from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard import open_shard
from lightning_streaming.loading import open_shards
from lightning_streaming.loading.ahead import ShardsAhead
from lightning_streaming.loading.open_shards import OpenShards, raw_bytes
from tests.formats.split_datasets import put_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


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
