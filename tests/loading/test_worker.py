"""Worker processes: they end when they should, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ids, make_loader, write_dataset
from tests.loading.processes import children, is_alive, shared_memory_of, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing is freed but by its last user letting go of it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_workers_end_with_their_iterator(root: Path) -> None:
    before = children()
    loader = make_loader(root, workers=2, batch_size=1)
    iterator = iter(loader)
    next(iterator)
    workers = children() - before
    del iterator
    assert len(workers) == 2
    assert wait_until(lambda: not workers & children())
    assert not shared_memory_of(workers | {os.getpid()})


@pytest.mark.usefixtures("no_collector")
def test_persistent_workers_end_with_their_loader(root: Path) -> None:
    before = children()
    loader = make_loader(root, workers=2, loader={"persistent_workers": True})
    assert len(ids(loader)) == 8
    workers = children() - before
    assert len(workers) == 2
    del loader
    assert wait_until(lambda: not workers & children())


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_when_their_loader_is_closed(root: Path, persistent: bool) -> None:
    before = children()
    loader = make_loader(root, workers=2, loader={"persistent_workers": persistent})
    iterator = iter(loader)
    next(iterator)
    workers = children() - before
    loader.close()
    assert len(workers) == 2
    assert wait_until(lambda: not workers & children())
    assert next(iterator, None) is None


TRAINER = """
import os, signal, sys, time
from tests.helpers import ids, make_loader
from tests.loading.processes import children

if __name__ == "__main__":
    root, method, signal_to_workers = sys.argv[1:]
    iterator = iter(make_loader(root, workers=2, batch_size=1, loader={"multiprocessing_context": method}))
    ids([next(iterator)])
    if signal_to_workers:
        for worker in children():
            os.kill(worker, getattr(signal, signal_to_workers))
        print(len(ids(iterator)))
    else:
        print("reading", flush=True)
        time.sleep(60)
"""


def _start_trainer(root: Path, method: str = "fork", signal_to_workers: str = "") -> subprocess.Popen[str]:
    path = root.parent / "trainer.py"
    path.write_text(TRAINER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(path), str(root), method, signal_to_workers]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_killed_worker_is_an_error_and_not_a_hang(root: Path) -> None:
    # In a process of its own, because torch raises the error wherever that process happens to be.
    with _start_trainer(root, signal_to_workers="SIGKILL") as trainer:
        said, _ = trainer.communicate(timeout=20)
    assert (said, trainer.returncode) == ("", 1)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_at_once_when_their_parent_is_killed(root: Path, method: str) -> None:
    with _start_trainer(root, method) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "reading\n"
        workers = children(trainer.pid)
        trainer.kill()
    assert len(workers) >= 2
    # Torch alone would take five seconds.
    assert wait_until(lambda: not any(map(is_alive, workers)), seconds=2)
    assert not shared_memory_of(workers | {trainer.pid})
