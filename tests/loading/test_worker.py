"""Worker processes: they end when they should, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
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


def test_workers_end_with_their_iterator_without_help_of_the_garbage_collector(root: Path) -> None:
    before = children()
    loader = make_loader(root, workers=2, batch_size=1)
    gc.disable()
    try:
        iterator = iter(loader)
        next(iterator)
        workers = children() - before
        del iterator
        assert len(workers) == 2
        assert wait_until(lambda: not workers & children())
        assert not shared_memory_of(workers | {os.getpid()})
    finally:
        gc.enable()


def test_persistent_workers_end_with_their_loader(root: Path) -> None:
    before = children()
    loader = make_loader(root, workers=2, loader={"persistent_workers": True})
    assert len(ids(loader)) == 8
    workers = children() - before
    assert len(workers) == 2
    del loader
    assert wait_until(lambda: not workers & children())


def test_a_killed_worker_is_an_error_and_not_a_hang(root: Path) -> None:
    before = children()
    loader = make_loader(root, workers=2, batch_size=1)
    iterator = iter(loader)
    next(iterator)
    for worker in children() - before:
        os.kill(worker, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"worker .*(exited unexpectedly|killed by signal)"):
        ids(iterator)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_at_once_when_their_parent_is_killed(root: Path, method: str) -> None:
    script = (
        "import sys, time\n"
        "from tests.helpers import make_loader\n"
        "if __name__ == '__main__':\n"
        "    loader = make_loader(sys.argv[1], workers=2, loader={'multiprocessing_context': sys.argv[2]})\n"
        "    iterator = iter(loader)\n"
        "    next(iterator)\n"
        "    print(flush=True)\n"
        "    time.sleep(60)\n"
    )
    path = root.parent / f"{method}.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(path), str(root), method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        workers = children(trainer.pid)
        trainer.kill()
    assert len(workers) >= 2
    # Torch alone would take five seconds.
    assert wait_until(lambda: not any(map(is_alive, workers)), seconds=2)
    assert not shared_memory_of(workers | {trainer.pid})


@pytest.mark.xfail(
    strict=True, reason="workers do not ignore the signals that a trainer handles yet", raises=RuntimeError
)
def test_a_sigterm_to_the_whole_group_does_not_take_the_workers_from_a_trainer_that_handles_it(root: Path) -> None:
    before = children()
    iterator = iter(make_loader(root, workers=2, batch_size=1))
    next(iterator)
    for worker in children() - before:
        os.kill(worker, signal.SIGTERM)
    assert len(ids(iterator)) == 28
