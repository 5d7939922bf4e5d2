"""Four jobs of eight processes in one cache directory that has room for six shards."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import MDSWriter, StreamingDataset, World
from lightning_streaming.cache.limits import largest_shard_bytes, least_limit
from lightning_streaming.formats.index import INDEX_BASENAME, parse_index
from lightning_streaming.storage import prepare
from tests.cache.datasets import cached, parts
from tests.cache.watcher import Watcher, measured
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

JOBS, RANKS = 4, 8
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
