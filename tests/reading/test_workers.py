"""Worker processes: they end when they should, and leave nothing behind.

Closing a loader whose workers are in the middle of something.

An exception of the user's own code, told with its sample: the same from a worker as in the process itself.

``kill -9`` at any moment: the next start just works, reads what comes next, and nothing is left behind.

``LIGHTNING_STREAMING_KILLS=50`` asks for more kills than the few that every run of the tests can afford.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_streaming import SampleKey, Stream, StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import EncodingError, SampleError, StreamingError
from lightning_streaming.reading.workers import WorkerFailure
from tests.helpers import ids, make_dataset, make_loader, raises, read_epochs, write_dataset
from tests.reading.processes import children, is_alive, shared_memory_of, wait_until
from tests.servers import HttpStore
from tests.tiers import kills

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
looks_into_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


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
@looks_into_proc
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
@looks_into_proc
def test_persistent_workers_end_with_their_loader(root: Path) -> None:
    before = children()
    loader = make_loader(root, workers=2, loader={"persistent_workers": True})
    assert len(ids(loader)) == 8
    workers = children() - before
    assert len(workers) == 2
    del loader
    assert wait_until(lambda: not workers & children())


@pytest.mark.parametrize("persistent", [False, True])
@looks_into_proc
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
from lightning_streaming.reading.workers import WorkerFailure
from tests.helpers import ids, make_loader
from tests.reading.processes import children

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


ENDLESS = """
import sys
from tests.helpers import make_loader


def endless(loader):
    while True:
        yield from loader


