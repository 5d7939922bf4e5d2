"""``mode="append"`` without a kill: equal to one writer that wrote it all, and readers of the old index are served."""

from __future__ import annotations

import shutil
from itertools import count as count_from
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, IntegrityError, ShardCorruptError
from lightning_streaming.writing.writer import MDSWriter
from tests.formats.golden_datasets import read_samples
from tests.servers import S3Store
from tests.writing.killed import Conversion, contents, runs_to_its_end, samples
from tests.writing.test_resuming import SETTINGS, write


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
