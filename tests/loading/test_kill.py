"""``kill -9`` at any moment: the next start just works, reads what comes next, and nothing is left behind.

``LIGHTNING_STREAMING_KILLS=50`` asks for more kills than the few that every run of the tests can afford.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import make_loader, read_epochs, write_dataset
from tests.loading.processes import children, is_alive, shared_memory_of, wait_until
from tests.servers import HttpStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

KILLS = int(os.environ.get("LIGHTNING_STREAMING_KILLS", "20"))
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