batches = endless(make_loader(sys.argv[1], workers=2, loader={"multiprocessing_context": sys.argv[2]}))
next(batches)
"""


def test_a_generator_that_outlives_the_modules_says_nothing_at_the_end(root: Path) -> None:
    with _start_trainer(root, source=ENDLESS) as trainer:
        assert trainer.communicate(timeout=60) == ("", "")
    assert trainer.returncode == 0


def _start_trainer(root: Path, method: str = "fork", do: str = "", source: str = TRAINER) -> subprocess.Popen[str]:
    path = root.parent / "trainer.py"
    path.write_text(source)
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


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["fork", "spawn"])
@looks_into_proc
def test_workers_live_through_signals_to_the_process_group_and_end_as_always(root: Path, method: str) -> None:
    with _start_trainer(root, method) as trainer:
        _wait_for(trainer, "starting")
        _wait_for(trainer, "reading")
        _signal_all(children(trainer.pid))
        said, failed = trainer.communicate("go on\n", timeout=60)
    assert (said, failed, trainer.returncode) == ("27\n", "", 0)


@pytest.mark.nightly
@looks_into_proc
def test_workers_live_through_signals_that_come_while_they_start(root: Path) -> None:
    with _start_trainer(root, "spawn") as trainer:
        _wait_for(trainer, "starting")
        # Two workers and what multiprocessing starts beside them.
        assert wait_until(lambda: len(children(trainer.pid)) >= 3)
        _signal_all(children(trainer.pid))
        said, failed = trainer.communicate("go on\n", timeout=60)
    assert (said, failed, trainer.returncode) == ("reading\n27\n", "", 0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@looks_into_proc
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


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["fork", "spawn"])
@looks_into_proc
def test_a_trainer_that_exits_in_mid_epoch_is_not_held_up(root: Path, method: str) -> None:
    # Torch then leaves the workers to multiprocessing, which terminates them and waits without end.
    with _start_trainer(root, method, "exit") as trainer:
        said, failed = trainer.communicate(timeout=60)
    assert (said, failed, trainer.returncode) == ("starting\nreading\n", "", 0)


@looks_into_proc
def test_a_killed_worker_is_an_error_and_not_a_hang(root: Path) -> None:
    # In a process of its own, because torch raises the error wherever that process happens to be.
    with _start_trainer(root, do="SIGKILL") as trainer:
        said, _ = trainer.communicate("go on\n", timeout=60)
    assert said in ("starting\n", "starting\nreading\n")
    assert trainer.returncode == 1


@pytest.mark.rotate(1)
@pytest.mark.parametrize("method", ["fork", "spawn"])
@looks_into_proc
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


TORCHS_PATIENCE = 10
"""Seconds that torch takes for two workers that do not end by themselves."""


def _stand_still() -> None:
    threading.Event().wait()


def _hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(100)


def _after_two_batches(sample: dict[str, Any], do: Callable[[], None], going: Path) -> dict[str, Any]:
    if sample["id"] >= 8:
        assert wait_until((going / "go").exists)  # or the first batch might never be sent
        (going / str(sample["id"])).touch()
        do()
    return sample


@pytest.mark.rotate(2)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("do", [_stand_still, _hold_the_interpreter])
@looks_into_proc
def test_workers_in_the_middle_of_a_sample_are_ended_soon(
    root: Path, tmp_path: Path, do: Callable[[], None], persistent: bool
) -> None:
    before = children()
    transform = partial(_after_two_batches, do=do, going=tmp_path)
    options = {"persistent_workers": persistent}
    loader = make_loader(root, workers=2, shuffle=False, transform=transform, loader=options)
    batches = iter(loader)
    assert ids([next(batches), next(batches)]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    workers = children() - before
    assert len(workers) == 2
    (tmp_path / "go").touch()
    assert wait_until(lambda: {path.name for path in tmp_path.iterdir()} == {"go", "8", "12"})
    closing = threading.Thread(target=loader.close)
    closing.start()
    assert wait_until(lambda: not workers & children(), seconds=0.8 * TORCHS_PATIENCE)
    closing.join()
    assert next(batches, None) is None


@looks_into_proc
def test_a_loader_can_be_closed_again_and_used_again(root: Path) -> None:
    loader = make_loader(root, workers=2, loader={"persistent_workers": True})
    for _ in range(2):
        assert len(ids([next(iter(loader))])) == 1
        loader.close()
        loader.close()
    assert len(ids(loader)) == 8
    loader.close()


WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    roots = tmp_path_factory.mktemp("data")
    return {
        "a": Stream(remote=str(write_dataset(roots / "a", 17))),
        "b": Stream(remote=str(write_dataset(roots / "b", 12, first_id=100))),
    }


class OddError(Exception):
    """An exception that pickles, and comes back as it was."""


class TwoArgumentsError(Exception):
    """An exception that pickles, and cannot come back."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _fails(sample: dict[str, Any], kind: type[Exception]) -> dict[str, Any]:
    if sample["id"] == 107:
        raise TwoArgumentsError("no", "good") if kind is TwoArgumentsError else kind("no good")
    return sample


class Failing(StreamingDataset):
    """A subclass whose samples cannot all be made."""

    kind: type[Exception] = OddError

    def __getitem__(self, idx: Any) -> Any:
        return _fails(super().__getitem__(idx), self.kind)


class FailingToGet(StreamingDataset):
    """One that overrides the other method."""

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        return _fails(super().get_item(sample_id, retry), OddError)


def _error_of(loader: Any) -> StreamingError:
    with pytest.raises(StreamingError) as caught:
        list(loader)
    traceback.clear_frames(caught.tb)
    return caught.value


def _assert_names_its_sample(error: BaseException, streams: dict[str, Stream], who: str) -> None:
    told = str(error)
    assert f"{who} failed on sample 2 of shard 1 of stream 'b': " in told
    start = told.index("dataset.restore_sample(") + len("dataset.restore_sample(")
    key = SampleKey.from_dict(json.loads(told[start : told.index(")", start)]))
    assert make_dataset(streams=streams).restore_sample(key) == {"id": 107}
    failing = Failing(streams=streams)
    with pytest.raises(OddError, match=r"^no good$"):
        failing.restore_sample(key)


