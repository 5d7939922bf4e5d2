"""The processes behind ``write_parallel``: what they do when their parent, their input or the terminal fails them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import PartError
from lightning_streaming.writing.engines.interrupts import ignore_interrupts, without_interrupts
from lightning_streaming.writing.engines.processes import _serve
from lightning_streaming.writing.parallel import write_parallel
from lightning_streaming.writing.parts import plan_parts
from tests.writing import part_functions as make

SPAWN = multiprocessing.get_context("spawn")


def test_a_worker_whose_parent_is_gone_ends_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = SPAWN.Pipe()
    worker = SPAWN.Process(target=_serve, args=(theirs, plan_parts([range(3)], make.count, tmp_path / "out")))
    worker.start()
    theirs.close()
    ours.close()
    worker.join(60)
    assert worker.exitcode == 0
    assert capfd.readouterr().err == ""


class OnlyHere:
    """Pickles in the process that made it, and is made again in no other."""

    home = os.getpid()

    def __init__(self, home: int) -> None:
        if home != os.getpid():
            raise LookupError("only at home")

    def __reduce__(self) -> tuple[Any, ...]:
        return OnlyHere, (self.home,)

    def __repr__(self) -> str:
        return "OnlyHere()"


def test_an_input_that_cannot_be_unpickled_is_named(tmp_path: Path) -> None:
    inputs: list[Any] = [range(3), OnlyHere(os.getpid())]
    with pytest.raises(PartError) as caught:
        write_parallel(
            inputs,
            make.count,
            tmp_path / "out",
            columns={"id": "int", "text": "str"},
            num_workers=1,
            progress_bar=False,
        )
    assert "part 1 could not be written, from input OnlyHere(): it could be pickled, but not unpickled" in str(
        caught.value
    )
    assert "LookupError: only at home" in str(caught.value)
    assert isinstance(caught.value.__cause__, LookupError)


def _tell_signals(connection: Any) -> None:
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    os.kill(os.getpid(), signal.SIGINT)  # held back until it is ignored
    ignore_interrupts()
    connection.send((blocked, signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())))


def start_and_compare() -> None:
    """Start a process, and check what it says of its signals."""
    ours, theirs = SPAWN.Pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    worker = SPAWN.Process(target=_tell_signals, args=(theirs,))
    with without_interrupts():
        worker.start()
    theirs.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    blocked, handler, mask = ours.recv()
    worker.join()
    assert (blocked, handler) == (True, signal.SIG_IGN)
    assert signal.SIGINT not in mask
    assert worker.exitcode == 0


def test_no_ctrl_c_reaches_a_process_that_is_being_started() -> None:
    """Nor the first one of a program, with which multiprocessing starts a process of its own."""
    code = "from tests.writing.test_worker_processes import start_and_compare; start_and_compare()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_ctrl_c_that_comes_while_processes_start_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), without_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
