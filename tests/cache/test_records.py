"""Manifests, tags and counts of cache directories, across changes of the index, users and releases."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache, index_cache
from lightning_streaming.cache.config import MANIFEST_BASENAME
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.index_files import locked_index
from lightning_streaming.cache.maintenance import is_cache
from lightning_streaming.cache.records import (
    CacheManifest,
    OwnTags,
    make_tag,
    next_tag,
    parse_tag,
    read_manifest,
    read_usage,
    scan,
    tag_of_original,
    verified_tag,
    write_manifest,
)
from lightning_streaming.errors import ConfigError, IntegrityError, StorageError
from lightning_streaming.files import SECOND
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, dump_index
from tests.cache.helpers import (
    LARGE,
    SMALL,
    as_nobody,
    fetch_shard,
    forms,
    let_a_minute_pass,
    over_http,
    put,
    raw_data,
    shard,
    write_dataset,
)
from tests.helpers import assert_error
from tests.servers import HttpStore


def state(modified: int, size: int = 5, changed: int = 0) -> os.stat_result:
    """What ``stat`` says of a file."""
    return os.stat_result((0,) * 6 + (size, 0, 0, 0), {"st_mtime_ns": modified, "st_ctime_ns": changed})


def test_a_tag_is_a_whole_second_long_ago() -> None:
    for tag in (make_tag(), tag_of_original(state(1_700_000_000_123_456_789))):
        assert tag % SECOND == 0
        assert 2001 <= datetime.fromtimestamp(tag // SECOND, timezone.utc).year <= 2009


def test_a_directory_owns_what_has_its_tag() -> None:
    tag = make_tag()
    assert OwnTags(tag).include(tag)
    assert not OwnTags(tag).include(verified_tag(tag))
    assert not OwnTags(tag).include(1_700_000_000 * SECOND)


def test_a_directory_of_decompressed_files_owns_what_has_any_tag() -> None:
    assert OwnTags(None).include(tag_of_original(state(1)))
    assert not OwnTags(None).include(tag_of_original(state(1)) + 1)
    assert not OwnTags(None).include(1_700_000_000 * SECOND)


def test_a_file_made_from_another_original_has_another_tag() -> None:
    states = [state(modified, size, 1) for modified in (1, 2, 10**18) for size in (1, 2)]
    assert len({tag_of_original(status) for status in [*states, state(1, 1, 2)]}) == 7


def test_a_file_made_from_one_of_a_cache_has_the_same_tag_when_that_was_used() -> None:
    assert tag_of_original(state(tag := make_tag(), 5, 1)) == tag_of_original(state(tag, 5, 2))


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        (b"1000000000000000000", 10**18),
        (b"", None),
        (b"nonsense", None),
        (b"1700000000000000000", None),  # of 2023, so not a tag
    ],
)
def test_a_tag_is_read_only_where_there_is_one(text: bytes, tag: int | None) -> None:
    assert parse_tag(text) == tag


def test_files_of_all_tags_of_a_directory_are_ours() -> None:
    tags = [make_tag()]
    while len(tags) < 64:
        tags.append(next_tag(tags[-1]))
    assert len(set(tags)) == 64
    for tag in (tags[0], tags[30], tags[-1]):
        assert all(OwnTags(tag).include(other) for other in tags)
        assert not any(OwnTags(tag).include(verified_tag(other)) for other in tags)
        assert not OwnTags(tag).include(tags[0] - 2 * SECOND)
        assert not OwnTags(tag).include(tags[-1] + 2 * SECOND)
    assert not OwnTags(next_tag(tags[-1])).include(tags[0])  # used up, so those are not mistaken for new ones


def test_a_confirmed_file_stays_ours_or_not_and_keeps_the_latest_tag() -> None:
    earlier = make_tag()
    own = OwnTags(next_tag(earlier))
    later = next_tag(next_tag(earlier))
    assert own.confirmed(earlier) == own.tag
    assert own.confirmed(later) == later
    assert own.tag is not None
    assert own.confirmed(verified_tag(earlier)) == verified_tag(own.tag)
    assert own.confirmed(verified_tag(later)) == verified_tag(later)
    assert own.confirmed(1_700_000_000 * SECOND) == own.confirmed(earlier + 1) == verified_tag(own.tag)


class TestChangedShards:
    def put_files(self, directory: Path, count: int, tag: int) -> None:
        """Let files be there as if they had been fetched."""
        for number in range(count):
            path = directory / shard(number).raw_data.basename
            path.write_bytes(bytes(2000))
            os.utime(path, ns=(tag, tag))

    def there(self, directory: Path) -> list[str]:
        return sorted(path.name for path in directory.glob("shard*"))

    def test_files_that_are_others_now_go_and_the_rest_stays(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, 4)
        cache = over_http(http_store, tmp_path)
        cache.read()
        self.put_files(tmp_path / "cache", 4, cache.tag)
        os.utime(tmp_path / "cache" / "shard.00002.mds")  # another program's
        changed = [shard(0), shard(1, seed=1), shard(2, seed=1), shard(4)]
        (http_store.root / INDEX_BASENAME).write_bytes(dump_index(changed))
        let_a_minute_pass(tmp_path / "cache")
        assert over_http(http_store, tmp_path).read().shards == changed
        assert self.there(tmp_path / "cache") == ["shard.00000.mds", "shard.00002.mds", "shard.00003.mds"]

    def test_all_stay_where_shards_were_added(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, 4)
        cache = over_http(http_store, tmp_path)
        cache.read()
        self.put_files(tmp_path / "cache", 4, cache.tag)
        put(http_store.root, 5)
        let_a_minute_pass(tmp_path / "cache")
        over_http(http_store, tmp_path).read()
        assert len(self.there(tmp_path / "cache")) == 4


class TestOrigin:
    def test_the_tag_is_a_whole_second_of_long_ago_and_stays(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, SMALL)
        tags = {over_http(http_store, tmp_path).tag for _ in range(2)}
        cache = over_http(http_store, tmp_path)
        cache.read()
        let_a_minute_pass(tmp_path / "cache")
        over_http(http_store, tmp_path).read()
        tags |= {cache.tag, over_http(http_store, tmp_path).tag, pickle.loads(pickle.dumps(cache)).tag}
        (tag,) = tags
        assert tag % 10**9 == 0
        assert 978307200 <= tag // 10**9 < 1262304000

    @pytest.mark.parametrize("second_line", ["", "\n", "\nabc\n", "\n12\n{}", "\n99999999999999999999999\n"])
    def test_a_directory_without_a_sound_tag_gets_one(
        self, http_store: HttpStore, tmp_path: Path, second_line: str
    ) -> None:
        index = put(http_store.root, SMALL)
        over_http(http_store, tmp_path).read()
        path = tmp_path / "cache" / MANIFEST_BASENAME
        path.write_text(path.read_text().splitlines()[0] + second_line)
        cache = over_http(http_store, tmp_path)
        assert cache.read() == index
        assert over_http(http_store, tmp_path).tag == cache.tag

    @pytest.mark.parametrize("look", [IndexCache.read, IndexCache.tag.fget])  # type: ignore[attr-defined]
    def test_a_directory_serves_a_single_remote(
        self, http_store: HttpStore, tmp_path: Path, look: Callable[[IndexCache], object]
    ) -> None:
        put(http_store.root, SMALL)
        over_http(http_store, tmp_path).read()
        other = IndexCache(CacheConfig(name="b", remote=f"{http_store.url}/other", local=tmp_path / "cache"))
        with assert_error(ConfigError, option="remote", path="cache"):
            look(other)

    def test_a_directory_that_cannot_be_created_is_an_error(self, http_store: HttpStore, tmp_path: Path) -> None:
        (tmp_path / "cache").touch()
        with assert_error(StorageError, path="cache") as caught:
            over_http(http_store, tmp_path).read()
        assert "cannot be created" in str(caught.value)

    def test_it_shows_no_remote(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, LARGE)
        over_http(http_store, tmp_path).read()
        assert "127.0.0.1" not in (tmp_path / "cache" / MANIFEST_BASENAME).read_text()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
class TestForeignDirectory:
    """Directories that belong to another user, read by a user who is not root."""

    @pytest.fixture
    def directory(self) -> Iterator[Path]:
        """One that others may look into, unlike those of pytest."""
        path = Path(tempfile.mkdtemp())
        path.chmod(0o755)
        yield path
        shutil.rmtree(path)

    @pytest.mark.parametrize("count", [SMALL, LARGE])
    def test_an_index_in_a_directory_that_is_not_ours_is_used_as_it_is(
        self, http_store: HttpStore, directory: Path, count: int
    ) -> None:
        put(directory / "cache", count)
        (directory / "cache").chmod(0o555)
        put(http_store.root, count + 1)
        assert as_nobody(lambda: len(over_http(http_store, directory).read().shards)) == count
        assert [path.name for path in (directory / "cache").iterdir()] == [INDEX_BASENAME]

    def test_one_without_an_index_is_refused(self, http_store: HttpStore, directory: Path) -> None:
        (directory / "cache").mkdir(mode=0o555)
        put(http_store.root, SMALL)
        assert "may not write to it; choose another" in as_nobody(lambda: over_http(http_store, directory).read())

    def test_users_of_a_group_share_one(self, http_store: HttpStore, directory: Path) -> None:
        (directory / "cache").mkdir()
        (directory / "cache").chmod(0o777)
        put(http_store.root, LARGE)
        over_http(http_store, directory).read()
        put(http_store.root, LARGE + 1)
        let_a_minute_pass(directory / "cache")
        assert as_nobody(lambda: len(over_http(http_store, directory).read().shards)) == LARGE + 1
        assert len(over_http(http_store, directory).read().shards) == LARGE + 1
        assert len(forms(directory / "cache")) == 1

    @pytest.mark.parametrize("count", [SMALL, LARGE])
    def test_users_who_start_together_share_one(self, http_store: HttpStore, directory: Path, count: int) -> None:
        (directory / "cache").mkdir()
        (directory / "cache").chmod(0o777)
        index = put(http_store.root, count)
        (directory / "own").mkdir()
        over_http(http_store, directory / "own").read()  # other users may not import from where packages are
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(4)

        def start(user: int) -> None:
            if os.getuid() == 0:
                os.setgroups([])
                os.setuid(user)
            os.umask(0o077)
            cache = over_http(http_store, directory)
            barrier.wait()
            assert cache.read() == index
            assert pickle.loads(pickle.dumps(cache)).read() == index

        children = [context.Process(target=start, args=(65530 + number // 2,)) for number in range(4)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0] * 4
        manifest = read_manifest(directory / "cache")
        assert manifest is not None
        assert manifest.digest == hashlib.sha256(dump_index(index.shards)).hexdigest()
        assert as_nobody(lambda: over_http(http_store, directory).tag) == manifest.tag

    def test_who_may_only_read_waits_for_who_fetches(self, http_store: HttpStore, directory: Path) -> None:
        (directory / "cache").mkdir()
        (directory / "cache").chmod(0o755)
        put(http_store.root, SMALL)
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        with locked_index(directory / "cache", 1):
            child = context.Process(target=lambda: sender.send(as_nobody(lambda: over_http(http_store, directory).tag)))
            child.start()
            child.join(0.5)
            assert child.is_alive()
            shutil.copy(http_store.root / INDEX_BASENAME, directory / "cache")
            (directory / "cache" / INDEX_BASENAME).chmod(0o644)
        child.join()
        assert 978307200 <= receiver.recv() // 10**9 < 1262304000

    def test_who_may_only_read_believes_a_tag_that_goes_with_the_index(
        self, http_store: HttpStore, directory: Path
    ) -> None:
        put(http_store.root, SMALL)
        (directory / "cache").mkdir(mode=0o755)
        tag = over_http(http_store, directory).tag
        assert as_nobody(lambda: over_http(http_store, directory).tag) == tag
        put(directory / "cache", SMALL + 1)
        assert as_nobody(lambda: over_http(http_store, directory).tag) != tag

    def test_a_manifest_that_may_not_be_read_is_an_error(self, http_store: HttpStore, directory: Path) -> None:
        put(http_store.root, SMALL)
        (directory / "cache").mkdir(mode=0o755)
        over_http(http_store, directory).read()
        (directory / "cache" / MANIFEST_BASENAME).chmod(0o600)
        assert "cannot be read" in as_nobody(lambda: over_http(http_store, directory).read())
        assert not as_nobody(lambda: is_cache(directory / "cache"))


NAMES = ["shard.00000.mds", "shard.00001.mds"]


def opened(root: Path) -> ShardCache:
    """A job that begins now."""
    cache = ShardCache(CacheConfig(name="code", remote=str(root / "remote"), local=root / "cache", download_retry=0))
    cache.read_index()
    return cache


def fetched(cache: ShardCache, number: int = 0) -> bytes:
    """What a job reads of a shard."""
    shard = cache.read_index().shards[number]
    with cache.hold(shard) as directory:
        return (directory / shard.raw_data.basename).read_bytes()


def put_index(root: Path, index: DatasetIndex) -> None:
    (root / INDEX_BASENAME).write_bytes(dump_index(index.shards))


def rewrite(root: Path, seed: int) -> None:
    """Write another dataset of the same sizes in the same place."""
    write_dataset(root / "remote", shards=2, seed=seed)


def write_next_index(root: Path) -> DatasetIndex:
    """Let the remote have the index of a dataset whose first shard will be another, but its old files still."""
    first, second = (write_dataset(root / f"seed{seed}", shards=2, seed=seed).shards for seed in (1, 0))
    index = DatasetIndex([first[0], second[1]])
    put_index(root / "remote", index)
    return index


def time_of(root: Path, name: str) -> int:
    return (root / "cache" / name).stat().st_mtime_ns


def delete(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def take_from_remote(path: Path) -> None:
    """Copy the remote's index into the cache, as an update of a cache does that is killed then."""
    shutil.copyfile(path.parent.parent / "remote" / INDEX_BASENAME, path)