@pytest.mark.rotate(2)
@WORKERS
@pytest.mark.parametrize("kind", [Failing, FailingToGet, None])
def test_what_fails_names_its_sample_and_has_the_exception_as_its_cause(
    streams: dict[str, Stream], workers: int, kind: type[StreamingDataset] | None
) -> None:
    settings: dict[str, Any] = {"streams": streams, "batch_size": 4, "shuffle": True}
    who = "transform" if kind is None else f"dataset[i] of {kind.__name__}"
    if kind is None:
        kind, settings["transform"] = StreamingDataset, lambda sample: _fails(sample, OddError)
    with closing(StreamingDataLoader(kind(**settings), num_workers=workers)) as loader:
        error = _error_of(loader)
    assert type(error) is SampleError
    _assert_names_its_sample(error, streams, who)
    assert (type(error.__cause__), str(error.__cause__)) == (OddError, "no good")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert "in _fails" in "".join(traceback.format_exception(error))


def test_so_does_a_pass_without_a_loader_and_one_of_torchs(streams: dict[str, Stream]) -> None:
    settings: dict[str, Any] = {"streams": streams, "batch_size": 4}
    error = _error_of(Failing(**settings))
    _assert_names_its_sample(error, streams, "dataset[i] of Failing")
    assert isinstance(error.__cause__, OddError)
    loader: DataLoader[Any] = DataLoader(Failing(**settings), batch_size=4, num_workers=1)
    _assert_names_its_sample(_error_of(loader), streams, "dataset[i] of Failing")


@WORKERS
@pytest.mark.parametrize("kind", [TwoArgumentsError, type("Local", (Exception,), {})])
def test_an_exception_that_cannot_travel_is_told_all_the_same(
    streams: dict[str, Stream], workers: int, kind: type[Exception]
) -> None:
    loader = make_loader(streams=streams, workers=workers, transform=lambda sample: _fails(sample, kind))
    error = _error_of(loader)
    _assert_names_its_sample(error, streams, "transform")
    assert f"{kind.__name__}: no good" in str(error)
    assert "in _fails" in "".join(traceback.format_exception(error))


@WORKERS
def test_an_error_of_ours_keeps_its_class(streams: dict[str, Stream], workers: int) -> None:
    loader = make_loader(streams=streams, workers=workers, transform=lambda sample: _fails(sample, EncodingError))
    error = _error_of(loader)
    assert type(error) is EncodingError
    _assert_names_its_sample(error, streams, "transform")


