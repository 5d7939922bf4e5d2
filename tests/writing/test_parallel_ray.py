"""The same parts on a real Ray cluster of two workers, which are killed.

``LIGHTNING_STREAMING_KILLS=30`` asks for more kills than the few that every run of the tests can afford.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import PartError
from lightning_streaming.writing.parallel import write_parallel
from lightning_streaming.writing.parts import plan_parts
from tests.reading.processes import is_alive
from tests.tiers import kills
from tests.writing import part_functions as make
from tests.writing.test_merge import contents, ids

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:unclosed file .*/ray/session:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:subprocess [0-9]+ is still running:ResourceWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

INPUTS = [range(first, first + 10) for first in range(0, 50, 10)]
KILLS = kills(3, 3)
SETTINGS: dict[str, Any] = {"columns": {"id": "int", "text": "str"}, "size_limit": make.SIZE_LIMIT}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster with room for two tasks."""
    on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray sets its own, and leaves it
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    gc.collect()  # Ray leaves files and processes to the collector; let their warnings come here, where they are known
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, on_sigterm)
    gc.collect()


def write(out: Path, fn: Any = make.count, inputs: Any = INPUTS, **settings: Any) -> Path:
    write_parallel(inputs, fn, out, **{**SETTINGS, "progress_bar": False, "engine": "ray", **settings})
    return out


def write_here(out: Path, fn: Any = make.count, inputs: Any = INPUTS) -> Path:
    """The same dataset, undisturbed, by this process."""
    job = plan_parts(inputs, fn, out, **SETTINGS)
    for number, one in enumerate(inputs):
        job.write(number, one)
    job.publish()
    return out


def shards(out: Path) -> dict[str, bytes]:
    """Everything but the plan, which tells the inputs."""
    return {name: data for name, data in contents(out).items() if name != "parts.plan"}


def test_a_cluster_writes_what_one_process_writes(cluster: None, tmp_path: Path) -> None:
    out = write(tmp_path / "out")
    assert contents(out) == contents(write_here(tmp_path / "here"))
    assert ids(out) == list(range(50))


def test_a_function_of_a_script_will_do(cluster: None, tmp_path: Path) -> None:
    out = write(tmp_path / "out", lambda numbers: ({"id": number, "text": ""} for number in numbers))
    assert ids(out) == list(range(50))


def test_a_failure_names_its_input_and_the_rest_can_be_resumed(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(PartError, match=r"part 2 .* from input range\(20, 30\): .*cannot make number 25") as caught:
        write(tmp_path / "out", make.fail_at_20, num_workers=1)
    assert type(caught.value.__cause__) is make.LocalOnlyError
    assert "in fail_at_20" in str(caught.value.__cause__.__cause__)
    assert sorted(path.parent.name for path in tmp_path.glob("out/part.*/index.json")) == ["part.000000", "part.000001"]
    out = write(tmp_path / "out", mode="resume")
    assert contents(out) == contents(write_here(tmp_path / "here"))


def test_a_part_whose_worker_always_dies_is_told_by_its_input(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(PartError, match=r"part 2 .* from input range\(20, 30\): Ray gave it up after 3 more attempts"):
        write(tmp_path / "out", make.die_in_the_middle, INPUTS[:3])
    assert not (tmp_path / "out" / "index.json").exists()


class Killer:
    """Kills Ray's workers, one after the other, while they write parts."""

    def __init__(self, notes: Path, kills: int) -> None:
        self.killed: list[str] = []
        self._notes = notes
        self._kills = kills
        self._stop = threading.Event()
        self._chance = random.Random(5)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while len(self.killed) < self._kills and not self._stop.wait(self._chance.uniform(0.05, 0.3)):
            name = max((path.name for path in self._notes.iterdir()), default="", key=lambda name: name.split("-")[2:])
            if name and self._may_kill(name):
                with suppress(ProcessLookupError):
                    os.kill(int(name.split("-")[1]), signal.SIGKILL)
                    self.killed.append(name)

    def _may_kill(self, name: str) -> bool:
        """Whether it is alive, and its part not given up if it is killed: Ray tries one four times in all."""
        part, process, _ = name.split("-")
        return is_alive(int(process)) and [one.split("-")[0] for one in self.killed].count(part) < 3


def test_workers_that_are_killed_in_mid_part_are_replaced(cluster: None, tmp_path: Path) -> None:
    notes, numbers = tmp_path / "notes", [range(150 * part, 150 * (part + 1)) for part in range(4 * KILLS)]
    notes.mkdir()
    with Killer(notes, KILLS) as killer:
        out = write(tmp_path / "out", make.count_slowly_and_note, [(str(notes), one) for one in numbers])
    assert len(killer.killed) == KILLS
    assert len(list(notes.iterdir())) > len(numbers)  # some parts were begun again
    assert shards(out) == shards(write_here(tmp_path / "here", inputs=numbers))


@pytest.mark.nightly
def test_a_program_without_a_cluster_gets_one_and_a_clean_stdout(tmp_path: Path) -> None:
    script = (
        "from tests.writing import part_functions as make\n"
        "from lightning_streaming.writing.parallel import write_parallel\n"
        f"write_parallel({INPUTS!r}, make.count, {str(tmp_path / 'out')!r}, engine='ray', num_workers=1)\n"
        "import ray\n"
        "assert not ray.is_initialized()\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "5/5" in done.stderr
    assert ids(tmp_path / "out") == list(range(50))