@pytest.mark.parametrize("change", [delete, cut, take_from_remote])
def test_an_index_that_comes_without_the_one_before_has_all_files_checked(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    rewrite(tmp_path, 0)
    assert fetched(opened(tmp_path)) == raw_data(0, seed=0)
    rewrite(tmp_path, 1)
    change(tmp_path / "cache" / INDEX_BASENAME)
    assert fetched(opened(tmp_path)) == raw_data(0, seed=1)


def test_the_same_index_again_leaves_files_checked(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    cache = opened(tmp_path)
    fetched(cache)
    (tmp_path / "cache" / INDEX_BASENAME).unlink()
    assert opened(tmp_path).directory.own == cache.directory.own
    assert cache.directory.own.tag == time_of(tmp_path, NAMES[0])


def test_what_an_old_job_publishes_late_is_not_believed(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    index = write_next_index(tmp_path)
    new = opened(tmp_path)
    assert new.read_index() == index
    assert fetched(old) == raw_data(0, seed=0)
    shutil.copy(tmp_path / "seed1" / NAMES[0], tmp_path / "remote")
    assert fetched(new) == raw_data(0, seed=1)
    assert fetched(opened(tmp_path)) == raw_data(0, seed=1)


def test_an_old_job_does_not_read_what_a_new_one_fetched(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    write_next_index(tmp_path)
    shutil.copy(tmp_path / "seed1" / NAMES[0], tmp_path / "remote")
    new = opened(tmp_path)
    assert fetched(new) == raw_data(0, seed=1)
    with assert_error(IntegrityError, path="shard.00000.mds") as caught:
        fetched(old)
    assert "must be" in str(caught.value)
    assert fetched(new) == raw_data(0, seed=1)


def test_files_of_shards_that_are_the_same_stay_checked_and_keep_their_last_use(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    for number in range(2):
        fetched(old, number)
    os.utime(tmp_path / "cache" / NAMES[1], ns=(5 * SECOND, time_of(tmp_path, NAMES[1])))
    write_next_index(tmp_path)
    new = opened(tmp_path)
    assert new.directory.own != old.directory.own
    assert time_of(tmp_path, NAMES[1]) == new.directory.own.tag
    assert (tmp_path / "cache" / NAMES[1]).stat().st_atime_ns == 5 * SECOND
    assert not (tmp_path / "cache" / NAMES[0]).exists()


def test_jobs_of_two_indexes_leave_each_others_tags(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    fetched(old, 1)
    write_next_index(tmp_path)
    new = opened(tmp_path)
    for job in (old, new, old):
        assert fetched(job, 1) == raw_data(1, seed=0)
        assert time_of(tmp_path, NAMES[1]) == new.directory.own.tag
    new.discard(new.read_index().shards[1])
    fetched(old, 1)
    assert time_of(tmp_path, NAMES[1]) == old.directory.own.tag
    fetched(new, 1)
    assert time_of(tmp_path, NAMES[1]) == new.directory.own.tag


def test_both_count_what_the_other_fetched(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    write_next_index(tmp_path)
    shutil.copy(tmp_path / "seed1" / NAMES[0], tmp_path / "remote")
    new = opened(tmp_path)
    fetched(new)
    fetched(old, 1)
    for job in (old, new):
        assert scan(tmp_path / "cache", job.directory.own).bytes == read_usage(tmp_path / "cache") == 6000


def test_a_shard_that_comes_back_as_another_is_noticed(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    fetched(opened(tmp_path), 1)
    put_index(tmp_path / "remote", write_dataset(tmp_path / "short", shards=1))
    opened(tmp_path)
    rewrite(tmp_path, 1)
    assert fetched(opened(tmp_path), 1) == raw_data(1, seed=1)


def test_shards_that_were_added_leave_the_tag(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    write_dataset(tmp_path / "remote", shards=3)
    assert opened(tmp_path).directory.own == old.directory.own


def test_users_who_adopt_different_longer_indexes_at_once_do_not_share_a_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each user has an index lock of their own."""
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    write_dataset(tmp_path / "remote", shards=3)
    update = index_cache._IndexTags.update

    def after_another_user(tags: index_cache._IndexTags, manifest: CacheManifest, *others: Any) -> int | None:
        assert manifest.check is not None
        theirs = replace(manifest, check=replace(manifest.check, digest="0" * 64))
        write_manifest(tmp_path / "cache", theirs, tmp_path / "cache" / "scratch")
        return update(tags, manifest, *others)

    monkeypatch.setattr(index_cache._IndexTags, "update", after_another_user)
    assert opened(tmp_path).directory.own != old.directory.own


def test_a_note_that_names_no_index_has_all_files_checked(tmp_path: Path) -> None:
    """As after a kill between choosing a tag and saying what it goes with."""
    rewrite(tmp_path, 0)
    fetched(opened(tmp_path))
    path = tmp_path / "cache" / MANIFEST_BASENAME
    path.write_text("\n".join([*path.read_text().splitlines()[:2], "null", ""]))
    (tmp_path / "cache" / NAMES[0]).write_bytes(before := bytes(3000))
    os.utime(tmp_path / "cache" / NAMES[0], ns=(0, int(path.read_text().splitlines()[1])))
    assert fetched(opened(tmp_path)) == raw_data(0) != before


def put_directory_of_an_earlier_release(http_store: HttpStore, root: Path) -> int:
    """A directory as the releases before wrote it, byte for byte, with four files; gives its tag.

    The shards were checked by this index, by an earlier one, put there by another program and checked, and put there.
    """
    tag = 1_232_510_210_000_000_000
    index = (http_store.root / INDEX_BASENAME).read_bytes()
    digest = hashlib.sha256(index).hexdigest()
    check = f'{{"digest": "{digest}", "checked": 1795356085377882253, "version": {{}}, "asker": 26332, '
    (root / ".arriving").mkdir(parents=True)
    (root / ".origin").write_text(
        f'{CacheConfig(name="0", remote=http_store.url).digest}\n{tag}\n{check}"came_along": false, "mark": {tag}}}\n'
    )
    (root / ".usage").write_text(f"{6000:<19}\n")
    (root / ".queue").write_text("")
    (root / INDEX_BASENAME).write_bytes(index)
    for number, modified in enumerate([tag, tag - 2 * 10**9, tag + 10**9, 1_700_000_000_000_000_000]):
        path = root / f"shard.{number:05}.mds"
        path.write_bytes(raw_data(number))
        os.utime(path, ns=(1_795_356_085_000_000_000 + number, modified))
    return tag


def test_a_directory_of_an_earlier_release_is_taken_up_and_stays_one(http_store: HttpStore, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    shards = write_dataset(http_store.root, shards=5).shards
    tag = put_directory_of_an_earlier_release(http_store, root)
    before = (root / ".origin").read_text().splitlines()
    cache = ShardCache(CacheConfig(name="code", remote=http_store.url, local=root))
    for entry in cache.read_index().shards:
        fetch_shard(cache, entry)
    assert http_store.requests() == [INDEX_BASENAME, "shard.00004.mds"]
    # Processes of both releases trust, count and evict, or keep, files with these times.
    times = [time_of(tmp_path, f"shard.{number:05}.mds") for number in range(5)]
    assert times == [tag, tag, tag + 10**9, tag + 10**9, tag]
    assert (root / ".usage").read_bytes() == b"9000               \n"
    after = (root / ".origin").read_text().splitlines()
    assert after[:2] == before[:2]
    record, known = json.loads(after[2]), json.loads(before[2])
    assert list(record) == list(known)
    assert (record["digest"], record["mark"]) == (known["digest"], tag)
    assert [cache.evict(entry) for entry in shards] == [True, True, False, False, True]
