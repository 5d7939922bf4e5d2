"""The log of what each worker read: whole whatever becomes of the worker, and good to make its samples again.

A sample that takes too long: who reads it, which one it is and where the worker is, and nothing else happens.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from lightning_streaming import Stream, StreamingDataset, World
from lightning_streaming.errors import FormatError, SampleError, ShardCorruptError, StorageError
from lightning_streaming.logs import read_sample_log
from lightning_streaming.reading.sample_log import last_sample
from tests.helpers import assert_error, ids, make_dataset, make_loader, write_dataset
from tests.reading.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


def _augment(sample: dict[str, Any], rng: np.random.Generator) -> tuple[int, float]:
    return sample["id"], float(rng.random())


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_logged_is_what_was_read_by_each_worker(root: Path, tmp_path: Path, workers: int) -> None:
    streams = {"a": Stream(remote=str(root)), "b": Stream(remote=str(write_dataset(tmp_path / "b", 9, first_id=100)))}
    log = tmp_path / "logs" / "here"
    world = World(ranks_per_node=2, rank=1)
    options = {"collate_fn": list, "return_keys": True}
    loader = make_loader(
        streams=streams, world=world, workers=workers, loader=options, transform=_augment, debug={"sample_log": log}
    )
    with closing(loader):
        batches = list(loader)
    step = max(workers, 1)
    assert sorted(path.name for path in log.iterdir()) == [f"rank1-worker{worker}.jsonl" for worker in range(step)]
    for worker in range(step):
        lines = list(read_sample_log(log / f"rank1-worker{worker}.jsonl"))
        own = batches[worker::step]
        assert [line.key for line in lines] == [key for _, keys in own for key in keys]
        assert [loader.dataset.restore_sample(line.key) for line in lines] == [
            one for samples, _ in own for one in samples
        ]
        assert len({line.pid for line in lines}) == 1
        assert [line.time for line in lines] == sorted(line.time for line in lines)


def test_a_log_goes_on_where_it_was(root: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert len(ids(make_loader(root, debug={"sample_log": str(tmp_path)}))) == 8
    (path,) = tmp_path.iterdir()
    positions = [line.key.position for line in read_sample_log(path)]
    assert positions == [*range(29), *range(29)]


def test_without_it_nothing_is_written(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(ids(make_loader(root))) == 8
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from tests.helpers import make_loader

def die(sample):
    if sample["id"] == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample

for _ in make_loader(sys.argv[1], transform=die, debug={'sample_log': sys.argv[2]}):
    pass
"""


