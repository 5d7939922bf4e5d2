"""Samples that cannot be read: which are replaced and by which, what is an error, and when it is too many."""

from __future__ import annotations

import errno
import json
import logging
import pickle
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset, World
from lightning_streaming.dataset.bad_samples import choose_other, is_bad_sample
from lightning_streaming.errors import (
    BadSamplesError,
    ConfigError,
    DownloadError,
    EncodingError,
    FormatError,
    IntegrityError,
    MissingDependencyError,
    SampleError,
    ShardCorruptError,
    StreamingError,
)
from lightning_streaming.logs import read_bad_samples, read_sample_log
from tests.broken_data import (
    BROKEN,
    SIZES,
    ids,
    replacing,
    replacing_loader,
    shard_of,
    write_broken_arrays,
    write_broken_images,
    write_broken_json,
)
from tests.helpers import (
    assert_resumes_at_every_step,
    make_loader,
    raises,
    read_together,
    write_dataset,
    write_shards,
)
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
NUMBERS = st.integers(0, 2**63 - 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_broken_json(tmp_path_factory.mktemp("data") / "json")


@given(seed=NUMBERS, epoch=NUMBERS, position=NUMBERS, count=st.integers(1, 20), first=st.data())
def test_others_are_chosen_by_key_and_never_twice(
    seed: int, epoch: int, position: int, count: int, first: st.DataObject
) -> None:
    tried = [first.draw(st.integers(0, count - 1))]
    for attempt in range(1, count):
        chosen = choose_other((seed, epoch, position), attempt, tried, count)
        assert chosen == choose_other((seed, epoch, position), attempt, set(tried), count)
        assert chosen is not None
        tried.append(chosen)
    assert sorted(tried) == list(range(count))
    assert choose_other((seed, epoch, position), count, tried, count) is None


def test_choices_are_spread_and_stay_what_they_are() -> None:
    chosen = Counter(choose_other((7, 0, position), 1, [3], 5) for position in range(4000))
    assert chosen.keys() == {0, 1, 2, 4}
    assert min(chosen.values()) > 900
    assert [choose_other((9176, 2, position), 1, [0], 100) for position in range(5)] == CHOSEN


CHOSEN = [28, 19, 46, 6, 15]
"""What runs in progress have chosen, and must choose again."""


def _raised(kind: type[StreamingError], cause: BaseException | None) -> StreamingError:
    error = kind("told")
    error.__cause__ = cause
    return error


def _wrapped(inner: BaseException) -> ValueError:
    try:
        raise ValueError("in the user's words") from inner
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("told", "is_bad"),
    [
        (_raised(EncodingError, None), True),
        (_raised(EncodingError, EncodingError("x")), True),
        (_raised(SampleError, ValueError("x")), True),
        (_raised(SampleError, KeyError("x")), True),
        (_raised(SampleError, OSError("x")), True),
        (_raised(SampleError, FileNotFoundError(errno.ENOENT, "named by the sample")), True),
        (_raised(SampleError, PIL.UnidentifiedImageError("no image")), True),
        *((_raised(SampleError, OSError(one, "x")), False) for one in (errno.ENOSPC, errno.EIO, errno.EMFILE)),
        (_raised(EncodingError, OSError(errno.EMFILE, "too many open files")), False),
        (_raised(SampleError, ConnectionResetError()), False),
        (_raised(SampleError, TimeoutError()), False),
        (_raised(SampleError, socket.gaierror(socket.EAI_AGAIN, "no name server")), False),
        (_raised(SampleError, _wrapped(ConnectionRefusedError())), False),
        (_raised(SampleError, StopIteration()), True),
        (_raised(SampleError, _wrapped(ValueError())), True),
        (_raised(EncodingError, MemoryError()), False),
        (_raised(SampleError, MemoryError()), False),
        (_raised(SampleError, torch.cuda.OutOfMemoryError()), False),
        (_raised(SampleError, ModuleNotFoundError()), False),
        (_raised(SampleError, _wrapped(MemoryError())), False),
        (_raised(SampleError, _wrapped(DownloadError("x"))), False),
        (_raised(SampleError, _wrapped(ConfigError("x"))), False),
        (_raised(SampleError, SampleError("x")), False),
        (_raised(SampleError, None), False),
        (_raised(ConfigError, ConfigError("x")), False),
        (_raised(IntegrityError, IntegrityError("x")), False),
        (_raised(ShardCorruptError, ShardCorruptError("x")), False),
        (_raised(FormatError, FormatError("x")), False),
        (_raised(MissingDependencyError, MissingDependencyError("x")), False),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else str(one),
)
def test_what_is_a_samples_own_fault(told: StreamingError, is_bad: bool) -> None:
    assert is_bad_sample(told) is is_bad


def _size(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": sample["id"], "size": torch.tensor(sample["image"].size)}


@pytest.mark.rotate(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("write", "settings"),
    [(write_broken_json, {}), (write_broken_arrays, {}), (write_broken_images, {"transform": _size})],
)
def test_a_bad_sample_is_replaced_by_one_of_its_shard(
    tmp_path: Path, write: Callable[[Path], Path], settings: dict[str, Any], workers: int
) -> None:
    root, log = write(tmp_path / "data"), tmp_path / "log"
    planned = ids(make_loader(write_shards(tmp_path / "sound", SIZES)))
    keyed = {"return_keys": True}
    with closing(replacing_loader(root, log, workers=workers, loader=keyed, **settings)) as loader:
        batches = list(loader)
    read = ids(batch for batch, _ in batches)
    assert not {*read} & {*BROKEN}
    assert [(now if now == then else then) for now, then in zip(read, planned, strict=True) if now != then] == [
        one for one in planned if one in BROKEN
    ]
    assert [shard_of(one) for one in read] == [shard_of(one) for one in planned]
    assert loader.statistics().bad_samples == len(BROKEN)
    keys = [key for _, of_batch in batches for key in of_batch]
    firsts = np.cumsum(SIZES) - SIZES
    assert [int(firsts[key.shard]) + key.sample_index for key in keys] == read
    assert [int(loader.dataset.restore_sample(key)["id"]) for key in keys] == read
    found = [one for one in read_bad_samples(log) if not one.attempt]
    assert sorted(int(firsts[one.key.shard]) + one.key.sample_index for one in found) == sorted(BROKEN)
    assert {one.key.position: int(firsts[one.key.shard]) + one.key.sample_index for one in found} == {
        place: one for place, one in enumerate(planned) if one in BROKEN
    }
    assert len(list(log.iterdir())) <= max(1, workers)
    assert all("column" in one.error and "\n" not in one.error for one in found)


def test_without_it_a_bad_sample_is_an_error_and_nothing_is_written(root: Path, tmp_path: Path) -> None:
    with raises(EncodingError, "sample 3", "meta"):
        list(make_loader(root, shuffle=False))
    sound = write_dataset(tmp_path / "sound")
    list(replacing_loader(sound, tmp_path / "log"))
    assert not (tmp_path / "log").exists()


@pytest.mark.rotate(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_it_resumes_at_every_step(root: Path, tmp_path: Path, workers: int) -> None:
    # Without the log too: what fails always is found again, and the same replacement with it.
    logs = (tmp_path / str(number) for number in range(1000))
    assert_resumes_at_every_step(lambda: replacing_loader(root, next(logs), workers=workers))
    assert_resumes_at_every_step(lambda: replacing_loader(root, tmp_path / "one", workers=workers))


def test_ranks_stay_even_and_read_what_one_rank_reads(root: Path, tmp_path: Path) -> None:
    alone = ids(replacing_loader(root, tmp_path / "alone"))
    worlds = [World(ranks_per_node=2, rank=rank) for rank in range(2)]
    settings = {"batch_size": 2, "num_canonical_nodes": 1}
    loaders = [replacing_loader(root, tmp_path / "two", world=world, **settings) for world in worlds]
    together = [one for step, _ in read_together(loaders) for one in step]
    assert together[: len(alone)] == alone
    assert {path.name[: len("bad-rank0")] for path in (tmp_path / "two").iterdir()} == {"bad-rank0", "bad-rank1"}


def test_a_state_of_one_rank_is_gone_on_with_by_two(root: Path, tmp_path: Path) -> None:
    settings = {"num_canonical_nodes": 1}
    whole = ids(replacing_loader(root, tmp_path / "a", **settings))
    loader = replacing_loader(root, tmp_path / "b", **settings)
    batches = iter(loader)
    read = ids([next(batches), next(batches)])
    state = loader.state_dict()
    loaders = [
        replacing_loader(root, tmp_path / "c", world=World(ranks_per_node=2, rank=rank), batch_size=2, **settings)
        for rank in range(2)
    ]
    for one in loaders:
        one.load_state_dict(state)
    rest = [number for step, _ in read_together(loaders) for number in step]
    assert [*read, *rest][: len(whole)] == whole


def test_the_other_is_of_the_stream_and_its_selection(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100)):
        write_broken_json(tmp_path / name, first_id=first)
    streams = {
        "a": Stream(remote=str(tmp_path / "a"), selection={"where": "id % 2 = 1"}),
        "b": Stream(remote=str(tmp_path / "b"), selection={"indices": [8, 9, 10, 11, 25, 24, 0]}),
    }
    read = ids(replacing_loader(None, tmp_path / "log", streams=streams))
    broken = {*BROKEN, *(100 + one for one in BROKEN)}
    selected = {*range(1, 31, 2), *(100 + one for one in (8, 9, 10, 11, 25, 24, 0))}
    assert {*read} == selected - broken
    assert len(read) == len(selected)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_without_another_sample_is_an_error(tmp_path: Path, workers: int) -> None:
    root = write_broken_json(tmp_path / "data", [3, 1, 3], [3])
    with (
        closing(replacing_loader(root, tmp_path / "log", workers=workers)) as loader,
        raises(BadSamplesError, "no other sample of its shard can replace it", "sample 0 of shard 1", "--not"),
    ):
        list(loader)
    root = write_broken_json(tmp_path / "more", [3, 20], range(3, 23))
    with raises(BadSamplesError, "none of the 8 others of its shard that were tried can replace it"):
        list(replacing_loader(root, tmp_path / "log2"))
    assert [one.attempt for one in read_bad_samples(tmp_path / "log2")] == list(range(9))


def _fails(sample: dict[str, Any], *, error: BaseException) -> dict[str, Any]:
    if sample["id"] == 7:
        raise error
    return sample


def test_errors_of_a_transform_count(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    read = ids(replacing_loader(root, tmp_path / "log", transform=partial(_fails, error=ValueError("odd\nodder"))))
    assert len(read) == 29
    assert 7 not in read
    (found,) = read_bad_samples(tmp_path / "log")
    assert found.error == "ValueError: odd odder"


@pytest.mark.rotate(3)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (MemoryError(), SampleError),
        (ModuleNotFoundError("no module"), SampleError),
        (DownloadError("gone"), DownloadError),
        (ConfigError("no such column"), ConfigError),
        (ShardCorruptError("damaged"), ShardCorruptError),
    ],
)
def test_what_is_nobodys_sample_stays_an_error(
    tmp_path: Path, error: Exception, raised: type[StreamingError], workers: int
) -> None:
    root = write_dataset(tmp_path / "data")
    with (
        closing(
            replacing_loader(root, tmp_path / "log", transform=partial(_fails, error=error), workers=workers)
        ) as loader,
        raises(raised, "sample 2 of shard 1"),
    ):
        list(loader)
    assert not (tmp_path / "log").exists()


def test_ctrl_c_goes_through(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    with pytest.raises(KeyboardInterrupt):
        list(replacing_loader(root, tmp_path / "log", transform=partial(_fails, error=KeyboardInterrupt())))


def test_a_damaged_shard_is_an_error(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", hashes=["sha1"])
    shard = root / "shard.00002.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    with raises(ShardCorruptError, "shard.00002.mds"):
        list(replacing_loader(root, tmp_path / "log", local=str(root)))
    remote, local = write_dataset(tmp_path / "remote", hashes=["sha1"]), tmp_path / "local"
    shard = remote / "shard.00002.mds"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0xFF
    shard.write_bytes(data)
    with raises(IntegrityError, "shard.00002.mds"):
        list(replacing_loader(f"file://{remote}", tmp_path / "log", local=str(local), download_retry=0))
    assert not (tmp_path / "log").exists()


class _Doubled(StreamingDataset):
    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return {"id": sample["id"], "twice": 2 * sample["id"]}


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_subclass_are_replaced(root: Path, tmp_path: Path, workers: int) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "shuffle_block_size": 16}
    dataset = _Doubled(remote=str(root), bad_samples=replacing(tmp_path), **settings)
    with closing(StreamingDataLoader(dataset, num_workers=workers)) as loader:
        batches = list(loader)
    assert ids(batches) == ids(replacing_loader(root, tmp_path / "other"))
    assert all((batch["twice"] == 2 * batch["id"]).all() for batch in batches)
    with raises(EncodingError):
        dataset[BROKEN[0]]


def test_a_joined_column_that_is_broken_is_a_bad_sample(tmp_path: Path) -> None:
    own = write_shards(tmp_path / "own", SIZES)
    more = write_broken_json(tmp_path / "more", [10, 21])
    join = {"more": {"remote": str(more), "columns": ["meta"]}}
    loader = replacing_loader(own, tmp_path / "log", join=join)
    batches = list(loader)
    assert ids(batches) == ids(replacing_loader(write_broken_json(tmp_path / "same"), tmp_path / "log2"))
    for batch in batches:
        assert batch["meta"]["name"] == [f"name-{number:04}" for number in batch["id"].tolist()]


def _augmented(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": sample["id"], "noise": int(rng.integers(1 << 40))}


def test_randomness_is_that_of_the_place_and_keys_and_logs_name_the_other(root: Path, tmp_path: Path) -> None:
    sound = write_shards(tmp_path / "sound", SIZES)
    planned = [one for batch in make_loader(sound, transform=_augmented) for one in batch["noise"].tolist()]
    watched: dict[str, Any] = {
        "transform": _augmented,
        "debug": {"sample_log": tmp_path / "read"},
        "loader": {"return_keys": True},
    }
    loader = replacing_loader(root, tmp_path / "log", **watched)
    batches = list(loader)
    assert [one for batch, _ in batches for one in batch["noise"].tolist()] == planned
    keys = [key for _, of_batch in batches for key in of_batch]
    for key, number, noise in zip(keys, ids(batch for batch, _ in batches), planned, strict=True):
        assert loader.dataset.restore_sample(key) == {"id": number, "noise": noise}
    logged = list(read_sample_log(tmp_path / "read" / "rank0-worker0.jsonl"))
    assert list({line.key.position: line.key for line in logged}.values()) == keys
    assert len(logged) == len(keys) + len(list(read_bad_samples(tmp_path / "log")))


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("limit", "stops_after"), [(3, 4), (2, 2), ("3", 4), (0, 1), ("0%", 1), ("0.2%", 2)])
@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_end_a_run_at_the_same_batch_whatever_the_workers(
    root: Path, tmp_path: Path, limit: int | str, stops_after: int, workers: int
) -> None:
    loader = replacing_loader(root, tmp_path, workers=workers, most=limit)
    read = 0
    with (
        closing(loader),
        raises(BadSamplesError, f"bad_samples.max={limit} allows", "sample 3 of shard 0", str(tmp_path)),
    ):
        for _ in loader:
            read += 1
    assert read == stops_after
    with raises(BadSamplesError):
        list(replacing_loader(root, tmp_path, most=limit))


def test_the_error_can_be_sent_and_names_the_first(root: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSamplesError) as caught:
        list(replacing_loader(root, tmp_path, most=2))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is BadSamplesError
    assert str(copied) == str(caught.value)
    assert str(copied).count("sample ") >= 3
    assert isinstance(copied, SampleError)


@pytest.mark.parametrize("workers", [0, 2])
def test_readers_without_our_loader_count_themselves(root: Path, tmp_path: Path, workers: int) -> None:
    def dataset(limit: Any) -> StreamingDataset:
        return StreamingDataset(remote=str(root), batch_size=4, bad_samples=replacing(tmp_path / str(limit), limit))

    with raises(BadSamplesError, "bad_samples.max=0 allows 0"):
        list(DataLoader(dataset(0), batch_size=4, num_workers=workers))
    read = ids(DataLoader(dataset(4), batch_size=4, num_workers=workers))
    assert len(read) == sum(SIZES)
    assert not {*read} & {*BROKEN}


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_share_is_of_what_was_read(tmp_path: Path, is_ours: bool) -> None:
    def read(broken: set[int], name: str) -> list[int]:
        root = write_broken_json(tmp_path / name, [500] * 4, broken)
        settings: dict[str, Any] = {"bad_samples": replacing(tmp_path / "log" / name, "0.2%"), "batch_size": 10}
        dataset = StreamingDataset(remote=str(root), shuffle=False, **settings)
        return ids(StreamingDataLoader(dataset) if is_ours else DataLoader(dataset, batch_size=10))

    assert len(read({1, 2, 1900}, "late")) == 2000
    with raises(BadSamplesError, "bad_samples.max=0.2% allows 2"):
        read({1, 2, 1400}, "early")


def test_it_is_warned_of_once(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = replacing_loader(root, tmp_path / "log")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            list(loader)
    told = [record.getMessage() for record in caplog.records if "bad" in record.getMessage()]
    assert len(told) == 1
    assert str(tmp_path / "log") in told[0]
    assert "shard 0" in told[0]
    assert loader.statistics().bad_samples == 2 * len(BROKEN)


def test_nothing_else_is_fetched_under_a_limit(http_store: HttpStore, tmp_path: Path) -> None:
    http_store.put_all(write_broken_json(tmp_path / "data"))
    remote: dict[str, Any] = {"local": str(tmp_path / "local"), "cache_limit": 4000, "shuffle": False, "predownload": 4}
    read = ids(replacing_loader(http_store.url, tmp_path / "log", **remote))
    in_place = ids(replacing_loader(tmp_path / "data", tmp_path / "log2", shuffle=False))
    assert read == in_place
    asked = Counter(name for name in http_store.requests() if name.startswith("shard."))
    assert set(asked.values()) == {1}
    assert len(asked) == len(SIZES)


def _no_batch(samples: list[dict[str, Any]]) -> Any:
    if len(samples) == 4:
        raise ValueError([one["id"] for one in samples])
    return samples


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_collate_function_names_what_it_was_given(root: Path, tmp_path: Path, workers: int) -> None:
    options = {"collate_fn": _no_batch}
    with (
        closing(replacing_loader(root, tmp_path, workers=workers, shuffle=False, loader=options)) as loader,
        pytest.raises(SampleError) as caught,
    ):
        list(loader)
    keys = [json.loads(line) for line in str(caught.value).splitlines() if line.strip().startswith("{")]
    given = [int(loader.dataset.restore_sample(key)["id"]) for key in keys]
    assert f"ValueError: {given}" in str(caught.value)
    assert given[:3] == [0, 1, 2]
    assert given[3] in (0, 1, 2, 4)
