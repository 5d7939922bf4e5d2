from __future__ import annotations

import multiprocessing
import os
import pty
import re
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lightning_streaming import StreamingDataset
from lightning_streaming.cache.config import CACHE_VARIABLE, default_cache_directory
from lightning_streaming.cache.file_states import claim
from lightning_streaming.cache.records import make_tag
from lightning_streaming.errors import ObjectNotFoundError
from lightning_streaming.files import hold_lock
from tests.servers import HttpStore
from tests.tools.running import contents, run, write_texts

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

_FORK = multiprocessing.get_context("fork")


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """Two caches of three shards each, the second with one of them."""
    write_texts(tmp_path / "data")
    for name, samples in {"books": 25, "web": 1}.items():
        dataset = StreamingDataset(remote=str(tmp_path / "data"), local=str(tmp_path / "caches" / name))
        assert all(dataset[sample]["id"] == sample for sample in range(samples))
        dataset.close()
    return tmp_path / "caches"


def shards(directory: Path) -> list[str]:
    """Names of the whole files there but for the index; none is read, which would count as using it."""
    return sorted(path.name for path in directory.iterdir() if path.name[0] != "." and path.name != "index.json")


def entries(outcome: Any, key: str) -> dict[str, str]:
    """File to reason, of the only cache that was cleaned."""
    (cache,) = outcome.json["caches"]
    return {one["file"]: one["because"] for one in cache[key]}


def test_a_cache_is_described(caches: Path) -> None:
    (caches / "web" / "notes.txt").write_text("mine")
    part = claim(caches / "web", "shard.00005.mds")
    assert part is not None
    part.resize(7)
    (one,) = run("cache", "info", caches / "web", "--json").json["caches"]
    size = (caches / "web" / "shard.00000.mds").stat().st_size
    assert (one["shards"], one["shards_present"]) == (3, 1)
    assert one["ours"] == {"files": 1, "bytes": size}
    assert one["not_ours"] == {"files": 1, "bytes": 4}
    assert one["arriving"] == {"files": 1, "bytes": 7}
    assert one["leftovers"] == one["in_use"] == {"files": 0, "bytes": 0}
    assert one["bytes"] == size + 4 + 7 + (caches / "web" / "index.json").stat().st_size
    assert re.fullmatch(r"[0-9a-f]{16}", one["remote"])
    assert re.fullmatch(r"[0-9a-f]{16}", one["index"])
    assert one["last_used"][:2] == one["checked"][:2] == "20"
    part.close()
    (one,) = run("cache", "info", caches / "web", "--json").json["caches"]
    assert one["arriving"] == {"files": 0, "bytes": 0}
    assert one["leftovers"] == {"files": 1, "bytes": 7}
    shown = run("cache", "info", caches / "web")
    assert shown.code == 0
    assert re.search(r"shards here +1 of 3\n ours +1 file \(\d+ B\)\n not ours +1 file \(4 B\)", shown.out)
    assert re.search(r"left over +1 file \(7 B\)\n last use +just now", shown.out)


def test_several_caches_are_a_line_each(caches: Path) -> None:
    shown = run("cache", "info", caches)
    assert [line.split()[0].rpartition("/")[2] for line in shown.out.splitlines() if " of 3 " in line]
    assert "not ours" not in shown.out  # nothing is, anywhere
    assert shown.out.endswith(" in 2 caches\n")
    (caches / "web" / "notes.txt").write_text("mine")
    assert "not ours" in run("cache", "info", caches).out


def test_a_cache_that_was_never_used_has_no_last_use(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    assert StreamingDataset(remote=str(tmp_path / "data"), local=str(tmp_path / "cache")).size == 25
    shown = run("cache", "info", tmp_path / "cache").out
    assert re.search(r"shards here +0 of 3\n ours +-\n", shown)
    assert re.search(r"last use +-\n", shown)


def test_the_default_caches_are_meant_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "root"))
    shown = [run("cache", *words) for words in (["info"], ["clear"], ["gc"])]
    assert [(one.code, one.out) for one in shown] == [(0, f"nothing is cached in {tmp_path / 'root'}\n")] * 3
    write_texts(tmp_path / "data", compression="zstd")
    dataset = StreamingDataset(local=str(tmp_path / "data"))  # decompressed shards are kept there
    assert dataset[0]["id"] == 0
    dataset.close()
    (one,) = run("cache", "info", "--json").json["caches"]
    assert one["directory"] == str(default_cache_directory(str(tmp_path / "data")))
    assert (one["remote"], one["shards"], one["ours"]["files"]) == (None, None, 1)
    assert "a dataset that is read in place" in run("cache", "info").out
    assert run("cache", "clear", "--yes").code == 0
    assert shards(Path(one["directory"])) == []


