"""The next epoch's order, made in the background: there in time, kept until its use, and never in the way."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.files import hold_lock
from lightning_streaming.loading import order_ahead
from lightning_streaming.loading.order_ahead import OrderAhead
from lightning_streaming.loading.order_store import order_ahead_of_use, shared_order
from lightning_streaming.order.draw import Order, draw_order, order_digest
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape
from lightning_streaming.order.weights import StreamWeight, resolve_weights
from tests.helpers import make_loader, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SETTINGS = OrderSettings(shuffle=True).settled(1)
BROKEN = OrderSettings(shuffle=True, shuffle_algo="py1br", shuffle_block_size=1).settled(1)


def make_shape(samples: int) -> DatasetShape:
    weights = resolve_weights([StreamWeight()], [samples], None, 0)
    return DatasetShape(shard_sizes=(np.full(samples // 100, 100),), weights=weights)


SHAPE = make_shape(70_000)


@pytest.fixture(autouse=True)
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that orders are kept in, for this test alone."""
    monkeypatch.setenv("LIGHTNING_STREAMING_RUNTIME", str(tmp_path / "runtime"))
    return tmp_path / "runtime" / "orders"


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


def name(epoch: int) -> str:
    return order_digest(SETTINGS, SHAPE, epoch) + ".order"


class Held:
    """A draw that begins, and goes on when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(order_ahead, "order_ahead_of_use", self._draw)

    def _draw(self, settings: OrderSettings, shape: DatasetShape, epoch: int) -> Order | None:
        self.calls.append(epoch)
        self.begun.set()
        assert self.go_on.wait(20)
        return order_ahead_of_use(settings, shape, epoch)


def test_an_order_is_there_when_it_is_asked_for(ahead: OrderAhead, orders: Path) -> None:
    ahead.prepare(SETTINGS, SHAPE, 1)
    finish()
    assert made(orders) == {name(1)}
    written = (orders / name(1)).stat().st_mtime_ns
    order, expected = shared_order(SETTINGS, SHAPE, 1), draw_order(SETTINGS, SHAPE, 1)
    assert isinstance(order, np.ndarray)
    assert isinstance(expected, np.ndarray)
    assert np.array_equal(order, expected)
    assert (orders / name(1)).stat().st_mtime_ns == written


def test_an_order_is_kept_until_the_one_after_it_is_made(ahead: OrderAhead, orders: Path) -> None:
    ahead.prepare(SETTINGS, SHAPE, 1)
    finish()
    other = shared_order(SETTINGS, SHAPE, 7)  # whoever makes an order removes those that nobody holds
    assert other is not None
    assert made(orders) == {name(1), name(7)}
    ahead.prepare(SETTINGS, SHAPE, 2)
    finish()
    del other
    shared_order(SETTINGS, SHAPE, 8)
    assert made(orders) == {name(2), name(8)}


def test_close_lets_go(ahead: OrderAhead, orders: Path) -> None:
    ahead.prepare(SETTINGS, SHAPE, 1)
    finish()
    ahead.close()
    shared_order(SETTINGS, SHAPE, 7)
    assert made(orders) == {name(7)}


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        (SETTINGS, 100),
        (OrderSettings().settled(1), 70_000),
        (OrderSettings(shuffle=True, shuffle_algo="blockwise").settled(1), 70_000),
    ],
    ids=["small", "identity", "on demand"],
)
def test_what_needs_no_file_is_not_made(
    ahead: OrderAhead, orders: Path, settings: OrderSettings, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    ahead.prepare(settings, make_shape(samples), 1)
    finish()
    assert held.calls == []
    assert not orders.exists()


def test_one_at_a_time_and_nobody_waits(ahead: OrderAhead, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    ahead.prepare(SETTINGS, SHAPE, 1)
    assert held.begun.wait(20)
    ahead.prepare(SETTINGS, SHAPE, 2)
    ahead.close()
    held.go_on.set()
    finish()
    assert held.calls == [1]


def test_asking_again_makes_nothing_again(ahead: OrderAhead, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    held.go_on.set()
    for _ in range(3):
        ahead.prepare(SETTINGS, SHAPE, 1)
        finish()
    assert held.calls == [1]


def test_a_file_that_is_there_is_kept_and_not_made_again(ahead: OrderAhead, orders: Path) -> None:
    shared_order(SETTINGS, SHAPE, 1)
    written = (orders / name(1)).stat().st_mtime_ns
    ahead.prepare(SETTINGS, SHAPE, 1)
    finish()
    shared_order(SETTINGS, SHAPE, 7)
    assert (orders / name(1)).stat().st_mtime_ns == written


def test_while_another_process_makes_an_order_nothing_is_done_until_asked_again(
    ahead: OrderAhead, orders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hold_lock(orders / "lock", 1, "test"):
        ahead.prepare(SETTINGS, SHAPE, 1)
        finish()
        assert made(orders) == set()
    assert caplog.records == []
    ahead.prepare(SETTINGS, SHAPE, 1)
    finish()
    assert made(orders) == {name(1)}


def test_a_failure_is_logged_once_with_its_cause_and_met_by_the_reader(
    ahead: OrderAhead, orders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        ahead.prepare(BROKEN, SHAPE, 1)
        finish()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "epoch 1 was not made ahead of time" in record.getMessage()
    assert "ConfigError: shuffle_algo='py1br' needs blocks" in record.getMessage()
    assert made(orders) == set()
    with pytest.raises(ConfigError, match="needs blocks"):
        shared_order(BROKEN, SHAPE, 1)


def test_a_copy_sent_elsewhere_starts_with_nothing(ahead: OrderAhead, orders: Path) -> None:
    ahead.prepare(SETTINGS, SHAPE, 1)
    finish()
    copy = pickle.loads(pickle.dumps(ahead))
    assert isinstance(copy, OrderAhead)
    ahead.close()
    shared_order(SETTINGS, SHAPE, 7)
    assert made(orders) == {name(7)}


def _prepare_in_child(ahead: OrderAhead, answers: Any) -> None:
    ahead.prepare(SETTINGS, SHAPE, 2)
    finish()
    answers.put(os.getpid())


def test_a_forked_child_starts_fresh_while_its_parent_is_busy(
    ahead: OrderAhead, orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    ahead.prepare(SETTINGS, SHAPE, 1)
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
from tests.loading.test_order_ahead import SETTINGS, SHAPE
import lightning_streaming.loading.order_store as store
from lightning_streaming.loading.order_ahead import OrderAhead
import threading

begun = threading.Event()

def draw_for_ever(*arguments):
    begun.set()
    threading.Event().wait()

store.draw_into = draw_for_ever
ahead = OrderAhead()
ahead.prepare(SETTINGS, SHAPE, 1)
assert begun.wait(20)
ahead.close()
"""


def test_a_process_ends_while_its_background_is_busy(orders: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", LEAVES], env=environment, timeout=60, check=False).returncode == 0
    shared_order(SETTINGS, SHAPE, 2)
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
