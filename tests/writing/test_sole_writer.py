from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.sole_writer import after_others, instead_of_others
from lightning_streaming.writing.writer import MDSWriter
from tests.formats.golden_datasets import read_samples
from tests.helpers import write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def hold(directory: Path, says: Connection) -> None:
    with after_others(directory):
        says.send("in")
        multiprocessing.Event().wait()


def enter(directory: Path, says: Connection) -> None:
    says.send("trying")
    with after_others(directory):
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
    with after_others(None), after_others(None):
        pass


@pytest.mark.parametrize("first", ["create", "resume"])
@pytest.mark.parametrize("second", ["create", "resume", "append"])
def test_two_writers_do_not_begin_in_one_directory(
    first: Literal["create", "resume"], second: Literal["create", "resume", "append"], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"out": str(tmp_path / "out"), "columns": {"id": "int"}, "size_limit": 230}
    with MDSWriter(**settings, mode=first) as writer:
        writer.write({"id": 7})
        with pytest.raises(ConfigError, match="another writer is at work in "):
            MDSWriter(**settings, mode=second, exist_ok=second == "create")
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
        with pytest.raises(ConfigError, match="another writer is at work in "), instead_of_others(directory):
            pass
    with instead_of_others(directory):
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
        with pytest.raises(ConfigError, match="another writer is at work"):  # the child did not give back the lock
            MDSWriter(**settings, mode="resume")
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
    with pytest.raises(ConfigError, match="another writer is at work in "):
        MDSWriter(**settings, mode=mode)
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
    with pytest.raises(ConfigError, match="another writer is at work"):
        MDSWriter(out=str(tmp_path), columns={"id": "int"}, mode="resume")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    write_dataset(tmp_path, 7, mode="resume")


def test_a_writer_that_could_not_begin_is_in_nobodys_way(tmp_path: Path) -> None:
    write_dataset(tmp_path, 7)
    with pytest.raises(ConfigError, match="other settings"):
        write_dataset(tmp_path, 9, mode="append", size_limit=240)
    write_dataset(tmp_path, 7, first_id=7, mode="append")
