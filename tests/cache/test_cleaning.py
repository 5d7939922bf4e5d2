from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.arrival import claim, part_path
from lightning_streaming.cache.cleaning import Plan, Reason, carry_out, plan_clear, plan_garbage
from lightning_streaming.cache.index_lock import held_index
from lightning_streaming.cache.inspection import CacheFile, FileKind, find_index, list_cache
from lightning_streaming.cache.layout import ARRIVING_BASENAME
from lightning_streaming.cache.ledger import held_ledger, read_ledger
from lightning_streaming.cache.stamps import finished_stamp, stamp_used
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import INDEX_BASENAME, dump_index
from lightning_streaming.formats.mapping import map_file
from tests.cache.datasets import cached, fetch_shard, parts, write_dataset
from tests.cache.users import as_nobody, open_to_all

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
    assert read_ledger(filled) == 0


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
    with held_ledger(filled, lambda: 0) as ledger:
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
    assert read_ledger(filled) == 3000
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
    stamp_used(filled / "shard.00000.mds")
    done = carry_out(plan, no_progress)
    assert (done.goes, told(done.stays)) == ([], {"shard.00000.mds": Reason.IN_USE})
    age(filled / "shard.00000.mds", 8 * DAY)
    assert carry_out(plan, no_progress).goes == plan.goes


def test_a_shard_that_was_finished_with_just_now_is_not_cold(filled: Path) -> None:
    path = filled / "shard.00000.mds"
    os.utime(path, ns=(finished_stamp(time.time_ns()), path.stat().st_mtime_ns))
    assert not garbage(filled, time.time() - DAY).goes
    os.utime(path, ns=(finished_stamp(time.time_ns() - 2 * DAY * 10**9), path.stat().st_mtime_ns))
    assert told(garbage(filled, time.time() - DAY).goes) == {path.name: Reason.COLD}


def test_the_form_of_the_index_that_is_here_is_no_garbage(filled: Path) -> None:
    index = find_index(filled)
    assert index is not None
    (filled / index.form_name).write_bytes(b"parsed")
    assert not garbage(filled).goes
    assert told(to_clear(filled).goes)[index.form_name] is Reason.OLD_FORM


def test_a_form_that_a_process_has_mapped_stays(filled: Path) -> None:
    (filled / FORM).write_bytes(b"old")
    plan = garbage(filled)
    view = map_file(filled / FORM, 3)
    assert not garbage(filled).goes
    assert not carry_out(plan, no_progress).goes
    view.release()
    assert told(carry_out(plan, no_progress).goes) == {FORM: Reason.OLD_FORM}


def test_what_is_left_of_fetching_an_index_goes_but_not_under_its_writer(filled: Path) -> None:
    scratch = filled / f".index-{part_path(filled, INDEX_BASENAME).name}.scratch"
    scratch.write_bytes(b"half")
    plan = garbage(filled)
    assert told(plan.goes) == {scratch.name: Reason.OLD_FORM}
    with held_index(filled, 1) as lock:
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
        with held_ledger(root, lambda: 0) as ledger:  # would not end if it were held
            counts.append(ledger.used)

    assert len(carry_out(to_clear(root), look).goes) == 50
    assert len(counts) > 2
    assert counts[-1] == 0


def test_a_directory_without_locks_is_refused(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = to_clear(filled)

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("lightning_streaming.cache.locks.fcntl.flock", refuse)
    with pytest.raises(ConfigError, match="has no file locks"):
        carry_out(plan, no_progress)
    assert "shard.00000.mds" in cached(filled)


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
    assert (filled / ARRIVING_BASENAME).is_dir()
    assert read_ledger(filled) == 3000


def test_a_file_is_judged_by_what_is_known_of_it(tmp_path: Path) -> None:
    file = CacheFile(name="a.mds", kind=FileKind.OURS, bytes=1, last_used=None, in_use=False)
    assert not plan_garbage(tmp_path, [file], None, time.time()).goes
