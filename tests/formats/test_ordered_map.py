"""Many files at once in threads: results and errors in order, and no thread that outlives them."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Barrier, Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import FormatError, ShardCorruptError
from lightning_streaming.formats.shard import other_format
from lightning_streaming.formats.shard_format import StoredFiles, map_unknown, ordered_map
from tests.formats.stored import Folder
from tests.tiers import examples

THREADS, AHEAD = 16, 32


class Numbers:
    """Files called 0, 1, ..., each of which holds its own name."""

    shown = "numbers"

    def __init__(self, count: int = 100) -> None:
        self.names = [str(number) for number in range(count)]

    def shown_file(self, name: str) -> str:
        return name

    def sizes(self) -> Mapping[str, int]:
        return {name: len(name) for name in self.names}

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return name.encode()[start:stop]

    def read_if_there(self, name: str) -> bytes | None:
        return name.encode() if name in self.names else None


def read(files: StoredFiles, item: int) -> int:
    return int(files.read_range(str(item), 0, 9))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "ordered-map"]


@given(pauses=st.lists(st.sampled_from([0, 0, 0.002, 0.005]), max_size=60))
@settings(deadline=None, max_examples=examples(20))
def test_results_come_in_the_order_of_the_items_whichever_is_ready_first(pauses: list[float]) -> None:
    def slowly(files: StoredFiles, item: int) -> int:
        Event().wait(pauses[item])
        return read(files, item)

    assert list(ordered_map(slowly, Numbers(), range(len(pauses)))) == list(range(len(pauses)))


def test_looks_happen_at_the_same_time() -> None:
    together = Barrier(THREADS, timeout=30)

    def meet(files: StoredFiles, item: int) -> int:
        together.wait()
        return read(files, item)

    assert list(ordered_map(meet, Numbers(), range(2 * THREADS))) == list(range(2 * THREADS))


def test_of_several_errors_the_one_of_the_first_item_is_raised_after_the_results_before_it() -> None:
    later_failed = Event()

    def fail(files: StoredFiles, item: int) -> int:
        if item == 7:
            later_failed.set()
            raise ShardCorruptError("item 7")
        if item == 5:
            assert later_failed.wait(30)
            raise FormatError("item 5")
        return read(files, item)

    results = ordered_map(fail, Numbers(), range(50))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(FormatError, match="item 5"):
        next(results)


def test_no_more_items_are_taken_than_a_slow_one_may_hold_up() -> None:
    taken, released = list[int](), Event()

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    def look(files: StoredFiles, item: int) -> int:
        if item == 1:
            assert released.wait(30)
        return read(files, item)

    results = ordered_map(look, Numbers(1000), items())
    assert next(results) == 0
    assert len(taken) == AHEAD
    released.set()
    assert next(results) == 1
    assert len(taken) == AHEAD + 1
    results.close()


def test_once_it_is_closed_reads_end_and_nothing_more_is_begun() -> None:
    begun, reading, ended = list[int](), Event(), list[type]()

    def look(files: StoredFiles, item: int) -> int:
        begun.append(item)
        if item == 0:
            return read(files, item)
        try:
            while True:
                read(files, item)
                files.read_if_there(str(item))
                reading.set()
                Event().wait(0.001)
        except CancelledError as error:
            ended.append(type(error))
            raise

    results = ordered_map(look, Numbers(), range(100))
    assert next(results) == 0
    assert reading.wait(30)
    results.close()
    assert ended == [CancelledError] * (len(begun) - 1)
    assert len(begun) <= THREADS + 1


def test_an_interrupt_while_it_waits_ends_the_threads() -> None:
    def look(files: StoredFiles, item: int) -> int:
        _thread.interrupt_main()
        while True:
            read(files, item)
            Event().wait(0.001)

    with pytest.raises(KeyboardInterrupt):
        list(ordered_map(look, Numbers(), range(3)))


def test_known_results_are_not_computed_again() -> None:
    computed = list[int]()

    def look(files: StoredFiles, item: int) -> str:
        computed.append(item)
        return f"read {read(files, item)}"

    items = [(number, f"known {number}" if number % 3 else None) for number in range(20)]
    assert list(map_unknown(look, Numbers(), items)) == [known or f"read {number}" for number, known in items]
    assert sorted(computed) == list(range(0, 20, 3))
    assert list(map_unknown(look, Numbers(), [(1, "known")])) == ["known"]


def _spoil_npy(path: Path) -> None:
    np.save(path, np.arange(4))
    path.write_bytes(path.read_bytes()[:-3])


def _spoil_pair(path: Path) -> None:
    path.write_bytes(b"12")
    path.with_suffix(".idx").write_bytes(b"no index")


def _spoil_tar(path: Path) -> None:
    path.write_bytes(b"no tar file")


@pytest.mark.parametrize(
    ("name", "ending", "spoil"),
    [
        ("npy", "npy", _spoil_npy),
        ("megatron", "bin", _spoil_pair),
        ("webdataset", "tar", lambda p: p.write_bytes(b"x")),
    ],
)
def test_of_damaged_files_the_first_is_named(
    name: str, ending: str, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    for number in reversed(range(40)):
        spoil(tmp_path / f"{number:03}.{ending}")
    with pytest.raises(ShardCorruptError, match="000"):
        list(other_format(name).describe(Folder(tmp_path), {}))
