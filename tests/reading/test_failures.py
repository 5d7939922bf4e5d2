"""What goes wrong is raised in the step that needed it, after all batches before it, in words that help."""

from __future__ import annotations

import gc
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs
from numpy.typing import NDArray

from lightning_streaming import MDSWriter, Stream, StreamingDataLoader
from lightning_streaming.errors import (
    ConfigError,
    DownloadError,
    EncodingError,
    IndexFormatError,
    IntegrityError,
    ObjectNotFoundError,
    SampleError,
    ShardCorruptError,
    StateMismatchError,
    StreamingError,
)
from lightning_streaming.resume import run_state
from lightning_streaming.sequence.draw import Shuffled, drawn_here
from tests.helpers import assert_error, ids, make_loader, raises, write_dataset
from tests.reading.processes import children, wait_until
from tests.servers import HttpStore, S3Store

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def _in_shards(where: Path | str | None = None, **settings: Any) -> StreamingDataLoader:
    """A loader whose n-th batch is the n-th shard."""
    return make_loader(where, **{"shuffle": False, "batch_size": 5, "download_retry": 0, **settings})


def _steps_before(loader: StreamingDataLoader, error: type[Exception], *words: str) -> int:
    """Batches delivered before the error; afterwards the pass is over, and the place is before what failed."""
    iterator, steps = iter(loader), 0
    with raises(error, *words):
        for batch in iterator:
            assert batch["id"].tolist() == list(range(5 * steps, 5 * steps + 5))
            steps += 1
    assert next(iterator, None) is None
    assert loader.state_dict()["sample_in_epoch"] == 5 * steps
    return steps


@WORKERS
def test_a_missing_shard_fails_the_step_that_needs_it(tmp_path: Path, workers: int) -> None:
    root = write_dataset(tmp_path / "data", 30)
    (root / "shard.00003.mds").rename(tmp_path / "away")
    loader = _in_shards(root, workers=workers)
    assert _steps_before(loader, ObjectNotFoundError, "stream '0'", "shard.00003.mds does not exist") == 3
    (tmp_path / "away").rename(root / "shard.00003.mds")
    loader.load_state_dict(loader.state_dict())
    assert ids(loader) == [list(range(first, first + 5)) for first in (15, 20, 25)]


@pytest.mark.rotate(2)
@WORKERS
@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"\xff" * len(data), lambda data: b""])
def test_a_damaged_shard_fails_the_step_that_needs_it(
    tmp_path: Path, workers: int, damage: Callable[[bytes], bytes]
) -> None:
    shard = write_dataset(tmp_path / "data", 30) / "shard.00002.mds"
    shard.write_bytes(damage(shard.read_bytes()))
    loader = _in_shards(shard.parent, workers=workers)
    assert _steps_before(loader, ShardCorruptError, "stream '0'", "shard.00002.mds") == 2


@pytest.mark.parametrize("shard", [0, 3])
def test_a_file_that_changes_while_it_is_read_in_place_ends_the_pass(tmp_path: Path, shard: int) -> None:
    path = write_dataset(tmp_path / "data", 30) / f"shard.{shard:05}.mds"
    batches = iter(_in_shards(path.parent))
    assert [next(batches)["id"][0].item() for _ in range(2)] == [0, 5]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"x")
    with assert_error(IntegrityError, path=path, stream="0", hint="start the run again"):
        list(batches)


FAULTS = [
    ({"fault": "status", "status": 404}, ObjectNotFoundError, "not found"),
    ({"fault": "status", "status": 503}, DownloadError, "1 attempt"),
    ({"fault": "reset"}, DownloadError, "1 attempt"),
    ({"fault": "truncate"}, DownloadError, "1 attempt"),
    ({"fault": "short"}, IntegrityError, "index.json says"),
    ({"fault": "corrupt"}, IntegrityError, "sha1"),
]


@pytest.mark.rotate(2)
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
    assert _steps_before(loader, error, "stream '0'", "shard.00004.mds", words) == 4
    assert not list((tmp_path / "cache").glob("shard.00004.mds*"))


