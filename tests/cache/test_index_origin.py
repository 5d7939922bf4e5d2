"""Whose files a cache directory holds, and what becomes of them when the index changes or somebody else looks."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.index_lock import held_index
from lightning_streaming.cache.inspection import is_cache
from lightning_streaming.cache.layout import ORIGIN_BASENAME
from lightning_streaming.cache.origin import read_origin
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.formats.index import INDEX_BASENAME, dump_index
from tests.cache.indexes import LARGE, SMALL, forms, let_a_minute_pass, over_http, put, shard
from tests.cache.users import as_nobody
from tests.servers import HttpStore


class TestChangedShards:
    def put_files(self, directory: Path, count: int, mark: int) -> None:
        """Let files be there as if they had been fetched."""
        for number in range(count):
            path = directory / shard(number).raw_data.basename
            path.write_bytes(bytes(2000))
            os.utime(path, ns=(mark, mark))

    def there(self, directory: Path) -> list[str]:
        return sorted(path.name for path in directory.glob("shard*"))

    def test_files_that_are_others_now_go_and_the_rest_stays(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, 4)
        cache = over_http(http_store, tmp_path)
        cache.read()
        self.put_files(tmp_path / "cache", 4, cache.mark)
        os.utime(tmp_path / "cache" / "shard.00002.mds")  # somebody else's
        changed = [shard(0), shard(1, seed=1), shard(2, seed=1), shard(4)]
        (http_store.root / INDEX_BASENAME).write_bytes(dump_index(changed))
        let_a_minute_pass(tmp_path / "cache")
        assert over_http(http_store, tmp_path).read().shards == changed
        assert self.there(tmp_path / "cache") == ["shard.00000.mds", "shard.00002.mds", "shard.00003.mds"]

    def test_all_stay_where_shards_were_added(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, 4)
        cache = over_http(http_store, tmp_path)
        cache.read()
        self.put_files(tmp_path / "cache", 4, cache.mark)
        put(http_store.root, 5)
        let_a_minute_pass(tmp_path / "cache")
        over_http(http_store, tmp_path).read()
        assert len(self.there(tmp_path / "cache")) == 4


class TestOrigin:
    def test_the_mark_is_a_whole_second_of_long_ago_and_stays(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, SMALL)
        marks = {over_http(http_store, tmp_path).mark for _ in range(2)}
        cache = over_http(http_store, tmp_path)
        cache.read()
        let_a_minute_pass(tmp_path / "cache")
        over_http(http_store, tmp_path).read()
        marks |= {cache.mark, over_http(http_store, tmp_path).mark, pickle.loads(pickle.dumps(cache)).mark}
        (mark,) = marks
        assert mark % 10**9 == 0
        assert 978307200 <= mark // 10**9 < 1262304000

    @pytest.mark.parametrize("second_line", ["", "\n", "\nabc\n", "\n12\n{}", "\n99999999999999999999999\n"])
    def test_a_directory_without_a_sound_mark_gets_one(
        self, http_store: HttpStore, tmp_path: Path, second_line: str
    ) -> None:
        index = put(http_store.root, SMALL)
        over_http(http_store, tmp_path).read()
        path = tmp_path / "cache" / ORIGIN_BASENAME
        path.write_text(path.read_text().splitlines()[0] + second_line)
        cache = over_http(http_store, tmp_path)
        assert cache.read() == index
        assert over_http(http_store, tmp_path).mark == cache.mark

    @pytest.mark.parametrize("look", [IndexCache.read, IndexCache.mark.fget])  # type: ignore[attr-defined]
    def test_a_directory_serves_one_remote_only(
        self, http_store: HttpStore, tmp_path: Path, look: Callable[[IndexCache], object]
    ) -> None:
        put(http_store.root, SMALL)
        over_http(http_store, tmp_path).read()
        other = IndexCache(CacheConfig(name="b", remote=f"{http_store.url}/other", local=tmp_path / "cache"))
        with pytest.raises(ConfigError, match="holds shards of another remote"):
            look(other)

    def test_a_directory_that_cannot_be_made_is_told(self, http_store: HttpStore, tmp_path: Path) -> None:
        (tmp_path / "cache").touch()
        with pytest.raises(StreamingError, match="cannot be made"):
            over_http(http_store, tmp_path).read()

    def test_it_shows_no_remote(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, LARGE)
        over_http(http_store, tmp_path).read()
        assert "127.0.0.1" not in (tmp_path / "cache" / ORIGIN_BASENAME).read_text()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
class TestForeignDirectory:
    """Directories that belong to somebody else, looked at by a user who is not root."""

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
        assert "cannot be written to; choose another" in as_nobody(lambda: over_http(http_store, directory).read())

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
        origin = read_origin(directory / "cache")
        assert origin is not None
        assert origin.digest == hashlib.sha256(dump_index(index.shards)).hexdigest()
        assert as_nobody(lambda: over_http(http_store, directory).mark) == origin.mark

    def test_who_may_only_read_waits_for_who_fetches(self, http_store: HttpStore, directory: Path) -> None:
        (directory / "cache").mkdir()
        (directory / "cache").chmod(0o755)
        put(http_store.root, SMALL)
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        with held_index(directory / "cache", 1):
            child = context.Process(
                target=lambda: sender.send(as_nobody(lambda: over_http(http_store, directory).mark))
            )
            child.start()
            child.join(0.5)
            assert child.is_alive()
            shutil.copy(http_store.root / INDEX_BASENAME, directory / "cache")
            (directory / "cache" / INDEX_BASENAME).chmod(0o644)
        child.join()
        assert 978307200 <= receiver.recv() // 10**9 < 1262304000

    def test_who_may_only_read_believes_a_mark_that_goes_with_the_index(
        self, http_store: HttpStore, directory: Path
    ) -> None:
        put(http_store.root, SMALL)
        (directory / "cache").mkdir(mode=0o755)
        mark = over_http(http_store, directory).mark
        assert as_nobody(lambda: over_http(http_store, directory).mark) == mark
        put(directory / "cache", SMALL + 1)
        assert as_nobody(lambda: over_http(http_store, directory).mark) != mark

    def test_an_origin_that_may_not_be_read_is_told(self, http_store: HttpStore, directory: Path) -> None:
        put(http_store.root, SMALL)
        (directory / "cache").mkdir(mode=0o755)
        over_http(http_store, directory).read()
        (directory / "cache" / ORIGIN_BASENAME).chmod(0o600)
        assert "it says whose files are there" in as_nobody(lambda: over_http(http_store, directory).read())
        assert not as_nobody(lambda: is_cache(directory / "cache"))
