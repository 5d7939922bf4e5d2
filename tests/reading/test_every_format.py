"""Every format as a stream: order, resumes, faults, kills, limits, selections and damage, the same tests for all.

What is read must be what MDS shards of the same sizes give: the same samples, in the same order. Data is that of the
formats' real writers.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset
from lightning_streaming.cache.config import CACHE_VARIABLE
from lightning_streaming.cache.eviction import least_limit
from lightning_streaming.cache.quota import largest_shard_bytes
from lightning_streaming.errors import DownloadError, EncodingError, IntegrityError
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.logs import read_bad_samples
from lightning_streaming.storage import retries
from tests.broken_data import replacing_loader
from tests.cache.helpers import Watcher, measured, parts
from tests.formats.every_format import COUNT, FORMS, Sample, ranges, same
from tests.helpers import (
    assert_resumes_at_every_step,
    ids,
    json_copy,
    make_dataset,
    make_loader,
    raises,
    read_epochs,
    read_together,
    worlds,
)
from tests.servers import S3Bucket
from tests.tiers import some
from tests.tools.running import contents, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.timeout(60),
]
EVERY = pytest.mark.parametrize("name", FORMS)
Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT", 0.02)


class Numbered:
    """A transform that leaves of a sample its number, as ``id``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, sample: Sample) -> Sample:
        return {"id": FORMS[self.name].number(sample)}


def numbered(name: str) -> dict[str, Any]:
    """What makes batches have an ``id``, whatever columns there are."""
    return {"columns": ["id"]} if "id" in FORMS[name].plain else {"transform": Numbered(name)}


def loader_of(name: str, root: Path | str, **settings: Any) -> StreamingDataLoader:
    """A loader of whole samples."""
    return make_loader(root, loader={"collate_fn": list}, **FORMS[name].options, **settings)


def mds_loader(name: str, root: Path, **settings: Any) -> StreamingDataLoader:
    return make_loader(root, loader={"collate_fn": list}, **settings)


def epochs(loader: StreamingDataLoader, count: int = 2) -> list[Any]:
    """The batches of some epochs."""
    try:
        return [batch for _ in range(count) for batch in loader]
    finally:
        loader.close()


def numbers(name: str, batches: list[list[Sample]]) -> list[int]:
    return [FORMS[name].number(sample) for sample in chain(*batches)]


def assert_whole(name: str, batches: list[list[Sample]]) -> None:
    """The batches of an epoch that was not shuffled are exactly the samples."""
    expected = [FORMS[name].sample(number) for number in range(COUNT)]
    assert same(list(chain(*batches)), expected)


IN_TURN: dict[str, Any] = {"shuffle": False, "num_canonical_nodes": 1}


# --- exactness ---

ORDERS: Mapping[str, dict[str, Any]] = {
    "py1e": {"shuffle_algo": "py1e", "workers": 2, "batch_size": 4, "num_canonical_nodes": 2},
    "blockwise": {"shuffle_algo": "blockwise", "workers": 0, "batch_size": 7, "num_canonical_nodes": 1},
    "in turn": {"shuffle": False, "workers": 0, "batch_size": 5, "num_canonical_nodes": 1},
}


@pytest.mark.rotate(2)
@EVERY
@pytest.mark.parametrize("order", ORDERS)
def test_samples_and_order_are_those_of_mds(written: Write, name: str, order: str) -> None:
    found = epochs(loader_of(name, written(name), **ORDERS[order]))
    assert same(found, epochs(mds_loader(name, written(f"mds of {name}"), **ORDERS[order])))
    assert sorted(numbers(name, found)) == sorted(2 * list(range(COUNT)))


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.plain])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_numbers_are_those_of_mds(written: Write, name: str, workers: int) -> None:
    how: dict[str, Any] = {"columns": list(FORMS[name].plain), "workers": workers}
    found = epochs(make_loader(written(name), **FORMS[name].options, **how))
    assert same(found, epochs(make_loader(written(f"mds of {name}"), **how)))
    assert len(found) == 2 * 9


