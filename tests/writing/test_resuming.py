"""``mode="resume"`` without a kill: what counts as safe, and what is refused.

``mode="append"`` without a kill: equal to one writer that wrote it all, and readers of the old index are served.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import count as count_from
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, EncodingError, IntegrityError, ShardCorruptError
from lightning_streaming.writing.writers import CSVWriter, JSONWriter, MDSWriter
from tests.formats.golden_datasets import read_samples
from tests.servers import S3Store
from tests.writing.killed import Conversion, contents, runs_to_its_end, samples

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
        ({"compression": "zstd"}, "compression is None there, but 'zstd' here"),
        ({"hashes": []}, r"hashes is \['sha1'\] there, but \[\] here"),
        ({"size_limit": "1kb"}, "size_limit is 700 there, but 1024 here"),
        ({"columns": {"id": "int"}}, r"column_names is \['id', 'text'\] there, but \['id'\] here"),
        ({"size_limit": 900, "hashes": None}, r"hashes is .* here; size_limit is 700 there, but 900 here"),
    ],
)
def test_other_settings_are_refused_and_listed(changed: dict[str, Any], told: str, whole: bool, tmp_path: Path) -> None:
    write(tmp_path, 60, whole=whole)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=told):
        write(tmp_path, 100, whole=True, **changed)
    assert contents(tmp_path) == before


def test_another_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 60, whole=False)
    with pytest.raises(ConfigError, match=r"shard\.00000\.mds is of format mds, but this writer makes csv"):
        CSVWriter(out=tmp_path, mode="resume")


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
    with pytest.raises(ConfigError, match="choose one of both"):
        write(tmp_path, 3, whole=True, mode=mode, exist_ok=True)


def test_what_others_put_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "shard.00000.mds").touch()
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigError, match=r"holds shard\.00000\.mds, which no index names and no writer left"):
        write(tmp_path, 3, whole=True)
    (tmp_path / "shard.00000.mds").unlink()
    write(tmp_path, 3, whole=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "mine.txt", "shard.00000.mds"]


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_a_dataset_that_is_not_finished_is_replaced_only_if_told(place: str, s3: S3Store, tmp_path: Path) -> None:
    out: Any = {"directory": tmp_path / "out", "bucket": f"{s3.make_bucket()}/data"}[place]
    settings: dict[str, Any] = {"storage_options": s3.options}
    write(out, 60, whole=False, **settings)
    with pytest.raises(ConfigError, match=r"not finished.*mode='resume'.*exist_ok=True"):
        write(out, 5, whole=True, mode="create", **settings)
    write(out, 5, whole=True, mode="create", exist_ok=True, **settings)
    assert write(out, 5, whole=True, **settings) == 5
    if place == "directory":
        assert sorted(path.name for path in out.iterdir()) == ["index.json", "shard.00000.mds"]


def test_a_directory_of_records_that_holds_something_else_is_not_removed(tmp_path: Path) -> None:
    write(tmp_path, 60, whole=False)
    (tmp_path / ".writing" / "mine.txt").touch()
    with pytest.raises(ConfigError, match=r"holds \.writing, which no index names"):
        write(tmp_path, 5, whole=True, mode="create", exist_ok=True)
    write(tmp_path, 100, whole=True)
    assert [path.name for path in (tmp_path / ".writing").iterdir()] == ["mine.txt"]


def whole(count: int, out: Path, **settings: Any) -> dict[str, bytes]:
    """The files of a dataset that was written in one go."""
    job = Conversion(out="", mode="create", samples=count, settings={**SETTINGS, **settings})
    return contents(job.uninterrupted(out))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=4),
    st.sampled_from([None, 1, 400, 2000]),
    st.sampled_from([None, "zstd"]),
)
def test_a_dataset_of_many_appends_is_that_of_one_writer(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], size_limit: int | None, compression: str | None
) -> None:
    root = tmp_path_factory.mktemp("many")
    changes: dict[str, Any] = {"size_limit": size_limit, "compression": compression}
    written = 0
    for number, count in enumerate(counts):
        mode = "append" if number else "create"
        assert write(root / "out", written + count, whole=True, mode=mode, **changes) == written
        written += count
    assert contents(root / "out") == whole(written, root / "expected", **changes)
    shutil.rmtree(root)


@pytest.mark.parametrize("keep_local", [False, True])
def test_a_dataset_in_a_bucket_is_appended_to(keep_local: bool, s3: S3Store, tmp_path: Path) -> None:
    url = f"{s3.make_bucket()}/data"
    write(url, 50, whole=True, storage_options=s3.options)
    out: Any = (str(tmp_path / "here"), url) if keep_local else url
    write(out, 90, whole=True, mode="append", storage_options=s3.options, keep_local=keep_local)
    assert write((str(tmp_path / "copy"), url), 90, whole=True, storage_options=s3.options, keep_local=True) == 90
    expected = whole(90, tmp_path / "expected")
    assert contents(tmp_path / "copy") == expected
    assert not keep_local or contents(tmp_path / "here") == expected


def test_readers_of_the_old_index_are_served_until_the_new_one_is_published(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, 50, whole=True)
    old = contents(out)
    writer = MDSWriter(**SETTINGS, out=out, mode="append")
    for sample in islice(samples(100), 50, None):
        writer.write(sample)
        found = contents(out)
        assert {name: found[name] for name in old} == old
    writer.close()
    assert read_samples(out, tmp_path / "scratch") == list(samples(50))


def test_appending_nothing_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, 50, whole=True)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert write(tmp_path, 50, whole=True, mode="append") == 50
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_last_shard_that_is_full_is_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    columns = {"columns": {"id": "int"}, "size_limit": 300, "hashes": ["sha1"]}
    for mode, count in (("create", 11), ("append", 20)):  # 11 to a shard
        with MDSWriter(**columns, out=out, mode=mode) as writer:  # type: ignore[arg-type]
            stored = [path.stat().st_mtime_ns for path in out.glob("shard.00000.mds")]
            for number in range(writer.num_samples, count):
                writer.write({"id": number})
    assert [path.stat().st_mtime_ns for path in out.glob("shard.00000.mds")] == stored
    assert [sample["id"] for sample in read_samples(out, tmp_path)] == list(range(20))


def test_there_must_be_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no finished dataset to append to"):
        write(tmp_path / "out", 5, whole=True, mode="append")
    write(tmp_path / "out", 50, whole=False)
    with pytest.raises(ConfigError, match="there is no finished dataset to append to"):
        write(tmp_path / "out", 50, whole=True, mode="append")


def test_an_append_that_was_not_finished_is_not_resumed_as_something_else(tmp_path: Path) -> None:
    write(tmp_path / "out", 50, whole=True)
    write(tmp_path / "out", 100, whole=False, mode="append")
    with pytest.raises(ConfigError, match="an append to this dataset was not finished; mode='append' goes on"):
        write(tmp_path / "out", 100, whole=True)
    assert 50 < write(tmp_path / "out", 100, whole=True, mode="append") < 100
    assert contents(tmp_path / "out") == whole(100, tmp_path / "expected")


@pytest.mark.parametrize("changed", [{"size_limit": 900}, {"compression": "zstd"}, {"columns": {"id": "int"}}])
def test_other_settings_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, 50, whole=True)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="was written with other settings"):
        write(tmp_path, 90, whole=True, mode="append", **changed)
    assert contents(tmp_path) == before


def test_columns_need_not_be_said_again(tmp_path: Path) -> None:
    write(tmp_path / "out", 50, whole=True)
    write(tmp_path / "out", 90, whole=True, mode="append", columns=None)
    assert contents(tmp_path / "out") == whole(90, tmp_path / "expected")


def test_a_dataset_of_many_writers_is_not_appended_to(tmp_path: Path) -> None:
    write(tmp_path, 50, whole=True)
    index = tmp_path / "index.json"
    index.write_bytes(index.read_bytes().replace(b"shard.00001", b"part/shard.00001"))
    with pytest.raises(ConfigError, match=r"only a dataset of one writer .* shard 1 is part/shard\.00001\.mds"):
        write(tmp_path, 90, whole=True, mode="append")


@pytest.mark.parametrize("damage", [b"", b"!"])
def test_a_damaged_last_shard_is_not_appended_to(damage: bytes, tmp_path: Path) -> None:
    write(tmp_path, 50, whole=True)
    last = max(tmp_path.glob("shard.*"))
    last.write_bytes(last.read_bytes()[:-1] + damage)
    with pytest.raises(ShardCorruptError, match="is not what the index promises"):
        write(tmp_path, 90, whole=True, mode="append")


def test_a_decision_is_not_carried_out_with_a_damaged_shard(tmp_path: Path) -> None:
    out = stopped_when_decided(tmp_path)
    before = {name: data for name, data in contents(out).items() if not name.startswith(".writing")}
    (aside,) = (out / ".writing").glob("shard.*")
    sound = aside.read_bytes()
    aside.write_bytes(sound[:-1] + b"!")
    with pytest.raises(IntegrityError, match="the dataset is as it was"):
        write(out, 90, whole=True, mode="append")
    assert {name: data for name, data in contents(out).items() if not name.startswith(".writing")} == before
    aside.write_bytes(sound)
    assert write(out, 90, whole=True, mode="append") == 90
    assert contents(out) == whole(90, tmp_path / "expected")


def stopped_when_decided(root: Path) -> Path:
    """A dataset of 50 samples, and an append of 40 that was killed just after it had been decided."""
    for operations in count_from(10):
        out = root / f"{operations}"
        write(out, 50, whole=True)
        job = Conversion(out=str(out), mode="append", samples=90, settings=SETTINGS)
        assert not runs_to_its_end(job, operations, out)
        if (out / ".writing" / "index.json").exists():
            return out
    raise AssertionError
