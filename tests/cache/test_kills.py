"""``kill -9`` at any moment of a cold epoch with eviction: the next start completes, and other jobs notice nothing.

``LIGHTNING_STREAMING_KILLS=50`` asks for more kills of each kind than the few that every run of the tests can afford.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataLoader, StreamingDataset
from lightning_streaming.world import World
from tests.cache.datasets import parts
from tests.cache.test_crowd import SAMPLES, text_of, write_shards
from tests.loading.processes import children, is_alive, shared_memory_of, wait_until
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

KILLS = int(os.environ.get("LIGHTNING_STREAMING_KILLS", "3"))
_FORK: Any = multiprocessing.get_context("fork")


def make_loader(url: str, root: Path, limit: int, seed: int, workers: int) -> StreamingDataLoader:
    dataset = StreamingDataset(
        remote=url, local=str(root), cache_limit=limit, shuffle=True, shuffle_seed=seed, shuffle_block_size=64
    )
    return StreamingDataLoader(dataset, batch_size=4, num_workers=workers)


def read_epoch(loader: StreamingDataLoader, steps: Any) -> list[int]:
    found: list[int] = []
    for batch in loader:
        assert batch["text"] == [text_of(index) for index in batch["id"].tolist()]
        found += batch["id"].tolist()
        steps.value += 1
    return found


def job(url: str, root: Path, limit: int, out: Path, steps: Any) -> None:
    out.write_text(json.dumps(read_epoch(make_loader(url, root, limit, 1, workers=2), steps)))


def other_job(url: str, root: Path, limit: int, ended: Any, steps: Any) -> None:
    loader = make_loader(url, root, limit, 2, workers=0)
    while not ended.is_set():
        assert sorted(read_epoch(loader, steps)) == list(range(SAMPLES))


def rank(url: str, root: Path, limit: int, number: int, steps: Any) -> None:
    """One of two ranks of a node, which read an epoch together and need nothing else of each other."""
    dataset = StreamingDataset(
        remote=url,
        local=str(root),
        cache_limit=limit,
        batch_size=4,
        shuffle=True,
        shuffle_block_size=64,
        world=World(num_nodes=1, ranks_per_node=2, rank=number),
    )
    found = []
    for sample in dataset:
        assert sample["text"] == text_of(sample["id"])
        found.append(sample["id"])
        steps.value += 1
    rank_file(root, number).write_text(json.dumps(found))


def wait_for_steps(steps: Any, wanted: int) -> None:
    assert wait_until(lambda: steps.value >= wanted, 60)


def parts_after_a_start(url: str, root: Path) -> list[Path]:
    """What is on its way when nobody fetches: a process that ends leaves what it was fetching ahead to the next."""
    StreamingDataset(remote=url, local=str(root)).prepare_shard(0)
    return parts(root)


def rank_file(root: Path, number: int) -> Path:
    return root.parent / f"rank-{number}.json"


@contextmanager
def running(target: Any, *arguments: Any) -> Iterator[Any]:
    process = _FORK.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def kill_at_random(process: Any, steps: Any, victim: str, moment: random.Random) -> set[int]:
    """Kill the job's main process or one of its workers; gives all its processes, once they have ended."""
    wanted = moment.randrange(30)
    assert wait_until(lambda: steps.value >= wanted or not is_alive(process.pid), 60)
    time.sleep(moment.random() / 20)
    pids = {process.pid, *children(process.pid)}
    killed = process.pid if victim == "main" else moment.choice([*children(process.pid)] or [process.pid])
    os.kill(killed, signal.SIGKILL)
    process.join()
    assert process.exitcode != 0
    assert wait_until(lambda: not any(map(is_alive, pids)))
    return pids


@pytest.mark.parametrize("victim", ["main", "worker"])
def test_after_a_kill_the_next_start_completes_and_other_jobs_go_on(
    http_store: HttpStore, tmp_path: Path, victim: str
) -> None:
    least, largest = write_shards(http_store.root)
    root, limit, out = tmp_path / "cache", least + 3 * largest, tmp_path / "read.json"
    moment = random.Random(0)
    ended, steps, other_steps = _FORK.Event(), _FORK.Value("i"), _FORK.Value("i")
    with running(other_job, http_store.url, root, limit, ended, other_steps) as other:
        for _ in range(KILLS):
            steps.value = 0
            with running(job, http_store.url, root, limit, out, steps) as first:
                pids = kill_at_random(first, steps, victim, moment)
            with running(job, http_store.url, root, limit, out, steps) as second:
                second.join()
                assert second.exitcode == 0
            assert sorted(json.loads(out.read_text())) == list(range(SAMPLES))
            assert not shared_memory_of(pids)
            assert other.is_alive()
        wait_for_steps(other_steps, SAMPLES // 4)
        ended.set()
        other.join()
        assert other.exitcode == 0
    assert not parts_after_a_start(http_store.url, root)


def test_after_a_rank_was_killed_the_other_goes_on_and_the_next_start_completes(
    http_store: HttpStore, tmp_path: Path
) -> None:
    least, largest = write_shards(http_store.root)
    root, limit = tmp_path / "cache", least + 3 * largest
    moment = random.Random(0)
    for _ in range(KILLS):
        steps = [_FORK.Value("i"), _FORK.Value("i")]
        begun = [(http_store.url, root, limit, number, steps[number]) for number in range(2)]
        with running(rank, *begun[0]) as survivor, running(rank, *begun[1]) as victim:
            wait_for_steps(steps[1], moment.randrange(SAMPLES // 2))
            victim.kill()
            survivor.join()
            assert survivor.exitcode == 0
        with running(rank, *begun[0]) as first, running(rank, *begun[1]) as second:
            first.join()
            second.join()
            assert (first.exitcode, second.exitcode) == (0, 0)
        read = [json.loads(rank_file(root, number).read_text()) for number in range(2)]
        assert sorted(read[0] + read[1]) == list(range(SAMPLES))
        assert not shared_memory_of({survivor.pid, victim.pid, first.pid, second.pid})
    assert not parts_after_a_start(http_store.url, root)