def test_clearing_says_what_it_leaves_and_why(caches: Path) -> None:
    (caches / "books" / "notes.txt").write_text("mine")
    tried = run("cache", "clear", caches / "books", "--dry-run")
    assert "would remove 3 files" in tried.out
    assert shards(caches / "books")[1:] == ["shard.00000.mds", "shard.00001.mds", "shard.00002.mds"]
    done = run("cache", "clear", caches / "books", "--yes")
    assert done.out == tried.out.replace("would remove", "removed")
    assert done.out.endswith("  stays: 1 file (4 B) not fetched by us: notes.txt\n")
    assert shards(caches / "books") == ["notes.txt"]
    again = run("cache", "clear", caches / "books", "--yes", "--json")
    assert (entries(again, "removed"), entries(again, "stays")) == ({}, {"notes.txt": "not fetched by us"})
    assert run("cache", "clear", caches / "books", "--yes").out.startswith(f"{caches / 'books'}: nothing to remove\n")
    assert run("cache", "clear", caches, "--yes").out.endswith("\nremoved 1 file (482 B) in all\n")


def test_garbage_goes_without_asking(caches: Path) -> None:
    part = claim(caches / "web", "shard.00005.mds")
    assert part is not None
    part.close()
    os.utime(caches / "web" / "shard.00000.mds", ns=(10**18, (caches / "web" / "shard.00000.mds").stat().st_mtime_ns))
    tried = run("cache", "gc", caches / "web", "--older-than", "7d", "--dry-run", "--json")
    assert entries(tried, "removed") == {
        f".arriving/{part.path.name}": "left by a process that died",
        "shard.00000.mds": "not used for long",
    }
    assert run("cache", "gc", caches / "web", "--older-than", "4000w").out.endswith(" left by a process that died\n")
    assert shards(caches / "web") == ["shard.00000.mds"]
    done = run("cache", "gc", caches / "web", "--older-than", "1.5h")
    assert done.out == f"{caches / 'web'}: removed 1 file (482 B) not used for long\n"
    assert shards(caches / "web") == []


@pytest.mark.parametrize("age", ["7", "d", "7y", "-7d", "7 d"])
def test_an_age_has_a_unit(age: str) -> None:
    refused = run("cache", "gc", "--older-than", age)
    assert refused.code == 2
    assert "must be a number and one of s, m, h, d and w" in refused.err or "expected one argument" in refused.err


@pytest.mark.parametrize("action", ["info", "clear", "gc"])
def test_what_is_no_cache_of_ours_is_refused_and_left(tmp_path: Path, action: str) -> None:
    write_texts(tmp_path / "data")
    for path in (tmp_path / "data").iterdir():
        os.utime(path, ns=(0, make_tag()))
    before = contents(tmp_path)
    refused = run("cache", action, tmp_path)
    assert refused.code == 2
    assert "is not a cache directory: neither it nor a directory in it has an .origin of ours" in refused.err
    assert "it does not exist" in run("cache", action, tmp_path / "missing").err
    assert contents(tmp_path) == before


def test_one_cache_that_cannot_be_served_does_not_keep_others_from_it(caches: Path) -> None:
    (caches / "books" / ".usage").unlink()
    (caches / "books" / ".usage").mkdir()
    done = run("cache", "clear", caches, "--yes", "--json")
    assert done.code == 0
    (failure,) = done.json["failures"]
    assert failure["directory"] == str(caches / "books")
    assert f"left out {caches / 'books'}: " in done.err
    assert shards(caches / "web") == []
    alone = run("cache", "clear", caches / "books", "--yes")
    assert alone.code == 2
    assert "cannot be written to" in alone.err


