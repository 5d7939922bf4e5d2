"""A limit on what a dataset's directories hold.

Who goes first, and how many.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.config import MANIFEST_BASENAME, QUEUE_BASENAME
from lightning_streaming.cache.eviction import FINISHED_BEFORE
from lightning_streaming.cache.file_states import claim
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.quota import (
    CacheQuota,
    WaitQueue,
    largest_shard_bytes,
)
from lightning_streaming.cache.records import (
    read_usage,
    shard_files,
    write_number,
)
from lightning_streaming.cache.selection_files import map_bits, selection_path
from lightning_streaming.cache.shard_cache import FetchStatus
from lightning_streaming.cache.shared_files import pauses
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, ShardInfo
from lightning_streaming.formats.mds import map_file
from lightning_streaming.formats.shard import narrowed
from tests.cache.helpers import cached, fetch_shard, parts, raw_data, write_dataset
from tests.formats.small_shards import put_dataset
from tests.helpers import assert_error

SHARD = 3000


class Cached:
    """A dataset of some shards, its cache, and room for ``room`` shards beside the index."""

    def __init__(self, tmp_path: Path, name: str = "code", *, shards: int = 6, room: int = 3, **settings: Any) -> None:
        write_dataset(tmp_path / f"{name}-remote", shards=shards, compression=settings.pop("compression", None))
        self.root = tmp_path / name
        self.cache = ShardCache(
            CacheConfig(name=name, remote=str(tmp_path / f"{name}-remote"), local=self.root, **settings)
        )
        self.shards = list(self.cache.read_index().shards)
        self.index_bytes = (self.root / INDEX_BASENAME).stat().st_size
        self.room = CacheQuota([self.cache.directory], self.index_bytes + room * SHARD)

    def ensure(self, *shards: int, room: CacheQuota | None = None) -> None:
        for shard in shards:
            fetch_shard(self.cache, self.shards[shard], room=room or self.room)

    def ahead(self, shard: int, spare_since: int | None) -> FetchStatus | None:
        return self.cache.fetch_ahead(self.shards[shard], self.room, spare_since)

    def path(self, shard: int) -> Path:
        return self.root / f"shard.{shard:05}.mds"

    def here(self) -> list[int]:
        # Without reading them, which some filesystems take for a use.
        return sorted(int(path.name.split(".")[1]) for path in self.root.glob("*.mds"))

    def map(self, shard: int) -> memoryview:
        return map_file(self.path(shard), SHARD)


@pytest.fixture
def six(tmp_path: Path) -> Cached:
    return Cached(tmp_path)


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_streaming.cache.quota._WAIT_SECONDS", 0.05)


def test_what_was_used_longest_ago_goes_first(six: Cached) -> None:
    six.ensure(0, 1, 2, 0, 3)
    assert six.here() == [0, 2, 3]
    six.ensure(4)
    assert six.here() == [0, 3, 4]
    assert read_usage(six.root) == 3 * SHARD
    assert six.room.usage() == 3 * SHARD + six.index_bytes == six.room.limit


def test_selections_take_room_and_no_shard_of_a_reader_makes_them_go(six: Cached) -> None:
    kept = selection_path(six.root, "0" * 32)
    six.ensure(0)
    kept.parent.mkdir()
    np.save(kept, np.zeros(SHARD, np.uint8))
    mapped = map_bits(kept)
    assert mapped is not None
    six.ensure(1, 2, 3)
    assert six.here() == [3]  # the bits are larger than a shard
    assert kept.exists()
    assert six.room.fixed_bytes() == six.index_bytes + kept.stat().st_size
    part = kept.with_suffix(".parts") / "0-3.npy"
    part.parent.mkdir()
    part.write_bytes(bytes(SHARD))
    six.room.forget_fixed_bytes()
    assert six.room.fixed_bytes() == six.index_bytes + kept.stat().st_size
    assert mapped.shape == (SHARD,)


def test_the_log_tells_why_a_shard_is_downloaded_twice(six: Cached, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "lightning_streaming.cache"):
        six.ensure(0, 1, 2, 3, 0)
    told = [message for message in caplog.messages if "shard.00000.mds" in message]
    assert [message.split(":")[0] for message in told] == ["downloaded", "evicted", "downloaded"]
    assert told[0].endswith(f"shard.00000.mds ({SHARD} bytes)")


def test_what_is_finished_goes_before_all_else(six: Cached) -> None:
    six.ensure(0, 1, 2)
    six.cache.record_use(six.shards[1], finished=True)
    six.ensure(3)
    assert six.here() == [0, 2, 3]


def test_a_mapped_shard_stays_and_is_not_finished_for_others(six: Cached) -> None:
    six.ensure(0, 1, 2)
    view = six.map(0)
    six.cache.record_use(six.shards[0], finished=True)
    assert six.path(0).stat().st_atime_ns >= FINISHED_BEFORE
    six.ensure(3, 4)
    assert six.here() == [0, 3, 4]
    view.release()
    six.ensure(5, 1)
    assert 0 not in six.here()


def test_a_held_shard_stays(six: Cached) -> None:
    with six.cache.hold(six.shards[0], six.room):
        six.ensure(1, 2, 3, 4)
        assert 0 in six.here()
    six.ensure(5, 1)
    assert 0 not in six.here()


def test_fetching_ahead_takes_no_room_from_what_it_is_told_to_spare(six: Cached) -> None:
    six.ensure(0, 1, 2)
    since = six.path(1).stat().st_atime_ns
    assert six.ahead(3, since) is None
    assert six.here() == [1, 2, 3]
    assert six.ahead(4, since) is FetchStatus.NO_ROOM
    assert six.here() == [1, 2, 3]
    assert not parts(six.root)
    assert read_usage(six.root) == 3 * SHARD


def test_who_fetches_ahead_stands_back_while_a_reader_waits(six: Cached) -> None:
    with WaitQueue(six.root) as turn:
        assert not six.room.has_waiting_reader()
        assert turn.wait(0)
        assert six.room.has_waiting_reader()
        assert six.ahead(0, None) is FetchStatus.NO_ROOM
    assert six.ahead(0, None) is None


def test_directories_of_several_streams_share_one_limit(tmp_path: Path) -> None:
    one, other = Cached(tmp_path, "one"), Cached(tmp_path, "other")
    room = CacheQuota([other.cache.directory, one.cache.directory], one.index_bytes + other.index_bytes + 3 * SHARD)
    one.ensure(0, 1, room=room)
    other.ensure(0, 1, room=room)
    assert (one.here(), other.here()) == ([1], [0, 1])
    assert room.usage() == room.limit


def test_jobs_with_and_without_a_limit_count_together(six: Cached) -> None:
    six.ensure(0, 1, 2, 3, 4, room=CacheQuota([six.cache.directory]))
    assert len(six.here()) == 5
    six.ensure(5)
    assert six.here() == [3, 4, 5]


def test_what_others_put_there_is_neither_counted_nor_removed(six: Cached) -> None:
    (six.root / "notes.txt").write_bytes(bytes(9 * SHARD))
    (six.root / "folder").mkdir()
    (six.root / "folder" / "shard.00009.mds").write_bytes(bytes(SHARD))
    six.path(0).write_bytes(raw_data(0))
    six.ensure(0, 1, 2, 3, 4, 5)
    assert six.here() == [0, 3, 4, 5]
    assert six.path(0).read_bytes() == raw_data(0)
    assert (six.root / "notes.txt").stat().st_size == 9 * SHARD
    assert (six.root / "folder" / "shard.00009.mds").exists()


@pytest.mark.parametrize("damage", ["", "nonsense", "99999999"])
def test_a_count_that_is_lost_or_too_big_is_mended(six: Cached, damage: str) -> None:
    six.ensure(0, 1)
    (six.root / ".usage").write_text(damage)
    six.ensure(2)
    assert six.here() == [0, 1, 2]
    assert read_usage(six.root) == 3 * SHARD


def test_the_part_of_a_dead_writer_makes_room(six: Cached) -> None:
    part = claim(six.root, "shard.00005.mds")
    assert part is not None
    six.ensure(0)  # what was left before is swept only once
    assert six.room.reserve(six.cache.directory, [(part, 2 * SHARD)], spare_since=None)
    assert read_usage(six.root) == 3 * SHARD
    part.close()  # as the kernel does when its process dies
    six.ensure(1, 2)
    assert six.here() == [0, 1, 2]
    assert not parts(six.root)


def test_the_part_of_a_living_writer_takes_room(six: Cached) -> None:
    part = claim(six.root, "shard.00005.mds")
    assert part is not None
    assert six.room.reserve(six.cache.directory, [(part, SHARD)])
    six.ensure(0, 1, 2)
    assert six.here() == [1, 2]
    assert read_usage(six.root) == 3 * SHARD
    six.cache.directory.drop([part])
    assert read_usage(six.root) == 2 * SHARD


def test_dead_parts_are_swept_when_a_process_first_uses_the_directory(six: Cached) -> None:
    six.ensure(0)
    part = claim(six.root, "shard.00005.mds")
    assert part is not None
    part.resize(SHARD)
    part.close()
    six.ensure(1)
    assert len(parts(six.root)) == 1
    other = ShardCache(CacheConfig(name="other", remote=str(six.root.parent / "code-remote"), local=six.root))
    fetch_shard(other, six.shards[0])
    assert not parts(six.root)


def test_compressed_files_that_are_kept_count_and_make_raw_ones_again(tmp_path: Path) -> None:
    kept = Cached(tmp_path, compression="zstd", keep_zip=True, room=6)
    kept.ensure(0, 1)
    assert len(list(kept.root.glob("*.zstd"))) == 2
    assert kept.room.usage() == sum(path.stat().st_size for path in kept.root.iterdir() if path.name[0] != ".")
    (tmp_path / "code-remote" / "shard.00000.mds.zstd").unlink()
    os.utime(kept.path(0), ns=(1, kept.path(0).stat().st_mtime_ns))
    kept.ensure(2)  # removes the raw file only
    assert not kept.path(0).exists()
    kept.ensure(0)
    assert kept.path(0).read_bytes() == raw_data(0)


def test_a_reader_lets_go_of_its_own_shards_before_it_waits(six: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    six.ensure(0, 1, 2)
    views = [six.map(shard) for shard in (0, 1, 2)]
    for shard in six.shards[:3]:  # some filesystems take a map for a use
        six.cache.record_use(shard, finished=False)

    def release() -> None:
        while views:
            views.pop().release()

    with six.cache.hold(six.shards[3], six.room, release):
        assert six.here() == [1, 2, 3]
    assert not views


def test_a_reader_waits_until_others_let_go(six: Cached) -> None:
    six.ensure(0, 1, 2)
    views = [six.map(shard) for shard in (0, 1, 2)]
    reader = threading.Thread(target=six.ensure, args=(3,))
    reader.start()
    while not six.room.has_waiting_reader():
        reader.join(0.005)
    assert six.here() == [0, 1, 2]
    views[1].release()
    reader.join()
    assert six.here() == [0, 2, 3]
    assert not six.room.has_waiting_reader()


def test_what_a_reader_wrote_takes_no_room_while_it_waits_on_a_full_disk(six: Cached) -> None:
    part = claim(six.root, "shard.00005.mds")
    assert part is not None
    demands = [(part, SHARD)]
    assert six.room.reserve(six.cache.directory, demands)
    with part.path.open("r+b") as file:
        file.write(b"x" * SHARD)
    done: list[bool] = []

    def retry() -> None:
        done.append(six.room.retry_with_space(six.cache.directory, demands, lambda: True, release=lambda: None))

    reader = threading.Thread(target=retry)
    with WaitQueue(six.root) as first:
        assert first.wait(0)
        reader.start()
        assert any(part.path.read_bytes() == bytes(SHARD) for _ in pauses(20.0))
        assert not done
    reader.join()
    assert done == [True]
    assert read_usage(six.root) == SHARD
    six.cache.directory.drop([part])


def test_a_reader_exceeds_the_limit_in_the_end_with_one_warning(
    six: Cached, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    impatient(monkeypatch)
    six.ensure(0, 1, 2)
    views = [six.map(shard) for shard in (0, 1, 2)]
    with caplog.at_level(logging.WARNING):
        six.ensure(3)
        six.ensure(4)  # keeps to what was taken
    assert six.here() == [0, 1, 2, 4]
    (message,) = caplog.messages
    assert f"{six.index_bytes + 4 * SHARD} bytes" in message
    views[0].release()
    assert six.room.limit == six.index_bytes + 3 * SHARD


def test_making_space_ignores_the_limit(six: Cached) -> None:
    six.ensure(0, 1, 2)
    view = six.map(0)
    assert six.room.make_space(SHARD + 1) == 2 * SHARD
    assert six.here() == [0]
    assert six.room.make_space(1) == 0
    view.release()


def test_nothing_is_made_where_a_dataset_is_read_in_place(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data")
    cache = ShardCache(CacheConfig(name="code", local=tmp_path / "data"))
    room = CacheQuota([cache.directory], 1)
    before = cached(tmp_path / "data")
    shards: list[ShardInfo] = list(cache.read_index().shards)
    for shard in shards:
        with cache.hold(shard, room) as directory:
            assert directory == tmp_path / "data"
        cache.record_use(shard, finished=True)
        assert not cache.evict(shard)
    assert room.usage() == room.make_space(10**6) == 0
    assert cached(tmp_path / "data") == before
    assert not cache.directory.path.exists()


def test_decompressed_shards_of_a_dataset_in_place_are_evicted_and_it_is_not(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", shards=5, compression="zstd")
    cache = ShardCache(CacheConfig(name="code", local=tmp_path / "data"))
    room = CacheQuota([cache.directory], 2 * SHARD)
    before = cached(tmp_path / "data")
    for shard in cache.read_index().shards:
        fetch_shard(cache, shard, room=room)
    assert list(cached(cache.directory.path)) == ["shard.00003.mds", "shard.00004.mds"]
    assert cached(tmp_path / "data") == before


def test_a_limit_needs_locks(six: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    """No filesystem without them can be mounted here, so the system call is made to fail as it does there."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("lightning_streaming.cache.shared_files.fcntl.flock", refuse)
    with assert_error(ConfigError, option="cache_limit", path="code"):
        six.ensure(0)
    six.ensure(0, 1, room=CacheQuota([six.cache.directory]))
    assert six.here() == [0, 1]


