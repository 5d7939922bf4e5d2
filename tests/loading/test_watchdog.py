"""A sample that takes too long: who reads it, which one it is and where the worker is, and nothing else happens."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataset
from lightning_streaming.errors import SampleError
from tests.helpers import ids, make_dataset, make_loader, write_dataset
from tests.loading.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SLOW = 7
"""Sample whose transform waits until the watchdog has told of it."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


def _linger_until_told(log: Path) -> Any:
    def linger(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == SLOW:
            assert wait_until(lambda: any(path.stat().st_size for path in log.glob("*.stacks")), seconds=60)
        return sample

    return linger


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_sample_is_told_of_with_its_key_and_read_all_the_same(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    watch: dict[str, Any] = {"watchdog_seconds": 0.4, "sample_log": tmp_path}
    loader = make_loader(root, workers=workers, transform=_linger_until_told(tmp_path), **watch)
    with closing(loader):
        assert ids(loader) == ids(make_loader(root))
    told = capfd.readouterr().err
    (stacks,) = tmp_path.glob("*.stacks")
    assert stacks.read_text() in told
    first, _, rest = stacks.read_text().partition("\n")
    who, _, key = first.partition(": ")
    assert stacks.stem == f"rank0-worker{who.split()[1]}"
    assert who.endswith("of rank 0 has been at one sample for 0.4 s")
    assert StreamingDataset(remote=str(root)).restore_sample(json.loads(key)) == {"id": SLOW}
    assert "Thread 'MainThread'" in rest
    assert "in linger" in rest
    assert "watchdog" not in [line.strip() for line in rest.splitlines()]


def test_a_worker_that_holds_the_interpreter_is_told_of_without_the_key(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def hold(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == SLOW:
            ctypes.PyDLL(None).usleep(1_500_000)  # which, other than time.sleep, lets no other thread run
        return sample

    loader = make_loader(root, workers=1, transform=hold, watchdog_seconds=0.3)
    with closing(loader):
        assert len(ids(loader)) == 8
    told = capfd.readouterr().err
    assert "Timeout" in told
    assert " in hold\n" in told


def test_the_time_between_two_samples_does_not_count(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samples = iter(make_dataset(root, watchdog_seconds=0.5))
    next(samples)
    time.sleep(1.2)
    next(samples)
    samples.close()
    assert "at one sample" not in capfd.readouterr().err


@pytest.mark.parametrize("end", ["exhausted", "closed", "dropped"])
def test_the_watch_ends_with_the_pass(root: Path, end: str) -> None:
    def watchdogs() -> int:
        return sum(thread.name == "watchdog" for thread in threading.enumerate())

    assert wait_until(lambda: watchdogs() == 0)
    samples = iter(make_dataset(root, watchdog_seconds=60))
    assert watchdogs() == 0
    next(samples)
    assert watchdogs() == 1
    if end == "exhausted":
        assert len(list(samples)) == 28
    elif end == "closed":
        samples.close()
    else:
        del samples
    assert wait_until(lambda: watchdogs() == 0)


def test_a_sample_that_fails_ends_the_watch_and_fails(root: Path) -> None:
    dataset = make_dataset(root, watchdog_seconds=60, transform=lambda sample: 1 / 0)
    with pytest.raises(SampleError, match="ZeroDivisionError"):
        next(iter(dataset))
    assert wait_until(lambda: all(thread.name != "watchdog" for thread in threading.enumerate()))