def test_without_a_terminal_clearing_must_be_confirmed_beforehand(caches: Path) -> None:
    command = [sys.executable, "-m", "lightning_streaming", "cache", "clear", str(caches)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "would remove 4 files (1.6 KB) of 2 caches, and there is no terminal to confirm it; pass --yes" in done.stderr
    )
    assert len(shards(caches / "books")) == 3


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("answer", "left"), [(b"y\n", 0), (b"n\n", 3), (b"\n", 3), (b"\x04", 3)])
def test_on_a_terminal_clearing_asks(caches: Path, answer: bytes, left: int) -> None:
    keyboard, terminal = pty.openpty()
    command = [sys.executable, "-m", "lightning_streaming", "cache", "clear", str(caches / "books")]
    with subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.write(keyboard, answer)
        _, err = process.communicate(timeout=60)
    os.close(keyboard)
    os.close(terminal)
    assert process.returncode == 0
    assert b"Remove 3 files (1.2 KB) of 1 cache? [y/N] " in err
    assert (b"nothing was removed" in err) == (left > 0)
    assert len(shards(caches / "books")) == left


def read_when_told(url: str, local: str, talk: Connection) -> None:
    """A job: read a sample of the first shard, wait until told to go on, and read all."""
    dataset = StreamingDataset(remote=url, local=local, download_timeout=30)
    assert dataset[0]["text"] == "text 000"
    talk.send("open")
    talk.recv()
    for sample in range(25):
        assert dataset[sample]["text"] == f"text {sample:03}"
    talk.send("read")