@pytest.mark.rotate(1)
@EVERY
def test_a_store_is_read_through_the_cache(written: Write, s3_bucket: S3Bucket, tmp_path: Path, name: str) -> None:
    put(s3_bucket, written(name), "deep/")
    how: dict[str, Any] = {"storage": {"options": s3_bucket.options}, "local": str(tmp_path / "cache")}
    expected = epochs(mds_loader(name, written(f"mds of {name}")))
    for workers in (2, 0):
        asked = len(s3_bucket.requests())
        assert same(epochs(loader_of(name, f"{s3_bucket.url}/deep", workers=workers, **how)), expected)
    assert {one for one in s3_bucket.requests()[asked:] if not one.endswith(".json")} == set()  # the cache has all
    assert not parts(tmp_path / "cache")


def put(bucket: S3Bucket, root: Path, prefix: str = "") -> None:
    for path in root.rglob("*"):
        if path.is_file():
            bucket.put(f"{prefix}{path.relative_to(root).as_posix()}", path.read_bytes())


# --- resumes ---


@pytest.mark.rotate(2)
@EVERY
@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 0)])
def test_a_run_resumes_at_every_step(written: Write, name: str, before: int, after: int) -> None:
    make = partial(make_loader, written(name), batch_size=6, **numbered(name), **FORMS[name].options)
    assert_resumes_at_every_step(partial(make, workers=before), partial(make, workers=after), epochs=1 if before else 2)


