"""The processes behind ``write_parallel``: what they do when their parent, their input or the terminal fails them.

``kill -9`` of all of ``write_parallel`` at any moment: resumed, it gives the same dataset, byte for byte.

``LIGHTNING_STREAMING_KILLS=30`` asks for more kills than the few that every run of the tests can afford.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import PartError
from lightning_streaming.writing.parallel import _serve, ignore_interrupts, without_interrupts, write_parallel
from lightning_streaming.writing.parts import plan_parts
from tests.reading.processes import children, is_alive, state_of, wait_until
from tests.tiers import kills
from tests.writing import part_functions as make
from tests.writing.part_functions import SIZE_LIMIT, count_slowly, count_slowly_to_the_last
from tests.writing.test_merge import contents, ids

SPAWN = multiprocessing.get_context("spawn")


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_no_ctrl_c_reaches_a_process_that_is_being_started() -> None:
    """Nor the first one of a program, with which multiprocessing starts a process of its own."""
    code = "from tests.writing.test_parallel_workers import start_and_compare; start_and_compare()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_ctrl_c_that_comes_while_processes_start_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), without_interrupts():
        os.kill(os.getpid(), signal.SIGINT)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.timeout(600),
]

KILLS = kills(3, 10)
SAMPLES_PER_PART = 40


def _inputs() -> list[range]:
    return [range(SAMPLES_PER_PART * part, SAMPLES_PER_PART * (part + 1)) for part in range(10 * KILLS)]


def _write(out: Path, fn: Any = count_slowly) -> None:
    write_parallel(
        _inputs(),
        fn,
        out,
        columns={"id": "int", "text": "str"},
        size_limit=SIZE_LIMIT,
        hashes=["sha1"],
        num_workers=2,
        start_method="fork",
        mode="resume",
        progress_bar=False,
    )


def _kill(program: Any, *, workers_too: bool) -> set[int]:
    """Kill a program, alone or with its workers, which may stand still; gives the workers."""
    workers = children(program.pid)
    for victim in [program.pid, *(workers if workers_too else ())]:
        os.kill(victim, signal.SIGKILL)
    program.join()
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
    return workers


def _stop_in_mid_part(program: Any, out: Path) -> None:
    """Let a program and its workers stand still while at least one part is begun and not finished."""

    def is_in_mid_part() -> bool:
        assert program.exitcode is None
        everyone = [program.pid, *children(program.pid)]
        _send(everyone, signal.SIGSTOP)
        found = wait_until(lambda: all(map(_stands_still, everyone))) and _parts(out) > _finished_parts(out)
        if not found:
            _send(everyone, signal.SIGCONT)
        return found

    assert wait_until(is_in_mid_part)


def _send(processes: Iterable[int], signum: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signum)


def _stands_still(process: int) -> bool:
    return not is_alive(process) or state_of(process) == "T"


def _parts(out: Path) -> int:
    return len(list(out.glob("part.*")))


def _finished_parts(out: Path) -> int:
    return len(list(out.glob("part.*/index.json")))


def test_writing_survives_being_killed_at_any_moment(tmp_path: Path) -> None:
    chance, context = random.Random(11), multiprocessing.get_context("fork")
    out, workers, finished = tmp_path / "out", set(), []
    for kill in range(KILLS):
        program = context.Process(target=_write, args=(out, partial(count_slowly_to_the_last, _inputs()[-1])))
        program.start()
        if kill % 2 == 0:  # amid the parts, however long a busy machine takes to get there
            before = _finished_parts(out)
            assert wait_until(lambda: _finished_parts(out) > before)  # noqa: B023
        program.join(chance.uniform(0.005, 0.4))
        assert program.exitcode is None
        if kill % 2 == 0:
            _stop_in_mid_part(program, out)
        workers |= _kill(program, workers_too=kill % 4 in (1, 2))
        # The next one starts at once, while workers of this one may still be alive.
        finished.append(_finished_parts(out))
        assert not (out / "index.json").exists()
    program = context.Process(target=_write, args=(out,))
    program.start()
    program.join()
    assert program.exitcode == 0
    assert wait_until(lambda: not any(map(is_alive, workers)))

    assert len(set(finished)) >= KILLS // 2  # kills found it in many places, half of them in mid-part
    assert 0 < finished[-1] < len(_inputs())  # and none found it done
    _write(tmp_path / "undisturbed")
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert ids(out)[::SAMPLES_PER_PART] == list(range(0, len(_inputs()) * SAMPLES_PER_PART, SAMPLES_PER_PART))
