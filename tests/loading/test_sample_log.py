"""The log of what each worker read: whole whatever becomes of the worker, and good to make its samples again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import Stream, World, read_sample_log
from lightning_streaming.errors import FormatError
from tests.helpers import ids, make_dataset, make_loader, write_dataset

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
    options = {"collate_fn": list, "with_keys": True}
    loader = make_loader(
        streams=streams, world=world, workers=workers, loader=options, transform=_augment, sample_log=log
    )
    with closing(loader):
        batches = list(loader)
    step = max(workers, 1)
    assert sorted(path.name for path in log.iterdir()) == [f"rank1-worker{worker}.jsonl" for worker in range(step)]
    for worker in range(step):
        lines = list(read_sample_log(log / f"rank1-worker{worker}.jsonl"))
        own = batches[worker::step]
        assert [line.key for line in lines] == [key for _, keys in own for key in keys]
        assert [loader.restore_sample(line.key) for line in lines] == [one for samples, _ in own for one in samples]
        assert len({line.pid for line in lines}) == 1
        assert [line.time for line in lines] == sorted(line.time for line in lines)


def test_a_log_goes_on_where_it_was(root: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert len(ids(make_loader(root, sample_log=str(tmp_path)))) == 8
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

for _ in make_loader(sys.argv[1], transform=die, sample_log=sys.argv[2]):
    pass
"""


def test_the_last_line_of_a_killed_process_is_the_sample_that_killed_it(root: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", KILLED, str(root), str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    *_, last = read_sample_log(tmp_path / "rank0-worker0.jsonl")
    assert make_dataset(root).restore_sample(last.key) == {"id": 17}


def test_a_line_cut_short_is_left_out_and_another_one_refused(root: Path, tmp_path: Path) -> None:
    list(make_loader(root, sample_log=tmp_path))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert len(list(read_sample_log(path))) == 28
    list(make_loader(root, sample_log=tmp_path))
    assert len(list(read_sample_log(path))) == 28 + 29
    for broken in (b"{}\n", b"no json\n", b"[1]\n"):
        path.write_bytes(broken + whole)
        with pytest.raises(FormatError, match=r"line 1 of .*rank0-worker0.jsonl is not one of a sample log"):
            next(read_sample_log(path))


def test_a_log_that_cannot_be_written_fails_at_the_first_sample(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        next(iter(make_loader(root, sample_log=tmp_path / "file")))
