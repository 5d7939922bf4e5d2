"""``mode="resume"`` without a kill: what counts as safe, and what is refused.

``mode="append"`` without a kill: shards behind those that are there, of which none is touched; what an earlier version
left, which filled up the last one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import StreamingDataset
from lightning_streaming.errors import ConfigError, EncodingError, StorageError
from lightning_streaming.formats.index import parse_index
from lightning_streaming.writing.writers import CSVWriter, JSONWriter, MDSWriter
from tests.formats.golden_datasets import read_samples
from tests.helpers import assert_error
from tests.servers import S3Store
from tests.tiers import examples
from tests.writing.killed import Conversion, contents, leave_as_earlier, samples, shard_marks

COLUMNS = {"id": "int", "text": "str"}
SETTINGS: dict[str, Any] = {"columns": COLUMNS, "size_limit": 700, "hashes": ["sha1"], "max_workers": 1}


def write(out: Any, count: int, *, whole: bool, mode: str = "resume", **settings: Any) -> int:
    """Write some samples, and finish or break off; gives how many were safe before."""
    writer = MDSWriter(**{**SETTINGS, "out": out, "mode": mode, **settings})
    skipped = writer.num_samples
    for sample in islice(samples(count), skipped, None):
        writer.write(sample)
    if whole:
        writer.finish()
    writer.close()
    return skipped


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    """The files of the dataset of 100 samples."""
    return contents(Conversion(out="", mode="create", samples=100, settings=SETTINGS).uninterrupted(tmp_path / "one"))


def test_shards_that_are_stored_are_not_written_again(tmp_path: Path, expected: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    assert write(out, 60, whole=False) == 0
    assert not (out / "index.json").exists()
    stored = {path.name: path.stat().st_mtime_ns for path in out.glob("shard.*")}
    records = sorted(path.name for path in (out / ".writing").iterdir())
    assert records == [f"{number:05}.json" for number in range(len(stored))]
    safe = write(out, 100, whole=True)
    assert 40 < safe < 60
    assert {name: (out / name).stat().st_mtime_ns for name in stored} == stored
    assert contents(out) == expected
    assert not (out / ".writing").exists()


def test_a_block_that_fails_keeps_what_is_stored(tmp_path: Path, expected: dict[str, bytes]) -> None:
    out = tmp_path / "out"

    def fail() -> None:
        with MDSWriter(**SETTINGS, out=out, mode="resume") as writer:
            for sample in samples(60):
                writer.write(sample)
            raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        fail()
    assert write(out, 100, whole=True) > 40
    assert contents(out) == expected


@pytest.mark.rotate(2)
@pytest.mark.parametrize("place", ["directory", "bucket", "pair", "pair kept"])
def test_a_finished_dataset_is_left_as_it_is(place: str, s3: S3Store, tmp_path: Path) -> None:
    url, here = f"{s3.make_bucket()}/data", str(tmp_path / "out")
    out = {"directory": here, "bucket": url}.get(place, (here, url))
    settings: dict[str, Any] = {"storage_options": s3.options, "keep_local": place == "pair kept"}
    write(out, 100, whole=True, **settings)
    for finished in (100, 100):
        assert write(out, 100, whole=True, **settings) == finished
    writer = MDSWriter(**{**SETTINGS, **settings, "out": out, "mode": "resume"})
    with pytest.raises(ConfigError, match="this dataset is finished; mode='append' adds to it"):
        writer.write({"id": 0, "text": ""})
    writer.close()


@pytest.mark.parametrize("damage", ["short", "other bytes", "missing", "no record"])
def test_a_shard_that_is_not_as_it_was_stored_is_written_again(
    damage: str, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    write(out, 60, whole=False)
    shard, record = out / "shard.00003.mds", out / ".writing" / "00003.json"
    before = sum(json.loads((out / ".writing" / f"{n:05}.json").read_bytes())["shards"][0]["samples"] for n in range(3))
    data = shard.read_bytes()
    damages: dict[str, Callable[[], object]] = {
        "short": lambda: shard.write_bytes(data[:-1]),
        "other bytes": lambda: shard.write_bytes(data[:-1] + b"!"),
        "missing": shard.unlink,
        "no record": record.unlink,
    }
    damages[damage]()
    assert write(out, 60, whole=False) == before
    assert write(out, 100, whole=True) > before
    assert contents(out) == expected


def test_half_a_record_costs_nothing_where_the_next_one_tells_of_its_shard(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    write(out, 60, whole=False)
    safe = write(out, 60, whole=False)
    records = sorted((out / ".writing").iterdir())
    before = sum(json.loads(record.read_bytes())["shards"][0]["samples"] for record in records[:2])
    for damaged in (records[0], records[2]):
        damaged.write_bytes(damaged.read_bytes()[:40])
    assert write(out, 60, whole=False) == safe
    for damaged in records[2:4]:  # nothing that can be read tells of shard 2
        damaged.write_bytes(damaged.read_bytes()[:40])
    assert write(out, 100, whole=True) == before
    assert contents(out) == expected


def test_a_missing_copy_is_fetched_again(tmp_path: Path, expected: dict[str, bytes]) -> None:
    out = (str(tmp_path / "here"), str(tmp_path / "there"))
    write(out, 60, whole=False, keep_local=True)
    (tmp_path / "here" / "shard.00001.mds").unlink()
    write(out, 100, whole=True, keep_local=True)
    assert contents(tmp_path / "here") == contents(tmp_path / "there") == expected
    (tmp_path / "here" / "index.json").unlink()
    (tmp_path / "here" / "shard.00002.mds").unlink()
    write(out, 100, whole=True, keep_local=True)
    assert contents(tmp_path / "here") == expected


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"compression": "zstd"}, "'zstd'"),
        ({"hashes": []}, "hashes is"),
        ({"size_limit": "1kb"}, "1024"),
        ({"columns": {"id": "int"}}, "column_names is"),
        ({"size_limit": 900, "hashes": None}, "here; size_limit is 700"),
    ],
)
def test_other_settings_are_refused_and_listed(changed: dict[str, Any], told: str, whole: bool, tmp_path: Path) -> None:
    write(tmp_path, 60, whole=whole)
    before = contents(tmp_path)
    with assert_error(ConfigError, path="shard.00000.mds") as caught:
        write(tmp_path, 100, whole=True, **changed)
    assert told in str(caught.value)
    assert contents(tmp_path) == before


def test_another_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 60, whole=False)
    with assert_error(ConfigError, path="shard.00000.mds") as caught:
        CSVWriter(out=tmp_path, mode="resume")
    assert "format" in str(caught.value)


def test_columns_that_were_told_from_a_sample_hold_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"out": tmp_path / "out", "mode": "resume", "size_limit": 50}
    writer = JSONWriter(**settings)
    for number in range(10):
        writer.write({"id": number, "text": "x" * number})
    writer.close()
    with JSONWriter(**settings) as writer:
        assert 0 < writer.num_samples < 10
        with pytest.raises(EncodingError, match=r"had columns \['id', 'text'\], but this one has \['id'\]"):
            writer.write({"id": 3})
        for number in range(writer.num_samples, 10):
            writer.write({"id": number, "text": "x" * number})
    found = read_samples(tmp_path / "out", tmp_path)
    assert found == [{"id": number, "text": "x" * number} for number in range(10)]


def test_num_samples_counts_what_is_safe(tmp_path: Path) -> None:
    with MDSWriter(**SETTINGS, out=tmp_path) as writer:
        assert writer.num_samples == 0
        for number, sample in enumerate(samples(100)):
            writer.write(sample)
            assert writer.num_samples <= number
    assert writer.num_samples == 100


@pytest.mark.parametrize("mode", ["resume", "append"])
def test_going_on_and_replacing_at_once_is_refused(mode: str, tmp_path: Path) -> None:
    with assert_error(ConfigError, option="exist_ok"):
        write(tmp_path, 3, whole=True, mode=mode, exist_ok=True)


def test_what_others_put_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "shard.00000.mds").touch()
    (tmp_path / "mine.txt").touch()
    with assert_error(ConfigError, option="out") as caught:
        write(tmp_path, 3, whole=True)
    assert "00000" in str(caught.value)
    (tmp_path / "shard.00000.mds").unlink()
    write(tmp_path, 3, whole=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "mine.txt", "shard.00000.mds"]


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_a_dataset_that_is_not_finished_is_replaced_only_if_told(place: str, s3: S3Store, tmp_path: Path) -> None:
    out: Any = {"directory": tmp_path / "out", "bucket": f"{s3.make_bucket()}/data"}[place]
    settings: dict[str, Any] = {"storage_options": s3.options}
    write(out, 60, whole=False, **settings)
    with assert_error(ConfigError, option="out") as caught:
        write(out, 5, whole=True, mode="create", **settings)
    assert "'resume'" in str(caught.value)
    write(out, 5, whole=True, mode="create", exist_ok=True, **settings)
    assert write(out, 5, whole=True, **settings) == 5
    if place == "directory":
        assert sorted(path.name for path in out.iterdir()) == ["index.json", "shard.00000.mds"]


def test_a_directory_of_records_that_holds_something_else_is_not_removed(tmp_path: Path) -> None:
    write(tmp_path, 60, whole=False)
    (tmp_path / ".writing" / "mine.txt").touch()
    with assert_error(ConfigError, option="out") as caught:
        write(tmp_path, 5, whole=True, mode="create", exist_ok=True)
    assert "writing" in str(caught.value)
    write(tmp_path, 100, whole=True)
    assert [path.name for path in (tmp_path / ".writing").iterdir()] == ["mine.txt"]


def grown(out: Path, *counts: int, **settings: Any) -> dict[str, bytes]:
    """The files of a dataset that was written with so many samples, and then appended to until it had the next many."""
    for number, count in enumerate(counts):
        write(out, count, whole=True, mode="append" if number else "create", **settings)
    return contents(out)


def shards_of(out: Path) -> list[tuple[str, int]]:
    """Name and number of samples of each shard that an index names."""
    index = parse_index((out / "index.json").read_bytes(), str(out))
    return [(shard.raw_data.basename, shard.samples) for shard in index.shards]


@settings(max_examples=examples(25))
@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=4),
    st.sampled_from([None, 1, 400, 2000]),
    st.sampled_from([None, "zstd"]),
)
def test_each_append_is_a_dataset_of_its_own_behind_the_one_before(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], size_limit: int | None, compression: str | None
) -> None:
    root = tmp_path_factory.mktemp("many")
    changes: dict[str, Any] = {"size_limit": size_limit, "compression": compression}
    written, sizes = 0, list[int]()
    kept: dict[str, tuple[int, int, bytes]] = {}
    for number, added in enumerate(counts):
        mode = "append" if number else "create"
        assert write(root / "out", written + added, whole=True, mode=mode, **changes) == written
        with MDSWriter(**{**SETTINGS, **changes}, out=root / f"{number}") as alone:
            for sample in islice(samples(written + added), written, None):
                alone.write(sample)
        own = shards_of(root / f"{number}")
        if sizes and own and own[0][1] == 0:
            del own[
                0
            ]  # only a dataset's first shard may be empty, where the very first sample is larger than the limit
        sizes += [size for _, size in own]
        written += added
        now = shard_marks(root / "out")
        assert kept.items() <= now.items()
        kept = now
    assert shards_of(root / "out") == [(f"shard.{number:05}.mds", size) for number, size in enumerate(sizes)]
    assert read_samples(root / "out", root / "scratch") == list(samples(written))
    assert not (root / "out" / ".writing").exists()
    shutil.rmtree(root)


@pytest.mark.parametrize("keep_local", [False, True])
def test_a_dataset_in_a_bucket_is_appended_to(keep_local: bool, s3: S3Store, tmp_path: Path) -> None:
    url = f"{s3.make_bucket()}/data"
    write(url, 50, whole=True, storage_options=s3.options)
    out: Any = (str(tmp_path / "here"), url) if keep_local else url
    write(out, 90, whole=True, mode="append", storage_options=s3.options, keep_local=keep_local)
    assert write((str(tmp_path / "copy"), url), 90, whole=True, storage_options=s3.options, keep_local=True) == 90
    expected = grown(tmp_path / "expected", 50, 90)
    assert contents(tmp_path / "copy") == expected
    assert not keep_local or contents(tmp_path / "here") == expected


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("hashes", [["sha1"], []])
def test_no_shard_that_is_published_is_touched(compression: str | None, hashes: list[str], tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    how: dict[str, Any] = {"compression": compression, "hashes": hashes, "keep_local": True}
    out = (str(here), str(there))
    write(out, 50, whole=True, mode="create", **how)
    old = {root: shard_marks(root) for root in (here, there)}
    index = (there / "index.json").read_bytes()
    writer = MDSWriter(**{**SETTINGS, **how}, out=out, mode="append")
    for sample in islice(samples(100), 50, None):
        writer.write(sample)
        assert (there / "index.json").read_bytes() == index
        assert all(marks.items() <= shard_marks(root).items() for root, marks in old.items())
    writer.close()
    assert read_samples(there, tmp_path / "before") == list(samples(50))
    assert 50 < write(out, 100, whole=True, mode="append", **how) < 100
    assert all(marks.items() <= shard_marks(root).items() for root, marks in old.items())
    assert read_samples(there, tmp_path / "after") == list(samples(100))
    (there / "index.json").write_bytes(index)
    assert read_samples(there, tmp_path / "old index") == list(samples(50))


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_who_reads_with_the_old_index_goes_on(place: str, s3: S3Store, tmp_path: Path) -> None:
    out = {"directory": str(tmp_path / "out"), "bucket": f"{s3.make_bucket()}/data"}[place]
    write(out, 50, whole=True, mode="create", storage_options=s3.options)

    def reader(cache: str) -> StreamingDataset:
        local = None if place == "directory" else str(tmp_path / cache)
        return StreamingDataset(remote=out, local=local, storage={"options": s3.options})

    old = reader("old")
    assert old.size == 50
    assert old[0] == next(samples(1))
    write(out, 90, whole=True, mode="append", storage_options=s3.options)
    assert [old[number] for number in range(old.size)] == list(samples(50))
    new = reader("new")
    assert [new[number] for number in range(new.size)] == list(samples(90))


def test_appending_nothing_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, 50, whole=True)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert write(tmp_path, 50, whole=True, mode="append") == 50
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_small_appends_make_small_shards(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for mode, count in (("create", 15), ("append", 16), ("append", 40)):  # 11 to a shard
        with MDSWriter(columns={"id": "int"}, size_limit=300, out=out, mode=mode) as writer:  # type: ignore[arg-type]
            for number in range(writer.num_samples, count):
                writer.write({"id": number})
    assert [size for _, size in shards_of(out)] == [11, 4, 1, 11, 11, 2]
    assert [sample["id"] for sample in read_samples(out, tmp_path)] == list(range(40))


def test_a_first_sample_that_is_larger_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    for mode in ("create", "append"):
        with MDSWriter(columns={"data": "bytes"}, size_limit=300, out=tmp_path, mode=mode) as writer:
            for size in (1000, 1, 1):
                writer.write({"data": bytes(size)})
    assert [size for _, size in shards_of(tmp_path)] == [0, 1, 2, 1, 2]


def test_there_must_be_a_dataset(tmp_path: Path) -> None:
    with assert_error(ConfigError, option="mode") as caught:
        write(tmp_path / "out", 5, whole=True, mode="append")
    assert "there is no finished dataset to append to" in str(caught.value)
    write(tmp_path / "out", 50, whole=False)
    with assert_error(ConfigError, option="mode") as caught:
        write(tmp_path / "out", 50, whole=True, mode="append")
    assert "there is no finished dataset to append to" in str(caught.value)


def test_an_append_that_was_not_finished_is_not_resumed_as_something_else(tmp_path: Path) -> None:
    write(tmp_path / "out", 50, whole=True)
    write(tmp_path / "out", 100, whole=False, mode="append")
    with assert_error(ConfigError, option="mode", hint="mode='append'"):
        write(tmp_path / "out", 100, whole=True)
    assert 50 < write(tmp_path / "out", 100, whole=True, mode="append") < 100
    assert contents(tmp_path / "out") == grown(tmp_path / "expected", 50, 100)


@pytest.mark.parametrize("changed", [{"size_limit": 900}, {"compression": "zstd"}, {"columns": {"id": "int"}}])
def test_other_settings_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, 50, whole=True)
    before = contents(tmp_path)
    with assert_error(ConfigError, path="shard.00000.mds") as caught:
        write(tmp_path, 90, whole=True, mode="append", **changed)
    assert "settings" in str(caught.value)
    assert contents(tmp_path) == before


def test_columns_need_not_be_said_again(tmp_path: Path) -> None:
    write(tmp_path / "out", 50, whole=True)
    write(tmp_path / "out", 90, whole=True, mode="append", columns=None)
    assert contents(tmp_path / "out") == grown(tmp_path / "expected", 50, 90)


def test_a_dataset_of_many_writers_is_not_appended_to(tmp_path: Path) -> None:
    write(tmp_path, 50, whole=True)
    index = tmp_path / "index.json"
    index.write_bytes(index.read_bytes().replace(b"shard.00001", b"part/shard.00001"))
    with assert_error(ConfigError, option="mode", path="shard.00001.mds") as caught:
        write(tmp_path, 90, whole=True, mode="append")
    assert "writer" in str(caught.value)


@pytest.mark.parametrize(("damage", "told"), [("short", "has another size"), ("missing", "is missing")])
def test_a_dataset_whose_shards_are_not_what_the_index_says_is_not_appended_to(
    damage: str, told: str, tmp_path: Path
) -> None:
    write(tmp_path, 50, whole=True)
    shard = tmp_path / "shard.00001.mds"
    if damage == "short":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        shard.unlink()
    before = contents(tmp_path)
    with assert_error(StorageError, path="shard.00001.mds") as caught:
        write(tmp_path, 90, whole=True, mode="append")
    assert told in str(caught.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_record_of_an_append_loses_no_sample(damaged: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, 50, whole=True)
    write(out, 100, whole=False, mode="append")
    safe = write(out, 100, whole=False, mode="append")
    record = sorted((out / ".writing").iterdir())[damaged]
    record.write_bytes(record.read_bytes()[:40])
    # The next record tells of the shard, but not of the one before that, which must be the last published one.
    assert write(out, 100, whole=True, mode="append") == (safe if damaged else 50)
    assert contents(out) == grown(tmp_path / "expected", 50, 100)


def test_records_of_an_append_to_another_dataset_are_not_taken(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, 50, whole=True)
    write(out, 100, whole=False, mode="append")
    other = tmp_path / "other"
    with MDSWriter(**SETTINGS, out=other) as writer:
        for sample in samples(50):
            writer.write({**sample, "id": -sample["id"]})
    assert len(shards_of(other)) == len(shards_of(out))
    for name, data in contents(other).items():
        (out / name).write_bytes(data)
    assert write(out, 100, whole=True, mode="append") == 50
    found = read_samples(out, tmp_path / "scratch")
    assert [sample["id"] for sample in found] == [*(-number for number in range(50)), *range(50, 100)]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """What an earlier version would have made of 50 samples and 50 appended ones: one writer's dataset."""
    write(tmp_path / "filled", 100, whole=True, mode="create")
    return tmp_path / "filled"


