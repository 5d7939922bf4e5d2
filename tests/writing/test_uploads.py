"""Storing in the background: how much at a time, what of failures, and that nothing is left running.

What writers, merging and parts refuse because somebody's samples would be lost, and that nothing is touched then.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_streaming import StreamingDataset
from lightning_streaming.errors import AccessDeniedError, ConfigError, ObjectNotFoundError, StorageError
from lightning_streaming.formats.index import parse_index
from lightning_streaming.storage import Location
from lightning_streaming.writing import merge, merge_recursive, shards, write_parallel
from lightning_streaming.writing.destination import WRITING
from lightning_streaming.writing.shards import ShardBuffer
from lightning_streaming.writing.writers import MDSWriter
from tests.formats.golden_datasets import read_samples
from tests.helpers import assert_error, write_dataset
from tests.reading.processes import wait_until
from tests.servers import S3Store
from tests.writing import part_functions
from tests.writing.faulty_s3 import FaultyS3, faulty_s3

COLUMNS = {"id": "int"}


@pytest.fixture
def faulty(s3: S3Store) -> Iterator[FaultyS3]:
    """An S3 server of this test, that can be made to fail."""
    with faulty_s3(s3) as store:
        yield store


class WatchedStore(MemoryFileSystem):  # type: ignore[misc]
    """Counts the objects that are being stored, and stores none before it is let."""

    protocol = "watched"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    lock = threading.Lock()
    open_gate: threading.Event
    entered: threading.Semaphore
    active: int
    most: int

    @classmethod
    def reset(cls) -> None:
        """Begin a test. Filesystems are kept open, so all tests have the same class."""
        cls.store.clear()
        cls.open_gate, cls.entered, cls.active, cls.most = threading.Event(), threading.Semaphore(0), 0, 0

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        """Store an object when the gate is open."""
        cls = type(self)
        with cls.lock:
            cls.active += 1
            cls.most = max(cls.most, cls.active)
        cls.entered.release()
        assert cls.open_gate.wait(30)
        super().pipe_file(path, value, mode, **more)
        with cls.lock:
            cls.active -= 1


@pytest.fixture
def watched() -> Iterator[type[WatchedStore]]:
    """The class of a store whose uploads wait, as fsspec knows it."""
    fsspec.register_implementation("watched", WatchedStore, clobber=True)
    WatchedStore.reset()
    yield WatchedStore
    WatchedStore.open_gate.set()


def write_ids(number_of_ids: int, out: Any, **settings: Any) -> None:
    with MDSWriter(**{"columns": COLUMNS, "out": out, "size_limit": 300, **settings}) as writer:
        for number in range(number_of_ids):
            writer.write({"id": number})


def write_until_it_fails(writer: MDSWriter, numbers: Iterator[int]) -> None:
    for number in numbers:
        writer.write({"id": number})


def fetch(url: str, options: dict[str, Any], to: Path) -> list[int]:
    """The ids of a dataset in a bucket."""
    store = fsspec.filesystem("s3", **options, skip_instance_cache=True)
    to.mkdir()
    for path in store.find(url):
        (to / path.rpartition("/")[2]).write_bytes(store.cat_file(path))
    return [sample["id"] for sample in read_samples(to, to / "scratch")]


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_shards_than_agreed_are_in_memory(workers: int, watched: type[WatchedStore]) -> None:
    written = 0

    def write() -> None:
        nonlocal written
        with MDSWriter(columns=COLUMNS, out="watched://bucket/data", size_limit=300, max_workers=workers) as writer:
            for number in range(200):  # 11 to a shard
                writer.write({"id": number})
                written += 1
                stored = sum("shard." in path for path in watched.store)
                # Those not stored, without the one that is gathered, are at most those that may be in flight.
                assert number // 11 - stored <= workers + 1

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(workers):
        assert watched.entered.acquire(timeout=30)
    assert not watched.store
    watched.open_gate.set()
    thread.join(60)
    assert written == 200
    assert watched.most == workers
    assert sum("shard." in path for path in watched.store) == 19


def test_a_writer_that_waits_for_its_uploads_has_gathered_no_more_than_agreed(
    watched: type[WatchedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = threading.Semaphore(0)
    buffers = []

    class Counted(ShardBuffer):
        def __init__(self, expected: int = 0) -> None:
            super().__init__(expected)
            buffers.append(self)

    monkeypatch.setattr(shards, "ShardBuffer", Counted)

    def write() -> None:
        with MDSWriter(columns=COLUMNS, out="watched://bucket/data", size_limit=300, max_workers=2) as writer:
            for number in range(100):
                writer.write({"id": number})
                progress.release()

    thread = threading.Thread(target=write)
    thread.start()
    # Two at work, one waiting, and eleven samples gathered; the next does not get in before one is stored.
    for _ in range(4 * 11):
        assert progress.acquire(timeout=30)
    assert not progress.acquire(timeout=0.2)
    assert len(buffers) == 4
    watched.open_gate.set()
    thread.join(60)
    assert not thread.is_alive()


def test_failures_that_pass_heal(faulty: FaultyS3, s3: S3Store, tmp_path: Path) -> None:
    url = f"{s3.make_bucket()}/data"
    faulty.fail(r"PUT .*shard\.00001", 503, times=2)
    faulty.fail(r"PUT .*shard\.00002", 0, times=1)
    faulty.fail(r"PUT .*index\.json", 500, times=1)
    write_ids(30, url, storage_options=faulty.options)
    assert sum("shard.00001" in request for request in faulty.requests) == 3
    assert fetch(url, s3.options, tmp_path / "copy") == list(range(30))


def test_a_failure_that_stays_is_raised_at_the_next_write_with_its_object_and_cause(
    faulty: FaultyS3, s3: S3Store
) -> None:
    url = f"{s3.make_bucket()}/data"
    faulty.fail(r"PUT .*shard\.00001", 403)
    faulty.fail(r"PUT .*shard\.00003", 403)
    writer = MDSWriter(columns=COLUMNS, out=url, size_limit=300, max_workers=1, storage_options=faulty.options)
    written = count()
    with assert_error(AccessDeniedError, path="shard.00001.mds") as caught:
        write_until_it_fails(writer, written)
    assert re.search(r"data/shard\.00001\.mds: access denied", str(caught.value))
    assert next(written) < 11 * 6
    with assert_error(AccessDeniedError, path="shard.00001.mds"):
        writer.write({"id": 0})
    with assert_error(AccessDeniedError, path="shard.00001.mds"):
        writer.finish()
    writer.close()
    assert not [request for request in faulty.requests if request.startswith("PUT") and "index.json" in request]


def test_the_failure_of_the_last_shard_is_raised_by_finish(faulty: FaultyS3, s3: S3Store) -> None:
    faulty.fail(r"PUT .*shard\.00000", 500)
    writer = MDSWriter(columns=COLUMNS, out=f"{s3.make_bucket()}/data", retry=1, storage_options=faulty.options)
    writer.write({"id": 0})
    with assert_error(StorageError, path="shard.00000.mds") as caught:
        writer.finish()
    assert "PutObject" in str(caught.value)
    assert caught.value.__cause__ is not None
    writer.close()
    assert not any("index.json" in request for request in faulty.requests if request.startswith("PUT"))


def test_an_index_that_could_not_be_stored_can_be_tried_again(faulty: FaultyS3, s3: S3Store, tmp_path: Path) -> None:
    url = f"{s3.make_bucket()}/data"
    faulty.fail(r"PUT .*index\.json", 500, times=1)
    writer = MDSWriter(columns=COLUMNS, out=url, retry=1, storage_options=faulty.options)
    writer.write({"id": 7})
    with assert_error(StorageError, path="index.json"):
        writer.finish()
    writer.finish()
    assert fetch(url, s3.options, tmp_path / "copy") == [7]


@pytest.mark.nightly
def test_what_failed_is_resumed(faulty: FaultyS3, s3: S3Store, tmp_path: Path) -> None:
    url = f"{s3.make_bucket()}/data"
    faulty.fail(r"PUT .*shard\.00002", 403, times=1)
    settings: dict[str, Any] = {"max_workers": 2, "storage_options": faulty.options, "mode": "resume"}
    with pytest.raises(AccessDeniedError):
        write_ids(50, url, **settings)
    with MDSWriter(columns=COLUMNS, out=url, size_limit=300, **settings) as writer:
        assert writer.num_samples == 22
        for number in range(22, 50):
            writer.write({"id": number})
    assert fetch(url, s3.options, tmp_path / "copy") == list(range(50))


def test_an_append_puts_nothing_under_a_name_that_readers_ask_for(
    faulty: FaultyS3, s3: S3Store, tmp_path: Path
) -> None:
    url = f"{s3.make_bucket()}/data"
    write_ids(25, url, storage_options=s3.options)  # 11 to a shard
    writer = MDSWriter(columns=COLUMNS, out=url, size_limit=300, storage_options=faulty.options, mode="append")
    for number in range(25, 50):
        writer.write({"id": number})
    writer.finish()
    changed = [one.rpartition("/data/")[2] for one in faulty.requests if one.startswith(("PUT", "POST", "DELETE"))]
    shards = [f"shard.{number:05}.mds" for number in range(3, 6)]
    assert sorted(name for name in changed if not name.startswith(".writing/")) == ["index.json", *shards]
    removed = {f".writing/{number:05}.json" for number in (3, 4)}
    assert changed[-3] == "index.json"
    assert set(changed[-2:]) == removed
    assert fetch(url, s3.options, tmp_path / "copy") == list(range(50))


def test_a_bucket_that_is_not_there_is_named(s3: S3Store) -> None:
    with assert_error(ObjectNotFoundError, path="shard.00000.mds"):
        write_ids(3, "s3://no-such-bucket/data", storage_options=s3.options)


@pytest.mark.nightly
def test_the_index_is_stored_after_every_shard(faulty: FaultyS3, s3: S3Store) -> None:
    write_ids(100, f"{s3.make_bucket()}/data", max_workers=4, storage_options=faulty.options)
    stored = [request for request in faulty.requests if request.startswith("PUT")]
    assert len(stored) == 11
    assert "index.json" in stored[-1]


def test_a_file_that_cannot_be_written_is_told_in_words(tmp_path: Path) -> None:
    writer = MDSWriter(columns=COLUMNS, out=tmp_path / "out", size_limit=300)
    (tmp_path / "out" / "shard.00000.mds").mkdir()  # a file cannot be renamed to it
    with assert_error(StorageError, path="shard.00000.mds") as caught:
        write_until_it_fails(writer, count())
    assert "write" in str(caught.value)
    writer.close()


@pytest.mark.parametrize("fails", [False, True])
def test_threads_end_with_the_writer(fails: bool, tmp_path: Path) -> None:
    before = threading.enumerate()
    try:
        with MDSWriter(columns=COLUMNS, out=tmp_path / "out", size_limit=300, progress_bar=True) as writer:
            for number in range(100):
                writer.write({"id": number})
            assert any(thread.name.startswith("shard-writer") for thread in threading.enumerate())
            if fails:
                raise RuntimeError("the source broke")
    except RuntimeError:
        assert fails
    assert set(threading.enumerate()) <= set(before)  # servers of other tests may have ended theirs meanwhile


def test_progress_shows_the_bytes_stored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_ids(30, (str(tmp_path / "here"), str(tmp_path / "there")), progress_bar=True)
    (*_, last) = capsys.readouterr().err.strip().split("\r")
    index = parse_index((tmp_path / "there" / "index.json").read_bytes(), "index")
    stored = sum(path.stat().st_size for path in (tmp_path / "there").iterdir())
    assert len(index.shards) == 3
    assert f"{stored / 1024:.2f}k/{stored / 1024:.2f}k" in last


def test_nothing_is_shown_unasked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_ids(30, tmp_path / "out")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("wrong", [{"max_workers": 0}, {"retry": 0}, {"mode": "continue"}])
def test_counts_and_modes_that_cannot_work_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        MDSWriter(**{"columns": COLUMNS, "out": tmp_path / "out", **wrong})
    assert not (tmp_path / "out").exists()


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def write(out: Any, samples: range, **settings: Any) -> None:
    with MDSWriter(out=out, columns={"id": "int"}, size_limit=230, **settings) as writer:
        for sample in samples:
            writer.write({"id": sample})


@pytest.mark.parametrize("mode", ["resume", "append"])
def test_a_published_directory_is_no_copy_of_another_place(tmp_path: Path, mode: Literal["resume", "append"]) -> None:
    own = write_dataset(tmp_path / "own", 20)
    (own / WRITING).mkdir()  # as an older writer may have left it
    if mode == "append":
        write(str(tmp_path / "other"), range(6))
    before = contents(own)
    with assert_error(ConfigError, option="out", path="/own") as caught:
        MDSWriter(
            out=(str(own), str(tmp_path / "other")), columns={"id": "int"}, size_limit=230, keep_local=True, mode=mode
        )
    assert "holds another dataset" in str(caught.value)
    assert contents(own) == before


def test_an_unfinished_directory_is_no_copy_of_another_place(tmp_path: Path) -> None:
    writer = MDSWriter(out=str(tmp_path / "own"), columns={"id": "int"}, size_limit=230, mode="resume")
    for sample in range(20):
        writer.write({"id": sample})
    writer.close()
    before = contents(tmp_path / "own")
    assert len(before) > 3
    with assert_error(ConfigError, option="out", path="/own") as caught:
        MDSWriter(
            out=(str(tmp_path / "own"), str(tmp_path / "other")),
            columns={"id": "int"},
            size_limit=230,
            keep_local=True,
            mode="resume",
        )
    assert "holds another dataset" in str(caught.value)
    assert contents(tmp_path / "own") == before


def test_a_copy_of_the_same_sizes_is_not_taken_for_the_dataset(tmp_path: Path) -> None:
    write(str(tmp_path / "copy"), range(1000, 1020))
    write(str(tmp_path / "truth"), range(20))
    pair = (str(tmp_path / "copy"), str(tmp_path / "truth"))
    write(pair, range(20, 25), keep_local=True, mode="append")
    assert contents(tmp_path / "copy") == contents(tmp_path / "truth")
    dataset = StreamingDataset(remote=str(tmp_path / "copy"))
    assert [sample["id"] for sample in dataset[:]] == list(range(25))


def test_the_second_directory_of_a_pair_must_be_empty_too(tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    (second / "shard.00000.mds").write_bytes(b"precious")
    with assert_error(ConfigError, option="out", path="second") as caught:
        write((str(tmp_path / "first"), str(second)), range(6))
    assert "must be empty" in str(caught.value)
    assert contents(second) == {"shard.00000.mds": b"precious"}


@pytest.mark.parametrize("joins", ["merge", "merge_recursive"])
def test_a_dataset_is_not_merged_over(tmp_path: Path, joins: str) -> None:
    root = write_dataset(tmp_path / "root", 20)
    extra = write_dataset(root / "extra", 5, first_id=20)
    before = contents(root)
    with assert_error(ConfigError, option="out", path="root") as caught:
        merge([str(extra)], str(root)) if joins == "merge" else merge_recursive(str(root))
    assert "itself" in str(caught.value)
    assert contents(root) == before


def test_foreign_parts_in_a_bucket_are_not_taken_over(s3: S3Store) -> None:
    url = f"{s3.make_bucket()}/corpus"
    Location(f"{url}/part.000000/shard.00000.mds", s3.options, attempts=1).put(b"whatever")
    with assert_error(ConfigError, option="out", path="corpus") as caught:
        write_parallel(
            [range(3)], part_functions.count, url, progress_bar=False, storage_options=s3.options, num_workers=1
        )
    assert "000000" in str(caught.value)


def test_a_writer_that_was_closed_does_not_say_that_it_finished(tmp_path: Path) -> None:
    writer = MDSWriter(out=str(tmp_path / "a"), columns={"id": "int"})
    writer.write({"id": 1})
    writer.close()
    with pytest.raises(ConfigError, match="closed before it was finished"):
        writer.finish()
    write(str(tmp_path / "b"), range(3))


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_a_new_dataset_is_not_published_over_shards_that_changed(damage: str, tmp_path: Path) -> None:
    writer = MDSWriter(out=str(tmp_path / "a"), columns={"id": "int"}, size_limit=230)
    for sample in range(20):
        writer.write({"id": sample})
    shard = tmp_path / "a" / "shard.00001.mds"
    assert wait_until(shard.exists)
    if damage == "gone":
        shard.unlink()
    else:
        (tmp_path / "other").write_bytes(b"of another writer")
        (tmp_path / "other").rename(shard)
    with assert_error(StorageError, path="shard.00001.mds") as caught:
        writer.finish()
    assert "stored" in str(caught.value)
    writer.close()
    left = contents(tmp_path)
    assert left == ({} if damage == "gone" else {"a/shard.00001.mds": b"of another writer"})


def test_an_index_is_not_published_over_shards_that_are_gone(tmp_path: Path) -> None:
    writer = MDSWriter(out=str(tmp_path / "a"), columns={"id": "int"}, size_limit=230, mode="resume")
    for sample in range(20):
        writer.write({"id": sample})
    assert wait_until((tmp_path / "a" / WRITING / "00001.json").exists)
    (tmp_path / "a" / "shard.00001.mds").unlink()
    with assert_error(StorageError, path="shard.00001.mds") as caught:
        writer.finish()
    assert "stored" in str(caught.value)
    writer.close()
    assert not (tmp_path / "a" / "index.json").exists()
    write(str(tmp_path / "a"), range(5, 20), mode="resume")  # goes on behind the first shard
    assert [sample["id"] for sample in StreamingDataset(remote=str(tmp_path / "a"))[:]] == list(range(20))
