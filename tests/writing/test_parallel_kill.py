"""``kill -9`` of all of ``write_parallel`` at any moment: resumed, it gives the same dataset, byte for byte.

``LIGHTNING_STREAMING_KILLS=30`` asks for more kills than the few that every run of the tests can afford.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.writing.parallel import write_parallel
from tests.loading.processes import children, is_alive, state_of, wait_until
from tests.writing.part_functions import SIZE_LIMIT, count_slowly
from tests.writing.test_merge import contents, ids

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.timeout(600),
]

KILLS = int(os.environ.get("LIGHTNING_STREAMING_KILLS", "10"))
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
        program = context.Process(target=_write, args=(out,))
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
