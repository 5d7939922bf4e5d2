"""The order of a large epoch: one file per node, made once, mapped by all, gone when nobody needs it.

The next epoch's order, made in the background: there in time, kept until its use, and never in the way.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_streaming import Stream
from lightning_streaming.errors import ConfigError, StorageError
from lightning_streaming.files import hold_lock
from lightning_streaming.formats.index import INDEX_BASENAME, parse_index
from lightning_streaming.resume import order_files
from lightning_streaming.resume.order_files import OrderAhead, shared_order
from lightning_streaming.resume.run_order import RunRequest
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.draw import Shuffled, drawn_here
from lightning_streaming.sequence.phases import ResolvedPhase
from lightning_streaming.sequence.settings import OrderSettings, ResolvedOrder
from lightning_streaming.sequence.weights import DatasetShape, StreamWeight, resolve_weights
from tests.helpers import ids, make_loader, write_dataset
from tests.reading.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


SETTINGS = OrderSettings(shuffle=True).resolved(1)


@pytest.fixture(autouse=True)
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that orders are kept in, for this test alone."""
    monkeypatch.setenv("LIGHTNING_STREAMING_RUNTIME", str(tmp_path / "runtime"))
    return tmp_path / "runtime" / "orders"


def _shape(samples: int = 70_000, repeat: float | None = None) -> DatasetShape:
    sizes = np.full(samples // 100, 100)
    weights = resolve_weights([StreamWeight(repeat=repeat)], [int(sizes.sum())], None, 0)
    return DatasetShape(shard_sizes=(sizes,), weights=weights)


def _made(orders: Path) -> list[str]:
    return sorted(path.name for path in orders.glob("*") if path.name != "lock")


def _order(shape: DatasetShape, epoch: int = 0, settings: ResolvedOrder = SETTINGS) -> NDArray[np.integer[Any]]:
    order, expected = shared_order(Shuffled(settings, shape, epoch)), drawn_here(Shuffled(settings, shape, epoch))
    assert order.dtype == expected.dtype == np.uint32
    assert np.array_equal(order, expected)
    return order


def _is_mapped(order: NDArray[np.integer[Any]]) -> bool:
    return isinstance(order.base, memoryview) and isinstance(order.base.obj, mmap.mmap)


def test_a_step_that_was_cut_is_drawn_once_for_all_processes(tmp_path: Path, orders: Path) -> None:
    index = parse_index((write_dataset(tmp_path / "web") / INDEX_BASENAME).read_bytes(), "web")
    whole = (("web", 1.0),)
    cut = ResolvedPhase(name="cut", planned_stop=140_000, begin=whole, end=whole, cut=70_001)
    asked = RunRequest(settings=SETTINGS, weights=(StreamWeight(),), epoch_size=None, phases=(cut,))
    plans, made = [], []
    for _ in range(2):
        mixture = asked.mixture(SETTINGS, Catalog({"web": index}))
        assert mixture is not None
        plans.append(mixture.plan.drawn.tolist())
        (path,) = orders.glob("*.order")
        made.append(path.stat().st_mtime_ns)
    assert plans == [[[0], [70_001]]] * 2
    assert made[0] == made[1]


def test_a_large_order_is_a_file_that_is_mapped_and_made_once(orders: Path) -> None:
    first = _order(_shape())
    assert _is_mapped(first)
    (path,) = orders.glob("*.order")
    made = path.stat().st_mtime_ns
    again = _order(_shape())
    assert _is_mapped(again)
    assert path.stat().st_mtime_ns == made
    with pytest.raises(ValueError, match="read-only"):
        again[0] = 1


def test_epochs_seeds_and_data_have_orders_of_their_own(orders: Path) -> None:
    kept = [
        _order(_shape()),
        _order(_shape(), epoch=1),
        _order(_shape(), settings=OrderSettings(shuffle=True, shuffle_seed=1).resolved(1)),
        _order(_shape(80_000)),
        _order(_shape(repeat=1.5)),
    ]
    assert len(_made(orders)) == len(kept)


@pytest.mark.parametrize("samples", [100, 65_500])
def test_a_small_order_is_no_file(orders: Path, samples: int) -> None:
    assert not _is_mapped(_order(_shape(samples)))
    assert not orders.exists()


def test_an_order_that_changes_nothing_is_no_file(orders: Path) -> None:
    order = Shuffled(OrderSettings().resolved(1), _shape(), 0, shared_order)
    assert order.ids(np.asarray([69_999])).tolist() == [69_999]
    assert not orders.exists()


def test_an_order_on_demand_is_no_file(orders: Path) -> None:
    settings = OrderSettings(shuffle=True, shuffle_algo="blockwise").resolved(1)
    order = Shuffled(settings, _shape(), 0, shared_order)
    assert len(np.unique(order.ids(np.arange(70_000)))) == 70_000
    assert not orders.exists()


def test_a_weighted_order_without_shuffle_is_a_file(orders: Path) -> None:
    assert _is_mapped(_order(_shape(repeat=1.5), settings=OrderSettings().resolved(1)))


def test_orders_that_nobody_maps_are_removed_when_the_next_is_made(orders: Path) -> None:
    kept = _order(_shape(), epoch=0)
    (name,) = _made(orders)
    _order(_shape(), epoch=1)
    _order(_shape(), epoch=2)
    assert len(_made(orders)) == 2  # epoch 0, which is in use, and epoch 2
    assert name in _made(orders)
    assert np.array_equal(kept, _order(_shape(), epoch=0))


@pytest.mark.parametrize("damage", [b"", b"12345", bytes(4 * 69_999)])
def test_an_order_cut_short_by_a_crash_of_the_machine_is_made_again(orders: Path, damage: bytes) -> None:
    _order(_shape())
    (path,) = orders.glob("*.order")
    path.write_bytes(damage)
    assert len(_order(_shape())) == 70_000


def test_an_order_stays_readable_when_its_file_is_removed(orders: Path) -> None:
    order = _order(_shape())
    (path,) = orders.glob("*.order")
    path.unlink()
    assert np.array_equal(order, _order(_shape()))


def _draw_in(process: int, start: Any, answers: Any) -> None:
    start.wait()
    order = shared_order(Shuffled(SETTINGS, _shape(), 0))
    answers.put((process, _is_mapped(order), int(order[:1000].sum())))


def test_processes_that_need_it_at_once_share_one_file(orders: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(6), context.SimpleQueue()
    children = [context.Process(target=_draw_in, args=(number, start, answers)) for number in range(6)]
    for child in children:
        child.start()
    got = [answers.get() for _ in children]
    for child in children:
        child.join()
    assert {answer[1:] for answer in got} == {(True, int(_order(_shape())[:1000].sum()))}
    assert len(_made(orders)) == 1


MAKER = """
from lightning_streaming.resume.order_files import shared_order
from lightning_streaming.sequence.draw import Shuffled
from tests.resume.test_order_files import SETTINGS, _shape

draw = Shuffled.draw_into

def draw_half(order, out):
    draw(order, out)
    out[len(out) // 2 :] = 0
    print("writing", flush=True)
    input()

Shuffled.draw_into = draw_half
shared_order(Shuffled(SETTINGS, _shape(), 0))
"""


@pytest.mark.nightly
def test_what_a_killed_maker_left_is_removed_by_the_next(orders: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", MAKER]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"writing\n"
        maker.send_signal(signal.SIGKILL)
    (partial,) = _made(orders)
    assert partial.endswith(".part")
    _order(_shape(), epoch=5)
    assert len(_made(orders)) == 1
    assert not list(orders.glob("*.part"))


def test_a_disk_without_room_is_an_error_that_says_so_and_leaves_nothing(orders: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"280000 bytes .*/orders/.*LIGHTNING_STREAMING_RUNTIME"):
            shared_order(Shuffled(SETTINGS, _shape(), 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _made(orders) == []
    _order(_shape())


def test_a_draw_that_fails_leaves_nothing(orders: Path) -> None:
    with pytest.raises(ConfigError, match="needs blocks"):
        shared_order(Shuffled(BROKEN, _shape(), 0))
    assert _made(orders) == []


def test_loaders_read_a_large_epoch_and_remove_it_in_time(orders: Path, tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", 50)
    streams = [Stream(remote=str(root), repeat=1400)]
    settings: dict[str, Any] = {"streams": streams, "batch_size": 1000, "shuffle_block_size": None}
    loader = make_loader(workers=2, loader={"persistent_workers": True}, **settings)
    alone = make_loader(workers=0, **settings)
    for epoch in range(2):
        batches = iter(loader)
        assert ids([next(batches)]) == ids([next(iter(alone))])
        assert len(_made(orders)) <= 1 + epoch
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "sample_in_epoch": 69_000})
    assert len(ids(loader)) == 1
    del loader, alone, batches
    _order(_shape(), epoch=9)
    assert wait_until(lambda: len(_made(orders)) == 1)


BROKEN = OrderSettings(shuffle=True, shuffle_algo="py1br", shuffle_block_size=1).resolved(1)


def make_shape(samples: int) -> DatasetShape:
    weights = resolve_weights([StreamWeight()], [samples], None, 0)
    return DatasetShape(shard_sizes=(np.full(samples // 100, 100),), weights=weights)


SHAPE = make_shape(70_000)


@pytest.fixture
def ahead() -> Iterator[OrderAhead]:
    ahead = OrderAhead()
    yield ahead
    finish()
    ahead.close()


def finish() -> None:
    """Wait for the background."""
    for thread in threading.enumerate():
        if thread.name == "order-ahead":
            thread.join(timeout=20)
            assert not thread.is_alive()


def made(orders: Path) -> set[str]:
    return {path.name for path in orders.glob("*.order*")}


def of_epoch(epoch: int) -> Shuffled:
    return Shuffled(SETTINGS, SHAPE, epoch)


def name(epoch: int) -> str:
    return of_epoch(epoch).digest + ".order"


class Held:
    """A draw that begins, and goes on when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(order_files, "shared_order", self._draw)

    def _draw(self, order: Shuffled, timeout: float) -> NDArray[np.integer[Any]]:
        self.calls.append(order.epoch)
        self.begun.set()
        assert self.go_on.wait(20)
        return shared_order(order, timeout)


def test_an_order_is_there_when_it_is_asked_for(ahead: OrderAhead, orders: Path) -> None:
    ahead.prepare(of_epoch(1))
    finish()
    assert made(orders) == {name(1)}
    written = (orders / name(1)).stat().st_mtime_ns
    assert np.array_equal(shared_order(of_epoch(1)), drawn_here(of_epoch(1)))
    assert (orders / name(1)).stat().st_mtime_ns == written


def test_an_order_is_kept_until_the_one_after_it_is_made(ahead: OrderAhead, orders: Path) -> None:
    ahead.prepare(of_epoch(1))
    finish()
    other = shared_order(of_epoch(7))  # whoever makes an order removes those that nobody holds
    assert other is not None
    assert made(orders) == {name(1), name(7)}
    ahead.prepare(of_epoch(2))
    finish()
    del other
    shared_order(of_epoch(8))
    assert made(orders) == {name(2), name(8)}


def test_close_lets_go(ahead: OrderAhead, orders: Path) -> None:
    ahead.prepare(of_epoch(1))
    finish()
    ahead.close()
    shared_order(of_epoch(7))
    assert made(orders) == {name(7)}


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        (SETTINGS, 100),
        (OrderSettings().resolved(1), 70_000),
        (OrderSettings(shuffle=True, shuffle_algo="blockwise").resolved(1), 70_000),
    ],
    ids=["small", "identity", "on demand"],
)
def test_what_needs_no_file_is_not_made(
    ahead: OrderAhead, orders: Path, settings: ResolvedOrder, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    ahead.prepare(Shuffled(settings, make_shape(samples), 1))
    finish()
    assert held.calls == []
    assert not orders.exists()


def test_one_at_a_time_and_nobody_waits(ahead: OrderAhead, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    ahead.prepare(of_epoch(1))
    assert held.begun.wait(20)
    ahead.prepare(of_epoch(2))
    ahead.close()
    held.go_on.set()
    finish()
    assert held.calls == [1]


def test_asking_again_makes_nothing_again(ahead: OrderAhead, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    held.go_on.set()
    for _ in range(3):
        ahead.prepare(of_epoch(1))
        finish()
    assert held.calls == [1]


def test_a_file_that_is_there_is_kept_and_not_made_again(ahead: OrderAhead, orders: Path) -> None:
    shared_order(of_epoch(1))
    written = (orders / name(1)).stat().st_mtime_ns
    ahead.prepare(of_epoch(1))
    finish()
    shared_order(of_epoch(7))
    assert (orders / name(1)).stat().st_mtime_ns == written


def test_while_another_process_makes_an_order_nothing_is_done_until_asked_again(
    ahead: OrderAhead, orders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hold_lock(orders / "lock", 1, "test"):
        ahead.prepare(of_epoch(1))
        finish()
        assert made(orders) == set()
    assert caplog.records == []
    ahead.prepare(of_epoch(1))
    finish()
    assert made(orders) == {name(1)}


def test_a_failure_is_logged_once_with_its_cause_and_met_by_the_reader(
    ahead: OrderAhead, orders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        ahead.prepare(Shuffled(BROKEN, SHAPE, 1))
        finish()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "epoch 1 could not be drawn ahead of time" in record.getMessage()
    assert "ConfigError: shuffle_algo='py1br' needs blocks" in record.getMessage()
    assert made(orders) == set()
    with pytest.raises(ConfigError, match="needs blocks"):
        shared_order(Shuffled(BROKEN, SHAPE, 1))


def test_a_copy_sent_elsewhere_starts_with_nothing(ahead: OrderAhead, orders: Path) -> None:
    ahead.prepare(of_epoch(1))
    finish()
    copy = pickle.loads(pickle.dumps(ahead))
    assert isinstance(copy, OrderAhead)
    ahead.close()
    shared_order(of_epoch(7))
    assert made(orders) == {name(7)}


def _prepare_in_child(ahead: OrderAhead, answers: Any) -> None:
    ahead.prepare(of_epoch(2))
    finish()
    answers.put(os.getpid())


def test_a_forked_child_starts_fresh_while_its_parent_is_busy(
    ahead: OrderAhead, orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    ahead.prepare(of_epoch(1))
    assert held.begun.wait(20)
    monkeypatch.undo()
    monkeypatch.setenv("LIGHTNING_STREAMING_RUNTIME", str(orders.parent))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_prepare_in_child, args=(ahead, answers))
    child.start()
    assert answers.get() == child.pid
    child.join()
    assert made(orders) == {name(2)}
    held.go_on.set()
    finish()
    assert made(orders) == {name(1)}


LEAVES = """
from lightning_streaming.sequence.draw import Shuffled
from tests.resume.test_order_files import of_epoch
from lightning_streaming.resume.order_files import OrderAhead
import threading

begun = threading.Event()

def draw_for_ever(*arguments):
    begun.set()
    threading.Event().wait()

Shuffled.draw_into = draw_for_ever
ahead = OrderAhead()
ahead.prepare(of_epoch(1))
assert begun.wait(20)
ahead.close()
"""


@pytest.mark.nightly
def test_a_process_ends_while_its_background_is_busy(orders: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", LEAVES], env=environment, timeout=60, check=False).returncode == 0
    shared_order(of_epoch(2))
    assert made(orders) == {name(2)}


def test_whoever_reads_most_of_an_epoch_prepares_the_next(tmp_path: Path, orders: Path) -> None:
    loader = make_loader(write_dataset(tmp_path / "data"), epoch_size=70_000, batch_size=1000)
    iterator = iter(loader)
    for _ in range(30):
        next(iterator)
    finish()
    assert len(list(orders.glob("*.order"))) == 1
    for _ in range(40):
        next(iterator)
    finish()
    assert len(list(orders.glob("*.order"))) == 2
    next(iter(loader))
    assert len(list(orders.glob("*.order"))) == 2
    loader.close()
