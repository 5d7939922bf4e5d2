"""The index of a dataset's ids: it finds each, is made once on a node, and who is killed has made nothing in vain."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import StreamingDataset
from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.errors import ConfigError, DiskFullError, IntegrityError, StorageError
from lightning_streaming.formats.columns import read_columns
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.selection import id_index, scanning
from lightning_streaming.selection.id_index import IdIndex, index_ids
from tests.helpers import assert_error, write_shards
from tests.tiers import examples
from tests.tools.running import run
from tests.waits import told_at_once

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def cache_of(root: Path) -> ShardCache:
    return ShardCache(CacheConfig(name="x", remote=str(root), local=str(root.parent / "local")))


def indexed(root: Path, on: str = "id") -> IdIndex:
    cache = cache_of(root)
    return index_ids(on, cache.read_index(), cache)


def selections(root: Path) -> Path:
    return root.parent / "local" / "selections"


@settings(max_examples=examples(30), deadline=None)
@given(
    ids=st.one_of(
        st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=60),
        st.lists(st.text(max_size=3), unique=True, max_size=60),
        st.lists(st.binary(max_size=2), unique=True, max_size=60),
    ),
    cut=st.integers(0, 60),
    per_bucket=st.integers(1, 70),
)
def test_each_id_is_found_and_no_other(ids: list[Any], cut: int, per_bucket: int) -> None:
    kind = type(ids[0]).__name__ if ids else "int"
    others: dict[str, list[Any]] = {"int": [2**62 + 1, 0, -1], "str": ["none", "ab\0c"], "bytes": [b"none"]}
    absent = others[kind]
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_index, "_ROWS_PER_BUCKET", per_bucket)
        patch.setattr(scanning, "SHARDS_AT_ONCE", 1)
        sizes = [min(cut, len(ids)), len(ids) - min(cut, len(ids))]
        root = write_shards(Path(directory) / "x", sizes, {"id": kind}, lambda number: {"id": ids[number]})
        index = indexed(root)
        expected = [*range(len(ids)), *(ids.index(one) if one in ids else -1 for one in absent)]
        assert index.places(ids + absent).tolist() == expected
        assert [index.place(one) for one in ids + absent] == expected
        assert len(index) == len(ids)
        assert index.is_whole()
        assert (index.cached_at is None) == (not ids)


def test_arrays_and_lists_of_ids_are_looked_for_alike(tmp_path: Path) -> None:
    index = indexed(write_shards(tmp_path / "x", [4, 5]))
    for dtype in (np.int8, np.uint64, np.int64):
        assert index.places(np.array([8, 0, 9], dtype)).tolist() == [8, 0, -1]
    assert index.places([]).tolist() == []


def test_ids_rewritten_in_place_are_indexed_again(tmp_path: Path) -> None:
    def place_of_1(ids: list[int]) -> int:
        new = write_shards(tmp_path / "new", [4], make=lambda number: {"id": ids[number]})
        (tmp_path / "x").mkdir(exist_ok=True)
        for path in new.iterdir():
            os.utime(path, (0, 0))
            path.replace(tmp_path / "x" / path.name)
        new.rmdir()
        cache = ShardCache(CacheConfig(name="x", remote=str(tmp_path / "x")))
        return index_ids("id", cache.read_index(), cache).place(1)

    assert [place_of_1([1, 2, 3, 4]), place_of_1([2, 3, 4, 1])] == [0, 3]


def test_numbers_below_zero_are_not_large_ones(tmp_path: Path) -> None:
    """Though both have the same 64 bits."""
    large, small = [2**64 - 1, 2**63, 5], [-1, -(2**63), 5]
    unsigned = indexed(write_shards(tmp_path / "a" / "x", [3], {"id": "uint64"}, lambda number: {"id": large[number]}))
    signed = indexed(write_shards(tmp_path / "b" / "x", [3], {"id": "int64"}, lambda number: {"id": small[number]}))
    for index, there, absent in ((unsigned, large, small[:2]), (signed, small, large[:2])):
        assert [index.place(one) for one in there + absent] == [0, 1, 2, -1, -1]
        assert index.places(there + absent).tolist() == [0, 1, 2, -1, -1]
    assert unsigned.places(np.array(small, np.int64)).tolist() == [-1, -1, 2]
    assert signed.places(np.array(large, np.uint64)).tolist() == [-1, -1, 2]
    assert unsigned.place(np.int64(-1)) == signed.place(np.uint64(2**64 - 1)) == -1


def test_numbers_of_the_same_64_bits_may_be_in_one_column(tmp_path: Path) -> None:
    ids = [-1, 2**64 - 1, 7, -(2**63), 2**63]
    root = write_shards(tmp_path / "a" / "x", [2, 3], {"id": "str_int"}, lambda number: {"id": ids[number]})
    index = indexed(root)
    assert index.places(ids).tolist() == [index.place(one) for one in ids] == [0, 1, 2, 3, 4]
    twice = [-1, 2**64 - 1, -1]
    root = write_shards(tmp_path / "b" / "x", [2, 1], {"id": "str_int"}, lambda number: {"id": twice[number]})
    with pytest.raises(ConfigError, match="samples 0 and 2 both have id=-1; write"):
        indexed(root)


def test_hashes_that_begin_alike_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = id_index._hash
    monkeypatch.setattr(id_index, "_hash", lambda value: bytes(8) + whole(value)[8:])
    root = write_shards(tmp_path / "x", [20], {"id": "str"}, lambda number: {"id": f"n{number}"})
    index = indexed(root)
    assert index.places([f"n{number}" for number in range(21)]).tolist() == [*range(20), -1]
    assert [index.place(f"n{number}") for number in range(21)] == [*range(20), -1]


def test_an_id_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "x", [2], {"id": "str_int"}, lambda number: {"id": 2**64 + number})
    with pytest.raises(ConfigError, match="stream 'x': ids that are whole numbers must fit in 64 bits"):
        indexed(root)


def _killed_after(root: Path, shards: int) -> None:
    """Begin to make the index, in a process that kills itself."""
    read = 0

    def deadly(info: ShardInfo, *of: Any) -> Any:
        nonlocal read
        read += 1
        if read > shards:
            os.kill(os.getpid(), signal.SIGKILL)
        return read_columns(info, *of)

    vars(scanning)["read_columns"] = deadly
    scanning._MOST_THREADS = 1
    indexed(root)


def test_who_is_killed_has_read_nothing_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "SHARDS_AT_ONCE", 1)
    root = write_shards(tmp_path / "x", [3] * 12)
    child = multiprocessing.get_context("fork").Process(target=_killed_after, args=(root, 7))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list(selections(root).glob("*.parts/*.npy"))) == 7
    assert not list(selections(root).glob("*.npy"))
    looked_at: list[str] = []

    def watched(info: ShardInfo, *of: Any) -> Any:
        looked_at.append(info.raw_data.basename)
        return read_columns(info, *of)

    monkeypatch.setattr(scanning, "read_columns", watched)
    index = indexed(root)
    assert len(looked_at) == 5
    assert index.places(np.arange(36)).tolist() == list(range(36))
    assert [path.suffix for path in selections(root).iterdir() if path.suffix != ".lock"] == [".npy"]
    monkeypatch.setattr(scanning, "read_columns", None)
    assert indexed(root).place(35) == 35  # by nobody again


def test_a_part_that_is_damaged_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "SHARDS_AT_ONCE", 1)
    root = write_shards(tmp_path / "x", [3] * 12)
    child = multiprocessing.get_context("fork").Process(target=_killed_after, args=(root, 7))
    child.start()
    child.join()
    for path in selections(root).glob("*.parts/*.npy"):
        held = path.read_bytes()
        path.write_bytes(held[:140] + bytes([held[140] ^ 1]) + held[141:])
    assert indexed(root).places(np.arange(36)).tolist() == list(range(36))


def _make(root: Path, barrier: Any, read: Any) -> None:
    def counting(info: ShardInfo, *of: Any) -> Any:
        read.put(info.raw_data.basename)
        return read_columns(info, *of)

    vars(scanning)["read_columns"] = counting
    barrier.wait()
    assert indexed(root).place(7) == 7


def test_processes_that_want_it_at_once_make_it_once(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "x", [3] * 12)
    context = multiprocessing.get_context("fork")
    barrier, read = context.Barrier(5), context.Queue()
    makers = [context.Process(target=_make, args=(root, barrier, read)) for _ in range(5)]
    for maker in makers:
        maker.start()
    names = [read.get(timeout=60) for _ in range(12)]
    for maker in makers:
        maker.join()
    assert [maker.exitcode for maker in makers] == [0] * 5
    assert len(set(names)) == 12
    assert read.empty()


@pytest.mark.parametrize("refused", ["lock", "index"])
def test_where_nothing_may_be_written_it_is_made_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    root = write_shards(tmp_path / "x", [3] * 5)

    def denied(*_: Any) -> Any:
        raise StorageError("denied") if refused == "lock" else PermissionError("denied")

    if refused == "lock":
        monkeypatch.setattr(scanning, "selection_lock", denied)
    else:
        monkeypatch.setattr(scanning, "adopt_file", denied)
    index = indexed(root)
    assert index.cached_at is None
    assert index.places(np.arange(16)).tolist() == [*range(15), -1]
    assert "is not writable: each process builds its own index of ids" in caplog.text


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_shards(tmp_path / "x", [3] * 5)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match=r"stream 'x': no space left in .*No space left on device"):
        indexed(root)
    monkeypatch.undo()
    assert indexed(root).place(3) == 3
    assert not list(selections(root).glob("*.part"))


def test_a_long_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(scanning, "SAMPLES_AT_ONCE", 10)
    monkeypatch.setattr(scanning, "SHARDS_AT_ONCE", 1)
    with told_at_once(caplog, monkeypatch):
        indexed(write_shards(tmp_path / "x", [3] * 5))
    assert "building the index of column 'id' over 15 samples of stream 'x'" in caplog.messages[0]
    assert caplog.messages[-1].startswith("reading ids in column 'id' of stream 'x': 15 of 15 samples, after ")


def test_an_index_that_is_damaged_is_told_when_it_misleads(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "x", [9], {"id": "int", "y": "int"}, lambda number: {"id": number, "y": number})
    images = write_shards(tmp_path / "images", [9])
    join = {"x": {"remote": str(root), "local": str(tmp_path / "local"), "key": "id"}}
    dataset = StreamingDataset(remote=str(images), join=join)
    assert [sample["y"] for sample in dataset[:]] == list(range(9))
    dataset.close()
    (kept,) = selections(root).glob("*.npy")
    held = kept.read_bytes()
    at_places, at_keys = len(held) - 8 * 10, 128
    for at, value in ((at_places, b"\0"), (at_keys, b"\xff" * 72)):
        kept.write_bytes(held[:at] + value + held[at + len(value) :])
        with pytest.raises(StorageError, match=rf"stream '0', join 'x': {kept} is damaged; remove it"):
            _ = StreamingDataset(remote=str(images), join=join)[:]
    kept.write_bytes(b"\x93NUMPY")  # that it is no index at all is seen at once
    assert [sample["y"] for sample in StreamingDataset(remote=str(images), join=join)[:]] == list(range(9))


def test_the_tools_count_and_clear_it_as_they_do_selections(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "x", [3] * 5)
    assert indexed(root).cached_at is not None
    before = run("cache", "info", tmp_path / "local", "--json").json
    assert before["caches"][0]["selections"]["files"] == 2  # with its lock
    assert run("cache", "clear", tmp_path / "local", "--yes").code == 0
    assert not list(selections(root).glob("*.npy"))


def test_shards_that_changed_and_kept_their_index_are_told(tmp_path: Path) -> None:
    def rows(first: int) -> Any:
        return lambda number: {"id": (number + first) % 9, "y": number}

    root = write_shards(tmp_path / "x", [9], {"id": "int", "y": "int"}, rows(0))
    images = write_shards(tmp_path / "images", [9])
    join = {"x": {"remote": str(root), "key": "id"}}
    assert StreamingDataset(remote=str(images), join=join)[3]["y"] == 3
    begun = StreamingDataset(remote=str(images), join=join)
    assert begun.size == 9  # its ids are indexed
    other = write_shards(tmp_path / "other", [9], {"id": "int", "y": "int"}, rows(1))
    (other / "shard.00000.mds").replace(root / "shard.00000.mds")
    with assert_error(IntegrityError, path=str(root / "shard.00000.mds")):
        _ = begun[3]
    assert StreamingDataset(remote=str(images), join=join)[3]["y"] == 2