@WORKERS
def test_a_missing_object_fails_the_step_that_needs_it(s3: S3Store, tmp_path: Path, workers: int) -> None:
    bucket = s3.make_bucket()
    with MDSWriter(out=bucket, columns={"id": "int"}, size_limit=230, storage_options=s3.options) as writer:
        for index in range(30):
            writer.write({"id": index})
    filesystem = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)
    filesystem.rm_file(f"{bucket}/shard.00002.mds")
    loader = _in_shards(bucket, workers=workers, local=str(tmp_path), storage={"options": s3.options})
    assert _steps_before(loader, ObjectNotFoundError, "stream '0'", f"{bucket}/shard.00002.mds", "no such object") == 2


@WORKERS
def test_a_transform_that_fails_raises_its_own_error_in_its_step(tmp_path: Path, workers: int) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == 17:
            raise EncodingError("a bad sample")
        return sample

    loader = _in_shards(write_dataset(tmp_path / "data", 30), workers=workers, transform=transform)
    assert _steps_before(loader, EncodingError, "a bad sample") == 3


def _first_epoch_only(order: Shuffled) -> NDArray[np.integer[Any]]:
    if order.epoch:
        raise ConfigError(f"there is no order for epoch {order.epoch}")
    return drawn_here(order)


def test_workers_that_live_on_tell_why_a_later_pass_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "shared_order", _first_epoch_only)
    loader = make_loader(
        write_dataset(tmp_path / "data"),
        workers=2,
        loader={"persistent_workers": True, "multiprocessing_context": "fork"},
    )
    assert len(ids(loader)) == 8
    with raises(ConfigError, "no order for epoch 1"):
        next(iter(loader))


def test_a_failure_ahead_that_has_healed_is_none(http_store: HttpStore) -> None:
    write_dataset(http_store.root, 30)
    http_store.fail("shard.00003.mds", "status", times=1)
    iterator = iter(_in_shards(http_store.url))
    next(iterator)
    assert wait_until(lambda: "shard.00003.mds" in http_store.requests())
    assert len(ids(iterator)) == 5


def test_after_a_failure_the_next_pass_tries_again(http_store: HttpStore) -> None:
    write_dataset(http_store.root, 30)
    http_store.fail("shard.00001.mds", "status", times=2)  # once ahead of the reader, once for the reader
    loader = _in_shards(http_store.url)
    assert _steps_before(loader, DownloadError, "shard.00001.mds") == 1
    loader.load_state_dict(loader.state_dict())
    assert len(ids(loader)) == 5


def test_a_failure_ahead_of_the_reader_is_not_raised_early(http_store: HttpStore) -> None:
    write_dataset(http_store.root, 30)
    http_store.fail("shard.00005.mds", "status", status=404)
    loader = _in_shards(http_store.url, predownload=1000)
    iterator = iter(loader)
    next(iterator)
    assert wait_until(lambda: "shard.00005.mds" in http_store.requests())
    assert len(ids(itertools.islice(iterator, 4))) == 4


Index = dict[str, Any]


def _wrong_version(index: Index, root: Path) -> None:
    index["version"] = 3


def _shorter_shard(index: Index, root: Path) -> None:
    path = root / "shard.00000.mds"
    path.write_bytes(path.read_bytes()[:-3])


def _wrong_hash(index: Index, root: Path) -> None:
    index["shards"][0]["hashes"] = ["sha1"]
    index["shards"][0]["raw_data"]["hashes"] = {"sha1": "0" * 40}


def _unknown_encoding(index: Index, root: Path) -> None:
    for shard in index["shards"]:
        shard["column_encodings"] = ["hologram"]


def _climbing_basename(index: Index, root: Path) -> None:
    index["shards"][0]["raw_data"]["basename"] = "../shard.00000.mds"


def _absolute_basename(index: Index, root: Path) -> None:
    index["shards"][0]["raw_data"]["basename"] = "/etc/passwd"


def _no_samples(index: Index, root: Path) -> None:
    index["shards"] = []


