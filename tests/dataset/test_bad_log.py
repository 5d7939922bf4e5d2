"""The log of bad samples: whole whatever becomes of its writers; by it a resume is exact where failures are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import BadSamplesError, ConfigError, FormatError, ObjectNotFoundError, StorageError
from lightning_streaming.logs import read_bad_samples
from tests.broken_data import ids, replacing_loader, write_broken_json
from tests.helpers import make_loader, raises, write_dataset
from tests.tiers import some

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


def _odd_times(sample: dict[str, Any]) -> dict[str, Any]:
    """Fails on some samples, as a store that is asked for more than it gives would: now and then."""
    if os.environ.get("FAILS") and sample["id"] % 5 == 3:
        raise ValueError("this time it fails")
    return sample


KILLED = """
import json, os, signal, sys
from pathlib import Path
from tests.broken_data import replacing_loader
from tests.dataset.test_bad_log import _odd_times

root, log, out, workers = sys.argv[1:]
loader = replacing_loader(Path(root), Path(log), transform=_odd_times, workers=int(workers))
states, batches = [loader.state_dict()], []
for batch in loader:
    batches.append(batch["id"].tolist())
    states.append(loader.state_dict())
    Path(out).write_text(json.dumps([batches, states]))
    if len(batches) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [2, 0])
def test_a_killed_run_goes_on_the_same_though_nothing_fails_any_more(root: Path, tmp_path: Path, workers: int) -> None:
    out = tmp_path / "out.json"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "FAILS": "1"}
    command = [sys.executable, "-c", KILLED, str(root), str(tmp_path / "log"), str(out), str(workers)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    batches, states = json.loads(out.read_text())
    planned = [batch["id"].tolist() for batch in make_loader(root)][:6]
    assert batches != planned
    logged = list(read_bad_samples(tmp_path / "log"))
    for place, state in some(list(enumerate(states[:-1])), 4):
        for other_workers in {0, workers}:
            loader = replacing_loader(root, tmp_path / "log", transform=_odd_times, workers=other_workers)
            loader.load_state_dict(state)
            with closing(loader):
                going_on = [batch["id"].tolist() for _, batch in zip(range(6 - place), loader, strict=False)]
            assert going_on == batches[place:]
    assert list(read_bad_samples(tmp_path / "log")) == logged


def test_what_is_known_is_not_tried_again(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")
    first = ids(replacing_loader(root, tmp_path / "log", transform=_odd_times))
    lines = list(read_bad_samples(tmp_path / "log"))
    assert [one.key.position for one in lines] == sorted(one.key.position for one in lines)
    monkeypatch.delenv("FAILS")
    tried = []

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        tried.append(sample["id"])
        return sample

    loader = replacing_loader(root, tmp_path / "log", transform=note)
    assert ids(loader) == first == tried
    assert loader.statistics().bad_samples == len([one for one in lines if not one.attempt])
    assert list(read_bad_samples(tmp_path / "log")) == lines
    assert ids(loader) != first  # another epoch: its places are others
    plain = replacing_loader(root, tmp_path / "log")
    assert ids(plain) == first  # where samples are tables, too


def test_a_log_of_another_epoch_or_seed_says_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"shuffle": False, "transform": _odd_times}  # each sample has the same place always
    monkeypatch.setenv("FAILS", "1")
    list(replacing_loader(root, tmp_path / "log", **settings))
    monkeypatch.delenv("FAILS")
    assert ids(replacing_loader(root, tmp_path / "log", shuffle_seed=1, **settings)) == [*range(29)]
    loader = replacing_loader(root, tmp_path / "log", **settings)
    assert ids(loader) != [*range(29)]
    assert ids(loader) == [*range(29)]


def test_a_line_cut_short_is_left_out_and_another_one_refused(root: Path, tmp_path: Path) -> None:
    broken = write_broken_json(tmp_path / "data")
    log = tmp_path / "log"
    read = ids(replacing_loader(broken, log))
    (path,) = log.iterdir()
    assert path.name == "bad-rank0-worker0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert len(list(read_bad_samples(log))) == whole.count(b"\n") - 1
    assert ids(replacing_loader(broken, log)) == read
    assert len(list(read_bad_samples(path))) == whole.count(b"\n")
    for damage in (b"{}\n", b"no json\n", b"[1]\n"):
        path.write_bytes(damage + whole)
        with raises(FormatError, "line 1 of", "is not one of a log of bad samples"):
            ids(replacing_loader(broken, log))
    with raises(ObjectNotFoundError, "no log of bad samples"):
        list(read_bad_samples(tmp_path / "elsewhere"))


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    broken = write_broken_json(tmp_path / "data")
    with raises(ConfigError, "bad_samples.log must be a directory", "is a file"):
        ids(replacing_loader(broken, tmp_path / "file"))
    with raises(StorageError, "bad_samples.log", "cannot be written"):
        ids(replacing_loader(broken, tmp_path / "file" / "log"))


def _says_braces(_: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("{no} {sample}")


def test_a_line_may_be_cut_short_anywhere(root: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with raises(BadSamplesError, "no"):
        ids(replacing_loader(root, log, transform=_says_braces))
    (path,) = log.iterdir()
    line = path.read_bytes().splitlines(keepends=True)[0]
    assert next(read_bad_samples(path)).error == "ValueError: {no} {sample}"
    for stop in range(1, len(line) - 1):
        path.write_bytes(line[:stop] + b"\n" + line)  # as who adds to it ends it
        assert len(list(read_bad_samples(path))) == 1


@pytest.mark.nightly
def test_workers_that_are_spawned_and_live_on_write_and_read_it(root: Path, tmp_path: Path) -> None:
    broken = write_broken_json(tmp_path / "data")
    options = {"multiprocessing_context": "spawn", "persistent_workers": True, "return_keys": True}
    expected = replacing_loader(broken, tmp_path / "a", loader={"return_keys": True})
    with closing(replacing_loader(broken, tmp_path / "b", workers=2, loader=options)) as loader:
        for _ in range(2):
            ours, theirs = list(loader), list(expected)
            assert [batch["id"].tolist() for batch, _ in ours] == [batch["id"].tolist() for batch, _ in theirs]
            assert [keys for _, keys in ours] == [keys for _, keys in theirs]
    found = [{(one.key, one.attempt, one.error) for one in read_bad_samples(tmp_path / name)} for name in "ab"]
    assert found[0] == found[1]
