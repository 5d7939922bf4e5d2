"""Several processes that want the same selection at once: one evaluates it, and all have it."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataset
from tests.helpers import write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

PROCESSES, SAMPLES = 8, 400


def _is_odd(id: int) -> bool:  # noqa: A002  named like the column
    note = os.open(os.environ["LOOKED_AT"], os.O_WRONLY | os.O_APPEND)
    os.write(note, b".")
    os.close(note)
    return id % 2 == 1


def _read(remote: Path, local: Path, start: Any, found: Any) -> None:
    start.wait()
    dataset = StreamingDataset(remote=str(remote), local=str(local), selection={"where": _is_odd}, batch_size=1)
    found.put((len(dataset), [int(dataset[number]["id"]) for number in (0, 1, 199)]))
    dataset.close()


def test_eight_processes_that_want_one_selection_evaluate_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, noted = write_dataset(tmp_path / "remote", SAMPLES), tmp_path / "noted"
    noted.touch()
    monkeypatch.setenv("LOOKED_AT", str(noted))
    context = multiprocessing.get_context("fork")
    start, found = context.Barrier(PROCESSES), context.Queue()
    ends = (remote, tmp_path / "local", start, found)
    readers = [context.Process(target=_read, args=ends) for _ in range(PROCESSES)]
    for reader in readers:
        reader.start()
    read = [found.get(timeout=60) for _ in readers]
    for reader in readers:
        reader.join()
    assert read == [(SAMPLES // 2, [1, 3, 399])] * PROCESSES
    assert noted.stat().st_size == SAMPLES
    assert len(list((tmp_path / "local" / "selections").glob("*.npy"))) == 1
