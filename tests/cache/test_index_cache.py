"""The index on a node: parsed once, fetched again when it changed, and one and the same for every process of a run.

Waiting for whoever is at an index: as long as it lives, and no longer.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import random
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest

from lightning_streaming.cache import file_states
from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.file_states import claim, staging_path
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.index_files import LARGE_INDEX_BYTES, locked_index
from lightning_streaming.errors import IndexFormatError, LockTimeoutError, ObjectNotFoundError, StorageError
from lightning_streaming.formats.index import INDEX_BASENAME, dump_index
from tests.cache.helpers import (
    LARGE,
    SMALL,
    forms,
    in_place,
    kept_for,
    let_a_minute_pass,
    let_time_pass,
    over_http,
    put,
)
from tests.helpers import assert_error
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class TestInPlace:
    def test_a_small_index_is_read_and_nothing_is_kept(self, tmp_path: Path) -> None:
        index = put(tmp_path / "data", SMALL)
        assert in_place(tmp_path / "data").read() == index
        assert not kept_for(tmp_path / "data").exists()

    def test_a_large_index_is_parsed_once(self, tmp_path: Path) -> None:
        index, path = put(tmp_path / "data", LARGE), tmp_path / "data" / INDEX_BASENAME
        assert path.stat().st_size > LARGE_INDEX_BYTES
        assert in_place(tmp_path / "data").read() == index
        assert len(forms(kept_for(tmp_path / "data"))) == 1
        # Nobody looks at the text again: this change, which keeps size and time, is not seen.
        before = path.stat()
        with path.open("r+b") as file:
            file.write(b"[")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert in_place(tmp_path / "data").read() == index
        assert list((tmp_path / "data").iterdir()) == [path]

    def test_an_index_that_was_written_again_is_read_again(self, tmp_path: Path) -> None:
        put(tmp_path / "data", LARGE)
        in_place(tmp_path / "data").read()
        index = put(tmp_path / "data", LARGE, seed=1)
        assert in_place(tmp_path / "data").read() == index
        assert in_place(tmp_path / "data").read() == index

    def test_the_same_index_in_another_file_is_not_parsed_again(self, tmp_path: Path) -> None:
        index = put(tmp_path / "data", LARGE)
        in_place(tmp_path / "data").read()
        (form,) = forms(kept_for(tmp_path / "data"))
        made = form.stat()
        os.utime(tmp_path / "data" / INDEX_BASENAME, ns=(0, 0))
        assert in_place(tmp_path / "data").read() == index
        assert (form.stat().st_ino, form.stat().st_size) == (made.st_ino, made.st_size)
        changed = form.stat().st_mtime_ns  # the new time was noted in it, so it need not be noted again
        assert in_place(tmp_path / "data").read() == index
        assert form.stat().st_mtime_ns == changed

    @pytest.mark.rotate(2)
    @pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
    def test_a_damaged_form_is_made_again(self, tmp_path: Path, damage: str) -> None:
        index = put(tmp_path / "data", LARGE)
        in_place(tmp_path / "data").read()
        (form,) = forms(kept_for(tmp_path / "data"))
        whole = form.read_bytes()
        place = random.Random(1).randrange(5000, len(whole) - 5000)
        changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        form.write_bytes({"cut": whole[:place], "changed": changed, "empty": b""}[damage])
        assert in_place(tmp_path / "data").read() == index
        assert forms(kept_for(tmp_path / "data")) == [form]
        assert form.read_bytes() == whole

    def test_a_cache_that_cannot_be_made_is_done_without(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("LIGHTNING_STREAMING_CACHE", str(tmp_path / "file"))
        index = put(tmp_path / "data", LARGE)
        cache = in_place(tmp_path / "data")
        assert cache.read() == index
        assert pickle.loads(pickle.dumps(cache)).read() == index

    @pytest.mark.parametrize("count", [SMALL, LARGE])
    def test_a_copy_reads_the_index_that_was_read_first(self, tmp_path: Path, count: int) -> None:
        index = put(tmp_path / "data", count)
        cache = in_place(tmp_path / "data")
        cache.read()
        put(tmp_path / "data", count + 1)
        assert cache.read() == index
        assert pickle.loads(pickle.dumps(cache)).read() == index
        assert in_place(tmp_path / "data").read() != index

    def test_an_index_that_is_gone_for_good_is_told(self, tmp_path: Path) -> None:
        put(tmp_path / "data", LARGE)
        cache = in_place(tmp_path / "data")
        cache.read()
        put(tmp_path / "data", LARGE + 1)
        shutil.rmtree(kept_for(tmp_path / "data"))
        with assert_error(StorageError, path="index.json") as caught:
            pickle.loads(pickle.dumps(cache)).read()
        assert "started with is gone" in str(caught.value)


class TestRemote:
    @pytest.mark.nightly
    @pytest.mark.parametrize("count", [SMALL, LARGE])
    def test_processes_that_start_one_after_another_fetch_it_once(
        self, http_store: HttpStore, tmp_path: Path, count: int
    ) -> None:
        index = put(http_store.root, count)
        _read_in_child(over_http(http_store, tmp_path))
        cache = over_http(http_store, tmp_path)
        assert cache.read() == index
        assert pickle.loads(pickle.dumps(cache)).read() == index
        assert http_store.requests() == [INDEX_BASENAME]
        assert (tmp_path / "cache" / INDEX_BASENAME).read_bytes() == dump_index(index.shards)
        assert len(forms(tmp_path / "cache")) == (count == LARGE)

    @pytest.mark.nightly
    def test_a_start_some_seconds_later_asks_again(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, SMALL)
        _read_in_child(over_http(http_store, tmp_path))
        index = put(http_store.root, SMALL, seed=1)
        let_time_pass(tmp_path / "cache", 11)
        assert over_http(http_store, tmp_path).read() == index

    @pytest.mark.parametrize("count", [SMALL, LARGE])
    def test_a_process_that_wrote_it_anew_reads_that_at_once(
        self, http_store: HttpStore, tmp_path: Path, count: int
    ) -> None:
        put(http_store.root, count)
        over_http(http_store, tmp_path).read()
        index = put(http_store.root, count + 1, seed=1)
        assert over_http(http_store, tmp_path).read() == index

    def test_a_second_look_ignores_checks_of_other_processes(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, SMALL)
        _read_in_child(over_http(http_store, tmp_path))
        index = put(http_store.root, SMALL + 1, seed=1)
        assert over_http(http_store, tmp_path).refreshed().read() == index

    def test_a_large_one_that_somebody_put_in_its_place_is_noticed(self, http_store: HttpStore, tmp_path: Path) -> None:
        index = put(http_store.root, LARGE)
        over_http(http_store, tmp_path).read()
        put(tmp_path / "cache", LARGE, seed=1)
        assert over_http(http_store, tmp_path).read() == index

    @pytest.mark.parametrize("count", [SMALL, LARGE])
    def test_shards_that_were_added_are_seen_by_who_comes_later(
        self, http_store: HttpStore, tmp_path: Path, count: int
    ) -> None:
        old = put(http_store.root, count)
        earlier = over_http(http_store, tmp_path)
        earlier.read()
        new = put(http_store.root, count + 1)
        let_a_minute_pass(tmp_path / "cache")
        assert over_http(http_store, tmp_path).read() == new
        assert (tmp_path / "cache" / INDEX_BASENAME).read_bytes() == dump_index(new.shards)
        assert earlier.read() == old
        assert over_http(http_store, tmp_path).read() == new
        assert http_store.requests() == [INDEX_BASENAME] * (2 if count == LARGE else 3)

    def test_a_run_that_is_under_way_keeps_its_index_for_processes_it_starts(
        self, http_store: HttpStore, tmp_path: Path
    ) -> None:
        old = put(http_store.root, LARGE)
        cache = over_http(http_store, tmp_path)
        held = cache.read()
        for number in (1, 2):
            put(http_store.root, LARGE + number)
            let_a_minute_pass(tmp_path / "cache")
            over_http(http_store, tmp_path).read()
        assert pickle.loads(pickle.dumps(cache)).read() == old == held
        del held
        assert len(forms(tmp_path / "cache")) == 2  # of the first and the last; nobody used the one between

    def test_a_large_index_that_has_not_changed_is_not_fetched(self, http_store: HttpStore, tmp_path: Path) -> None:
        index = put(http_store.root, LARGE)
        over_http(http_store, tmp_path).read()
        for _ in range(2):
            let_a_minute_pass(tmp_path / "cache")
            assert over_http(http_store, tmp_path).read() == index
        assert Counter(entry.method for entry in http_store.log()) == {"GET": 1, "HEAD": 3}

    def test_a_large_index_of_the_same_size_is_noticed(self, http_store: HttpStore, tmp_path: Path) -> None:
        put(http_store.root, LARGE)
        over_http(http_store, tmp_path).read()
        index = put(http_store.root, LARGE, seed=1)
        os.utime(http_store.root / INDEX_BASENAME, (10**9, 10**9))
        let_a_minute_pass(tmp_path / "cache")
        assert over_http(http_store, tmp_path).read() == index

    @pytest.mark.parametrize("count", [SMALL, LARGE])
    def test_one_that_was_put_there_is_used_and_kept_if_it_is_right(
        self, http_store: HttpStore, tmp_path: Path, count: int
    ) -> None:
        index = put(http_store.root, count)
        put(tmp_path / "cache", count)
        before = (tmp_path / "cache" / INDEX_BASENAME).stat()
        assert over_http(http_store, tmp_path).read() == index
        assert (tmp_path / "cache" / INDEX_BASENAME).stat().st_ino == before.st_ino

    @pytest.mark.rotate(2)
    @pytest.mark.parametrize("count", [SMALL, LARGE])
    @pytest.mark.parametrize("trouble", ["status", "reset", "html"])
    def test_without_the_remote_the_index_that_is_here_is_used_with_one_warning(
        self, http_store: HttpStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, trouble: str, count: int
    ) -> None:
        index = put(http_store.root, count)
        over_http(http_store, tmp_path).read()
        let_a_minute_pass(tmp_path / "cache")
        if trouble == "html":
            (http_store.root / INDEX_BASENAME).write_text("<html>")
        else:
            http_store.fail(INDEX_BASENAME, trouble, method="GET|HEAD")
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert over_http(http_store, tmp_path, download_retry=0).read() == index
        assert [record.message for record in caplog.records if "may be outdated" in record.message] == [
            record.message for record in caplog.records
        ]
        assert len(caplog.records) == 1
        assert (tmp_path / "cache" / INDEX_BASENAME).read_bytes() == dump_index(index.shards)

    @pytest.mark.rotate(2)
    @pytest.mark.parametrize("count", [SMALL, LARGE])
    @pytest.mark.parametrize("kind", ["store", "path"])
    def test_one_whose_remote_says_that_there_is_none_is_refused(
        self, http_store: HttpStore, tmp_path: Path, kind: str, count: int
    ) -> None:
        remote = http_store.url if kind == "store" else str(http_store.root)
        config = CacheConfig(name="code", remote=remote, local=tmp_path / "cache", download_retry=0)
        index = put(http_store.root, count)
        IndexCache(config).read()
        let_a_minute_pass(tmp_path / "cache")
        (http_store.root / INDEX_BASENAME).unlink()
        for _ in range(2):  # a refusal is no answer to go by next time
            with assert_error(ObjectNotFoundError, path=f"{remote}/{INDEX_BASENAME}", hint="without remote="):
                IndexCache(config).read()
        assert in_place(tmp_path / "cache").read() == index  # the way out that the error names

    @pytest.mark.parametrize("count", [SMALL, LARGE])
    def test_one_that_was_cut_short_is_fetched_again(self, http_store: HttpStore, tmp_path: Path, count: int) -> None:
        index = put(http_store.root, count)
        over_http(http_store, tmp_path).read()
        path = tmp_path / "cache" / INDEX_BASENAME
        path.write_bytes(path.read_bytes()[:-100])
        assert over_http(http_store, tmp_path).read() == index
        assert path.read_bytes() == dump_index(index.shards)

    def test_one_that_cannot_be_used_is_told_and_not_kept(self, http_store: HttpStore, tmp_path: Path) -> None:
        (http_store.root / INDEX_BASENAME).write_bytes(b"no index")
        with pytest.raises(IndexFormatError, match=f"{http_store.url}/{INDEX_BASENAME}"):
            over_http(http_store, tmp_path).read()
        assert not (tmp_path / "cache" / INDEX_BASENAME).exists()
        assert not forms(tmp_path / "cache")

    def test_it_may_be_a_path_of_this_machine(self, tmp_path: Path) -> None:
        for count in (LARGE, LARGE + 1):
            index = put(tmp_path / "data", count)
            cache = IndexCache(CacheConfig(name="code", remote=str(tmp_path / "data"), local=tmp_path / "cache"))
            assert cache.read() == index
            let_a_minute_pass(tmp_path / "cache")

    @pytest.mark.nightly
    def test_what_a_killed_process_left_is_gone_after_the_next_start(
        self, http_store: HttpStore, tmp_path: Path
    ) -> None:
        put(http_store.root, LARGE)
        http_store.fail(INDEX_BASENAME, "stall", times=1)
        child = multiprocessing.get_context("spawn").Process(target=_read, args=(over_http(http_store, tmp_path),))
        child.start()
        while not http_store.requests():
            assert child.is_alive()
            child.join(0.02)
        child.kill()
        child.join()
        assert len(forms(tmp_path / "cache")) == 1
        over_http(http_store, tmp_path).read()
        assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".part", ".scratch"))]

    @pytest.mark.parametrize("suffix", ["", ".scratch"])
    def test_what_was_left_before_the_machine_was_started_is_gone_after_the_next_start(
        self, http_store: HttpStore, tmp_path: Path, suffix: str
    ) -> None:
        put(http_store.root, SMALL)
        host, _, user, digest = staging_path(tmp_path, INDEX_BASENAME).name.split("-")
        (tmp_path / "cache").mkdir()
        left, living = (tmp_path / "cache" / f".index-{of}-00000000-{user}-{digest}{suffix}" for of in (host, "0" * 8))
        for path in (left, living):
            path.write_bytes(b"half")
        os.utime(left, (0, 0))
        over_http(http_store, tmp_path).read()
        assert forms(tmp_path / "cache") == [living]

    @pytest.mark.rotate(1)
    @pytest.mark.parametrize("count", [SMALL, LARGE])
    def test_processes_that_start_together_fetch_it_once(
        self, http_store: HttpStore, tmp_path: Path, count: int
    ) -> None:
        put(http_store.root, count)
        context = multiprocessing.get_context("fork")  # the soonest to start, so that they meet
        children = [context.Process(target=_read, args=(over_http(http_store, tmp_path),)) for _ in range(4)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0] * 4
        assert http_store.requests() == [INDEX_BASENAME]


def _read_in_child(cache: IndexCache) -> None:
    child = multiprocessing.get_context("fork").Process(target=_read, args=(cache,))
    child.start()
    child.join()
    assert child.exitcode == 0


def _read(cache: IndexCache) -> None:
    cache.read()


def test_a_holder_that_lives_is_waited_for_though_nothing_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while its download waits for others of its process: several times the patience of who waits for it."""
    monkeypatch.setattr(file_states, "_BEAT_SECONDS", 0.02)
    is_held, done = threading.Event(), list[str]()

    def hold() -> None:
        with locked_index(tmp_path, 1):
            is_held.set()
            threading.Event().wait(1.5)
            done.append("holder")

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(30)
    with locked_index(tmp_path, 0.4):
        done.append("waiter")
    holder.join()
    assert done == ["holder", "waiter"]


def test_a_holder_that_is_stopped_is_given_up(tmp_path: Path) -> None:
    part = claim(tmp_path, INDEX_BASENAME)
    assert part is not None
    with pytest.raises(LockTimeoutError, match=rf"waited 0\.1 s .* process {os.getpid()}"), locked_index(tmp_path, 0.1):
        pass
    part.close()
