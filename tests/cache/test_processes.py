"""Several processes, one cache directory.

Four jobs of several processes in one cache directory that has room for six shards.

``kill -9`` at any moment of a cold epoch with eviction: the next start completes, and other jobs notice nothing.

``LIGHTNING_STREAMING_KILLS=50`` asks for more kills of each kind than the few that every run of the tests can afford.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World
from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.eviction import least_limit
from lightning_streaming.cache.quota import largest_shard_bytes
from lightning_streaming.formats.index import INDEX_BASENAME, parse_index
from lightning_streaming.storage import prepare
from tests.cache.helpers import Watcher, cached, fetch_shard, measured, parts, raw_data, write_dataset
from tests.reading.processes import children, is_alive, shared_memory_of, wait_until
from tests.servers import HttpStore
from tests.tiers import amount, kills

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def _cache(store: HttpStore, tmp_path: Path, **settings: Any) -> ShardCache:
    return ShardCache(CacheConfig(name="code", remote=store.url, local=tmp_path / "cache", **settings))


def _ensure_all(cache: ShardCache, start: Any = None) -> None:
    if start is not None:
        start.wait()
    for shard in cache.read_index().shards:
        fetch_shard(cache, shard)


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    ("method", "compression"),
    [("fork", None), ("fork", "zstd"), pytest.param("spawn", None, marks=pytest.mark.nightly)],
)
def test_eight_processes_fetch_each_file_once(
    http_store: HttpStore, tmp_path: Path, method: str, compression: str | None
) -> None:
    write_dataset(http_store.root, shards=20, compression=compression)
    context: Any = multiprocessing.get_context(method)
    start = context.Barrier(8)
    children = [context.Process(target=_ensure_all, args=(_cache(http_store, tmp_path), start)) for _ in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 8
    assert set(Counter(http_store.requests()).values()) == {1}
    assert list(cached(tmp_path / "cache")) == [INDEX_BASENAME, *(f"shard.{number:05}.mds" for number in range(20))]
    assert not parts(tmp_path / "cache")


def test_what_a_killed_process_was_fetching_is_fetched_by_the_next(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, shards=1)
    http_store.fail("shard.00000.mds", "stall", times=1)
    child = multiprocessing.get_context("fork").Process(target=_ensure_all, args=(_cache(http_store, tmp_path),))
    child.start()
    directory = tmp_path / "cache"
    while "shard.00000.mds" not in http_store.requests():
        assert child.is_alive()
        child.join(0.02)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert len(parts(directory)) == 1
    _ensure_all(_cache(http_store, tmp_path, download_retry=0, download_timeout=5))
    assert list(cached(directory)) == [INDEX_BASENAME, "shard.00000.mds"]
    assert not parts(directory)
    assert (directory / "shard.00000.mds").read_bytes() == raw_data(0)


JOBS, RANKS = 4, amount(4, 8)
SAMPLES, SHARD_BYTES = 384, 18_000


def make_dataset(store: HttpStore, root: Path, limit: int, job: int, rank: int) -> StreamingDataset:
    return StreamingDataset(
        remote=store.url,
        local=str(root),
        cache_limit=limit,
        batch_size=2,
        shuffle=job > 0,
        shuffle_algo="blockwise",
        shuffle_block_size=32,
        shuffle_seed=job,
        num_canonical_nodes=1,
        world=World(num_nodes=1, ranks_per_node=RANKS, rank=rank),
    )


def read_share(store: HttpStore, root: Path, limit: int, job: int, rank: int, progress: Any, start: Any) -> None:
    dataset = make_dataset(store, root, limit, job, rank)
    assert dataset.size == SAMPLES
    start.wait()
    ids = []
    for sample in dataset:
        assert sample["text"] == text_of(sample["id"])
        ids.append(sample["id"])
        progress[job * RANKS + rank] = len(ids)
    (root.parent / f"read-{job}-{rank}.json").write_text(json.dumps([ids, list(progress)]))


def text_of(index: int) -> str:
    return f"{index:04} " * 200


def write_shards(root: Path) -> tuple[int, int]:
    """Write the dataset; gives the smallest limit that works, and the bytes of the largest shard."""
    with MDSWriter(
        out=str(root), columns={"id": "int", "text": "str"}, hashes=["sha1"], size_limit=SHARD_BYTES
    ) as writer:
        for index in range(SAMPLES):
            writer.write({"id": index, "text": text_of(index)})
    text = (root / INDEX_BASENAME).read_bytes()
    largest = largest_shard_bytes(parse_index(text, "").shards)
    return least_limit(len(text), largest), largest


def test_a_crowd_reads_right_bytes_within_the_limit(http_store: HttpStore, tmp_path: Path) -> None:
    least, largest = write_shards(http_store.root)
    limit, root = least + 4 * largest, tmp_path / "cache"
    context: Any = multiprocessing.get_context("fork")
    prepare(http_store.url)  # imports once for all
    progress, start = context.Array("i", JOBS * RANKS, lock=False), context.Barrier(JOBS * RANKS)
    root.mkdir()
    with Watcher(root) as watcher:
        children = [
            context.Process(target=read_share, args=(http_store, root, limit, job, rank, progress, start))
            for job in range(JOBS)
            for rank in range(RANKS)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0] * len(children)
    reports = {
        (job, rank): json.loads((tmp_path / f"read-{job}-{rank}.json").read_text())
        for job in range(JOBS)
        for rank in range(RANKS)
    }
    for job in range(JOBS):
        found = [ids for (its_job, _), (ids, _) in reports.items() if its_job == job]
        assert sorted(chain.from_iterable(found)) == list(range(SAMPLES))
    # Nobody reads all while the others wait: when the first has finished, many are half way.
    assert min(sum(progress) for _, progress in reports.values()) > JOBS * SAMPLES // 8
    assert watcher.looks > 0
    assert watcher.largest <= limit
    names = sorted(path.name for path in http_store.root.glob("shard.*"))
    assert len(names) > 20
    downloads = Counter(name for name in http_store.requests() if name != INDEX_BASENAME)
    here = Counter(name for name in cached(root) if name != INDEX_BASENAME)
    assert sorted(downloads) == names
    assert downloads == Counter({name: watcher.appeared[name] for name in names})
    assert downloads == Counter({name: watcher.removed[name] for name in names}) + here
    assert not parts(root)
    assert measured(root) <= limit


KILLS = kills(1, 3)
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


@pytest.mark.rotate(1)
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
