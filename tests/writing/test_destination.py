from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import fsspec
import pytest

from lightning_streaming.errors import ConfigError, IndexFormatError, ObjectNotFoundError, StorageError
from lightning_streaming.storage import Location
from lightning_streaming.writing.destination import (
    Destination,
    exclusive_lock,
    has_all_files,
    parse_out,
    prepare_directory,
    remove_partial_part,
    waiting_lock,
)
from lightning_streaming.writing.writers import MDSWriter
from tests.formats.golden_datasets import read_index, read_samples
from tests.helpers import assert_error, write_dataset


@pytest.fixture
def bucket() -> Iterator[str]:
    """A URL in fsspec's own memory."""
    fsspec.filesystem("memory").touch("/bucket/beside")
    yield "memory://bucket/data"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def destination_of(out: Any, **options: Any) -> Destination:
    return Destination(out, **options)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_old_dataset(out: Any, **settings: Any) -> None:
    with MDSWriter(columns={"id": "int"}, out=out, size_limit=300, **settings) as writer:
        for number in range(40):
            writer.write({"id": number})


@pytest.mark.parametrize(
    ("out", "directory", "remote"),
    [
        ("data", Path("data"), None),
        (Path("data"), Path("data"), None),
        ("file:///data", Path("/data"), None),
        ("~/data", Path.home() / "data", None),
        ("s3://bucket/data", None, "s3://bucket/data"),
        (("data", "s3://bucket/data"), Path("data"), "s3://bucket/data"),
        (["data", "/mnt/data"], Path("data"), "/mnt/data"),
    ],
)
def test_out_says_a_directory_and_a_remote(out: Any, directory: Path | None, remote: str | None) -> None:
    assert parse_out(out) == (directory, remote)


@pytest.mark.parametrize(
    "out",
    ["", (), ("data",), ("data", "s3://a", "s3://b"), ("s3://a", "data"), ("data", ""), ("data", "./data"), None, 3],
)
def test_any_other_out_is_refused(out: Any) -> None:
    with assert_error(ConfigError, option="out") as caught:
        parse_out(out)
    assert "pair" in str(caught.value)


def test_passwords_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_out(("s3://user:secret@bucket", "data"))
    assert "secret" not in str(caught.value)


def test_files_go_to_a_directory(tmp_path: Path) -> None:
    destination = destination_of(tmp_path / "new" / "out")
    destination.put("a.mds", b"a")
    destination.close()
    assert (tmp_path / "new" / "out" / "a.mds").read_bytes() == b"a"