class TestEvict:
    def test_an_unused_shard_goes(self, six: Cached) -> None:
        six.ensure(0, 1)
        assert six.cache.evict(six.shards[0])
        assert (six.here(), read_usage(six.root)) == ([1], SHARD)
        assert not six.cache.evict(six.shards[0])

    def test_one_in_use_and_one_that_is_not_ours_stay(self, six: Cached) -> None:
        six.path(1).write_bytes(raw_data(1))
        six.ensure(0, 1)
        view = six.map(0)
        assert not six.cache.evict(six.shards[0])
        assert not six.cache.evict(six.shards[1])
        assert six.here() == [0, 1]
        view.release()


def test_without_a_limit_a_full_disk_without_locks_is_no_matter_of_limits(
    six: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    six.ensure(0)
    monkeypatch.setattr("lightning_streaming.cache.shared_files.fcntl.flock", refuse)
    assert CacheQuota([six.cache.directory]).make_space(1) == 0
    assert six.here() == [0]


def test_files_are_opened_for_writing_to_be_locked_for_removal(six: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network filesystem can be mounted here, so the system call is made to refuse as it does there."""
    flock = fcntl.flock

    def refuse(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    six.ensure(0)
    monkeypatch.setattr("lightning_streaming.cache.shared_files.fcntl.flock", refuse)
    assert six.room.make_space(1) == SHARD
    assert six.here() == []


def test_a_limit_that_was_exceeded_holds_again_once_that_is_possible(
    six: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    six.ensure(0, 1, 2)
    views = [six.map(shard) for shard in (0, 1, 2)]
    six.ensure(3)
    assert len(six.here()) == 4
    views.clear()
    six.ensure(4)
    assert len(six.here()) <= 3

    views.extend(six.map(shard) for shard in six.here())
    with six.cache.hold(six.shards[5], six.room, views.clear):
        assert len(six.here()) <= 3
    assert not views


@pytest.mark.parametrize(("noted", "waits"), [(0, False), (3600, True), (-601, True)], ids=str)
def test_a_reader_waits_for_room_unless_another_waited_in_vain_a_short_time_ago(
    six: Cached, noted: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    six.ensure(0, 1, 2)
    views = [six.map(shard) for shard in (0, 1, 2)]
    with monkeypatch.context() as for_now:
        impatient(for_now)
        six.ensure(3)  # in vain
    views.append(six.map(3))
    if noted:
        with (six.root / QUEUE_BASENAME).open("r+b") as queue:
            write_number(queue.fileno(), time.time_ns() + noted * 10**9)
    other = CacheQuota([six.cache.directory], six.room.limit)
    reader = threading.Thread(target=lambda: six.ensure(4, room=other))
    reader.start()
    waited = False
    while reader.is_alive() and not waited:
        waited = other.has_waiting_reader()
        reader.join(0.001)
    views.clear()
    reader.join()
    assert waited == waits


def test_files_of_a_cache_within_a_cache_are_not_counted(six: Cached) -> None:
    six.ensure(0)
    for name, other in (("other", MANIFEST_BASENAME), ("subdirectory", "notes.txt")):
        (six.root / name).mkdir()
        (six.root / name / "shard.00000.mds").write_bytes(bytes(SHARD))
        (six.root / name / other).touch()
    names = {Path(file.path).relative_to(six.root).as_posix() for file in shard_files(six.root)}
    assert names == {"shard.00000.mds", "subdirectory/shard.00000.mds", "subdirectory/notes.txt"}


def test_the_largest_shard_counts_with_all_its_files(tmp_path: Path) -> None:
    for index in (
        write_dataset(tmp_path / "mds", shards=3, compression="zstd"),
        put_dataset(tmp_path / "csv", "csv", (4, 9, 2), compression="zstd"),
    ):
        sizes = [sum(file.bytes for pair in shard.files for file in pair if file) for shard in index.shards]
        assert largest_shard_bytes(index.shards) == max(sizes)
    assert largest_shard_bytes(DatasetIndex(()).shards) == 0


def test_the_largest_shard_is_that_of_the_wanted_columns(tmp_path: Path) -> None:
    for name, texts, numbers in (("a", 50, 1), ("b", 1, 30), ("c", 2, 2)):
        table = pyarrow.table({"text": ["x" * 1000 * texts], "numbers": [list(range(1000 * numbers))], "é": [1]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    shards = IndexCache(CacheConfig(name="0", remote=str(tmp_path), format="parquet")).read().shards
    for columns in (["text"], ["numbers"], ["é"], ["text", "numbers"], None):
        sizes = [narrowed(shard, columns).raw_data.bytes for shard in shards]
        assert largest_shard_bytes(shards, columns) == max(sizes)
