"""What goes wrong is raised in the step that needed it, after all batches before it, in words that help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import Stream, StreamingDataLoader
from lightning_streaming.errors import (
    ConfigError,
    DownloadError,
    FormatError,
    IndexFormatError,
    IntegrityError,
    ObjectNotFoundError,
    ShardCorruptError,
    StreamingError,
)
from tests.helpers import ids, make_loader, write_dataset
from tests.servers import HttpStore, S3Store

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def _in_shards(where: Path | str | None = None, **settings: Any) -> StreamingDataLoader:
    """A loader whose n-th batch is the n-th shard."""
    return make_loader(where, **{"shuffle": False, "batch_size": 5, "download_retry": 1, **settings})


def _read_until_it_fails(loader: StreamingDataLoader, error: type[Exception], words: str) -> list[list[int]]:
    """The batches before the error; nothing comes after it, and the place stays before it."""
    iterator, batches = iter(loader), []
    with pytest.raises(error, match=words):
        batches += [next(iterator)["id"].tolist() for _ in range(6)]
    return batches


def _steps_before(loader: StreamingDataLoader, error: type[Exception], words: str) -> int:
    """Batches delivered before the error; afterwards the pass is over, and the place is before what failed."""
    iterator, steps = iter(loader), 0
    with pytest.raises(error, match=words) as caught:
        for batch in iterator:
            assert batch["id"].tolist() == list(range(5 * steps, 5 * steps + 5))
            steps += 1
    assert type(caught.value) is error
    assert next(iterator, None) is None
    assert loader.state_dict()["sample_in_epoch"] == 5 * steps
    return steps


@WORKERS
def test_a_missing_shard_fails_the_step_that_needs_it(tmp_path: Path, workers: int) -> None:
    root = write_dataset(tmp_path / "data", 30)
    (root / "shard.00003.mds").rename(tmp_path / "away")
    loader = _in_shards(root, workers=workers)
    assert _steps_before(loader, ObjectNotFoundError, r"stream '0': .*shard\.00003\.mds does not exist") == 3
    (tmp_path / "away").rename(root / "shard.00003.mds")
    loader.load_state_dict(loader.state_dict())
    assert ids(loader) == [list(range(first, first + 5)) for first in (15, 20, 25)]


@WORKERS
@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"\xff" * len(data), lambda data: b""])
def test_a_damaged_shard_fails_the_step_that_needs_it(
    tmp_path: Path, workers: int, damage: Callable[[bytes], bytes]
) -> None:
    shard = write_dataset(tmp_path / "data", 30) / "shard.00002.mds"
    shard.write_bytes(damage(shard.read_bytes()))
    loader = _in_shards(shard.parent, workers=workers)
    assert _steps_before(loader, ShardCorruptError, r"stream '0': .*shard\.00002\.mds") == 2


FAULTS = [
    ({"fault": "status", "status": 404}, ObjectNotFoundError, "not found"),
    ({"fault": "status", "status": 503}, DownloadError, "1 attempt"),
    ({"fault": "reset"}, DownloadError, "1 attempt"),
    ({"fault": "truncate"}, DownloadError, "1 attempt"),
    ({"fault": "short"}, IntegrityError, "promises"),
    ({"fault": "corrupt"}, IntegrityError, "sha1"),
]


@WORKERS
@pytest.mark.parametrize("predownload", [1, None])
@pytest.mark.parametrize(("fault", "error", "words"), FAULTS)
def test_a_failed_download_fails_the_step_that_needs_it(
    http_store: HttpStore,
    tmp_path: Path,
    workers: int,
    predownload: int | None,
    fault: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    write_dataset(http_store.root, 30, hashes=["sha1"], size_limit=240)
    http_store.fail("shard.00004.mds", **fault)
    settings = {"workers": workers, "predownload": predownload, "local": str(tmp_path / "cache")}
    loader = _in_shards(http_store.url, **settings)
    assert _steps_before(loader, error, rf"(?s)stream '0': .*shard\.00004\.mds.*{words}") == 4
    loader.close()
    assert not list((tmp_path / "cache").glob("*.part"))
    assert not (tmp_path / "cache" / "shard.00004.mds").exists()