@pytest.mark.parametrize("left", ["all", "no replacement", "no first record", "no second record", "only one"])
def test_what_an_earlier_version_left_is_written_again(left: str, filled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, 50, whole=True)
    (replacement,) = leave_as_earlier(out, filled)
    records = sorted((out / ".writing").glob("*.json"))
    gone = {
        "all": [],
        "no replacement": [out / ".writing" / replacement],
        "no first record": records[:1],
        "no second record": records[1:2],
        "only one": [*records[:1], *records[2:]],
    }
    for path in gone[left]:  # as a writer leaves it that is killed while it removes them
        path.unlink()
    with assert_error(ConfigError, option="mode") as caught:
        write(out, 100, whole=True)
    assert "an append to this dataset was not finished" in str(caught.value)
    assert write(out, 100, whole=True, mode="append") == 50
    assert contents(out) == grown(tmp_path / "expected", 50, 100)


@pytest.mark.parametrize("mode", ["resume", "append"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_append_that_an_earlier_version_decided_is_finished_by_hand(
    mode: str, is_replaced: bool, filled: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write(out, 50, whole=True)
    (replacement,) = leave_as_earlier(out, filled)
    shutil.copy(filled / "index.json", out / ".writing")
    shutil.copy(filled / shards_of(filled)[-1][0], out)
    if is_replaced:
        shutil.copy(out / ".writing" / replacement, out)
    before = contents(out)
    with assert_error(ConfigError, path="/out") as caught:
        write(out, 120, whole=True, mode=mode)
    assert "published" in str(caught.value)
    assert contents(out) == before
    for name in (replacement, "index.json"):
        (out / ".writing" / name).replace(out / name)
    assert write(out, 120, whole=True, mode="append") == 100
    write(filled, 120, whole=True, mode="append")
    assert contents(out) == contents(filled)


def test_an_append_that_an_earlier_version_published_needs_nothing(filled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, 50, whole=True)
    leave_as_earlier(out, filled)
    for name, data in contents(filled).items():
        (out / name).write_bytes(data)
    shutil.copy(filled / "index.json", out / ".writing")
    assert write(out, 100, whole=True, mode="append") == 100
    assert contents(out) == contents(filled)
