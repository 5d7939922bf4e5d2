"""The order of a large epoch: one file per node, made once, mapped by all, gone when nobody needs it."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_streaming import Stream
from lightning_streaming.errors import ConfigError, StorageError
from lightning_streaming.loading.order_store import shared_order
from lightning_streaming.order.draw import draw_order
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape
from lightning_streaming.order.weights import StreamWeight, resolve_weights
from tests.helpers import ids, make_loader, write_dataset
from tests.loading.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SETTINGS = OrderSettings(shuffle=True).settled(1)


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


def _order(shape: DatasetShape, epoch: int = 0, settings: OrderSettings = SETTINGS) -> NDArray[np.integer[Any]]:
    order, expected = shared_order(settings, shape, epoch), draw_order(settings, shape, epoch)
    assert isinstance(order, np.ndarray)
    assert isinstance(expected, np.ndarray)
    assert order.dtype == expected.dtype == np.uint32
    assert np.array_equal(order, expected)
    return order


def _is_mapped(order: NDArray[np.integer[Any]]) -> bool:
    return isinstance(order.base, memoryview) and isinstance(order.base.obj, mmap.mmap)


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
        _order(_shape(), settings=OrderSettings(shuffle=True, shuffle_seed=1).settled(1)),
        _order(_shape(80_000)),
        _order(_shape(repeat=1.5)),
    ]
    assert len(_made(orders)) == len(kept)


@pytest.mark.parametrize("samples", [100, 65_500])
def test_a_small_order_is_no_file(orders: Path, samples: int) -> None:
    assert not _is_mapped(_order(_shape(samples)))
    assert not orders.exists()


def test_an_order_that_changes_nothing_is_no_file(orders: Path) -> None:
    assert shared_order(OrderSettings().settled(1), _shape(), 0) is None
    assert not orders.exists()


def test_an_order_on_demand_is_no_file(orders: Path) -> None:
    settings = OrderSettings(shuffle=True, shuffle_algo="blockwise").settled(1)
    order = shared_order(settings, _shape(), 0)
    assert order is not None
    assert len(order) == 70_000
    assert not orders.exists()


def test_a_weighted_order_without_shuffle_is_a_file(orders: Path) -> None:
    assert _is_mapped(_order(_shape(repeat=1.5), settings=OrderSettings().settled(1)))


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
    order = shared_order(SETTINGS, _shape(), 0)
    assert isinstance(order, np.ndarray)
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
import lightning_streaming.loading.order_store as store
from tests.loading.test_order_store import SETTINGS, _shape

draw = store.draw_into

def draw_half(settings, shape, epoch, out):
    draw(settings, shape, epoch, out)
    out[len(out) // 2 :] = 0
    print("writing", flush=True)
    input()

store.draw_into = draw_half
store.shared_order(SETTINGS, _shape(), 0)
"""


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
            shared_order(SETTINGS, _shape(), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _made(orders) == []
    _order(_shape())


def test_a_draw_that_fails_leaves_nothing(orders: Path) -> None:
    with pytest.raises(ConfigError, match="needs blocks"):
        shared_order(OrderSettings(shuffle=True, shuffle_algo="py1br", shuffle_block_size=1).settled(1), _shape(), 0)
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
