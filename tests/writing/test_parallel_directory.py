from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.writing.part_directory import has_all_files, remove_half_part, sole_writer
from tests.formats.golden_datasets import read_index
from tests.helpers import write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def hold(directory: Path, says: Connection) -> None:
    with sole_writer(directory):
        says.send("in")
        multiprocessing.Event().wait()


def enter(directory: Path, says: Connection) -> None:
    says.send("trying")
    with sole_writer(directory):
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
    with sole_writer(None), sole_writer(None):
        pass


def test_only_what_a_writer_makes_is_removed(tmp_path: Path) -> None:
    foreign = ["notes.txt", "index.json.bak", "shard.1.mds", "my.shard.00000.mds", "shard.00000.mds.txt"]
    written = ["index.json", "shard.00000.mds", "shard.123456.mds.zstd", "shard.00001.mds.node-a-7-8.part"]
    for name in [*foreign, *written]:
        (tmp_path / name).touch()
    remove_half_part(tmp_path)
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
