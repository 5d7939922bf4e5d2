"""Worker processes: they end when they should, and leave nothing behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
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
import os, signal, sys
from tests.helpers import ids, make_loader
from tests.loading.processes import children

if __name__ == "__main__":
    root, method, do = sys.argv[1:]
    print("starting", flush=True)
    options = {"multiprocessing_context": method, "persistent_workers": do == "exit"}
    iterator = iter(make_loader(root, workers=2, batch_size=1, loader=options))
    ids([next(iterator), next(iterator)])  # one from each
    if do.startswith("SIG"):
        for worker in children():
            os.kill(worker, getattr(signal, do))
    print("reading", flush=True)
    if do != "exit":
        sys.stdin.readline()
        print(len(ids(iterator)))
"""


def _start_trainer(root: Path, method: str = "fork", do: str = "") -> subprocess.Popen[str]:
    path = root.parent / "trainer.py"
    path.write_text(TRAINER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(path), str(root), method, do]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def _wait_for(trainer: subprocess.Popen[str], line: str) -> None:
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == line + "\n"


def _signal_all(processes: set[int]) -> None:
    for process in processes:
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            os.kill(process, signum)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_live_through_signals_to_the_process_group_and_end_as_always(root: Path, method: str) -> None:
    with _start_trainer(root, method) as trainer:
        _wait_for(trainer, "starting")
        _wait_for(trainer, "reading")
        _signal_all(children(trainer.pid))
        said, failed = trainer.communicate("go on\n", timeout=60)
    assert (said, failed, trainer.returncode) == ("27\n", "", 0)


def test_workers_live_through_signals_that_come_while_they_start(root: Path) -> None:
    with _start_trainer(root, "spawn") as trainer:
        _wait_for(trainer, "starting")
        # Two workers and what multiprocessing starts beside them.
        assert wait_until(lambda: len(children(trainer.pid)) >= 3)
        _signal_all(children(trainer.pid))
        said, failed = trainer.communicate("go on\n", timeout=60)
    assert (said, failed, trainer.returncode) == ("reading\n27\n", "", 0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_its_parent_terminates_ends(root: Path, method: str) -> None:
    loader = make_loader(root, workers=2, batch_size=1, loader={"multiprocessing_context": method})
    iterator = iter(loader)
    ids([next(iterator), next(iterator)])
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        worker.terminate()
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    loader.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_trainer_that_exits_in_mid_epoch_is_not_held_up(root: Path, method: str) -> None:
    # Torch then leaves the workers to multiprocessing, which terminates them and waits without end.
    with _start_trainer(root, method, "exit") as trainer:
        said, failed = trainer.communicate(timeout=60)
    assert (said, failed, trainer.returncode) == ("starting\nreading\n", "", 0)


def test_a_killed_worker_is_an_error_and_not_a_hang(root: Path) -> None:
    # In a process of its own, because torch raises the error wherever that process happens to be.
    with _start_trainer(root, do="SIGKILL") as trainer:
        said, _ = trainer.communicate("go on\n", timeout=60)
    assert said in ("starting\n", "starting\nreading\n")
    assert trainer.returncode == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_at_once_when_their_parent_is_killed(root: Path, method: str) -> None:
    with _start_trainer(root, method) as trainer:
        _wait_for(trainer, "starting")
        _wait_for(trainer, "reading")
        workers = children(trainer.pid)
        trainer.kill()
    assert len(workers) >= 2
    # Torch alone would take five seconds.
    assert wait_until(lambda: not any(map(is_alive, workers)), seconds=4)
    assert not shared_memory_of(workers | {trainer.pid})