class OwnError(StreamingError):
    """A user's own, of one of our classes."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class FailingToIterate(StreamingDataset):
    def __iter__(self) -> Any:
        yield from super().__iter__()
        raise OwnError("no", "good")


def test_an_error_of_a_users_own_class_travels_as_one_that_is_known(streams: dict[str, Stream]) -> None:
    error = _error_of(StreamingDataLoader(FailingToIterate(streams=streams, batch_size=4), num_workers=1))
    assert (type(error), str(error)) == (SampleError, "no good")
    assert "OwnError" in "".join(traceback.format_exception(error))


KILLS = kills(3, 20)
EPOCHS = max(8, KILLS // 2)


def _journal(path: Path) -> list[dict[str, Any]]:
    """What was consumed, and the state after it; a line that was being written at a kill never happened."""
    whole, newline, _ = path.read_text().rpartition("\n")
    path.write_text(whole + newline)
    return [json.loads(line) for line in whole.splitlines()]


def _train(url: str, directory: Path) -> None:
    """Read to the end of the last epoch, from where the journal stops."""
    loader = make_loader(
        url,
        local=str(directory / "cache"),
        workers=2,
        batch_size=2,
        predownload=6,
        download_timeout=1,
        download_retry=4,
    )
    journal = _journal(directory / "journal")
    if journal:
        loader.load_state_dict(journal[-1]["state"])
    with (directory / "journal").open("a") as written:
        while loader.state_dict()["epoch"] < EPOCHS:
            for batch in loader:
                time.sleep(0.002)
                written.write(json.dumps({"ids": batch["id"].tolist(), "state": loader.state_dict()}) + "\n")
                written.flush()


def _kill_after(trainer: Any, seconds: float) -> None:
    """Kill the trainer alone, and see that all it started ends with it."""
    trainer.join(seconds)
    assert trainer.exitcode is None
    workers = children(trainer.pid)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join()
    assert wait_until(lambda: not any(map(is_alive, workers)))
    assert not shared_memory_of(workers | {trainer.pid})


@looks_into_proc
def test_training_survives_being_killed_at_any_moment(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, 250)
    # Some downloads stand still half way, so that kills find them there.
    http_store.fail("shard", "stall", times=6, skip=20)
    (tmp_path / "journal").touch()
    chance, context = random.Random(3), multiprocessing.get_context("fork")
    lengths = []
    for kill in range(KILLS + 1):
        trainer = context.Process(target=_train, args=(http_store.url, tmp_path))
        trainer.start()
        if kill < KILLS and kill % 2:  # while it reads, however long a busy machine takes to get there
            written = (tmp_path / "journal").stat().st_size
            assert wait_until(lambda: (tmp_path / "journal").stat().st_size > written)  # noqa: B023
            _kill_after(trainer, chance.uniform(0.001, 0.1))
        elif kill < KILLS:
            _kill_after(trainer, chance.uniform(0.01, 0.5))
        lengths.append(len(_journal(tmp_path / "journal")) if kill < KILLS else 0)
    trainer.join()
    assert trainer.exitcode == 0

    assert len(set(lengths)) > KILLS // 3  # kills found it in many places
    assert lengths[-2] < EPOCHS * 125  # and none found it done
    expected, _ = read_epochs(make_loader(http_store.root, batch_size=2), EPOCHS)
    assert [line["ids"] for line in _journal(tmp_path / "journal")] == expected
    cache = tmp_path / "cache"
    assert all((cache / path.name).read_bytes() == path.read_bytes() for path in http_store.root.iterdir())
    assert not list(cache.rglob("*.part"))


def _tensors(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tensor": torch.full((3, 50, 50), sample["id"]), "array": np.full((50, 50), sample["id"])}


def _sparse(sample: dict[str, Any]) -> torch.Tensor:
    return torch.eye(50).to_sparse()


def test_batches_that_go_through_slots_take_no_other_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "data", 30)
    plain = list(make_loader(tmp_path / "data", transform=_tensors))
    monkeypatch.delattr(torch.storage.TypedStorage, "_new_shared")  # before workers are forked
    read = list(make_loader(tmp_path / "data", transform=_tensors, workers=2))
    for one, other in zip(plain, read, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("tensor", "array"))
    with raises(SampleError, "default collate", "sparse tensors"):
        next(iter(make_loader(tmp_path / "data", transform=_sparse, workers=1)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex64, torch.bool])
def test_batches_made_here_are_those_of_torch(threads: int, dtype: torch.dtype, root: Path) -> None:
    def tensor(sample: dict[str, Any]) -> torch.Tensor:
        return torch.full((4, 90, 60), sample["id"]).to(dtype)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = list(make_loader(root, transform=tensor))
        by_torch = list(make_loader(root, transform=tensor, loader={"collate_fn": torch.stack}))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(made, by_torch, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        one[0] = 1  # may be written to


def _growing(sample: dict[str, Any]) -> torch.Tensor:
    return torch.ones(sample["id"] + 1)


def _filled_up(tensors: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_torch_was_told_to_make_of_tensors_is_made(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "data", 4)
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, _filled_up)
    loader = make_loader(tmp_path / "data", transform=_growing, shuffle=False, batch_size=4, workers=workers)
    assert next(iter(loader)).sum(dim=1).tolist() == [1, 2, 3, 4]


def test_a_failure_of_a_worker_is_freed_without_a_garbage_collection() -> None:
    failure = WorkerFailure(SampleError("damaged"), 0)
    gc.disable()
    try:
        try:
            list(failure)
        except SampleError as error:
            freed = weakref.ref(error)
        assert freed() is None
    finally:
        gc.enable()
