"""A dataset in a faulty store, and one way to check that an epoch of it is right to the last byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from tests.helpers import raises
from tests.servers import FaultyStore

PER_SHARD = 4
SHARDS = 6
SAMPLES = PER_SHARD * SHARDS


def data_of(sample: int, size: int = 1500) -> bytes:
    """What a sample holds: like no other, and of its own length."""
    return random.Random(sample).randbytes(size + sample)


def write_samples(root: Path, *, samples: int = SAMPLES, size: int = 1500, **writer: Any) -> Path:
    """Write samples in shards of :data:`PER_SHARD`; gives ``root``."""
    columns = {"id": "int", "data": "bytes"}
    limit = PER_SHARD * (size + 32) + 200 + PER_SHARD * samples
    with MDSWriter(out=str(root), columns=columns, size_limit=limit, **{"hashes": ["sha1"], **writer}) as written:
        for index in range(samples):
            written.write({"id": index, "data": data_of(index, size)})
    return root


def loader_over(
    store: FaultyStore, cache: Path, workers: int = 0, method: str | None = None, **settings: Any
) -> StreamingDataLoader:
    """A loader whose n-th batch is the n-th shard, unless it shuffles; ``method`` starts its workers."""
    dataset = StreamingDataset(
        remote=store.url,
        local=str(cache),
        batch_size=PER_SHARD,
        **{
            "storage": {"options": store.options},
            "download_timeout": 2,
            "download_retry": 2,
            "shuffle": False,
            **settings,
        },
    )
    return StreamingDataLoader(dataset, num_workers=workers, collate_fn=list, multiprocessing_context=method)


def assert_right(batches: list[list[dict[str, Any]]], samples: list[int], size: int = 1500) -> None:
    """Batches are exactly these samples in this order, byte for byte."""
    read = [sample for batch in batches for sample in batch]
    assert [sample["id"] for sample in read] == samples
    assert all(sample["data"] == data_of(sample["id"], size) for sample in read)


def assert_whole_epoch(loader: StreamingDataLoader, samples: int = SAMPLES, size: int = 1500) -> None:
    """An epoch that is not shuffled is exactly the dataset, byte for byte."""
    assert_right(list(loader), list(range(samples)), size)
    loader.close()


@contextmanager
def fails_at_shard(loader: StreamingDataLoader, shard: int, error: type[Exception], *words: str) -> Iterator[None]:
    """Read up to a shard: all before is right, and it fails with an error that names it. Then look at what is left."""
    batches: list[list[dict[str, Any]]] = []
    with raises(error, f"shard.{shard:05}.mds", *words):
        batches.extend(loader)
    assert_right(batches, list(range(PER_SHARD * shard)))
    yield
    loader.close()