@pytest.mark.rotate(3)
@EVERY
@pytest.mark.parametrize(("before", "after"), [((1, 2, 3), (2, 1, 4)), ((2, 1, 4), (1, 1, 5))])
def test_other_ranks_and_batch_sizes_go_on(
    written: Write, name: str, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    def ranks(nodes: int, per_node: int, batch_size: int) -> list[StreamingDataLoader]:
        how: dict[str, Any] = {**numbered(name), **FORMS[name].options, "num_canonical_nodes": 2}
        return [
            make_loader(written(name), batch_size=batch_size, world=world, **how) for world in worlds(nodes, per_node)
        ]

    (alone,) = ranks(1, 1, 4)
    sequence = [number for batch in read_epochs(alone, 1)[0] for number in batch]
    assert sorted(sequence) == list(range(COUNT))
    read: list[int] = []
    for samples, state in read_together(ranks(*before)):
        read += samples
        if state["epoch"] == 1:
            continue
        resumed = ranks(*after)
        for loader in resumed:
            loader.load_state_dict(json_copy(state))
        rest = [number for more, _ in read_together(resumed) for number in more]
        assert (read + rest)[:COUNT] == sequence


# --- faults ---

FAMILIES: Mapping[str, list[dict[str, Any]]] = {
    "refused and cut": [{"fault": "status", "status": 500}, {"fault": "truncate"}, {"fault": "reset_body"}],
    "wrong and still": [{"fault": "short"}, {"fault": "stall"}, {"fault": "long"}],
}


@pytest.mark.rotate(2)
@EVERY
@pytest.mark.parametrize("family", FAMILIES)
def test_an_epoch_is_right_if_every_file_fails_once(
    written: Write, s3_bucket: S3Bucket, tmp_path: Path, name: str, family: str
) -> None:
    put(s3_bucket, written(name))
    still = family == "wrong and still"
    how: dict[str, Any] = {
        "storage": {"options": s3_bucket.options},
        "local": str(tmp_path / "cache"),
        "download_timeout": 0.5 if still else 5,
        "download_retry": 3,
    }
    loader = loader_of(name, s3_bucket.url, workers=0 if still else 2, **how, **IN_TURN)
    for _ in ("the index", "the data"):
        for path, fault in zip(sorted(written(name).iterdir()), cycle(FAMILIES[family]), strict=False):
            s3_bucket.fail(path.name, times=1, **fault)
        assert len(loader.dataset) == COUNT
    s3_bucket.fail("", "ignore_range", times=1, each=True)
    assert_whole(name, epochs(loader, 1))
    assert {entry.name for entry in s3_bucket.log() if entry.fault} >= {one.name for one in written(name).iterdir()}
    assert not parts(tmp_path / "cache")


@pytest.mark.rotate(2)
@EVERY
@pytest.mark.parametrize("fault", ["status", "short"])
def test_a_file_that_cannot_be_had_is_named(
    written: Write, s3_bucket: S3Bucket, tmp_path: Path, name: str, fault: str
) -> None:
    put(s3_bucket, written(name))
    how: dict[str, Any] = {
        "storage": {"options": s3_bucket.options},
        "local": str(tmp_path / "cache"),
        "download_retry": 1,
    }
    loader = loader_of(name, s3_bucket.url, **how, **IN_TURN)
    assert len(loader.dataset) == COUNT
    last = stored_files(loader)[-1]
    s3_bucket.fail(last, fault)
    batches: list[list[Sample]] = []
    with raises(DownloadError if fault == "status" else IntegrityError, last, "stream '0'"):
        batches.extend(loader)
    assert numbers(name, batches) == list(range(len(numbers(name, batches))))
    assert len(batches) >= (COUNT - 21) // 4
    s3_bucket.heal()
    assert_whole(name, epochs(loader_of(name, s3_bucket.url, **how, **IN_TURN), 1))
    assert not parts(tmp_path / "cache")


def stored_files(loader: StreamingDataLoader) -> list[str]:
    """The data file of each shard, as it lies."""
    shards = loader.dataset._source.catalog.shards
    return [(shard.zip_data or shard.raw_data).basename for shard in shards]


# --- kills ---

_FORK: Any = multiprocessing.get_context("fork")


@contextmanager
def forked(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process of its own, which does not outlive the block."""
    process = _FORK.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def read_in_turn(name: str, root: Path, cache: Path, told: Any) -> None:
    """Read an epoch from a cold cache; each sample tells that it was reached."""
    dataset = StreamingDataset(remote=str(root), local=str(cache), batch_size=1, **IN_TURN, **FORMS[name].options)
    for _ in dataset:
        with told.get_lock():
            told.value += 1


def make_index(name: str, root: Path, told: Any) -> None:
    tqdm.set_lock(threading.RLock())  # of its own: whoever is killed with one that is shared keeps it
    told.value = 1
    run(*index_command(name, root))


def index_command(name: str, root: Path) -> list[object]:
    options = FORMS[name].options
    length = ["--block-length", options["block_length"]] if "block_length" in options else []
    return ["index", root, "--format", options["format"], *length]


def kill_after(process: Any, told: Any, wanted: int, seconds: float) -> None:
    """Kill a process a moment after it has told of so many steps, or once it has ended."""
    while told.value < wanted and process.is_alive():
        process.join(0.002)
    process.join(seconds)
    process.kill()
    process.join()


@pytest.mark.rotate(3)
@EVERY
def test_after_a_reader_was_killed_the_next_reads_all(written: Write, tmp_path: Path, name: str) -> None:
    moment, cache = random.Random(name), tmp_path / "cache"
    for _ in some(range(3), 1):
        told, wanted = _FORK.Value("i"), moment.randrange(COUNT)
        with forked(read_in_turn, name, written(name), cache, told) as process:
            kill_after(process, told, wanted, moment.random() / 100)
        found = epochs(loader_of(name, written(name), local=str(cache), **IN_TURN), 1)
        assert_whole(name, found)
        assert not parts(cache)
        kept = sorted(path for path in cache.rglob("*") if path.is_file() and not path.name.startswith("."))
        for path in moment.sample(kept, len(kept) // 2):
            path.unlink()


@pytest.mark.rotate(3)
@EVERY
def test_an_index_whose_maker_was_killed_is_made_right(
    written: Write, copied: Write, tmp_path: Path, name: str
) -> None:
    if name == "litdata":
        pytest.skip("its own index is read")
    root, moment = copied(name), random.Random(name)
    assert run(*index_command(name, root)).code == 0
    whole = (root / INDEX_BASENAME).read_bytes()
    for _ in some(range(3), 1):
        (root / INDEX_BASENAME).unlink(missing_ok=True)
        told = _FORK.Value("i")
        with forked(make_index, name, root, told) as process:
            kill_after(process, told, 1, moment.random() / 30)
        assert not (root / INDEX_BASENAME).exists() or (root / INDEX_BASENAME).read_bytes() == whole
        assert run(*index_command(name, root)).code == 0
        assert (root / INDEX_BASENAME).read_bytes() == whole
        assert contents(root).keys() == {*contents(written(name)), INDEX_BASENAME}
        left = [path.name for path in (tmp_path / "caches").rglob("*") if path.suffix in (".journal", ".partial")]
        assert left == []


# --- limits ---


@pytest.mark.rotate(2)
@EVERY
@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_of_two_shards_is_enough(written: Write, tmp_path: Path, name: str, workers: int) -> None:
    cache = tmp_path / "cache"
    how: dict[str, Any] = {"local": str(cache), "workers": workers, "batch_size": 3}
    loader = loader_of(name, written(name), **how)
    shards = loader.dataset._source.catalog.shards
    index_bytes = sum(path.stat().st_size for path in cache.rglob("index.json*") if path.is_file())
    limit = least_limit(index_bytes, largest_shard_bytes(loader.dataset._source.catalog.indexes[0].shards))
    loader = loader_of(name, written(name), cache_limit=limit, **how)
    assert loader.dataset.size == COUNT  # by an index, which lies there twice while it is made anew
    with Watcher(cache) as watcher:
        found = epochs(loader)
        largest = max(watcher.largest, measured(cache))
    assert same(found, epochs(mds_loader(name, written(f"mds of {name}"), batch_size=3)))
    assert 0 < largest <= limit
    stored = sum(raw.bytes for info in shards for raw, _ in info.files)
    assert stored + index_bytes > limit  # or nothing was ever removed


# --- selections, packs, mixtures, keys ---


@pytest.mark.rotate(3)
@EVERY
def test_a_part_is_that_of_mds(written: Write, name: str) -> None:
    how: dict[str, Any] = {"selection": {"fraction": ":60%"}, "columns": [FORMS[name].tokens]}
    found = epochs(loader_of(name, written(name), **how))
    assert same(found, epochs(mds_loader(name, written(f"mds of {name}"), **how)))
    assert COUNT / 4 < len(set(numbers(name, found))) < COUNT


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if "id" in form.columns])
@pytest.mark.parametrize("where", ["id % 3 = 1 and text <> ''", lambda id, text: id % 3 == 1 and text != ""])  # noqa: A006
def test_a_condition_selects_what_it_does_of_mds(written: Write, name: str, where: Any) -> None:
    found = epochs(loader_of(name, written(name), selection={"where": where}))
    assert same(found, epochs(mds_loader(name, written(f"mds of {name}"), selection={"where": where})))
    assert set(numbers(name, found)) == set(range(1, COUNT, 3))


PACKINGS: Mapping[str, dict[str, Any]] = {
    "packs": {"packing": {"capacity": 16}, "batch_size": 2},
    "rows of blocks": {"packing": {"capacity": 16, "method": "concat"}, "batch_size": 2},
    "groups": {"token_budget": {"tokens": 32}, "batch_size": None},
}


@pytest.mark.rotate(3)
@EVERY
@pytest.mark.parametrize("way", PACKINGS)
def test_packs_are_those_of_mds(written: Write, name: str, way: str) -> None:
    form = FORMS[name]
    how: dict[str, Any] = {
        key: {"column": form.tokens, **one} if isinstance(one, dict) else one for key, one in PACKINGS[way].items()
    }
    found = epochs(make_loader(written(name), **how, **form.options))
    assert same(found, epochs(make_loader(written(f"mds of {name}"), **how)))
    assert len(found) >= 6


class AnyNumbered:
    """A transform that leaves of a sample of any form its number."""

    def __call__(self, sample: Sample) -> Sample:
        return {"id": next(form.number(sample) for form in FORMS.values() if form.tokens in sample)}


@pytest.mark.rotate(3)
@pytest.mark.parametrize(("first", "second"), list(zip(FORMS, [*list(FORMS)[1:], *list(FORMS)[:1]], strict=True)))
def test_mixtures_are_those_of_mds(written: Write, first: str, second: str) -> None:
    def mixed(is_mds: bool) -> list[Any]:
        streams = {
            name: Stream(remote=str(written(f"mds of {name}")), proportion=share)
            if is_mds
            else Stream(remote=str(written(name)), proportion=share, **FORMS[name].options)
            for name, share in ((first, 0.7), (second, 0.3))
        }
        return epochs(make_loader(streams=streams, transform=AnyNumbered(), epoch_size=60))

    found = mixed(is_mds=False)
    assert same(found, mixed(is_mds=True))
    assert len(found) == 30


@pytest.mark.rotate(3)
@EVERY
def test_samples_are_restored_by_their_keys(written: Write, name: str) -> None:
    form = FORMS[name]
    loader = make_loader(written(name), loader={"collate_fn": list, "return_keys": True}, **form.options)
    dataset = make_dataset(written(name), **form.options)
    shards = ranges(form.sizes)
    for batch, keys in loader:
        for sample, key in zip(batch, keys, strict=True):
            assert same(dataset.restore_sample(json_copy(key.as_dict())), sample)
            assert shards[key.shard][key.sample_index] == form.number(sample)


# --- bad samples ---

BAD = 17


def spoil_list(root: Path) -> None:
    """A null among the tokens of a sample of Parquet."""
    import pyarrow
    import pyarrow.parquet

    (path,) = (path for path in root.iterdir() if BAD in pyarrow.parquet.read_table(path)["id"].to_pylist())
    file = pyarrow.parquet.ParquetFile(path)
    groups = [file.read_row_group(group) for group in range(file.num_row_groups)]
    with pyarrow.parquet.ParquetWriter(path, groups[0].schema) as writer:
        for group in groups:
            rows = group.to_pylist()
            for row in rows:
                row["tokens"] = [*row["tokens"], None] if row["id"] == BAD else row["tokens"]
            writer.write_table(pyarrow.Table.from_pylist(rows, group.schema))


def spoil_member(root: Path) -> None:
    """The head of an array in a tar file."""
    overwrite(root, FORMS["webdataset"].sample(BAD)["tokens.npy"].tobytes(), -128, b"\0" * 6)


def spoil_text(root: Path) -> None:
    """A character that is none, in a row of records."""
    path = root / "2.npy"
    data = bytearray(path.read_bytes())
    place = data.index(np.array(f"text {BAD}").tobytes())
    data[place : place + 4] = b"\xff" * 4
    path.write_bytes(data)


def spoil_item(root: Path) -> None:
    """Bytes that are no text, in an item of litData."""
    overwrite(root, f"text {BAD} ".encode(), 0, b"\xff")


def overwrite(root: Path, found: bytes, ahead: int, new: bytes) -> None:
    (path,) = (path for path in root.iterdir() if found in path.read_bytes())
    data = bytearray(path.read_bytes())
    place = data.index(found) + ahead
    data[place : place + len(new)] = new
    path.write_bytes(data)


SPOILED: Mapping[str, Callable[[Path], None]] = {
    "parquet": spoil_list,
    "datasets": spoil_list,
    "webdataset": spoil_member,
    "npy": spoil_text,
    "litdata": spoil_item,
}


class Failing(Numbered):
    """A transform that fails on one sample."""

    def __call__(self, sample: Sample) -> Sample:
        found = super().__call__(sample)
        if found["id"] == BAD:
            raise ValueError("it is bad")
        return found


@EVERY
def test_a_bad_sample_is_replaced_as_one_of_mds(written: Write, copied: Write, tmp_path: Path, name: str) -> None:
    root = copied(name)
    make: Any = Failing
    if name in SPOILED:
        SPOILED[name](root)
        make = Numbered
    found = replacing_loader(root, tmp_path / "log", transform=make(name), **FORMS[name].options)
    read = list(chain(*ids(found)))
    expected = replacing_loader(written(f"mds of {name}"), tmp_path / "other", transform=Failing(name))
    assert read == list(chain(*ids(expected)))
    assert set(read) == set(range(COUNT)) - {BAD}
    (bad,) = {(one.key.shard, one.key.sample_index) for one in read_bad_samples(tmp_path / "log")}
    assert ranges(FORMS[name].sizes)[bad[0]][bad[1]] == BAD
    if name in SPOILED:
        with raises(EncodingError, "sample", "stream '0'"):
            list(make_loader(root, transform=make(name), **FORMS[name].options))