BAD_DATASETS = [
    (_wrong_version, IndexFormatError, ["index.json", "version", "3"]),
    (_shorter_shard, IntegrityError, ["shard.00000.mds", "index.json says", "write the object"]),
    (_wrong_hash, IntegrityError, ["shard.00000.mds", "sha1", "0" * 40]),
    (_unknown_encoding, IndexFormatError, ["hologram", "shard.00000.mds", "must be one of"]),
    (_climbing_basename, IndexFormatError, ["'../shard.00000.mds'", "inside its dataset directory"]),
    (_absolute_basename, IndexFormatError, ["'/etc/passwd'", "inside its dataset directory"]),
    (_no_samples, ConfigError, ["no samples", "leave it out"]),
]


@pytest.mark.parametrize(("spoil", "error", "words"), BAD_DATASETS)
def test_bad_data_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, spoil: Callable[[Index, Path], None], error: type[Exception], words: list[str]
) -> None:
    root = write_dataset(tmp_path / "data")
    index = json.loads((root / "index.json").read_text())
    spoil(index, root)
    (root / "index.json").write_text(json.dumps(index))
    streams = {"code": Stream(remote=str(root), local=str(tmp_path / "cache"), download_retry=0)}
    with raises(error, "'code'", *words):
        next(iter(make_loader(streams=streams, shuffle=False)))
    assert wait_until(lambda: not list(tmp_path.rglob("*.part")))  # other shards may still be on their way
    assert [path.parent for path in tmp_path.rglob("shard.00000*")] == [root]


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"stream '0': .*index\.json"):
        next(iter(make_loader(tmp_path / "nowhere", local=str(tmp_path / "cache"), download_retry=0)))
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_file()] == [".origin"]


def test_a_state_of_another_dataset_fails_before_the_first_batch(tmp_path: Path) -> None:
    loader = make_loader(write_dataset(tmp_path / "b", 29), workers=2)
    loader.load_state_dict(make_loader(write_dataset(tmp_path / "a", 30)).state_dict())
    with raises(StateMismatchError, "streams.0.samples        30                  29"):
        next(iter(loader))


@pytest.mark.rotate(1)
@pytest.mark.parametrize("fault", ["corrupt", "status"])
def test_plain_samples_ask_no_more_often_for_a_shard_that_fails(
    http_store: HttpStore, tmp_path: Path, fault: str
) -> None:
    write_dataset(http_store.root, 60, hashes=["sha1"])
    http_store.fail("shard.00004", fault)
    asked = []
    for name, transform in (("plain", None), ("decoded", dict)):
        before = len(http_store.log())
        stream = Stream(remote=http_store.url, local=str(tmp_path / name), download_retry=1)
        loader = make_loader(streams={"a": stream}, batch_size=4, shuffle=False, transform=transform)
        with pytest.raises(StreamingError):
            list(loader)
        loader.close()
        asked.append(sum("shard.00004" in one.name for one in http_store.log()[before:]))
    # Two attempts ahead of the reader, and one more of its own where those had failed before it came.
    assert set(asked) <= {2, 3}


def test_a_reader_that_arrives_after_a_failed_prefetch_makes_one_attempt(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, 60, hashes=["sha1"])
    http_store.fail("shard.00004", "status")

    def arrive_late(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == 0:
            assert wait_until(lambda: not prefetching() - others)
            asked.append(sum("shard.00004" in one.name for one in http_store.log()))
        return sample

    def prefetching() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name.startswith("shard-prefetch")}

    others = prefetching()  # of other tests, whose downloads stall
    asked: list[int] = []
    stream = Stream(remote=http_store.url, local=str(tmp_path / "cache"), download_retry=1)
    loader = make_loader(streams={"a": stream}, batch_size=4, shuffle=False, transform=arrive_late)
    with pytest.raises(DownloadError):
        list(loader)
    loader.close()
    asked.append(sum("shard.00004" in one.name for one in http_store.log()))
    assert asked == [2, 3]


def test_a_pass_that_fails_ends_its_workers(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    loader = make_loader(tmp_path, workers=2, batch_size=2, transform=_fails_late)
    under_way, others = iter(loader), children()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(SampleError, match="ValueError: late"):
            list(under_way)
        assert children() <= others
    finally:
        gc.enable()


def _fails_late(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["id"] == 20:
        raise ValueError("late")
    return sample
