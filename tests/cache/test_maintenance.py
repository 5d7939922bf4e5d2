"""What is listed and removed of a cache directory."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.config import MANIFEST_BASENAME, STAGING_BASENAME, default_cache_directory
from lightning_streaming.cache.eviction import finished_time
from lightning_streaming.cache.file_states import claim, staging_path
from lightning_streaming.cache.index_files import form_name, locked_index
from lightning_streaming.cache.maintenance import (
    CacheFile,
    FileKind,
    Plan,
    Reason,
    carry_out,
    find_index,
    is_cache,
    list_cache,
    plan_clear,
    plan_garbage,
)
from lightning_streaming.cache.records import locked_usage, make_tag, read_usage, set_finished, set_used
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, ShardInfo, dump_index, parse_index
from lightning_streaming.formats.mds import map_file
from lightning_streaming.formats.shard import narrowed
from tests.cache.helpers import as_nobody, cached, fetch_shard, open_to_all, parts, write_dataset
from tests.helpers import assert_error


def read_again(directory: Path) -> Iterable[ShardInfo]:
    """The shards of the index there."""
    return parse_index((directory / INDEX_BASENAME).read_bytes(), "index").shards


def test_every_file_is_listed_with_what_it_is(filled: Path) -> None:
    view = map_file(filled / "shard.00000.mds", 3000)
    part = claim(filled, "shard.00005.mds")
    assert part is not None
    part.resize(7)
    found = {file.name: (file.kind, file.bytes, file.in_use) for file in list_cache(filled)}
    assert found == {
        f".arriving/{part.path.name}": (FileKind.ARRIVING, 7, True),
        INDEX_BASENAME: (FileKind.INDEX, (filled / INDEX_BASENAME).stat().st_size, False),
        "notes.txt": (FileKind.FOREIGN, 4, False),
        "shard.00000.mds": (FileKind.OURS, 3000, True),
        "shard.00001.mds": (FileKind.OURS, 3000, False),
    }
    last_used = {file.name: file.last_used for file in list_cache(filled)}["shard.00001.mds"]
    assert last_used is not None
    assert last_used <= time.time()
    part.close()
    view.release()
    assert not any(file.in_use for file in list_cache(filled))


def test_a_shard_that_was_finished_with_is_known_to_have_been_used(filled: Path) -> None:
    before = time.time()
    for name in ("shard.00000.mds", "shard.00001.mds"):
        os.utime(filled / name, ns=(0, (filled / name).stat().st_mtime_ns))
    set_used(filled / "shard.00000.mds")
    set_finished(filled / "shard.00001.mds")
    for file in list_cache(filled):
        if file.kind is FileKind.OURS:
            assert file.last_used is not None
            assert before - 1 <= file.last_used <= time.time() + 1


def test_what_an_index_is_fetched_into_is_in_use_as_long_as_its_part_is_locked(filled: Path) -> None:
    with locked_index(filled, 1) as lock:
        lock.scratch.write_bytes(b"half")
        assert {file.name: file.in_use for file in list_cache(filled)}[lock.scratch.name]
        (filled / "kept").write_bytes(b"half")
    (filled / "kept").rename(lock.scratch)
    assert not {file.name: file.in_use for file in list_cache(filled)}[lock.scratch.name]


@pytest.mark.parametrize("shards", [3, 6000])
def test_the_index_is_found_whether_it_has_a_parsed_form_or_not(filled: Path, shards: int) -> None:
    index = DatasetIndex(tuple(replace(one, samples=1) for one in list(read_again(filled)) * (shards // 2)))
    text = dump_index(index.shards)
    (filled / INDEX_BASENAME).write_bytes(text)
    found = find_index(filled)
    assert found is not None
    assert found.digest == hashlib.sha256(text).hexdigest()
    assert len(found.index.shards) == len(index.shards)


@pytest.mark.parametrize("text", [None, b"{"])
def test_an_index_that_is_missing_or_damaged_is_none(filled: Path, text: bytes | None) -> None:
    (filled / INDEX_BASENAME).unlink()
    if text is not None:
        (filled / INDEX_BASENAME).write_bytes(text)
    assert find_index(filled) is None


def test_decompressed_shards_of_a_dataset_in_place_are_listed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", shards=2, compression="zstd")
    cache = ShardCache(CacheConfig(name="code", local=tmp_path / "data"))
    before = cached(tmp_path / "data")
    for shard in cache.read_index().shards:
        fetch_shard(cache, shard)
    root = cache.directory.path
    assert [(file.name, file.kind) for file in list_cache(root)] == [
        ("shard.00000.mds", FileKind.OURS),
        ("shard.00001.mds", FileKind.OURS),
    ]
    assert cached(tmp_path / "data") == before


@pytest.mark.parametrize("in_default", [False, True])
def test_what_was_not_fetched_is_foreign_also_without_an_index(tmp_path: Path, in_default: bool) -> None:
    """People keep files of their own beside shards, and old ones have times of the years that marks are of."""
    write_dataset(tmp_path / "remote", shards=1)
    url = (tmp_path / "remote").as_uri()
    local = default_cache_directory(url) if in_default else tmp_path / "cache"
    cache = ShardCache(CacheConfig(name="code", remote=url, local=local))
    fetch_shard(cache, cache.read_index().shards[0])
    (local / "notes.txt").write_text("mine")
    os.utime(local / "notes.txt", ns=(0, make_tag()))
    (local / INDEX_BASENAME).unlink()
    assert {file.name: file.kind for file in list_cache(local)} == {
        "notes.txt": FileKind.FOREIGN,
        "shard.00000.mds": FileKind.OURS,
    }


@pytest.mark.parametrize("text", [None, "", "0123456789abcdef", "0123456789abcdef\nnonsense\nnull"])
@pytest.mark.parametrize("has_index", [False, True])
def test_a_directory_that_does_not_say_what_is_ours_is_none(filled: Path, text: str | None, has_index: bool) -> None:
    if not has_index:
        (filled / INDEX_BASENAME).unlink()
    (filled / MANIFEST_BASENAME).unlink()
    if text is not None:
        (filled / MANIFEST_BASENAME).write_text(text)
    assert not is_cache(filled)
    with assert_error(ConfigError, option="directory", path=filled):
        list_cache(filled)


def test_a_directory_is_for_fetched_or_for_decompressed_files(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", shards=1, compression="zstd")
    in_place = ShardCache(CacheConfig(name="code", local=tmp_path / "data"))
    fetch_shard(in_place, in_place.read_index().shards[0])
    root = in_place.directory.path
    fetched = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "data"), local=root))
    with assert_error(ConfigError, option="local", path=root):
        fetched.read_index()
    origin = (root / MANIFEST_BASENAME).read_text().splitlines()
    (root / MANIFEST_BASENAME).write_text(f"{origin[0]}\n{make_tag()}\nnull\n")
    again = ShardCache(CacheConfig(name="code", local=tmp_path / "data"))
    with assert_error(ConfigError, option="local", path=root):
        fetch_shard(again, again.read_index().shards[0])


def test_another_directory_is_refused_and_left(tmp_path: Path) -> None:
    write_dataset(tmp_path, shards=1)
    before = cached(tmp_path)
    assert not is_cache(tmp_path)
    with assert_error(ConfigError, option="directory", path=tmp_path):
        list_cache(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(before)


pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
FORM = ".index-0123456789abcdef"
DAY = 86400


def to_clear(root: Path) -> Plan:
    return plan_clear(root, list_cache(root), find_index(root))


def garbage(root: Path, unused_since: float | None = None) -> Plan:
    return plan_garbage(root, list_cache(root), find_index(root), unused_since)


def told(judged: Any) -> dict[str, Reason]:
    return {file.name: reason for file, reason in judged}


def no_progress(files: int) -> None:
    pass


def age(path: Path, seconds: float) -> None:
    """Let a file have been used so long ago."""
    os.utime(path, ns=(time.time_ns() - int(seconds * 1e9), path.stat().st_mtime_ns))


def publish_index_of(root: Path, remote: Path, shards: int) -> None:
    (root / INDEX_BASENAME).write_bytes(dump_index(write_dataset(remote, shards=shards).shards))


def test_clearing_leaves_what_is_in_use_or_not_ours(filled: Path) -> None:
    view = map_file(filled / "shard.00000.mds", 3000)
    plan = to_clear(filled)
    assert told(plan.goes) == {"shard.00001.mds": Reason.FETCHED}
    assert told(plan.stays) == {"shard.00000.mds": Reason.IN_USE, "notes.txt": Reason.NOT_OURS}
    steps: list[int] = []
    assert carry_out(plan, steps.append) == plan
    assert sum(steps) == 1
    assert list(cached(filled)) == [INDEX_BASENAME, "notes.txt", "shard.00000.mds"]
    view.release()
    carry_out(to_clear(filled), no_progress)
    assert list(cached(filled)) == [INDEX_BASENAME, "notes.txt"]
    assert read_usage(filled) == 0


def test_a_plan_touches_nothing(filled: Path) -> None:
    before = cached(filled)
    to_clear(filled)
    garbage(filled, time.time() + DAY)
    assert cached(filled) == before


def test_what_was_opened_or_changed_since_it_was_planned_stays(filled: Path) -> None:
    plan = to_clear(filled)
    view = map_file(filled / "shard.00000.mds", 3000)
    (filled / "shard.00001.mds").write_bytes(b"by somebody")
    done = carry_out(plan, no_progress)
    assert not done.goes
    assert told(done.stays) == {
        "notes.txt": Reason.NOT_OURS,
        "shard.00000.mds": Reason.IN_USE,
        "shard.00001.mds": Reason.NOT_OURS,
    }
    assert (filled / "shard.00001.mds").read_bytes() == b"by somebody"
    view.release()


def test_what_has_gone_since_it_was_planned_is_in_neither_list(filled: Path) -> None:
    plan = to_clear(filled)
    carry_out(to_clear(filled), no_progress)
    done = carry_out(plan, no_progress)
    assert (done.goes, told(done.stays)) == ([], {"notes.txt": Reason.NOT_OURS})


def test_garbage_is_what_nobody_will_need(filled: Path, tmp_path: Path) -> None:
    part = claim(filled, "shard.00005.mds")
    assert part is not None
    with locked_usage(filled, lambda: 0) as ledger:
        assert ledger.used is not None
        ledger.used += 7
        part.resize(7)
    part.close()
    (filled / FORM).write_bytes(b"old")
    publish_index_of(filled, tmp_path / "remote", 1)
    plan = garbage(filled)
    assert told(plan.goes) == {
        f".arriving/{part.path.name}": Reason.DEAD,
        FORM: Reason.OLD_FORM,
        "shard.00001.mds": Reason.UNNAMED,
    }
    assert {file.name for file, _ in carry_out(plan, no_progress).goes} == set(told(plan.goes))
    assert list(cached(filled)) == [INDEX_BASENAME, "notes.txt", "shard.00000.mds"]
    assert not parts(filled)
    assert not (filled / FORM).exists()
    assert read_usage(filled) == 3000
    assert not garbage(filled).goes


@pytest.mark.parametrize("planned", [to_clear, garbage])
def test_shards_of_an_older_index_stay_while_somebody_uses_the_directory(
    filled: Path, tmp_path: Path, planned: Any
) -> None:
    publish_index_of(filled, tmp_path / "remote", 1)
    view = map_file(filled / "shard.00000.mds", 3000)
    plan = planned(filled)
    assert told(plan.stays)["shard.00001.mds"] is Reason.PERHAPS_NAMED
    carry_out(plan, no_progress)
    assert (filled / "shard.00001.mds").exists()
    view.release()
    assert "shard.00001.mds" in told(planned(filled).goes)


def test_without_an_index_every_shard_may_be_needed(filled: Path) -> None:
    for text in (b"{", None):
        (filled / INDEX_BASENAME).unlink() if text is None else (filled / INDEX_BASENAME).write_bytes(text)
        assert not garbage(filled).goes


def test_shards_that_were_not_used_for_long_go_if_asked(filled: Path) -> None:
    age(filled / "shard.00000.mds", 8 * DAY)
    age(filled / "notes.txt", 8 * DAY)
    assert not garbage(filled).goes
    plan = garbage(filled, time.time() - 7 * DAY)
    assert told(plan.goes) == {"shard.00000.mds": Reason.COLD}
    set_used(filled / "shard.00000.mds")
    done = carry_out(plan, no_progress)
    assert (done.goes, told(done.stays)) == ([], {"shard.00000.mds": Reason.IN_USE})
    age(filled / "shard.00000.mds", 8 * DAY)
    assert carry_out(plan, no_progress).goes == plan.goes


def test_a_shard_that_was_finished_with_just_now_is_not_cold(filled: Path) -> None:
    path = filled / "shard.00000.mds"
    os.utime(path, ns=(finished_time(time.time_ns()), path.stat().st_mtime_ns))
    assert not garbage(filled, time.time() - DAY).goes
    os.utime(path, ns=(finished_time(time.time_ns() - 2 * DAY * 10**9), path.stat().st_mtime_ns))
    assert told(garbage(filled, time.time() - DAY).goes) == {path.name: Reason.COLD}


def test_the_form_of_the_index_that_is_here_is_no_garbage(filled: Path) -> None:
    index = find_index(filled)
    assert index is not None
    (filled / form_name(index.digest)).write_bytes(b"parsed")
    assert not garbage(filled).goes
    assert told(to_clear(filled).goes)[form_name(index.digest)] is Reason.OLD_FORM


def test_a_form_that_a_process_has_mapped_stays(filled: Path) -> None:
    (filled / FORM).write_bytes(b"old")
    plan = garbage(filled)
    view = map_file(filled / FORM, 3)
    assert not garbage(filled).goes
    assert not carry_out(plan, no_progress).goes
    view.release()
    assert told(carry_out(plan, no_progress).goes) == {FORM: Reason.OLD_FORM}


def test_what_is_left_of_fetching_an_index_goes_but_not_under_its_writer(filled: Path) -> None:
    scratch = filled / f".index-{staging_path(filled, INDEX_BASENAME).name}.scratch"
    scratch.write_bytes(b"half")
    plan = garbage(filled)
    assert told(plan.goes) == {scratch.name: Reason.OLD_FORM}
    with locked_index(filled, 1) as lock:
        lock.scratch.write_bytes(b"half")
        assert lock.scratch == scratch
        assert not carry_out(plan, no_progress).goes
        assert scratch.exists()
        (filled / "kept").write_bytes(b"half")
    (filled / "kept").rename(scratch)
    assert carry_out(plan, no_progress).goes
    assert not scratch.exists()


def test_what_another_machine_left_of_an_index_goes_after_a_day(filled: Path) -> None:
    scratch = filled / ".index-0123456789ab-0-0123456789abcdef01234567.part"
    scratch.write_bytes(b"half")
    assert not carry_out(garbage(filled), no_progress).goes
    os.utime(scratch, (0, time.time() - 2 * DAY))
    assert told(carry_out(garbage(filled), no_progress).goes) == {scratch.name: Reason.OLD_FORM}


def test_the_ledger_is_not_kept_from_readers_for_long(tmp_path: Path) -> None:
    write_dataset(tmp_path / "remote", shards=50)
    root = tmp_path / "cache"
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=root))
    for shard in cache.read_index().shards:
        fetch_shard(cache, shard)
    counts: list[int | None] = []

    def look(_: int) -> None:
        with locked_usage(root, lambda: 0) as ledger:  # would not end if it were held
            counts.append(ledger.used)

    assert len(carry_out(to_clear(root), look).goes) == 50
    assert len(counts) > 2
    assert counts[-1] == 0


def test_a_directory_without_locks_is_refused(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = to_clear(filled)

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("lightning_streaming.cache.shared_files.fcntl.flock", refuse)
    with assert_error(ConfigError, path="cache"):
        carry_out(plan, no_progress)
    assert "shard.00000.mds" in cached(filled)


@pytest.mark.nightly
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act for another user")
def test_a_directory_of_another_user_is_cleared_as_far_as_permitted(filled: Path) -> None:
    filled.chmod(0o755)
    open_to_all(filled)
    assert told(as_nobody(lambda: to_clear(filled).goes)) == {
        "shard.00000.mds": Reason.FETCHED,
        "shard.00001.mds": Reason.FETCHED,
    }
    assert "cannot be written to" in as_nobody(lambda: carry_out(to_clear(filled), no_progress))
    filled.chmod(0o1777)  # as /tmp: everybody may write, and remove what is their own
    (filled / ".usage").chmod(0o666)
    os.chown(filled / "shard.00001.mds", 65534, 65534)
    done = as_nobody(lambda: carry_out(to_clear(filled), no_progress))
    assert told(done.goes) == {"shard.00001.mds": Reason.FETCHED}
    assert told(done.stays)["shard.00000.mds"] is Reason.REFUSED
    assert (filled / STAGING_BASENAME).is_dir()
    assert read_usage(filled) == 3000


def test_a_row_group_of_which_some_columns_are_here_is_named_by_the_index(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["a", "b"]}), tmp_path / "data" / "a.parquet")
    root = tmp_path / "cache"
    cache = ShardCache(CacheConfig(name="0", remote=str(tmp_path / "data"), local=root, format="parquet"))
    (shard,) = cache.read_index().shards
    held = [shard, narrowed(shard, ["id"])]
    for one in held:
        cache.fetch_ahead(one)
    assert not garbage(root).goes
    left = replace(held[1], raw_data=replace(held[1].raw_data, basename="b.parquet.rows/000000-0123456789.arrow"))
    path = root / left.raw_data.basename
    path.parent.mkdir()
    (root / held[1].raw_data.basename).rename(path)
    assert told(garbage(root).goes) == {left.raw_data.basename: Reason.UNNAMED}


def test_a_file_is_judged_by_what_is_known_of_it(tmp_path: Path) -> None:
    file = CacheFile(name="a.mds", kind=FileKind.OURS, bytes=1, last_used=None, in_use=False)
    assert not plan_garbage(tmp_path, [file], None, time.time()).goes