class Job:
    """A process that runs :func:`read_when_told`."""

    def __init__(self, url: str, cache: Path) -> None:
        self._talk, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=read_when_told, args=(url, str(cache), theirs))
        self._process.start()
        theirs.close()

    def expect(self, word: str) -> None:
        """Wait until it says something."""
        assert self._talk.recv() == word

    def go_on(self) -> None:
        """Let it read the other shards."""
        self._talk.send("go on")

    def kill(self) -> None:
        """End it, at whatever it is."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._talk.close()


def until_arriving(cache: Path) -> Any:
    """What info says once a file is on its way."""
    while True:
        (one,) = run("cache", "info", cache, "--json").json["caches"]
        if one["arriving"]["files"]:
            return one


@pytest.mark.timeout(120)
def test_a_shard_that_a_job_has_open_stays_and_others_are_fetched_again(http_store: HttpStore, tmp_path: Path) -> None:
    write_texts(http_store.root)
    with Job(http_store.url, tmp_path / "a") as job, Job(http_store.url, tmp_path / "a") as other:
        job.expect("open")
        other.go_on()
        other.expect("open")
        other.expect("read")
        other.kill()
        assert len(shards(tmp_path / "a")) == 3
        (one,) = run("cache", "info", tmp_path / "a", "--json").json["caches"]
        assert one["in_use"]["files"] == 1
        done = run("cache", "clear", tmp_path / "a", "--yes", "--json")
        assert entries(done, "stays") == {"shard.00000.mds": "in use"}
        assert shards(tmp_path / "a") == ["shard.00000.mds"]
        run("cache", "gc", tmp_path / "a", "--older-than", "0s")
        assert shards(tmp_path / "a") == ["shard.00000.mds"]
        job.go_on()
        job.expect("read")
    assert len(shards(tmp_path / "a")) == 3


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_shard_that_a_job_is_downloading_arrives(http_store: HttpStore, tmp_path: Path) -> None:
    write_texts(http_store.root)
    http_store.fail("shard.00001.mds", "slow", rate=150)
    with Job(http_store.url, tmp_path / "a") as job:
        job.expect("open")
        job.go_on()
        assert until_arriving(tmp_path / "a")["arriving"]["files"] == 1
        for words in (["clear", "--yes"], ["gc", "--older-than", "0s"]):
            run("cache", words[0], tmp_path / "a", *words[1:])
        job.expect("read")
    assert [entry.status for entry in http_store.log() if entry.name == "shard.00001.mds"] == [200]


@pytest.mark.timeout(120)
def test_what_a_killed_download_leaves_is_collected(http_store: HttpStore, tmp_path: Path) -> None:
    write_texts(http_store.root)
    http_store.fail("shard.00001.mds", "hang")
    with Job(http_store.url, tmp_path / "a") as job:
        job.expect("open")
        job.go_on()
        until_arriving(tmp_path / "a")
        job.kill()
    assert list(entries(run("cache", "gc", tmp_path / "a", "--json"), "removed").values()) == [
        "left by a process that died"
    ]
    http_store.heal()
    with Job(http_store.url, tmp_path / "a") as job:
        job.go_on()
        job.expect("open")
        job.expect("read")


@pytest.mark.timeout(120)
def test_jobs_read_right_while_their_cache_is_cleared_again_and_again(http_store: HttpStore, tmp_path: Path) -> None:
    write_texts(http_store.root)
    with Job(http_store.url, tmp_path / "a") as first, Job(http_store.url, tmp_path / "a") as second:
        for job in (first, second):
            job.expect("open")
        first.go_on()
        second.go_on()
        for number in range(40):
            words = ["clear", "--yes"] if number % 2 else ["gc", "--older-than", "0s"]
            assert run("cache", words[0], tmp_path / "a", *words[1:]).code == 0
        for job in (first, second):
            job.expect("read")
    assert run("cache", "clear", tmp_path / "a", "--yes").code == 0
    assert shards(tmp_path / "a") == []


@pytest.mark.parametrize("left", ["notes", "part", "file", "index", "at-work"])
def test_a_directory_that_a_misspelt_remote_left_is_collected(left: str, http_store: HttpStore, tmp_path: Path) -> None:
    """Unless something else is in it, or somebody is about to fetch the index."""
    local = tmp_path / "caches" / "typo"
    with pytest.raises(ObjectNotFoundError):
        len(StreamingDataset(remote=f"{http_store.url}/typo", local=str(local)))
    assert (local / ".origin").exists()
    part = None
    if left == "part":
        (local / ".arriving" / "0-0-0-x.part").write_text("")
        os.utime(local / ".arriving" / "0-0-0-x.part", (0, 0))
    elif left in ("file", "index"):
        (local / {"file": "notes.txt", "index": "index.json"}[left]).write_text("mine")
    elif left == "at-work":
        part = claim(local, "index.json")
    goes = left in ("notes", "part")
    would = run("cache", "gc", tmp_path / "caches", "--dry-run", "--json").json["caches"][0]
    assert (would["removed_directory"], local.exists()) == (goes, True)
    done = run("cache", "gc", tmp_path / "caches")
    assert done.code == 0
    assert local.exists() is not goes
    assert ("removed" in done.out and "the directory, into which nothing was fetched" in done.out) is goes
    if part is not None:
        part.close()


def test_the_cache_of_a_dataset_in_place_stays_however_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has cleared it may be about to decompress into it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))
    write_texts(tmp_path / "data", compression="gz")
    dataset = StreamingDataset(remote=str(tmp_path / "data"))
    assert dataset[0]["id"] == 0
    assert run("cache", "gc", "--older-than", "0s").code == 0
    assert run("cache", "gc", "--older-than", "0s").code == 0
    assert dataset[24]["id"] == 24


@pytest.fixture
def selected(tmp_path: Path) -> Path:
    """A cache of two selections, whose shards were not looked at, beside files of somebody."""
    write_texts(tmp_path / "data")
    for part in ("0%:40%", "40%:100%"):
        assert run("select", tmp_path / "data", "--local", tmp_path / "cache", "--fraction", part).code == 0
    kept = tmp_path / "cache" / "selections"
    (kept / "notes.npy").write_text("mine")
    (kept / f"{'0' * 32}.txt").write_text("mine")
    return tmp_path / "cache"


def bits(cache: Path) -> list[Path]:
    return [path for path in sorted((cache / "selections").glob("*.npy")) if len(path.stem) == 32]


def of_selections(outcome: Any, key: str) -> dict[str, str]:
    return {name: why for name, why in entries(outcome, key).items() if name.startswith("selections/")}


def test_selections_are_counted_by_themselves(selected: Path) -> None:
    (one,) = run("cache", "info", selected, "--json").json["caches"]
    held = [path for path in (selected / "selections").iterdir() if path.read_bytes() != b"mine"]
    assert one["selections"] == {"files": 4, "bytes": sum(path.stat().st_size for path in held)}
    assert one["not_ours"] == {"files": 2, "bytes": 8}
    assert one["leftovers"]["files"] == one["in_use"]["files"] == 0
    assert re.search(r"selections +4 files", run("cache", "info", selected).out)


def test_clearing_removes_selections_and_nothing_else_that_is_beside_them(selected: Path) -> None:
    done = run("cache", "clear", selected, "--yes", "--json")
    assert set(of_selections(done, "removed").values()) == {"of a selection, unused"}
    assert set(of_selections(done, "stays").values()) == {"not fetched by us"}
    assert len(list((selected / "selections").iterdir())) == 2
    for path in (selected / "selections").iterdir():
        path.unlink()
    assert run("select", selected.parent / "data", "--local", selected, "--fraction", "0%:40%").code == 0
    assert run("cache", "clear", selected, "--yes").code == 0
    assert not (selected / "selections").exists()


def test_a_selection_that_a_dataset_has_open_stays(selected: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(
        remote=str(tmp_path / "data"), local=str(selected), selection={"fraction": ":40%"}, batch_size=1
    )
    assert 0 < len(dataset) < 25
    for words in (["clear", "--yes"], ["gc", "--older-than", "0s"]):
        run("cache", words[0], selected, *words[1:])
        assert len(bits(selected)) == 1
    numbers = [dataset[number]["id"] for number in range(len(dataset))]
    dataset.close()
    assert len(numbers) == len(set(numbers)) > 0


def test_garbage_is_what_of_selections_was_not_used_for_long(selected: Path, tmp_path: Path) -> None:
    first, second = bits(selected)
    os.utime(first, (10**9, first.stat().st_mtime))  # in 2001
    assert of_selections(run("cache", "gc", selected, "--json"), "removed") == {}
    done = of_selections(run("cache", "gc", selected, "--older-than", "7d", "--json"), "removed")
    key = f"selections/{first.stem}"
    assert done == {f"{key}.npy": "not used for long", f"{key}.lock": "of a selection, unused"}
    assert bits(selected) == [second]


def test_what_is_left_of_making_a_selection_that_is_kept_is_garbage(selected: Path) -> None:
    first, _ = bits(selected)
    parts = first.with_suffix(".parts")
    parts.mkdir()
    (parts / "0-3.npy").write_bytes(b"bits")
    done = of_selections(run("cache", "gc", selected, "--json"), "removed")
    assert done == {f"selections/{parts.name}/0-3.npy": "of a selection, unused"}
    assert not parts.exists()
    assert len(bits(selected)) == 2


def test_what_is_left_of_making_a_selection_is_garbage_once_nobody_makes_it(selected: Path) -> None:
    kept = selected / "selections"
    lock, parts = kept / f"{'a' * 32}.lock", kept / f"{'a' * 32}.parts"
    parts.mkdir()
    for name in ("0-3.npy", "3-6.npy.node7-4711-140032.part"):
        (parts / name).write_bytes(b"bits")
    (parts / "mine.npy").write_bytes(b"mine")
    with hold_lock(lock, 0, "evaluate a selection"):
        (one,) = run("cache", "info", selected, "--json").json["caches"]
        assert one["leftovers"]["files"] == 0
        assert of_selections(run("cache", "gc", selected, "--json"), "removed") == {}
        assert set(of_selections(run("cache", "clear", selected, "--yes", "--json"), "stays").values()) == {
            "in use",
            "not fetched by us",
        }
    lock.write_text("process 7 on another-machine")  # which may go on with it
    assert of_selections(run("cache", "gc", selected, "--json"), "removed") == {}
    for path in (lock, *parts.iterdir()):
        os.utime(path, (0, 0))
    (one,) = run("cache", "info", selected, "--json").json["caches"]
    assert one["leftovers"] == {"files": 2, "bytes": 8}
    assert len(of_selections(run("cache", "gc", selected, "--json"), "removed")) == 3
    assert [path.name for path in parts.iterdir()] == ["mine.npy"]
    assert not lock.exists()


def test_row_groups_of_some_columns_are_those_of_the_index(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    rows = pa.table({"id": range(6), "text": list("abcdef")})
    parquet.write_table(rows, tmp_path / "rows" / "a.parquet", row_group_size=2)
    for columns, samples in ((["id"], 6), (None, 1)):
        remote, local = str(tmp_path / "rows"), str(tmp_path / "cache")
        dataset = StreamingDataset(remote=remote, local=local, format="parquet", columns=columns)
        assert [dataset[sample]["id"] for sample in range(samples)] == list(range(samples))
        dataset.close()
    (one,) = run("cache", "info", tmp_path / "cache", "--json").json["caches"]
    assert (one["shards"], one["shards_present"], one["ours"]["files"]) == (3, 3, 4)
    assert entries(run("cache", "gc", tmp_path / "cache", "--json"), "removed") == {}
    assert len(entries(run("cache", "clear", tmp_path / "cache", "--yes", "--json"), "removed")) == 4