def test_files_of_a_url_leave_nothing_here(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    destination = destination_of(bucket)
    destination.put("a.mds", b"a")
    destination.close()
    assert names(tmp_path) == []
    assert fsspec.filesystem("memory").cat("/bucket/data/a.mds") == b"a"


@pytest.mark.parametrize("keep_local", [True, False])
def test_files_of_a_pair_are_kept_on_request(keep_local: bool, bucket: str, tmp_path: Path) -> None:
    destination = destination_of((str(tmp_path / "out"), bucket), keep_local=keep_local)
    destination.put("a.mds", b"a")
    destination.close()
    assert fsspec.filesystem("memory").cat("/bucket/data/a.mds") == b"a"
    assert (tmp_path / "out").exists() == keep_local
    assert (tmp_path / "out" / "a.mds").exists() == keep_local


def test_the_second_place_of_a_pair_may_be_a_directory(tmp_path: Path) -> None:
    destination = destination_of((str(tmp_path / "a"), str(tmp_path / "b" / "c")))
    destination.put("a.mds", b"a")
    destination.close()
    assert names(tmp_path) == ["b"]
    assert names(tmp_path / "b" / "c") == ["a.mds"]


def test_a_url_has_no_directory_to_keep(bucket: str) -> None:
    with assert_error(ConfigError, option="keep_local"):
        destination_of(bucket, keep_local=True)


def test_only_what_was_put_is_removed(tmp_path: Path) -> None:
    destination = destination_of(tmp_path / "out")
    destination.put("a.mds", b"a")
    (tmp_path / "out" / "mine.txt").touch()
    destination.undo()
    assert names(tmp_path / "out") == ["mine.txt"]


def test_a_directory_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    for name in ("found", "made"):
        destination = destination_of(tmp_path / name)
        destination.put("a.mds", b"a")
        destination.undo()
    assert names(tmp_path) == ["found"]
    assert names(tmp_path / "found") == []


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with assert_error(ConfigError, option="out") as caught:
        prepare_directory(tmp_path, exist_ok=False)
    assert "empty" in str(caught.value)
    with assert_error(ConfigError, option="out", path="mine.txt") as caught:
        prepare_directory(tmp_path / "mine.txt", exist_ok=True)
    assert "must be a directory, but is a file" in str(caught.value)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_dataset_may_be_replaced(compression: str | None, tmp_path: Path) -> None:
    write_old_dataset(tmp_path / "out", compression=compression)
    assert len(names(tmp_path / "out")) > 2
    with assert_error(ConfigError, option="out", path="/out") as caught:
        prepare_directory(tmp_path / "out", exist_ok=False)
    assert "replaces" in str(caught.value)
    prepare_directory(tmp_path / "out", exist_ok=True)
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize(
    "foreign", ["mine.txt", "shard.00099.mds", "shard.00000.mds.1-2.part", "part0/shard.00000.mds"]
)
def test_nothing_is_replaced_where_something_else_lies(foreign: str, tmp_path: Path) -> None:
    write_old_dataset(tmp_path / "out")
    (tmp_path / "out" / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / foreign).touch()
    before = names(tmp_path / "out")
    with assert_error(ConfigError, option="out", path="/out") as caught:
        prepare_directory(tmp_path / "out", exist_ok=True)
    assert "which no index names as part of a dataset" in str(caught.value)
    assert names(tmp_path / "out") == before


def test_a_folder_is_not_replaced_even_if_an_index_names_it(tmp_path: Path) -> None:
    write_old_dataset(tmp_path / "out")
    (tmp_path / "out" / "shard.00000.mds").unlink()
    (tmp_path / "out" / "shard.00000.mds").mkdir()
    with assert_error(ConfigError, option="out", path="/out") as caught:
        prepare_directory(tmp_path / "out", exist_ok=True)
    assert "00000" in str(caught.value)
    assert (tmp_path / "out" / "index.json").exists()


def test_nothing_is_replaced_by_the_word_of_a_damaged_index(tmp_path: Path) -> None:
    write_old_dataset(tmp_path / "out")
    (tmp_path / "out" / "index.json").write_bytes(b"{}")
    before = names(tmp_path / "out")
    with assert_error(IndexFormatError, path="index.json"):
        prepare_directory(tmp_path / "out", exist_ok=True)
    assert names(tmp_path / "out") == before


@pytest.mark.parametrize("with_directory", [False, True], ids=["URL", "pair"])
def test_a_dataset_under_a_url_is_not_written_over_unless_told(
    bucket: str, with_directory: bool, tmp_path: Path
) -> None:
    def out(place: str) -> Any:
        return (str(tmp_path / place), bucket) if with_directory else bucket

    write_old_dataset(out("first"))
    with assert_error(ConfigError, option="out", path="data") as caught:
        destination_of(out("second")).clear(exist_ok=False)
    assert "holds a dataset" in str(caught.value)
    write_old_dataset(out("third"), exist_ok=True)


@pytest.mark.parametrize("kind", ["URL", "directory"])
def test_a_remote_dataset_that_is_replaced_is_no_dataset_meanwhile(kind: str, bucket: str, tmp_path: Path) -> None:
    remote = bucket if kind == "URL" else str(tmp_path / "remote")
    out = (str(tmp_path / "out"), remote)
    write_old_dataset(out)
    writer = MDSWriter(columns={"id": "int"}, out=out, size_limit=300, exist_ok=True)
    assert destination_of(out).published() is None
    writer.write({"id": 0})
    writer.finish()
    found = destination_of(out).published()
    assert found is not None
    assert found[0].num_samples == 1


def test_the_directory_of_a_pair_is_not_used_unless_it_is_to_be_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").touch()
    write_old_dataset((str(tmp_path / "mine"), str(tmp_path / "remote")))
    assert names(tmp_path / "mine") == ["mine.txt"]
    with assert_error(ConfigError, option="out", path="mine") as caught:
        write_old_dataset((str(tmp_path / "mine"), str(tmp_path / "other")), keep_local=True)
    assert "empty" in str(caught.value)


@pytest.mark.parametrize("mode", ["create", "resume", "append"])
def test_a_file_is_no_directory(mode: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (str(tmp_path / "file"), (str(tmp_path / "here"), str(tmp_path / "file"))):
        with assert_error(ConfigError, option="out", path="file") as caught:
            MDSWriter(columns={"id": "int"}, out=out, mode=mode)  # type: ignore[arg-type]
        assert "must be a directory, but is a file" in str(caught.value)


@pytest.mark.parametrize("mode", ["create", "resume", "append"])
def test_what_the_system_refuses_is_a_storage_error_with_the_path(mode: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (str(tmp_path / "file" / "sub"), (str(tmp_path / "here"), str(tmp_path / "file" / "sub"))):
        with pytest.raises(StorageError, match=r"could not .*file/sub"):
            MDSWriter(columns={"id": "int"}, out=out, mode=mode)  # type: ignore[arg-type]


def test_a_directory_names_what_the_system_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    destination, location = destination_of(tmp_path), Location(str(tmp_path))
    for refused in (
        (location / "folder").remove,
        (location / "folder").read,
        lambda: (location / "file/x").put(b""),
        lambda: destination.put("file/x", b""),
        lambda: destination.make_folder("file/x"),
    ):
        with pytest.raises(StorageError, match=str(tmp_path)) as caught:
            refused()
        assert not isinstance(caught.value, ObjectNotFoundError)


pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def hold(directory: Path, says: Connection) -> None:
    with waiting_lock(directory):
        says.send("in")
        multiprocessing.Event().wait()


def enter(directory: Path, says: Connection) -> None:
    says.send("trying")
    with waiting_lock(directory):
        says.send("in")


def start(target: Any, directory: Path) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(directory, theirs))
    process.start()
    return process, ours


def test_a_second_writer_waits_until_the_first_is_dead(tmp_path: Path) -> None:
    first, says_first = start(hold, tmp_path / "part")
    assert says_first.recv() == "in"
    second, says_second = start(enter, tmp_path / "part")
    assert says_second.recv() == "trying"
    assert not says_second.poll(0.2)
    os.kill(first.pid, signal.SIGKILL)
    assert says_second.recv() == "in"
    first.join()
    second.join()
    assert list((tmp_path / "part").iterdir()) == []


def test_a_place_that_is_no_directory_is_not_waited_for() -> None:
    with waiting_lock(None), waiting_lock(None):
        pass


@pytest.mark.parametrize("first", ["create", "resume"])
@pytest.mark.parametrize("second", ["create", "resume", "append"])
def test_two_writers_do_not_begin_in_one_directory(
    first: Literal["create", "resume"], second: Literal["create", "resume", "append"], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"out": str(tmp_path / "out"), "columns": {"id": "int"}, "size_limit": 230}
    with MDSWriter(**settings, mode=first) as writer:
        writer.write({"id": 7})
        with assert_error(ConfigError, option="out", path="/out") as caught:
            MDSWriter(**settings, mode=second, exist_ok=second == "create")
        assert "another writer" in str(caught.value)
    assert [sample["id"] for sample in read_samples(tmp_path / "out", tmp_path)] == [7]


def test_a_directory_that_was_made_again_is_not_taken_for_the_locked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "out"
    directory.mkdir()

    def lock_late(_handle: int, _operation: int) -> None:  # meanwhile another writer gave up, and a third began
        directory.rename(tmp_path / "gone")
        directory.mkdir()

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", lock_late)
        with assert_error(ConfigError, option="out", path="/out") as caught, exclusive_lock(directory):
            pass
        assert "another writer" in str(caught.value)
    with exclusive_lock(directory):
        pass


def unwind(writer: MDSWriter, says: Connection) -> None:
    """What a forked child does whose stack is unwound."""
    writer.__exit__(SystemExit, SystemExit(0), None)
    try:
        writer.finish()
    except ConfigError as error:
        says.send(str(error))
    del writer


@pytest.mark.parametrize("mode", ["create", "resume"])
def test_a_forked_child_touches_nothing(mode: Literal["create", "resume"], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"out": str(tmp_path / "out"), "columns": {"id": "int"}, "size_limit": 230}
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with MDSWriter(**settings, mode=mode) as writer:
        for number in range(20):
            writer.write({"id": number})
        child = context.Process(target=unwind, args=(writer, theirs))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert f"is of process {os.getpid()}, from which this one was forked" in ours.recv()
        with assert_error(ConfigError, option="out", path="/out") as caught:  # the child did not give back the lock
            MDSWriter(**settings, mode="resume")
        assert "another writer" in str(caught.value)
        for number in range(20, 40):
            writer.write({"id": number})
    assert [sample["id"] for sample in read_samples(tmp_path / "out", tmp_path)] == list(range(40))


@pytest.mark.parametrize("mode", ["resume", "append"])
@pytest.mark.parametrize("kept", [False, True])
def test_two_writers_do_not_go_on_with_one_directory(
    mode: Literal["resume", "append"], kept: bool, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    out: Any = (str(here), str(tmp_path / "there")) if kept else str(here)
    settings: dict[str, Any] = {"out": out, "keep_local": kept, "columns": {"id": "int"}, "size_limit": 230}
    if mode == "append":
        with MDSWriter(**settings) as begun:
            begun.write({"id": 0})
    first = MDSWriter(**settings, mode=mode)
    with assert_error(ConfigError, option="out") as caught:
        MDSWriter(**settings, mode=mode)
    assert "another writer" in str(caught.value)
    first.close()
    with MDSWriter(**settings, mode=mode) as second:
        second.write({"id": 1})
    with MDSWriter(**settings, mode=mode) as third:
        assert third.num_samples == (2 if mode == "append" else 1)


def resume_and_wait(directory: Path, says: Connection) -> None:
    writer = MDSWriter(out=str(directory), columns={"id": "int"}, mode="resume")
    says.send(writer.num_samples)
    multiprocessing.Event().wait()


def test_a_killed_writer_is_in_nobodys_way(tmp_path: Path) -> None:
    process, says = start(resume_and_wait, tmp_path)
    assert says.recv() == 0
    with assert_error(ConfigError, option="out") as caught:
        MDSWriter(out=str(tmp_path), columns={"id": "int"}, mode="resume")
    assert "another writer" in str(caught.value)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    write_dataset(tmp_path, 7, mode="resume")


def test_a_writer_that_could_not_begin_is_in_nobodys_way(tmp_path: Path) -> None:
    write_dataset(tmp_path, 7)
    with assert_error(ConfigError, path="shard.00000.mds") as caught:
        write_dataset(tmp_path, 9, mode="append", size_limit=240)
    assert "other settings" in str(caught.value)
    write_dataset(tmp_path, 7, first_id=7, mode="append")


def test_only_what_a_writer_makes_is_removed(tmp_path: Path) -> None:
    foreign = ["notes.txt", "index.json.bak", "shard.1.mds", "my.shard.00000.mds", "shard.00000.mds.txt"]
    written = ["index.json", "shard.00000.mds", "shard.123456.mds.zstd", "shard.00001.mds.node-a-7-8.part"]
    for name in [*foreign, *written]:
        (tmp_path / name).touch()
    remove_partial_part(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(foreign)


def test_files_that_are_missing_or_short_are_seen(tmp_path: Path) -> None:
    index = read_index(write_dataset(tmp_path, 12))
    assert has_all_files(tmp_path, index)
    shard = tmp_path / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert not has_all_files(tmp_path, index)
    shard.unlink()
    assert not has_all_files(tmp_path, index)


def test_compressed_files_are_those_looked_for(tmp_path: Path) -> None:
    index = read_index(write_dataset(tmp_path, 12, compression="zstd"))
    assert has_all_files(tmp_path, index)