@pytest.mark.nightly
def test_the_last_line_of_a_killed_process_is_the_sample_that_killed_it(root: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", KILLED, str(root), str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    *_, last = read_sample_log(tmp_path / "rank0-worker0.jsonl")
    assert make_dataset(root).restore_sample(last.key) == {"id": 17}


def _die(sample: dict[str, Any], how: str, may_die: Path) -> dict[str, Any]:
    if sample["id"] == 2:
        assert wait_until(may_die.exists)
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    return sample


def _once_the_main_thread_waits(do: Callable[[], object]) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def waits() -> bool:
        frame: FrameType | None = sys._current_frames().get(main)
        while frame is not None and frame.f_code.co_name != "_try_get_data":
            frame = frame.f_back
        return frame is not None

    if wait_until(waits):
        do()


@pytest.mark.parametrize(
    ("how", "words", "is_logged"),
    [("SIGKILL", "was killed by SIGKILL", True), ("SIGSEGV", "by SIGSEGV", False), ("exit", "exited with 3", False)],
)
def test_the_error_of_a_worker_that_dies_names_how_and_which_sample(
    root: Path, tmp_path: Path, how: str, words: str, is_logged: bool
) -> None:
    # Once the main thread waits for the worker: torch raises the error wherever that thread is.
    ready, log = tmp_path / "ready", tmp_path / "log" if is_logged else None
    loader = make_loader(root, workers=1, transform=partial(_die, how=how, may_die=ready), debug={"sample_log": log})
    thread = threading.Thread(target=_once_the_main_thread_waits, args=(ready.touch,))
    thread.start()
    with closing(loader), pytest.raises(SampleError) as raised:
        list(loader)
    thread.join()
    told = str(raised.value)
    assert told.startswith("worker process 0 (pid ")
    assert words in told
    if is_logged:
        key = json.loads(told[told.index("{") : told.index("}") + 1])
        assert make_dataset(root).restore_sample(key)["id"] == 2
    else:
        assert "sample_log" in told
        assert "rank0-worker0.jsonl" in told


@pytest.mark.parametrize("dies", ["before the pass", "as it begins"])
def test_a_persistent_worker_that_dies_between_passes_is_an_error_and_other_workers_read_the_pass(
    root: Path, dies: str
) -> None:
    loader, alone = (make_loader(root, workers=n, loader={"persistent_workers": n > 0}) for n in (2, 0))
    for reader in (loader, alone):
        list(reader)
    worker, *_ = before = multiprocessing.active_children()
    assert worker.pid is not None
    kill = partial(os.kill, worker.pid, signal.SIGKILL)
    thread = threading.Thread(target=_once_the_main_thread_waits, args=(kill,))
    if dies == "before the pass":
        with suppress(RuntimeError):  # torch raises its own in any line of this thread
            kill()
            worker.join()
    else:
        os.kill(worker.pid, signal.SIGSTOP)
        thread.start()
    with pytest.raises(SampleError, match=r"^worker process . \(pid .* was killed by SIGKILL .* between two passes; "):
        next(iter(loader))
    if dies != "before the pass":
        thread.join()
    assert [batch["id"].tolist() for batch in loader] == [batch["id"].tolist() for batch in alone]
    assert not {*before} & {*multiprocessing.active_children()}
    loader.close()


def _truncate(sample: dict[str, Any], path: Path, may_die: Path) -> dict[str, Any]:
    if sample["id"] == 2:
        assert wait_until(may_die.exists)
        os.truncate(path, 0)
    return sample


def test_the_error_of_a_worker_names_the_mapped_file_that_was_truncated(tmp_path: Path) -> None:
    ready, shard = tmp_path / "ready", write_dataset(tmp_path / "data") / "shard.00000.mds"
    loader = make_loader(
        shard.parent, workers=1, shuffle=False, transform=partial(_truncate, path=shard, may_die=ready)
    )
    thread = threading.Thread(target=_once_the_main_thread_waits, args=(ready.touch,))
    thread.start()
    with closing(loader), assert_error(ShardCorruptError, path=shard) as raised:
        list(loader)
    thread.join()
    assert "was killed by SIGBUS" in str(raised.value)


def test_a_line_cut_short_is_left_out_and_another_one_refused(root: Path, tmp_path: Path) -> None:
    list(make_loader(root, debug={"sample_log": tmp_path}))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert len(list(read_sample_log(path))) == 28
    list(make_loader(root, debug={"sample_log": tmp_path}))
    assert len(list(read_sample_log(path))) == 28 + 29
    for broken in (b"{}\n", b"no json\n", b"[1]\n"):
        path.write_bytes(broken + whole)
        with pytest.raises(FormatError, match=r"line 1 of .*rank0-worker0.jsonl is not one of a sample log"):
            next(read_sample_log(path))


def test_the_last_sample_of_a_dead_worker_is_read_from_the_end_of_its_log(root: Path, tmp_path: Path) -> None:
    list(make_loader(root, debug={"sample_log": tmp_path}))
    (path,) = tmp_path.iterdir()
    hint, whole = partial(last_sample, tmp_path, 0, 0, os.getpid()), path.read_bytes()
    last = json.dumps(list(read_sample_log(path))[-1].key.as_dict())
    before = json.dumps(list(read_sample_log(path))[-2].key.as_dict())
    no_lines = b"no line of a log\n" * 10_000
    for log, key in ((whole, last), (whole[:-5], before), (no_lines + whole, last)):
        path.write_bytes(log)
        assert hint() == f"the last sample it read: dataset.restore_sample({key})"
    for log in (b"", b'{"time": 1'):
        path.write_bytes(log)
        assert hint() == "it had read no sample"
    path.write_bytes(whole + b"no line of a log\n")
    assert hint().startswith(f"its last sample is unknown: the last line of {path} is")


def test_a_log_that_cannot_be_written_fails_at_the_first_sample(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with assert_error(StorageError, option="debug.sample_log", path=tmp_path / "file"):
        next(iter(make_loader(root, debug={"sample_log": tmp_path / "file"})))


SLOW = 7
"""Sample whose transform waits until the watchdog has told of it."""


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
    watch: dict[str, Any] = {"debug": {"watchdog_seconds": 0.4, "sample_log": tmp_path}}
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


@pytest.mark.nightly
def test_a_worker_that_holds_the_interpreter_is_told_of_without_the_key(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def hold(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == SLOW:
            ctypes.PyDLL(None).usleep(1_500_000)  # which, other than time.sleep, lets no other thread run
        return sample

    loader = make_loader(root, workers=1, transform=hold, debug={"watchdog_seconds": 0.3})
    with closing(loader):
        assert len(ids(loader)) == 8
    told = capfd.readouterr().err
    assert "Timeout" in told
    assert " in hold\n" in told


def test_the_time_between_two_samples_does_not_count(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samples = iter(make_dataset(root, debug={"watchdog_seconds": 0.5}))
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
    samples = iter(make_dataset(root, debug={"watchdog_seconds": 60}))
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
    dataset = make_dataset(root, debug={"watchdog_seconds": 60}, transform=lambda sample: 1 / 0)
    with pytest.raises(SampleError, match="ZeroDivisionError"):
        next(iter(dataset))
    assert wait_until(lambda: all(thread.name != "watchdog" for thread in threading.enumerate()))
